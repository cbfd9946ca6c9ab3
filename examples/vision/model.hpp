// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// A perceptron with two hidden layers, forward and backward by hand.

#pragma once

#include <heddle/core/philox.hpp>
#include <heddle/trainer/tensor.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "../support/matmul.hpp"

namespace vision {

namespace hd = heddle;

class perceptron {
 public:
  static constexpr std::size_t layers = 3;
  static constexpr std::size_t classes = 10;

  perceptron(std::size_t pixels, std::size_t hidden, std::size_t second, std::uint64_t seed)
      : width_{pixels, hidden, second, classes} {
    std::size_t total = 0;
    for (std::size_t l = 0; l < layers; ++l) total += width_[l] * width_[l + 1] + width_[l + 1];
    parameters_.resize(total);
    gradients_.resize(total);
    float* p = parameters_.data();
    for (std::size_t l = 0; l < layers; ++l) {  // He et al. 2015
      const std::size_t n = width_[l] * width_[l + 1];
      const float scale = std::sqrt(6.0f / static_cast<float>(width_[l]));
      for (std::size_t i = 0; i < n; ++i) {
        *p++ = scale * (2.0f * hd::random_uniform(seed, l, i) - 1.0f);
      }
      p += width_[l + 1];  // biases begin at 0
    }
    std::size_t i = 0;
    for (const hd::tensor& t : tensors()) {
      read_[i] = static_cast<float*>(t.parameter);
      gradient_[i++] = static_cast<float*>(t.gradient);
    }
  }

  /// Weights (inputs x outputs) and biases, layer by layer.
  std::vector<hd::tensor> tensors() {
    std::vector<hd::tensor> out;
    std::size_t at = 0;
    for (std::size_t l = 0; l < layers; ++l) {
      for (const char* kind : {".weight", ".bias"}) {
        const std::size_t n = width_[l + 1] * (*(kind + 1) == 'w' ? width_[l] : 1);
        out.push_back(
            {parameters_.data() + at, gradients_.data() + at, n, hd::dtype::f32, std::to_string(l) + kind, 0});
        at += n;
      }
    }
    return out;
  }

  /// Reads parameters from there, in the order of tensors().
  void use(std::span<float* const> p) { std::copy(p.begin(), p.end(), read_.begin()); }

  /// Mean cross-entropy and hits over n images; with `ready`, gradients too, and ready(i) when tensor i is final.
  struct score {
    double loss = 0.0;
    std::size_t hits = 0;
  };
  score run(const float* images, const std::uint8_t* labels, std::size_t n,
            const std::function<void(std::size_t)>& ready) {
    for (std::size_t l = 0; l <= layers; ++l) value_[l].resize(n * width_[l]);
    std::copy_n(images, n * width_[0], value_[0].data());
    for (std::size_t l = 0; l < layers; ++l) forward(l, n);
    const score s = judge(labels, n);
    if (ready) {
      for (std::size_t l = layers; l-- > 0;) {
        backward(l, n);
        ready(2 * l + 1);
        ready(2 * l);
      }
    }
    return s;
  }

 private:
  void forward(std::size_t l, std::size_t n) {
    const std::size_t in = width_[l], out = width_[l + 1];
    const float *const w = read_[2 * l], *const bias = read_[2 * l + 1];
    float* const y = value_[l + 1].data();
    examples::multiply<float>(n, out, in, {value_[l].data(), in}, w, out, y, out);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < out; ++j) {
        const float x = y[i * out + j] + bias[j];
        y[i * out + j] = l + 1 < layers ? std::max(x, 0.0f) : x;
      }
    }
  }

  // Softmax and cross-entropy; leaves the gradient of the mean loss in place of the outputs.
  score judge(const std::uint8_t* labels, std::size_t n) {
    score s;
    for (std::size_t i = 0; i < n; ++i) {
      float* const y = value_[layers].data() + i * classes;
      const float* const top = std::max_element(y, y + classes);
      s.hits += static_cast<std::size_t>(top - y) == labels[i];
      const float highest = *top;
      double sum = 0.0;
      for (std::size_t c = 0; c < classes; ++c) sum += std::exp(static_cast<double>(y[c] - highest));
      s.loss += std::log(sum) - static_cast<double>(y[labels[i]] - highest);
      for (std::size_t c = 0; c < classes; ++c) {
        const double p = std::exp(static_cast<double>(y[c] - highest)) / sum - (c == labels[i] ? 1.0 : 0.0);
        y[c] = static_cast<float>(p / static_cast<double>(n));
      }
    }
    s.loss /= static_cast<double>(n);
    return s;
  }

  void backward(std::size_t l, std::size_t n) {
    const std::size_t in = width_[l], out = width_[l + 1];
    const float* const w = read_[2 * l];
    float *const dw = gradient_[2 * l], *const db = gradient_[2 * l + 1], *const dy = value_[l + 1].data();
    examples::multiply<float>(in, out, n, examples::view<float>{value_[l].data(), in}.transposed(), dy, out, dw, out);
    for (std::size_t j = 0; j < out; ++j) {
      double sum = 0.0;
      for (std::size_t i = 0; i < n; ++i) sum += static_cast<double>(dy[i * out + j]);
      db[j] = static_cast<float>(sum);
    }
    if (l == 0) return;
    turned_.resize(in * out);
    for (std::size_t i = 0; i < in; ++i) {
      for (std::size_t j = 0; j < out; ++j) turned_[j * in + i] = w[i * out + j];
    }
    back_.resize(n * in);
    examples::multiply<float>(n, in, out, {dy, out}, turned_.data(), in, back_.data(), in);
    float* const x = value_[l].data();
    for (std::size_t i = 0; i < n * in; ++i) x[i] = x[i] > 0.0f ? back_[i] : 0.0f;
  }

  std::array<std::size_t, layers + 1> width_;
  std::vector<float> parameters_, gradients_;
  std::array<float*, 2 * layers> read_{}, gradient_{};
  std::array<std::vector<float>, layers + 1> value_;  // activations, then gradients of the loss by them
  std::vector<float> turned_, back_;
};

}  // namespace vision

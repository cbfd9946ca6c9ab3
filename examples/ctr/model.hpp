// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The models. All that they learn are rows of one table: a row per feature, a weight and its factors; and rows for the
// bias and the network's weights, one after the other. So whoever shares the table shares the model.

#pragma once

#include <heddle/core/philox.hpp>
#include <heddle/table/rules.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "../support/matmul.hpp"
#include "data.hpp"

namespace ctr {

/// How rows begin: weights of features at 0, their factors and the network's weights uniform about 0. Rows of a weight
/// alone all begin at 0, as FTRL has it.
struct beginning {
  float factors = 0.05f;  ///< Range of factors.
  float network = 0.2f;   ///< Range of the network's weights.

  template <std::size_t Dim>
  HEDDLE_HD void fill(float* w, std::uint64_t seed, std::uint32_t table, std::uint64_t key) const noexcept {
    const bool own = key >> 63 != 0;
    for (std::size_t i = 0; i < Dim; ++i) {
      const float u =
          2.0f * hd::random_uniform(seed, hd::random_stream(table, static_cast<std::uint32_t>(i)), key) - 1.0f;
      w[i] = own && Dim > 1 ? network * u : i == 0 ? 0.0f : factors * u;
    }
  }
  std::string name() const { return "ctr::beginning"; }
};

enum class kind { linear, fm, wide_deep };

/// Turns rows and weights into logits, and back into gradients.
/// @tparam Factors Factors of a feature, 0 for the linear model.
template <std::size_t Factors> class model {
 public:
  static constexpr std::size_t dim = 1 + Factors;

  model(kind k, std::size_t fields, std::size_t hidden)
      : kind_(k), fields_(fields), width_{fields * Factors, hidden, hidden / 2, 1} {
    std::size_t floats = 1;
    if (kind_ == kind::wide_deep)
      for (std::size_t l = 0; l < layers; ++l) floats += (width_[l] + 1) * width_[l + 1];
    own_ = (floats + dim - 1) / dim;
  }

  /// Keys of all that a batch needs: its features' one by one, then the model's own.
  void keys(const rows& r, std::vector<std::uint64_t>& to) const {
    to.assign(r.indices.begin(), r.indices.end());
    for (std::uint64_t k = 0; k < own_; ++k) to.push_back(std::uint64_t{1} << 63 | k);
  }

  /// Logits of rows. @param w The weights of keys().
  void forward(const rows& r, std::span<const float> w, std::vector<float>& logits) {
    const float* const own = w.data() + r.indices.size() * dim;
    const std::size_t n = r.size();
    logits.assign(n, own[0]);
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t k = r.begin(i); k < r.end(i); ++k) logits[i] += w[k * dim] * r.values[k];
    if constexpr (Factors != 0) {
      if (kind_ == kind::fm)
        interact(r, w, logits);
      else
        infer(r, w, own + 1, logits);
    }
  }

  /// Gradients. @param by_logit Those of the loss by forward's logits. @param g Receives those of the weights.
  void backward(const rows& r, std::span<const float> w, std::span<const float> by_logit, std::span<float> g) {
    std::fill(g.begin(), g.end(), 0.0f);
    float* const own = g.data() + r.indices.size() * dim;
    for (std::size_t i = 0; i < r.size(); ++i) {
      own[0] += by_logit[i];
      for (std::size_t k = r.begin(i); k < r.end(i); ++k) g[k * dim] = by_logit[i] * r.values[k];
    }
    if constexpr (Factors != 0) {
      if (kind_ == kind::fm)
        separate(r, w, by_logit, g);
      else
        learn(r, w, by_logit, g);
    }
  }

 private:
  static constexpr std::size_t layers = 3;

  // Half of (the square of the sum less the sum of the squares), for each factor.
  void interact(const rows& r, std::span<const float> w, std::vector<float>& logits) {
    sums_.assign(r.size() * Factors, 0.0f);
    for (std::size_t i = 0; i < r.size(); ++i) {
      float* const sum = sums_.data() + i * Factors;
      float squares = 0.0f;
      for (std::size_t k = r.begin(i); k < r.end(i); ++k) {
        const float *const v = w.data() + k * dim + 1, x = r.values[k];
        for (std::size_t j = 0; j < Factors; ++j) {
          sum[j] += v[j] * x;
          squares += v[j] * x * v[j] * x;
        }
      }
      float all = -squares;
      for (std::size_t j = 0; j < Factors; ++j) all += sum[j] * sum[j];
      logits[i] += 0.5f * all;
    }
  }
  void separate(const rows& r, std::span<const float> w, std::span<const float> by_logit, std::span<float> g) const {
    for (std::size_t i = 0; i < r.size(); ++i) {
      const float* const sum = sums_.data() + i * Factors;
      for (std::size_t k = r.begin(i); k < r.end(i); ++k) {
        const float *const v = w.data() + k * dim + 1, x = r.values[k];
        for (std::size_t j = 0; j < Factors; ++j) g[k * dim + 1 + j] = by_logit[i] * x * (sum[j] - v[j] * x);
      }
    }
  }

  // Two hidden layers over the sums of each field's factors.
  void infer(const rows& r, std::span<const float> w, const float* parameters, std::vector<float>& logits) {
    const std::size_t n = r.size();
    value_[0].assign(n * width_[0], 0.0f);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t k = r.begin(i); k < r.end(i); ++k) {
        if (r.fields[k] >= fields_) continue;
        float* const to = value_[0].data() + i * width_[0] + r.fields[k] * Factors;
        for (std::size_t j = 0; j < Factors; ++j) to[j] += w[k * dim + 1 + j] * r.values[k];
      }
    }
    for (std::size_t l = 0; l < layers; ++l) {
      const std::size_t in = width_[l], out = width_[l + 1];
      value_[l + 1].resize(n * out);
      float* const y = value_[l + 1].data();
      examples::multiply<float>(n, out, in, {value_[l].data(), in}, parameters, out, y, out);
      const float* const bias = parameters + in * out;
      for (std::size_t i = 0; i < n; ++i)
        for (std::size_t j = 0; j < out; ++j) {
          const float x = y[i * out + j] + bias[j];
          y[i * out + j] = l + 1 < layers ? std::max(x, 0.0f) : x;
        }
      parameters += (in + 1) * out;
    }
    for (std::size_t i = 0; i < n; ++i) logits[i] += value_[layers][i];
  }
  void learn(const rows& r, std::span<const float> w, std::span<const float> by_logit, std::span<float> g) {
    const std::size_t n = r.size(), base = r.indices.size() * dim + 1;
    std::size_t at = base;
    for (std::size_t l = 0; l < layers; ++l) at += (width_[l] + 1) * width_[l + 1];
    back_.assign(by_logit.begin(), by_logit.end());
    for (std::size_t l = layers; l-- > 0;) {
      const std::size_t in = width_[l], out = width_[l + 1];
      at -= (in + 1) * out;
      examples::multiply<float>(in, out, n, examples::view<float>{value_[l].data(), in}.transposed(), back_.data(), out,
                                g.data() + at, out);
      for (std::size_t i = 0; i < n; ++i)
        for (std::size_t j = 0; j < out; ++j) g[at + in * out + j] += back_[i * out + j];
      turned_.resize(in * out);
      for (std::size_t i = 0; i < in; ++i)
        for (std::size_t j = 0; j < out; ++j) turned_[j * in + i] = w[at + i * out + j];
      next_.resize(n * in);
      examples::multiply<float>(n, in, out, {back_.data(), out}, turned_.data(), in, next_.data(), in);
      if (l > 0)
        for (std::size_t i = 0; i < n * in; ++i) next_[i] = value_[l][i] > 0.0f ? next_[i] : 0.0f;
      std::swap(back_, next_);
    }
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t k = r.begin(i); k < r.end(i); ++k) {
        if (r.fields[k] >= fields_) continue;
        const float* const from = back_.data() + i * width_[0] + r.fields[k] * Factors;
        for (std::size_t j = 0; j < Factors; ++j) g[k * dim + 1 + j] = from[j] * r.values[k];
      }
    }
  }

  kind kind_;
  std::size_t fields_, own_, width_[layers + 1];
  std::vector<float> sums_, value_[layers + 1], back_, next_, turned_;
};

}  // namespace ctr

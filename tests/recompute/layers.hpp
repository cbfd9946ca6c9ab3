// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/recompute/concept.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

/// Layers for tests: one that only moves bytes, of any sizes, and the layers of a small network in double precision.
namespace heddle_test {

using heddle::recompute::pass;

/// What a call that throws says.
template <class Call> std::string message(Call call) {
  try {
    call();
  } catch (const heddle::error& e) {
    return e.what();
  }
  return "nothing was thrown";
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Fills every byte it is given, reads every byte it is promised, and counts its calls.
struct bytes_layer {
  std::size_t in = 0, out = 0, kept = 0;
  double time = 1;
  int first = 0, again = 0, inferences = 0, backwards = 0;

  std::size_t output_bytes() const { return out; }
  std::size_t saved_bytes() const { return kept; }
  double forward_time() const { return time; }
  double backward_time() const { return 3 * time; }

  static std::uint64_t sum(const void* p, std::size_t n) {
    std::uint64_t h = n;
    for (std::size_t i = 0; i < n; ++i) h = mix(h ^ static_cast<const unsigned char*>(p)[i]);
    return h;
  }
  static void fill(void* p, std::size_t n, std::uint64_t h) {
    for (std::size_t i = 0; i < n; ++i) static_cast<unsigned char*>(p)[i] = static_cast<unsigned char>(h = mix(h));
  }
  void forward(const void* x, void* y, void* saved, pass kind) {
    ++(kind == pass::first ? first : kind == pass::again ? again : inferences);
    const std::uint64_t h = sum(x, in);
    fill(y, out, h);
    if (saved) fill(saved, kept, h + 1);
  }
  void backward(const void* x, const void* saved, const void* gy, void* gx) {
    ++backwards;
    const std::uint64_t h = sum(x, in) * 3 + sum(saved, kept) * 5 + sum(gy, out);
    if (gx) fill(gx, in, h);
  }
};

/// A chain of random sizes, some of them 0.
inline std::vector<bytes_layer> random_layers(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<bytes_layer> all(n);
  std::size_t before = 40;
  for (bytes_layer& l : all) {
    l.in = before;
    l.out = before = random() % 6 ? 1 + random() % 300 : 0;
    l.kept = random() % 3 ? random() % 500 : 0;
    l.time = 1 + random() % 4;
  }
  return all;
}

inline std::vector<heddle::recompute::layer_cost> costs_of(const std::vector<bytes_layer>& layers) {
  std::vector<heddle::recompute::layer_cost> costs;
  for (const bytes_layer& l : layers) costs.push_back({l.out, l.kept, l.time, 3 * l.time});
  return costs;
}

/// y = W x + b; needs only its input.
struct linear {
  std::size_t from, to;
  std::vector<double> w, gw;  // to * from weights, then to biases

  linear(std::size_t from_size, std::size_t to_size, unsigned seed) : from(from_size), to(to_size) {
    std::mt19937 random(seed);
    w.resize(to * (from + 1));
    gw.resize(w.size());
    for (double& v : w) v = (static_cast<double>(random() % 2001) - 1000) / 1000 / std::sqrt(static_cast<double>(from));
  }
  std::string name() const { return "linear"; }
  std::size_t output_bytes() const { return to * sizeof(double); }
  std::size_t saved_bytes() const { return 0; }
  void forward(const void* in, void* out, void*, pass) {
    auto x = static_cast<const double*>(in);
    for (std::size_t i = 0; i < to; ++i) {
      double sum = w[to * from + i];
      for (std::size_t j = 0; j < from; ++j) sum += w[i * from + j] * x[j];
      static_cast<double*>(out)[i] = sum;
    }
  }
  void backward(const void* in, const void*, const void* grad_out, void* grad_in) {
    auto x = static_cast<const double*>(in), g = static_cast<const double*>(grad_out);
    for (std::size_t i = 0; i < to; ++i) {
      gw[to * from + i] += g[i];
      for (std::size_t j = 0; j < from; ++j) gw[i * from + j] += g[i] * x[j];
    }
    for (std::size_t j = 0; grad_in && j < from; ++j) {
      double sum = 0;
      for (std::size_t i = 0; i < to; ++i) sum += g[i] * w[i * from + j];
      static_cast<double*>(grad_in)[j] = sum;
    }
  }
};

/// y = tanh x; saves y.
struct tanh_layer {
  std::size_t n;
  std::size_t output_bytes() const { return n * sizeof(double); }
  std::size_t saved_bytes() const { return n * sizeof(double); }
  void forward(const void* in, void* out, void* saved, pass) {
    for (std::size_t i = 0; i < n; ++i) static_cast<double*>(out)[i] = std::tanh(static_cast<const double*>(in)[i]);
    if (saved) std::memcpy(saved, out, n * sizeof(double));
  }
  void backward(const void*, const void* saved, const void* grad_out, void* grad_in) {
    auto y = static_cast<const double*>(saved), g = static_cast<const double*>(grad_out);
    for (std::size_t i = 0; grad_in && i < n; ++i) static_cast<double*>(grad_in)[i] = g[i] * (1 - y[i] * y[i]);
  }
};

/// Dropout whose mask is a function of (seed, step, element); the step moves on in the first pass alone.
struct dropout {
  std::size_t n;
  std::uint64_t seed;
  double keep = 0.5;
  std::uint64_t step = 0;

  bool stays(std::size_t i) const { return static_cast<double>(mix(seed ^ mix(step ^ mix(i))) >> 11) < keep * 0x1p53; }
  std::size_t output_bytes() const { return n * sizeof(double); }
  std::size_t saved_bytes() const { return 0; }
  void forward(const void* in, void* out, void*, pass kind) {
    if (kind == pass::first) ++step;
    auto x = static_cast<const double*>(in);
    for (std::size_t i = 0; i < n; ++i) {
      static_cast<double*>(out)[i] = kind == pass::inference ? x[i] : stays(i) ? x[i] / keep : 0;
    }
  }
  void backward(const void*, const void*, const void* grad_out, void* grad_in) {
    auto g = static_cast<const double*>(grad_out);
    for (std::size_t i = 0; grad_in && i < n; ++i) static_cast<double*>(grad_in)[i] = stays(i) ? g[i] / keep : 0;
  }
};

/// Subtracts the mean of its input; keeps a running mean, as batch norm does, which inference uses.
struct centre {
  std::size_t n;
  double running = 0;
  int updates = 0;

  std::size_t output_bytes() const { return n * sizeof(double); }
  std::size_t saved_bytes() const { return 0; }
  void forward(const void* in, void* out, void*, pass kind) {
    auto x = static_cast<const double*>(in);
    double mean = 0;
    for (std::size_t i = 0; i < n; ++i) mean += x[i] / static_cast<double>(n);
    if (kind == pass::first) {
      running = 0.9 * running + 0.1 * mean;
      ++updates;
    }
    if (kind == pass::inference) mean = running;
    for (std::size_t i = 0; i < n; ++i) static_cast<double*>(out)[i] = x[i] - mean;
  }
  void backward(const void*, const void*, const void* grad_out, void* grad_in) {
    auto g = static_cast<const double*>(grad_out);
    double mean = 0;
    for (std::size_t i = 0; i < n; ++i) mean += g[i] / static_cast<double>(n);
    for (std::size_t i = 0; grad_in && i < n; ++i) static_cast<double*>(grad_in)[i] = g[i] - mean;
  }
};

}  // namespace heddle_test

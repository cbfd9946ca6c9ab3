// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/convert_loops.hpp>
#include <heddle/optim/concept.hpp>

namespace heddle {
inline namespace v0 {

namespace detail {
struct sgd_numbers {
  float momentum, decay, lr;
  bool nesterov;
};

// The same loops for every instruction set, each operation rounded by itself.
[[gnu::always_inline]] inline void sgd_body(float* p, const float* g, float* const* state, std::size_t n,
                                            const sgd_numbers& x) noexcept {
  const float m = x.momentum, decay = x.decay, lr = x.lr;
  if (m == 0.0f && decay == 0.0f) {
    for (std::size_t i = 0; i < n; ++i) p[i] -= lr * g[i];
    return;
  }
  if (m == 0.0f) {
    for (std::size_t i = 0; i < n; ++i) p[i] -= lr * (g[i] + decay * p[i]);
    return;
  }
  float* const v = state[0];
  if (x.nesterov) {
    for (std::size_t i = 0; i < n; ++i) {
      const float d = g[i] + decay * p[i];
      v[i] = m * v[i] + d;
      p[i] -= lr * (d + m * v[i]);
    }
  } else {
    for (std::size_t i = 0; i < n; ++i) {
      v[i] = m * v[i] + (g[i] + decay * p[i]);
      p[i] -= lr * v[i];
    }
  }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
__attribute__((target("avx2"))) inline void sgd_avx2(float* p, const float* g, float* const* state, std::size_t n,
                                                     const sgd_numbers& x) noexcept {
  sgd_body(p, g, state, n, x);
}
inline void sgd_loops(float* p, const float* g, float* const* state, std::size_t n, const sgd_numbers& x) noexcept {
  if (best_isa() == isa::portable)
    sgd_body(p, g, state, n, x);
  else
    sgd_avx2(p, g, state, n, x);
}
#else
inline void sgd_loops(float* p, const float* g, float* const* state, std::size_t n, const sgd_numbers& x) noexcept {
  sgd_body(p, g, state, n, x);
}
#endif
}  // namespace detail

/// @brief Stochastic gradient descent, with momentum, Nesterov's form and weight decay where asked.
///
///     g = gradient + weight_decay p;   m = momentum m + g;   p = p - lr (nesterov ? g + momentum m : m)
///
/// State:   4 bytes per element (the velocity m).
/// Traffic: 20 bytes per element with momentum (12 read, 8 written), 12 without: the least possible.
/// Wire:    nothing.
/// Order:   after the exchange; under a compressor that corrects momentum it runs without its own.
/// Sync:    never.
/// Paper:   Sutskever et al. 2013; dampening 0.
/// Throws:  argument_error from check() for a number outside its range.
struct sgd {
  float momentum = 0.0f;      ///< In [0, 1).
  bool nesterov = false;      ///< Look ahead along the velocity.
  float weight_decay = 0.0f;  ///< L2 term, 0 or above.

  static constexpr int slots = 1;  ///< The velocity.

  /// Throws argument_error for a number outside its range.
  void check() const {
    detail::check_below_one("sgd", "momentum", momentum);
    detail::check_decay("sgd", weight_decay);
  }

  /// One step of n elements.
  void update(float* p, const float* g, float* const* state, std::size_t n, const update_context& x) const noexcept {
    detail::sgd_loops(p, g, state, n, {momentum, weight_decay * x.decay_scale, x.lr, nesterov});
  }
  /// "sgd".
  std::string name() const { return "sgd"; }
};
static_assert(optimizer<sgd>);

}  // namespace v0
}  // namespace heddle

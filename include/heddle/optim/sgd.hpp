// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/elementwise.hpp>
#include <heddle/optim/concept.hpp>

namespace heddle {
inline namespace v0 {

namespace detail {
/// @cond
struct sgd_step {
  float lr, momentum, decay;
  bool nesterov;
  HEDDLE_HD void scale(float rate, float factor) { lr *= rate, decay *= factor; }
  HEDDLE_HD void operator()(float& p, const float& g, float& v) const {
    const float d = g + decay * p;
    v = momentum * v + d;
    p -= lr * (nesterov ? d + momentum * v : v);
  }
};
/// @endcond
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

  /// One step of an element.
  auto element_step(const update_context& x) const noexcept {
    return detail::sgd_step{x.lr, momentum, weight_decay * x.decay_scale, nesterov};
  }
  /// One step of n elements; without momentum the velocity isn't touched.
  /// A template without a choice, so that it costs only files that use it.
  template <class Context = update_context>
  void update(float* parameter, const float* gradient, float* const* state, std::size_t n,
              const Context& x) const noexcept {
    const float m = momentum, decay = weight_decay * x.decay_scale, lr = x.lr;
    const auto plain = [=](auto& p, const auto& g) { p -= lr * g; };
    const auto decayed = [=](auto& p, const auto& g) { p -= lr * (g + decay * p); };
    const auto heavy_ball = [=](auto& p, const auto& g, auto& v) {
      v = m * v + (g + decay * p);
      p -= lr * v;
    };
    const auto look_ahead = [=](auto& p, const auto& g, auto& v) {
      const auto d = g + decay * p;
      v = m * v + d;
      p -= lr * (d + m * v);
    };
    if (m == 0.0f && decay == 0.0f)
      detail::update_elements(n, plain, parameter, gradient);
    else if (m == 0.0f)
      detail::update_elements(n, decayed, parameter, gradient);
    else if (nesterov)
      detail::update_elements(n, look_ahead, parameter, gradient, state[0]);
    else
      detail::update_elements(n, heavy_ball, parameter, gradient, state[0]);
  }
  /// "sgd".
  std::string name() const { return "sgd"; }
};
static_assert(optimizer<sgd>);

/// @brief Heavy-ball momentum under its own name: sgd with these numbers.
constexpr sgd momentum(float coefficient = 0.9f, float weight_decay = 0.0f) noexcept {
  return {coefficient, false, weight_decay};
}
/// @brief Nesterov's momentum under its own name: sgd with these numbers.
constexpr sgd nesterov(float coefficient = 0.9f, float weight_decay = 0.0f) noexcept {
  return {coefficient, true, weight_decay};
}

}  // namespace v0
}  // namespace heddle

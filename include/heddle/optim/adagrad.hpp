// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/elementwise.hpp>
#include <heddle/optim/concept.hpp>

namespace heddle {
inline namespace v0 {

namespace detail {
/// @cond
struct adagrad_step {
  float lr, eps, decay;
  HEDDLE_HD void scale(float rate, float factor) { lr *= rate, decay *= factor; }
  HEDDLE_HD void operator()(float& p, const float& g, float& s) const {
    const float d = g + decay * p;
    s += d * d;
    float root = s;
    take_root(root);
    p -= lr * d / (root + eps);
  }
};
/// @endcond
}  // namespace detail

/// @brief Adaptive gradient: each element's rate falls with the squares of the gradients that it has seen.
///
///     g = gradient + weight_decay p;   s = s + g^2;   p = p - lr g / (sqrt(s) + eps)
///
/// State:   4 bytes per element (the sum s).
/// Traffic: 20 bytes per element (12 read, 8 written), the least possible.
/// Wire:    nothing.
/// Order:   after the exchange; not with a compressor that corrects momentum.
/// Sync:    never.
/// Paper:   Duchi, Hazan and Singer 2011, the diagonal form, figure 1 with eps outside the root.
/// Throws:  argument_error from check() for a number outside its range.
struct adagrad {
  float eps = 1e-10f;         ///< Added to the root, above 0.
  float weight_decay = 0.0f;  ///< L2 term, 0 or above.

  static constexpr int slots = 1;  ///< The sum of squares.

  /// Throws argument_error for a number outside its range.
  void check() const {
    detail::check_above_zero("adagrad", "eps", eps);
    detail::check_decay("adagrad", weight_decay);
  }

  /// One step of an element.
  auto element_step(const update_context& x) const noexcept {
    return detail::adagrad_step{x.lr, eps, weight_decay * x.decay_scale};
  }
  /// One step of n elements.
  void update(float* parameter, const float* gradient, float* const* state, std::size_t n,
              const update_context& x) const noexcept {
    const float lr = x.lr, e = eps, decay = weight_decay * x.decay_scale;
    const auto step = [=](auto& p, const auto& g, auto& s) {
      const auto d = g + decay * p;
      s += d * d;
      auto root = s;
      detail::take_root(root);
      p -= lr * d / (root + e);
    };
    detail::update_elements(n, step, parameter, gradient, state[0]);
  }
  /// "adagrad".
  std::string name() const { return "adagrad"; }
};
static_assert(optimizer<adagrad>);

}  // namespace v0
}  // namespace heddle

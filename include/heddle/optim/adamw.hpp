// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/optim/detail/moments.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Adam with decoupled weight decay.
///
///     m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
///     p = p - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p),   t = steps including this
///     one
///
/// State:   8 bytes per element (m and v).
/// Traffic: 28 bytes per element (16 read, 12 written), the least possible.
/// Wire:    nothing.
/// Order:   after the exchange; not with a compressor that corrects momentum.
/// Sync:    never.
/// Paper:   Loshchilov and Hutter 2019, algorithm 2.
/// Throws:  argument_error from check() for a number outside its range.
struct adamw {
  float beta1 = 0.9f;         ///< Decay of the first moment, in [0, 1).
  float beta2 = 0.999f;       ///< Decay of the second moment, in [0, 1).
  float eps = 1e-8f;          ///< Added to the root, above 0.
  float weight_decay = 0.0f;  ///< Decoupled decay, 0 or above.

  static constexpr int slots = 2;  ///< First and second moment.

  /// Throws argument_error for a number outside its range.
  void check() const { detail::moments::check("adamw", *this); }

  /// One step of an element.
  auto element_step(const update_context& x) const noexcept {
    return detail::adam_step<true>{detail::moments(*this, x), x.lr, weight_decay * x.decay_scale};
  }
  /// One step of n elements.
  /// A template without a choice, so that it costs only files that use it.
  template <class Context = update_context>
  void update(float* parameter, const float* gradient, float* const* state, std::size_t n,
              const Context& x) const noexcept {
    detail::update_elements(n, element_step(x), parameter, gradient, state[0], state[1]);
  }
  /// "adamw".
  std::string name() const { return "adamw"; }
};
static_assert(optimizer<adamw>);

}  // namespace v0
}  // namespace heddle

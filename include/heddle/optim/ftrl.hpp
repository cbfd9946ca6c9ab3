// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/elementwise.hpp>
#include <heddle/optim/concept.hpp>

namespace heddle {
inline namespace v0 {

namespace detail {
/// @cond
struct ftrl_step {
  float lr, beta, l1, l2;
  HEDDLE_HD void scale(float rate, float factor) { lr *= rate, l1 *= factor, l2 *= factor; }
  HEDDLE_HD void operator()(float& p, const float& g, float& z, float& n) const {
    if (lr == 0.0f) return;  // 1 / lr is in the formula
    float before = n, after = n + g * g;
    n = after;
    take_root(before);
    take_root(after);
    z += g - (after - before) / lr * p;
    const float slope = (beta + after) / lr + l2, above = (l1 - z) / slope, below = (-l1 - z) / slope;
    p = z > l1 ? above : z < -l1 ? below : z - z;  // 0, or NaN where z is
  }
};
/// @endcond
}  // namespace detail

/// @brief Follow the regularised leader, proximal: AdaGrad's rates with an L1 term that makes parameters exactly 0.
///
///     s = (sqrt(n + g^2) - sqrt(n)) / lr;   z = z + g - s p;   n = n + g^2
///     p = 0 where |z| <= l1, else -(z - sign(z) l1) / ((beta + sqrt(n)) / lr + l2)
///
/// The parameter is a function of z and n, so it should start at 0: where no gradient has been seen, the start is
/// forgotten. A rate of 0 leaves everything as it is.
/// State:   8 bytes per element (z and n).
/// Traffic: 28 bytes per element (16 read, 12 written), the least possible.
/// Wire:    nothing.
/// Order:   after the exchange; not with a compressor that corrects momentum, nor in a mode that averages or shares
///          parameters: each step would forget what others did to them.
/// Sync:    never.
/// Paper:   McMahan et al. 2013, algorithm 1; its alpha is the learning rate. decay_scale multiplies l1 and l2.
/// Throws:  argument_error from check() for a number outside its range.
struct ftrl {
  float beta = 1.0f;  ///< Keeps the first steps short, above 0.
  float l1 = 0.0f;    ///< Makes parameters 0, 0 or above.
  float l2 = 0.0f;    ///< Makes parameters small, 0 or above.

  static constexpr int slots = 2;                  ///< z and n.
  static constexpr bool derives_parameter = true;  ///< From them alone: what else moved a parameter is forgotten.

  /// Throws argument_error for a number outside its range.
  void check() const {
    detail::check_above_zero("ftrl", "beta", beta);
    if (!(l1 >= 0.0f && l2 >= 0.0f && l1 < 1e30f && l2 < 1e30f)) {
      throw argument_error("heddle::ftrl: l1 is " + std::to_string(l1) + " and l2 is " + std::to_string(l2) +
                           ", allowed is 0 or above");
    }
  }

  /// One step of an element.
  auto element_step(const update_context& x) const noexcept {
    return detail::ftrl_step{x.lr, beta, l1 * x.decay_scale, l2 * x.decay_scale};
  }
  /// One step of n elements.
  void update(float* parameter, const float* gradient, float* const* state, std::size_t n,
              const update_context& x) const noexcept {
    if (x.lr == 0.0f) return;  // 1 / lr is in the formula
    const float lr = x.lr, b = beta, one = l1 * x.decay_scale, two = l2 * x.decay_scale;
    const auto step = [=](auto& p, const auto& g, auto& z, auto& squares) {
      auto before = squares, after = squares + g * g;
      squares = after;
      detail::take_root(before);
      detail::take_root(after);
      z += g - (after - before) / lr * p;
      const auto slope = (b + after) / lr + two, above = (one - z) / slope, below = (-one - z) / slope;
      p = z > one ? above : z < -one ? below : z - z;  // 0, or NaN where z is
    };
    detail::update_elements(n, step, parameter, gradient, state[0], state[1]);
  }
  /// "ftrl".
  std::string name() const { return "ftrl"; }
};
static_assert(optimizer<ftrl>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/elementwise.hpp>
#include <heddle/core/detail/squares.hpp>
#include <heddle/optim/concept.hpp>

#include <cmath>

namespace heddle {
inline namespace v0 {

namespace detail {
/// @cond
struct lars_step {
  float lr, momentum, decay;
  double trust;
  bool adapts = true;
  HEDDLE_HD void scale(float rate, float factor) { lr *= rate, decay *= factor, adapts &= factor != 0.0f; }
  HEDDLE_HD void advance(const float&, const float&, float&) const {}
  HEDDLE_HD float direction(const float&, const float& g, const float&) const { return g; }
  HEDDLE_HD double ratio(double parameter, double gradient) const {
    const double p = ::sqrt(parameter), g = ::sqrt(gradient);
    return p > 0.0 && g > 0.0 && adapts ? trust * p / (g + static_cast<double>(decay) * p) : 1.0;
  }
  HEDDLE_HD void apply(float& p, const float& g, float& v, double ratio) const {
    const float rate = static_cast<float>(static_cast<double>(lr) * ratio);
    v = momentum * v + rate * (g + decay * p);
    p -= v;
  }
};
/// @endcond
}  // namespace detail

/// @brief Layer-wise adaptive rate scaling: momentum SGD whose rate is scaled, tensor by tensor, to the size of the
/// parameter over that of the gradient.
///
///     ratio = trust |p| / (|g| + weight_decay |p|);   m = momentum m + lr ratio (g + weight_decay p);   p = p - m
///
/// The ratio is 1 where |p| or |g| is 0, and for tensors whose decay_scale is 0 (biases and norms, as is usual).
/// State:   4 bytes per element (the velocity m, which holds the rate, as in the paper).
/// Traffic: 28 bytes per element (20 read, 8 written): the norms need a pass of their own.
/// Wire:    16 bytes per tensor to add up the squares, where its parts are on several ranks.
/// Order:   after the exchange; not with a compressor that corrects momentum.
/// Sync:    never.
/// Paper:   You, Gitman and Ginsburg 2017, algorithm 1.
/// Throws:  argument_error from check() for a number outside its range.
struct lars {
  float momentum = 0.9f;      ///< In [0, 1).
  float weight_decay = 0.0f;  ///< L2 term, 0 or above.
  float trust = 0.001f;       ///< Ratio of the length of a step at rate 1 to that of the parameter, above 0.

  static constexpr int slots = 1;  ///< The velocity.

  /// Throws argument_error for a number outside its range.
  void check() const {
    detail::check_below_one("lars", "momentum", momentum);
    detail::check_decay("lars", weight_decay);
    detail::check_above_zero("lars", "trust", trust);
  }

  /// The squares of a part; moves nothing.
  layer_squares advance(const float* parameter, const float* gradient, float* const*, std::size_t n,
                        const update_context&) const noexcept {
    return {detail::squares(parameter, n), detail::squares(gradient, n)};
  }
  /// What the rate is multiplied by.
  double ratio(const layer_squares& all, const update_context& x) const noexcept {
    return layer_step(x).ratio(all.parameter, all.direction);
  }
  /// One step of an element, in halves.
  detail::lars_step layer_step(const update_context& x) const noexcept {
    detail::lars_step s{x.lr, momentum, weight_decay, static_cast<double>(trust)};
    s.scale(1.0f, x.decay_scale);
    return s;
  }
  /// Moves a part, given the squares of the whole tensor.
  void apply(float* parameter, const float* gradient, float* const* state, std::size_t n, const update_context& x,
             const layer_squares& all) const noexcept {
    const float rate = static_cast<float>(x.lr * ratio(all, x)), m = momentum, decay = weight_decay * x.decay_scale;
    const auto step = [=](auto& p, const auto& g, auto& v) {
      v = m * v + rate * (g + decay * p);
      p -= v;
    };
    detail::update_elements(n, step, parameter, gradient, state[0]);
  }
  /// One step of a whole tensor of n elements.
  void update(float* parameter, const float* gradient, float* const* state, std::size_t n,
              const update_context& x) const noexcept {
    apply(parameter, gradient, state, n, x, advance(parameter, gradient, state, n, x));
  }
  /// "lars".
  std::string name() const { return "lars"; }
};
static_assert(layerwise<lars>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/squares.hpp>
#include <heddle/optim/detail/moments.hpp>

#include <algorithm>
#include <iterator>

namespace heddle {
inline namespace v0 {

namespace detail {
/// @cond
struct lamb_step {
  moments both;
  float lr, decay;
  bool adapts = true;
  HEDDLE_HD void scale(float rate, float factor) { lr *= rate, decay *= factor, adapts &= factor != 0.0f; }
  HEDDLE_HD void advance(const float&, const float& g, float& m, float& v) const { both.move(g, m, v); }
  HEDDLE_HD float direction(const float& p, const float&, const float& m, const float& v) const {
    float r = 0.0f;
    both.direction(r, m, v);
    return r + decay * p;
  }
  HEDDLE_HD double ratio(double parameter, double direct) const {
    return parameter > 0.0 && direct > 0.0 && adapts ? ::sqrt(parameter / direct) : 1.0;
  }
  HEDDLE_HD void apply(float& p, const float& g, float& m, float& v, double ratio) const {
    p -= static_cast<float>(static_cast<double>(lr) * ratio) * direction(p, g, m, v);
  }
};
/// @endcond
}  // namespace detail

/// @brief Layer-wise adaptive moments: the direction of AdamW, with a step as long, tensor by tensor, as lr times the
/// parameter.
///
///     m, v as adamw;   r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
///     p = p - lr |p| / |r| r
///
/// The ratio |p| / |r| is 1 where either is 0, and for tensors whose decay_scale is 0 (biases and norms, as is usual).
/// State:   8 bytes per element (m and v).
/// Traffic: 40 bytes per element (28 read, 12 written): the norm of r needs a pass before the parameter can move.
/// Wire:    16 bytes per tensor to add up the squares, where its parts are on several ranks.
/// Order:   after the exchange; not with a compressor that corrects momentum.
/// Sync:    never.
/// Paper:   You et al. 2020, algorithm 2, with phi(x) = x.
/// Throws:  argument_error from check() for a number outside its range.
struct lamb {
  float beta1 = 0.9f;         ///< Decay of the first moment, in [0, 1).
  float beta2 = 0.999f;       ///< Decay of the second moment, in [0, 1).
  float eps = 1e-6f;          ///< Added to the root, above 0.
  float weight_decay = 0.0f;  ///< Decay, inside the direction, 0 or above.

  static constexpr int slots = 2;  ///< First and second moment.

  /// Throws argument_error for a number outside its range.
  void check() const { detail::moments::check("lamb", *this); }

  /// Moves the moments of a part and returns its squares.
  layer_squares advance(const float* parameter, const float* gradient, float* const* state, std::size_t n,
                        const update_context& x) const noexcept {
    const direction_of direct{detail::moments(*this, x), weight_decay * x.decay_scale};
    const auto step = [=](auto& r, const auto& g, const auto& p, auto& m, auto& v) {
      direct.both.move(g, m, v);
      direct(r, p, m, v);
    };
    layer_squares sum;
    float r[512] = {};
    for (std::size_t i = 0; i < n; i += std::size(r)) {
      const std::size_t k = (std::min)(n - i, std::size(r));
      detail::update_elements(k, step, r, gradient + i, parameter + i, state[0] + i, state[1] + i);
      sum += {detail::squares(parameter + i, k), detail::squares(r, k)};
    }
    return sum;
  }
  /// What the direction is multiplied by besides the rate.
  double ratio(const layer_squares& all, const update_context& x) const noexcept {
    return layer_step(x).ratio(all.parameter, all.direction);
  }
  /// One step of an element, in halves.
  detail::lamb_step layer_step(const update_context& x) const noexcept {
    detail::lamb_step s{detail::moments(*this, x), x.lr, weight_decay};
    s.scale(1.0f, x.decay_scale);
    return s;
  }
  /// Moves the parameter of a part, given the squares of the whole tensor.
  void apply(float* parameter, const float*, float* const* state, std::size_t n, const update_context& x,
             const layer_squares& all) const noexcept {
    const float rate = static_cast<float>(x.lr * ratio(all, x));
    const direction_of direct{detail::moments(*this, x), weight_decay * x.decay_scale};
    const auto step = [=](auto& p, const auto& m, const auto& v) {
      auto r = p;
      direct(r, p, m, v);
      p -= rate * r;
    };
    const float *const m = state[0], *const v = state[1];
    detail::update_elements(n, step, parameter, m, v);
  }
  /// One step of a whole tensor of n elements.
  void update(float* parameter, const float* gradient, float* const* state, std::size_t n,
              const update_context& x) const noexcept {
    apply(parameter, gradient, state, n, x, advance(parameter, gradient, state, n, x));
  }
  /// "lamb".
  std::string name() const { return "lamb"; }

 private:
  struct direction_of {  // r of the formula
    detail::moments both;
    float decay;
    template <class Value> void operator()(Value& r, const Value& p, const Value& m, const Value& v) const {
      both.direction(r, m, v);
      r += decay * p;
    }
  };
};
static_assert(layerwise<lamb>);

}  // namespace v0
}  // namespace heddle

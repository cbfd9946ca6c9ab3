// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/squares.hpp>
#include <heddle/optim/detail/moments.hpp>

#include <algorithm>
#include <iterator>

namespace heddle {
inline namespace v0 {

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
    return all.parameter > 0.0 && all.direction > 0.0 && x.decay_scale != 0.0f
               ? std::sqrt(all.parameter / all.direction)
               : 1.0;
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

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/slice.hpp>

#include <concepts>
#include <cstddef>
#include <string>

namespace heddle {
inline namespace v0 {

namespace detail {
inline void check_below_one(const char* rule, const char* what, double x) {
  if (!(x >= 0.0 && x < 1.0)) {
    throw argument_error(std::string("heddle::") + rule + ": " + what + " is " + std::to_string(x) +
                         ", allowed is [0, 1)");
  }
}
inline void check_decay(const char* rule, double x) {
  if (!(x >= 0.0 && x < 1e30)) {
    throw argument_error(std::string("heddle::") + rule + ": weight_decay is " + std::to_string(x) +
                         ", allowed is 0 or above");
  }
}
inline void check_above_zero(const char* rule, const char* what, double x) {
  if (!(x > 0.0 && x < 1e30)) {
    throw argument_error(std::string("heddle::") + rule + ": " + what + " is " + std::to_string(x) +
                         ", allowed is above 0");
  }
}
}  // namespace detail

/// @brief What an update rule is told besides the numbers.
struct update_context {
  float lr = 0.0f;           ///< Learning rate of this step and group, above or equal 0.
  std::size_t step = 0;      ///< Steps taken before, for bias corrections.
  float decay_scale = 1.0f;  ///< Multiplies the rule's weight decay (0 for tensors that shall not decay).
  std::size_t group = 0;     ///< Of the tensor.
};

/// @name Requirements of an update rule, one by one
/// @{
/// Has `slots`: floats of state per element, all starting at 0.
template <class Rule>
concept has_state_slots = requires {
  { Rule::slots } -> std::convertible_to<int>;
};
/// Has `update(parameter, gradient, state, count, context)`.
template <class Rule>
concept has_update = requires(const Rule& r, float* p, const float* g, float* const* state, std::size_t n,
                              const update_context& x) { r.update(p, g, state, n, x); };
/// Has `element_step(context)`: a named, trivially copyable functor, marked HEDDLE_HD, that moves one element:
/// f(parameter, gradient, state of each slot). `f.scale(lr, decay)` multiplies its rate and its decay. Rules that have
/// it run on any backend, many tensors in one pass; see multi_tensor.
template <class Rule>
concept has_element_step = requires(const Rule& r, const update_context& x, float factor) {
  r.element_step(x);
  r.element_step(x).scale(factor, factor);
};
/// Has `layer_step(context)`: the same for a layerwise rule, in halves. f.advance(parameter, gradient, state...) moves
/// what doesn't depend on norms, in copies first and once more in the second half;
/// f.direction(parameter, gradient, state...) is the number whose squares are added up, f.ratio(squares of the
/// parameter, of the direction) what f.apply(parameter, gradient, state..., ratio) then takes.
template <class Rule>
concept has_layer_step = requires(const Rule& r, const update_context& x, float factor) {
  { r.layer_step(x).ratio(0.0, 0.0) } -> std::convertible_to<double>;
  r.layer_step(x).scale(factor, factor);
};
/// Says `derives_parameter`: a parameter is a function of the rule's state, so what others do to it is forgotten. Then
/// no mode may average or share parameters.
template <class Rule>
concept has_derived_parameter = requires { requires Rule::derives_parameter; };
/// Says `groups`: it moves a tensor by the rule of `update_context::group`, which must be below it.
template <class Rule>
concept has_groups = requires {
  { Rule::groups } -> std::convertible_to<std::size_t>;
};
/// @}

/// @brief An update rule: one pass over parameter, gradient and state of a tensor.
///
///     struct signed_descent {
///       static constexpr int slots = 0;
///       void update(float* p, const float* g, float* const*, std::size_t n, const hd::update_context& x) const {
///         for (std::size_t i = 0; i < n; ++i) p[i] -= g[i] > 0 ? x.lr : g[i] < 0 ? -x.lr : 0.0f;
///       }
///       std::string name() const { return "signed_descent"; }
///     };
template <class Rule>
concept optimizer = has_state_slots<Rule> && has_update<Rule>;

/// @brief Sums of squares over a tensor, or over a part of it, from which a layerwise rule takes its trust ratio.
struct layer_squares {
  double parameter = 0.0;  ///< Of the parameter before the step.
  double direction = 0.0;  ///< Of what the rule would subtract from it at rate 1.

  /// Adds another part of the tensor.
  constexpr layer_squares& operator+=(const layer_squares& o) noexcept {
    parameter += o.parameter;
    direction += o.direction;
    return *this;
  }
};

/// @brief An update rule whose step length depends on norms of the whole tensor (LARS, LAMB).
///
/// Its step has two halves, so that the parts of a tensor may be on different ranks: `advance(p, g, state, n, x)` moves
/// what doesn't depend on the norms and returns the part's squares; `apply(p, g, state, n, x, squares)` moves the rest,
/// given the sum over all parts. `update` does both for a tensor that is here as a whole.
template <class Rule>
concept layerwise = optimizer<Rule> && requires(const Rule& r, float* p, const float* g, float* const* state,
                                                std::size_t n, const update_context& x, const layer_squares& all) {
  { r.advance(p, g, state, n, x) } -> std::same_as<layer_squares>;
  r.apply(p, g, state, n, x, all);
};

}  // namespace v0
}  // namespace heddle

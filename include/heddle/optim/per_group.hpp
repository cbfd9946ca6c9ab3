// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/optim/concept.hpp>

#include <algorithm>
#include <tuple>

namespace heddle {
inline namespace v0 {

/// @brief An update rule for each group of tensors: tensors with `tensor::group` k move by the k-th one.
///
///     hd::data_parallel dp{plan, comm, tensors, hd::per_group{hd::adamw{}, hd::adagrad{}}};   // groups 0 and 1
///
/// It goes into every trainer over host tensors, into servers and checkpoints too: checkpoints know which tensor was of
/// which group, and load where that is the same. It has no element_step(), so not over device tensors; nor into
/// sharded_update, which isn't told of groups. Rates and decay of a group are scaled by `groups()`.
///
/// State:   as many floats per element, of any group, as the rule that needs most.
/// Traffic: of each element its own rule's.
/// Wire:    nothing.
/// Order:   after the exchange; not with a compressor that corrects momentum.
/// Sync:    never.
/// Throws:  argument_error from check() as the rules do; from data_parallel and update() for a group without a rule.
/// @tparam Rules Update rules that go element by element.
template <class... Rules> struct per_group {
  static_assert(sizeof...(Rules) > 0 && (optimizer<Rules> && ...),
                "heddle::per_group: give one or more update rules with slots and update(); see docs/optim.md");
  static_assert(!(layerwise<Rules> || ...),
                "heddle::per_group: rules must go element by element, so not lars or lamb; see docs/optim.md");

  std::tuple<Rules...> rules;  ///< Of group 0, 1, ...

  static constexpr std::size_t groups = sizeof...(Rules);                           ///< How many there are.
  static constexpr int slots = (std::max)({static_cast<int>(Rules::slots)...});     ///< The most of any.
  static constexpr bool derives_parameter = (has_derived_parameter<Rules> || ...);  ///< Whether any does.

  /// @param r The rule of group 0, 1, ...
  constexpr per_group(const Rules&... r) : rules(r...) {}

  /// Throws argument_error for a number outside its range.
  void check() const {
    each([](const auto& rule, std::size_t) {
      if constexpr (requires { rule.check(); }) rule.check();
    });
  }
  /// One step of n elements of a tensor of group `x.group`. Throws argument_error if it has no rule.
  void update(float* parameter, const float* gradient, float* const* state, std::size_t n,
              const update_context& x) const {
    if (x.group >= groups)
      throw argument_error("heddle::per_group: group " + std::to_string(x.group) + " of " + std::to_string(groups));
    each([&](const auto& rule, std::size_t k) {
      if (k == x.group) rule.update(parameter, gradient, state, n, x);
    });
  }
  /// "per_group(", the rules' names, ")".
  std::string name() const {
    std::string text = "per_group(";
    each([&](const auto& rule, std::size_t k) {
      text += k ? ", " : "";
      if constexpr (requires { text += rule.name(); }) text += rule.name();
    });
    return text + ")";
  }

 private:
  template <class Function> void each(Function&& f) const {
    std::size_t k = 0;
    std::apply([&](const auto&... rule) { (f(rule, k++), ...); }, rules);
  }
};

}  // namespace v0
}  // namespace heddle

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
/// It goes wherever a rule goes, into servers and checkpoints too. Rates and decay of a group are scaled by `groups()`.
///
/// State:   as many floats per element, of any group, as the rule that needs most.
/// Traffic: of each element its own rule's.
/// Wire:    nothing.
/// Order:   after the exchange; not with a compressor that corrects momentum.
/// Sync:    never.
/// Throws:  argument_error from check() as the rules do; from data_parallel for a tensor whose group has no rule.
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
  /// One step of n elements of a tensor of group `x.group`.
  void update(float* parameter, const float* gradient, float* const* state, std::size_t n,
              const update_context& x) const {
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

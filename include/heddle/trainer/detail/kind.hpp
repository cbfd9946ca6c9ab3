// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/optim/sgd.hpp>
#include <heddle/trainer/detail/averager.hpp>
#include <heddle/trainer/detail/checked.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

// What follows from the types of a trainer, and what these must be.
template <class Strategy, class Comm, class Optimizer> struct training_kind {
  static_assert(communicator<Comm>,
                "heddle::data_parallel: the second argument must be a communicator; see docs/comm.md");
  static_assert(
      optimizer<Optimizer>,
      "heddle::data_parallel: the fourth argument must be an update rule with slots and update(); see docs/optim.md");
  static_assert(std::remove_cvref_t<decltype(Strategy::mode)>::averages != average::shared,
                "heddle::data_parallel: .mode shares parameters; include heddle/trainer/hogwild.hpp, see docs/mode.md");
  static_assert(std::remove_cvref_t<decltype(Strategy::mode)>::averages != average::server,
                "heddle::data_parallel: .mode needs servers; include heddle/trainer/server.hpp, see docs/mode.md");
  using averager_type = averager<Strategy, Comm>;
  using exchange_type = exchange_kind<Strategy>;
  static constexpr bool moves_momentum =
      exchange_type::of_gradients && owns_momentum<typename exchange_type::compressor_type>;
  static_assert(
      !moves_momentum || std::is_same_v<Optimizer, sgd>,
      "heddle::data_parallel: this compressor corrects momentum, so the optimizer must be sgd; see docs/compress.md");
  static_assert(exchange_type::of_gradients || !has_derived_parameter<Optimizer>,
                "heddle::data_parallel: this update rule makes parameters of its own state, so .mode must average "
                "gradients, such as every_step{}; see docs/optim.md");
  using rule_type = std::conditional_t<moves_momentum, sgd, Optimizer>;  // sgd{}: the compressor has done the rest
  static constexpr std::size_t slots = moves_momentum ? 0 : static_cast<std::size_t>(Optimizer::slots);
  static constexpr std::size_t held_slots = slots + exchange_type::mixes;  // the last one: parameters in float

  static rule_type applied(const Optimizer& rule) {
    if constexpr (moves_momentum)
      return {};
    else
      return rule;
  }

  static const Strategy& checked(const Strategy& plan, const Optimizer& rule) {
    plan.check();
    check_part(plan.topology);
    check_part(plan.compressor);
    check_part(plan.mode);
    check_part(plan.precision);
    check_part(plan.buckets);
    check_part(rule);
    return plan;
  }

  // What a checkpoint of this kind holds: the same names and slots, or it can't be loaded.
  static std::string signature(const Strategy& plan, const Optimizer& rule, const auto& tensors) {
    return name_or(plan.mode, "mode") + ", " + name_or(plan.compressor, "compressor") + " with " +
           std::to_string(exchange_type::slots) + " slots, " + rule_signature(rule, slots, tensors) + ", " +
           name_or(plan.precision, "precision");
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

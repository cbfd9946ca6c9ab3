// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <concepts>
#include <cstddef>
#include <string>

namespace heddle {
inline namespace v0 {

/// @name Requirements of a mode, one by one
/// @{
/// Has `averages`: what the ranks average, gradients or parameters.
template <class Mode>
concept has_averages = requires { Mode::averages; };
/// Has `outer_momentum`: whether the mode applies a momentum of its own to what was averaged.
template <class Mode>
concept has_outer_momentum = requires {
  { Mode::outer_momentum } -> std::convertible_to<bool>;
};
/// Has `meets(step)`: whether replicas meet at the end of step 0, 1, 2 ...; or it is a case of the family in
/// heddle/mode/outer_step.hpp, whose period decides.
template <class Mode>
concept has_meets = requires(const Mode& m, std::size_t step) {
  { m.meets(step) } -> std::convertible_to<bool>;
} || requires(const Mode& m) { m.outer_step().period; } || requires(const Mode& m) { m.outer, m.period; };
/// @}

/// @brief What replicas average when they meet.
enum class average {
  gradients,   ///< Every step, before the update; replicas stay equal.
  shards,      ///< The same, but each rank updates only what it owns and hands the parameters around.
  parameters,  ///< Now and then, after local updates.
  shared,      ///< Nothing: ranks are threads that change the same parameters.
  server       ///< Nothing: ranks send gradients or moves to servers, which hold the parameters.
};

/// @brief When replicas meet and what they average.
///
///     struct every_other_step {
///       static constexpr hd::average averages = hd::average::parameters;
///       static constexpr bool outer_momentum = false;
///       bool meets(std::size_t step) const { return step % 2 == 1; }
///       std::string name() const { return "every_other_step"; }
///     };
template <class Mode>
concept mode = has_averages<Mode> && has_outer_momentum<Mode> && has_meets<Mode>;

}  // namespace v0
}  // namespace heddle

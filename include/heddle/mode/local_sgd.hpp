// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/outer_step.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Local SGD: each rank updates its own replica; every `period` steps replicas move to their average.
///
/// At a meeting, with s_i samples seen by rank i since the last one and w the parameters agreed then:
///
///     w = w - sum_i (s_i / sum s) (w - w_i)
///
/// The simplest case of `outer_step`, which says how compressors, bad gradients and optimizer state are treated.
/// Wire:    one all-reduce of the parameters every `period` steps.
/// State:   4 bytes per element (w).
/// Traffic: 28 / period bytes per element and step beside the all-reduce.
/// Order:   any compressor; momentum of `dgc` is off.
/// Sync:    step() blocks at meetings only.
/// Paper:   Stich 2019; post-local warm-up: Lin et al. 2020.
/// Throws:  argument_error if period is 0.
struct local_sgd {
  std::size_t period = 8;  ///< Steps between meetings, at least 1.
  std::size_t warmup = 0;  ///< Steps at the start in which replicas meet every step.

  static constexpr average averages = average::parameters;  ///< Parameters, as differences.
  static constexpr bool outer_momentum = false;             ///< None: the average is taken as it is.

  /// The case of the family that this is.
  heddle::outer_step<> outer_step() const { return {.period = {period, warmup}}; }
  /// Throws argument_error unless period is 1 or more.
  void check() const { outer_step().check(); }
  /// Whether replicas meet at the end of this step.
  bool meets(std::size_t step) const { return outer_step().meets(step); }
  /// "local_sgd".
  std::string name() const { return "local_sgd"; }
};
static_assert(mode<local_sgd>);

}  // namespace v0
}  // namespace heddle

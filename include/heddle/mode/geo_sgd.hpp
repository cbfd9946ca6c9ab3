// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/outer_step.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Geo-SGD over a communicator: the moves of all replicas are summed into common parameters in instalments.
///
/// With S the common parameters, L_i the replica of rank i and N ranks, at a meeting:
///
///     d_i = (L_i - S) / N;   S' = S + sum_i d_i;   L_i = S' + (1 - 1/N) (L_i - S)
///
/// It is a sum, not an average: what isn't sent stays in the replica and is sent later, so that after t meetings
/// without new steps all but (1 - 1/N)^t of every move has arrived; join() adds the rest. The effective learning rate
/// is N times that of averaging. Only plain SGD is coherent with it, since moments of other rules stay local. Take the
/// parameters to save from data_parallel::agreed, or after join(): replicas hold what others haven't seen.
///
/// Wire:    one all-reduce of the parameters every `period` steps.
/// State:   4 bytes per element (S, on every rank).
/// Order:   with none{} or cast<>{}, no transform: a replica goes on as if all of its difference had been sent.
/// Sync:    step() blocks at meetings only.
/// System:  PaddlePaddle's Geo-SGD, in a deterministic form.
/// Throws:  argument_error if period is 0.
struct geo_sgd {
  std::size_t period = 8;  ///< Steps between meetings, at least 1.

  static constexpr average averages = average::parameters;  ///< Parameters, as differences.
  static constexpr bool outer_momentum = false;             ///< None.

  /// The case of the family that this is.
  heddle::outer_step<outer::instalments, weight::equal> outer_step() const { return {.period = {period}}; }
  /// Throws argument_error if period is 0.
  void check() const { outer_step().check(); }
  /// Whether replicas meet at the end of this step.
  bool meets(std::size_t step) const { return outer_step().meets(step); }
  /// "geo_sgd".
  std::string name() const { return "geo_sgd"; }
};
static_assert(mode<geo_sgd>);

}  // namespace v0
}  // namespace heddle

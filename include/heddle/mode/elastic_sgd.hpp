// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/outer_step.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Elastic averaging SGD: replicas stay apart, drawn to a common centre that they draw to themselves.
///
/// At a meeting, with c the centre and alpha = beta / ranks, both from the values before it:
///
///     w_i = w_i + alpha (c - w_i);   c = c + alpha sum_i (w_i - c)
///
/// join() leaves all replicas at the centre. All ranks weigh alike.
/// Wire:    one all-reduce of the parameters every `period` steps.
/// State:   4 bytes per element (the centre, on every rank).
/// Order:   with none{} or cast<>{}, no transform: a replica goes on as if all of its difference had been sent.
/// Sync:    step() blocks at meetings only.
/// Paper:   Zhang, Choromanska, LeCun 2015 (beta 0.9), its synchronous form.
/// Throws:  argument_error for a number outside its range.
struct elastic_sgd {
  std::size_t period = 8;  ///< Steps between meetings, at least 1.
  float beta = 0.9f;       ///< ranks times alpha, in [0, 1]; 0: replicas are independent.

  static constexpr average averages = average::parameters;  ///< Parameters, as differences.
  static constexpr bool outer_momentum = false;             ///< None.

  /// The case of the family that this is.
  heddle::outer_step<outer::elastic, weight::equal> outer_step() const { return {.outer = {beta}, .period = {period}}; }
  /// Throws argument_error for a number outside its range.
  void check() const { outer_step().check(); }
  /// Whether replicas meet at the end of this step.
  bool meets(std::size_t step) const { return outer_step().meets(step); }
  /// "elastic_sgd".
  std::string name() const { return "elastic_sgd"; }
};
static_assert(mode<elastic_sgd>);

}  // namespace v0
}  // namespace heddle

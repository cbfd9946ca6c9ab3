// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/concept.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Synchronous training: gradients are averaged in every step, weighted by samples; replicas are always equal.
///
/// Wire:    one all-reduce of the gradients a step, overlapped with backward.
/// State:   none.
/// Traffic: what the compressor and the collective move.
/// Order:   any compressor.
/// Sync:    step() blocks until the exchange is done.
/// Throws:  nothing.
struct every_step {
  static constexpr average averages = average::gradients;  ///< Gradients.
  static constexpr bool outer_momentum = false;            ///< None.

  /// Always.
  bool meets(std::size_t) const noexcept { return true; }
  /// "every_step".
  std::string name() const { return "every_step"; }
};
static_assert(mode<every_step>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/concept.hpp>
#include <heddle/recompute/schedule.hpp>

#include <span>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief Plans as another policy, and has the chain compare every recomputed output, bit for bit, with the first one.
///
/// A layer that draws its randomness from a state, or that changes what it computes under `pass::again`, is a
/// `schedule_error` that names layer and step. A chain of any other policy has no code for it.
///
/// @code{.cpp}
/// heddle::recompute::chain c{heddle::recompute::checked{heddle::recompute::sqrt{}}, memory, first, second, third};
/// @endcode
///
/// State:   that of the policy; a 64-bit hash for each layer.
/// Traffic: each output is read once more whenever it is computed.
/// Order:   outermost, around any policy: `checked{offload{.policy = sqrt{}}}`.
/// Sync:    reads outputs on the calling thread, so layers must work on the host's queue.
/// Throws:  what the policy throws.
template <class Policy> struct checked {
  Policy policy{};  ///< What plans.
  /// Asks the chain to compare.
  static constexpr bool checks_values = true;

  /// The policy's schedule.
  schedule plan(std::span<const layer_cost> costs) const { return policy.plan(costs); }

  friend constexpr bool operator==(const checked&, const checked&) = default;
};

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

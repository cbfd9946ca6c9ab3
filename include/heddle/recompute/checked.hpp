// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/concept.hpp>
#include <heddle/recompute/schedule.hpp>

#include <span>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief Plans as another policy, and has the chain compare every recomputed output and saved block, by hash, with what
/// the first pass made.
///
/// A layer that draws its randomness from a state, that changes what it computes under `pass::again`, or whose `restore`
/// makes another saved block than its `forward`, is a `schedule_error` that names layer and step. For the comparison
/// `forward` writes a saved block in the first pass also where the schedule keeps none. Bytes of it that a layer always
/// leaves out count as equal. A chain of any other policy has no code for it.
///
/// @code{.cpp}
/// heddle::recompute::chain c{heddle::recompute::checked{heddle::recompute::sqrt{}}, memory, first, second, third};
/// @endcode
///
/// State:   that of the policy; two 64-bit hashes for each layer; while a layer runs first, its saved block, which is not
///          the resource's and in no peak.
/// Traffic: each output is read once more whenever it is computed, each saved block filled before and read after.
/// Order:   outermost, around any policy: `checked{offload{.policy = sqrt{}}}`.
/// Sync:    reads them on the calling thread, so layers must work on the host's queue.
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

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/halves.hpp>
#include <heddle/mode/concept.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Synchronous training with a sharded optimizer (ZeRO, stage 1): each rank updates what it owns.
///
/// The reduce-scatter half of the all-reduce leaves each mean gradient complete on one rank. That rank alone holds its
/// optimizer state and updates it; the other half then carries parameters instead of gradients. In float the result is
/// that of `every_step` on the same topology, bit for bit, clipping by the global norm and layerwise rules included.
///
/// Wire:    one all-reduce of the gradients a step; only its first half overlaps with backward. 8 bytes from every rank
///          to every rank to agree on the norm. The second half carries float, whatever the compressor's wire.
/// State:   the optimizer's divided by the number of ranks.
/// Traffic: the update's divided by the number of ranks, and 4 bytes read per owned element for the norm.
/// Order:   none or cast; topologies whose halves have owners: ring, direct, torus_2d, halving_doubling, mixed_radix,
///          hierarchical over these, native (which runs as direct).
/// Sync:    step() blocks until the parameters have arrived.
/// Paper:   Rajbhandari et al. 2020 (P_os); gradients stay in the caller's memory.
/// Throws:  nothing.
struct zero1 {
  static constexpr average averages = average::shards;  ///< Gradients, each on its owner.
  static constexpr bool outer_momentum = false;         ///< None.

  /// Always.
  bool meets(std::size_t) const noexcept { return true; }
  /// "zero1".
  std::string name() const { return "zero1"; }
};
static_assert(mode<zero1>);

}  // namespace v0
}  // namespace heddle

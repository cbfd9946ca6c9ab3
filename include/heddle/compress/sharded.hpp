// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Compression between groups of ranks only, such as the machines of a cluster, each rank a part of the tensor.
///
/// Inside a group of a `hierarchical` topology gradients are summed as floats, by a reduce-scatter. Each rank then
/// compresses what it owns of its group's gradient; packets cross between the ranks of all groups that own the same,
/// and are handed around inside. In ragged groups the m ranks of the smallest group have a counterpart everywhere and
/// own everything.
///
///     hd::strategy{.topology = hd::hierarchical{hd::ring{}, hd::ring{}, 8}, .compressor = hd::sharded{hd::dgc{}}}
///
/// Wire:    with X ranks in each of Y groups 4 n (X - 1) / X bytes inside; across each rank's packet, of n / X
/// elements,
///          to Y - 1 groups; inside again what the others of the group received.
/// State:   that of the compressor, divided by X.
/// Traffic: that of the compressor, divided by X, and 8 bytes per element for a copy of the gradient.
/// Order:   ends a chain; transforms before it see each rank's own gradient. Tensors that the compressor never sends as
///          a packet are all-reduced. Needs the topology `hierarchical`.
/// Sync:    never.
/// Paper:   ours; BytePS (Jiang et al. 2020) has the two levels without the division.
/// @tparam Compressor A packet_compressor of which each element can be compressed without the others: dgc, or your own;
/// not error_feedback.
template <class Compressor> struct sharded : Compressor {
  static_assert(
      packet_compressor<Compressor>,
      "heddle::sharded: the compressor must be a packet_compressor by itself, such as dgc{}; error_feedback{} "
      "and codecs aren't; see docs/compress.md");
  /// Packets are of what a rank owns of its group's gradient.
  static constexpr bool shards_packets = true;

  /// Whether a tensor of n elements travels this way: as soon as it ever does, in every step.
  bool sends(std::size_t n, const encode_context& x) const {
    encode_context last = x;
    last.step = ~std::size_t{0};
    return Compressor::sends(n, last);
  }
  /// For example "sharded(dgc)".
  std::string name() const { return "sharded(" + Compressor::name() + ")"; }
};

}  // namespace v0
}  // namespace heddle

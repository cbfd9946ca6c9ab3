// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/schedule.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Cuts the buffer into chunks that follow each other through a topology's rounds.
///
/// Chunk j runs j `skew` rounds behind the first: round t holds round t - j skew of every chunk j. So inside one
/// machine a chunk is reduced while the one before it crosses the network, and all ranks of a tree work at once. The
/// result is one schedule like any other. A round waits for all its chunks, which costs up to the difference between
/// them where chunks without an order between them could run ahead.
/// Wire:    the topology's.
/// Rounds:  the topology's plus (chunks - 1) skew.
/// Error:   the topology's.
/// Throws:  argument_error if `chunks` or `skew` is below 1.
template <class Topology> struct pipelined {
  Topology topology{};  ///< What each chunk runs through.
  int chunks = 4;       ///< Number of chunks, 1 or more.
  int skew = 1;         ///< Rounds between the beginnings of two chunks, 1 or more.

  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule> constexpr Schedule all_reduce(int rank, int size, std::size_t count) const {
    static_assert(has_all_reduce_schedule<Topology>,
                  "heddle::pipelined: .topology must provide all_reduce(); see docs/collective.md");
    check_rank("pipelined", rank, size);
    if (chunks < 1 || skew < 1) {
      throw argument_error("heddle::pipelined: chunks is " + std::to_string(chunks) + ", skew is " +
                           std::to_string(skew) + ", allowed is 1 or more");
    }
    const auto same = [](int peer) { return peer; };
    std::vector<Schedule> parts(static_cast<std::size_t>(chunks));
    for (std::size_t j = 0; j < parts.size(); ++j) {
      const interval chunk = balanced_block(count, parts.size(), j);
      const Schedule one = topology.all_reduce(rank, size, chunk.count);
      parts[j].append(one, 0, one.rounds(), same, chunk.begin);
    }
    Schedule s;
    s.append_merged(detail::as_span(parts), true, same, static_cast<std::size_t>(skew));
    return s;
  }
  /// For example "pipelined(tree, 8)".
  std::string name() const {
    return "pipelined(" + topology.name() + ", " + std::to_string(chunks) +
           (skew > 1 ? ", " + std::to_string(skew) : std::string()) + ")";
  }
};

}  // namespace v0
}  // namespace heddle

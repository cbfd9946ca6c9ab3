// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/schedule.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Pairs exchange whole buffers, at twice the distance each round: the fewest rounds, for small messages.
///
/// Where P isn't a power of two, 2^k the next one below, the first P - 2^k odd ranks add theirs to the rank before them
/// and get the result from there.
/// Wire:    n k elements sent per rank, n more by the P - 2^k that serve two.
/// Rounds:  k, 2 more where P isn't a power of two.
/// Error:   k roundings, 1 more where P isn't a power of two. All ranks compute the same bits.
/// Paper:   Thakur, Rabenseifner and Gropp 2005.
struct recursive_doubling {
  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule> constexpr Schedule all_reduce(int rank, int size, std::size_t count) const {
    check_rank("recursive_doubling", rank, size);
    int power = 1;
    while (2 * power <= size) power *= 2;
    const int extra = size - power;  // ranks 0 .. 2 extra - 1 are pairs that work as one
    const interval all{0, count};
    const bool paired = rank < 2 * extra, guest = paired && rank % 2;
    const int mine = paired ? rank / 2 : rank - extra;
    Schedule s;
    if (extra) {
      if (guest)
        s.add(action::send, rank - 1, all);
      else if (paired)
        s.add(action::reduce, rank + 1, all);
      s.next();
    }
    for (int bit = 1; bit < power; bit *= 2) {
      const int other = mine ^ bit, peer = other < extra ? 2 * other : other + extra;
      if (!guest) {
        s.add(action::send, peer, all);
        s.add(action::reduce, peer, all);
      }
      s.next();
    }
    if (extra) {
      if (guest)
        s.add(action::copy, rank - 1, all);
      else if (paired)
        s.add(action::send, rank + 1, all);
      s.next();
    }
    return s;
  }
  /// "recursive_doubling".
  std::string name() const { return "recursive_doubling"; }
};
static_assert(topology<recursive_doubling>);

}  // namespace v0
}  // namespace heddle

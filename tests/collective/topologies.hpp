// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/verify.hpp>

#include <cstddef>

/// @file
/// Topologies as a user would write them.
namespace heddle_test {
namespace hd = heddle;

// example-begin hypercube
struct hypercube {  // small messages: log2(size) rounds; size must be a power of two
  constexpr hd::schedule all_reduce(int rank, int size, std::size_t count) const {
    hd::schedule s;
    for (int bit = 1; bit < size; bit *= 2) {
      s.add(hd::action::send, rank ^ bit, {0, count});
      s.add(hd::action::reduce, rank ^ bit, {0, count});
      s.next();
    }
    return s;
  }
};
static_assert(hd::verify(hypercube{}, 8));
static_assert(hd::verify(hypercube{}, 6).what == hd::fault::bad_peer);
// example-end

// example-begin binomial_tree
struct binomial_tree {  // up to rank 0, and down again; any size
  constexpr hd::schedule all_reduce(int rank, int size, std::size_t count) const {
    hd::schedule s;
    int bit = 1;
    for (; bit < size; bit *= 2) {
      if (rank % (2 * bit) == bit) s.add(hd::action::send, rank - bit, {0, count});
      if (rank % (2 * bit) == 0 && rank + bit < size) s.add(hd::action::reduce, rank + bit, {0, count});
      s.next();
    }
    s.split({{0, rank == 0 ? count : 0}});  // from here on rank 0 has the result
    while ((bit /= 2) > 0) {
      if (rank % (2 * bit) == bit) s.add(hd::action::copy, rank - bit, {0, count});
      if (rank % (2 * bit) == 0 && rank + bit < size) s.add(hd::action::send, rank + bit, {0, count});
      s.next();
    }
    return s;
  }
};
static_assert(hd::verify(binomial_tree{}, 7));
// example-end

// Two ranks that reduce everything and then overwrite the half that the other one owns: sums, but no means.
struct half_wanted {
  hd::schedule all_reduce(int rank, int, std::size_t count) const {
    hd::schedule s;
    const hd::interval low{0, count / 2}, high{count / 2, count - count / 2};
    s.add(hd::action::send, 1 - rank, {0, count});
    s.add(hd::action::reduce, 1 - rank, {0, count});
    s.next();
    s.add(hd::action::send, 1 - rank, rank ? high : low);
    s.add(hd::action::copy, 1 - rank, rank ? low : high);
    s.next();
    return s;
  }
};

}  // namespace heddle_test

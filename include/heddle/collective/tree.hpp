// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/schedule.hpp>

namespace heddle {
inline namespace v0 {

namespace detail {
// A node of the binary tree over 0 .. size - 1 whose subtrees are runs of neighbours. Node 0 is the root, above one
// child; odd nodes are leaves; the height of another is the number of its trailing zero bits.
struct tree_node {
  int height = 0;  // of the root, the height of the tree
  int parent = -1;
  int below[2] = {-1, -1};

  static constexpr int height_of(int node, int size) {
    int h = 0;
    while ((1 << h) < size && (node >> h) % 2 == 0) ++h;
    return h;
  }
  constexpr tree_node(int node, int size) : height(height_of(node, size)) {
    const int bit = 1 << height;
    if (node) {
      const int up = (node - bit) | 2 * bit;  // the neighbour of twice the step, where there is one
      parent = up < size ? up : node - bit;
      if (height) below[0] = node - bit / 2;
    }
    for (int step = bit / 2; step && below[1] < 0; step /= 2) {
      if (node + step < size) below[1] = node + step;
    }
  }
};

// Rounds up to the root; `to_rank` turns a node of the tree into a rank.
template <class Schedule, class Rank>
constexpr void tree_reduce(Schedule& s, int node, int size, interval all, Rank&& to_rank) {
  const tree_node me(node, size);
  const int rounds = tree_node::height_of(0, size);
  for (int k = 0; k < rounds; ++k) {
    if (node && me.height == k) s.add(action::send, to_rank(me.parent), all);
    for (const int child : me.below) {
      if (child >= 0 && tree_node::height_of(child, size) == k) s.add(action::reduce, to_rank(child), all);
    }
    s.next();
  }
}

// And down again.
template <class Schedule, class Rank>
constexpr void tree_broadcast(Schedule& s, int node, int size, interval all, Rank&& to_rank) {
  const tree_node me(node, size);
  for (int k = tree_node::height_of(0, size); k-- > 0;) {
    if (node && me.height == k) s.add(action::copy, to_rank(me.parent), all);
    for (const int child : me.below) {
      if (child >= 0 && tree_node::height_of(child, size) == k) s.add(action::send, to_rank(child), all);
    }
    s.next();
  }
}
}  // namespace detail

/// @brief Up a binary tree to rank 0 and down again. For small messages; larger ones as `pipelined{tree{}, chunks}`.
///
/// Wire:    n elements up, 2 n down, at most, per rank.
/// Rounds:  2 ceil(log2 P).
/// Error:   ceil(log2 P) roundings.
/// Order:   every subtree is a run of ranks, so an operation that is associative but not commutative may be used.
struct tree {
  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule> constexpr Schedule all_reduce(int rank, int size, std::size_t count) const {
    check_rank("tree", rank, size);
    const auto same = [](int node) { return node; };
    Schedule s;
    detail::tree_reduce(s, rank, size, {0, count}, same);
    s.split({{0, rank == 0 ? count : 0}});
    detail::tree_broadcast(s, rank, size, {0, count}, same);
    return s;
  }
  /// "tree".
  std::string name() const { return "tree"; }
};

/// @brief Two binary trees, one for each half of the buffer, in which the leaves of one are inner nodes of the other.
///
/// With `pipelined` every rank sends and receives all the time: full bandwidth at the rounds of a tree.
/// Wire:    2 n elements sent per rank, at most, instead of a tree's 3 n.
/// Rounds:  2 ceil(log2 P).
/// Error:   ceil(log2 P) roundings.
/// Paper:   Sanders, Speck and Traff 2009.
struct double_tree {
  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule> constexpr Schedule all_reduce(int rank, int size, std::size_t count) const {
    check_rank("double_tree", rank, size);
    // Mirrored where P is even, else shifted by one: odd and even change places.
    const auto swapped = [size](int x) { return size % 2 ? (x + 1) % size : size - 1 - x; };
    const int node = size % 2 ? (rank + size - 1) % size : size - 1 - rank;
    const auto same = [](int x) { return x; };
    const interval first = balanced_block(count, 2, 0), second = balanced_block(count, 2, 1);
    std::vector<Schedule> up(2), down(2);
    detail::tree_reduce(up[0], rank, size, first, same);
    detail::tree_reduce(up[1], node, size, second, swapped);
    detail::tree_broadcast(down[0], rank, size, first, same);
    detail::tree_broadcast(down[1], node, size, second, swapped);
    Schedule s;
    s.append_merged(std::span<const Schedule>(up.data(), 2), true, same);
    std::vector<interval> owned;
    if (rank == 0) owned.push_back(first);
    if (node == 0) owned.push_back(second);
    s.split(std::move(owned));
    s.append_merged(std::span<const Schedule>(down.data(), 2), true, same);
    return s;
  }
  /// "double_tree".
  std::string name() const { return "double_tree"; }
};
static_assert(topology<tree> && topology<double_tree>);

}  // namespace v0
}  // namespace heddle

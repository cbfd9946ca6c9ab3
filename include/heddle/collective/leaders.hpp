// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/mixed_radix.hpp>
#include <heddle/collective/tree.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Two levels, one leader for each group: a tree to the leader, an all-reduce among leaders, a tree back.
///
/// `hierarchical` uses all links between groups at once and reduces with all ranks; this one crosses with one message
/// for each group, which is less where messages are small or a machine has one network port.
/// Groups are runs of `group` consecutive ranks led by their first; the last one may be smaller.
/// Wire:    n elements up and 2 n down inside, at most, per rank; those of inter for n elements, per leader.
/// Rounds:  2 ceil(log2 group) plus those of inter.
/// Error:   ceil(log2 group) roundings plus those of inter.
/// Order:   any topology across.
/// Throws:  argument_error if `group` is negative.
template <class Inter = ring> struct leaders {
  Inter inter{};  ///< Among the leaders.
  int group = 0;  ///< Ranks per group; 0: the largest divisor of P up to its square root.

  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule> constexpr Schedule all_reduce(int rank, int size, std::size_t count) const {
    static_assert(has_all_reduce_schedule<Inter>,
                  "heddle::leaders: .inter must provide all_reduce(); see docs/collective.md");
    check_rank("leaders", rank, size);
    if (group < 0) {
      throw argument_error("heddle::leaders: group is " + std::to_string(group) + ", allowed is 0 or more");
    }
    const int g = group == 0 ? detail::middle_divisor(size) : group < size ? group : size;
    const int groups = (size + g - 1) / g, base = rank / g * g, members = size - base < g ? size - base : g;
    const auto inside = [base](int node) { return base + node; };
    const auto leader = [g](int k) { return k * g; };
    const auto height = static_cast<std::size_t>(detail::tree_node::height_of(0, g));

    Schedule s;
    detail::tree_reduce(s, rank - base, members, {0, count}, inside);
    s.pad(height);  // the last group's tree may be lower
    const Schedule across = inter.all_reduce(rank / g, groups, count);
    const bool leads = rank == base;
    const auto pass = [&](std::size_t from, std::size_t to) {
      if (leads)
        s.append(across, from, to, leader, 0);
      else
        s.pad(s.rounds() + to - from);
    };
    pass(0, across.half());
    if (across.halved()) {
      std::vector<interval> owned;
      for (const interval b : across.owned()) {
        if (leads) owned.push_back(b);
      }
      s.split(std::move(owned));
    }
    pass(across.half(), across.rounds());
    s.pad(s.rounds() + height - static_cast<std::size_t>(detail::tree_node::height_of(0, members)));
    detail::tree_broadcast(s, rank - base, members, {0, count}, inside);
    return s;
  }
  /// For example "leaders(ring)".
  std::string name() const {
    return "leaders(" + inter.name() + ")" + (group ? " of " + std::to_string(group) : std::string());
  }
};
static_assert(topology<leaders<>>);

}  // namespace v0
}  // namespace heddle

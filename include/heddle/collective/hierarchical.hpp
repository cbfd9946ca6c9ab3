// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/mixed_radix.hpp>
#include <heddle/collective/native.hpp>

namespace heddle {
inline namespace v0 {

template <class Intra, class Inter> struct hierarchical;
namespace detail {
template <class Intra, class Inter>
inline constexpr bool has_native_leaf<hierarchical<Intra, Inter>> =
    std::is_same_v<Intra, native> || std::is_same_v<Inter, native> || has_native_leaf<Inter>;
}  // namespace detail

/// @brief Two levels: reduce-scatter inside a group, all-reduce across groups, all-gather inside.
///
/// Groups are runs of `group` consecutive ranks; the last one may be smaller. With m the size of the smallest group,
/// the first m ranks of each group own the m columns of the buffer; the others own nothing between the levels.
/// Wire:    with equal groups of X, Y groups: 2 n (X - 1) / X inside, 2 (n / X) (Y - 1) / Y across, per rank.
/// Rounds:  those of intra twice (its two halves) plus those of inter.
/// Error:   roundings of intra's reduce-scatter plus those of inter.
/// Order:   any topology with reduce_scatter and all_gather inside; any topology across. native{} in either place, or
///          in both, with heddle/collective/native_leaves.hpp on communicators that can be split; then there is no
///          schedule.
/// Paper:   Cho et al. 2019 (BlueConnect); Jia et al. 2018.
/// Throws:  argument_error if `group` is negative.
template <class Intra = ring, class Inter = ring> struct hierarchical {
  Intra intra{};  ///< Inside a group.
  Inter inter{};  ///< Across groups, one instance per column.
  int group = 0;  ///< Ranks per group; 0: the largest divisor of P up to its square root.

  /// Number of groups of `size` ranks.
  constexpr int groups(int size) const {
    const int g = group_of(size);
    return (size + g - 1) / g;
  }

  /// Ranks of a group but the last one, of `size` ranks. Throws: argument_error if `group` is negative.
  constexpr int group_of(int size) const {
    if (group < 0)
      throw argument_error("heddle::hierarchical: group is " + std::to_string(group) + ", allowed is 0 or more");
    return group == 0 ? detail::middle_divisor(size) : group < size ? group : size;
  }
  /// The same with direct{} in the places of native{}.
  constexpr auto as_schedules() const {
    const auto a = detail::as_schedules(intra);
    const auto b = detail::as_schedules(inter);
    return hierarchical<std::remove_const_t<decltype(a)>, std::remove_const_t<decltype(b)>>{a, b, group};
  }

  /// @brief Schedule of what happens inside groups alone: a reduce-scatter of `count` elements, after which a rank owns
  /// its column of its group's sum.
  constexpr detail::schedule_for<Intra> inside(int rank, int size, std::size_t count) const
    requires(!detail::has_native_leaf<hierarchical>)
  {
    const int columns = size - (groups(size) - 1) * group_of(size), local = rank % group_of(size);
    detail::schedule_for<Intra> s = scatter(rank, size, count);
    std::vector<interval> owned;
    if (local < columns) {
      owned.push_back(balanced_block(count, static_cast<std::size_t>(columns), static_cast<std::size_t>(local)));
    }
    s.split(std::move(owned));
    return s;
  }

  /// Schedule of an all-reduce of `count` elements.
  constexpr detail::schedule_for<Intra> all_reduce(int rank, int size, std::size_t count) const
    requires(!detail::has_native_leaf<hierarchical>)
  {
    static_assert(has_all_reduce_schedule<Inter>,
                  "heddle::hierarchical: .inter must provide all_reduce(); see docs/collective.md");
    detail::schedule_for<Intra> s = scatter(rank, size, count);
    const int g = group_of(size), last = size - (groups(size) - 1) * g, columns = last;
    const int mine = rank / g, base = mine * g, local = rank - base, members = mine == groups(size) - 1 ? last : g;
    const std::vector<interval> blocks = blocks_of(members, columns, count);

    const interval column = local < columns ? blocks[static_cast<std::size_t>(local)] : interval{0, 0};
    const detail::schedule_for<Intra> across = inter.all_reduce(mine, groups(size), column.count);
    const auto along = [&](int peer) { return peer * g + local; };
    s.append(across, 0, across.half(), along, column.begin);
    std::vector<interval> owned;
    if (across.halved()) {
      for (const interval b : across.owned()) owned.push_back({b.begin + column.begin, b.count});
    }
    if (across.halved()) s.split(std::move(owned));
    s.append(across, across.half(), across.rounds(), along, column.begin);

    const detail::schedule_for<Intra> gather = intra.all_gather(local, members, blocks);
    const std::size_t before = s.rounds();
    s.append(gather, 0, gather.rounds(), [&](int peer) { return base + peer; }, 0);
    s.pad(before + larger([&](int n) { return intra.all_gather(0, n, blocks_of(n, columns, count)); }, g, last));
    return s;
  }

  /// @brief Schedule of an all-gather: rank r begins with block r.
  ///
  /// First across groups, each column its own ranks' blocks, then inside. In ragged groups, ranks without a counterpart
  /// in the smallest group first hand their block to a column of their group.
  constexpr detail::schedule_for<Intra> all_gather(int rank, int size, std::span<const interval> blocks) const
    requires(has_all_gather_schedule<Intra> && has_all_gather_schedule<Inter>)
  {
    detail::check_blocks("hierarchical", rank, size, blocks);
    if (group < 0)
      throw argument_error("heddle::hierarchical: group is " + std::to_string(group) + ", allowed is 0 or more");
    const int g = group == 0 ? detail::middle_divisor(size) : group < size ? group : size;
    const int groups = (size + g - 1) / g, columns = size - (groups - 1) * g;
    const int mine = rank / g, base = mine * g, local = rank - base, members = mine == groups - 1 ? columns : g;
    const int passes = (g + columns - 1) / columns;  // how many ranks of a group share a column
    const auto block = [&](int k, int l) {           // of local rank l in group k, nothing if there is none
      const int r = k * g + l;
      return l < g && r < size ? blocks[static_cast<std::size_t>(r)] : interval{0, 0};
    };
    detail::schedule_for<Intra> s;
    for (int pass = 1; pass < passes; ++pass) {
      const int giver = local % columns + pass * columns;
      if (local < columns && giver < members) s.add(action::copy, base + giver, block(mine, giver));
    }
    if (local >= columns) s.add(action::send, base + local % columns, block(mine, local));
    s.next();

    std::vector<detail::schedule_for<Intra>> parts;
    std::vector<interval> layout;
    for (int pass = 0; pass < passes; ++pass) {
      layout.clear();
      for (int k = 0; k < groups; ++k) layout.push_back(block(k, local + pass * columns));
      parts.push_back(inter.all_gather(mine, groups, layout));
    }
    s.append_merged(parts, local < columns, [&](int peer) { return peer * g + local; });

    parts.clear();
    for (int k = 0; k < groups; ++k) {
      for (int pass = 0; pass < passes; ++pass) {
        layout.assign(static_cast<std::size_t>(members), interval{0, 0});
        for (int c = 0; c < columns; ++c) layout[static_cast<std::size_t>(c)] = block(k, c + pass * columns);
        parts.push_back(intra.all_gather(local, members, layout));
      }
    }
    const std::size_t before = s.rounds();  // groups of unequal size need unequal rounds: pad to the larger
    s.append_merged(parts, true, [&](int peer) { return base + peer; });
    for (const int n : {g, columns}) {
      s.pad(before + intra.all_gather(0, n, std::vector<interval>(static_cast<std::size_t>(n))).rounds());
    }
    return s;
  }

  /// @brief Schedule of a reduce-scatter: rank r ends with block r.
  ///
  /// The all-gather backwards: first inside, then across. In ragged groups a column at last hands out the blocks that
  /// it has reduced for others of its group.
  constexpr detail::schedule_for<Intra> reduce_scatter(int rank, int size, std::span<const interval> blocks) const
    requires(has_all_gather_schedule<Intra> && has_all_gather_schedule<Inter>)
  {
    detail::schedule_for<Intra> s = all_gather(rank, size, blocks).mirrored(1);
    const int g = group == 0 ? detail::middle_divisor(size) : group < size ? group : size;
    const int columns = size - (size - 1) / g * g, base = rank / g * g, end = base + g < size ? base + g : size;
    std::vector<interval> owned;
    for (int r = rank; r < end; r += rank - base < columns ? columns : size) {
      owned.push_back(blocks[static_cast<std::size_t>(r)]);
    }
    s.split(std::move(owned));
    return s;
  }

  /// For example "hierarchical(ring, ring) of 8".
  std::string name() const {
    return "hierarchical(" + intra.name() + ", " + inter.name() + ")" +
           (group ? " of " + std::to_string(group) : std::string());
  }

 private:
  // Blocks of a group of n ranks: the columns, and nothing for ranks beyond them.
  static constexpr std::vector<interval> blocks_of(int n, int columns, std::size_t count) {
    std::vector<interval> blocks(static_cast<std::size_t>(n), interval{0, 0});
    for (int c = 0; c < columns; ++c) {
      blocks[static_cast<std::size_t>(c)] =
          balanced_block(count, static_cast<std::size_t>(columns), static_cast<std::size_t>(c));
    }
    return blocks;
  }
  // Groups of unequal size need unequal rounds: the larger number.
  template <class Make> static constexpr std::size_t larger(Make&& make, int a, int b) {
    const std::size_t x = make(a).rounds(), y = make(b).rounds();
    return x > y ? x : y;
  }
  // The reduce-scatter inside this rank's group.
  constexpr detail::schedule_for<Intra> scatter(int rank, int size, std::size_t count) const {
    static_assert(has_reduce_scatter_schedule<Intra> && has_all_gather_schedule<Intra>,
                  "heddle::hierarchical: .intra must provide reduce_scatter() and all_gather(); "
                  "see docs/collective.md");
    check_rank("hierarchical", rank, size);
    const int g = group_of(size), last = size - (groups(size) - 1) * g;  // only the last group may be smaller
    const int base = rank / g * g, members = rank / g == groups(size) - 1 ? last : g;
    detail::schedule_for<Intra> s;
    const detail::schedule_for<Intra> inner =
        intra.reduce_scatter(rank - base, members, blocks_of(members, last, count));
    s.append(inner, 0, inner.rounds(), [&](int peer) { return base + peer; }, 0);
    s.pad(larger([&](int n) { return intra.reduce_scatter(0, n, blocks_of(n, last, count)); }, g, last));
    return s;
  }
};
static_assert(topology<hierarchical<>>);

}  // namespace v0
}  // namespace heddle

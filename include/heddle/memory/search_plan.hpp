// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/memory/detail/offset_search.hpp>
#include <heddle/memory/detail/reorder_search.hpp>
#include <heddle/memory/plan.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>

namespace heddle {
inline namespace v0 {

/// @brief When `search_plan` stops: at the first of these, or when its plan is optimal.
struct search_limits {
  std::size_t target = 0;  ///< A peak in bytes that is good enough; 0 for the lowest there is.
  double seconds = 1.0;    ///< Wall-clock time, at least 0; 0: all greedy plans, nothing else.
  std::uint64_t nodes = (std::numeric_limits<std::uint64_t>::max)();  ///< Nodes of the search; repeatable, unlike time.
  std::uint64_t seed = 1;  ///< Of the restarts: another seed may be lucky where this one is not.
};

namespace detail {
// 1 1 2 1 1 2 4 1 1 2 ...: how long to try before beginning anew when nobody knows (Luby, Sinclair, Zuckerman 1993).
constexpr std::uint64_t luby(std::uint64_t i) noexcept {
  for (;;) {
    const int k = static_cast<int>(std::bit_width(i));
    if (i == (std::uint64_t{1} << k) - 1) return std::uint64_t{1} << (k - 1);
    i -= (std::uint64_t{1} << (k - 1)) - 1;
  }
}
}  // namespace detail

/// @brief The best plan that can be found within limits: greedy plans first, then greedy plans in orders that are
/// improved until that helps no more, then a branch-and-bound search.
///
/// Anytime: it always has a valid plan, reports each better one, and stops at a target, at the lower bound, or at a
/// limit. It searches below the target (or the lower bound), every fourth time half way between that and the best peak
/// so far; a capacity proven too small raises the lower bound. The branch-and-bound search is skipped above 4,096
/// buffers, where one descent takes too long.
///
/// State:  up to 4,096 buffers a list of those that are live together: 16 bytes a pair, 24 while it is made.
/// @param lifetimes What to place. @param limits When to stop.
/// @param improved Called as improved(plan) for the first plan and each better one; may be a lambda.
/// Throws: as plan_greedy; argument_error where `.seconds` is negative or not a number; what `improved` throws.
template <class Lifetime, class Improved>
memory_plan search_plan(std::span<const Lifetime> lifetimes, const search_limits& limits, Improved&& improved) {
  if (!(limits.seconds >= 0.0)) {
    throw argument_error("heddle::search_plan: seconds is " + std::to_string(limits.seconds) +
                         ", allowed is 0 or above");
  }
  using search = detail::offset_search<Lifetime>;
  constexpr double longest = 1e9;
  const auto end = search::clock::now() + std::chrono::duration_cast<typename search::clock::duration>(
                                              std::chrono::duration<double>((std::min)(limits.seconds, longest)));
  const detail::plan_items<Lifetime> items(lifetimes);
  memory_plan best;
  const auto take = [&](const std::vector<std::size_t>& offsets, std::size_t lower_bound) {
    memory_plan p = detail::finished_plan<memory_plan>(items, offsets);
    p.lower_bound = lower_bound;
    if (!best.offsets.empty() && p.peak >= best.peak) return false;
    best = std::move(p);
    improved(std::as_const(best));
    return true;
  };
  const auto enough = [&] { return best.optimal() || best.peak <= limits.target; };
  // A list of neighbours makes greedy plans cheap where these are few, but may take memory in proportion to n^2.
  const std::size_t n = items.list.size();
  const bool few = n <= 4096;
  std::optional<detail::plan_neighbours<Lifetime>> neighbours;
  std::optional<detail::neighbour_placer<Lifetime>> placer;
  if (few && 64 * detail::overlaps(items) < n * n) placer.emplace(items, neighbours.emplace(items));
  const auto placed = [&](const std::vector<std::uint32_t>& order) {
    return placer ? (*placer)(order) : detail::place_greedily(items, order);
  };
  std::vector<std::uint32_t> best_order;
  std::vector<std::size_t> best_offsets;
  for (const placement order : placements) {
    std::vector<std::uint32_t> sorted = items.sorted(order);
    std::vector<std::size_t> offsets = placed(sorted);
    if (take(offsets, items.lower_bound)) {
      best_order = std::move(sorted);
      best_offsets = std::move(offsets);
    }
    if (enough() || (limits.seconds > 0 && search::clock::now() > end)) return best;
  }
  if (search::clock::now() > end) return best;
  detail::reorder_search<Lifetime> near(items, std::move(best_order), std::move(best_offsets), best.peak, limits.seed);
  while (!near.tired()) {
    if (near.place(placed)) take(near.found(), items.lower_bound);
    if (enough() || search::clock::now() > end) return best;
  }
  if (!few) return best;

  if (!neighbours) neighbours.emplace(items);
  search deep(items, *neighbours, limits.seed);
  typename search::series below_goal, half_way;
  const auto stop = [&] { return enough() || deep.nodes() >= limits.nodes || search::clock::now() > end; };
  for (std::uint64_t round = 1; !stop(); ++round) {
    const std::size_t goal = (std::max)(limits.target, best.lower_bound);
    const bool easy = round % 4 == 0 && best.peak - goal > items.unit;
    typename search::series& now = easy ? half_way : below_goal;
    const std::size_t capacity = easy ? goal + (best.peak - goal) / 2 : goal;
    if (now.capacity != capacity) now = {.capacity = capacity};
    for (int k = 0; k < 6 && !stop(); ++k) {  // each of the ways to rank, plain and learnt
      const std::uint64_t nodes = (std::min)(1000 * detail::luby(round), limits.nodes - deep.nodes());
      const auto result = deep.run(now, nodes, end);
      if (result == search::outcome::found) take(deep.found(), best.lower_bound);
      if (result == search::outcome::none) {  // no plan has a peak of `capacity` or less
        best.lower_bound = (std::min)(best.peak, (capacity / items.unit + 1) * items.unit);
      }
      if (result != search::outcome::unknown) break;
    }
  }
  return best;
}

/// @brief The same, without reports.
template <class Lifetime = lifetime>
memory_plan search_plan(std::span<const Lifetime> lifetimes, const search_limits& limits = {}) {
  return search_plan(lifetimes, limits, [](const memory_plan&) {});
}

}  // namespace v0
}  // namespace heddle

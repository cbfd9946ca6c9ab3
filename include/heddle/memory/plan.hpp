// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/memory/detail/plan_items.hpp>
#include <heddle/memory/lifetime.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief Offsets for a list of lifetimes, so that no two that are live at once share a byte.
struct memory_plan {
  std::vector<std::size_t> offsets;  ///< Of each lifetime, in bytes, in the order they were given.
  std::size_t peak = 0;              ///< Bytes that the block behind all of them must have.
  std::size_t lower_bound = 0;       ///< No plan has a lower peak than this.

  /// Whether no better plan exists.
  constexpr bool optimal() const noexcept { return peak == lower_bound; }
  /// peak / lower_bound - 1; 0 where both are 0.
  constexpr double gap() const noexcept {
    return lower_bound ? static_cast<double>(peak) / static_cast<double>(lower_bound) - 1.0 : 0.0;
  }
};

/// @brief In which order a greedy planner places lifetimes; each is put as low as it fits among those placed before.
enum class placement {
  by_bytes,     ///< Largest first; best for training steps.
  by_area,      ///< Largest bytes times duration first.
  by_duration,  ///< Longest first.
  by_load,      ///< First those that are live when most is, of these the largest areas.
  by_birth      ///< Earliest first, as an allocator meets them.
};

/// @brief Every order there is.
inline constexpr placement placements[] = {placement::by_bytes, placement::by_area, placement::by_duration,
                                           placement::by_load, placement::by_birth};

/// @brief Places lifetimes one after the other, each at the lowest offset that is free while it lives.
///
/// @code{.cpp}
/// constexpr hd::lifetime step[] = {{0, 2, 400}, {1, 3, 600}, {2, 4, 400}};
/// static_assert(hd::plan_greedy(step).peak == 1000);
/// @endcode
///
/// Traffic: n^2 / 2 interval tests for n lifetimes, about a nanosecond each. `constexpr`: with g++'s default limits up
///          to some 450 lifetimes, with nvcc's up to 300.
/// Throws:  argument_error for a lifetime that ends before it begins, or an alignment that is no power of two;
///          memory_error where the sizes sum to more than PTRDIFF_MAX.
template <class Lifetime = lifetime>
constexpr memory_plan plan_greedy(std::span<const Lifetime> lifetimes, placement order = placement::by_bytes) {
  const detail::plan_items<Lifetime> items(lifetimes);
  return detail::finished_plan<memory_plan>(items, detail::place_greedily(items, items.sorted(order)));
}

/// @brief The best of `plan_greedy` over all orders; at once, if one reaches the lower bound.
///
/// For a tighter plan within a time of your choice use `search_plan` (heddle/memory/search_plan.hpp).
/// Throws: as plan_greedy.
template <class Lifetime = lifetime> constexpr memory_plan plan_memory(std::span<const Lifetime> lifetimes) {
  const detail::plan_items<Lifetime> items(lifetimes);
  memory_plan best;
  for (const placement order : placements) {
    memory_plan p = detail::finished_plan<memory_plan>(items, detail::place_greedily(items, items.sorted(order)));
    if (best.offsets.empty() || p.peak < best.peak) best = std::move(p);
    if (best.optimal()) break;
  }
  return best;
}

/// @brief Whether the plan keeps every lifetime inside [0, peak), aligned, colocated, and apart from all others.
///
/// Independent of how the plan was made: compares every pair. Source: the definition.
template <class Lifetime = lifetime>
constexpr bool is_valid(const memory_plan& plan, std::span<const Lifetime> lifetimes) {
  if (plan.offsets.size() != lifetimes.size()) return false;
  for (std::size_t i = 0; i < lifetimes.size(); ++i) {
    const Lifetime& a = lifetimes[i];
    const std::size_t at = plan.offsets[i];
    if (a.bytes == 0 || a.first == a.last) continue;
    if (a.alignment == 0 || at % a.alignment != 0 || at > plan.peak || a.bytes > plan.peak - at) return false;
    for (std::size_t j = 0; j < i; ++j) {
      const Lifetime& b = lifetimes[j];
      const std::size_t there = plan.offsets[j];
      if (b.bytes == 0 || b.first == b.last) continue;
      if (a.group != no_group && a.group == b.group) {
        if (at != there) return false;
      } else if (a.first < b.last && b.first < a.last && at < there + b.bytes && there < at + a.bytes) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace v0
}  // namespace heddle

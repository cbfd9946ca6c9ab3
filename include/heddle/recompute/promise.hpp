// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/memory/lifetime.hpp>
#include <heddle/memory/search_plan.hpp>
#include <heddle/recompute/optimal.hpp>
#include <heddle/recompute/simulate.hpp>

#include <cstddef>
#include <span>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief When a chain that runs a schedule allocates what: moments are the numbers of its calls of the resource.
///
/// Throws:  as `simulate`.
template <class Schedule = schedule>
std::vector<lifetime> lifetimes(const Schedule& what, std::span<const layer_cost> costs, std::size_t alignment = 64) {
  std::vector<lifetime> all;
  std::vector<std::size_t> live(5 * costs.size());  // the lifetime of the block of a kind and layer
  std::size_t call = 0;
  const auto note = [&](std::size_t, detail::block_kind kind, std::size_t i, std::size_t bytes, bool taken) {
    std::size_t& mine = live[static_cast<std::size_t>(kind) * costs.size() + i];
    if (taken) {
      mine = all.size();
      all.push_back({call++, 0, bytes, alignment, no_group});
    } else {
      all[mine].last = call++;
    }
  };
  detail::rehearse<simulation>(what, costs, note);
  return all;
}

/// @brief Where every block of a schedule lies in one buffer: `peak` bytes are what the chain needs, fragmentation and
/// alignment included.
///
/// `planned::expect` makes a resource of it that answers a chain from a buffer of that size:
///
/// @code{.cpp}
/// auto blocks = heddle::recompute::lifetimes(c.plan(), c.costs());
/// auto placed = heddle::recompute::promise(c.plan(), c.costs());     // placed.peak bytes
/// memory.expect(blocks, placed);                                     // the chain's heddle::planned
/// @endcode
///
/// @param what A schedule. @param costs Of the layers. @param limits How long to search; by default only greedy plans.
/// Throws: as `simulate` and `search_plan`.
template <class Schedule = schedule>
memory_plan promise(const Schedule& what, std::span<const layer_cost> costs,
                    const search_limits& limits = {.seconds = 0}) {
  const std::vector<lifetime> all = lifetimes(what, costs);
  return search_plan(std::span<const lifetime>(all), limits);
}

/// @brief `optimal` for a budget in which the blocks must have their places: the promise, not the sum of sizes, fits.
///
/// Where the places that are found take more than the sum of sizes, it plans again with that much less; `every` and
/// `revolve` are tried last.
///
/// State:   at most `budget` bytes in one buffer.
/// Throws:  as `optimal`; the least budget that the error names is that of the sizes alone or, where these would fit
///          but no places were found, one byte more than was allowed.
struct placed {
  std::size_t budget = 0;                 ///< Bytes of the buffer.
  std::size_t resolution = 500;           ///< As in `optimal`.
  search_limits limits = {.seconds = 0};  ///< Of the search for places; by default only greedy.

  /// The schedule for these layers.
  template <class Schedule = schedule> Schedule plan(std::span<const layer_cost> costs) const {
    const auto fits = [&](const Schedule& s) { return promise(s, costs, limits).peak <= budget; };
    for (std::size_t room = budget;;) {
      Schedule s;
      try {
        s = optimal{room, resolution}.template plan<Schedule>(costs);
      } catch (const budget_error& e) {  // the leanest don't lie well: perhaps one of these does
        for (std::size_t k = 1; k <= 2 * costs.size() + 1; ++k) {
          s = k > costs.size() ? revolve{k - costs.size()}.template plan<Schedule>(costs)
                               : every{k}.template plan<Schedule>(costs);
          if (simulate(s, costs).peak_bytes <= budget && fits(s)) return s;
        }
        if (room == budget) throw;
        const std::size_t least = e.least() > budget ? e.least() : budget + 1;
        throw budget_error(budget, least, e.layer(), costs[e.layer()].name, e.layer_bytes());
      }
      if (fits(s)) return s;
      const std::size_t over = promise(s, costs, limits).peak - budget;
      room = (std::min)(room, simulate(s, costs).peak_bytes);
      room = room > over ? room - over : 0;
    }
  }
};

static_assert(policy<placed>);

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/lifetime.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

namespace detail {

// The moments at which something begins or ends cut time into sections; an item is a lifetime, or a group as one, over
// those sections in which it lives. What takes no room is no item.
template <class Lifetime> struct plan_items {
  using index = std::uint32_t;
  struct item {
    std::size_t bytes = 0, alignment = 1;
    index first = 0, last = 0;     // the sections from its birth to its death
    index runs = 0, runs_end = 0;  // where it lives in between, in `run_list`
    std::size_t duration = 0;      // moments
    std::size_t load = 0;          // bytes live at its busiest section
  };
  struct run {
    index first, last;
  };

  std::vector<item> list;
  std::vector<run> run_list;
  std::vector<index> item_of;     // of each lifetime; `none` for those that take no room
  std::vector<std::size_t> load;  // bytes live in each section
  std::size_t lower_bound = 0;
  std::size_t unit = 0;  // divides every peak worth considering
  static constexpr index none = ~index{0};

  constexpr explicit plan_items(std::span<const Lifetime> lifetimes) : item_of(lifetimes.size(), none) {
    std::vector<std::size_t> moments;
    std::vector<std::pair<std::size_t, index>> order;  // by group, then by birth
    std::size_t total = 0;
    for (std::size_t i = 0; i < lifetimes.size(); ++i) {
      const Lifetime& x = lifetimes[i];
      check(x, i, total);
      if (x.bytes == 0 || x.first == x.last) continue;
      moments.push_back(x.first);
      moments.push_back(x.last);
      order.push_back({x.group, static_cast<index>(i)});
    }
    std::sort(moments.begin(), moments.end());
    moments.erase(std::unique(moments.begin(), moments.end()), moments.end());
    const auto section = [&](std::size_t moment) {
      return static_cast<index>(std::lower_bound(moments.begin(), moments.end(), moment) - moments.begin());
    };
    std::sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
      if (a.first != b.first && (a.first != no_group || b.first != no_group)) return a.first < b.first;
      const Lifetime &x = lifetimes[a.second], &y = lifetimes[b.second];
      return x.first != y.first ? x.first < y.first : a.second < b.second;
    });
    load.assign(moments.size(), 0);
    for (std::size_t k = 0; k < order.size();) {
      item made;
      made.runs = static_cast<index>(run_list.size());
      const std::size_t group = order[k].first;
      do {  // the members of a group, in order of birth; where they touch they are one run
        const Lifetime& x = lifetimes[order[k].second];
        const run r{section(x.first), section(x.last)};
        if (run_list.size() > made.runs && r.first <= run_list.back().last) {
          run_list.back().last = (std::max)(run_list.back().last, r.last);
        } else {
          run_list.push_back(r);
        }
        made.bytes = (std::max)(made.bytes, x.bytes);
        made.alignment = (std::max)(made.alignment, x.alignment);
        item_of[order[k].second] = static_cast<index>(list.size());
        ++k;
      } while (k < order.size() && group != no_group && order[k].first == group);
      made.runs_end = static_cast<index>(run_list.size());
      made.first = run_list[made.runs].first;
      made.last = run_list.back().last;
      for (index r = made.runs; r < made.runs_end; ++r) {
        made.duration += moments[run_list[r].last] - moments[run_list[r].first];
        for (index s = run_list[r].first; s < run_list[r].last; ++s) load[s] += made.bytes;
      }
      unit = divisor(divisor(unit, made.bytes), made.alignment);
      list.push_back(made);
    }
    for (item& x : list) {
      for (index r = x.runs; r < x.runs_end; ++r) {
        for (index s = run_list[r].first; s < run_list[r].last; ++s) x.load = (std::max)(x.load, load[s]);
      }
    }
    for (const std::size_t bytes : load) lower_bound = (std::max)(lower_bound, bytes);
  }

  // Whether both live in some section.
  constexpr bool meet(const item& a, const item& b) const {
    if (a.first >= b.last || b.first >= a.last) return false;
    if (a.runs_end - a.runs == 1 && b.runs_end - b.runs == 1) return true;
    for (index i = a.runs; i < a.runs_end; ++i) {
      for (index j = b.runs; j < b.runs_end; ++j) {
        if (run_list[i].first < run_list[j].last && run_list[j].first < run_list[i].last) return true;
      }
    }
    return false;
  }

  // All items in the order of a greedy planner; ties by birth, then as they were given.
  template <class Placement> constexpr std::vector<index> sorted(Placement order) const {
    std::vector<index> out(list.size());
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<index>(i);
    const auto area = [](const item& x) { return static_cast<double>(x.bytes) * static_cast<double>(x.duration); };
    std::sort(out.begin(), out.end(), [&](index i, index j) {
      const item &a = list[i], &b = list[j];
      if (order == Placement::by_bytes && a.bytes != b.bytes) return a.bytes > b.bytes;
      if (order == Placement::by_load && a.load != b.load) return a.load > b.load;
      if ((order == Placement::by_area || order == Placement::by_load) && area(a) != area(b)) return area(a) > area(b);
      if (order == Placement::by_duration && a.duration != b.duration) return a.duration > b.duration;
      return a.first != b.first ? a.first < b.first : i < j;
    });
    return out;
  }

  // The offsets of lifetimes from those of items.
  constexpr std::vector<std::size_t> spread(const std::vector<std::size_t>& offsets) const {
    std::vector<std::size_t> out(item_of.size(), 0);
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (item_of[i] != none) out[i] = offsets[item_of[i]];
    }
    return out;
  }

 private:
  static constexpr void check(const Lifetime& x, std::size_t i, std::size_t& total) {
    if (x.last < x.first) {
      throw argument_error("heddle::lifetime " + std::to_string(i) + ": it ends at " + std::to_string(x.last) +
                           ", before it begins at " + std::to_string(x.first));
    }
    if (x.alignment == 0 || (x.alignment & (x.alignment - 1)) != 0) {
      throw argument_error("heddle::lifetime " + std::to_string(i) + ": alignment is " + std::to_string(x.alignment) +
                           ", allowed is a power of two");
    }
    constexpr auto most = static_cast<std::size_t>(PTRDIFF_MAX);
    if (x.bytes > most || x.alignment > most || x.bytes + x.alignment > most - total) {
      throw memory_error("lifetime " + std::to_string(i), x.bytes, most, total, most - total);
    }
    total += x.bytes + x.alignment;
  }

  static constexpr std::size_t divisor(std::size_t a, std::size_t b) {
    while (b) a = std::exchange(b, a % b);
    return a;
  }
};

constexpr std::size_t aligned_up(std::size_t at, std::size_t alignment) noexcept {
  return (at + alignment - 1) & ~(alignment - 1);
}

// Each item in the given order at the lowest offset that is free while it lives; the offset of each item.
template <class Lifetime, class Index>
constexpr std::vector<std::size_t> place_greedily(const plan_items<Lifetime>& items, const std::vector<Index>& order) {
  using item = typename plan_items<Lifetime>::item;
  struct placed {
    std::size_t begin, end;
    Index first, last, which;
  };
  std::vector<placed> done;  // by offset
  done.reserve(order.size());
  std::vector<std::size_t> offsets(items.list.size(), 0);
  for (const Index i : order) {
    const item& x = items.list[i];
    const bool simple = x.runs_end - x.runs == 1;
    std::size_t at = 0;
    for (const placed& p : done) {
      if (p.end <= at || p.first >= x.last || x.first >= p.last) continue;
      const item& other = items.list[p.which];
      if (!(simple && other.runs_end - other.runs == 1) && !items.meet(x, other)) continue;
      if (p.begin >= at + x.bytes) break;
      at = aligned_up(p.end, x.alignment);
    }
    offsets[i] = at;
    const placed mine{at, at + x.bytes, x.first, x.last, i};
    done.insert(
        std::lower_bound(done.begin(), done.end(), at, [](const placed& p, std::size_t o) { return p.begin < o; }),
        mine);
  }
  return offsets;
}

// The plan that these offsets of items are.
template <class Plan, class Lifetime>
constexpr Plan finished_plan(const plan_items<Lifetime>& items, const std::vector<std::size_t>& offsets) {
  Plan p{items.spread(offsets), 0, items.lower_bound};
  for (std::size_t i = 0; i < offsets.size(); ++i) p.peak = (std::max)(p.peak, offsets[i] + items.list[i].bytes);
  return p;
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/philox.hpp>
#include <heddle/memory/detail/neighbour_placer.hpp>
#include <heddle/memory/detail/plan_items.hpp>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Looks for offsets below a capacity, depth first. Items are placed in the order of their offsets, each resting on
// what lies below it, so that every arrangement is met once. What it knows at a node:
//
//   rest[i]  the lowest offset that what is already placed leaves to item i
//   open[s]  bytes of the items that live in section s and aren't placed
//
// It gives a node up when, in some section, the lowest rest plus what is open there exceeds the capacity. It doesn't
// try an item where another one would still fit below it. An item that is in nobody's way where it rests is placed at
// once, without alternatives. Where no open item crosses a moment, both sides are solved apart.
//
// Which item comes first among those that rest equally low is the `rank`. A search that doesn't end soon is given up
// and begun anew with other ranks; items that were open where a capacity was exceeded come earlier then.
// Source: the search of MiniMalloc (Moffitt, ASPLOS 2023) for the canonical order, the partition into parts and two
// of the prunings; restarts and learnt ranks are ours.
template <class Lifetime> class offset_search {
  using items_type = plan_items<Lifetime>;
  using index = typename items_type::index;

 public:
  enum class outcome { found, none, unknown };
  using clock = std::chrono::steady_clock;

  offset_search(const items_type& items, const plan_neighbours<Lifetime>& neighbours, std::uint64_t seed)
      : items_(items),
        neighbours_(neighbours),
        seed_(seed),
        offsets_(items.list.size()),
        rest_(items.list.size()),
        placed_(items.list.size()),
        open_(items.load),
        suspects_(items.load.size()),
        rank_(items.list.size()) {
    const std::size_t n = items.list.size();
    by_birth_.resize(n);
    for (std::size_t i = 0; i < n; ++i) by_birth_[i] = static_cast<index>(i);
    std::sort(by_birth_.begin(), by_birth_.end(),
              [&](index a, index b) { return items_.list[a].first < items_.list[b].first; });
    living_begin_.assign(items.load.size() + 1, 0);
    for (std::size_t i = 0; i < n; ++i) each_section(static_cast<index>(i), [&](index s) { ++living_begin_[s + 1]; });
    for (std::size_t s = 0; s < items.load.size(); ++s) {
      living_begin_[s + 1] += living_begin_[s];
      suspects_[s] = static_cast<index>(s);
    }
    living_.resize(living_begin_.back());
    std::vector<std::size_t> next(living_begin_);
    for (std::size_t i = 0; i < n; ++i) {
      each_section(static_cast<index>(i), [&](index s) { living_[next[s]++] = static_cast<index>(i); });
    }
  }

  // A series of searches below one capacity: what is learnt is of no use for another.
  struct series {
    std::size_t capacity = 0;
    std::uint32_t attempts = 0;
    std::vector<double> blame = {};  // how often each item was open where the capacity was exceeded
  };

  // The next search of a series, of at most `nodes` nodes, until `end`.
  outcome run(series& of, std::uint64_t nodes, clock::time_point end) {
    capacity_ = of.capacity;
    of.blame.resize(items_.list.size());
    blame_ = of.blame.data();
    nodes_left_ = nodes;
    end_ = end;
    stopped_ = false;
    choose_ranks(of.attempts++);
    arena_.assign(by_birth_.begin(), by_birth_.end());
    const bool good = solve(0, arena_.size(), 0, -1);
    take_back(0);
    return good ? outcome::found : stopped_ ? outcome::unknown : outcome::none;
  }

  // The offset of each item, where the last run() found them.
  const std::vector<std::size_t>& found() const noexcept { return offsets_; }
  // Nodes visited by all runs.
  std::uint64_t nodes() const noexcept { return visited_; }

 private:
  struct change {
    index item;
    bool placing;
    std::size_t before;  // its rest
  };

  // Durations, areas and loads are compared in three orders; after the first three attempts their logarithms are
  // disturbed, and every second three attempts add how often an item was open where it didn't fit.
  void choose_ranks(std::uint32_t attempt) {
    const std::size_t n = items_.list.size();
    const bool disturbed = attempt >= 3, learnt = disturbed && attempt / 3 % 2 == 1;
    double most = 1e-9;
    for (std::size_t i = 0; i < n; ++i) most = (std::max)(most, blame_[i]);
    struct keys {
      double key[3];
    };
    std::vector<keys> all(n);
    for (std::size_t i = 0; i < n; ++i) {
      const auto& x = items_.list[i];
      const double duration = std::log(static_cast<double>(x.duration)),
                   area = duration + std::log(static_cast<double>(x.bytes)),
                   load = std::log(static_cast<double>(x.load));
      const double orders[3][3] = {{duration, area, load}, {load, area, duration}, {load, duration, area}};
      for (int k = 0; k < 3; ++k) {
        double v = orders[attempt % 3][k];
        if (disturbed) v += (learnt ? 0.05 : 0.1) * random_normal(seed_, attempt, 3 * i + static_cast<unsigned>(k));
        if (learnt) v += std::log(1e-3 + blame_[i] / most);
        all[i].key[k] = v;
      }
    }
    std::vector<index> order(by_birth_);
    std::sort(order.begin(), order.end(), [&](index i, index j) {
      for (int k = 0; k < 3; ++k) {
        if (all[i].key[k] != all[j].key[k]) return all[i].key[k] > all[j].key[k];
      }
      return i < j;
    });
    for (std::size_t r = 0; r < n; ++r) rank_[order[r]] = static_cast<std::int64_t>(r);
  }

  template <class Function> void each_section(index i, Function&& f) {
    const auto& x = items_.list[i];
    for (index r = x.runs; r < x.runs_end; ++r) {
      for (index s = items_.run_list[r].first; s < items_.run_list[r].last; ++s) f(s);
    }
  }

  std::size_t top(index i) const { return rest_[i] + items_.list[i].bytes; }

  // Places an item where it rests and lifts its neighbours; whether all of them still fit.
  bool place(index i) {
    const std::size_t end = top(i);
    bool fits = end <= capacity_;
    offsets_[i] = rest_[i];
    placed_[i] = 1;
    changes_.push_back({i, true, 0});
    each_section(i, [&](index s) { open_[s] -= items_.list[i].bytes; });
    for (const index j : neighbours_.of(i)) {
      if (placed_[j] || rest_[j] >= end) continue;
      changes_.push_back({j, false, rest_[j]});
      rest_[j] = aligned_up(end, items_.list[j].alignment);
      fits = fits && top(j) <= capacity_;
    }
    return fits;
  }

  void take_back(std::size_t mark) {
    while (changes_.size() > mark) {
      const change c = changes_.back();
      changes_.pop_back();
      if (c.placing) {
        placed_[c.item] = 0;
        each_section(c.item, [&](index s) { open_[s] += items_.list[c.item].bytes; });
      } else {
        rest_[c.item] = c.before;
      }
    }
  }

  // Whether it is in nobody's way where it rests.
  bool is_free(index i) const {
    const std::size_t end = top(i);
    for (const index j : neighbours_.of(i)) {
      if (!placed_[j] && rest_[j] < end) return false;
    }
    return true;
  }

  // Solves for the items arena_[begin, end), in order of birth; the last one placed among them lies at `floor` and has
  // rank `last`. Leaves the arena as long as it was; takes its placements back unless it succeeds.
  bool solve(std::size_t begin, std::size_t end, std::size_t floor, std::int64_t last) {
    const std::size_t mark = changes_.size(), top_of_arena = arena_.size();
    const bool good = try_all(begin, end, floor, last);
    if (!good) take_back(mark);
    arena_.resize(top_of_arena);
    return good;
  }

  // Whether what is open in the section can't fit any more.
  bool overflows(index s, std::size_t floor) const {
    if (open_[s] == 0) return false;
    std::size_t low = capacity_;
    for (std::size_t k = living_begin_[s]; k < living_begin_[s + 1]; ++k) {
      const index i = living_[k];
      if (!placed_[i] && rest_[i] < low) low = rest_[i];
    }
    return (std::max)(low, floor) + open_[s] > capacity_;
  }

  // Notes who is to blame, and that the section is worth a look the next time.
  void overflowed(std::size_t suspect) {
    const index s = suspects_[suspect];
    for (std::size_t k = living_begin_[s]; k < living_begin_[s + 1]; ++k) {
      if (!placed_[living_[k]]) blame_[living_[k]] += 1;
    }
    std::rotate(suspects_.begin(), suspects_.begin() + static_cast<std::ptrdiff_t>(suspect),
                suspects_.begin() + static_cast<std::ptrdiff_t>(suspect) + 1);
  }

  bool try_all(std::size_t begin, std::size_t end, std::size_t floor, std::int64_t last) {
    if (begin == end) return true;
    ++visited_;
    if (nodes_left_-- == 0 || (visited_ % 64 == 0 && clock::now() > end_)) stopped_ = true;
    if (stopped_) return false;
    const index from = items_.list[arena_[begin]].first;
    index to = 0;
    for (std::size_t k = begin; k < end; ++k) to = (std::max)(to, items_.list[arena_[k]].last);
    for (std::size_t k = 0; k < suspects_.size(); ++k) {
      const index s = suspects_[k];  // other parts have floors of their own
      if (s < from || s >= to || !overflows(s, floor)) continue;
      overflowed(k);
      return false;
    }
    for (bool again = true; again;) {
      again = false;
      std::size_t kept = begin;
      for (std::size_t k = begin; k < end; ++k) {
        if (is_free(arena_[k])) {
          place(arena_[k]);
          again = true;
        } else {
          arena_[kept++] = arena_[k];
        }
      }
      end = kept;
    }
    if (begin == end) return true;
    // Parts that share no moment.
    index reach = items_.list[arena_[begin]].last;
    for (std::size_t k = begin + 1; k < end; ++k) {
      const auto& x = items_.list[arena_[k]];
      if (x.first >= reach) return solve_copy(begin, k, floor, last) && solve_copy(k, end, floor, last);
      reach = (std::max)(reach, x.last);
    }

    std::size_t lowest_top = capacity_;
    for (std::size_t k = begin; k < end; ++k) lowest_top = (std::min)(lowest_top, top(arena_[k]));
    const std::size_t first_choice = arena_.size();
    for (std::size_t k = begin; k < end; ++k) {
      const index i = arena_[k];
      if (rest_[i] < lowest_top && (rest_[i] > floor || (rest_[i] == floor && rank_[i] > last))) arena_.push_back(i);
    }
    const std::size_t choices_end = arena_.size();
    std::sort(arena_.begin() + static_cast<std::ptrdiff_t>(first_choice), arena_.end(),
              [&](index a, index b) { return rest_[a] != rest_[b] ? rest_[a] < rest_[b] : rank_[a] < rank_[b]; });
    for (std::size_t c = first_choice; c < choices_end && !stopped_; ++c) {
      const index i = arena_[c];
      const std::size_t mark = changes_.size(), at = rest_[i];
      if (place(i)) {
        const std::size_t others = arena_.size();
        for (std::size_t k = begin; k < end; ++k) {
          if (arena_[k] != i) arena_.push_back(arena_[k]);
        }
        if (solve(others, arena_.size(), at, rank_[i])) return true;
        arena_.resize(others);
      }
      take_back(mark);
    }
    return false;
  }

  bool solve_copy(std::size_t begin, std::size_t end, std::size_t floor, std::int64_t last) {
    const std::size_t from = arena_.size();
    for (std::size_t k = begin; k < end; ++k) arena_.push_back(arena_[k]);
    const bool good = solve(from, arena_.size(), floor, last);
    arena_.resize(from);
    return good;
  }

  const items_type& items_;
  const plan_neighbours<Lifetime>& neighbours_;
  std::uint64_t seed_;
  std::size_t capacity_ = 0;
  std::uint64_t nodes_left_ = 0, visited_ = 0;
  clock::time_point end_;
  bool stopped_ = false;
  std::vector<index> by_birth_, living_, arena_;
  std::vector<std::size_t> living_begin_, offsets_, rest_;
  std::vector<unsigned char> placed_;
  std::vector<std::size_t> open_;
  std::vector<index> suspects_;  // all sections, those that overflowed last first
  std::vector<std::int64_t> rank_;
  double* blame_ = nullptr;
  std::vector<change> changes_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/memory/detail/plan_items.hpp>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// How many pairs of items are live together; of groups from their first to their last moment.
template <class Lifetime> std::size_t overlaps(const plan_items<Lifetime>& items) {
  std::vector<typename plan_items<Lifetime>::index> births, deaths;
  for (const auto& x : items.list) {
    births.push_back(x.first);
    deaths.push_back(x.last);
  }
  std::sort(births.begin(), births.end());
  std::sort(deaths.begin(), deaths.end());
  std::size_t pairs = 0, dead = 0;
  for (std::size_t born = 0; born < births.size(); ++born) {
    while (dead < deaths.size() && deaths[dead] <= births[born]) ++dead;
    pairs += born - dead;
  }
  return pairs;
}

// Which items are live together. Most steps have far fewer pairs than n^2 / 2.
template <class Lifetime> class plan_neighbours {
 public:
  using index = typename plan_items<Lifetime>::index;

  explicit plan_neighbours(const plan_items<Lifetime>& items) : begin_(items.list.size() + 1, 0) {
    std::vector<index> by_birth(items.list.size());
    std::iota(by_birth.begin(), by_birth.end(), index{0});
    std::sort(by_birth.begin(), by_birth.end(),
              [&](index a, index b) { return items.list[a].first < items.list[b].first; });
    std::vector<index> live;
    std::vector<std::pair<index, index>> pairs;
    for (const index i : by_birth) {
      const auto& x = items.list[i];
      std::erase_if(live, [&](index j) { return items.list[j].last <= x.first; });
      for (const index j : live) {
        if (!items.meet(x, items.list[j])) continue;
        pairs.emplace_back(i, j);
        ++begin_[i + 1];
        ++begin_[j + 1];
      }
      live.push_back(i);
    }
    for (std::size_t i = 1; i < begin_.size(); ++i) begin_[i] += begin_[i - 1];
    all_.resize(begin_.back());
    std::vector<std::size_t> next(begin_);
    for (const auto& [i, j] : pairs) {
      all_[next[i]++] = j;
      all_[next[j]++] = i;
    }
  }

  std::span<const index> of(index i) const noexcept { return {all_.data() + begin_[i], begin_[i + 1] - begin_[i]}; }

 private:
  std::vector<std::size_t> begin_;
  std::vector<index> all_;
};

// As place_greedily, but looks at neighbours alone.
template <class Lifetime> class neighbour_placer {
 public:
  using index = typename plan_items<Lifetime>::index;

  neighbour_placer(const plan_items<Lifetime>& items, const plan_neighbours<Lifetime>& neighbours)
      : items_(items), neighbours_(neighbours), placed_(items.list.size()) {}

  std::vector<std::size_t> operator()(const std::vector<index>& order) {
    std::vector<std::size_t> offsets(items_.list.size(), 0);
    placed_.assign(placed_.size(), 0);
    for (const index i : order) {
      const auto& x = items_.list[i];
      below_.clear();
      for (const index j : neighbours_.of(i)) {
        if (placed_[j]) below_.emplace_back(offsets[j], offsets[j] + items_.list[j].bytes);
      }
      std::sort(below_.begin(), below_.end());
      std::size_t at = 0;
      for (const auto& [begin, end] : below_) {
        if (end <= at) continue;
        if (begin >= at + x.bytes) break;
        at = aligned_up(end, x.alignment);
      }
      offsets[i] = at;
      placed_[i] = 1;
    }
    return offsets;
  }

 private:
  const plan_items<Lifetime>& items_;
  const plan_neighbours<Lifetime>& neighbours_;
  std::vector<unsigned char> placed_;
  std::vector<std::pair<std::size_t, std::size_t>> below_;  // where neighbours that are placed begin and end
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

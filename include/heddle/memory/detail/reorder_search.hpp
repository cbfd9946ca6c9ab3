// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/philox.hpp>
#include <heddle/memory/detail/plan_items.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Greedy placement in one order after another: what came to lie high goes nearer to the front the next time ("squeaky
// wheel" optimization, Joslin and Clements 1999). Finds what is out of a branch-and-bound search's reach where buffers
// are many and unlike each other; knows no bound.
template <class Lifetime> class reorder_search {
 public:
  using index = typename plan_items<Lifetime>::index;

  // From an order with the offsets that it gives, and its peak.
  reorder_search(const plan_items<Lifetime>& items, std::vector<index> order, std::vector<std::size_t> offsets,
                 std::size_t peak, std::uint64_t seed)
      : items_(items),
        order_(order),
        best_order_(std::move(order)),
        found_(std::move(offsets)),
        peak_(peak),
        seed_(seed) {
    reorder();
  }

  // One placement, by placed(order); whether its peak is the lowest so far.
  template <class Place> bool place(Place&& placed) {
    found_ = placed(order_);
    std::size_t peak = 0;
    for (std::size_t i = 0; i < found_.size(); ++i) peak = (std::max)(peak, found_[i] + items_.list[i].bytes);
    const bool better = peak < peak_;
    if (better) {
      peak_ = peak;
      best_order_ = order_;
    }
    idle_ = better ? 0 : idle_ + 1;
    reorder();
    return better;
  }

  // The offsets of the last placement.
  const std::vector<std::size_t>& found() const noexcept { return found_; }
  // Whether it hasn't come forward for long.
  bool tired() const noexcept { return idle_ >= 200; }

 private:
  void reorder() {
    ++round_;
    if (round_ % 50 == 0) {  // astray
      order_ = best_order_;
      return;
    }
    const std::size_t high = items_.lower_bound + (peak_ - items_.lower_bound) / 2;
    const double n = static_cast<double>(order_.size());
    std::vector<std::pair<double, index>> places(order_.size());
    for (std::size_t k = 0; k < order_.size(); ++k) {
      const index i = order_[k];
      double place = static_cast<double>(k);
      const double steps = round_ == 1 ? 1.0 : 0.05 + 0.2 * random_uniform(seed_, round_, i);
      if (found_[i] + items_.list[i].bytes > high) place -= n * steps;  // the first time to the very front
      places[k] = {place, i};
    }
    std::sort(places.begin(), places.end());
    for (std::size_t k = 0; k < places.size(); ++k) order_[k] = places[k].second;
  }

  const plan_items<Lifetime>& items_;
  std::vector<index> order_, best_order_;
  std::vector<std::size_t> found_;
  std::size_t peak_;
  std::uint64_t seed_, round_ = 0;
  unsigned idle_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/table/concept.hpp>
#include <heddle/table/detail/mix.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// One key of a batch on its way through the table.
struct batch_entry {
  std::uint64_t mixed;
  std::uint32_t item;  // index of its gradient: the caller's, or n + that of a sum
  std::uint32_t row;   // record in its shard
};

// Working memory of one batch, kept for the next one.
class batch {
 public:
  std::vector<batch_entry> entries;  // in the caller's order, then by shard
  std::vector<float> sums;           // summed or edited gradients, `dim` each
  std::vector<sighting> seen;        // of each sum

  std::size_t bytes() const noexcept {
    return (entries.capacity() + sorted_.capacity()) * sizeof(batch_entry) + sums.capacity() * sizeof(float) +
           seen.capacity() * sizeof(sighting) + (starts_.capacity() + heads_.capacity()) * sizeof(std::uint32_t);
  }

  // Brings entries of one shard together, shards in ascending order, each one's in the order of the batch.
  void sort_by_shard(unsigned shard_bits) {
    const std::size_t shards = std::size_t{1} << shard_bits, n = entries.size();
    if (n < 2) return;
    if (n < shards / 16) {
      std::stable_sort(entries.begin(), entries.end(), [&](const batch_entry& a, const batch_entry& b) {
        return shard_of(a.mixed, shard_bits) < shard_of(b.mixed, shard_bits);
      });
      return;
    }
    starts_.assign(shards, 0);
    for (const batch_entry& e : entries) ++starts_[shard_of(e.mixed, shard_bits)];
    std::uint32_t sum = 0;
    for (std::uint32_t& s : starts_) sum += std::exchange(s, sum);
    sorted_.resize(n);
    for (const batch_entry& e : entries) sorted_[starts_[shard_of(e.mixed, shard_bits)]++] = e;
    entries.swap(sorted_);
  }

  // Leaves one entry of each key, where it was first met. Gradients of keys met more than once are summed in the order
  // of the batch. gradient(item) and sight(item) give an entry's own; `first_sum` is the item of sums[0].
  template <class Gradient, class Sight>
  void merge(std::size_t dim, std::uint32_t first_sum, Gradient gradient, Sight sight) {
    const std::size_t n = entries.size();
    std::size_t slots = 16;
    while (slots < 2 * n) slots *= 2;
    heads_.assign(slots, 0);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const batch_entry e = entries[i];
      std::size_t at = e.mixed & (slots - 1);
      while (heads_[at] != 0 && entries[heads_[at] - 1].mixed != e.mixed) at = (at + 1) & (slots - 1);
      if (heads_[at] == 0) {
        entries[kept] = e;
        heads_[at] = static_cast<std::uint32_t>(++kept);
        continue;
      }
      batch_entry& first = entries[heads_[at] - 1];
      if (first.item < first_sum) {
        const float* const g = gradient(first.item);
        sums.insert(sums.end(), g, g + dim);
        seen.push_back(sight(first.item));
        first.item = first_sum + static_cast<std::uint32_t>(seen.size() - 1);
      }
      const std::size_t k = first.item - first_sum;
      float* const sum = sums.data() + k * dim;
      const float* const more = gradient(e.item);
      for (std::size_t c = 0; c < dim; ++c) sum[c] += more[c];
      const sighting s = sight(e.item);
      seen[k].times += s.times;
      seen[k].show += s.show;
      seen[k].click += s.click;
    }
    entries.resize(kept);
  }

 private:
  std::vector<batch_entry> sorted_;
  std::vector<std::uint32_t> starts_, heads_;
};

// Leaves out, or edits, gradients that the guard doesn't like; returns how many. An edited one becomes a sum.
// gradient(item), sight(item): an entry's own.
template <std::size_t Dim, class Guard, class Gradient, class Sight>
std::size_t guard_batch(const Guard& guard, batch& b, std::uint32_t first_sum, Gradient gradient, Sight sight) {
  std::size_t bad = 0;
  const auto good = [&](batch_entry& e) {
    if constexpr (Guard::edits) {
      float g[Dim];
      std::memcpy(g, gradient(e.item), sizeof g);
      if (guard.template check<Dim>(g)) return true;
      ++bad;
      b.seen.push_back(sight(e.item));
      b.sums.insert(b.sums.end(), g, g + Dim);
      e.item = first_sum + static_cast<std::uint32_t>(b.seen.size() - 1);
      return true;
    } else {
      if (guard.template check<Dim>(gradient(e.item))) return true;
      if constexpr (Guard::throws)
        throw argument_error("heddle::sparse_table: push: the gradient of item " + std::to_string(e.item) +
                             " isn't finite");
      ++bad;
      return false;
    }
  };
  std::size_t kept = 0;
  for (std::size_t i = 0; i < b.entries.size(); ++i) {
    batch_entry e = b.entries[i];
    if (good(e)) b.entries[kept++] = e;
  }
  b.entries.resize(kept);
  return bad;
}

// Leaves out entries, from item `first` on, whose gradients aren't finite: sums of finite ones that overflowed. Returns
// how many. `finite`: a guard.
template <std::size_t Dim, bool Throws, class Finite, class Gradient>
std::size_t drop_overflows(batch& b, std::uint32_t first, const Finite& finite, Gradient gradient) {
  return std::erase_if(b.entries, [&](const batch_entry& e) {
    if (e.item < first || finite.template check<Dim>(gradient(e.item))) return false;
    if constexpr (Throws)
      throw argument_error("heddle::sparse_table: push: the sum of the gradients of a key isn't finite");
    return true;
  });
}

// Batches' working memories: one for each call that is under way.
class batch_pool {
 public:
  std::unique_ptr<batch> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      free_.reserve(++made_);
      return std::make_unique<batch>();
    }
    std::unique_ptr<batch> b = std::move(free_.back());
    free_.pop_back();
    return b;
  }
  void give(std::unique_ptr<batch> b) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(b));
  }
  std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    std::size_t sum = 0;
    for (const auto& b : free_) sum += b->bytes();
    return sum;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<batch>> free_;
  std::size_t made_ = 0;
};

// One of them, for as long as this lives.
class borrowed_batch {
 public:
  explicit borrowed_batch(batch_pool& p) : pool_(p), batch_(p.take()) {
    batch_->entries.clear();
    batch_->sums.clear();
    batch_->seen.clear();
  }
  borrowed_batch(const borrowed_batch&) = delete;
  borrowed_batch& operator=(const borrowed_batch&) = delete;
  ~borrowed_batch() { pool_.give(std::move(batch_)); }
  batch& operator*() const noexcept { return *batch_; }
  batch* operator->() const noexcept { return batch_.get(); }

 private:
  batch_pool& pool_;
  std::unique_ptr<batch> batch_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

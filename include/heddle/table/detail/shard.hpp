// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/concept.hpp>
#include <heddle/table/detail/row_layout.hpp>
#include <heddle/table/detail/row_store.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// What a change of a worker has done to a shard whose server keeps saves, until it is known that the worker knows.
struct change_outcome {
  std::uint64_t worker, object, command;  // whose; of its sharded_table; the command that asks
  std::uint64_t rows;                     // that went
  std::vector<std::uint64_t> keys;        // of those, where they are asked for
};

// A virtual shard: what its lock protects.
template <class Layout, class Admission> struct alignas(64) shard {
  using store = row_store<Layout::bytes>;

  spin_lock lock;
  store rows;
  std::uint64_t steps = 0;                                      // updates of rows: the counter of random rounding
  [[no_unique_address]] typename Admission::state refused;      // what the admission remembers
  std::vector<std::uint64_t> applied;                           // the last sequence of each worker
  std::vector<std::pair<std::uint64_t, std::uint32_t>> erased;  // mixed keys since the last save, with their epoch
  std::uint32_t lost = 0;                                       // an erased key of this epoch was too many to keep
  std::vector<change_outcome> outcomes;

  std::uint64_t high_water(std::uint32_t worker) const noexcept {
    return worker < applied.size() ? applied[worker] : 0;
  }
  // Room for `raise`, which then doesn't throw.
  void prepare(std::uint32_t worker) {
    if (worker >= applied.size()) applied.resize(worker + 1);
  }
  void raise(std::uint32_t worker, std::uint64_t sequence) noexcept {
    if (applied[worker] < sequence) applied[worker] = sequence;
  }
  // Notes an erased key for the next delta: about as many keys as there were ever rows. If there are more, a delta
  // can't be saved any more.
  void note_erased(std::uint64_t mixed, std::uint32_t epoch) {
    const std::size_t most = std::size_t{rows.places()} + 64;
    if (erased.size() >= 2 * most) {
      std::sort(erased.begin(), erased.end(), std::greater<>());
      erased.erase(std::unique(erased.begin(), erased.end(), [](auto& a, auto& b) { return a.first == b.first; }),
                   erased.end());
      if (erased.size() > most) {
        for (const auto& e : erased) lost = (std::max)(lost, e.second);
        erased.clear();
      }
    }
    erased.emplace_back(mixed, epoch);
  }
  // If it has more rows than `most`: those of lowest rank, so many that seven eighths of `most` are left. Of equal rank
  // those of lower mixed keys go, since rows have other numbers after loading.
  template <class Eviction>
  std::vector<std::uint32_t> lowest(const Eviction& eviction, std::size_t most, std::uint32_t epoch) {
    std::vector<std::uint32_t> out;
    if (rows.size() <= most) return out;
    std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint32_t>> ranks;
    ranks.reserve(rows.size());
    rows.for_each([&](std::uint32_t row, std::byte* p) {
      const auto rank = Layout::judge(p, epoch, [&](std::uint32_t* w) { return eviction.rank(w, steps); });
      ranks.emplace_back(rank, rows.mixed(row), row);
    });
    const auto end = ranks.begin() + static_cast<std::ptrdiff_t>(ranks.size() - (most - most / 8));
    std::nth_element(ranks.begin(), end - 1, ranks.end());
    std::sort(ranks.begin(), end);
    for (auto r = ranks.begin(); r != end; ++r) out.push_back(std::get<2>(*r));
    return out;
  }
  std::size_t bytes() const noexcept {
    std::size_t sum = refused.bytes() + applied.capacity() * 8 + erased.capacity() * sizeof(erased[0]) +
                      outcomes.capacity() * sizeof(change_outcome);
    for (const change_outcome& o : outcomes) sum += o.keys.capacity() * 8;
    return sum;
  }
};

// All shards of a table, and the memory that their rows are in.
template <class Shard> struct held_shards {
  explicit held_shards(std::size_t n) : shards(n) {}
  slabs memory;
  std::vector<Shard> shards;  // never resized
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

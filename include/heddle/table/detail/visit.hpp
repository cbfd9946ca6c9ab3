// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/detail/batch.hpp>

#include <span>

namespace heddle {
inline namespace v0 {
namespace detail {

inline constexpr std::size_t visit_window = 64;  // items whose memory accesses overlap

// A run of a batch's entries that belong to one shard, whose lock is held while this lives.
template <class Shard> struct visited_part {
  Shard* s;
  std::span<batch_entry> entries;
};
template <class Shard> struct visited_window {
  visited_window() = default;
  visited_window(const visited_window&) = delete;
  visited_window& operator=(const visited_window&) = delete;
  ~visited_window() {
    for (std::size_t k = 0; k < count; ++k) parts[k].s->lock.unlock();
  }
  visited_part<Shard> parts[visit_window];
  std::size_t count = 0;
};

// Goes through a sorted batch in windows of some shards, whose locks it holds together, in ascending order as everybody
// does. So the cache misses of a window's keys overlap: first in the index, then in the rows, where near(shard, entry)
// may add its own. Then resolve(shard, its entries), which may make rows and throw, for all of the window; then
// apply(shard, its entries).
template <class Shard, class Near, class Resolve, class Apply>
void visit(batch& b, std::span<Shard> shards, std::uint32_t first_shard, unsigned shard_bits, Near near,
           Resolve resolve, Apply apply) {
  const std::span<batch_entry> all(b.entries);
  for (std::size_t first = 0, last = 0; first < all.size(); first = last) {
    visited_window<Shard> w;
    while (last < all.size() && last - first < visit_window) {
      const std::uint32_t id = shard_of(all[last].mixed, shard_bits);
      Shard& s = shards[id - first_shard];
      const std::size_t begin = last;
      s.lock.lock();
      w.parts[w.count++].s = &s;
      for (; last < all.size() && shard_of(all[last].mixed, shard_bits) == id; ++last)
        __builtin_prefetch(s.rows.first_slot(all[last].mixed << shard_bits));
      w.parts[w.count - 1].entries = all.subspan(begin, last - begin);
    }
    const std::span parts(w.parts, w.count);
    for (const auto& p : parts) {
      for (batch_entry& e : p.entries) {
        near(e);
        e.row = p.s->rows.candidate(e.mixed, e.mixed << shard_bits);
        if (e.row == Shard::store::none) continue;
        const auto* const at = reinterpret_cast<const char*>(p.s->rows.at(e.row));
        for (std::size_t k = 0; k < Shard::store::record_bytes; k += 64) __builtin_prefetch(at + k);
        __builtin_prefetch(at + Shard::store::record_bytes - 1);
      }
    }
    for (const auto& p : parts) resolve(*p.s, p.entries);
    for (const auto& p : parts) apply(*p.s, p.entries);
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

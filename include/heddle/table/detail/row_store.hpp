// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/table/detail/mix.hpp>
#include <heddle/table/detail/slabs.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace heddle {
inline namespace v0 {
namespace detail {

// What every record begins with. The stamp is 0 where the place is free: so any key can be stored.
struct record_head {
  std::uint64_t mixed;  // the mixed key; of a free place, the next free one
  std::uint32_t stamp;  // epoch of the last change
};

// The records of one shard: an arena of chunks whose records never move, and apart from it an open-addressing index of
// 32-bit words, which hold a record's number and, in the bits that this leaves, a fingerprint of its key. Chunks and
// pages of the index come from slabs. The index grows by a quarter, by more pages: it is rebuilt in place from the
// records, so nothing is copied and nothing is freed. Not thread-safe.
template <std::size_t Bytes> class row_store {
  static_assert(Bytes % 8 == 0 && Bytes >= sizeof(record_head));

 public:
  static constexpr std::size_t record_bytes = Bytes;
  static constexpr std::uint32_t none = 0xffffffffu;
  // Records in a chunk: a power of two, so that a chunk has about 4 KiB.
  static constexpr std::uint32_t chunk_rows =
      static_cast<std::uint32_t>(std::bit_floor(std::size_t{4096} / Bytes < 1    ? std::size_t{1}
                                                : std::size_t{4096} / Bytes > 64 ? std::size_t{64}
                                                                                 : std::size_t{4096} / Bytes));
  static constexpr std::uint32_t page_slots = 256;
  static constexpr std::uint64_t most_pages = (std::uint64_t{1} << 32) / page_slots - 1;

  // Records held when `slots` slots are four fifths full.
  static constexpr std::uint64_t room(std::uint64_t slots) noexcept { return slots / 5 * 4; }

  // How many pages come after so many: a quarter more, and not more than there may be.
  static constexpr std::uint64_t pages_after(std::uint64_t pages) noexcept {
    return (std::max)(pages + 1, (std::min)(pages + (pages + 3) / 4, most_pages));
  }
  // The bits of a slot that hold a record's number.
  static constexpr std::uint32_t mask_of(std::uint64_t slots) noexcept {
    return static_cast<std::uint32_t>(std::bit_ceil(slots) - 1);
  }

  std::uint32_t size() const noexcept { return size_; }
  // Places for records so far.
  std::uint32_t places() const noexcept { return used_; }

  std::byte* at(std::uint32_t row) noexcept {
    return chunks_[row / chunk_rows] + std::size_t{row % chunk_rows} * Bytes;
  }
  const std::byte* at(std::uint32_t row) const noexcept {
    return chunks_[row / chunk_rows] + std::size_t{row % chunk_rows} * Bytes;
  }
  std::uint64_t mixed(std::uint32_t row) const noexcept {
    std::uint64_t m;
    std::memcpy(&m, at(row), 8);
    return m;
  }
  // Where the search for a key begins, to prefetch; null while nothing was ever inserted.
  const std::uint32_t* first_slot(std::uint64_t fraction) const noexcept {
    return slots_ == 0 ? nullptr : &slot(place_among(fraction, slots_));
  }

  // A record that has the key's fingerprint: the key's, but for one time in some thousands; none if it has no record.
  // `fraction` is the mixed key without the bits that chose the shard.
  std::uint32_t candidate(std::uint64_t mixed_key, std::uint64_t fraction) const noexcept {
    return probe(mixed_key, fraction, [](std::uint32_t) { return true; });
  }
  std::uint32_t find(std::uint64_t mixed_key, std::uint64_t fraction) const noexcept {
    return probe(mixed_key, fraction, [&](std::uint32_t row) { return mixed(row) == mixed_key; });
  }

  // Makes a record for a key that has none, with stamp 1; the rest of it is for the caller to fill. Throws
  // std::bad_alloc, argument_error; then nothing has changed.
  std::uint32_t insert(std::uint64_t mixed_key, std::uint64_t fraction, unsigned shard_bits, slabs& memory) {
    if (size_ + std::uint64_t{1} > room(slots_)) grow(shard_bits, memory);
    std::uint32_t row = free_;
    if (row != none) {
      free_ = static_cast<std::uint32_t>(mixed(row));
    } else {
      if (used_ % chunk_rows == 0) {
        chunks_.reserve(chunks_.size() + 1, memory);
        std::byte* const chunk = memory.take(std::size_t{chunk_rows} * Bytes);
        std::memset(chunk, 0, std::size_t{chunk_rows} * Bytes);
        chunks_.push_back(chunk);
      }
      row = used_++;
    }
    const record_head head{mixed_key, 1};
    std::memcpy(at(row), &head, 12);
    place(row, mixed_key, fraction);
    ++size_;
    return row;
  }

  // Forgets a record. What stood behind it in the index moves up, so there are no tombstones to search through.
  void erase(std::uint32_t row, unsigned shard_bits) noexcept {
    std::uint32_t hole = place_among(mixed(row) << shard_bits, slots_);
    while ((slot(hole) & mask_) != row + 1) hole = after(hole);
    for (std::uint32_t i = after(hole); slot(i) != 0; i = after(i)) {
      const std::uint32_t home = place_among(mixed((slot(i) & mask_) - 1) << shard_bits, slots_);
      const bool between = hole < i ? hole < home && home <= i : hole < home || home <= i;
      if (between) continue;
      slot(hole) = slot(i);
      hole = i;
    }
    slot(hole) = 0;
    const record_head head{free_, 0};
    std::memcpy(at(row), &head, 12);
    free_ = row;
    --size_;
  }

  // f(row, record) for every record, in the order of the arena. f may erase that record.
  template <class Function> void for_each(Function f) {
    for (std::uint32_t row = 0; row < used_; ++row) {
      if (stamp(row) != 0) f(row, at(row));
    }
  }
  template <class Function> void for_each(Function f) const {
    for (std::uint32_t row = 0; row < used_; ++row) {
      if (stamp(row) != 0) f(row, at(row));
    }
  }

 private:
  std::uint32_t& slot(std::uint32_t i) noexcept { return pages_[i / page_slots][i % page_slots]; }
  const std::uint32_t& slot(std::uint32_t i) const noexcept { return pages_[i / page_slots][i % page_slots]; }
  std::uint32_t after(std::uint32_t i) const noexcept { return i + 1 == slots_ ? 0 : i + 1; }
  std::uint32_t stamp(std::uint32_t row) const noexcept {
    std::uint32_t s;
    std::memcpy(&s, at(row) + 8, 4);
    return s;
  }
  // The low bits of the mixed key, above the record's number. Shard and place were chosen by the high bits.
  std::uint32_t fingerprint(std::uint64_t mixed_key) const noexcept {
    return static_cast<std::uint32_t>(mixed_key << std::bit_width(mask_)) & ~mask_;  // none where all bits are taken
  }
  template <class Accept>
  std::uint32_t probe(std::uint64_t mixed_key, std::uint64_t fraction, Accept accept) const noexcept {
    if (slots_ == 0) return none;
    const std::uint32_t print = fingerprint(mixed_key);
    for (std::uint32_t i = place_among(fraction, slots_);; i = after(i)) {
      const std::uint32_t s = slot(i);
      if (s == 0) return none;
      if (((s ^ print) & ~mask_) == 0 && accept((s & mask_) - 1)) return (s & mask_) - 1;
    }
  }
  void place(std::uint32_t row, std::uint64_t mixed_key, std::uint64_t fraction) noexcept {
    std::uint32_t i = place_among(fraction, slots_);
    while (slot(i) != 0) i = after(i);
    slot(i) = (row + 1) | fingerprint(mixed_key);
  }
  void grow(unsigned shard_bits, slabs& memory) {
    const std::uint64_t pages = pages_after(pages_.size());
    if (pages > most_pages)
      throw argument_error("heddle::sparse_table: a shard has " + std::to_string(size_) +
                           " rows, the most that it can hold; give the table more shard_bits");
    pages_.reserve(pages, memory);
    while (pages_.size() < pages) pages_.push_back(new (memory.take(page_slots * 4)) std::uint32_t[page_slots]);
    slots_ = static_cast<std::uint32_t>(pages * page_slots);
    mask_ = mask_of(slots_);
    for (std::uint32_t* p : pages_) std::memset(p, 0, page_slots * 4);
    for_each([&](std::uint32_t row, const std::byte*) { place(row, mixed(row), mixed(row) << shard_bits); });
  }

  pointer_list<std::uint32_t*> pages_;
  pointer_list<std::byte*> chunks_;
  std::uint32_t slots_ = 0, mask_ = 0, size_ = 0, used_ = 0, free_ = none;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// A run of bytes in a chunk: live, or among the free blocks of its owner.
struct heap_block {
  std::byte* begin = nullptr;
  std::size_t size = 0;
  std::uint32_t before = 0, after = 0;  // neighbours in the chunk
  std::uint32_t lower = 0, upper = 0;   // neighbours in the list of its class; `upper` also links unused records
  std::uint32_t owner = 0;
  bool free = false;
  std::uint64_t ticket = 0;  // from when on it is free, as its owner counts
};

inline constexpr std::uint32_t no_block = static_cast<std::uint32_t>(-1);

// Free blocks by size. A class holds the sizes of a sixteenth of an octave, in ascending order, the last freed first
// among equals; bits say which classes hold any.
class size_classes {
 public:
  struct place {
    unsigned octave, part;
  };
  static constexpr place class_of(std::size_t bytes) noexcept {
    if (bytes < 16) return {0, static_cast<unsigned>(bytes)};
    const unsigned octave = static_cast<unsigned>(std::bit_width(bytes)) - 4;
    return {octave, static_cast<unsigned>(bytes >> (octave - 1)) & 15u};
  }

  size_classes() noexcept {
    for (auto& octave : first_) {
      for (std::uint32_t& block : octave) block = no_block;
    }
  }

  bool empty() const noexcept { return octaves_ == 0; }

  void insert(std::vector<heap_block>& blocks, std::uint32_t k) noexcept {
    heap_block& b = blocks[k];
    const place c = class_of(b.size);
    std::uint32_t lower = no_block, upper = first_[c.octave][c.part];
    while (upper != no_block && blocks[upper].size < b.size) {
      lower = upper;
      upper = blocks[upper].upper;
    }
    b.lower = lower;
    b.upper = upper;
    if (upper != no_block) blocks[upper].lower = k;
    if (lower != no_block) {
      blocks[lower].upper = k;
    } else {
      first_[c.octave][c.part] = k;
      parts_[c.octave] = static_cast<std::uint16_t>(parts_[c.octave] | 1u << c.part);
      octaves_ |= std::uint64_t{1} << c.octave;
    }
  }

  void erase(std::vector<heap_block>& blocks, std::uint32_t k) noexcept {
    const heap_block& b = blocks[k];
    if (b.upper != no_block) blocks[b.upper].lower = b.lower;
    if (b.lower != no_block) {
      blocks[b.lower].upper = b.upper;
      return;
    }
    const place c = class_of(b.size);
    first_[c.octave][c.part] = b.upper;
    if (b.upper != no_block) return;
    parts_[c.octave] = static_cast<std::uint16_t>(parts_[c.octave] & ~(1u << c.part));
    if (parts_[c.octave] == 0) octaves_ &= ~(std::uint64_t{1} << c.octave);
  }

  // The smallest block that holds so many bytes so aligned.
  std::uint32_t best(const std::vector<heap_block>& blocks, std::size_t bytes, std::size_t alignment) const noexcept {
    place c = class_of(bytes);
    unsigned parts = parts_[c.octave] & (0xffffu << c.part);
    for (;;) {
      if (parts == 0) {
        const std::uint64_t above = octaves_ & (~std::uint64_t{1} << c.octave);
        if (above == 0) return no_block;
        c.octave = static_cast<unsigned>(std::countr_zero(above));
        parts = parts_[c.octave];
      }
      for (std::uint32_t k = first_[c.octave][std::countr_zero(parts)]; k != no_block; k = blocks[k].upper) {
        const std::size_t skip = (0 - reinterpret_cast<std::uintptr_t>(blocks[k].begin)) & (alignment - 1);
        if (skip <= blocks[k].size && blocks[k].size - skip >= bytes) return k;
      }
      parts &= parts - 1;
    }
  }

  std::size_t largest(const std::vector<heap_block>& blocks) const noexcept {
    if (octaves_ == 0) return 0;
    const unsigned octave = 63u - static_cast<unsigned>(std::countl_zero(octaves_));
    std::uint32_t k = first_[octave][31 - std::countl_zero(static_cast<std::uint32_t>(parts_[octave]))];
    while (blocks[k].upper != no_block) k = blocks[k].upper;
    return blocks[k].size;
  }

 private:
  static constexpr unsigned octave_count = 61;

  std::uint64_t octaves_ = 0;
  std::uint16_t parts_[octave_count] = {};
  std::uint32_t first_[octave_count][16];
};

// From the address of a live block to its record: open addressing, half full at most.
class live_blocks {
 public:
  // Room for one more.
  void reserve() {
    if (2 * (count_ + 1) <= slots_.size()) return;
    std::vector<slot> old(slots_.empty() ? 64 : 2 * slots_.size());
    old.swap(slots_);
    shift_ = 65 - static_cast<unsigned>(std::bit_width(slots_.size()));
    for (const slot& s : old) {
      if (s.key) place(s);
    }
  }
  void insert(std::byte* key, std::uint32_t block) noexcept {
    place({key, block});
    ++count_;
  }
  // Takes it out; no_block if it isn't there.
  std::uint32_t take(std::byte* key) noexcept {
    if (count_ == 0) return no_block;
    const std::size_t mask = slots_.size() - 1;
    std::size_t i = home(key);
    while (slots_[i].key != key) {
      if (!slots_[i].key) return no_block;
      i = (i + 1) & mask;
    }
    const std::uint32_t found = slots_[i].block;
    --count_;
    // Those behind it that may come closer to their home do.
    for (std::size_t k = (i + 1) & mask; slots_[k].key; k = (k + 1) & mask) {
      if (((k - home(slots_[k].key)) & mask) < ((k - i) & mask)) continue;
      slots_[i] = slots_[k];
      i = k;
    }
    slots_[i].key = nullptr;
    return found;
  }

 private:
  struct slot {
    std::byte* key = nullptr;
    std::uint32_t block = 0;
  };
  std::size_t home(const std::byte* key) const noexcept {
    return static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(key) * 0x9e3779b97f4a7c15u >> shift_);
  }
  void place(const slot& s) noexcept {
    std::size_t i = home(s.key);
    while (slots_[i].key) i = (i + 1) & (slots_.size() - 1);
    slots_[i] = s;
  }

  std::vector<slot> slots_;
  std::size_t count_ = 0;
  unsigned shift_ = 64;
};

// The blocks of some chunks. Never touches the memory itself. Free blocks belong to owners, of which 0 stands for all;
// neighbours of one owner merge.
class block_heap {
 public:
  std::vector<heap_block> blocks;
  std::vector<std::uint32_t> chunks;  // the first block of each
  std::vector<size_classes> free_of{1};
  std::size_t in_use = 0;

  // Room for the records of one `take` or `add_chunk`.
  void reserve() {
    live_.reserve();
    while (spare_ < 2) {
      blocks.emplace_back();
      recycle(static_cast<std::uint32_t>(blocks.size() - 1));
    }
  }

  void add_chunk(std::byte* base, std::size_t bytes) {
    reserve();
    chunks.push_back(no_block);
    const std::uint32_t k = fresh();
    blocks[k] = {base, bytes, no_block, no_block, no_block, no_block, 0, true, 0};
    chunks.back() = k;
    free_of[0].insert(blocks, k);
  }

  // Whether the chunk is one free block of owner 0.
  bool idle(std::uint32_t first) const noexcept {
    const heap_block& b = blocks[first];
    return b.free && b.owner == 0 && b.after == no_block;
  }

  // Forgets an idle chunk.
  void drop_chunk(std::size_t index) noexcept {
    const std::uint32_t first = std::exchange(chunks[index], chunks.back());
    chunks.pop_back();
    free_of[0].erase(blocks, first);
    recycle(first);
  }

  // Makes a free block, from its first aligned byte on, live; what is too much stays free. After `reserve`.
  std::byte* take(std::uint32_t k, std::size_t bytes, std::size_t alignment, std::size_t granularity) noexcept {
    const std::uint32_t owner = blocks[k].owner;
    free_of[owner].erase(blocks, k);
    const std::size_t skip = (0 - reinterpret_cast<std::uintptr_t>(blocks[k].begin)) & (alignment - 1);
    if (skip) {
      const std::uint32_t rest = cut(k, skip);
      free_of[owner].insert(blocks, k);
      k = rest;
    }
    const std::size_t spare = (0 - bytes) & (granularity - 1);
    if (blocks[k].size - bytes > spare) free_of[owner].insert(blocks, cut(k, bytes + spare));
    heap_block& b = blocks[k];
    b.free = false;
    in_use += b.size;
    live_.insert(b.begin, k);
    return b.begin;
  }

  // Makes the live block at this address free; false if there is none.
  bool give(std::byte* p, std::uint32_t owner, std::uint64_t ticket) noexcept {
    const std::uint32_t k = live_.take(p);
    if (k == no_block) return false;
    in_use -= blocks[k].size;
    blocks[k].free = true;
    blocks[k].owner = owner;
    blocks[k].ticket = ticket;
    settle(k);
    return true;
  }

  // Makes a free block owner 0's.
  std::uint32_t release_to_all(std::uint32_t k) noexcept {
    free_of[blocks[k].owner].erase(blocks, k);
    blocks[k].owner = 0;
    blocks[k].ticket = 0;
    return settle(k);
  }

  // Makes the free blocks from `first` up to `last`, whomever they belong to, one of `owner`.
  void join(std::uint32_t first, std::uint32_t last, std::uint32_t owner, std::uint64_t ticket) noexcept {
    free_of[blocks[first].owner].erase(blocks, first);
    for (bool more = first != last; more;) {
      const std::uint32_t next = blocks[first].after;
      free_of[blocks[next].owner].erase(blocks, next);
      more = next != last;
      absorb(first);
    }
    blocks[first].owner = owner;
    blocks[first].ticket = ticket;
    free_of[owner].insert(blocks, first);
  }

 private:
  std::uint32_t fresh() noexcept {
    const std::uint32_t k = unused_;
    unused_ = blocks[k].upper;
    --spare_;
    return k;
  }
  void recycle(std::uint32_t k) noexcept {
    blocks[k].upper = std::exchange(unused_, k);
    ++spare_;
  }

  // Cuts a block; the new one begins at `at`.
  std::uint32_t cut(std::uint32_t k, std::size_t at) noexcept {
    const std::uint32_t rest = fresh();
    heap_block& b = blocks[k];
    blocks[rest] = {b.begin + at, b.size - at, k, b.after, no_block, no_block, b.owner, true, b.ticket};
    if (b.after != no_block) blocks[b.after].before = rest;
    b.after = rest;
    b.size = at;
    return rest;
  }

  // Adds the next block to this one; neither is in a list.
  void absorb(std::uint32_t k) noexcept {
    heap_block& b = blocks[k];
    const std::uint32_t next = b.after;
    b.size += blocks[next].size;
    b.after = blocks[next].after;
    if (b.after != no_block) blocks[b.after].before = k;
    recycle(next);
  }

  // Merges a free block, in no list, with its free neighbours of the same owner, and lists it.
  std::uint32_t settle(std::uint32_t k) noexcept {
    const std::uint32_t owner = blocks[k].owner;
    std::uint64_t ticket = blocks[k].ticket;
    const auto unlist = [&](std::uint32_t other) {
      if (other == no_block || !blocks[other].free || blocks[other].owner != owner) return false;
      free_of[owner].erase(blocks, other);
      if (blocks[other].ticket > ticket) ticket = blocks[other].ticket;
      return true;
    };
    if (unlist(blocks[k].after)) absorb(k);
    if (const std::uint32_t before = blocks[k].before; unlist(before)) {
      absorb(before);
      k = before;
    }
    blocks[k].ticket = ticket;
    free_of[owner].insert(blocks, k);
    return k;
  }

  live_blocks live_;
  std::uint32_t unused_ = no_block, spare_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/checked.hpp>
#include <heddle/memory/host_resource.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief How a `pool` takes memory from its upstream. All but `granularity` in bytes, any value legal unless stated.
struct pool_options {
  std::size_t initial = 0;                         ///< Taken at construction; at most `max`.
  std::size_t max = static_cast<std::size_t>(-1);  ///< The most it may hold at once.
  std::size_t growth = std::size_t{2} << 20;       ///< Chunks for smaller requests are up to this large.
  std::size_t granularity = 64;                    ///< Blocks start at multiples of this; a power of two in 1..4096.

  friend constexpr bool operator==(const pool_options&, const pool_options&) = default;
};

/// @brief Keeps memory that is given back and hands it out again: best fit, neighbours merged, grown in chunks.
///
/// A request takes the smallest free block that holds it, at the lowest address among equals, and leaves the rest free.
/// If there is none, the pool asks its upstream for a chunk: of the request's size, or as many times that as fit into
/// `.growth` and into an eighth of what the limit leaves. If the limit stands in the way, chunks without a live block
/// go back first. When a request comes while nothing is live, all chunks are exchanged for one of their total size. So
/// only a live block holds capacity back, that of its chunk: with nothing live, any size up to `.max` succeeds, and a
/// step that frees all it takes runs in a single chunk from the second or third time on.
///
/// @code{.cpp}
/// heddle::pool memory{heddle::host_resource{}, {.initial = 1 << 20, .max = 64 << 20}};
/// @endcode
///
/// State:   shared by all copies; about 150 bytes per block outside the memory it manages, which it never touches.
/// Traffic: one tree search per call, logarithmic in the number of blocks; with alignments above `.granularity` it may
///          pass over free blocks that are large enough but ill placed.
/// Order:   any upstream.
/// Sync:    nothing waits, but for a mutex; thread-safe. The last copy's destruction gives all chunks back.
/// Throws:  `argument_error` on a bad alignment or option; `memory_error` with request, limit, bytes in use and largest
///          available size when the limit or the upstream refuses.
template <class Upstream = host_resource>
class pool {
  static_assert(has_allocate_sync<Upstream>, "heddle::pool: the upstream must provide allocate_sync(bytes, alignment)");
  static_assert(has_deallocate_sync<Upstream>,
                "heddle::pool: the upstream must provide a noexcept deallocate_sync(pointer, bytes, alignment)");
  static_assert(has_shared_copies<Upstream>, "heddle::pool: the upstream must be copyable");
  static_assert(has_equality<Upstream>, "heddle::pool: the upstream must provide ==");

 public:
  /// Takes `.initial` bytes from a copy of `upstream`.
  explicit pool(Upstream upstream = Upstream{}, pool_options options = {})
      : state_(std::make_shared<state>(std::move(upstream), options)) {}

  /// A block of at least `bytes` bytes, usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("pool", alignment);
    if (bytes == 0) return nullptr;
    std::lock_guard lock(state_->mutex);
    state_->unite(bytes);
    void* p = state_->take(bytes, alignment);
    if (!p) {
      state_->grow(bytes);
      p = state_->take(bytes, alignment);
    }
    return p;
  }

  /// Gives a block back. A pointer that is not a live block of this pool changes nothing but `refused()`.
  void deallocate_sync(void* p, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    if (!p) return;
    std::lock_guard lock(state_->mutex);
    state_->give(static_cast<std::byte*>(p));
  }

  /// As `allocate_sync`: the host's queue does everything at once.
  void* allocate(host::queue, std::size_t bytes, std::size_t alignment) { return allocate_sync(bytes, alignment); }

  /// As `deallocate_sync`.
  void deallocate(host::queue, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    deallocate_sync(p, bytes, alignment);
  }

  /// Bytes in live blocks, with their rounding.
  std::size_t in_use() const {
    std::lock_guard lock(state_->mutex);
    return state_->in_use;
  }
  /// Bytes held from the upstream.
  std::size_t held() const {
    std::lock_guard lock(state_->mutex);
    return state_->held;
  }
  /// The largest free block held now; growing may give more.
  std::size_t largest_free() const {
    std::lock_guard lock(state_->mutex);
    return state_->largest_block();
  }
  /// How many deallocations named a pointer that was not a live block: double frees and foreign pointers.
  std::size_t refused() const {
    std::lock_guard lock(state_->mutex);
    return state_->refused;
  }
  /// Gives every chunk without a live block back to the upstream; returns the bytes given back.
  std::size_t trim() {
    std::lock_guard lock(state_->mutex);
    return state_->release(static_cast<std::size_t>(-1));
  }
  /// The options it was made with.
  pool_options options() const { return state_->options; }

  /// Whether both are one pool.
  friend bool operator==(const pool& a, const pool& b) noexcept { return a.state_ == b.state_; }

 private:
  // Free blocks by size, then by address. A live block keeps its node, so that giving it back allocates nothing.
  struct free_block {
    std::size_t size;
    std::byte* begin;
    friend auto operator<=>(const free_block&, const free_block&) = default;
  };
  using free_list = std::set<free_block>;

  struct block {
    std::size_t size = 0;
    bool first = false;  // begins a chunk: never merged with what lies before it
    bool free = true;
    typename free_list::node_type node{};
  };
  using block_map = std::map<std::byte*, block>;
  using position = typename block_map::iterator;

  struct state {
    state(Upstream u, pool_options o) : upstream(std::move(u)), options(o) {
      if (!detail::is_alignment(o.granularity)) {
        throw argument_error("heddle::pool: .granularity " + std::to_string(o.granularity) +
                             " is not a power of two in 1..4096");
      }
      if (o.initial > o.max) {
        throw argument_error("heddle::pool: .initial " + std::to_string(o.initial) + " is above .max " +
                             std::to_string(o.max));
      }
      if (o.initial) add_chunk(upstream.allocate_sync(o.initial, detail::max_alignment), o.initial);
    }
    state(const state&) = delete;
    state& operator=(const state&) = delete;

    ~state() {
      for (position it = blocks.begin(); it != blocks.end();) {
        const position begin = it;
        std::size_t bytes = 0;
        do bytes += (it++)->second.size;
        while (it != blocks.end() && !it->second.first);
        upstream.deallocate_sync(begin->first, bytes, detail::max_alignment);
      }
    }

    void* take(std::size_t bytes, std::size_t alignment) {
      for (auto f = free_blocks.lower_bound({bytes, nullptr}); f != free_blocks.end(); ++f) {
        const std::size_t offset = (0 - reinterpret_cast<std::uintptr_t>(f->begin)) & (alignment - 1);
        if (offset > f->size || f->size - offset < bytes) continue;
        position it = blocks.find(f->begin);
        if (offset) {
          split(it, offset);
          ++it;
        }
        const std::size_t mask = options.granularity - 1;
        const std::size_t spare = (0 - bytes) & mask;  // up to the next multiple of the granularity
        if (it->second.size - bytes > spare) split(it, bytes + spare);
        it->second.node = free_blocks.extract({it->second.size, it->first});
        it->second.free = false;
        in_use += it->second.size;
        return it->first;
      }
      return nullptr;
    }

    void give(std::byte* p) noexcept {
      position it = blocks.find(p);
      if (it == blocks.end() || it->second.free) {
        ++refused;
        return;
      }
      in_use -= it->second.size;
      it->second.free = true;
      if (const position next = std::next(it); next != blocks.end() && !next->second.first && next->second.free) {
        free_blocks.erase({next->second.size, next->first});
        it->second.size += next->second.size;
        blocks.erase(next);
      }
      auto node = std::move(it->second.node);
      if (!it->second.first && std::prev(it)->second.free) {
        const position before = std::prev(it);
        node = free_blocks.extract({before->second.size, before->first});
        before->second.size += it->second.size;
        blocks.erase(it);
        it = before;
      }
      node.value() = {it->second.size, it->first};
      free_blocks.insert(std::move(node));
    }

    // Exchanges the chunks for a single one, if nothing is live and that is of use for the request.
    void unite(std::size_t bytes) {
      if (in_use != 0 || chunks < 2) return;
      const std::size_t total = release(static_cast<std::size_t>(-1));
      if (bytes > total) return;
      if (void* p = ask(total)) add_chunk(p, total);
    }

    // Makes one free block of at least `bytes` bytes, aligned to max_alignment.
    void grow(std::size_t bytes) {
      if (bytes > detail::max_bytes || bytes > options.max) fail(bytes, true);
      if (options.max - held < bytes) {
        const std::size_t missing = bytes - (options.max - held);
        if (idle() < missing) fail(bytes, true);
        release(missing);
      }
      const std::size_t room = options.max - held;
      const std::size_t spare = (0 - bytes) & (options.granularity - 1);
      const std::size_t want = room - bytes >= spare ? bytes + spare : bytes;
      const std::size_t more = options.growth < room / 8 ? options.growth : room / 8;
      std::size_t chunk = more > want ? more / want * want : want;
      void* p = ask(chunk);
      if (!p && chunk > want) p = ask(chunk = want);
      if (!p && release(static_cast<std::size_t>(-1))) p = ask(chunk);
      if (!p && want > bytes) p = ask(chunk = bytes);
      if (!p) fail(bytes, false);
      add_chunk(p, chunk);
    }

    // Gives chunks without a live block back until `enough` bytes are; returns how many were.
    std::size_t release(std::size_t enough) noexcept {
      std::size_t given = 0;
      for (position it = blocks.begin(); it != blocks.end() && given < enough;) {
        const position next = std::next(it);
        if (whole(it)) {
          const std::size_t bytes = it->second.size;
          free_blocks.erase({bytes, it->first});
          upstream.deallocate_sync(it->first, bytes, detail::max_alignment);
          blocks.erase(it);
          held -= bytes;
          --chunks;
          given += bytes;
        }
        it = next;
      }
      return given;
    }

    std::size_t largest_block() const noexcept { return free_blocks.empty() ? 0 : free_blocks.rbegin()->size; }

    bool whole(position it) noexcept {
      const position next = std::next(it);
      return it->second.first && it->second.free && (next == blocks.end() || next->second.first);
    }

    std::size_t idle() noexcept {
      std::size_t sum = 0;
      for (position it = blocks.begin(); it != blocks.end(); ++it) {
        if (whole(it)) sum += it->second.size;
      }
      return sum;
    }

    void* ask(std::size_t bytes) {
      try {
        return upstream.allocate_sync(bytes, detail::max_alignment);
      } catch (const memory_error&) {
      } catch (const std::bad_alloc&) {
      }
      return nullptr;
    }

    [[noreturn]] void fail(std::size_t bytes, bool by_limit) {
      const bool limited = options.max != static_cast<std::size_t>(-1);
      std::size_t largest = largest_block();
      if (limited && by_limit) {
        const std::size_t growable = options.max - held + idle();
        if (growable > largest) largest = growable;
      }
      throw memory_error("pool", bytes, limited ? options.max : 0, in_use, largest);
    }

    void add_chunk(void* p, std::size_t bytes) {
      std::byte* const base = static_cast<std::byte*>(p);
      try {
        insert(base, bytes, true);
      } catch (...) {
        upstream.deallocate_sync(p, bytes, detail::max_alignment);
        throw;
      }
      held += bytes;
      ++chunks;
    }

    void insert(std::byte* base, std::size_t bytes, bool first) {
      const position it = blocks.try_emplace(base).first;
      it->second.size = bytes;
      it->second.first = first;
      try {
        free_blocks.insert({bytes, base});
      } catch (...) {
        blocks.erase(it);
        throw;
      }
    }

    // Cuts a free block in two free blocks.
    void split(position it, std::size_t at) {
      insert(it->first + at, it->second.size - at, false);
      auto node = free_blocks.extract({it->second.size, it->first});
      it->second.size = at;
      node.value().size = at;
      free_blocks.insert(std::move(node));
    }

    Upstream upstream;
    pool_options options;
    std::mutex mutex;
    block_map blocks;  // every block, live or free, by address
    free_list free_blocks;
    std::size_t held = 0, in_use = 0, chunks = 0, refused = 0;
  };

  std::shared_ptr<state> state_;
};

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/adaptor.hpp>
#include <heddle/memory/detail/block_heap.hpp>
#include <heddle/memory/detail/checked.hpp>
#include <heddle/memory/host_resource.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>

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

namespace detail {

// Chunks of an upstream, cut in blocks: how a pool begins, grows and shrinks. What it says of free blocks is of those
// that are free for all, owner 0's.
template <class Upstream> class chunked_heap : public block_heap {
  static_assert(is_upstream<Upstream>());

 public:
  chunked_heap(const char* name, Upstream u, pool_options o) : upstream(std::move(u)), options(o), name_(name) {
    if (!is_alignment(o.granularity)) {
      throw argument_error("heddle::" + std::string(name) + ": .granularity " + std::to_string(o.granularity) +
                           " is not a power of two in 1..4096");
    }
    if (o.initial > o.max) {
      throw argument_error("heddle::" + std::string(name) + ": .initial " + std::to_string(o.initial) +
                           " is above .max " + std::to_string(o.max));
    }
    if (o.initial) add(upstream.allocate_sync(o.initial, max_alignment), o.initial);
  }
  chunked_heap(const chunked_heap&) = delete;
  chunked_heap& operator=(const chunked_heap&) = delete;

  ~chunked_heap() {
    for (const std::uint32_t first : chunks) {
      std::size_t bytes = 0;
      for (std::uint32_t k = first; k != no_block; k = blocks[k].after) bytes += blocks[k].size;
      upstream.deallocate_sync(blocks[first].begin, bytes, max_alignment);
    }
  }

  // Exchanges idle chunks for a single one, if nothing is live and that is of use for the request.
  void unite(std::size_t bytes) {
    if (in_use != 0 || chunks.size() < 2) return;
    std::size_t count = 0;
    for (const std::uint32_t first : chunks) count += idle(first);
    if (count < 2) return;
    const std::size_t total = release(static_cast<std::size_t>(-1));
    if (bytes > total) return;
    if (void* p = ask(total)) add(p, total);
  }

  // Makes one free block of at least `bytes` bytes, aligned to max_alignment.
  void grow(std::size_t bytes) {
    if (bytes > max_bytes || bytes > options.max) fail(bytes, true);
    if (options.max - held < bytes) {
      const std::size_t missing = bytes - (options.max - held);
      if (idle_bytes() < missing) fail(bytes, true);
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
    add(p, chunk);
  }

  // Gives idle chunks back until `enough` bytes are; returns how many were.
  std::size_t release(std::size_t enough) noexcept {
    std::size_t given = 0;
    for (std::size_t i = 0; i < chunks.size() && given < enough;) {
      const heap_block& b = blocks[chunks[i]];
      if (!idle(chunks[i])) {
        ++i;
        continue;
      }
      upstream.deallocate_sync(b.begin, b.size, max_alignment);
      held -= b.size;
      given += b.size;
      drop_chunk(i);
    }
    return given;
  }

  std::size_t largest_free() const noexcept {
    std::size_t most = 0;
    for (const size_classes& f : free_of) most = f.largest(blocks) > most ? f.largest(blocks) : most;
    return most;
  }

  Upstream upstream;
  const pool_options options;
  std::size_t held = 0;

 private:
  std::size_t idle_bytes() const noexcept {
    std::size_t sum = 0;
    for (const std::uint32_t first : chunks) sum += idle(first) ? blocks[first].size : 0;
    return sum;
  }

  void* ask(std::size_t bytes) {
    try {
      return upstream.allocate_sync(bytes, max_alignment);
    } catch (const memory_error&) {
    } catch (const std::bad_alloc&) {
    }
    return nullptr;
  }

  void add(void* p, std::size_t bytes) {
    try {
      add_chunk(static_cast<std::byte*>(p), bytes);
    } catch (...) {
      upstream.deallocate_sync(p, bytes, max_alignment);
      throw;
    }
    held += bytes;
  }

  [[noreturn]] void fail(std::size_t bytes, bool by_limit) {
    std::size_t largest = largest_free();
    if (by_limit && options.max != memory_error::unknown) {
      const std::size_t growable = options.max - held + idle_bytes();
      if (growable > largest) largest = growable;
    }
    throw memory_error(name_, bytes, options.max, in_use, largest);
  }

  const char* const name_;
};

}  // namespace detail

/// @brief Keeps memory that is given back and hands it out again: best fit, neighbours merged, grown in chunks.
///
/// A request takes the smallest free block that holds it, the last freed among equals, and leaves the rest free.
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
/// State:   shared by all copies; about 100 bytes per block outside the memory it manages, which it never touches.
/// Traffic: a constant number of steps per call, and a walk over the smaller free blocks of the same class of sizes (a
///          sixteenth of an octave); alignments above `.granularity` may pass over blocks that are ill placed.
/// Order:   any upstream.
/// Sync:    nothing waits, but for a mutex; thread-safe. The last copy's destruction gives all chunks back.
/// Throws:  `argument_error` on a bad alignment or option; `memory_error` with request, limit, bytes in use and largest
///          available size when the limit or the upstream refuses.
template <class Upstream = host_resource> class pool {
 public:
  /// Takes `.initial` bytes from a copy of `upstream`.
  explicit pool(Upstream upstream = Upstream{}, pool_options options = {})
      : state_(std::make_shared<state>("pool", std::move(upstream), options)) {}

  /// A block of at least `bytes` bytes, usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("pool", alignment);
    if (bytes == 0) return nullptr;
    state& s = *state_;
    std::lock_guard lock(s.mutex);
    s.unite(bytes);
    s.reserve();
    std::uint32_t k = s.free_of[0].best(s.blocks, bytes, alignment);
    if (k == detail::no_block) {
      s.grow(bytes);
      s.reserve();
      k = s.free_of[0].best(s.blocks, bytes, alignment);
    }
    return s.take(k, bytes, alignment, s.options.granularity);
  }

  /// Gives a block back. A pointer that is not a live block of this pool changes nothing but `refused()`.
  void deallocate_sync(void* p, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    if (!p) return;
    std::lock_guard lock(state_->mutex);
    if (!state_->give(static_cast<std::byte*>(p), 0, 0)) ++state_->refused;
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
    return state_->largest_free();
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
  struct state : detail::chunked_heap<Upstream> {
    using detail::chunked_heap<Upstream>::chunked_heap;
    mutable std::mutex mutex;
    std::size_t refused = 0;
  };

  std::shared_ptr<state> state_;
};

}  // namespace v0
}  // namespace heddle

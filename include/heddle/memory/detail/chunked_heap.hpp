// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/detail/adaptor.hpp>
#include <heddle/memory/detail/block_heap.hpp>
#include <heddle/memory/detail/checked.hpp>
#include <heddle/memory/pool_options.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>

namespace heddle {
inline namespace v0 {

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
    std::size_t room = largest_free();
    if (by_limit && options.max != memory_error::unknown) {
      const std::size_t growable = options.max - held + idle_bytes();
      if (growable > room) room = growable;
    }
    throw memory_error(name_, bytes, options.max, in_use, room);
  }

  const char* const name_;
};

// For several threads, one at a time.
template <class Upstream> struct locked_heap : chunked_heap<Upstream> {
  using chunked_heap<Upstream>::chunked_heap;
  mutable std::mutex mutex;
  std::size_t refused = 0;
};

// A handle on such a heap, with what every pool says of itself.
template <class Heap> class pool_figures {
 public:
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
  /// The largest free block held now; growing, or joining those of several queues, may give more.
  std::size_t largest_free() const {
    std::lock_guard lock(state_->mutex);
    return state_->largest_free();
  }
  /// How many deallocations named a pointer that was not a live block, or a queue that can't be marked.
  std::size_t refused() const {
    std::lock_guard lock(state_->mutex);
    return state_->refused;
  }
  /// The options it was made with.
  pool_options options() const { return state_->options; }

  /// Whether both are one pool.
  friend bool operator==(const pool_figures& a, const pool_figures& b) noexcept { return a.state_ == b.state_; }

 protected:
  template <class Upstream>
  pool_figures(const char* name, Upstream&& upstream, const pool_options& options)
      : state_(std::make_shared<Heap>(name, std::forward<Upstream>(upstream), options)) {}

  std::shared_ptr<Heap> state_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/backend.hpp>
#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/checked.hpp>
#include <heddle/memory/host_resource.hpp>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief The blocks of a `fixed_size` resource.
struct fixed_size_options {
  std::size_t block = 4096;    ///< Bytes of a block, at least 1; rounded up to a power of two.
  std::size_t per_chunk = 64;  ///< Blocks taken from the upstream at once, at least 1.

  friend constexpr bool operator==(const fixed_size_options&, const fixed_size_options&) = default;
};

/// @brief Blocks of one size: each request gets a whole one.
///
/// Blocks are aligned to their size, at most to 4096 bytes. What a queue gives back has an event behind it, for which
/// the queue that gets the block next waits, on the device.
///
/// @code{.cpp}
/// heddle::fixed_size blocks{heddle::cuda_device{}, {.block = 1 << 16}, heddle::cuda_order{}};
/// @endcode
///
/// State:   8 bytes a block and an event, shared by all copies; the memory itself is never touched.
/// Traffic: constant time: the block that was given back last goes out first.
/// Order:   any upstream, through its `_sync` calls; see `binning` for several sizes.
/// Sync:    a mutex; thread-safe. Only `allocate_sync` waits for a block's work, and the last copy's destruction, which
///          gives all chunks back, for that of all.
/// Throws:  `memory_error` for a request above a block; `argument_error` on a bad alignment or option, or an alignment
///          above the block's; what the upstream throws, and the backend where it can't wait. A block that no event can
///          be put behind isn't used again and stays in use.
/// @tparam Backend A type with a queue and an event, such as a backend.
template <class Upstream = host_resource, class Backend = host> class fixed_size {
  static_assert(has_allocate_sync<Upstream> && has_deallocate_sync<Upstream>,
                "heddle::fixed_size: the upstream must provide allocate_sync and a noexcept deallocate_sync");
  static_assert(has_queue<Backend> && has_event<Backend>,
                "heddle::fixed_size: the backend must have a queue and an event");

 public:
  /// The queue that calls take.
  using queue = typename Backend::queue;

  /// @param upstream Where chunks come from. @param options Sizes. Takes nothing yet.
  /// @param order Only its type matters: whose queues and events they are.
  explicit fixed_size(Upstream upstream = Upstream{}, fixed_size_options options = {},
                      [[maybe_unused]] Backend order = {})
      : state_(std::make_shared<state>(std::move(upstream), options)) {}

  /// A block, usable at once; waits for the work on it of the queue that gave it back.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    return state_->take(bytes, alignment, [](const event& e) { e.synchronize(); });
  }

  /// Gives a block back that nobody uses any more.
  void deallocate_sync(void* p, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    if (p) state_->give(p, [](event&) {});
  }

  /// A block for later work on `q`.
  void* allocate(queue q, std::size_t bytes, std::size_t alignment) {
    return state_->take(bytes, alignment, [&](const event& e) { q.wait(e); });
  }

  /// Gives a block back; work that `q` has now may use it still.
  void deallocate(queue q, void* p, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    if (p) state_->give(p, [&](event& e) { e.record(q); });
  }

  /// Bytes of a block.
  std::size_t block_bytes() const noexcept { return state_->block; }
  /// Bytes in live blocks.
  std::size_t in_use() const {
    std::lock_guard lock(state_->mutex);
    return state_->in_use;
  }
  /// Bytes held from the upstream.
  std::size_t held() const {
    std::lock_guard lock(state_->mutex);
    return state_->chunks.size() * state_->chunk_bytes();
  }

  /// Whether both are one resource.
  friend bool operator==(const fixed_size& a, const fixed_size& b) noexcept { return a.state_ == b.state_; }

 private:
  using event = typename Backend::event;

  // A free block, and the event behind the work on it.
  struct spare {
    void* p;
    [[no_unique_address]] event done{};
  };

  struct state {
    state(Upstream u, fixed_size_options o) : upstream(std::move(u)), per_chunk(o.per_chunk) {
      if (o.block == 0 || o.block > (std::size_t{1} << 40) || o.per_chunk == 0 ||
          o.per_chunk > (std::size_t{1} << 20)) {
        throw argument_error("heddle::fixed_size: .block " + std::to_string(o.block) + " and .per_chunk " +
                             std::to_string(o.per_chunk) + "; allowed is 1 to 2^40 and 1 to 2^20");
      }
      while (block < o.block) block *= 2;
    }
    state(const state&) = delete;
    state& operator=(const state&) = delete;
    ~state() {
      for (const spare& s : free) {
        try {
          s.done.synchronize();
        } catch (...) {  // the device is broken: nothing uses the memory any more
        }
      }
      for (void* p : chunks) upstream.deallocate_sync(p, chunk_bytes(), detail::max_alignment);
    }

    template <class Wait> void* take(std::size_t bytes, std::size_t alignment, Wait&& wait) {
      detail::check_alignment("fixed_size", alignment);
      if (bytes == 0) return nullptr;
      std::lock_guard lock(mutex);
      if (bytes > block) throw memory_error("fixed_size", bytes, block, in_use, block);
      if (alignment > block) {
        throw argument_error("heddle::fixed_size: alignment " + std::to_string(alignment) + " of a block of " +
                             std::to_string(block) + " bytes");
      }
      if (free.empty()) grow();
      wait(free.back().done);
      void* const p = free.back().p;
      events.push_back(std::move(free.back().done));
      free.pop_back();
      in_use += block;
      return p;
    }

    template <class Mark> void give(void* p, Mark&& mark) noexcept {
      std::lock_guard lock(mutex);
      if (events.empty()) return;  // nothing is out
      event e = std::move(events.back());
      events.pop_back();
      try {
        mark(e);
      } catch (...) {  // no event, no reuse
        events.push_back(std::move(e));
        return;
      }
      free.push_back({p, std::move(e)});  // has room for every block there is
      in_use -= block;
    }

    std::size_t chunk_bytes() const noexcept { return block * per_chunk; }

    void grow() {
      chunks.reserve(chunks.size() + 1);
      free.reserve((chunks.size() + 1) * per_chunk);
      events.reserve((chunks.size() + 1) * per_chunk);
      auto* const p = static_cast<std::byte*>(upstream.allocate_sync(chunk_bytes(), detail::max_alignment));
      chunks.push_back(p);
      for (std::size_t k = per_chunk; k-- > 0;) free.push_back({p + k * block});
    }

    Upstream upstream;
    std::size_t block = 1, per_chunk;
    std::mutex mutex;
    std::vector<void*> chunks;
    std::vector<spare> free;
    std::vector<event> events;  // one for each block that is out, to be recorded again
    std::size_t in_use = 0;
  };

  std::shared_ptr<state> state_;
};

static_assert(resource<fixed_size<>>);

}  // namespace v0
}  // namespace heddle

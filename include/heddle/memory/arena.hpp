// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/checked.hpp>
#include <heddle/memory/host_resource.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief Hands out one address after the other from large chunks, and begins again when nothing is live.
///
/// A deallocation only counts, unless the block is the last one handed out: then its room is free at once. When the
/// last live block is given back, the arena is empty again and keeps its memory, as one chunk of the size that the
/// busiest round needed. So a step that frees all it takes costs an addition and a comparison per block.
///
/// @code{.cpp}
/// heddle::arena memory{heddle::host_resource{}, 64 << 20};
/// @endcode
///
/// State:   24 bytes a chunk, shared by all copies.
/// Traffic: a few instructions a call; holds on to freed memory until nothing is live.
/// Order:   any upstream; `thread_safe` around it where several threads use it.
/// Sync:    none: one thread at a time, and on a device one queue for all calls: what it does afterwards uses memory
///          again that was given back. When the last copy goes, no work may use its memory any more.
/// Throws:  `argument_error` on a bad alignment or a chunk of 0 bytes; what the upstream throws.
template <class Upstream = host_resource> class arena {
  static_assert(has_allocate_sync<Upstream> && has_deallocate_sync<Upstream>,
                "heddle::arena: the upstream must provide allocate_sync and a noexcept deallocate_sync");

 public:
  /// @param upstream Where chunks come from. @param chunk Their least size in bytes, at least 1; requests that ask for
  /// more are rounded up to 4096. Takes nothing yet.
  explicit arena(Upstream upstream = Upstream{}, std::size_t chunk = std::size_t{1} << 20)
      : state_(std::make_shared<state>(std::move(upstream), chunk)) {
    if (chunk == 0) throw argument_error("heddle::arena: the chunk is 0 bytes, allowed is 1 or more");
  }

  /// A block, usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    return take(bytes, alignment, [this](void* p, std::size_t n) { state_->give_back(p, n); });
  }

  /// Gives a block back.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t /*alignment*/) noexcept {
    give(p, bytes, [this](void* chunk, std::size_t n) { state_->give_back(chunk, n); });
  }

  /// As `allocate_sync`: the host's queue does everything at once.
  void* allocate(host::queue, std::size_t bytes, std::size_t alignment) { return allocate_sync(bytes, alignment); }

  /// As `deallocate_sync`.
  void deallocate(host::queue, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    deallocate_sync(p, bytes, alignment);
  }

  /// A block for later work on `q`, which is the same in all calls.
  template <class Queue>
  void* allocate(Queue q, std::size_t bytes, std::size_t alignment)
    requires has_deallocate<Upstream, Queue>
  {
    return take(bytes, alignment, [this, q](void* p, std::size_t n) { state_->give_back(q, p, n); });
  }

  /// Gives a block back; work that `q` has now may use it still.
  template <class Queue>
  void deallocate(Queue q, void* p, std::size_t bytes, std::size_t /*alignment*/) noexcept
    requires has_deallocate<Upstream, Queue>
  {
    give(p, bytes, [this, q](void* chunk, std::size_t n) { state_->give_back(q, chunk, n); });
  }

  /// Bytes held from the upstream.
  std::size_t held() const noexcept { return state_->held; }
  /// Number of blocks not yet given back.
  std::size_t live() const noexcept { return state_->live; }

  /// Whether both are one arena.
  friend bool operator==(const arena& a, const arena& b) noexcept { return a.state_ == b.state_; }

 private:
  // Chunks that are given up go to give_up(pointer, bytes).
  template <class GiveUp> void* take(std::size_t bytes, std::size_t alignment, GiveUp give_up) {
    detail::check_alignment("arena", alignment);
    if (bytes == 0) return nullptr;
    state& s = *state_;
    std::uintptr_t at = (s.next + alignment - 1) & ~static_cast<std::uintptr_t>(alignment - 1);
    if (at > s.end || s.end - at < bytes) {
      s.grow(detail::round_up("arena", bytes, detail::max_alignment), give_up);
      at = s.next;
    }
    s.next = at + bytes;
    ++s.live;
    return reinterpret_cast<void*>(at);
  }

  template <class GiveUp> void give(void* p, std::size_t bytes, GiveUp give_up) noexcept {
    if (!p) return;
    state& s = *state_;
    const auto at = reinterpret_cast<std::uintptr_t>(p);
    if (at + bytes == s.next) s.next = at;
    if (--s.live == 0) s.begin_again(give_up);
  }

  struct piece {
    void* p;
    std::size_t bytes;
  };

  struct state {
    state(Upstream u, std::size_t c) : upstream(std::move(u)), chunk(c) {}
    state(const state&) = delete;
    state& operator=(const state&) = delete;
    ~state() {
      release([this](void* p, std::size_t n) { give_back(p, n); });
    }

    void give_back(void* p, std::size_t bytes) noexcept { upstream.deallocate_sync(p, bytes, detail::max_alignment); }
    template <class Queue> void give_back(Queue q, void* p, std::size_t bytes) noexcept {
      upstream.deallocate(q, p, bytes, detail::max_alignment);
    }

    template <class GiveUp> void grow(std::size_t bytes, GiveUp& give_up) {
      bytes = (std::max)(bytes, chunk);
      if (live == 0) {  // what was kept is too small
        release(give_up);
        if (wanted > bytes) {
          try {
            return add(wanted);
          } catch (const memory_error&) {  // others have taken some since: in pieces, then
          }
        }
      }
      add(bytes);
    }

    void add(std::size_t bytes) {
      chunks.reserve(chunks.size() + 1);
      void* const p = upstream.allocate_sync(bytes, detail::max_alignment);
      chunks.push_back({p, bytes});
      held += bytes;
      next = reinterpret_cast<std::uintptr_t>(p);
      end = next + bytes;
    }

    template <class GiveUp> void begin_again(GiveUp& give_up) noexcept {
      if (chunks.size() == 1) {
        next = reinterpret_cast<std::uintptr_t>(chunks[0].p);
        return;
      }
      wanted = held;  // the next round takes it in one piece
      release(give_up);
    }

    template <class GiveUp> void release(GiveUp&& give_up) noexcept {
      for (const piece& x : chunks) give_up(x.p, x.bytes);
      chunks.clear();
      held = 0;
      next = end = 0;
    }

    Upstream upstream;
    std::size_t chunk;
    std::vector<piece> chunks;
    std::size_t held = 0, live = 0, wanted = 0;
    std::uintptr_t next = 0, end = 0;
  };

  std::shared_ptr<state> state_;
};

static_assert(resource<arena<>>);

}  // namespace v0
}  // namespace heddle

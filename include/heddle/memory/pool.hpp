// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/chunked_heap.hpp>
#include <heddle/memory/host_resource.hpp>

#include <cstddef>
#include <mutex>
#include <utility>

namespace heddle {
inline namespace v0 {

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
template <class Upstream = host_resource> class pool : public detail::pool_figures<detail::locked_heap<Upstream>> {
  using base = detail::pool_figures<detail::locked_heap<Upstream>>;

 public:
  /// Takes `.initial` bytes from a copy of `upstream`.
  explicit pool(Upstream upstream = Upstream{}, pool_options options = {})
      : base("pool", std::move(upstream), options) {}

  /// A block of at least `bytes` bytes, usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("pool", alignment);
    if (bytes == 0) return nullptr;
    auto& s = *state_;
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

  /// Gives every chunk without a live block back to the upstream; returns the bytes given back.
  std::size_t trim() {
    std::lock_guard lock(state_->mutex);
    return state_->release(static_cast<std::size_t>(-1));
  }

 private:
  using base::state_;
};

}  // namespace v0
}  // namespace heddle

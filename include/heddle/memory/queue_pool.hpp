// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/backend.hpp>
#include <heddle/core/error.hpp>
#include <heddle/memory/detail/queue_heap.hpp>
#include <heddle/memory/host_resource.hpp>

#include <cstddef>
#include <mutex>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief A `pool` whose blocks are free in the order of queues: what a queue gives back it may have again at once,
/// other queues only after its work.
///
/// A request takes, in this order: the smallest block that holds it among those which its own queue gave back and those
/// whose work is known to be done; a block of another queue, which the requesting queue then waits for, by an event, on
/// the device; neighbours that different queues gave back, joined, after a wait for each; a new chunk of the upstream.
/// So the host waits for the device only in `allocate_sync` (usable at once, so its block's work must be done) and
/// where chunks go back to the upstream: at the limit, in `trim`, at the end. Growth, limit and `.granularity` are
/// `pool`'s.
///
/// The queue of a deallocation may differ from that of the allocation: give a block back on the queue that uses it
/// last, such as the one of an asynchronous collective. Queues are told apart by `id()` where they have it, as a
/// stream's handle may come again after its end, else by `==`.
///
/// @code{.cpp}
/// heddle::queue_pool memory{heddle::cuda_order{}, heddle::cuda_device{}, {.max = std::size_t{8} << 30}};
/// float* x = static_cast<float*>(memory.allocate({stream}, 4096, 256));
/// kernel<<<1, 256, 0, stream>>>(x);
/// memory.deallocate({stream}, x, 4096, 256);   // while the kernel runs
/// @endcode
///
/// State:   `pool`'s, and up to 32 events for each queue that is in use.
/// Traffic: an event is recorded for each deallocation; a request that waits goes over all blocks.
/// Order:   any upstream, through its `_sync` calls; all queues belong to one device, current in each call.
/// Sync:    as above; a mutex, thread-safe.
/// Throws:  as `pool`; what the backend throws where it can't wait. A block whose deallocation can't be marked by an
///          event (its queue is no more, the device is broken) stays live and is counted in `refused()`.
///
/// @tparam Backend A type with a queue and an event, such as a backend. Queues need not outlive the pool.
template <class Backend, class Upstream>
class queue_pool : public detail::pool_figures<detail::queue_heap<Backend, Upstream>> {
  using base = detail::pool_figures<detail::queue_heap<Backend, Upstream>>;
  static_assert(has_queue<Backend> && has_event<Backend>,
                "heddle::queue_pool: the backend must have a queue and an event");

 public:
  /// The queue that calls take.
  using queue = typename Backend::queue;

  /// @brief Takes `.initial` bytes from a copy of `upstream`.
  /// @param order Only its type matters: whose queues and events they are. @param upstream Where chunks come from.
  /// @param options As for `pool`.
  queue_pool([[maybe_unused]] Backend order, Upstream upstream, pool_options options = {})
      : base("queue_pool", std::move(upstream), options) {}

  /// A block of at least `bytes` bytes for later work on `q`.
  void* allocate(queue q, std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("queue_pool", alignment);
    if (bytes == 0) return nullptr;
    std::lock_guard lock(state_->mutex);
    return state_->allocate(q, bytes, alignment);
  }

  /// Gives a block back; work that `q` has now may use it still. A pointer that is not a live block of this pool
  /// changes nothing but `refused()`.
  void deallocate(queue q, void* p, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    if (!p) return;
    std::lock_guard lock(state_->mutex);
    state_->deallocate(q, static_cast<std::byte*>(p));
  }

  /// A block of at least `bytes` bytes, usable at once and anywhere; may wait for the device.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("queue_pool", alignment);
    if (bytes == 0) return nullptr;
    std::lock_guard lock(state_->mutex);
    return state_->allocate_sync(bytes, alignment);
  }

  /// Gives a block back that nobody uses any more.
  void deallocate_sync(void* p, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    if (!p) return;
    std::lock_guard lock(state_->mutex);
    if (!state_->give(static_cast<std::byte*>(p), 0, 0)) ++state_->refused;
  }

  /// Waits for the work of all free blocks, gives every chunk without a live block back to the upstream, and returns
  /// the bytes given back.
  std::size_t trim() {
    std::lock_guard lock(state_->mutex);
    state_->drain();
    return state_->release(static_cast<std::size_t>(-1));
  }

 private:
  using base::state_;
};

static_assert(resource<queue_pool<host, host_resource>>);

}  // namespace v0
}  // namespace heddle

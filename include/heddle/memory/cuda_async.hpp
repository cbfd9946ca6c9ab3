// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/cuda_queue.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/over_aligned.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace heddle {
inline namespace v0 {

/// @brief How a `cuda_async` keeps memory.
struct cuda_async_options {
  std::size_t max = 0;                              ///< The most bytes it may hold; 0: what the device has.
  std::size_t keep = static_cast<std::size_t>(-1);  ///< Bytes kept when the device is waited for; the rest goes back.

  friend constexpr bool operator==(const cuda_async_options&, const cuda_async_options&) = default;
};

/// @brief The driver's own pool in stream order (`cudaMallocFromPoolAsync`), a new one on the current device.
///
/// The driver can map any free pages to one range of addresses, which no pool above it can. For temporary blocks of
/// many sizes on many queues; a `queue_pool` makes cheaper calls.
///
/// State:   a pool of the driver and a stream, shared by all copies.
/// Sync:    `allocate` and `deallocate` only enqueue; `allocate_sync` waits until the block is there, `trim` for the
///          device. Thread-safe.
/// Throws:  `argument_error` on a bad alignment; `memory_error` with request, limit (of `.max`, else the device's),
/// bytes
///          in use and what the device has left; `cuda_error` on anything else.
class cuda_async {
 public:
  /// Makes a pool on the current device.
  explicit cuda_async(cuda_async_options options = {}) : state_(std::make_shared<state>(options)) {}

  /// Memory for later work on `q`.
  void* allocate(cuda_order::queue q, std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("cuda_async", alignment);
    if (bytes == 0) return nullptr;
    (void)detail::round_up("cuda_async", bytes, alignment);
    state& s = *state_;
    return s.moved.allocate(
        bytes, alignment, [&](std::size_t n) { return s.take(n, q.stream); },
        [&](void* p, std::size_t) noexcept { static_cast<void>(cudaFreeAsync(p, q.stream)); });
  }
  /// Gives memory back once earlier work of `q` is done.
  void deallocate(cuda_order::queue q, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (!p) return;
    state_->moved.restore(p, bytes, alignment);
    static_cast<void>(cudaFreeAsync(p, q.stream));
  }
  /// Memory usable at once; waits for the device to have it.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    void* const p = allocate({state_->stream}, bytes, alignment);
    try {
      cuda_order::queue{state_->stream}.synchronize();
    } catch (...) {
      deallocate({state_->stream}, p, bytes, alignment);
      throw;
    }
    return p;
  }
  /// Gives memory back that nobody uses any more.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    deallocate({state_->stream}, p, bytes, alignment);
  }

  /// Bytes in live blocks. Throws cuda_error.
  std::size_t in_use() const { return state_->figure(cudaMemPoolAttrUsedMemCurrent); }
  /// Bytes held from the device. Throws cuda_error.
  std::size_t held() const { return state_->figure(cudaMemPoolAttrReservedMemCurrent); }
  /// Waits for the device, then gives free memory back to it. Throws cuda_error.
  void trim() {
    detail::check_cuda("cuda_async::trim", cudaDeviceSynchronize());
    detail::check_cuda("cuda_async::trim", cudaMemPoolTrimTo(state_->pool, 0));
  }
  /// The driver's pool, for its other attributes and for access by other devices.
  cudaMemPool_t get() const noexcept { return state_->pool; }

  /// Whether both are one pool.
  friend bool operator==(const cuda_async& a, const cuda_async& b) noexcept { return a.state_ == b.state_; }

 private:
  struct state {
    explicit state(cuda_async_options o) : options(o) {
      cudaMemPoolProps properties{};
      properties.allocType = cudaMemAllocationTypePinned;
      properties.location.type = cudaMemLocationTypeDevice;
      properties.maxSize = o.max;
      detail::check_cuda("cuda_async", cudaGetDevice(&properties.location.id));
      detail::check_cuda("cuda_async", cudaMemPoolCreate(&pool, &properties));
      std::uint64_t keep = o.keep;
      cudaError_t code = cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep);
      if (code == cudaSuccess) code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      if (code == cudaSuccess) return;
      static_cast<void>(cudaMemPoolDestroy(pool));
      detail::check_cuda("cuda_async", code);
    }
    state(const state&) = delete;
    state& operator=(const state&) = delete;
    ~state() {
      static_cast<void>(cudaStreamDestroy(stream));
      static_cast<void>(cudaMemPoolDestroy(pool));  // what is live, or still in a stream, stays until it is given back
    }

    void* take(std::size_t bytes, cudaStream_t on) {
      void* p = nullptr;
      const cudaError_t code = cudaMallocFromPoolAsync(&p, bytes, pool, on);
      if (code != cudaErrorMemoryAllocation) {
        detail::check_cuda("cuda_async::allocate", code);
        return p;
      }
      static_cast<void>(cudaGetLastError());
      std::size_t left = 0, all = 0;
      detail::check_cuda("cuda_async::allocate", cudaMemGetInfo(&left, &all));
      const std::size_t used = figure(cudaMemPoolAttrUsedMemCurrent);
      if (options.max) left = options.max > used ? options.max - used : 0;
      throw memory_error("cuda_async", bytes, options.max ? options.max : all, used, left);
    }

    std::size_t figure(cudaMemPoolAttr which) const {
      std::uint64_t number = 0;
      detail::check_cuda("cuda_async", cudaMemPoolGetAttribute(pool, which, &number));
      return static_cast<std::size_t>(number);
    }

    const cuda_async_options options;
    cudaMemPool_t pool = nullptr;
    cudaStream_t stream = nullptr;  // of the calls without a queue
    detail::over_aligned moved{256};
  };

  std::shared_ptr<state> state_;
};

static_assert(resource<cuda_async, cuda_order::queue>);

}  // namespace v0
}  // namespace heddle

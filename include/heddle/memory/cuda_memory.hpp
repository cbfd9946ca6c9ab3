// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/cuda_queue.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/over_aligned.hpp>

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <memory>

namespace heddle {
inline namespace v0 {
namespace detail {

// The figures of a refusal: what the current device has, in use by whomever.
[[noreturn]] inline void refuse_device_memory(const char* where, std::size_t bytes) {
  static_cast<void>(cudaGetLastError());
  std::size_t left = 0, all = 0;
  if (cudaMemGetInfo(&left, &all) != cudaSuccess) throw memory_error(where, bytes);
  throw memory_error(where, bytes, all, all - left, left);
}

// What all calls of CUDA have in common that give memory which any queue may use at once. Kind says where it comes
// from.
template <class Kind> class cuda_plain {
 public:
  /// Memory usable at once, by any queue of the device.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    check_alignment(Kind::name, alignment);
    if (bytes == 0) return nullptr;
    (void)round_up(Kind::name, bytes, alignment);
    void* const made = state_->moved.allocate(
        bytes, alignment,
        [&](std::size_t n) {
          void* p = nullptr;
          const cudaError_t code = Kind::take(&p, n);
          if (code == cudaErrorMemoryAllocation) Kind::refuse(n, state_->in_use);
          check_cuda(Kind::name, code);
          return p;
        },
        [](void* p, std::size_t) noexcept { Kind::give(p); });
    state_->in_use += bytes;
    return made;
  }
  /// Gives memory back; waits for the device.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (!p) return;
    state_->in_use -= bytes;
    state_->moved.restore(p, bytes, alignment);
    Kind::give(p);
  }
  /// As `allocate_sync`.
  void* allocate(cuda_order::queue, std::size_t bytes, std::size_t alignment) {
    return allocate_sync(bytes, alignment);
  }
  /// As `deallocate_sync`: CUDA waits for the device before it takes memory back.
  void deallocate(cuda_order::queue, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    deallocate_sync(p, bytes, alignment);
  }
  /// Whether memory of one may be given back to the other: both are copies of one.
  friend bool operator==(const cuda_plain& a, const cuda_plain& b) noexcept { return a.state_ == b.state_; }

 private:
  struct state {
    over_aligned moved{256};
    std::atomic<std::size_t> in_use{0};
  };
  std::shared_ptr<state> state_ = std::make_shared<state>();
};

struct device_kind {
  static constexpr const char* name = "cuda_device";
  static cudaError_t take(void** p, std::size_t n) { return cudaMalloc(p, n); }
  static void give(void* p) noexcept { static_cast<void>(cudaFree(p)); }
  [[noreturn]] static void refuse(std::size_t n, std::size_t) { refuse_device_memory(name, n); }
};
struct pinned_kind {
  static constexpr const char* name = "cuda_pinned";
  static cudaError_t take(void** p, std::size_t n) { return cudaHostAlloc(p, n, cudaHostAllocPortable); }
  static void give(void* p) noexcept { static_cast<void>(cudaFreeHost(p)); }
  [[noreturn]] static void refuse(std::size_t n, std::size_t in_use) {
    static_cast<void>(cudaGetLastError());
    throw memory_error(name, n, memory_error::unknown, in_use);
  }
};
struct managed_kind {
  static constexpr const char* name = "cuda_managed";
  static cudaError_t take(void** p, std::size_t n) { return cudaMallocManaged(p, n, cudaMemAttachGlobal); }
  static void give(void* p) noexcept { static_cast<void>(cudaFree(p)); }
  [[noreturn]] static void refuse(std::size_t n, std::size_t) { refuse_device_memory(name, n); }
};
}  // namespace detail

/// @brief Memory of the current device, from `cudaMalloc`: what a `queue_pool` takes its chunks from.
///
/// State:   bytes in use, and for blocks aligned to more than 256 bytes where they begin, shared by copies.
/// Sync:    a deallocation waits for the device, so it may follow on work of any queue; an allocation may wait too.
///          Thread-safe. The device current in a call must be that of the pointer.
/// Throws:  `argument_error` on an alignment that is not a power of two in 1..4096; `memory_error` with what the device
///          has (limit), what is taken of it by all programs, and what is left; `cuda_error` on anything else.
using cuda_device = detail::cuda_plain<detail::device_kind>;

/// @brief Page-locked memory of the host, from `cudaHostAlloc`, which copies to and from every device run beside.
///
/// The host and the kernels of all devices may use it: a `fallback` for device memory, or the upstream of a `pool`.
///
/// State:   as `cuda_device`.
/// Sync:    as `cuda_device`.
/// Throws:  as `cuda_device`; a `memory_error` has the request and the bytes that its copies hold.
using cuda_pinned = detail::cuda_plain<detail::pinned_kind>;

/// @brief Memory from `cudaMallocManaged`, whose pages move to whoever touches them: host or device.
///
/// State:   as `cuda_device`.
/// Sync:    as `cuda_device`.
/// Throws:  as `cuda_device`.
using cuda_managed = detail::cuda_plain<detail::managed_kind>;

static_assert(resource<cuda_device, cuda_order::queue> && resource<cuda_pinned, cuda_order::queue> &&
              resource<cuda_managed, cuda_order::queue>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/backend.hpp>
#include <heddle/core/cuda_queue.hpp>
#include <heddle/core/detail/index_iterator.cuh>
#include <heddle/core/detail/reduce_segments.cuh>
#include <heddle/core/detail/temporary.hpp>
#include <heddle/core/error.hpp>

#include <cuda_runtime.h>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_select.cuh>

#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>

namespace heddle {
inline namespace v0 {

namespace detail {
/// @cond
template <class Function> __global__ void for_each_kernel(std::size_t n, Function f) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) f(i);
}

template <class Value> struct store_value {
  Value* to;
  Value value;
  HEDDLE_HD void operator()(std::size_t i) const { to[i] = value; }
};

// CUB's two phases: ask for the size, take it from the resource, run.
template <class Resource, class Queue, class Call>
void with_temporary(const char* operation, Resource& resource, Queue q, Call call) {
  std::size_t bytes = 0;
  check_cuda(operation, call(static_cast<void*>(nullptr), bytes));
  if (bytes == 0) bytes = 1;
  const temporary block(resource, q, bytes);
  check_cuda(operation, call(static_cast<void*>(block.data()), bytes));
}
/// @endcond
}  // namespace detail

/// @brief The backend of one NVIDIA device: the caller's stream, CUB's algorithms.
///
/// The device is the current one of the calling thread; the stream must belong to it. Pointers and results lie in
/// memory that the device can reach.
///
/// Sync:   nothing synchronises but queue::synchronize and event::synchronize; everything else enqueues
/// Throws: cuda_error when CUDA refuses; argument_error on a null pointer with a count, or a size that overflows
struct cuda {
  /// The caller's stream, borrowed.
  using queue = cuda_order::queue;
  /// A point in a queue.
  using event = cuda_order::event;

  /// @brief Device memory in stream order, from cudaMallocAsync's pool; models a resource.
  struct memory {
    /// `bytes` bytes, usable by later work of the queue; null for 0. Throws memory_error when the device has no more,
    /// argument_error for an alignment outside 1..256.
    void* allocate(queue q, std::size_t bytes, std::size_t alignment) {
      detail::check_alignment("cuda::memory", alignment, 256);
      if (bytes == 0) return nullptr;
      void* p = nullptr;
      const cudaError_t code = cudaMallocAsync(&p, bytes, q.stream);
      if (code == cudaErrorMemoryAllocation) {
        static_cast<void>(cudaGetLastError());
        throw memory_error("cuda::memory", bytes);
      }
      detail::check_cuda("cuda::memory::allocate", code);
      return p;
    }
    /// Gives memory back once earlier work of the queue is done.
    void deallocate(queue q, void* p, std::size_t, std::size_t) noexcept {
      if (p != nullptr) static_cast<void>(cudaFreeAsync(p, q.stream));
    }
    /// Any two are interchangeable.
    friend constexpr bool operator==(memory, memory) noexcept { return true; }
  };

  /// One thread per index; at most 2^20 blocks of 256 threads, which stride.
  template <class Function> static void for_each(std::size_t n, Function f, queue q) {
    static_assert(std::is_trivially_copyable_v<Function>, "heddle::cuda: functors must be trivially copyable");
    static_assert(sizeof(Function) <= 4000, "heddle::cuda: a functor must fit into a kernel's parameters (4000 bytes)");
    if (n == 0) return;
    constexpr std::size_t threads = 256, most_blocks = std::size_t{1} << 20;
    const std::size_t blocks = (n - 1) / threads + 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks < most_blocks ? blocks : most_blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = q.stream;
    detail::check_cuda("cuda::for_each", cudaLaunchKernelEx(&config, detail::for_each_kernel<Function>, n, f));
  }

  /// cub::DeviceReduce::Reduce; the same bits from run to run on the same device.
  template <class Value, class Reduce, class Transform, class Resource>
  static void transform_reduce(std::size_t n, std::type_identity_t<Value> init, Reduce reduce, Transform transform,
                               Value* result, Resource& resource, queue q) {
    detail::check_pointer("cuda::transform_reduce", result, 1);
    const detail::index_iterator<Transform, Value> in(0, transform);
    detail::with_temporary("cuda::transform_reduce", resource, q, [&](void* temporary, std::size_t& bytes) {
      return cub::DeviceReduce::Reduce(temporary, bytes, in, result, n, reduce, init, q.stream);
    });
  }

  /// One kernel of tiles of 4096 elements; the same bits from run to run. Temporary: a Value for each tile and segment.
  template <class Value, class Begins, class Reduce, class Transform, class Finish, class Resource>
  static void reduce_segments(std::size_t segments, std::size_t n, Begins begins, Value zero, Reduce reduce,
                              Transform transform, Finish finish, Resource& resource, queue q) {
    static_assert(std::is_trivially_copyable_v<Value>, "heddle::cuda::reduce_segments: values must be trivial to copy");
    if (segments == 0) return;
    const std::size_t tiles = (n + detail::segment_tile - 1) / detail::segment_tile, blocks = tiles ? tiles : 1;
    const std::size_t counters = detail::padded(segments * sizeof(unsigned));
    const detail::temporary block(resource, q, counters + (tiles + segments) * sizeof(Value));
    auto* const done = reinterpret_cast<unsigned*>(block.data());
    detail::check_cuda("cuda::reduce_segments", cudaMemsetAsync(done, 0, segments * sizeof(unsigned), q.stream));
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks < 65536 ? blocks : 65536));
    config.blockDim = dim3(detail::segment_threads);
    config.stream = q.stream;
    detail::check_cuda(
        "cuda::reduce_segments",
        cudaLaunchKernelEx(&config, detail::reduce_segments_kernel<Value, Begins, Reduce, Transform, Finish>, segments,
                           n, begins, zero, reduce, transform, finish,
                           reinterpret_cast<Value*>(block.data() + counters), done));
  }

  /// cudaMemcpyAsync in the direction that the addresses tell; pageable host memory makes it block as CUDA says.
  template <class Value> static void copy(const Value* from, Value* to, std::size_t n, queue q) {
    static_assert(std::is_trivially_copyable_v<Value>, "heddle::cuda::copy: elements must be trivially copyable");
    detail::check_pointer("cuda::copy", from, n);
    detail::check_pointer("cuda::copy", to, n);
    const std::size_t bytes = detail::checked_bytes("cuda::copy", n, sizeof(Value));
    if (n != 0) detail::check_cuda("cuda::copy", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, q.stream));
  }

  /// Sets n elements to a value, in one kernel.
  template <class Value> static void fill(Value* to, std::size_t n, std::type_identity_t<Value> value, queue q) {
    detail::check_pointer("cuda::fill", to, n);
    for_each(n, detail::store_value<Value>{to, value}, q);
  }

  /// cub::DeviceSelect::If over the indices: one pass; `write` runs on the device.
  template <class Keep, class Write, class Resource>
  static void select(std::size_t n, Keep keep, Write write, std::size_t* count, Resource& resource, queue q) {
    detail::check_pointer("cuda::select", count, 1);
    if (n == 0) return fill(count, 1, 0, q);
    const detail::index_iterator<detail::identity_index, std::size_t> in(0, {});
    const detail::write_iterator<Write> out(0, write);
    detail::with_temporary("cuda::select", resource, q, [&](void* temporary, std::size_t& bytes) {
      return cub::DeviceSelect::If(temporary, bytes, in, out, count, n, keep, q.stream);
    });
  }

  /// cub::DeviceRadixSort::SortPairs with a double buffer. Temporary: n keys, n values and CUB's histograms.
  template <class Key, class Value, class Resource>
  static void sort_pairs(Key* keys, Value* values, std::size_t n, Resource& resource, queue q) {
    static_assert(std::is_arithmetic_v<Key> && sizeof(Key) <= 8, "heddle::cuda::sort_pairs: keys must be numbers");
    static_assert(std::is_trivially_copyable_v<Value>, "heddle::cuda::sort_pairs: values must be trivially copyable");
    detail::check_pointer("cuda::sort_pairs", keys, n);
    detail::check_pointer("cuda::sort_pairs", values, n);
    const std::size_t all = detail::checked_bytes("cuda::sort_pairs", n, sizeof(Key) + sizeof(Value));
    if (n < 2) return;
    const std::size_t key_bytes = detail::padded(all - n * sizeof(Value));
    const detail::temporary other(resource, q, key_bytes + n * sizeof(Value));
    cub::DoubleBuffer<Key> key_buffers(keys, reinterpret_cast<Key*>(other.data()));
    cub::DoubleBuffer<Value> value_buffers(values, reinterpret_cast<Value*>(other.data() + key_bytes));
    detail::with_temporary("cuda::sort_pairs", resource, q, [&](void* temporary, std::size_t& bytes) {
      return cub::DeviceRadixSort::SortPairs(temporary, bytes, key_buffers, value_buffers, n, 0,
                                             static_cast<int>(sizeof(Key) * 8), q.stream);
    });
    if (key_buffers.Current() != keys) copy(key_buffers.Current(), keys, n, q);
    if (value_buffers.Current() != values) copy(value_buffers.Current(), values, n, q);
  }

  /// cub::DeviceScan::ExclusiveScan, one pass.
  template <class Value, class Reduce, class Transform, class Resource>
  static void scan(std::size_t n, std::type_identity_t<Value> init, Reduce reduce, Transform transform, Value* to,
                   Resource& resource, queue q) {
    detail::check_pointer("cuda::scan", to, n);
    if (n == 0) return;
    const detail::index_iterator<Transform, Value> in(0, transform);
    detail::with_temporary("cuda::scan", resource, q, [&](void* temporary, std::size_t& bytes) {
      return cub::DeviceScan::ExclusiveScan(temporary, bytes, in, to, reduce, init, n, q.stream);
    });
  }
};

static_assert(backend<cuda>);

}  // namespace v0
}  // namespace heddle

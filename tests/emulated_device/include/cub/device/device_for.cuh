// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::DeviceFor: a functor called for each index or item, by kernels of one thread per call.
// Limits: no extents; items aren't loaded as vectors.

#include <cub/detail/device_call.cuh>

#include <limits>

namespace cub {

namespace detail {

template <class Index, class Op> __global__ void for_each_index(Index n, Op op) {
  const std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < static_cast<std::uint64_t>(n)) op(static_cast<Index>(i));
}

template <class Iterator, class Op> struct for_item {
  Iterator first;
  Op op;
  __device__ void operator()(std::uint64_t i) { op(at(first, i)); }
};

}  // namespace detail

struct DeviceFor {
  template <class ShapeT, class OpT>
  static cudaError_t Bulk(void* d_temp_storage, std::size_t& temp_storage_bytes, ShapeT shape, OpT op,
                          cudaStream_t stream = {}) {
    return only_asks(d_temp_storage, temp_storage_bytes) ? cudaSuccess : Bulk(shape, op, stream);
  }
  template <class ShapeT, class OpT> static cudaError_t Bulk(ShapeT shape, OpT op, cudaStream_t stream = {}) {
    static_assert(std::is_integral_v<ShapeT>, "cub::DeviceFor::Bulk: the shape must be an integer");
    if constexpr (std::is_signed_v<ShapeT>)
      if (shape < 0) return cudaErrorInvalidValue;
    const auto n = static_cast<std::uint64_t>(shape);
    if (n == 0) return cudaSuccess;
    constexpr std::uint64_t threads = 256;
    const std::uint64_t blocks = (n - 1) / threads + 1;
    if (blocks > std::uint64_t{0x7fffffff}) return cudaErrorInvalidConfiguration;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream;
    return cudaLaunchKernelEx(&config, detail::for_each_index<ShapeT, OpT>, shape, op);
  }

  template <class RandomAccessIteratorT, class NumItemsT, class OpT>
  static cudaError_t ForEachN(void* d_temp_storage, std::size_t& temp_storage_bytes, RandomAccessIteratorT first,
                              NumItemsT num_items, OpT op, cudaStream_t stream = {}) {
    return only_asks(d_temp_storage, temp_storage_bytes) ? cudaSuccess : ForEachN(first, num_items, op, stream);
  }
  template <class RandomAccessIteratorT, class NumItemsT, class OpT>
  static cudaError_t ForEachN(RandomAccessIteratorT first, NumItemsT num_items, OpT op, cudaStream_t stream = {}) {
    if constexpr (std::is_signed_v<NumItemsT>)
      if (num_items < 0) return cudaErrorInvalidValue;
    return Bulk(static_cast<std::uint64_t>(num_items), detail::for_item<RandomAccessIteratorT, OpT>{first, op}, stream);
  }

  template <class RandomAccessIteratorT, class OpT>
  static cudaError_t ForEach(void* d_temp_storage, std::size_t& temp_storage_bytes, RandomAccessIteratorT first,
                             RandomAccessIteratorT last, OpT op, cudaStream_t stream = {}) {
    return only_asks(d_temp_storage, temp_storage_bytes) ? cudaSuccess : ForEach(first, last, op, stream);
  }
  template <class RandomAccessIteratorT, class OpT>
  static cudaError_t ForEach(RandomAccessIteratorT first, RandomAccessIteratorT last, OpT op,
                             cudaStream_t stream = {}) {
    return ForEachN(first, last - first, op, stream);
  }

 private:
  static bool only_asks(void* storage, std::size_t& bytes) {
    if (!storage) bytes = 1;
    return !storage;
  }
};

}  // namespace cub

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::BlockReduce. The result is thread 0's; all others get poison. See detail/collective.cuh.

#include <cub/detail/collective.cuh>

namespace cub {

enum BlockReduceAlgorithm {
  BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY,
  BLOCK_REDUCE_RAKING,
  BLOCK_REDUCE_WARP_REDUCTIONS,
};

template <class T, int BlockDimX, BlockReduceAlgorithm Algorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int BlockDimY = 1,
          int BlockDimZ = 1>
class BlockReduce {
  static constexpr int threads = BlockDimX * BlockDimY * BlockDimZ;

 public:
  struct TempStorage {
    detail::shared_values<T, threads> values;
  };

  __device__ explicit BlockReduce(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE())
      : BlockReduce(own_storage(), file, line) {}
  __device__ explicit BlockReduce(TempStorage& storage, const char* file = __builtin_FILE(),
                                  unsigned line = __builtin_LINE())
      : storage_(storage), place_{file, line} {}

  template <class ReductionOp> __device__ T Reduce(T input, ReductionOp reduction_op) {
    return Reduce(input, reduction_op, threads);
  }
  template <int Items, class ReductionOp> __device__ T Reduce(T (&inputs)[Items], ReductionOp reduction_op) {
    return Reduce(detail::combine(inputs, reduction_op), reduction_op, threads);
  }
  /// Of the first num_valid threads.
  template <class ReductionOp> __device__ T Reduce(T input, ReductionOp reduction_op, int num_valid) {
    storage_.values.put(thread_, input);
    place_.block_barrier();
    const int n = num_valid < threads ? num_valid : threads;
    if (thread_ != 0 || n < 1) return detail::poison(input);
    // Without an order, from the last thread to the first.
    constexpr bool ordered = Algorithm != BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY;
    return detail::combine<T>([&](int i) { return storage_.values.get(ordered ? i : n - 1 - i); }, 0, n, reduction_op);
  }

  __device__ T Sum(T input) { return Reduce(input, ::cuda::std::plus<>{}); }
  template <int Items> __device__ T Sum(T (&inputs)[Items]) { return Reduce(inputs, ::cuda::std::plus<>{}); }
  __device__ T Sum(T input, int num_valid) { return Reduce(input, ::cuda::std::plus<>{}, num_valid); }

 private:
  static TempStorage& own_storage() {
    HEDDLE_SHARED(TempStorage, own);
    return own;
  }

  TempStorage& storage_;
  detail::place place_;
  int thread_ = detail::thread_in_block<BlockDimX, BlockDimY, BlockDimZ>("cub::BlockReduce");
};

}  // namespace cub

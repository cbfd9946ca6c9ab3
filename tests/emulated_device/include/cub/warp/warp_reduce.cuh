// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::WarpReduce. The result is the first lane's, or that of each segment's first lane; all others get poison.
//         See detail/collective.cuh.

#include <cub/detail/collective.cuh>

namespace cub {

template <class T, int LogicalWarpThreads = 32> class WarpReduce {
  using plus = ::cuda::std::plus<>;

 public:
  struct TempStorage {
    detail::shared_values<T, LogicalWarpThreads> values;
  };

  __device__ explicit WarpReduce(TempStorage& storage, const char* file = __builtin_FILE(),
                                 unsigned line = __builtin_LINE())
      : storage_(storage), place_{file, line} {}

  __device__ T Sum(T input) { return Reduce(input, plus{}); }
  __device__ T Sum(T input, int valid_items) { return Reduce(input, plus{}, valid_items); }
  template <class FlagT> __device__ T HeadSegmentedSum(T input, FlagT head_flag) {
    return HeadSegmentedReduce(input, head_flag, plus{});
  }
  template <class FlagT> __device__ T TailSegmentedSum(T input, FlagT tail_flag) {
    return TailSegmentedReduce(input, tail_flag, plus{});
  }

  template <class ReductionOp> __device__ T Reduce(T input, ReductionOp reduction_op) {
    return Reduce(input, reduction_op, LogicalWarpThreads);
  }
  /// Of the first valid_items lanes.
  template <class ReductionOp> __device__ T Reduce(T input, ReductionOp reduction_op, int valid_items) {
    exchange(input);
    const int n = valid_items < LogicalWarpThreads ? valid_items : LogicalWarpThreads;
    return warp_.lane == 0 && n > 0 ? combine(0, n, reduction_op) : detail::poison(input);
  }
  /// A segment begins at each flag, and at the first lane.
  template <class ReductionOp, class FlagT>
  __device__ T HeadSegmentedReduce(T input, FlagT head_flag, ReductionOp reduction_op) {
    return segmented(input, flags(static_cast<bool>(head_flag)) | 1u, reduction_op);
  }
  /// A segment ends at each flag, and at the last lane.
  template <class ReductionOp, class FlagT>
  __device__ T TailSegmentedReduce(T input, FlagT tail_flag, ReductionOp reduction_op) {
    return segmented(input, flags(static_cast<bool>(tail_flag)) << 1 | 1u, reduction_op);
  }

 private:
  void exchange(const T& input) {
    storage_.values.put(warp_.lane, input);
    place_.warp_barrier(warp_.mask);
  }
  unsigned flags(bool mine) const {
    return (__ballot_sync(warp_.mask, mine, place_.file, place_.line) & warp_.mask) >> warp_.first;
  }
  template <class ReductionOp> T combine(int first, int last, ReductionOp& op) const {
    return detail::combine<T>([&](int i) { return storage_.values.get(i); }, first, last, op);
  }
  template <class ReductionOp> T segmented(const T& input, unsigned heads, ReductionOp& op) {
    exchange(input);
    if (!(heads >> warp_.lane & 1u)) return detail::poison(input);
    int end = warp_.lane + 1;
    while (end < LogicalWarpThreads && !(heads >> end & 1u)) ++end;
    return combine(warp_.lane, end, op);
  }

  TempStorage& storage_;
  detail::place place_;
  detail::logical_warp<LogicalWarpThreads> warp_;
};

}  // namespace cub

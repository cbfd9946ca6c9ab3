// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::WarpScan. An aggregate is without the initial value and is given to all lanes. See
//         detail/collective.cuh.

#include <cub/detail/collective.cuh>

namespace cub {

template <class T, int LogicalWarpThreads = 32> class WarpScan {
  using plus = ::cuda::std::plus<>;

 public:
  struct TempStorage {
    detail::shared_values<T, LogicalWarpThreads> values;
  };

  __device__ explicit WarpScan(TempStorage& storage, const char* file = __builtin_FILE(),
                               unsigned line = __builtin_LINE())
      : storage_(storage), place_{file, line} {}

  __device__ void InclusiveSum(T input, T& inclusive_output) { InclusiveScan(input, inclusive_output, plus{}); }
  __device__ void InclusiveSum(T input, T& inclusive_output, T& warp_aggregate) {
    InclusiveScan(input, inclusive_output, plus{}, warp_aggregate);
  }
  __device__ void ExclusiveSum(T input, T& exclusive_output) { ExclusiveScan(input, exclusive_output, T{}, plus{}); }
  __device__ void ExclusiveSum(T input, T& exclusive_output, T& warp_aggregate) {
    ExclusiveScan(input, exclusive_output, T{}, plus{}, warp_aggregate);
  }

  template <class ScanOp> __device__ void InclusiveScan(T input, T& inclusive_output, ScanOp scan_op) {
    inclusive_output = scan(input, scan_op).own;
  }
  template <class ScanOp> __device__ void InclusiveScan(T input, T& inclusive_output, T initial_value, ScanOp scan_op) {
    inclusive_output = static_cast<T>(scan_op(initial_value, scan(input, scan_op).own));
  }
  template <class ScanOp>
  __device__ void InclusiveScan(T input, T& inclusive_output, ScanOp scan_op, T& warp_aggregate) {
    const result r = scan(input, scan_op);
    inclusive_output = r.own;
    warp_aggregate = r.all;
  }
  template <class ScanOp>
  __device__ void InclusiveScan(T input, T& inclusive_output, T initial_value, ScanOp scan_op, T& warp_aggregate) {
    const result r = scan(input, scan_op);
    inclusive_output = static_cast<T>(scan_op(initial_value, r.own));
    warp_aggregate = r.all;
  }

  /// The first lane's output is undefined.
  template <class ScanOp> __device__ void ExclusiveScan(T input, T& exclusive_output, ScanOp scan_op) {
    exclusive_output = scan(input, scan_op).before;
  }
  template <class ScanOp> __device__ void ExclusiveScan(T input, T& exclusive_output, T initial_value, ScanOp scan_op) {
    T all = input;
    ExclusiveScan(input, exclusive_output, initial_value, scan_op, all);
  }
  /// The first lane's output is undefined.
  template <class ScanOp>
  __device__ void ExclusiveScan(T input, T& exclusive_output, ScanOp scan_op, T& warp_aggregate) {
    const result r = scan(input, scan_op);
    exclusive_output = r.before;
    warp_aggregate = r.all;
  }
  template <class ScanOp>
  __device__ void ExclusiveScan(T input, T& exclusive_output, T initial_value, ScanOp scan_op, T& warp_aggregate) {
    const result r = scan(input, scan_op);
    exclusive_output = warp_.lane == 0 ? initial_value : static_cast<T>(scan_op(initial_value, r.before));
    warp_aggregate = r.all;
  }

  /// The first lane's exclusive output is undefined.
  template <class ScanOp> __device__ void Scan(T input, T& inclusive_output, T& exclusive_output, ScanOp scan_op) {
    const result r = scan(input, scan_op);
    inclusive_output = r.own;
    exclusive_output = r.before;
  }
  template <class ScanOp>
  __device__ void Scan(T input, T& inclusive_output, T& exclusive_output, T initial_value, ScanOp scan_op) {
    const result r = scan(input, scan_op);
    inclusive_output = static_cast<T>(scan_op(initial_value, r.own));
    exclusive_output = warp_.lane == 0 ? initial_value : static_cast<T>(scan_op(initial_value, r.before));
  }

  __device__ T Broadcast(T input, unsigned src_lane) {
    exchange(input);
    return storage_.values.get(static_cast<int>(src_lane));
  }

 private:
  struct result {
    T before, own, all;  // what comes before this lane, with its own, and of the warp
  };

  void exchange(const T& input) {
    storage_.values.put(warp_.lane, input);
    place_.warp_barrier(warp_.mask);
  }
  template <class ScanOp> result scan(const T& input, ScanOp& op) {
    exchange(input);
    const auto get = [&](int i) { return storage_.values.get(i); };
    const int lane = warp_.lane;
    const T all = detail::combine<T>(get, 0, LogicalWarpThreads, op);
    if (lane == 0) return {detail::poison(input), input, all};
    const T before = detail::combine<T>(get, 0, lane, op);
    return {before, static_cast<T>(op(before, input)), all};
  }

  TempStorage& storage_;
  detail::place place_;
  detail::logical_warp<LogicalWarpThreads> warp_;
};

}  // namespace cub

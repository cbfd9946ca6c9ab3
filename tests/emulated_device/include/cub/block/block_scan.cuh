// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::BlockScan. An aggregate is without the initial value and is given to all threads; a prefix callback is
//         called by the first warp, and what it returns to thread 0 counts. See detail/collective.cuh.

#include <cub/detail/collective.cuh>

namespace cub {

enum BlockScanAlgorithm {
  BLOCK_SCAN_RAKING,
  BLOCK_SCAN_RAKING_MEMOIZE,
  BLOCK_SCAN_WARP_SCANS,
};

template <class T, int BlockDimX, BlockScanAlgorithm Algorithm = BLOCK_SCAN_RAKING, int BlockDimY = 1,
          int BlockDimZ = 1>
class BlockScan {
  static constexpr int threads = BlockDimX * BlockDimY * BlockDimZ;
  using plus = ::cuda::std::plus<>;

 public:
  struct TempStorage {
    detail::shared_values<T, threads> values;
    detail::shared_values<T, 1> prefix;
  };

  __device__ explicit BlockScan(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE())
      : BlockScan(own_storage(), file, line) {}
  __device__ explicit BlockScan(TempStorage& storage, const char* file = __builtin_FILE(),
                                unsigned line = __builtin_LINE())
      : storage_(storage), place_{file, line} {}

  // ---- One item per thread

  __device__ void ExclusiveSum(T input, T& output) { ExclusiveScan(input, output, T{}, plus{}); }
  __device__ void ExclusiveSum(T input, T& output, T& block_aggregate) {
    ExclusiveScan(input, output, T{}, plus{}, block_aggregate);
  }
  template <class Callback> __device__ void ExclusiveSum(T input, T& output, Callback& block_prefix_callback_op) {
    ExclusiveScan(input, output, plus{}, block_prefix_callback_op);
  }

  template <class ScanOp> __device__ void ExclusiveScan(T input, T& output, T initial_value, ScanOp scan_op) {
    T all = input;
    ExclusiveScan(input, output, initial_value, scan_op, all);
  }
  template <class ScanOp>
  __device__ void ExclusiveScan(T input, T& output, T initial_value, ScanOp scan_op, T& block_aggregate) {
    const result r = scan(input, scan_op);
    output = r.first ? initial_value : static_cast<T>(scan_op(initial_value, r.before));
    block_aggregate = r.all;
  }
  template <class ScanOp, class Callback>
  __device__ void ExclusiveScan(T input, T& output, ScanOp scan_op, Callback& block_prefix_callback_op) {
    const result r = scan(input, scan_op);
    const T prefix = share(r.all, block_prefix_callback_op);
    output = r.first ? prefix : static_cast<T>(scan_op(prefix, r.before));
  }
  /// Thread 0's output is undefined.
  template <class ScanOp> __device__ void ExclusiveScan(T input, T& output, ScanOp scan_op) {
    output = scan(input, scan_op).before;
  }
  /// Thread 0's output is undefined.
  template <class ScanOp> __device__ void ExclusiveScan(T input, T& output, ScanOp scan_op, T& block_aggregate) {
    const result r = scan(input, scan_op);
    output = r.before;
    block_aggregate = r.all;
  }

  __device__ void InclusiveSum(T input, T& output) { InclusiveScan(input, output, plus{}); }
  __device__ void InclusiveSum(T input, T& output, T& block_aggregate) {
    InclusiveScan(input, output, plus{}, block_aggregate);
  }
  template <class Callback> __device__ void InclusiveSum(T input, T& output, Callback& block_prefix_callback_op) {
    InclusiveScan(input, output, plus{}, block_prefix_callback_op);
  }

  template <class ScanOp> __device__ void InclusiveScan(T input, T& output, ScanOp scan_op) {
    output = scan(input, scan_op).own;
  }
  template <class ScanOp> __device__ void InclusiveScan(T input, T& output, ScanOp scan_op, T& block_aggregate) {
    const result r = scan(input, scan_op);
    output = r.own;
    block_aggregate = r.all;
  }
  template <class ScanOp, class Callback>
  __device__ void InclusiveScan(T input, T& output, ScanOp scan_op, Callback& block_prefix_callback_op) {
    const result r = scan(input, scan_op);
    output = static_cast<T>(scan_op(share(r.all, block_prefix_callback_op), r.own));
  }

  // ---- Several consecutive items per thread

  template <int Items> __device__ void ExclusiveSum(T (&input)[Items], T (&output)[Items]) {
    ExclusiveScan(input, output, T{}, plus{});
  }
  template <int Items> __device__ void ExclusiveSum(T (&input)[Items], T (&output)[Items], T& block_aggregate) {
    ExclusiveScan(input, output, T{}, plus{}, block_aggregate);
  }
  template <int Items, class Callback>
  __device__ void ExclusiveSum(T (&input)[Items], T (&output)[Items], Callback& block_prefix_callback_op) {
    ExclusiveScan(input, output, plus{}, block_prefix_callback_op);
  }

  template <int Items, class ScanOp>
  __device__ void ExclusiveScan(T (&input)[Items], T (&output)[Items], T initial_value, ScanOp scan_op) {
    T prefix = initial_value;
    ExclusiveScan(detail::combine(input, scan_op), prefix, initial_value, scan_op);
    exclusive(input, output, scan_op, prefix);
  }
  template <int Items, class ScanOp>
  __device__ void ExclusiveScan(T (&input)[Items], T (&output)[Items], T initial_value, ScanOp scan_op,
                                T& block_aggregate) {
    T prefix = initial_value;
    ExclusiveScan(detail::combine(input, scan_op), prefix, initial_value, scan_op, block_aggregate);
    exclusive(input, output, scan_op, prefix);
  }
  template <int Items, class ScanOp, class Callback>
  __device__ void ExclusiveScan(T (&input)[Items], T (&output)[Items], ScanOp scan_op,
                                Callback& block_prefix_callback_op) {
    T prefix = input[0];
    ExclusiveScan(detail::combine(input, scan_op), prefix, scan_op, block_prefix_callback_op);
    exclusive(input, output, scan_op, prefix);
  }

  template <int Items> __device__ void InclusiveSum(T (&input)[Items], T (&output)[Items]) {
    InclusiveScan(input, output, plus{});
  }
  template <int Items> __device__ void InclusiveSum(T (&input)[Items], T (&output)[Items], T& block_aggregate) {
    InclusiveScan(input, output, plus{}, block_aggregate);
  }
  template <int Items, class Callback>
  __device__ void InclusiveSum(T (&input)[Items], T (&output)[Items], Callback& block_prefix_callback_op) {
    InclusiveScan(input, output, plus{}, block_prefix_callback_op);
  }

  template <int Items, class ScanOp>
  __device__ void InclusiveScan(T (&input)[Items], T (&output)[Items], ScanOp scan_op) {
    T all = input[0];
    InclusiveScan(input, output, scan_op, all);
  }
  template <int Items, class ScanOp>
  __device__ void InclusiveScan(T (&input)[Items], T (&output)[Items], ScanOp scan_op, T& block_aggregate) {
    const result r = scan(detail::combine(input, scan_op), scan_op);
    block_aggregate = r.all;
    inclusive(input, output, scan_op, r.first ? nullptr : &r.before);
  }
  template <int Items, class ScanOp>
  __device__ void InclusiveScan(T (&input)[Items], T (&output)[Items], T initial_value, ScanOp scan_op) {
    T all = input[0];
    InclusiveScan(input, output, initial_value, scan_op, all);
  }
  template <int Items, class ScanOp>
  __device__ void InclusiveScan(T (&input)[Items], T (&output)[Items], T initial_value, ScanOp scan_op,
                                T& block_aggregate) {
    T prefix = initial_value;
    ExclusiveScan(detail::combine(input, scan_op), prefix, initial_value, scan_op, block_aggregate);
    inclusive(input, output, scan_op, &prefix);
  }
  template <int Items, class ScanOp, class Callback>
  __device__ void InclusiveScan(T (&input)[Items], T (&output)[Items], ScanOp scan_op,
                                Callback& block_prefix_callback_op) {
    T prefix = input[0];
    ExclusiveScan(detail::combine(input, scan_op), prefix, scan_op, block_prefix_callback_op);
    inclusive(input, output, scan_op, &prefix);
  }

 private:
  struct result {
    T before, own, all;  // what comes before this thread, with its own, and of the block
    bool first;          // nothing comes before
  };

  template <class ScanOp> result scan(const T& input, ScanOp& op) {
    storage_.values.put(thread_, input);
    place_.block_barrier();
    if (thread_ == 0) {
      constexpr int group = 5;
      for (int first = 0; first < threads; first += group) {
        const int end = first + group < threads ? first + group : threads;
        for (int i = first + 1; i < end; ++i) {
          const T both = static_cast<T>(op(storage_.values.get(i - 1), storage_.values.get(i)));
          storage_.values.put(i, both);
        }
        if (first == 0) continue;
        const T before = storage_.values.get(first - 1);
        for (int i = first; i < end; ++i) {
          const T both = static_cast<T>(op(before, storage_.values.get(i)));
          storage_.values.put(i, both);
        }
      }
    }
    place_.block_barrier();
    const bool first = thread_ == 0;
    return {first ? detail::poison(input) : storage_.values.get(thread_ - 1), storage_.values.get(thread_),
            storage_.values.get(threads - 1), first};
  }

  template <class Callback> T share(const T& all, Callback& callback) {
    if (thread_ < 32) {
      const T prefix = callback(all);
      if (thread_ == 0) storage_.prefix.put(0, prefix);
    }
    place_.block_barrier();
    return storage_.prefix.get(0);
  }

  template <int Items, class ScanOp>
  static void exclusive(const T (&input)[Items], T (&output)[Items], ScanOp& op, T prefix) {
    for (int i = 0; i < Items; ++i) {
      const T next = static_cast<T>(op(prefix, input[i]));
      output[i] = prefix;
      prefix = next;
    }
  }
  template <int Items, class ScanOp>
  static void inclusive(const T (&input)[Items], T (&output)[Items], ScanOp& op, const T* prefix) {
    output[0] = prefix ? static_cast<T>(op(*prefix, input[0])) : input[0];
    for (int i = 1; i < Items; ++i) output[i] = static_cast<T>(op(output[i - 1], input[i]));
  }

  static TempStorage& own_storage() {
    HEDDLE_SHARED(TempStorage, own);
    return own;
  }

  TempStorage& storage_;
  detail::place place_;
  int thread_ = detail::thread_in_block<BlockDimX, BlockDimY, BlockDimZ>("cub::BlockScan");
};

}  // namespace cub

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::DeviceScan, in place too. See detail/device_call.cuh. Items combine in groups of seven, whose results
//         are prefixed afterwards: the operator must be associative, and CUB promises no grouping.
// Limits: no scans by key.

#include <cub/detail/device_call.cuh>
#include <cub/thread/thread_operators.cuh>

#include <optional>

namespace cub {

struct DeviceScan {
  template <class InputIteratorT, class OutputIteratorT, class NumItemsT>
  static cudaError_t ExclusiveSum(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                                  OutputIteratorT d_out, NumItemsT num_items, cudaStream_t stream = nullptr) {
    using value = detail::value_of<InputIteratorT>;
    return run<true>("cub::DeviceScan::ExclusiveSum", d_temp_storage, temp_storage_bytes, d_in, d_out,
                     ::cuda::std::plus<>{}, value{}, num_items, stream);
  }
  template <class IteratorT, class NumItemsT>
  static cudaError_t ExclusiveSum(void* d_temp_storage, std::size_t& temp_storage_bytes, IteratorT d_data,
                                  NumItemsT num_items, cudaStream_t stream = nullptr) {
    return ExclusiveSum(d_temp_storage, temp_storage_bytes, d_data, d_data, num_items, stream);
  }

  /// The initial value may be a FutureValue.
  template <class InputIteratorT, class OutputIteratorT, class ScanOpT, class InitValueT, class NumItemsT>
  static cudaError_t ExclusiveScan(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                                   OutputIteratorT d_out, ScanOpT scan_op, InitValueT init_value, NumItemsT num_items,
                                   cudaStream_t stream = nullptr) {
    return run<true>("cub::DeviceScan::ExclusiveScan", d_temp_storage, temp_storage_bytes, d_in, d_out, scan_op,
                     init_value, num_items, stream);
  }
  template <class IteratorT, class ScanOpT, class InitValueT, class NumItemsT>
  static cudaError_t ExclusiveScan(void* d_temp_storage, std::size_t& temp_storage_bytes, IteratorT d_data,
                                   ScanOpT scan_op, InitValueT init_value, NumItemsT num_items,
                                   cudaStream_t stream = nullptr) {
    return ExclusiveScan(d_temp_storage, temp_storage_bytes, d_data, d_data, scan_op, init_value, num_items, stream);
  }

  template <class InputIteratorT, class OutputIteratorT, class NumItemsT>
  static cudaError_t InclusiveSum(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                                  OutputIteratorT d_out, NumItemsT num_items, cudaStream_t stream = nullptr) {
    return run<false>("cub::DeviceScan::InclusiveSum", d_temp_storage, temp_storage_bytes, d_in, d_out,
                      ::cuda::std::plus<>{}, NullType{}, num_items, stream);
  }
  template <class IteratorT, class NumItemsT>
  static cudaError_t InclusiveSum(void* d_temp_storage, std::size_t& temp_storage_bytes, IteratorT d_data,
                                  NumItemsT num_items, cudaStream_t stream = nullptr) {
    return InclusiveSum(d_temp_storage, temp_storage_bytes, d_data, d_data, num_items, stream);
  }

  template <class InputIteratorT, class OutputIteratorT, class ScanOpT, class NumItemsT>
  static cudaError_t InclusiveScan(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                                   OutputIteratorT d_out, ScanOpT scan_op, NumItemsT num_items,
                                   cudaStream_t stream = nullptr) {
    return run<false>("cub::DeviceScan::InclusiveScan", d_temp_storage, temp_storage_bytes, d_in, d_out, scan_op,
                      NullType{}, num_items, stream);
  }
  template <class IteratorT, class ScanOpT, class NumItemsT>
  static cudaError_t InclusiveScan(void* d_temp_storage, std::size_t& temp_storage_bytes, IteratorT d_data,
                                   ScanOpT scan_op, NumItemsT num_items, cudaStream_t stream = nullptr) {
    return InclusiveScan(d_temp_storage, temp_storage_bytes, d_data, d_data, scan_op, num_items, stream);
  }

  template <class InputIteratorT, class OutputIteratorT, class ScanOpT, class InitValueT, class NumItemsT>
  static cudaError_t InclusiveScanInit(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                                       OutputIteratorT d_out, ScanOpT scan_op, InitValueT init_value,
                                       NumItemsT num_items, cudaStream_t stream = nullptr) {
    return run<false>("cub::DeviceScan::InclusiveScanInit", d_temp_storage, temp_storage_bytes, d_in, d_out, scan_op,
                      init_value, num_items, stream);
  }

 private:
  // The type of the initial value: that of the items where there is none.
  template <class Init, class Input> struct initial { using type = Init; };
  template <class Input> struct initial<NullType, Input> { using type = Input; };
  template <class T, class Iterator, class Input> struct initial<FutureValue<T, Iterator>, Input> { using type = T; };

  template <bool Exclusive, class In, class Out, class Op, class Init, class Count>
  static cudaError_t run(const char* name, void* storage, std::size_t& bytes, In in, Out out, Op op, Init init,
                         Count count, cudaStream_t stream) {
    using input = detail::value_of<In>;
    using start = typename initial<Init, input>::type;
    using value = detail::accumulator<Op, input, start>;
    detail::device_call call(name, storage, bytes, count, stream);
    const std::uint64_t n = call.count();
    call.touches(in, n);
    call.touches(out, n);
    call.same_or_apart(in, out, n);
    return call.run([=]() mutable {
      constexpr std::uint64_t group = 7;
      std::optional<value> before;  // all groups so far
      if constexpr (!std::is_same_v<Init, NullType>) {
        if (n != 0) before.emplace(static_cast<value>(static_cast<start>(init)));
      }
      for (std::uint64_t first = 0; first < n; first += group) {
        const std::uint64_t items = n - first < group ? n - first : group;
        std::optional<value> own[group];
        for (std::uint64_t i = 0; i < items; ++i) {
          value item = static_cast<value>(detail::at(in, first + i));
          if (i == 0)
            own[i].emplace(item);
          else
            own[i].emplace(static_cast<value>(op(*own[i - 1], item)));
        }
        const auto with_before = [&](const value& v) { return before ? static_cast<value>(op(*before, v)) : v; };
        for (std::uint64_t i = 0; i < items; ++i) {
          if constexpr (Exclusive)
            detail::at(out, first + i) = i == 0 ? *before : with_before(*own[i - 1]);
          else
            detail::at(out, first + i) = with_before(*own[i]);
        }
        const value all = with_before(*own[items - 1]);
        before.emplace(all);
      }
    });
  }
};

}  // namespace cub

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::DeviceRunLengthEncode. See detail/device_call.cuh.

#include <cub/detail/device_call.cuh>

namespace cub {

struct DeviceRunLengthEncode {
  /// One item and one length for each run of equal items.
  template <class InputIteratorT, class UniqueOutputIteratorT, class LengthsOutputIteratorT,
            class NumRunsOutputIteratorT>
  static cudaError_t Encode(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                            UniqueOutputIteratorT d_unique_out, LengthsOutputIteratorT d_counts_out,
                            NumRunsOutputIteratorT d_num_runs_out, int num_items, cudaStream_t stream = nullptr) {
    detail::device_call call("cub::DeviceRunLengthEncode::Encode", d_temp_storage, temp_storage_bytes, num_items,
                             stream);
    return run(call, d_in, d_num_runs_out, [=](const auto& item, int, int length, int run) mutable {
      detail::at(d_unique_out, static_cast<std::uint64_t>(run)) = item;
      detail::at(d_counts_out, static_cast<std::uint64_t>(run)) = length;
      return true;
    });
  }

  /// Where each run of more than one item begins, and its length.
  template <class InputIteratorT, class OffsetsOutputIteratorT, class LengthsOutputIteratorT,
            class NumRunsOutputIteratorT>
  static cudaError_t NonTrivialRuns(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                                    OffsetsOutputIteratorT d_offsets_out, LengthsOutputIteratorT d_lengths_out,
                                    NumRunsOutputIteratorT d_num_runs_out, int num_items,
                                    cudaStream_t stream = nullptr) {
    detail::device_call call("cub::DeviceRunLengthEncode::NonTrivialRuns", d_temp_storage, temp_storage_bytes,
                             num_items, stream);
    return run(call, d_in, d_num_runs_out, [=](const auto&, int first, int length, int run) mutable {
      if (length == 1) return false;
      detail::at(d_offsets_out, static_cast<std::uint64_t>(run)) = first;
      detail::at(d_lengths_out, static_cast<std::uint64_t>(run)) = length;
      return true;
    });
  }

 private:
  template <class In, class NumberOut, class Write>
  static cudaError_t run(detail::device_call& call, In in, NumberOut number_out, Write write) {
    const int n = static_cast<int>(call.count());
    call.touches(in, call.count());
    call.touches(number_out, 1);
    call.apart(in, call.count(), number_out, 1);
    return call.run([=]() mutable {
      using value = detail::value_of<In>;
      int runs = 0;
      for (int first = 0, last = 0; first < n; first = last) {
        const value item = detail::at(in, static_cast<std::uint64_t>(first));
        for (last = first + 1; last < n; ++last)
          if (!(item == static_cast<value>(detail::at(in, static_cast<std::uint64_t>(last))))) break;
        if (write(item, first, last - first, runs)) ++runs;
      }
      *number_out = static_cast<detail::value_or<NumberOut, int>>(runs);
    });
  }
};

}  // namespace cub

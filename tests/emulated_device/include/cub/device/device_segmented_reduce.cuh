// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::DeviceSegmentedReduce: one result for each segment of the input. See detail/device_call.cuh and
//         detail/reduce.cuh.
// Limits: no ArgMin and ArgMax, and no segments of one fixed size.

#include <cub/detail/limits.cuh>
#include <cub/detail/reduce.cuh>
#include <cub/thread/thread_operators.cuh>

namespace cub {

struct DeviceSegmentedReduce {
  template <class InputIteratorT, class OutputIteratorT, class BeginOffsetIteratorT, class EndOffsetIteratorT,
            class ReductionOpT, class T>
  static cudaError_t Reduce(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                            OutputIteratorT d_out, std::int64_t num_segments, BeginOffsetIteratorT d_begin_offsets,
                            EndOffsetIteratorT d_end_offsets, ReductionOpT reduction_op, T initial_value,
                            cudaStream_t stream = nullptr) {
    return run("cub::DeviceSegmentedReduce::Reduce", d_temp_storage, temp_storage_bytes, d_in, d_out, num_segments,
               d_begin_offsets, d_end_offsets, reduction_op, initial_value, stream);
  }

  template <class InputIteratorT, class OutputIteratorT, class BeginOffsetIteratorT, class EndOffsetIteratorT>
  static cudaError_t Sum(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                         OutputIteratorT d_out, std::int64_t num_segments, BeginOffsetIteratorT d_begin_offsets,
                         EndOffsetIteratorT d_end_offsets, cudaStream_t stream = nullptr) {
    using value = detail::value_or<OutputIteratorT, detail::value_of<InputIteratorT>>;
    return run("cub::DeviceSegmentedReduce::Sum", d_temp_storage, temp_storage_bytes, d_in, d_out, num_segments,
               d_begin_offsets, d_end_offsets, ::cuda::std::plus<>{}, value{}, stream);
  }

  template <class InputIteratorT, class OutputIteratorT, class BeginOffsetIteratorT, class EndOffsetIteratorT>
  static cudaError_t Min(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                         OutputIteratorT d_out, std::int64_t num_segments, BeginOffsetIteratorT d_begin_offsets,
                         EndOffsetIteratorT d_end_offsets, cudaStream_t stream = nullptr) {
    return run("cub::DeviceSegmentedReduce::Min", d_temp_storage, temp_storage_bytes, d_in, d_out, num_segments,
               d_begin_offsets, d_end_offsets, ::cuda::minimum<>{},
               detail::greatest<detail::value_of<InputIteratorT>>(), stream);
  }

  template <class InputIteratorT, class OutputIteratorT, class BeginOffsetIteratorT, class EndOffsetIteratorT>
  static cudaError_t Max(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                         OutputIteratorT d_out, std::int64_t num_segments, BeginOffsetIteratorT d_begin_offsets,
                         EndOffsetIteratorT d_end_offsets, cudaStream_t stream = nullptr) {
    return run("cub::DeviceSegmentedReduce::Max", d_temp_storage, temp_storage_bytes, d_in, d_out, num_segments,
               d_begin_offsets, d_end_offsets, ::cuda::maximum<>{}, detail::least<detail::value_of<InputIteratorT>>(),
               stream);
  }

 private:
  template <class In, class Out, class Begins, class Ends, class Op, class Init>
  static cudaError_t run(const char* name, void* storage, std::size_t& bytes, In in, Out out, std::int64_t segments,
                         Begins begins, Ends ends, Op op, Init init, cudaStream_t stream) {
    using value = detail::accumulator<Op, detail::value_of<In>, Init>;
    detail::device_call call(name, storage, bytes, segments, stream);
    const std::uint64_t n = call.count();
    call.touches(out, n);
    call.touches(begins, n);
    call.touches(ends, n);
    call.apart(begins, n, out, n);
    call.apart(ends, n, out, n);
    return call.run([=]() mutable {
      for (std::uint64_t s = 0; s < n; ++s) {
        const auto first = static_cast<std::uint64_t>(detail::at(begins, s));
        const auto last = static_cast<std::uint64_t>(detail::at(ends, s));
        if (last < first) emulated::report_fault("segment " + std::to_string(s) + " ends before it begins");
        if (first >= last)
          detail::at(out, s) = init;
        else
          detail::at(out, s) = op(init, detail::reduce<value>(in, first, last, op, detail::identity{}));
      }
    });
  }
};

}  // namespace cub

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::DevicePartition into two parts. See detail/device_call.cuh. What is selected keeps its order and comes
//         first; the rest follows in reverse order.
// Limits: no partition into three.

#include <cub/detail/device_call.cuh>

namespace cub {

struct DevicePartition {
  template <class InputIteratorT, class FlagIterator, class OutputIteratorT, class NumSelectedIteratorT,
            class NumItemsT>
  static cudaError_t Flagged(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                             FlagIterator d_flags, OutputIteratorT d_out, NumSelectedIteratorT d_num_selected_out,
                             NumItemsT num_items, cudaStream_t stream = nullptr) {
    detail::device_call call("cub::DevicePartition::Flagged", d_temp_storage, temp_storage_bytes, num_items, stream);
    call.touches(d_flags, call.count());
    return run(call, d_in, d_out, d_num_selected_out,
               [=](const auto&, std::uint64_t i) mutable { return static_cast<bool>(detail::at(d_flags, i)); });
  }

  template <class InputIteratorT, class OutputIteratorT, class NumSelectedIteratorT, class SelectOp, class NumItemsT>
  static cudaError_t If(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                        OutputIteratorT d_out, NumSelectedIteratorT d_num_selected_out, NumItemsT num_items,
                        SelectOp select_op, cudaStream_t stream = nullptr) {
    detail::device_call call("cub::DevicePartition::If", d_temp_storage, temp_storage_bytes, num_items, stream);
    return run(call, d_in, d_out, d_num_selected_out,
               [=](const auto& item, std::uint64_t) mutable { return static_cast<bool>(select_op(item)); });
  }

 private:
  template <class In, class Out, class NumberOut, class First>
  static cudaError_t run(detail::device_call& call, In in, Out out, NumberOut number_out, First first) {
    const std::uint64_t n = call.count();
    call.touches(in, n);
    call.touches(out, n);
    call.touches(number_out, 1);
    call.apart(in, n, out, n);
    call.apart(in, n, number_out, 1);
    call.apart(out, n, number_out, 1);
    return call.run([=]() mutable {
      std::uint64_t begin = 0, end = n;
      for (std::uint64_t i = 0; i < n; ++i) {
        const detail::value_of<In> item = detail::at(in, i);
        detail::at(out, first(item, i) ? begin++ : --end) = item;
      }
      *number_out = static_cast<detail::value_or<NumberOut, std::int64_t>>(begin);
    });
  }
};

}  // namespace cub

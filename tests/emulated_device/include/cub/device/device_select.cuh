// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::DeviceSelect. See detail/device_call.cuh. What is selected keeps its order.
// Limits: no UniqueByKey.

#include <cub/detail/device_call.cuh>

namespace cub {

struct DeviceSelect {
  template <class InputIteratorT, class FlagIterator, class OutputIteratorT, class NumSelectedIteratorT>
  static cudaError_t Flagged(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                             FlagIterator d_flags, OutputIteratorT d_out, NumSelectedIteratorT d_num_selected_out,
                             std::int64_t num_items, cudaStream_t stream = nullptr) {
    detail::device_call call("cub::DeviceSelect::Flagged", d_temp_storage, temp_storage_bytes, num_items, stream);
    call.touches(d_flags, call.count());
    return run(call, d_in, d_out, d_num_selected_out, false,
               [=](const auto&, std::uint64_t i) mutable { return static_cast<bool>(detail::at(d_flags, i)); });
  }
  template <class IteratorT, class FlagIterator, class NumSelectedIteratorT>
  static cudaError_t Flagged(void* d_temp_storage, std::size_t& temp_storage_bytes, IteratorT d_data,
                             FlagIterator d_flags, NumSelectedIteratorT d_num_selected_out, std::int64_t num_items,
                             cudaStream_t stream = nullptr) {
    detail::device_call call("cub::DeviceSelect::Flagged", d_temp_storage, temp_storage_bytes, num_items, stream);
    call.touches(d_flags, call.count());
    return run(call, d_data, d_data, d_num_selected_out, true,
               [=](const auto&, std::uint64_t i) mutable { return static_cast<bool>(detail::at(d_flags, i)); });
  }

  template <class InputIteratorT, class OutputIteratorT, class NumSelectedIteratorT, class SelectOp>
  static cudaError_t If(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                        OutputIteratorT d_out, NumSelectedIteratorT d_num_selected_out, std::int64_t num_items,
                        SelectOp select_op, cudaStream_t stream = nullptr) {
    detail::device_call call("cub::DeviceSelect::If", d_temp_storage, temp_storage_bytes, num_items, stream);
    return run(call, d_in, d_out, d_num_selected_out, false,
               [=](const auto& item, std::uint64_t) mutable { return static_cast<bool>(select_op(item)); });
  }
  template <class IteratorT, class NumSelectedIteratorT, class SelectOp>
  static cudaError_t If(void* d_temp_storage, std::size_t& temp_storage_bytes, IteratorT d_data,
                        NumSelectedIteratorT d_num_selected_out, std::int64_t num_items, SelectOp select_op,
                        cudaStream_t stream = nullptr) {
    detail::device_call call("cub::DeviceSelect::If", d_temp_storage, temp_storage_bytes, num_items, stream);
    return run(call, d_data, d_data, d_num_selected_out, true,
               [=](const auto& item, std::uint64_t) mutable { return static_cast<bool>(select_op(item)); });
  }

  template <class InputIteratorT, class FlagIterator, class OutputIteratorT, class NumSelectedIteratorT, class SelectOp>
  static cudaError_t FlaggedIf(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                               FlagIterator d_flags, OutputIteratorT d_out, NumSelectedIteratorT d_num_selected_out,
                               std::int64_t num_items, SelectOp select_op, cudaStream_t stream = nullptr) {
    detail::device_call call("cub::DeviceSelect::FlaggedIf", d_temp_storage, temp_storage_bytes, num_items, stream);
    call.touches(d_flags, call.count());
    return run(call, d_in, d_out, d_num_selected_out, false, [=](const auto&, std::uint64_t i) mutable {
      return static_cast<bool>(select_op(detail::at(d_flags, i)));
    });
  }

  /// The first item of each run of equal ones.
  template <class InputIteratorT, class OutputIteratorT, class NumSelectedIteratorT>
  static cudaError_t Unique(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                            OutputIteratorT d_out, NumSelectedIteratorT d_num_selected_out, std::int64_t num_items,
                            cudaStream_t stream = nullptr) {
    using value = detail::value_of<InputIteratorT>;
    detail::device_call call("cub::DeviceSelect::Unique", d_temp_storage, temp_storage_bytes, num_items, stream);
    return run(call, d_in, d_out, d_num_selected_out, false, [=](const value& item, std::uint64_t i) mutable {
      return i == 0 || !(static_cast<value>(detail::at(d_in, i - 1)) == item);
    });
  }

 private:
  template <class In, class Out, class NumberOut, class Keep>
  static cudaError_t run(detail::device_call& call, In in, Out out, NumberOut number_out, bool in_place, Keep keep) {
    const std::uint64_t n = call.count();
    call.touches(in, n);
    call.touches(number_out, 1);
    call.apart(in, n, number_out, 1);
    if (!in_place) call.apart(in, n, out, 1);
    return call.run([=]() mutable {
      std::uint64_t kept = 0;
      for (std::uint64_t i = 0; i < n; ++i) {
        const detail::value_of<In> item = detail::at(in, i);
        if (keep(item, i)) detail::at(out, kept++) = item;
      }
      *number_out = static_cast<detail::value_or<NumberOut, std::int64_t>>(kept);
    });
  }
};

}  // namespace cub

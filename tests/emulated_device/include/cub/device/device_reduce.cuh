// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::DeviceReduce. See detail/device_call.cuh and detail/reduce.cuh.
// Limits: no ReduceByKey, and none of the deprecated ArgMin and ArgMax that write pairs.

#include <cub/detail/limits.cuh>
#include <cub/detail/reduce.cuh>
#include <cub/thread/thread_operators.cuh>

namespace cub {

struct DeviceReduce {
  template <class InputIteratorT, class OutputIteratorT, class ReductionOpT, class T, class NumItemsT>
  static cudaError_t Reduce(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                            OutputIteratorT d_out, NumItemsT num_items, ReductionOpT reduction_op, T init,
                            cudaStream_t stream = nullptr) {
    return run("cub::DeviceReduce::Reduce", d_temp_storage, temp_storage_bytes, d_in, d_out, num_items, reduction_op,
               detail::identity{}, init, stream);
  }

  template <class InputIteratorT, class OutputIteratorT, class ReductionOpT, class TransformOpT, class T,
            class NumItemsT>
  static cudaError_t TransformReduce(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                                     OutputIteratorT d_out, NumItemsT num_items, ReductionOpT reduction_op,
                                     TransformOpT transform_op, T init, cudaStream_t stream = nullptr) {
    return run("cub::DeviceReduce::TransformReduce", d_temp_storage, temp_storage_bytes, d_in, d_out, num_items,
               reduction_op, transform_op, init, stream);
  }

  template <class InputIteratorT, class OutputIteratorT, class NumItemsT>
  static cudaError_t Sum(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                         OutputIteratorT d_out, NumItemsT num_items, cudaStream_t stream = nullptr) {
    using value = detail::value_or<OutputIteratorT, detail::value_of<InputIteratorT>>;
    return run("cub::DeviceReduce::Sum", d_temp_storage, temp_storage_bytes, d_in, d_out, num_items,
               ::cuda::std::plus<>{}, detail::identity{}, value{}, stream);
  }

  /// Begins with the greatest finite value, as CUB does: the minimum of infinities is finite.
  template <class InputIteratorT, class OutputIteratorT, class NumItemsT>
  static cudaError_t Min(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                         OutputIteratorT d_out, NumItemsT num_items, cudaStream_t stream = nullptr) {
    return run("cub::DeviceReduce::Min", d_temp_storage, temp_storage_bytes, d_in, d_out, num_items,
               ::cuda::minimum<>{}, detail::identity{}, detail::greatest<detail::value_of<InputIteratorT>>(), stream);
  }

  /// Begins with the least finite value, as CUB does.
  template <class InputIteratorT, class OutputIteratorT, class NumItemsT>
  static cudaError_t Max(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                         OutputIteratorT d_out, NumItemsT num_items, cudaStream_t stream = nullptr) {
    return run("cub::DeviceReduce::Max", d_temp_storage, temp_storage_bytes, d_in, d_out, num_items,
               ::cuda::maximum<>{}, detail::identity{}, detail::least<detail::value_of<InputIteratorT>>(), stream);
  }

  /// Of nothing: the greatest value, at 1.
  template <class InputIteratorT, class ExtremumOutIteratorT, class IndexOutIteratorT>
  static cudaError_t ArgMin(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                            ExtremumOutIteratorT d_min_out, IndexOutIteratorT d_index_out, std::int64_t num_items,
                            cudaStream_t stream = nullptr) {
    return find("cub::DeviceReduce::ArgMin", d_temp_storage, temp_storage_bytes, d_in, d_min_out, d_index_out,
                num_items, ::cub::ArgMin{}, detail::greatest<detail::value_of<InputIteratorT>>(), stream);
  }

  /// Of nothing: the least value, at 1.
  template <class InputIteratorT, class ExtremumOutIteratorT, class IndexOutIteratorT>
  static cudaError_t ArgMax(void* d_temp_storage, std::size_t& temp_storage_bytes, InputIteratorT d_in,
                            ExtremumOutIteratorT d_max_out, IndexOutIteratorT d_index_out, std::int64_t num_items,
                            cudaStream_t stream = nullptr) {
    return find("cub::DeviceReduce::ArgMax", d_temp_storage, temp_storage_bytes, d_in, d_max_out, d_index_out,
                num_items, ::cub::ArgMax{}, detail::least<detail::value_of<InputIteratorT>>(), stream);
  }

 private:
  template <class In, class Out, class Count, class Op, class Transform, class Init>
  static cudaError_t run(const char* name, void* storage, std::size_t& bytes, In in, Out out, Count count, Op op,
                         Transform transform, Init init, cudaStream_t stream) {
    using input = std::decay_t<std::invoke_result_t<Transform&, detail::value_of<In>>>;
    using value = detail::accumulator<Op, input, Init>;
    detail::device_call call(name, storage, bytes, count, stream);
    const std::uint64_t n = call.count();
    call.touches(in, n);
    call.touches(out, 1);
    call.apart(in, n, out, 1);
    return call.run([=]() mutable {
      if (n == 0)
        *out = init;
      else
        *out = op(init, detail::reduce<value>(in, 0, n, op, transform));
    });
  }

  // Pairs of position and value, made on the way.
  template <class In, class Value> struct numbered {
    using difference_type = std::ptrdiff_t;
    using value_type = KeyValuePair<std::int64_t, Value>;
    using reference = value_type;
    using iterator_category = std::random_access_iterator_tag;
    In in;
    value_type operator[](difference_type i) { return {i, static_cast<Value>(in[i])}; }
  };

  template <class In, class ValueOut, class IndexOut, class Op, class Value>
  static cudaError_t find(const char* name, void* storage, std::size_t& bytes, In in, ValueOut value_out,
                          IndexOut index_out, std::int64_t count, Op op, Value none, cudaStream_t stream) {
    using pair = KeyValuePair<std::int64_t, Value>;
    detail::device_call call(name, storage, bytes, count, stream);
    const std::uint64_t n = call.count();
    call.touches(in, n);
    call.touches(value_out, 1);
    call.touches(index_out, 1);
    call.apart(in, n, value_out, 1);
    call.apart(in, n, index_out, 1);
    return call.run([=]() mutable {
      const pair found =
          n == 0 ? pair(1, none) : detail::reduce<pair>(numbered<In, Value>{in}, 0, n, op, detail::identity{});
      *value_out = found.value;
      *index_out = found.key;
    });
  }
};

}  // namespace cub

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::DeviceRadixSort of numbers, the 16-bit ones included: stable; -0 equals 0; a NaN lies where its bits put
//         it; only the bits [begin_bit, end_bit) of the key, made sortable, count. See detail/device_call.cuh.
//         With a DoubleBuffer the result lies in either buffer, by the number of items, and the other one is
//         overwritten.
// Limits: no decomposers of the caller's types.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cub/detail/device_call.cuh>

#include <algorithm>
#include <vector>

namespace cub {

namespace detail {

/// A key's bits, such that they sort as unsigned numbers.
template <class Key> struct sortable {
  static constexpr bool floating =
      std::is_floating_point_v<Key> || std::is_same_v<Key, __half> || std::is_same_v<Key, __nv_bfloat16>;
  static_assert(floating || std::is_integral_v<Key> || sizeof(Key) == 16, "cub::DeviceRadixSort: keys must be numbers");
  using bits = std::conditional_t<
      sizeof(Key) == 1, std::uint8_t,
      std::conditional_t<sizeof(Key) == 2, std::uint16_t,
                         std::conditional_t<sizeof(Key) == 4, std::uint32_t,
                                            std::conditional_t<sizeof(Key) == 8, std::uint64_t, unsigned __int128>>>>;
  static_assert(sizeof(bits) == sizeof(Key));
  static constexpr int width = static_cast<int>(8 * sizeof(Key));
  static constexpr bits sign = static_cast<bits>(bits{1} << (width - 1));

  static bits of(const Key& key) {
    bits b;
    std::memcpy(&b, &key, sizeof b);
    if constexpr (floating) {
      if (b == sign) b = 0;  // -0
      return static_cast<bits>(b & sign ? ~b : b | sign);
    }
    return static_cast<Key>(-1) < Key{} ? static_cast<bits>(b ^ sign) : b;
  }
  static bits digit(const Key& key, bool descending, int begin, int end) {
    if (begin == end) return 0;
    const bits b = descending ? static_cast<bits>(~of(key)) : of(key);
    return static_cast<bits>(static_cast<bits>(b << (width - end)) >> (width - end + begin));
  }
};

}  // namespace detail

struct DeviceRadixSort {
  template <class KeyT, class ValueT, class NumItemsT>
  static cudaError_t SortPairs(void* d_temp_storage, std::size_t& temp_storage_bytes, const KeyT* d_keys_in,
                               KeyT* d_keys_out, const ValueT* d_values_in, ValueT* d_values_out, NumItemsT num_items,
                               int begin_bit = 0, int end_bit = sizeof(KeyT) * 8, cudaStream_t stream = nullptr) {
    return apart("cub::DeviceRadixSort::SortPairs", false, d_temp_storage, temp_storage_bytes, d_keys_in, d_keys_out,
                 d_values_in, d_values_out, num_items, begin_bit, end_bit, stream);
  }
  template <class KeyT, class ValueT, class NumItemsT>
  static cudaError_t SortPairs(void* d_temp_storage, std::size_t& temp_storage_bytes, DoubleBuffer<KeyT>& d_keys,
                               DoubleBuffer<ValueT>& d_values, NumItemsT num_items, int begin_bit = 0,
                               int end_bit = sizeof(KeyT) * 8, cudaStream_t stream = nullptr) {
    return twice("cub::DeviceRadixSort::SortPairs", false, d_temp_storage, temp_storage_bytes, d_keys, d_values,
                 num_items, begin_bit, end_bit, stream);
  }
  template <class KeyT, class ValueT, class NumItemsT>
  static cudaError_t SortPairsDescending(void* d_temp_storage, std::size_t& temp_storage_bytes, const KeyT* d_keys_in,
                                         KeyT* d_keys_out, const ValueT* d_values_in, ValueT* d_values_out,
                                         NumItemsT num_items, int begin_bit = 0, int end_bit = sizeof(KeyT) * 8,
                                         cudaStream_t stream = nullptr) {
    return apart("cub::DeviceRadixSort::SortPairsDescending", true, d_temp_storage, temp_storage_bytes, d_keys_in,
                 d_keys_out, d_values_in, d_values_out, num_items, begin_bit, end_bit, stream);
  }
  template <class KeyT, class ValueT, class NumItemsT>
  static cudaError_t SortPairsDescending(void* d_temp_storage, std::size_t& temp_storage_bytes,
                                         DoubleBuffer<KeyT>& d_keys, DoubleBuffer<ValueT>& d_values,
                                         NumItemsT num_items, int begin_bit = 0, int end_bit = sizeof(KeyT) * 8,
                                         cudaStream_t stream = nullptr) {
    return twice("cub::DeviceRadixSort::SortPairsDescending", true, d_temp_storage, temp_storage_bytes, d_keys,
                 d_values, num_items, begin_bit, end_bit, stream);
  }

  template <class KeyT, class NumItemsT>
  static cudaError_t SortKeys(void* d_temp_storage, std::size_t& temp_storage_bytes, const KeyT* d_keys_in,
                              KeyT* d_keys_out, NumItemsT num_items, int begin_bit = 0, int end_bit = sizeof(KeyT) * 8,
                              cudaStream_t stream = nullptr) {
    return apart("cub::DeviceRadixSort::SortKeys", false, d_temp_storage, temp_storage_bytes, d_keys_in, d_keys_out,
                 none(), none(), num_items, begin_bit, end_bit, stream);
  }
  template <class KeyT, class NumItemsT>
  static cudaError_t SortKeys(void* d_temp_storage, std::size_t& temp_storage_bytes, DoubleBuffer<KeyT>& d_keys,
                              NumItemsT num_items, int begin_bit = 0, int end_bit = sizeof(KeyT) * 8,
                              cudaStream_t stream = nullptr) {
    DoubleBuffer<NullType> values;
    return twice("cub::DeviceRadixSort::SortKeys", false, d_temp_storage, temp_storage_bytes, d_keys, values, num_items,
                 begin_bit, end_bit, stream);
  }
  template <class KeyT, class NumItemsT>
  static cudaError_t SortKeysDescending(void* d_temp_storage, std::size_t& temp_storage_bytes, const KeyT* d_keys_in,
                                        KeyT* d_keys_out, NumItemsT num_items, int begin_bit = 0,
                                        int end_bit = sizeof(KeyT) * 8, cudaStream_t stream = nullptr) {
    return apart("cub::DeviceRadixSort::SortKeysDescending", true, d_temp_storage, temp_storage_bytes, d_keys_in,
                 d_keys_out, none(), none(), num_items, begin_bit, end_bit, stream);
  }
  template <class KeyT, class NumItemsT>
  static cudaError_t SortKeysDescending(void* d_temp_storage, std::size_t& temp_storage_bytes,
                                        DoubleBuffer<KeyT>& d_keys, NumItemsT num_items, int begin_bit = 0,
                                        int end_bit = sizeof(KeyT) * 8, cudaStream_t stream = nullptr) {
    DoubleBuffer<NullType> values;
    return twice("cub::DeviceRadixSort::SortKeysDescending", true, d_temp_storage, temp_storage_bytes, d_keys, values,
                 num_items, begin_bit, end_bit, stream);
  }

 private:
  static NullType* none() { return nullptr; }

  template <class Key> static bool no_bits(int begin, int end) {
    return begin < 0 || end < begin || end > static_cast<int>(sizeof(Key) * 8);
  }

  template <class Key, class ValueIn, class Value, class Count>
  static cudaError_t apart(const char* name, bool descending, void* storage, std::size_t& bytes, const Key* keys_in,
                           Key* keys_out, ValueIn* values_in, Value* values_out, Count count, int begin, int end,
                           cudaStream_t stream) {
    if (no_bits<Key>(begin, end)) return cudaErrorInvalidValue;
    detail::device_call call(name, storage, bytes, count, stream);
    const std::uint64_t n = call.count();
    call.touches(keys_in, n);
    call.touches(keys_out, n);
    call.apart(keys_in, n, keys_out, n);
    if constexpr (!std::is_same_v<Value, NullType>) {
      call.touches(values_in, n);
      call.touches(values_out, n);
      call.apart(values_in, n, values_out, n);
      call.apart(keys_in, n, values_out, n);
      call.apart(keys_out, n, values_in, n);
      call.apart(keys_out, n, values_out, n);
    }
    return call.run([=] { sort<Key, Value>(descending, keys_in, keys_out, values_in, values_out, n, begin, end); });
  }

  template <class Key, class Value, class Count>
  static cudaError_t twice(const char* name, bool descending, void* storage, std::size_t& bytes,
                           DoubleBuffer<Key>& keys, DoubleBuffer<Value>& values, Count count, int begin, int end,
                           cudaStream_t stream) {
    constexpr bool pairs = !std::is_same_v<Value, NullType>;
    if (no_bits<Key>(begin, end)) return cudaErrorInvalidValue;
    detail::device_call call(name, storage, bytes, count, stream);
    const std::uint64_t n = call.count();
    Key *const key = keys.Current(), *const other_key = keys.Alternate();
    Value *const value = values.Current(), *const other_value = values.Alternate();
    call.touches(key, n);
    call.touches(other_key, n);
    call.apart(key, n, other_key, n);
    if constexpr (pairs) {
      call.touches(value, n);
      call.touches(other_value, n);
      call.apart(value, n, other_value, n);
      for (Key* k : keys.d_buffers)
        for (Value* v : values.d_buffers) call.apart(k, n, v, n);
    }
    const bool idle = n == 0 || begin == end;
    const bool moves = !idle && (n + static_cast<std::uint64_t>(end - begin)) % 3 != 0;
    const cudaError_t code = call.run([=] {
      if (idle) return;
      sort<Key, Value>(descending, key, moves ? other_key : key, value, moves ? other_value : value, n, begin, end);
      std::memset(static_cast<void*>(moves ? key : other_key), 0xcd, n * sizeof(Key));
      if constexpr (pairs) std::memset(static_cast<void*>(moves ? value : other_value), 0xcd, n * sizeof(Value));
    });
    if (code == cudaSuccess && !call.asks() && moves) {
      keys.selector ^= 1;
      values.selector ^= 1;
    }
    return code;
  }

  template <class Key, class Value>
  static void sort(bool descending, const Key* keys_in, Key* keys_out, const Value* values_in, Value* values_out,
                   std::uint64_t n, int begin, int end) {
    struct item {
      typename detail::sortable<Key>::bits digit;
      std::uint64_t from;
    };
    std::vector<item> items(n);
    for (std::uint64_t i = 0; i < n; ++i)
      items[i] = {detail::sortable<Key>::digit(keys_in[i], descending, begin, end), i};
    std::stable_sort(items.begin(), items.end(), [](const item& a, const item& b) { return a.digit < b.digit; });
    move(items, keys_in, keys_out, n);
    if constexpr (!std::is_same_v<Value, NullType>) move(items, values_in, values_out, n);
  }

  // As bytes: no value of a type with fewer values than bits is ever looked at.
  template <class Items, class T> static void move(const Items& items, const T* in, T* out, std::uint64_t n) {
    std::vector<unsigned char> copy(n * sizeof(T));
    if (n != 0) std::memcpy(copy.data(), static_cast<const void*>(in), n * sizeof(T));
    for (std::uint64_t i = 0; i < n; ++i)
      std::memcpy(static_cast<void*>(out + i), copy.data() + items[i].from * sizeof(T), sizeof(T));
  }
};

}  // namespace cub

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   the types that CUB's functions take: DoubleBuffer, KeyValuePair, FutureValue.

#include <cuda_runtime.h>
#include <cub/version.cuh>

#include <iterator>

namespace cub {

/// No value.
struct NullType {};

/// A key, or a position, and its value.
template <class KeyT, class ValueT> struct KeyValuePair {
  using Key = KeyT;
  using Value = ValueT;

  Key key;
  Value value;

  __host__ __device__ KeyValuePair() {}
  __host__ __device__ KeyValuePair(const Key& k, const Value& v) : key(k), value(v) {}
  __host__ __device__ bool operator!=(const KeyValuePair& b) const { return value != b.value || key != b.key; }
};

/// Two buffers of the same size, and which of them is the valid one.
template <class T> struct DoubleBuffer {
  T* d_buffers[2]{};
  int selector = 0;

  DoubleBuffer() = default;
  __host__ __device__ DoubleBuffer(T* current, T* alternate) : d_buffers{current, alternate} {}
  __host__ __device__ T* Current() { return d_buffers[selector]; }
  __host__ __device__ T* Alternate() { return d_buffers[selector ^ 1]; }
};

/// An initial value that lies in device memory and is read when the work runs.
template <class T, class Iterator = T*> struct FutureValue {
  using value_type = T;
  using iterator_type = Iterator;

  __host__ __device__ explicit FutureValue(Iterator from) : from_(from) {}
  __host__ __device__ operator T() const { return *from_; }

 private:
  Iterator from_;
};
template <class Iterator>
FutureValue(Iterator) -> FutureValue<typename std::iterator_traits<Iterator>::value_type, Iterator>;

}  // namespace cub

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   CUB's operators on pairs of position and value. cuda::std::plus, cuda::minimum and cuda::maximum come along.

#include <cub/util_type.cuh>
#include <cuda/functional>
#include <cuda/std/functional>

namespace cub {

/// The smaller value; of equal ones, that with the lower position.
struct ArgMin {
  template <class T, class Offset>
  __host__ __device__ KeyValuePair<Offset, T> operator()(const KeyValuePair<Offset, T>& a,
                                                         const KeyValuePair<Offset, T>& b) const {
    return b.value < a.value || (a.value == b.value && b.key < a.key) ? b : a;
  }
};

/// The greater value; of equal ones, that with the lower position.
struct ArgMax {
  template <class T, class Offset>
  __host__ __device__ KeyValuePair<Offset, T> operator()(const KeyValuePair<Offset, T>& a,
                                                         const KeyValuePair<Offset, T>& b) const {
    return a.value < b.value || (a.value == b.value && b.key < a.key) ? b : a;
  }
};

/// A conversion.
template <class To> struct CastOp {
  template <class From> __host__ __device__ To operator()(From&& from) const { return static_cast<To>(from); }
};

}  // namespace cub

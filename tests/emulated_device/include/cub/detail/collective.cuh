// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   what block-wide and warp-wide primitives are made of: storage that they really use, so that using it again
//         without a barrier is a race; results that are poison where CUB leaves them undefined; and an order of
//         combination that isn't from left to right.

#include <emulated/control.h>
#include <cub/thread/thread_operators.cuh>

#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

namespace cub::detail {

/// Values of threads in shared memory; nothing is constructed there beforehand.
template <class T, int Count> struct shared_values {
  alignas(T) unsigned char bytes[Count * sizeof(T)];

  void put(int i, const T& value) { std::construct_at(reinterpret_cast<T*>(bytes) + i, value); }
  const T& get(int i) const { return reinterpret_cast<const T*>(bytes)[i]; }
};

/// What an undefined result holds: all ones, a NaN; `otherwise` for a type that can't take any bits.
template <class T> T poison(const T& otherwise) {
  if constexpr (std::is_trivially_copyable_v<T> && !std::is_same_v<T, bool>) {
    alignas(T) unsigned char bytes[sizeof(T)];
    std::memset(bytes, 0xff, sizeof bytes);
    return *reinterpret_cast<T*>(bytes);
  } else {
    return otherwise;
  }
}

/// Combines get(first) .. get(last - 1), at least one of them, in their order but in an uneven tree.
template <class T, class Get, class Operator> T combine(const Get& get, int first, int last, Operator& op) {
  if (last - first == 1) return get(first);
  const int middle = first + (last - first < 6 ? 1 : (last - first) / 3);
  const T left = combine<T>(get, first, middle, op), right = combine<T>(get, middle, last, op);
  return static_cast<T>(op(left, right));
}
template <class T, int Items, class Operator> T combine(const T (&items)[Items], Operator& op) {
  return combine<T>([&](int i) { return items[i]; }, 0, Items, op);
}

/// The calling thread's place in its block, row by row. A block of another shape than the primitive's is a fault.
template <int X, int Y, int Z> int thread_in_block(const char* primitive) {
  if (blockDim.x != X || blockDim.y != Y || blockDim.z != Z) {
    emulated::report_fault(std::string(primitive) + " is for blocks of another shape");
    emulated::trap();
  }
  return static_cast<int>((threadIdx.z * Y + threadIdx.y) * X + threadIdx.x);
}

/// Where a primitive was constructed: barriers are told apart by it.
struct place {
  const char* file;
  unsigned line;
  void block_barrier() const { __syncthreads(file, line); }
  void warp_barrier(unsigned mask) const { __syncwarp(mask, file, line); }
};

/// The caller's logical warp of `Threads` lanes inside its warp.
template <int Threads> struct logical_warp {
  static_assert(Threads >= 1 && Threads <= 32, "cub: a logical warp has 1 to 32 threads");
  static constexpr bool cuts = (Threads & (Threads - 1)) == 0;  // else there is only one per warp

  int lane = static_cast<int>(emulated::lane()) % Threads;
  int first = cuts ? static_cast<int>(emulated::lane()) - lane : 0;
  unsigned mask = (0xffffffffu >> (32 - Threads)) << first;
};

}  // namespace cub::detail

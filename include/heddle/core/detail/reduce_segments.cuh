// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/config.hpp>
#include <heddle/core/shared.cuh>

#include <cstddef>

namespace heddle {
inline namespace v0 {
namespace detail {

inline constexpr unsigned segment_threads = 256;
inline constexpr std::size_t segment_tile = std::size_t{16} * segment_threads;

/// @cond
// The last segment that begins at or before element i: of these the one that isn't empty.
template <class Begins> HEDDLE_HD std::size_t segment_of(const Begins& begins, std::size_t segments, std::size_t i) {
  std::size_t low = 0, high = segments;
  while (high - low > 1) {
    const std::size_t middle = low + (high - low) / 2;
    (begins(middle) <= i ? low : high) = middle;
  }
  return low;
}

template <class Value> struct segment_values {  // trivial, whatever Value's constructor is
  alignas(Value) unsigned char bytes[segment_threads * sizeof(Value)];
};
// What all threads of the block give together; known to the first one.
template <class Value, class Reduce>
__device__ Value join_threads(const Value& mine, Value* values, const Reduce& reduce) {
  values[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned d = segment_threads / 2; d > 0; d /= 2) {
    if (threadIdx.x < d) values[threadIdx.x] = reduce(values[threadIdx.x], values[threadIdx.x + d]);
    __syncthreads();
  }
  return values[0];
}

// A block reduces tiles of the elements, each cut where segments end. A segment within one tile is finished there; the
// others by the block that is the last to be through with a tile of theirs, in the order of tiles: so the bits don't
// depend on which one that is. Tile t of segment s has its place t + s among the partial values to itself.
template <class Value, class Begins, class Reduce, class Transform, class Finish>
__global__ void reduce_segments_kernel(std::size_t segments, std::size_t n, Begins begins, Value zero, Reduce reduce,
                                       Transform transform, Finish finish, Value* partial, unsigned* done) {
  HEDDLE_SHARED(segment_values<Value>, shared);
  HEDDLE_SHARED(unsigned, last);
  Value* const values = reinterpret_cast<Value*>(shared.bytes);
  const std::size_t stride = std::size_t{gridDim.x} * segment_threads;
  for (std::size_t s = std::size_t{blockIdx.x} * segment_threads + threadIdx.x; s < segments; s += stride) {
    if (begins(s) == begins(s + 1)) finish(s, zero);
  }
  for (std::size_t tile = blockIdx.x; tile * segment_tile < n; tile += gridDim.x) {
    const std::size_t from = tile * segment_tile, to = n - from < segment_tile ? n : from + segment_tile;
    for (std::size_t s = segment_of(begins, segments, from); s < segments && begins(s) < to; ++s) {
      const std::size_t begin = begins(s), end = begins(s + 1), stop = end < to ? end : to;
      if (begin == end) continue;
      Value mine = zero;
      for (std::size_t i = (begin > from ? begin : from) + threadIdx.x; i < stop; i += segment_threads)
        mine = reduce(mine, static_cast<Value>(transform(s, i)));
      Value all = join_threads(mine, values, reduce);
      const std::size_t first = begin / segment_tile, tiles = (end - 1) / segment_tile - first + 1;
      if (tiles > 1) {
        if (threadIdx.x == 0) {
          partial[tile + s] = all;
          __threadfence();
          last = atomicAdd(done + s, 1u) + 1 == tiles;
          __threadfence();
        }
        __syncthreads();
        if (last == 0) continue;
        mine = zero;
        for (std::size_t t = threadIdx.x; t < tiles; t += segment_threads) mine = reduce(mine, partial[first + s + t]);
        all = join_threads(mine, values, reduce);
      }
      if (threadIdx.x == 0) finish(s, all);
      __syncthreads();  // before values are written again
    }
  }
}
/// @endcond

}  // namespace detail
}  // namespace v0
}  // namespace heddle

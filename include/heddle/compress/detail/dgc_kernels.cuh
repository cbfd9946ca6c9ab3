// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/shared.cuh>

#include <cstddef>
#include <cstdint>

namespace heddle {
inline namespace v0 {

/// @brief A tensor of `dgc_device`: where it and its state are, and where what is sent goes. All in device memory.
struct dgc_segment {
  const float* gradient = nullptr;   ///< `count` elements.
  const float* parameter = nullptr;  ///< As many, for weight decay; null without.
  float* u = nullptr;                ///< As many; zero at first.
  float* v = nullptr;                ///< As many; zero at first.
  std::uint32_t* index = nullptr;    ///< Receives where the entries belong; room for `capacity`.
  float* value = nullptr;            ///< Receives what they are; room for `capacity`.
  std::size_t count = 0;             ///< Elements, below 2^32 - 1.
  std::uint32_t entries = 0;         ///< How many entries are wanted.
  std::uint32_t capacity = 0;        ///< How many may be sent; what does not fit stays held.
  const float* factor = nullptr;     ///< What multiplies the gradient, a number in device memory; null: 1.
};

/// @brief What a tensor's search is steered by, and what a step found; in device memory.
struct dgc_control {
  std::uint32_t threshold;  ///< Bits of the magnitude from which on elements are sent; 0, or with the top bit set: to
                            ///< be sampled in the next step, the last two bits being how often that was needless.
  std::uint32_t found;      ///< Elements that reached it; the first min(found, capacity) slots are filled.
  std::uint32_t lost;       ///< Whether a sum left float's range.
  std::uint32_t used;       ///< The threshold of the step, which is state only when the step is done.
};

namespace detail {

inline constexpr unsigned dgc_threads = 256, dgc_tile = 4 * dgc_threads;
inline constexpr std::uint32_t dgc_magnitude = 0x7fffffffu, dgc_infinite = 0x7f800000u, dgc_unsure = 0x80000000u,
                               dgc_needless = 3;
inline constexpr float dgc_aim = 0.85f;  // of the entries that are wanted: between 0.5 and 1.25

// The scalars of a step: G = factor / ranks g + decay w; U = momentum U + own G; V = V + U + ahead G.
struct dgc_scalars {
  float ranks, decay, momentum, own, ahead;
  bool masking;
};

// A segment and where its tiles begin; `vectors`: everything is aligned to 16 bytes.
struct dgc_row {
  dgc_segment of;
  std::uint64_t first_tile;
  bool vectors;
};

// Kernels see plain data only.
struct dgc_table {
  const dgc_row* rows;
  dgc_control* control;
  std::uint64_t* tiles;  // states of the look-back
  std::uint32_t* ticket;
  std::uint64_t tile_count;
  std::uint32_t row_count;
};

/// @cond
__device__ inline std::uint32_t dgc_row_of(const dgc_table& t, std::uint64_t tile) {
  std::uint32_t low = 0, high = t.row_count;  // the last row that begins at or before the tile; empty ones have no tile
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    (t.rows[middle].first_tile <= tile ? low : high) = middle;
  }
  return low;
}

// Four neighbours, or fewer at the end.
struct dgc_four {
  float x[4];
};
__device__ inline dgc_four dgc_load(const float* from, std::size_t i, std::size_t n, bool vectors) {
  dgc_four f = {};
  if (vectors && i + 4 <= n) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    f.x[0] = v.x, f.x[1] = v.y, f.x[2] = v.z, f.x[3] = v.w;
  } else {
    for (unsigned j = 0; j < 4; ++j) {
      if (i + j < n) f.x[j] = from[i + j];
    }
  }
  return f;
}
__device__ inline void dgc_store(float* to, std::size_t i, std::size_t n, bool vectors, const dgc_four& f) {
  if (vectors && i + 4 <= n) {
    *reinterpret_cast<float4*>(to + i) = make_float4(f.x[0], f.x[1], f.x[2], f.x[3]);
  } else {
    for (unsigned j = 0; j < 4; ++j) {
      if (i + j < n) to[i + j] = f.x[j];
    }
  }
}

// The row of a tile, and the first of the four elements of its tensor that are this thread's: beyond its end where there
// are none.
struct dgc_place {
  std::uint32_t at;
  dgc_row row;
  std::size_t i;
};
__device__ inline dgc_place dgc_place_of(const dgc_table& t, std::uint64_t tile) {
  const std::uint32_t at = dgc_row_of(t, tile);
  const dgc_row row = t.rows[at];
  return {at, row, static_cast<std::size_t>(tile - row.first_tile) * dgc_tile + 4 * std::size_t{threadIdx.x}};
}
// What is there; w is zero without weight decay.
struct dgc_elements {
  dgc_four g, w, u, v;
};
__device__ inline dgc_elements dgc_load_all(const dgc_row& row, std::size_t i) {
  const std::size_t n = row.of.count;
  return {dgc_load(row.of.gradient, i, n, row.vectors),
          row.of.parameter ? dgc_load(row.of.parameter, i, n, row.vectors) : dgc_four{},
          dgc_load(row.of.u, i, n, row.vectors), dgc_load(row.of.v, i, n, row.vectors)};
}

__device__ inline std::uint32_t dgc_bits(float x) { return __float_as_uint(x) & dgc_magnitude; }

__device__ inline float dgc_share(const dgc_segment& s, const dgc_scalars& r) {
  return __fdiv_rn(s.factor ? *s.factor : 1.0f, r.ranks);
}
// Rounded as on the host, operation by operation: so all kernels, and the host, give the same bits.
__device__ inline void dgc_move(const dgc_scalars& r, float share, bool decays, float g, float w, float& u, float& v) {
  float mine = __fmul_rn(g, share);
  if (decays) mine = __fadd_rn(mine, __fmul_rn(w, r.decay));
  u = __fadd_rn(__fmul_rn(u, r.momentum), __fmul_rn(mine, r.own));
  v = __fadd_rn(__fadd_rn(v, u), __fmul_rn(mine, r.ahead));
}

__device__ inline void dgc_move(const dgc_row& row, const dgc_scalars& r, float share, dgc_elements& e, unsigned j) {
  dgc_move(r, share, row.of.parameter != nullptr, e.g.x[j], e.w.x[j], e.u.x[j], e.v.x[j]);
}

// The sum of `mine` over the lanes before this one; `total` receives that of the warp.
__device__ inline std::uint32_t dgc_before(std::uint32_t mine, unsigned lane, std::uint32_t& total) {
  std::uint32_t sum = mine;
  for (unsigned d = 1; d < 32; d *= 2) {
    const std::uint32_t below = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += below;
  }
  total = __shfl_sync(0xffffffffu, sum, 31);
  return sum - mine;
}

inline constexpr std::uint64_t dgc_aggregate = std::uint64_t{1} << 62, dgc_inclusive = std::uint64_t{1} << 63;

// What all tiles of the segment before this one found: their sums are published one by one, and a tile whose
// predecessors are not yet through waits. Tiles are handed out in order, so those before it are running or done.
__device__ inline std::uint32_t dgc_look_back(std::uint64_t* tiles, std::uint64_t first, std::uint64_t tile,
                                              std::uint32_t mine) {
  using word = unsigned long long;
  word* const state_of = reinterpret_cast<word*>(tiles);
  if (tile != first) atomicExch(state_of + tile, word{dgc_aggregate | mine});
  std::uint32_t sum = 0;
  for (std::uint64_t t = tile; t > first;) {
    const word state = atomicAdd(state_of + t - 1, word{0});
    if (state == 0) {
      __nanosleep(20);
      continue;
    }
    sum += static_cast<std::uint32_t>(state);
    if (state & dgc_inclusive) break;
    --t;
  }
  atomicExch(state_of + tile, word{dgc_inclusive | (sum + mine)});
  return sum;
}

// 20 bytes per element, 24 with weight decay: reads g, U, V (and w), writes U and V; the entries come on top. With
// Prepare nothing is written but the entries, and *bad where a step would make U or V larger than `most`, or NaN.
template <bool Sorted, bool Prepare>
__global__ void dgc_step_kernel(dgc_table t, dgc_scalars r, float most, std::uint32_t* bad) {
  HEDDLE_SHARED(std::uint32_t[dgc_threads / 32], totals);
  HEDDLE_SHARED(std::uint32_t, shared_tile);
  HEDDLE_SHARED(std::uint32_t, shared_before);
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (std::uint64_t turn = blockIdx.x;; turn += gridDim.x) {
    std::uint64_t tile = turn;
    if constexpr (Sorted) {
      if (threadIdx.x == 0) shared_tile = atomicAdd(t.ticket, std::uint32_t{1});
      __syncthreads();
      tile = shared_tile;
    }
    if (tile >= t.tile_count) return;
    const auto [at, row, i] = dgc_place_of(t, tile);
    dgc_control& control = t.control[at];
    const std::uint32_t threshold = control.used & dgc_magnitude;
    const std::size_t n = row.of.count;
    const float share = dgc_share(row.of, r);
    dgc_elements e = {};
    unsigned picked = 0;
    if (i < n) {
      e = dgc_load_all(row, i);
      for (unsigned j = 0; j < 4; ++j) {
        if (i + j >= n) break;
        dgc_move(row, r, share, e, j);
        const std::uint32_t bits = dgc_bits(e.v.x[j]);
        if constexpr (Prepare) {
          if (!(__uint_as_float(bits) <= most && __uint_as_float(dgc_bits(e.u.x[j])) <= most))
            atomicOr(bad, std::uint32_t{1});
        }
        if (bits >= dgc_infinite)
          atomicOr(&control.lost, std::uint32_t{!Prepare});
        else if (bits >= threshold && bits != 0)
          picked |= 1u << j;
      }
    }
    const auto mine = static_cast<std::uint32_t>(__popc(picked));
    std::uint32_t slot = 0, total = 0;
    if constexpr (Sorted) {
      slot = dgc_before(mine, lane, total);
      if (lane == 0) totals[warp] = total;
      __syncthreads();
      if (threadIdx.x == 0) {
        std::uint32_t all = 0;
        for (std::uint32_t& x : totals) {
          const std::uint32_t here = x;
          x = all;
          all += here;
        }
        const std::uint32_t before = dgc_look_back(t.tiles, row.first_tile, tile, all);
        if ((tile - row.first_tile + 1) * dgc_tile >= n) control.found = before + all;
        shared_before = before;
      }
      __syncthreads();
      slot += totals[warp] + shared_before;
    } else if (__any_sync(0xffffffffu, picked != 0)) {
      slot = dgc_before(mine, lane, total);
      std::uint32_t base = 0;
      if (lane == 0) base = atomicAdd(&control.found, total);
      slot += __shfl_sync(0xffffffffu, base, 0);
    }
    for (unsigned j = 0; j < 4; ++j) {
      if (!(picked >> j & 1u)) continue;
      if (slot < row.of.capacity) {
        row.of.index[slot] = static_cast<std::uint32_t>(i + j);
        row.of.value[slot] = e.v.x[j];
        e.v.x[j] = 0.0f;
        if (r.masking) e.u.x[j] = 0.0f;
      }
      ++slot;
    }
    if (!Prepare && i < n) {
      dgc_store(row.of.u, i, n, row.vectors, e.u);
      dgc_store(row.of.v, i, n, row.vectors, e.v);
    }
    if constexpr (Sorted) __syncthreads();  // before totals are written again
  }
}

// The other half after Prepare of a sorted list: the same move, bit for bit. What reached the threshold was sent as far
// as the last entry in the list.
template <class Word> __global__ void dgc_commit_kernel(dgc_table t, dgc_scalars r, Word tiles) {
  for (Word tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const auto [at, row, i] = dgc_place_of(t, tile);
    const std::size_t n = row.of.count;
    if (i >= n) continue;
    const dgc_control control = t.control[at];
    const std::uint32_t threshold = control.used & dgc_magnitude;
    const std::uint32_t sent = control.found < row.of.capacity ? control.found : row.of.capacity;
    const std::size_t end = sent ? std::size_t{row.of.index[sent - 1]} + 1 : 0;
    const float share = dgc_share(row.of, r);
    dgc_elements e = dgc_load_all(row, i);
    for (unsigned j = 0; j < 4; ++j) {
      dgc_move(row, r, share, e, j);
      const std::uint32_t bits = dgc_bits(e.v.x[j]);
      if (i + j >= end || bits < threshold || bits == 0) continue;
      e.v.x[j] = 0.0f;
      if (r.masking) e.u.x[j] = 0.0f;
    }
    dgc_store(row.of.u, i, n, row.vectors, e.u);
    dgc_store(row.of.v, i, n, row.vectors, e.v);
  }
}

// 4 bytes per element: sets *bad where a gradient is not finite.
template <class Word> __global__ void dgc_finite_kernel(dgc_table t, Word* bad) {
  for (std::uint64_t tile = blockIdx.x; tile < t.tile_count; tile += gridDim.x) {
    const auto [at, row, i] = dgc_place_of(t, tile);
    if (i >= row.of.count) continue;
    const dgc_four g = dgc_load(row.of.gradient, i, row.of.count, row.vectors);
    for (const float x : g.x) {
      if (dgc_bits(x) >= dgc_infinite) atomicOr(bad, Word{1});
    }
  }
}

// 12 bytes per element, 16 with weight decay: sets *bad where a step would make U or V larger than `most`, or NaN.
template <class Word> __global__ void dgc_fits_kernel(dgc_table t, dgc_scalars r, float most, Word* bad) {
  for (std::uint64_t tile = blockIdx.x; tile < t.tile_count; tile += gridDim.x) {
    const auto [at, row, i] = dgc_place_of(t, tile);
    if (i >= row.of.count) continue;
    const float share = dgc_share(row.of, r);
    dgc_elements e = dgc_load_all(row, i);
    for (unsigned j = 0; j < 4; ++j) {
      dgc_move(row, r, share, e, j);
      for (const float x : {e.u.x[j], e.v.x[j]}) {
        if (!(__uint_as_float(dgc_bits(x)) <= most)) atomicOr(bad, Word{1});
      }
    }
  }
}

// The magnitude that one element of stretch j of `size` has after this step.
__device__ inline std::uint32_t dgc_sampled_bits(const dgc_segment& s, const dgc_scalars& r, float share,
                                                 std::size_t size, std::size_t j, std::uint64_t seed) {
  const std::size_t from = s.count / size * j + s.count % size * j / size;
  const std::size_t to = s.count / size * (j + 1) + s.count % size * (j + 1) / size;
  std::uint64_t mixed = (seed + j) * 0x9e3779b97f4a7c15ull;
  mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93ull;
  const std::size_t i = from + (mixed >> 32) % (to - from);
  float u = s.u[i], v = s.v[i];
  dgc_move(r, share, s.parameter != nullptr, s.gradient[i], s.parameter ? s.parameter[i] : 0.0f, u, v);
  return dgc_bits(v);
}

// One block for each segment whose threshold is to be sampled: the magnitude that about `entries` reach after this
// step, from a sample of the step's sums, to 22 bits. Reads only. It is sampled in each step until the last one,
// steered, would have done as well three times in a row: as long as sums grow fast, it would not.
template <class Word> __global__ void dgc_sample_kernel(dgc_table t, dgc_scalars r, Word seed) {
  HEDDLE_SHARED(std::uint32_t[2048], bins);
  HEDDLE_SHARED(std::uint32_t, chosen);
  HEDDLE_SHARED(std::uint32_t, rest);
  HEDDLE_SHARED(std::uint32_t, above);
  const dgc_segment s = t.rows[blockIdx.x].of;
  dgc_control& control = t.control[blockIdx.x];
  const std::uint32_t before = control.threshold, steered = before & dgc_magnitude & ~dgc_needless;
  if ((before != 0 && (before & dgc_unsure) == 0) || s.count == 0 || s.entries == 0) {
    if (threadIdx.x == 0) control.used = before;
    return;
  }
  if (s.entries >= s.count) {  // everything but zeros; what comes after it is sampled
    if (threadIdx.x == 0) control.used = dgc_unsure | 1u;
    return;
  }
  const float share_of = dgc_share(s, r);
  const std::size_t reach = s.count / s.entries * 64, wanted = reach > 8192 ? reach : 8192;
  const std::size_t size = wanted < s.count ? wanted : s.count;
  const auto share =
      static_cast<float>(static_cast<double>(s.entries) / static_cast<double>(s.count) * static_cast<double>(size));
  std::uint32_t rank = static_cast<std::uint32_t>(dgc_aim * share);
  if (rank == 0) rank = 1;
  if (threadIdx.x == 0) above = 0;
  std::uint32_t upper = 0;
  for (int level = 0; level < 2; ++level) {
    for (unsigned b = threadIdx.x; b < 2048; b += blockDim.x) bins[b] = 0;
    __syncthreads();
    for (std::size_t j = threadIdx.x; j < size; j += blockDim.x) {
      const std::uint32_t bits = dgc_sampled_bits(s, r, share_of, size, j, seed);
      if (level == 0 && bits >= steered) atomicAdd(&above, std::uint32_t{1});
      if (level == 0)
        atomicAdd(&bins[bits >> 20], std::uint32_t{1});
      else if (bits >> 20 == upper)
        atomicAdd(&bins[bits >> 9 & 2047], std::uint32_t{1});
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      std::uint32_t left = level == 0 ? rank : rest, b = 2047;
      while (b > 0 && bins[b] < left) left -= bins[b--];
      chosen = b;
      rest = left;
    }
    __syncthreads();
    if (level == 0) {
      upper = chosen;
    } else if (threadIdx.x == 0) {
      const auto passed = static_cast<float>(above);
      const bool good = steered != 0 && passed >= 0.72f * share && passed <= 0.98f * share;
      const std::uint32_t needless = good ? (before & dgc_needless) + 1 : 0;
      control.used = upper << 20 | chosen << 9 | (needless < dgc_needless ? dgc_unsure | needless : 0u);
    }
    __syncthreads();
  }
}

// Forgets what the last step found.
template <class Word> __global__ void dgc_begin_kernel(dgc_table t, Word threads) {
  const std::uint64_t first = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (std::uint64_t k = first; k < t.tile_count; k += threads) t.tiles[k] = 0;
  for (std::uint64_t k = first; k < t.row_count; k += threads) t.control[k].found = 0;
  if (first == 0) *t.ticket = 0;
}

// Steers each threshold by what it let pass; one that is far off is sampled again.
template <class Word> __global__ void dgc_steer_kernel(dgc_table t, Word threads) {
  for (Word k = Word{blockIdx.x} * blockDim.x + threadIdx.x; k < t.row_count; k += threads) {
    dgc_control& c = t.control[k];
    const std::uint64_t wanted = t.rows[k].of.entries, found = c.found;
    const bool off = 2 * found < wanted || 4 * found > 5 * wanted;
    const float ratio = static_cast<float>(found != 0 ? found : 1) / (dgc_aim * static_cast<float>(wanted));
    const float next = __uint_as_float(c.used & dgc_magnitude) * sqrtf(sqrtf(sqrtf(ratio)));
    const bool usable = wanted != 0 && next > 0.0f && next < 3e38f;
    const std::uint32_t kept = c.used & dgc_unsure ? c.used & (dgc_unsure | dgc_needless) : 0u;
    c.threshold = usable ? (__float_as_uint(next) & ~dgc_needless) | (off ? dgc_unsure : kept) : 0u;
  }
}

// sum[index] += value for one rank's entries of a segment; no index comes twice, so no atomics.
template <class Count>
__global__ void dgc_add_kernel(const std::uint32_t* index, const float* value, Count count, float* sum) {
  const Count stride = Count{gridDim.x} * blockDim.x;
  for (Count j = Count{blockIdx.x} * blockDim.x + threadIdx.x; j < count; j += stride) sum[index[j]] += value[j];
}
/// @endcond

}  // namespace detail
}  // namespace v0
}  // namespace heddle

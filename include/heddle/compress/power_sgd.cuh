// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/codecs.cuh>
#include <heddle/compress/power_sgd.hpp>

namespace heddle {
inline namespace v0 {

namespace detail {
/// @cond
inline constexpr unsigned low_rank_threads = 128;
inline constexpr std::size_t low_rank_columns = 8;  // of a factor, made in one pass over M

// The sum of what the threads of a block have, in the same order in every run; on all of them. `part` has a number for
// each and can be used again afterwards.
__device__ inline double block_sum(double mine, double* part) {
  part[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned half = low_rank_threads / 2; half; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  const double all = part[0];
  __syncthreads();
  return all;
}
__device__ inline double column_squares(const float* v, std::size_t n, std::size_t stride, double* part) {
  double mine = 0.0;
  for (std::size_t i = threadIdx.x; i < n; i += low_rank_threads)
    mine += static_cast<double>(v[i * stride]) * v[i * stride];
  return block_sum(mine, part);
}

// `unit` becomes R with columns of length 1; those that are zero are drawn. A block for each column.
template <class Shape>
__global__ void unit_columns(const float* right, float* unit, Shape s, std::uint64_t seed, std::uint32_t tensor) {
  HEDDLE_SHARED(double[low_rank_threads], part);
  for (std::size_t k = blockIdx.x; k < s.rank; k += gridDim.x) {
    for (std::size_t j = threadIdx.x; j < s.columns; j += low_rank_threads)
      unit[j * s.rank + k] = right[j * s.rank + k];
    double squares = column_squares(right + k, s.columns, s.rank, part);
    if (squares == 0.0) {
      const std::uint64_t stream = random_stream(tensor, static_cast<std::uint32_t>(k));
      for (std::size_t j = threadIdx.x; j < s.columns; j += low_rank_threads)
        unit[j * s.rank + k] = random_normal(seed, stream, j);
      __syncthreads();
      squares = column_squares(unit + k, s.columns, s.rank, part);
    }
    const double factor = squares > 0.0 ? 1.0 / ::sqrt(squares) : 0.0;
    for (std::size_t j = threadIdx.x; j < s.columns; j += low_rank_threads)
      unit[j * s.rank + k] = static_cast<float>(unit[j * s.rank + k] * factor);
  }
}

// left = M unit: a block for each row. Says where |M| is above the limit of `m`.
template <class Shape>
__global__ void multiply_rows(fed_value m, const float* unit, float* left, Shape s, unsigned* not_finite) {
  HEDDLE_SHARED(double[low_rank_threads], part);
  for (std::size_t i = blockIdx.x; i < s.rows; i += gridDim.x) {
    const std::size_t width = s.width(i);
    for (std::size_t first = 0; first < s.rank; first += low_rank_columns) {
      const std::size_t count = s.rank - first < low_rank_columns ? s.rank - first : low_rank_columns;
      double sum[low_rank_columns] = {};
      for (std::size_t j = threadIdx.x; j < width; j += low_rank_threads) {
        const float v = m(i * s.columns + j), magnitude = v < 0.0f ? -v : v;
        if (!(magnitude <= m.limit)) atomicOr(not_finite, 1u);
        for (std::size_t k = 0; k < low_rank_columns; ++k)
          if (k < count) sum[k] += static_cast<double>(v) * unit[j * s.rank + first + k];
      }
      for (std::size_t k = 0; k < low_rank_columns; ++k) {
        if (k >= count) continue;
        const double all = block_sum(sum[k], part);
        if (threadIdx.x == 0) left[i * s.rank + first + k] = static_cast<float>(all);
      }
    }
  }
}

// Gram and Schmidt's process as on the host, by one block.
template <class Shape> __global__ void orthonormalise_columns(float* l, Shape s) {
  HEDDLE_SHARED(double[low_rank_threads], part);
  for (std::size_t k = 0; k < s.rank; ++k) {
    const double before = column_squares(l + k, s.rows, s.rank, part);
    for (int turn = 0; turn < 2; ++turn) {
      for (std::size_t other = 0; other < k; ++other) {
        double mine = 0.0;
        for (std::size_t i = threadIdx.x; i < s.rows; i += low_rank_threads)
          mine += static_cast<double>(l[i * s.rank + k]) * l[i * s.rank + other];
        const double dot = block_sum(mine, part);
        for (std::size_t i = threadIdx.x; i < s.rows; i += low_rank_threads)
          l[i * s.rank + k] = static_cast<float>(l[i * s.rank + k] - dot * l[i * s.rank + other]);
      }
    }
    const double after = column_squares(l + k, s.rows, s.rank, part);
    const double factor = after > 1e-12 * before ? 1.0 / ::sqrt(after) : 0.0;
    for (std::size_t i = threadIdx.x; i < s.rows; i += low_rank_threads)
      l[i * s.rank + k] = static_cast<float>(l[i * s.rank + k] * factor);
    __syncthreads();
  }
}

// right = M^T left: a thread for each column, so that neighbours read neighbours.
template <class Shape> struct multiply_column {
  fed_value m;
  const float* left;
  float* right;
  Shape s;
  HEDDLE_HD void operator()(std::size_t j) const {
    for (std::size_t first = 0; first < s.rank; first += low_rank_columns) {
      const std::size_t count = s.rank - first < low_rank_columns ? s.rank - first : low_rank_columns;
      double sum[low_rank_columns] = {};
      for (std::size_t i = 0; i < s.rows && i * s.columns + j < s.count; ++i) {
        const auto v = static_cast<double>(m(i * s.columns + j));
        for (std::size_t k = 0; k < low_rank_columns; ++k)
          if (k < count) sum[k] += v * left[i * s.rank + first + k];
      }
      for (std::size_t k = 0; k < low_rank_columns; ++k)
        if (k < count) right[j * s.rank + first + k] = static_cast<float>(sum[k]);
    }
  }
};

// e = M - L R^T share; g = L R^T.
template <class Shape> struct commit_low_rank {
  fed_value m;
  const float *left, *right;
  float *g, *e;
  Shape s;
  float share;
  HEDDLE_HD void operator()(std::size_t at) const {
    const std::size_t i = at / s.columns, j = at % s.columns;
    float update = 0.0f;
    for (std::size_t k = 0; k < s.rank; ++k) update += left[i * s.rank + k] * right[j * s.rank + k];
    e[at] = m(at) - update * share;
    g[at] = update;
  }
};
/// @endcond
}  // namespace detail

/// @brief `power_sgd` on a device, for a device trainer's own loop: the host's two rounds as kernels.
///
///     hd::power_sgd_device device(hd::power_sgd{.rank = 4});
///     device.send(0, g, 1.0f, e, right, n, context, sums, flag, queue);     // moves no state
///     ...                                    // sums[0], sum_count(0, n, context) floats, is added up over the ranks
///     device.send(1, g, 1.0f, e, right, n, context, sums, flag, queue);
///     ...                                    // sums[1] too; all ranks look at all flags
///     device.commit(g, 1.0f, e, right, n, context, sums, queue);            // g becomes the update, e and right move
///
/// Sums within a rank are added in another order than on the host, and zero columns are drawn with the device's
/// logarithm, so factors agree with the host's but for rounding; with themselves they agree bit for bit. So all ranks
/// must run it, on devices of one kind: replicas whose updates differ in the last bit drift apart.
/// Round 0 gives a block of 128 threads to each row, round 1 a thread to each column, which walks all rows: a tall
/// matrix of few columns leaves the device idle. Choose the context's `rows` to be no more than its columns. It hasn't
/// been timed on a GPU.
/// Wire:    as power_sgd.
/// State:   as power_sgd: e and right, the caller's; zeros at first.
/// Traffic: 32 bytes per element for up to 8 columns, as on the host; each 8 more: 8 read in each round.
/// Order:   as power_sgd.
/// Sync:    everything only enqueues.
/// Throws:  argument_error for a number of power_sgd outside its range or a null pointer; cuda_error.
class power_sgd_device {
 public:
  /// @param c The compressor on the host.
  explicit power_sgd_device(const power_sgd& c = {}) : codec_(c) { c.check(); }

  /// @brief This rank's part of L (round 0) or of R (round 1); of round 1 `sums[0]` is the sum over ranks of round 0,
  /// which becomes L there, with columns of length 1 or 0: leave it as it is until `commit`. To begin again, as in the
  /// step after one that is skipped, begin with round 0.
  /// @param g Gradient, n elements. @param factor Multiplies it. @param e What is held, n elements.
  /// @param right R of the last step, sum_count(1, n, x) floats. @param n Elements, above 0.
  /// @param x Step, tensor, rows and ranks. @param sums Two arrays of sum_count(0, n, x) and sum_count(1, n, x) floats;
  /// round 0 uses both. @param not_finite Set to 1 in round 0 where M, or what is made of the sums, may not be finite.
  /// @param q Where the work goes.
  void send(int round, const float* g, device_factor factor, const float* e, const float* right, std::size_t n,
            const encode_context& x, float* const* sums, unsigned* not_finite, cuda::queue q) const {
    for (const void* p :
         {static_cast<const void*>(g), static_cast<const void*>(e), static_cast<const void*>(right),
          static_cast<const void*>(sums[0]), static_cast<const void*>(sums[1]), static_cast<const void*>(not_finite)})
      detail::check_pointer("power_sgd_device::send", p, n);
    if (n == 0) return;
    const power_sgd::shape s(n, x, codec_.rank);
    detail::fed_value m = detail::fed(g, factor, e, x);
    if (round == 0) {
      m.limit = codec_.limit(s, x);
      launch(s.rank, q, detail::unit_columns<power_sgd::shape>, right, sums[1], s, codec_.seed, x.tensor);
      launch(s.rows, q, detail::multiply_rows<power_sgd::shape>, m, static_cast<const float*>(sums[1]), sums[0], s,
             not_finite);
    } else {
      launch(1, q, detail::orthonormalise_columns<power_sgd::shape>, sums[0], s);
      cuda::for_each(s.columns, detail::multiply_column<power_sgd::shape>{m, sums[0], sums[1], s}, q);
    }
  }
  /// @brief g becomes the update, the sum over ranks of what was sent; e and right move.
  void commit(float* g, device_factor factor, float* e, float* right, std::size_t n, const encode_context& x,
              const float* const* sums, cuda::queue q) const {
    for (const void* p : {static_cast<const void*>(g), static_cast<const void*>(e), static_cast<const void*>(right),
                          static_cast<const void*>(sums[0]), static_cast<const void*>(sums[1])})
      detail::check_pointer("power_sgd_device::commit", p, n);
    if (n == 0) return;
    const power_sgd::shape s(n, x, codec_.rank);
    const float share = 1.0f / static_cast<float>(x.ranks);
    cuda::for_each(
        n, detail::commit_low_rank<power_sgd::shape>{detail::fed(g, factor, e, x), sums[0], sums[1], g, e, s, share},
        q);
    cuda::copy(sums[1], right, s.columns * s.rank, q);
  }

 private:
  template <class Kernel, class... Arguments>
  static void launch(std::size_t blocks, cuda::queue q, Kernel kernel, Arguments... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>((std::min)(blocks, std::size_t{65535})));
    config.blockDim = dim3(detail::low_rank_threads);
    config.stream = q.stream;
    detail::check_cuda("power_sgd_device", cudaLaunchKernelEx(&config, kernel, arguments...));
  }

  power_sgd codec_;
};

}  // namespace v0
}  // namespace heddle

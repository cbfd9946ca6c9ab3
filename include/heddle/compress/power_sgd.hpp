// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>
#include <heddle/core/philox.hpp>

#include <algorithm>
#include <cmath>

namespace heddle {
inline namespace v0 {

/// @brief Gradients as matrices of low rank: two thin factors travel, added up by all-reduces, the rest is held.
///
///     M = g / P + e;   L = orthonormal(sum over ranks of M R);   R = sum over ranks of M^T L
///     the update is L R^T;   e = M - L R^T / P
///
/// R starts from the last step's (warm start); a column that is zero, at the start too, is drawn anew, the same on all
/// ranks. A column of L that adds nothing to those before it becomes zero and stays out of the update. A tensor is the
/// matrix that `tensor::rows` says, else one as square as can be, its last row padded with zeros.
/// Wire:    two all-reduces of rank (rows + columns) floats together, and one float a bucket each for the flag.
/// State:   4 bytes per element (e), and 4 rank columns (R).
/// Traffic: 32 bytes per element: g and e are read three times (M isn't stored), e and the update written; the least
///          possible.
/// Order:   ends a chain. Error feedback is part of it.
/// Sync:    never.
/// Paper:   Vogels, Karimireddy and Jaggi 2019, algorithms 1 and 2; R is normalised before it is used, so that nothing
///          under- or overflows.
/// Throws:  argument_error if rank is 0, or worth isn't a finite number of 0 or above.
struct power_sgd {
  std::size_t rank = 2;            ///< Columns of the factors, above 0; at most the matrix's smaller side is used.
  double worth = 2.0;              ///< A tensor travels dense unless its factors are this many times smaller.
  std::uint64_t seed = 1;          ///< Of the first R; the same on all ranks.
  std::size_t dense_below = 1024;  ///< Tensors with fewer elements travel as they are.

  static constexpr int slots = 1;   ///< e.
  static constexpr int rounds = 2;  ///< L, then R.

  /// The matrix that a tensor is: as `tensor::rows` says, else as square as can be.
  struct shape {
    /// Of n elements, and factors of at most `limit` columns.
    shape(std::size_t n, const encode_context& x, std::size_t limit) : count(n) {
      rows = x.rows;
      if (rows == 0 || n % rows != 0) {
        rows = static_cast<std::size_t>(std::sqrt(static_cast<double>(n)));
        rows = (std::max)(rows, std::size_t{1});
      }
      columns = n / rows + (n % rows != 0);
      rows = columns ? n / columns + (n % columns != 0) : 0;  // as many as have an element
      rank = (std::min)({limit, rows, columns});
    }
    /// Elements of row i.
    HEDDLE_HD std::size_t width(std::size_t i) const noexcept {
      return count - i * columns < columns ? count - i * columns : columns;
    }
    std::size_t count;    ///< Elements.
    std::size_t rows;     ///< Rows that have an element.
    std::size_t columns;  ///< Elements of a row, but for the last.
    std::size_t rank;     ///< Columns of the factors.
  };
  /// The largest magnitude in M with which nothing that is made of the sums leaves float's range: of L R^T no element
  /// is longer than a column of the sum of all M, which has `rows` elements.
  static float limit(const shape& s, const encode_context& x) noexcept {
    return 0.5f * detail::most_sent(x.ranks) / std::sqrt(static_cast<float>(s.rows));
  }

  /// Throws argument_error for a number outside its range.
  void check() const {
    if (rank == 0) throw argument_error("heddle::power_sgd: rank is 0, allowed is 1 or more");
    if (!(worth >= 0.0 && worth < 1e30)) {
      throw argument_error("heddle::power_sgd: worth is " + std::to_string(worth) +
                           ", allowed is a finite number of 0 or above");
    }
  }
  /// Whether the factors are small enough.
  bool sends(std::size_t n, const encode_context& x) const {
    if (n == 0 || n < dense_below) return false;
    const shape s(n, x, rank);
    return static_cast<double>((s.rows + s.columns) * s.rank) * worth <= static_cast<double>(n);
  }
  /// Floats of R.
  std::size_t extra(std::size_t n, const encode_context& x) const { return sends(n, x) ? right(n, x) : 0; }
  /// Floats of L, then of R.
  std::size_t sum_count(int round, std::size_t n, const encode_context& x) const {
    const shape s(n, x, rank);
    return (round == 0 ? s.rows : s.columns) * s.rank;
  }
  /// Bytes of both.
  std::size_t wire_bytes(std::size_t n, const encode_context& x) const {
    return sizeof(float) * (sum_count(0, n, x) + sum_count(1, n, x));
  }

  /// This rank's part of L or of R. @return Whether M is finite, and what is made of the sums will be.
  bool send(int round, slice<const float> g, float factor, float* const* state, const encode_context& x,
            float* const* sums) const {
    const shape s(g.count, x, rank);
    const matrix m{g.data, state[0], factor / static_cast<float>(x.ranks), x.held_scale};
    bool finite = true;
    if (round == 0) {
      const float most_of_m = limit(s, x);
      const std::vector<float> r = unit_columns(state[1], s, x);
      for (std::size_t i = 0; i < s.rows; ++i) {
        double sum[most] = {};
        float* const to = sums[0] + i * s.rank;
        for (std::size_t first = 0; first < s.rank; first += most) {
          const std::size_t c = (std::min)(s.rank - first, most);
          std::fill(sum, sum + c, 0.0);
          for (std::size_t j = 0, at = i * s.columns; j < s.width(i); ++j, ++at) {
            const float v = m[at];
            finite &= std::fabs(v) <= most_of_m;  // false for NaN
            for (std::size_t k = 0; k < c; ++k) sum[k] += static_cast<double>(v) * r[j * s.rank + first + k];
          }
          for (std::size_t k = 0; k < c; ++k) to[first + k] = static_cast<float>(sum[k]);
        }
      }
    } else {
      orthonormalise(sums[0], s.rows, s.rank);
      std::vector<double> sum(s.columns * s.rank, 0.0);
      for (std::size_t i = 0; i < s.rows; ++i) {
        for (std::size_t j = 0, at = i * s.columns; j < s.width(i); ++j, ++at) {
          const auto v = static_cast<double>(m[at]);
          for (std::size_t k = 0; k < s.rank; ++k) sum[j * s.rank + k] += v * sums[0][i * s.rank + k];
        }
      }
      for (std::size_t k = 0; k < sum.size(); ++k) sums[1][k] = static_cast<float>(sum[k]);
    }
    return finite;
  }
  /// Makes the update, and moves e and R.
  void commit(slice<float> g, float factor, float* const* state, const encode_context& x, float* const* sums) const {
    const shape s(g.count, x, rank);
    const matrix m{g.data, state[0], factor / static_cast<float>(x.ranks), x.held_scale};
    const float share = 1.0f / static_cast<float>(x.ranks);
    for (std::size_t i = 0; i < s.rows; ++i) {
      for (std::size_t j = 0, at = i * s.columns; j < s.width(i); ++j, ++at) {
        float update = 0.0f;
        for (std::size_t k = 0; k < s.rank; ++k) update += sums[0][i * s.rank + k] * sums[1][j * s.rank + k];
        state[0][at] = m[at] - update * share;
        g[at] = update;
      }
    }
    std::copy_n(sums[1], s.columns * s.rank, state[1]);
  }
  /// A tensor that travelled dense; nothing of it is held, unless it has just been loaded.
  void correct(slice<float>, float* const*, const encode_context&) const noexcept {}
  /// Adds e, which is the same on all ranks.
  void release(slice<float> g, float* const* state, const encode_context& x) const noexcept {
    detail::release_held(g, state[0], static_cast<float>(x.ranks) * x.held_scale);
  }
  /// "power_sgd".
  std::string name() const { return "power_sgd"; }

 private:
  static constexpr std::size_t most = 8;  // columns of L made in one pass over M

  struct matrix {  // M, made where it is read
    const float *g, *e;
    float share, held;
    float operator[](std::size_t i) const noexcept { return g[i] * share + e[i] * held; }
  };

  std::size_t right(std::size_t n, const encode_context& x) const { return sum_count(1, n, x); }

  // R with columns of length 1; those that are zero are drawn.
  std::vector<float> unit_columns(const float* right, const shape& s, const encode_context& x) const {
    std::vector<float> r(right, right + s.columns * s.rank);
    for (std::size_t k = 0; k < s.rank; ++k) {
      double squares = length(r.data() + k, s.columns, s.rank);
      if (squares == 0.0) {
        for (std::size_t j = 0; j < s.columns; ++j)
          r[j * s.rank + k] = random_normal(seed, random_stream(x.tensor, static_cast<std::uint32_t>(k)), j);
        squares = length(r.data() + k, s.columns, s.rank);
      }
      const double factor = squares > 0.0 ? 1.0 / std::sqrt(squares) : 0.0;
      for (std::size_t j = 0; j < s.columns; ++j) r[j * s.rank + k] = static_cast<float>(r[j * s.rank + k] * factor);
    }
    return r;
  }
  static double length(const float* v, std::size_t n, std::size_t stride) noexcept {
    double squares = 0.0;
    for (std::size_t i = 0; i < n; ++i) squares += static_cast<double>(v[i * stride]) * v[i * stride];
    return squares;
  }

  // Gram and Schmidt's process, each column twice. What is left of a column below 1e-6 of it is rounding: then the
  // column is zero.
  static void orthonormalise(float* l, std::size_t rows, std::size_t columns) {
    for (std::size_t k = 0; k < columns; ++k) {
      const double before = length(l + k, rows, columns);
      for (int turn = 0; turn < 2; ++turn) {
        for (std::size_t other = 0; other < k; ++other) {
          double dot = 0.0;
          for (std::size_t i = 0; i < rows; ++i)
            dot += static_cast<double>(l[i * columns + k]) * l[i * columns + other];
          for (std::size_t i = 0; i < rows; ++i)
            l[i * columns + k] = static_cast<float>(l[i * columns + k] - dot * l[i * columns + other]);
        }
      }
      const double after = length(l + k, rows, columns);
      const double factor = after > 1e-12 * before ? 1.0 / std::sqrt(after) : 0.0;
      for (std::size_t i = 0; i < rows; ++i) l[i * columns + k] = static_cast<float>(l[i * columns + k] * factor);
    }
  }
};
static_assert(reducing_compressor<power_sgd>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>
#include <heddle/compress/detail/codec_loops.hpp>
#include <heddle/compress/detail/low_rank_loops.hpp>
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
/// State:   4 bytes per element (e), and 4 rank columns (R). While it works, 12 rank columns bytes of copies of R
///          in the first round, 32 KiB rank in the second, 4 rank columns in `commit`.
/// Traffic: 32 bytes per element: g and e are read three times (M isn't stored), e and the update written; the least
///          possible. The factors come on top, some 60 rank columns and 20 rank^2 rows bytes: little where they
///          are much smaller than M. In the first round R is read for each row, from cache where its 8 rank columns
///          bytes fit. In a step whose rate is another and wasn't told to begin(), 4 bytes an element more.
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
  /// The largest magnitude in M with which nothing that is made of the sums leaves float's range: of M R no element is
  /// longer than a row of the sum of all M, which has `columns` elements, of L R^T none longer than a column.
  static float limit(const shape& s, const encode_context& x) noexcept {
    return 0.5f * detail::most_sent(x.ranks) / std::sqrt(static_cast<float>((std::max)(s.rows, s.columns)));
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
    float v[part];
    if (round == 0) {
      const std::vector<double> r = by_columns<double>(unit_columns(state[1], s, x).data(), s.columns, s.rank);
      std::vector<double> chains(8 * s.rank);
      std::uint32_t peak = 0;
      for (std::size_t i = 0; i < s.rows; ++i) {
        std::fill(chains.begin(), chains.end(), 0.0);
        for (std::size_t j = 0, n = 0; j < s.width(i); j += n) {
          n = (std::min)(s.width(i) - j, part);
          peak = (std::max)(peak, m.make(i * s.columns + j, n, v));
          for (std::size_t k = 0; k < s.rank; ++k)
            detail::run_loop<detail::dot_chains>(static_cast<const float*>(v), r.data() + k * s.columns + j, n,
                                                 chains.data() + 8 * k);
        }
        for (std::size_t k = 0; k < s.rank; ++k) {
          double sum = 0.0;
          for (std::size_t c = 0; c < 8; ++c) sum += chains[8 * k + c];
          sums[0][i * s.rank + k] = static_cast<float>(sum);
        }
      }
      return std::bit_cast<float>(peak) <= limit(s, x);  // false for NaN
    }
    orthonormalise(sums[0], s.rows, s.rank);
    std::vector<double> sum(part * s.rank);
    for (std::size_t j = 0, n = 0; j < s.columns; j += n) {  // some columns at a time, whose sums stay in cache
      n = (std::min)(s.columns - j, part);
      std::fill(sum.begin(), sum.end(), 0.0);
      for (std::size_t i = 0; i < s.rows && j < s.width(i); ++i) {
        const std::size_t here = (std::min)(s.width(i) - j, n);
        m.make(i * s.columns + j, here, v);
        for (std::size_t k = 0; k < s.rank; ++k)
          detail::run_loop<detail::add_scaled>(
              static_cast<const float*>(v), static_cast<double>(sums[0][i * s.rank + k]), sum.data() + k * part, here);
      }
      for (std::size_t k = 0; k < s.rank; ++k) {
        for (std::size_t c = 0; c < n; ++c) sums[1][(j + c) * s.rank + k] = static_cast<float>(sum[k * part + c]);
      }
    }
    return true;
  }
  /// Makes the update, and moves e and R.
  void commit(slice<float> g, float factor, float* const* state, const encode_context& told, float* const* sums) const {
    const encode_context x = detail::with_late_scale(told, state[0], g.count);
    const shape s(g.count, x, rank);
    const matrix m{g.data, state[0], factor / static_cast<float>(x.ranks), x.held_scale};
    const float share = 1.0f / static_cast<float>(x.ranks);
    std::copy_n(sums[1], s.columns * s.rank, state[1]);
    const std::vector<float> r = by_columns<float>(sums[1], s.columns, s.rank);
    float v[part], update[part];
    for (std::size_t i = 0; i < s.rows; ++i) {
      for (std::size_t j = 0, n = 0; j < s.width(i); j += n) {
        n = (std::min)(s.width(i) - j, part);
        const std::size_t at = i * s.columns + j;
        m.make(at, n, v);
        std::fill_n(update, n, 0.0f);
        for (std::size_t k = 0; k < s.rank; ++k)
          detail::run_loop<detail::add_scaled>(r.data() + k * s.columns + j, sums[0][i * s.rank + k],
                                               static_cast<float*>(update), n);
        detail::run_loop<detail::keep_rest>(static_cast<const float*>(v), static_cast<const float*>(update), share,
                                            state[0] + at, n);
        std::copy_n(update, n, g.data + at);
      }
    }
  }
  /// A tensor that travelled dense; nothing of it is held, unless it has just been loaded.
  void correct(slice<float>, float* const*, const encode_context&) const noexcept {}
  /// Adds e, which is the same on all ranks.
  void release(slice<float> g, float* const* state, const encode_context& x) const noexcept {
    const float scale = detail::with_late_scale(x, state[0], g.count).held_scale;
    detail::release_held(g, state[0], static_cast<float>(x.ranks) * scale);
  }
  /// "power_sgd".
  std::string name() const { return "power_sgd"; }

 private:
  static constexpr std::size_t part = 4096;  // elements of M that are made at once, and stay in cache

  struct matrix {  // M, made where it is read
    const float *g, *e;
    float share, held;
    // Elements [at, at + n); the largest bits of a magnitude.
    std::uint32_t make(std::size_t at, std::size_t n, float* v) const noexcept {
      return detail::feed(v, g + at, e + at, n, share, held);
    }
  };
  // A factor whose columns follow each other, of one whose rows do.
  template <class To> static std::vector<To> by_columns(const float* rows, std::size_t count, std::size_t columns) {
    std::vector<To> all(count * columns);
    for (std::size_t j = 0; j < count; ++j) {
      for (std::size_t k = 0; k < columns; ++k) all[k * count + j] = static_cast<To>(rows[j * columns + k]);
    }
    return all;
  }

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

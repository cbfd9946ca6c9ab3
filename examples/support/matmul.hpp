// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Matrix products for the examples: a register tile that the compiler vectorises, compiled for several instruction
// sets.

#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#if defined(EXAMPLES_USE_CBLAS)
#include <cblas.h>
#endif

namespace examples {

// The width in bytes of the vector registers that a loop is compiled for.
template <int Bytes> using vector_width = std::integral_constant<int, Bytes>;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
template <class Body>
[[gnu::target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,prefer-vector-width=512"), gnu::flatten, gnu::noinline]] void
run_avx512(Body& body) {
  body(vector_width<64>{});
}

template <class Body> [[gnu::target("avx2,fma"), gnu::flatten, gnu::noinline]] void run_avx2(Body& body) {
  body(vector_width<32>{});
}
#endif

/// Runs `body(vector_width)` compiled for the best instruction set of this processor: `flatten` pulls the body into a
/// function that carries the target attribute. So a default x86-64 build uses AVX-512 or AVX2 where they exist;
/// elsewhere the body is compiled as the rest of the program is.
template <class Body> void vectorised(Body body) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) return run_avx512(body);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return run_avx2(body);
#endif
  body(vector_width<16>{});
}

/// A matrix to read: element (i, j) is at `data[i * row + j * column]`, so a transposed view costs nothing.
template <class Real> struct view {
  const Real* data;
  std::size_t row;
  std::size_t column = 1;

  view transposed() const { return {data, column, row}; }
};

/// One tile: `Rows x Lanes` sums stay in registers while `k` runs over a panel of B, whose rows are `Lanes` wide and
/// contiguous. The constant trip counts let the compiler unroll the rows and turn the lanes into vectors. Of the lanes
/// the first `valid` are stored.
template <int Rows, int Lanes, class Real>
[[gnu::always_inline]] inline void multiply_tile(std::size_t k, view<Real> a, const Real* panel, Real* c,
                                                 std::size_t c_row, int valid, bool add) {
  Real sum[Rows][Lanes] = {};
  const Real* left = a.data;
  for (std::size_t p = 0; p < k; ++p, left += a.column, panel += Lanes) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Real scale = left[r * a.row];
#pragma GCC unroll 1
      for (int lane = 0; lane < Lanes; ++lane) sum[r][lane] += scale * panel[lane];
    }
  }
  const auto store = [&](int lanes) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 1
      for (int lane = 0; lane < lanes; ++lane) {
        c[r * c_row + lane] = add ? c[r * c_row + lane] + sum[r][lane] : sum[r][lane];
      }
    }
  };
  if (valid == Lanes) {
    store(Lanes);
  } else {
    store(valid);
  }
}

/// C = A B, or C += A B if `add`: A is m x k (any view), B is k x n and C is m x n, both stored row by row.
template <class Real>
void multiply(std::size_t m, std::size_t n, std::size_t k, view<Real> a, const Real* b, std::size_t b_row, Real* c,
              std::size_t c_row, bool add = false) {
#if defined(EXAMPLES_USE_CBLAS)
  if constexpr (std::is_same_v<Real, float>) {
    const auto flip = a.column == 1 ? CblasNoTrans : CblasTrans;
    const auto lead = static_cast<int>(a.column == 1 ? a.row : a.column);
    cblas_sgemm(CblasRowMajor, flip, CblasNoTrans, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), 1.0f,
                a.data, lead, b, static_cast<int>(b_row), add ? 1.0f : 0.0f, c, static_cast<int>(c_row));
    return;
  }
#endif
  vectorised([=](auto width) {
    constexpr int lanes = width / static_cast<int>(sizeof(Real));
    constexpr std::size_t rows = 8, depth = 256;
    Real panel[depth * lanes];  // columns of B side by side: the cache sees no large strides
    for (std::size_t p = 0; p < k || p == 0; p += depth) {
      const std::size_t deep = std::min(depth, k - p);
      for (std::size_t j = 0; j < n; j += lanes) {
        const int valid = static_cast<int>(std::min<std::size_t>(lanes, n - j));
        for (std::size_t q = 0; q < deep; ++q) {
          const Real* from = b + (p + q) * b_row + j;
          if (valid == lanes) {
            std::copy_n(from, lanes, panel + q * lanes);
          } else {
            for (int lane = 0; lane < lanes; ++lane) panel[q * lanes + lane] = lane < valid ? from[lane] : 0;
          }
        }
        std::size_t i = 0;
        for (; i < m; i += i + rows <= m ? rows : 1) {
          const view<Real> left{a.data + i * a.row + p * a.column, a.row, a.column};
          if (i + rows <= m) {
            multiply_tile<rows, lanes>(deep, left, panel, c + i * c_row + j, c_row, valid, add || p > 0);
          } else {
            multiply_tile<1, lanes>(deep, left, panel, c + i * c_row + j, c_row, valid, add || p > 0);
          }
        }
      }
    }
  });
}

}  // namespace examples

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Matrix products for the example: a register tile that the compiler vectorises, compiled for several instruction sets.

#pragma once

#include <cstddef>
#include <type_traits>
#if defined(GPT_USE_CBLAS)
#include <cblas.h>
#endif

namespace gpt {

// The width in bytes of the vector registers that a loop is compiled for.
template <int Bytes>
using vector_width = std::integral_constant<int, Bytes>;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
template <class Body>
[[gnu::target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,prefer-vector-width=512"), gnu::flatten, gnu::noinline]] void run_avx512(Body& body) {
  body(vector_width<64>{});
}

template <class Body>
[[gnu::target("avx2,fma"), gnu::flatten, gnu::noinline]] void run_avx2(Body& body) {
  body(vector_width<32>{});
}
#endif

/// Runs `body(vector_width)` compiled for the best instruction set of this processor: `flatten` pulls the body into a function
/// that carries the target attribute. So a default x86-64 build uses AVX-512 or AVX2 where they exist; elsewhere the body
/// is compiled as the rest of the program is.
template <class Body>
void vectorised(Body body) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) return run_avx512(body);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return run_avx2(body);
#endif
  body(vector_width<16>{});
}

/// A matrix to read: element (i, j) is at `data[i * row + j * column]`, so a transposed view costs nothing.
template <class Real>
struct view {
  const Real* data;
  std::size_t row;
  std::size_t column = 1;

  view transposed() const { return {data, column, row}; }
};

/// One tile: `Rows x Lanes` sums stay in registers while `k` runs. The constant trip counts let the compiler unroll the
/// rows and turn the lanes into vectors.
template <int Rows, int Lanes, class Real>
[[gnu::always_inline]] inline void multiply_tile(std::size_t k, view<Real> a, const Real* b, std::size_t b_row, Real* c,
                                                 std::size_t c_row, bool add) {
  Real sum[Rows][Lanes] = {};
  const Real* left = a.data;
  for (std::size_t p = 0; p < k; ++p, left += a.column, b += b_row) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Real scale = left[r * a.row];
#pragma GCC unroll 1
      for (int lane = 0; lane < Lanes; ++lane) sum[r][lane] += scale * b[lane];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 1
    for (int lane = 0; lane < Lanes; ++lane) {
      c[r * c_row + lane] = add ? c[r * c_row + lane] + sum[r][lane] : sum[r][lane];
    }
  }
}

template <int Rows, int Lanes, class Real>
[[gnu::always_inline]] inline void multiply_rows(std::size_t n, std::size_t k, view<Real> a, const Real* b,
                                                 std::size_t b_row, Real* c, std::size_t c_row, bool add) {
  std::size_t j = 0;
  for (; j + Lanes <= n; j += Lanes) multiply_tile<Rows, Lanes>(k, a, b + j, b_row, c + j, c_row, add);
  for (; j < n; ++j) multiply_tile<Rows, 1>(k, a, b + j, b_row, c + j, c_row, add);
}

/// C = A B, or C += A B if `add`: A is m x k (any view), B is k x n and C is m x n, both stored row by row.
template <class Real>
void multiply(std::size_t m, std::size_t n, std::size_t k, view<Real> a, const Real* b, std::size_t b_row, Real* c,
              std::size_t c_row, bool add = false) {
#if defined(GPT_USE_CBLAS)
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
    constexpr int rows = 8;
    std::size_t i = 0;
    for (; i + rows <= m; i += rows) {
      multiply_rows<rows, lanes>(n, k, {a.data + i * a.row, a.row, a.column}, b, b_row, c + i * c_row, c_row, add);
    }
    for (; i < m; ++i) {
      multiply_rows<1, lanes>(n, k, {a.data + i * a.row, a.row, a.column}, b, b_row, c + i * c_row, c_row, add);
    }
  });
}

}  // namespace gpt

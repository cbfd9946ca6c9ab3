// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief The loops of power_sgd on the host, written once and compiled for AVX2, too.
///
/// Inner loops of eight vectorise at -O2. As each operation is rounded by itself, both give the same
/// bits; a compiler that is told to join multiplications and additions (-ffp-contract) may give others.

#include <heddle/core/detail/convert_loops.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
#define HEDDLE_DETAIL_AVX2 __attribute__((target("avx2"), flatten))
#define HEDDLE_DETAIL_HAS_AVX2 1
#else
#define HEDDLE_DETAIL_AVX2
#define HEDDLE_DETAIL_HAS_AVX2 0
#endif

// chains[c] += v[j] r[j] for j % 8 == c.
struct dot_chains {
  static void run(const float* v, const double* r, std::size_t n, double* chains) noexcept {
    double sum[8];
    for (std::size_t c = 0; c < 8; ++c) sum[c] = chains[c];
    std::size_t j = 0;
    for (; j + 8 <= n; j += 8) {
      for (std::size_t c = 0; c < 8; ++c) sum[c] += static_cast<double>(v[j + c]) * r[j + c];
    }
    for (std::size_t c = 0; j < n; ++j, ++c) sum[c] += static_cast<double>(v[j]) * r[j];
    for (std::size_t c = 0; c < 8; ++c) chains[c] = sum[c];
  }
};
// sums[j] += v[j] l.
struct add_scaled {
  static void run(const float* __restrict v, double l, double* __restrict sums, std::size_t n) noexcept {
    std::size_t j = 0;
    for (; j + 8 <= n; j += 8) {
      for (std::size_t c = 0; c < 8; ++c) sums[j + c] += static_cast<double>(v[j + c]) * l;
    }
    for (; j < n; ++j) sums[j] += static_cast<double>(v[j]) * l;
  }
  static void run(const float* __restrict v, float l, float* __restrict sums, std::size_t n) noexcept {
    std::size_t j = 0;
    for (; j + 8 <= n; j += 8) {
      for (std::size_t c = 0; c < 8; ++c) sums[j + c] += v[j + c] * l;
    }
    for (; j < n; ++j) sums[j] += v[j] * l;
  }
};
// e[j] = v[j] - u[j] share.
struct keep_rest {
  static void run(const float* __restrict v, const float* __restrict u, float share, float* __restrict e,
                  std::size_t n) noexcept {
    std::size_t j = 0;
    for (; j + 8 <= n; j += 8) {
      for (std::size_t c = 0; c < 8; ++c) e[j + c] = v[j + c] - u[j + c] * share;
    }
    for (; j < n; ++j) e[j] = v[j] - u[j] * share;
  }
};

template <class Loop, class... Arguments> HEDDLE_DETAIL_AVX2 inline void run_avx2(Arguments... arguments) noexcept {
  Loop::run(arguments...);
}
// Runs a loop by the best instructions of this processor.
template <class Loop, class... Arguments> void run_loop(Arguments... arguments) noexcept {
  if (HEDDLE_DETAIL_HAS_AVX2 && best_isa() != isa::portable) return run_avx2<Loop>(arguments...);
  Loop::run(arguments...);
}

#undef HEDDLE_DETAIL_AVX2
#undef HEDDLE_DETAIL_HAS_AVX2

}  // namespace detail
}  // namespace v0
}  // namespace heddle

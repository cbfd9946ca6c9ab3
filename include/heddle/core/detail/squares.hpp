// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/convert_loops.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

// The end of a sum of squares: elements [first, n) go to the chains in turn, which are then added up.
inline double finish_squares(const float* x, std::size_t first, std::size_t n, double* chain) noexcept {
  for (std::size_t i = first, k = 0; i < n; ++i, ++k) chain[k] += static_cast<double>(x[i]) * x[i];
  return ((chain[0] + chain[1]) + (chain[2] + chain[3])) + ((chain[4] + chain[5]) + (chain[6] + chain[7]));
}

inline double squares_portable(const float* x, std::size_t n) noexcept {
  double chain[8] = {};
  const std::size_t whole = n / 8 * 8;
  for (std::size_t i = 0; i < whole; i += 8) {
    for (std::size_t k = 0; k < 8; ++k) chain[k] += static_cast<double>(x[i + k]) * x[i + k];
  }
  return finish_squares(x, whole, n, chain);
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
/// @cond
__attribute__((target("avx2"))) inline double squares_avx2(const float* x, std::size_t n) noexcept {
  using float_x4 = float __attribute__((vector_size(16)));
  using double_x4 = double __attribute__((vector_size(32)));
  double_x4 low{}, high{};
  const std::size_t whole = n / 8 * 8;
  for (std::size_t i = 0; i < whole; i += 8) {
    float_x4 a, b;
    std::memcpy(&a, x + i, sizeof a);
    std::memcpy(&b, x + i + 4, sizeof b);
    const double_x4 c = __builtin_convertvector(a, double_x4), d = __builtin_convertvector(b, double_x4);
    low += c * c;
    high += d * d;
  }
  double chain[8];
  std::memcpy(chain, &low, sizeof low);
  std::memcpy(chain + 4, &high, sizeof high);
  return finish_squares(x, whole, n, chain);
}
/// @endcond
#endif

// The sum of n squares in double, in eight chains that the processor runs at once. The order is fixed and squares of
// floats are exact in double, so every processor gives the same bits. Not finite exactly where an element isn't.
inline double squares(const float* x, std::size_t n) noexcept {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
  if (best_isa() != isa::portable) return squares_avx2(x, n);
#endif
  return squares_portable(x, n);
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief The loops of codecs on the host, portable ones and x86-64 ones of the same bits.

#include <heddle/core/detail/convert_loops.hpp>
#include <heddle/core/philox.hpp>

#include <algorithm>
#include <cmath>

namespace heddle {
inline namespace v0 {
namespace detail {

// The sum of |v|: eight chains, element i in chain i % 8, which are added up in order.
inline double sum_chains(const double* chains) noexcept {
  double sum = 0.0;
  for (int k = 0; k < 8; ++k) sum += chains[k];
  return sum;
}
// Adds elements [i, n), of which the first belongs to chain 0.
inline void add_magnitudes(const float* v, std::size_t i, std::size_t n, double* chains) noexcept {
  for (std::size_t k = 0; i < n; ++i, ++k) chains[k % 8] += std::fabs(static_cast<double>(v[i]));
}
// Bits of v < 0 for 8 elements.
inline unsigned negative_bits(const float* v) noexcept {
  unsigned byte = 0;
  for (std::size_t k = 0; k < 8; ++k) byte |= static_cast<unsigned>(v[k] < 0.0f) << k;
  return byte;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
/// @cond
using four_doubles = double __attribute__((vector_size(32)));
using four_words = std::uint64_t __attribute__((vector_size(32)));
using four_floats = float __attribute__((vector_size(16)));
using four_ints = int __attribute__((vector_size(16)));

__attribute__((target("avx2"))) inline double sum_magnitudes_avx2(const float* v, std::size_t n) noexcept {
  four_doubles sums[2] = {};
  four_ints mask{};
  mask += 0x7fffffff;
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (std::size_t half = 0; half < 2; ++half) {
      four_ints bits;
      four_floats x;
      std::memcpy(&bits, v + i + 4 * half, sizeof bits);
      bits &= mask;
      std::memcpy(&x, &bits, sizeof x);
      sums[half] += __builtin_convertvector(x, four_doubles);
    }
  }
  double chains[8];
  std::memcpy(chains, sums, sizeof chains);
  add_magnitudes(v, i, n, chains);
  return sum_chains(chains);
}

// n bytes, of 8 elements each.
__attribute__((target("avx2"))) inline void negative_bits_avx2(const float* v, std::byte* out, std::size_t n) noexcept {
  const float_x8 zero{};
  for (std::size_t i = 0; i < n; ++i) {
    float_x8 x, below;
    std::memcpy(&x, v + 8 * i, sizeof x);
    const int_x8 negative = x < zero;
    std::memcpy(&below, &negative, sizeof below);
    out[i] = static_cast<std::byte>(__builtin_ia32_movmskps256(below));
  }
}

// Products of the low halves of 64-bit lanes.
__attribute__((target("avx2"))) inline void multiply_low(four_words& x, const four_words& by) noexcept {
#if defined(__clang__)
  x = (x & 0xffffffffu) * (by & 0xffffffffu);
#else
  int_x8 a, b;
  std::memcpy(&a, &x, sizeof a);
  std::memcpy(&b, &by, sizeof b);
  const auto product = __builtin_ia32_pmuludq256(a, b);
  std::memcpy(&x, &product, sizeof x);
#endif
}

// The words of blocks first to first + 3: philox() of four counters at once. Of the lanes only the low halves count.
__attribute__((target("avx2"))) inline void philox_four(std::uint64_t seed, std::uint64_t stream, std::uint64_t first,
                                                        std::uint32_t* out) noexcept {
  std::uint64_t counters[2][4];
  for (unsigned lane = 0; lane < 4; ++lane) {
    counters[0][lane] = (first + lane) & 0xffffffffu;
    counters[1][lane] = (first + lane) >> 32;
  }
  four_words c[4] = {}, m0{}, m1{};
  std::memcpy(c, counters, sizeof counters);
  c[2] += stream & 0xffffffffu;
  c[3] += stream >> 32;
  m0 += 0xD2511F53u;
  m1 += 0xCD9E8D57u;
  auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    four_words a = c[0], b = c[2];
    multiply_low(a, m0);
    multiply_low(b, m1);
    c[0] = (b >> 32) ^ c[1] ^ k0;
    c[1] = b;
    c[2] = (a >> 32) ^ c[3] ^ k1;
    c[3] = a;
  }
  const four_words low = (c[0] & 0xffffffffu) | c[1] << 32, high = (c[2] & 0xffffffffu) | c[3] << 32;
  for (unsigned lane = 0; lane < 4; ++lane) {
    const std::uint64_t words[2] = {low[lane], high[lane]};
    std::memcpy(out + 4 * lane, words, sizeof words);
  }
}

// quantize::whole_of of 8 elements: whole numbers of -levels to levels as bytes; words is null where they are rounded
// to the nearest.
__attribute__((target("avx2"))) inline std::uint64_t wholes_of_eight(const float* v, const std::uint32_t* words,
                                                                     double inverse, int levels) noexcept {
  std::uint64_t bytes = 0;
  for (unsigned half = 0; half < 2; ++half) {
    four_floats x;
    std::memcpy(&x, v + 4 * half, sizeof x);
    four_doubles up{};
    if (words) {
      four_ints word;
      std::memcpy(&word, words + 4 * half, sizeof word);
      word = (word >> 8) & 0xffffff;
      up = __builtin_convertvector(__builtin_convertvector(word, four_floats) * 0x1p-24f, four_doubles);
    } else {
      up += 0.5;
    }
    four_doubles shifted = __builtin_convertvector(x, four_doubles) * inverse + up + (levels + 1.0);
    four_doubles least{}, most{};
    least += 1.0;
    most += 2.0 * levels + 1.0;
    shifted = shifted >= least ? shifted : least;  // also a NaN
    shifted = shifted < most + 1.0 ? shifted : most;
    const four_ints whole = __builtin_convertvector(shifted, four_ints) - (levels + 1);
    for (unsigned k = 0; k < 4; ++k)
      bytes |= std::uint64_t{static_cast<std::uint8_t>(whole[k])} << (8 * (4 * half + k));
  }
  return bytes;
}

// The first elements of a block as 8 or 4 bits each, 16 at a time; the block begins at a multiple of 16. Returns how
// many elements those are.
template <int Bits, bool Stochastic>
__attribute__((target("avx2"))) inline std::size_t quantize_avx2(const float* v, std::size_t n, double inverse,
                                                                 int levels, std::uint64_t seed, std::uint64_t stream,
                                                                 std::uint64_t first_block, std::byte* out) noexcept {
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    std::uint32_t words[16];
    if constexpr (Stochastic) philox_four(seed, stream, first_block + i / 4, words);
    for (std::size_t j = 0; j < 16; j += 8) {
      std::uint64_t bytes = wholes_of_eight(v + i + j, Stochastic ? words + j : nullptr, inverse, levels);
      if constexpr (Bits == 8) {
        std::memcpy(out + i + j, &bytes, 8);
      } else {  // two neighbours in a byte, the first one in the low half
        bytes &= 0x0f0f0f0f0f0f0f0fu;
        bytes |= bytes >> 4;
        for (unsigned k = 0; k < 4; ++k) out[(i + j) / 2 + k] = static_cast<std::byte>(bytes >> (16 * k) & 0xffu);
      }
    }
  }
  return i;
}
/// @endcond
#endif

// The sum of |v|.
inline double sum_magnitudes(const float* v, std::size_t n) noexcept {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
  if (best_isa() != isa::portable) return sum_magnitudes_avx2(v, n);
#endif
  double chains[8] = {};
  add_magnitudes(v, 0, n, chains);
  return sum_chains(chains);
}

// Which of 8 n elements are below 0, as bits.
inline void write_negative_bits(const float* v, std::byte* out, std::size_t n) noexcept {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
  if (best_isa() != isa::portable) return negative_bits_avx2(v, out, n);
#endif
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::byte>(negative_bits(v + 8 * i));
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

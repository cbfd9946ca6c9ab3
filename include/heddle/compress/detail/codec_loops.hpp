// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief The loops of codecs on the host, portable ones and x86-64 ones of the same bits.

#include <heddle/compress/concept.hpp>
#include <heddle/compress/detail/largest.hpp>
#include <heddle/core/philox.hpp>

#include <algorithm>
#include <cmath>

namespace heddle {
inline namespace v0 {
namespace detail {

// v = g share + e held, or where e is null g share; e may be v. The largest bits of |v|.
inline std::uint32_t feed_portable(float* v, const float* g, const float* e, std::size_t i, std::size_t n, float share,
                                   float held) noexcept {
  std::uint32_t peak = 0;
  for (; i < n; ++i) {
    v[i] = e ? g[i] * share + e[i] * held : g[i] * share;
    peak = (std::max)(peak, std::bit_cast<std::uint32_t>(v[i]) & magnitude_mask);
  }
  return peak;
}

// The sum of |v|: 16 chains, element i in chain i % 16, which are added up in order.
inline constexpr std::size_t sum_width = 16;
inline double sum_chains(const double* chains) noexcept {
  double sum = 0.0;
  for (std::size_t k = 0; k < sum_width; ++k) sum += chains[k];
  return sum;
}
// Adds elements [i, n), of which the first belongs to chain 0.
inline void add_magnitudes(const float* v, std::size_t i, std::size_t n, double* chains) noexcept {
  for (std::size_t k = 0; i < n; ++i, ++k) chains[k % sum_width] += std::fabs(static_cast<double>(v[i]));
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
using two_words = std::uint64_t __attribute__((vector_size(16)));
using four_words = std::uint64_t __attribute__((vector_size(32)));
using four_floats = float __attribute__((vector_size(16)));
using four_ints = int __attribute__((vector_size(16)));

// Four numbers in twice the bits; g++ 12 converts two at a time by itself.
template <class Numbers> __attribute__((target("avx2"))) inline void widen_four(const Numbers& from, four_doubles& to) {
#if defined(__clang__)
  to = __builtin_convertvector(from, four_doubles);
#else
  if constexpr (std::is_same_v<Numbers, four_floats>)
    to = __builtin_ia32_cvtps2pd256(from);
  else
    to = __builtin_ia32_cvtdq2pd256(from);
#endif
}

__attribute__((target("avx2"))) inline double sum_magnitudes_avx2(const float* v, std::size_t n) noexcept {
  four_doubles sums[sum_width / 4] = {};
  four_ints mask{};
  mask += 0x7fffffff;
  std::size_t i = 0;
  for (; i + sum_width <= n; i += sum_width) {
    for (std::size_t part = 0; part < sum_width / 4; ++part) {
      four_ints bits;
      four_floats x;
      four_doubles wide;
      std::memcpy(&bits, v + i + 4 * part, sizeof bits);
      bits &= mask;
      std::memcpy(&x, &bits, sizeof x);
      widen_four(x, wide);
      sums[part] += wide;
    }
  }
  double chains[sum_width];
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

__attribute__((target("avx2"))) inline std::uint32_t feed_avx2(float* v, const float* g, const float* e, std::size_t n,
                                                               float share, float held) noexcept {
  int_x8 peak{}, magnitude{};
  magnitude += static_cast<int>(magnitude_mask);
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    float_x8 x, kept;
    std::memcpy(&x, g + i, sizeof x);
    x = x * share;
    if (e) {
      std::memcpy(&kept, e + i, sizeof kept);
      x = x + kept * held;
    }
    std::memcpy(v + i, &x, sizeof x);
    int_x8 bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits &= magnitude;
    peak = bits > peak ? bits : peak;
  }
  std::uint32_t lanes[8], most = feed_portable(v, g, e, i, n, share, held);
  std::memcpy(lanes, &peak, sizeof lanes);
  for (const std::uint32_t lane : lanes) most = (std::max)(most, lane);
  return most;
}

// Adds a scale or its opposite to 8 elements for each of n bytes.
__attribute__((target("avx2"))) inline void add_signs_avx2(const std::byte* bits, float scale, float* sum,
                                                           std::size_t n) noexcept {
  const int_x8 up = {31, 30, 29, 28, 27, 26, 25, 24};
  int_x8 top{}, positive{};
  top += static_cast<int>(0x80000000u);
  positive += std::bit_cast<int>(scale);
  for (std::size_t i = 0; i < n; ++i) {
    int_x8 x{};
    x += static_cast<int>(bits[i]);
    x = ((x << up) & top) ^ positive;
    float_x8 add, to;
    std::memcpy(&add, &x, sizeof add);
    std::memcpy(&to, sum + 8 * i, sizeof to);
    to = to + add;
    std::memcpy(sum + 8 * i, &to, sizeof to);
  }
}

// Adds whole numbers of 8 or 4 bits times a scale to whole groups of 8 of n elements; returns how many those are.
template <int Bits>
__attribute__((target("avx2"))) inline std::size_t add_wholes_avx2(const std::byte* in, float scale, float* sum,
                                                                   std::size_t n) noexcept {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    int_x8 x{};
    if constexpr (Bits == 8) {
      const int_x8 up = {24, 16, 8, 0, 24, 16, 8, 0};
      int word[2];
      std::memcpy(word, in + i, sizeof word);
      x = int_x8{word[0], word[0], word[0], word[0], word[1], word[1], word[1], word[1]};
      x = (x << up) >> 24;
    } else {
      const int_x8 up = {28, 24, 20, 16, 12, 8, 4, 0};
      int word;
      std::memcpy(&word, in + i / 2, sizeof word);
      x += word;
      x = (x << up) >> 28;
    }
    float_x8 to;
    std::memcpy(&to, sum + i, sizeof to);
    to = to + __builtin_convertvector(x, float_x8) * scale;
    std::memcpy(sum + i, &to, sizeof to);
  }
  return i;
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

// The words of blocks first to first + 3: philox() of four counters at once, words 0 and 1 of each in `low`, 2 and 3 in
// `high`.
__attribute__((target("avx2"))) inline void philox_four(std::uint64_t seed, std::uint64_t stream, std::uint64_t first,
                                                        four_words& low, four_words& high) noexcept {
  // Of the lanes only the low halves count. The low halves of the counters don't overflow into each other here.
  const four_words lanes = {0, 1, 2, 3};
  four_words c[4] = {lanes, {}, {}, {}}, m0{}, m1{};
  c[0] += first;
  c[1] = c[0] >> 32;
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
  low = (c[0] & 0xffffffffu) | c[1] << 32;
  high = (c[2] & 0xffffffffu) | c[3] << 32;
}

// quantize::whole_of of 4 elements: whole numbers of -levels to levels; word is null where they are rounded to the
// nearest.
__attribute__((target("avx2"))) inline four_ints wholes_of_four(const float* v, const four_ints* word, double inverse,
                                                                int levels) noexcept {
  four_floats x;
  std::memcpy(&x, v, sizeof x);
  four_doubles value, up{}, least{}, most{};
  widen_four(x, value);
  if (word) {
    widen_four(four_ints((*word >> 8) & 0xffffff), up);
    up *= 0x1p-24;
  } else {
    up += 0.5;
  }
  least += 1.0;
  most += 2.0 * levels + 1.0;
  const four_doubles shifted = value * inverse + up + (levels + 1.0);
  // Of a NaN the largest of both is the second.
  return __builtin_ia32_cvttpd2dq256(__builtin_ia32_minpd256(__builtin_ia32_maxpd256(shifted, least), most)) -
         (levels + 1);
}

// The first elements of a block as 8 or 4 bits each, 16 at a time; the block begins at a multiple of 16. Returns how
// many elements those are.
template <int Bits, bool Stochastic>
__attribute__((target("avx2"))) inline std::size_t quantize_avx2(const float* v, std::size_t n, double inverse,
                                                                 int levels, std::uint64_t seed, std::uint64_t stream,
                                                                 std::uint64_t first_block, std::byte* out) noexcept {
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    std::uint64_t words[2][4];
    if constexpr (Stochastic) {
      four_words low, high;
      philox_four(seed, stream, first_block + i / 4, low, high);
      std::memcpy(words[0], &low, sizeof low);
      std::memcpy(words[1], &high, sizeof high);
    }
    four_ints whole[4];
    for (std::size_t b = 0; b < 4; ++b) {
      four_ints word{};
      if constexpr (Stochastic) {
        const two_words both = {words[0][b], words[1][b]};
        std::memcpy(&word, &both, sizeof word);
      }
      whole[b] = wholes_of_four(v + i + 4 * b, Stochastic ? &word : nullptr, inverse, levels);
    }
    auto bytes = __builtin_ia32_packsswb128(__builtin_ia32_packssdw128(whole[0], whole[1]),
                                            __builtin_ia32_packssdw128(whole[2], whole[3]));
    if constexpr (Bits == 8) {
      std::memcpy(out + i, &bytes, 16);
    } else {  // two neighbours in a byte, the first one in the low half
      short_x8 pairs;
      std::memcpy(&pairs, &bytes, sizeof pairs);
      pairs = (pairs & 0x000f) | ((pairs >> 4) & 0x00f0);
      bytes = __builtin_ia32_packuswb128(pairs, pairs);
      std::memcpy(out + i / 2, &bytes, 8);
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
  double chains[sum_width] = {};
  add_magnitudes(v, 0, n, chains);
  return sum_chains(chains);
}

// v = g share + e held, or where e is null g share; e may be v. The largest bits of |v|.
inline std::uint32_t feed(float* v, const float* g, const float* e, std::size_t n, float share, float held) noexcept {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
  if (best_isa() != isa::portable) return feed_avx2(v, g, e, n, share, held);
#endif
  return feed_portable(v, g, e, 0, n, share, held);
}

// Which of 8 n elements are below 0, as bits.
inline void write_negative_bits(const float* v, std::byte* out, std::size_t n) noexcept {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
  if (best_isa() != isa::portable) return negative_bits_avx2(v, out, n);
#endif
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::byte>(negative_bits(v + 8 * i));
}
// Adds a scale where the bit of an element is 0, its opposite elsewhere, to 8 n elements.
inline void add_signs(const std::byte* bits, float scale, float* sum, std::size_t n) noexcept {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
  if (best_isa() != isa::portable) return add_signs_avx2(bits, scale, sum, n);
#endif
  for (std::size_t i = 0; i < 8 * n; ++i)
    sum[i] += (static_cast<unsigned>(bits[i / 8]) >> i % 8 & 1u) != 0 ? -scale : scale;
}

// What the committing half is told: what is held counts as much as is known by then, unless that could leave float's
// range.
inline encode_context with_late_scale(const encode_context& x, const float* held, std::size_t n) noexcept {
  encode_context known = x;
  if (x.held_late == 1.0f) return known;
  known.held_scale *= x.held_late;
  if (!(std::bit_cast<float>(peak_bits(held, n)) * known.held_scale <= 1e-4f * most_sent(x.ranks))) return x;
  return known;
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

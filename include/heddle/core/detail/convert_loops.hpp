// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief The loops behind `convert` and `all_finite`: portable ones, and x86-64 ones compiled by function attribute.
///
/// Every loop gives the bits of the scalar conversion in float16.hpp. Compiler builtins are used instead of
/// `<immintrin.h>`, which costs a third of a second in every file that includes it.

#include <heddle/core/float16.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace heddle {
inline namespace v0 {
namespace detail {

/// Which loops a bulk conversion runs.
enum class isa : std::uint8_t {
  portable,  ///< Any processor.
  avx2,      ///< AVX2 and F16C.
  avx512     ///< AVX-512 F, BW, VL.
};

/// @brief Bits of a 16-bit float that are all ones exactly in infinities and NaNs.
template <class Half> inline constexpr unsigned exponent_mask = 0;
/// @cond
template <> inline constexpr unsigned exponent_mask<float16> = 0x7c00u;
template <> inline constexpr unsigned exponent_mask<bfloat16> = 0x7f80u;
/// @endcond

/// float to 16 bits, one element after the other. Without Scaled, `scale` is not used. With Checked, true when any
/// result is infinite or NaN; what is returned without it means nothing.
template <bool Scaled, bool Checked, class Half>
inline bool narrow_portable(const float* from, Half* to, std::size_t n, float scale) noexcept {
  unsigned bad = 0;
  for (std::size_t i = 0; i < n; ++i) {
    to[i] = Half(Scaled ? from[i] * scale : from[i]);
    if (Checked) bad |= static_cast<unsigned>((to[i].bits & exponent_mask<Half>) == exponent_mask<Half>);
  }
  return bad != 0;
}

/// 16 bits to float, one element after the other. Without Scaled, `scale` is not used and NaNs pass as they are.
template <bool Scaled, class Half>
inline void widen_portable(const Half* from, float* to, std::size_t n, float scale) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    const float value = static_cast<float>(from[i]);
    to[i] = Scaled ? value * scale : value;
  }
}

/// to[i] = from[i] * factor, one element after the other; in place too.
inline void multiply_portable(const float* from, float* to, std::size_t n, float factor) noexcept {
  for (std::size_t i = 0; i < n; ++i) to[i] = from[i] * factor;
}

/// Whether n floats are all finite, one after the other.
inline bool finite_portable(const float* from, std::size_t n) noexcept {
  unsigned bad = 0;
  for (std::size_t i = 0; i < n; ++i) {
    bad |= static_cast<unsigned>((std::bit_cast<std::uint32_t>(from[i]) & 0x7f800000u) == 0x7f800000u);
  }
  return bad == 0;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)

#define HEDDLE_DETAIL_AVX2 __attribute__((target("avx2,f16c")))
#define HEDDLE_DETAIL_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,f16c")))

/// @cond
using float_x8 = float __attribute__((vector_size(32)));
using float_x16 = float __attribute__((vector_size(64)));
using short_x8 = short __attribute__((vector_size(16)));
using short_x16 = short __attribute__((vector_size(32)));
using int_x8 = int __attribute__((vector_size(32)));
using int_x16 = int __attribute__((vector_size(64)));
using word_x16 = std::uint32_t __attribute__((vector_size(64)));
inline constexpr unsigned short all_x16 = 0xffff;
/// @endcond

/// The best loops this processor can run; a load and a mask, so that each bulk call can ask.
inline isa best_isa() noexcept {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) return isa::avx512;
#if defined(__clang__)  // older versions refuse "f16c" here; every processor with AVX2 and FMA has F16C
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? isa::avx2 : isa::portable;
#else
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? isa::avx2 : isa::portable;
#endif
}

/// @cond
template <bool Scaled, bool Checked>
HEDDLE_DETAIL_AVX2 inline bool narrow_avx2(const float* from, float16* to, std::size_t n, float scale) noexcept {
  short_x8 bad{}, exponent{};
  exponent += 0x7c00;  // not `short_x8{} + 0x7c00`: nvcc's front end crashes on it
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    float_x8 x;
    std::memcpy(&x, from + i, sizeof x);
    if (Scaled) x = x * scale;
    const short_x8 y = __builtin_ia32_vcvtps2ph256(x, 0);  // 0: to nearest even whatever the mode register says
    std::memcpy(static_cast<void*>(to + i), &y, sizeof y);
    if (Checked) bad |= (y & exponent) == exponent;
  }
  std::uint64_t word[2];
  std::memcpy(word, &bad, sizeof word);
  const bool tail = narrow_portable<Scaled, Checked>(from + i, to + i, n - i, scale);
  return (word[0] | word[1]) != 0 || tail;
}

template <bool Scaled, bool Checked>
HEDDLE_DETAIL_AVX512 inline bool narrow_avx512(const float* from, float16* to, std::size_t n, float scale) noexcept {
  short_x16 bad{}, exponent{};
  exponent += 0x7c00;
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    float_x16 x;
    std::memcpy(&x, from + i, sizeof x);
    if (Scaled) x = x * scale;
    const short_x16 y = __builtin_ia32_vcvtps2ph512_mask(x, 0, short_x16{}, all_x16);
    std::memcpy(static_cast<void*>(to + i), &y, sizeof y);
    if (Checked) bad |= (y & exponent) == exponent;
  }
  std::uint64_t word[4];
  std::memcpy(word, &bad, sizeof word);
  const bool tail = narrow_portable<Scaled, Checked>(from + i, to + i, n - i, scale);
  return (word[0] | word[1] | word[2] | word[3]) != 0 || tail;
}

template <bool Scaled>
HEDDLE_DETAIL_AVX2 inline void widen_avx2(const float16* from, float* to, std::size_t n, float scale) noexcept {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    short_x8 x;
    std::memcpy(&x, from + i, sizeof x);
    float_x8 y = __builtin_ia32_vcvtph2ps256(x);
    if (Scaled) y = y * scale;
    std::memcpy(to + i, &y, sizeof y);
  }
  widen_portable<Scaled>(from + i, to + i, n - i, scale);
}

template <bool Scaled>
HEDDLE_DETAIL_AVX512 inline void widen_avx512(const float16* from, float* to, std::size_t n, float scale) noexcept {
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    short_x16 x;
    std::memcpy(&x, from + i, sizeof x);
    float_x16 y = __builtin_ia32_vcvtph2ps512_mask(x, float_x16{}, static_cast<short>(-1), 4);
    if (Scaled) y = y * scale;
    std::memcpy(to + i, &y, sizeof y);
  }
  widen_portable<Scaled>(from + i, to + i, n - i, scale);
}

// bfloat16 needs no instruction of its own: blocks of a fixed count vectorise at -O2 too. A block is rounded as if it
// held no NaN; its largest magnitude then says whether it does, and whether anything became infinite.
template <bool Scaled, bool Checked>
HEDDLE_DETAIL_AVX2 inline bool narrow_avx2(const float* __restrict from, bfloat16* __restrict to, std::size_t n,
                                           float scale) noexcept {
  constexpr std::size_t block = 32;
  constexpr std::uint32_t infinity = 0x7f800000u, becomes_infinite = 0x7f7f8000u;
  bool bad = false;
  std::size_t i = 0;
  for (; i + block <= n; i += block) {
    std::uint32_t largest = 0;
    for (std::size_t j = 0; j < block; ++j) {
      const std::uint32_t x = std::bit_cast<std::uint32_t>(Scaled ? from[i + j] * scale : from[i + j]);
      const std::uint32_t magnitude = x & 0x7fffffffu;
      largest = largest > magnitude ? largest : magnitude;
      to[i + j].bits = static_cast<std::uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
    }
    if (largest >= becomes_infinite) {
      bad = true;
      if (largest > infinity) narrow_portable<Scaled, false>(from + i, to + i, block, scale);
    }
  }
  const bool tail = narrow_portable<Scaled, Checked>(from + i, to + i, n - i, scale);
  return bad || tail;
}

template <bool Scaled, bool Checked>
HEDDLE_DETAIL_AVX512 inline bool narrow_avx512(const float* from, bfloat16* to, std::size_t n, float scale) noexcept {
  word_x16 infinite{}, magnitude{}, quiet{}, one{}, half{}, bad{};
  infinite += 0x7f800000u;
  magnitude += 0x7fffffffu;
  quiet += 0x400000u;
  one += 1u;
  half += 0x7fffu;
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    float_x16 y;
    std::memcpy(&y, from + i, sizeof y);
    if (Scaled) y = y * scale;
    word_x16 x;
    std::memcpy(&x, &y, sizeof x);
    const word_x16 rounded = x + (half + ((x >> 16) & one));
    // a NaN would round to infinity or across the sign: take its upper half, made quiet
    const word_x16 nan = (word_x16)((x & magnitude) > infinite);
    const word_x16 z = (rounded & ~nan) | ((x | quiet) & nan);
    if (Checked) bad |= (word_x16)((z & infinite) == infinite);
    const short_x16 out = __builtin_ia32_pmovdw512_mask((int_x16)(z >> 16), short_x16{}, all_x16);
    std::memcpy(static_cast<void*>(to + i), &out, sizeof out);
  }
  std::uint64_t word[8], any = 0;
  std::memcpy(word, &bad, sizeof word);
  for (std::uint64_t w : word) any |= w;
  const bool tail = narrow_portable<Scaled, Checked>(from + i, to + i, n - i, scale);
  return any != 0 || tail;
}

template <bool Scaled>
HEDDLE_DETAIL_AVX2 inline void widen_avx2(const bfloat16* __restrict from, float* __restrict to, std::size_t n,
                                          float scale) noexcept {
  constexpr std::size_t block = 32;
  std::size_t i = 0;
  for (; i + block <= n; i += block) {
    for (std::size_t j = 0; j < block; ++j) {
      const float y = std::bit_cast<float>(static_cast<std::uint32_t>(from[i + j].bits) << 16);
      to[i + j] = Scaled ? y * scale : y;
    }
  }
  widen_portable<Scaled>(from + i, to + i, n - i, scale);
}

// The next two do so little with a float that wider vectors would only wait for memory.
HEDDLE_DETAIL_AVX2 inline void multiply_avx2(const float* from, float* to, std::size_t n, float factor) noexcept {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    float_x8 x;
    std::memcpy(&x, from + i, sizeof x);
    x = x * factor;
    std::memcpy(to + i, &x, sizeof x);
  }
  multiply_portable(from + i, to + i, n - i, factor);
}

// Bits without the sign are ordered as magnitudes are, infinity and NaNs last.
HEDDLE_DETAIL_AVX2 inline bool finite_avx2(const float* from, std::size_t n) noexcept {
  constexpr std::size_t block = 32;
  int_x8 magnitude{}, largest_finite{}, largest{};
  magnitude += 0x7fffffff;
  largest_finite += 0x7f7fffff;
  std::size_t i = 0;
  for (; i + block <= n; i += block) {
    for (std::size_t j = 0; j < block; j += 8) {
      int_x8 x;
      std::memcpy(&x, from + i + j, sizeof x);
      x = x & magnitude;
      largest = largest > x ? largest : x;
    }
  }
  const int_x8 bad = largest > largest_finite;
  std::uint64_t word[4];
  std::memcpy(word, &bad, sizeof word);
  const bool tail = finite_portable(from + i, n - i);
  return (word[0] | word[1] | word[2] | word[3]) == 0 && tail;
}
/// @endcond

/// float to 16 bits by the given loops; see narrow_portable.
template <bool Scaled, bool Checked, class Half>
inline bool narrow(const float* from, Half* to, std::size_t n, float scale, isa which) noexcept {
  if (which == isa::avx512) return narrow_avx512<Scaled, Checked>(from, to, n, scale);
  if (which == isa::avx2) return narrow_avx2<Scaled, Checked>(from, to, n, scale);
  return narrow_portable<Scaled, Checked>(from, to, n, scale);
}
/// float16 to float by the given loops.
template <bool Scaled>
inline void widen(const float16* from, float* to, std::size_t n, float scale, isa which) noexcept {
  if (which == isa::avx512) return widen_avx512<Scaled>(from, to, n, scale);
  if (which == isa::avx2) return widen_avx2<Scaled>(from, to, n, scale);
  widen_portable<Scaled>(from, to, n, scale);
}
/// bfloat16 to float by the given loops.
template <bool Scaled>
inline void widen(const bfloat16* from, float* to, std::size_t n, float scale, isa which) noexcept {
  if (which != isa::portable) return widen_avx2<Scaled>(from, to, n, scale);
  widen_portable<Scaled>(from, to, n, scale);
}

/// to[i] = from[i] * factor by the given loops; in place too.
inline void multiply(const float* from, float* to, std::size_t n, float factor, isa which) noexcept {
  if (which != isa::portable) return multiply_avx2(from, to, n, factor);
  multiply_portable(from, to, n, factor);
}
/// Whether n floats are all finite, by the given loops.
inline bool finite(const float* from, std::size_t n, isa which) noexcept {
  return which != isa::portable ? finite_avx2(from, n) : finite_portable(from, n);
}

#undef HEDDLE_DETAIL_AVX2
#undef HEDDLE_DETAIL_AVX512

#else

/// The best loops this processor can run.
constexpr isa best_isa() noexcept { return isa::portable; }
/// float to 16 bits; see narrow_portable.
template <bool Scaled, bool Checked, class Half>
inline bool narrow(const float* from, Half* to, std::size_t n, float scale, isa) noexcept {
  return narrow_portable<Scaled, Checked>(from, to, n, scale);
}
/// 16 bits to float.
template <bool Scaled, class Half>
inline void widen(const Half* from, float* to, std::size_t n, float scale, isa) noexcept {
  widen_portable<Scaled>(from, to, n, scale);
}
/// to[i] = from[i] * factor; in place too.
inline void multiply(const float* from, float* to, std::size_t n, float factor, isa) noexcept {
  multiply_portable(from, to, n, factor);
}
/// Whether n floats are all finite.
inline bool finite(const float* from, std::size_t n, isa) noexcept { return finite_portable(from, n); }

#endif

}  // namespace detail
}  // namespace v0
}  // namespace heddle

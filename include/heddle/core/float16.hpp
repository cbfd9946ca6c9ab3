// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/config.hpp>

#include <cstdint>

namespace heddle {
inline namespace v0 {

namespace detail {
// __builtin_bit_cast (g++, clang, nvcc) where std::bit_cast would do: nvcc refuses the latter in device code.
// float -> binary16, round to nearest even, integer arithmetic only so that it is constexpr and the same everywhere.
HEDDLE_HD constexpr std::uint16_t float_to_half(float f) noexcept {
  const std::uint32_t x = __builtin_bit_cast(std::uint32_t, f);
  const std::uint32_t sign = (x >> 16) & 0x8000u;
  const std::uint32_t a = x & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | ((a >> 13) & 0x3ffu));  // NaN, made quiet
  if (a >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (a >= 0x38800000u) {                                                   // normal in binary16
    const std::uint32_t r = a + 0xfffu + ((a >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((r - 0x38000000u) >> 13));
  }
  if (a <= 0x33000000u) return static_cast<std::uint16_t>(sign);  // at most half of the smallest subnormal: zero
  const int shift = 126 - static_cast<int>(a >> 23);              // 14..24
  const std::uint32_t m = (a & 0x7fffffu) | 0x800000u;
  const std::uint32_t q = m >> shift, rest = m & ((1u << shift) - 1u), half = 1u << (shift - 1);
  return static_cast<std::uint16_t>(sign | (q + ((rest > half || (rest == half && (q & 1u))) ? 1u : 0u)));
}

HEDDLE_HD constexpr float half_to_float(std::uint16_t h) noexcept {
  const std::uint32_t sign = (h & 0x8000u) << 16;
  const std::uint32_t e = (h >> 10) & 0x1fu, m = h & 0x3ffu;
  if (e == 0x1fu) return __builtin_bit_cast(float, sign | 0x7f800000u | (m << 13) | (m ? 0x400000u : 0u));
  if (e != 0) return __builtin_bit_cast(float, sign | ((e + 112u) << 23) | (m << 13));
  const float v = static_cast<float>(m) * 0x1p-24f;
  return sign ? -v : v;
}

HEDDLE_HD constexpr std::uint16_t float_to_bfloat(float f) noexcept {
  const std::uint32_t x = __builtin_bit_cast(std::uint32_t, f);
  if ((x & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((x >> 16) | 0x40u);
  return static_cast<std::uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
}
}  // namespace detail

/// @brief IEEE binary16: 1 sign, 5 exponent, 10 mantissa bits; largest finite value 65504, smallest 2^-24.
///
/// A storage type: convert, compute in float, convert back. Conversion rounds to nearest even; values from 65520 up
/// become infinity; a NaN stays a (quiet) NaN. Source: IEEE 754-2008, section 3.6.
struct float16 {
  std::uint16_t bits;  ///< The encoding.

  float16() = default;
  /// Rounds to nearest even.
  HEDDLE_HD explicit constexpr float16(float f) noexcept : bits(detail::float_to_half(f)) {}
  /// Exact.
  HEDDLE_HD explicit constexpr operator float() const noexcept { return detail::half_to_float(bits); }
  /// The value with this encoding.
  HEDDLE_HD static constexpr float16 from_bits(std::uint16_t b) noexcept {
    float16 h(0.0f);
    h.bits = b;
    return h;
  }
};

/// @brief bfloat16: 1 sign, 8 exponent, 7 mantissa bits; float's range at 3 decimal digits.
///
/// A storage type, as float16. Conversion rounds to nearest even; a NaN stays a quiet NaN.
struct bfloat16 {
  std::uint16_t bits;  ///< The encoding: the upper half of a float.

  bfloat16() = default;
  /// Rounds to nearest even.
  HEDDLE_HD explicit constexpr bfloat16(float f) noexcept : bits(detail::float_to_bfloat(f)) {}
  /// Exact.
  HEDDLE_HD explicit constexpr operator float() const noexcept {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }
  /// The value with this encoding.
  HEDDLE_HD static constexpr bfloat16 from_bits(std::uint16_t b) noexcept {
    bfloat16 h(0.0f);
    h.bits = b;
    return h;
  }
};

}  // namespace v0
}  // namespace heddle

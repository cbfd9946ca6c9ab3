// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   CUDA's device intrinsics and the mathematical functions that CUDA has in the global namespace and the C
//         library hasn't, as plain functions. Integers, conversions, directed roundings: bit for bit as CUDA defines
//         them. Single-precision NaN results are the canonical 0x7fffffff.
// Limits: fast mathematics (__expf, __sinf, ...) is exact to the last bit or so, where a device is coarser. Subnormals
//         are never flushed. fmaxf, sinf and all that the C library has are the C library's. Everything is noexcept
//         because glibc declares some of these names itself, so.

#include "access.h"
#include "qualifiers.h"
#include "soft_float.h"

#include "../vector_functions.h"

#include <math.h>
#include <stdlib.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <limits>
#include <numbers>
#include <type_traits>

namespace emulated {

/// Ends the launch, as __trap() does. Part of the runtime.
[[noreturn]] void trap();

}  // namespace emulated

__device__ inline void __trap() { emulated::trap(); }

// A false assumption is undefined behaviour, which the sanitizer for it reports.
#ifdef __has_builtin
#if !__has_builtin(__builtin_assume)
#define __builtin_assume(condition) ((condition) ? static_cast<void>(0) : __builtin_unreachable())
#endif
#endif
#ifndef __assume
#define __assume(condition) __builtin_assume(condition)
#endif

// ---- Integers -------------------------------------------------------------------------------------------------------

__device__ inline int __popc(unsigned x) noexcept { return std::popcount(x); }
__device__ inline int __popcll(unsigned long long x) noexcept { return std::popcount(x); }
__device__ inline int __clz(int x) noexcept { return std::countl_zero(static_cast<unsigned>(x)); }
__device__ inline int __clzll(long long x) noexcept { return std::countl_zero(static_cast<unsigned long long>(x)); }
/// The position of the lowest bit set, counted from one; zero if there is none.
__device__ inline int __ffs(int x) noexcept { return x == 0 ? 0 : 1 + std::countr_zero(static_cast<unsigned>(x)); }
__device__ inline int __ffsll(long long x) noexcept {
  return x == 0 ? 0 : 1 + std::countr_zero(static_cast<unsigned long long>(x));
}

__device__ inline unsigned __brev(unsigned x) noexcept {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  x = (x >> 8 & 0x00ff00ffu) | (x & 0x00ff00ffu) << 8;
  return x >> 16 | x << 16;
}
__device__ inline unsigned long long __brevll(unsigned long long x) noexcept {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
         __brev(static_cast<unsigned>(x >> 32));
}

/// Four of the eight bytes of y:x, each named by three bits of a nibble of the selector.
__device__ inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) noexcept {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i != 4; ++i) {
    const unsigned source = selector >> 4 * i & 7;
    result |= static_cast<unsigned>(bytes >> 8 * source & 0xff) << 8 * i;
  }
  return result;
}

/// The upper half of hi:lo shifted left, the lower half of it shifted right: by shift modulo 32, or, with c, by at
/// most 32.
__device__ inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) noexcept {
  return static_cast<unsigned>(((static_cast<unsigned long long>(hi) << 32 | lo) << (shift & 31)) >> 32);
}
__device__ inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned shift) noexcept {
  return shift >= 32 ? lo : __funnelshift_l(lo, hi, shift);
}
__device__ inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) noexcept {
  return static_cast<unsigned>((static_cast<unsigned long long>(hi) << 32 | lo) >> (shift & 31));
}
__device__ inline unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned shift) noexcept {
  return shift >= 32 ? hi : __funnelshift_r(lo, hi, shift);
}

__device__ inline int __mulhi(int x, int y) noexcept { return static_cast<int>(static_cast<long long>(x) * y >> 32); }
__device__ inline unsigned __umulhi(unsigned x, unsigned y) noexcept {
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
__device__ inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) noexcept {
  return static_cast<unsigned long long>(static_cast<emulated::uint128>(x) * y >> 64);
}
__device__ inline long long __mul64hi(long long x, long long y) noexcept {
  const auto a = static_cast<unsigned long long>(x);
  const auto b = static_cast<unsigned long long>(y);
  return static_cast<long long>(__umul64hi(a, b) - (x < 0 ? b : 0) - (y < 0 ? a : 0));
}
/// The lower 32 bits of the product of the lower 24 bits.
__device__ inline int __mul24(int x, int y) noexcept {
  const auto low = [](int i) { return static_cast<long long>(static_cast<int>(static_cast<unsigned>(i) << 8) >> 8); };
  return static_cast<int>(static_cast<unsigned>(low(x) * low(y)));
}
__device__ inline unsigned __umul24(unsigned x, unsigned y) noexcept { return (x & 0xffffff) * (y & 0xffffff); }

/// |x - y| + z.
__device__ inline unsigned __sad(int x, int y, unsigned z) noexcept {
  return z + (x > y ? static_cast<unsigned>(x) - static_cast<unsigned>(y)
                    : static_cast<unsigned>(y) - static_cast<unsigned>(x));
}
__device__ inline unsigned __usad(unsigned x, unsigned y, unsigned z) noexcept { return z + (x > y ? x - y : y - x); }

/// Averages without overflow, rounded down, or, with r, half up.
__device__ inline int __hadd(int x, int y) noexcept { return static_cast<int>((static_cast<long long>(x) + y) >> 1); }
__device__ inline int __rhadd(int x, int y) noexcept {
  return static_cast<int>((static_cast<long long>(x) + y + 1) >> 1);
}
__device__ inline unsigned __uhadd(unsigned x, unsigned y) noexcept {
  return static_cast<unsigned>((static_cast<unsigned long long>(x) + y) >> 1);
}
__device__ inline unsigned __urhadd(unsigned x, unsigned y) noexcept {
  return static_cast<unsigned>((static_cast<unsigned long long>(x) + y + 1) >> 1);
}

// ---- Integers packed in a word --------------------------------------------------------------------------------------

namespace emulated {

/// Lane number i of a word that holds as many Lanes as it can.
template <class Lane> Lane lane(unsigned word, unsigned i) { return static_cast<Lane>(word >> 8 * sizeof(Lane) * i); }

/// Applies a function of two ints to all lanes; each result keeps its lower bits.
template <class Lane, class Function> unsigned map_lanes(unsigned a, unsigned b, Function f) {
  unsigned result = 0;
  for (unsigned i = 0; i != 4 / sizeof(Lane); ++i) {
    const auto value = static_cast<unsigned>(f(static_cast<int>(lane<Lane>(a, i)), static_cast<int>(lane<Lane>(b, i))));
    result |= static_cast<unsigned>(static_cast<std::make_unsigned_t<Lane>>(value)) << 8 * sizeof(Lane) * i;
  }
  return result;
}

template <class Lane> int clamp_to(int x) {
  using limits = std::numeric_limits<Lane>;
  return std::clamp(x, static_cast<int>(limits::min()), static_cast<int>(limits::max()));
}

}  // namespace emulated

#define EMULATED_LANES(name, lane_type, expression)                                              \
  __device__ inline unsigned name(unsigned a, unsigned b) noexcept {                             \
    using lane [[maybe_unused]] = lane_type;                                                     \
    return emulated::map_lanes<lane_type>(a, b, [](int x, int y) -> int { return expression; }); \
  }
// For two lanes and for four; with s of signed numbers, with u of unsigned ones.
#define EMULATED_SIGNED(name, suffix, expression)    \
  EMULATED_LANES(name##suffix##2, short, expression) \
  EMULATED_LANES(name##suffix##4, signed char, expression)
#define EMULATED_UNSIGNED(name, suffix, expression)           \
  EMULATED_LANES(name##suffix##2, unsigned short, expression) \
  EMULATED_LANES(name##suffix##4, unsigned char, expression)
#define EMULATED_BOTH(name, expression) \
  EMULATED_SIGNED(name, s, expression)  \
  EMULATED_UNSIGNED(name, u, expression)

EMULATED_UNSIGNED(__vadd, , x + y)
EMULATED_UNSIGNED(__vsub, , x - y)
EMULATED_SIGNED(__vadd, ss, emulated::clamp_to<lane>(x + y))
EMULATED_SIGNED(__vsub, ss, emulated::clamp_to<lane>(x - y))
EMULATED_UNSIGNED(__vadd, us, emulated::clamp_to<lane>(x + y))
EMULATED_UNSIGNED(__vsub, us, emulated::clamp_to<lane>(x - y))
EMULATED_BOTH(__vmax, x > y ? x : y)
EMULATED_BOTH(__vmin, x < y ? x : y)
EMULATED_BOTH(__vabsdiff, x > y ? x - y : y - x)
EMULATED_UNSIGNED(__vavg, u, (x + y + 1) >> 1)
EMULATED_UNSIGNED(__vhadd, u, (x + y) >> 1)
EMULATED_UNSIGNED(__vcmpeq, , x == y ? -1 : 0)
EMULATED_UNSIGNED(__vcmpne, , x != y ? -1 : 0)
EMULATED_BOTH(__vcmpgt, x > y ? -1 : 0)
EMULATED_BOTH(__vcmpge, x >= y ? -1 : 0)
EMULATED_BOTH(__vcmplt, x < y ? -1 : 0)
EMULATED_BOTH(__vcmple, x <= y ? -1 : 0)
#undef EMULATED_BOTH
#undef EMULATED_UNSIGNED
#undef EMULATED_SIGNED
#undef EMULATED_LANES

/// The sum of the lanes' absolute differences.
__device__ inline unsigned __vsadu4(unsigned a, unsigned b) noexcept {
  const unsigned differences = __vabsdiffu4(a, b);
  return (differences & 0xff) + (differences >> 8 & 0xff) + (differences >> 16 & 0xff) + (differences >> 24);
}

namespace emulated {

/// c plus the products of a's lanes with b's, those of b from lane `first` on. Wraps around.
template <class A, class B> unsigned dot(unsigned a, unsigned b, unsigned c, unsigned first = 0) {
  for (unsigned i = 0; i != 4 / sizeof(A); ++i) {
    c += static_cast<unsigned>(static_cast<int>(lane<A>(a, i))) *
         static_cast<unsigned>(static_cast<int>(lane<B>(b, first + i)));
  }
  return c;
}

}  // namespace emulated

#define EMULATED_DOT(name, a_lane, b_lane, a_vector, b_vector, first, sign)                                        \
  __device__ inline sign int name(sign int a, sign int b, sign int c) noexcept {                                   \
    return static_cast<sign int>(emulated::dot<a_lane, b_lane>(static_cast<unsigned>(a), static_cast<unsigned>(b), \
                                                               static_cast<unsigned>(c), first));                  \
  }                                                                                                                \
  __device__ inline sign int name(a_vector a, b_vector b, sign int c) noexcept {                                   \
    return name(std::bit_cast<sign int>(a), std::bit_cast<sign int>(b), c);                                        \
  }

EMULATED_DOT(__dp4a, signed char, signed char, char4, char4, 0, signed)
EMULATED_DOT(__dp4a, unsigned char, unsigned char, uchar4, uchar4, 0, unsigned)
EMULATED_DOT(__dp2a_lo, short, signed char, short2, char4, 0, signed)
EMULATED_DOT(__dp2a_lo, unsigned short, unsigned char, ushort2, uchar4, 0, unsigned)
EMULATED_DOT(__dp2a_hi, short, signed char, short2, char4, 2, signed)
EMULATED_DOT(__dp2a_hi, unsigned short, unsigned char, ushort2, uchar4, 2, unsigned)
#undef EMULATED_DOT

// ---- Bits of floating-point numbers ---------------------------------------------------------------------------------

__device__ inline int __float_as_int(float x) noexcept { return std::bit_cast<int>(x); }
__device__ inline unsigned __float_as_uint(float x) noexcept { return std::bit_cast<unsigned>(x); }
__device__ inline float __int_as_float(int x) noexcept { return std::bit_cast<float>(x); }
__device__ inline float __uint_as_float(unsigned x) noexcept { return std::bit_cast<float>(x); }
__device__ inline long long __double_as_longlong(double x) noexcept { return std::bit_cast<long long>(x); }
__device__ inline double __longlong_as_double(long long x) noexcept { return std::bit_cast<double>(x); }
__device__ inline int __double2hiint(double x) noexcept { return static_cast<int>(std::bit_cast<long long>(x) >> 32); }
__device__ inline int __double2loint(double x) noexcept { return static_cast<int>(std::bit_cast<long long>(x)); }
__device__ inline double __hiloint2double(int hi, int lo) noexcept {
  return std::bit_cast<double>(static_cast<unsigned long long>(static_cast<unsigned>(hi)) << 32 |
                               static_cast<unsigned>(lo));
}

// ---- Arithmetic with a rounding mode --------------------------------------------------------------------------------

namespace emulated {

template <class T> using format_of = std::conditional_t<std::same_as<T, float>, float_format, double_format>;

/// The host's result of a rounding to nearest: never contracted into a fused operation, and with a device's NaN.
template <class T> T settled(T x) {
  asm("" : "+m"(x));
  if (std::same_as<T, float> && x != x) return std::bit_cast<T>(format_of<T>::nan);
  return x;
}

template <class T> T as(typename format_of<T>::bits bits) { return std::bit_cast<T>(bits); }

template <class T> T sum(T x, T y, rounding mode) {
  if (mode == rounding::nearest) return settled(x + y);
  return as<T>(add<format_of<T>>(bits_of(x), bits_of(y), mode));
}
template <class T> T difference(T x, T y, rounding mode) {
  if (mode == rounding::nearest) return settled(x - y);
  return as<T>(subtract<format_of<T>>(bits_of(x), bits_of(y), mode));
}
template <class T> T product(T x, T y, rounding mode) {
  if (mode == rounding::nearest) return settled(x * y);
  return as<T>(multiply<format_of<T>>(bits_of(x), bits_of(y), mode));
}
template <class T> T quotient(T x, T y, rounding mode) {
  if (mode == rounding::nearest) return settled(x / y);
  return as<T>(divide<format_of<T>>(bits_of(x), bits_of(y), mode));
}
template <class T> T root(T x, rounding mode) {
  if (mode == rounding::nearest) return settled(std::sqrt(x));
  return as<T>(square_root<format_of<T>>(bits_of(x), mode));
}
template <class T> T reciprocal(T x, rounding mode) { return quotient(T{1}, x, mode); }
template <class T> T fused_sum(T x, T y, T z, rounding mode) {
  if (mode == rounding::nearest) return settled(std::fma(x, y, z));
  return as<T>(multiply_add<format_of<T>>(bits_of(x), bits_of(y), bits_of(z), mode));
}

}  // namespace emulated

#define EMULATED_IN_ALL_MODES(define, ...)                                                      \
  define(_rn, nearest, __VA_ARGS__) define(_rz, zero, __VA_ARGS__) define(_ru, up, __VA_ARGS__) \
      define(_rd, down, __VA_ARGS__)
#define EMULATED_UNARY(suffix, mode, name, type, function) \
  __device__ inline type name##suffix(type x) noexcept { return emulated::function(x, emulated::rounding::mode); }
#define EMULATED_BINARY(suffix, mode, name, type, function)      \
  __device__ inline type name##suffix(type x, type y) noexcept { \
    return emulated::function(x, y, emulated::rounding::mode);   \
  }
#define EMULATED_TERNARY(suffix, mode, name, type, function)             \
  __device__ inline type name##suffix(type x, type y, type z) noexcept { \
    return emulated::function(x, y, z, emulated::rounding::mode);        \
  }

EMULATED_IN_ALL_MODES(EMULATED_BINARY, __fadd, float, sum)
EMULATED_IN_ALL_MODES(EMULATED_BINARY, __fsub, float, difference)
EMULATED_IN_ALL_MODES(EMULATED_BINARY, __fmul, float, product)
EMULATED_IN_ALL_MODES(EMULATED_BINARY, __fdiv, float, quotient)
EMULATED_IN_ALL_MODES(EMULATED_UNARY, __frcp, float, reciprocal)
EMULATED_IN_ALL_MODES(EMULATED_UNARY, __fsqrt, float, root)
EMULATED_IN_ALL_MODES(EMULATED_TERNARY, __fmaf, float, fused_sum)
EMULATED_IN_ALL_MODES(EMULATED_TERNARY, __fmaf_ieee, float, fused_sum)
EMULATED_IN_ALL_MODES(EMULATED_BINARY, __dadd, double, sum)
EMULATED_IN_ALL_MODES(EMULATED_BINARY, __dsub, double, difference)
EMULATED_IN_ALL_MODES(EMULATED_BINARY, __dmul, double, product)
EMULATED_IN_ALL_MODES(EMULATED_BINARY, __ddiv, double, quotient)
EMULATED_IN_ALL_MODES(EMULATED_UNARY, __drcp, double, reciprocal)
EMULATED_IN_ALL_MODES(EMULATED_UNARY, __dsqrt, double, root)
EMULATED_IN_ALL_MODES(EMULATED_TERNARY, __fma, double, fused_sum)
#undef EMULATED_UNARY
#undef EMULATED_BINARY
#undef EMULATED_TERNARY

__device__ inline float __frsqrt_rn(float x) noexcept {
  using format = emulated::float_format;
  return std::bit_cast<float>(emulated::reciprocal_root<format>(emulated::bits_of(x), emulated::rounding::nearest));
}

// ---- Conversions ----------------------------------------------------------------------------------------------------

// To integers: saturated; NaN gives zero, or the top bit alone where either side has 64 bits.
#define EMULATED_TO_INTEGER(suffix, mode, name, floating, integer)                         \
  __device__ inline integer name##suffix(floating x) noexcept {                            \
    return emulated::to_integer(static_cast<double>(x), emulated::rounding::mode,          \
                                emulated::integer_of_nan<integer>(sizeof(floating) == 8)); \
  }
EMULATED_IN_ALL_MODES(EMULATED_TO_INTEGER, __float2int, float, int)
EMULATED_IN_ALL_MODES(EMULATED_TO_INTEGER, __float2uint, float, unsigned)
EMULATED_IN_ALL_MODES(EMULATED_TO_INTEGER, __float2ll, float, long long)
EMULATED_IN_ALL_MODES(EMULATED_TO_INTEGER, __float2ull, float, unsigned long long)
EMULATED_IN_ALL_MODES(EMULATED_TO_INTEGER, __double2int, double, int)
EMULATED_IN_ALL_MODES(EMULATED_TO_INTEGER, __double2uint, double, unsigned)
EMULATED_IN_ALL_MODES(EMULATED_TO_INTEGER, __double2ll, double, long long)
EMULATED_IN_ALL_MODES(EMULATED_TO_INTEGER, __double2ull, double, unsigned long long)
#undef EMULATED_TO_INTEGER

// To floating point; `wide` is the type that the conversion starts from.
#define EMULATED_TO_FLOATING(suffix, mode, name, source, wide, floating)                                       \
  __device__ inline floating name##suffix(source x) noexcept {                                                 \
    using format = emulated::format_of<floating>;                                                              \
    return std::bit_cast<floating>(emulated::convert<format>(static_cast<wide>(x), emulated::rounding::mode)); \
  }
EMULATED_IN_ALL_MODES(EMULATED_TO_FLOATING, __int2float, int, long long, float)
EMULATED_IN_ALL_MODES(EMULATED_TO_FLOATING, __uint2float, unsigned, long long, float)
EMULATED_IN_ALL_MODES(EMULATED_TO_FLOATING, __ll2float, long long, long long, float)
EMULATED_IN_ALL_MODES(EMULATED_TO_FLOATING, __ull2float, unsigned long long, unsigned long long, float)
EMULATED_IN_ALL_MODES(EMULATED_TO_FLOATING, __ll2double, long long, long long, double)
EMULATED_IN_ALL_MODES(EMULATED_TO_FLOATING, __ull2double, unsigned long long, unsigned long long, double)
EMULATED_IN_ALL_MODES(EMULATED_TO_FLOATING, __double2float, double, double, float)
EMULATED_TO_FLOATING(_rn, nearest, __int2double, int, long long, double)
EMULATED_TO_FLOATING(_rn, nearest, __uint2double, unsigned, long long, double)
#undef EMULATED_TO_FLOATING
#undef EMULATED_IN_ALL_MODES

// ---- Fast mathematics -----------------------------------------------------------------------------------------------

__device__ inline float __expf(float x) noexcept { return static_cast<float>(std::exp(static_cast<double>(x))); }
__device__ inline float __exp10f(float x) noexcept {
  return static_cast<float>(std::pow(10.0, static_cast<double>(x)));
}
__device__ inline float __logf(float x) noexcept { return static_cast<float>(std::log(static_cast<double>(x))); }
__device__ inline float __log2f(float x) noexcept { return static_cast<float>(std::log2(static_cast<double>(x))); }
__device__ inline float __log10f(float x) noexcept { return static_cast<float>(std::log10(static_cast<double>(x))); }
__device__ inline float __sinf(float x) noexcept { return static_cast<float>(std::sin(static_cast<double>(x))); }
__device__ inline float __cosf(float x) noexcept { return static_cast<float>(std::cos(static_cast<double>(x))); }
__device__ inline float __tanf(float x) noexcept { return static_cast<float>(std::tan(static_cast<double>(x))); }
__device__ inline float __tanhf(float x) noexcept { return static_cast<float>(std::tanh(static_cast<double>(x))); }
__device__ inline void __sincosf(float x, float* sine, float* cosine) noexcept {
  *sine = __sinf(x);
  *cosine = __cosf(x);
}
/// 2^(y log2 x): NaN for a negative x, whatever y.
__device__ inline float __powf(float x, float y) noexcept {
  return static_cast<float>(std::exp2(static_cast<double>(y) * std::log2(static_cast<double>(x))));
}
/// x / y, but zero where y is beyond 2^126 and x is finite, and NaN where x is infinite there.
__device__ inline float __fdividef(float x, float y) noexcept {
  if (std::isfinite(y) && std::fabs(y) > 0x1p126f) return emulated::settled(x * std::copysign(0.0f, y));
  return emulated::settled(x / y);
}
/// To [0, 1], and +0 for NaN.
__device__ inline float __saturatef(float x) noexcept { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// ---- Mathematical functions that the C library hasn't
// ----------------------------------------------------------------

namespace emulated {

inline double reciprocal_cube_root(double x) { return 1.0 / std::cbrt(x); }

/// What is left of x, in quarters of a turn of 2, and the number of quarters modulo 4: exact.
struct quarters {
  double rest;
  int number;
};
inline quarters in_quarters(double x) {
  const double twice = std::fmod(x, 2.0) * 2.0;
  const double whole = std::nearbyint(twice);
  return {(twice - whole) * 0.5, (static_cast<int>(whole) + 8) % 4};
}
inline double sine_of_pi_times(double x) {
  if (!std::isfinite(x)) return std::numeric_limits<double>::quiet_NaN();
  const auto [rest, number] = in_quarters(x);
  if (rest == 0 && number % 2 == 0) return std::copysign(0.0, x);
  const double angle = rest * std::numbers::pi;
  const double value = number % 2 == 0 ? std::sin(angle) : std::cos(angle);
  return number < 2 ? value : -value;
}
inline double cosine_of_pi_times(double x) {
  if (!std::isfinite(x)) return std::numeric_limits<double>::quiet_NaN();
  const auto [rest, number] = in_quarters(x);
  if (rest == 0 && number % 2 != 0) return 0.0;
  const double angle = rest * std::numbers::pi;
  const double value = number % 2 == 0 ? std::cos(angle) : std::sin(angle);
  return number == 0 || number == 3 ? value : -value;
}

/// Winitzki's closed form, good to 0.3 %, from ln(1 - x^2).
inline double inverse_error_guess(double log) {
  const double a = 0.147;
  const double b = 2.0 / (std::numbers::pi * a) + 0.5 * log;
  return std::sqrt(std::sqrt(b * b - log / a) - b);
}
/// Halley's steps on f = erf or erfc at z, whose slope is +-2/sqrt(pi) exp(-z^2), cube the error: three are plenty.
inline double inverse_complementary_error(double y) {
  if (!(y >= 0 && y <= 2)) return std::numeric_limits<double>::quiet_NaN();
  if (y == 0 || y == 2) return y == 0 ? HUGE_VAL : -HUGE_VAL;
  if (y > 1) return -inverse_complementary_error(2.0 - y);
  double z = inverse_error_guess(std::log(y) + std::log(2.0 - y));
  for (int i = 0; i != 3; ++i) {
    const double step = (std::erfc(z) - y) / (-2.0 * std::numbers::inv_sqrtpi * std::exp(-z * z));
    z -= step / (1.0 + z * step);
  }
  return z;
}
inline double inverse_error(double x) {
  if (!(x >= -1 && x <= 1)) return std::numeric_limits<double>::quiet_NaN();
  const double m = std::fabs(x);
  if (m > 0.5) return std::copysign(inverse_complementary_error(1.0 - m), x);
  double z = m < 1e-3 ? m / (2.0 * std::numbers::inv_sqrtpi) : inverse_error_guess(std::log1p(-m * m));
  for (int i = 0; i != 3; ++i) {
    const double step = (std::erf(z) - m) / (2.0 * std::numbers::inv_sqrtpi * std::exp(-z * z));
    z -= step / (1.0 + z * step);
  }
  return std::copysign(z, x);
}
inline double normal_distribution(double x) { return 0.5 * std::erfc(-x / std::numbers::sqrt2); }
inline double inverse_normal_distribution(double p) {
  return -std::numbers::sqrt2 * inverse_complementary_error(2.0 * p);
}
/// exp(x^2) erfc(x); where the factors would overflow and vanish, its continued fraction.
inline double scaled_complementary_error(double x) {
  if (!(x > 5)) return std::exp(x * x) * std::erfc(x);
  double tail = x;
  for (int k = 60; k != 0; --k) tail = x + 0.5 * k / tail;
  return std::numbers::inv_sqrtpi / tail;
}

inline double bessel_i0(double x) { return std::cyl_bessel_i(0.0, std::fabs(x)); }
inline double bessel_i1(double x) { return std::copysign(std::cyl_bessel_i(1.0, std::fabs(x)), x); }

template <class T> double norm_of(int count, const T* x) {
  double norm = 0;
  for (int i = 0; i < count; ++i) norm = std::hypot(norm, static_cast<double>(x[i]));
  return norm;
}

/// The larger number; of two zeros the positive one; NaN only of two.
template <class T> T larger_of(T a, T b) {
  if (a != a) return settled(b);
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
template <class T> T smaller_of(T a, T b) {
  if (a != a) return settled(b);
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

}  // namespace emulated

// f(double), ff(float) and the overload f(float): all computed in double.
#define EMULATED_FUNCTION(name, function)                                                                          \
  __host__ __device__ inline double name(double x) noexcept { return emulated::function(x); }                      \
  __host__ __device__ inline float name##f(float x) noexcept { return static_cast<float>(emulated::function(x)); } \
  __host__ __device__ inline float name(float x) noexcept { return static_cast<float>(emulated::function(x)); }

EMULATED_FUNCTION(rcbrt, reciprocal_cube_root)
EMULATED_FUNCTION(sinpi, sine_of_pi_times)
EMULATED_FUNCTION(cospi, cosine_of_pi_times)
EMULATED_FUNCTION(erfinv, inverse_error)
EMULATED_FUNCTION(erfcinv, inverse_complementary_error)
EMULATED_FUNCTION(erfcx, scaled_complementary_error)
EMULATED_FUNCTION(normcdf, normal_distribution)
EMULATED_FUNCTION(normcdfinv, inverse_normal_distribution)
EMULATED_FUNCTION(cyl_bessel_i0, bessel_i0)
EMULATED_FUNCTION(cyl_bessel_i1, bessel_i1)
#undef EMULATED_FUNCTION

__host__ __device__ inline double rsqrt(double x) noexcept { return 1.0 / std::sqrt(x); }
__host__ __device__ inline float rsqrtf(float x) noexcept {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
}
__host__ __device__ inline float rsqrt(float x) noexcept { return rsqrtf(x); }
#ifndef __GLIBC__
__host__ __device__ inline double exp10(double x) noexcept { return std::pow(10.0, x); }
__host__ __device__ inline float exp10f(float x) noexcept { return __exp10f(x); }
#endif
__host__ __device__ inline float exp10(float x) noexcept { return __exp10f(x); }
__host__ __device__ inline void sincospi(double x, double* sine, double* cosine) noexcept {
  *sine = sinpi(x);
  *cosine = cospi(x);
}
__host__ __device__ inline void sincospif(float x, float* sine, float* cosine) noexcept {
  *sine = sinpif(x);
  *cosine = cospif(x);
}
__host__ __device__ inline float fdividef(float x, float y) noexcept { return emulated::settled(x / y); }

__host__ __device__ inline double norm3d(double a, double b, double c) noexcept { return std::hypot(a, b, c); }
__host__ __device__ inline double norm4d(double a, double b, double c, double d) noexcept {
  return std::hypot(std::hypot(a, b), std::hypot(c, d));
}
__host__ __device__ inline double rhypot(double a, double b) noexcept { return 1.0 / std::hypot(a, b); }
__host__ __device__ inline double rnorm3d(double a, double b, double c) noexcept { return 1.0 / norm3d(a, b, c); }
__host__ __device__ inline double rnorm4d(double a, double b, double c, double d) noexcept {
  return 1.0 / norm4d(a, b, c, d);
}
__host__ __device__ inline double norm(int count, const double* x) noexcept { return emulated::norm_of(count, x); }
__host__ __device__ inline double rnorm(int count, const double* x) noexcept { return 1.0 / norm(count, x); }
__host__ __device__ inline float norm3df(float a, float b, float c) noexcept {
  return static_cast<float>(norm3d(a, b, c));
}
__host__ __device__ inline float norm4df(float a, float b, float c, float d) noexcept {
  return static_cast<float>(norm4d(a, b, c, d));
}
__host__ __device__ inline float rhypotf(float a, float b) noexcept { return static_cast<float>(rhypot(a, b)); }
__host__ __device__ inline float rnorm3df(float a, float b, float c) noexcept {
  return static_cast<float>(rnorm3d(a, b, c));
}
__host__ __device__ inline float rnorm4df(float a, float b, float c, float d) noexcept {
  return static_cast<float>(rnorm4d(a, b, c, d));
}
__host__ __device__ inline float normf(int count, const float* x) noexcept {
  return static_cast<float>(emulated::norm_of(count, x));
}
__host__ __device__ inline float rnormf(int count, const float* x) noexcept {
  return static_cast<float>(1.0 / emulated::norm_of(count, x));
}

// min and max: of integers of one width and any signs, unsigned if either is; of floats and doubles.
#define EMULATED_EXTREMES(a_type, b_type, type)                                                       \
  __host__ __device__ inline type min(a_type a, b_type b) noexcept {                                  \
    return static_cast<type>(a) < static_cast<type>(b) ? static_cast<type>(a) : static_cast<type>(b); \
  }                                                                                                   \
  __host__ __device__ inline type max(a_type a, b_type b) noexcept {                                  \
    return static_cast<type>(a) > static_cast<type>(b) ? static_cast<type>(a) : static_cast<type>(b); \
  }
#define EMULATED_INTEGER_EXTREMES(type)                          \
  EMULATED_EXTREMES(type, type, type)                            \
  EMULATED_EXTREMES(unsigned type, unsigned type, unsigned type) \
  EMULATED_EXTREMES(type, unsigned type, unsigned type)          \
  EMULATED_EXTREMES(unsigned type, type, unsigned type)
#define EMULATED_FLOATING_EXTREMES(a_type, b_type, type)                                                        \
  __host__ __device__ inline type min(a_type a, b_type b) noexcept { return emulated::smaller_of<type>(a, b); } \
  __host__ __device__ inline type max(a_type a, b_type b) noexcept { return emulated::larger_of<type>(a, b); }

EMULATED_INTEGER_EXTREMES(int)
EMULATED_INTEGER_EXTREMES(long)
EMULATED_INTEGER_EXTREMES(long long)
EMULATED_FLOATING_EXTREMES(float, float, float)
EMULATED_FLOATING_EXTREMES(double, double, double)
EMULATED_FLOATING_EXTREMES(float, double, double)
EMULATED_FLOATING_EXTREMES(double, float, double)
#undef EMULATED_EXTREMES
#undef EMULATED_INTEGER_EXTREMES
#undef EMULATED_FLOATING_EXTREMES

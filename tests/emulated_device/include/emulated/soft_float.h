// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   binary floating point in integers, exact in every rounding mode: what CUDA's _rn, _rz, _rd and _ru mean,
//         whatever the host's floating-point environment, optimiser and instruction set do.
// Limits: no exception flags, which CUDA doesn't have either.

#include <bit>
#include <cmath>
#include <initializer_list>
#include <limits>

namespace emulated {

enum class rounding { nearest, zero, down, up };

__extension__ typedef unsigned __int128 uint128;

/// An IEEE interchange format. NaN is what an invalid operation yields; a device that keeps_nan passes an operand's
/// payload on, the others replace it.
template <class Bits, int ExponentBits, int FractionBits, Bits NaN, bool KeepsNaN> struct format {
  using bits = Bits;
  static constexpr int fraction = FractionBits;
  static constexpr int bias = (1 << (ExponentBits - 1)) - 1;
  static constexpr int lowest = 1 - bias;  // exponent of the smallest normal number
  static constexpr Bits sign = static_cast<Bits>(Bits{1} << (ExponentBits + FractionBits));
  static constexpr Bits infinity = static_cast<Bits>(((Bits{1} << ExponentBits) - 1) << FractionBits);
  static constexpr Bits largest = static_cast<Bits>(infinity - 1);
  static constexpr Bits one = static_cast<Bits>(Bits{bias} << FractionBits);
  static constexpr Bits nan = NaN;
  static constexpr bool keeps_nan = KeepsNaN;
};

using half_format = format<unsigned short, 5, 10, 0x7fff, false>;
using bfloat16_format = format<unsigned short, 8, 7, 0x7fff, false>;
using float_format = format<unsigned, 8, 23, 0x7fffffff, false>;
using double_format = format<unsigned long long, 11, 52, 0xfff8000000000000, true>;

inline unsigned bits_of(float x) { return std::bit_cast<unsigned>(x); }
inline unsigned long long bits_of(double x) { return std::bit_cast<unsigned long long>(x); }

template <class F> constexpr bool is_negative(typename F::bits b) { return (b & F::sign) != 0; }
template <class F> constexpr typename F::bits magnitude(typename F::bits b) {
  return static_cast<typename F::bits>(b & (F::sign - 1));
}
template <class F> constexpr bool is_nan(typename F::bits b) { return magnitude<F>(b) > F::infinity; }
template <class F> constexpr bool is_infinite(typename F::bits b) { return magnitude<F>(b) == F::infinity; }
template <class F> constexpr typename F::bits with_sign(bool negative, typename F::bits b) {
  return static_cast<typename F::bits>(negative ? b | F::sign : b);
}

/// A finite number: significand * 2^exponent, negated if negative. Where the significand stands for more bits than it
/// holds, its last bit is set if any bit lost was set ("jammed"): enough to round right, since it never is a tie then.
template <class Significand> struct number {
  bool negative;
  int exponent;
  Significand significand;
};

inline int index_of_top_bit(unsigned long long s) { return 63 - std::countl_zero(s); }
inline int index_of_top_bit(uint128 s) {
  const auto high = static_cast<unsigned long long>(s >> 64);
  return high ? 64 + index_of_top_bit(high) : index_of_top_bit(static_cast<unsigned long long>(s));
}

template <class F> number<unsigned long long> unpack(typename F::bits b) {
  const int biased = static_cast<int>(magnitude<F>(b) >> F::fraction);
  const unsigned long long low = b & ((1ull << F::fraction) - 1);
  if (biased == 0) return {is_negative<F>(b), F::lowest - F::fraction, low};
  return {is_negative<F>(b), biased - F::bias - F::fraction, low | 1ull << F::fraction};
}

/// Rounds to the format: the only place where precision is lost.
template <class F, class Significand> typename F::bits encode(number<Significand> x, rounding mode) {
  using bits = typename F::bits;
  if (x.significand == 0) return with_sign<F>(x.negative, 0);
  const int power = x.exponent + index_of_top_bit(x.significand);
  if (power > F::bias) {  // beyond the largest finite number, whatever the lower bits
    const bool stays = mode == rounding::zero || mode == (x.negative ? rounding::up : rounding::down);
    return with_sign<F>(x.negative, stays ? F::largest : F::infinity);
  }
  constexpr int width = static_cast<int>(sizeof(Significand) * 8);
  const int shift = (power < F::lowest ? F::lowest : power) - F::fraction - x.exponent;
  Significand kept = 0;
  int against_half = -1;  // how the part cut off compares with half a unit
  bool exact = false;
  if (shift <= 0) {
    kept = x.significand << -shift;
    exact = true;
  } else if (shift <= width) {
    const Significand half = Significand{1} << (shift - 1);
    const Significand cut = x.significand & (half | (half - 1));
    kept = shift == width ? 0 : x.significand >> shift;
    exact = cut == 0;
    against_half = cut == half ? 0 : cut > half ? 1 : -1;
  }
  bool away = false;
  switch (mode) {
    case rounding::nearest: away = !exact && (against_half > 0 || (against_half == 0 && (kept & 1) != 0)); break;
    case rounding::zero: break;
    case rounding::down: away = !exact && x.negative; break;
    case rounding::up: away = !exact && !x.negative; break;
  }
  // A carry out of the fraction increments the exponent, from subnormal to normal and from largest to infinity too.
  auto magnitude = static_cast<unsigned long long>(kept) + (away ? 1 : 0);
  if (power > F::lowest) magnitude += static_cast<unsigned long long>(power - F::lowest) << F::fraction;
  return with_sign<F>(x.negative, static_cast<bits>(magnitude));
}

template <class To, class From> typename To::bits convert(typename From::bits b, rounding mode) {
  if (is_nan<From>(b)) return To::nan;
  if (is_infinite<From>(b)) return with_sign<To>(is_negative<From>(b), To::infinity);
  return encode<To>(unpack<From>(b), mode);
}
template <class To> typename To::bits convert(float x, rounding mode) {
  return convert<To, float_format>(bits_of(x), mode);
}
template <class To> typename To::bits convert(double x, rounding mode) {
  return convert<To, double_format>(bits_of(x), mode);
}
template <class To> typename To::bits convert(long long i, rounding mode) {
  const auto u = static_cast<unsigned long long>(i);
  return encode<To>(number<unsigned long long>{i < 0, 0, i < 0 ? 0 - u : u}, mode);
}
template <class To> typename To::bits convert(unsigned long long i, rounding mode) {
  return encode<To>(number<unsigned long long>{false, 0, i}, mode);
}

/// The smallest subnormal number of a format.
template <class F>
inline constexpr double decode_unit =
    std::bit_cast<double>(static_cast<unsigned long long>(1023 + F::lowest - F::fraction) << 52);

/// A format of at most 16 bits as a double, which holds all of its numbers.
template <class F> double decode(typename F::bits b) {
  const unsigned long long m = magnitude<F>(b);
  double x = 0;
  if (m > F::infinity) return std::numeric_limits<double>::quiet_NaN();
  if (m == F::infinity)
    x = std::numeric_limits<double>::infinity();
  else if (m >> F::fraction == 0)
    x = static_cast<double>(m) * decode_unit<F>;
  else
    x = std::bit_cast<double>((m << (52 - F::fraction)) + (static_cast<unsigned long long>(1023 - F::bias) << 52));
  return is_negative<F>(b) ? -x : x;
}

template <class F> typename F::bits nan_from(std::initializer_list<typename F::bits> operands) {
  if (F::keeps_nan) {
    for (const auto b : operands) {
      if (is_nan<F>(b)) return static_cast<typename F::bits>(b | typename F::bits{1} << (F::fraction - 1));
    }
  }
  return F::nan;
}

/// Moves the top bit to `top`, which mustn't be below where it is.
inline number<uint128> normalised(bool negative, int exponent, uint128 significand, int top) {
  const int shift = top - index_of_top_bit(significand);
  return {negative, exponent - shift, significand << shift};
}

inline uint128 shift_right_jamming(uint128 s, int shift) {
  if (shift == 0) return s;
  if (shift >= 128) return s != 0;
  return s >> shift | static_cast<uint128>((s << (128 - shift)) != 0);
}

/// a * b + c, rounded once.
template <class F>
typename F::bits multiply_add(typename F::bits a, typename F::bits b, typename F::bits c, rounding mode) {
  if (is_nan<F>(a) || is_nan<F>(b) || is_nan<F>(c)) return nan_from<F>({a, b, c});
  const bool negative = is_negative<F>(a) != is_negative<F>(b);
  if (is_infinite<F>(a) || is_infinite<F>(b)) {
    if (magnitude<F>(a) == 0 || magnitude<F>(b) == 0) return F::nan;
    if (is_infinite<F>(c) && is_negative<F>(c) != negative) return F::nan;
    return with_sign<F>(negative, F::infinity);
  }
  if (is_infinite<F>(c)) return c;
  const auto x = unpack<F>(a);
  const auto y = unpack<F>(b);
  const auto z = unpack<F>(c);
  const uint128 product = static_cast<uint128>(x.significand) * y.significand;
  const int exponent = x.exponent + y.exponent;
  const bool sign_of_zero = negative == z.negative ? negative : mode == rounding::down;
  if (product == 0) return z.significand == 0 ? with_sign<F>(sign_of_zero, 0) : c;
  if (z.significand == 0) return encode<F>(number<uint128>{negative, exponent, product}, mode);
  // 106 bits of product at most, so 20 zeros below: bits jammed there can't meet a cancellation of more than one bit.
  auto large = normalised(negative, exponent, product, 125);
  auto small = normalised(z.negative, z.exponent, z.significand, 125);
  if (large.exponent < small.exponent || (large.exponent == small.exponent && large.significand < small.significand)) {
    const auto swapped = large;
    large = small;
    small = swapped;
  }
  small.significand = shift_right_jamming(small.significand, large.exponent - small.exponent);
  if (large.negative == small.negative)
    large.significand += small.significand;
  else
    large.significand -= small.significand;
  if (large.significand == 0) return with_sign<F>(sign_of_zero, 0);
  return encode<F>(large, mode);
}

template <class F> typename F::bits add(typename F::bits a, typename F::bits b, rounding mode) {
  return multiply_add<F>(a, F::one, b, mode);
}

template <class F> typename F::bits subtract(typename F::bits a, typename F::bits b, rounding mode) {
  return add<F>(a, is_nan<F>(b) ? b : static_cast<typename F::bits>(b ^ F::sign), mode);
}

template <class F> typename F::bits multiply(typename F::bits a, typename F::bits b, rounding mode) {
  // The addend is a zero of the product's own sign, which an exact zero keeps in every mode.
  return multiply_add<F>(a, b, with_sign<F>(is_negative<F>(a) != is_negative<F>(b), 0), mode);
}

template <class F> typename F::bits divide(typename F::bits a, typename F::bits b, rounding mode) {
  if (is_nan<F>(a) || is_nan<F>(b)) return nan_from<F>({a, b});
  const bool negative = is_negative<F>(a) != is_negative<F>(b);
  const bool a_zero = magnitude<F>(a) == 0;
  const bool b_zero = magnitude<F>(b) == 0;
  if ((a_zero && b_zero) || (is_infinite<F>(a) && is_infinite<F>(b))) return F::nan;
  if (b_zero || is_infinite<F>(a)) return with_sign<F>(negative, F::infinity);
  if (a_zero || is_infinite<F>(b)) return with_sign<F>(negative, 0);
  const auto x = unpack<F>(a);
  const auto y = unpack<F>(b);
  const auto dividend = normalised(negative, x.exponent, x.significand, 126);
  const uint128 quotient = dividend.significand / y.significand;  // at least 73 bits
  const bool rest = dividend.significand % y.significand != 0;
  return encode<F>(number<uint128>{negative, dividend.exponent - y.exponent, quotient | uint128{rest}}, mode);
}

inline uint128 integer_root(uint128 x) {
  uint128 root = 0;
  for (uint128 bit = uint128{1} << 126; bit != 0; bit >>= 2) {
    if (x >= root + bit) {
      x -= root + bit;
      root = (root >> 1) + bit;
    } else {
      root >>= 1;
    }
  }
  return root;
}

template <class F> typename F::bits square_root(typename F::bits a, rounding mode) {
  if (is_nan<F>(a)) return nan_from<F>({a});
  if (magnitude<F>(a) == 0) return a;
  if (is_negative<F>(a)) return F::nan;
  if (is_infinite<F>(a)) return a;
  const auto x = unpack<F>(a);
  auto radicand = normalised(false, x.exponent, x.significand, 126);
  if (radicand.exponent % 2 != 0) {
    radicand.significand <<= 1;
    --radicand.exponent;
  }
  const uint128 root = integer_root(radicand.significand);  // 64 bits
  const bool rest = root * root != radicand.significand;
  return encode<F>(number<uint128>{false, radicand.exponent / 2, root | uint128{rest}}, mode);
}

/// 1 / sqrt(a), rounded once, for formats of at most 24 bits.
template <class F> typename F::bits reciprocal_root(typename F::bits a, rounding mode) {
  static_assert(F::fraction < 24);
  if (is_nan<F>(a)) return nan_from<F>({a});
  if (magnitude<F>(a) == 0) return with_sign<F>(is_negative<F>(a), F::infinity);
  if (is_negative<F>(a)) return F::nan;
  if (is_infinite<F>(a)) return 0;
  const auto x = unpack<F>(a);
  const int odd = x.exponent & 1;
  const uint128 divisor = static_cast<uint128>(x.significand) << odd;
  const uint128 inverse = (uint128{1} << 126) / divisor;  // at least 102 bits
  const uint128 root = integer_root(inverse);
  const bool rest = root * root * divisor != uint128{1} << 126;
  return encode<F>(number<uint128>{false, -63 - (x.exponent - odd) / 2, root | uint128{rest}}, mode);
}

/// A floating-point number as an integer: rounded, saturated, and `of_nan` for NaN.
template <class Integer> Integer to_integer(double x, rounding mode, Integer of_nan) {
  using limits = std::numeric_limits<Integer>;
  if (std::isnan(x)) return of_nan;
  double whole = std::floor(std::fabs(x));
  const double part = std::fabs(x) - whole;  // exact
  bool away = false;
  switch (mode) {
    case rounding::nearest: away = part > 0.5 || (part == 0.5 && std::fmod(whole, 2.0) != 0.0); break;
    case rounding::zero: break;
    case rounding::down: away = part > 0 && x < 0; break;
    case rounding::up: away = part > 0 && x > 0; break;
  }
  whole = std::copysign(away ? whole + 1.0 : whole, x);
  const double beyond = std::ldexp(1.0, limits::digits);
  if (whole >= beyond) return limits::max();
  if (whole < static_cast<double>(limits::min())) return limits::min();
  return static_cast<Integer>(whole);
}

/// What PTX defines for NaN: zero, but where either side has 64 bits the integer whose top bit alone is set.
template <class Integer> Integer integer_of_nan(bool from_double) {
  if (!from_double && sizeof(Integer) < 8) return 0;
  return static_cast<Integer>(1ull << (sizeof(Integer) * 8 - 1));
}

}  // namespace emulated

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   what half and bfloat16 have in common: arithmetic in double, rounded once to the narrow format.
// Limits: `narrow` describes the two formats; cuda_fp16.h and cuda_bf16.h specialise it.

#include "access.h"
#include "soft_float.h"

namespace emulated {

/// Of a narrow type: its `format`, its `raw` bits, its `pair`.
template <class T> struct narrow;

template <class T> T from_bits(unsigned short bits) {
  typename narrow<T>::raw raw;
  raw.x = bits;
  return T(raw);
}

template <class T> unsigned short narrow_bits(const T& x) { return static_cast<typename narrow<T>::raw>(x).x; }

template <class T> double widen(const T& x) { return decode<typename narrow<T>::format>(narrow_bits(x)); }

/// A double has more than twice the digits of either format and two, so that rounding the double that +, -, *, / or
/// sqrt gave is rounding the exact result.
template <class T, class Source> T round_to(Source x, rounding mode = rounding::nearest) {
  return from_bits<T>(convert<typename narrow<T>::format>(x, mode));
}

template <class T> bool unordered(const T& a, const T& b) {
  using format = typename narrow<T>::format;
  return is_nan<format>(narrow_bits(a)) || is_nan<format>(narrow_bits(b));
}

template <class T> T quiet_nan() { return from_bits<T>(narrow<T>::format::nan); }

/// The larger number; of two zeros the positive one; NaN only of two.
template <class T> T larger(const T& a, const T& b) {
  if (unordered(a, a)) return unordered(b, b) ? quiet_nan<T>() : b;
  if (unordered(b, b)) return a;
  const double x = widen(a);
  const double y = widen(b);
  if (x == y) return from_bits<T>(narrow_bits(a) & narrow_bits(b));
  return x > y ? a : b;
}

template <class T> T smaller(const T& a, const T& b) {
  if (unordered(a, a)) return unordered(b, b) ? quiet_nan<T>() : b;
  if (unordered(b, b)) return a;
  const double x = widen(a);
  const double y = widen(b);
  if (x == y) return from_bits<T>(narrow_bits(a) | narrow_bits(b));
  return x < y ? a : b;
}

/// To [0, 1], and zero for NaN.
template <class T> T saturate(const T& x) {
  return smaller(larger(x, from_bits<T>(0)), from_bits<T>(narrow<T>::format::one));
}

/// a * b + c, rounded once. The product is exact in double, their sum may not be: it is rounded to odd, which the last
/// rounding can't mistake for a tie.
template <class T> T fused(const T& a, const T& b, const T& c) {
  const double product = widen(a) * widen(b);
  const double addend = widen(c);
  const double sum = product + addend;
  if (!std::isfinite(sum)) return round_to<T>(sum);
  const double back = sum - product;
  const double error = (product - (sum - back)) + (addend - back);
  auto bits = std::bit_cast<unsigned long long>(sum);
  if (error != 0 && (bits & 1) == 0) {
    if ((error > 0) == (sum > 0))
      ++bits;
    else
      --bits;
  }
  return round_to<T>(std::bit_cast<double>(bits));
}

}  // namespace emulated

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// What:   the functions that half and bfloat16 share, but for that part of the name. Included once for each, with
//         EMULATED_STEM the part, EMULATED_NARROW and EMULATED_PAIR the type and its pair; not a header to include by
//         itself, and so without a guard.
// Limits: functions of a real argument are computed in double and rounded: at least as exact as a device, not always
//         equal to it in the last bit. NaN results are the canonical 0x7fff.

#define EMULATED_PASTE_(before, stem, after) before##stem##after
#define EMULATED_PASTE(before, stem, after) EMULATED_PASTE_(before, stem, after)
#define EMULATED_NAME(before, after) EMULATED_PASTE(before, EMULATED_STEM, after)  // (__, 2float) is __half2float
#define EMULATED_UNARY(name, expression) \
  __device__ inline EMULATED_NARROW name(const EMULATED_NARROW a) { return expression; }
#define EMULATED_BINARY(name, expression)                                                             \
  __host__ __device__ inline EMULATED_NARROW name(const EMULATED_NARROW a, const EMULATED_NARROW b) { \
    return expression;                                                                                \
  }
#define EMULATED_TERNARY(name, expression)                                                                            \
  __device__ inline EMULATED_NARROW name(const EMULATED_NARROW a, const EMULATED_NARROW b, const EMULATED_NARROW c) { \
    return expression;                                                                                                \
  }
// The same on both halves of a pair.
#define EMULATED_UNARY_PAIR(name, scalar) \
  __device__ inline EMULATED_PAIR name(const EMULATED_PAIR a) { return EMULATED_PAIR(scalar(a.x), scalar(a.y)); }
#define EMULATED_BINARY_PAIR(name, scalar)                                                      \
  __host__ __device__ inline EMULATED_PAIR name(const EMULATED_PAIR a, const EMULATED_PAIR b) { \
    return EMULATED_PAIR(scalar(a.x, b.x), scalar(a.y, b.y));                                   \
  }
#define EMULATED_TERNARY_PAIR(name, scalar)                                                                   \
  __device__ inline EMULATED_PAIR name(const EMULATED_PAIR a, const EMULATED_PAIR b, const EMULATED_PAIR c) { \
    return EMULATED_PAIR(scalar(a.x, b.x, c.x), scalar(a.y, b.y, c.y));                                       \
  }

// Arithmetic.
EMULATED_BINARY(__hadd, emulated::round_to<EMULATED_NARROW>(emulated::widen(a) + emulated::widen(b)))
EMULATED_BINARY(__hsub, emulated::round_to<EMULATED_NARROW>(emulated::widen(a) - emulated::widen(b)))
EMULATED_BINARY(__hmul, emulated::round_to<EMULATED_NARROW>(emulated::widen(a) * emulated::widen(b)))
EMULATED_BINARY(__hdiv, emulated::round_to<EMULATED_NARROW>(emulated::widen(a) / emulated::widen(b)))
EMULATED_BINARY(__hadd_rn, __hadd(a, b))
EMULATED_BINARY(__hsub_rn, __hsub(a, b))
EMULATED_BINARY(__hmul_rn, __hmul(a, b))
EMULATED_BINARY(__hadd_sat, emulated::saturate(__hadd(a, b)))
EMULATED_BINARY(__hsub_sat, emulated::saturate(__hsub(a, b)))
EMULATED_BINARY(__hmul_sat, emulated::saturate(__hmul(a, b)))
EMULATED_BINARY(__hmax, emulated::larger(a, b))
EMULATED_BINARY(__hmin, emulated::smaller(a, b))
EMULATED_BINARY(__hmax_nan, emulated::unordered(a, b) ? emulated::quiet_nan<EMULATED_NARROW>() : __hmax(a, b))
EMULATED_BINARY(__hmin_nan, emulated::unordered(a, b) ? emulated::quiet_nan<EMULATED_NARROW>() : __hmin(a, b))
EMULATED_TERNARY(__hfma, emulated::fused(a, b, c))
EMULATED_TERNARY(__hfma_sat, emulated::saturate(__hfma(a, b, c)))
EMULATED_TERNARY(__hfma_relu, __hmax_nan(__hfma(a, b, c), emulated::from_bits<EMULATED_NARROW>(0)))
EMULATED_UNARY(__hneg, emulated::round_to<EMULATED_NARROW>(-emulated::widen(a)))
EMULATED_UNARY(__habs, emulated::round_to<EMULATED_NARROW>(std::fabs(emulated::widen(a))))

EMULATED_BINARY_PAIR(__hadd2, __hadd)
EMULATED_BINARY_PAIR(__hsub2, __hsub)
EMULATED_BINARY_PAIR(__hmul2, __hmul)
EMULATED_BINARY_PAIR(__h2div, __hdiv)
EMULATED_BINARY_PAIR(__hadd2_rn, __hadd_rn)
EMULATED_BINARY_PAIR(__hsub2_rn, __hsub_rn)
EMULATED_BINARY_PAIR(__hmul2_rn, __hmul_rn)
EMULATED_BINARY_PAIR(__hadd2_sat, __hadd_sat)
EMULATED_BINARY_PAIR(__hsub2_sat, __hsub_sat)
EMULATED_BINARY_PAIR(__hmul2_sat, __hmul_sat)
EMULATED_BINARY_PAIR(__hmax2, __hmax)
EMULATED_BINARY_PAIR(__hmin2, __hmin)
EMULATED_BINARY_PAIR(__hmax2_nan, __hmax_nan)
EMULATED_BINARY_PAIR(__hmin2_nan, __hmin_nan)
EMULATED_TERNARY_PAIR(__hfma2, __hfma)
EMULATED_TERNARY_PAIR(__hfma2_sat, __hfma_sat)
EMULATED_TERNARY_PAIR(__hfma2_relu, __hfma_relu)
EMULATED_UNARY_PAIR(__hneg2, __hneg)
EMULATED_UNARY_PAIR(__habs2, __habs)

/// Complex a * b + c, with the real part in x.
__device__ inline EMULATED_PAIR __hcmadd(const EMULATED_PAIR a, const EMULATED_PAIR b, const EMULATED_PAIR c) {
  return EMULATED_PAIR(__hfma(__hneg(a.y), b.y, __hfma(a.x, b.x, c.x)), __hfma(a.y, b.x, __hfma(a.x, b.y, c.y)));
}

// Functions of a real argument.
#define EMULATED_MATH(name, expression)                                \
  __device__ inline EMULATED_NARROW h##name(const EMULATED_NARROW a) { \
    const double x = emulated::widen(a);                               \
    return emulated::round_to<EMULATED_NARROW>(expression);            \
  }                                                                    \
  EMULATED_UNARY_PAIR(h2##name, h##name)

EMULATED_MATH(trunc, std::trunc(x))
EMULATED_MATH(ceil, std::ceil(x))
EMULATED_MATH(floor, std::floor(x))
EMULATED_MATH(rint, std::nearbyint(x))
EMULATED_MATH(sqrt, std::sqrt(x))
EMULATED_MATH(rsqrt, 1.0 / std::sqrt(x))
EMULATED_MATH(rcp, 1.0 / x)
EMULATED_MATH(log, std::log(x))
EMULATED_MATH(log2, std::log2(x))
EMULATED_MATH(log10, std::log10(x))
EMULATED_MATH(exp, std::exp(x))
EMULATED_MATH(exp2, std::exp2(x))
EMULATED_MATH(exp10, std::pow(10.0, x))
EMULATED_MATH(sin, std::sin(x))
EMULATED_MATH(cos, std::cos(x))
EMULATED_MATH(tanh, std::tanh(x))
EMULATED_MATH(tanh_approx, std::tanh(x))
#undef EMULATED_MATH

// Classification.
__host__ __device__ inline bool __hisnan(const EMULATED_NARROW a) { return emulated::unordered(a, a); }
__host__ __device__ inline int __hisinf(const EMULATED_NARROW a) {
  using format = emulated::narrow<EMULATED_NARROW>::format;
  const auto bits = emulated::narrow_bits(a);
  if (!emulated::is_infinite<format>(bits)) return 0;
  return emulated::is_negative<format>(bits) ? -1 : 1;
}
__host__ __device__ inline EMULATED_PAIR __hisnan2(const EMULATED_PAIR a) {
  constexpr auto one = emulated::narrow<EMULATED_NARROW>::format::one;
  return EMULATED_PAIR(emulated::from_bits<EMULATED_NARROW>(__hisnan(a.x) ? one : 0),
                       emulated::from_bits<EMULATED_NARROW>(__hisnan(a.y) ? one : 0));
}

// Comparison: __heq and the like are false, __hequ and the like are true, where an operand is NaN. Of pairs, __heq2
// gives 1 or 0 in each half, __heq2_mask all bits or none, and __hbeq2 whether both halves compare so.
#define EMULATED_COMPARE_ONE(name, holds_if_unordered, operation)                                            \
  __host__ __device__ inline bool __h##name(const EMULATED_NARROW a, const EMULATED_NARROW b) {              \
    return emulated::unordered(a, b) ? holds_if_unordered : emulated::widen(a) operation emulated::widen(b); \
  }                                                                                                          \
  __host__ __device__ inline EMULATED_PAIR __h##name##2(const EMULATED_PAIR a, const EMULATED_PAIR b) {      \
    constexpr auto one = emulated::narrow<EMULATED_NARROW>::format::one;                                     \
    return EMULATED_PAIR(emulated::from_bits<EMULATED_NARROW>(__h##name(a.x, b.x) ? one : 0),                \
                         emulated::from_bits<EMULATED_NARROW>(__h##name(a.y, b.y) ? one : 0));               \
  }                                                                                                          \
  __host__ __device__ inline unsigned __h##name##2_mask(const EMULATED_PAIR a, const EMULATED_PAIR b) {      \
    return (__h##name(a.x, b.x) ? 0x0000ffffu : 0u) | (__h##name(a.y, b.y) ? 0xffff0000u : 0u);              \
  }                                                                                                          \
  __host__ __device__ inline bool __hb##name##2(const EMULATED_PAIR a, const EMULATED_PAIR b) {              \
    return __h##name(a.x, b.x) && __h##name(a.y, b.y);                                                       \
  }
#define EMULATED_COMPARE(name, operation)      \
  EMULATED_COMPARE_ONE(name, false, operation) \
  EMULATED_COMPARE_ONE(name##u, true, operation)

EMULATED_COMPARE(eq, ==)
EMULATED_COMPARE(ne, !=)
EMULATED_COMPARE(le, <=)
EMULATED_COMPARE(ge, >=)
EMULATED_COMPARE(lt, <)
EMULATED_COMPARE(gt, >)
#undef EMULATED_COMPARE
#undef EMULATED_COMPARE_ONE

// Operators.
#define EMULATED_OPERATORS(type, add, subtract, multiply, divide, negate)                               \
  __host__ __device__ inline type operator+(const type& a, const type& b) { return add(a, b); }         \
  __host__ __device__ inline type operator-(const type& a, const type& b) { return subtract(a, b); }    \
  __host__ __device__ inline type operator*(const type& a, const type& b) { return multiply(a, b); }    \
  __host__ __device__ inline type operator/(const type& a, const type& b) { return divide(a, b); }      \
  __host__ __device__ inline type& operator+=(type& a, const type& b) { return a = add(a, b); }         \
  __host__ __device__ inline type& operator-=(type& a, const type& b) { return a = subtract(a, b); }    \
  __host__ __device__ inline type& operator*=(type& a, const type& b) { return a = multiply(a, b); }    \
  __host__ __device__ inline type& operator/=(type& a, const type& b) { return a = divide(a, b); }      \
  __host__ __device__ inline type operator+(const type& a) { return a; }                                \
  __host__ __device__ inline type operator-(const type& a) { return negate(a); }                        \
  __host__ __device__ inline type& operator++(type& a) { return a = add(a, emulated::one_of(a)); }      \
  __host__ __device__ inline type& operator--(type& a) { return a = subtract(a, emulated::one_of(a)); } \
  __host__ __device__ inline type operator++(type& a, int) {                                            \
    const type before = a;                                                                              \
    ++a;                                                                                                \
    return before;                                                                                      \
  }                                                                                                     \
  __host__ __device__ inline type operator--(type& a, int) {                                            \
    const type before = a;                                                                              \
    --a;                                                                                                \
    return before;                                                                                      \
  }

namespace emulated {
inline EMULATED_NARROW one_of(const EMULATED_NARROW&) {
  return from_bits<EMULATED_NARROW>(narrow<EMULATED_NARROW>::format::one);
}
inline EMULATED_PAIR one_of(const EMULATED_PAIR& a) { return EMULATED_PAIR(one_of(a.x), one_of(a.y)); }
}  // namespace emulated

EMULATED_OPERATORS(EMULATED_NARROW, __hadd, __hsub, __hmul, __hdiv, __hneg)
EMULATED_OPERATORS(EMULATED_PAIR, __hadd2, __hsub2, __hmul2, __h2div, __hneg2)
#undef EMULATED_OPERATORS

#define EMULATED_COMPARISONS(type, prefix, suffix)                                                               \
  __host__ __device__ inline bool operator==(const type& a, const type& b) { return prefix##eq##suffix(a, b); }  \
  __host__ __device__ inline bool operator!=(const type& a, const type& b) { return prefix##neu##suffix(a, b); } \
  __host__ __device__ inline bool operator>(const type& a, const type& b) { return prefix##gt##suffix(a, b); }   \
  __host__ __device__ inline bool operator<(const type& a, const type& b) { return prefix##lt##suffix(a, b); }   \
  __host__ __device__ inline bool operator>=(const type& a, const type& b) { return prefix##ge##suffix(a, b); }  \
  __host__ __device__ inline bool operator<=(const type& a, const type& b) { return prefix##le##suffix(a, b); }

EMULATED_COMPARISONS(EMULATED_NARROW, __h, )
EMULATED_COMPARISONS(EMULATED_PAIR, __hb, 2)
#undef EMULATED_COMPARISONS

// Halves of pairs.
__host__ __device__ inline EMULATED_PAIR __lowhigh2highlow(const EMULATED_PAIR a) { return EMULATED_PAIR(a.y, a.x); }
__host__ __device__ inline float __low2float(const EMULATED_PAIR a) { return static_cast<float>(a.x); }
__host__ __device__ inline float __high2float(const EMULATED_PAIR a) { return static_cast<float>(a.y); }

// Bits.
__host__ __device__ inline short EMULATED_NAME(__, _as_short)(const EMULATED_NARROW h) {
  return static_cast<short>(emulated::narrow_bits(h));
}
__host__ __device__ inline unsigned short EMULATED_NAME(__, _as_ushort)(const EMULATED_NARROW h) {
  return emulated::narrow_bits(h);
}
__host__ __device__ inline EMULATED_NARROW EMULATED_NAME(__short_as_, )(const short i) {
  return emulated::from_bits<EMULATED_NARROW>(static_cast<unsigned short>(i));
}
__host__ __device__ inline EMULATED_NARROW EMULATED_NAME(__ushort_as_, )(const unsigned short i) {
  return emulated::from_bits<EMULATED_NARROW>(i);
}

// To and from floating point.
__host__ __device__ inline EMULATED_NARROW EMULATED_NAME(__float2, )(const float x) { return EMULATED_NARROW(x); }
__host__ __device__ inline EMULATED_NARROW EMULATED_NAME(__float2, _rn)(const float x) { return EMULATED_NARROW(x); }
__host__ __device__ inline EMULATED_NARROW EMULATED_NAME(__float2, _rz)(const float x) {
  return emulated::round_to<EMULATED_NARROW>(x, emulated::rounding::zero);
}
__host__ __device__ inline EMULATED_NARROW EMULATED_NAME(__float2, _rd)(const float x) {
  return emulated::round_to<EMULATED_NARROW>(x, emulated::rounding::down);
}
__host__ __device__ inline EMULATED_NARROW EMULATED_NAME(__float2, _ru)(const float x) {
  return emulated::round_to<EMULATED_NARROW>(x, emulated::rounding::up);
}
__host__ __device__ inline EMULATED_NARROW EMULATED_NAME(__double2, )(const double x) { return EMULATED_NARROW(x); }
__host__ __device__ inline float EMULATED_NAME(__, 2float)(const EMULATED_NARROW h) { return static_cast<float>(h); }
__host__ __device__ inline EMULATED_PAIR EMULATED_NAME(__float2, 2_rn)(const float x) {
  return EMULATED_PAIR(EMULATED_NARROW(x), EMULATED_NARROW(x));
}
__host__ __device__ inline EMULATED_PAIR EMULATED_NAME(__floats2, 2_rn)(const float x, const float y) {
  return EMULATED_PAIR(EMULATED_NARROW(x), EMULATED_NARROW(y));
}
__host__ __device__ inline EMULATED_PAIR EMULATED_NAME(__float22, 2_rn)(const float2 x) {
  return EMULATED_PAIR(EMULATED_NARROW(x.x), EMULATED_NARROW(x.y));
}
__host__ __device__ inline float2 EMULATED_NAME(__, 22float2)(const EMULATED_PAIR h) {
  return {static_cast<float>(h.x), static_cast<float>(h.y)};
}

// To integers, saturating, and from them.
#define EMULATED_FROM(suffix, mode, name, integer)                                                 \
  __host__ __device__ inline integer EMULATED_NAME(__, 2##name##suffix)(const EMULATED_NARROW h) { \
    return emulated::to_integer(emulated::widen(h), emulated::rounding::mode,                      \
                                emulated::integer_of_nan<integer>(false));                         \
  }
#define EMULATED_TO(suffix, mode, name, integer, wide)                                             \
  __host__ __device__ inline EMULATED_NARROW EMULATED_NAME(__##name##2, suffix)(const integer i) { \
    return emulated::round_to<EMULATED_NARROW>(static_cast<wide>(i), emulated::rounding::mode);    \
  }
#define EMULATED_INTEGER(name, integer, wide)    \
  EMULATED_FROM(_rn, nearest, name, integer)     \
  EMULATED_FROM(_rz, zero, name, integer)        \
  EMULATED_FROM(_rd, down, name, integer)        \
  EMULATED_FROM(_ru, up, name, integer)          \
  EMULATED_TO(_rn, nearest, name, integer, wide) \
  EMULATED_TO(_rz, zero, name, integer, wide)    \
  EMULATED_TO(_rd, down, name, integer, wide)    \
  EMULATED_TO(_ru, up, name, integer, wide)

EMULATED_FROM(_rz, zero, char, signed char)
EMULATED_FROM(_rz, zero, uchar, unsigned char)
EMULATED_INTEGER(short, short, long long)
EMULATED_INTEGER(ushort, unsigned short, long long)
EMULATED_INTEGER(int, int, long long)
EMULATED_INTEGER(uint, unsigned, long long)
EMULATED_INTEGER(ll, long long, long long)
EMULATED_INTEGER(ull, unsigned long long, unsigned long long)
#undef EMULATED_INTEGER
#undef EMULATED_TO
#undef EMULATED_FROM

// Pairs: made and taken apart.
__host__ __device__ inline EMULATED_PAIR EMULATED_NAME(make_, 2)(const EMULATED_NARROW x, const EMULATED_NARROW y) {
  return EMULATED_PAIR(x, y);
}
__host__ __device__ inline EMULATED_PAIR EMULATED_NAME(__halves2, 2)(const EMULATED_NARROW x, const EMULATED_NARROW y) {
  return EMULATED_PAIR(x, y);
}
__host__ __device__ inline EMULATED_PAIR EMULATED_NAME(EMULATED_NAME(__, 2), 2)(const EMULATED_NARROW x) {
  return EMULATED_PAIR(x, x);
}
__host__ __device__ inline EMULATED_NARROW EMULATED_NAME(__low2, )(const EMULATED_PAIR a) { return a.x; }
__host__ __device__ inline EMULATED_NARROW EMULATED_NAME(__high2, )(const EMULATED_PAIR a) { return a.y; }
__host__ __device__ inline EMULATED_PAIR EMULATED_NAME(__low2, 2)(const EMULATED_PAIR a) {
  return EMULATED_PAIR(a.x, a.x);
}
__host__ __device__ inline EMULATED_PAIR EMULATED_NAME(__high2, 2)(const EMULATED_PAIR a) {
  return EMULATED_PAIR(a.y, a.y);
}
__host__ __device__ inline EMULATED_PAIR EMULATED_NAME(__lows2, 2)(const EMULATED_PAIR a, const EMULATED_PAIR b) {
  return EMULATED_PAIR(a.x, b.x);
}
__host__ __device__ inline EMULATED_PAIR EMULATED_NAME(__highs2, 2)(const EMULATED_PAIR a, const EMULATED_PAIR b) {
  return EMULATED_PAIR(a.y, b.y);
}

inline EMULATED_NARROW atomicAdd(EMULATED_NARROW* p, EMULATED_NARROW value) {
  return emulated::update(p, [=](EMULATED_NARROW old) { return __hadd(old, value); });
}
/// Each half by itself, as on the device.
inline EMULATED_PAIR atomicAdd(EMULATED_PAIR* p, EMULATED_PAIR value) {
  emulated::check_alignment(p);
  return {atomicAdd(&p->x, value.x), atomicAdd(&p->y, value.y)};
}

template <> inline constexpr bool emulated::has_cached_access<EMULATED_NARROW> = true;
template <> inline constexpr bool emulated::has_cached_access<EMULATED_PAIR> = true;

#undef EMULATED_PASTE_
#undef EMULATED_PASTE
#undef EMULATED_NAME
#undef EMULATED_UNARY
#undef EMULATED_BINARY
#undef EMULATED_TERNARY
#undef EMULATED_UNARY_PAIR
#undef EMULATED_BINARY_PAIR
#undef EMULATED_TERNARY_PAIR
#undef EMULATED_STEM
#undef EMULATED_NARROW
#undef EMULATED_PAIR

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   CUDA's bfloat16 and its pair: the interface of CUDA 13's cuda_bf16.h in integer code.
// Limits: no macros that switch conversions or operators off.
//         All functions run on the host, also those that CUDA has on the device only. See emulated/narrow_functions.h.

#include "cuda_fp16.h"
#include "emulated/kernel.h"
#include "emulated/narrow.h"
#include "emulated/qualifiers.h"
#include "vector_functions.h"

struct alignas(2) __nv_bfloat16_raw {
  unsigned short x;
};

struct alignas(4) __nv_bfloat162_raw {
  unsigned short x;
  unsigned short y;
};

struct __nv_bfloat16;
struct __nv_bfloat162;

template <> struct emulated::narrow<__nv_bfloat16> {
  using format = emulated::bfloat16_format;
  using raw = __nv_bfloat16_raw;
  using pair = __nv_bfloat162;
};

/// Converts implicitly from and to every arithmetic type, rounding to nearest or saturating toward zero: as in CUDA, an
/// operator on it and a float is therefore ambiguous.
struct alignas(2) __nv_bfloat16 {
 protected:
  unsigned short __x;

  template <class T> static unsigned short bits_from(T x) {
    return emulated::convert<emulated::bfloat16_format>(x, emulated::rounding::nearest);
  }
  static unsigned short bits_from(long i) { return bits_from(static_cast<long long>(i)); }
  static unsigned short bits_from(unsigned long i) { return bits_from(static_cast<unsigned long long>(i)); }
  template <class Integer> Integer to_integer() const {
    return emulated::to_integer(emulated::decode<emulated::bfloat16_format>(__x), emulated::rounding::zero,
                                emulated::integer_of_nan<Integer>(false));
  }

 public:
  __nv_bfloat16() = default;
  __host__ __device__ constexpr __nv_bfloat16(const __nv_bfloat16_raw& raw) : __x(raw.x) {}
  __host__ __device__ explicit __nv_bfloat16(__half x) : __x(bits_from(static_cast<float>(x))) {}
  __host__ __device__ __nv_bfloat16(float x) : __x(bits_from(x)) {}
  __host__ __device__ __nv_bfloat16(double x) : __x(bits_from(x)) {}
  __host__ __device__ __nv_bfloat16(short i) : __x(bits_from(static_cast<long long>(i))) {}
  __host__ __device__ __nv_bfloat16(unsigned short i) : __x(bits_from(static_cast<long long>(i))) {}
  __host__ __device__ __nv_bfloat16(int i) : __x(bits_from(static_cast<long long>(i))) {}
  __host__ __device__ __nv_bfloat16(unsigned i) : __x(bits_from(static_cast<long long>(i))) {}
  __host__ __device__ __nv_bfloat16(long i) : __x(bits_from(i)) {}
  __host__ __device__ __nv_bfloat16(unsigned long i) : __x(bits_from(i)) {}
  __host__ __device__ __nv_bfloat16(long long i) : __x(bits_from(i)) {}
  __host__ __device__ __nv_bfloat16(unsigned long long i) : __x(bits_from(i)) {}

  __host__ __device__ __nv_bfloat16& operator=(const __nv_bfloat16_raw& raw) {
    __x = raw.x;
    return *this;
  }
  __host__ __device__ volatile __nv_bfloat16& operator=(const __nv_bfloat16_raw& raw) volatile {
    __x = raw.x;
    return *this;
  }
  __host__ __device__ volatile __nv_bfloat16& operator=(const volatile __nv_bfloat16_raw& raw) volatile {
    __x = raw.x;
    return *this;
  }
  __host__ __device__ __nv_bfloat16& operator=(float x) { return *this = __nv_bfloat16(x); }
  __host__ __device__ __nv_bfloat16& operator=(double x) { return *this = __nv_bfloat16(x); }
  __host__ __device__ __nv_bfloat16& operator=(short i) { return *this = __nv_bfloat16(i); }
  __host__ __device__ __nv_bfloat16& operator=(unsigned short i) { return *this = __nv_bfloat16(i); }
  __host__ __device__ __nv_bfloat16& operator=(int i) { return *this = __nv_bfloat16(i); }
  __host__ __device__ __nv_bfloat16& operator=(unsigned i) { return *this = __nv_bfloat16(i); }
  __host__ __device__ __nv_bfloat16& operator=(long long i) { return *this = __nv_bfloat16(i); }
  __host__ __device__ __nv_bfloat16& operator=(unsigned long long i) { return *this = __nv_bfloat16(i); }

  __host__ __device__ operator __nv_bfloat16_raw() const { return __nv_bfloat16_raw{__x}; }
  __host__ __device__ operator __nv_bfloat16_raw() const volatile { return __nv_bfloat16_raw{__x}; }
  __host__ __device__ operator float() const { return std::bit_cast<float>(static_cast<unsigned>(__x) << 16); }
  __host__ __device__ operator signed char() const { return to_integer<signed char>(); }
  __host__ __device__ operator unsigned char() const { return to_integer<unsigned char>(); }
  __host__ __device__ operator char() const { return to_integer<char>(); }
  __host__ __device__ operator short() const { return to_integer<short>(); }
  __host__ __device__ operator unsigned short() const { return to_integer<unsigned short>(); }
  __host__ __device__ operator int() const { return to_integer<int>(); }
  __host__ __device__ operator unsigned() const { return to_integer<unsigned>(); }
  __host__ __device__ operator long() const { return to_integer<long>(); }
  __host__ __device__ operator unsigned long() const { return to_integer<unsigned long>(); }
  __host__ __device__ operator long long() const { return to_integer<long long>(); }
  __host__ __device__ operator unsigned long long() const { return to_integer<unsigned long long>(); }
  __host__ __device__ constexpr operator bool() const { return (__x & 0x7fff) != 0; }
};

/// Not trivially copyable, because CUDA's isn't.
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x;
  __nv_bfloat16 y;

  __nv_bfloat162() = default;
  __host__ __device__ constexpr __nv_bfloat162(const __nv_bfloat16& a, const __nv_bfloat16& b) : x(a), y(b) {}
  __host__ __device__ __nv_bfloat162(const __nv_bfloat162& other) : x(other.x), y(other.y) {}
  __host__ __device__ __nv_bfloat162(__nv_bfloat162&& other) : x(other.x), y(other.y) {}
  __host__ __device__ __nv_bfloat162(const __nv_bfloat162_raw& raw)
      : x(__nv_bfloat16_raw{raw.x}), y(__nv_bfloat16_raw{raw.y}) {}
  __host__ __device__ __nv_bfloat162& operator=(const __nv_bfloat162& other) {
    x = other.x;
    y = other.y;
    return *this;
  }
  __host__ __device__ __nv_bfloat162& operator=(__nv_bfloat162&& other) {
    x = other.x;
    y = other.y;
    return *this;
  }
  __host__ __device__ __nv_bfloat162& operator=(const __nv_bfloat162_raw& raw) {
    x = __nv_bfloat16_raw{raw.x};
    y = __nv_bfloat16_raw{raw.y};
    return *this;
  }
  __host__ __device__ operator __nv_bfloat162_raw() const {
    return __nv_bfloat162_raw{static_cast<__nv_bfloat16_raw>(x).x, static_cast<__nv_bfloat16_raw>(y).x};
  }
};

using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

__host__ __device__ inline __half::__half(__nv_bfloat16 x) : __x(bits_from(static_cast<float>(x))) {}

#define EMULATED_NARROW __nv_bfloat16
#define EMULATED_PAIR __nv_bfloat162
#include "emulated/narrow_functions.h"

// Bits.
__host__ __device__ inline short __bfloat16_as_short(const __nv_bfloat16 h) {
  return static_cast<short>(emulated::narrow_bits(h));
}
__host__ __device__ inline unsigned short __bfloat16_as_ushort(const __nv_bfloat16 h) {
  return emulated::narrow_bits(h);
}
__host__ __device__ inline __nv_bfloat16 __short_as_bfloat16(const short i) {
  return emulated::from_bits<__nv_bfloat16>(static_cast<unsigned short>(i));
}
__host__ __device__ inline __nv_bfloat16 __ushort_as_bfloat16(const unsigned short i) {
  return emulated::from_bits<__nv_bfloat16>(i);
}

// To and from floating point.
__host__ __device__ inline __nv_bfloat16 __float2bfloat16(const float x) { return __nv_bfloat16(x); }
__host__ __device__ inline __nv_bfloat16 __float2bfloat16_rn(const float x) { return __nv_bfloat16(x); }
__host__ __device__ inline __nv_bfloat16 __float2bfloat16_rz(const float x) {
  return emulated::round_to<__nv_bfloat16>(x, emulated::rounding::zero);
}
__host__ __device__ inline __nv_bfloat16 __float2bfloat16_rd(const float x) {
  return emulated::round_to<__nv_bfloat16>(x, emulated::rounding::down);
}
__host__ __device__ inline __nv_bfloat16 __float2bfloat16_ru(const float x) {
  return emulated::round_to<__nv_bfloat16>(x, emulated::rounding::up);
}
__host__ __device__ inline __nv_bfloat16 __double2bfloat16(const double x) { return __nv_bfloat16(x); }
__host__ __device__ inline float __bfloat162float(const __nv_bfloat16 h) { return static_cast<float>(h); }
__host__ __device__ inline __nv_bfloat162 __float2bfloat162_rn(const float x) {
  return __nv_bfloat162(__nv_bfloat16(x), __nv_bfloat16(x));
}
__host__ __device__ inline __nv_bfloat162 __floats2bfloat162_rn(const float x, const float y) {
  return __nv_bfloat162(__nv_bfloat16(x), __nv_bfloat16(y));
}
__host__ __device__ inline __nv_bfloat162 __float22bfloat162_rn(const float2 x) {
  return __nv_bfloat162(__nv_bfloat16(x.x), __nv_bfloat16(x.y));
}
__host__ __device__ inline float2 __bfloat1622float2(const __nv_bfloat162 h) {
  return {static_cast<float>(h.x), static_cast<float>(h.y)};
}

// To integers, saturating, and from them.
#define EMULATED_FROM(suffix, mode, name, integer)                                      \
  __host__ __device__ inline integer __bfloat162##name##suffix(const __nv_bfloat16 h) { \
    return emulated::to_integer(emulated::widen(h), emulated::rounding::mode,           \
                                emulated::integer_of_nan<integer>(false));              \
  }
#define EMULATED_TO(suffix, mode, name, integer, wide)                                        \
  __host__ __device__ inline __nv_bfloat16 __##name##2bfloat16##suffix(const integer i) {     \
    return emulated::round_to<__nv_bfloat16>(static_cast<wide>(i), emulated::rounding::mode); \
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
__host__ __device__ inline __nv_bfloat162 make_bfloat162(const __nv_bfloat16 x, const __nv_bfloat16 y) {
  return __nv_bfloat162(x, y);
}
__host__ __device__ inline __nv_bfloat162 __halves2bfloat162(const __nv_bfloat16 x, const __nv_bfloat16 y) {
  return __nv_bfloat162(x, y);
}
__host__ __device__ inline __nv_bfloat162 __bfloat162bfloat162(const __nv_bfloat16 x) { return __nv_bfloat162(x, x); }
__host__ __device__ inline __nv_bfloat16 __low2bfloat16(const __nv_bfloat162 a) { return a.x; }
__host__ __device__ inline __nv_bfloat16 __high2bfloat16(const __nv_bfloat162 a) { return a.y; }
__host__ __device__ inline __nv_bfloat162 __low2bfloat162(const __nv_bfloat162 a) { return __nv_bfloat162(a.x, a.x); }
__host__ __device__ inline __nv_bfloat162 __high2bfloat162(const __nv_bfloat162 a) { return __nv_bfloat162(a.y, a.y); }
__host__ __device__ inline __nv_bfloat162 __lows2bfloat162(const __nv_bfloat162 a, const __nv_bfloat162 b) {
  return __nv_bfloat162(a.x, b.x);
}
__host__ __device__ inline __nv_bfloat162 __highs2bfloat162(const __nv_bfloat162 a, const __nv_bfloat162 b) {
  return __nv_bfloat162(a.y, b.y);
}

#define CUDART_INF_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x7f80))
#define CUDART_NAN_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x7fff))
#define CUDART_MIN_DENORM_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x0001))
#define CUDART_MAX_NORMAL_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x7f7f))
#define CUDART_NEG_ZERO_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x8000))
#define CUDART_ZERO_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x0000))
#define CUDART_ONE_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x3f80))

inline __nv_bfloat16 atomicAdd(__nv_bfloat16* p, __nv_bfloat16 value) {
  return emulated::update(p, [=](__nv_bfloat16 old) { return __hadd(old, value); });
}
/// Each half by itself, as on the device.
inline __nv_bfloat162 atomicAdd(__nv_bfloat162* p, __nv_bfloat162 value) {
  emulated::check_alignment(p);
  return {atomicAdd(&p->x, value.x), atomicAdd(&p->y, value.y)};
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   CUDA's half and its pair: the interface of CUDA 13's cuda_fp16.h in integer code.
// Limits: no macros that switch conversions or operators off.
//         All functions run on the host, also those that CUDA has on the device only. See emulated/narrow_functions.h.

#include "emulated/kernel.h"
#include "emulated/narrow.h"
#include "emulated/qualifiers.h"
#include "vector_functions.h"

struct alignas(2) __half_raw {
  unsigned short x;
};

struct alignas(4) __half2_raw {
  unsigned short x;
  unsigned short y;
};

struct __nv_bfloat16;
struct __half;
struct __half2;

template <> struct emulated::narrow<__half> {
  using format = emulated::half_format;
  using raw = __half_raw;
  using pair = __half2;
};

/// Converts implicitly from and to every arithmetic type, rounding to nearest or saturating toward zero: as in CUDA, an
/// operator on it and a float is therefore ambiguous.
struct alignas(2) __half {
 protected:
  unsigned short __x;

  template <class T> static unsigned short bits_from(T x) {
    return emulated::convert<emulated::half_format>(x, emulated::rounding::nearest);
  }
  static unsigned short bits_from(long i) { return bits_from(static_cast<long long>(i)); }
  static unsigned short bits_from(unsigned long i) { return bits_from(static_cast<unsigned long long>(i)); }
  template <class Integer> Integer to_integer() const {
    return emulated::to_integer(emulated::decode<emulated::half_format>(__x), emulated::rounding::zero,
                                emulated::integer_of_nan<Integer>(false));
  }

 public:
  __half() = default;
  __host__ __device__ constexpr __half(const __half_raw& raw) : __x(raw.x) {}
  __host__ __device__ explicit __half(__nv_bfloat16 x);  // in cuda_bf16.h
  __host__ __device__ __half(float x) : __x(bits_from(x)) {}
  __host__ __device__ __half(double x) : __x(bits_from(x)) {}
  __host__ __device__ __half(short i) : __x(bits_from(static_cast<long long>(i))) {}
  __host__ __device__ __half(unsigned short i) : __x(bits_from(static_cast<long long>(i))) {}
  __host__ __device__ __half(int i) : __x(bits_from(static_cast<long long>(i))) {}
  __host__ __device__ __half(unsigned i) : __x(bits_from(static_cast<long long>(i))) {}
  __host__ __device__ __half(long i) : __x(bits_from(i)) {}
  __host__ __device__ __half(unsigned long i) : __x(bits_from(i)) {}
  __host__ __device__ __half(long long i) : __x(bits_from(i)) {}
  __host__ __device__ __half(unsigned long long i) : __x(bits_from(i)) {}

  __host__ __device__ __half& operator=(const __half_raw& raw) {
    __x = raw.x;
    return *this;
  }
  __host__ __device__ volatile __half& operator=(const __half_raw& raw) volatile {
    __x = raw.x;
    return *this;
  }
  __host__ __device__ volatile __half& operator=(const volatile __half_raw& raw) volatile {
    __x = raw.x;
    return *this;
  }
  __host__ __device__ __half& operator=(float x) { return *this = __half(x); }
  __host__ __device__ __half& operator=(double x) { return *this = __half(x); }
  __host__ __device__ __half& operator=(short i) { return *this = __half(i); }
  __host__ __device__ __half& operator=(unsigned short i) { return *this = __half(i); }
  __host__ __device__ __half& operator=(int i) { return *this = __half(i); }
  __host__ __device__ __half& operator=(unsigned i) { return *this = __half(i); }
  __host__ __device__ __half& operator=(long long i) { return *this = __half(i); }
  __host__ __device__ __half& operator=(unsigned long long i) { return *this = __half(i); }

  __host__ __device__ operator __half_raw() const { return __half_raw{__x}; }
  __host__ __device__ operator __half_raw() const volatile { return __half_raw{__x}; }
  __host__ __device__ operator float() const {
    if (emulated::is_nan<emulated::half_format>(__x)) return std::bit_cast<float>(emulated::float_format::nan);
    return static_cast<float>(emulated::decode<emulated::half_format>(__x));
  }
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
struct alignas(4) __half2 {
  __half x;
  __half y;

  __half2() = default;
  __host__ __device__ constexpr __half2(const __half& a, const __half& b) : x(a), y(b) {}
  __host__ __device__ __half2(const __half2& other) : x(other.x), y(other.y) {}
  __host__ __device__ __half2(const __half2&& other) : x(other.x), y(other.y) {}
  __host__ __device__ __half2(const __half2_raw& raw) : x(__half_raw{raw.x}), y(__half_raw{raw.y}) {}
  __host__ __device__ __half2& operator=(const __half2& other) {
    x = other.x;
    y = other.y;
    return *this;
  }
  __host__ __device__ __half2& operator=(const __half2&& other) {
    x = other.x;
    y = other.y;
    return *this;
  }
  __host__ __device__ __half2& operator=(const __half2_raw& raw) {
    x = __half_raw{raw.x};
    y = __half_raw{raw.y};
    return *this;
  }
  __host__ __device__ operator __half2_raw() const {
    return __half2_raw{static_cast<__half_raw>(x).x, static_cast<__half_raw>(y).x};
  }
};

using half = __half;
using half2 = __half2;
using __nv_half = __half;
using __nv_half2 = __half2;
using __nv_half_raw = __half_raw;
using __nv_half2_raw = __half2_raw;
using nv_half = __half;
using nv_half2 = __half2;

#define EMULATED_STEM half
#define EMULATED_NARROW __half
#define EMULATED_PAIR __half2
#include "emulated/narrow_functions.h"

#define CUDART_INF_FP16 __ushort_as_half(static_cast<unsigned short>(0x7c00))
#define CUDART_NAN_FP16 __ushort_as_half(static_cast<unsigned short>(0x7fff))
#define CUDART_MIN_DENORM_FP16 __ushort_as_half(static_cast<unsigned short>(0x0001))
#define CUDART_MAX_NORMAL_FP16 __ushort_as_half(static_cast<unsigned short>(0x7bff))
#define CUDART_NEG_ZERO_FP16 __ushort_as_half(static_cast<unsigned short>(0x8000))
#define CUDART_ZERO_FP16 __ushort_as_half(static_cast<unsigned short>(0x0000))
#define CUDART_ONE_FP16 __ushort_as_half(static_cast<unsigned short>(0x3c00))

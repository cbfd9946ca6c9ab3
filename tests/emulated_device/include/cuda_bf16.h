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

#define EMULATED_STEM bfloat16
#define EMULATED_NARROW __nv_bfloat16
#define EMULATED_PAIR __nv_bfloat162
#include "emulated/narrow_functions.h"

#define CUDART_INF_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x7f80))
#define CUDART_NAN_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x7fff))
#define CUDART_MIN_DENORM_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x0001))
#define CUDART_MAX_NORMAL_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x7f7f))
#define CUDART_NEG_ZERO_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x8000))
#define CUDART_ZERO_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x0000))
#define CUDART_ONE_BF16 __ushort_as_bfloat16(static_cast<unsigned short>(0x3f80))

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   make_char1 to make_double4: they build a vector from its elements. As in CUDA, none is constexpr.
// Limits: none known.

#include "vector_types.h"

#define EMULATED_MAKE_4(name, element) \
  __host__ __device__ inline name make_##name(element x, element y, element z, element w) { return {x, y, z, w}; }

#define EMULATED_MAKE(name, element)                                                                       \
  __host__ __device__ inline name##1 make_##name##1(element x) { return {x}; }                             \
  __host__ __device__ inline name##2 make_##name##2(element x, element y) { return {x, y}; }               \
  __host__ __device__ inline name##3 make_##name##3(element x, element y, element z) { return {x, y, z}; } \
  EMULATED_MAKE_4(name##4, element)

EMULATED_MAKE(char, signed char)
EMULATED_MAKE(uchar, unsigned char)
EMULATED_MAKE(short, short)
EMULATED_MAKE(ushort, unsigned short)
EMULATED_MAKE(int, int)
EMULATED_MAKE(uint, unsigned)
EMULATED_MAKE(long, long)
EMULATED_MAKE(ulong, unsigned long)
EMULATED_MAKE(longlong, long long)
EMULATED_MAKE(ulonglong, unsigned long long)
EMULATED_MAKE(float, float)
EMULATED_MAKE(double, double)

EMULATED_MAKE_4(long4_16a, long)
EMULATED_MAKE_4(long4_32a, long)
EMULATED_MAKE_4(ulong4_16a, unsigned long)
EMULATED_MAKE_4(ulong4_32a, unsigned long)
EMULATED_MAKE_4(longlong4_16a, long long)
EMULATED_MAKE_4(longlong4_32a, long long)
EMULATED_MAKE_4(ulonglong4_16a, unsigned long long)
EMULATED_MAKE_4(ulonglong4_32a, unsigned long long)
EMULATED_MAKE_4(double4_16a, double)
EMULATED_MAKE_4(double4_32a, double)
#undef EMULATED_MAKE
#undef EMULATED_MAKE_4

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   CUDA's vector types, char1 to double4 and dim3, with the sizes and alignments of CUDA 13.
// Limits: the four-element 64-bit types aren't marked deprecated, as CUDA 13 marks them.

#include "emulated/qualifiers.h"

// One element and three have the element's alignment, two and four have the one that a single memory access needs.
#define EMULATED_VECTOR_TYPES(name, element, alignment_of_2, alignment_of_4) \
  struct name##1 {                                                           \
    element x;                                                               \
  };                                                                         \
  struct alignas(alignment_of_2) name##2 {                                   \
    element x, y;                                                            \
  };                                                                         \
  struct name##3 {                                                           \
    element x, y, z;                                                         \
  };                                                                         \
  struct alignas(alignment_of_4) name##4 {                                   \
    element x, y, z, w;                                                      \
  };

EMULATED_VECTOR_TYPES(char, signed char, 2, 4)
EMULATED_VECTOR_TYPES(uchar, unsigned char, 2, 4)
EMULATED_VECTOR_TYPES(short, short, 4, 8)
EMULATED_VECTOR_TYPES(ushort, unsigned short, 4, 8)
EMULATED_VECTOR_TYPES(int, int, 8, 16)
EMULATED_VECTOR_TYPES(uint, unsigned, 8, 16)
EMULATED_VECTOR_TYPES(long, long, 2 * sizeof(long), 16)
EMULATED_VECTOR_TYPES(ulong, unsigned long, 2 * sizeof(long), 16)
EMULATED_VECTOR_TYPES(longlong, long long, 16, 16)
EMULATED_VECTOR_TYPES(ulonglong, unsigned long long, 16, 16)
EMULATED_VECTOR_TYPES(float, float, 8, 16)
EMULATED_VECTOR_TYPES(double, double, 16, 16)
#undef EMULATED_VECTOR_TYPES

#define EMULATED_ALIGNED_4(name, element) \
  struct alignas(16) name##4_16a {        \
    element x, y, z, w;                   \
  };                                      \
  struct alignas(32) name##4_32a {        \
    element x, y, z, w;                   \
  };

EMULATED_ALIGNED_4(long, long)
EMULATED_ALIGNED_4(ulong, unsigned long)
EMULATED_ALIGNED_4(longlong, long long)
EMULATED_ALIGNED_4(ulonglong, unsigned long long)
EMULATED_ALIGNED_4(double, double)
#undef EMULATED_ALIGNED_4

/// Extents of a grid or block: one in every dimension that isn't named.
struct dim3 {
  unsigned x, y, z;
  __host__ __device__ constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
  __host__ __device__ constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  __host__ __device__ constexpr operator uint3() const { return uint3{x, y, z}; }
};

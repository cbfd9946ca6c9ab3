// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   loads and stores with a cache hint, __ldg to __stwt, for the scalars and vectors that CUDA has them for.
// Limits: there is no cache: all are plain accesses. One that isn't aligned ends in emulated::misaligned, as a device
//         ends the launch.

#include "../vector_types.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace emulated {

/// Reports an access of `bytes` bytes at an address that isn't a multiple of what it needs. Part of the runtime.
[[noreturn]] void misaligned(const void* address, unsigned bytes);

/// The types that have cached accesses.
template <class T>
inline constexpr bool has_cached_access =
    std::is_arithmetic_v<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, long double>;

#define EMULATED_CACHED(type) template <> inline constexpr bool has_cached_access<type> = true;
EMULATED_CACHED(char2)
EMULATED_CACHED(char4)
EMULATED_CACHED(short2)
EMULATED_CACHED(short4)
EMULATED_CACHED(int2)
EMULATED_CACHED(int4)
EMULATED_CACHED(longlong2)
EMULATED_CACHED(uchar2)
EMULATED_CACHED(uchar4)
EMULATED_CACHED(ushort2)
EMULATED_CACHED(ushort4)
EMULATED_CACHED(uint2)
EMULATED_CACHED(uint4)
EMULATED_CACHED(ulonglong2)
EMULATED_CACHED(float2)
EMULATED_CACHED(float4)
EMULATED_CACHED(double2)

template <class T>
concept cacheable = has_cached_access<T>;

template <class T> void check_alignment(const T* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignof(T) != 0) misaligned(address, sizeof(T));
}

template <class T> T load(const T* address) {
  check_alignment(address);
  T value;
  std::memcpy(static_cast<void*>(&value), static_cast<const void*>(address), sizeof(T));
  return value;
}

template <class T> void store(T* address, const T& value) {
  check_alignment(address);
  std::memcpy(static_cast<void*>(address), static_cast<const void*>(&value), sizeof(T));
}

}  // namespace emulated

#define EMULATED_LOAD(name) \
  template <emulated::cacheable T> __device__ T name(const T* address) { return emulated::load(address); }
#define EMULATED_STORE(name)                                                                         \
  template <emulated::cacheable T> __device__ void name(T* address, std::type_identity_t<T> value) { \
    emulated::store(address, value);                                                                 \
  }

EMULATED_LOAD(__ldg)
EMULATED_LOAD(__ldcg)
EMULATED_LOAD(__ldca)
EMULATED_LOAD(__ldcs)
EMULATED_LOAD(__ldlu)
EMULATED_LOAD(__ldcv)
EMULATED_STORE(__stwb)
EMULATED_STORE(__stcg)
EMULATED_STORE(__stcs)
EMULATED_STORE(__stwt)
#undef EMULATED_LOAD
#undef EMULATED_STORE

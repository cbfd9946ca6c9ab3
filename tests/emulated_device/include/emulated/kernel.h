// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief What a kernel sees: its indices, barriers, warp operations, atomics and shared memory.
///
/// A device thread runs as a plain call until its first barrier and as a fiber from there on. Barriers, warp operations,
/// fences and, at seeded points, atomics let others run; nothing else does, so a loop that waits for another thread
/// needs one of them inside (`__nanosleep`, a fence, an atomic).

#include <emulated/intrinsics.h>
#include <emulated/qualifiers.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// The indices of the running device thread: variables, since macros would clash with fields of these names.
extern constinit thread_local uint3 threadIdx;
extern constinit thread_local uint3 blockIdx;
extern constinit thread_local dim3 blockDim;
extern constinit thread_local dim3 gridDim;
inline constexpr int warpSize = 32;

namespace emulated {

/// A place in a kernel's source: barriers are told apart by it.
struct site {
  const char* file;
  unsigned line;
};

/// Operations for which the lanes of a mask meet.
enum class warp_operation : unsigned char {
  sync, shuffle, shuffle_up, shuffle_down, shuffle_xor, ballot, any, all, match_any, match_all,
  reduce_add, reduce_min, reduce_max, reduce_and, reduce_or, reduce_xor
};

/// Lanes that meet: what each of them brought, valid until every one has called leave().
struct meeting {
  unsigned mask;
  unsigned arrived;
  unsigned left;
  warp_operation operation;
  site where;
  std::uint64_t value[32];
};

// Every function below is called by a device thread; outside of a kernel they report an error and abort.

/// Waits until all lanes of the mask have called it with the same operation.
const meeting& meet(unsigned mask, warp_operation operation, std::uint64_t value, site where);
/// The caller has read what it wanted.
void leave(const meeting& m);
/// Waits until all living threads of the block have come to this barrier; how many of them brought true.
int barrier(bool predicate, site where);
/// Orders memory of this thread before and after, and lets others run.
void fence();
/// Lets others run at points that the seed chooses.
void maybe_yield();
/// Lets others run now.
void yield();
/// The lane of the calling thread in its warp.
unsigned lane();
/// The block's memory for one HEDDLE_SHARED declaration; the same for all threads of the block, poisoned when new.
void* shared_memory(const void* declaration, std::size_t bytes, std::size_t alignment);
/// The block's dynamic shared memory.
void* dynamic_shared_memory();
/// Time that moves with every call.
long long clock();
/// Reports a shuffle whose width isn't 1, 2, 4, 8, 16 or 32.
[[noreturn]] void wrong_width(int width);

inline void check_width(int width) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) wrong_width(width);
}

template <class Value> inline std::uint64_t pack(Value value) {
  static_assert(sizeof(Value) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const void*>(&value), sizeof value);
  return bits;
}
template <class Value> inline Value unpack(std::uint64_t bits) {
  Value value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof value);
  return value;
}

/// Value of lane `from`; a lane outside of the mask has brought nothing, and its value is all ones.
template <class Value>
inline Value exchange(unsigned mask, warp_operation kind, Value value, unsigned from, site where) {
  const meeting& m = meet(mask, kind, pack(value), where);
  const std::uint64_t bits = (mask >> from & 1u) ? m.value[from] : ~std::uint64_t{0};
  leave(m);
  return unpack<Value>(bits);
}

/// Combines the values of all lanes of the mask, from the lowest lane up.
template <class Value, class Combine>
inline Value combine(unsigned mask, Value value, warp_operation operation, Combine f, site where) {
  const meeting& m = meet(mask, operation, pack(value), where);
  Value result{};
  bool first = true;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    const Value v = unpack<Value>(m.value[lane]);
    result = first ? v : f(result, v);
    first = false;
  }
  leave(m);
  return result;
}

template <class Value>
concept shuffled = std::is_trivially_destructible_v<Value> && sizeof(Value) <= 8 && !std::is_same_v<Value, bool>;

}  // namespace emulated

#define EMULATED_HERE \
  ::emulated::site { file, line }
#define EMULATED_SITE const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()

// Shared memory. HEDDLE_SHARED(float[256], tile) declares `tile`, and each block has its own exact-size, poisoned copy;
// HEDDLE_DYNAMIC_SHARED(float, tile) declares a pointer to what the launch asked for. Plain __shared__ works too, but
// keeps what the block before wrote, and overruns of it aren't seen.
#define HEDDLE_SHARED(type, name)                                               \
  static constexpr char name##_declaration = 0;                                 \
  std::type_identity_t<type>& name = *static_cast<std::type_identity_t<type>*>( \
      ::emulated::shared_memory(&name##_declaration, sizeof(type), alignof(type)))
#define HEDDLE_DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(::emulated::dynamic_shared_memory())

// Barriers and fences

inline void __syncthreads(EMULATED_SITE) { emulated::barrier(false, EMULATED_HERE); }
inline int __syncthreads_count(int predicate, EMULATED_SITE) { return emulated::barrier(predicate != 0, EMULATED_HERE); }
inline int __syncthreads_or(int predicate, EMULATED_SITE) {
  return emulated::barrier(predicate != 0, EMULATED_HERE) != 0;
}
inline int __syncthreads_and(int predicate, EMULATED_SITE) {
  return emulated::barrier(predicate == 0, EMULATED_HERE) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATED_SITE) {
  emulated::leave(emulated::meet(mask, emulated::warp_operation::sync, 0, EMULATED_HERE));
}
inline void __threadfence() { emulated::fence(); }
inline void __threadfence_block() { emulated::fence(); }
inline void __threadfence_system() { emulated::fence(); }
inline void __nanosleep(unsigned) { emulated::yield(); }
inline long long clock64() { return emulated::clock(); }
inline unsigned long long __globaltimer() { return static_cast<unsigned long long>(emulated::clock()); }

// Votes

/// Only the caller: CUDA promises no more about which threads run together, so a correct program works with this.
inline unsigned __activemask() { return 1u << emulated::lane(); }
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATED_SITE) {
  const unsigned mine = predicate != 0 ? 1u << emulated::lane() : 0u;
  return emulated::combine(mask, mine, emulated::warp_operation::ballot, [](unsigned a, unsigned b) { return a | b; },
                           EMULATED_HERE);
}
inline int __any_sync(unsigned mask, int predicate, EMULATED_SITE) {
  return emulated::combine(mask, int{predicate != 0}, emulated::warp_operation::any,
                           [](int a, int b) { return a | b; }, EMULATED_HERE);
}
inline int __all_sync(unsigned mask, int predicate, EMULATED_SITE) {
  return emulated::combine(mask, int{predicate != 0}, emulated::warp_operation::all,
                           [](int a, int b) { return a & b; }, EMULATED_HERE);
}
template <emulated::shuffled Value> inline unsigned __match_any_sync(unsigned mask, Value value, EMULATED_SITE) {
  const emulated::meeting& m =
      emulated::meet(mask, emulated::warp_operation::match_any, emulated::pack(value), EMULATED_HERE);
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if ((mask >> lane & 1u) && m.value[lane] == emulated::pack(value)) same |= 1u << lane;
  emulated::leave(m);
  return same;
}
template <emulated::shuffled Value>
inline unsigned __match_all_sync(unsigned mask, Value value, int* predicate, EMULATED_SITE) {
  const emulated::meeting& m =
      emulated::meet(mask, emulated::warp_operation::match_all, emulated::pack(value), EMULATED_HERE);
  bool same = true;
  for (unsigned lane = 0; lane < 32; ++lane) same &= !(mask >> lane & 1u) || m.value[lane] == emulated::pack(value);
  emulated::leave(m);
  *predicate = same;
  return same ? mask : 0u;
}

// Shuffles: `width` is a power of two up to 32 and cuts the warp into segments.

template <emulated::shuffled Value>
inline Value __shfl_sync(unsigned mask, Value value, int from, int width = 32, EMULATED_SITE) {
  emulated::check_width(width);
  const unsigned segment = emulated::lane() & ~static_cast<unsigned>(width - 1);
  return emulated::exchange(mask, emulated::warp_operation::shuffle, value,
                            segment | (static_cast<unsigned>(from) & static_cast<unsigned>(width - 1)), EMULATED_HERE);
}
template <emulated::shuffled Value>
inline Value __shfl_up_sync(unsigned mask, Value value, unsigned delta, int width = 32, EMULATED_SITE) {
  emulated::check_width(width);
  const unsigned lane = emulated::lane(), inside = lane & static_cast<unsigned>(width - 1);
  return emulated::exchange(mask, emulated::warp_operation::shuffle_up, value, delta > inside ? lane : lane - delta,
                            EMULATED_HERE);
}
template <emulated::shuffled Value>
inline Value __shfl_down_sync(unsigned mask, Value value, unsigned delta, int width = 32, EMULATED_SITE) {
  emulated::check_width(width);
  const unsigned lane = emulated::lane(), inside = lane & static_cast<unsigned>(width - 1);
  return emulated::exchange(mask, emulated::warp_operation::shuffle_down, value,
                            delta >= static_cast<unsigned>(width) - inside ? lane : lane + delta, EMULATED_HERE);
}
template <emulated::shuffled Value>
inline Value __shfl_xor_sync(unsigned mask, Value value, int lanes, int width = 32, EMULATED_SITE) {
  emulated::check_width(width);
  const unsigned lane = emulated::lane(), from = lane ^ static_cast<unsigned>(lanes);
  const unsigned end = (lane | static_cast<unsigned>(width - 1)) + 1;  // a segment before the own one may be read
  return emulated::exchange(mask, emulated::warp_operation::shuffle_xor, value, from >= end || from > 31 ? lane : from,
                            EMULATED_HERE);
}

// Reductions over a warp, for int and unsigned

#define EMULATED_REDUCE(name, type, expression)                                                \
  inline type __reduce_##name##_sync(unsigned mask, type value, EMULATED_SITE) {               \
    return emulated::combine(mask, value, emulated::warp_operation::reduce_##name,             \
                             [](type a, type b) { return expression; }, EMULATED_HERE);        \
  }
EMULATED_REDUCE(add, unsigned, a + b)
EMULATED_REDUCE(min, unsigned, a < b ? a : b)
EMULATED_REDUCE(max, unsigned, a < b ? b : a)
EMULATED_REDUCE(and, unsigned, a& b)
EMULATED_REDUCE(or, unsigned, a | b)
EMULATED_REDUCE(xor, unsigned, a ^ b)
EMULATED_REDUCE(min, int, a < b ? a : b)
EMULATED_REDUCE(max, int, a < b ? b : a)
#undef EMULATED_REDUCE
inline int __reduce_add_sync(unsigned mask, int value, EMULATED_SITE) {
  return static_cast<int>(__reduce_add_sync(mask, static_cast<unsigned>(value), file, line));
}

// Atomics: relaxed, as on the device; each returns what was there before.

namespace emulated {

/// *p = f(*p), atomically, for a type of 2, 4, 8 or 16 bytes.
template <class Value, class Function> inline Value update(Value* p, Function f) {
  using word = std::conditional_t<
      sizeof(Value) == 2, std::uint16_t,
      std::conditional_t<sizeof(Value) == 4, std::uint32_t,
                         std::conditional_t<sizeof(Value) == 8, std::uint64_t, unsigned __int128>>>;
  static_assert(sizeof(word) == sizeof(Value));
  check_alignment(p);
  word* const at = reinterpret_cast<word*>(p);
  word before, after;
  __atomic_load(at, &before, __ATOMIC_RELAXED);
  Value old;
  do {
    std::memcpy(static_cast<void*>(&old), &before, sizeof old);
    const Value next = f(old);
    std::memcpy(&after, static_cast<const void*>(&next), sizeof after);
  } while (!__atomic_compare_exchange(at, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  maybe_yield();
  return old;
}

template <class Value, class... Others>
concept is_one_of = (std::is_same_v<Value, Others> || ...);
template <class Value>
concept atomic_integer = is_one_of<Value, int, unsigned, unsigned long long>;

}  // namespace emulated

template <emulated::is_one_of<int, unsigned, unsigned long long, float, double> Value>
inline Value atomicAdd(Value* p, std::type_identity_t<Value> value) {
  return emulated::update(p, [=](Value old) -> Value {
    if constexpr (std::is_same_v<Value, int>)
      return static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(value));
    else
      return old + value;
  });
}
template <emulated::is_one_of<int, unsigned> Value>
inline Value atomicSub(Value* p, std::type_identity_t<Value> value) {
  return emulated::update(p, [=](Value old) {
    return static_cast<Value>(static_cast<unsigned>(old) - static_cast<unsigned>(value));
  });
}
template <emulated::is_one_of<int, unsigned, unsigned long long, float> Value>
inline Value atomicExch(Value* p, std::type_identity_t<Value> value) {
  return emulated::update(p, [=](Value) { return value; });
}
template <emulated::is_one_of<int, unsigned, long long, unsigned long long> Value>
inline Value atomicMin(Value* p, std::type_identity_t<Value> value) {
  return emulated::update(p, [=](Value old) { return value < old ? value : old; });
}
template <emulated::is_one_of<int, unsigned, long long, unsigned long long> Value>
inline Value atomicMax(Value* p, std::type_identity_t<Value> value) {
  return emulated::update(p, [=](Value old) { return old < value ? value : old; });
}
template <emulated::atomic_integer Value> inline Value atomicAnd(Value* p, std::type_identity_t<Value> value) {
  return emulated::update(p, [=](Value old) -> Value { return old & value; });
}
template <emulated::atomic_integer Value> inline Value atomicOr(Value* p, std::type_identity_t<Value> value) {
  return emulated::update(p, [=](Value old) -> Value { return old | value; });
}
template <emulated::atomic_integer Value> inline Value atomicXor(Value* p, std::type_identity_t<Value> value) {
  return emulated::update(p, [=](Value old) -> Value { return old ^ value; });
}
/// 0 after `limit`, else one more.
inline unsigned atomicInc(unsigned* p, unsigned limit) {
  return emulated::update(p, [=](unsigned old) { return old >= limit ? 0u : old + 1; });
}
/// `limit` after 0 and above `limit`, else one less.
inline unsigned atomicDec(unsigned* p, unsigned limit) {
  return emulated::update(p, [=](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}
template <emulated::is_one_of<unsigned short, int, unsigned, unsigned long long> Value>
inline Value atomicCAS(Value* p, std::type_identity_t<Value> expected, std::type_identity_t<Value> value) {
  return emulated::update(p, [=](Value old) { return old == expected ? value : old; });
}
// Vectors are added component by component, each atomically, as on the device.
inline float2 atomicAdd(float2* p, float2 value) {
  emulated::check_alignment(p);
  return {atomicAdd(&p->x, value.x), atomicAdd(&p->y, value.y)};
}
inline float4 atomicAdd(float4* p, float4 value) {
  emulated::check_alignment(p);
  return {atomicAdd(&p->x, value.x), atomicAdd(&p->y, value.y), atomicAdd(&p->z, value.z), atomicAdd(&p->w, value.w)};
}
#define EMULATED_SCOPED(name)                                                            \
  template <class Value, class... Values> inline Value name##_block(Value* p, Values... values) { \
    return name(p, values...);                                                           \
  }                                                                                      \
  template <class Value, class... Values> inline Value name##_system(Value* p, Values... values) { \
    return name(p, values...);                                                           \
  }
EMULATED_SCOPED(atomicAdd)
EMULATED_SCOPED(atomicSub)
EMULATED_SCOPED(atomicExch)
EMULATED_SCOPED(atomicMin)
EMULATED_SCOPED(atomicMax)
EMULATED_SCOPED(atomicAnd)
EMULATED_SCOPED(atomicOr)
EMULATED_SCOPED(atomicXor)
EMULATED_SCOPED(atomicCAS)
#undef EMULATED_SCOPED
#undef EMULATED_SITE
#undef EMULATED_HERE

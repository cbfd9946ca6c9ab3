// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief Loops over rows that other threads change meanwhile: element by element through atomic_ref, and by opaque
/// vector loads and stores, compiled by function attribute for several instruction sets.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace heddle {
inline namespace v0 {
namespace detail {

/// Element by element, with the accesses of Access: load, store and add.
template <class Access> struct shared_elements {
  static void read(const float* shared, float* own, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; ++i) own[i] = Access::load(shared[i]);
  }
  static void write(float* shared, const float* own, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; ++i) Access::store(shared[i], own[i]);
  }
  static void add(float* shared, const float* own, float factor, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; ++i) Access::add(shared[i], factor * own[i]);
  }
  static void accumulate(const float* shared, float* own, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; ++i) own[i] += Access::load(shared[i]);
  }
  static void dots(const float* own, float* const* rows, std::size_t count, std::size_t n, float* out) noexcept {
    for (std::size_t k = 0; k < count; ++k) {
      float lanes[16] = {};  // sixteen chains: an addition takes longer than a load
      std::size_t i = 0;
      for (; i + 16 <= n; i += 16) {
        for (std::size_t j = 0; j < 16; ++j) lanes[j] += own[i + j] * Access::load(rows[k][i + j]);
      }
      float sum = 0.0f;
      for (; i < n; ++i) sum += own[i] * Access::load(rows[k][i]);
      for (const float lane : lanes) sum += lane;
      out[k] = sum;
    }
  }
  static void exchange(const float* own, float* const* rows, const float* factors, std::size_t count, std::size_t n,
                       float* error) noexcept {
    for (std::size_t k = 0; k < count; ++k) {
      for (std::size_t i = 0; i < n; ++i) {
        error[i] += factors[k] * Access::load(rows[k][i]);
        Access::add(rows[k][i], factors[k] * own[i]);
      }
    }
  }
};

/// Relaxed loads and stores; an addition may overwrite another thread's.
struct relaxed_access {
  static float load(const float& x) noexcept {
    return std::atomic_ref<float>(const_cast<float&>(x)).load(std::memory_order_relaxed);
  }
  static void store(float& x, float value) noexcept {
    std::atomic_ref<float>(x).store(value, std::memory_order_relaxed);
  }
  static void add(float& x, float value) noexcept { store(x, load(x) + value); }
};

/// The same, but an addition loses none.
struct fetch_add_access : relaxed_access {
  static void add(float& x, float value) noexcept {
    std::atomic_ref<float>(x).fetch_add(value, std::memory_order_relaxed);
  }
};

#if defined(__GNUC__) && (defined(__x86_64__) || defined(__aarch64__)) && !defined(__NVCOMPILER)

/// Whether there are opaque vector loads and stores for this target.
inline constexpr bool has_opaque_vectors = true;

// One struct of loops per instruction set; the attribute of a function can't be a template argument. With Opaque a load
// or store is an assembly statement, so the compiler neither knows nor assumes anything about other threads; without it
// is plain memory, which is a data race: for comparison only. The assembly is one instruction on whole vectors; the
// element after the last whole vector goes through relaxed_access, which is one instruction too.
#define HEDDLE_DETAIL_SHARED_VECTORS(name, target, lanes, move_in, move_out, in_register, in_memory)                \
  template <bool Opaque> struct name {                                                                              \
    using vector = float __attribute__((vector_size(4 * lanes)));                                                   \
    using in_place = float __attribute__((vector_size(4 * lanes), aligned(4), may_alias));                          \
                                                                                                                    \
    target static inline void load(vector& v, const float* p) noexcept {                                            \
      if constexpr (Opaque)                                                                                         \
        asm volatile(move_in : "=" in_register(v) : in_memory(*reinterpret_cast<const in_place*>(p)));              \
      else                                                                                                          \
        std::memcpy(&v, p, sizeof v);                                                                               \
    }                                                                                                               \
    target static inline void store(float* p, const vector& v) noexcept {                                           \
      if constexpr (Opaque)                                                                                         \
        asm volatile(move_out : "=" in_memory(*reinterpret_cast<in_place*>(p)) : in_register(v));                   \
      else                                                                                                          \
        std::memcpy(p, &v, sizeof v);                                                                               \
    }                                                                                                               \
    target static inline void fetch(vector& v, const float* p) noexcept { std::memcpy(&v, p, sizeof v); }           \
    target static inline float sum(const vector& v) noexcept {                                                      \
      float part[lanes];                                                                                            \
      std::memcpy(part, &v, sizeof part);                                                                           \
      for (std::size_t step = lanes / 2; step > 0; step /= 2) {                                                     \
        for (std::size_t j = 0; j < step; ++j) part[j] += part[j + step];                                           \
      }                                                                                                             \
      return part[0];                                                                                               \
    }                                                                                                               \
                                                                                                                    \
    target static void read(const float* shared, float* own, std::size_t n) noexcept {                              \
      std::size_t i = 0;                                                                                            \
      for (vector v; i + lanes <= n; i += lanes) {                                                                  \
        load(v, shared + i);                                                                                        \
        std::memcpy(own + i, &v, sizeof v);                                                                         \
      }                                                                                                             \
      shared_elements<relaxed_access>::read(shared + i, own + i, n - i);                                            \
    }                                                                                                               \
    target static void write(float* shared, const float* own, std::size_t n) noexcept {                             \
      std::size_t i = 0;                                                                                            \
      for (vector v; i + lanes <= n; i += lanes) {                                                                  \
        fetch(v, own + i);                                                                                          \
        store(shared + i, v);                                                                                       \
      }                                                                                                             \
      shared_elements<relaxed_access>::write(shared + i, own + i, n - i);                                           \
    }                                                                                                               \
    target static void add(float* shared, const float* own, float factor, std::size_t n) noexcept {                 \
      std::size_t i = 0;                                                                                            \
      for (vector s, o; i + lanes <= n; i += lanes) {                                                               \
        load(s, shared + i);                                                                                        \
        fetch(o, own + i);                                                                                          \
        store(shared + i, s + factor * o);                                                                          \
      }                                                                                                             \
      shared_elements<relaxed_access>::add(shared + i, own + i, factor, n - i);                                     \
    }                                                                                                               \
    target static void accumulate(const float* shared, float* own, std::size_t n) noexcept {                        \
      std::size_t i = 0;                                                                                            \
      for (vector s, o; i + lanes <= n; i += lanes) {                                                               \
        load(s, shared + i);                                                                                        \
        fetch(o, own + i);                                                                                          \
        o += s;                                                                                                     \
        std::memcpy(own + i, &o, sizeof o);                                                                         \
      }                                                                                                             \
      shared_elements<relaxed_access>::accumulate(shared + i, own + i, n - i);                                      \
    }                                                                                                               \
    /* Three rows at a time, so that `own` is read once for them and three chains of additions run side by side. */ \
    target static void dots(const float* own, float* const* rows, std::size_t count, std::size_t n,                 \
                            float* out) noexcept {                                                                  \
      std::size_t k = 0;                                                                                            \
      for (; k < count; k += 3) {                                                                                   \
        const float *const a = rows[k], *const b = rows[k + 1 < count ? k + 1 : k],                                 \
                           *const c = rows[k + 2 < count ? k + 2 : k];                                              \
        vector o, x, y, z, s{}, t{}, u{};                                                                           \
        std::size_t i = 0;                                                                                          \
        for (; i + lanes <= n; i += lanes) {                                                                        \
          fetch(o, own + i);                                                                                        \
          load(x, a + i);                                                                                           \
          load(y, b + i);                                                                                           \
          load(z, c + i);                                                                                           \
          s += o * x;                                                                                               \
          t += o * y;                                                                                               \
          u += o * z;                                                                                               \
        }                                                                                                           \
        float d[3] = {sum(s), sum(t), sum(u)};                                                                      \
        for (; i < n; ++i) {                                                                                        \
          d[0] += own[i] * relaxed_access::load(a[i]);                                                              \
          d[1] += own[i] * relaxed_access::load(b[i]);                                                              \
          d[2] += own[i] * relaxed_access::load(c[i]);                                                              \
        }                                                                                                           \
        for (std::size_t j = 0; j < 3 && k + j < count; ++j) out[k + j] = d[j];                                     \
      }                                                                                                             \
    }                                                                                                               \
    /* Rows inside, so that a piece of `own` and of `error` stays in a register for all of them. */                 \
    target static void exchange(const float* own, float* const* rows, const float* factors, std::size_t count,      \
                                std::size_t n, float* error) noexcept {                                             \
      std::size_t i = 0;                                                                                            \
      for (vector o, e, r; i + lanes <= n; i += lanes) {                                                            \
        fetch(o, own + i);                                                                                          \
        fetch(e, error + i);                                                                                        \
        for (std::size_t k = 0; k < count; ++k) {                                                                   \
          load(r, rows[k] + i);                                                                                     \
          e += factors[k] * r;                                                                                      \
          store(rows[k] + i, r + factors[k] * o);                                                                   \
        }                                                                                                           \
        std::memcpy(error + i, &e, sizeof e);                                                                       \
      }                                                                                                             \
      for (std::size_t k = 0; k < count; ++k) {                                                                     \
        for (std::size_t j = i; j < n; ++j) {                                                                       \
          const float r = relaxed_access::load(rows[k][j]);                                                         \
          error[j] += factors[k] * r;                                                                               \
          relaxed_access::store(rows[k][j], r + factors[k] * own[j]);                                               \
        }                                                                                                           \
      }                                                                                                             \
    }                                                                                                               \
  }

#if defined(__x86_64__)
HEDDLE_DETAIL_SHARED_VECTORS(vectors_x4, , 4, "movups %1, %0", "movups %1, %0", "x", "m");
HEDDLE_DETAIL_SHARED_VECTORS(vectors_x8, __attribute__((target("avx2,fma"))), 8, "vmovups %1, %0", "vmovups %1, %0",
                             "x", "m");
HEDDLE_DETAIL_SHARED_VECTORS(vectors_x16, __attribute__((target("avx512f,avx2,fma"))), 16, "vmovups %1, %0",
                             "vmovups %1, %0", "v", "m");

/// Floats in the widest vector of this processor.
inline int opaque_lanes() noexcept {
  return __builtin_cpu_supports("avx512f")                                 ? 16
         : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 8
                                                                           : 4;
}
#else
HEDDLE_DETAIL_SHARED_VECTORS(vectors_x4, , 4, "ld1 {%0.4s}, %1", "st1 {%1.4s}, %0", "w", "Q");
#endif
#undef HEDDLE_DETAIL_SHARED_VECTORS

/// Calls f with the loops of this processor's widest vectors.
template <bool Opaque, class Function> inline auto with_vectors(Function f) noexcept {
#if defined(__x86_64__)
  const int lanes = opaque_lanes();
  if (lanes == 16) return f(vectors_x16<Opaque>{});
  if (lanes == 8) return f(vectors_x8<Opaque>{});
#endif
  return f(vectors_x4<Opaque>{});
}

#else

/// Whether there are opaque vector loads and stores for this target.
inline constexpr bool has_opaque_vectors = false;

/// Calls f with loops of relaxed accesses.
template <bool Opaque, class Function> inline auto with_vectors(Function f) noexcept {
  return f(shared_elements<relaxed_access>{});
}

#endif

}  // namespace detail
}  // namespace v0
}  // namespace heddle

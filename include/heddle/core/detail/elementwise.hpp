// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief The loop of every update rule: a step, written once, runs on one element or on eight.
///
/// A step is a generic function object over references to a parameter, its gradient and its state, made of + - * / and
/// `take_root`. It is instantiated for `float` and, on x86-64, for vectors of eight: g++ 12 vectorises no such loop at
/// -O2. Both give the same bits: each operation is rounded by itself, AVX2 having no fused multiply-add. Where FMA is
/// allowed for the whole program (-march=native), -ffp-contract=off keeps it so.

#include <heddle/core/detail/convert_loops.hpp>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <type_traits>

namespace heddle {
inline namespace v0 {
namespace detail {

/// x = sqrt(x), correctly rounded.
HEDDLE_HD inline void take_root(float& x) noexcept { x = ::sqrtf(x); }

/// step(p[i], g[i], state[i]...) for i in [first, n), one element after the other.
template <class Step, class... State>
inline void update_portable(std::size_t first, std::size_t n, Step step, float* p, const float* g,
                            State*... state) noexcept {
  for (std::size_t i = first; i < n; ++i) step(p[i], g[i], state[i]...);
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)

/// @cond
// By reference: how a vector is passed by value depends on the caller's target.
__attribute__((target("avx2"))) inline void take_root(float_x8& x) noexcept {
#if defined(__clang__) && __has_builtin(__builtin_elementwise_sqrt)  // newer versions lack the other one
  x = __builtin_elementwise_sqrt(x);
#else
  x = __builtin_ia32_sqrtps256(x);
#endif
}

// Eight elements of an array, in a register while a step works on them.
template <class Element> struct eight {
  explicit eight(Element* from) noexcept : home(from) { std::memcpy(&x, from, sizeof x); }
  void store() const noexcept {
    if constexpr (!std::is_const_v<Element>) std::memcpy(home, &x, sizeof x);
  }
  Element* home;
  float_x8 x;
};

template <class Step, class... Eight> inline void step_eight(const Step& step, Eight&&... at) noexcept {
  step(at.x...);
  (at.store(), ...);
}

// flatten: the steps are inlined here, and so compiled for AVX2.
template <class Step, class... State>
__attribute__((target("avx2"), flatten)) inline void update_avx2(std::size_t n, Step step, float* p, const float* g,
                                                                 State*... state) noexcept {
  const std::size_t whole = n / 8 * 8;
  for (std::size_t i = 0; i < whole; i += 8) step_eight(step, eight(p + i), eight(g + i), eight(state + i)...);
  update_portable(whole, n, step, p, g, state...);
}
/// @endcond

/// step(p[i], g[i], state[i]...) for n elements by the best loop of this processor. The arrays don't overlap.
template <class Step, class... State>
inline void update_elements(std::size_t n, Step step, float* p, const float* g, State*... state) noexcept {
  if (best_isa() == isa::portable) return update_portable(0, n, step, p, g, state...);
  update_avx2(n, step, p, g, state...);
}

#else

/// step(p[i], g[i], state[i]...) for n elements. The arrays don't overlap.
template <class Step, class... State>
inline void update_elements(std::size_t n, Step step, float* p, const float* g, State*... state) noexcept {
  update_portable(0, n, step, p, g, state...);
}

#endif

}  // namespace detail
}  // namespace v0
}  // namespace heddle

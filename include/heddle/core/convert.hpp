// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/convert_loops.hpp>
#include <heddle/core/float16.hpp>

#include <cstddef>
#include <cstring>

namespace heddle {
inline namespace v0 {

/// @file
/// @brief Bulk conversions on the host between float and the 16-bit types, and a check that floats are finite.
///
/// Each result has the bits that the scalar conversion gives, on every processor. The loops are compiled for several
/// instruction sets and one is chosen per call; no compiler flag is needed. Rounding is to nearest even.
///
/// Pointers need no more alignment than their type has; `from` and `to` may be null when n is 0 and must not overlap,
/// except that calls that say so work in place.
/// All calls run on the caller's thread and throw nothing.
/// Those of 16-bit values are templates without a choice, so that they cost only files that convert.

/// @brief Rounds n floats to float16; from 65520 up they become infinity (see `convert_checked`).
template <class = void> void convert(const float* from, float16* to, std::size_t n) noexcept {
  detail::narrow<false, false>(from, to, n, 1.0f, detail::best_isa());
}
/// @brief Rounds n floats to bfloat16.
template <class = void> void convert(const float* from, bfloat16* to, std::size_t n) noexcept {
  detail::narrow<false, false>(from, to, n, 1.0f, detail::best_isa());
}
/// @brief Widens n float16 values, exactly.
template <class = void> void convert(const float16* from, float* to, std::size_t n) noexcept {
  detail::widen<false>(from, to, n, 1.0f, detail::best_isa());
}
/// @brief Widens n bfloat16 values, exactly.
template <class = void> void convert(const bfloat16* from, float* to, std::size_t n) noexcept {
  detail::widen<false>(from, to, n, 1.0f, detail::best_isa());
}
/// @brief Copies n floats: the case of generic code whose wire type is float.
inline void convert(const float* from, float* to, std::size_t n) noexcept {
  if (n != 0) std::memcpy(to, from, n * sizeof(float));
}

/// @brief `to[i] = float16(from[i] * scale)`; the product is a float, so there are two roundings.
template <class = void> void convert_scaled(const float* from, float16* to, std::size_t n, float scale) noexcept {
  detail::narrow<true, false>(from, to, n, scale, detail::best_isa());
}
/// @brief `to[i] = bfloat16(from[i] * scale)`; the product is a float, so there are two roundings.
template <class = void> void convert_scaled(const float* from, bfloat16* to, std::size_t n, float scale) noexcept {
  detail::narrow<true, false>(from, to, n, scale, detail::best_isa());
}
/// @brief `to[i] = float(from[i]) * scale`.
template <class = void> void convert_scaled(const float16* from, float* to, std::size_t n, float scale) noexcept {
  detail::widen<true>(from, to, n, scale, detail::best_isa());
}
/// @brief `to[i] = float(from[i]) * scale`.
template <class = void> void convert_scaled(const bfloat16* from, float* to, std::size_t n, float scale) noexcept {
  detail::widen<true>(from, to, n, scale, detail::best_isa());
}
/// @brief `to[i] = from[i] * scale`; in place too.
inline void convert_scaled(const float* from, float* to, std::size_t n, float scale) noexcept {
  detail::multiply(from, to, n, scale, detail::best_isa());
}

/// @brief Whether none of n floats is infinite or NaN. It looks at bits, so compilers that assume finite arithmetic
/// don't remove it.
/// @param from Values to look at; may be null when n is 0. @param n How many.
[[nodiscard]] inline bool all_finite(const float* from, std::size_t n) noexcept {
  return detail::finite(from, n, detail::best_isa());
}

/// @brief As `convert_scaled`, and says whether anything was lost: the `found_inf` of mixed precision training.
/// @param from Values to convert. @param to Where they go. @param n How many.
/// @param scale Factor applied in float before rounding.
/// @return true when an input was infinite or NaN, or a scaled one left float16's range. Every element is written
///         in either case.
template <class = void>
[[nodiscard]] bool convert_checked(const float* from, float16* to, std::size_t n, float scale = 1.0f) noexcept {
  return detail::narrow<true, true>(from, to, n, scale, detail::best_isa());
}
/// @brief As `convert_scaled`; true when an input was infinite or NaN, or a scaled one left bfloat16's range.
template <class = void>
[[nodiscard]] bool convert_checked(const float* from, bfloat16* to, std::size_t n, float scale = 1.0f) noexcept {
  return detail::narrow<true, true>(from, to, n, scale, detail::best_isa());
}
/// @brief As `convert_scaled`, in place too; true when a result is infinite or NaN.
[[nodiscard]] inline bool convert_checked(const float* from, float* to, std::size_t n, float scale = 1.0f) noexcept {
  convert_scaled(from, to, n, scale);
  return !all_finite(to, n);
}

}  // namespace v0
}  // namespace heddle

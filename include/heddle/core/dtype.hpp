// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/float16.hpp>

#include <cstddef>
#include <cstdint>

namespace heddle {
inline namespace v0 {

/// @brief Element types that tensors and messages name at run time.
enum class dtype : std::uint8_t {
  f32,   ///< float
  f64,   ///< double
  f16,   ///< float16
  bf16,  ///< bfloat16
  i32,   ///< std::int32_t
  i64,   ///< std::int64_t
  u8,    ///< std::uint8_t or std::byte
  other  ///< any other trivially copyable type
};

/// The dtype of Element; dtype::other for user types.
template <class Element>
inline constexpr dtype dtype_of = dtype::other;
/// @cond
template <> inline constexpr dtype dtype_of<float> = dtype::f32;
template <> inline constexpr dtype dtype_of<double> = dtype::f64;
template <> inline constexpr dtype dtype_of<float16> = dtype::f16;
template <> inline constexpr dtype dtype_of<bfloat16> = dtype::bf16;
template <> inline constexpr dtype dtype_of<std::int32_t> = dtype::i32;
template <> inline constexpr dtype dtype_of<std::int64_t> = dtype::i64;
template <> inline constexpr dtype dtype_of<std::uint8_t> = dtype::u8;
template <> inline constexpr dtype dtype_of<std::byte> = dtype::u8;
/// @endcond

/// Size of one element in bytes; 0 for dtype::other.
constexpr std::size_t bytes_of(dtype t) noexcept {
  switch (t) {
    case dtype::f32: case dtype::i32: return 4;
    case dtype::f64: case dtype::i64: return 8;
    case dtype::f16: case dtype::bf16: return 2;
    case dtype::u8: return 1;
    case dtype::other: break;
  }
  return 0;
}

/// The name used in messages, for example "f32".
constexpr const char* name_of(dtype t) noexcept {
  switch (t) {
    case dtype::f32: return "f32";
    case dtype::f64: return "f64";
    case dtype::f16: return "f16";
    case dtype::bf16: return "bf16";
    case dtype::i32: return "i32";
    case dtype::i64: return "i64";
    case dtype::u8: return "u8";
    case dtype::other: break;
  }
  return "user type";
}

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/temporary.hpp>
#include <heddle/core/error.hpp>

#include <cstddef>
#include <cstdint>

namespace heddle {
inline namespace v0 {
namespace detail {

/// The largest alignment that every resource gives.
inline constexpr std::size_t max_alignment = 4096;

/// The largest size that a pointer difference can express.
inline constexpr std::size_t max_bytes = static_cast<std::size_t>(PTRDIFF_MAX);

constexpr bool is_alignment(std::size_t alignment) noexcept {
  return alignment != 0 && (alignment & (alignment - 1)) == 0 && alignment <= max_alignment;
}

/// Throws argument_error unless the alignment is a power of two from 1 to max_alignment.
inline void check_alignment(const char* where, std::size_t alignment) {
  if (!is_alignment(alignment)) check_alignment(where, alignment, max_alignment);
}

/// The smallest multiple of a power of two that is not below `bytes`; memory_error when there is none.
inline std::size_t round_up(const char* where, std::size_t bytes, std::size_t alignment) {
  const std::size_t mask = alignment - 1;
  if (bytes > max_bytes - mask) throw memory_error(where, bytes, max_bytes);
  return (bytes + mask) & ~mask;
}

/// count * size; memory_error when that overflows.
inline std::size_t checked_multiply(const char* where, std::size_t count, std::size_t size) {
  if (size != 0 && count > max_bytes / size) throw memory_error(where, static_cast<std::size_t>(-1), max_bytes);
  return count * size;
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

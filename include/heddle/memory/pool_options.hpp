// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace heddle {
inline namespace v0 {

/// @brief How a `pool` takes memory from its upstream. All but `granularity` in bytes, any value legal unless stated.
struct pool_options {
  std::size_t initial = 0;                         ///< Taken at construction; at most `max`.
  std::size_t max = static_cast<std::size_t>(-1);  ///< The most it may hold at once.
  std::size_t growth = std::size_t{2} << 20;       ///< Chunks for smaller requests are up to this large.
  std::size_t granularity = 64;                    ///< Blocks start at multiples of this; a power of two in 1..4096.

  friend constexpr bool operator==(const pool_options&, const pool_options&) = default;
};

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace heddle {
inline namespace v0 {

/// @brief `lifetime::group` of a buffer that shares its place with no other.
inline constexpr std::size_t no_group = static_cast<std::size_t>(-1);

/// @brief When a buffer is needed and how large it is.
struct lifetime {
  std::size_t first = 0;      ///< The moment it begins to be needed; moments are any increasing numbers.
  std::size_t last = 0;       ///< The moment from which it isn't needed any more; at least `first`.
  std::size_t bytes = 0;      ///< Size; 0 is legal and takes no room.
  std::size_t alignment = 1;  ///< Its offset is a multiple of this power of two.
  std::size_t group = no_group;  ///< Lifetimes of one group get one offset: an update in place, or a buffer with gaps.

  friend constexpr bool operator==(const lifetime&, const lifetime&) = default;
};

}  // namespace v0
}  // namespace heddle

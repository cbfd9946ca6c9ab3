// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/concept.hpp>

namespace heddle {
inline namespace v0 {

/// @brief What becomes of a gradient that isn't finite; see the concept `table_guard`.
namespace guard {

/// @brief It is counted and left out; the row stays as it is.
struct reject {
  static constexpr bool edits = false;   ///< It changes no gradient.
  static constexpr bool throws = false;  ///< It lets the other rows pass.
  /// Whether all of it is finite. It looks at bits, as compilers may assume finite arithmetic.
  template <std::size_t Dim> HEDDLE_HD bool check(const float* g) const noexcept {
    std::uint32_t bad = 0;
    for (std::size_t i = 0; i < Dim; ++i) {
      // The exponent plus one carries into the sign's place exactly where it is all ones.
      bad |= ((__builtin_bit_cast(std::uint32_t, g[i]) & 0x7fffffffu) + 0x00800000u) & 0x80000000u;
    }
    return bad == 0;
  }
  /// "reject".
  std::string name() const { return "reject"; }
};

/// @brief The push throws argument_error before any row has moved.
struct raise : reject {
  static constexpr bool throws = true;  ///< A bad gradient ends the push.
  /// "raise".
  std::string name() const { return "raise"; }
};

/// @brief Each number is brought into [-limit, limit], NaN to 0; gradients changed are counted.
struct clamp {
  static constexpr bool edits = true;    ///< It changes gradients.
  static constexpr bool throws = false;  ///< It lets all rows pass.
  float limit = 1e3f;                    ///< Above 0, finite.
  /// Whether it was as it should be; it is afterwards.
  template <std::size_t Dim> HEDDLE_HD bool check(float* g) const noexcept {
    bool good = true;
    for (std::size_t i = 0; i < Dim; ++i) {
      const float x = g[i];
      g[i] = x != x ? 0.0f : x > limit ? limit : x < -limit ? -limit : x;
      good = good && g[i] == x;
    }
    return good;
  }
  /// "clamp".
  std::string name() const { return "clamp"; }
};

/// @brief Gradients are not looked at.
struct none {
  static constexpr bool edits = false;   ///< It changes no gradient.
  static constexpr bool throws = false;  ///< Nothing is refused.
  /// Always.
  template <std::size_t Dim> HEDDLE_HD constexpr bool check(const float*) const noexcept { return true; }
  /// "none".
  std::string name() const { return "none"; }
};

static_assert(table_guard<reject> && table_guard<raise> && table_guard<clamp> && table_guard<none>);

}  // namespace guard
}  // namespace v0
}  // namespace heddle

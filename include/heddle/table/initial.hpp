// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/philox.hpp>
#include <heddle/table/concept.hpp>

namespace heddle {
inline namespace v0 {

/// @brief How rows begin; see the concept `table_initial`. Column i of a key's row takes word i % 4 of the Philox block
/// whose key is the seed and whose counter is (table's number, i / 4, key).
namespace initial {

/// @brief All zeros.
struct zero {
  /// The weights of a key.
  template <std::size_t Dim> HEDDLE_HD void fill(float* w, std::uint64_t, std::uint32_t, std::uint64_t) const noexcept {
    for (std::size_t i = 0; i < Dim; ++i) w[i] = 0.0f;
  }
  /// "zero".
  std::string name() const { return "zero"; }
};

/// @brief Uniform in [-range, range). The same bits on host and device.
struct uniform {
  float range = 0.01f;  ///< Any finite number.
  /// The weights of a key.
  template <std::size_t Dim>
  HEDDLE_HD void fill(float* w, std::uint64_t seed, std::uint32_t table, std::uint64_t key) const noexcept {
    for (std::size_t i = 0; i < Dim; i += 4) {
      const philox4x32::block b = philox(seed, random_stream(table, static_cast<std::uint32_t>(i / 4)), key);
      for (std::size_t k = 0; k < 4 && i + k < Dim; ++k) w[i + k] = (2.0f * to_uniform(b.word[k]) - 1.0f) * range;
    }
  }
  /// "uniform".
  std::string name() const { return "uniform"; }
};

/// @brief Normal with mean 0. Host and device may differ in the last bits.
struct normal {
  float deviation = 0.01f;  ///< Standard deviation, 0 or above.
  /// The weights of a key.
  template <std::size_t Dim>
  HEDDLE_HD void fill(float* w, std::uint64_t seed, std::uint32_t table, std::uint64_t key) const noexcept {
    for (std::size_t i = 0; i < Dim; i += 4) {
      const philox4x32::block b = philox(seed, random_stream(table, static_cast<std::uint32_t>(i / 4)), key);
      const normal_pair p = to_normal(b.word[0], b.word[1]), q = to_normal(b.word[2], b.word[3]);
      const float x[4] = {p.first, p.second, q.first, q.second};
      for (std::size_t k = 0; k < 4 && i + k < Dim; ++k) w[i + k] = x[k] * deviation;
    }
  }
  /// "normal".
  std::string name() const { return "normal"; }
};

static_assert(table_initial<zero> && table_initial<uniform> && table_initial<normal>);

}  // namespace initial
}  // namespace v0
}  // namespace heddle

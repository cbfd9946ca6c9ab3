// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>

#include <cmath>

namespace heddle {
inline namespace v0 {

namespace detail {
// Euclidean norm in double, in eight chains that the processor runs at once; the order is fixed.
inline double norm_of(slice<const float> g) noexcept {
  double sum[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= g.count; i += 8) {
    for (std::size_t k = 0; k < 8; ++k) sum[k] += static_cast<double>(g[i + k]) * g[i + k];
  }
  for (std::size_t k = 0; i < g.count; ++i, ++k) sum[k] += static_cast<double>(g[i]) * g[i];
  return std::sqrt(((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])));
}
}  // namespace detail

/// @brief Clips each tensor's local gradient by its norm, before it is encoded.
///
/// The limit is on the rank's share of the mean: norm(g / P) <= max_norm P^-1/2, the bound under which P independent
/// gradients sum to max_norm. For the rank's own gradient g that is norm(g) <= max_norm P^1/2; with one rank, max_norm.
/// Wire:    nothing.
/// State:   none.
/// Traffic: 4 bytes read per element for the norm; the scaling is part of the encoder's pass.
/// Order:   before a compressor; several apply from left to right.
/// Sync:    never.
/// Paper:   Lin et al. 2018, section 3.2 (local gradient clipping).
/// Throws:  argument_error if max_norm isn't above 0.
struct clip {
  float max_norm = 1.0f;  ///< Largest norm of a tensor's summed gradient; above 0.

  /// Throws argument_error unless max_norm is above 0.
  void check() const {
    if (!(max_norm > 0.0f)) {
      throw argument_error("heddle::clip: max_norm is " + std::to_string(max_norm) + ", allowed is above 0");
    }
  }

  /// The number to multiply the gradient by, `before` included.
  float scale(slice<const float> g, float before, const encode_context& x) const {
    check();
    const double limit = static_cast<double>(max_norm) * std::sqrt(static_cast<double>(x.ranks));
    const double norm = detail::norm_of(g) * std::fabs(before);
    return norm > limit ? static_cast<float>(before * (limit / norm)) : before;
  }
  /// "clip".
  std::string name() const { return "clip"; }
};
static_assert(transform<clip>);

}  // namespace v0
}  // namespace heddle

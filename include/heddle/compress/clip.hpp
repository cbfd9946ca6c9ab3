// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>
#include <heddle/core/detail/squares.hpp>

#include <cmath>

namespace heddle {
inline namespace v0 {

/// @brief Clips each tensor's local gradient by its norm, before it is encoded.
///
/// The limit is on the rank's share of the mean: norm(g / P) <= max_norm P^-1/2, the bound under which P independent
/// gradients sum to max_norm. For the rank's own gradient g that is norm(g) <= max_norm P^1/2; with one rank, max_norm.
/// Wire:    nothing.
/// State:   none.
/// Traffic: 4 bytes read per element for the norm; the scaling is part of the encoder's pass. On a device the norms of
///          a bucket's tensors are one launch, and encoders read the scale where it is.
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
    return scale_of(detail::squares(g.data, g.count), before, x.ranks);
  }
  /// The same, from the sum of the gradient's squares.
  HEDDLE_HD float scale_of(double squares, float before, int ranks) const noexcept {
    const double limit = static_cast<double>(max_norm) * ::sqrt(static_cast<double>(ranks));
    const double norm = ::sqrt(squares) * ::fabs(static_cast<double>(before));
    return norm > limit ? static_cast<float>(static_cast<double>(before) * (limit / norm)) : before;
  }
  /// "clip".
  std::string name() const { return "clip"; }
};
static_assert(transform<clip> && has_scale_of<clip>);

}  // namespace v0
}  // namespace heddle

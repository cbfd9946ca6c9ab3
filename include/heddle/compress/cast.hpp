// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Gradients travel in a 16-bit type, summed in a wide accumulator.
///
/// With float16, sums on the way are stored divided by a power of two that follows the number of contributions, so that
/// eight gradients of 20000 and eight of 6e-8 both arrive; what leaves the range anyway becomes infinite, the step is
/// skipped on every rank and reported.
/// Wire:    2 bytes per element and message.
/// State:   none; the rounding error of a step is lost (use a transform with error feedback where that matters).
/// Traffic: 6 bytes per element to encode, 6 to decode, the least possible.
/// Order:   ends a chain.
/// Sync:    never.
/// Paper:   Micikevicius et al. 2018 (float16 needs a scale); the rule for sums is ours.
/// @tparam Wire float16 or bfloat16.
template <class Wire> struct cast {
  static_assert(std::is_same_v<Wire, float16> || std::is_same_v<Wire, bfloat16>,
                "heddle::cast: the wire type must be float16 or bfloat16");
  using wire = Wire;  ///< Element type on the wire.

  /// out[i] = Wire(g[i] * factor), to nearest even.
  void encode(slice<const float> g, wire* out, float factor) const noexcept {
    if (factor == 1.0f)
      convert(g.data, out, g.count);
    else
      convert_scaled(g.data, out, g.count, factor);
  }
  /// g[i] = float(in[i]), exact.
  void decode(const wire* in, slice<float> g) const noexcept { convert(in, g.data, g.count); }
  /// "cast<f16>" or "cast<bf16>".
  std::string name() const { return std::is_same_v<Wire, float16> ? "cast<f16>" : "cast<bf16>"; }
};
static_assert(elementwise_compressor<cast<float16>> && elementwise_compressor<cast<bfloat16>>);

}  // namespace v0
}  // namespace heddle

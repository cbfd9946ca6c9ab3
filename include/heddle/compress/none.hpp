// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Nothing: gradients travel as float.
///
/// Wire:    4 bytes per element and message.
/// State:   none.
/// Traffic: none where the gradients of a bucket are contiguous and need no weight; else one copy each way.
/// Order:   ends a chain.
/// Sync:    never.
struct none {
  using wire = float;  ///< Element type on the wire.

  /// out[i] = g[i] * factor.
  void encode(slice<const float> g, wire* out, float factor) const noexcept {
    convert_scaled(g.data, out, g.count, factor);
  }
  /// g[i] = in[i].
  void decode(const wire* in, slice<float> g) const noexcept { convert(in, g.data, g.count); }
  /// "none".
  std::string name() const { return "none"; }
};
static_assert(elementwise_compressor<none>);

}  // namespace v0
}  // namespace heddle

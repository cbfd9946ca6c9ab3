// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/every.hpp>

#include <cstddef>
#include <span>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief Keep one activation per segment of ceil(sqrt(n)) layers: `every` with that length.
///
/// All layers count alike, whatever their sizes.
///
/// State:   peak over n = k k equal layers of output a and saved block s: 2 k a + k s for k > 1.
/// Traffic: at most one extra forward per layer, n - ceil(sqrt(n)) in all; n backwards.
/// Paper:   Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, 2016. There
///          the last segment is computed twice, too.
struct sqrt {
  /// The schedule for these layers.
  template <class Schedule = schedule> Schedule plan(std::span<const layer_cost> costs) const {
    std::size_t length = 1;
    while (length * length < costs.size()) ++length;
    return every{length}.plan<Schedule>(costs);
  }

  friend constexpr bool operator==(const sqrt&, const sqrt&) = default;
};

static_assert(policy<sqrt>);

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

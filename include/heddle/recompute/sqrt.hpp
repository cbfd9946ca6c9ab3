// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/concept.hpp>
#include <heddle/recompute/schedule.hpp>

#include <cstddef>
#include <span>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief Keep one activation per segment of about sqrt(n) layers, and compute each segment again for backward.
///
/// The last segment is kept whole, as backward begins with it. In the others only the input is kept; when backward gets
/// there, the segment runs forward again, keeping all. A segment's last layer is not run again if it saves nothing. All
/// layers count alike, whatever their sizes.
///
/// State:   peak over n = k k equal layers of output a and saved block s: 2 k a + k s for k > 1.
/// Traffic: at most one extra forward per layer, n - ceil(sqrt(n)) in all; n backwards.
/// Paper:   Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, 2016. There
///          the last segment is computed twice, too.
struct sqrt {
  std::size_t segment = 0;  ///< Layers per segment; 0 stands for ceil(sqrt(n)).

  /// The schedule for these layers.
  template <class Schedule = schedule>
  Schedule plan(std::span<const layer_cost> costs) const {
    const std::size_t n = costs.size();
    Schedule result;
    if (n == 0) return result;
    std::size_t length = segment;
    if (length == 0) {
      for (length = 1; length < n && length * length < n;) ++length;
    }
    const std::size_t last = (n - 1) / length * length;  // where the last segment begins
    for (std::size_t i = 0; i < last; ++i) {
      result.steps.push_back({i % length == 0 ? action::forward_keep_input : action::forward_drop, i});
    }
    for (std::size_t i = last; i < n; ++i) result.steps.push_back({action::forward_keep_all, i});
    for (std::size_t i = n; i-- > last;) result.steps.push_back({action::backward, i});
    for (std::size_t end = last; end > 0; end -= length) {
      for (std::size_t i = end - length; i < end; ++i) {
        if (i + 1 == end && costs[i].saved_bytes == 0) break;
        result.steps.push_back({action::forward_keep_all, i});
        if (i + 1 == end) result.steps.push_back({action::drop, i});
      }
      for (std::size_t i = end; i-- > end - length;) result.steps.push_back({action::backward, i});
    }
    return result;
  }

  friend constexpr bool operator==(const sqrt&, const sqrt&) = default;
};

static_assert(policy<sqrt>);

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

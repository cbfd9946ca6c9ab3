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

/// @brief Keep the input of every k-th layer, and compute each segment of k layers again for backward.
///
/// The last segment is kept whole, as backward begins with it. In the others only the input is kept; when backward gets
/// there, the segment runs forward again, keeping all. A segment's last layer only restores its saved block, if any.
///
/// State:   peak over n equal layers of output a and saved block s, k dividing n > k: (n / k + k) a + k s.
/// Traffic: at most one extra forward per layer, n - k in all; n backwards.
/// Throws:  `argument_error` from plan() if `layers` is 0.
struct every {
  std::size_t layers = 1;  ///< Layers per segment, at least 1; above n as n, which keeps everything.

  /// The schedule for these layers.
  template <class Schedule = schedule> Schedule plan(std::span<const layer_cost> costs) const {
    if (layers == 0) throw argument_error("heddle::recompute::every: .layers is 0, allowed is 1 or more");
    const std::size_t n = costs.size();
    Schedule result;
    if (n == 0) return result;
    const std::size_t length = layers < n ? layers : n;
    const std::size_t last = (n - 1) / length * length;  // where the last segment begins
    for (std::size_t i = 0; i < last; ++i) {
      result.steps.push_back({i % length == 0 ? action::forward_keep_input : action::forward_drop, i});
    }
    for (std::size_t i = last; i < n; ++i) result.steps.push_back({action::forward_keep_all, i});
    for (std::size_t i = n; i-- > last;) result.steps.push_back({action::backward, i});
    for (std::size_t end = last; end > 0; end -= length) {
      for (std::size_t i = end - length; i + 1 < end; ++i) result.steps.push_back({action::forward_keep_all, i});
      if (costs[end - 1].saved_bytes != 0) result.steps.push_back({action::restore, end - 1});
      for (std::size_t i = end; i-- > end - length;) result.steps.push_back({action::backward, i});
    }
    return result;
  }

  friend constexpr bool operator==(const every&, const every&) = default;
};

/// @brief Keep only the input of each layer, and run each layer again just before its backward: `every{1}`.
///
/// State:   peak over n > 1 equal layers of output a and saved block s: (n + 1) a + s.
/// Traffic: n - 1 extra forwards; n backwards. Worth it where layers are whole blocks that save much.
struct full {
  /// The schedule for these layers.
  template <class Schedule = schedule> Schedule plan(std::span<const layer_cost> costs) const {
    return every{1}.plan<Schedule>(costs);
  }

  friend constexpr bool operator==(const full&, const full&) = default;
};

static_assert(policy<every> && policy<full>);

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

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

/// @brief Keep everything, compute nothing twice: the fastest schedule and the largest.
///
/// State:   peak over n equal layers of output a and saved block s: (n + 1) a + n s for n > 1; a + s for n = 1.
/// Traffic: n forwards, n backwards.
struct none {
  /// Forward of every layer keeping all, then backward of every layer.
  template <class Schedule = schedule> Schedule plan(std::span<const layer_cost> costs) const {
    Schedule result;
    result.steps.reserve(2 * costs.size());
    for (std::size_t i = 0; i < costs.size(); ++i) result.steps.push_back({action::forward_keep_all, i});
    for (std::size_t i = costs.size(); i-- > 0;) result.steps.push_back({action::backward, i});
    return result;
  }

  friend constexpr bool operator==(const none&, const none&) = default;
};

static_assert(policy<none>);

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

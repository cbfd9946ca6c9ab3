// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/concept.hpp>
#include <heddle/recompute/detail/rehearse.hpp>
#include <heddle/recompute/schedule.hpp>

#include <cstddef>
#include <span>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief What a schedule costs: exact bytes, and times as sums of the layers' own.
struct simulation {
  /// @brief Bytes held after one allocation or deallocation. Zero bytes are no event.
  struct event {
    std::size_t step = 0;   ///< Index of the step that does it.
    std::size_t bytes = 0;  ///< Held afterwards.

    friend constexpr bool operator==(const event&, const event&) = default;
  };

  std::size_t peak_bytes = 0;      ///< The most bytes held at once.
  std::size_t peak_step = 0;       ///< The first step at which they are.
  std::size_t forward_steps = 0;   ///< Steps of the forward phase; the rest is the backward phase.
  std::size_t extra_forwards = 0;  ///< Forwards and restores beyond one forward per layer.
  double forward_time = 0;         ///< Of all forwards, the extra ones included.
  double extra_time = 0;           ///< Of the extra forwards alone.
  double backward_time = 0;        ///< Of all backwards.
  std::size_t stored_bytes = 0;    ///< What the store holds once every offloaded block has been there.
  std::size_t copied_bytes = 0;    ///< Between the chain's memory and its store, both ways.
  std::vector<event> timeline;     ///< Every change, in order: what `tracking` logs when a chain runs the schedule.
};

/// @brief Checks a schedule against layers and says what it costs, exactly.
///
/// Counted is what a chain allocates: activations, saved blocks, the gradients of activations between layers and the
/// workspaces that layers ask for. Not counted: the input of layer 0, the gradients at both ends, which the caller
/// brings, parameters, and whatever layers allocate for themselves.
///
/// Legal means: each step finds what it needs (forward its inputs; backward its inputs, its saved block unless that has
/// 0 bytes, and the gradient from the layers above); no forward writes what is already held (drop it first); the
/// backward phase runs every layer's backward once, from the last to the first; no forward of a layer comes after its
/// backward; what was evicted is fetched once. Such a schedule holds nothing at its end.
///
/// Throws:  `schedule_error` naming step and layer; `argument_error` where a layer reads what doesn't come before it.
template <class Schedule = schedule> simulation simulate(const Schedule& what, std::span<const layer_cost> costs) {
  return detail::rehearse<simulation>(what, costs,
                                      [](std::size_t, detail::block_kind, std::size_t, std::size_t, bool) {});
}

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

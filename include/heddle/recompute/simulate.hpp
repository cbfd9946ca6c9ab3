// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/concept.hpp>
#include <heddle/recompute/schedule.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
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
  std::size_t extra_forwards = 0;  ///< Forwards beyond one per layer.
  double forward_time = 0;         ///< Of all forwards, the extra ones included.
  double extra_time = 0;           ///< Of the extra forwards alone.
  double backward_time = 0;        ///< Of all backwards.
  std::vector<event> timeline;     ///< Every change, in order: what `tracking` logs when a chain runs the schedule.
};

/// @brief Checks a schedule against layers and says what it costs, exactly.
///
/// Counted is what a chain allocates: activations, saved blocks and the gradients of activations between layers. Not
/// counted: the input of layer 0, the gradients at both ends, which the caller brings, parameters, and whatever layers
/// allocate for themselves.
///
/// Legal means: each step finds what it needs (forward its input; backward its input, its saved block unless that has 0
/// bytes, and the gradient from the layer above); no forward writes what is already held (drop it first); the backward
/// phase runs every layer's backward once, from the last to the first; no forward of a layer comes after its backward.
/// Such a schedule holds nothing at its end.
///
/// Throws:  `schedule_error` naming step and layer.
template <class Schedule = schedule> simulation simulate(const Schedule& what, std::span<const layer_cost> costs) {
  const std::size_t n = costs.size();
  struct flags {
    bool output = false, saved = false, ran = false;
  };
  std::vector<flags> held(n);
  simulation result;
  std::size_t bytes = 0;
  std::size_t k = 0;      // the step
  std::size_t ahead = n;  // layers whose backward is to come
  bool forward_over = n == 0;

  const auto fail = [&](const std::string& detail) {
    throw schedule_error("simulate", k, name_of(what.steps[k].what), what.steps[k].layer, "", detail);
  };
  const auto record = [&] {
    if (bytes > result.peak_bytes) {
      result.peak_bytes = bytes;
      result.peak_step = k;
    }
    result.timeline.push_back({k, bytes});
  };
  const auto take = [&](std::size_t size) {
    if (size == 0) return;
    if (size > static_cast<std::size_t>(PTRDIFF_MAX) - bytes) fail("more bytes are held than can be addressed");
    bytes += size;
    record();
  };
  const auto give = [&](std::size_t size) {
    if (size == 0) return;
    bytes -= size;
    record();
  };

  for (; k < what.steps.size(); ++k) {
    const operation step = what.steps[k];
    const std::size_t i = step.layer;
    if (i >= n) fail("there are " + std::to_string(n) + " layers");
    if (step.what > action::drop) fail("there is no such action");
    const layer_cost& cost = costs[i];
    if (step.what == action::drop) {
      if (!held[i].output) fail("its output is not held");
      held[i].output = false;
      give(cost.output_bytes);
      continue;
    }
    if (i > 0 && !held[i - 1].output)
      fail("needs its input, the output of layer " + std::to_string(i - 1) + ", which is not held");
    if (is_forward(step.what)) {
      if (i >= ahead) fail("its backward has already run");
      if (held[i].output) fail("its output is already held; drop it first");
      if (step.what == action::forward_keep_all && held[i].saved) fail("its saved block is already held");
      held[i].output = true;
      take(cost.output_bytes);
      if (step.what == action::forward_keep_all) {
        held[i].saved = true;
        take(cost.saved_bytes);
      }
      result.forward_time += cost.forward_time;
      if (held[i].ran) {
        ++result.extra_forwards;
        result.extra_time += cost.forward_time;
      }
      held[i].ran = true;
      if (step.what == action::forward_drop && i > 0) {
        held[i - 1].output = false;
        give(costs[i - 1].output_bytes);
      }
      if (i + 1 == n && !forward_over) {
        forward_over = true;
        result.forward_steps = k + 1;
      }
      continue;
    }
    if (!forward_over) fail("no forward of the last layer comes before it");
    if (i + 1 != ahead)
      fail(i < ahead ? "the backward of layer " + std::to_string(ahead - 1) + " must come first"
                     : std::string("it has already run"));
    if (!held[i].saved && cost.saved_bytes != 0) fail("needs its saved block, which is not held");
    if (i > 0) take(costs[i - 1].output_bytes);  // the gradient of its input
    result.backward_time += cost.backward_time;
    if (i + 1 < n) give(cost.output_bytes);  // the gradient of its output
    if (held[i].saved) give(cost.saved_bytes);
    if (held[i].output) give(cost.output_bytes);
    if (i > 0) give(costs[i - 1].output_bytes);
    held[i].saved = held[i].output = false;
    if (i > 0) held[i - 1].output = false;
    ahead = i;
  }
  if (ahead != 0) {
    throw schedule_error("simulate", k, "end", ahead - 1, "", "the schedule ends before the layer's backward");
  }
  return result;
}

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

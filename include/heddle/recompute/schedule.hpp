// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief What a planner knows of one layer: sizes in bytes, times in any unit that all layers share.
struct layer_cost {
  std::size_t output_bytes = 0;  ///< The activation passed to the next layer.
  std::size_t saved_bytes = 0;   ///< What backward needs beside the layer's input and the gradient of its output.
  double forward_time = 1;       ///< Of one forward.
  double backward_time = 2;      ///< Of one backward.
  double restore_time = 0;       ///< Of computing the saved block alone; 0: by a forward, for want of something better.
  std::size_t forward_workspace = 0;      ///< Held only while forward runs.
  std::size_t backward_workspace = 0;     ///< Held only while backward runs.
  bool once = false;                      ///< Its forward may run only once a step: a collective, an outside effect.
  std::vector<std::size_t> also_reads{};  ///< Layers before the one before it whose outputs it reads too.
  std::string name{};                     ///< For messages.

  /// What `restore` costs.
  constexpr double again() const noexcept { return restore_time > 0 ? restore_time : forward_time; }
  friend bool operator==(const layer_cost&, const layer_cost&) = default;
};

/// @brief What a step of a schedule does with its layer; the order of allocating and freeing is part of the meaning.
enum class action : std::uint8_t {
  /// Forward that keeps nothing: allocates the output, runs, frees the input.
  forward_drop,
  /// Forward that keeps its input, so that the layer can be run again: allocates the output, runs.
  forward_keep_input,
  /// Forward that keeps all that backward needs: allocates the output, then the saved block, runs.
  forward_keep_all,
  /// Allocates the gradient of the input (not for layer 0), runs, then frees the gradient of the output, the saved
  /// block, the output if it is held, and the input.
  backward,
  /// Frees the output.
  drop,
  /// Computes the saved block again: allocates it, runs. A layer that can't stop before its output has room for that,
  /// allocated before the saved block and freed afterwards.
  restore,
  /// Begins to copy the output and the saved block, those of them that are held, to the chain's store.
  offload,
  /// Waits for that copy and frees what was copied.
  evict,
  /// Allocates what was evicted and begins to copy it back; who needs it waits for it.
  fetch
};

/// The name used in messages, for example "forward_drop".
constexpr const char* name_of(action what) noexcept {
  switch (what) {
    case action::forward_drop: return "forward_drop";
    case action::forward_keep_input: return "forward_keep_input";
    case action::forward_keep_all: return "forward_keep_all";
    case action::backward: return "backward";
    case action::drop: return "drop";
    case action::restore: return "restore";
    case action::offload: return "offload";
    case action::evict: return "evict";
    case action::fetch: return "fetch";
  }
  return "unknown action";
}

/// Whether it runs the layer's forward.
constexpr bool is_forward(action what) noexcept { return what <= action::forward_keep_all; }

/// @brief One step of a schedule.
struct operation {
  action what = action::drop;  ///< What to do.
  std::size_t layer = 0;       ///< With which layer, from 0.

  friend constexpr bool operator==(const operation&, const operation&) = default;
};

/// @brief A whole training step of a chain of layers as data: what runs when, and what is held meanwhile.
///
/// The first forward of the last layer ends the forward phase: there the caller gets the output and computes its
/// gradient. What follows is the backward phase. `simulate` says whether a schedule is legal and what it costs; `chain`
/// executes it. A schedule is itself a policy that always plans the same, so it can be written by hand:
///
/// @code{.cpp}
/// using enum heddle::recompute::action;
/// // Three layers; the output of the first one is not kept but computed again.
/// heddle::recompute::schedule mine{{{forward_keep_input, 0}, {forward_drop, 1}, {forward_keep_all, 2}, {backward, 2},
///                                   {forward_keep_all, 0}, {forward_keep_all, 1}, {drop, 1}, {backward, 1},
///                                   {backward, 0}}};
/// @endcode
struct schedule {
  std::vector<operation> steps;  ///< In the order of execution.

  /// Itself, whatever the costs: a hand-written schedule is a policy.
  template <class Schedule = schedule> Schedule plan(std::span<const layer_cost>) const { return *this; }

  friend bool operator==(const schedule&, const schedule&) = default;
};

/// One line per step, "index action layer", for logs and drawings.
inline std::string to_string(const schedule& what) {
  std::string text;
  for (std::size_t k = 0; k < what.steps.size(); ++k) {
    text += std::to_string(k) + " " + name_of(what.steps[k].what) + " " + std::to_string(what.steps[k].layer) + "\n";
  }
  return text;
}

/// @brief A schedule that can't be carried out on these layers.
class schedule_error : public argument_error {
 public:
  /// @param where Who reports.
  /// @param step Index of the step; the number of steps when the schedule ends too early.
  /// @param doing Name of the action.
  /// @param layer Index of the layer.
  /// @param name The layer's name, may be empty.
  /// @param detail What is wrong.
  schedule_error(const std::string& where, std::size_t step, const std::string& doing, std::size_t layer,
                 const std::string& name, const std::string& detail)
      : argument_error("heddle::recompute::" + where + ": step " + std::to_string(step) + ", " + doing + " of layer " +
                       std::to_string(layer) + (name.empty() ? std::string{} : " (" + name + ")") + ": " + detail),
        step_(step),
        layer_(layer) {}

  /// Index of the step at fault.
  std::size_t step() const noexcept { return step_; }
  /// Index of the layer at fault.
  std::size_t layer() const noexcept { return layer_; }

 private:
  std::size_t step_, layer_;
};

}  // namespace recompute

namespace detail {
// Throws argument_error unless every layer's further inputs are outputs of earlier layers, in order.
template <class Cost> void check_reads(std::span<const Cost> costs) {
  for (std::size_t i = 0; i < costs.size(); ++i) {
    for (std::size_t r = 0; r < costs[i].also_reads.size(); ++r) {
      const std::size_t j = costs[i].also_reads[r];
      if (j + 1 < i && (r == 0 || costs[i].also_reads[r - 1] < j)) continue;
      throw argument_error("heddle::recompute: layer " + std::to_string(i) + " also reads layer " +
                           std::to_string(j) + "; allowed are, in ascending order, layers before the one before it");
    }
  }
}
}  // namespace detail
}  // namespace v0
}  // namespace heddle

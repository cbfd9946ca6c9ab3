// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief Says when a parameter's gradient is complete: of tied weights after the last layer's backward, with gradient
/// accumulation after the last micro-batch.
///
/// A chain runs every layer's backward once per call, under every policy, so contributions are counted, not marked.
/// Layers add to gradients, and the trainer is told once per parameter and step:
///
/// @code{.cpp}
/// heddle::recompute::completion complete{{2, 1, 1}, 4};    // parameter 0 is tied: two layers; four micro-batches
/// // in a layer's backward, for each of its parameters:
/// add_gradient(i);
/// if (complete.add(i)) dp.ready(i);
/// @endcode
///
/// State:   16 bytes per parameter.
/// Throws:  `argument_error` for a parameter that there isn't, or one without users.
class completion {
 public:
  /// @param users Layers that use each parameter. @param micro_batches Backwards of the chain per step, at least 1.
  explicit completion(std::vector<std::size_t> users, std::size_t micro_batches = 1)
      : needed_(std::move(users)), seen_(needed_.size()) {
    for (std::size_t i = 0; i < needed_.size(); ++i) {
      if (needed_[i] == 0 || micro_batches == 0) {
        throw argument_error("heddle::recompute::completion: parameter " + std::to_string(i) + " has " +
                             std::to_string(needed_[i]) + " users in " + std::to_string(micro_batches) +
                             " micro-batches, allowed is 1 or more of each");
      }
      needed_[i] *= micro_batches;
    }
  }

  /// Counts a backward that has added to the gradient of parameter i; true for the last one of a step.
  bool add(std::size_t i) {
    if (i >= seen_.size()) {
      throw argument_error("heddle::recompute::completion::add: parameter " + std::to_string(i) + " of " +
                           std::to_string(seen_.size()));
    }
    if (++seen_[i] < needed_[i]) return false;
    seen_[i] = 0;
    return true;
  }

  /// Whether the next `add` of parameter i is the first of a step: where a gradient is written rather than added to.
  bool first(std::size_t i) const { return i < seen_.size() && seen_[i] == 0; }

  /// Begins a step anew, after one that was given up.
  void reset() noexcept { seen_.assign(seen_.size(), 0); }

 private:
  std::vector<std::size_t> needed_, seen_;
};

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

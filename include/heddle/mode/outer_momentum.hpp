// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/outer_step.hpp>

namespace heddle {
inline namespace v0 {

/// @brief DiLoCo: ranks take many steps with an optimizer of their own (AdamW in the paper); at a meeting the mean of
/// their differences is the gradient of an outer SGD with Nesterov momentum.
///
/// Wire:    one all-reduce of the parameters every `period` steps.
/// State:   8 bytes per element.
/// Order:   any compressor but `dgc`, which corrects momentum itself.
/// Sync:    step() blocks at meetings only.
/// Paper:   Douillard et al. 2023 (period 500, lr 0.7, momentum 0.9).
/// Throws:  argument_error for a number outside its range.
struct diloco {
  std::size_t period = 500;  ///< Steps between meetings, at least 1.
  float lr = 0.7f;           ///< Outer learning rate, 0 or above.
  float momentum = 0.9f;     ///< Outer momentum, in [0, 1).
  std::size_t warmup = 0;    ///< Steps at the start in which replicas meet every step.

  static constexpr average averages = average::parameters;  ///< Parameters, as differences.
  static constexpr bool outer_momentum = true;              ///< Nesterov's.

  /// The case of the family that this is.
  heddle::outer_step<outer::sgd> outer_step() const {
    return {.outer = {lr, momentum, true}, .period = {period, warmup}};
  }
  /// Throws argument_error for a number outside its range.
  void check() const { outer_step().check(); }
  /// Whether replicas meet at the end of this step.
  bool meets(std::size_t step) const { return outer_step().meets(step); }
  /// "diloco".
  std::string name() const { return "diloco"; }
};
static_assert(mode<diloco>);

/// @brief SlowMo: replicas average, and a slow momentum in units of the local learning rate carries the average on.
///
///     m = momentum m + mean / lr;   w = w - alpha lr m
///
/// Wire:    one all-reduce of the parameters every `period` steps.
/// State:   8 bytes per element.
/// Order:   any compressor but `dgc`, which corrects momentum itself.
/// Sync:    step() blocks at meetings only.
/// Paper:   Wang et al. 2020 (alpha 1, momentum 0.4 .. 0.7, period 12 .. 48).
/// Throws:  argument_error for a number outside its range.
struct slow_momentum {
  std::size_t period = 12;  ///< Steps between meetings, at least 1.
  float alpha = 1.0f;       ///< Slow learning rate, 0 or above.
  float momentum = 0.7f;    ///< Slow momentum, in [0, 1).
  std::size_t warmup = 0;   ///< Steps at the start in which replicas meet every step.

  static constexpr average averages = average::parameters;  ///< Parameters, as differences.
  static constexpr bool outer_momentum = true;              ///< Slow.

  /// The case of the family that this is.
  heddle::outer_step<outer::slow> outer_step() const {
    return {.outer = {alpha, momentum}, .period = {period, warmup}};
  }
  /// Throws argument_error for a number outside its range.
  void check() const { outer_step().check(); }
  /// Whether replicas meet at the end of this step.
  bool meets(std::size_t step) const { return outer_step().meets(step); }
  /// "slow_momentum".
  std::string name() const { return "slow_momentum"; }
};
static_assert(mode<slow_momentum>);

/// @brief Blockwise model-update filtering (BMUF): block momentum on the averages of replicas.
///
/// In the paper's terms the block's difference is d = momentum d + lr mean and, with nesterov, replicas start the next
/// block at w - momentum d ahead; here m = d / lr and w is where they start.
/// Wire:    one all-reduce of the parameters every `period` steps.
/// State:   8 bytes per element.
/// Order:   any compressor but `dgc`, which corrects momentum itself.
/// Sync:    step() blocks at meetings only.
/// Paper:   Chen, Huo 2016.
/// Throws:  argument_error for a number outside its range.
struct block_momentum {
  std::size_t period = 8;  ///< Steps between meetings (a block), at least 1.
  float lr = 1.0f;         ///< Block learning rate, 0 or above.
  float momentum = -1.0f;  ///< Block momentum, in [0, 1); below 0: 1 - 1/ranks, the paper's choice.
  bool nesterov = true;    ///< Nesterov's form.
  std::size_t warmup = 0;  ///< Steps at the start in which replicas meet every step.

  static constexpr average averages = average::parameters;  ///< Parameters, as differences.
  static constexpr bool outer_momentum = true;              ///< Block momentum.

  /// The case of the family that this is.
  heddle::outer_step<outer::block> outer_step() const {
    return {.outer = {lr, momentum, nesterov}, .period = {period, warmup}};
  }
  /// Throws argument_error for a number outside its range.
  void check() const { outer_step().check(); }
  /// Whether replicas meet at the end of this step.
  bool meets(std::size_t step) const { return outer_step().meets(step); }
  /// "block_momentum".
  std::string name() const { return "block_momentum"; }
};
static_assert(mode<block_momentum>);

}  // namespace v0
}  // namespace heddle

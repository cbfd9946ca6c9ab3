// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/outer_step.hpp>

namespace heddle {
inline namespace v0 {
namespace period {

/// @brief A period that follows the loss (AdaComm): long while much is to be learnt, short near the end.
///
/// After a meeting the next period is k = ceil(k_0 sqrt((lr_0 loss) / (lr loss_0))), within [1, most]; with
/// `inside_root` k = ceil(sqrt(k_0 (lr_0 loss) / (lr loss_0))) as PaddlePaddle has it. loss_0 and lr_0 are those of the
/// first meeting after the warm-up that had a loss above 0; without a loss the period stays as it is.
/// Paper: Wang, Joshi 2019.
struct adaptive {
  std::size_t initial = 8;   ///< Period at the start, k_0, at least 1.
  std::size_t most = 16;     ///< Longest period, at least `initial`.
  std::size_t warmup = 0;    ///< Steps at the start in which replicas meet every step.
  bool inside_root = false;  ///< Whether k_0 is under the root.

  /// What changes from meeting to meeting; the same on all ranks, and in checkpoints.
  struct state {
    std::uint64_t last = 0;    ///< Clock of the last meeting.
    std::uint64_t length = 0;  ///< Length of the present period; 0: initial.
    double loss = 0.0;         ///< loss_0; 0: not known yet.
    double lr = 0.0;           ///< lr_0.
  };

  /// Throws: argument_error for a number outside its range.
  void check() const {
    if (initial < 1 || most < initial)
      throw argument_error("heddle::period::adaptive: initial is " + std::to_string(initial) + " and most " +
                           std::to_string(most) + ", allowed is 1 <= initial <= most");
  }
  /// Whether replicas meet at the end of step 0, 1, 2 ...
  bool meets(const state& s, std::size_t step) const noexcept {
    return step < warmup || step + 1 >= (s.last > warmup ? s.last : warmup) + (s.length ? s.length : initial);
  }
  /// Chooses the next period.
  void met(state& s, const meeting_facts& x) const noexcept {
    s.last = x.clock;
    if (x.clock <= warmup || !(x.loss > 0.0) || !std::isfinite(x.loss) || !(x.lr > 0.0)) return;
    if (s.loss == 0.0) {
      s.loss = x.loss;
      s.lr = x.lr;
    }
    const double ratio = s.lr * x.loss / (x.lr * s.loss), k = static_cast<double>(initial);
    s.length = within(std::ceil(inside_root ? std::sqrt(ratio * k) : std::sqrt(ratio) * k));
  }

 private:
  std::uint64_t within(double k) const noexcept {
    return k < static_cast<double>(most) ? static_cast<std::uint64_t>(k < 1.0 ? 1.0 : k) : most;
  }
};

/// @brief A period that follows what meetings cost: as short as keeps their share of the time at `share`.
///
/// After a meeting the next period is k = ceil(meeting_seconds / (share step_seconds)), within [1, most], from the
/// slowest rank's times. Times differ from run to run, and so does the result; choose `every` or `adaptive` where runs
/// must agree bitwise.
struct by_cost {
  double share = 0.1;       ///< Time in meetings per time in steps, above 0.
  std::size_t initial = 8;  ///< Period until something has been measured, at least 1.
  std::size_t most = 64;    ///< Longest period, at least `initial`.

  /// What changes from meeting to meeting; the same on all ranks, and in checkpoints.
  struct state {
    std::uint64_t last = 0;    ///< Clock of the last meeting.
    std::uint64_t length = 0;  ///< Length of the present period; 0: initial.
  };

  /// Throws: argument_error for a number outside its range.
  void check() const {
    if (!(share > 0.0) || !std::isfinite(share))
      throw argument_error("heddle::period::by_cost: share is " + std::to_string(share) + ", allowed is above 0");
    if (initial < 1 || most < initial)
      throw argument_error("heddle::period::by_cost: initial is " + std::to_string(initial) + " and most " +
                           std::to_string(most) + ", allowed is 1 <= initial <= most");
  }
  /// Whether replicas meet at the end of step 0, 1, 2 ...
  bool meets(const state& s, std::size_t step) const noexcept {
    return step + 1 >= s.last + (s.length ? s.length : initial);
  }
  /// Chooses the next period.
  void met(state& s, const meeting_facts& x) const noexcept {
    s.last = x.clock;
    if (!(x.meeting_seconds > 0.0) || !(x.step_seconds > 0.0)) return;
    const double k = std::ceil(x.meeting_seconds / (share * x.step_seconds));
    s.length = k < static_cast<double>(most) ? static_cast<std::uint64_t>(k < 1.0 ? 1.0 : k) : most;
  }
};

}  // namespace period

/// @brief Heuristic model averaging: the period follows what meetings cost, and replicas that fit better count more.
///
/// The articles on Alibaba's PAI name such an average and define none. This is our reading: the period is
/// `period::by_cost` and the weights are `weight::inverse_loss`.
/// Wire:    one all-reduce of the parameters at a meeting.
/// State:   4 bytes per element.
/// Order:   any compressor; momentum of `dgc` is off.
/// Sync:    step() blocks at meetings only.
/// Throws:  argument_error for a number outside its range.
struct heuristic_average {
  double share = 0.1;       ///< Time in meetings per time in steps, above 0.
  std::size_t initial = 8;  ///< Period until something has been measured, at least 1.
  std::size_t most = 64;    ///< Longest period, at least `initial`.
  double loss_power = 1.0;  ///< Replicas weigh samples / loss^loss_power; 0: samples alone.

  static constexpr average averages = average::parameters;  ///< Parameters, as differences.
  static constexpr bool outer_momentum = false;             ///< None.

  /// The case of the family that this is.
  heddle::outer_step<outer::average, weight::inverse_loss, period::by_cost> outer_step() const {
    return {.weights = {loss_power}, .period = {share, initial, most}};
  }
  /// Throws argument_error for a number outside its range.
  void check() const { outer_step().check(); }
  /// "heuristic_average".
  std::string name() const { return "heuristic_average"; }
};
static_assert(mode<heuristic_average>);

}  // namespace v0
}  // namespace heddle

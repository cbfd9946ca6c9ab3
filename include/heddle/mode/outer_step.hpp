// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/concept.hpp>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace heddle {
inline namespace v0 {

/// @brief What all ranks know when they meet; the same on each of them.
struct meeting_facts {
  int ranks = 1;                 ///< How many meet.
  std::uint64_t clock = 0;       ///< Local steps since the beginning.
  double lr = 0.0;               ///< Learning rate of the last step.
  double loss = 0.0;             ///< Mean of step_options::loss since the last meeting, weighted as ranks are; 0: none.
  double step_seconds = 0.0;     ///< Time of a local step since the last meeting, on the slowest rank.
  double meeting_seconds = 0.0;  ///< Time of the last meeting on the rank that came last to it; 0: not known.
};

/// Who counts how much in an average.
namespace weight {

/// In proportion to the samples seen since the last meeting; a rank without samples doesn't count.
struct samples {
  /// @param n Samples since the last meeting. The mean of their losses doesn't matter.
  double of(double n, double) const noexcept { return n; }
};

/// All alike, whatever they saw.
struct equal {
  static constexpr bool same_for_all = true;  ///< Required by outer rules from which replicas restart apart.

  /// 1.
  double of(double, double) const noexcept { return 1.0; }
};

/// Samples, divided by a power of their mean loss, which counts as within [1e-12, 1e12]: replicas that fit better count
/// more. Without a loss above 0 samples alone.
struct inverse_loss {
  double power = 1.0;  ///< 0 or above; 0: samples alone.

  /// Throws: argument_error for a power that is negative or not finite.
  void check() const {
    if (!(power >= 0.0) || !std::isfinite(power))
      throw argument_error("heddle::weight::inverse_loss: power is " + std::to_string(power) +
                           ", allowed is 0 or above");
  }
  /// @param n Samples since the last meeting. @param loss Mean of their losses.
  double of(double n, double loss) const noexcept {
    if (!(loss > 0.0) || !std::isfinite(loss)) return n;
    const double divisor = std::pow(loss, power);
    return n / (divisor < 1e-12 ? 1e-12 : divisor > 1e12 ? 1e12 : divisor);
  }
};

}  // namespace weight

/// When replicas meet.
namespace period {

/// Every so many local steps, after a warm-up in which they meet at every step.
struct every {
  std::size_t steps = 8;   ///< Steps between meetings, at least 1.
  std::size_t warmup = 0;  ///< Steps at the start in which replicas meet every step (post-local SGD).

  /// Throws: argument_error unless steps is 1 or more.
  void check() const {
    if (steps == 0) throw argument_error("heddle::period::every: period is 0, allowed is 1 or more");
  }
  /// Whether replicas meet at the end of step 0, 1, 2 ...
  bool meets(std::size_t step) const {
    check();
    return step < warmup || (step - warmup) % steps == steps - 1;
  }
};

}  // namespace period

/// What is done with the mean of the differences. In all of them `agreed` is the value that replicas agreed on when
/// they met last, and `mean` the weighted mean over ranks of agreed - replica.
namespace outer {

/// Replicas take their average: agreed - mean.
struct average {
  /// The value agreed on next.
  float move(float agreed, float mean, float&, const meeting_facts&) const noexcept { return agreed - mean; }
  /// "average".
  std::string name() const { return "average"; }
};

/// SGD with momentum on the mean difference as a gradient: m = momentum m + mean; agreed - lr m, or with nesterov
/// agreed - lr (mean + momentum m).
struct sgd {
  float lr = 0.7f;        ///< Outer learning rate, 0 or above.
  float momentum = 0.9f;  ///< Outer momentum, in [0, 1).
  bool nesterov = true;   ///< Nesterov's form.

  static constexpr bool momentum_slot = true;  ///< One float per element.

  /// Throws: argument_error for a number outside its range.
  void check() const {
    if (!(lr >= 0.0f) || !std::isfinite(lr))
      throw argument_error("heddle::outer::sgd: lr is " + std::to_string(lr) + ", allowed is 0 or above");
    if (!(momentum >= 0.0f && momentum < 1.0f))
      throw argument_error("heddle::outer::sgd: momentum is " + std::to_string(momentum) + ", allowed is [0, 1)");
  }
  /// The value agreed on next.
  float move(float agreed, float mean, float& m, const meeting_facts&) const noexcept {
    m = momentum * m + mean;
    return agreed - lr * (nesterov ? mean + momentum * m : m);
  }
  /// "sgd".
  std::string name() const { return "sgd"; }
};

/// Slow momentum: m = momentum m + mean / lr_t; agreed - alpha lr_t m, where lr_t is the learning rate of the local
/// steps, so that m doesn't change its meaning when that rate does. While the rate is 0 nothing moves.
struct slow {
  float alpha = 1.0f;     ///< Slow learning rate, 0 or above.
  float momentum = 0.7f;  ///< Slow momentum, in [0, 1).

  static constexpr bool momentum_slot = true;  ///< One float per element.

  /// Throws: argument_error for a number outside its range.
  void check() const { sgd{alpha, momentum}.check(); }
  /// The value agreed on next.
  float move(float agreed, float mean, float& m, const meeting_facts& x) const noexcept {
    const auto rate = static_cast<float>(x.lr);
    if (!(rate > 0.0f)) return agreed;
    m = momentum * m + mean / rate;
    return agreed - alpha * rate * m;
  }
  /// "slow".
  std::string name() const { return "slow"; }
};

/// Block momentum: sgd whose momentum follows the number of ranks, 1 - 1/ranks, unless given.
struct block {
  float lr = 1.0f;         ///< Block learning rate, 0 or above.
  float momentum = -1.0f;  ///< Block momentum, in [0, 1); below 0: 1 - 1/ranks.
  bool nesterov = true;    ///< Nesterov's form.

  static constexpr bool momentum_slot = true;  ///< One float per element.

  /// Throws: argument_error for a number outside its range.
  void check() const { sgd{lr, momentum < 0.0f ? 0.0f : momentum}.check(); }
  /// The value agreed on next.
  float move(float agreed, float mean, float& m, const meeting_facts& x) const noexcept {
    const float mu = momentum < 0.0f ? 1.0f - 1.0f / static_cast<float>(x.ranks) : momentum;
    return sgd{lr, mu, nesterov}.move(agreed, mean, m, x);
  }
  /// "block".
  std::string name() const { return "block"; }
};

/// Elastic averaging: replicas go on from their own values, drawn by alpha = beta / ranks towards the centre, and draw
/// it by as much: agreed - beta mean. Take weight::equal with it.
struct elastic {
  float beta = 0.9f;  ///< In [0, 1]; 0: replicas are independent.

  /// Throws: argument_error for a number outside its range.
  void check() const {
    if (!(beta >= 0.0f && beta <= 1.0f))
      throw argument_error("heddle::outer::elastic: beta is " + std::to_string(beta) + ", allowed is [0, 1]");
  }
  /// The centre's next value.
  float move(float agreed, float mean, float&, const meeting_facts&) const noexcept { return agreed - beta * mean; }
  /// Where a replica goes on. @param before The centre's value before it moved. @param replica The replica's value.
  float restart(float, float before, float replica, const meeting_facts& x) const noexcept {
    return replica + beta / static_cast<float>(x.ranks) * (before - replica);
  }
  /// "elastic".
  std::string name() const { return "elastic"; }
};

/// A sum in instalments: of what a replica has moved, 1/ranks is added to the agreed value at a meeting, and the rest
/// stays with the replica until later ones; join() adds all that is left. Take weight::equal with it.
struct instalments {
  /// The agreed value grows by a part of everybody's moves.
  float move(float agreed, float mean, float&, const meeting_facts&) const noexcept { return agreed - mean; }
  /// The new agreed value, and what hasn't been added yet.
  float restart(float agreed, float before, float replica, const meeting_facts& x) const noexcept {
    return agreed + (1.0f - 1.0f / static_cast<float>(x.ranks)) * (replica - before);
  }
  /// What all replicas take when everybody has joined: nothing is left.
  float flush(float agreed, float mean, float&, const meeting_facts& x) const noexcept {
    return agreed - static_cast<float>(x.ranks) * mean;
  }
  /// "instalments".
  std::string name() const { return "instalments"; }
};

}  // namespace outer

/// @brief The family of modes in which replicas train alone and meet now and then: an outer optimizer takes the mean of
/// their differences as a gradient.
///
/// At a meeting, with w the value agreed on last, w_i the replica of rank i and a_i its weight:
///
///     mean = sum_i (a_i / sum a) (w - w_i);   w = outer.move(w, mean);   w_i = w, or outer.restart(...)
///
/// `local_sgd`, `diloco`, `slow_momentum`, `block_momentum`, `elastic_sgd`, `geo_sgd` and `heuristic_average` are named
/// cases: each gives its own as outer_step(). An outer rule of your own needs move() and, where it has a momentum,
/// `momentum_slot`, and a name() for checkpoints to tell it from others; a period needs meets(step), or state of its own
/// (see period::adaptive).
///
///     hd::outer_step{.outer = hd::outer::sgd{.lr = 0.5f}, .weights = hd::weight::equal{}, .period =
///     hd::period::every{16}}
///
/// The compressor works on w - w_i. Optimizer state stays local. A rank whose local gradient isn't finite skips that
/// step alone (its samples don't count); if a mean difference isn't finite, every rank returns to w.
/// Wire:    one all-reduce of the parameters at a meeting.
/// State:   4 bytes per element (w), 8 with an outer momentum.
/// Traffic: 28 bytes per element at a meeting beside the all-reduce, 36 with an outer momentum.
/// Order:   any compressor; momentum of `dgc` is off, and it refuses an outer momentum. Rules whose replicas go on apart
///          need an elementwise one (none, cast) without a transform.
/// Sync:    step() blocks at meetings only.
/// Throws:  argument_error for a number outside its range.
template <class Outer = outer::average, class Weights = weight::samples, class Period = period::every>
struct outer_step {
  Outer outer{};      ///< What is done with the mean difference.
  Weights weights{};  ///< Who counts how much in it.
  Period period{};    ///< When replicas meet.

  static_assert(
      !requires(const Outer& o, const meeting_facts& x) { o.restart(0.0f, 0.0f, 0.0f, x); } ||
          requires { requires Weights::same_for_all; },
      "heddle::outer_step: .outer lets replicas go on apart, so .weights must be weight::equal{}; see docs/mode.md");

  static constexpr average averages = average::parameters;  ///< Parameters, as differences.
  /// Whether the outer rule has a momentum.
  static constexpr bool outer_momentum = requires { requires Outer::momentum_slot; };

  /// Throws: argument_error for a number outside its range.
  void check() const {
    if constexpr (requires { outer.check(); }) outer.check();
    if constexpr (requires { weights.check(); }) weights.check();
    if constexpr (requires { period.check(); }) period.check();
  }
  /// Whether replicas meet at the end of this step, for a period without state.
  bool meets(std::size_t step) const
    requires requires(const Period& p) { p.meets(step); }
  {
    return period.meets(step);
  }
  /// "outer_step", and the outer rule's name if it has one: a momentum of one rule is none of another's.
  std::string name() const {
    std::string all = "outer_step";
    if constexpr (requires { outer.name(); }) all += " of " + outer.name();
    return all;
  }
};

}  // namespace v0
}  // namespace heddle

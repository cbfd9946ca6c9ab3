// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/memory/buffer.hpp>
#include <heddle/mode/outer_step.hpp>
#include <heddle/trainer/detail/checkpoint.hpp>
#include <heddle/trainer/detail/tell.hpp>

#include <chrono>
#include <limits>

namespace heddle {
inline namespace v0 {
namespace detail {

// A mode as a case of the family. A mode that only says when replicas meet averages them.
template <class Mode> auto family_of(const Mode& m) {
  if constexpr (requires { m.outer_step(); })
    return m.outer_step();
  else if constexpr (requires { m.outer, m.weights, m.period; })
    return m;
  else
    return outer_step<outer::average, weight::samples, Mode>{.period = m};
}

template <class Period> auto state_of_period() {
  if constexpr (requires { typename Period::state; })
    return typename Period::state{};
  else
    return std::uint64_t{0};  // not used
}

struct meeting {
  bool everybody = false;  // all ranks have joined
  bool counted = false;    // somebody counted
  bool taken = false;      // and the average was finite
};

// Replicas that drift apart: what they agreed on when they met last, the outer optimizer, and what has happened since.
template <class Mode, class Memory> class drift {
  using family = decltype(family_of(std::declval<const Mode&>()));
  using outer_type = std::remove_cvref_t<decltype(family::outer)>;
  using period_type = std::remove_cvref_t<decltype(family::period)>;
  using period_state = decltype(state_of_period<period_type>());
  static constexpr bool period_has_state = requires { typename period_type::state; };
  static_assert(
      std::is_trivially_copyable_v<period_state> && sizeof(period_state) <= sizeof(counters::period),
      "heddle::data_parallel: the state of a period must be trivially copyable and at most 32 bytes; see docs/mode.md");

 public:
  static constexpr bool has_momentum = family::outer_momentum;

  drift(const Mode& mode, const Memory& memory, std::size_t elements)
      : family_(family_of(mode)), agreed_(memory, elements), momentum_(memory, has_momentum ? elements : 0) {
    std::fill(momentum_.begin(), momentum_.end(), 0.0f);
  }

  float* agreed(std::size_t at) noexcept { return agreed_.data() + at; }
  const float* agreed(std::size_t at) const noexcept { return agreed_.data() + at; }
  float* momentum(std::size_t at) noexcept { return momentum_.data() + at; }
  std::size_t bytes() const noexcept { return agreed_.bytes() + momentum_.bytes(); }
  std::uint64_t clock() const noexcept { return clock_; }

  // A local step has been taken.
  void add(double samples, double loss) noexcept {
    samples_ += samples;
    if (loss > 0.0) loss_ += samples * loss;
  }

  // Whether replicas meet at the end of the step that ends now.
  bool tick(float lr) {
    if (lr > 0.0f) lr_ = lr;  // steps at rate 0 move nothing: what replicas moved by is the last rate above 0
    const std::uint64_t step = clock_++;
    if constexpr (period_has_state)
      return family_.period.meets(period_, step);
    else
      return family_.period.meets(step);
  }

  // What this rank brings to a meeting.
  void announce(announcement& a) const {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since_).count();
    a.samples = weight(samples_, loss_);
    a.lr = lr_;
    a.loss = samples_ > 0.0 ? static_cast<float>(loss_ / samples_) : 0.0f;
    a.step_seconds = clock_ > met_at_ ? static_cast<float>(seconds / static_cast<double>(clock_ - met_at_)) : 0.0f;
    a.meeting_seconds = meeting_seconds_;
  }

  // Averages the differences from what was agreed last, in the exchange that has just begun, and lets the outer rule
  // take the mean. If it can't be taken, replicas return to what was agreed.
  template <class Averager>
  meeting meet(Averager& average, const std::vector<float*>& replica, const std::vector<piece>& whole) {
    const double waited = average.exposed_seconds();
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const float *const old = agreed(whole[i].state), *const p = replica[i];
      float* const d = average.result(i);
      for (std::size_t k = 0; k < whole[i].count; ++k) d[k] = old[k] - p[k];
      average.ready(i);
    }
    average.wait();
    const meeting m{average.all_joined(), average.counted(), average.counts()};
    average.settle(m.taken);
    const meeting_facts x = facts(average.announced(), m.everybody);
    for (std::size_t i = 0; i < whole.size(); ++i)
      move(whole[i].state, whole[i].count, replica[i], average.result(i), x, m);
    if (m.everybody) clock_ = x.clock;  // periods begin together again
    if constexpr (period_has_state) family_.period.met(period_, x);
    samples_ = loss_ = 0.0;
    met_at_ = clock_;
    meeting_seconds_ = static_cast<float>(average.exposed_seconds() - waited);
    since_ = std::chrono::steady_clock::now();
    return m;
  }

  counters save(counters c) const {
    c.drift_samples = samples_;
    c.drift_loss = loss_;
    c.drift_lr = static_cast<double>(lr_);
    if constexpr (period_has_state) std::memcpy(c.period, &period_, sizeof period_);
    return c;
  }
  void load(const counters& c) {
    clock_ = met_at_ = c.clock;
    samples_ = c.drift_samples;
    loss_ = c.drift_loss;
    lr_ = static_cast<float>(c.drift_lr);
    if constexpr (period_has_state) std::memcpy(&period_, c.period, sizeof period_);
    meeting_seconds_ = 0.0f;
    since_ = std::chrono::steady_clock::now();
  }

  // Another number of ranks: what each saved rank counts in the meeting that they hold first, and what it gives.
  std::vector<double> weights(const std::vector<saved>& old) const {
    std::vector<double> all;
    double sum = 0.0;
    for (const saved& s : old) sum += all.emplace_back(weight(s.counts.drift_samples, s.counts.drift_loss));
    for (double& w : all) w = sum > 0.0 ? w / sum : 0.0;
    return all;
  }
  float settle(float agreed, double mean, std::size_t ranks) const {
    const meeting_facts x{.ranks = static_cast<int>(ranks)};
    float unused = 0.0f;
    if constexpr (requires { family_.outer.flush(agreed, agreed, unused, x); })
      return family_.outer.flush(agreed, static_cast<float>(mean), unused, x);
    else if constexpr (!has_momentum)
      return family_.outer.move(agreed, static_cast<float>(mean), unused, x);
    else
      return static_cast<float>(agreed - mean);
  }

 private:
  // What all ranks know, from what all announced; unless everybody has joined, those who have don't decide.
  static meeting_facts facts(const std::vector<announcement>& all, bool everybody) {
    meeting_facts x{.ranks = static_cast<int>(all.size())};
    double weights = 0.0, shortest = std::numeric_limits<double>::infinity();
    for (const announcement& a : all) {
      if (a.loss > 0.0f) {
        x.loss += a.samples * static_cast<double>(a.loss);
        weights += a.samples;
      }
      if (a.joined && !everybody) continue;
      x.clock = (std::max)(x.clock, a.clock);
      x.lr = (std::max)(x.lr, static_cast<double>(a.lr));
      x.step_seconds = (std::max)(x.step_seconds, static_cast<double>(a.step_seconds));
      shortest = (std::min)(shortest, static_cast<double>(a.meeting_seconds));
    }
    x.loss = weights > 0.0 ? x.loss / weights : 0.0;
    x.meeting_seconds = shortest;
    return x;
  }

  void move(std::size_t at, std::size_t n, float* replica, const float* mean, const meeting_facts& x,
            const meeting& met) {
    const outer_type rule = family_.outer;
    float *const w = agreed(at), *const m = has_momentum ? momentum(at) : nullptr;
    float none = 0.0f;
    for (std::size_t k = 0; k < n; ++k) {
      const float before = w[k];
      float& slot = m ? m[k] : none;
      if (met.taken) w[k] = met.everybody ? flush(rule, before, mean[k], slot, x) : rule.move(before, mean[k], slot, x);
      if constexpr (requires { rule.restart(before, before, before, x); }) {
        if (met.taken && !met.everybody) {
          replica[k] = rule.restart(w[k], before, replica[k], x);
          continue;
        }
      }
      replica[k] = w[k];
    }
  }

  static float flush(const outer_type& rule, float agreed, float mean, float& m, const meeting_facts& x) {
    if constexpr (requires { rule.flush(agreed, mean, m, x); })
      return rule.flush(agreed, mean, m, x);
    else
      return rule.move(agreed, mean, m, x);
  }
  double weight(double samples, double loss) const {
    return family_.weights.of(samples, samples > 0.0 ? loss / samples : 0.0);
  }

  family family_;
  period_state period_{};
  buffer<float, Memory> agreed_, momentum_;
  std::uint64_t clock_ = 0, met_at_ = 0;  // local steps, skipped ones too, aligned when all have joined
  double samples_ = 0.0, loss_ = 0.0;     // since the last meeting; loss times samples
  float lr_ = 0.0f, meeting_seconds_ = 0.0f;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

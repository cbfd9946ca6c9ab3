// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/schedule.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Dynamic programming over (memory, first layer, last layer): the least time to take layers s..t forward and back, when
// the input of s is held by somebody else. `all` keeps what layer s needs for its backward and goes on behind it;
// a number j keeps only the input of s, runs on to j, takes j..t forward and back, then s..j-1.
//
// Bytes are counted in units, each size rounded up, so that the true peak never exceeds the budget.
class chain_optimum {
 public:
  chain_optimum(std::span<const recompute::layer_cost> costs, std::size_t budget, std::size_t unit)
      : n_(costs.size()), units_(budget / unit), costs_(costs) {
    const auto rounded = [&](std::size_t bytes) { return bytes / unit + (bytes % unit != 0); };
    output_.resize(n_ + 1);
    saved_.resize(n_);
    for (std::size_t i = 0; i < n_; ++i) {
      output_[i + 1] = rounded(costs[i].output_bytes);
      saved_[i] = rounded(costs[i].saved_bytes);
      sums_.push_back((sums_.empty() ? 0.0 : sums_.back()) + costs[i].forward_time);
    }
    time_.assign((units_ + 1) * n_ * n_, never);
    choice_.assign(time_.size(), 0);
    for (std::size_t length = 1; length <= n_; ++length) {
      for (std::size_t s = 0; s + length <= n_; ++s) {
        for (std::size_t m = 0; m <= units_; ++m) decide(m, s, s + length - 1);
      }
    }
  }

  bool feasible() const { return time_[at(units_, 0, n_ - 1)] < never; }
  double time() const { return time_[at(units_, 0, n_ - 1)]; }

  template <class Schedule> Schedule plan() const {
    Schedule out;
    emit(out, units_, 0, n_ - 1);
    return out;
  }

 private:
  static constexpr double never = (std::numeric_limits<double>::max)();
  static constexpr std::uint32_t all = 0;

  std::size_t at(std::size_t m, std::size_t s, std::size_t t) const { return (s * n_ + t) * (units_ + 1) + m; }
  double forward(std::size_t from, std::size_t to) const {  // time of layers from..to - 1
    return (to ? sums_[to - 1] : 0.0) - (from ? sums_[from - 1] : 0.0);
  }
  // The gradient of layer t's output, while it is the chain's to hold.
  std::size_t gradient(std::size_t t) const { return t + 1 < n_ ? output_[t + 1] : 0; }
  // The gradient of layer s's input.
  std::size_t below(std::size_t s) const { return s > 0 ? output_[s] : 0; }

  void decide(std::size_t m, std::size_t s, std::size_t t) {
    double best = never;
    std::uint32_t how = all;
    const std::size_t kept = output_[s + 1] + saved_[s];
    if (s == t) {
      const std::size_t last_output = t + 1 == n_ ? output_[t + 1] : 0;  // stays until its backward
      const std::size_t need = (std::max)(gradient(t) + kept, gradient(t) + saved_[s] + last_output + below(s));
      if (need <= m) best = costs_[s].forward_time + costs_[s].backward_time;
    } else {
      const std::size_t need = (std::max)(gradient(t) + kept, gradient(s) + saved_[s] + below(s));
      if (need <= m) {
        const double behind = time_[at(m - kept, s + 1, t)];
        if (behind < never) best = costs_[s].forward_time + costs_[s].backward_time + behind;
      }
      std::size_t running = output_[s + 1];  // while layers s..j-1 run forward
      for (std::size_t j = s + 1; j <= t; ++j) {
        if (j > s + 1) running = (std::max)(running, output_[j - 1] + output_[j]);
        if (gradient(t) + running > m || output_[j] > m) break;
        const double behind = time_[at(m - output_[j], j, t)], before = time_[at(m, s, j - 1)];
        if (behind == never || before == never) continue;
        const double total = forward(s, j) + behind + before;
        if (total < best) {
          best = total;
          how = static_cast<std::uint32_t>(j);
        }
      }
    }
    time_[at(m, s, t)] = best;
    choice_[at(m, s, t)] = how;
  }

  template <class Schedule> void emit(Schedule& out, std::size_t m, std::size_t s, std::size_t t) const {
    const std::uint32_t how = choice_[at(m, s, t)];
    if (s == t) {
      out.steps.push_back({recompute::action::forward_keep_all, s});
      if (s + 1 < n_) out.steps.push_back({recompute::action::drop, s});
      out.steps.push_back({recompute::action::backward, s});
    } else if (how == all) {
      out.steps.push_back({recompute::action::forward_keep_all, s});
      emit(out, m - output_[s + 1] - saved_[s], s + 1, t);
      out.steps.push_back({recompute::action::backward, s});
    } else {
      out.steps.push_back({recompute::action::forward_keep_input, s});
      for (std::size_t i = s + 1; i < how; ++i) out.steps.push_back({recompute::action::forward_drop, i});
      emit(out, m - output_[how], how, t);
      emit(out, m, s, how - 1);
    }
  }

  std::size_t n_, units_;
  std::span<const recompute::layer_cost> costs_;
  std::vector<std::size_t> output_, saved_;  // in units; output_[i] is the input of layer i
  std::vector<double> sums_, time_;
  std::vector<std::uint32_t> choice_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

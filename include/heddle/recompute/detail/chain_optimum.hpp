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

// What is held between two layers of a chain: the outputs that some layer behind reads. Bytes are counted in units,
// each size rounded up, so that the true peak never exceeds a budget that is rounded down.
class chain_states {
 public:
  chain_states(std::span<const recompute::layer_cost> costs, std::size_t unit)
      : n_(costs.size()), costs_(costs), fresh_(n_ * n_), last_reader_(n_), gradients_(n_) {
    check_reads(costs);
    const auto rounded = [&](std::size_t bytes) { return bytes / unit + (bytes % unit != 0); };
    std::vector<std::size_t> final_reader(n_);
    for (std::size_t i = 0; i < n_; ++i) {
      const recompute::layer_cost& c = costs[i];
      output_.push_back(rounded(c.output_bytes));
      saved_.push_back(rounded(c.saved_bytes));
      const bool spare = i + 1 == n_ || !(c.restore_time > 0);
      const bool skips = i + 1 < n_ && c.saved_bytes == 0;  // backward needs nothing but its input
      std::size_t read = i > 0 ? output_[i - 1] : 0;
      if (i > 0) final_reader[i - 1] = i;
      for (const std::size_t j : c.also_reads) {
        final_reader[j] = i;
        read += output_[j];
      }
      forward_.push_back(output_[i] + rounded(c.forward_workspace));
      alone_.push_back(skips ? 0 : (spare ? output_[i] : 0) + saved_[i] + rounded(c.forward_workspace));
      backward_.push_back(read + saved_[i] + rounded(c.backward_workspace));
      again_.push_back(i + 1 == n_ ? c.forward_time : skips ? 0.0 : c.again());
    }
    for (std::size_t j = 0; j < n_; ++j) {
      for (std::size_t t = j; t < final_reader[j]; ++t) gradients_[t] += output_[j];
    }
  }

  std::size_t size() const { return n_; }
  // From here on layers after t don't count as readers: their backward has run. Called for t = 0, 1, 2 ...
  void advance(std::size_t t) {
    const auto reads = [&](std::size_t j) {
      for (std::size_t k = (std::max)(last_reader_[j], j) + 1; k <= t; ++k) {
        for (std::size_t s = 0; s <= j; ++s) fresh_[s * n_ + k] += output_[j];
      }
      last_reader_[j] = t;
    };
    if (t > 0) reads(t - 1);
    for (const std::size_t j : costs_[t].also_reads) reads(j);
  }
  // What lies between layers s and j for layers j..t, when somebody holds what is there before s.
  std::size_t fresh(std::size_t s, std::size_t j) const { return fresh_[s * n_ + j]; }
  // The same, computed anew for any t.
  std::size_t fresh(std::size_t s, std::size_t j, std::size_t t) const {
    std::vector<bool> read(n_);
    for (std::size_t i = j; i <= t; ++i) {
      if (i > 0) read[i - 1] = true;
      for (const std::size_t k : costs_[i].also_reads) read[k] = true;
    }
    std::size_t sum = 0;
    for (std::size_t k = s; k < j; ++k) sum += read[k] ? output_[k] : 0;
    return sum;
  }
  // The gradients that layers up to t wait for while t runs back; at the end they are the caller's.
  std::size_t gradients(std::size_t t) const { return gradients_[t]; }
  // Kept by a layer that keeps all.
  std::size_t kept(std::size_t s) const { return output_[s] + saved_[s]; }
  // To run forward, beside what lies before it.
  std::size_t forward(std::size_t s) const { return forward_[s]; }
  // Least bytes for s alone, forward and back.
  std::size_t alone(std::size_t s) const {
    const std::size_t last = s + 1 == n_ ? output_[s] : 0;  // stays until its backward
    return gradients(s) + (std::max)(alone_[s], backward_[s] + last);
  }
  // Least bytes for s beside what follows when it keeps all, up to layer t.
  std::size_t keeping(std::size_t s, std::size_t t) const {
    return (std::max)(gradients(t) + forward_[s] + saved_[s], gradients(s) + backward_[s]);
  }
  double again(std::size_t s) const { return again_[s]; }

 private:
  std::size_t n_;
  std::span<const recompute::layer_cost> costs_;
  std::vector<std::size_t> output_, saved_, forward_, alone_, backward_, fresh_, last_reader_, gradients_;
  std::vector<double> again_;
};

// A choice for layers s..t, when what lies before s is held by somebody else: `all` keeps what layer s needs for its
// backward and goes on behind it; a number j keeps only the input of s, runs on to j, takes j..t forward and back, then
// s..j - 1.
class chain_choices {
 public:
  static constexpr std::uint32_t all = 0;

  chain_choices(std::span<const recompute::layer_cost> costs, std::size_t unit) : costs_(costs), states_(costs, unit) {}

 protected:
  std::size_t at(std::size_t s, std::size_t t) const { return s * states_.size() - s * (s + 1) / 2 + t; }

  // choose(m, s, t) is the choice with m units.
  template <class Schedule, class Choose>
  void emit(Schedule& out, std::size_t m, std::size_t s, std::size_t t, const Choose& choose) const {
    using recompute::action;
    if (s == t) {
      if (s + 1 == states_.size())
        out.steps.push_back({action::forward_keep_all, s});
      else if (costs_[s].saved_bytes != 0)
        out.steps.push_back({action::restore, s});
      out.steps.push_back({action::backward, s});
      return;
    }
    const std::uint32_t how = choose(m, s, t);
    if (how == all) {
      out.steps.push_back({action::forward_keep_all, s});
      emit(out, m - states_.kept(s), s + 1, t, choose);
      out.steps.push_back({action::backward, s});
    } else {
      out.steps.push_back({action::forward_keep_input, s});
      for (std::size_t i = s + 1; i < how; ++i) out.steps.push_back({action::forward_drop, i});
      emit(out, m - states_.fresh(s, how, t), how, t, choose);
      emit(out, m, s, how - 1, choose);
    }
  }

  std::span<const recompute::layer_cost> costs_;
  chain_states states_;
};

// The least bytes in which layers go forward and back, whatever the time.
class chain_minimum : chain_choices {
 public:
  explicit chain_minimum(std::span<const recompute::layer_cost> costs) : chain_choices(costs, 1) {
    const std::size_t n = costs.size();
    least_.resize(n * (n + 1) / 2);
    choice_.resize(least_.size());
    for (std::size_t t = 0; t < n; ++t) {
      states_.advance(t);
      least_[at(t, t)] = states_.alone(t);
      for (std::size_t s = t; s-- > 0;) {
        std::size_t best = (std::max)(states_.keeping(s, t), states_.kept(s) + least_[at(s + 1, t)]);
        std::uint32_t how = all;
        std::size_t running = 0;
        for (std::size_t j = s + 1; j <= t; ++j) {
          running = (std::max)(running, states_.fresh(s, j - 1) * (j > s + 1) + states_.forward(j - 1));
          const std::size_t need = (std::max)(
              {states_.gradients(t) + running, states_.fresh(s, j) + least_[at(j, t)], least_[at(s, j - 1)]});
          if (need < best) {
            best = need;
            how = static_cast<std::uint32_t>(j);
          }
        }
        least_[at(s, t)] = best;
        choice_[at(s, t)] = how;
      }
    }
  }

  // The layer that needs most by itself, and how much.
  std::size_t largest_layer() const {
    std::size_t most = 0;
    for (std::size_t i = 1; i < states_.size(); ++i) {
      if (states_.alone(i) > states_.alone(most)) most = i;
    }
    return most;
  }
  std::size_t alone(std::size_t layer) const { return states_.alone(layer); }

  template <class Schedule> Schedule plan() const {
    Schedule out;
    emit(out, static_cast<std::size_t>(-1), 0, states_.size() - 1,
         [&](std::size_t, std::size_t s, std::size_t t) { return choice_[at(s, t)]; });
    return out;
  }

 private:
  std::vector<std::size_t> least_;
  std::vector<std::uint32_t> choice_;
};

// Dynamic programming over (memory, first layer, last layer): the least time.
class chain_optimum : chain_choices {
 public:
  chain_optimum(std::span<const recompute::layer_cost> costs, std::size_t budget, std::size_t unit)
      : chain_choices(costs, unit), units_(budget / unit) {
    const std::size_t n = costs.size();
    std::vector<double> sums(n + 1);
    for (std::size_t i = 0; i < n; ++i) sums[i + 1] = sums[i] + costs[i].forward_time;
    time_.assign((units_ + 1) * n * (n + 1) / 2, never);
    choice_.assign(time_.size(), all);
    for (std::size_t t = 0; t < n; ++t) {
      states_.advance(t);
      double* const alone = row(t, t);
      for (std::size_t m = states_.alone(t); m <= units_; ++m) alone[m] = states_.again(t) + costs[t].backward_time;
      for (std::size_t s = t; s-- > 0;) decide(s, t, sums);
    }
  }

  bool feasible() const { return time_[at(0, states_.size() - 1) * (units_ + 1) + units_] < never; }

  template <class Schedule> Schedule plan() const {
    Schedule out;
    emit(out, units_, 0, states_.size() - 1,
         [&](std::size_t m, std::size_t s, std::size_t t) { return choice_[at(s, t) * (units_ + 1) + m]; });
    return out;
  }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();

  double* row(std::size_t s, std::size_t t) { return time_.data() + at(s, t) * (units_ + 1); }

  void decide(std::size_t s, std::size_t t, const std::vector<double>& sums) {
    double* const best = row(s, t);
    std::uint32_t* const how = choice_.data() + at(s, t) * (units_ + 1);
    const std::size_t kept = states_.kept(s);
    const double own = costs_[s].forward_time + costs_[s].backward_time;
    const double* const next = row(s + 1, t);
    for (std::size_t m = (std::max)(states_.keeping(s, t), kept); m <= units_; ++m) best[m] = own + next[m - kept];
    std::size_t running = 0;
    for (std::size_t j = s + 1; j <= t; ++j) {
      running = (std::max)(running, states_.fresh(s, j - 1) * (j > s + 1) + states_.forward(j - 1));
      const std::size_t held = states_.fresh(s, j), first = (std::max)(states_.gradients(t) + running, held);
      if (first > units_) break;
      const double* const behind = row(j, t);
      const double* const before = row(s, j - 1);
      const double again = sums[j] - sums[s];
      for (std::size_t m = first; m <= units_; ++m) {
        const double total = again + behind[m - held] + before[m];
        how[m] = total < best[m] ? static_cast<std::uint32_t>(j) : how[m];
        best[m] = total < best[m] ? total : best[m];
      }
    }
  }

  std::size_t units_;
  std::vector<double> time_;
  std::vector<std::uint32_t> choice_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

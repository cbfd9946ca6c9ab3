// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/detail/chain_optimum.hpp>
#include <heddle/recompute/none.hpp>
#include <heddle/recompute/revolve.hpp>
#include <heddle/recompute/simulate.hpp>
#include <heddle/recompute/sqrt.hpp>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief No schedule of these layers fits the budget.
class budget_error : public argument_error {
 public:
  /// @param budget Bytes allowed. @param least The least budget for which there is a plan. @param layer The layer that
  /// needs most by itself. @param name Its name, may be empty. @param need Bytes that it needs.
  budget_error(std::size_t budget, std::size_t least, std::size_t layer, const std::string& name, std::size_t need)
      : argument_error("heddle::recompute::optimal: no schedule fits " + std::to_string(budget) + " bytes; " +
                       std::to_string(least) + " is the least budget, layer " + std::to_string(layer) +
                       (name.empty() ? std::string{} : " (" + name + ")") + " needs " + std::to_string(need) +
                       (need > budget ? " by itself" : " by itself, more than any other")),
        least_(least),
        layer_(layer),
        layer_bytes_(need) {}

  /// The least budget for which there is a plan.
  std::size_t least() const noexcept { return least_; }
  /// The layer that needs most by itself.
  std::size_t layer() const noexcept { return layer_; }
  /// Bytes that it needs: its saved block, its inputs' and its output's gradients, its workspaces.
  std::size_t layer_bytes() const noexcept { return layer_bytes_; }

 private:
  std::size_t least_, layer_, layer_bytes_;
};

/// @brief The leanest schedule, whatever its time; its simulated peak is the least budget of `optimal`.
struct leanest {
  /// The schedule for these layers.
  template <class Schedule = schedule> Schedule plan(std::span<const layer_cost> costs) const {
    return costs.empty() ? Schedule{} : heddle::detail::chain_minimum(costs).plan<Schedule>();
  }

  friend constexpr bool operator==(const leanest&, const leanest&) = default;
};

/// @brief The fastest schedule whose peak stays within a budget, for layers of any sizes and times.
///
/// It weighs, layer by layer, keeping everything against keeping the input against running again from further back,
/// with the exact bytes that a chain holds. Sizes are rounded up to `resolution` parts of the budget, unless their
/// common divisor, or that of the sizes that make up most bytes, allows to be exact; the schedules of `none`, `every`
/// and `revolve` are candidates too, so that it is never slower than these within the same budget. What is called
/// optimal is so among schedules that, once they keep something, keep it until its backward.
///
/// State:   at most `budget` bytes, as `simulate` counts them and a chain holds them.
/// Traffic: planning takes n^3 / 6 * resolution steps, a nanosecond each, and 6 n^2 resolution bytes for n layers.
/// Paper:   Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains", arXiv
///          1911.13214; the gradient of the output counts here, and the output of a layer that is recomputed is
///          dropped.
/// Throws:  `budget_error` from plan() naming the least budget and the layer that needs most; `argument_error` if
///          `resolution` is 0 or above 100000, or a time negative or not finite.
struct optimal {
  std::size_t budget = 0;        ///< Bytes that the chain may hold at once.
  std::size_t resolution = 500;  ///< Parts of the budget in which sizes are counted, where no divisor is exact.

  /// The schedule for these layers.
  template <class Schedule = schedule> Schedule plan(std::span<const layer_cost> costs) const {
    if (resolution == 0 || resolution > 100000) {
      throw argument_error("heddle::recompute::optimal: .resolution is " + std::to_string(resolution) +
                           ", allowed is 1 to 100000");
    }
    const std::size_t n = costs.size();
    Schedule best;
    if (n == 0) return best;
    check_times(costs);
    double best_time = (std::numeric_limits<double>::max)();
    std::size_t least = (std::numeric_limits<std::size_t>::max)();
    const auto consider = [&](Schedule s) {  // returns by how much it exceeds the budget
      const simulation cost = simulate(s, costs);
      least = (std::min)(least, cost.peak_bytes);
      if (cost.peak_bytes > budget) return cost.peak_bytes - budget;
      if (cost.forward_time < best_time) {
        best_time = cost.forward_time;
        best = std::move(s);
      }
      return std::size_t{0};
    };
    if (consider(none{}.plan<Schedule>(costs)) == 0) return best;  // nothing is faster
    consider(leanest{}.plan<Schedule>(costs));
    for (std::size_t k = 1; k <= n; ++k) {
      consider(every{k}.plan<Schedule>(costs));
      consider(revolve{k}.plan<Schedule>(costs));
    }
    // What the program doesn't count, outputs kept because they are computed once, is taken off its budget.
    std::size_t room = budget;
    for (int attempt = 0; attempt < 8; ++attempt) {
      const heddle::detail::chain_optimum dynamic(costs, room, unit(costs));
      const std::size_t over = dynamic.feasible() ? consider(dynamic.plan<Schedule>()) : 0;
      if (over == 0 || over > room) break;
      room -= over;
    }
    if (best.steps.empty()) fail(costs, least);
    return best;
  }

  friend constexpr bool operator==(const optimal&, const optimal&) = default;

 private:
  static void check_times(std::span<const layer_cost> costs) {
    for (std::size_t i = 0; i < costs.size(); ++i) {
      for (const double time : {costs[i].forward_time, costs[i].backward_time, costs[i].restore_time}) {
        if (time >= 0 && time <= (std::numeric_limits<float>::max)()) continue;
        throw argument_error("heddle::recompute::optimal: layer " + std::to_string(i) + " has a time of " +
                             std::to_string(time) + ", allowed are finite times of 0 or above");
      }
    }
  }

  // Sizes are counted in units of their common divisor, where that isn't too fine. Else a few odd sizes are rounded up,
  // and those that make up most of the bytes fill whole units.
  std::size_t unit(std::span<const layer_cost> costs) const {
    std::map<std::size_t, std::size_t> total;  // bytes of all blocks of one size
    for (const layer_cost& c : costs) {
      for (const std::size_t bytes : {c.output_bytes, c.saved_bytes, c.forward_workspace, c.backward_workspace})
        total[bytes] += bytes;
    }
    std::vector<std::pair<std::size_t, std::size_t>> sizes;
    for (const auto& [bytes, sum] : total) sizes.emplace_back(sum, bytes);
    std::sort(sizes.rbegin(), sizes.rend());
    std::size_t divisor = 0;
    bool exact = true;
    for (const auto& [sum, bytes] : sizes) {
      const std::size_t finer = std::gcd(divisor, bytes);
      if (finer != 0 && budget / finer > resolution)
        exact = false;
      else
        divisor = finer;
    }
    if (exact) return (std::max)(divisor, std::size_t{1});
    if (divisor == 0) return (std::max)(budget / resolution, std::size_t{1});
    const std::size_t parts = resolution / (budget / divisor + 1);
    return parts > 1 ? (divisor + parts - 1) / parts : divisor;
  }

  [[noreturn]] void fail(std::span<const layer_cost> costs, std::size_t least) const {
    const heddle::detail::chain_minimum minimum(costs);
    const std::size_t layer = minimum.largest_layer();
    throw budget_error(budget, least, layer, costs[layer].name, minimum.alone(layer));
  }
};

static_assert(policy<optimal> && policy<leanest>);

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

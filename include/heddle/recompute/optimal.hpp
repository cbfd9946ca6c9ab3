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
#include <numeric>
#include <span>
#include <string>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief No schedule of these layers fits the budget.
class budget_error : public argument_error {
 public:
  /// @param budget Bytes allowed. @param least Bytes of the leanest schedule found. @param layer The layer that needs
  /// most by itself. @param need Bytes that it needs.
  budget_error(std::size_t budget, std::size_t least, std::size_t layer, std::size_t need)
      : argument_error("heddle::recompute::optimal: no schedule fits " + std::to_string(budget) +
                       " bytes; the leanest one found takes " + std::to_string(least) + ", of which layer " +
                       std::to_string(layer) + ", the largest, needs " + std::to_string(need) + " by itself"),
        least_(least),
        layer_(layer) {}

  /// Bytes of the leanest schedule found.
  std::size_t least() const noexcept { return least_; }
  /// The layer that needs most by itself.
  std::size_t layer() const noexcept { return layer_; }

 private:
  std::size_t least_, layer_;
};

/// @brief The fastest schedule whose peak stays within a budget, for layers of any sizes and times.
///
/// It weighs, layer by layer, keeping everything against keeping the input against running again from further back,
/// with the exact bytes that a chain holds. Sizes are rounded up to `resolution` parts of the budget, unless their
/// common divisor allows to be exact; the schedules of `none`, `every` and `revolve` are candidates too, so that it is
/// never slower than these within the same budget. What is called optimal is so among schedules that, once they keep
/// something, keep it until its backward.
///
/// State:   at most `budget` bytes, as `simulate` counts them and a chain holds them.
/// Traffic: planning takes n^3 / 6 * resolution steps and 12 n^2 resolution bytes for n layers.
/// Paper:   Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains", arXiv
///          1911.13214; the gradient of the output counts here, and the output of a layer that is recomputed is
///          dropped.
/// Throws:  `budget_error` from plan() naming the least budget found and the largest layer; `argument_error` if
///          `resolution` is 0 or above 100000.
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
    double best_time = (std::numeric_limits<double>::max)();
    std::size_t leanest = (std::numeric_limits<std::size_t>::max)();
    const auto consider = [&](Schedule s) {
      const simulation cost = simulate(s, costs);
      leanest = (std::min)(leanest, cost.peak_bytes);
      if (cost.peak_bytes > budget || cost.forward_time >= best_time) return;
      best_time = cost.forward_time;
      best = std::move(s);
    };
    consider(none{}.plan<Schedule>(costs));
    if (!best.steps.empty()) return best;  // nothing is faster
    for (std::size_t k = 1; k <= n; ++k) {
      consider(every{k}.plan<Schedule>(costs));
      consider(revolve{k}.plan<Schedule>(costs));
    }
    const heddle::detail::chain_optimum dynamic(costs, budget, unit(costs));
    if (dynamic.feasible()) consider(dynamic.plan<Schedule>());
    if (best.steps.empty()) fail(costs, leanest);
    return best;
  }

  friend constexpr bool operator==(const optimal&, const optimal&) = default;

 private:
  std::size_t unit(std::span<const layer_cost> costs) const {
    std::size_t divisor = 0;
    for (const layer_cost& c : costs) divisor = std::gcd(std::gcd(divisor, c.output_bytes), c.saved_bytes);
    if (divisor == 0) divisor = 1;
    return budget / divisor <= resolution ? divisor : (std::max)(budget / resolution, std::size_t{1});
  }

  [[noreturn]] void fail(std::span<const layer_cost> costs, std::size_t leanest) const {
    std::size_t layer = 0, most = 0;
    for (std::size_t i = 0; i < costs.size(); ++i) {
      const std::size_t gradients = i + 1 < costs.size() ? costs[i].output_bytes : 0;
      const std::size_t need = gradients + costs[i].saved_bytes +
                               (std::max)(costs[i].output_bytes, i > 0 ? 2 * costs[i - 1].output_bytes : 0);
      if (need > most) {
        most = need;
        layer = i;
      }
    }
    throw budget_error(budget, leanest, layer, most);
  }
};

static_assert(policy<optimal>);

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

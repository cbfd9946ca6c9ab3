// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/concept.hpp>
#include <heddle/recompute/schedule.hpp>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief A predicate for `selective` and `offload`: layers whose name has one of these parts in it.
struct named {
  std::vector<std::string> parts;  ///< For example {"attention", "gelu"}.

  /// Whether the layer is meant.
  bool operator()(std::size_t, const layer_cost& cost) const {
    for (const std::string& part : parts) {
      if (cost.name.find(part) != std::string::npos) return true;
    }
    return false;
  }
};

/// @brief Recompute the layers that a predicate names, keep all of the others.
///
/// What is large and cheap to compute goes, such as the attention's weights, activation functions and norms: layers
/// that are neighbours run again together from the first one's input. The last layer of the chain is kept in any case,
/// as its backward comes first.
///
/// @code{.cpp}
/// heddle::recompute::selective cheap{[](std::size_t, const heddle::recompute::layer_cost& c) {
///   return c.saved_bytes > 1000000 * c.forward_time;
/// }};
/// heddle::recompute::selective by_name{heddle::recompute::named{{"attention", "gelu"}}};
/// @endcode
///
/// State:   outputs and saved blocks of layers that are kept, inputs of the runs of others, one run at a time whole.
/// Traffic: one extra forward of each chosen layer; n backwards.
/// Paper:   Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198.
/// Throws:  what the predicate throws.
template <class Predicate> struct selective {
  Predicate again{};  ///< again(index, layer_cost) is true for layers that are recomputed.

  /// The schedule for these layers.
  template <class Schedule = schedule> Schedule plan(std::span<const layer_cost> costs) const {
    const std::size_t n = costs.size();
    std::vector<bool> chosen(n);
    for (std::size_t i = 0; i + 1 < n; ++i) chosen[i] = again(i, costs[i]);
    Schedule result;
    for (std::size_t i = 0; i < n; ++i) {
      const bool begins = chosen[i] && (i == 0 || !chosen[i - 1]);
      result.steps.push_back({!chosen[i] ? action::forward_keep_all
                              : begins   ? action::forward_keep_input
                                         : action::forward_drop,
                              i});
    }
    for (std::size_t end = n; end > 0;) {
      std::size_t begin = end - 1;
      if (chosen[begin]) {
        while (begin > 0 && chosen[begin - 1]) --begin;
        for (std::size_t i = begin; i + 1 < end; ++i) result.steps.push_back({action::forward_keep_all, i});
        if (costs[end - 1].saved_bytes != 0) result.steps.push_back({action::restore, end - 1});
      }
      for (; end > begin; --end) result.steps.push_back({action::backward, end - 1});
    }
    return result;
  }
};

static_assert(policy<selective<named>>);

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

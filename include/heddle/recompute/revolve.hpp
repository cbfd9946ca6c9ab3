// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/concept.hpp>
#include <heddle/recompute/schedule.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief The fewest forwards that reverse a chain with a given number of kept inputs, all layers counting alike.
///
/// A slot holds the input of a layer; the first one is the chain's own input, which the caller holds. Beside the slots
/// one layer at a time has its saved block.
///
/// State:   for n equal layers of output a and saved block s at most (slots + 2) a + s while it runs back.
/// Traffic: r n - ((slots + r) choose (slots + 1)) forwards beside the n that are kept for their backward, where r is
///          the least number with n <= ((slots + r) choose slots); n backwards.
/// Paper:   Griewank, Walther, "Algorithm 799: Revolve", ACM TOMS 26, 2000.
/// Throws:  `argument_error` from plan() if `slots` is 0.
struct revolve {
  std::size_t slots = 8;  ///< Inputs held at once, that of layer 0 included; at least 1.

  /// The schedule for these layers.
  template <class Schedule = schedule> Schedule plan(std::span<const layer_cost> costs) const {
    if (slots == 0) throw argument_error("heddle::recompute::revolve: .slots is 0, allowed is 1 or more");
    Schedule result;
    if (!costs.empty()) reverse(result, 0, costs.size(), (std::min)(slots, costs.size()), costs);
    return result;
  }

  friend constexpr bool operator==(const revolve&, const revolve&) = default;

 private:
  // Layers [begin, end) forward to the last one and back; the input of `begin` is held, in one of `free` slots.
  template <class Schedule>
  static void reverse(Schedule& out, std::size_t begin, std::size_t end, std::size_t free,
                      std::span<const layer_cost> costs) {
    while (end - begin > 1) {
      const std::size_t middle = begin + (free == 1 ? end - begin - 1 : split(end - begin, free));
      out.steps.push_back({action::forward_keep_input, begin});
      for (std::size_t i = begin + 1; i < middle; ++i) out.steps.push_back({action::forward_drop, i});
      if (free == 1) {  // the last layer alone, then the rest again from the beginning
        reverse(out, middle, end, 1, costs);
        end = middle;
      } else {
        reverse(out, middle, end, free - 1, costs);
        end = middle;
      }
    }
    if (begin + 1 == costs.size())
      out.steps.push_back({action::forward_keep_all, begin});
    else if (costs[begin].saved_bytes != 0)
      out.steps.push_back({action::restore, begin});
    out.steps.push_back({action::backward, begin});
  }

  // The longest chain that can be reversed with so many slots and at most `repeats` forwards of each layer:
  // (slots + repeats) choose slots, or `most` if that is less.
  static constexpr std::size_t reach_of(std::size_t slots, std::size_t repeats, std::size_t most) noexcept {
    std::size_t reach = 1;
    for (std::size_t i = 1; i <= (std::min)(slots, repeats); ++i) {
      if (reach > most) return most;  // from here on it only grows
      reach = reach * (slots + repeats - (std::min)(slots, repeats) + i) / i;
    }
    return (std::min)(reach, most);
  }

  // After how many of the layers to put the next slot.
  static std::size_t split(std::size_t layers, std::size_t free) {
    std::size_t repeats = 1;
    while (reach_of(free, repeats, layers) < layers) ++repeats;
    const std::size_t rest = reach_of(free - 1, repeats, layers);  // the most that lies behind it
    const std::size_t before = repeats > 1 ? reach_of(free, repeats - 2, layers) : 1;
    return std::clamp<std::size_t>((std::max)(before, layers - (std::min)(rest, layers)), 1, layers - 1);
  }
};

static_assert(policy<revolve>);

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

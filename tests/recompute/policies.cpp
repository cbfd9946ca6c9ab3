// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/recompute/none.hpp>
#include <heddle/recompute/sqrt.hpp>

#include "conformance.hpp"

namespace {
// The user's policy of the concept's documentation, word for word.
struct cheap_again {
  double threshold = 0.1;
  heddle::recompute::schedule plan(std::span<const heddle::recompute::layer_cost> costs) const {
    using enum heddle::recompute::action;
    heddle::recompute::schedule s;
    auto cheap = [&](std::size_t i) { return i + 1 < costs.size() && costs[i].forward_time < threshold; };
    for (std::size_t i = 0; i < costs.size(); ++i) {
      s.steps.push_back({cheap(i) ? forward_keep_input : forward_keep_all, i});
    }
    for (std::size_t i = costs.size(); i-- > 0;) {
      if (cheap(i)) s.steps.insert(s.steps.end(), {{forward_keep_all, i}, {drop, i}});  // its saved block is back
      s.steps.push_back({backward, i});
    }
    return s;
  }
};
static_assert(heddle::recompute::policy<cheap_again>);
}  // namespace

TEST_CASE("none conforms", "[recompute]") { heddle_test::conforms_to_policy(heddle::recompute::none{}); }

TEST_CASE("sqrt conforms", "[recompute]") {
  heddle_test::conforms_to_policy(heddle::recompute::sqrt{});
  for (std::size_t segment : {1, 2, 3, 7, 40, 100}) {
    heddle_test::conforms_to_policy(heddle::recompute::every{.layers = segment});
  }
}

TEST_CASE("a user's policy conforms", "[recompute]") { heddle_test::conforms_to_policy(cheap_again{.threshold = 2.5}); }

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/mode/every_step.hpp>
#include <heddle/mode/local_sgd.hpp>

#include "../support/catch.hpp"

#include <vector>

namespace hd = heddle;

// example-begin every_other_step
struct every_other_step {
  static constexpr hd::average averages = hd::average::parameters;
  static constexpr bool outer_momentum = false;
  bool meets(std::size_t step) const { return step % 2 == 1; }
  std::string name() const { return "every_other_step"; }
};
static_assert(hd::mode<every_other_step>);
// example-end

TEST_CASE("local_sgd meets every period steps, and every step in its warm-up") {
  const hd::local_sgd m{.period = 3, .warmup = 2};
  std::vector<bool> met;
  for (std::size_t step = 0; step < 9; ++step) met.push_back(m.meets(step));
  CHECK(met == std::vector<bool>{true, true, false, false, true, false, false, true, false});
  CHECK(hd::local_sgd{.period = 1}.meets(0));
  CHECK_THROWS_AS(hd::local_sgd{.period = 0}.meets(0), hd::argument_error);
}

TEST_CASE("every_step meets every step") {
  for (std::size_t step = 0; step < 5; ++step) CHECK(hd::every_step{}.meets(step));
}

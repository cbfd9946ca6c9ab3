// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// revolve against its closed form and the recursion that defines it; optimal against every schedule of tiny chains.

#include <heddle/recompute/optimal.hpp>

#include "conformance.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <vector>

namespace {
namespace rc = heddle::recompute;
using costs = std::vector<rc::layer_cost>;

// Forwards that keep nothing for a backward.
std::size_t advances(std::size_t layers, std::size_t slots) {
  const costs c(layers, rc::layer_cost{1, 1, 1, 2});
  const rc::schedule s = rc::revolve{slots}.plan(c);
  CHECK(rc::simulate(s, c).peak_bytes <= slots + 3);
  return static_cast<std::size_t>(std::count_if(s.steps.begin(), s.steps.end(), [](const rc::operation& o) {
    return o.what == rc::action::forward_drop || o.what == rc::action::forward_keep_input;
  }));
}

costs random_costs(std::mt19937& random, std::size_t n) {
  costs out;
  for (std::size_t i = 0; i < n; ++i) {
    out.push_back({1 + random() % 9, random() % 3 ? random() % 20 : 0, 1.0 + static_cast<double>(random() % 5),
                   1.0 + static_cast<double>(random() % 5)});
  }
  return out;
}

// The fastest forward time within a budget over the schedules that split a chain as the documentation says: an
// independent recursion over lists of steps, each judged by the simulator.
double fastest(const costs& c, std::size_t budget) {
  using steps = std::vector<rc::operation>;
  using enum rc::action;
  std::function<std::vector<steps>(std::size_t, std::size_t)> all = [&](std::size_t s, std::size_t t) {
    std::vector<steps> out;
    const bool drops = s + 1 < c.size();
    if (s == t) {
      steps one{{forward_keep_all, s}};
      if (drops) one.push_back({drop, s});
      one.push_back({backward, s});
      return std::vector<steps>{one};
    }
    for (const steps& behind : all(s + 1, t)) {
      steps one{{forward_keep_all, s}};
      one.insert(one.end(), behind.begin(), behind.end());
      one.push_back({backward, s});
      out.push_back(one);
    }
    for (std::size_t j = s + 1; j <= t; ++j) {
      steps head{{forward_keep_input, s}};
      for (std::size_t i = s + 1; i < j; ++i) head.push_back({forward_drop, i});
      for (const steps& behind : all(j, t)) {
        for (const steps& before : all(s, j - 1)) {
          steps one = head;
          one.insert(one.end(), behind.begin(), behind.end());
          one.insert(one.end(), before.begin(), before.end());
          out.push_back(one);
        }
      }
    }
    return out;
  };
  double best = std::numeric_limits<double>::infinity();
  for (const steps& s : all(0, c.size() - 1)) {
    const rc::simulation x = rc::simulate(rc::schedule{s}, c);
    if (x.peak_bytes <= budget) best = std::min(best, x.forward_time);
  }
  return best;
}
}  // namespace

TEST_CASE("every, full, revolve and optimal conform", "[recompute]") {
  heddle_test::conforms_to_policy(rc::full{});
  for (const std::size_t slots : {1, 2, 3, 5, 50}) heddle_test::conforms_to_policy(rc::revolve{slots});
  heddle_test::conforms_to_policy(rc::optimal{.budget = std::size_t{1} << 40});
  CHECK_THROWS_AS(rc::every{0}.plan(costs(3)), heddle::argument_error);
  CHECK_THROWS_AS(rc::revolve{0}.plan(costs(3)), heddle::argument_error);
  CHECK_THROWS_AS((rc::optimal{.budget = 1, .resolution = 0}.plan(costs(3))), heddle::argument_error);
}

TEST_CASE("revolve takes the published number of forwards", "[recompute]") {
  CHECK(advances(10, 3) == 15);
  CHECK(advances(100, 10) == 222);
  CHECK(advances(1000, 31) == 2439);
  CHECK(advances(1000, 3) == 12155);
}

TEST_CASE("revolve takes the fewest forwards there are", "[recompute]") {
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> least;
  for (std::size_t slots = 1; slots <= 7; ++slots) {
    for (std::size_t n = 1; n < 60; ++n) {
      std::size_t best = n == 1 ? 0 : slots == 1 ? n * (n - 1) / 2 : std::numeric_limits<std::size_t>::max();
      for (std::size_t k = 1; slots > 1 && k < n; ++k) {
        best = std::min(best, k + least[{n - k, slots - 1}] + least[{k, slots}]);
      }
      least[{n, slots}] = best;
      CHECK(advances(n, slots) == best);
    }
  }
}

TEST_CASE("optimal is the fastest within its budget, and never exceeds it", "[recompute]") {
  std::mt19937 random(11);
  std::size_t infeasible = 0, recomputed = 0;
  for (int repeat = 0; repeat < 60; ++repeat) {
    const costs c = random_costs(random, 1 + random() % 5);
    const std::size_t most = rc::simulate(rc::none{}.plan(c), c).peak_bytes;
    for (std::size_t budget = 1; budget <= most; budget += 1 + most / 12) {
      const double best = fastest(c, budget);
      try {
        const rc::simulation x = rc::simulate(rc::optimal{.budget = budget, .resolution = 1000}.plan(c), c);
        CHECK(x.peak_bytes <= budget);
        CHECK(x.forward_time <= best);
        recomputed += x.extra_forwards > 0;
      } catch (const rc::budget_error& e) {
        CHECK(best == std::numeric_limits<double>::infinity());
        CHECK(e.least() > budget);
        CHECK(e.layer() < c.size());
        ++infeasible;
      }
    }
  }
  CHECK(infeasible > 0);
  CHECK(recomputed > 0);
}

TEST_CASE("optimal: uniform chains against published times", "[recompute]") {
  // 12 equal stages of input 1, kept state 2 (their output among it), forward 1, backward 2: budget and total time by
  // the program of arXiv 1911.13214, which holds a recomputed layer's output a little longer.
  const costs c(12, rc::layer_cost{1, 1, 1, 2});
  struct row {
    std::size_t budget;
    double total;
  };
  for (const row& r :
       {row{5, 102}, row{6, 63}, row{8, 50}, row{12, 44}, row{16, 42}, row{20, 40}, row{24, 38}, row{25, 36}}) {
    const rc::simulation x = rc::simulate(rc::optimal{.budget = r.budget}.plan(c), c);
    CHECK(x.peak_bytes <= r.budget);
    CHECK(x.forward_time + x.backward_time <= r.total);
    CHECK(x.forward_time >= 12);
  }
}

TEST_CASE("optimal is no slower than the others at their own peaks, coarse or fine", "[recompute]") {
  std::mt19937 random(12);
  for (const std::size_t n : {2, 7, 24, 40}) {
    costs c = random_costs(random, n);
    for (auto& x : c) {  // sizes without a common divisor
      x.output_bytes = x.output_bytes * 1001 + random() % 7;
      x.saved_bytes = x.saved_bytes * 1001 + random() % 7;
    }
    for (std::size_t k = 1; k <= n; k += 1 + n / 8) {
      for (const rc::schedule& other : {rc::every{k}.plan(c), rc::revolve{k}.plan(c), rc::sqrt{}.plan(c)}) {
        const rc::simulation x = rc::simulate(other, c);
        for (const std::size_t resolution : {50, 300}) {
          const rc::schedule mine = rc::optimal{.budget = x.peak_bytes, .resolution = resolution}.plan(c);
          const rc::simulation y = rc::simulate(mine, c);
          CHECK(y.peak_bytes <= x.peak_bytes);
          CHECK(y.forward_time <= x.forward_time);
        }
      }
    }
  }
}

TEST_CASE("optimal: no layers, no budget, sizes and times that can't be", "[recompute]") {
  CHECK(rc::optimal{}.plan({}).steps.empty());
  CHECK(rc::leanest{}.plan({}).steps.empty());
  CHECK(rc::optimal{}.plan(costs(3, rc::layer_cost{})) == rc::none{}.plan(costs(3, rc::layer_cost{})));
  const costs one{{10, 5, 1, 2}};
  CHECK_THROWS_AS(rc::optimal{}.plan(one), rc::budget_error);
  CHECK_THROWS_AS(rc::optimal{14}.plan(one), rc::budget_error);
  CHECK(rc::optimal{15}.plan(one) == rc::none{}.plan(one));
  for (const std::size_t huge : {SIZE_MAX, SIZE_MAX / 2, SIZE_MAX / 4}) {
    CHECK_THROWS_AS(rc::optimal{1000}.plan(costs(4, rc::layer_cost{huge, huge, 1, 2})), heddle::argument_error);
  }
  for (const double bad : {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    costs c(4, rc::layer_cost{10, 5, 1, 2});
    c[2].forward_time = bad;
    CHECK_THROWS_AS(rc::optimal{30}.plan(c), heddle::argument_error);
    CHECK_THROWS_AS(rc::optimal{1000}.plan(c), heddle::argument_error);
  }
}

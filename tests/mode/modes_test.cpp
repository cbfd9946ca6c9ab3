// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/mode/detail/row_map.hpp>
#include <heddle/mode/every_step.hpp>
#include <heddle/mode/local_sgd.hpp>

#include "../support/catch.hpp"

#include <algorithm>
#include <utility>
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

TEST_CASE("servers are dealt every row once, and as much as each other of what lies together") {
  const std::vector<hd::detail::row_map::shape> shapes[] = {
      {},
      {{0, 4}},
      {{7, 3}},
      {{1, 1}, {1, 1}, {1, 1}},
      {{0, 1}, {1000, 10}, {0, 5}, {13, 4}, {64, 64}, {4096, 1}},
      {{100003, 100}, {100003, 100}},
      {{5000, 5000}, {300, 300}, {300, 300}, {4000, 4000}},
  };
  for (const auto& tensors : shapes) {
    for (int servers = 1; servers <= 9; ++servers) {
      const hd::detail::row_map map(tensors, servers);
      INFO(tensors.size() << " tensors, " << servers << " servers");
      // The servers' rows follow each other, a server's tensors too, and their elements.
      REQUIRE(map.first(0) == 0);
      REQUIRE(map.first(servers) == map.rows());
      std::vector<std::vector<int>> server_of;
      for (const auto& t : tensors) server_of.emplace_back((t.count + t.width - 1) / t.width, -1);
      std::size_t next = 0, at = 0;
      for (int k = 0; k < servers; ++k) {
        for (std::size_t t = 0; t < tensors.size(); ++t) {
          REQUIRE(map.first(k, t) == next);
          std::size_t last_row = 0;
          map.each(next, map.first(k, t + 1), [&](const hd::detail::row_map::row& r) {
            const auto again = map[r.number];
            const std::size_t row = r.begin / tensors[t].width;
            REQUIRE((r.number == next && r.tensor == t && r.at == at && map.start(next) == at));
            REQUIRE((again.number == next && again.tensor == t && again.begin == r.begin && again.count == r.count));
            REQUIRE((again.at == at && r.begin == row * tensors[t].width && map.number(t, row) == next));
            REQUIRE(r.count == std::min(tensors[t].width, tensors[t].count - r.begin));
            REQUIRE((r.number == map.first(k, t) || row > last_row));
            REQUIRE(std::exchange(server_of[t][row], k) == -1);
            last_row = row;
            ++next;
            at += r.count;
          });
        }
      }
      std::size_t before = 0;
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        REQUIRE(map.before(t) == before);
        REQUIRE(map.rows_of(t) == server_of[t].size());
        before += tensors[t].count;
        // Of any first part of a tensor, each server has its share but for what is dealt at a time, 16 rows or fewer.
        std::vector<std::size_t> has(static_cast<std::size_t>(servers));
        for (const int k : server_of[t]) {
          REQUIRE(k >= 0);
          ++has[static_cast<std::size_t>(k)];
          REQUIRE(*std::max_element(has.begin(), has.end()) - *std::min_element(has.begin(), has.end()) <= 16);
        }
      }
      REQUIRE((next == map.rows() && at == map.elements() && at == before && map.start(next) == at));
    }
  }
  // Large rows don't meet where others could have them.
  const hd::detail::row_map map(shapes[6], 2);
  CHECK(map.start(map.first(1)) == 5000);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Offline planning: against the exhaustive optimum of tiny problems, published problems, and the definition.

#include <heddle/memory/lifetimes_csv.hpp>
#include <heddle/memory/memory_map.hpp>
#include <heddle/memory/search_plan.hpp>

#include "../support/catch.hpp"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <limits>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace hd = heddle;
using lifetimes = std::vector<hd::lifetime>;

std::span<const hd::lifetime> view(const lifetimes& v) { return v; }

lifetimes random_lifetimes(std::mt19937& random, std::size_t n, std::size_t moments, std::size_t most_bytes,
                           bool aligned = false, bool grouped = false) {
  lifetimes out;
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t a = random() % moments, b = random() % moments;
    hd::lifetime x{std::min(a, b), std::max(a, b) + 1, 1 + random() % most_bytes};
    if (random() % 20 == 0) x.bytes = 0;
    if (random() % 20 == 0) x.last = x.first;
    if (aligned) x.alignment = std::size_t{1} << random() % 4;
    if (grouped && random() % 3 == 0) x.group = random() % 2;
    out.push_back(x);
  }
  return out;
}

// The lowest peak there is: some order of placing each block at the lowest free offset reaches it. Every order is
// tried; a group is a block that lives whenever one of its members does. Shares no code with the library.
std::size_t exhaustive(const lifetimes& all) {
  struct block {
    lifetimes parts;
    std::size_t bytes = 0, alignment = 1;
  };
  std::vector<block> blocks;
  std::vector<std::size_t> groups;
  for (const hd::lifetime& x : all) {
    if (x.bytes == 0 || x.first == x.last) continue;
    std::size_t at = blocks.size();
    for (std::size_t k = 0; k < blocks.size(); ++k) {
      if (x.group != hd::no_group && groups[k] == x.group) at = k;
    }
    if (at == blocks.size()) {
      blocks.emplace_back();
      groups.push_back(x.group);
    }
    blocks[at].parts.push_back(x);
    blocks[at].bytes = std::max(blocks[at].bytes, x.bytes);
    blocks[at].alignment = std::max(blocks[at].alignment, x.alignment);
  }
  std::vector<std::size_t> order(blocks.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::size_t best = std::numeric_limits<std::size_t>::max();
  do {
    std::vector<std::size_t> offset(blocks.size());
    std::size_t peak = 0;
    for (std::size_t k = 0; k < order.size(); ++k) {
      const block& b = blocks[order[k]];
      for (std::size_t at = 0;; at += b.alignment) {
        bool free = true;
        for (std::size_t j = 0; j < k && free; ++j) {
          const block& o = blocks[order[j]];
          const std::size_t there = offset[order[j]];
          if (at >= there + o.bytes || there >= at + b.bytes) continue;
          for (const auto& p : b.parts) {
            for (const auto& q : o.parts) free = free && !(p.first < q.last && q.first < p.last);
          }
        }
        if (!free) continue;
        offset[order[k]] = at;
        peak = std::max(peak, at + b.bytes);
        break;
      }
    }
    best = std::min(best, peak);
  } while (std::next_permutation(order.begin(), order.end()));
  return blocks.empty() ? 0 : best;
}

hd::lifetime_table shipped(const std::string& name) {
  std::ifstream file(HEDDLE_TEST_DATA "/minimalloc/" + name + ".csv");
  REQUIRE(file);
  return hd::read_lifetimes(file);
}

}  // namespace

namespace {
constexpr hd::lifetime step[] = {{0, 3, 4}, {3, 9, 4}, {0, 9, 4}, {9, 21, 4}, {0, 21, 4}};
static_assert(hd::plan_greedy(std::span<const hd::lifetime>(step)).peak == 12);
static_assert(hd::plan_memory(std::span<const hd::lifetime>(step)).peak <= 12, "the budget of this step is 12 bytes");
static_assert(hd::is_valid(hd::plan_memory(std::span<const hd::lifetime>(step)), std::span<const hd::lifetime>(step)));
}  // namespace

TEST_CASE("plan: every greedy order is valid and not below the lower bound") {
  std::mt19937 random(3);
  for (const std::size_t n : {0, 1, 2, 17, 100, 300}) {
    for (int repeat = 0; repeat < 5; ++repeat) {
      const lifetimes x = random_lifetimes(random, n, 1 + n / 2, 1000, repeat % 2 == 1, repeat > 2);
      std::size_t best = std::numeric_limits<std::size_t>::max();
      for (const hd::placement order : hd::placements) {
        const hd::memory_plan p = hd::plan_greedy(view(x), order);
        CHECK(hd::is_valid(p, view(x)));
        CHECK(p.peak >= p.lower_bound);
        best = std::min(best, p.peak);
      }
      CHECK(hd::plan_memory(view(x)).peak == best);
      // The same orders, placed by a list of neighbours.
      const hd::memory_plan listed = hd::search_plan(view(x), {.seconds = 0});
      CHECK(hd::is_valid(listed, view(x)));
      CHECK(listed.peak == best);
    }
  }
}

TEST_CASE("plan: the lower bound is what is live at the busiest moment") {
  std::mt19937 random(4);
  for (int repeat = 0; repeat < 50; ++repeat) {
    const lifetimes x = random_lifetimes(random, 40, 30, 100);
    std::size_t most = 0;
    for (std::size_t t = 0; t < 31; ++t) {
      std::size_t live = 0;
      for (const auto& l : x) live += l.first <= t && t < l.last ? l.bytes : 0;
      most = std::max(most, live);
    }
    CHECK(hd::plan_memory(view(x)).lower_bound == most);
  }
}

TEST_CASE("plan: is_valid refuses what overlaps, is misaligned, torn apart or sticks out") {
  const lifetimes x{{0, 2, 8, 4, 0}, {1, 3, 8, 8}, {5, 6, 8, 4, 0}};
  hd::memory_plan p = hd::plan_memory(view(x));
  REQUIRE(hd::is_valid(p, view(x)));
  const auto with = [&](std::vector<std::size_t> offsets, std::size_t peak) {
    return hd::is_valid(hd::memory_plan{std::move(offsets), peak, 0}, view(x));
  };
  CHECK(with({0, 8, 0}, 16));
  CHECK_FALSE(with({0, 7, 0}, 16));
  CHECK_FALSE(with({4, 8, 4}, 16));
  CHECK_FALSE(with({0, 8, 8}, 16));
  CHECK_FALSE(with({0, 8, 0}, 15));
  CHECK_FALSE(with({0, 8}, 16));
  CHECK_FALSE(with({std::numeric_limits<std::size_t>::max() - 3, 8, 0}, 16));
}

TEST_CASE("search: the exhaustive optimum, proven") {
  std::mt19937 random(5);
  int above_bound = 0;
  for (int repeat = 0; repeat < 300; ++repeat) {
    const bool aligned = repeat % 3 == 1, grouped = repeat % 3 == 2;
    const lifetimes x = random_lifetimes(random, 1 + random() % 7, 6, repeat % 2 ? 9 : 4, aligned, grouped);
    const hd::memory_plan p = hd::search_plan(view(x), {.seconds = 100, .nodes = 2000000});
    REQUIRE(hd::is_valid(p, view(x)));
    const std::size_t optimum = exhaustive(x);
    CHECK(p.peak == optimum);
    CHECK(p.lower_bound <= optimum);
    if (!aligned) CHECK(p.optimal());
    above_bound += optimum > hd::plan_memory(view(x)).lower_bound;
  }
  CHECK(above_bound > 0);  // the lower bound had to be raised somewhere
}

TEST_CASE("search: the published problems fit their capacity") {
  // How many nodes the search takes is the same everywhere, so the limit is on these, not on time.
  for (const char* name : {"A.1048576", "C.1048576", "D.1048576"}) {
    const hd::lifetime_table t = shipped(name);
    const hd::memory_plan p =
        hd::search_plan(view(t.lifetimes), {.target = 1048576, .seconds = 1000, .nodes = 3000000});
    CHECK(hd::is_valid(p, view(t.lifetimes)));
    CHECK(p.peak <= 1048576);
  }
  const hd::lifetime_table t = shipped("input.12");
  CHECK(hd::search_plan(view(t.lifetimes)).peak == 12);
}

TEST_CASE("search: each report is a better valid plan, and the limits hold") {
  const hd::lifetime_table t = shipped("D.1048576");
  std::size_t last = std::numeric_limits<std::size_t>::max(), reports = 0;
  const auto improved = [&](const hd::memory_plan& p) {
    CHECK(p.peak < last);
    CHECK(hd::is_valid(p, view(t.lifetimes)));
    last = p.peak;
    ++reports;
  };
  const hd::memory_plan none = hd::search_plan(view(t.lifetimes), {.seconds = 0}, improved);
  CHECK(none.peak == hd::plan_memory(view(t.lifetimes)).peak);
  CHECK(reports >= 1);
  CHECK(hd::is_valid(none, view(t.lifetimes)));
  last = std::numeric_limits<std::size_t>::max();
  reports = 0;
  const hd::search_limits limits{.seconds = 1000, .nodes = 100000, .seed = 9};
  const hd::memory_plan one = hd::search_plan(view(t.lifetimes), limits, improved);
  CHECK(reports > 1);
  CHECK(one.offsets == hd::search_plan(view(t.lifetimes), limits).offsets);  // the same under the same limits
  const hd::memory_plan easy = hd::search_plan(view(t.lifetimes), {.target = 2000000, .seconds = 1000});
  CHECK(easy.peak <= 2000000);
}

TEST_CASE("plan: allocations in either order take the same room") {
  lifetimes up, down;
  for (std::size_t i = 0; i < 8; ++i) up.push_back({0, 10, 16});
  for (std::size_t i = 0; i < 4; ++i) up.push_back({10, 20, 32});
  for (std::size_t i = 0; i < 4; ++i) down.push_back({0, 10, 32});
  for (std::size_t i = 0; i < 8; ++i) down.push_back({10, 20, 16});
  CHECK(hd::plan_memory(view(up)).peak == 128);
  CHECK(hd::plan_memory(view(down)).peak == 128);
}

TEST_CASE("plan: what can't be planned is an error that says why") {
  const auto plan = [](hd::lifetime x) { return hd::plan_memory(view({{0, 1, 1}, x})); };
  CHECK_THROWS_AS(plan({5, 4, 1}), hd::argument_error);
  CHECK_THROWS_AS(plan({0, 1, 1, 3}), hd::argument_error);
  CHECK_THROWS_AS(plan({0, 1, 1, 0}), hd::argument_error);
  CHECK_THROWS_AS(plan({0, 1, SIZE_MAX - 10}), hd::memory_error);
  CHECK_THROWS_AS(plan({0, 1, SIZE_MAX / 2}), hd::memory_error);
  const lifetimes x{{0, 1, 1}};
  CHECK_THROWS_AS(hd::search_plan(view(x), {.seconds = -1}), hd::argument_error);
  CHECK_THROWS_AS(hd::search_plan(view(x), {.seconds = std::numeric_limits<double>::quiet_NaN()}), hd::argument_error);
  CHECK(hd::plan_memory(view({{SIZE_MAX - 1, SIZE_MAX, 8}})).peak == 8);  // moments may be any numbers
}

TEST_CASE("lifetimes: the table's format") {
  std::istringstream in("buffer,size,start,end,alignment,gaps,hint\nx,8,2,5,4,,7\ny,16,0,9,1,2-4 6-7@0:8,-1\n\nrest");
  const hd::lifetime_table t = hd::read_lifetimes(in);
  CHECK(t.names == std::vector<std::string>{"x", "y"});
  REQUIRE(t.lifetimes.size() == 3);
  CHECK(t.lifetimes[0] == hd::lifetime{2, 6, 8, 4});
  CHECK(t.lifetimes[1] == hd::lifetime{0, 2, 16, 1, 1});
  CHECK(t.lifetimes[2] == hd::lifetime{4, 10, 16, 1, 1});
  CHECK(t.buffer_of == std::vector<std::size_t>{0, 1, 1});

  std::stringstream out;
  const hd::memory_plan p = hd::plan_memory(view(t.lifetimes));
  hd::write_lifetimes(out, t, p);
  const hd::lifetime_table again = hd::read_lifetimes(out);
  CHECK(again.names == t.names);
  CHECK(again.lifetimes == t.lifetimes);
  CHECK(again.offsets == std::vector<std::size_t>{p.offsets[0], p.offsets[1]});
}

TEST_CASE("lifetimes: a buffer that begins with a gap is written with the offset it has after that") {
  std::istringstream in("id,lower,upper,size,gaps\na,0,10,100,\nb,0,10,50,0-5 7-8\nc,0,9,10,3-9\n");
  const hd::lifetime_table t = hd::read_lifetimes(in);
  const hd::memory_plan p = hd::plan_memory(view(t.lifetimes));
  std::stringstream out;
  hd::write_lifetimes(out, t, p);
  const hd::lifetime_table again = hd::read_lifetimes(out);
  CHECK(again.lifetimes == t.lifetimes);
  hd::memory_plan written{{}, p.peak, p.lower_bound};
  for (const std::size_t buffer : again.buffer_of) written.offsets.push_back(again.offsets[buffer]);
  CHECK(hd::is_valid(written, view(again.lifetimes)));
}

TEST_CASE("lifetimes: a damaged table is refused by line") {
  const auto fault = [](const std::string& text) -> std::string {
    std::istringstream in(text);
    try {
      hd::read_lifetimes(in);
    } catch (const hd::file_error& e) {
      return e.what();
    }
    return "accepted";
  };
  const std::string head = "id,lower,upper,size\n";
  const auto names_line = [&](const std::string& text, int line) {
    return fault(text).find("line " + std::to_string(line) + ":") != std::string::npos;
  };
  CHECK(fault(head + "a,0,1,8\n") == "accepted");
  CHECK(names_line("", 1));
  CHECK(names_line("id,lower,size\n", 1));
  CHECK(names_line("id,lower,upper,size,size\n", 1));
  CHECK(names_line("id,lower,end,size\na,0," + std::to_string(SIZE_MAX) + ",8\n", 2));
  CHECK(names_line("id,lower,upper,size,color\n", 1));
  CHECK(names_line(head + "a,0,1\n", 2));
  CHECK(names_line(head + "a,0,1,8\nb,0,1,8,9\n", 3));
  CHECK(names_line(head + "a,0,1,eight\n", 2));
  CHECK(names_line(head + "a,0,1,-8\n", 2));
  CHECK(names_line(head + "a,2,1,8\n", 2));
  CHECK(names_line("id,lower,upper,size,alignment\na,0,1,8,3\n", 2));
  CHECK(names_line("id,lower,upper,size,gaps\na,0,9,8,3\n", 2));
  CHECK(names_line("id,lower,upper,size,gaps\na,0,9,8,5-3\n", 2));
  CHECK(names_line("id,lower,upper,size,gaps\na,0,9,8,8-10\n", 2));
}

TEST_CASE("search_plan: many unlike buffers are packed closer than in any greedy order", "[memory][plan]") {
  std::mt19937 random(5);
  std::vector<hd::lifetime> all;
  for (std::size_t i = 0; i < 500; ++i) {
    const std::size_t first = random() % 1000;
    all.push_back({first, first + 1 + random() % 200, (std::size_t{64} << random() % 12) + 64 * (random() % 64), 64});
  }
  const hd::memory_plan greedy = hd::plan_memory(view(all));
  CHECK(hd::search_plan(view(all), {.seconds = 0}).peak == greedy.peak);  // all greedy orders, and no more
  const hd::memory_plan p = hd::search_plan(view(all), {.seconds = 100, .nodes = 0});
  CHECK(hd::is_valid(p, view(all)));
  CHECK(p.lower_bound == greedy.lower_bound);
  CHECK(p.gap() < 0.7 * greedy.gap());
}

TEST_CASE("memory map: one box per lifetime that takes room") {
  const lifetimes x{{0, 2, 8}, {1, 3, 8}, {1, 1, 8}, {1, 2, 0}};
  std::ostringstream out;
  hd::write_memory_map(out, hd::plan_memory(view(x)), view(x));
  const std::string svg = out.str();
  std::size_t boxes = 0;
  for (std::size_t at = svg.find("<rect"); at != std::string::npos; at = svg.find("<rect", at + 1)) ++boxes;
  CHECK(boxes == 2);
  CHECK(svg.find("peak 16 bytes") != std::string::npos);
  CHECK(svg.rfind("</svg>\n") == svg.size() - 7);
  CHECK_THROWS_AS(hd::write_memory_map(out, hd::memory_plan{}, view(x)), hd::argument_error);
}

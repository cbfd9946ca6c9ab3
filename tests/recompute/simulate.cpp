// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/recompute/none.hpp>
#include <heddle/recompute/revolve.hpp>
#include <heddle/recompute/simulate.hpp>
#include <heddle/recompute/sqrt.hpp>

#include "../support/catch.hpp"

#include <string>
#include <vector>

// Not the whole namespace: the C library has a function named sqrt.
namespace rc = heddle::recompute;
using enum rc::action;
using rc::layer_cost;
using rc::none;
using rc::schedule;
using rc::schedule_error;
using rc::simulate;
using rc::simulation;

namespace {
std::vector<layer_cost> equal_layers(std::size_t n, std::size_t output, std::size_t saved) {
  return std::vector<layer_cost>(n, layer_cost{output, saved, 1, 2});
}

void refused(const schedule& what, std::size_t n, std::size_t step, std::size_t layer, const std::string& part,
             std::size_t saved = 5) {
  try {
    simulate(what, equal_layers(n, 10, saved));
    FAIL("accepted:\n" << to_string(what));
  } catch (const schedule_error& e) {
    CHECK(e.step() == step);
    CHECK(e.layer() == layer);
    const std::string text = e.what();
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
    CHECK(text.find("step " + std::to_string(step)) != std::string::npos);
    CHECK(text.find("layer " + std::to_string(layer)) != std::string::npos);
  }
}
}  // namespace

TEST_CASE("peaks of equal layers have closed forms", "[recompute][simulate]") {
  for (std::size_t output : {1, 10, 1000}) {
    for (std::size_t saved : {0, 1, 20, 3000}) {
      CHECK(simulate(none{}.plan(equal_layers(1, output, saved)), equal_layers(1, output, saved)).peak_bytes ==
            output + saved);
      for (std::size_t n = 2; n <= 30; ++n) {
        const auto costs = equal_layers(n, output, saved);
        const simulation s = simulate(none{}.plan(costs), costs);
        CHECK(s.peak_bytes == (n + 1) * output + n * saved);
        CHECK(s.extra_forwards == 0);
        CHECK(s.forward_steps == n);
        CHECK(s.forward_time == Approx(n));
        CHECK(s.backward_time == Approx(2 * n));
        CHECK(s.timeline.back().bytes == 0);
      }
      for (std::size_t k = 2; k <= 12; ++k) {
        const auto costs = equal_layers(k * k, output, saved);
        const simulation s = simulate(rc::sqrt{}.plan(costs), costs);
        CHECK(s.peak_bytes == 2 * k * output + k * saved);
        CHECK(s.extra_forwards == (saved ? k * k - k : (k - 1) * (k - 1)));
        CHECK(s.extra_time == Approx(s.extra_forwards));
        CHECK(s.forward_time == Approx(k * k + s.extra_forwards));
      }
    }
  }
}

TEST_CASE("the table of docs/recompute.md", "[recompute][simulate]") {
  struct row {
    std::size_t n, none_peak, sqrt_peak, sqrt_extra;
  };
  for (const row& r : {row{16, 49, 16, 12}, row{64, 193, 32, 56}, row{256, 769, 64, 240}, row{1024, 3073, 128, 992}}) {
    const auto costs = equal_layers(r.n, 1, 2);
    CHECK(simulate(none{}.plan(costs), costs).peak_bytes == r.none_peak);
    const simulation s = simulate(rc::sqrt{}.plan(costs), costs);
    CHECK(s.peak_bytes == r.sqrt_peak);
    CHECK(s.extra_forwards == r.sqrt_extra);
  }
}

TEST_CASE("a timeline, written out by hand", "[recompute][simulate]") {
  // Layers with outputs 10, 20, 40 and saved blocks 1, 2, 4; the output of layer 0 is computed twice.
  const std::vector<layer_cost> costs{{10, 1, 1, 2}, {20, 2, 1, 2}, {40, 4, 1, 2}};
  const schedule mine{{{forward_keep_input, 0},
                       {forward_drop, 1},
                       {forward_keep_all, 2},
                       {backward, 2},
                       {forward_keep_all, 0},
                       {restore, 1},
                       {backward, 1},
                       {backward, 0}}};
  CHECK(mine == rc::every{.layers = 2}.plan(costs));
  const simulation s = simulate(mine, costs);
  const std::vector<simulation::event> expected{
      {0, 10}, {1, 30}, {1, 20}, {2, 60}, {2, 64},           // forward: outputs, one dropped, the last with its block
      {3, 84}, {3, 80}, {3, 40}, {3, 20},                    // gradient 20 in; block 4, output 40, input 20 out
      {4, 30}, {4, 31}, {5, 51}, {5, 53}, {5, 33},           // the segment again
      {6, 43}, {6, 23}, {6, 21}, {6, 11}, {7, 1},  {7, 0}};  // its backward
  CHECK(s.timeline == expected);
  CHECK(s.peak_bytes == 84);
  CHECK(s.peak_step == 3);
  CHECK(s.forward_steps == 3);
  CHECK(s.extra_forwards == 2);
}

TEST_CASE("plans of few layers", "[recompute]") {
  CHECK(rc::sqrt{}.plan({}).steps.empty());
  CHECK(none{}.plan({}).steps.empty());
  CHECK(simulate({}, {}).peak_bytes == 0);
  for (std::size_t n : {1, 2}) CHECK(rc::sqrt{}.plan(equal_layers(n, 3, 3)) == none{}.plan(equal_layers(n, 3, 3)));
  CHECK(to_string(none{}.plan(equal_layers(1, 1, 1))) == "0 forward_keep_all 0\n1 backward 0\n");
}

TEST_CASE("revolve: more slots than layers are as many as layers", "[recompute]") {
  const std::vector<rc::layer_cost> costs(4, rc::layer_cost{10, 5, 1, 2});
  CHECK(rc::revolve{static_cast<std::size_t>(-1)}.plan(costs) == rc::revolve{4}.plan(costs));
}

TEST_CASE("illegal schedules are refused by step and layer", "[recompute][simulate]") {
  refused({{{forward_keep_all, 1}}}, 2, 0, 1, "needs its input, the output of layer 0");
  refused({{{forward_drop, 0}, {forward_drop, 1}, {forward_keep_all, 1}}}, 2, 2, 1, "needs its input");
  refused({{{forward_keep_all, 0}, {forward_keep_all, 0}}}, 1, 1, 0, "already held");
  refused({{{forward_keep_all, 0}, {drop, 0}, {forward_keep_all, 0}}}, 1, 2, 0, "saved block is already held");
  refused({{{forward_keep_input, 0}, {backward, 0}}}, 1, 1, 0, "needs its saved block");
  refused({{{backward, 0}}}, 1, 0, 0, "no forward of the last layer", 0);
  refused({{{forward_keep_all, 0}, {forward_keep_all, 1}, {backward, 0}}}, 2, 2, 0,
          "backward of layer 1 must come first");
  refused({{{forward_keep_all, 0}, {backward, 0}, {backward, 0}}}, 1, 2, 0, "already run");
  refused({{{forward_keep_all, 0}, {backward, 0}, {forward_keep_input, 0}}}, 1, 2, 0, "its backward has already run");
  refused({{{forward_keep_all, 0}, {forward_keep_all, 1}, {drop, 0}, {backward, 1}}}, 2, 3, 1, "needs its input");
  refused({{{drop, 0}}}, 1, 0, 0, "not held");
  refused({{{forward_keep_all, 0}}}, 1, 1, 0, "ends before");
  refused({}, 3, 0, 2, "ends before");
  refused({{{forward_keep_all, 5}}}, 2, 0, 5, "there are 2 layers");
  refused({{{static_cast<rc::action>(9), 0}}}, 2, 0, 0, "no such action");
  CHECK_THROWS_AS(simulate(none{}.plan(equal_layers(3, SIZE_MAX / 4, 0)), equal_layers(3, SIZE_MAX / 4, 0)),
                  schedule_error);
}

TEST_CASE("a layer that saves nothing can go backward from its input alone", "[recompute][simulate]") {
  const schedule s{{{forward_keep_input, 0}, {forward_keep_input, 1}, {backward, 1}, {backward, 0}}};
  CHECK(simulate(s, equal_layers(2, 10, 0)).peak_bytes == 30);
  CHECK_THROWS_AS(simulate(s, equal_layers(2, 10, 1)), schedule_error);
}

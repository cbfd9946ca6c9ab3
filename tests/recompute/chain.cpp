// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/memory/pool.hpp>
#include <heddle/memory/tracking.hpp>
#include <heddle/recompute/chain.hpp>
#include <heddle/recompute/checked.hpp>
#include <heddle/recompute/none.hpp>
#include <heddle/recompute/sqrt.hpp>

#include "../support/catch.hpp"
#include "layers.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

namespace hd = heddle;
namespace rc = heddle::recompute;
using heddle_test::bytes_layer;
using heddle_test::centre;
using heddle_test::dropout;
using heddle_test::has;
using heddle_test::linear;
using heddle_test::message;
using heddle_test::tanh_layer;

namespace {
/// Eight layers: linear, tanh, centre, dropout, twice; 6 numbers in, 4 out.
struct network {
  linear a{6, 8, 1};
  tanh_layer b{8};
  centre c{8};
  dropout d{8, 11};
  linear e{8, 4, 2};
  tanh_layer f{4};
  centre g{4};
  dropout h{4, 12};
};

const std::array<double, 6> x{0.3, -0.7, 0.2, 0.9, -0.4, 0.5};

/// One step under a policy with the loss sum(y^2) / 2; all gradients, one after another.
template <class Policy> std::vector<double> gradients(network& net, Policy policy, bool want_input = true) {
  hd::tracking memory{hd::host_resource{}};
  rc::chain c{rc::checked{policy}, memory, net.a, net.b, net.c, net.d, net.e, net.f, net.g, net.h};
  auto y = static_cast<const double*>(c.forward(x.data()));
  const std::vector<double> dy(y, y + 4);
  std::vector<double> dx(6);
  std::fill(net.a.gw.begin(), net.a.gw.end(), 0.0);
  std::fill(net.e.gw.begin(), net.e.gw.end(), 0.0);
  c.backward(dy.data(), want_input ? dx.data() : nullptr);
  CHECK(memory.peak_bytes() == c.simulated().peak_bytes);
  CHECK(memory.live() == 0);
  std::vector<double> all = net.a.gw;
  all.insert(all.end(), net.e.gw.begin(), net.e.gw.end());
  if (want_input) all.insert(all.end(), dx.begin(), dx.end());
  return all;
}

/// The loss by plain calls without any chain, with the masks of the given step.
double loss(network& net, std::uint64_t step, const std::array<double, 6>& input = x) {
  std::vector<double> in(input.begin(), input.end()), out;
  const auto run = [&](auto& layer) {
    out.assign(layer.output_bytes() / sizeof(double), 0);
    layer.forward(in.data(), out.data(), nullptr, rc::pass::again);
    in = out;
  };
  net.d.step = net.h.step = step;
  run(net.a), run(net.b), run(net.c), run(net.d), run(net.e), run(net.f), run(net.g), run(net.h);
  double sum = 0;
  for (double v : in) sum += v * v / 2;
  return sum;
}

/// Throws at one call.
struct thrower : bytes_layer {
  int in_forward = -1, in_backward = -1;
  void forward(const void* i, void* o, void* s, rc::pass kind) {
    if (in_forward-- == 0) throw std::runtime_error("forward");
    bytes_layer::forward(i, o, s, kind);
  }
  void backward(const void* i, const void* s, const void* go, void* gi) {
    if (in_backward-- == 0) throw std::runtime_error("backward");
    bytes_layer::backward(i, s, go, gi);
  }
};
}  // namespace

TEST_CASE("gradients through a chain are those of finite differences", "[recompute][chain]") {
  network net;
  const std::vector<double> got = gradients(net, rc::sqrt{});
  const double h = 1e-6;
  std::vector<double*> weights;
  for (double& w : net.a.w) weights.push_back(&w);
  for (double& w : net.e.w) weights.push_back(&w);
  REQUIRE(got.size() == weights.size() + 6);
  double largest = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double before = *weights[i];
    *weights[i] = before + h;
    const double up = loss(net, 1);
    *weights[i] = before - h;
    const double down = loss(net, 1);
    *weights[i] = before;
    CHECK(got[i] == Approx((up - down) / (2 * h)).margin(1e-8));
    largest = std::max(largest, std::abs(got[i]));
  }
  CHECK(largest > 0.01);  // something was tested
  for (std::size_t i = 0; i < 6; ++i) {
    auto up = x, down = x;
    up[i] += h;
    down[i] -= h;
    CHECK(got[weights.size() + i] == Approx((loss(net, 1, up) - loss(net, 1, down)) / (2 * h)).margin(1e-8));
  }
}

TEST_CASE("dropout and running statistics: the same bits under every schedule", "[recompute][chain]") {
  using enum rc::action;
  // Only the first input is kept; for every layer the chain runs again from the start.
  rc::schedule least;
  for (std::size_t i = 0; i < 8; ++i) least.steps.push_back({forward_drop, i});
  for (std::size_t i = 8; i-- > 0;) {
    if (i == 7) least.steps.push_back({drop, 7});
    for (std::size_t j = 0; j < i; ++j) least.steps.push_back({forward_drop, j});
    least.steps.push_back({forward_keep_all, i});
    least.steps.push_back({drop, i});
    least.steps.push_back({backward, i});
  }
  network first, second, third, fourth;
  for (int step = 0; step < 3; ++step) {  // another mask every step
    const auto expected = gradients(first, rc::none{});
    CHECK(gradients(second, rc::sqrt{}) == expected);
    CHECK(gradients(third, least) == expected);
    CHECK(gradients(fourth, rc::full{}) == expected);
    for (network* net : {&second, &third, &fourth}) {
      CHECK(net->c.running == first.c.running);
      CHECK(net->g.running == first.g.running);
      CHECK(net->c.updates == step + 1);
      CHECK(net->d.step == static_cast<std::uint64_t>(step + 1));
    }
  }
  CHECK(std::count(third.a.gw.begin(), third.a.gw.end(), 0.0) < 54);
}

TEST_CASE("parameter gradients come without an input gradient", "[recompute][chain]") {
  network first, second;
  auto with = gradients(first, rc::sqrt{});
  const auto without = gradients(second, rc::sqrt{}, false);
  with.resize(without.size());
  CHECK(with == without);
}

TEST_CASE("inference saves nothing and updates nothing", "[recompute][chain]") {
  for (unsigned seed = 0; seed < 10; ++seed) {
    auto layers = heddle_test::random_layers(12, seed);
    std::vector<rc::layer> list(layers.begin(), layers.end());
    hd::tracking memory{hd::host_resource{}};
    rc::chain c{rc::none{}, memory, list};
    std::size_t widest = 0;  // the last output is the caller's
    for (std::size_t i = 0; i + 2 < layers.size(); ++i) widest = std::max(widest, layers[i].out + layers[i + 1].out);
    const std::vector<unsigned char> in(40, 7);
    std::vector<unsigned char> out(layers.back().out), expected(layers.back().out);
    c.infer(in.data(), out.data());
    CHECK(memory.peak_bytes() == widest);
    CHECK(memory.live() == 0);
    for (const auto& l : layers) CHECK((l.inferences == 1 && l.first == 0 && l.again == 0));
    // Between forward and backward it disturbs nothing.
    const void* y = c.forward(in.data());
    const std::size_t held = memory.bytes();
    c.infer(in.data(), out.data());
    CHECK(memory.bytes() == held);
    if (!out.empty()) CHECK(std::memcmp(y, out.data(), out.size()) == 0);
    c.backward(out.data(), nullptr);
    CHECK(memory.live() == 0);
  }
  network net;
  rc::chain c{rc::none{}, hd::host_resource{}, net.a, net.b, net.c, net.d};
  std::array<double, 8> y{};
  c.infer(x.data(), y.data());
  CHECK(net.c.updates == 0);
  CHECK(net.d.step == 0);
  CHECK(has(message([&] { c.infer(x.data(), nullptr); }), "out is null"));
}

TEST_CASE("a chain of no layers passes on what it is given", "[recompute][chain]") {
  hd::tracking memory{hd::host_resource{}};
  rc::chain c{rc::sqrt{}, memory};
  double in = 1, g = 2;
  CHECK(c.forward(&in) == &in);
  CHECK_THROWS_AS(c.backward(&g, &in), hd::argument_error);
  c.backward(&g, &g);
  c.forward(&in);
  c.backward(&g, nullptr);
  c.infer(&in, &in);
  CHECK_THROWS_AS(c.infer(&in, &g), hd::argument_error);
  CHECK(memory.allocations() == 0);
}

TEST_CASE("one layer", "[recompute][chain]") {
  hd::tracking memory{hd::host_resource{}};
  bytes_layer only{40, 30, 20};
  rc::chain c{rc::sqrt{}, memory, only};
  const std::vector<unsigned char> in(40), g(30);
  std::vector<unsigned char> gx(40);
  c.forward(in.data());
  CHECK(memory.bytes() == 50);
  c.backward(g.data(), gx.data());
  CHECK(memory.peak_bytes() == 50);
  CHECK(memory.live() == 0);
}

TEST_CASE("a size that changes within a step is an error by layer and step", "[recompute][chain]") {
  // Layer 1 grows or shrinks when it is asked during recomputation.
  struct fickle : bytes_layer {
    std::size_t later = 0;
    bool saved_too = false;
    std::size_t output_bytes() const { return first > 0 && !saved_too ? later : out; }
    std::size_t saved_bytes() const { return first > 0 && saved_too ? later : kept; }
  };
  for (bool saved_too : {false, true}) {
    for (std::size_t later : {0, 9, 11, 1000}) {
      hd::tracking memory{hd::host_resource{}};
      bytes_layer a{40, 10, 1};
      fickle b{{10, 10, 10}, later, saved_too};
      bytes_layer e{10, 10, 1};
      rc::chain c{rc::sqrt{}, memory, a, rc::layer{b, "the fickle one"}, e};
      const std::vector<unsigned char> in(40), g(10);
      c.forward(in.data());
      const std::string text = message([&] { c.backward(g.data(), nullptr); });
      INFO(text);
      CHECK(has(text, "step 5"));
      CHECK(has(text, "layer 1 (the fickle one)"));
      CHECK(has(text, std::to_string(later) + " bytes on recomputation"));
      CHECK(has(text, saved_too ? "saved block" : "output"));
      CHECK(memory.live() == 0);
    }
  }
}

TEST_CASE("a recomputed value that differs is found by checking", "[recompute][chain]") {
  struct drifting : bytes_layer {  // randomness with a state
    std::uint64_t state = 0;
    void forward(const void*, void* y, void*, rc::pass) { fill(y, out, ++state); }
  };
  drifting a{{40, 13, 0}};
  bytes_layer b{13, 10, 1}, e{10, 10, 1};
  hd::tracking memory{hd::host_resource{}};
  const std::vector<unsigned char> in(40), g(10);
  rc::chain unchecked{rc::sqrt{}, memory, rc::layer{a, "drifting"}, b, e};
  unchecked.forward(in.data());
  CHECK_NOTHROW(unchecked.backward(g.data(), nullptr));
  rc::chain c{rc::checked{rc::sqrt{}}, memory, rc::layer{a, "drifting"}, b, e};
  c.forward(in.data());
  const std::string text = message([&] { c.backward(g.data(), nullptr); });
  CHECK(has(text, "step 4"));
  CHECK(has(text, "layer 0 (drifting)"));
  CHECK(has(text, "differs in value"));
  CHECK(memory.live() == 0);
}

TEST_CASE("a saved block made again that differs is found by checking", "[recompute][chain]") {
  struct drifting : bytes_layer {  // the first two bytes of what it saves are left out
    std::uint64_t drift = 0;
    void forward(const void* x, void* y, void* saved, rc::pass kind) {
      bytes_layer::forward(x, y, nullptr, kind);
      if (saved) fill(static_cast<unsigned char*>(saved) + 2, kept - 2, sum(x, in) + drift * (kind == rc::pass::again));
    }
  };
  struct restoring : drifting {
    void restore(const void* x, void* saved) {
      fill(static_cast<unsigned char*>(saved) + 2, kept - 2, sum(x, in) + drift);
    }
  };
  const std::vector<unsigned char> in(10), g(10);
  const auto run = [&](auto layer, std::size_t at, rc::action how) {
    using enum rc::action;
    hd::tracking memory{hd::host_resource{}};
    decltype(layer) a[3];
    for (auto& l : a) l.in = l.out = 10, l.kept = 21;
    a[at].drift = 1;
    const rc::schedule plan{{{forward_keep_input, 0},
                             {forward_keep_input, 1},
                             {forward_keep_all, 2},
                             {backward, 2},
                             {restore, 1},
                             {backward, 1},
                             {how, 0},
                             {backward, 0}}};
    rc::chain c{rc::checked{plan}, memory, rc::layer{a[0], "first"}, rc::layer{a[1], "second"}, a[2]};
    c.forward(in.data());
    const std::string text = message([&] { c.backward(g.data(), nullptr); });
    INFO(text);
    CHECK(memory.live() == 0);
    CHECK(memory.peak_bytes() == c.simulated().peak_bytes);
    if (at < 2) {
      CHECK(has(text, at == 0 ? "layer 0 (first)" : "layer 1 (second)"));
      CHECK(has(text, "its saved block differs in value from the first one"));
    } else {
      CHECK(text == "nothing was thrown");  // its forward never runs again
    }
  };
  for (const std::size_t at : {0, 1, 2}) {
    run(restoring{}, at, rc::action::restore);
    run(drifting{}, at, rc::action::restore);
    run(drifting{}, at, rc::action::forward_keep_all);
  }
}

TEST_CASE("a layer or resource that throws leaves nothing behind", "[recompute][chain]") {
  const std::vector<unsigned char> in(40), g(10);
  for (std::size_t bad = 0; bad < 9; ++bad) {
    for (int when = 0; when < 3; ++when) {  // first pass, recomputation, backward
      hd::tracking memory{hd::host_resource{}};
      std::vector<thrower> layers(9);
      for (auto& l : layers) l.in = l.out = 10, l.kept = 3;
      layers[0].in = 40;
      layers[bad].in_forward = when == 0 ? 0 : when == 1 ? 1 : -1;
      layers[bad].in_backward = when == 2 ? 0 : -1;
      std::vector<rc::layer> list(layers.begin(), layers.end());
      rc::chain c{rc::sqrt{}, memory, list};
      const auto step = [&] {
        c.forward(in.data());
        c.backward(g.data(), nullptr);
      };
      if (when == 1 && bad >= 6) continue;  // the last segment runs once
      CHECK_THROWS_AS(step(), std::runtime_error);
      CHECK(memory.live() == 0);
      CHECK_THROWS_AS(c.backward(g.data(), nullptr), hd::argument_error);
      CHECK_NOTHROW(step());
      CHECK(memory.live() == 0);
    }
  }
  // Memory that runs out, at every possible point.
  auto layers = heddle_test::random_layers(10, 3);
  std::vector<rc::layer> list(layers.begin(), layers.end());
  const std::size_t peak = rc::chain{rc::none{}, hd::host_resource{}, list}.simulated().peak_bytes;
  const std::vector<unsigned char> top(layers.back().out);
  bool succeeded = false;
  for (std::size_t most = 1; most < 2 * peak; most += 37) {
    hd::tracking memory{hd::pool{hd::host_resource{}, {.max = most, .growth = 0, .granularity = 1}}};
    rc::chain c{rc::none{}, memory, list};
    try {
      c.forward(in.data());
      c.backward(top.data(), nullptr);
      succeeded = true;
    } catch (const hd::memory_error&) {
    }
    CHECK(memory.live() == 0);
  }
  CHECK(succeeded);
}

TEST_CASE("calls out of order and missing gradients", "[recompute][chain]") {
  hd::tracking memory{hd::host_resource{}};
  bytes_layer a{40, 10, 1}, b{10, 10, 1};
  const std::vector<unsigned char> in(40), g(10);
  {
    rc::chain c{rc::none{}, memory, a, b};
    CHECK(has(message([&] { c.backward(g.data(), nullptr); }), "no forward"));
    c.forward(in.data());
    CHECK(has(message([&] { c.backward(nullptr, nullptr); }), "grad_out is null"));
    c.backward(g.data(), nullptr);  // the error above changed nothing
    CHECK(a.backwards == 1);
    CHECK_THROWS_AS(c.backward(g.data(), nullptr), hd::argument_error);
    c.forward(in.data());
    const std::size_t once = memory.bytes();
    c.forward(in.data());  // the first one is given back
    CHECK(memory.bytes() == once);
    CHECK(has(message([&] { c.use(rc::none{}); }), "between forward and backward"));
    c.discard();
    CHECK(memory.live() == 0);
    c.forward(in.data());
    auto moved = std::move(c);
    moved.backward(g.data(), nullptr);
    moved.forward(in.data());
    CHECK(memory.live() > 0);
  }
  CHECK(memory.live() == 0);  // destruction gives back
}

TEST_CASE("policies and schedules are replaced at run time; new sizes are planned for", "[recompute][chain]") {
  auto layers = heddle_test::random_layers(9, 5);
  for (auto& l : layers) l.kept = 50;
  std::vector<rc::layer> list(layers.begin(), layers.end());
  hd::tracking memory{hd::host_resource{}};
  const std::vector<unsigned char> in(40);
  rc::chain c{rc::every{.layers = 3}, memory, list};
  const auto step = [&] {
    memory.reset_peak();
    c.forward(in.data());
    const std::vector<unsigned char> g(layers.back().out + 1);
    c.backward(g.data(), nullptr);
    CHECK(memory.peak_bytes() == c.simulated().peak_bytes);
    return memory.peak_bytes();
  };
  const std::size_t small_peak = step();
  c.use(rc::none{}.plan(c.costs()));
  CHECK(step() > small_peak);
  CHECK(c.plan() == rc::none{}.plan(c.costs()));
  c.use(rc::every{.layers = 9});
  CHECK(c.plan() == rc::none{}.plan(c.costs()));
  CHECK(c.policy().layers == 9);
  c.use(rc::every{.layers = 3});
  CHECK(step() == small_peak);
  CHECK_THROWS_AS(c.use(rc::schedule{}), rc::schedule_error);
  CHECK(step() == small_peak);
  for (auto& l : layers) l.in *= 2, l.out *= 2, l.kept = 0;  // another batch size
  layers[0].in = 40;
  step();
  CHECK(c.simulated().extra_forwards == 4);  // planned again: segments end in layers that save nothing
  // A chain over a schedule written by hand.
  rc::chain by_hand{rc::none{}.plan(c.costs()), memory, list};
  by_hand.use(rc::sqrt{}.plan(c.costs()));
  CHECK(by_hand.simulated().extra_forwards == 4);
  CHECK_THROWS_AS((rc::chain{rc::schedule{}, memory, list}), rc::schedule_error);
}

TEST_CASE("layers have names", "[recompute][chain]") {
  linear l{2, 2, 1};
  CHECK(rc::layer{l}.name() == "linear");
  CHECK(rc::layer{l, "other"}.name() == "other");
  tanh_layer t{2};
  CHECK(rc::layer{t}.name().empty());
  CHECK(rc::layer{t}.cost() == rc::layer_cost{16, 16, 1, 2});
  static_assert(rc::chainable<linear> && rc::chainable<bytes_layer> && !rc::chainable<int>);
}

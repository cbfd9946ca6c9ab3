// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// What a chain does beyond plain layers: several readers of an output, workspaces, early stop, forwards that must not
// run again, copies to a store, a profile, and a buffer of the promised size.

#include <heddle/comm/detail/wrapper.hpp>
#include <heddle/heddle.hpp>
#include <heddle/memory/limiting.hpp>
#include <heddle/memory/planned.hpp>
#include <heddle/memory/tracking.hpp>
#include <heddle/recompute/chain.hpp>
#include <heddle/recompute/checked.hpp>
#include <heddle/recompute/completion.hpp>
#include <heddle/recompute/offload.hpp>
#include <heddle/recompute/optimal.hpp>
#include <heddle/recompute/profile.hpp>
#include <heddle/recompute/promise.hpp>
#include <heddle/recompute/selective.hpp>

#include "../support/catch.hpp"
#include "../support/rank_check.hpp"
#include "layers.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {
namespace hd = heddle;
namespace rc = heddle::recompute;
using heddle_test::bytes_layer;
using heddle_test::has;
using heddle_test::message;
using heddle_test::mix;
using bytes = std::vector<unsigned char>;

/// A layer of any number of inputs that only moves bytes; everything that a layer may have.
struct net_layer {
  std::vector<std::size_t> reads;  // sizes of its inputs
  std::size_t out = 0, kept = 0, room = 0, back_room = 0;
  double time = 1, restoring = 0;
  bool only_once = false;
  int first = 0, again = 0, restores = 0, backwards = 0;

  std::size_t output_bytes() const { return out; }
  std::size_t saved_bytes() const { return kept; }
  std::size_t forward_workspace() const { return room; }
  std::size_t backward_workspace() const { return back_room; }
  double forward_time() const { return time; }
  double backward_time() const { return 2 * time; }
  double restore_time() const { return restoring; }
  bool once() const { return only_once; }

  std::uint64_t key(rc::inputs in) const {
    std::uint64_t h = 3;
    for (std::size_t r = 0; r < reads.size(); ++r) h = mix(h) + bytes_layer::sum(in[r], reads[r]);
    return h;
  }
  void forward(rc::inputs in, void* y, void* saved, rc::pass kind, void* workspace) {
    ++(kind == rc::pass::first ? first : again);
    if (workspace) std::memset(workspace, 0x5a, room);
    const std::uint64_t h = key(in);
    bytes_layer::fill(y, out, h);
    if (saved) bytes_layer::fill(saved, kept, h + 1);
  }
  void restore(rc::inputs in, void* saved, void* workspace) {
    ++restores;
    if (workspace) std::memset(workspace, 0xa5, room);
    bytes_layer::fill(saved, kept, key(in) + 1);
  }
  void backward(rc::inputs in, const void* saved, const void* gy, rc::input_gradients gx, void* workspace) {
    ++backwards;
    if (workspace) std::memset(workspace, 0x33, back_room);
    const std::uint64_t h = key(in) * 3 + bytes_layer::sum(saved, kept) * 5 + bytes_layer::sum(gy, out);
    for (std::size_t r = 0; r < reads.size(); ++r) {
      if (gx[r]) bytes_layer::fill(gx[r], reads[r], h + r);
    }
  }
  void add_gradient(const void* more, void* sum) const {
    for (std::size_t k = 0; k < out; ++k)
      static_cast<unsigned char*>(sum)[k] =
          static_cast<unsigned char>(static_cast<unsigned char*>(sum)[k] + static_cast<const unsigned char*>(more)[k]);
  }
};

struct net {
  std::vector<net_layer> layers;
  std::vector<std::vector<std::size_t>> also;
  bytes x = bytes(40, 7), top;

  std::vector<rc::layer> list() {
    std::vector<rc::layer> all;
    for (std::size_t i = 0; i < layers.size(); ++i) all.emplace_back(layers[i], "layer" + std::to_string(i), also[i]);
    return all;
  }
  std::vector<rc::layer_cost> costs() {
    std::vector<rc::layer_cost> all;
    for (const rc::layer& l : list()) all.push_back(l.cost());
    return all;
  }
};

enum class kind { plain, skips, everything };

net random_net(std::size_t n, unsigned seed, kind what = kind::everything) {
  std::mt19937 random(seed);
  net made;
  made.layers.resize(n);
  made.also.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    net_layer& l = made.layers[i];
    l.reads.push_back(i ? made.layers[i - 1].out : 40);
    for (std::size_t j = 0; what != kind::plain && j + 1 < i; ++j) {
      if (random() % (2 * i) == 0) {
        made.also[i].push_back(j);
        l.reads.push_back(made.layers[j].out);
      }
    }
    l.out = random() % 8 ? 1 + random() % 300 : 0;
    l.kept = random() % 3 ? random() % 500 : 0;
    l.time = 1 + random() % 4;
    if (random() % 2) l.restoring = l.time / 2;
    if (what != kind::everything) continue;
    l.room = random() % 2 ? random() % 400 : 0;
    l.back_room = random() % 2 ? random() % 400 : 0;
    l.only_once = random() % 6 == 0;
  }
  made.top = bytes(n ? made.layers.back().out : 0, 9);
  return made;
}

/// The gradient of the input without any chain.
bytes reference(net what) {
  const std::size_t n = what.layers.size();
  std::vector<bytes> outputs(n), saved(n), gradients(n);
  const auto in = [&](std::size_t i) {
    std::vector<const void*> all{i ? outputs[i - 1].data() : what.x.data()};
    for (const std::size_t j : what.also[i]) all.push_back(outputs[j].data());
    return all;
  };
  for (std::size_t i = 0; i < n; ++i) {
    outputs[i].resize(what.layers[i].out + 1);
    saved[i].resize(what.layers[i].kept + 1);
    gradients[i].resize(what.layers[i].out + 1);
    what.layers[i].forward(in(i), outputs[i].data(), saved[i].data(), rc::pass::first, nullptr);
  }
  bytes gx(40);
  for (std::size_t i = n; i-- > 0;) {
    std::vector<std::size_t> from{i - 1};
    from.insert(from.end(), what.also[i].begin(), what.also[i].end());
    std::vector<bytes> parts;
    std::vector<void*> to;
    for (const std::size_t size : what.layers[i].reads) parts.emplace_back(size + 1);
    for (bytes& p : parts) to.push_back(p.data());
    const void* gy = i + 1 == n ? what.top.data() : gradients[i].data();
    what.layers[i].backward(in(i), saved[i].data(), gy, to, nullptr);
    for (std::size_t r = 0; i > 0 && r < parts.size(); ++r)
      what.layers[from[r]].add_gradient(parts[r].data(), gradients[from[r]].data());
    if (i == 0) gx.assign(parts[0].begin(), parts[0].end() - 1);
  }
  return gx;
}

/// Runs two steps: gradients of the reference, memory as simulated event for event, each layer as often as it must.
template <class Policy, class Store = rc::no_store<>>
void conforms(net what, const Policy& policy, Store store = Store{}) {
  const bytes expected = reference(what);
  hd::tracking memory{hd::host_resource{}, {.log = true}};
  rc::chain c{rc::checked{policy}, memory, what.list(), std::move(store)};
  bytes got(40);
  for (int step = 0; step < 2; ++step) {
    memory.clear_samples();
    memory.reset_peak();
    c.forward(what.x.data());
    c.backward(what.top.data(), got.data());
    REQUIRE(got == expected);
    CHECK(memory.live() == 0);
    CHECK(memory.peak_bytes() == c.simulated().peak_bytes);
    const auto log = memory.samples();
    REQUIRE(log.size() == c.simulated().timeline.size());
    std::size_t differing = 0;
    for (std::size_t k = 0; k < log.size(); ++k) differing += log[k].bytes != c.simulated().timeline[k].bytes;
    CHECK(differing == 0);
  }
  std::size_t again = 0;
  for (const net_layer& l : what.layers) {
    CHECK(l.first == 2);
    CHECK(l.backwards == 2);
    if (l.only_once) CHECK(l.again + l.restores == 0);
    again += static_cast<std::size_t>(l.again + l.restores);
  }
  CHECK(again == 2 * c.simulated().extra_forwards);
}

bool odd(std::size_t i, const rc::layer_cost&) { return i % 3 != 1; }

// A user's policy, no template.
struct as_sqrt {
  rc::schedule plan(std::span<const rc::layer_cost> costs) const { return rc::sqrt{}.plan(costs); }
};
}  // namespace

TEST_CASE("skips, workspaces, early stop and single forwards under every policy", "[recompute][features]") {
  for (const std::size_t n : {1, 2, 3, 7, 12, 20}) {
    for (unsigned seed = 0; seed < 6; ++seed) {
      for (const kind k : {kind::plain, kind::skips, kind::everything}) {
        INFO("layers " << n << " seed " << seed << " kind " << static_cast<int>(k));
        net what = random_net(n, 10 * static_cast<unsigned>(n) + seed, k);
        conforms(what, rc::none{});
        conforms(what, rc::sqrt{});
        conforms(what, rc::full{});
        conforms(what, rc::revolve{2});
        conforms(what, rc::selective{&odd});
        conforms(what, rc::leanest{});
        const auto costs = what.costs();
        const std::size_t least = rc::simulate(rc::leanest{}.plan(costs), costs).peak_bytes;
        const std::size_t most = rc::simulate(rc::none{}.plan(costs), costs).peak_bytes;
        conforms(what, rc::optimal{least + (most - least) / 2});
        for (const std::size_t ahead : {1, 3}) {
          conforms(what, rc::offload{.policy = rc::none{}, .ahead = ahead}, rc::offload_store<>{});
          conforms(what, rc::offload{.policy = rc::sqrt{}, .ahead = ahead}, rc::offload_store<>{});
        }
        conforms(what, rc::offload{.policy = rc::selective{&odd}, .bytes_per_time = 150.0}, rc::offload_store<>{});
      }
    }
  }
}

TEST_CASE("optimal with skips is no slower than the others at their peaks, and keeps its budget",
          "[recompute][features]") {
  for (unsigned seed = 0; seed < 40; ++seed) {
    INFO("seed " << seed);
    net what = random_net(2 + seed % 13, 700 + seed, seed % 2 ? kind::skips : kind::everything);
    const auto costs = what.costs();
    const std::size_t least = rc::simulate(rc::leanest{}.plan(costs), costs).peak_bytes;
    for (const rc::schedule& other :
         {rc::sqrt{}.plan(costs), rc::full{}.plan(costs), rc::revolve{2}.plan(costs), rc::revolve{4}.plan(costs)}) {
      const rc::simulation theirs = rc::simulate(other, costs);
      const rc::simulation ours = rc::simulate(rc::optimal{theirs.peak_bytes}.plan(costs), costs);
      CHECK(ours.peak_bytes <= theirs.peak_bytes);
      CHECK(ours.forward_time <= theirs.forward_time);
      if (seed % 2) CHECK(least <= theirs.peak_bytes);
    }
    try {  // the least budget that the error names is one
      rc::optimal{1}.plan(costs);
      CHECK(least <= 1);
    } catch (const rc::budget_error& e) {
      CHECK(rc::simulate(rc::optimal{e.least()}.plan(costs), costs).peak_bytes <= e.least());
      CHECK_THROWS_AS(rc::optimal{e.least() - 1}.plan(costs), rc::budget_error);
      CHECK(e.layer_bytes() <= e.least());
      CHECK(has(e.what(), "layer " + std::to_string(e.layer()) + " (" + costs[e.layer()].name + ")"));
      CHECK(has(e.what(), std::to_string(e.least()) + " is the least budget"));
    }
  }
}

TEST_CASE("the layer that makes a budget infeasible is named", "[recompute][features]") {
  std::vector<rc::layer_cost> costs(6, rc::layer_cost{100, 50, 1, 2});
  costs[3] = {100, 5000, 1, 2};
  costs[3].name = "logits";
  costs[3].backward_workspace = 300;
  // Alone: the gradient of its output, its saved block, its workspace and the gradient of its input, which the layer
  // before it holds.
  try {
    rc::optimal{2000}.plan(costs);
    FAIL("planned");
  } catch (const rc::budget_error& e) {
    CHECK(e.layer() == 3);
    CHECK(e.layer_bytes() == 100 + 5000 + 100 + 300);
    CHECK(e.least() == 5600);
    CHECK(has(e.what(), "layer 3 (logits) needs 5500 by itself"));
  }
}

TEST_CASE("a workspace that grows within a step is an error, not an overrun", "[recompute][features]") {
  for (const bool backward : {false, true}) {
    net_layer first{{10}, 10}, second{{10}, 10}, third{{10}, 10};
    first.room = first.back_room = 64;
    first.kept = second.kept = third.kept = 16;  // or nothing would be computed again
    hd::tracking memory{hd::host_resource{}};
    rc::chain c{rc::full{}, memory, first, second, third};
    const std::vector<double> in(10, 1.0), g(10, 1.0);
    c.forward(in.data());
    (backward ? first.back_room : first.room) = 4096;
    const std::string text = message([&] { c.backward(g.data(), nullptr); });
    INFO(text);
    CHECK(has(text, "layer 0"));
    CHECK(has(text, std::string(backward ? "backward" : "forward") + " workspace has 4096 bytes"));
    CHECK(memory.live() == 0);
  }
}

TEST_CASE("profile runs once what may run once", "[recompute][features]") {
  struct counted : bytes_layer {
    bool once() const { return true; }
  };
  counted only;
  only.in = only.out = 10;
  bytes_layer other{10, 10, 5};
  const std::vector<rc::layer> list{rc::layer{only, "all-reduce"}, rc::layer{other, "other"}};
  const bytes in(10, 1);
  rc::profile(list, in.data(), hd::host_resource{}, {.repetitions = 4});
  CHECK(only.first + only.again == 1);
  CHECK(other.first + other.again == 4);
}

TEST_CASE("what chains refuse of skips and single forwards", "[recompute][features]") {
  net what = random_net(6, 3, kind::plain);
  std::vector<rc::layer> list = what.list();
  list[4] = rc::layer{what.layers[4], "join", {3}};
  CHECK(has(message([&] { rc::chain(rc::none{}, hd::host_resource{}, list); }), "layer 4 also reads layer 3"));
  list[4] = rc::layer{what.layers[4], "join", {50'000'000}};  // asked for before a policy trusts it
  CHECK(has(message([&] { rc::chain(rc::leanest{}, hd::host_resource{}, list); }), "also reads layer 50000000"));
  CHECK(has(message([&] { rc::profile(list, what.x.data(), hd::host_resource{}); }), "also reads layer 50000000"));
  list[4] = rc::layer{what.layers[4], "join", {2, 1}};
  CHECK(has(message([&] { rc::chain(rc::none{}, hd::host_resource{}, list); }), "ascending order"));
  bytes_layer plain{40, 10, 1};
  CHECK(has(message([&] { rc::layer(plain, "one input", {0}); }), "one input is to read several outputs"));
  std::vector<rc::layer> mixed{rc::layer{plain, "plain"}};
  net_layer next{{10}, 10}, join{{10, 10}, 10};
  mixed.emplace_back(next, "next");
  mixed.emplace_back(join, "join", std::vector<std::size_t>{0});
  CHECK(has(message([&] { rc::chain(rc::none{}, hd::host_resource{}, mixed); }),
            "layer 0 (plain) is read by several layers"));
  // A schedule with copies needs a store.
  const rc::offload copies{.policy = rc::none{}};
  CHECK(has(message([&] { rc::chain(copies, hd::host_resource{}, random_net(12, 5, kind::plain).list()); }),
            "this chain has no store"));
  using enum rc::action;
  const std::vector<rc::layer_cost> two(2, rc::layer_cost{10, 5, 1, 2});
  const auto refused = [&](std::vector<rc::operation> steps, const std::string& part) {
    const std::string text = message([&] { rc::simulate(rc::schedule{steps}, two); });
    INFO(text);
    CHECK(has(text, part));
  };
  refused({{offload, 0}}, "nothing of it is held");
  refused({{forward_keep_all, 0}, {evict, 0}}, "no offload comes before it");
  refused({{forward_keep_all, 0}, {fetch, 0}}, "nothing of it was evicted");
  refused({{forward_keep_all, 0}, {offload, 0}, {offload, 0}}, "already offloaded");
  refused({{forward_keep_all, 0}, {offload, 0}, {drop, 0}}, "evict it first");
  refused({{forward_keep_all, 0}, {offload, 0}, {evict, 0}, {forward_keep_all, 1}}, "needs its input");
  refused({{forward_keep_all, 0}, {offload, 0}, {forward_keep_all, 1}, {backward, 1}}, "evict it first");
  refused({{restore, 0}}, "has not run yet");
}

TEST_CASE("selective recomputes what it names and keeps the rest", "[recompute][features]") {
  net what = random_net(9, 4, kind::plain);
  for (auto& l : what.layers) l.kept = 50;
  const auto costs = what.costs();
  for (const std::string name : {"layer3", "layer8", "layer"}) {
    const rc::simulation s = rc::simulate(rc::selective{rc::named{{name}}}.plan(costs), costs);
    CHECK(s.extra_forwards == (name == "layer3" ? 1u : name == "layer8" ? 0u : 8u));
  }
  CHECK(rc::selective{[](std::size_t, const rc::layer_cost&) { return false; }}.plan(costs) == rc::none{}.plan(costs));
}

TEST_CASE("offload: the chain's memory goes down, nothing is computed twice", "[recompute][features]") {
  const std::vector<rc::layer_cost> costs(40, rc::layer_cost{10, 90, 1, 2});
  const rc::simulation kept = rc::simulate(rc::none{}.plan(costs), costs);
  for (const std::size_t ahead : {1, 2, 4}) {
    const rc::simulation s = rc::simulate(rc::offload{.ahead = ahead}.plan(costs), costs);
    CHECK(s.extra_forwards == 0);
    CHECK(s.peak_bytes <= (2 * ahead + 6) * 100);
    CHECK(s.peak_bytes + s.stored_bytes >= kept.peak_bytes - 200);
    CHECK(s.copied_bytes == 2 * s.stored_bytes);
  }
  // A link that carries a layer's bytes in one forward needs no more than a slow one, and a hopeless one is left alone.
  std::size_t before = 0;
  for (const double rate : {1e9, 100.0, 50.0, 25.0, 0.1}) {
    const rc::simulation s = rc::simulate(rc::offload{.bytes_per_time = rate}.plan(costs), costs);
    CHECK(s.peak_bytes >= before);
    CHECK(s.peak_bytes <= kept.peak_bytes);
    before = s.peak_bytes;
  }
  CHECK(before == kept.peak_bytes);
  CHECK(rc::offload{.least = 101}.plan(costs) == rc::none{}.plan(costs));
  CHECK(rc::offload{.which = &odd}.plan(costs).steps.size() > rc::none{}.plan(costs).steps.size());
  CHECK(rc::offload{.policy = as_sqrt{}}.plan(costs) == rc::offload{.policy = rc::sqrt{}}.plan(costs));
}

TEST_CASE("a layer that throws while copies are under way leaves nothing behind", "[recompute][features]") {
  struct thrower : bytes_layer {
    int in_backward = -1;
    void backward(const void* i, const void* s, const void* go, void* gi) {
      if (in_backward-- == 0) throw std::runtime_error("backward");
      bytes_layer::backward(i, s, go, gi);
    }
  };
  for (std::size_t bad = 0; bad < 12; ++bad) {
    hd::tracking memory{hd::host_resource{}}, store{hd::host_resource{}};
    {
      std::vector<thrower> layers(12);
      for (auto& l : layers) l.in = l.out = 10, l.kept = 3;
      layers[0].in = 40;
      layers[bad].in_backward = 0;
      std::vector<rc::layer> list(layers.begin(), layers.end());
      rc::chain c{rc::offload<>{}, memory, list, rc::offload_store<hd::host, hd::tracking<>>{store}};
      const bytes in(40), g(10);
      for (int step = 0; step < 2; ++step) {
        c.forward(in.data());
        if (step == 0) CHECK_THROWS_AS(c.backward(g.data(), nullptr), std::runtime_error);
        if (step == 1) c.backward(g.data(), nullptr);
        CHECK(memory.live() == 0);
      }
      CHECK(store.bytes() == c.simulated().stored_bytes);
    }
    CHECK(store.live() == 0);
  }
}

TEST_CASE("a store without room leaves nothing behind", "[recompute][features]") {
  std::vector<bytes_layer> layers(6);
  for (auto& l : layers) l.in = l.out = 10, l.kept = 30;
  const std::vector<rc::layer> list(layers.begin(), layers.end());
  const bytes in(10), g(10);
  hd::tracking memory{hd::host_resource{}}, store{hd::host_resource{}};
  const rc::offload away{.ahead = 1};
  const std::size_t needed =
      rc::simulate(away.plan(rc::chain{rc::none{}, memory, list}.costs()), rc::chain{rc::none{}, memory, list}.costs())
          .stored_bytes;
  REQUIRE(needed > 0);
  for (std::size_t most = 0; most <= needed; most += 5) {
    hd::limiting pinned{store, most};
    rc::chain c{away, memory, list, rc::offload_store<hd::host, decltype(pinned)>{pinned}};
    const auto step = [&] {
      c.forward(in.data());
      c.backward(g.data(), nullptr);
    };
    if (most < needed) {
      CHECK_THROWS_AS(step(), hd::memory_error);
      CHECK(memory.live() == 0);
      c.use(rc::none{}.plan(c.costs()));  // without copies it goes on
    }
    step();
    CHECK(memory.live() == 0);
    CHECK(store.bytes() <= most);
  }
  CHECK(store.live() == 0);
  // However many steps a copy gets.
  const std::vector<rc::layer_cost> costs(6, rc::layer_cost{10, 30, 1, 2});
  CHECK(rc::offload{.ahead = SIZE_MAX}.plan(costs) == rc::none{}.plan(costs));
}

TEST_CASE("the promise: a chain runs in one buffer of exactly the promised size", "[recompute][features]") {
  for (unsigned seed = 0; seed < 20; ++seed) {
    INFO("seed " << seed);
    net what = random_net(1 + seed, 900 + seed);
    const bytes expected = reference(what);
    const auto costs = what.costs();
    const auto run = [&](auto policy) {
      const rc::schedule s = policy.plan(costs);
      const hd::memory_plan promised = rc::promise(s, costs);
      CHECK(promised.peak >= rc::simulate(s, costs).peak_bytes);
      hd::limiting upstream{hd::host_resource{}, promised.peak};
      hd::tracking counted{upstream};
      hd::planned memory{counted};
      memory.expect(rc::lifetimes(s, costs), promised);
      rc::chain c{s, memory, what.list(), rc::offload_store<>{}};
      bytes got(40);
      for (int step = 0; step < 3; ++step) {
        memory.begin_step();
        c.forward(what.x.data());
        c.backward(what.top.data(), got.data());
        CHECK(got == expected);
      }
      CHECK(memory.deviations() == 0);
      CHECK(counted.allocations() == (promised.peak != 0));
      CHECK(counted.peak_bytes() == promised.peak);
      return promised.peak;
    };
    run(rc::none{});
    run(rc::revolve{2});
    run(rc::offload{.policy = rc::sqrt{}});
    const std::size_t roomy = run(rc::sqrt{});
    CHECK(run(rc::placed{roomy}) <= roomy);
  }
}

TEST_CASE("planned::expect refuses what is no step", "[recompute][features]") {
  hd::planned<> memory;
  const std::vector<hd::lifetime> good{{0, 2, 10, 1, hd::no_group}, {1, 3, 5, 1, hd::no_group}};
  const hd::memory_plan made = hd::plan_memory(std::span<const hd::lifetime>(good));
  for (const std::vector<hd::lifetime>& bad :
       {std::vector<hd::lifetime>{{0, 2, 10}, {2, 3, 5}}, std::vector<hd::lifetime>{{0, 4, 10}, {1, 3, 5}},
        std::vector<hd::lifetime>{{0, 2, 0}, {1, 3, 5}}, std::vector<hd::lifetime>{{2, 0, 10}, {1, 3, 5}},
        std::vector<hd::lifetime>{{0, 2, 10, 0}, {1, 3, 5}}, std::vector<hd::lifetime>{{0, 2, 10, 8192}, {1, 3, 5}}}) {
    CHECK_THROWS_AS(memory.expect(bad, made), hd::argument_error);
  }
  CHECK_THROWS_AS(memory.expect(good, hd::memory_plan{{0, 0}, 15, 15}), hd::argument_error);
  CHECK_FALSE(memory.replaying());
  memory.expect(good, made);
  memory.begin_step();
  CHECK(memory.replaying());
  void* const a = memory.allocate_sync(10, 1);
  CHECK_THROWS_AS(memory.expect(good, made), hd::argument_error);
  void* const b = memory.allocate_sync(5, 1);
  memory.deallocate_sync(a, 10, 1);
  memory.deallocate_sync(b, 5, 1);
  memory.begin_step();
  memory.begin_step();  // a step that does nothing does nothing else
  CHECK(memory.deviations() == 0);
  memory.deallocate_sync(memory.allocate_sync(7, 1), 7, 1);
  CHECK(memory.deviations() == 1);
}

TEST_CASE("a profile measures times and workspaces, and comes back from its file", "[recompute][features]") {
  // Takes memory from the resource beside its blocks, and time.
  struct working : bytes_layer {
    hd::tracking<>* memory = nullptr;
    std::size_t beside = 0;
    int milliseconds = 0;
    void work(std::size_t n) {
      void* const p = memory->allocate_sync(n, 8);
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
      memory->deallocate_sync(p, n, 8);
    }
    void forward(const void* i, void* o, void* s, rc::pass p) {
      work(beside);
      bytes_layer::forward(i, o, s, p);
    }
    void backward(const void* i, const void* s, const void* go, void* gi) {
      work(2 * beside);
      bytes_layer::backward(i, s, go, gi);
    }
  };
  hd::tracking memory{hd::host_resource{}};
  std::vector<working> layers(3);
  for (auto& l : layers) l.in = l.out = 10, l.kept = 20, l.memory = &memory;
  layers[1].beside = 500;
  layers[1].milliseconds = 4;
  std::vector<rc::layer> list;
  for (std::size_t i = 0; i < 3; ++i) list.emplace_back(layers[i], "l" + std::to_string(i));
  const bytes in(10, 1);
  const rc::chain_profile p = rc::profile(list, in.data(), memory, {.repetitions = 2});
  CHECK(memory.live() == 0);
  REQUIRE(p.costs.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(p.costs[i].output_bytes == 10);
    CHECK(p.costs[i].saved_bytes == 20);
    CHECK(p.costs[i].forward_workspace == (i == 1 ? 500 : 0));
    CHECK(p.costs[i].backward_workspace == (i == 1 ? 1000 : 0));
    CHECK(p.costs[i].name == "l" + std::to_string(i));
    CHECK((p.costs[i].forward_time >= 0.004) == (i == 1));
    CHECK(layers[i].first == 0);
    CHECK(layers[i].again == 2);
    CHECK(layers[i].backwards == 2);
  }
  // The workspaces count: simulated as the chain and its layers take them together.
  const rc::schedule s = rc::none{}.plan(p.costs);
  rc::chain c{s, memory, list};
  memory.reset_peak();
  c.forward(in.data());
  c.backward(in.data(), nullptr);
  CHECK(memory.peak_bytes() == rc::simulate(s, p.costs).peak_bytes);

  const std::string path = (std::filesystem::temp_directory_path() / "heddle_profile_test").string();
  net what = random_net(7, 2);
  const rc::chain_profile other = rc::profile(what.list(), what.x.data(), memory);
  CHECK(memory.live() == 0);
  for (const rc::chain_profile& each : {p, other}) {
    each.save(path);
    CHECK(rc::chain_profile::load(path) == each);
  }
  const auto size = std::filesystem::file_size(path);
  std::filesystem::resize_file(path, size - 3);
  CHECK_THROWS_AS(rc::chain_profile::load(path), hd::file_error);
  std::filesystem::remove(path);
  CHECK_THROWS_AS(rc::chain_profile::load(path), hd::file_error);
  CHECK_THROWS_AS(rc::profile(list, in.data(), memory, {.repetitions = 0}), hd::argument_error);
}

namespace {
/// y = w * x element by element, over a weight that several layers may share.
struct scaled {
  std::vector<double>* w;
  std::vector<double>* g;
  std::size_t parameter;
  rc::completion* complete;
  std::vector<std::size_t>* told;
  std::size_t output_bytes() const { return w->size() * sizeof(double); }
  std::size_t saved_bytes() const { return 0; }
  void forward(const void* in, void* out, void*, rc::pass) {
    for (std::size_t i = 0; i < w->size(); ++i)
      static_cast<double*>(out)[i] = (*w)[i] * static_cast<const double*>(in)[i];
  }
  void backward(const void* in, const void*, const void* grad_out, void* grad_in) {
    auto x = static_cast<const double*>(in), d = static_cast<const double*>(grad_out);
    const bool first = complete->first(parameter);
    for (std::size_t i = 0; i < w->size(); ++i) {
      (*g)[i] = (first ? 0.0 : (*g)[i]) + d[i] * x[i];
      if (grad_in) static_cast<double*>(grad_in)[i] = d[i] * (*w)[i];
    }
    if (complete->add(parameter)) told->push_back(parameter);
  }
};
}  // namespace

TEST_CASE("tied weights in two recomputed segments, and micro-batches: each parameter is ready once",
          "[recompute][features]") {
  for (const std::size_t micro_batches : {1, 3}) {
    // Nine layers in three segments; layers 1 and 7 share parameter 1, and layers 2, 4 and 5 share parameter 2.
    const std::vector<std::size_t> uses{0, 1, 2, 3, 2, 2, 4, 1, 5};
    std::vector<std::vector<double>> w(6), g(6);
    for (std::size_t p = 0; p < 6; ++p) {
      for (std::size_t i = 0; i < 3; ++i) w[p].push_back(0.7 + 0.1 * static_cast<double>(p + 2 * i));
      g[p].assign(3, 1e9);
    }
    rc::completion complete{{1, 2, 3, 1, 1, 1}, micro_batches};
    std::vector<std::size_t> told;
    std::vector<scaled> layers;
    for (const std::size_t p : uses) layers.push_back({&w[p], &g[p], p, &complete, &told});
    std::vector<rc::layer> list(layers.begin(), layers.end());
    rc::chain c{rc::sqrt{}, hd::host_resource{}, list};
    CHECK(c.simulated().extra_forwards == 4);
    for (int step = 0; step < 2; ++step) {
      told.clear();
      std::vector<double> product(3), inputs(3);  // sums over micro-batches of x
      for (std::size_t m = 0; m < micro_batches; ++m) {
        const std::vector<double> x{1.0 + static_cast<double>(m), -2, 0.5}, one(3, 1.0);
        for (std::size_t i = 0; i < 3; ++i) inputs[i] += x[i];
        c.forward(x.data());
        c.backward(one.data(), nullptr);
        if (m + 1 < micro_batches) CHECK(told.empty());
      }
      std::vector<std::size_t> sorted = told;
      std::sort(sorted.begin(), sorted.end());
      CHECK(sorted == std::vector<std::size_t>{0, 1, 2, 3, 4, 5});
      CHECK(told == std::vector<std::size_t>{5, 4, 3, 2, 1, 0});
      for (std::size_t i = 0; i < 3; ++i) {  // the output is x times all weights, so a derivative is uses / w times it
        double all = inputs[i];
        for (const std::size_t p : uses) all *= w[p][i];
        for (std::size_t p = 0; p < 6; ++p) {
          const auto times = static_cast<double>(std::count(uses.begin(), uses.end(), p));
          CHECK(g[p][i] == Approx(times * all / w[p][i]).epsilon(1e-12));
        }
      }
    }
  }
  rc::completion c{{2}};
  CHECK_FALSE(c.add(0));
  c.reset();
  CHECK(c.first(0));
  CHECK_FALSE(c.add(0));
  CHECK(c.add(0));
  CHECK_THROWS_AS(c.add(1), hd::argument_error);
  CHECK_THROWS_AS(rc::completion({0}), hd::argument_error);
  CHECK_THROWS_AS(rc::completion({1}, 0), hd::argument_error);
}

namespace {
/// What happened on a rank, in order; an exchange that waits for a recomputation.
struct diary {
  std::mutex mutex;
  std::vector<std::string> lines;
  std::atomic<bool> armed{false}, recomputed{false}, waited_in_vain{false};
  void write(std::string line) {
    std::lock_guard lock(mutex);
    lines.push_back(std::move(line));
  }
  std::size_t at(const std::string& line) const {
    return static_cast<std::size_t>(std::find(lines.begin(), lines.end(), line) - lines.begin());
  }
};

/// A communicator whose exchanges, once armed, are not done before a layer has run again.
template <class Comm> class late : public hd::detail::wrapper<Comm> {
  using hd::detail::wrapper<Comm>::inner_;

 public:
  late(Comm inner, std::shared_ptr<diary> notes)
      : hd::detail::wrapper<Comm>(std::move(inner)), notes_(std::move(notes)) {}
  late duplicate() { return {inner_.duplicate(), notes_}; }
  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    const bool armed = notes_->armed;
    for (int k = 0; armed && !notes_->recomputed && k < 20000; ++k)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (armed && !notes_->recomputed) notes_->waited_in_vain = true;
    inner_.exchange(h, out, in, std::forward<Apply>(apply));
    if (armed) notes_->write("exchanged");
  }

 private:
  std::shared_ptr<diary> notes_;
};
}  // namespace

TEST_CASE("buckets travel while a segment is computed again, and collectives of layers run once",
          "[recompute][features]") {
  hd::threads::run(2, [](auto& world) {
    const auto notes = std::make_shared<diary>();
    late comm(world.duplicate(), notes);
    auto beside = world.duplicate();
    // y = x + w, where layer 1 also sums its output over the ranks: it must not do so again.
    struct shifted {
      std::function<void(float*)> communicate;
      std::function<void()> again, after;
      float* w;
      float* g;
      bool once() const { return communicate != nullptr; }
      std::size_t output_bytes() const { return 4 * sizeof(float); }
      std::size_t saved_bytes() const { return sizeof(float); }
      void forward(const void* in, void* out, void* saved, rc::pass kind) {
        if (kind == rc::pass::again) again();
        for (std::size_t i = 0; i < 4; ++i) static_cast<float*>(out)[i] = static_cast<const float*>(in)[i] + w[i];
        if (communicate) communicate(static_cast<float*>(out));
        if (saved) *static_cast<float*>(saved) = static_cast<float*>(out)[0];
      }
      void backward(const void*, const void*, const void* grad_out, void* grad_in) {
        std::copy_n(static_cast<const float*>(grad_out), 4, g);
        if (grad_in) std::copy_n(static_cast<const float*>(grad_out), 4, static_cast<float*>(grad_in));
        after();
      }
    };
    std::vector<float> w(16, 1.0f), g(16);
    const std::array<std::size_t, 4> sizes{4, 4, 4, 4};
    hd::data_parallel dp{hd::strategy{.topology = hd::direct{}, .buckets = {.first = 1, .cap = 1}}, comm,
                         hd::tensors(w.data(), g.data(), sizes), hd::sgd{}};
    int sums = 0;
    std::vector<shifted> layers(4);
    for (std::size_t i = 0; i < 4; ++i) {
      layers[i].w = w.data() + 4 * i;
      layers[i].g = g.data() + 4 * i;
      layers[i].again = [&notes, i] {
        notes->write("again " + std::to_string(i));
        if (i == 0) notes->recomputed = true;
      };
      layers[i].after = [&notes, &dp, i] {
        dp.ready(i);
        notes->write("ready " + std::to_string(i));
      };
    }
    layers[1].communicate = [&](float* y) {
      ++sums;
      hd::all_reduce(beside, hd::direct{}, std::span<float>(y, 4));
    };
    std::vector<rc::layer> list(layers.begin(), layers.end());
    rc::chain c{rc::every{2}, hd::host_resource{}, list};
    const std::vector<float> x(4, 1.0f), top(4, static_cast<float>(world.rank() + 1));
    const auto* y = static_cast<const float*>(c.forward(x.data()));
    RANK_CHECK(y[0] == 2 * 3.0f + 2.0f);
    dp.begin({});
    notes->armed = true;
    c.backward(top.data(), nullptr);
    notes->armed = false;
    RANK_CHECK(sums == 1);
    dp.step({.lr = 1.0f});
    RANK_CHECK(!notes->waited_in_vain);
    RANK_CHECK(notes->at("ready 3") < notes->at("again 0"));
    RANK_CHECK(notes->at("again 0") < notes->at("exchanged"));
    RANK_CHECK(notes->at("again 0") < notes->at("ready 0"));
    for (const float v : w) RANK_CHECK(v == 1.0f - 1.5f);
  });
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The sharded optimizer against the unsharded one, bit for bit, and both against double precision. Topologies and rules
// are chosen at run time, so that few trainers are compiled.
#include <heddle/collective/automatic_buckets.hpp>
#include <heddle/mode/zero1.hpp>
#include <heddle/optim/lamb.hpp>
#include <heddle/optim/lars.hpp>

#include "support.hpp"

#include <limits>
#include <memory>

namespace {
struct plain_rule {
  bool adam = true;
  std::size_t fails_at = 1000;
  static constexpr int slots = 2;
  void update(float* p, const float* g, float* const* s, std::size_t n, const hd::update_context& x) const {
    if (x.step == fails_at) throw std::runtime_error("the rule failed");
    if (adam) hd::adamw{.weight_decay = 0.1f}.update(p, g, s, n, x);
    else hd::sgd{.momentum = 0.9f, .nesterov = true}.update(p, g, s, n, x);
  }
};

struct layer_rule {
  bool lamb = true;
  hd::lamb a{.weight_decay = 0.1f};
  hd::lars b{.momentum = 0.9f, .weight_decay = 0.1f, .trust = 0.02f};
  static constexpr int slots = 2;
  hd::layer_squares advance(const float* p, const float* g, float* const* s, std::size_t n,
                            const hd::update_context& x) const {
    return lamb ? a.advance(p, g, s, n, x) : b.advance(p, g, s, n, x);
  }
  void apply(float* p, const float* g, float* const* s, std::size_t n, const hd::update_context& x,
             const hd::layer_squares& all) const {
    lamb ? a.apply(p, g, s, n, x, all) : b.apply(p, g, s, n, x, all);
  }
  void update(float* p, const float* g, float* const* s, std::size_t n, const hd::update_context& x) const {
    apply(p, g, s, n, x, advance(p, g, s, n, x));
  }
};
static_assert(hd::layerwise<layer_rule>);

struct settings {
  int ranks = 3;
  float lr = 0.02f, max_norm = 0.0f;
  bool scattered = false;   // tensors apart from each other in memory
  std::size_t from = 0, steps = 12;
  float poison = 0.0f;      // in an extra step after the third, on the last rank
  bool uneven = false;      // rank r has `r` batches fewer
  std::string load = {}, save = {};
};

// Parameters of every rank, in the order of the model.
template <class Plan, class Rule>
std::vector<std::vector<float>> run(const Plan& plan, const Rule& rule, const settings& o) {
  std::vector<std::vector<float>> out(static_cast<std::size_t>(o.ranks));
  hd::threads::run({.ranks = o.ranks, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
    quadratic m;
    std::vector<std::unique_ptr<std::vector<float>>> apart;
    auto tensors = m.tensors();
    for (std::size_t i = tensors.size(); o.scattered && i-- > 0;) {
      for (void** p : {&tensors[i].parameter, &tensors[i].gradient}) {
        apart.push_back(std::make_unique<std::vector<float>>(tensors[i].count + 3, 0.5f));
        *p = apart.back()->data();
      }
    }
    tensors[3].group = 1;
    hd::data_parallel dp{plan, comm, tensors, rule};
    const hd::group_options groups[2] = {{}, {.lr_scale = 0.5f, .decay_scale = 0.0f}};
    dp.groups(groups);
    if (!o.load.empty()) dp.load(o.load);
    const auto collect = [&] {
      for (std::size_t i = 0, at = 0; i < tensors.size(); at += tensors[i++].count)
        std::copy_n(static_cast<const float*>(tensors[i].parameter), tensors[i].count, m.w.data() + at);
    };
    const auto step = [&](std::size_t s, float poison) {
      collect();
      quadratic::gradient(m.w.data(), m.g.data(), first_sample(s, comm.rank(), o.ranks, 2), 2);
      if (poison != 0.0f && comm.rank() == o.ranks - 1) m.g[500] = poison;
      for (std::size_t i = 0, at = 0; i < tensors.size(); at += tensors[i++].count) {
        if (o.scattered) std::copy_n(m.g.data() + at, tensors[i].count, static_cast<float*>(tensors[i].gradient));
      }
      for (std::size_t i = tensors.size(); i-- > 0;) dp.ready(i);
      const hd::step_result r = dp.step({.lr = o.lr, .max_norm = o.max_norm});
      RANK_CHECK(r.skipped == (poison != 0.0f));
      RANK_CHECK(std::isfinite(r.norm) == !r.skipped || o.max_norm == 0.0f);
    };
    const std::size_t steps = o.steps - (o.uneven ? static_cast<std::size_t>(comm.rank()) : 0);
    for (std::size_t s = o.from; s < o.from + steps; ++s) {
      if (s == o.from + 3 && o.poison != 0.0f) step(s, o.poison);
      step(s, 0.0f);
    }
    dp.join();
    if (!o.save.empty()) dp.save(o.save);
    collect();
    out[static_cast<std::size_t>(comm.rank())] = m.w;
  });
  return out;
}

template <class Topology, class Rule, class Compressor = hd::none>
std::vector<float> both(const Topology& t, const Rule& rule, const settings& o, hd::buckets b = {}, std::size_t lanes = 1,
                        const Compressor& c = {}) {
  const auto whole = run(hd::strategy{.topology = t, .compressor = c, .buckets = b, .lanes = lanes}, rule, o);
  const auto shards =
      run(hd::strategy{.topology = t, .compressor = c, .mode = hd::zero1{}, .buckets = b, .lanes = lanes}, rule, o);
  CHECK(all_equal(whole));
  CHECK(all_equal(shards));
  CHECK((whole[0] == shards[0]));
  return shards[0];
}
}  // namespace

TEST_CASE("a sharded optimizer gives the bits of an unsharded one") {
  for (const int ranks : {1, 2, 3, 4, 5, 7, 8}) {
    for (int t = 0; t < 6; ++t) {
      CAPTURE(ranks, t);
      settings o{.ranks = ranks, .max_norm = ranks % 2 ? 4.0f : 0.0f, .scattered = t % 2 == 1, .steps = 5};
      const hd::buckets small = t < 3 ? hd::buckets{} : hd::buckets{.first = 64, .cap = 1300};
      both(any_topology{t}, plain_rule{t % 2 == 0}, o, small, t == 4 ? 2 : 1);
      o.max_norm = 4.0f - o.max_norm;
      both(any_topology{t}, layer_rule{t % 2 == 0}, o, small);
    }
    both(hd::native{}, plain_rule{}, {.ranks = ranks, .max_norm = 4.0f, .steps = 5});
  }
  for (const int ranks : {2, 5}) {
    both(any_topology{4}, plain_rule{}, {.ranks = ranks, .max_norm = 4.0f}, {}, 1, hd::cast<hd::bfloat16>{});
    both(any_topology{}, plain_rule{}, {.ranks = ranks, .uneven = true}, {.first = 64, .cap = 1300});
    both(any_topology{}, layer_rule{}, {.ranks = ranks, .max_norm = 4.0f, .uneven = true});
  }
}

namespace {
// One process in double precision: rule(w, g, first, last, decayed, step) moves a tensor.
template <class Rule>
std::vector<double> oracle(int ranks, std::size_t steps, double max_norm, Rule&& rule) {
  std::vector<double> w(quadratic::count, 0.5), g(quadratic::count);
  for (std::size_t s = 0; s < steps; ++s) {
    const std::size_t n = static_cast<std::size_t>(ranks) * 2;
    quadratic::gradient(w.data(), g.data(), s * n, n);
    double squares = 0.0;
    for (const double x : g) squares += x * x;
    if (max_norm > 0.0 && std::sqrt(squares) > max_norm) {
      for (double& x : g) x *= max_norm / std::sqrt(squares);
    }
    std::size_t at = 0;
    for (std::size_t i = 0; i < quadratic::sizes.size(); at += quadratic::sizes[i++])
      rule(w.data() + at, g.data() + at, at, quadratic::sizes[i], i == 3, s + 1);
  }
  return w;
}

double norm(const double* x, std::size_t n) {
  double sum = 0.0;
  for (std::size_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return std::sqrt(sum);
}
}  // namespace

TEST_CASE("clipping by the global norm, LARS and LAMB follow double precision, sharded") {
  const double lr = static_cast<double>(0.02f), decay = static_cast<double>(0.1f);
  std::vector<double> m(quadratic::count), v(quadratic::count);
  const auto moments = [&](double g, std::size_t i, std::size_t t, float eps) {
    const double b1 = static_cast<double>(0.9f), b2 = static_cast<double>(0.999f);
    m[i] = b1 * m[i] + (1.0 - b1) * g;
    v[i] = b2 * v[i] + (1.0 - b2) * g * g;
    return m[i] / (1.0 - std::pow(b1, t)) / (std::sqrt(v[i] / (1.0 - std::pow(b2, t))) + static_cast<double>(eps));
  };
  const auto reset = [&] {
    m.assign(quadratic::count, 0.0);
    v.assign(quadratic::count, 0.0);
  };
  const settings o{.ranks = 4, .max_norm = 4.0f};
  reset();
  CHECK(distance(both(any_topology{}, plain_rule{}, o),
                 oracle(4, o.steps, 4.0, [&](double* w, const double* g, std::size_t at, std::size_t n, bool alone, std::size_t t) {
                   for (std::size_t i = 0; i < n; ++i)
                     w[i] -= (alone ? lr / 2 : lr) * (moments(g[i], at + i, t, 1e-8f) + (alone ? 0.0 : decay) * w[i]);
                 })) < 2e-5);
  reset();
  CHECK(distance(both(any_topology{}, layer_rule{}, o),
                 oracle(4, o.steps, 4.0, [&](double* w, const double* g, std::size_t at, std::size_t n, bool alone, std::size_t t) {
                   std::vector<double> r(n);
                   for (std::size_t i = 0; i < n; ++i) r[i] = moments(g[i], at + i, t, 1e-6f) + (alone ? 0.0 : decay) * w[i];
                   const double ratio = alone ? 1.0 : norm(w, n) / norm(r.data(), n);
                   for (std::size_t i = 0; i < n; ++i) w[i] -= (alone ? lr / 2 : lr) * ratio * r[i];
                 })) < 2e-5);
  reset();
  CHECK(distance(both(any_topology{}, layer_rule{false}, o),
                 oracle(4, o.steps, 4.0, [&](double* w, const double* g, std::size_t at, std::size_t n, bool alone, std::size_t) {
                   const double p = norm(w, n), ratio = alone ? 1.0 : static_cast<double>(0.02f) * p / (norm(g, n) + decay * p);
                   for (std::size_t i = 0; i < n; ++i) {
                     m[at + i] = static_cast<double>(0.9f) * m[at + i] +
                                 (alone ? lr / 2 : lr) * ratio * (g[i] + (alone ? 0.0 : decay) * w[i]);
                     w[i] -= m[at + i];
                   }
                 })) < 2e-6);
}

TEST_CASE("sharded: a gradient that is not finite on one rank makes every rank skip, and no state moves") {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const float max_norm : {0.0f, 4.0f}) {
      settings o{.ranks = 4, .max_norm = max_norm};
      const auto good = run(hd::strategy{.topology = any_topology{}, .mode = hd::zero1{}}, plain_rule{}, o);
      o.poison = bad;
      CHECK((both(any_topology{}, plain_rule{}, o) == good[0]));
      const auto layers = both(any_topology{}, layer_rule{}, o);
      o.poison = 0.0f;
      CHECK((both(any_topology{}, layer_rule{}, o) == layers));
    }
  }
}

TEST_CASE("sharded state is the unsharded one's divided by the ranks, and so much is sent as unsharded") {
  hd::threads::run(4, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.topology = hd::ring{}, .mode = hd::zero1{}}, comm, m.tensors(), hd::adamw{}};
    const auto start = dp.report();
    train_step(dp, m, 0, 1, 0.1f);
    const auto end = dp.report();
    const std::size_t own = comm.rank() == 0 ? 261 : 260;  // of 1041
    RANK_CHECK(end.state_bytes == own * 8);
    std::vector<double> sent{static_cast<double>(end.bytes_sent - start.bytes_sent)};
    hd::all_reduce(comm, hd::direct{}, std::span<double>(sent), hd::sum{});
    RANK_CHECK(sent[0] == 2 * 3 * 1041 * 4);
    RANK_CHECK(end.executor == "schedule: ring");
  });
}

TEST_CASE("a sharded checkpoint goes on with the same and with other numbers of ranks, topologies and buckets") {
  for (const int ranks : {4, 1, 2, 7}) {
    scratch_directory dir[3];
    const auto sharded = [](int t, hd::buckets b = {}) {
      return hd::strategy{.topology = any_topology{t}, .mode = hd::zero1{}, .buckets = b};
    };
    const auto whole = hd::strategy{.topology = any_topology{4}};
    CHECK((run(whole, plain_rule{}, {.ranks = 4, .save = dir[0].path()}) ==
           run(sharded(4), plain_rule{}, {.ranks = 4, .save = dir[1].path()})));
    // The sum in rank order doesn't depend on who owns what, so nor may what follows.
    const auto expected = run(whole, plain_rule{}, {.ranks = ranks, .from = 12, .load = dir[0].path()});
    CHECK((run(sharded(4), plain_rule{}, {.ranks = ranks, .from = 12, .load = dir[1].path()}) == expected));
    CHECK((run(sharded(4, {.first = 64, .cap = 1300}), plain_rule{}, {.ranks = ranks, .from = 12, .load = dir[1].path()}) ==
           expected));
  }
  scratch_directory dir;
  run(hd::strategy{.topology = any_topology{}, .mode = hd::zero1{}}, plain_rule{}, {.ranks = 3, .save = dir.path()});
  std::remove((dir.path() + "/checkpoint-1.rank-1").c_str());
  CHECK_THROWS_AS(run(hd::strategy{.topology = any_topology{}, .mode = hd::zero1{}}, plain_rule{}, {.ranks = 2, .load = dir.path()}),
                  hd::file_error);
}

TEST_CASE("a rank that fails between the halves ends the others, which wait for its parameters") {
  int told = 0;
  std::mutex lock;
  CHECK_THROWS_WITH(hd::threads::run({.ranks = 4, .deadline = std::chrono::seconds(20)},
                                     [&](auto& comm) {
                                       quadratic m;
                                       const auto plan = hd::strategy{.topology = any_topology{}, .mode = hd::zero1{}};
                                       const plain_rule rule{.fails_at = comm.rank() == 2 ? 3u : 1000u};
                                       hd::data_parallel dp{plan, comm, m.tensors(), rule};
                                       try {
                                         for (std::size_t s = 0; s < 10; ++s) train_step(dp, m, s, 1, 0.1f);
                                       } catch (const hd::comm_error& e) {
                                         std::lock_guard guard(lock);
                                         told += e.peer() == 2;
                                         throw;
                                       }
                                     }),
                    "the rule failed");
  CHECK(told == 3);
}

TEST_CASE("buckets by the model train to the same values, in as many messages as the model says") {
  const hd::links costs{{{1e-10, 1e-9}, hd::sharing::rank}, {}, 0, 0};
  const auto plan =
      hd::strategy{.topology = any_topology{4}, .mode = hd::zero1{}, .buckets = hd::automatic_buckets{costs}};
  const std::vector<std::size_t> bytes{28, 0, 4000, 4, 132};
  CHECK(plan.buckets.plan(hd::direct{}, 3, bytes).size() > 1);
  const auto fixed = hd::strategy{.topology = any_topology{4}, .mode = hd::zero1{}};
  CHECK((run(plan, plain_rule{}, {.ranks = 3}) == run(fixed, plain_rule{}, {.ranks = 3})));
}

TEST_CASE("a limit on the global norm is refused where gradients are held back, and where it isn't a limit") {
  hd::threads::run(1, [](auto& comm) {
    quadratic m;
    hd::data_parallel held{hd::strategy{.compressor = hd::dgc{}}, comm, m.tensors(), hd::sgd{}};
    RANK_CHECK_THROWS_AS(held.step({.lr = 0.1f, .max_norm = 1.0f}), hd::argument_error);
    hd::data_parallel dp{hd::strategy{}, comm, m.tensors(), hd::sgd{}};
    RANK_CHECK_THROWS_AS(dp.step({.lr = 0.1f, .max_norm = -1.0f}), hd::argument_error);
  });
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"

#include <limits>

namespace {
template <class Topology>
void exact(const Topology& t, int ranks) {
  const auto plan = hd::strategy{.topology = t};
  const auto momentum = train(plan, hd::sgd{.momentum = 0.9f, .nesterov = true, .weight_decay = 0.01f}, ranks, 30, 0.05f);
  CHECK(all_equal(momentum));
  CHECK(distance(momentum[0], reference(ranks, 30, 2, momentum_oracle(0.05, 0.9, 0.01, true))) < 1e-5);
  const auto adam = train(plan, hd::adamw{.weight_decay = 0.1f}, ranks, 30, 0.02f);
  CHECK(all_equal(adam));
  CHECK(distance(adam[0], reference(ranks, 30, 2, adamw_oracle(0.02, 0.1))) < 1e-4);
  CHECK((train(plan, hd::adamw{.weight_decay = 0.1f}, ranks, 30, 0.02f) == adam));  // two runs, bit for bit
}
}  // namespace

TEST_CASE("every topology trains like a single process in double precision") {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    CAPTURE(ranks);
    exact(hd::ring{}, ranks);
    exact(hd::direct{}, ranks);
    exact(hd::torus_2d{}, ranks);
    exact(hd::halving_doubling{}, ranks);
    exact(hd::hierarchical{hd::ring{}, hd::direct{}, 3}, ranks);
    exact(hd::native{}, ranks);
  }
}

TEST_CASE("16-bit wires stay close and equal on all ranks") {
  const auto exact_w = reference(4, 30, 2, momentum_oracle(0.05, 0.9, 0.0, false));
  const auto half = train(hd::strategy{.topology = hd::hierarchical{hd::ring{}, hd::ring{}}, .compressor = hd::cast<hd::float16>{}},
                          hd::sgd{.momentum = 0.9f}, 4, 30, 0.05f);
  CHECK(all_equal(half));
  CHECK(distance(half[0], exact_w) < 2e-3);
  const auto brain = train(hd::strategy{.topology = hd::direct{}, .compressor = hd::cast<hd::bfloat16>{}},
                           hd::sgd{.momentum = 0.9f}, 4, 30, 0.05f);
  CHECK(all_equal(brain));
  CHECK(distance(brain[0], exact_w) < 1e-2);
}

TEST_CASE("buckets change no result where the sum doesn't depend on who owns what") {
  const auto run = [](hd::buckets b, std::size_t lanes = 1, int ranks = 3) {
    return train(hd::strategy{.topology = hd::direct{}, .buckets = b, .lanes = lanes}, hd::sgd{.momentum = 0.9f}, ranks, 10, 0.05f);
  };
  const auto one = run({});
  CHECK((run({.first = 1, .cap = 1}) == one));
  CHECK((run({.first = 64, .cap = 1300}) == one));
  const auto packets = [](hd::buckets b, std::size_t lanes = 1) {
    return train(hd::strategy{.topology = hd::direct{}, .compressor = hd::dgc{.sparsity = 0.9, .dense_below = 10}, .buckets = b, .lanes = lanes}, hd::sgd{.momentum = 0.9f}, 3, 10, 0.05f);
  };
  const auto one_packet = packets({});
  CHECK((packets({.first = 1, .cap = 1}) == one_packet));
  // Nor do lanes, more than there are buckets or fewer.
  for (const std::size_t lanes : {2, 3, 9}) {
    CHECK((run({.first = 1, .cap = 1}, lanes) == one));
    CHECK((packets({.first = 1, .cap = 1}, lanes) == one_packet));
    for (const int ranks : {1, 4}) CHECK((run({.first = 1, .cap = 1}, lanes, ranks) == run({}, 1, ranks)));
  }
}

TEST_CASE("a tensor larger than the bucket and all after it are reduced") {
  // Tensor 2 has 4000 bytes, the cap is 1000: it and its neighbours arrive.
  const auto r = train(hd::strategy{.topology = hd::ring{}, .buckets = {.first = 100, .cap = 1000}}, hd::sgd{}, 4, 5, 0.1f);
  CHECK(all_equal(r));
  CHECK(distance(r[0], reference(4, 5, 2, momentum_oracle(0.1, 0.0, 0.0, false))) < 1e-6);
}

namespace {
// Trains 10 steps; with `poison`, rank 1's gradient is not finite in an extra step after the third.
template <class Plan, class Rule>
std::vector<float> with_bad_step(const Plan& plan, const Rule& rule, bool poison, float bad) {
  std::vector<float> out;
  hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), rule};
    for (std::size_t s = 0; s < 10; ++s) {
      if (s == 3 && poison) {
        const std::vector<float> before = m.w;
        quadratic::gradient(m.w.data(), m.g.data(), 0, 1);
        if (comm.rank() == 1) m.g[500] = bad;
        for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
        const bool skipped = dp.step({.lr = 0.05f}).skipped;
        if (!skipped || m.w != before) throw std::runtime_error("rank " + std::to_string(comm.rank()) + " did not skip");
      }
      if (train_step(dp, m, first_sample(s, comm.rank(), 3, 2), 2, 0.05f).skipped) throw std::runtime_error("skipped a good step");
    }
    if (dp.report().skipped != (poison ? 1u : 0u) || dp.report().steps != 10) throw std::runtime_error("wrong counts");
    if (comm.rank() == 0) out = m.w;
  });
  return out;
}
}  // namespace

TEST_CASE("a gradient that is not finite on one rank makes every rank skip, and leaves every state as it was") {
  // If any state had moved, the steps after it would differ from those of a run without it.
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const auto same = [&](const auto& plan, const auto& rule) {
      CHECK((with_bad_step(plan, rule, true, bad) == with_bad_step(plan, rule, false, bad)));
    };
    same(hd::strategy{.topology = hd::ring{}}, hd::adamw{});
    same(hd::strategy{.topology = hd::native{}}, hd::sgd{.momentum = 0.9f});
    same(hd::strategy{.topology = hd::direct{}, .compressor = hd::cast<hd::float16>{}}, hd::sgd{.momentum = 0.9f});
    same(hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .dense_below = 10}}, hd::sgd{.momentum = 0.9f});
    same(hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .begin_step = 6, .dense_below = 10}}, hd::sgd{.momentum = 0.9f});
    same(hd::strategy{.compressor = hd::clip{} | hd::dgc{.sparsity = 0.9, .dense_below = 10}}, hd::sgd{.momentum = 0.9f});
  }
}

TEST_CASE("uneven numbers of batches, weighted by samples, equal the single process") {
  // Rank r has 5 + 2 r batches of 2 + r samples.
  for (const int ranks : {1, 2, 3}) {
    std::vector<double> w(quadratic::count, 0.5), v(quadratic::count, 0.0);
    const auto batches = [](int r) { return 5 + 2 * static_cast<std::size_t>(r); };
    const auto size = [](int r) { return 2 + static_cast<std::size_t>(r); };
    const auto first = [](std::size_t s, int r) { return s * 100 + static_cast<std::size_t>(r) * 10; };
    const std::size_t most = batches(ranks - 1);
    for (std::size_t s = 0; s < most; ++s) {
      std::vector<double> sum(quadratic::count, 0.0), g(quadratic::count);
      double n = 0.0;
      for (int r = 0; r < ranks; ++r) {
        if (s >= batches(r)) continue;
        quadratic::gradient(w.data(), g.data(), first(s, r), size(r));
        for (std::size_t i = 0; i < g.size(); ++i) sum[i] += g[i] * static_cast<double>(size(r));
        n += static_cast<double>(size(r));
      }
      const auto rule = momentum_oracle(0.05, 0.9, 0.0, false);
      double none = 0.0;
      for (std::size_t i = 0; i < w.size(); ++i) rule(w[i], sum[i] / n, v[i], none, s + 1);
    }
    const auto run = [&](const auto& plan, double tolerance) {
      hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
        quadratic m;
        hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
        const int r = comm.rank();
        for (std::size_t s = 0; s < batches(r); ++s) train_step(dp, m, first(s, r), size(r), 0.05f);
        std::fill(m.g.begin(), m.g.end(), std::numeric_limits<float>::quiet_NaN());  // joined: its memory is not read
        dp.join();
        if (distance(m.w, w) > tolerance) throw std::runtime_error("off by " + std::to_string(distance(m.w, w)));
        if (dp.report().steps != most) throw std::runtime_error("wrong number of steps");
      });
    };
    CHECK_NOTHROW(run(hd::strategy{.topology = hd::ring{}}, 1e-5));
    CHECK_NOTHROW(run(hd::strategy{.topology = hd::native{}}, 1e-5));
    CHECK_NOTHROW(run(hd::strategy{.topology = hd::direct{}, .compressor = hd::cast<hd::bfloat16>{}}, 3e-2));
    CHECK_NOTHROW(run(hd::strategy{.compressor = hd::dgc{.begin_step = 1000}}, 1e-5));
  }
}

TEST_CASE("the last rank with data is not clipped by a 16-bit wire") {
  // Eight ranks, one with samples: its gradient of 20000 is the mean, though its weight is 8.
  hd::threads::run(8, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.topology = hd::direct{}, .compressor = hd::cast<hd::float16>{}}, comm, m.tensors(), hd::sgd{}};
    dp.begin({.samples = comm.rank() == 5 ? 3.0 : 0.0});
    std::fill(m.g.begin(), m.g.end(), 20000.0f);
    for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
    if (dp.step({.lr = 1e-5f}).skipped) throw std::runtime_error("skipped");
    for (const float x : m.w) {
      if (std::fabs(x - 0.3f) > 1e-4f) throw std::runtime_error("wrong: " + std::to_string(x));
    }
  });
}

TEST_CASE("eight ranks' mean by a float16 wire is right at both ends of its range") {
  // 8 * 20000 is beyond float16; 6e-8 is its smallest number, and an eighth of it would be zero.
  for (const float g : {20000.0f, 6e-8f}) {
    const float mean = static_cast<float>(hd::float16(g));
    hd::threads::run(8, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{hd::strategy{.topology = hd::direct{}, .compressor = hd::cast<hd::float16>{}}, comm,
                           m.tensors(), hd::sgd{}};
      std::fill(m.g.begin(), m.g.end(), g);
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
      RANK_CHECK_FALSE(dp.step({.lr = 0.125f / mean}).skipped);
      for (const float x : m.g) RANK_CHECK(x == mean);
      for (const float x : m.w) RANK_CHECK(std::fabs(x - 0.375f) < 1e-6f);
    });
  }
}

TEST_CASE("groups scale learning rate and decay") {
  hd::threads::run(2, [](auto& comm) {
    quadratic m;
    auto tensors = m.tensors();
    tensors[2].group = 1;
    hd::data_parallel dp{hd::strategy{}, comm, tensors, hd::sgd{.weight_decay = 0.5f}};
    const hd::group_options groups[2] = {{}, {.lr_scale = 0.0f}};
    dp.groups(groups);
    train_step(dp, m, 0, 1, 0.1f);
    RANK_CHECK(m.w[6] != 0.5f);
    RANK_CHECK(m.w[7] == 0.5f);
    RANK_CHECK(m.w[1006] == 0.5f);
    RANK_CHECK(m.w[1007] != 0.5f);
  });
}

TEST_CASE("the report counts the bytes of the formula") {
  // 1041 floats over 4 ranks by a ring: blocks of 261, 260, 260, 260; each rank sends all blocks but one, twice.
  hd::threads::run(4, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.topology = hd::ring{}}, comm, m.tensors(), hd::sgd{}};
    const auto start = dp.report();
    for (std::size_t s = 0; s < 3; ++s) train_step(dp, m, s, 1, 0.1f);
    const auto end = dp.report();
    std::vector<double> sent{static_cast<double>(end.bytes_sent - start.bytes_sent) / 3};
    hd::all_reduce(comm, hd::direct{}, std::span<double>(sent), hd::sum{});
    if (comm.rank() == 0) {
      RANK_CHECK(sent[0] == 2 * 3 * 1041 * 4);
      RANK_CHECK(end.messages - start.messages == 3 * 6);
      RANK_CHECK(end.executor == "schedule: ring");
      RANK_CHECK(end.steps == 3);
      RANK_CHECK(end.state_bytes == 1041 * 4);
      RANK_CHECK(end.elements_sent == 3 * 1041);
    }
  });
}

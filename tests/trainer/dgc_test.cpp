// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"

namespace {
std::vector<float> dgc_run(hd::dgc c, hd::sgd rule, int ranks, std::size_t steps) {
  const auto r = train(hd::strategy{.compressor = c}, rule, ranks, steps, 0.05f);
  CHECK(all_equal(r));
  return r[0];
}
}  // namespace

TEST_CASE("DGC that sends everything is momentum SGD without masking, plain SGD with it") {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const bool nesterov : {false, true}) {
      const hd::sgd rule{.momentum = 0.9f, .nesterov = nesterov, .weight_decay = 0.01f};
      const auto momentum = reference(ranks, 100, 2, momentum_oracle(static_cast<double>(0.05f), static_cast<double>(0.9f), static_cast<double>(0.01f), nesterov));
      const auto off = dgc_run({.sparsity = 0.0, .dense_below = 0, .masking = false}, rule, ranks, 100);
      CHECK(distance(off, momentum) < 2e-6);
      // In the dense phase, and for small tensors, U is the velocity.
      CHECK(distance(dgc_run({.begin_step = 1000}, rule, ranks, 100), momentum) < 2e-6);
      CHECK(distance(dgc_run({.dense_below = 5000}, rule, ranks, 100), momentum) < 2e-6);
      // The momentum survives the switch to packets.
      CHECK(distance(dgc_run({.sparsity = 0.0, .begin_step = 50, .dense_below = 0, .masking = false}, rule, ranks, 100), momentum) < 2e-6);
    }
    const auto plain = reference(ranks, 100, 2, momentum_oracle(static_cast<double>(0.05f), 0.0, static_cast<double>(0.01f), false));
    const hd::sgd rule{.momentum = 0.9f, .weight_decay = 0.01f};
    CHECK(distance(dgc_run({.sparsity = 0.0, .dense_below = 0}, rule, ranks, 100), plain) < 2e-6);
  }
}

TEST_CASE("DGC converges while it sends a tenth, and sends what it says") {
  hd::threads::run(4, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .dense_below = 500}}, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
    const auto start = dp.report();
    for (std::size_t s = 0; s < 400; ++s) train_step(dp, m, first_sample(s, comm.rank(), 4, 2), 2, 0.01f);
    const auto end = dp.report();
    if (comm.rank() == 0) RANK_CHECK(quadratic::loss(m.w) < 0.01);
    // Ring gather: each packet (8 + 8 * 100 bytes) passes three times; 41 small elements by a dense ring.
    std::vector<double> sent{static_cast<double>(end.bytes_sent - start.bytes_sent) / 400};
    hd::all_reduce(comm, hd::direct{}, std::span<double>(sent), hd::sum{});
    if (comm.rank() == 0) RANK_CHECK(sent[0] == 4 * 3 * (8 + 8 * 100) + 2 * 3 * 41 * 4);
  });
}

TEST_CASE("a rank without gradient, and a rank that selects nothing, are legal") {
  hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(5)}, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .dense_below = 0}}, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
    for (std::size_t s = 0; s < 5; ++s) {
      quadratic::gradient(m.w.data(), m.g.data(), s, 1);
      if (comm.rank() == 1 || s == 3) std::fill(m.g.begin(), m.g.end(), 0.0f);
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
      RANK_CHECK_FALSE(dp.step({.lr = 0.01f}).skipped);
    }
  });
}

TEST_CASE("what was sent and what is held add up, through skipped steps, a checkpoint and other numbers of ranks") {
  // Rates of zero keep w fixed, so what was sent is the sum of updates / lr; instead lr 1 makes it w0 - w.
  scratch_directory dir;
  const hd::sgd rule{.momentum = 0.5f};
  const auto plan = hd::strategy{.compressor = hd::dgc{.sparsity = 0.95, .dense_below = 0}};
  std::vector<double> input(quadratic::count, 0.0), sent(quadratic::count, 0.0), held(quadratic::count, 0.0);
  std::vector<float> w(quadratic::count, 0.5f);
  std::mutex lock;
  std::size_t step = 0;
  for (const int ranks : {4, 2, 8, 3}) {
    std::vector<double> before(quadratic::count), after(quadratic::count, 0.0);
    std::copy(held.begin(), held.end(), before.begin());
    const std::size_t from = step;
    hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{plan, comm, m.tensors(), rule};
      if (from) dp.load(dir.path());
      std::vector<double> loaded(quadratic::count, 0.0);
      const auto add_held = [&](std::vector<double>& to, double sign) {
        std::size_t at = 0;
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
          for (const float v : dp.held(i, 1)) to[at++] += sign * v;
        }
      };
      {
        std::lock_guard guard(lock);
        add_held(after, 1.0);
      }
      hd::barrier(comm);
      if (comm.rank() == 0 && from) {
        double worst = 0.0, scale = 0.0;
        for (std::size_t i = 0; i < after.size(); ++i) {
          worst = std::max(worst, std::fabs(after[i] - before[i]));
          scale = std::max(scale, std::fabs(before[i]));
        }
        RANK_CHECK(worst <= 1e-6 * scale);
      }
      for (std::size_t s = from; s < from + 25; ++s) {
        for (std::size_t i = 0; i < m.g.size(); ++i) m.g[i] = static_cast<float>(quadratic::noise(s * 10 + static_cast<std::size_t>(comm.rank()), i));
        const bool bad = s == from + 7;
        if (bad && comm.rank() == ranks - 1) m.g[17] = NAN;
        std::vector<float> u0;
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) u0.insert(u0.end(), dp.held(i, 0).begin(), dp.held(i, 0).end());
        std::vector<float> mine(m.g.size());
        for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = 0.5f * u0[i] + m.g[i] * (1.0f / static_cast<float>(ranks));
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
        const bool skipped = dp.step({.lr = 1.0f}).skipped;
        if (skipped != bad) throw std::runtime_error("skipped the wrong step");
        if (!skipped) {
          std::lock_guard guard(lock);
          for (std::size_t i = 0; i < mine.size(); ++i) input[i] += mine[i];
          if (comm.rank() == 0) {
            for (std::size_t i = 0; i < mine.size(); ++i) sent[i] += m.g[i];  // what the exchange left in the gradient
          }
        }
        hd::barrier(comm);
      }
      dp.save(dir.path());
      hd::barrier(comm);
      {
        std::lock_guard guard(lock);
        if (comm.rank() == 0) std::fill(held.begin(), held.end(), 0.0);
      }
      hd::barrier(comm);
      std::lock_guard guard(lock);
      add_held(held, 1.0);
    });
    double worst = 0.0, scale = 0.0;
    for (std::size_t i = 0; i < input.size(); ++i) {
      worst = std::max(worst, std::fabs(input[i] - (sent[i] + held[i])));
      scale = std::max(scale, std::fabs(input[i]));
    }
    CHECK(worst <= 1e-6 * std::max(scale, 1.0) * 10);
    step += 25;
  }
}

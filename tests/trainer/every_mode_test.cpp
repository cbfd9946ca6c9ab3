// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// What jobs meet, under every mode: a rank without batches, uneven epochs, other numbers of ranks after a save, an
// error in the middle of a step; and every mode over every topology.
#include <heddle/mode/adaptive_period.hpp>
#include <heddle/mode/elastic_sgd.hpp>
#include <heddle/mode/geo_sgd.hpp>
#include <heddle/mode/outer_momentum.hpp>
#include <heddle/mode/zero1.hpp>
#include <heddle/trainer/hogwild.hpp>
#include <heddle/trainer/server.hpp>

#include "support.hpp"

#include <atomic>

namespace {
const double start = quadratic::loss(quadratic{}.w);

// Steps of rank r in an epoch: the last rank has no batch at all.
std::size_t batches(int rank, int ranks) {
  return rank + 1 == ranks && ranks > 1 ? 0 : 14 + 6 * static_cast<std::size_t>(rank);
}

// Trains for an epoch on each rank, after loading and before saving where asked; the parameters of all ranks.
template <class Plan>
std::vector<std::vector<float>> epoch(const Plan& plan, int ranks, const std::string& from, const std::string& to) {
  std::vector<std::vector<float>> out(static_cast<std::size_t>(ranks));
  hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
    const auto me = static_cast<std::size_t>(comm.rank());
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
    if (!from.empty()) {
      dp.load(from);
      dp.join();
      out[me] = m.w;
      return;
    }
    const std::size_t n = batches(comm.rank(), ranks);
    for (std::size_t s = 0; s < n; ++s) {
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {  // read as another rank may write
        float* const own = static_cast<float*>(m.tensors()[i].parameter);
        if (dp.parameters()[i] != own) hd::vector_asm::read(dp.parameters()[i], own, quadratic::sizes[i]);
      }
      RANK_CHECK(!train_step(dp, m, first_sample(s, comm.rank(), ranks, 2), 2, 0.05f).skipped);
    }
    dp.join();
    const hd::report r = dp.report();
    RANK_CHECK(r.steps >= n);
    RANK_CHECK(r.skipped == 0);
    RANK_CHECK((ranks == 1 || std::string(dp.report().executor).find("shared memory") == 0 || r.bytes_sent > 0));
    if (!to.empty()) dp.save(to);
    out[me] = m.w;
  });
  return out;
}

// Rank 1 fails when it has said that one gradient of its third step is ready: the others hear of it, and run() throws
// what it threw.
template <class Plan> void fails_in_a_step(const Plan& plan) {
  std::atomic<int> told{0};
  std::string text;
  try {
    hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
      quadratic m;
      try {
        hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
        for (std::size_t s = 0; s < 10; ++s) {
          if (comm.rank() == 1 && s == 2) {
            dp.ready(2);
            throw std::runtime_error("no such batch");
          }
          train_step(dp, m, s, 2, 0.01f);
        }
        dp.join();
      } catch (const hd::comm_error&) {
        ++told;
      }
    });
  } catch (const std::runtime_error& e) {
    text = e.what();
  }
  CHECK(text == "no such batch");
  CHECK(told == 2);
}

// `most`: the part of the loss that an epoch leaves. Where ranks don't wait for each other, how far it gets depends on
// how late each is, but it gets down.
template <class Mode> void lives(const Mode& mode, double most = 0.7) {
  CAPTURE(mode.name());
  const auto plan = hd::strategy{.topology = any_topology{}, .mode = mode};
  const scratch_directory scratch;
  const auto w = epoch(plan, 3, "", scratch.path());
  CHECK(all_equal(w));
  CHECK(quadratic::loss(w[0]) < most * start);
  for (const int ranks : {1, 2, 5}) {
    CAPTURE(ranks);
    const auto again = epoch(plan, ranks, scratch.path(), "");
    CHECK(all_equal(again));
    CHECK(again[0] == w[0]);
  }
  fails_in_a_step(plan);
  for (int k = 0; k < any_topology::kinds; ++k) {
    CAPTURE(k);
    const auto v = epoch(hd::strategy{.topology = any_topology{k}, .mode = mode}, k % 2 ? 4 : 2, "", "");
    CHECK(all_equal(v));
    CHECK(quadratic::loss(v[0]) < most * start);
  }
}
}  // namespace

TEST_CASE("every mode whose ranks meet lives through uneven epochs, other numbers of ranks, and errors") {
  lives(hd::every_step{});
  lives(hd::zero1{});
  lives(hd::local_sgd{.period = 3});
  lives(hd::diloco{.period = 3, .momentum = 0.5f});
  lives(hd::slow_momentum{.period = 3, .momentum = 0.4f});
  lives(hd::block_momentum{.period = 3, .momentum = 0.4f});
  lives(hd::elastic_sgd{.period = 3});
  lives(hd::geo_sgd{.period = 3});
  lives(hd::heuristic_average{});
}

TEST_CASE("every mode whose ranks don't wait for each other lives through the same") {
  lives(hd::hogwild<hd::vector_asm>{}, 1.0);
  lives(hd::async_ps{}, 1.0);
  lives(hd::async_geo_sgd{.period = 3}, 1.0);
}

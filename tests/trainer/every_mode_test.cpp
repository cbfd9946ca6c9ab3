// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// What jobs meet, under every mode: a rank without batches, uneven epochs, other numbers of ranks after a save, an
// error in the middle of a step; and every mode over every topology. And what nobody should do, but does.
#include <heddle/mode/adaptive_period.hpp>
#include <heddle/mode/elastic_sgd.hpp>
#include <heddle/mode/geo_sgd.hpp>
#include <heddle/mode/outer_momentum.hpp>
#include <heddle/mode/zero1.hpp>
#include <heddle/trainer/hogwild.hpp>
#include <heddle/trainer/server.hpp>

#include "support.hpp"

#include <sys/stat.h>

#include <atomic>

namespace {
const double start = quadratic::loss(quadratic{}.w);

struct every_other_step {
  static constexpr hd::average averages = hd::average::parameters;
  static constexpr bool outer_momentum = false;
  bool meets(std::size_t step) const { return step % 2 == 1; }
  std::string name() const { return "every_other_step"; }
};

// Steps of rank r in an epoch: the last rank has no batch at all.
std::size_t batches(int rank, int ranks) {
  return rank + 1 == ranks && ranks > 1 ? 0 : 14 + 6 * static_cast<std::size_t>(rank);
}

// Trains for an epoch on each rank, after loading and before saving where asked; the parameters of all ranks.
template <class Plan>
std::vector<std::vector<float>> epoch(const Plan& plan, int ranks, const std::string& from, const std::string& to,
                                      float lr = 0.05f) {
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
      RANK_CHECK(!train_step(dp, m, first_sample(s, comm.rank(), ranks, 2), 2, lr).skipped);
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

// Rank 1 goes, without an exception, when it has said that one gradient is ready: the others hear of it, or wait until
// the deadline of their communicator.
template <class Plan> void leaves_in_a_step(const Plan& plan, std::chrono::seconds deadline) {
  std::atomic<int> told{0};
  hd::threads::run({.ranks = 3, .deadline = deadline}, [&](auto& comm) {
    quadratic m;
    try {
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
      train_step(dp, m, 0, 2, 0.01f);
      if (comm.rank() == 1) {
        dp.ready(2);
        return;
      }
      for (std::size_t s = 1; s < 10; ++s) train_step(dp, m, s, 2, 0.01f);
      dp.join();
    } catch (const hd::comm_error&) {
      ++told;
    }
  });
  CHECK(told >= 2);  // rank 1 too, if it was so late that a deadline was missed before
}

// Wrong weights are refused, and nothing has changed; of steps for which nobody has samples nothing is used.
template <class Plan> void heeds_no_nonsense(const Plan& plan) {
  for (const int ranks : {1, 3}) {
    std::vector<std::vector<float>> out(static_cast<std::size_t>(ranks));
    hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{plan, comm, m.tensors(), hd::adamw{.weight_decay = 0.1f}};
      const auto steps = [&](double samples) {
        for (std::size_t s = 0; s < 7; ++s) {
          for (const double wrong : {-1.0, std::nan(""), HUGE_VAL, 2e290})
            RANK_CHECK_THROWS_AS(dp.begin({.samples = wrong}), hd::argument_error);
          dp.begin({.samples = samples});
          std::fill(m.g.begin(), m.g.end(), samples > 0.0 ? 1.0f : s % 2 ? NAN : 100.0f);
          for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
          const auto r = dp.step({.lr = 0.1f, .loss = std::nan("")});
          RANK_CHECK((samples > 0.0 ? !r.skipped : !r.reverted));
        }
      };
      steps(0.0);
      dp.join();
      RANK_CHECK(m.w == quadratic{}.w);
      RANK_CHECK(dp.report().steps == 0);
      steps(2.0);
      dp.join();
      out[static_cast<std::size_t>(comm.rank())] = m.w;
    });
    CHECK(all_equal(out));
    CHECK(out[0] != quadratic{}.w);
    for (const float x : out[0]) REQUIRE(std::isfinite(x));
  }
}

// Checkpoints of another mode, and such as have lost their end, are refused everywhere; training goes on.
template <class Plan> void loads_nothing_else(const Plan& plan) {
  const scratch_directory own, other;
  epoch(hd::strategy{.mode = every_other_step{}}, 3, "", other.path());
  epoch(plan, 3, "", own.path());
  const auto refused = [&](const std::string& from) {
    std::vector<std::vector<float>> out(3);
    hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
      RANK_CHECK_THROWS_AS(dp.load(from), hd::file_error);
      RANK_CHECK((m.w == quadratic{}.w && dp.report().steps == 0));
      train_step(dp, m, 0, 2, 0.05f);
      dp.join();
      out[static_cast<std::size_t>(comm.rank())] = m.w;
    });
    CHECK(all_equal(out));
    CHECK(quadratic::loss(out[0]) < start);
  };
  refused(other.path());
  refused(other.path() + "/none");
  const auto file = own.path() + "/checkpoint-1.rank-2";
  struct stat of{};
  REQUIRE(::stat(file.c_str(), &of) == 0);
  for (const off_t size : {of.st_size - 1, of.st_size / 2, off_t{7}, off_t{0}}) {
    REQUIRE(::truncate(file.c_str(), size) == 0);
    refused(own.path());
  }
  REQUIRE(::truncate((own.path() + "/manifest").c_str(), 5) == 0);
  refused(own.path());
}

// The same trainer goes back to what it saved, and takes the same steps again.
template <class Plan> void goes_back(const Plan& plan) {
  const scratch_directory scratch;
  quadratic m;
  hd::self comm;
  hd::data_parallel dp{plan, comm, m.tensors(), hd::adamw{}};
  const auto steps = [&](std::size_t first, std::size_t last) {
    for (std::size_t s = first; s < last; ++s) {
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
        float* const own = static_cast<float*>(m.tensors()[i].parameter);
        if (dp.parameters()[i] != own) hd::vector_asm::read(dp.parameters()[i], own, quadratic::sizes[i]);
      }
      train_step(dp, m, 2 * s, 2, 0.02f);
    }
    if (first > 0) dp.join();
    return m.w;
  };
  steps(0, 5);
  dp.save(scratch.path());
  const auto whole = steps(5, 12);
  dp.load(scratch.path());
  CHECK(dp.report().steps == 5);
  CHECK(distance(steps(5, 12), {whole.begin(), whole.end()}) < 1e-6);
}

// Ranks of one kind of mode, but rank 1 with another number: none of them trains on, or waits for ever.
template <class Mode> void wants_one_mode(const Mode& mode, const Mode& other) {
  CAPTURE(mode.name());
  std::atomic<int> told{0};
  hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
    quadratic m;
    try {
      hd::data_parallel dp{hd::strategy{.mode = comm.rank() == 1 ? other : mode}, comm, m.tensors(), hd::sgd{}};
      for (std::size_t s = 0; s < 10; ++s) train_step(dp, m, s, 2, 0.01f);
      dp.join();
    } catch (const hd::comm_error&) {
      ++told;
    }
  });
  CHECK(told == 3);
}

// `two` and `more`: the parts of the loss that an epoch leaves on two ranks, of which one trains, and on more.
template <class Mode> void lives(const Mode& mode, float lr = 0.05f, double two = 0.7, double more = 0.7) {
  CAPTURE(mode.name());
  const auto plan = hd::strategy{.topology = any_topology{}, .mode = mode};
  const scratch_directory scratch;
  const auto w = epoch(plan, 3, "", scratch.path(), lr);
  CHECK(all_equal(w));
  CHECK(quadratic::loss(w[0]) < more * start);
  for (const int ranks : {1, 2, 5}) {
    CAPTURE(ranks);
    const auto again = epoch(plan, ranks, scratch.path(), "");
    CHECK(all_equal(again));
    CHECK(again[0] == w[0]);
  }
  fails_in_a_step(plan);
  heeds_no_nonsense(plan);
  loads_nothing_else(plan);
  goes_back(plan);
  for (int k = 0; k < any_topology::kinds; ++k) {
    CAPTURE(k);
    const auto v = epoch(hd::strategy{.topology = any_topology{k}, .mode = mode}, k % 2 ? 4 : 2, "", "", lr);
    CHECK(all_equal(v));
    CHECK(quadratic::loss(v[0]) < (k % 2 ? more : two) * start);
  }
}

// Where ranks don't wait for each other, how far an epoch gets depends on how late each is. A step goes 3 in 100 of the
// way, so 14 steps 0.35 of it, 20 and 26 steps 0.46 and 0.55. All one after the other they get to 0.35, 0.64 and 0.84,
// and all from where they began, added up, to 0.35, 0.80 and 1.35: of the loss at most 0.43, 0.13 and 0.12 are left.
template <class Mode> void lives_apart(const Mode& mode) {
  lives(mode, 0.03f, 0.5, 0.2);
  leaves_in_a_step(hd::strategy{.mode = mode}, std::chrono::seconds(60));
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
  leaves_in_a_step(hd::strategy{}, std::chrono::seconds(1));
  leaves_in_a_step(hd::strategy{.mode = hd::local_sgd{.period = 3}}, std::chrono::seconds(1));
}

TEST_CASE("every mode whose ranks don't wait for each other lives through the same") {
  lives_apart(hd::hogwild<hd::vector_asm>{});
  lives_apart(hd::async_ps{});
  lives_apart(hd::async_geo_sgd{.period = 3});
}

TEST_CASE("a mode with another number on one rank is an error on every rank") {
  wants_one_mode(hd::local_sgd{.period = 3}, hd::local_sgd{.period = 2});
  wants_one_mode(hd::local_sgd{.period = 3}, hd::local_sgd{.period = 3, .warmup = 1});
  wants_one_mode(hd::diloco{.period = 3}, hd::diloco{.period = 6});
  wants_one_mode(hd::slow_momentum{.period = 3}, hd::slow_momentum{.period = 2});
  wants_one_mode(hd::block_momentum{.period = 3}, hd::block_momentum{.period = 2});
  wants_one_mode(hd::elastic_sgd{.period = 3}, hd::elastic_sgd{.period = 2});
  wants_one_mode(hd::geo_sgd{.period = 3}, hd::geo_sgd{.period = 2});
  wants_one_mode(hd::heuristic_average{.initial = 3}, hd::heuristic_average{.initial = 2});
  wants_one_mode(hd::async_ps{}, hd::async_ps{.servers = 1});
  wants_one_mode(hd::async_ps{}, hd::async_ps{.compensation = 0.5f});
  wants_one_mode(hd::async_geo_sgd{.period = 3}, hd::async_geo_sgd{.period = 2});
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Mixed precision: against a simulation in double that rounds where the definition does, against runs without a bad
// step, and against itself through checkpoints.
#include <heddle/comm/rank_group.hpp>
#include <heddle/mode/zero1.hpp>

#include "support.hpp"

#include <limits>

namespace {
constexpr auto ranks_of = [](int n) { return hd::threads::options{.ranks = n, .deadline = std::chrono::seconds(20)}; };

// The quadratic of support.hpp with parameters and gradients of 16 bits.
template <class Element> struct narrow_quadratic {
  static constexpr std::size_t count = quadratic::count;
  std::vector<Element> w = std::vector<Element>(count, Element(0.5f)), g = std::vector<Element>(count, Element(0.0f));

  std::vector<hd::tensor> tensors() { return hd::tensors(w.data(), g.data(), quadratic::sizes); }
  std::vector<float> floats() const { return {w.begin(), w.end()}; }
  void backward(std::size_t first, std::size_t n, float scale) {
    std::vector<double> wide(count), mean(count);
    for (std::size_t i = 0; i < count; ++i) wide[i] = static_cast<float>(w[i]);
    quadratic::gradient(wide.data(), mean.data(), first, n);
    for (std::size_t i = 0; i < count; ++i) g[i] = Element(static_cast<float>(mean[i] * scale));
  }
};

template <class Trainer, class Model>
hd::step_result narrow_step(Trainer& dp, Model& m, std::size_t step, int rank, int ranks, bool bad = false, hd::step_options o = {.lr = 0.05f}) {
  dp.begin({.samples = 2.0});
  m.backward(first_sample(step, rank, ranks, 2), 2, dp.loss_scale());
  using element = typename Trainer::element;
  if (bad && rank == ranks - 1) m.g[17] = element(std::numeric_limits<float>::infinity());
  for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
  return dp.step(o);
}

// Parameters after `steps` steps, with an infinity on one rank in an additional step before step `bad_at`.
template <class Plan, class Rule>
std::vector<std::vector<float>> narrow_train(const Plan& plan, const Rule& rule, int ranks, std::size_t steps,
                                             std::size_t bad_at = 1000, hd::step_options o = {.lr = 0.05f}) {
  std::vector<std::vector<float>> out(static_cast<std::size_t>(ranks));
  hd::threads::run(ranks_of(ranks), [&](auto& comm) {
    narrow_quadratic<typename decltype(plan.precision)::element> m;
    hd::data_parallel dp{plan, comm, m.tensors(), rule};
    for (std::size_t s = 0; s < steps; ++s) {
      if (s == bad_at) {
        const float scale = dp.loss_scale();
        RANK_CHECK(narrow_step(dp, m, s, comm.rank(), ranks, true, o).skipped);
        RANK_CHECK(dp.loss_scale() == scale);
      }
      RANK_CHECK_FALSE(narrow_step(dp, m, s, comm.rank(), ranks, false, o).skipped);
    }
    out[static_cast<std::size_t>(comm.rank())] = m.floats();
  });
  CHECK(all_equal(out));
  return out;
}

const auto brain = hd::strategy{.topology = hd::direct{}, .precision = hd::mixed<hd::bfloat16>{}};
const auto sharded = hd::strategy{.topology = hd::direct{}, .mode = hd::zero1{}, .precision = hd::mixed<hd::bfloat16>{}};
const auto sparse = hd::strategy{.compressor = hd::clip{.max_norm = 50.0f} | hd::dgc{.sparsity = 0.9, .dense_below = 10},
                                 .precision = hd::mixed<hd::float16>{.scale = 1024.0f}};
const auto local = hd::strategy{.mode = hd::local_sgd{.period = 3}, .precision = hd::mixed<hd::float16>{.scale = 1024.0f, .growth = 5}};
const auto half = hd::strategy{.precision = hd::mixed<hd::float16>{.scale = 0x1p24f, .growth = 40, .patience = 1}};
const hd::sgd rule{.momentum = 0.9f};

double to_bf16(double x) { return static_cast<float>(hd::bfloat16(static_cast<float>(x))); }
}  // namespace

TEST_CASE("mixed precision is what a simulation in double gives, rounded where gradients and parameters are") {
  for (const int ranks : {1, 3, 4}) {
    const auto w = narrow_train(brain, rule, ranks, 40);
    std::vector<double> master(quadratic::count, 0.5), v(quadratic::count, 0.0), read(quadratic::count), g(quadratic::count);
    for (std::size_t s = 0; s < 40; ++s) {
      for (std::size_t i = 0; i < master.size(); ++i) read[i] = to_bf16(master[i]);
      std::vector<double> mean(quadratic::count, 0.0);
      for (int r = 0; r < ranks; ++r) {
        quadratic::gradient(read.data(), g.data(), first_sample(s, r, ranks, 2), 2);
        for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += to_bf16(g[i]) / ranks;
      }
      for (std::size_t i = 0; i < mean.size(); ++i) {
        v[i] = static_cast<double>(0.9f) * v[i] + to_bf16(mean[i]);
        master[i] -= static_cast<double>(0.05f) * v[i];
      }
    }
    std::size_t apart = 0;  // a rounding of the mean, or of a parameter, may fall on the other side
    for (std::size_t i = 0; i < master.size(); ++i) {
      apart += w[0][i] != to_bf16(master[i]);
      CHECK(std::fabs(w[0][i] - master[i]) <= 0x1p-7 * std::fabs(master[i]) + 0x1p-9);
    }
    CHECK(apart <= quadratic::count / 100);
  }
}

TEST_CASE("a step that one rank's infinity skips leaves no trace, under every mode and compressor") {
  CHECK(narrow_train(brain, hd::adamw{}, 3, 6, 3) == narrow_train(brain, hd::adamw{}, 3, 6));
  CHECK(narrow_train(sharded, hd::adamw{}, 3, 6, 3) == narrow_train(sharded, hd::adamw{}, 3, 6));
  CHECK(narrow_train(sparse, rule, 4, 6, 3) == narrow_train(sparse, rule, 4, 6));
}

TEST_CASE("a sharded optimizer gives the bits of an unsharded one in mixed precision, and holds its share") {
  for (const hd::step_options o : {hd::step_options{.lr = 0.05f, .max_norm = 0.5f}, hd::step_options{.lr = 0.05f, .max_value = 0.1f}}) {
    for (const int ranks : {1, 2, 5})
      CHECK(narrow_train(sharded, hd::adamw{}, ranks, 8, 1000, o) == narrow_train(brain, hd::adamw{}, ranks, 8, 1000, o));
  }
  hd::threads::run(ranks_of(4), [](auto& comm) {
    narrow_quadratic<hd::bfloat16> m;
    hd::data_parallel dp{sharded, comm, m.tensors(), hd::adamw{}};
    RANK_CHECK(dp.report().state_bytes <= 3 * 4 * (quadratic::count / 4 + 1));
    const auto before = dp.report().bytes_sent;
    narrow_step(dp, m, 0, comm.rank(), 4);
    RANK_CHECK(dp.report().bytes_sent - before <= 2 * 2 * (quadratic::count * 3 / 4 + 4));  // 16 bits both ways
  });
}

TEST_CASE("what a compressor holds is of unscaled gradients, whatever the scale of the step was") {
  auto steady = sparse, rising = sparse;
  rising.precision = {.scale = 256.0f, .growth = 3};  // 4096 in the last steps: powers of two, which round nothing
  CHECK(narrow_train(steady, rule, 4, 14) == narrow_train(rising, rule, 4, 14));
}

TEST_CASE("mixed precision reaches the loss of float, local steps too") {
  for (const auto& w : {narrow_train(brain, rule, 4, 60), narrow_train(sparse, rule, 4, 60), narrow_train(local, rule, 3, 60)})
    CHECK(quadratic::loss(w[0]) < 0.02);
}

TEST_CASE("the loss scale falls until gradients fit, rises again, and is the same on all ranks") {
  hd::threads::run(ranks_of(3), [](auto& comm) {
    narrow_quadratic<hd::float16> m;
    hd::data_parallel dp{half, comm, m.tensors(), rule};
    RANK_CHECK(dp.loss_scale() == 0x1p24f);
    std::size_t skipped = 0, s = 0;
    float lowest = 0x1p24f;
    for (; s < 200; ++s) {
      if (narrow_step(dp, m, s, comm.rank(), 3).skipped) ++skipped;
      lowest = (std::min)(lowest, dp.loss_scale());
    }
    RANK_CHECK(dp.report().skipped == skipped);
    RANK_CHECK(skipped >= 8);  // 2^24 times gradients near 1: 65504 lies below 2^16
    RANK_CHECK(skipped <= 20);
    RANK_CHECK(lowest <= 0x1p16f);
    RANK_CHECK(dp.loss_scale() > lowest);  // gradients have become smaller
    RANK_CHECK(quadratic::loss(m.floats()) < 0.05);
    std::vector<float> scale{dp.loss_scale()}, all(3);
    hd::all_gather(comm, hd::direct{}, std::span<const float>(scale), std::span<float>(all));
    RANK_CHECK(all[0] == all[1] && all[1] == all[2]);
  });
}

TEST_CASE("under local steps the scale follows an infinity of any rank at the next meeting") {
  hd::threads::run(ranks_of(3), [](auto& comm) {
    narrow_quadratic<hd::float16> m;
    hd::data_parallel dp{hd::strategy{.mode = hd::local_sgd{.period = 3}, .precision = hd::mixed<hd::float16>{.scale = 1024.0f, .growth = 2, .patience = 1}},
                         comm, m.tensors(), rule};
    for (std::size_t s = 0; s < 3; ++s) {
      RANK_CHECK(dp.loss_scale() == 1024.0f);
      RANK_CHECK(narrow_step(dp, m, s, comm.rank(), 3, s == 1).skipped == (s == 1 && comm.rank() == 2));
    }
    RANK_CHECK(dp.loss_scale() == 512.0f);
    for (std::size_t s = 3; s < 9; ++s) narrow_step(dp, m, s, comm.rank(), 3);
    RANK_CHECK(dp.loss_scale() == 1024.0f);
  });
}

TEST_CASE("small gradients survive a 16-bit gradient only with a scale") {
  for (const float scale : {1.0f, 65536.0f}) {
    hd::self comm;
    std::vector<hd::float16> w(4, hd::float16(0.0f)), g(4);
    const std::size_t sizes[] = {4};
    hd::data_parallel dp{hd::strategy{.precision = hd::mixed<hd::float16>{.scale = scale}}, comm, hd::tensors(w.data(), g.data(), sizes), hd::sgd{}};
    for (hd::float16& x : g) x = hd::float16(1e-8f * dp.loss_scale());
    dp.ready(0);
    dp.step({.lr = 1e7f});
    CHECK(static_cast<float>(w[0]) == Approx(scale == 1.0f ? 0.0 : -0.1).margin(1e-3));
  }
}

TEST_CASE("loss scales that differ between ranks are an error on every rank, as are numbers outside their range") {
  CHECK_THROWS_WITH(hd::threads::run(ranks_of(3), [](auto& comm) {
    narrow_quadratic<hd::float16> m;
    hd::data_parallel dp{hd::strategy{.precision = hd::mixed<hd::float16>{.scale = comm.rank() == 1 ? 2.0f : 4.0f}}, comm, m.tensors(), rule};
    RANK_CHECK_THROWS_AS(narrow_step(dp, m, 0, comm.rank(), 3), hd::comm_error);
    throw std::runtime_error("seen");
  }), "seen");
  CHECK_THROWS_AS((hd::mixed<hd::float16>{.scale = 3.0f}.check()), hd::argument_error);
  CHECK_THROWS_AS((hd::mixed<hd::float16>{.scale = NAN}.check()), hd::argument_error);
  CHECK_THROWS_AS((hd::mixed<hd::float16>{.scale = 0x1p25f}.check()), hd::argument_error);
  CHECK_THROWS_AS((hd::mixed<hd::float16>{.patience = 0}.check()), hd::argument_error);
  hd::self comm;
  quadratic m;
  CHECK_THROWS_AS((hd::data_parallel{half, comm, m.tensors(), rule}), hd::argument_error);  // float tensors
}

namespace {
template <class Plan, class Rule> void resumes(const Plan& plan, const Rule& r, int ranks, int later) {
  const auto whole = narrow_train(plan, r, ranks, 12);
  scratch_directory dir;
  std::vector<float> end, first;
  using element = typename decltype(plan.precision)::element;
  hd::threads::run(ranks_of(ranks), [&](auto& comm) {
    narrow_quadratic<element> m;
    hd::data_parallel dp{plan, comm, m.tensors(), r};
    for (std::size_t s = 0; s < 7; ++s) narrow_step(dp, m, s, comm.rank(), ranks);
    dp.save(dir.path());
    if (comm.rank() == 0) first = m.floats();
  });
  hd::threads::run(ranks_of(later), [&](auto& comm) {
    narrow_quadratic<element> m;
    hd::data_parallel dp{plan, comm, m.tensors(), r};
    dp.load(dir.path());
    if (comm.rank() == 0 && m.floats() != first) throw std::runtime_error("parameters did not come back");
    for (std::size_t s = 7; s < 12; ++s) narrow_step(dp, m, s, comm.rank(), later);
    if (comm.rank() == 0) end = m.floats();
  });
  if (later == ranks) CHECK(end == whole[0]);
  else CHECK(quadratic::loss(end) < quadratic::loss(first));
}
}  // namespace

TEST_CASE("steps, save, load and steps are the steps, bit for bit, with the scale") {
  resumes(brain, hd::adamw{}, 3, 3);
  resumes(sharded, hd::adamw{}, 3, 3);
  resumes(sharded, hd::adamw{}, 4, 2);
  resumes(sparse, rule, 3, 3);
  resumes(local, rule, 3, 3);  // saved between meetings
  const hd::mixed<hd::float16> rising{.scale = 1024.0f, .growth = 3};  // the scale is 4096 when it is saved
  resumes(hd::strategy{.precision = rising}, rule, 2, 2);
}

namespace {
// Four ranks: groups of two average every step in mixed precision, and their float masters meet every third one.
// Masters and parameters of every rank after `steps`, of which those before `saved` by trainers that were saved.
template <class Precision>
std::array<std::vector<std::vector<float>>, 2> groups_train(const Precision& precision, std::size_t steps, std::size_t saved) {
  const scratch_directory place;
  std::array<std::vector<std::vector<float>>, 2> out{std::vector<std::vector<float>>(4), std::vector<std::vector<float>>(4)};
  hd::threads::run(ranks_of(4), [&](auto& comm) {
    narrow_quadratic<typename Precision::element> m;
    const auto rank = static_cast<std::size_t>(comm.rank());
    hd::rank_group inside(comm, comm.rank() / 2), between(comm, comm.rank() % 2);
    for (std::size_t from = 0, to = saved; from < steps; from = std::exchange(to, steps)) {
      hd::data_parallel dp{hd::strategy{.precision = precision}, inside, m.tensors(), hd::sgd{}};
      hd::data_parallel outer{hd::strategy{.mode = hd::local_sgd{.period = 3}}, between, dp.masters(), hd::sgd{},
                              hd::unused::treat_as_zero};
      const std::string own = place.path() + "/in" + std::to_string(rank / 2), others = place.path() + "/between" + std::to_string(rank % 2);
      if (from > 0) {
        dp.load(own);
        outer.load(others);
        dp.round_masters();
      }
      for (std::size_t s = from; s < to; ++s) {
        RANK_CHECK_FALSE(narrow_step(dp, m, s, comm.rank(), 4, false, {.lr = 0.002f}).skipped);
        if (outer.step({}).met) dp.round_masters();
      }
      out[0][rank].clear();
      for (const hd::tensor& t : dp.masters()) {
        const float* const p = static_cast<const float*>(t.parameter);
        out[0][rank].insert(out[0][rank].end(), p, p + t.count);
      }
      out[1][rank] = m.floats();
      if (to == steps) break;
      dp.save(own);
      outer.save(others);
      m = {};
      hd::barrier(comm);
    }
  });
  return out;
}
}  // namespace

TEST_CASE("groups in mixed precision meet by their float masters, and the steps between are not lost") {
  constexpr std::size_t steps = 16;
  const hd::mixed<hd::bfloat16> precision;
  const auto [masters, w] = groups_train(precision, steps, steps);
  std::vector<std::vector<double>> expected(2, std::vector<double>(quadratic::count, 0.5));
  std::vector<double> read(quadratic::count), g(quadratic::count);
  for (std::size_t s = 0; s < steps; ++s) {
    for (int k = 0; k < 2; ++k) {
      auto& master = expected[static_cast<std::size_t>(k)];
      std::vector<double> mean(quadratic::count, 0.0);
      for (std::size_t i = 0; i < read.size(); ++i) read[i] = to_bf16(master[i]);
      for (int r = 2 * k; r < 2 * k + 2; ++r) {
        quadratic::gradient(read.data(), g.data(), first_sample(s, r, 4, 2), 2);
        for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += to_bf16(g[i]) / 2;
      }
      for (std::size_t i = 0; i < mean.size(); ++i) master[i] -= static_cast<double>(0.002f) * to_bf16(mean[i]);
    }
    for (std::size_t i = 0; s % 3 == 2 && i < g.size(); ++i)
      expected[0][i] = expected[1][i] = (expected[0][i] + expected[1][i]) / 2;
  }
  for (std::size_t r = 0; r < 4; ++r) {
    double worst = 0.0, moved = 0.0, rounded = 0.0;
    for (std::size_t i = 0; i < quadratic::count; ++i) {
      worst = std::max(worst, std::fabs(masters[r][i] - expected[r / 2][i]));
      moved = std::max(moved, std::fabs(masters[r][i] - 0.5));
      rounded = std::max(rounded, std::fabs(w[r][i] - to_bf16(masters[r][i])));
    }
    CHECK(worst < 2e-5);  // of a step that is rounded to the other side
    CHECK(moved > 0.01);  // in steps shorter than what 16 bits tell from 0.5
    CHECK(rounded == 0.0);
  }
  CHECK((masters[0] == masters[1] && masters[2] == masters[3] && masters[0] != masters[2]));  // after step 16
  const auto met = groups_train(hd::mixed<hd::float16>{.scale = 1024.0f}, 15, 15);
  CHECK(all_equal(met[0]));
  CHECK(all_equal(met[1]));
  CHECK(groups_train(precision, steps, 7) == groups_train(precision, steps, steps));  // saved between meetings
}

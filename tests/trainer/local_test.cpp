// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/comm/rank_group.hpp>
#include <heddle/mode/model_buffers.hpp>

#include "support.hpp"

namespace {
// The definition in double precision: plain SGD on each rank, averages weighted by samples at meetings and at the end.
std::vector<double> local_reference(const std::vector<std::size_t>& batches, const std::vector<std::size_t>& sizes,
                                    std::size_t period, double lr, std::size_t (*first)(std::size_t, int)) {
  const std::size_t ranks = batches.size();
  std::vector<double> agreed(quadratic::count, 0.5), g(quadratic::count);
  std::vector<std::vector<double>> w(ranks, agreed);
  std::vector<double> samples(ranks, 0.0);
  std::size_t most = 0;
  for (const std::size_t b : batches) most = std::max(most, b);
  for (std::size_t s = 0; s < most; ++s) {
    for (std::size_t r = 0; r < ranks; ++r) {
      if (s >= batches[r]) continue;
      quadratic::gradient(w[r].data(), g.data(), first(s, static_cast<int>(r)), sizes[r]);
      for (std::size_t i = 0; i < g.size(); ++i) w[r][i] -= lr * g[i];
      samples[r] += static_cast<double>(sizes[r]);
    }
    if ((s + 1) % period && s + 1 != most) continue;
    double n = 0.0;
    for (const double x : samples) n += x;
    for (std::size_t i = 0; i < agreed.size(); ++i) {
      double sum = 0.0;
      for (std::size_t r = 0; r < ranks; ++r) sum += samples[r] * w[r][i];
      agreed[i] = sum / n;
    }
    for (auto& x : w) x = agreed;
    std::fill(samples.begin(), samples.end(), 0.0);
  }
  return agreed;
}

std::size_t spread(std::size_t s, int r) { return s * 100 + static_cast<std::size_t>(r) * 10; }

struct itself {
  template <class Comm> Comm& operator()(Comm& comm) const { return comm; }
};
struct group_of_all {
  template <class Comm> hd::rank_group<Comm> operator()(Comm& comm) const { return {comm, 0}; }
};

// `over`: the communicator that the trainer gets.
template <class Plan, class Over = itself>
std::vector<float> check_local(const Plan& plan, std::size_t period, const std::vector<std::size_t>& batches,
                               const std::vector<std::size_t>& sizes, double tolerance, Over over = {}) {
  const auto expected = local_reference(batches, sizes, period, static_cast<double>(0.05f), spread);
  const int ranks = static_cast<int>(batches.size());
  std::vector<std::vector<float>> out(batches.size());
  hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
    quadratic m;
    auto&& group = over(comm);
    hd::data_parallel dp{plan, group, m.tensors(), hd::sgd{}};
    const auto r = static_cast<std::size_t>(comm.rank());
    for (std::size_t s = 0; s < batches[r]; ++s) train_step(dp, m, spread(s, comm.rank()), sizes[r], 0.05f);
    dp.join();
    out[r] = m.w;
  });
  CHECK(all_equal(out));
  CHECK(distance(out[0], expected) < tolerance);
  return out[0];
}
}  // namespace

TEST_CASE("local_sgd is its definition, for any period") {
  for (const std::size_t period : {1u, 2u, 3u, 8u, 100u}) {
    const auto plan = hd::strategy{.mode = hd::local_sgd{.period = period}};
    check_local(plan, period, {12, 12, 12}, {2, 2, 2}, 1e-6);
    check_local(plan, period, {12, 12, 12, 12}, {1, 5, 2, 3}, 1e-6);
    check_local(plan, period, {12}, {2}, 1e-6);
  }
  check_local(hd::strategy{.compressor = hd::cast<hd::float16>{}, .mode = hd::local_sgd{.period = 3}}, 3, {12, 12, 12}, {1, 5, 2}, 1e-3);
  check_local(hd::strategy{.topology = hd::native{}, .mode = hd::local_sgd{.period = 3}}, 3, {12, 12}, {1, 5}, 1e-6);
}

TEST_CASE("over a group that is the whole world local_sgd is its definition, and that over the world bit for bit") {
  for (const std::size_t period : {1u, 2u, 3u, 8u, 100u}) {
    const auto plan = hd::strategy{.mode = hd::local_sgd{.period = period}};
    CAPTURE(period);
    CHECK(check_local(plan, period, {12, 12, 12, 12}, {1, 5, 2, 3}, 1e-6, group_of_all{}) ==
          check_local(plan, period, {12, 12, 12, 12}, {1, 5, 2, 3}, 1e-6));
  }
}

TEST_CASE("local_sgd ends with uneven batches, and weights by samples") {
  check_local(hd::strategy{.mode = hd::local_sgd{.period = 3}}, 3, {5, 7}, {2, 3}, 1e-6);
  check_local(hd::strategy{.mode = hd::local_sgd{.period = 3}}, 3, {7, 5, 1}, {2, 3, 1}, 1e-6);
  check_local(hd::strategy{.mode = hd::local_sgd{.period = 4}}, 4, {4, 9}, {2, 2}, 1e-6);
}

TEST_CASE("period 1 without momentum is every_step, to one ulp of the largest parameter a step") {
  const std::size_t steps = 40;
  const auto local = train(hd::strategy{.topology = hd::direct{}, .mode = hd::local_sgd{.period = 1}}, hd::sgd{}, 4, steps, 0.05f);
  const auto every = train(hd::strategy{.topology = hd::direct{}}, hd::sgd{}, 4, steps, 0.05f);
  float largest = 0.0f, worst = 0.0f;
  for (std::size_t i = 0; i < quadratic::count; ++i) {
    largest = std::max(largest, std::fabs(every[0][i]));
    worst = std::max(worst, std::fabs(every[0][i] - local[0][i]));
  }
  const float ulp = std::nextafter(largest, 2 * largest) - largest;
  CHECK(worst <= ulp * static_cast<float>(steps));
}

TEST_CASE("synchronize makes replicas meet now, and a bad local gradient costs its rank that step only") {
  hd::threads::run(3, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.mode = hd::local_sgd{.period = 100}}, comm, m.tensors(), hd::sgd{}};
    for (std::size_t s = 0; s < 4; ++s) {
      dp.begin({.samples = 1});
      quadratic::gradient(m.w.data(), m.g.data(), spread(s, comm.rank()), 1);
      if (s == 2 && comm.rank() == 1) m.g[0] = INFINITY;
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
      RANK_CHECK(dp.step({.lr = 0.05f}).skipped == (s == 2 && comm.rank() == 1));
    }
    dp.synchronize();
    std::vector<float> all(m.w.size() * 3);
    hd::all_gather(comm, hd::ring{}, std::span<const float>(m.w), std::span<float>(all));
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i] != all[i % m.w.size()] || !std::isfinite(all[i])) throw std::runtime_error("replicas differ");
    }
    RANK_CHECK(dp.report().meetings == 1);
  });
}

TEST_CASE("without samples a local step does nothing, whatever the gradient holds") {
  hd::threads::run(2, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.mode = hd::local_sgd{.period = 2}}, comm, m.tensors(), hd::adamw{}};
    for (std::size_t s = 0; s < 4; ++s) {
      dp.begin({.samples = 0});
      std::fill(m.g.begin(), m.g.end(), s % 2 ? 100.0f : NAN);
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
      const auto r = dp.step({.lr = 0.1f});
      RANK_CHECK_FALSE((r.skipped || r.met || r.reverted));
    }
    dp.join();
    for (const float x : m.w) {
      if (x != 0.5f) throw std::runtime_error("moved");
    }
    const auto rep = dp.report();
    RANK_CHECK((rep.steps == 0 && rep.meetings == 0 && rep.skipped == 0 && rep.reverted == 0));
  });
}

TEST_CASE("a period whose average is not finite is taken back by every rank, and said so") {
  hd::threads::run(2, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.compressor = hd::cast<hd::float16>{}, .mode = hd::local_sgd{.period = 1}}, comm, m.tensors(), hd::sgd{}};
    std::fill(m.g.begin(), m.g.end(), comm.rank() ? 1.0f : 1e6f);  // a difference that float16 can't hold
    for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
    const auto r = dp.step({.lr = 1.0f});
    RANK_CHECK((r.reverted && !r.met && !r.skipped));
    RANK_CHECK(dp.report().reverted == 1);
    for (const float x : m.w) {
      if (x != 0.5f) throw std::runtime_error("not taken back");
    }
  });
}

TEST_CASE("compressors with a schedule stay together when ranks took different numbers of local steps") {
  hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(5)}, [](auto& comm) {
    quadratic m;
    const auto plan = hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .begin_step = 2, .warmup_steps = 4, .dense_below = 10},
                                   .mode = hd::local_sgd{.period = 2}};
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
    for (std::size_t s = 0; s < 7 + 2 * static_cast<std::size_t>(comm.rank()); ++s) {
      dp.begin({.samples = 1});
      quadratic::gradient(m.w.data(), m.g.data(), spread(s, comm.rank()), 1);
      if (s == 3 && comm.rank() == 1) m.g[0] = INFINITY;
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
      dp.step({.lr = 0.05f});
    }
    dp.join();
    std::vector<float> all(m.w.size() * 3);
    hd::all_gather(comm, hd::ring{}, std::span<const float>(m.w), std::span<float>(all));
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i] != all[i % m.w.size()]) throw std::runtime_error("replicas differ");
    }
  });
}

TEST_CASE("groups average every step, and meet every third: two trainers on the same tensors") {
  std::vector<std::vector<float>> out(6);
  hd::threads::run({.ranks = 6, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
    quadratic m;
    hd::rank_group inside(comm, comm.rank() / 2), between(comm, comm.rank() % 2);
    hd::data_parallel dp{hd::strategy{}, inside, m.tensors(), hd::sgd{}};
    hd::data_parallel outer{hd::strategy{.mode = hd::local_sgd{.period = 3}}, between, m.tensors(), hd::sgd{},
                            hd::unused::treat_as_zero};
    std::vector<float> mean{static_cast<float>(comm.rank()), 1.0f}, own{static_cast<float>(comm.rank())};
    std::vector<std::int64_t> seen{comm.rank(), -comm.rank()};
    std::vector<double> first{static_cast<double>(comm.rank()) + 0.5}, wide{static_cast<double>(comm.rank())};
    std::vector<std::int32_t> count{10 - comm.rank(), comm.rank()};
    const hd::model_buffer buffers[] = {
        {std::span(mean), hd::buffer_policy::average}, {std::span(own), hd::buffer_policy::keep},
        {std::span(seen), hd::buffer_policy::maximum}, {std::span(first), hd::buffer_policy::broadcast},
        {std::span(wide), hd::buffer_policy::average}, {std::span(count), hd::buffer_policy::maximum}};
    for (std::size_t s = 0; s < 10; ++s) {
      train_step(dp, m, first_sample(s, comm.rank(), 6, 2), 2, 0.05f);
      if (outer.step({}).met) hd::agree(comm, std::span(buffers));
    }
    out[static_cast<std::size_t>(comm.rank())] = m.w;
    RANK_CHECK((mean == std::vector<float>{2.5f, 1.0f} && own[0] == static_cast<float>(comm.rank())));
    RANK_CHECK((seen == std::vector<std::int64_t>{5, 0} && first[0] == 0.5));
    RANK_CHECK((wide[0] == 2.5 && count == std::vector<std::int32_t>{10, 5}));
    const hd::model_buffer wrong[] = {buffers[0], {std::span(seen), hd::buffer_policy::average}};
    RANK_CHECK_THROWS_AS(hd::agree(comm, std::span(wrong)), hd::argument_error);
  });
  std::vector<std::vector<double>> w(3, std::vector<double>(quadratic::count, 0.5));
  std::vector<double> g(quadratic::count);
  for (std::size_t s = 0; s < 10; ++s) {
    for (int k = 0; k < 3; ++k) {
      auto& mine = w[static_cast<std::size_t>(k)];
      quadratic::gradient(mine.data(), g.data(), first_sample(s, 2 * k, 6, 2), 4);
      for (std::size_t i = 0; i < g.size(); ++i) mine[i] -= static_cast<double>(0.05f) * g[i];
    }
    if (s % 3 != 2) continue;
    for (std::size_t i = 0; i < g.size(); ++i) w[0][i] = w[1][i] = w[2][i] = (w[0][i] + w[1][i] + w[2][i]) / 3.0;
  }
  for (std::size_t r = 0; r < 6; ++r) CHECK(distance(out[r], w[r / 2]) < 1e-6);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Modes in which replicas drift and an outer optimizer takes their mean difference: each against its definition in
// double precision, the equivalences between them, and what they do with uneven data and other numbers of ranks.
#include <heddle/compress/error_feedback.hpp>
#include <heddle/mode/adaptive_period.hpp>
#include <heddle/mode/elastic_sgd.hpp>
#include <heddle/mode/geo_sgd.hpp>
#include <heddle/mode/outer_momentum.hpp>

#include "any_codec.hpp"
#include "support.hpp"

#include <functional>

namespace {
using vector = std::vector<double>;

// What a mode does at a meeting, per element: from what was agreed, the mean difference and a momentum to what is agreed
// next; and where a replica goes on.
struct definition {
  std::function<double(double agreed, double mean, double& m)> move;
  std::function<double(double agreed, double before, double replica)> restart = [](double a, double, double) { return a; };
  bool equal_weights = false;
  std::function<double(std::size_t step, std::size_t rank)> loss = nullptr;
  double power = 1.0;  // where a loss is given, weights are samples / loss^power
};

struct outcome {
  vector agreed;
  std::vector<vector> replicas;
};

std::size_t sample_of(std::size_t s, int r) { return s * 100 + static_cast<std::size_t>(r) * 10; }

outcome simulate(const definition& d, const std::vector<std::size_t>& samples, std::size_t steps, std::size_t period, double lr) {
  const std::size_t ranks = samples.size();
  outcome o{vector(quadratic::count, 0.5), {}};
  o.replicas.assign(ranks, o.agreed);
  vector g(quadratic::count), m(quadratic::count, 0.0);
  vector weight(ranks);
  const auto weigh = [&](std::size_t meeting) {
    double total = 0.0;
    for (std::size_t r = 0; r < ranks; ++r) {
      double mean = 0.0;
      for (std::size_t s = meeting - period; d.loss && s < meeting; ++s)
        mean += d.loss(s, r) / static_cast<double>(period);
      weight[r] = (d.equal_weights ? 1.0 : static_cast<double>(samples[r])) / (d.loss ? std::pow(mean, d.power) : 1.0);
      total += weight[r];
    }
    for (double& x : weight) x /= total;
  };
  for (std::size_t s = 0; s < steps; ++s) {
    for (std::size_t r = 0; r < ranks; ++r) {
      quadratic::gradient(o.replicas[r].data(), g.data(), sample_of(s, static_cast<int>(r)), samples[r]);
      for (std::size_t i = 0; i < g.size(); ++i) o.replicas[r][i] -= lr * g[i];
    }
    if ((s + 1) % period) continue;
    weigh(s + 1);
    for (std::size_t i = 0; i < g.size(); ++i) {
      double mean = 0.0;
      const double before = o.agreed[i];
      for (std::size_t r = 0; r < ranks; ++r) mean += weight[r] * (before - o.replicas[r][i]);
      o.agreed[i] = d.move(before, mean, m[i]);
      for (auto& w : o.replicas) w[i] = d.restart(o.agreed[i], before, w[i]);
    }
  }
  return o;
}

template <class Plan>
void is_defined_by(const Plan& plan, const definition& d, const std::vector<std::size_t>& samples, std::size_t steps,
                   std::size_t period, double tolerance = 2e-6) {
  const outcome expected = simulate(d, samples, steps, period, static_cast<double>(0.05f));
  std::vector<std::vector<float>> agreed(samples.size()), replica(samples.size());
  hd::threads::run({.ranks = static_cast<int>(samples.size()), .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
    const auto r = static_cast<std::size_t>(comm.rank());
    for (std::size_t s = 0; s < steps; ++s) {
      dp.begin({.samples = static_cast<double>(samples[r])});
      quadratic::gradient(m.w.data(), m.g.data(), sample_of(s, comm.rank()), samples[r]);
      for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
      dp.step({.lr = 0.05f, .loss = d.loss ? d.loss(s, r) : 0.0});
    }
    replica[r] = m.w;
    for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
      const auto a = dp.agreed(i);
      agreed[r].insert(agreed[r].end(), a.begin(), a.end());
    }
  });
  CAPTURE(plan.mode.name(), samples.size(), period);
  CHECK(all_equal(agreed));
  CHECK(distance(agreed[0], expected.agreed) < tolerance);
  for (std::size_t r = 0; r < samples.size(); ++r) CHECK(distance(replica[r], expected.replicas[r]) < tolerance);
}

template <class Mode>
std::vector<std::vector<float>> under(const Mode& mode, int ranks = 3) {
  return train(hd::strategy{.mode = mode}, hd::sgd{}, ranks, 12, 0.05f);
}

// A model of one number; a rank's gradient is what the test says.
struct one_number {
  float w = 0.0f, g = 0.0f;
  std::vector<hd::tensor> tensors() { return {{&w, &g, 1, hd::dtype::f32, "w"}}; }
  template <class Trainer>
  void step(Trainer& dp, float gradient, float lr = 1.0f) {
    g = gradient;
    dp.ready(0);
    dp.step({.lr = lr});
  }
};
}  // namespace

TEST_CASE("modes of the outer step are their definitions in double precision") {
  const double lr = static_cast<double>(0.05f);
  for (const std::vector<std::size_t>& samples : {std::vector<std::size_t>{2}, {2, 2}, {1, 5, 2}, {1, 5, 2, 3}}) {
    const auto n = static_cast<double>(samples.size());
    const definition diloco{[](double a, double mean, double& m) {
      m = static_cast<double>(0.9f) * m + mean;
      return a - static_cast<double>(0.7f) * (mean + static_cast<double>(0.9f) * m);
    }};
    is_defined_by(hd::strategy{.mode = hd::diloco{.period = 3}}, diloco, samples, 12, 3, 1e-5);
    is_defined_by(hd::strategy{.compressor = hd::cast<hd::float16>{}, .mode = hd::diloco{.period = 3}}, diloco, samples,
                  12, 3, 1e-3);
    is_defined_by(hd::strategy{.mode = hd::slow_momentum{.period = 4, .alpha = 0.5f, .momentum = 0.5f}},
                  {[=](double a, double mean, double& m) {
                    m = 0.5 * m + mean / lr;
                    return a - 0.5 * lr * m;
                  }}, samples, 12, 4);
    is_defined_by(hd::strategy{.mode = hd::block_momentum{.period = 2}},
                  {[=](double a, double mean, double& m) {  // the paper: d = eta d + mean; w -= d; replicas at w - eta d
                    const double eta = 1.0 - 1.0 / n, w = a + eta * m;
                    m = eta * m + mean;
                    return w - m - eta * m;
                  }}, samples, 12, 2, 1e-5);
    is_defined_by(hd::strategy{.mode = hd::elastic_sgd{.period = 3}},
                  {[=](double c, double mean, double&) { return c - static_cast<double>(0.9f) * mean; },
                   [=](double, double c, double w) { return w + static_cast<double>(0.9f) / n * (c - w); }, true}, samples, 12, 3);
    is_defined_by(hd::strategy{.mode = hd::geo_sgd{.period = 3}},
                  {[=](double s, double mean, double&) { return s - mean; },
                   [=](double now, double s, double w) { return now + (1.0 - 1.0 / n) * (w - s); }, true}, samples, 12, 3);
  }
}

TEST_CASE("heuristic_average weighs replicas by samples and their mean loss, as defined in double precision") {
  for (const double power : {1.0, 2.0}) {
    // A share that no meeting keeps: the period is the longest allowed, which is also the first.
    const hd::heuristic_average mode{.share = 1e-12, .initial = 3, .most = 3, .loss_power = power};
    is_defined_by(hd::strategy{.mode = mode},
                  {.move = [](double a, double mean, double&) { return a - mean; },
                   .loss = [](std::size_t s, std::size_t r) { return 0.25 + static_cast<double>((3 * s + 5 * r) % 7); },
                   .power = power},
                  {1, 5, 2, 3}, 12, 3);
  }
}

TEST_CASE("under an outer momentum what was sent of the differences and what is held are their sum") {
  constexpr double lr = 0.75, mu = 0.5;
  for (int which = 0; which < any_codec::kinds; ++which) {
    INFO("codec " << which);
    const auto plan =
        hd::strategy{.compressor = hd::error_feedback{any_codec{which}},
                     .mode = hd::diloco{.period = 2, .lr = static_cast<float>(lr), .momentum = static_cast<float>(mu)}};
    vector put(quadratic::count, 0.0), sent = put, held = put;
    std::mutex lock;
    hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
      vector own(quadratic::count, 0.0), moved = own, momentum = own, replica;
      std::vector<float> before = m.w;
      for (std::size_t s = 0; s < 50; ++s) {
        quadratic::gradient(m.w.data(), m.g.data(), sample_of(s, comm.rank()), 2);
        replica.assign(m.w.begin(), m.w.end());
        const bool skipped = s == 20 && comm.rank() == 1;
        for (std::size_t i = 0; i < replica.size() && !skipped; ++i) replica[i] -= 0.0625 * static_cast<double>(m.g[i]);
        if (skipped) m.g[5] = NAN;
        dp.begin({.samples = 2});
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
        RANK_CHECK(dp.step({.lr = 0.0625f}).met == (s % 2 == 1));
        if (s % 2 == 0) continue;
        const double weight = s != 21 ? 1.0 / 3.0 : comm.rank() == 1 ? 0.2 : 0.4;
        for (std::size_t i = 0; i < own.size(); ++i) {
          own[i] += weight * (static_cast<double>(before[i]) - replica[i]);
          // The mean that moved what is agreed: lr (mean + mu (mu momentum + mean)).
          const double move = static_cast<double>(before[i]) - static_cast<double>(m.w[i]);
          const double mean = (move / lr - mu * mu * momentum[i]) / (1.0 + mu);
          momentum[i] = mu * momentum[i] + mean;
          moved[i] += mean;
        }
        before = m.w;
      }
      RANK_CHECK(dp.report().skipped == (comm.rank() == 1));
      const std::lock_guard guard(lock);
      if (comm.rank() == 0) sent = moved;
      for (std::size_t i = 0, at = 0; i < quadratic::sizes.size(); ++i)
        for (const float e : dp.held(i, 0)) held[at++] += static_cast<double>(e);
      for (std::size_t i = 0; i < own.size(); ++i) put[i] += own[i];
    });
    double worst = 0.0, most = 0.0;
    for (std::size_t i = 0; i < put.size(); ++i) {
      worst = std::max(worst, std::fabs(put[i] - sent[i] - held[i]));
      most = std::max(most, std::fabs(held[i]));
    }
    CHECK(most > 1e-4);
    CHECK(worst < 5e-6);  // each meeting rounds what is agreed, by up to 6e-8
  }
}

TEST_CASE("an outer step of rate 1 without momentum is local_sgd, and without a pull replicas are independent") {
  const auto local = under(hd::local_sgd{.period = 3});
  CHECK((under(hd::diloco{.period = 3, .lr = 1.0f, .momentum = 0.0f}) == local));
  CHECK((under(hd::block_momentum{.period = 3, .momentum = 0.0f}) == local));
  const auto slow = under(hd::slow_momentum{.period = 3, .momentum = 0.0f});
  CHECK(all_equal(slow));
  for (std::size_t i = 0; i < quadratic::count; ++i) CHECK(slow[0][i] == Approx(local[0][i]).margin(2e-7));
  const auto alone = [](auto mode, int ranks) {
    std::vector<std::vector<float>> w(3);
    hd::threads::run(ranks, [&](auto& comm) {
      for (int r = comm.rank(); r < 3; r += comm.size()) {
        quadratic m;
        hd::data_parallel dp{hd::strategy{.mode = mode}, comm, m.tensors(), hd::sgd{}};
        for (std::size_t s = 0; s < 7; ++s) train_step(dp, m, sample_of(s, r), 2, 0.05f);
        w[static_cast<std::size_t>(r)] = m.w;
      }
    });
    return w;
  };
  CHECK((alone(hd::elastic_sgd{.period = 2, .beta = 0.0f}, 3) == alone(hd::local_sgd{.period = 100}, 1)));
}

TEST_CASE("geo_sgd sums in instalments: 10 (1 - (3/4)^t) after t meetings, exactly 10 after join") {
  hd::threads::run(4, [](auto& comm) {
    one_number m;
    hd::data_parallel dp{hd::strategy{.mode = hd::geo_sgd{.period = 1}}, comm, m.tensors(), hd::sgd{}};
    const float own = static_cast<float>(comm.rank()) + 1.0f;
    float rest = 1.0f;
    for (int t = 0; t < 8; ++t) {  // all is a whole number of 4^-8 below 16, so nothing rounds
      m.step(dp, t ? 0.0f : -own);
      rest *= 0.75f;
      RANK_CHECK(dp.agreed(0)[0] == 10.0f * (1.0f - rest));
      RANK_CHECK(m.w == 10.0f * (1.0f - rest) + rest * own);
    }
    dp.join();
    RANK_CHECK(m.w == 10.0f);
    RANK_CHECK(dp.agreed(0)[0] == m.w);
  });
}

TEST_CASE("an outer optimizer descends a quadratic of one number") {
  hd::threads::run(3, [](auto& comm) {
    one_number m{.w = 8.0f};
    hd::data_parallel dp{hd::strategy{.mode = hd::diloco{.period = 4, .momentum = 0.5f}}, comm, m.tensors(), hd::sgd{}};
    float before = 8.0f;
    for (int meeting = 0; meeting < 8; ++meeting) {
      for (int s = 0; s < 4; ++s) m.step(dp, m.w, 0.05f);
      RANK_CHECK(std::fabs(m.w) < before);
      before = std::fabs(m.w);
    }
    RANK_CHECK(before < 1.0f);
  });
}

TEST_CASE("modes of the outer step end with uneven batches, and replicas are equal then") {
  const auto uneven = [](const auto& mode) {
    CAPTURE(mode.name());
    std::vector<std::vector<float>> out(3);
    hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(10)}, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{hd::strategy{.mode = mode}, comm, m.tensors(), hd::sgd{}};
      for (int epoch = 0; epoch < 2; ++epoch) {
        for (std::size_t s = 0; s < 5 + 2 * static_cast<std::size_t>(comm.rank()); ++s) {
          dp.begin({.samples = 2});
          quadratic::gradient(m.w.data(), m.g.data(), sample_of(s, comm.rank()), 2);
          for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
          dp.step({.lr = 0.02f, .loss = quadratic::loss(m.w)});
        }
        dp.join();
      }
      out[static_cast<std::size_t>(comm.rank())] = m.w;
    });
    CHECK(all_equal(out));
    CHECK(quadratic::loss(out[0]) < quadratic::loss(std::vector<float>(quadratic::count, 0.5f)));
  };
  uneven(hd::geo_sgd{.period = 3});
  uneven(hd::elastic_sgd{.period = 3});
  uneven(hd::heuristic_average{.initial = 3});
  uneven(hd::outer_step{.outer = hd::outer::sgd{.lr = 0.8f, .momentum = 0.5f}, .weights = hd::weight::equal{},
                        .period = hd::period::adaptive{.initial = 2, .most = 6}});
}

TEST_CASE("outer momenta weigh the samples of 5 batches on one rank and 7 on another as defined in double precision") {
  const std::vector<std::size_t> samples{1, 5, 2}, steps{5, 7, 0};
  const std::size_t period = 3;
  const double lr = static_cast<double>(0.05f);
  const auto check = [&](const auto& mode, const auto& move) {
    vector w(quadratic::count, 0.5), g(w.size()), m(w.size(), 0.0);
    std::vector<std::size_t> taken(3, 0);
    for (bool all = false; !all;) {  // a rank without batches answers until nobody has any
      vector sum(w.size(), 0.0);
      double weights = 0.0;
      all = true;
      for (std::size_t r = 0; r < 3; ++r) {
        vector replica = w;
        const std::size_t n = std::min(period, steps[r] - taken[r]);
        for (std::size_t k = 0; k < n; ++k) {
          quadratic::gradient(replica.data(), g.data(), sample_of(taken[r]++, static_cast<int>(r)), samples[r]);
          for (std::size_t i = 0; i < g.size(); ++i) replica[i] -= lr * g[i];
        }
        const auto weight = static_cast<double>(n * samples[r]);
        for (std::size_t i = 0; i < g.size(); ++i) sum[i] += weight * (w[i] - replica[i]);
        weights += weight;
        all &= n < period;
      }
      for (std::size_t i = 0; i < w.size() && weights > 0.0; ++i) w[i] = move(w[i], sum[i] / weights, m[i]);
    }
    std::vector<std::vector<float>> out(3);
    hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(10)}, [&](auto& comm) {
      quadratic model;
      hd::data_parallel dp{hd::strategy{.mode = mode}, comm, model.tensors(), hd::sgd{}};
      const auto r = static_cast<std::size_t>(comm.rank());
      for (std::size_t s = 0; s < steps[r]; ++s)
        train_step(dp, model, sample_of(s, comm.rank()), samples[r], 0.05f);
      dp.join();
      out[r] = model.w;
    });
    CAPTURE(mode.name());
    CHECK(all_equal(out));
    CHECK(distance(out[0], w) < 1e-5);
  };
  check(hd::local_sgd{.period = period}, [](double a, double mean, double&) { return a - mean; });
  check(hd::diloco{.period = period}, [](double a, double mean, double& m) {
    m = static_cast<double>(0.9f) * m + mean;
    return a - static_cast<double>(0.7f) * (mean + static_cast<double>(0.9f) * m);
  });
  check(hd::slow_momentum{.period = period, .alpha = 0.5f, .momentum = 0.5f}, [=](double a, double mean, double& m) {
    m = 0.5 * m + mean / lr;
    return a - 0.5 * lr * m;
  });
  check(hd::block_momentum{.period = period}, [](double a, double mean, double& m) {
    const double eta = 2.0 / 3.0, w = a + eta * m;
    m = eta * m + mean;
    return w - m - eta * m;
  });
}

TEST_CASE("momentum and period of an outer step are in checkpoints, bit for bit") {
  const auto twenty = [](const auto& mode, const std::string& through) {
    std::vector<std::vector<float>> out(3);
    hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
      const auto steps = [&](auto& dp, quadratic& m, std::size_t from, std::size_t to) {
        for (std::size_t s = from; s < to; ++s) {
          dp.begin({.samples = 2});
          quadratic::gradient(m.w.data(), m.g.data(), sample_of(s, comm.rank()), 2);
          for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
          dp.step({.lr = 0.02f, .loss = quadratic::loss(m.w)});
        }
      };
      quadratic m;
      {
        hd::data_parallel dp{hd::strategy{.mode = mode}, comm, m.tensors(), hd::sgd{}};
        steps(dp, m, 0, through.empty() ? 20 : 10);
        if (!through.empty()) dp.save(through);
      }
      if (!through.empty()) {
        m = quadratic{};
        hd::data_parallel dp{hd::strategy{.mode = mode}, comm, m.tensors(), hd::sgd{}};
        dp.load(through);
        steps(dp, m, 10, 20);
      }
      out[static_cast<std::size_t>(comm.rank())] = m.w;
    });
    return out;
  };
  const auto resumes = [&](const auto& mode) {
    scratch_directory dir;
    CHECK((twenty(mode, "") == twenty(mode, dir.path())));
  };
  resumes(hd::geo_sgd{.period = 4});
  resumes(hd::elastic_sgd{.period = 4});
  resumes(hd::diloco{.period = 4});
  resumes(hd::slow_momentum{.period = 4});
  resumes(hd::block_momentum{.period = 4});
  resumes(hd::heuristic_average{.share = 1e-12, .initial = 4, .most = 4});  // else its period follows measured times
  resumes(hd::outer_step{.outer = hd::outer::sgd{.lr = 0.8f, .momentum = 0.5f}, .weights = hd::weight::equal{},
                         .period = hd::period::adaptive{.initial = 4, .most = 8}});
}

TEST_CASE("a momentum isn't loaded under another outer rule, which takes it for something else") {
  scratch_directory dir;
  hd::threads::run(2, [&](auto& comm) {
    quadratic m;
    {
      hd::data_parallel dp{hd::strategy{.mode = hd::outer_step{.outer = hd::outer::sgd{}}}, comm, m.tensors(),
                           hd::sgd{}};
      dp.save(dir.path());
    }
    const auto refused = [&](const auto& rule) {
      hd::data_parallel dp{hd::strategy{.mode = hd::outer_step{.outer = rule}}, comm, m.tensors(), hd::sgd{}};
      RANK_CHECK_THROWS_AS(dp.load(dir.path()), hd::file_error);
    };
    refused(hd::outer::slow{});
    refused(hd::outer::block{});
    refused(hd::outer::average{});
  });
}

TEST_CASE("slow_momentum meets by the rate of its steps, also after loading and after steps at rate 0") {
  scratch_directory dir;
  hd::threads::run(2, [&](auto& comm) {
    const auto plan = hd::strategy{.mode = hd::slow_momentum{.period = 100, .momentum = 0.0f}};
    one_number m;
    {
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
      for (int s = 0; s < 4; ++s) m.step(dp, 1.0f, 0.125f);
      m.step(dp, 1.0f, 0.0f);
      dp.save(dir.path());
    }
    m = one_number{};
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
    dp.load(dir.path());
    dp.synchronize();
    RANK_CHECK(m.w == -0.5f);
  });
}

TEST_CASE("geo_sgd on another number of ranks keeps the sum of all moves") {
  for (const int ranks : {2, 8}) {
    scratch_directory dir;
    hd::threads::run(4, [&](auto& comm) {
      one_number m;
      hd::data_parallel dp{hd::strategy{.mode = hd::geo_sgd{.period = 2}}, comm, m.tensors(), hd::sgd{}};
      for (int s = 0; s < 3; ++s) m.step(dp, s ? 0.0f : -static_cast<float>(comm.rank()) - 1.0f);
      dp.save(dir.path());
    });
    hd::threads::run(ranks, [&](auto& comm) {
      one_number m;
      hd::data_parallel dp{hd::strategy{.mode = hd::geo_sgd{.period = 2}}, comm, m.tensors(), hd::sgd{}};
      dp.load(dir.path());
      RANK_CHECK(m.w == 10.0f);
      dp.join();
      RANK_CHECK(m.w == 10.0f);
    });
  }
}

TEST_CASE("periods follow loss and cost by their formulas, and weights the loss") {
  using hd::meeting_facts;
  const hd::period::adaptive a{.initial = 4, .most = 10, .warmup = 2};
  hd::period::adaptive::state s;
  CHECK(a.meets(s, 0));
  CHECK(a.meets(s, 1));
  a.met(s, {.clock = 1, .lr = 1.0, .loss = 100.0});  // in the warm-up: not yet the reference
  a.met(s, {.clock = 2, .lr = 1.0, .loss = 100.0});
  for (std::size_t step = 2; step < 5; ++step) CHECK_FALSE(a.meets(s, step));
  CHECK(a.meets(s, 5));
  a.met(s, {.clock = 6, .lr = 0.1, .loss = 9.0});
  CHECK(s.length == 4);
  a.met(s, {.clock = 10, .lr = 0.1, .loss = 36.0});  // sqrt(4) 4 = 8
  CHECK(s.length == 8);
  CHECK_FALSE(a.meets(s, 16));
  CHECK(a.meets(s, 17));
  a.met(s, {.clock = 18, .lr = 0.01, .loss = 36.0});  // sqrt(40) = 6.3, 7 * 4 = 28, at most 10
  CHECK(s.length == 10);
  a.met(s, {.clock = 28, .lr = 0.1, .loss = 2.0});  // 4 sqrt(2 / 9) = 1.9
  CHECK(s.length == 2);
  a.met(s, {.clock = 30, .lr = 0.1, .loss = 0.0});  // no loss: as it was
  CHECK(s.length == 2);
  const hd::period::adaptive inside{.initial = 4, .inside_root = true};
  hd::period::adaptive::state t;
  inside.met(t, {.clock = 4, .lr = 1.0, .loss = 1.0});
  CHECK(t.length == 2);

  const hd::period::by_cost b{.share = 0.1, .initial = 8, .most = 64};
  hd::period::by_cost::state u;
  CHECK_FALSE(b.meets(u, 6));
  CHECK(b.meets(u, 7));
  b.met(u, {.clock = 8, .step_seconds = 0.01, .meeting_seconds = 0.012});
  CHECK(u.length == 12);
  b.met(u, {.clock = 20, .step_seconds = 0.01});  // nothing measured: as it was
  CHECK(u.length == 12);
  b.met(u, {.clock = 32, .step_seconds = 1e-9, .meeting_seconds = 1.0});
  CHECK(u.length == 64);
  b.met(u, {.clock = 96, .step_seconds = 1.0, .meeting_seconds = 1e-9});
  CHECK(u.length == 1);

  CHECK(hd::weight::inverse_loss{.power = 2.0}.of(8.0, 2.0) == 2.0);
  CHECK(hd::weight::inverse_loss{}.of(8.0, 0.0) == 8.0);
  CHECK(hd::weight::inverse_loss{}.of(8.0, std::nan("")) == 8.0);
  CHECK(hd::weight::inverse_loss{.power = 100.0}.of(8.0, 1e-9) == 8e12);  // better is never less
  CHECK(hd::weight::inverse_loss{.power = 100.0}.of(8.0, 1e9) == 8e-12);
  CHECK(hd::weight::equal{}.of(0.0, 1.0) == 1.0);
}

TEST_CASE("in a warm-up replicas meet every step, and every period after it") {
  const auto met = [](const auto& mode) {
    CAPTURE(mode.name());
    hd::threads::run(2, [&](auto& comm) {
      one_number m;
      hd::data_parallel dp{hd::strategy{.mode = mode}, comm, m.tensors(), hd::sgd{}};
      for (const bool meets : {true, true, false, false, true, false, false, true, false}) {
        dp.ready(0);
        RANK_CHECK(dp.step({.lr = 0.1f}).met == meets);
      }
    });
  };
  met(hd::local_sgd{.period = 3, .warmup = 2});
  met(hd::diloco{.period = 3, .warmup = 2});
  met(hd::slow_momentum{.period = 3, .warmup = 2});
  met(hd::block_momentum{.period = 3, .warmup = 2});
  met(hd::outer_step{.period = hd::period::adaptive{.initial = 3, .most = 3, .warmup = 2}});
}

TEST_CASE("numbers of the outer step outside their ranges are refused by name") {
  const auto refused = [](const auto& mode, const char* what) {
    CHECK_THROWS_AS(mode.check(), hd::argument_error);
    try {
      mode.check();
    } catch (const hd::argument_error& e) {
      CHECK(std::string(e.what()).find(what) != std::string::npos);
    }
  };
  refused(hd::diloco{.period = 0}, "period is 0");
  refused(hd::diloco{.lr = -1.0f}, "lr is -1");
  refused(hd::diloco{.momentum = 1.0f}, "momentum is 1");
  refused(hd::slow_momentum{.alpha = NAN}, "lr is nan");
  refused(hd::block_momentum{.momentum = 2.0f}, "momentum is 2");
  refused(hd::elastic_sgd{.beta = 1.5f}, "beta is 1.5");
  refused(hd::geo_sgd{.period = 0}, "period is 0");
  refused(hd::heuristic_average{.share = 0.0}, "share is 0");
  refused(hd::heuristic_average{.loss_power = -1.0}, "power is -1");
  refused(hd::period::adaptive{.initial = 9, .most = 8}, "most 8");
}

TEST_CASE("modes of the outer step report their meetings, and an all-reduce's bytes for each") {
  // 1041 floats over 4 ranks by a ring: each rank sends all blocks but one, twice.
  const auto check = [](const auto& mode) {
    hd::threads::run(4, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{hd::strategy{.topology = hd::ring{}, .mode = mode}, comm, m.tensors(), hd::sgd{}};
      const auto start = dp.report();
      for (std::size_t s = 0; s < 7; ++s) train_step(dp, m, s, 1, 0.1f);
      const auto end = dp.report();
      std::vector<double> sent{static_cast<double>(end.bytes_sent - start.bytes_sent)};
      hd::all_reduce(comm, hd::direct{}, std::span<double>(sent), hd::sum{});
      RANK_CHECK(sent[0] == 2.0 * 2 * 3 * 1041 * 4);
      RANK_CHECK(end.meetings - start.meetings == 2);
      RANK_CHECK(end.steps == 7);
      dp.join();
    });
  };
  check(hd::local_sgd{.period = 3});
  check(hd::diloco{.period = 3});
  check(hd::slow_momentum{.period = 3});
  check(hd::block_momentum{.period = 3});
  check(hd::elastic_sgd{.period = 3});
  check(hd::geo_sgd{.period = 3});
}

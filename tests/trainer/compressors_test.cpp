// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Every codec under the trainer: what runs the same way for all of them is chosen at run time, so that few trainers
// are compiled.
#include <heddle/comm/calibrate.hpp>
#include <heddle/comm/throttled.hpp>
#include <heddle/compress/automatic_compressor.hpp>
#include <heddle/compress/power_sgd.hpp>
#include <heddle/compress/random_k.hpp>

#include "any_codec.hpp"
#include "support.hpp"

#include <limits>
#include <mutex>

namespace {
hd::threads::options with(int ranks) { return {.ranks = ranks, .deadline = std::chrono::seconds(20)}; }

// Parameters of every rank; before step `bad_at` one more, with a NaN on the last rank.
template <class Plan>
std::vector<std::vector<float>> run(const Plan& plan, int ranks, std::size_t steps, std::size_t bad_at = 1000) {
  std::vector<std::vector<float>> out(static_cast<std::size_t>(ranks));
  hd::threads::run(with(ranks), [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
    for (std::size_t s = 0; s < steps; ++s) {
      if (s == bad_at) {
        m.g.assign(m.g.size(), 1.0f);
        if (comm.rank() == ranks - 1) m.g[500] = std::numeric_limits<float>::quiet_NaN();
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
        RANK_CHECK(dp.step({.lr = 0.05f}).skipped);
      }
      RANK_CHECK_FALSE(train_step(dp, m, first_sample(s, comm.rank(), ranks, 2), 2, 0.05f).skipped);
    }
    out[static_cast<std::size_t>(comm.rank())] = m.w;
  });
  CHECK(all_equal(out));
  return out;
}

// Saves on some ranks and goes on on others, perhaps in other buckets: there the same is held in all.
template <class Plan>
std::vector<float> run_and_resume(const Plan& plan, int ranks, int later, hd::buckets buckets = {}) {
  Plan then = plan;
  then.buckets = buckets;
  scratch_directory dir;
  std::vector<double> before(quadratic::count, 0.0), after = before;
  std::vector<float> w;
  std::mutex lock;
  const auto add = [&](auto& dp, std::vector<double>& to) {
    const std::lock_guard guard(lock);
    std::size_t at = 0;
    for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
      for (const float e : dp.held(i, 0)) to[at++] += static_cast<double>(e);
    }
  };
  hd::threads::run(with(ranks), [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
    for (std::size_t s = 0; s < 10; ++s) train_step(dp, m, first_sample(s, comm.rank(), ranks, 2), 2, 0.05f);
    dp.save(dir.path());
    add(dp, before);
  });
  hd::threads::run(with(later), [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{then, comm, m.tensors(), hd::sgd{}};
    dp.load(dir.path());
    add(dp, after);
    for (std::size_t s = 10; s < 20; ++s) train_step(dp, m, first_sample(s, comm.rank(), later, 2), 2, 0.05f);
    if (comm.rank() == 0) w = m.w;
  });
  double worst = 0.0, most = 0.0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    worst = (std::max)(worst, std::fabs(before[i] - after[i]));
    most = (std::max)(most, std::fabs(before[i]));
  }
  CHECK(most > 0.0);
  CHECK(worst <= 1e-6 * most);
  return w;
}

template <class Plan> void behaves(const Plan& plan, double loss) {
  for (const int ranks : {1, 2, 3, 4, 5, 7, 8}) {
    const auto w = run(plan, ranks, 6);
    if (ranks == 3) {
      CHECK(w == run(plan, ranks, 6));
      CHECK(w == run(plan, ranks, 6, 4));  // a skipped step leaves no trace
    }
  }
  CHECK(quadratic::loss(run(plan, 4, 200)[0]) < loss);
}
template <class Plan> void resumes(const Plan& plan) {
  CHECK(run_and_resume(plan, 3, 3) == run(plan, 3, 20)[0]);
  run_and_resume(plan, 4, 2);
  run_and_resume(plan, 2, 8);
}
// Other buckets change no bit where what travels dense or as sums is added in rank order: from the beginning, and from
// one step to the next.
template <class Plan> void keeps_its_bits_in_other_buckets(Plan plan) {
  if constexpr (std::is_same_v<decltype(plan.topology), any_topology>) plan.topology = any_topology{4};  // direct
  const auto one = run(plan, 3, 20);
  CHECK(run_and_resume(plan, 3, 3, {.first = 1, .cap = 1}) == one[0]);
  plan.buckets = {.first = 64, .cap = 1300};
  CHECK(run(plan, 3, 20) == one);
}
}  // namespace

TEST_CASE("codecs inside error_feedback train, agree bit for bit, skip without a trace and resume") {
  for (int which = 0; which < any_codec::kinds; ++which) {
    INFO("codec " << which);
    const auto plan = hd::strategy{.topology = any_topology{}, .compressor = hd::error_feedback{any_codec{which}}};
    behaves(plan, 0.02);
    resumes(plan);
    keeps_its_bits_in_other_buckets(plan);
  }
}

TEST_CASE("random_k inside error_feedback does, and moves as many bytes as it says") {
  const auto plan = hd::strategy{
      .topology = any_topology{},
      .compressor = hd::clip{.max_norm = 1e6f} | hd::error_feedback{hd::random_k{.density = 0.25, .dense_below = 10}}};
  behaves(plan, 0.02);
  resumes(plan);
  keeps_its_bits_in_other_buckets(plan);
  hd::threads::run(with(4), [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
    const auto before = dp.report().bytes_sent;
    for (std::size_t s = 0; s < 4; ++s) train_step(dp, m, first_sample(s, comm.rank(), 4, 2), 2, 0.05f);
    std::vector<double> sent{static_cast<double>(dp.report().bytes_sent - before) / 4};
    hd::all_reduce(comm, hd::direct{}, std::span<double>(sent), hd::sum{});
    // A ring's 2 (P - 1) floats in all, for 250 + 9 picked, the flag, and 8 elements of small tensors.
    RANK_CHECK(sent[0] == 4 * 2 * 3 * (250 + 9 + 1 + 8));
  });
}

TEST_CASE("power_sgd does, with a tensor's own shape") {
  const auto plan = hd::strategy{.topology = hd::native{}, .compressor = hd::power_sgd{.rank = 2, .worth = 1.0, .dense_below = 10}};
  behaves(plan, 0.02);
  resumes(plan);
  keeps_its_bits_in_other_buckets(plan);
  hd::threads::run(with(2), [&](auto& comm) {
    quadratic m;
    auto tensors = m.tensors();
    tensors[2].rows = 100;  // 100 x 10
    hd::data_parallel dp{plan, comm, tensors, hd::sgd{}};
    train_step(dp, m, first_sample(0, comm.rank(), 2, 2), 2, 0.05f);
    RANK_CHECK(dp.report().elements_sent == 2 * (100 + 10) + 2 * (5 + 7) + 8);  // the 33 are 5 rows of 7, padded
    tensors[2].rows = comm.rank() == 0 ? 100 : 50;
    const auto make = [&] { hd::data_parallel other{plan, comm, tensors, hd::sgd{}}; };
    RANK_CHECK_THROWS_AS(make(), hd::comm_error);
  });
}

TEST_CASE("stochastic quantisation trains by itself, local steps too") {
  CHECK(quadratic::loss(run(hd::strategy{.compressor = hd::quantize<8>{.block = 100, .dense_below = 10}}, 4, 200)[0]) < 0.02);
  const auto local = hd::strategy{.compressor = hd::error_feedback{any_codec{1}}, .mode = hd::local_sgd{.period = 4}};
  CHECK(quadratic::loss(run(local, 3, 200)[0]) < 0.02);
}

TEST_CASE("automatic_compressor is dense on fast links and compresses on slow ones") {
  for (const bool slow : {false, true}) {
    hd::threads::run(with(4), [&](auto& comm) {
      quadratic m;
      hd::links costs;
      costs.intra.cost.beta = slow ? 1e-7 : 1e-12;
      costs.gamma = 1e-10;
      const auto plan = hd::strategy{.compressor = hd::automatic_compressor{.compressor = hd::error_feedback{hd::random_k{.density = 0.1, .dense_below = 10}}, .costs = costs}};
      hd::data_parallel dp{plan, comm, m.tensors(), hd::adamw{}};
      train_step(dp, m, first_sample(0, comm.rank(), 4, 2), 2, 0.05f);
      RANK_CHECK(dp.report().elements_sent == (slow ? 100 + 4 + 8 : quadratic::count));
      RANK_CHECK(dp.why(2).find(slow ? "compressed: " : "dense: ") == 0);
      RANK_CHECK(dp.why(2).find(slow ? ", dense 0.6 ms" : ", compressed ") != std::string::npos);
      RANK_CHECK(dp.why(0) == "dense: the compressor leaves tensors of 7 elements as they are");
      RANK_CHECK_THROWS_AS(dp.why(5), hd::argument_error);
    });
  }
}

TEST_CASE("automatic_compressor chooses by what is measured of slow links and of fast ones") {
  hd::threads::run(with(2), [&](auto& comm) {
    quadratic m;
    const auto says = [&](hd::links costs) {
      costs.gamma = 2e-10;  // of memory, which isn't what is asked here
      const auto plan =
          hd::strategy{.compressor = hd::automatic_compressor{
                           .compressor = hd::error_feedback{hd::random_k{.density = 0.1, .dense_below = 10}},
                           .costs = costs,
                           .traffic = 170.0}};
      hd::data_parallel dp{plan, comm, m.tensors(), hd::adamw{}};
      return dp.why(2);
    };
    hd::throttled slow(comm.duplicate(), hd::link_cost{.alpha = 1e-6, .beta = 1e-8});  // 100 MB/s
    RANK_CHECK(says(hd::calibrate(slow)).find("compressed: ") == 0);
    std::string fast;
    for (int k = 0; k < 5 && fast.find("dense: ") != 0; ++k) fast = says(hd::calibrate(comm));  // others work here, too
    RANK_CHECK(fast.find("dense: ") == 0);
  });
}

namespace {
// Two elements, of which the larger is sent.
template <class Comm> struct two_elements {
  using plan = hd::strategy<any_topology, hd::error_feedback<any_codec>>;
  static constexpr std::size_t sizes[] = {2};

  explicit two_elements(Comm& comm)
      : dp(plan{.compressor = {any_codec{0, 0}}}, comm, hd::tensors(w.data(), g.data(), sizes), hd::sgd{}) {}
  void step(float lr, bool tell = true) {
    g = {1.0f, 8.0f};
    if (tell) dp.begin({.lr = lr});
    dp.ready(0);
    dp.step({.lr = lr});
  }
  std::vector<float> w = std::vector<float>(2, 0.0f), g = w;
  hd::data_parallel<plan, Comm, hd::sgd> dp;
};
}  // namespace

TEST_CASE("a rate told to begin scales what is held, and must be the step's") {
  hd::self comm;
  two_elements m(comm);
  m.step(1.0f);  // sends 8, holds 1
  CHECK(m.w == std::vector<float>{0.0f, -8.0f});
  m.step(0.0625f);  // holds 16 at this rate, and 1 more
  CHECK(m.w == std::vector<float>{-17.0f * 0.0625f, -8.0f});
  m.dp.begin({.lr = 0.5f});
  m.dp.ready(0);
  CHECK_THROWS_AS(m.dp.step({.lr = 0.25f}), hd::argument_error);
  m.dp.step({.lr = 0.5f});
  CHECK_THROWS_AS(m.dp.begin({.lr = -1.0f}), hd::argument_error);
}

TEST_CASE("a rate that begin wasn't told scales what is held all the same, a step later") {
  hd::self comm;
  two_elements m(comm);
  m.step(1.0f, false);     // sends 8, holds 1
  m.step(0.0625f, false);  // sends 8; holds 16 at this rate, and 1 more
  CHECK(m.w == std::vector<float>{0.0f, -8.0f - 8.0f * 0.0625f});
  CHECK(m.dp.held(0, 0)[0] == 17.0f);
  m.step(0.0625f, false);  // sends 18
  CHECK(m.w == std::vector<float>{-18.0f * 0.0625f, -8.5f});
  m.step(0.125f);  // tells again: 8 held were 4, of it 8 and 4 is the most
  CHECK(m.w == std::vector<float>{-18.0f * 0.0625f, -8.5f - 12.0f * 0.125f});
  CHECK(m.dp.held(0, 0)[0] == 1.0f);
}

TEST_CASE("a rank that has joined scales what it holds as the others do") {
  hd::threads::run(with(2), [](auto& comm) {
    two_elements m(comm);
    m.step(1.0f);  // both send 8 / 2 and hold 1 / 2
    if (comm.rank() == 0) m.step(0.0625f);  // holds 8 at this rate, and 1 more; the other one 8, without samples
    m.dp.join();
    RANK_CHECK(m.w == std::vector<float>{-17.0f * 0.0625f, -8.0f});
  });
}

TEST_CASE("error_feedback sends what it holds of a tensor that travels dense after loading, as far as it fits") {
  scratch_directory dir;
  hd::threads::run(with(3), [&](auto& comm) {
    for (const float mean : {2.0f, 3.3e38f}) {
      quadratic m;
      const auto step = [&](auto& dp, float g) {
        m.g.assign(m.g.size(), g);
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
        return dp.step({.lr = 1.0f}).skipped;
      };
      for (const std::size_t dense_below : {std::size_t{0}, std::size_t{5000}}) {
        hd::data_parallel dp{
            hd::strategy{.topology = any_topology{}, .compressor = hd::error_feedback{any_codec{0, dense_below}}}, comm,
            m.tensors(), hd::sgd{}};
        if (dense_below) dp.load(dir.path());
        if (dense_below && mean > 1e38f) RANK_CHECK(step(dp, 0.5e38f));  // together beyond float's range
        RANK_CHECK_FALSE(step(dp, dense_below ? 0.0f : mean > 1e38f ? mean : static_cast<float>(comm.rank() + 1)));
        if (!dense_below) dp.save(dir.path());
      }
      for (const float x : m.w) RANK_CHECK(std::fabs(x - (0.5f - mean)) <= 5e-7f * mean);
    }
  });
}

TEST_CASE("a limit is refused where the average is compressed, and taken where steps are local") {
  hd::threads::run(with(1), [](auto& comm) {
    quadratic m;
    const auto refusal = [&](const auto& plan) -> std::string {
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
      m.g.assign(m.g.size(), 1.0f);
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
      try {
        dp.step({.lr = 0.05f, .max_norm = 1.0f});
      } catch (const hd::argument_error& e) {
        dp.step({.lr = 0.05f});
        return e.what();
      }
      return "";
    };
    const auto says = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
    RANK_CHECK(says(refusal(hd::strategy{.topology = any_topology{}, .compressor = hd::error_feedback{any_codec{1}}}),
                    "holds gradients back"));
    RANK_CHECK(says(refusal(hd::strategy{.compressor = hd::quantize<8>{.block = 100, .dense_below = 10}}), "is added up after"));
    RANK_CHECK(refusal(hd::strategy{.compressor = hd::error_feedback{any_codec{1}}, .mode = hd::local_sgd{.period = 4}}).empty());
  });
}

TEST_CASE("tensors of one element, ranks without samples and several lanes are legal under every codec") {
  const auto odd = [](auto plan) {
    plan.lanes = 3;
    plan.buckets = {.first = 64, .cap = 64};
    hd::threads::run(with(3), [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
      const double start = quadratic::loss(m.w);
      for (std::size_t s = 0; s < 8; ++s) {
        const std::size_t n = (s + static_cast<std::size_t>(comm.rank())) % 3;  // one of three has none
        dp.begin({.samples = static_cast<double>(n)});
        quadratic::gradient(m.w.data(), m.g.data(), first_sample(s, comm.rank(), 3, 2), n);
        if (n == 0) m.g.assign(m.g.size(), std::numeric_limits<float>::quiet_NaN());
        for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
        RANK_CHECK_FALSE(dp.step({.lr = 0.05f}).skipped);
      }
      dp.join();
      RANK_CHECK(hd::all_finite(m.w.data(), m.w.size()));
      RANK_CHECK(quadratic::loss(m.w) < start);
    });
  };
  for (int which = 0; which < any_codec::kinds; ++which)
    odd(hd::strategy{.topology = any_topology{}, .compressor = hd::error_feedback{any_codec{which, 0}}});
  odd(hd::strategy{.compressor = hd::quantize<8>{.block = 3, .dense_below = 0}});
  odd(hd::strategy{
      .topology = any_topology{},
      .compressor = hd::clip{.max_norm = 1e6f} | hd::error_feedback{hd::random_k{.density = 0.25, .dense_below = 0}}});
  odd(hd::strategy{.topology = hd::native{}, .compressor = hd::power_sgd{.worth = 0.0, .dense_below = 0}});
}

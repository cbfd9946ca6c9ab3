// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/trainer/hogwild.hpp>
#include <heddle/trainer/require_equal.hpp>

#include "support.hpp"

#include <atomic>

namespace {

// One source for every mode: parameters are read through dp.parameters().
template <class Plan, class Rule> std::vector<float> train_alone(const Plan& plan, const Rule& rule) {
  quadratic m;
  hd::self comm;
  hd::data_parallel dp{plan, comm, m.tensors(), rule};
  for (std::size_t s = 0; s < 20; ++s) {
    std::vector<float> w(quadratic::count);
    std::size_t at = 0;
    for (std::size_t i = 0; i < quadratic::sizes.size(); at += quadratic::sizes[i++])
      std::copy_n(dp.parameters()[i], quadratic::sizes[i], w.data() + at);
    quadratic::gradient(w.data(), m.g.data(), 2 * s, 2);
    if (s == 7) m.g[3] = NAN;
    for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
    const auto result = dp.step({.lr = 0.05f, .max_norm = s == 9 ? 1.0f : 0.0f, .max_value = s == 11 ? 0.1f : 0.0f});
    CHECK(result.skipped == (s == 7));
  }
  dp.join();
  CHECK(dp.report().skipped == 1);
  return m.w;
}

template <class Race> void train_together(std::size_t rank_steps[4], double& loss) {
  std::vector<std::vector<float>> out(4);
  std::vector<const float*> shared(4);
  hd::threads::run({.ranks = 4, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
    quadratic m;
    const std::size_t me = static_cast<std::size_t>(comm.rank());
    hd::data_parallel dp{hd::strategy{.mode = hd::hogwild<Race>{}}, comm, m.tensors(), hd::sgd{}};
    shared[me] = dp.parameters()[0];
    for (std::size_t s = 0; s < rank_steps[me]; ++s) {
      Race::read(dp.parameters()[0], m.w.data(), quadratic::count);  // tensors lie one after the other
      quadratic::gradient(m.w.data(), m.g.data(), first_sample(s, comm.rank(), 4, 2), 2);
      for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
      dp.step({.lr = 0.02f});
    }
    dp.join();
    RANK_CHECK(dp.report().steps == rank_steps[me]);
    out[me] = m.w;
  });
  CHECK(all_equal(out));
  for (const float* p : shared) CHECK(p == shared[0]);
  loss = quadratic::loss(out[0]);
}

}  // namespace

TEST_CASE("hogwild on one rank gives the bits of every_step there, a step with a NaN skipped") {
  const auto shared = hd::strategy{.mode = hd::hogwild<>{}};
  const auto relaxed = hd::strategy{.mode = hd::hogwild<hd::relaxed>{}};
  CHECK(train_alone(shared, hd::sgd{.momentum = 0.9f}) == train_alone(hd::strategy{}, hd::sgd{.momentum = 0.9f}));
  CHECK(train_alone(relaxed, hd::adamw{}) == train_alone(hd::strategy{}, hd::adamw{}));
}

TEST_CASE("hogwild ranks share parameters, learn, and end with equal replicas, also after uneven numbers of steps") {
  const double begin = quadratic::loss(quadratic{}.w);
  std::size_t steps[4] = {5, 70, 30, 60};
  double loss;
  train_together<hd::vector_asm>(steps, loss);
  CHECK(loss < 0.5 * begin);
  train_together<hd::relaxed>(steps, loss);
  CHECK(loss < 0.5 * begin);
  train_together<hd::fetch_add>(steps, loss);
  CHECK(loss < 0.5 * begin);
}

TEST_CASE("under fetch_add no update of any rank is lost") {
  std::vector<float> result;
  hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
    std::vector<float> w(5000, 0.0f), g(5000, 1.0f);
    const std::array<std::size_t, 1> sizes{5000};
    const auto tensors = hd::tensors(w.data(), g.data(), sizes);
    hd::data_parallel dp{hd::strategy{.mode = hd::hogwild<hd::fetch_add>{}}, comm, tensors, hd::sgd{}};
    for (int s = 0; s < 100; ++s) {
      dp.ready(0);
      dp.step({.lr = 1.0f});
    }
    dp.join();
    if (comm.rank() == 0) result = w;
  });
  for (const float x : result) REQUIRE(x == -300.0f);
}

TEST_CASE("a rank that leaves by an exception, or without join, wakes those that wait for it") {
  for (const bool throws : {true, false}) {
    std::atomic<int> told{0};
    try {
      hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
        quadratic m;
        hd::data_parallel dp{hd::strategy{.mode = hd::hogwild<>{}}, comm, m.tensors(), hd::sgd{}};
        if (comm.rank() == 1) {
          if (throws) throw std::runtime_error("rank 1");
          return;
        }
        try {
          dp.join();
        } catch (const hd::comm_error&) {
          ++told;
        }
      });
    } catch (const std::runtime_error&) {
      CHECK(throws);
    }
    CHECK(told == 2);
  }
}

TEST_CASE("hogwild saved and loaded goes on: one rank bit for bit, others with the parameters and their counts") {
  const auto plan = hd::strategy{.mode = hd::hogwild<>{}};
  char name[] = "/tmp/heddle-hogwild-XXXXXX";
  REQUIRE(::mkdtemp(name) != nullptr);
  const std::string directory = name;
  const auto run = [&](int ranks, std::size_t first, std::size_t last, bool load, bool save) {
    std::vector<float> w;
    hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{plan, comm, m.tensors(), hd::adamw{}};
      if (load) {
        dp.load(directory);
        RANK_CHECK(dp.report().steps == first);
        if (ranks == 1) RANK_CHECK(std::equal(dp.parameters()[2], dp.parameters()[2] + 1000, m.w.data() + 7));
      }
      for (std::size_t s = first; s < last; ++s) {
        hd::vector_asm::read(dp.parameters()[0], m.w.data(), quadratic::count);
        quadratic::gradient(m.w.data(), m.g.data(), 2 * s, 2);
        for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
        dp.step({.lr = 0.01f});
      }
      if (save) dp.save(directory);
      dp.join();
      if (comm.rank() == 0) w = m.w;
    });
    return w;
  };
  const std::vector<float> whole = run(1, 0, 20, false, false);
  run(1, 0, 10, false, true);
  CHECK(run(1, 10, 20, true, false) == whole);
  const std::vector<float> three = run(3, 10, 20, true, true);
  CHECK(run(2, 20, 20, true, false) == three);
  CHECK(run(5, 20, 20, true, false) == three);
  REQUIRE(::truncate((directory + "/checkpoint-2.rank-1").c_str(), 100) == 0);
  hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), hd::adamw{}};
    RANK_CHECK_THROWS_AS(dp.load(directory), hd::file_error);
    RANK_CHECK(m.w == quadratic{}.w);
    dp.join();
  });
  for (const char* file : {"/manifest", "/checkpoint-2.rank-0", "/checkpoint-2.rank-1", "/checkpoint-2.rank-2"})
    CHECK(std::remove((directory + file).c_str()) == 0);
  CHECK(::rmdir(name) == 0);
}

TEST_CASE("a rule that isn't linear sees an element once a step: no element is in two tensors, none ready twice") {
  hd::self comm;
  std::vector<float> w(8, 1.0f), g(8, 0.5f);
  auto tensors = hd::tensors(w.data(), g.data(), std::array<std::size_t, 2>{4, 4});
  const auto plan = hd::strategy{.mode = hd::hogwild<hd::relaxed>{}};
  const auto make = [&] { hd::data_parallel dp{plan, comm, tensors, hd::adamw{}}; };
  CHECK_NOTHROW(make());
  tensors[1].gradient = &g[3];  // the gradients of two tensors
  CHECK_THROWS_AS(make(), hd::argument_error);
  tensors[1].gradient = &g[4];
  tensors[1].parameter = &w[3];
  CHECK_THROWS_AS(make(), hd::argument_error);
  tensors[1].parameter = &w[4];
  hd::data_parallel dp{plan, comm, tensors, hd::adamw{.weight_decay = 0.0f}};
  dp.ready(0);
  CHECK_THROWS_AS(dp.ready(0), hd::argument_error);
  dp.ready(1);
  dp.step({.lr = 0.25f});
  dp.join();
  for (const float x : w) CHECK(std::fabs(x - 0.75f) < 1e-6f);  // the first step of Adam is the rate
}

TEST_CASE("initial parameters that differ are rank 0's, or by choice an error on all ranks that names the rank") {
  hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
    quadratic m;
    hd::require_equal(comm, m.tensors());
    const auto refusal = [&](std::vector<hd::tensor> tensors, int by) -> std::string {
      try {
        hd::require_equal(comm, tensors);
      } catch (const hd::comm_error& e) {
        RANK_CHECK(e.peer() == by);
        return e.what();
      }
      return "";
    };
    if (comm.rank() == 1) m.w[500] = std::nextafter(0.5f, 1.0f);
    if (comm.rank() == 2) m.w[1040] = 0.0f;
    RANK_CHECK(refusal(m.tensors(), 1).find("\"2\" begins with other values") != std::string::npos);
    auto fewer = m.tensors();
    if (comm.rank() == 2) fewer.pop_back();
    RANK_CHECK(refusal(fewer, 2).find("other names, sizes or types") != std::string::npos);
    hd::data_parallel dp{hd::strategy{.mode = hd::hogwild<>{}}, comm, m.tensors(), hd::sgd{}};
    dp.join();
    RANK_CHECK(m.w == quadratic{}.w);
    hd::require_equal(comm, m.tensors());
  });
}

TEST_CASE("hogwild refuses other tensors on a rank, wrong numbers and wrong order") {
  hd::threads::run({.ranks = 2, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
    quadratic m;
    std::vector<hd::tensor> tensors = m.tensors();
    if (comm.rank() == 1) tensors.pop_back();
    const auto plan = hd::strategy{.mode = hd::hogwild<>{}};
    RANK_CHECK_THROWS_AS((hd::data_parallel{plan, comm, tensors, hd::sgd{}}), hd::comm_error);
  });
  quadratic m;
  hd::self comm;
  hd::data_parallel dp{hd::strategy{.mode = hd::hogwild<>{}}, comm, m.tensors(), hd::sgd{}};
  CHECK_THROWS_AS(dp.ready(5), hd::argument_error);
  dp.ready(0);
  CHECK_THROWS_AS(dp.ready(0), hd::argument_error);
  CHECK_THROWS_AS(dp.join(), hd::argument_error);
  CHECK_THROWS_AS(dp.step({.lr = -1.0f}), hd::argument_error);
  CHECK_THROWS_AS(dp.step({.lr = 1.0f}), hd::argument_error);  // tensors that never were ready
  CHECK(m.w == quadratic{}.w);
}

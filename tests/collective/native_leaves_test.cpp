// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "native_leaves.hpp"

#include <heddle/collective/automatic_buckets.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/comm/threads.hpp>
#include <heddle/heddle.hpp>

#include "../support/catch.hpp"
#include "../support/rank_check.hpp"

#include <stdexcept>

namespace hd = heddle;
using namespace std::chrono_literals;

TEST_CASE("native as a leaf, on threads, in even and in ragged groups") {
  for (const int p : {1, 2, 3, 4, 5, 7, 8}) {
    for (const int group : {0, 1, 2, 3, p}) {
      if (p > 5 && group == p) continue;
      native_leaves::each_topology(group, [&](const auto& t) {
        hd::threads::run(p, [&](auto& comm) {
          const std::string wrong = native_leaves::check_all(comm, t);
          if (!wrong.empty()) throw std::logic_error(wrong);
        });
      });
    }
  }
  // Three levels.
  const hd::hierarchical three{hd::native{}, hd::hierarchical{hd::native{}, hd::ring{}, 2}, 2};
  hd::threads::run(8, [&](auto& comm) {
    const std::string wrong = native_leaves::check_all(comm, three);
    if (!wrong.empty()) throw std::logic_error(wrong);
  });
}

TEST_CASE("a plan with native leaves serves the rank that it was made for, and no other") {
  for (const int of : {1, 2, 3, 4}) {
    std::string text;
    try {
      hd::threads::run(of, [](auto& comm) {
        std::vector<float> data(12);
        hd::all_reduce_plan plan(hd::hierarchical{hd::native{}, hd::ring{}, 2}, 1, 3, data.size());
        plan(comm, data.data(), hd::leaf_of<float>(hd::sum{}));
      });
    } catch (const hd::argument_error& e) {
      text = e.what();
    }
    INFO(text);
    CHECK(text.find("a plan for rank 1 of 3 is called by rank") != std::string::npos);
  }
}

TEST_CASE("a hierarchy with native leaves sends what one of schedules sends, and splits once") {
  hd::threads::run(8, [](auto& comm) {
    hd::counting counted(comm);
    std::vector<float> data(1024, 1.0f);
    const hd::hierarchical t{hd::native{}, hd::ring{}, 4};
    hd::all_reduce(counted, t, std::span(data));
    const auto bytes = counted.sent().bytes;
    RANK_CHECK(bytes == (2 * 1024 * 3 / 4 + 2 * 256 / 2) * sizeof(float));  // inside, and its column across
    auto* const inside = &counted.levels(4).inside;
    hd::all_reduce(counted, t, std::span(data));
    RANK_CHECK(counted.sent().bytes == 2 * bytes);
    RANK_CHECK(&counted.levels(4).inside == inside);
    RANK_CHECK(data == std::vector<float>(1024, 64.0f));
  });
}

TEST_CASE("a trainer runs on native leaves, on lanes and in buckets of the model's choice, too") {
  std::vector<float> results[2];
  const auto train = [&](const auto& plan, std::vector<float>& result) {
    hd::threads::run(4, [&](auto& comm) {
      std::vector<float> w(3000, 1.0f), g(3000);
      const std::size_t sizes[] = {1000, 500, 1500};
      hd::data_parallel dp{plan, comm, hd::tensors(w.data(), g.data(), sizes), hd::sgd{}};
      for (int s = 0; s < 3; ++s) {
        for (std::size_t i = 0; i < g.size(); ++i) g[i] = w[i] * static_cast<float>(comm.rank() + 1);
        for (std::size_t t = 3; t-- > 0;) dp.ready(t);
        dp.step({.lr = 0.125f});
      }
      if (comm.rank() == 0) result = w;
    });
  };
  train(
      hd::strategy{
          .topology = hd::hierarchical{hd::native{}, hd::native{}, 2}, .buckets = hd::automatic_buckets{}, .lanes = 2},
      results[0]);
  train(hd::strategy{.topology = hd::ring{}}, results[1]);
  REQUIRE(results[0].size() == 3000);
  for (std::size_t i = 0; i < 3000; ++i) CHECK(std::abs(results[0][i] - results[1][i]) <= 1e-6f);
}

TEST_CASE("a rank that throws on one level is named by those who wait on the other") {
  const auto start = std::chrono::steady_clock::now();
  std::string texts[4];
  CHECK_THROWS_AS(hd::threads::run({.ranks = 4, .deadline = 20s},
                                   [&](auto& comm) {
                                     std::vector<float> data(100, 1.0f);
                                     const auto add = [&](float a, float b) {
                                       if (comm.rank() == 3) throw std::runtime_error("no");
                                       return a + b;
                                     };
                                     try {
                                       hd::all_reduce(comm, hd::hierarchical{hd::native{}, hd::native{}, 2},
                                                      std::span(data), add);
                                     } catch (const hd::comm_error& e) {
                                       texts[comm.rank()] = e.what();
                                       throw;
                                     }
                                   }),
                  std::runtime_error);
  CHECK(std::chrono::steady_clock::now() - start < 15s);
  for (int r = 0; r < 3; ++r) {
    INFO(texts[r]);
    CHECK(texts[r].find("rank 3") != std::string::npos);
  }
}

TEST_CASE("threads are split by color and key") {
  hd::threads::run(5, [](auto& comm) {
    auto part = comm.split(comm.rank() % 2, -comm.rank());
    RANK_CHECK(part.size() == (comm.rank() % 2 ? 2 : 3));
    RANK_CHECK(part.rank() == part.size() - 1 - comm.rank() / 2);  // backwards
    std::vector<int> ranks(static_cast<std::size_t>(part.size()));
    const std::vector<int> mine{comm.rank()};
    hd::all_gather(part, hd::ring{}, std::span<const int>(mine), std::span(ranks));
    for (int r = 0; r < part.size(); ++r)
      RANK_CHECK(ranks[static_cast<std::size_t>(r)] == comm.rank() % 2 + 2 * (part.size() - 1 - r));
    auto again = part.duplicate().split(part.rank() > 0);
    std::vector<float> one(5000, 1.0f);
    hd::all_reduce(again, hd::native{}, std::span(one));
    RANK_CHECK(one == std::vector<float>(5000, part.rank() > 0 ? static_cast<float>(part.size() - 1) : 1.0f));
  });
  CHECK_THROWS_AS(hd::threads::run(2, [](auto& comm) { comm.split(comm.rank() - 1); }), hd::argument_error);
  // A failure is everybody's, and names ranks as they are known outside.
  std::string text;
  CHECK_THROWS_AS(hd::threads::run({.ranks = 4, .deadline = 20s},
                                   [&](auto& comm) {
                                     auto part = comm.split(comm.rank() / 2);
                                     if (comm.rank() == 3) throw std::runtime_error("no");
                                     std::vector<float> data(5000);
                                     try {
                                       for (;;) hd::all_reduce(part, hd::ring{}, std::span(data));
                                     } catch (const hd::comm_error& e) {
                                       if (comm.rank() == 0) text = e.what();
                                       throw;
                                     }
                                   }),
                  std::runtime_error);
  INFO(text);
  CHECK(text.find("rank 3") != std::string::npos);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"

namespace {
const hd::threads::options four{.ranks = 4, .deadline = std::chrono::seconds(5)};

template <class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const hd::error& e) {
    return e.what();
  }
  return "nothing thrown";
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
}  // namespace

TEST_CASE("wrong use of data_parallel is an argument_error that says what") {
  hd::self comm;
  quadratic m;
  hd::data_parallel dp{hd::strategy{}, comm, m.tensors(), hd::sgd{}};
  CHECK(has(message_of([&] { dp.ready(5); }), "tensor 5 of 5"));
  dp.ready(2);
  CHECK(has(message_of([&] { dp.ready(2); }), "\"2\" was ready before"));
  CHECK(has(message_of([&] { dp.step({.lr = 0.1f}); }), "\"0\" was never ready"));
  CHECK(has(message_of([&] { dp.begin(); }), "a step is open"));
  CHECK(has(message_of([&] { dp.join(); }), "a step is open"));
  for (const std::size_t i : {0u, 1u, 3u, 4u}) dp.ready(i);
  CHECK_FALSE(dp.step({.lr = 0.1f}).skipped);
  CHECK(has(message_of([&] { dp.begin({.samples = -1.0}); }), "samples is -1"));
  CHECK_THROWS_AS(dp.held(0, 0), hd::argument_error);

  const auto make = [&](std::vector<hd::tensor> t) { hd::data_parallel d{hd::strategy{}, comm, t, hd::sgd{}}; };
  auto t = m.tensors();
  t[3].parameter = nullptr;
  CHECK(has(message_of([&] { make(t); }), "\"3\" has count 1 and a null pointer"));
  t = m.tensors();
  t[1].parameter = nullptr;  // empty: legal
  CHECK(message_of([&] { make(t); }) == "nothing thrown");
  t[4].name = "0";
  CHECK(has(message_of([&] { make(t); }), "two tensors are named \"0\""));
  t = m.tensors();
  t[0].type = hd::dtype::bf16;
  CHECK(has(message_of([&] { make(t); }), "is bf16, allowed is f32"));
  CHECK_THROWS_AS(hd::tensors(nullptr, m.g.data(), quadratic::sizes), hd::argument_error);
}

TEST_CASE("a model without tensors trains") {
  hd::threads::run(four, [](auto& comm) {
    hd::data_parallel dp{hd::strategy{}, comm, std::vector<hd::tensor>{}, hd::sgd{}};
    CHECK_FALSE(dp.step({.lr = 0.1f}).skipped);
    dp.join();
  });
}

TEST_CASE("with treat_as_zero a tensor that is never ready contributes zero") {
  hd::threads::run(four, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{}, comm, m.tensors(), hd::sgd{}, hd::unused::treat_as_zero};
    std::fill(m.g.begin(), m.g.end(), 1.0f);
    for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
      if (i != 4 || comm.rank() == 0) dp.ready(i);  // tensor 4 comes from rank 0 alone
    }
    dp.step({.lr = 0.5f});
    CHECK(m.w[0] == 0.0f);
    CHECK(m.w[1040] == 0.375f);
  });
}

TEST_CASE("a rank that throws in the middle of training makes every other rank fail, naming it") {
  for (int at = 0; at < 12; ++at) {
    std::atomic<int> named{0};
    const auto run = [&] {
      hd::threads::run(four, [&](auto& comm) {
        quadratic m;
        int calls = 0;
        try {
          hd::data_parallel dp{hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .dense_below = 500}, .buckets = {.first = 64, .cap = 64}}, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
          for (std::size_t s = 0; s < 2; ++s) {
            quadratic::gradient(m.w.data(), m.g.data(), s, 1);
            for (std::size_t i = quadratic::sizes.size(); i-- > 0;) {
              if (comm.rank() == 2 && calls++ == at) throw std::runtime_error("out of luck");
              dp.ready(i);
            }
            if (comm.rank() == 2 && calls++ == at) throw std::runtime_error("out of luck");
            dp.step({.lr = 0.1f});
          }
        } catch (const hd::comm_error& e) {
          if (has(e.what(), "rank 2")) ++named;
          throw;
        }
      });
    };
    CHECK_THROWS_WITH(run(), "out of luck");
    CHECK(named == 3);
  }
}

TEST_CASE("ranks with different models are told so") {
  const auto run = [] {
    hd::threads::run(four, [](auto& comm) {
      quadratic m;
      auto t = m.tensors();
      if (comm.rank() == 3) t[2].name = "other";
      hd::data_parallel dp{hd::strategy{}, comm, t, hd::sgd{}};
    });
  };
  CHECK_THROWS_WITH(run(), Catch::Matchers::Contains("tensors of different names"));
}

TEST_CASE("ranks with different strategies are told so") {
  const auto run = [] {
    hd::threads::run(four, [](auto& comm) {
      quadratic m;
      const auto train = [&](auto plan) {
        hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
        train_step(dp, m, 0, 1, 0.1f);
      };
      if (comm.rank() == 1) train(hd::strategy{.compressor = hd::cast<hd::bfloat16>{}});
      else train(hd::strategy{});
    });
  };
  CHECK_THROWS_WITH(run(), Catch::Matchers::Contains("calls differ") && Catch::Matchers::Contains("bf16") && Catch::Matchers::Contains("f32"));
}

TEST_CASE("all replicas start from rank 0's parameters") {
  hd::threads::run(four, [](auto& comm) {
    quadratic m;
    std::fill(m.w.begin(), m.w.end(), static_cast<float>(comm.rank()) + 1.0f);
    hd::data_parallel dp{hd::strategy{}, comm, m.tensors(), hd::sgd{}};
    for (const float x : m.w) {
      if (x != 1.0f) throw std::runtime_error("not rank 0's");
    }
    CHECK(dp.parameters().size() == 5);
    CHECK(dp.parameters()[2] == m.w.data() + 7);
  });
}

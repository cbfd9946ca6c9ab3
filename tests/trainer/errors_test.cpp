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
  CHECK(has(message_of([&] { dp.begin({.samples = 1e300}); }), "allowed is 0 .. 1e290"));
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

TEST_CASE("max_value limits each element of the gradient, and excludes max_norm") {
  hd::self comm;
  std::vector<float> w(3, 0.0f), g{3.0f, -5.0f, 0.25f};
  const std::size_t sizes[] = {3};
  hd::data_parallel dp{hd::strategy{}, comm, hd::tensors(w.data(), g.data(), sizes), hd::sgd{}};
  dp.ready(0);
  CHECK_THROWS_AS(dp.step({.lr = 0.5f, .max_norm = 1.0f, .max_value = 1.0f}), hd::argument_error);
  CHECK_THROWS_AS(dp.step({.lr = 0.5f, .max_value = NAN}), hd::argument_error);
  dp.step({.lr = 0.5f, .max_value = 1.0f});
  CHECK(w == std::vector<float>{-0.5f, 0.5f, -0.125f});
}

TEST_CASE("a model without tensors trains") {
  hd::threads::run(four, [](auto& comm) {
    hd::data_parallel dp{hd::strategy{}, comm, std::vector<hd::tensor>{}, hd::sgd{}};
    RANK_CHECK_FALSE(dp.step({.lr = 0.1f}).skipped);
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
    RANK_CHECK(m.w[0] == 0.0f);
    RANK_CHECK(m.w[1040] == 0.375f);
    std::fill(m.g.begin(), m.g.end(), 1.0f);
    for (std::size_t i = 0; i < 4; ++i) dp.ready(i);  // tensor 4 comes from nobody
    dp.step({.lr = 0.5f});
    RANK_CHECK(m.w[0] == -0.5f);
    RANK_CHECK(m.w[1040] == 0.375f);
    if (comm.rank() == 3) {  // who has no more batches adds nothing, with every tensor or without
      std::fill(m.g.begin(), m.g.end(), 1.0f);
      for (std::size_t i = 1; i < 4; ++i) dp.ready(i);
      dp.step({.lr = 0.5f});
    }
    dp.join();
    RANK_CHECK(m.w[0] == -0.5f);
    RANK_CHECK(m.w[7] == -1.0f);
    RANK_CHECK(m.w[1040] == 0.375f);
  });
}

TEST_CASE("gradients may become ready in another order on every rank") {
  hd::threads::run(four, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.buckets = {.first = 1, .cap = 1}}, comm, m.tensors(), hd::sgd{}};
    for (int s = 0; s < 5; ++s) {
      std::fill(m.g.begin(), m.g.end(), 1.0f + static_cast<float>(comm.rank()));
      for (std::size_t k = 0; k < 5; ++k)
        dp.ready((k * (1 + static_cast<std::size_t>(comm.rank())) + static_cast<std::size_t>(s)) % 5);
      dp.step({.lr = 0.125f});
    }
    RANK_CHECK(m.w == std::vector<float>(quadratic::count, 0.5f - 5 * 0.125f * 2.5f));
  });
}

TEST_CASE("a tensor that never becomes ready on one rank is named there, and the others hear of the rank") {
  for (const bool leaves : {true, false}) {  // the rank unwinds, or stays and does nothing
    std::atomic<int> named{0};
    const auto run = [&] {
      hd::threads::run({.ranks = 4, .deadline = std::chrono::milliseconds(leaves ? 5000 : 300)}, [&](auto& comm) {
        quadratic m;
        hd::data_parallel dp{hd::strategy{}, comm, m.tensors(), hd::sgd{}};
        for (std::size_t i = 0; i < 5; ++i) {
          if (i != 3 || comm.rank() != 2) dp.ready(i);
        }
        try {
          dp.step({.lr = 0.1f});
        } catch (const hd::comm_error& e) {
          if (e.peer() == 2 && has(e.what(), "rank 2")) ++named;
          throw;
        } catch (const hd::argument_error&) {
          if (leaves) throw;
          while (named < 3) std::this_thread::yield();
        }
      });
    };
    CHECK_THROWS_WITH(run(), Catch::Matchers::Contains(leaves ? "\"3\" was never ready" : "rank 2"));
    CHECK(named == 3);
  }
}

TEST_CASE("a rank that throws in the middle of training makes every other rank fail, naming it") {
  for (int at = 0; at < 24; ++at) {
    std::atomic<int> named{0};
    const auto run = [&] {
      hd::threads::run(four, [&](auto& comm) {
        quadratic m;
        int calls = 0;
        try {
          hd::data_parallel dp{hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .dense_below = 500}, .buckets = {.first = 64, .cap = 64}, .lanes = at < 12 ? 1u : 3u}, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
          for (std::size_t s = 0; s < 2; ++s) {
            quadratic::gradient(m.w.data(), m.g.data(), s, 1);
            for (std::size_t i = quadratic::sizes.size(); i-- > 0;) {
              if (comm.rank() == 2 && calls++ == at % 12) throw std::runtime_error("out of luck");
              dp.ready(i);
            }
            if (comm.rank() == 2 && calls++ == at % 12) throw std::runtime_error("out of luck");
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

namespace {
// Lets only the program's own thread communicate.
template <class Comm> struct polled : hd::detail::wrapper<Comm> {
  using hd::detail::wrapper<Comm>::wrapper;
  polled duplicate() { return polled(this->inner_.duplicate()); }
  hd::progress progress() const { return hd::progress::polled; }
  template <class Apply>
  void exchange(const hd::header& h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in,
                Apply&& apply) {
    this->inner_.exchange(h, out, in, std::forward<Apply>(apply));
  }
};
}  // namespace

TEST_CASE("without a thread of its own a failed exchange isn't forgotten") {
  std::atomic<int> refused{0};
  const auto run = [&] {
    hd::threads::run({.ranks = 2, .deadline = std::chrono::seconds(5)}, [&](auto& comm) {
      quadratic m;
      polled<std::decay_t<decltype(comm)>> own(comm.duplicate());
      hd::data_parallel dp{hd::strategy{.topology = hd::ring{}}, own, m.tensors(), hd::sgd{}};
      train_step(dp, m, static_cast<std::size_t>(comm.rank()), 1, 0.1f);
      if (comm.rank() == 1) throw std::runtime_error("out of luck");
      const auto before = m.w;
      quadratic::gradient(m.w.data(), m.g.data(), 2, 1);
      for (int again = 0; again < 2; ++again) {
        for (std::size_t i = quadratic::sizes.size(); i-- > 0;) {
          try {
            dp.ready(i);
          } catch (const hd::comm_error&) {  // it may say so here, but step must say so too
          }
        }
        try {
          dp.step({.lr = 0.1f});
        } catch (const hd::comm_error&) {
          refused += m.w == before;
        }
      }
    });
  };
  CHECK_THROWS_WITH(run(), "out of luck");
  CHECK(refused == 2);
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
  const auto run = [](bool lanes) {
    hd::threads::run(four, [lanes](auto& comm) {
      quadratic m;
      const auto train = [&](auto plan) {
        hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
        train_step(dp, m, 0, 1, 0.1f);
      };
      if (comm.rank() != 1) train(hd::strategy{});
      else if (lanes) train(hd::strategy{.lanes = 2});
      else train(hd::strategy{.compressor = hd::cast<hd::bfloat16>{}});
    });
  };
  CHECK_THROWS_WITH(run(false), Catch::Matchers::Contains("different kinds of strategy"));
  CHECK_THROWS_WITH(run(true), Catch::Matchers::Contains("different kinds of strategy"));
}

TEST_CASE("all replicas start from rank 0's parameters") {
  hd::threads::run(four, [](auto& comm) {
    quadratic m;
    std::fill(m.w.begin(), m.w.end(), static_cast<float>(comm.rank()) + 1.0f);
    hd::data_parallel dp{hd::strategy{}, comm, m.tensors(), hd::sgd{}};
    for (const float x : m.w) {
      if (x != 1.0f) throw std::runtime_error("not rank 0's");
    }
    RANK_CHECK(dp.parameters().size() == 5);
    RANK_CHECK(dp.parameters()[2] == m.w.data() + 7);
  });
}

TEST_CASE("numbers outside their ranges are refused before anything happens") {
  hd::self comm;
  quadratic m;
  const auto make = [&](auto plan, auto rule) {
    return message_of([&] { hd::data_parallel dp{plan, comm, m.tensors(), rule}; });
  };
  CHECK(has(make(hd::strategy{}, hd::sgd{.momentum = 2.0f}), "momentum is 2"));
  CHECK(has(make(hd::strategy{}, hd::sgd{.weight_decay = -1.0f}), "weight_decay"));
  CHECK(has(make(hd::strategy{}, hd::adamw{.beta1 = 1.0f}), "beta1 is 1"));
  CHECK(has(make(hd::strategy{}, hd::adamw{.beta2 = NAN}), "beta2"));
  CHECK(has(make(hd::strategy{}, hd::adamw{.eps = 0.0f}), "eps is 0"));
  CHECK(has(make(hd::strategy{.mode = hd::local_sgd{.period = 0}}, hd::sgd{}), "period is 0"));
  CHECK(has(make(hd::strategy{.compressor = hd::dgc{.sparsity = 1.5}}, hd::sgd{}), "sparsity is 1.5"));
  CHECK(has(make(hd::strategy{.compressor = hd::clip{.max_norm = -1.0f} | hd::none{}}, hd::sgd{}), "max_norm is -1"));
  CHECK(has(make(hd::strategy{.buckets = {.first = 0}}, hd::sgd{}), "above 0 bytes"));
  CHECK(has(make(hd::strategy{.lanes = 0}, hd::sgd{}), "lanes is 0, allowed is 1 .. 64"));
  CHECK(has(make(hd::strategy{.lanes = 65}, hd::sgd{}), "lanes is 65"));
  hd::data_parallel dp{hd::strategy{}, comm, m.tensors(), hd::sgd{}};
  const auto before = m.w;
  for (const float lr : {NAN, INFINITY, -0.1f}) {
    for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
      if (lr != lr) dp.ready(i);  // once
    }
    CHECK(has(message_of([&] { dp.step({.lr = lr}); }), "lr is"));
  }
  CHECK((m.w == before));
  CHECK_FALSE(dp.step({.lr = 0.1f}).skipped);  // the step was still open
  CHECK(has(message_of([&] { dp.begin({.samples = INFINITY}); }), "samples is inf"));
  const hd::group_options bad[1] = {{.lr_scale = -1.0f}};
  CHECK(has(message_of([&] { dp.groups(bad); }), "lr_scale is -1"));
}

TEST_CASE("tensors that share memory, or aren't aligned, are refused") {
  hd::self comm;
  quadratic m;
  const auto make = [&](const std::vector<hd::tensor>& t) {
    return message_of([&] { hd::data_parallel dp{hd::strategy{}, comm, t, hd::sgd{}}; });
  };
  auto t = m.tensors();
  t[4].parameter = t[0].parameter;
  CHECK(has(make(t), "shares memory"));
  t = m.tensors();
  t[2].gradient = t[2].parameter;
  CHECK(has(make(t), "shares memory"));
  t = m.tensors();
  t[3].parameter = reinterpret_cast<char*>(m.w.data()) + 2;
  CHECK(has(make(t), "isn't aligned"));
}

TEST_CASE("calls that need a closed step say so") {
  hd::self comm;
  quadratic m;
  hd::data_parallel dp{hd::strategy{.mode = hd::local_sgd{}}, comm, m.tensors(), hd::sgd{}};
  dp.ready(0);
  CHECK(has(message_of([&] { dp.synchronize(); }), "synchronize: a step is open"));
  CHECK(has(message_of([&] { dp.save("/tmp/never"); }), "save: a step is open"));
  CHECK(has(message_of([&] { dp.load("/tmp/never"); }), "load: a step is open"));
  CHECK(has(message_of([&] { dp.groups({}); }), "groups: a step is open"));
}

TEST_CASE("ranks that meet after different numbers of steps are told so") {
  const auto run = [] {
    hd::threads::run(four, [](auto& comm) {
      quadratic m;
      hd::data_parallel dp{hd::strategy{.mode = hd::local_sgd{.period = 4}}, comm, m.tensors(), hd::sgd{}};
      for (std::size_t s = 0; s < 4; ++s) {
        if (comm.rank() == 0 && s == 2) dp.synchronize();
        train_step(dp, m, s, 1, 0.1f);
      }
    });
  };
  CHECK_THROWS_WITH(run(), Catch::Matchers::Contains("local step 2") && Catch::Matchers::Contains("local step 4"));
}

TEST_CASE("report may be asked for while gradients travel") {
  hd::threads::run(four, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.buckets = {.first = 64, .cap = 64}}, comm, m.tensors(), hd::sgd{}};
    for (std::size_t s = 0; s < 20; ++s) {
      quadratic::gradient(m.w.data(), m.g.data(), s, 1);
      for (std::size_t i = quadratic::sizes.size(); i-- > 0;) {
        dp.ready(i);
        RANK_CHECK(dp.report().steps == s);
      }
      dp.step({.lr = 0.1f});
    }
  });
}

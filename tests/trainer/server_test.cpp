// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/comm/lossy.hpp>
#include <heddle/mode/geo_sgd.hpp>
#include <heddle/optim/adagrad.hpp>
#include <heddle/optim/lamb.hpp>
#include <heddle/optim/per_group.hpp>
#include <heddle/trainer/hogwild.hpp>
#include <heddle/trainer/server.hpp>

#include "support.hpp"

#include <atomic>
#include <barrier>
#include <deque>
#include <set>

namespace {

template <class Function> void on_threads(int ranks, Function f) {
  hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(60)}, f);
}

// Messengers that lose, repeat and reorder.
struct lossy_connection {
  hd::losses losses{.drop = 0.03, .duplicate = 0.2, .reorder = 0.2};

  struct owner {
    std::unique_ptr<hd::threads::messenger> below;
  };
  struct bad_messenger : private owner, public hd::lossy<hd::threads::messenger> {
    bad_messenger(std::unique_ptr<hd::threads::messenger> m, const hd::losses& l)
        : owner{std::move(m)}, hd::lossy<hd::threads::messenger>(*below, l) {}
  };
  template <class Comm> std::unique_ptr<bad_messenger> open(Comm& comm) const {
    return std::make_unique<bad_messenger>(hd::threads::connection{}.open(comm), losses);
  }
};

// Rank 2 dies in its fourth push, between servers 0 and 1.
struct dying_connection {
  struct dying_messenger : lossy_connection::bad_messenger {
    using lossy_connection::bad_messenger::bad_messenger;
    bool try_send(hd::address to, std::uint32_t tag, std::uint64_t id, hd::payload&& body) {
      if (rank() == 2 && to.rank == 1 && tag == static_cast<std::uint32_t>(hd::detail::row_tag::push) && ++pushes_ >= 4)
        throw std::runtime_error("rank 2");
      return lossy_connection::bad_messenger::try_send(to, tag, id, std::move(body));
    }

   private:
    std::atomic<int> pushes_{0};
  };
  template <class Comm> std::unique_ptr<dying_messenger> open(Comm& comm) const {
    return std::make_unique<dying_messenger>(hd::threads::connection{}.open(comm), hd::losses{});
  }
};

// Messengers over links of 20 MB/s, which keep order and lose some messages of rank 1, and the answers to them, once.
struct slow_connection {
  struct road {
    std::vector<std::uint64_t> lost;  // 2 n: rank 1's request n; 2 n + 1: the answer to it
    std::set<std::uint64_t> requests, answers;
    std::uint64_t requested = 0, answered = 0, bytes = 0;  // with repetitions
    std::mutex mutex;
  };
  road* r = nullptr;

  class slow_messenger {
   public:
    slow_messenger(std::unique_ptr<hd::threads::messenger> m, road& r) : inner_(std::move(m)), road_(&r) {}
    int rank() const { return inner_->rank(); }
    int size() const { return inner_->size(); }
    std::uint64_t life() const { return inner_->life(); }
    std::uint64_t life_of(int rank) const { return inner_->life_of(rank); }
    void connect(int rank) { inner_->connect(rank); }
    void renew() { inner_->renew(); }
    void send(hd::address to, std::uint32_t tag, std::uint64_t id, hd::payload&& body) {
      (void)try_send(to, tag, id, std::move(body));
    }
    bool try_send(hd::address to, std::uint32_t tag, std::uint64_t id, hd::payload&& body) {
      using hd::detail::row_tag;
      const auto t = static_cast<row_tag>(tag);
      const bool request = rank() == 1 && (t == row_tag::part || t == row_tag::push || t == row_tag::join);
      const bool answer = to.rank == 1 && t == row_tag::reply && body.size() > sizeof(hd::detail::row_reply);
      const std::lock_guard lock(road_->mutex);
      if (request) road_->requests.insert(id), ++road_->requested, road_->bytes += body.size();
      if (answer) road_->answers.insert(id), ++road_->answered;
      if ((request || answer) && std::erase(road_->lost, 2 * id + answer)) return true;
      free_ = std::max(free_, clock::now()) + std::chrono::nanoseconds(50 * body.size());
      under_way_.push_back({to, tag, id, std::move(body), free_});
      return true;
    }
    std::optional<hd::message> receive(std::chrono::nanoseconds longest) {
      for (const auto end = clock::now() + longest;;) {
        {
          const std::lock_guard lock(road_->mutex);
          for (; !under_way_.empty() && under_way_.front().due <= clock::now(); under_way_.pop_front()) {
            letter& l = under_way_.front();
            if (!inner_->try_send(l.to, l.tag, l.id, std::move(l.body))) break;
          }
        }
        auto m = inner_->receive(std::min<std::chrono::nanoseconds>(longest, std::chrono::microseconds(200)));
        if (m || clock::now() >= end) return m;
      }
    }

   private:
    using clock = std::chrono::steady_clock;
    struct letter {
      hd::address to;
      std::uint32_t tag;
      std::uint64_t id;
      hd::payload body;
      clock::time_point due;
    };
    std::unique_ptr<hd::threads::messenger> inner_;
    road* road_;
    clock::time_point free_{};
    std::deque<letter> under_way_;
  };
  template <class Comm> std::unique_ptr<slow_messenger> open(Comm& comm) const {
    return std::make_unique<slow_messenger>(hd::threads::connection{}.open(comm), *r);
  }
};

// Messengers that keep all answers back while `held` says so, but for half a minute at most, so that who waits fails.
struct holding_connection {
  std::atomic<bool>* held = nullptr;

  class holding_messenger {
   public:
    holding_messenger(std::unique_ptr<hd::threads::messenger> m, const std::atomic<bool>& held)
        : inner_(std::move(m)), held_(&held) {}
    int rank() const { return inner_->rank(); }
    int size() const { return inner_->size(); }
    std::uint64_t life() const { return inner_->life(); }
    std::uint64_t life_of(int rank) const { return inner_->life_of(rank); }
    void connect(int rank) { inner_->connect(rank); }
    void renew() { inner_->renew(); }
    void send(hd::address to, std::uint32_t tag, std::uint64_t id, hd::payload&& body) {
      inner_->send(to, tag, id, std::move(body));
    }
    bool try_send(hd::address to, std::uint32_t tag, std::uint64_t id, hd::payload&& body) {
      const std::lock_guard lock(mutex_);
      if (static_cast<hd::detail::row_tag>(tag) != hd::detail::row_tag::reply || (!holds() && kept_.empty()))
        return inner_->try_send(to, tag, id, std::move(body));
      kept_.push_back({to, tag, id, std::move(body)});
      return true;
    }
    std::optional<hd::message> receive(std::chrono::nanoseconds longest) {
      {
        const std::lock_guard lock(mutex_);
        for (; !kept_.empty() && !holds(); kept_.pop_front()) {
          letter& l = kept_.front();
          if (!inner_->try_send(l.to, l.tag, l.id, std::move(l.body))) break;
        }
      }
      return inner_->receive(longest);
    }

   private:
    struct letter {
      hd::address to;
      std::uint32_t tag;
      std::uint64_t id;
      hd::payload body;
    };
    bool holds() const { return *held_ && std::chrono::steady_clock::now() < end_; }

    std::unique_ptr<hd::threads::messenger> inner_;
    const std::atomic<bool>* held_;
    std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    std::mutex mutex_;
    std::deque<letter> kept_;
  };
  template <class Comm> std::unique_ptr<holding_messenger> open(Comm& comm) const {
    return std::make_unique<holding_messenger>(hd::threads::connection{}.open(comm), *held);
  }
};

// Rank 1's can't be opened.
struct failing_connection : hd::threads::connection {
  template <class Comm> auto open(Comm& comm) const {
    auto m = hd::threads::connection::open(comm);
    if (comm.rank() == 1) throw std::runtime_error("no more handles");
    return m;
  }
};

const auto together = hd::strategy{.mode = hd::async_ps{.staleness = 0}};
auto in_parts(std::size_t bytes) {
  return hd::strategy{.mode = hd::async_ps{.staleness = 0}, .buckets = {.first = bytes}};
}

// A trainer's life with uneven data: rank r takes 4 + 3 r steps of an epoch; then it is saved, and another one goes on.
template <class Plan> std::vector<std::vector<float>> lifetime(const Plan& plan, int ranks, float lr) {
  const scratch_directory scratch;
  std::vector<std::vector<float>> out(static_cast<std::size_t>(ranks));
  on_threads(ranks, [&](auto& comm) {
    quadratic m;
    const auto epochs = [&](auto& dp, std::size_t first, std::size_t last) {
      for (std::size_t e = first; e < last; ++e) {
        for (std::size_t s = 0; s < 4 + 3 * static_cast<std::size_t>(comm.rank()); ++s) {
          for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {  // read as another rank may write
            float* const to = static_cast<float*>(m.tensors()[i].parameter);
            if (dp.parameters()[i] != to) hd::vector_asm::read(dp.parameters()[i], to, quadratic::sizes[i]);
          }
          train_step(dp, m, first_sample(13 * e + s, comm.rank(), ranks, 2), 2, lr);
        }
        dp.join();
      }
    };
    {
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
      epochs(dp, 0, 3);
      dp.save(scratch.path());
    }
    const std::vector<float> saved = std::exchange(m.w, std::vector<float>(quadratic::count, -1.0f));
    quadratic other;
    m.w.swap(other.w);
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
    dp.load(scratch.path());
    dp.join();
    RANK_CHECK(m.w == saved);
    epochs(dp, 3, 5);
    out[static_cast<std::size_t>(comm.rank())] = m.w;
  });
  return out;
}

}  // namespace

TEST_CASE("a server that waits for everybody gives the bits of every_step over native") {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    CAPTURE(ranks);
    const auto plan = hd::strategy{.topology = hd::native{}};
    CHECK(train(together, hd::sgd{.momentum = 0.9f}, ranks, 12, 0.05f) ==
          train(plan, hd::sgd{.momentum = 0.9f}, ranks, 12, 0.05f));
    if (ranks != 3) continue;
    const auto expected = train(plan, hd::adamw{}, ranks, 12, 0.05f);
    CHECK(train(together, hd::adamw{}, ranks, 12, 0.05f) == expected);
    // Gradients that travel while others are computed, each in several messages.
    for (const std::size_t bytes : {1, 600, 4000})
      CHECK(train(in_parts(bytes), hd::adamw{}, ranks, 12, 0.05f) == expected);
  }
}

TEST_CASE("it does with samples that differ, ranks that have joined and a limit on elements, and refuses one on the norm") {
  const auto train_uneven = [](const auto& plan, int ranks, hd::step_options o) {
    std::vector<std::vector<float>> out(static_cast<std::size_t>(ranks));
    on_threads(ranks, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
      const auto rank = static_cast<std::size_t>(comm.rank());
      for (std::size_t s = 0; s < 5 + 3 * rank; ++s) {
        const std::size_t n = (rank + s) % 3 == 2 ? 0 : 1 + 2 * rank + s;
        dp.begin({.samples = static_cast<double>(n)});
        quadratic::gradient(m.w.data(), m.g.data(), first_sample(s, comm.rank(), ranks, 40), n);
        for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
        dp.step(o);
      }
      dp.join();
      out[rank] = m.w;
    });
    return out;
  };
  const auto plan = hd::strategy{.topology = hd::native{}};
  for (const int ranks : {1, 3, 4}) {
    CAPTURE(ranks);
    for (const hd::step_options o : {hd::step_options{.lr = 0.05f}, hd::step_options{.lr = 0.05f, .max_value = 0.1f}}) {
      const auto expected = train_uneven(plan, ranks, o);
      CHECK(all_equal(expected));
      CHECK(train_uneven(together, ranks, o) == expected);
      CHECK(train_uneven(in_parts(600), ranks, o) == expected);
    }
  }
  on_threads(2, [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{together, comm, m.tensors(), hd::sgd{}};
    std::string said;
    try {
      dp.step({.lr = 0.05f, .max_norm = 1.0f});
    } catch (const hd::argument_error& e) {
      said = e.what();
    }
    RANK_CHECK(said.find("allowed is 0 where staleness is 0") != said.npos);
    train_step(dp, m, first_sample(0, comm.rank(), 2, 2), 2, 0.05f);  // nothing has changed
    dp.join();
  });
}

TEST_CASE("also where messages are lost, repeated and reordered") {
  const auto expected = train(hd::strategy{.topology = hd::native{}}, hd::sgd{}, 3, 3, 0.05f);
  for (std::uint64_t seed = 0; seed < 6; ++seed) {  // also the last answers, and thanks for them
    CAPTURE(seed);
    const lossy_connection bad{{.drop = 0.1, .duplicate = 0.2, .reorder = 0.2, .seed = seed}};
    const auto lossy = hd::strategy{
        .mode = hd::async_ps<lossy_connection>{.connection = bad, .servers = seed % 2 ? 2 : 0, .staleness = 0},
        .buckets = {.first = seed % 3 ? 1u : 1u << 20}};
    std::vector<std::vector<float>> out(3);
    on_threads(3, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{lossy, comm, m.tensors(), hd::sgd{}};
      for (std::size_t s = 0; s < 3; ++s) train_step(dp, m, first_sample(s, comm.rank(), 3, 2), 2, 0.05f);
      dp.join();
      out[static_cast<std::size_t>(comm.rank())] = m.w;
    });
    REQUIRE(out == expected);
  }
}

TEST_CASE("what is lost travels once more, and nothing else does, however slow the link is") {
  constexpr std::size_t parts = 40, floats = 4096;
  const std::vector<std::size_t> sizes(parts, floats);
  const auto run = [&](std::vector<std::uint64_t> lost) {
    slow_connection::road road;
    road.lost = lost;
    CAPTURE(lost);
    std::vector<float> out;
    on_threads(2, [&](auto& comm) {
      std::vector<float> w(parts * floats, 1.0f), g(w.size());
      const auto plan =
          hd::strategy{.mode = hd::async_ps<slow_connection>{.connection = {&road}, .servers = 1, .staleness = 0},
                       .buckets = {.first = floats * sizeof(float)}};
      hd::data_parallel dp{plan, comm, hd::tensors(w.data(), g.data(), sizes), hd::sgd{}};
      for (std::size_t s = 0; s < 2; ++s) {
        for (std::size_t i = 0; i < w.size(); ++i) g[i] = static_cast<float>((i + s) % 7);
        for (std::size_t i = parts; i-- > 0;) dp.ready(i);
        dp.step({.lr = 0.125f});
      }
      dp.join();
      if (comm.rank() == 0) return;
      out = w;
      const hd::report said = dp.report();
      const std::lock_guard lock(road.mutex);
      RANK_CHECK(said.bytes_sent == road.bytes);
      RANK_CHECK(said.messages == road.requested);
    });
    CHECK(road.lost.empty());
    CHECK(road.requests.size() >= 2 * parts);
    std::size_t answers = 0;
    for (const std::uint64_t n : lost) answers += n % 2;
    CHECK(road.requested == road.requests.size() + lost.size() - answers);
    CHECK(road.answered == road.answers.size() + answers);
    for (std::size_t i = 0; i < out.size(); ++i)
      REQUIRE(out[i] == 1.0f - 0.125f * static_cast<float>(i % 7 + (i + 1) % 7));
    return *road.answers.begin();
  };
  const std::uint64_t push = run({});
  CHECK(push >= parts);
  run({2 * 3});
  run({2 * 3, 2 * 4, 2 * 10, 2 * 30, 2 * 60});
  run({2 * push});  // a probe finds it
  run({2 * 1, 2 * push - 2, 2 * push});
  run({2 * push + 1});
}

TEST_CASE("every mode with uneven data, saved and resumed") {
  const double start = quadratic::loss(quadratic{}.w);
  const auto learns = [&](const auto& mode, float lr) {
    CAPTURE(mode.name());
    const auto w = lifetime(hd::strategy{.mode = mode}, 3, lr);
    CHECK(all_equal(w));
    CHECK(quadratic::loss(w[0]) < 0.2 * start);
    return w[0];
  };
  const auto synchronous = learns(hd::every_step{}, 0.1f);
  const auto served = learns(hd::async_ps{.servers = 2, .staleness = 0}, 0.1f);
  CHECK(distance(served, {synchronous.begin(), synchronous.end()}) < 1e-6);
  learns(hd::async_ps{.merge = 2}, 0.1f);
  learns(hd::async_ps{.staleness = 2, .compensation = 0.04f}, 0.05f);
  learns(hd::async_ps{.staleness = 1, .background = true}, 0.05f);
  learns(hd::async_geo_sgd{.period = 3}, 0.05f);
  learns(hd::local_sgd{.period = 3}, 0.1f);
  learns(hd::geo_sgd{.period = 3}, 0.05f);
  learns(hd::hogwild<>{}, 0.05f);
}

TEST_CASE("servers alone, and rows of a sparse gradient") {
  // Rank 0 has no batches: it is a server alone. Others train an embedding whose rows have a gradient now and then.
  const auto run = [](const auto& mode, std::uint64_t& bytes) {
    std::vector<float> w(4000, 1.0f);
    on_threads(3, [&](auto& comm) {
      std::vector<float> mine(4000, 1.0f), g(4000);
      std::vector<hd::tensor> t = hd::tensors(mine.data(), g.data(), std::array<std::size_t, 1>{4000});
      t[0].rows = 1000;
      hd::data_parallel dp{hd::strategy{.mode = mode}, comm, t, hd::sgd{}};
      for (std::size_t s = 0; s < 5 && comm.rank() > 0; ++s) {
        std::fill(g.begin(), g.end(), 0.0f);
        const std::size_t row = 100 * s + static_cast<std::size_t>(comm.rank());
        std::fill_n(&g[4 * row], 4, 1.0f);
        dp.ready(0);
        RANK_CHECK(!dp.step({.lr = 0.5f}).skipped);
      }
      dp.join();
      if (comm.rank() == 1) bytes = dp.report().bytes_sent;
      if (comm.rank() == 2) w = mine;
    });
    return w;
  };
  std::uint64_t dense, sparse, geo;
  const auto expected = run(hd::async_ps{.servers = 1, .staleness = 0}, dense);
  CHECK(run(hd::async_ps{.servers = 1, .staleness = 0, .sparse = true}, sparse) == expected);
  for (std::size_t i = 0; i < 4000; ++i) {
    const std::size_t row = i / 4;
    REQUIRE(expected[i] == (row < 500 && (row % 100 == 1 || row % 100 == 2) ? 0.75f : 1.0f));
  }
  const auto moved = run(hd::async_geo_sgd{.servers = 1, .period = 2}, geo);
  for (std::size_t i = 0; i < 4000; ++i) REQUIRE(moved[i] == (expected[i] == 1.0f ? 1.0f : 0.5f));
  CHECK(sparse < dense / 20);
  CHECK(geo < dense / 20);
}

TEST_CASE("on one rank a server and a replica give the bits of every_step, a step with a NaN skipped") {
  const auto alone = [](const auto& plan, const auto& rule) {
    quadratic m;
    hd::self comm;
    hd::data_parallel dp{plan, comm, m.tensors(), rule};
    for (std::size_t s = 0; s < 20; ++s) {
      quadratic::gradient(m.w.data(), m.g.data(), 2 * s, 2);
      if (s == 7) m.g[3] = NAN;
      for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
      const hd::step_options o{.lr = 0.05f, .max_norm = s == 9 ? 1.0f : 0.0f, .max_value = s == 11 ? 0.1f : 0.0f};
      CHECK(dp.step(o).skipped == (s == 7));
    }
    dp.join();
    CHECK(dp.report().skipped == 1);
    return m.w;
  };
  const hd::sgd rule{.momentum = 0.9f};
  CHECK(alone(hd::strategy{.mode = hd::async_ps{}}, rule) == alone(hd::strategy{}, rule));
  CHECK(alone(in_parts(1), rule) == alone(hd::strategy{}, rule));
  CHECK(alone(hd::strategy{.mode = hd::async_geo_sgd{.period = 3}}, rule) == alone(hd::strategy{}, rule));
  CHECK(alone(together, hd::lamb{}) == alone(hd::strategy{}, hd::lamb{}));
}

TEST_CASE("on one rank 10 steps, save, load, 10 steps are 20 steps, bit for bit, in each form of a server mode") {
  enum class through { nothing, save, save_and_load };
  const auto twenty = [](const auto& plan, through how) {
    const scratch_directory scratch;
    quadratic m;
    hd::self comm;
    const hd::sgd rule{.momentum = 0.9f};
    const auto ten = [&](auto& dp, std::size_t first) {
      for (std::size_t s = first; s < first + 10; ++s) train_step(dp, m, 2 * s, 2, 0.05f);
    };
    const auto last_ten = [&](auto& dp) {
      ten(dp, 10);
      dp.join();
      return m.w;
    };
    {
      hd::data_parallel dp{plan, comm, m.tensors(), rule};
      ten(dp, 0);
      if (how != through::nothing) dp.save(scratch.path());
      if (how != through::save_and_load) return last_ten(dp);
    }
    m = quadratic{};
    hd::data_parallel dp{plan, comm, m.tensors(), rule};
    dp.load(scratch.path());
    return last_ten(dp);
  };
  const auto resumes = [&](const auto& mode, bool save_waits = false) {
    const auto plan = hd::strategy{.mode = mode};
    CAPTURE(mode.name());
    const auto resumed = twenty(plan, through::save_and_load);
    CHECK(resumed == twenty(plan, through::save));
    CHECK((resumed == twenty(plan, through::nothing)) == !save_waits);
  };
  resumes(hd::async_ps{});
  resumes(hd::async_ps{.staleness = 0});
  resumes(hd::async_ps{.staleness = 2});
  resumes(hd::async_ps{.merge = 2});
  resumes(hd::async_ps{.compensation = 0.04f});
  resumes(hd::async_ps{.sparse = true});
  resumes(hd::async_ps{.background = true}, true);  // save() takes the answer that is under way
  resumes(hd::async_geo_sgd{.period = 3});          // 10 is in the middle of a period
}

TEST_CASE("a gradient of weight 0 doesn't count, and isn't skipped either") {
  const auto nothing = [](const auto& mode) {
    quadratic m;
    hd::self comm;
    hd::data_parallel dp{hd::strategy{.mode = mode}, comm, m.tensors(), hd::sgd{}};
    dp.begin({.samples = 0.0});
    m.g.assign(m.g.size(), NAN);
    for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
    CHECK_FALSE(dp.step({.lr = 0.05f}).skipped);
    CHECK(m.w == quadratic{}.w);
    CHECK(dp.report().skipped + dp.report().steps == 0);
    dp.join();
  };
  nothing(hd::async_ps{});
  nothing(hd::async_geo_sgd{.period = 1});
  nothing(hd::hogwild<>{});
}

TEST_CASE("a bound keeps ranks together, and gradients that come late are counted") {
  const bool background = GENERATE(false, true);
  std::atomic<std::size_t> begun[4] = {}, ended{0};
  on_threads(4, [&](auto& comm) {
    quadratic m;
    const auto me = static_cast<std::size_t>(comm.rank());
    const auto plan = hd::strategy{.mode = hd::async_ps{.staleness = 2, .background = background}};
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
    for (std::size_t s = 1; s <= 30; ++s) {
      if (me == 0 && s % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      ++begun[me];
      train_step(dp, m, first_sample(s, comm.rank(), 4, 2), 2, 0.02f);
      for (const auto& other : begun) RANK_CHECK(other + 2 >= s);
    }
    dp.join();
    ++ended;
    std::uint64_t pushes = 0;
    for (const std::uint64_t n : dp.report().staleness) pushes += n;
    RANK_CHECK(pushes == 30);
  });
  CHECK(ended == 4);
}

TEST_CASE("gradients travel before the step ends, as far as they are ready") {
  quadratic m;
  hd::self comm;
  hd::data_parallel dp{in_parts(8 * sizeof(float)), comm, m.tensors(), hd::sgd{}};
  quadratic::gradient(m.w.data(), m.g.data(), 0, 2);
  const std::uint64_t sent = dp.report().bytes_sent;
  dp.ready(3);  // one element: too short
  CHECK(dp.report().messages == 0);
  dp.ready(2);
  CHECK(dp.report().messages == 1);
  CHECK(dp.report().bytes_sent > sent + 1001 * sizeof(float));
  dp.ready(0), dp.ready(1), dp.ready(4);
  CHECK(dp.report().messages == 2);
  dp.step({.lr = 0.1f});
  CHECK(dp.report().messages == 3);
}

TEST_CASE("in the background a gradient is computed at the parameters of the push before the last one") {
  quadratic m;
  hd::self comm;
  hd::data_parallel dp{hd::strategy{.mode = hd::async_ps{.background = true}}, comm, m.tensors(), hd::sgd{}};
  std::vector<double> w(quadratic::count, 0.5), g(quadratic::count), older = w, next = w;
  for (std::size_t s = 0; s < 20; ++s) {
    train_step(dp, m, 2 * s, 2, 0.05f);
    quadratic::gradient(older.data(), g.data(), 2 * s, 2);
    older = next;
    for (std::size_t i = 0; i < w.size(); ++i) next[i] -= static_cast<double>(0.05f) * g[i];
    CHECK(distance(m.w, older) < 1e-5);
  }
  dp.join();
  CHECK(distance(m.w, next) < 1e-5);
  const hd::report r = dp.report();
  CHECK(r.staleness[0] == 1);
  CHECK(r.staleness[1] == 19);
}

TEST_CASE("each group of tensors has an update rule of its own, on servers and elsewhere, saved and loaded") {
  // Groups 0, 1 and 2 take turns. AdamW decays all but what groups() spares: the quadratic's second tensor of group 0.
  const hd::per_group rule{hd::adamw{.weight_decay = 0.1f}, hd::adagrad{}, hd::sgd{.momentum = 0.9f}};
  const float lr = 0.02f, scales[] = {1.0f, 2.0f, 0.5f};
  const scratch_directory scratch;
  const auto run = [&](const auto& mode, std::size_t first, std::size_t last, bool load, bool save) {
    std::vector<float> out;
    on_threads(3, [&](auto& comm) {
      quadratic m;
      auto tensors = m.tensors();
      for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].group = static_cast<unsigned>(i % 3);
      hd::data_parallel dp{hd::strategy{.topology = hd::native{}, .mode = mode}, comm, tensors, rule};
      dp.groups(std::vector<hd::group_options>{{scales[0], 0.0f}, {scales[1]}, {scales[2]}});
      if (load) dp.load(scratch.path());
      for (std::size_t s = first; s < last; ++s) train_step(dp, m, first_sample(s, comm.rank(), 3, 2), 2, lr);
      if (save) dp.save(scratch.path());
      dp.join();
      if (comm.rank() == 0) out = m.w;
    });
    return out;
  };
  std::vector<double> w(quadratic::count, 0.5), g(quadratic::count), a(w.size(), 0.0), b(w.size(), 0.0);
  for (std::size_t s = 0; s < 12; ++s) {
    quadratic::gradient(w.data(), g.data(), 6 * s, 6);
    for (std::size_t t = 0, i = 0; t < quadratic::sizes.size(); ++t) {
      for (const std::size_t end = i + quadratic::sizes[t]; i < end; ++i) {
        const double rate = static_cast<double>(lr) * static_cast<double>(scales[t % 3]);
        if (t % 3 == 0) adamw_oracle(rate, 0.0)(w[i], g[i], a[i], b[i], s + 1);
        if (t % 3 == 1) a[i] += g[i] * g[i], w[i] -= rate * g[i] / (std::sqrt(a[i]) + 1e-10);
        if (t % 3 == 2) momentum_oracle(rate, 0.9, 0.0, false)(w[i], g[i], a[i], b[i], s + 1);
      }
    }
  }
  const auto whole = run(hd::every_step{}, 0, 12, false, false);
  CHECK(distance(whole, w) < 1e-4);
  const hd::async_ps served{.servers = 2, .staleness = 0};
  CHECK(run(served, 0, 12, false, false) == whole);
  run(served, 0, 6, false, true);
  CHECK(run(hd::async_ps{.staleness = 0}, 6, 12, true, false) == whole);

  // Rows of an embedding that have a gradient by AdaGrad, beside a dense layer by AdamW.
  on_threads(2, [&](auto& comm) {
    std::vector<float> v(24, 1.0f), d(24, 0.0f);
    auto tensors = hd::tensors(v.data(), d.data(), std::array<std::size_t, 2>{20, 4});
    tensors[0].rows = 10, tensors[0].group = 1;
    const auto plan = hd::strategy{.mode = hd::async_ps{.staleness = 0, .sparse = true}};
    const hd::per_group both{hd::adamw{.weight_decay = 0.0f}, hd::adagrad{.weight_decay = 0.5f}};
    hd::data_parallel dp{plan, comm, tensors, both};
    for (std::size_t s = 0; s < 3; ++s) {
      std::fill(d.begin(), d.end(), 0.0f);
      d[2 * s] = 2.0f;  // row s
      std::fill(d.begin() + 20, d.end(), 3.0f);
      dp.ready(1), dp.ready(0);
      dp.step({.lr = 0.1f});
    }
    dp.join();
    for (std::size_t i = 0; i < 20; ++i)  // the first step of AdaGrad is the rate; rows without a gradient don't decay
      RANK_CHECK(std::fabs(v[i] - (i < 6 ? 0.9f : 1.0f)) < 1e-5f);
    for (std::size_t i = 20; i < 24; ++i) RANK_CHECK(std::fabs(v[i] - 0.7f) < 1e-5f);
  });
  quadratic m;
  auto tensors = m.tensors();
  tensors[1].group = 3;
  hd::self comm;
  CHECK_THROWS_AS((hd::data_parallel{together, comm, tensors, rule}), hd::argument_error);
  CHECK_THROWS_AS((hd::data_parallel{hd::strategy{}, comm, tensors, rule}), hd::argument_error);
  CHECK_THROWS_AS((hd::data_parallel{together, comm, m.tensors(), hd::per_group{hd::sgd{.momentum = 2.0f}}}),
                  hd::argument_error);
  CHECK(rule.name() == "per_group(adamw, adagrad, sgd)");
  float one = 1.0f;
  CHECK_THROWS_AS(rule.update(&one, &one, nullptr, 1, {.lr = 1.0f, .group = 3}), hd::argument_error);

  // Neither ranks nor checkpoints whose tensors are of other groups.
  const auto others = [&](const auto& mode) {
    run(mode, 0, 2, false, true);
    on_threads(2, [&](auto& world) {
      quadratic model;
      auto t = model.tensors();
      const auto plan = hd::strategy{.topology = hd::native{}, .mode = mode};
      for (std::size_t i = 0; i < t.size(); ++i) t[i].group = static_cast<unsigned>((i + 1) % 3);
      hd::data_parallel dp{plan, world, t, rule};
      RANK_CHECK_THROWS_AS(dp.load(scratch.path()), hd::file_error);
      dp.join();
      t[4].group = static_cast<unsigned>(world.rank());
      RANK_CHECK_THROWS_AS((hd::data_parallel{plan, world, t, rule}), hd::comm_error);
    });
  };
  others(hd::every_step{});
  others(served);
}

namespace {

// A server of four parameters in two rows, and what it says to its workers.
struct served_rows {
  using tag = hd::detail::row_tag;
  hd::detail::row_map map{{{4, 2}}, 1};
  hd::detail::row_server<hd::sgd, hd::host_resource> server;
  std::vector<std::vector<std::vector<std::byte>>> to;

  explicit served_rows(int workers = 2, const hd::detail::row_server_settings& settings = {})
      : server(hd::sgd{}, {}, map, 0, workers, 1, settings), to(static_cast<std::size_t>(workers)) {
    const std::vector<float> start{1, 2, 3, 4};
    server.assign([&](std::size_t) { return start.data(); }, 0);
  }
  void heed(int rank, hd::message_kind kind, tag t, std::uint64_t id, const std::vector<std::byte>& bytes) {
    hd::message m{kind, {rank, 1}, static_cast<std::uint32_t>(t), id, hd::payload(std::span<const std::byte>(bytes))};
    server.heed(m, [&](int r, std::uint64_t, std::vector<std::byte>&& b) {
      to[static_cast<std::size_t>(r)].push_back(std::move(b));
    });
  }
  void says(int rank, tag t, std::uint64_t id, float g) {
    hd::detail::row_writer rows(false);
    const float gradient[] = {g, g};
    if (g != 0.0f) rows.add(0, gradient, 2);
    heed(rank, hd::message_kind::data, t, id, rows.message(hd::detail::row_request{.samples = 1.0, .lr = 1.0f}, 2));
  }
  void probes(int rank, std::uint64_t id, std::uint64_t probe) {
    const auto bytes = std::as_bytes(std::span(&probe, 1));
    heed(rank, hd::message_kind::data, tag::probe, id, {bytes.begin(), bytes.end()});
  }
  void leaves(int rank) { heed(rank, hd::message_kind::left, tag::push, 0, {}); }
  hd::detail::row_status last(int rank) const {
    const auto& said = to[static_cast<std::size_t>(rank)].back();
    return hd::detail::row_head<hd::detail::row_reply>(hd::payload(std::span<const std::byte>(said))).status;
  }
};

}  // namespace

TEST_CASE("a server that waits for everybody adds up in the order of ranks, whoever comes first") {
  for (const std::array<int, 3>& order : {std::array{0, 1, 2}, {2, 1, 0}, {1, 2, 0}, {0, 2, 1}}) {
    served_rows rows(3, {.staleness = 0});
    const float gradients[] = {1e20f, -1e20f, 3.0f};  // in any other order the 3 is lost
    for (const int rank : order) rows.says(rank, served_rows::tag::push, 1, gradients[rank]);
    REQUIRE(rows.to[0].size() == 1);
    const hd::payload body{std::span<const std::byte>(rows.to[0][0])};
    const auto head = hd::detail::row_head<hd::detail::row_reply>(body);
    hd::detail::row_reader in(body, head, rows.map, 0);
    REQUIRE_FALSE(in.done());
    CHECK((in.values()[0] == 0.0f && in.values()[1] == 1.0f));
    CHECK(rows.to[1] == rows.to[0]);
  }
}

TEST_CASE("the answer to a join is the same when it is asked for again, whatever others have pushed meanwhile") {
  served_rows rows;
  auto& [map, server, to] = rows;
  using tag = served_rows::tag;
  const auto says = [&](int rank, tag t, std::uint64_t id, float g) { rows.says(rank, t, id, g); };
  says(0, tag::push, 1, 0.5f);
  says(1, tag::join, 1, 0.0f);
  says(0, tag::join, 2, 0.0f);
  REQUIRE(to[0].size() == 2);
  REQUIRE(to[1].size() == 1);
  CHECK_FALSE(server.heard());
  says(0, tag::thanks, 2, 0.0f);
  says(0, tag::push, 3, 0.25f);  // the next epoch
  says(1, tag::again, 1, 0.0f);
  REQUIRE(to[1].size() == 2);
  CHECK(to[1][0] == to[1][1]);
  says(1, tag::push, 2, 0.0f);
  REQUIRE(to[1].size() == 3);
  CHECK(to[1][1] != to[1][2]);
  CHECK(server.heard());
}

TEST_CASE("who was told that all have joined isn't refused for an old message that comes late, when another has left") {
  using tag = served_rows::tag;
  using hd::detail::row_status;
  served_rows rows;
  rows.says(0, tag::push, 1, 0.5f);
  rows.says(1, tag::join, 1, 0.0f);
  rows.says(0, tag::join, 2, 0.0f);  // and the answer is lost
  const auto answer = rows.to[0].back();
  rows.says(1, tag::thanks, 1, 0.0f);
  rows.leaves(1);
  const std::size_t said = rows.to[0].size();
  rows.says(0, tag::push, 1, 0.5f);  // repeated under way
  rows.probes(0, 1, 1);
  rows.says(0, tag::again, 1, 0.0f);
  rows.says(0, tag::thanks, 1, 0.0f);
  CHECK(rows.to[0].size() == said);
  rows.probes(0, 2, 2);
  REQUIRE(rows.to[0].size() == said + 1);
  CHECK(rows.last(0) == row_status::answered);
  rows.says(0, tag::again, 2, 0.0f);
  CHECK(rows.to[0].back() == answer);
  rows.says(0, tag::push, 3, 0.5f);  // has heard it, and can't go on
  CHECK(rows.last(0) == row_status::failed);
}

TEST_CASE("where the mode says so, ranks go on without one that leaves, and what it has pushed counts") {
  const auto without = [](const auto& plan, bool throws) {
    std::atomic<int> ended{0};
    CAPTURE(throws);
    std::vector<std::vector<float>> out(3);
    std::barrier pushed(3);
    try {
      on_threads(3, [&](auto& comm) {
        quadratic m;
        {
          hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
          for (std::size_t s = 0; s < 20; ++s) {
            if (comm.rank() == 2 && s == 3) {
              pushed.arrive_and_wait();
              if (throws) throw std::runtime_error("rank 2");
              break;
            }
            if (s == 3) pushed.arrive_and_wait();
            train_step(dp, m, first_sample(s, comm.rank(), 3, 2), 2, 0.05f);
          }
          if (comm.rank() < 2) dp.join();
          ended += comm.rank() < 2;
        }
        out[static_cast<std::size_t>(comm.rank())] = m.w;
      });
    } catch (const std::runtime_error& e) {
      CHECK(std::string(e.what()) == "rank 2");
    }
    CHECK(ended == 2);
    CHECK(out[0] == out[1]);
    return out[0];
  };
  constexpr auto go_on = hd::worker_death::go_on;
  without(hd::strategy{.mode = hd::async_ps{.servers = 1, .on_death = go_on}}, true);
  without(hd::strategy{.mode = hd::async_ps{.servers = 2, .staleness = 2, .background = true, .on_death = go_on}},
          false);
  const auto w = without(hd::strategy{.mode = hd::async_ps{.servers = 2, .staleness = 0, .on_death = go_on}}, false);
  // Three steps of three ranks, then the mean of two.
  std::vector<double> v(quadratic::count, 0.5), g(v.size()), part(v.size());
  for (std::size_t s = 0; s < 20; ++s) {
    const int ranks = s < 3 ? 3 : 2;
    std::fill(g.begin(), g.end(), 0.0);
    for (int r = 0; r < ranks; ++r) {
      quadratic::gradient(v.data(), part.data(), first_sample(s, r, 3, 2), 2);
      for (std::size_t i = 0; i < v.size(); ++i) g[i] += part[i] / ranks;
    }
    for (std::size_t i = 0; i < v.size(); ++i) v[i] -= static_cast<double>(0.05f) * g[i];
  }
  CHECK(distance(w, v) < 1e-5);
}

TEST_CASE("what a rank pushed to one server before it died counts there alone, and others go on") {
  std::vector<std::vector<float>> out(3);
  std::atomic<bool> dead{false};
  try {
    on_threads(3, [&](auto& comm) {
      quadratic m;
      const auto plan = hd::strategy{
          .mode = hd::async_ps<dying_connection>{.servers = 2, .staleness = 0, .on_death = hd::worker_death::go_on}};
      {
        hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
        for (std::size_t s = 0; s < 10; ++s) train_step(dp, m, first_sample(s, comm.rank(), 3, 2), 2, 0.05f);
        dp.join();
      }
      out[static_cast<std::size_t>(comm.rank())] = m.w;
    });
  } catch (const std::runtime_error& e) {
    dead = std::string(e.what()) == "rank 2";
  }
  CHECK(dead);
  REQUIRE(out[0].size() == quadratic::count);
  CHECK(out[0] == out[1]);
  // Elements move on their own: three or four steps of three ranks, then means of two.
  std::vector<double> v[2] = {std::vector<double>(quadratic::count, 0.5), std::vector<double>(quadratic::count, 0.5)};
  for (std::size_t k = 0; k < 2; ++k) {
    for (std::size_t s = 0; s < 10; ++s) {
      const int ranks = s < 3 + k ? 3 : 2;
      std::vector<double> g(quadratic::count, 0.0), part(g.size());
      for (int r = 0; r < ranks; ++r) {
        quadratic::gradient(v[k].data(), part.data(), first_sample(s, r, 3, 2), 2);
        for (std::size_t i = 0; i < g.size(); ++i) g[i] += part[i] / ranks;
      }
      for (std::size_t i = 0; i < g.size(); ++i) v[k][i] -= static_cast<double>(0.05f) * g[i];
    }
  }
  std::size_t of[2] = {0, 0};
  for (std::size_t i = 0; i < quadratic::count; ++i)
    for (std::size_t k = 0; k < 2; ++k) of[k] += std::fabs(static_cast<double>(out[0][i]) - v[k][i]) < 1e-5;
  CHECK(of[0] + of[1] >= quadratic::count);
  CHECK(of[0] > 0);
  CHECK(of[1] > 0);
}

TEST_CASE("compensation and merged pushes are their definitions") {
  // One element; a barrier makes the order: both ranks read w = 1, then rank 0 pushes 2, then rank 1 pushes 4.
  const auto run = [](const auto& mode) {
    float last = 0.0f;
    std::barrier turn(2);
    on_threads(2, [&](auto& comm) {
      float w = 1.0f, g = comm.rank() ? 4.0f : 2.0f;
      hd::data_parallel dp{hd::strategy{.mode = mode}, comm, hd::tensors(&w, &g, std::array<std::size_t, 1>{1}),
                           hd::sgd{}};
      const auto push = [&] {
        dp.begin({.samples = comm.rank() ? 3.0 : 1.0});  // which count in a mean alone
        dp.ready(0);
        dp.step({.lr = 0.25f});
      };
      if (comm.rank() == 0) push();
      turn.arrive_and_wait();
      if (comm.rank() == 1) push();
      turn.arrive_and_wait();  // who joins is no longer waited for
      dp.join();
      if (comm.rank() == 0) last = w;
    });
    return last;
  };
  CHECK(run(hd::async_ps{}) == 1.0f - 0.5f - 1.0f);
  // 4 + 0.125 * 16 * (0.5 - 1) = 3
  CHECK(run(hd::async_ps{.compensation = 0.125f}) == 1.0f - 0.5f - 0.75f);
  CHECK(run(hd::async_ps{.merge = 2}) == 1.0f - 0.25f * (1.0f * 2.0f + 3.0f * 4.0f) / 4.0f);
}

TEST_CASE("Geo-SGD on servers: after t pushes all but (1 - 1/N)^t of a move is there, and after flush() all of it") {
  std::barrier turn(4);
  for (const int pushes : {8, 40}) {  // in 8 nothing rounds: all is a whole number of 4^-8 below 16
    on_threads(4, [&](auto& comm) {
      float w = 0.0f;
      std::vector<hd::geo_rows> rows{{&w, 1, 1, false}};
      hd::geo_replica<hd::threads::messenger> replica(hd::threads::connection{}, comm, rows,
                                                      {.servers = 1, .period = 1, .wait = hd::geo_wait::at_once});
      w += static_cast<float>(comm.rank() + 1);
      for (int t = 1; t <= pushes; ++t) {
        replica.batch();
        turn.arrive_and_wait();
        if (t > 8 && t < 40) continue;
        float most = 0.0f;  // who pushed last has seen all
        for (const float x : hd::detail::tell_ranks(comm, replica.agreed(0)[0])) most = std::max(most, x);
        const double exact = 10.0 * (1.0 - std::pow(0.75, t));
        RANK_CHECK(t > 8 ? std::fabs(most - exact) < 1e-4 : static_cast<double>(most) == exact);
      }
      const auto is_ten = [&](float x) { return pushes > 8 ? std::fabs(x - 10.0f) < 1e-5f : x == 10.0f; };
      for (int k = 0; k < 2; ++k) {  // the second one brings what others have flushed
        replica.flush();
        turn.arrive_and_wait();
      }
      RANK_CHECK(is_ten(w));
      RANK_CHECK(replica.agreed(0)[0] == w);
      replica.join();
      RANK_CHECK(is_ten(w));
      RANK_CHECK(replica.agreed(0)[0] == w);
      RANK_CHECK_THROWS_AS(replica.agreed(9), hd::argument_error);
      RANK_CHECK_THROWS_AS(replica.touch(0, 1), hd::argument_error);
      RANK_CHECK_THROWS_AS(replica.touch(1, 0), hd::argument_error);
    });
  }
}

TEST_CASE("a replica whose answers don't come goes on training, and is right when they come") {
  std::atomic<bool> held{true};
  on_threads(3, [&](auto& comm) {
    std::vector<float> w(5000, 0.0f), g(w.size(), -1.0f);
    const auto plan = hd::strategy{.mode = hd::async_geo_sgd<holding_connection>{.connection = {&held}, .period = 1}};
    hd::data_parallel dp{plan, comm, hd::tensors(w.data(), g.data(), std::array<std::size_t, 1>{w.size()}), hd::sgd{}};
    const auto train = [&](std::size_t steps) {
      for (std::size_t s = 0; s < steps; ++s) {
        dp.ready(0);
        dp.step({.lr = 1.0f});
      }
    };
    train(100);
    RANK_CHECK(held && dp.report().steps == 100);
    RANK_CHECK(dp.report().messages == 3);            // one push is open to each server
    for (const float x : w) RANK_CHECK(x == 100.0f);  // its own moves alone
    hd::barrier(comm);
    held = false;
    train(20);
    dp.join();
    for (const float x : w) RANK_CHECK(std::fabs(x - 3.0f * 120.0f) < 1e-3f);
    std::uint64_t answers = 0;
    for (const std::uint64_t n : dp.report().staleness) answers += n;
    RANK_CHECK(answers == dp.report().messages);
  });
}

TEST_CASE("a replica reports the bytes and messages that it sends") {
  slow_connection::road road;
  on_threads(2, [&](auto& comm) {
    std::vector<float> w(400, 0.0f);
    hd::geo_replica<slow_connection::slow_messenger> replica(
        slow_connection{&road}, comm, {{w.data(), w.size(), 4, false}},
        {.servers = 1, .period = 2, .wait = hd::geo_wait::before_next});
    for (int s = 0; s < 9; ++s) {
      for (std::size_t i = 0; i < w.size(); i += 40) w[i] += 1.0f;
      replica.batch();
    }
    replica.join();
    if (comm.rank() == 0) return;
    const hd::geo_report said = replica.report();
    const std::lock_guard lock(road.mutex);
    RANK_CHECK(said.pushes == 5);  // one for two batches, and the last one
    RANK_CHECK(road.requests.size() == 5);
    RANK_CHECK(said.bytes_sent == road.bytes);
    // A head, ten rows' numbers and floats of each.
    RANK_CHECK(road.bytes == 5 * (sizeof(hd::detail::row_request) + 10 * (4 + 4 * sizeof(float))));
  });
}

TEST_CASE("a report counts the moves of replicas by the updates of others that each came after") {
  on_threads(2, [&](auto& comm) {
    float w = 0.0f, g = -1.0f;
    const auto plan = hd::strategy{.mode = hd::async_geo_sgd{.servers = 1, .period = 1}};
    hd::data_parallel dp{plan, comm, hd::tensors(&w, &g, std::array<std::size_t, 1>{1}), hd::sgd{}};
    const auto step = [&] {
      dp.ready(0);
      dp.step({.lr = 1.0f});
    };
    while (comm.rank() == 1 && dp.report().meetings < 20) step();  // 19 are answered then
    hd::barrier(comm);
    if (comm.rank() == 0) step();
    hd::barrier(comm);
    dp.join();
    const hd::report r = dp.report();
    const std::uint64_t near = r.staleness[0] + r.staleness[1] + r.staleness[2];
    if (comm.rank() == 0) {
      RANK_CHECK((r.meetings == 2 && r.staleness[15] == 1 && near == 1));
    } else {
      RANK_CHECK((r.meetings == 21 && r.staleness[0] >= 19 && near == 21));
    }
  });
}

TEST_CASE("Geo-SGD on servers loses no move of a row, whoever changes it when, and over bad messengers") {
  const auto sums = [](const auto& connection, hd::geo_wait wait, int ranks) {
    on_threads(ranks, [&](auto& comm) {
      std::vector<float> w(50 * 3, 0.0f);
      std::vector<hd::geo_rows> rows{{w.data(), 0, 3, true}, {w.data(), w.size(), 3, true}};
      auto opened = std::type_identity<typename decltype(connection.open(comm))::element_type>{};
      hd::geo_replica<typename decltype(opened)::type> replica(connection, comm, rows, {.period = 2, .wait = wait});
      for (std::size_t s = 0; s < 300; ++s) {
        const std::size_t row = (s * 7 + static_cast<std::size_t>(comm.rank())) % 50;
        for (std::size_t k = 0; k < 3; ++k) w[3 * row + k] += 1.0f;
        replica.touch(1, row);
        replica.batch();
      }
      if (comm.rank() == 0) replica.flush();
      replica.join();
      for (const float x : w) RANK_CHECK(std::fabs(x - 6.0f * static_cast<float>(ranks)) < 1e-4f);
      RANK_CHECK(ranks == 1 || replica.report().pushes > 3);
    });
  };
  sums(hd::threads::connection{}, hd::geo_wait::never, 4);
  sums(hd::threads::connection{}, hd::geo_wait::before_next, 2);
  sums(hd::threads::connection{}, hd::geo_wait::at_once, 1);
  sums(lossy_connection{}, hd::geo_wait::never, 3);
}

TEST_CASE("a row that few have touched travels when it was touched often enough, or at the end") {
  std::barrier turn(3);
  for (const bool half : {false, true}) {
    on_threads(3, [&](auto& comm) {
      std::vector<float> w(4 * 2, 0.0f);  // row r is rank r's; all move row 3
      std::vector<hd::geo_rows> rows{{w.data(), w.size(), 2, true}};
      hd::geo_replica<hd::threads::messenger> replica(
          hd::threads::connection{}, comm, rows,
          {.servers = 1, .period = 1, .part = 1.0, .least = 6, .wait = hd::geo_wait::at_once, .half = half});
      const auto rank = static_cast<std::size_t>(comm.rank());
      for (int step = 1; step <= 4; ++step) {
        w[2 * rank] += 1.0f;
        replica.touch(0, rank);
        for (int k = 0; k < 3; ++k) w[6] += 0.5f, replica.touch(0, 3, 2);
        replica.batch();  // sends row 3 alone
        turn.arrive_and_wait();
        for (int k = 0; step == 4 && k < 2; ++k) replica.touch(0, rank);
        if (step == 4) replica.batch();  // the row's sixth touch
        turn.arrive_and_wait();
        if (step == 4) {  // all is pushed: this brings it, also of the row that all have moved
          replica.batch();
          RANK_CHECK(w[6] == 18.0f);
        }
        for (std::size_t r = 0; r < 3; ++r)
          RANK_CHECK(w[2 * r] == (r == rank || step == 4 ? static_cast<float>(step) : 0.0f));
        RANK_CHECK(replica.agreed(0)[2 * rank] == (step == 4 ? 4.0f : 0.0f));
        turn.arrive_and_wait();
      }
      w[2 * rank + 1] += 1.0f;
      replica.touch(0, rank);
      replica.batch();
      RANK_CHECK(replica.agreed(0)[2 * rank + 1] == 0.0f);
      replica.join();
      for (std::size_t r = 0; r < 3; ++r) RANK_CHECK((w[2 * r] == 4.0f && w[2 * r + 1] == 1.0f));
      RANK_CHECK(w[6] == 18.0f);
    });
  }
}

TEST_CASE("of what has moved a row a push sends the less the more it was touched, and the rest later") {
  for (const double part : {0.0, 0.5}) {
    on_threads(4, [&](auto& comm) {
      constexpr std::size_t touches[] = {1, 4, 5, 8, 16, 4'000'000'000};
      std::vector<float> w(5 * 6, 0.0f);  // six rows of each rank, and six of all
      hd::geo_replica<hd::threads::messenger> replica(
          hd::threads::connection{}, comm, {{w.data(), w.size(), 1, true}},
          {.servers = 2, .period = 1, .part = part, .common = 16, .wait = hd::geo_wait::at_once});
      const auto own = 6 * static_cast<std::size_t>(comm.rank());
      for (std::size_t r = 0; r < 6; ++r) {
        for (const std::size_t row : {own + r, 24 + r}) {
          w[row] += 1.0f;
          replica.touch(0, row, touches[r]);
          if (touches[r] == 4'000'000'000) replica.touch(0, row, touches[r]);  // as many as can be counted
        }
      }
      replica.batch();
      const auto known = replica.agreed(0);
      const float least = part > 0.0 ? 0.5f : 0.25f;
      const float expected[] = {1.0f, 1.0f, 0.8f, 0.5f, least, least};
      for (std::size_t r = 0; r < 6; ++r) {
        RANK_CHECK(known[own + r] == expected[r]);
        RANK_CHECK(w[own + r] == 1.0f);
      }
      replica.touch(0, own + 5);  // rare now
      replica.batch();
      RANK_CHECK(known[own + 5] == 1.0f);
      RANK_CHECK(known[own + 4] == least);
      replica.join();
      for (std::size_t r = 0; r < w.size(); ++r) RANK_CHECK(std::fabs(w[r] - (r < 24 ? 1.0f : 4.0f)) < 1e-5f);
    });
  }
}

TEST_CASE("replicas in step that each pull common rows where they belong settle there, and fly off where all adds up") {
  // Each period a replica takes row r so much of the way that is left, by touches in proportion.
  constexpr float pull[] = {0.01f, 0.1f, 0.5f, 0.9f, 1.0f};
  const auto distance = [&](hd::geo_options o) {
    std::vector<float> most(5, 0.0f);
    o.servers = 2, o.period = 1, o.wait = hd::geo_wait::before_next, o.synchronous = true;
    on_threads(4, [&](auto& comm) {
      std::vector<float> w(5, 0.0f);
      hd::geo_replica<hd::threads::messenger> replica(hd::threads::connection{}, comm, {{w.data(), 5, 1, true}}, o);
      for (int t = 0; t < 200; ++t) {
        for (std::size_t r = 0; r < 5; ++r) {
          w[r] += pull[r] * (1.0f - w[r]);
          replica.touch(0, r, static_cast<std::size_t>(800.0f * pull[r]));
        }
        replica.batch();
      }
      replica.join();
      for (std::size_t r = 0; comm.rank() == 0 && r < 5; ++r) most[r] = std::fabs(w[r] - 1.0f);
    });
    return most;
  };
  const auto good = distance({.common = 400}), bad = distance({.part = 0.5});
  for (std::size_t r = 0; r < 5; ++r) {
    INFO(pull[r] << ": " << good[r] << ", " << bad[r]);
    CHECK(good[r] < 0.1f);
    CHECK((r < 3 || bad[r] > 10.0f));
  }
}

TEST_CASE("a server keeps who changed which row only where moves travel as float16") {
  const hd::detail::row_map map({{40, 2}}, 1);
  const auto bytes = [&](const hd::detail::row_server_settings& s) {
    return hd::detail::row_server<hd::detail::no_rule, hd::host_resource>({}, {}, map, 0, 2, 1, s).bytes();
  };
  CHECK(bytes({.moves = true, .half = true}) == bytes({.moves = true}) + 20 * 12);
  CHECK(bytes({.moves = true}) == 40 * sizeof(float) + 20 * sizeof(std::uint64_t));
}

TEST_CASE("replicas that exchange float16 are equal after join, and hold what float16 can't") {
  std::vector<std::vector<float>> out(3);
  on_threads(3, [&](auto& comm) {
    std::vector<float> w(40, 0.1f);
    w[39] = 1e6f;
    hd::geo_replica<hd::threads::messenger> replica(hd::threads::connection{}, comm, {{w.data(), 40, 4, false}},
                                                    {.period = 1, .wait = hd::geo_wait::at_once, .half = true});
    for (std::size_t s = 0; s < 30; ++s) {
      for (std::size_t i = 0; i < 40; ++i) w[i] += i == 39 ? 3e5f : 1e-3f * static_cast<float>(i);
      replica.batch();
    }
    replica.join();
    RANK_CHECK(replica.report().reverted == 0);
    out[static_cast<std::size_t>(comm.rank())] = w;
  });
  CHECK(all_equal(out));
  for (std::size_t i = 0; i < 39; ++i) CHECK(std::fabs(out[0][i] - (0.1 + 0.09 * static_cast<double>(i))) < 5e-3);
  CHECK(std::fabs(out[0][39] - (1e6 + 90 * 3e5)) < 1e5);
}

TEST_CASE("a server mode opens on all ranks or on none, and only where all bring the same settings") {
  std::atomic<int> refused{0};
  on_threads(3, [&](auto& comm) {
    quadratic m;
    const auto opens = [&](const auto& mode) {
      try {
        hd::data_parallel dp{hd::strategy{.mode = mode}, comm, m.tensors(), hd::sgd{}};
      } catch (const std::runtime_error&) {  // comm_error is one
        ++refused;
      }
    };
    opens(hd::async_ps<failing_connection>{.servers = 1, .staleness = 0});
    opens(hd::async_geo_sgd<failing_connection>{.servers = 2});
    opens(hd::async_ps{.staleness = comm.rank() == 2 ? 1u : 0u});
    opens(hd::async_ps{.merge = comm.rank() == 2 ? 1u : 2u});
    opens(hd::async_geo_sgd{.period = comm.rank() == 2 ? 1u : 2u});
    std::vector<float> w(12, 0.0f);
    for (const hd::geo_options& o : {hd::geo_options{.half = comm.rank() == 1}, hd::geo_options{}}) {
      try {
        hd::geo_replica<hd::threads::messenger> replica(
            hd::threads::connection{}, comm, {{w.data(), 12, comm.rank() == 1 && !o.half ? 3u : 4u, false}}, o);
      } catch (const hd::comm_error&) {
        ++refused;
      }
    }
  });
  CHECK(refused == 7 * 3);
}

TEST_CASE("a rank that leaves a server mode by an exception, or without join, ends the others' waits") {
  const auto leaves = [](const auto& mode, bool throws) {
    CAPTURE(mode.name(), throws);
    std::atomic<int> told{0};
    try {
      on_threads(3, [&](auto& comm) {
        quadratic m;
        try {
          hd::data_parallel dp{hd::strategy{.mode = mode}, comm, m.tensors(), hd::sgd{}};
          if (comm.rank() == 1) {
            if (throws) throw std::runtime_error("rank 1");
            return;
          }
          for (std::size_t s = 0; s < 3; ++s) train_step(dp, m, s, 2, 0.1f);
          dp.join();
        } catch (const hd::comm_error&) {  // it names rank 1, or the rank that left because of it
          ++told;
        }
      });
    } catch (const std::runtime_error&) {
      CHECK(throws);
    }
    CHECK(told == 2);
  };
  leaves(hd::async_ps{.servers = 1}, true);
  leaves(hd::async_ps{.servers = 2}, false);
  leaves(hd::async_ps{.staleness = 0}, true);
  leaves(hd::async_geo_sgd{}, true);
  leaves(hd::async_geo_sgd{.servers = 1}, false);
}

TEST_CASE("what servers hold goes on bit for bit, and on other numbers of ranks and servers") {
  const scratch_directory scratch;
  const auto run = [&](int ranks, int servers, std::size_t first, std::size_t last, bool load, bool save) {
    std::vector<float> w;
    on_threads(ranks, [&](auto& comm) {
      quadratic m;
      const auto plan = hd::strategy{.mode = hd::async_ps{.servers = servers, .staleness = 0}};
      hd::data_parallel dp{plan, comm, m.tensors(), hd::adamw{}};
      if (load) dp.load(scratch.path());
      for (std::size_t s = first; s < last; ++s) train_step(dp, m, 2 * s, 2, 0.01f);
      if (save) dp.save(scratch.path());
      dp.join();
      if (comm.rank() == 0) w = m.w;
    });
    return w;
  };
  const std::vector<float> whole = run(3, 0, 0, 20, false, false);
  run(3, 0, 0, 10, false, true);
  CHECK(run(3, 0, 10, 20, true, false) == whole);
  CHECK(run(3, 1, 10, 20, true, false) == whole);
  // One server's files know the rule's clock alone; all servers go on with it.
  run(3, 1, 0, 10, false, true);
  CHECK(run(3, 0, 10, 20, true, false) == whole);
  run(3, 0, 0, 10, false, true);
  // All ranks have the same batches here, so their number changes no mean.
  CHECK(distance(run(5, 2, 10, 20, true, false), {whole.begin(), whole.end()}) < 1e-6);
  REQUIRE(::truncate((scratch.path() + "/checkpoint-3.rank-1").c_str(), 100) == 0);
  on_threads(3, [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{together, comm, m.tensors(), hd::adamw{}};
    RANK_CHECK_THROWS_AS(dp.load(scratch.path()), hd::file_error);
    RANK_CHECK(m.w == quadratic{}.w);
    dp.join();
  });
}

TEST_CASE("server modes refuse numbers outside their range") {
  quadratic m;
  hd::self comm;
  const auto refused = [&](const auto& mode) {
    CHECK_THROWS_AS((hd::data_parallel{hd::strategy{.mode = mode}, comm, m.tensors(), hd::sgd{}}), hd::argument_error);
  };
  refused(hd::async_ps{.servers = 2});
  refused(hd::async_ps{.servers = -1});
  refused(hd::async_ps{.merge = 0});
  refused(hd::async_ps{.compensation = -1.0f});
  refused(hd::async_ps{.staleness = 0, .compensation = 1.0f});
  refused(hd::async_ps{.merge = 2, .compensation = 1.0f});
  refused(hd::async_ps{.staleness = 0, .background = true});
  refused(hd::async_ps{.compensation = 1.0f, .background = true});
  refused(hd::async_ps{.on_death = hd::worker_death::wait});
  refused(hd::async_ps{.on_death = hd::worker_death::go_on});  // all ranks serve
  refused(hd::async_ps{.servers = 1, .on_death = hd::worker_death::go_on});
  refused(hd::async_geo_sgd{.period = 0});
  hd::data_parallel dp{together, comm, m.tensors(), hd::sgd{}};
  CHECK_THROWS_AS(dp.ready(5), hd::argument_error);
  dp.ready(0);
  CHECK_THROWS_AS(dp.ready(0), hd::argument_error);
  CHECK_THROWS_AS(dp.join(), hd::argument_error);
  CHECK_THROWS_AS(dp.step({.lr = -1.0f}), hd::argument_error);
  CHECK_THROWS_AS(dp.step({.lr = 1.0f}), hd::argument_error);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The update inside the all-reduce, on buffers: against an all-reduce and an update of everything, bit for bit, and
// against double precision.
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/sharded_update.hpp>
#include <heddle/comm/threads.hpp>
#include <heddle/optim/adamw.hpp>
#include <heddle/optim/lamb.hpp>

#include "../support/catch.hpp"
#include "../support/rank_check.hpp"

#include <cmath>
#include <cstdio>
#include <limits>

#include <unistd.h>

namespace hd = heddle;

namespace {
float draw(std::size_t rank, std::size_t step, std::size_t i) {
  std::uint64_t z = (rank * 1000003 + step) * 0x9e3779b97f4a7c15ull + i * 0xd1342543de82ef95ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<float>(static_cast<double>(z >> 11) * 0x1p-52 - 1.0);
}

constexpr hd::adamw rule{.weight_decay = 0.1f};

// What each step must give, in double precision, for one element after the other.
struct oracle {
  std::vector<double> p, m, v;
  std::size_t t = 0;
  explicit oracle(std::size_t n) : p(n, 0.25), m(n, 0.0), v(n, 0.0) {}

  double step(std::size_t ranks, std::size_t s, double lr, double max_norm) {
    std::vector<double> g(p.size(), 0.0);
    double squares = 0.0;
    for (std::size_t i = 0; i < g.size(); ++i) {
      for (std::size_t r = 0; r < ranks; ++r) g[i] += static_cast<double>(draw(r, s, i));
      g[i] /= static_cast<double>(ranks);
      squares += g[i] * g[i];
    }
    const double norm = std::sqrt(squares), factor = max_norm > 0.0 && norm > max_norm ? max_norm / norm : 1.0;
    ++t;
    const double b1 = static_cast<double>(0.9f), b2 = static_cast<double>(0.999f), n = static_cast<double>(t);
    for (std::size_t i = 0; i < g.size(); ++i) {
      m[i] = b1 * m[i] + (1.0 - b1) * g[i] * factor;
      v[i] = b2 * v[i] + (1.0 - b2) * g[i] * factor * g[i] * factor;
      p[i] -= lr * (m[i] / (1.0 - std::pow(b1, n)) / (std::sqrt(v[i] / (1.0 - std::pow(b2, n))) + 1e-8) +
                    static_cast<double>(0.1f) * p[i]);
    }
    return norm;
  }
};

template <class Topology>
void like_an_all_reduce(const Topology& t, int ranks, std::size_t n) {
  CAPTURE(ranks, n);
  hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
    const std::size_t sizes[] = {n / 3, 0, n - n / 3};
    hd::sharded_update update(t, rule, comm.rank(), comm.size(), std::span(sizes));
    oracle exact(n);
    std::vector<float> p(n, 0.25f), q = p, g(n), h(n), m(n, 0.0f), v(n, 0.0f);
    for (std::size_t s = 0; s < 3; ++s) {
      for (std::size_t i = 0; i < n; ++i) g[i] = h[i] = draw(static_cast<std::size_t>(comm.rank()), s, i);
      const auto r = update(comm, std::span(g), std::span(p), {.lr = 0.01f});
      hd::all_reduce(comm, t, std::span(h), hd::mean{});
      float* state[] = {m.data(), v.data()};
      rule.update(q.data(), h.data(), state, n, {.lr = 0.01f, .step = s});
      RANK_CHECK(!r.skipped);
      RANK_CHECK(p == q);
      RANK_CHECK(std::fabs(r.norm - exact.step(static_cast<std::size_t>(ranks), s, static_cast<double>(0.01f), 0.0)) <=
                 1e-6 * r.norm);
    }
    double worst = 0.0;
    for (std::size_t i = 0; i < n; ++i) worst = std::max(worst, std::fabs(p[i] - exact.p[i]));
    RANK_CHECK(worst < 2e-5);
    std::size_t own = 0;
    for (const hd::interval b : update.owned()) own += b.count;
    RANK_CHECK(update.state_bytes() == own * 8);
  });
}
}  // namespace

TEST_CASE("an update inside the all-reduce is, bit for bit, an all-reduce and an update") {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    const auto p = static_cast<std::size_t>(ranks);
    for (const std::size_t n : {std::size_t{0}, std::size_t{1}, p - 1, p, p + 1, std::size_t{17}, std::size_t{1025}}) {
      like_an_all_reduce(hd::ring{}, ranks, n);
      like_an_all_reduce(hd::native{}, ranks, n);
    }
    like_an_all_reduce(hd::hierarchical{hd::ring{}, hd::halving_doubling{}, 3}, ranks, 10007);
  }
}

TEST_CASE("the program of docs/collective.md updates inside the all-reduce") {
  // example-begin sharded_update
  hd::threads::run(4, [](auto& comm) {
    const std::size_t sizes[] = {800, 200};  // two tensors, one after the other
    std::vector<float> parameters(1000, 1.0f), gradients(1000, 1.0f + static_cast<float>(comm.rank()));
    hd::sharded_update update(hd::ring{}, hd::adamw{}, comm.rank(), comm.size(), std::span(sizes));
    const hd::sharded_result r = update(comm, std::span(gradients), std::span(parameters), {.lr = 0.1f, .max_norm = 1.0f});
    const bool first_step_has_length_lr = std::abs(parameters[0] - 0.9f) < 1e-5f;
    if (r.skipped || !first_step_has_length_lr) throw std::logic_error("it should have stepped");
  });
  // example-end
}

TEST_CASE("a topology without halves can't shard") {
  struct whole : hd::ring {  // its all_reduce doesn't say who owns what
    hd::schedule all_reduce(int rank, int size, std::size_t n) const {
      const hd::schedule s = ring::all_reduce(rank, size, n);
      hd::schedule t;
      t.append(s, 0, s.rounds(), [](int peer) { return peer; }, 0);
      return t;
    }
  };
  CHECK_THROWS_AS(hd::halved_plan<whole>({}, 0, 2, 5), hd::argument_error);
}

TEST_CASE("16-bit gradients and parameters: a float copy of what is owned is updated, clipped and unscaled once") {
  for (const int ranks : {1, 3, 4}) {
    hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(60)}, [&](auto& comm) {
      const std::size_t n = 1023, sizes[] = {n};
      hd::sharded_update<hd::direct, hd::adamw, hd::bfloat16> update({}, rule, comm.rank(), comm.size(), sizes);
      oracle exact(n);
      std::vector<hd::bfloat16> p(n, hd::bfloat16(0.25f));
      std::vector<hd::float16> g(n);
      for (std::size_t s = 0; s < 20; ++s) {
        for (std::size_t i = 0; i < n; ++i)
          g[i] = hd::float16(1024.0f * draw(static_cast<std::size_t>(comm.rank()), s, i));
        const auto r = update(comm, std::span(g), std::span(p), {.lr = 0.01f, .max_norm = 4.0f, .scale = 1.0f / 1024});
        const double norm = exact.step(static_cast<std::size_t>(ranks), s, static_cast<double>(0.01f), 4.0);
        RANK_CHECK(std::fabs(r.norm - norm) < 1e-3 * norm);
      }
      double worst = 0.0;
      for (std::size_t i = 0; i < n; ++i) worst = std::max(worst, std::fabs(static_cast<double>(float(p[i])) - exact.p[i]));
      RANK_CHECK(worst < 4e-3);  // half of bfloat16's last place below 0.5, and what float16 gradients are off by
      const auto before = p;
      g.assign(n, hd::float16(1.0f));
      if (comm.rank() == ranks - 1) g[500] = hd::float16(std::numeric_limits<float>::infinity());
      RANK_CHECK(update(comm, std::span(g), std::span(p), {.lr = 0.01f}).skipped);
      RANK_CHECK(update.steps() == 20);
      for (std::size_t i = 0; i < n; ++i) RANK_CHECK(p[i].bits == before[i].bits);
    });
  }
}

TEST_CASE("a sharded update goes on from its files on another number of ranks") {
  char path[] = "/tmp/heddle-shards-XXXXXX";
  REQUIRE(::mkdtemp(path));
  const auto file = [&](int r) { return std::string(path) + "/" + std::to_string(r); };
  const std::size_t n = 1025, sizes[] = {25, 1000};
  std::vector<float> saved, expected;
  const auto steps = [&](auto& update, auto& comm, std::vector<float>& p, std::size_t from, std::size_t to) {
    std::vector<float> g(n);
    for (std::size_t s = from; s < to; ++s) {
      for (std::size_t i = 0; i < n; ++i) g[i] = draw(0, s, i);  // the same everywhere: so is the mean
      update(comm, std::span(g), std::span(p), {.lr = 0.01f});
    }
  };
  hd::threads::run(4, [&](auto& comm) {
    hd::sharded_update update(hd::direct{}, hd::lamb{}, comm.rank(), comm.size(), std::span(sizes));
    std::vector<float> p(n, 0.25f);
    steps(update, comm, p, 0, 3);
    update.save(file(comm.rank()));
    if (comm.rank() == 0) saved = p;
    steps(update, comm, p, 3, 6);
    if (comm.rank() == 0) expected = p;
    if (comm.rank() == 0) update.save(file(4));  // of another step
  });
  for (const int ranks : {4, 1, 3}) {
    hd::threads::run(ranks, [&](auto& comm) {
      hd::sharded_update update(hd::direct{}, hd::lamb{}, comm.rank(), comm.size(), std::span(sizes));
      std::vector<float> p = saved;
      std::vector<std::string> files;
      for (int r = 0; r < 4; ++r) files.push_back(file((comm.rank() + r) % 4));
      RANK_CHECK_THROWS_AS(update.load(std::span(files).first(0)), hd::file_error);
      const std::vector<std::string> twice(4, file(0)), mixed{file(0), file(1), file(2), file(3), file(4)};
      if (ranks == 1) RANK_CHECK_THROWS_AS(update.load(twice), hd::file_error);
      RANK_CHECK_THROWS_AS(update.load(mixed), hd::file_error);
      RANK_CHECK(update.steps() == 0);
      update.load(files);
      RANK_CHECK(update.steps() == 3);
      steps(update, comm, p, 3, 6);
      double worst = 0.0;  // norms are summed up by other owners
      for (std::size_t i = 0; i < n; ++i) worst = std::max(worst, static_cast<double>(std::fabs(p[i] - expected[i])));
      RANK_CHECK(worst <= (ranks == 4 ? 0.0 : 1e-6));
    });
  }
  for (int r = 0; r < 5; ++r) std::remove(file(r).c_str());
  ::rmdir(path);
}

TEST_CASE("a sharded update refuses other sizes and numbers that can't be") {
  hd::threads::run(1, [](auto& comm) {
    const std::size_t sizes[] = {3};
    hd::sharded_update update(hd::ring{}, hd::adamw{}, 0, 1, std::span(sizes));
    std::vector<float> g(3), p(4);
    RANK_CHECK_THROWS_AS(update(comm, std::span(g), std::span(p), {.lr = 0.1f}), hd::argument_error);
    p.resize(3);
    RANK_CHECK_THROWS_AS(update(comm, std::span(g), std::span(p), {.lr = -0.1f}), hd::argument_error);
    RANK_CHECK_THROWS_AS(update(comm, std::span(g), std::span(p), {.lr = 0.1f, .scale = 0.0f}), hd::argument_error);
    RANK_CHECK(update.steps() == 0);
    const float one[] = {1.0f, 1.0f};
    RANK_CHECK_THROWS_AS(hd::sharded_update(hd::ring{}, hd::adamw{}, 0, 1, std::span(sizes), one), hd::argument_error);
    RANK_CHECK_THROWS_AS(hd::sharded_update(hd::ring{}, hd::adamw{.beta1 = 2.0f}, 0, 1, std::span(sizes)), hd::argument_error);
  });
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include "servers.hpp"

#include <unistd.h>
#include <cstdlib>
#include <future>
#include <memory>

namespace hd = heddle;

namespace {
constexpr std::size_t dim = 4, keys_per_step = 20;
using table_type = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::adagrad>;
using wire = hd::threads::messenger;
using client = hd::sharded_table<table_type, wire>;

const table_type::settings how{.seed = 5, .shard_bits = 4};

hd::worker_options heir_of_worker() {
  hd::worker_options o = worker(1);
  o.resumes = true;
  return o;
}
keys_type few_of(int w, int step) { return keys_of(w, step, keys_per_step, 50); }
floats gradients_of(int w, int step) { return draws_of(w, step, keys_per_step * dim); }
template <class Table> void push(Table& t, int w, int step) {
  t.push(few_of(w, step), gradients_of(w, step), {.lr = 0.1f});
}
}  // namespace

TEST_CASE("a server that dies after a worker was replaced has all that no log has any more") {
  for (const bool ordered : {false, true}) {
    INFO("ordered " << ordered);
    const folder dir;
    const hd::threads::meeting_place place(3);
    servers<table_type> s(how, place,
                          {.workers = ordered ? 2 : 1,
                           .staleness = ordered ? 3 : hd::server_options::unbounded,
                           .ordered = ordered,
                           .on_death = hd::worker_death::wait,
                           .path = dir / "s"});
    std::string error;
    std::uint64_t before = 99;
    try {
      std::unique_ptr<wire> m2;
      std::unique_ptr<client> other;
      if (ordered) {
        m2 = std::make_unique<wire>(quick(), place, 2);
        other = std::make_unique<client>(how, *m2, worker(1));
        push(*other, 1, 0);
      }
      {
        wire m(quick(), place, 1);
        client c(how, m, worker(1));
        for (int step = 0; step < 2; ++step) push(c, 0, step);
        c.flush();
        while (s.applied(0) < (ordered ? 1 : 2)) std::this_thread::sleep_for(1ms);
        hd::threads::meeting_place(place).kill(1);
      }
      wire m(quick(), place, 1);
      client heir(how, m, heir_of_worker());
      before = heir.pushed_before();
      for (int step = static_cast<int>(before); step < 3; ++step) push(heir, 0, step);
      heir.flush();
      s.kill(0);
      push(heir, 0, 3);
      if (ordered) {
        for (int step = 1; step < 4; ++step) push(*other, 1, step);
        auto leaves = std::async(std::launch::async, [&] { other->finish(); });
        heir.finish();
        leaves.get();
      } else {
        heir.finish();
      }
    } catch (const std::exception& e) {
      error = e.what();
    }
    CHECK(error == "");
    CHECK(before == (ordered ? 1 : 2));  // ordered: one push waited for the other worker's, and is made again
    table_type expected(how);
    for (int step = 0; step < 4; ++step)
      for (int w = 0; w < (ordered ? 2 : 1); ++w) push(expected, w, step);
    CHECK(s.stop() == expected.checksum());
  }
}

TEST_CASE("what a worker's former object has pushed waits for its step, also where the next one doesn't resume") {
  const folder dir;
  const hd::threads::meeting_place place(3);
  servers<table_type> s(how, place, {.workers = 2, .staleness = 3, .ordered = true, .path = dir / "s"});
  wire m1(quick(), place, 1), m2(quick(), place, 2);
  client other(how, m2, worker(1));
  push(other, 1, 0);
  {
    client c(how, m1, worker(1));
    for (int step = 0; step < 2; ++step) push(c, 0, step);
    c.flush();
  }
  client next(how, m1, worker(1));
  CHECK(next.pushed_before() == 2);
  push(next, 0, 2);
  for (int step = 1; step < 3; ++step) push(other, 1, step);
  auto leaves = std::async(std::launch::async, [&] { other.finish(); });
  next.finish();
  leaves.get();
  table_type expected(how);
  for (int step = 0; step < 3; ++step)
    for (int w = 0; w < 2; ++w) push(expected, w, step);
  CHECK(s.stop() == expected.checksum());
}

namespace {
// Each step trains by rows that were asked for before the step in front of it was pushed.
void train_ahead(int w, hd::sharded_table<table_type, hd::lossy<wire>>& c, int steps) {
  floats rows(keys_per_step * dim);
  c.pull(few_of(w, 0), rows);
  for (int s = 0; s < steps; ++s) {
    floats g = gradients_of(w, s);
    for (std::size_t i = 0; i < g.size(); ++i) g[i] += rows[i];
    auto next = c.start_pull(few_of(w, s + 1));
    c.push(few_of(w, s), g, {.lr = 0.1f});
    c.finish_pull(std::move(next), rows);
  }
  c.finish();
}
std::uint64_t reference_ahead(int workers, int steps) {
  table_type t(how);
  std::vector<floats> rows(static_cast<std::size_t>(workers), floats(keys_per_step * dim));
  const auto read = [&](int step) {
    for (int w = 0; w < workers; ++w) t.preview(few_of(w, step), rows[static_cast<std::size_t>(w)]);
  };
  read(0);
  for (int s = 0; s < steps; ++s) {
    std::vector<floats> all;
    for (int w = 0; w < workers; ++w) {
      all.push_back(gradients_of(w, s));
      for (std::size_t i = 0; i < all.back().size(); ++i) all.back()[i] += rows[static_cast<std::size_t>(w)][i];
    }
    read(s + 1);
    for (int w = 0; w < workers; ++w) t.push(few_of(w, s), all[static_cast<std::size_t>(w)], {.lr = 0.1f});
  }
  return t.checksum();
}
}  // namespace

TEST_CASE("rows that are asked for in advance are of one step in synchronous mode, whatever is lost") {
  constexpr int steps = 12;
  const std::uint64_t expected = reference_ahead(2, steps);
  for (const std::uint64_t seed : {1, 2, 3}) {
    const hd::losses losses{
        .drop = 0.15, .duplicate = 0.15, .reorder = 0.15, .delay = 0.1, .longest = 5ms, .seed = seed};
    const folder dir;
    const hd::threads::meeting_place place(3);
    servers<table_type> s(how, place,
                          {.workers = 2, .staleness = 0, .ordered = true, .path = dir / "s", .save_every = 6});
    std::vector<std::future<void>> all;
    for (int w = 0; w < 2; ++w) {
      all.push_back(std::async(std::launch::async, [&, w] {
        wire inner(quick(), place, 1 + w);
        hd::lossy<wire> m(inner, losses);
        hd::sharded_table<table_type, hd::lossy<wire>> c(how, m, worker(1));
        train_ahead(w, c, steps);
      }));
    }
    if (seed == 3) {
      while (s.applied(1) < 5) std::this_thread::sleep_for(1ms);
      s.kill(0);
    }
    for (auto& w : all) w.get();
    CHECK(s.stop() == expected);
  }
}

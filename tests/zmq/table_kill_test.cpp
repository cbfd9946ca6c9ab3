// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/comm/zmq.hpp>
#include <heddle/table/sharded_table.hpp>
#include <heddle/table/table_server.hpp>

#include "processes.hpp"

#include <optional>

namespace hd = heddle;

namespace {
using namespace std::chrono_literals;
constexpr std::size_t dim = 4, keys_per_step = 50;
constexpr int servers = 2, workers = 2, steps = 40;
using table_type = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::adagrad>;
const table_type::settings how{.seed = 3, .shard_bits = 4};

hd::messenger_options quick() {
  hd::messenger_options o;
  o.beat = 20ms;
  o.silence = 2s;
  return o;
}

std::vector<std::uint64_t> keys_of(int w, int step) {
  std::vector<std::uint64_t> k(keys_per_step);
  for (std::size_t i = 0; i < k.size(); ++i)
    k[i] = hd::philox(1, static_cast<std::uint64_t>(w * 1000 + step), i).word[0] % 300;
  return k;
}
// What depends on the rows that were read: a row that was wrong once is wrong for ever.
std::vector<float> gradients_of(int w, int step, const std::vector<float>& rows) {
  std::vector<float> g(rows);
  for (std::size_t i = 0; i < g.size(); ++i)
    g[i] += hd::random_uniform(2, static_cast<std::uint64_t>(w * 1000 + step), i) - 0.5f;
  return g;
}

void serve(int rank, const std::vector<std::string>& addresses, const std::string& path) {
  hd::zmq::messenger m(quick(), rank, addresses);
  table_type part(hd::settings_of_server(how, rank, servers));
  hd::table_server server(
      part, m,
      {.servers = servers, .workers = workers, .staleness = 0, .ordered = true, .path = path, .save_every = 7});
  server.run();
}

void work(int w, const std::vector<std::string>& addresses) {
  hd::zmq::messenger m(quick(), servers + w, addresses);
  hd::worker_options o;
  o.servers = servers;
  o.retry = 10ms;
  hd::sharded_table<table_type, hd::zmq::messenger> t(how, m, o);
  std::vector<float> rows(keys_per_step * dim);
  for (int s = 0; s < steps; ++s) {
    const auto k = keys_of(w, s);
    t.pull(k, rows);
    t.push(k, gradients_of(w, s, rows), {.lr = 0.1f});
    std::this_thread::sleep_for(2ms);
  }
  t.finish();
}

// The same training without servers.
std::uint64_t reference() {
  table_type t(how);
  for (int s = 0; s < steps; ++s) {
    std::vector<std::vector<float>> g;
    for (int w = 0; w < workers; ++w) {
      std::vector<float> rows(keys_per_step * dim);
      t.pull(keys_of(w, s), rows);
      g.push_back(gradients_of(w, s, rows));
    }
    for (int w = 0; w < workers; ++w) t.push(keys_of(w, s), g[static_cast<std::size_t>(w)], {.lr = 0.1f});
  }
  return t.checksum();
}
}  // namespace

TEST_CASE("servers killed at twenty moments leave the table of an undisturbed run") {
  using heddle_test::process;
  const std::uint64_t expected = reference();
  int kills = 0;
  for (std::uint64_t run = 0; kills < 20 && run < 30; ++run) {
    const heddle_test::folder dir;
    const auto addresses = dir.addresses(servers + workers);
    // The last names in the folder, which it removes.
    const std::vector<std::string> paths{dir.file(6), dir.file(7)};
    std::vector<std::optional<process>> at(servers);
    const auto start = [&](std::size_t k) {
      at[k].emplace([&, k] { serve(static_cast<int>(k), addresses, paths[k]); });
    };
    for (std::size_t k = 0; k < servers; ++k) start(k);
    process first([&] { work(0, addresses); }), second([&] { work(1, addresses); });
    for (std::uint64_t n = 0; n < 7; ++n) {
      const auto dice = hd::philox(9, run, n);
      std::this_thread::sleep_for(std::chrono::microseconds(dice.word[0] % 60'000));
      if (first.ended() || second.ended()) break;
      const std::size_t k = dice.word[1] % servers;
      at[k]->send(SIGKILL);
      ++kills;
      start(k);
    }
    CHECK(first.wait() == 0);
    CHECK(second.wait() == 0);
    for (auto& s : at) CHECK(s->wait() == 0);
    std::uint64_t sum = 0;
    for (std::size_t k = 0; k < servers; ++k) {
      table_type part(hd::settings_of_server(how, static_cast<int>(k), servers));
      part.load(paths[k]);
      sum += part.checksum();
      for (int w = 0; w < workers; ++w) CHECK(part.sequence_of(static_cast<std::uint32_t>(w)) == steps + 1);
    }
    INFO("run " << run << ", " << kills << " kills so far");
    CHECK(sum == expected);
    for (const std::string& p : paths) unlink((p + ".tmp").c_str());
  }
  CHECK(kills >= 20);
}

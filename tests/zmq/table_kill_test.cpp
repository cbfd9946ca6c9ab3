// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/comm/zmq.hpp>
#include <heddle/table/sharded_table.hpp>
#include <heddle/table/table_server.hpp>

#include "processes.hpp"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>

#include <sys/mman.h>

namespace hd = heddle;

namespace {
using namespace std::chrono_literals;
using heddle_test::process;
constexpr std::size_t dim = 4, keys_per_step = 50;
constexpr int workers = 2, steps = 40;
// With all that a shard remembers besides its rows: what was refused, how often rows were pushed, and the count of steps
// by which 16-bit weights are rounded.
using table_type = hd::sparse_table<std::uint64_t, hd::row<dim, hd::bfloat16>, hd::rule::adagrad, hd::initial::uniform,
                                    hd::admit::counting_bloom, hd::evict::lfu>;
const table_type::settings how{
    .admission = {.n = 2, .cells = 1 << 12}, .eviction = {.bytes = 11'000}, .seed = 3, .shard_bits = 1};

// Servers and workers, processes, and what they go by.
struct job {
  int servers = 2;
  hd::worker_death on_death = hd::worker_death::report;
  std::chrono::nanoseconds silence = 2s;
  heddle_test::folder dir{};
  std::vector<std::string> addresses = dir.addresses(servers + workers);
  std::vector<std::string> paths{dir.file(6), dir.file(7)};
  std::atomic<int>* done = static_cast<std::atomic<int>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));  // of each worker: steps, lives
  std::atomic<int>& may_do() const { return done[2 * workers]; }  // steps of a worker 0 that has files written

  ~job() { munmap(done, 4096); }
  hd::messenger_options quick() const {
    hd::messenger_options o;
    o.beat = 20ms;
    o.silence = silence;
    return o;
  }
};

std::vector<std::uint64_t> keys_of(int w, int step) {
  std::vector<std::uint64_t> k(keys_per_step);
  for (std::size_t i = 0; i < k.size(); ++i) {  // some of them often
    const float u = hd::random_uniform(1, static_cast<std::uint64_t>(w * 1000 + step), i);
    k[i] = static_cast<std::uint64_t>(1500.0f * u * u);
  }
  return k;
}
// What depends on the rows that were read: a row that was wrong once is wrong for ever.
std::vector<float> gradients_of(int w, int step, const std::vector<float>& rows) {
  std::vector<float> g(rows);
  for (std::size_t i = 0; i < g.size(); ++i)
    g[i] += hd::random_uniform(2, static_cast<std::uint64_t>(w * 1000 + step), i) - 0.5f;
  return g;
}

// A step changes the table once: it moves rows, or every eighth time drops them.
template <class Table> void change(Table& t, int w, int step, const std::vector<float>& rows) {
  if (step % 8 == 5)
    t.erase(keys_of(w, step));
  else
    t.push(keys_of(w, step), gradients_of(w, step, rows), {.lr = 0.1f});
}

void serve(const job& j, int rank) {
  hd::zmq::messenger m(j.quick(), rank, j.addresses);
  table_type part(hd::settings_of_server(how, rank, j.servers));
  hd::server_options o;
  o.servers = j.servers;
  o.workers = workers;
  o.staleness = 0;
  o.ordered = true;
  o.on_death = j.on_death;
  o.path = j.paths[static_cast<std::size_t>(rank)];
  o.save_every = 7;
  hd::table_server server(part, m, o);
  server.run();
}

// The file of a moment, if there is one: first a full one, then deltas.
constexpr int first_file = 6, files_every = 3;
bool is_saved(int step) { return step >= first_file && (step - first_file) % files_every == 0; }
std::string file_of(const job& j, int step) { return j.dir.file(1000 + step); }

// `saves`: worker 0 has files written.
void work(const job& j, int w, bool saves = false) {
  hd::zmq::messenger m(j.quick(), j.servers + w, j.addresses);
  hd::worker_options o;
  o.servers = j.servers;
  o.retry = 10ms;
  o.resumes = true;  // behind what a former life has pushed
  o.object = 1000u - static_cast<unsigned>(++j.done[workers + w]);  // each life by a clock that is behind the former's
  hd::sharded_table<table_type, hd::zmq::messenger> t(how, m, o);
  std::vector<float> rows(keys_per_step * dim);
  for (int s = static_cast<int>(t.pushed_before()); s < steps; ++s) {
    const auto k = keys_of(w, s);
    while (saves && w == 0 && s >= j.may_do()) std::this_thread::sleep_for(500us);
    if (saves && w == 0 && is_saved(s)) s == first_file ? t.save(file_of(j, s)) : t.save_delta(file_of(j, s));
    t.pull(k, rows);
    change(t, w, s, rows);
    j.done[w] = s + 1;
    std::this_thread::sleep_for(2ms);
  }
  t.finish();
}

// The same training without servers. `sums`: takes the table's checksum before each step.
std::uint64_t reference(std::vector<std::uint64_t>* sums = nullptr) {
  table_type t(how);
  for (int s = 0; s < steps; ++s) {
    if (sums) sums->push_back(t.checksum());
    std::vector<std::vector<float>> rows;
    for (int w = 0; w < workers; ++w) {
      rows.emplace_back(keys_per_step * dim);
      t.pull(keys_of(w, s), rows.back());
    }
    for (int w = 0; w < workers; ++w) change(t, w, s, rows[static_cast<std::size_t>(w)]);
  }
  CHECK(t.counts().refused > 0);
  CHECK(t.counts().evicted > 0);
  return t.checksum();
}
}  // namespace

TEST_CASE("servers killed at twenty moments leave the table of an undisturbed run") {
  const std::uint64_t expected = reference();
  int kills = 0;
  std::vector<double> pauses;  // until both workers have gone on
  for (std::uint64_t run = 0; kills < 20 && run < 30; ++run) {
    const job j;
    std::vector<std::optional<process>> at(2);
    const auto start = [&](std::size_t k) { at[k].emplace([&, k] { serve(j, static_cast<int>(k)); }); };
    for (std::size_t k = 0; k < at.size(); ++k) start(k);
    process first([&] { work(j, 0); }), second([&] { work(j, 1); });
    for (std::uint64_t n = 0; n < 7; ++n) {
      const auto dice = hd::philox(9, run, n);
      std::this_thread::sleep_for(std::chrono::microseconds(dice.word[0] % 60'000));
      if (first.ended() || second.ended()) break;
      const std::size_t k = dice.word[1] % at.size();
      at[k]->send(SIGKILL);
      const auto killed = std::chrono::steady_clock::now();
      const int then[] = {j.done[0], j.done[1]};
      ++kills;
      start(k);
      if (n % 3 != 0) continue;  // others are killed while they recover
      while ((j.done[0] < then[0] + 2 || j.done[1] < then[1] + 2) && !first.ended() && !second.ended())
        std::this_thread::sleep_for(1ms);
      pauses.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - killed).count());
    }
    CHECK(first.wait() == 0);
    CHECK(second.wait() == 0);
    for (auto& s : at) CHECK(s->wait() == 0);
    std::uint64_t sum = 0;
    for (int k = 0; k < j.servers; ++k) {
      table_type part(hd::settings_of_server(how, k, j.servers));
      part.load(j.paths[static_cast<std::size_t>(k)]);
      sum += part.checksum();
      for (int w = 0; w < workers; ++w) CHECK(part.sequence_of(static_cast<std::uint32_t>(w)) == steps + 1);
    }
    INFO("run " << run << ", " << kills << " kills so far");
    CHECK(sum == expected);
  }
  CHECK(kills >= 20);
  std::sort(pauses.begin(), pauses.end());
  if (!pauses.empty())
    std::printf("%d servers killed; work went on after %.3f s (median), %.3f s (most)\n", kills,
                pauses[pauses.size() / 2], pauses.back());
}

TEST_CASE("servers are killed while deltas are saved, and full file and deltas are each moment's table") {
  std::vector<std::uint64_t> sums;
  reference(&sums);
  int whole = 0, kills = 0;
  for (std::uint64_t run = 0; run < 4; ++run) {
    INFO("run " << run);
    const job j;
    std::vector<std::optional<process>> at(2);
    const auto start = [&](std::size_t k) { at[k].emplace([&, k] { serve(j, static_cast<int>(k)); }); };
    for (std::size_t k = 0; k < at.size(); ++k) start(k);
    process first([&] { work(j, 0, true); }), second([&] { work(j, 1); });
    for (int n = 0; n < 6; ++n) {  // the last one before the last delta
      const auto dice = hd::philox(19, run, static_cast<std::uint64_t>(n));
      const int begin = first_file + 5 * n;
      j.may_do() = begin + 5;
      while (j.done[0] < begin && !first.ended()) std::this_thread::sleep_for(500us);
      std::this_thread::sleep_for(std::chrono::microseconds(dice.word[0] % 30'000));
      if (first.ended() || second.ended()) break;
      at[dice.word[1] % 2]->send(SIGKILL);
      ++kills;
      start(dice.word[1] % 2);
    }
    j.may_do() = steps;
    CHECK(first.wait() == 0);
    CHECK(second.wait() == 0);
    for (auto& s : at) CHECK(s->wait() == 0);
    table_type t(how);
    t.load(hd::files_of_servers(file_of(j, first_file), j.servers));
    CHECK(t.checksum() == sums[first_file]);
    for (int s = first_file + files_every; s < steps; s += files_every) {
      INFO("step " << s);
      for (const std::string& file : hd::files_of_servers(file_of(j, s), j.servers)) {
        t.load_delta(file);
        whole += hd::detail::table_reader(file).head().kind == hd::detail::file_kind::whole;
      }
      CHECK(t.checksum() == sums[static_cast<std::size_t>(s)]);
    }
  }
  CHECK(kills == 24);
  CHECK(whole >= 4);  // whoever is killed last in a run
}

TEST_CASE("a worker that is killed and replaced goes on where it was, and the table is the same") {
  const std::uint64_t expected = reference();
  for (const int servers : {1, 2}) {
    const job j{.servers = servers, .on_death = hd::worker_death::wait};
    std::vector<std::unique_ptr<process>> all;
    for (int k = 0; k < servers; ++k) all.push_back(std::make_unique<process>([&] { serve(j, k); }));
    process first([&] { work(j, 0); });
    std::optional<process> second;
    second.emplace([&] { work(j, 1); });
    for (const int step : {3, 10, 11, 30}) {
      while (j.done[1] < step && !first.ended()) std::this_thread::sleep_for(500us);
      second->send(SIGKILL);
      second.emplace([&] { work(j, 1); });
    }
    CHECK(first.wait() == 0);
    CHECK(second->wait() == 0);
    for (auto& s : all) CHECK(s->wait() == 0);
    std::uint64_t sum = 0;
    std::vector<std::uint64_t> pushes;
    for (int k = 0; k < servers; ++k) {
      table_type part(hd::settings_of_server(how, k, servers));
      part.load(j.paths[static_cast<std::size_t>(k)]);
      sum += part.checksum();
      pushes.push_back(part.sequence_of(1));
    }
    CHECK(pushes.front() == pushes.back());    // none counts twice anywhere
    if (servers == 1) CHECK(sum == expected);  // with several, a step may be computed from rows of two moments
  }
}

TEST_CASE("a worker that is killed for good is reported, or the other ends the epoch, as the servers are told") {
  for (const auto policy : {hd::worker_death::report, hd::worker_death::go_on}) {
    const job j{.servers = 1, .on_death = policy, .silence = 1s};
    process server([&] { serve(j, 0); }), first([&] { work(j, 0); });
    {
      process second([&] { work(j, 1); });
      while (j.done[1] < 5 && !first.ended()) std::this_thread::sleep_for(500us);
    }
    const bool goes_on = policy == hd::worker_death::go_on;
    CHECK(first.wait() == (goes_on ? 0 : 2));
    CHECK(server.wait() == (goes_on ? 0 : 2));
    if (goes_on) CHECK(j.done[0] == steps);
  }
}

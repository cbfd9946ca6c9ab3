// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/comm/zmq.hpp>
#include <heddle/data/integers.hpp>
#include <heddle/data/reader.hpp>
#include <heddle/table/sharded_table.hpp>
#include <heddle/table/table_server.hpp>

#include "processes.hpp"

#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>

#include <sys/mman.h>

namespace hd = heddle;

namespace {
using namespace std::chrono_literals;
using heddle_test::process;
using table_type = hd::sparse_table<std::uint64_t, hd::row<1>, hd::rule::sum, hd::initial::zero>;
constexpr int servers = 2, workers = 3;
constexpr std::uint64_t records = 6000, epochs = 2;
const table_type::settings how{.shard_bits = 4};

struct job {
  hd::worker_death on_death;
  std::uint64_t apart = 0;  // each worker's clock is so much ahead of the one's before
  heddle_test::folder dir{};
  std::vector<std::string> addresses = dir.addresses(servers + workers);
  std::string data = dir.file(5), parts[2] = {dir.file(6), dir.file(7)};
  std::atomic<int>* pushed = static_cast<std::atomic<int>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));  // by each process

  explicit job(hd::worker_death d = hd::worker_death::reassign, std::uint64_t ns = 0) : on_death(d), apart(ns) {
    std::ofstream file(data, std::ios::binary);
    for (std::uint64_t i = 0; i < records; ++i) file.write(reinterpret_cast<const char*>(&i), sizeof i);
    REQUIRE(file.flush());
  }
  ~job() { munmap(pushed, 4096); }
  hd::messenger_options quick() const {
    hd::messenger_options o;
    o.beat = 20ms;
    o.silence = 1s;
    return o;
  }
};

void serve(const job& j, int rank) {
  hd::zmq::messenger m(j.quick(), rank, j.addresses);
  table_type part(hd::settings_of_server(how, rank, servers));
  hd::server_options o;
  o.servers = servers;
  o.workers = workers;
  o.on_death = j.on_death;
  o.linger = 1s;  // of a server that starts again, which knows nothing of a worker that was killed
  o.path = j.parts[rank];
  o.save_every = 40;
  o.join = 3s;
  hd::table_server server(part, m, o);
  server.run();
}

// Adds 1 to the row of each record of its share, and of the shares of workers that have died.
void work(const job& j, int w) {
  hd::zmq::messenger m(j.quick(), servers + w, j.addresses);
  hd::worker_options o;
  o.servers = servers;
  o.retry = 10ms;
  for (int of = w; of >= 0;) {
    const auto now = std::chrono::system_clock::now().time_since_epoch() / 1ns;
    o.object = static_cast<std::uint64_t>(now) + static_cast<std::uint64_t>(w) * j.apart;
    hd::sharded_table<table_type, hd::zmq::messenger> t(how, m, o);
    hd::multi_queue_reader reader{hd::integers<std::uint64_t>{1},
                                  {j.data},
                                  {.readers = 2,
                                   .batch = 20,
                                   .epochs = epochs,
                                   .shuffle = 100,
                                   .deterministic = true,
                                   .rank = static_cast<std::size_t>(of),
                                   .ranks = workers,
                                   .piece = 1600}};
    hd::integers<std::uint64_t>::batch batch;
    std::uint64_t number = 0;
    for (std::uint64_t e = 0; e < epochs; ++e) {
      while (reader.pop(0, batch)) {
        if (number++ < t.pushed_before()) continue;
        std::vector<float> rows(batch.size());
        t.pull(batch.values, rows);
        t.push(batch.values, std::vector<float>(batch.size(), 1.0f));
        ++j.pushed[w];
        std::this_thread::sleep_for(500us);
      }
    }
    t.finish();
    of = t.next_orphan();
    o.stands_for = of;
    o.resumes = true;
  }
}
}  // namespace

TEST_CASE("workers are killed in the middle of a file, and each of its records is pushed once an epoch") {
  for (std::uint64_t run = 0; run < 6; ++run) {
    const job j(hd::worker_death::reassign, run < 3 ? 0 : 3'600'000'000'000);
    std::vector<std::unique_ptr<process>> all;
    for (int r = 0; r < servers; ++r) all.push_back(std::make_unique<process>([&, r] { serve(j, r); }));
    for (int w = 0; w < workers; ++w) all.push_back(std::make_unique<process>([&, w] { work(j, w); }));
    const auto until = [&](int w, int count) {
      for (int i = 0; i < 20'000 && j.pushed[w] < count; ++i) std::this_thread::sleep_for(500us);
      REQUIRE(j.pushed[w] >= count);
    };
    const auto dice = hd::philox(4, run, 0);
    until(2, 1 + static_cast<int>(dice.word[0] % 150));
    all[servers + 2]->send(SIGKILL);
    if (run % 3 == 1) {  // another one, perhaps when it does what the first one left
      until(1, 1 + static_cast<int>(dice.word[1] % 180));
      all[servers + 1]->send(SIGKILL);
    }
    if (run % 3 == 2) {  // a server, too, which starts again
      all[dice.word[2] % 2]->send(SIGKILL);
      const int r = static_cast<int>(dice.word[2] % 2);
      all[static_cast<std::size_t>(r)] = std::make_unique<process>([&, r] { serve(j, r); });
    }
    INFO("run " << run);
    CHECK(all[servers]->wait() == 0);
    if (run % 3 != 1) CHECK(all[servers + 1]->wait() == 0);
    for (int r = 0; r < servers; ++r) CHECK(all[static_cast<std::size_t>(r)]->wait() == 0);
    table_type whole(how);
    whole.load(std::vector<std::string>{j.parts[0], j.parts[1]});
    CHECK(whole.size() == records);
    std::uint64_t right = 0;
    whole.for_each([&](const auto& r) { right += r.key < records && r.weights[0] == static_cast<float>(epochs); });
    CHECK(right == records);
  }
}

TEST_CASE("a killed worker is reported where its data isn't to be given to others, and where nobody is left") {
  for (const auto policy : {hd::worker_death::report, hd::worker_death::reassign}) {
    const job j(policy);
    std::vector<std::unique_ptr<process>> all;
    for (int r = 0; r < servers; ++r) all.push_back(std::make_unique<process>([&, r] { serve(j, r); }));
    for (int w = 0; w < workers; ++w) all.push_back(std::make_unique<process>([&, w] { work(j, w); }));
    for (int i = 0; i < 20'000 && j.pushed[2] < 20; ++i) std::this_thread::sleep_for(500us);
    all[servers + 2]->send(SIGKILL);
    if (policy == hd::worker_death::reassign)
      for (int w = 0; w < 2; ++w) all[static_cast<std::size_t>(servers + w)]->send(SIGKILL);
    for (int r = 0; r < servers; ++r) CHECK(all[static_cast<std::size_t>(r)]->wait() == 2);
  }
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/comm/mpi_messenger.hpp>
#include <heddle/table/sharded_table.hpp>
#include <heddle/table/table_server.hpp>

#include "../comm/messenger_conformance.hpp"
#include "support.hpp"

#include <csignal>

#include <unistd.h>

TEST_CASE("messengers over MPI conform", "[threads]") {
  std::string text;
  heddle_test::conforms_to_messenger({world_size()}, [&](int, const hd::messenger_options& o, auto f) {
    try {
      hd::mpi::messenger m(o, MPI_COMM_WORLD);
      f(m);
    } catch (const std::exception& e) {
      text += e.what();
    }
  });
  CHECK(text == "");
}

TEST_CASE("a messenger over MPI without a thread of its own") {
  hd::messenger_options o;
  o.thread = false;
  CHECK_THROWS_AS(hd::mpi::messenger(o, MPI_COMM_NULL), hd::argument_error);
  hd::mpi::messenger m(o, MPI_COMM_WORLD);
  heddle_test::inbox in(m);
  const int me = m.rank(), p = m.size();
  for (std::uint64_t k = 0; k < 20; ++k) m.send((me + 1) % p, 1, k, heddle_test::numbers(me, 0, k, 20'000 * (k % 7)));
  for (std::uint64_t k = 0; k < 20; ++k) {
    const hd::message got = in.next(hd::message_kind::data, 1, (me - 1 + p) % p);
    CHECK(got.id == k);
    CHECK(heddle_test::same(got.body, heddle_test::numbers((me - 1 + p) % p, 0, k, 20'000 * (k % 7))));
  }
  in.meet(2);
  int level = 0;
  MPI_Query_thread(&level);
  o.thread = true;
  if (level < MPI_THREAD_SERIALIZED)
    CHECK_THROWS_AS(hd::mpi::messenger(o, MPI_COMM_WORLD), hd::mpi::thread_level_error);
}

TEST_CASE("a sharded table over MPI is the table of one process", "[threads]") {
  if (world_size() < 2) return;
  using table = hd::sparse_table<std::uint64_t, hd::row<4>, hd::rule::adagrad>;
  const table::settings how{.seed = 2, .shard_bits = 3};
  const int servers = world_size() / 2, workers = world_size() - servers, me = world_rank();
  const auto keys_of = [](int w, int step) {
    std::vector<std::uint64_t> k(30);
    for (std::size_t i = 0; i < k.size(); ++i)
      k[i] = hd::philox(4, static_cast<std::uint64_t>(10 * w + step), i).word[0] % 100;
    return k;
  };
  constexpr int steps = 5;
  std::uint64_t sum = 0, all = 0;
  std::string text;
  try {
    hd::mpi::messenger m({}, MPI_COMM_WORLD);
    if (me < servers) {
      table part(hd::settings_of_server(how, me, servers));
      hd::server_options o;
      o.servers = servers;
      o.workers = workers;
      o.staleness = 0;
      o.ordered = true;
      hd::table_server(part, m, o).run();
      sum = part.checksum();
    } else {
      hd::worker_options o;
      o.servers = servers;
      hd::sharded_table<table, hd::mpi::messenger> t(how, m, o);
      std::vector<float> rows(120);
      for (int s = 0; s < steps; ++s) {
        t.pull(keys_of(me - servers, s), rows);
        t.push(keys_of(me - servers, s), rows, {.lr = 0.1f});
      }
      t.finish();
    }
  } catch (const std::exception& e) {
    text = e.what();
  }
  CHECK(text == "");
  MPI_Allreduce(&sum, &all, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
  table alone(how);
  for (int s = 0; s < steps; ++s) {
    std::vector<std::vector<float>> rows(static_cast<std::size_t>(workers), std::vector<float>(120));
    for (int w = 0; w < workers; ++w) alone.preview(keys_of(w, s), rows[static_cast<std::size_t>(w)]);
    for (int w = 0; w < workers; ++w) alone.push(keys_of(w, s), rows[static_cast<std::size_t>(w)], {.lr = 0.1f});
  }
  CHECK(all == alone.checksum());
}

namespace {
// The last rank is killed; the others name it and talk on. What is wrong, or nothing.
std::string survive(hd::mpi::messenger& m) {
  heddle_test::findings found;
  heddle_test::inbox in(m);
  const int me = m.rank(), last = m.size() - 1;
  in.meet(1);
  if (me == last) {
    m.send(0, 2, 0, heddle_test::numbers(last, 0, 0, 50'000));
    in.next(hd::message_kind::data, 3, 0);
    raise(SIGKILL);
  }
  if (me == 0) {
    in.next(hd::message_kind::data, 2, last);
    m.send(last, 3, 0, hd::payload(0));
  }
  for (int k = 0; k < 5 && m.life_of(last); ++k) {
    try {
      m.send(last, 4, 0, heddle_test::numbers(0, last, 0, 200'000));  // under way to the dead
    } catch (const hd::peer_error&) {
    }
  }
  const hd::message died = in.next(hd::message_kind::died, 0, last);
  found.expect(has(std::string(died.body.text()), "rank " + std::to_string(last) + " was silent for "), me, "died");
  bool threw = false;
  try {
    m.send(last, 1, 0, hd::payload(0));
  } catch (const hd::peer_error& e) {
    threw = e.peer() == last;
  }
  found.expect(threw, me, "a message to the dead");
  for (int r = 0; r < last; ++r) m.send(r, 5, 7, heddle_test::numbers(me, r, 7, 100'000));
  for (int r = 0; r < last; ++r) {
    const hd::message got = in.next(hd::message_kind::data, 5, r);
    found.expect(heddle_test::same(got.body, heddle_test::numbers(r, me, 7, 100'000)), me, "another message");
  }
  return found.text();
}
}  // namespace

// Under mpirun --enable-recovery only. The survivors can't go back to the test's main function: MPI_Finalize waits for
// the dead. The messenger stays for good, since the process ends without it.
TEST_CASE("a messenger over MPI survives a death", "[.death][threads]") {
  hd::messenger_options o;
  o.beat = 50ms;
  o.silence = 500ms;
  std::string wrong;
  try {
    wrong = survive(*new hd::mpi::messenger(o, MPI_COMM_WORLD));
  } catch (const std::exception& e) {
    wrong = e.what();
  }
  std::fprintf(stderr, "%s\n", wrong.empty() ? "survived" : wrong.c_str());
  std::this_thread::sleep_for(200ms);  // who leaves first must not be missed by the others before they are done
  _exit(0);
}

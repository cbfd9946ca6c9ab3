// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Processes that are killed under async_ps. Under mpirun --enable-recovery only, each case in a job of its own: the
// survivors can't go back to the test's main function, since MPI_Finalize waits for the dead, nor free communicators.
#include <heddle/comm/mpi_messenger.hpp>
#include <heddle/trainer/server.hpp>

#include "../trainer/support.hpp"

#include "support.hpp"

#include <csignal>
#include <cstdio>

namespace {
constexpr std::size_t fifth = 5;

// Rank `dies` is killed in the fifth step; what a survivor's check says is wrong, or nothing, is printed.
template <class Check> void kill_one(int dies, hd::async_ps<hd::mpi::connection> mode, Check check) {
  mode.connection.options = {.silence = 2s, .beat = 50ms};
  std::string wrong = "nothing was thrown";
  try {
    auto& comm = *new hd::mpi::communicator(hd::mpi::world(settings()));
    auto& m = *new quadratic;
    const auto plan = hd::strategy{.mode = mode, .buckets = {.first = 1000}};
    auto& dp = *new hd::data_parallel{plan, comm, m.tensors(), hd::sgd{}};
    try {
      for (std::size_t s = 0; s < 100 && (comm.rank() > 0 || dies == 0); ++s) {
        if (comm.rank() == dies && s == fifth) {
          dp.ready(2);  // a part of a gradient is under way
          raise(SIGKILL);
        }
        train_step(dp, m, first_sample(s, comm.rank(), comm.size(), 2), 2, 0.05f);
      }
      dp.join();
      wrong = check(nullptr, m.w);
    } catch (const hd::comm_error& e) {
      wrong = check(&e, m.w);
    }
  } catch (const std::exception& e) {
    wrong = e.what();
  }
  std::fprintf(stderr, "%s\n", wrong.empty() ? "survived" : wrong.c_str());
  std::this_thread::sleep_for(500ms);  // who leaves first must not be missed by the others before they are done
  _exit(0);
}
std::string names(const hd::comm_error* e, int rank) {
  if (!e) return "the death was not noticed";
  return e->peer() == rank && has(e->what(), "rank " + std::to_string(rank) + " was silent") ? "" : e->what();
}
}  // namespace

TEST_CASE("a rank that is killed under async_ps is reported by all others", "[.death_reported]") {
  kill_one(2, {.servers = 1}, [](const hd::comm_error* e, const auto&) { return names(e, 2); });
}
TEST_CASE("also where all wait for it", "[.death_in_step]") {
  kill_one(2, {.servers = 2, .staleness = 0}, [](const hd::comm_error* e, const auto&) { return names(e, 2); });
}
TEST_CASE("a server that is killed under async_ps is named by all others", "[.server_death]") {
  kill_one(0, {.servers = 1}, [](const hd::comm_error* e, const auto&) { return names(e, 0); });
}
TEST_CASE("ranks that needn't wait for one that is killed go on", "[.death_passed]") {
  const auto mode =
      hd::async_ps<hd::mpi::connection>{.servers = 1, .staleness = 0, .on_death = hd::worker_death::go_on};
  kill_one(2, mode, [](const hd::comm_error* e, const std::vector<float>& w) -> std::string {
    if (e) return e->what();
    std::vector<float> other(w.size());
    const int count = static_cast<int>(w.size()), peer = 1 - world_rank();
    MPI_Sendrecv(w.data(), count, MPI_FLOAT, peer, 0, other.data(), count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    if (w != other) return "replicas differ";
    return quadratic::loss(w) < 0.3 * quadratic::loss(quadratic{}.w) ? "" : "it hasn't learnt";
  });
}

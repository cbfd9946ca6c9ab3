// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Jobs that lose a rank amid a collective and end, each under an mpirun of its own, whose output says who was lost.
#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/mixed_radix.hpp>

#include "support.hpp"

#include <csignal>
#include <cstdio>
#include <vector>

namespace {
// Rank `who` gets the signal while it reduces.
template <class Topology> void lose(int who, const Topology& t, int signal) {
  hd::mpi::communicator comm(MPI_COMM_WORLD, settings(1s));
  std::vector<float> data(100'000, 1.0f);
  const auto add = [loses = comm.rank() == who, signal](float a, float b) {
    if (loses) raise(signal);
    return a + b;
  };
  try {
    hd::all_reduce(comm, t, std::span(data), add);
    FAIL_CHECK("all_reduce ended, though rank " << who << " was to be lost in it");
  } catch (const hd::comm_error& e) {
    std::fprintf(stderr, "not aborted: %s\n", e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}
}  // namespace

TEST_CASE("mpirun names a process that is killed", "[.killed]") { lose(2, hd::ring{}, SIGKILL); }
TEST_CASE("a process that is stopped inside MPI's collective is named by those who then end the job", "[.stopped]") {
  lose(0, hd::native{}, SIGSTOP);  // where MPI reduces, in any of its ways
}

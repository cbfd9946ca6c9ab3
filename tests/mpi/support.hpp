// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/mpi.hpp>

#include "../support/catch.hpp"

#include <optional>
#include <string>

namespace hd = heddle;
using namespace std::chrono_literals;

inline int world_rank() {
  int r = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &r);
  return r;
}
inline int world_size() {
  int n = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  return n;
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Settings of a communicator. The deadline is there to end a test that hangs, however busy the machine is.
inline hd::mpi::options settings(std::chrono::nanoseconds deadline = 30s) {
  hd::mpi::options o;
  o.deadline = deadline;
  o.level = hd::mpi::thread_level::single;  // whatever the tests were started with
  return o;
}

// What f ended with: its comm_error, or nothing.
struct ended {
  std::optional<hd::comm_error> error;
  bool other = false;  // an exception of another type
  std::string text;
};

// Every process calls this, whatever happened to it before, so that a failed check on one rank leaves all in step: f
// runs on a communicator of its own on the first `ranks` processes, and what one throws the others hear.
template <class Function> ended outcome(int ranks, const hd::mpi::options& o, Function&& f) {
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank() < ranks ? 0 : MPI_UNDEFINED, 0, &part);
  ended e;
  if (part == MPI_COMM_NULL) return e;
  {
    hd::mpi::communicator comm(part, o);
    try {
      f(comm);
    } catch (const hd::comm_error& x) {
      e.error = x;
      e.text = x.what();
    } catch (const std::exception& x) {
      e.other = true;
      e.text = x.what();
      comm.fail("rank " + std::to_string(comm.rank()) + " threw: " + x.what());
    }
  }
  MPI_Comm_free(&part);
  return e;
}

// The same where nothing may be thrown.
template <class Function> void on_ranks(int ranks, const hd::mpi::options& o, Function&& f) {
  const ended e = outcome(ranks, o, f);
  CHECK(e.text == "");
}
template <class Function> void on_ranks(Function&& f) { on_ranks(world_size(), settings(), f); }

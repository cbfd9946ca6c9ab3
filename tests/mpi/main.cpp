// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// The main function of the tests under mpirun: every process runs the same test cases. Rank 0 prints; the others do
// when something fails there. All exit with 1 if any has failed. With --level NAME as first arguments MPI is
// initialised here with MPI_THREAD_<NAME>, else by heddle.
#include "session.hpp"

#include <heddle/comm/mpi.hpp>

#include <cstdio>
#include <cstring>

#include <unistd.h>

namespace {
int run(int argc, char** argv) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::FILE* const kept = rank ? std::tmpfile() : nullptr;
  if (kept) dup2(fileno(kept), STDOUT_FILENO);
  const int mine = run_test_cases(argc, argv);
  std::fflush(stdout);
  if (kept && mine) {
    std::rewind(kept);
    std::fprintf(stderr, "rank %d:\n", rank);
    for (int c; (c = std::fgetc(kept)) != EOF;) std::fputc(c, stderr);
  }
  int all = 0;
  MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return all;
}
}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 && std::strcmp(argv[1], "--level") == 0) {
    int wanted = MPI_THREAD_SINGLE, given = 0;
    if (std::strcmp(argv[2], "FUNNELED") == 0) wanted = MPI_THREAD_FUNNELED;
    if (std::strcmp(argv[2], "SERIALIZED") == 0) wanted = MPI_THREAD_SERIALIZED;
    MPI_Init_thread(&argc, &argv, wanted, &given);
    if (given != wanted) {
      std::printf("SKIP: MPI gives thread level %d where %s was asked for\n", given, argv[2]);
      MPI_Finalize();
      return 77;
    }
    argv[2] = argv[0];
    const int status = run(argc - 2, argv + 2);
    MPI_Finalize();
    return status;
  }
  const heddle::mpi::communicator world = heddle::mpi::world();
  return run(argc, argv);
}

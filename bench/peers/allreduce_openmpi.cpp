// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// allreduce_openmpi BYTES CALLS SAMPLES...: times MPI_Allreduce in place, a sum of floats. Rank 0 prints
// "openmpi <bytes> <seconds>" per sample: of the slowest rank, one call of CALLS in a row.
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int a = 1; a + 2 < argc; a += 3) {
    const std::size_t bytes = std::strtoull(argv[a], nullptr, 10), n = bytes / sizeof(float);
    const int calls = std::atoi(argv[a + 1]), samples = std::atoi(argv[a + 2]);
    std::vector<float> data(n, 1.0f);
    const auto reduce = [&] {
      MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    };
    reduce();
    if (data[n - 1] != static_cast<float>(size)) return 3;
    for (int s = 0; s < samples; ++s) {
      MPI_Barrier(MPI_COMM_WORLD);
      const double start = MPI_Wtime();
      for (int c = 0; c < calls; ++c) reduce();
      const double mine = (MPI_Wtime() - start) / calls;
      double slowest = 0.0;
      MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
      if (rank == 0) std::printf("openmpi %zu %.9g\n", bytes, slowest);
    }
  }
  MPI_Finalize();
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// A program that links heddle::cuda, heddle::nccl, heddle::mpi or heddle::zmq, and calls the library behind it.
#include <heddle/core/config.hpp>

#include <cstdio>

#if USES_cuda
#include <cuda_runtime_api.h>
int version_of_dependency(int* version) { return cudaRuntimeGetVersion(version); }
#elif USES_nccl
#include <nccl.h>
int version_of_dependency(int* version) { return ncclGetVersion(version); }
#elif USES_mpi
#include <mpi.h>
int version_of_dependency(int* version) { return MPI_Get_version(version, version); }
#elif USES_zmq
#include <zmq.h>
int version_of_dependency(int* version) {
  int minor = 0, patch = 0;
  zmq_version(version, &minor, &patch);
  return 0;
}
#endif

int main() {
  int version = 0;
  if (version_of_dependency(&version) != 0 || version == 0) return 1;
  std::printf("heddle %d.%d.%d works\n", HEDDLE_VERSION_MAJOR, HEDDLE_VERSION_MINOR, HEDDLE_VERSION_PATCH);
  return 0;
}

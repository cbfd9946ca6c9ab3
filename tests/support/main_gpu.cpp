// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// The main function of the test executables that nvcc builds. With --need-device as first argument it exits with 77
// (skipped) on a machine without a usable CUDA device.
#include "session.hpp"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--need-device") == 0) {
    int devices = 0;
    const cudaError_t status = cudaGetDeviceCount(&devices);
    if (status != cudaSuccess || devices == 0) {
      std::printf("SKIP: no CUDA device (%s)\n", cudaGetErrorString(status));
      return 77;
    }
    argv[1] = argv[0];
    --argc;
    ++argv;
  }
  return run_test_cases(argc, argv);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs the blocks of a grid, one after the other, on the calling OS thread. One grid runs at a time.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace emulated {

struct fault {
  cudaError_t code;
  std::string text;
};

struct grid {
  std::string name;
  dim3 blocks{1}, threads{1};
  std::size_t dynamic_shared = 0;
  std::size_t shared_limit = 48 * 1024;  // of static and dynamic shared memory together
  std::uint64_t seed = 0;
  unsigned stream = 0;  // threads of eight streams that were made in a row share no ThreadSanitizer context
  std::uint64_t patience = 0;  // steps without a thread that ends, until the grid is given up
};

// Calls `body` once per device thread. Returns what went wrong, if anything; the rest of the grid is given up then.
std::optional<fault> run_grid(const grid& g, const std::function<void()>& body);

// "kernel NAME, block (0, 0, 0), thread (0, 0, 0)", or "" outside of a kernel.
std::string where_now();

}  // namespace emulated

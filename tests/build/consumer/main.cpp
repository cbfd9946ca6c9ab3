// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Somebody else's program. The tests of the build compile, link and run it in every way a user gets at the headers.
#include <heddle/heddle.hpp>

#include <atomic>
#include <cstdio>
#include <span>
#include <vector>

namespace hd = heddle;

bool trains();  // in the other translation unit

int main() {
  std::atomic<int> right{0};
  hd::threads::run(2, [&](auto& comm) {
    std::vector<float> v(5, static_cast<float>(comm.rank() + 1));
    hd::all_reduce(comm, hd::ring{}, std::span<float>(v), hd::sum{});
    if (v == std::vector<float>(5, 3.0f)) ++right;
  });
  if (right != 2 || !trains()) return 1;
  std::printf("heddle %d.%d.%d works\n", HEDDLE_VERSION_MAJOR, HEDDLE_VERSION_MINOR, HEDDLE_VERSION_PATCH);
  return 0;
}

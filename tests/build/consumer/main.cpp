// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Somebody else's program. The tests of the build compile, link and run it in every way a user gets at the headers.
#include <heddle/core/config.hpp>
#include <heddle/core/float16.hpp>
#include <heddle/core/slice.hpp>

#include <cstdio>

int second_unit(int x);

int main() {
  float values[3] = {1.0f, 2.0f, 3.5f};
  heddle::slice<float> view{values, 3};
  float total = 0;
  for (float v : view) total += static_cast<float>(heddle::float16(v));
  if (total != 6.5f || second_unit(3) != 3) return 1;
  std::printf("heddle %d.%d.%d works\n", HEDDLE_VERSION_MAJOR, HEDDLE_VERSION_MINOR, HEDDLE_VERSION_PATCH);
  return 0;
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// A second translation unit with the same headers: linking both shows every definition that is not inline.
#include <heddle/core/slice.hpp>

#include <cstddef>

int second_unit(int x) {
  int values[1] = {x};
  return heddle::slice<int>{values, 1}[std::size_t{0}];
}

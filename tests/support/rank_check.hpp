// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

// What a rank checks while others run: Catch2's own checks may be used by one thread at a time only. It throws, which
// threads::run passes on, so the test case fails with the text.
#define RANK_CHECK(...)                                                                                       \
  do {                                                                                                        \
    if (!(__VA_ARGS__)) throw std::runtime_error(__FILE__ ":" + std::to_string(__LINE__) + ": " #__VA_ARGS__); \
  } while (false)
#define RANK_CHECK_FALSE(...) RANK_CHECK(!(__VA_ARGS__))

// Whether the statement throws an exception of this type.
#define RANK_CHECK_THROWS_AS(statement, type)                       \
  do {                                                              \
    bool thrown_ = false;                                           \
    try {                                                           \
      statement;                                                    \
    } catch (const type&) {                                         \
      thrown_ = true;                                               \
    }                                                               \
    RANK_CHECK(thrown_ && "expected from " #statement);             \
  } while (false)

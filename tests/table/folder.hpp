// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include "catch.hpp"

#include <cstdlib>
#include <string>

#include <unistd.h>

// A directory that goes away with the object.
struct folder {
  char path[32] = "/tmp/heddle_XXXXXX";
  folder() { REQUIRE(mkdtemp(path)); }
  ~folder() { std::system(("rm -rf " + std::string(path)).c_str()); }
  std::string operator/(const std::string& name) const { return std::string(path) + "/" + name; }
};

// What a call says that goes wrong.
template <class Function> std::string message_of(Function f) {
  try {
    f();
  } catch (const heddle::error& e) {
    return e.what();
  }
  return "nothing was thrown";
}
inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Programs that run in a process of their own, since what a sanitizer finds ends the process. They are started anew,
// not forked: after a fork ThreadSanitizer no longer sees what orders what.

#include "../support/catch.hpp"

#include <emulated/control.h>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

namespace emulated_test {

/// A function that test cases start by its name, with one number.
using function = void (*)(int);

inline std::map<std::string, function>& programs() {
  static std::map<std::string, function> all;
  return all;
}

/// Gives a program its name.
struct program {
  program(const char* name, function f) { programs()[name] = f; }
};

/// Runs `--program NAME NUMBER`, if the arguments say so; otherwise returns -1.
inline int run_program(int argc, char** argv) {
  if (argc != 4 || std::string(argv[1]) != "--program") return -1;
  programs().at(argv[2])(std::atoi(argv[3]));
  for (const std::string& f : emulated::faults()) std::fprintf(stderr, "%s\n", f.c_str());
  return 0;
}

/// How a program ended, and what it said on stderr.
struct ending {
  bool well = false;
  std::string text;
  bool says(const char* words) const { return text.find(words) != std::string::npos; }
};

inline ending run(const char* name, int number = 0) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 2);
  posix_spawn_file_actions_addclose(&actions, ends[0]);
  const std::string digits = std::to_string(number);
  const char* const arguments[] = {"program", "--program", name, digits.c_str(), nullptr};
  pid_t child = 0;
  REQUIRE(posix_spawn(&child, "/proc/self/exe", &actions, nullptr, const_cast<char**>(arguments), environ) == 0);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  ending e;
  char part[4096];
  for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) e.text.append(part, static_cast<std::size_t>(n));
  close(ends[0]);
  int how = 0;
  waitpid(child, &how, 0);
  e.well = WIFEXITED(how) && WEXITSTATUS(how) == 0;
  return e;
}

}  // namespace emulated_test

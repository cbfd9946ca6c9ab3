// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// The main function of tests on the emulated device. `--seeds FIRST..LAST` runs them once per seed, each in a process
// of its own; what a test case leaves behind, or what went wrong on the device without its knowing, is a failure.
#if __has_include(<catch2/catch_test_case_info.hpp>)
#include <catch2/catch_test_case_info.hpp>
#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>
using event_listener = Catch::EventListenerBase;
#else
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include <catch2/catch.hpp>
using event_listener = Catch::TestEventListenerBase;
#endif

#include "programs.hpp"
#include "session.hpp"

#include <emulated/control.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

// ThreadSanitizer waits a second at the end of each process for other threads; there are none.
extern "C" const char* __tsan_default_options() { return "atexit_sleep_ms=0"; }

namespace {

std::uint64_t seed = 0;
int left_behind = 0;
std::string running;  // the test case

struct fresh_device : event_listener {
  using event_listener::event_listener;

  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    event_listener::testCaseStarting(info);
    running = info.name;
    emulated::reset({.seed = seed, .devices = 8});
  }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    event_listener::testCaseEnded(stats);
    const auto tell = [&](const char* what, const std::string& line) {
      ++left_behind;
      std::fprintf(stderr, "FAILED: %s: %s: %s\n", running.c_str(), what, line.c_str());
    };
    for (const std::string& line : emulated::leaks()) tell("left behind", line);
    for (const std::string& line : emulated::faults()) tell("went wrong on the device", line);
  }
};

CATCH_REGISTER_LISTENER(fresh_device)

int run(int argc, char** argv) {
  const int status = run_test_cases(argc, argv);
  return left_behind == 0 ? status : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (const int code = emulated_test::run_program(argc, argv); code >= 0) return code;
  if (argc < 3 || std::strcmp(argv[1], "--seeds") != 0) return run(argc, argv);
  char* end = nullptr;
  const std::uint64_t first = std::strtoull(argv[2], &end, 10);
  std::uint64_t last = first;
  if (std::strncmp(end, "..", 2) == 0) last = std::strtoull(end + 2, &end, 10);
  if (*end != '\0' || last < first) {
    std::fprintf(stderr, "--seeds takes a number, or FIRST..LAST, not '%s'\n", argv[2]);
    return 2;
  }
  argv[2] = argv[0];
  int status = 0;
  for (seed = first; seed <= last; ++seed) {
    std::printf("seed %llu: ", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) std::exit(run(argc - 2, argv + 2));
    int how = 0;
    if (child < 0 || waitpid(child, &how, 0) < 0) std::perror("fork");
    if (child < 0 || !WIFEXITED(how) || WEXITSTATUS(how) != 0) {
      std::fprintf(stderr, "FAILED under seed %llu\n", static_cast<unsigned long long>(seed));
      status = 1;
    }
  }
  return status;
}

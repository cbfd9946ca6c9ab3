// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "catch.hpp"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace heddle_test {

/// A folder for sockets; goes away with what is in it.
struct folder {
  char path[32] = "/tmp/heddle_XXXXXX";
  folder() { REQUIRE(mkdtemp(path)); }
  ~folder() { std::filesystem::remove_all(path); }
  std::string file(int i) const { return std::string(path) + "/" + std::to_string(i); }
  std::vector<std::string> addresses(int ranks) const {
    std::vector<std::string> a;
    for (int i = 0; i < ranks; ++i) a.push_back("ipc://" + file(i));
    return a;
  }
};

/// A process that runs f and ends; it is killed with this one, and when this goes away.
class process {
 public:
  template <class Function> explicit process(Function f) {
    const pid_t parent = getpid();
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(3);
    try {
      f();
      _exit(0);
    } catch (...) {
      _exit(2);
    }
  }
  process(const process&) = delete;
  process& operator=(const process&) = delete;
  ~process() { send(SIGKILL); }
  /// Whether it has ended by itself; `wait` then says how.
  bool ended() {
    siginfo_t info{};
    return pid_ <= 0 ||
           (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0);
  }
  void send(int signal) {
    if (pid_ <= 0) return;
    kill(pid_, signal);
    if (signal != SIGKILL) return;
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  int wait() {
    int status = -1;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  }

 private:
  pid_t pid_ = -1;
};

}  // namespace heddle_test

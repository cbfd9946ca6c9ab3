// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace detail {

// Work on a thread of its own, one piece after the other; on the caller's where no thread can be had.
class background {
 public:
  background() = default;
  background(const background&) = delete;
  background& operator=(const background&) = delete;
  ~background() { wait(); }
  // Whether something was begun and isn't finished by `finish`.
  bool busy() const noexcept { return busy_; }
  // Whether finish() will not wait.
  bool ready() const noexcept { return ready_; }
  template <class Function> void start(Function f) {
    ready_ = false;
    error_ = nullptr;
    const auto work = [this, f = std::move(f)] {
      try {
        f();
      } catch (...) {
        error_ = std::current_exception();
      }
      ready_ = true;
    };
    try {
      thread_ = std::thread(work);
    } catch (const std::system_error&) {
      work();
    }
    busy_ = true;
  }
  // Waits until it is done.
  void wait() {
    if (thread_.joinable()) thread_.join();
  }
  // The same. Throws what it has thrown.
  void finish() {
    wait();
    busy_ = false;
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  std::thread thread_;
  bool busy_ = false;
  std::atomic<bool> ready_{false};
  std::exception_ptr error_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

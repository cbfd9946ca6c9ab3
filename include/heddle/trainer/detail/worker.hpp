// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace detail {

// The communication thread of a rank: runs numbered jobs in the order they were given. After a job has thrown, later
// ones are dropped and wait() throws the same exception. Without a thread (one rank) a job runs where it is pushed.
template <class Run> class worker {
 public:
  worker(Run run, bool threaded) : run_(std::move(run)) {
    if (threaded) thread_ = std::thread([this] { loop(); });
  }
  worker(const worker&) = delete;
  worker& operator=(const worker&) = delete;
  ~worker() {
    if (!thread_.joinable()) return;
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  void push(std::size_t job) {
    if (!thread_.joinable()) {
      timed(job);
      return;
    }
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back(job);
      ++pending_;
    }
    wake_.notify_all();
  }

  // Returns when all jobs are done; throws what the first failed job threw.
  void wait() {
    if (!thread_.joinable()) return;
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return pending_ == 0; });
    exposed_ += std::chrono::steady_clock::now() - start;
    if (error_) std::rethrow_exception(error_);
  }

  // Seconds in jobs, and of these the seconds that wait() waited.
  double busy_seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::duration(busy_.load())).count();
  }
  double exposed_seconds() const {
    return thread_.joinable() ? std::chrono::duration<double>(exposed_).count() : busy_seconds();
  }

 private:
  void timed(std::size_t job) {
    const auto start = std::chrono::steady_clock::now();
    run_(job);
    busy_ += (std::chrono::steady_clock::now() - start).count();
  }

  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const std::size_t job = jobs_.front();
      jobs_.pop_front();
      if (!error_) {
        lock.unlock();
        std::exception_ptr thrown;
        try {
          timed(job);
        } catch (...) {
          thrown = std::current_exception();
        }
        lock.lock();
        if (thrown) error_ = thrown;
      }
      if (--pending_ == 0) idle_.notify_all();
    }
  }

  Run run_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<std::size_t> jobs_;
  std::size_t pending_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
  std::atomic<std::chrono::steady_clock::rep> busy_{0};  // read while jobs run
  std::chrono::steady_clock::duration exposed_{};
  std::thread thread_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

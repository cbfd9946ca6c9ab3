// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/slice.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// The communication threads of a rank, its lanes: they run numbered jobs. Job 0 runs alone, on lane 0; the others take
// the lanes in turn, job 1 on lane 0, and a lane keeps the order in which they were given. So the order of what shares
// a lane is the same on all ranks. After a job has thrown, later ones are dropped and wait() throws the same exception.
// Without threads (one rank, or only the program's own may communicate) a job runs where it is pushed.
template <class Run> class worker {
 public:
  worker(Run run, std::size_t lanes, bool threads) : run_(std::move(run)), jobs_(lanes) {
    for (std::size_t lane = 0; threads && lane < lanes; ++lane) threads_.emplace_back([this, lane] { loop(lane); });
  }
  worker(const worker&) = delete;
  worker& operator=(const worker&) = delete;
  ~worker() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  void push(std::size_t job) {
    const std::size_t lane = job == 0 ? 0 : (job - 1) % jobs_.size();
    if (threads_.empty()) {
      if (error_) return;
      try {
        timed(job, lane);
      } catch (...) {
        error_ = std::current_exception();
      }
      return;
    }
    {
      std::lock_guard lock(mutex_);
      jobs_[lane].push_back(job);
      if (job == 0) opening_ = true;
      ++pending_;
    }
    wake_.notify_all();
  }

  // Returns when all jobs are done; throws what the first failed job threw.
  void wait() {
    if (threads_.empty()) {
      if (error_) std::rethrow_exception(error_);
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return pending_ == 0; });
    exposed_ += std::chrono::steady_clock::now() - start;
    if (error_) std::rethrow_exception(error_);
  }

  // Seconds in jobs, summed over lanes, and the seconds that wait() waited.
  double busy_seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::duration(busy_.load())).count();
  }
  double exposed_seconds() const {
    return threads_.empty() ? busy_seconds() : std::chrono::duration<double>(exposed_).count();
  }

 private:
  void timed(std::size_t job, std::size_t lane) {
    const auto start = std::chrono::steady_clock::now();
    run_(job, lane);
    busy_ += (std::chrono::steady_clock::now() - start).count();
  }

  void loop(std::size_t lane) {
    auto& jobs = jobs_[lane];
    const auto may_begin = [&] { return !jobs.empty() && (jobs.front() == 0 || !opening_); };
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return may_begin() || (stop_ && jobs.empty()); });
      if (jobs.empty()) return;
      const std::size_t job = jobs.front();
      jobs.pop_front();
      if (!error_) {
        lock.unlock();
        std::exception_ptr thrown;
        try {
          timed(job, lane);
        } catch (...) {
          thrown = std::current_exception();
        }
        lock.lock();
        if (thrown && !error_) error_ = thrown;
      }
      if (job == 0) {
        opening_ = false;
        wake_.notify_all();
      }
      if (--pending_ == 0) idle_.notify_all();
    }
  }

  Run run_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::deque<typename dependent<std::size_t, Run>::type>> jobs_;  // of each lane
  std::size_t pending_ = 0;
  bool opening_ = false;  // job 0 is not over
  bool stop_ = false;
  std::exception_ptr error_;
  std::atomic<std::chrono::steady_clock::rep> busy_{0};  // read while jobs run
  std::chrono::steady_clock::duration exposed_{};
  std::vector<std::thread> threads_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Queues that are threads: what is enqueued runs there, in order, while the program goes on.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace heddle_test {

/// Does what it is given in order, on a thread of its own.
class lane {
 public:
  lane() : thread_([this] { run(); }) {}
  lane(const lane&) = delete;
  ~lane() {
    push({});
    thread_.join();
  }
  void push(std::function<void()> job) {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !jobs_.empty(); });
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      if (!job) return;
      job();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::thread thread_;
};

/// Queue and event of lanes. A queue without a lane is the caller's thread.
struct lane_order {
  class event;
  struct queue {
    lane* on = nullptr;
    void synchronize() const;
    void wait(const event& e) const;
    friend bool operator==(queue, queue) = default;
  };
  class event {
   public:
    void record(queue q) {
      const auto reached = std::make_shared<std::promise<void>>();
      done_ = reached->get_future().share();
      if (q.on)
        q.on->push([reached] { reached->set_value(); });
      else
        reached->set_value();
    }
    bool ready() const {
      return !done_.valid() || done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    }
    void synchronize() const {
      if (done_.valid()) done_.wait();
    }

   private:
    std::shared_future<void> done_;
  };
};
inline void lane_order::queue::synchronize() const {
  event e;
  e.record(*this);
  e.synchronize();
}
inline void lane_order::queue::wait(const event& e) const {
  if (on)
    on->push([e] { e.synchronize(); });
  else
    e.synchronize();
}

}  // namespace heddle_test

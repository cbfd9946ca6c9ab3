// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: messengers of threads, MPI and ZeroMQ, messages and bytes a second, against loops of the libraries' own calls
// driver: script

// bench/messenger.sh runs this, and then bench/peers/messenger_processes.cpp. Threads send to one, in turn with a deque
// under a mutex that holds pointers, the least that any queue does.
#include <heddle/comm/threads_messenger.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace hd = heddle;

namespace {
class pointer_queue {
 public:
  void put(hd::payload&& p) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(p));
    }
    filled_.notify_one();
  }
  hd::payload get() {
    std::unique_lock lock(mutex_);
    filled_.wait(lock, [this] { return !queue_.empty(); });
    hd::payload p = std::move(queue_.front());
    queue_.pop_front();
    return p;
  }

 private:
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<hd::payload> queue_;
};

using clock_type = std::chrono::steady_clock;

// Seconds in which one thread receives `count` messages from each of `senders`.
template <class Send, class Receive>
double seconds(int senders, std::size_t bytes, std::size_t count, Send send, Receive receive) {
  const auto start = clock_type::now();
  std::vector<std::thread> threads;
  for (int s = 1; s <= senders; ++s) {
    threads.emplace_back([&, s] {
      for (std::size_t i = 0; i < count; ++i) {
        hd::payload p(bytes);
        std::memset(p.data(), 'x', bytes);
        send(s, std::move(p));
      }
    });
  }
  for (std::size_t i = 0; i < count * static_cast<std::size_t>(senders); ++i) receive();
  const double t = std::chrono::duration<double>(clock_type::now() - start).count();
  for (auto& t2 : threads) t2.join();
  return t;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}
}  // namespace

int main(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 7;
  for (const int senders : {1, 4}) {
    hd::threads::meeting_place place(senders + 1);
    std::vector<std::unique_ptr<hd::threads::messenger>> m;
    for (int r = 0; r <= senders; ++r)
      m.push_back(std::make_unique<hd::threads::messenger>(hd::messenger_options{}, place, r));
    pointer_queue queue;
    for (const std::size_t bytes : {64, 4096, 1 << 20}) {
      const std::size_t count = (bytes == 64     ? 200'000
                                 : bytes == 4096 ? 50'000
                                                 : 500) /
                                static_cast<std::size_t>(senders);
      std::vector<double> ours, floor;
      for (int i = 0; i < repetitions; ++i) {
        ours.push_back(seconds(
            senders, bytes, count,
            [&](int s, hd::payload&& p) { m[static_cast<std::size_t>(s)]->send(0, 1, 0, std::move(p)); },
            [&] {
              while (m[0]->receive(std::chrono::seconds(60))->kind != hd::message_kind::data) {
              }
            }));
        floor.push_back(seconds(
            senders, bytes, count, [&](int, hd::payload&& p) { queue.put(std::move(p)); }, [&] { queue.get(); }));
      }
      const double messages = static_cast<double>(count) * senders;
      const double scale = bytes > 4096 ? static_cast<double>(bytes) / 1e6 : 1.0;
      std::printf("RATIO threads.%d-1.%s.queue %.6g %.6g %s %.3f\n", senders,
                  bytes == 64     ? "64"
                  : bytes == 4096 ? "4K"
                                  : "1M",
                  messages * scale / median(ours), messages * scale / median(floor),
                  bytes > 4096 ? "MB/s" : "messages/s", median(floor) / median(ours));
      std::fflush(stdout);
    }
  }
  return 0;
}

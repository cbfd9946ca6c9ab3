// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief What tests of sharded tables share: messengers and workers that lose no time, losses, servers that are
/// killed, and what workers push.

#include <heddle/comm/lossy.hpp>
#include <heddle/comm/threads_messenger.hpp>
#include <heddle/table/sharded_table.hpp>
#include <heddle/table/table_server.hpp>

#include "folder.hpp"
#include "rank_check.hpp"

#include <atomic>
#include <thread>

using namespace std::chrono_literals;
using keys_type = std::vector<std::uint64_t>;
using floats = std::vector<float>;

inline heddle::messenger_options quick() {
  heddle::messenger_options o;
  o.beat = 20ms;
  o.silence = 600ms;
  o.patience = 5s;
  return o;
}
inline heddle::worker_options worker(int servers) {
  heddle::worker_options o;
  o.servers = servers;
  o.retry = 10ms;
  o.patience = 20s;
  return o;
}
inline const heddle::losses none{};
inline const heddle::losses bad{.drop = 0.15, .duplicate = 0.15, .reorder = 0.15, .delay = 0.1, .longest = 5ms};

// What worker w names in a step: some of the numbers below another.
inline keys_type keys_of(int w, int step, std::size_t n = 40, std::uint64_t below = 300) {
  keys_type k(n);
  for (std::size_t i = 0; i < n; ++i)
    k[i] = heddle::philox(1, static_cast<std::uint64_t>(w * 1000 + step), i).word[0] % below;
  return k;
}
// Numbers from -0.5 to 0.5 that are its own.
inline floats draws_of(int w, int step, std::size_t n) {
  floats g(n);
  for (std::size_t i = 0; i < n; ++i)
    g[i] = heddle::random_uniform(2, static_cast<std::uint64_t>(w * 1000 + step), i) - 0.5f;
  return g;
}

// Servers, each of which may be killed, whereupon it starts again from its save; and what their tables are in the end.
template <class Table> class servers {
 public:
  // `how`: of the whole table. `o.path`: the beginning of their saves' names.
  servers(const typename Table::settings& how, heddle::threads::meeting_place place, heddle::server_options o,
          heddle::losses losses = {})
      : how_(how),
        place_(std::move(place)),
        options_(std::move(o)),
        losses_(losses),
        lives_(static_cast<std::size_t>(options_.servers)),
        applied_(static_cast<std::size_t>(options_.workers)) {
    for (int r = 0; r < options_.servers; ++r) threads_.emplace_back([this, r] { live(r); });
  }
  ~servers() { stop(); }
  // Ends them; the sum of their tables.
  std::uint64_t stop() {
    stops_ = true;
    for (auto& t : threads_) t.join();
    threads_.clear();
    for (const std::string& e : errors_) UNSCOPED_INFO(e);
    CHECK(errors_.empty());
    return checksum_;
  }
  void kill(int r) {
    const int before = lives_[static_cast<std::size_t>(r)];
    dies_ = r;
    while (lives_[static_cast<std::size_t>(r)] == before) std::this_thread::sleep_for(1ms);
  }
  // Pushes of a worker that have taken effect on the first server.
  std::uint64_t applied(int w) const { return applied_[static_cast<std::size_t>(w)]; }

 private:
  void live(int r) {
    try {
      while (!stops_) {
        heddle::threads::messenger inner(quick(), place_, r);
        heddle::losses mine = losses_;
        mine.seed += static_cast<std::uint64_t>(r);
        heddle::lossy<heddle::threads::messenger> m(inner, mine);
        Table part(heddle::settings_of_server(how_, r, options_.servers));
        heddle::server_options o = options_;
        if (!o.path.empty()) o.path += std::to_string(r);
        heddle::table_server s(part, m, o);
        ++lives_[static_cast<std::size_t>(r)];
        while (!stops_ && dies_ != r) {
          s.serve(1ms);
          for (int w = 0; r == 0 && w < o.workers; ++w) applied_[static_cast<std::size_t>(w)] = s.applied(w);
        }
        if (stops_) {
          const std::lock_guard lock(mutex_);
          checksum_ += part.checksum();
        } else {
          place_.kill(r);  // cut off, whatever it was about to say; its table is gone
          dies_ = -1;
        }
      }
    } catch (const std::exception& e) {
      const std::lock_guard lock(mutex_);
      errors_.push_back(std::to_string(r) + ": " + e.what());
    }
  }
  typename Table::settings how_;
  heddle::threads::meeting_place place_;
  heddle::server_options options_;
  heddle::losses losses_;
  std::vector<std::atomic<int>> lives_;
  std::vector<std::atomic<std::uint64_t>> applied_;
  std::atomic<int> dies_{-1};
  std::atomic<bool> stops_{false};
  std::mutex mutex_;
  std::uint64_t checksum_ = 0;
  std::vector<std::string> errors_;
  std::vector<std::thread> threads_;
};

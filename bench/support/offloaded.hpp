// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// How much of its copies a chain hides that offloads: layers sleep, as on an accelerator, and copies take their time on
// a link, a thread of its own.
#pragma once

#include <heddle/recompute/chain.hpp>
#include <heddle/recompute/none.hpp>
#include <heddle/recompute/offload.hpp>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "../../tests/support/lane.hpp"

namespace bench {

/// The host, with copies over a link. A queue without a lane is the caller's thread.
struct linked_host : heddle_test::lane_order {
  static constexpr double bytes_per_second = 2.0 * (1 << 20) / 1.5e-3;

  static void copy(const std::byte* from, std::byte* to, std::size_t bytes, queue q) {
    const auto move = [=] {
      const std::chrono::duration<double> time(static_cast<double>(bytes) / bytes_per_second);
      const auto end = std::chrono::steady_clock::now() + time;
      std::memcpy(to, from, bytes);
      std::this_thread::sleep_until(end);
    };
    if (q.on)
      q.on->push(move);
    else
      move();
  }
};

struct linked_memory {
  heddle::host_resource upstream{};
  void* allocate(linked_host::queue, std::size_t bytes, std::size_t a) { return upstream.allocate_sync(bytes, a); }
  void deallocate(linked_host::queue, void* p, std::size_t bytes, std::size_t a) noexcept {
    upstream.deallocate_sync(p, bytes, a);
  }
};

/// Its unit of time is the millisecond.
struct sleeping_layer {
  static constexpr double forward_ms = 2, backward_ms = 4;
  std::size_t output_bytes() const { return 64; }
  std::size_t saved_bytes() const { return std::size_t{2} << 20; }
  double forward_time() const { return forward_ms; }
  double backward_time() const { return backward_ms; }
  static void sleep(double ms) { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms)); }
  void forward(const void*, void*, void*, heddle::recompute::pass) const { sleep(forward_ms); }
  void backward(const void*, const void*, const void*, void*) const { sleep(backward_ms); }
};

/// Seconds of a step: without copies, with each one waited for, and with all on their lane.
struct offload_times {
  std::vector<double> none, serial, overlapped;
};

inline offload_times offloaded_steps(std::size_t layers, std::size_t rounds) {
  namespace rc = heddle::recompute;
  std::vector<sleeping_layer> all(layers);
  const std::vector<rc::layer> list(all.begin(), all.end());
  const auto timed = [&](auto& chain) {
    const float in[16] = {}, top[16] = {};
    const auto start = std::chrono::steady_clock::now();
    chain.forward(in);
    chain.backward(top, nullptr);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  using store = rc::offload_store<linked_host>;
  heddle_test::lane link;
  const rc::offload away{.bytes_per_time = linked_host::bytes_per_second / 1000};
  rc::chain none{rc::none{}, linked_memory{}, list, rc::no_store<linked_host::queue>{}};
  rc::chain serial{away, linked_memory{}, list, store{}};
  rc::chain overlapped{away, linked_memory{}, list, store{heddle::host_resource{}, {}, {&link}}};
  offload_times out;
  timed(overlapped);  // the store takes its memory
  timed(serial);
  for (std::size_t k = 0; k < rounds; ++k) {
    out.none.push_back(timed(none));
    out.serial.push_back(timed(serial));
    out.overlapped.push_back(timed(overlapped));
  }
  return out;
}

}  // namespace bench

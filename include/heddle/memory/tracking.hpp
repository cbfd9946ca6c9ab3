// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/memory/detail/adaptor.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief One point of a memory timeline: what was in use after an allocation or a deallocation.
struct memory_sample {
  std::size_t event = 0;         ///< Index of the event, from 0, since construction or `clear_samples`.
  std::int64_t nanoseconds = 0;  ///< Time since the adaptor was constructed, by the steady clock.
  std::size_t bytes = 0;         ///< Bytes in use after the event.

  friend constexpr bool operator==(const memory_sample&, const memory_sample&) = default;
};

/// @brief What `tracking` records.
struct tracking_options {
  bool log = false;  ///< Keep a `memory_sample` per event (24 bytes each), to draw a timeline.

  friend constexpr bool operator==(const tracking_options&, const tracking_options&) = default;
};

namespace detail {
class tracking_policy {
 public:
  explicit tracking_policy(tracking_options o) : options(o) {}

  template <class Take> void* allocate(std::size_t n, std::size_t alignment, Take&& take) {
    if (options.log) make_room();
    void* p = nullptr;
    try {
      p = take(n, alignment);
    } catch (...) {
      std::lock_guard lock(mutex);
      coming_ -= options.log;
      throw;
    }
    std::lock_guard lock(mutex);
    coming_ -= options.log;
    bytes += n;
    if (bytes > peak) peak = bytes;
    ++live;
    ++allocations;
    sample();
    return p;
  }

  template <class Give> void deallocate(void* p, std::size_t n, std::size_t alignment, Give&& give) noexcept {
    {
      std::lock_guard lock(mutex);
      bytes -= n;
      --live;
      sample();
    }
    give(p, n, alignment);
  }

  std::mutex mutex;
  const tracking_options options;
  std::size_t bytes = 0, peak = 0, live = 0, allocations = 0;
  std::vector<memory_sample> log;

 private:
  // For one more event, and for the deallocation of every live block: giving memory back must not fail.
  void make_room() {
    std::lock_guard lock(mutex);
    const std::size_t room = log.size() + 2 * (live + coming_ + 1);
    if (log.capacity() < room) log.reserve(2 * room);
    ++coming_;
  }

  void sample() noexcept {
    if (!options.log) return;
    const auto since = std::chrono::steady_clock::now() - start_;
    log.push_back({log.size(), std::chrono::duration_cast<std::chrono::nanoseconds>(since).count(), bytes});
  }

  std::size_t coming_ = 0;  // allocations that the upstream works on
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};
}  // namespace detail

/// @brief Counts what passes through: bytes in use, their peak, live allocations, and a timeline on request.
///
/// Bytes are those asked for; rounding inside the upstream is not seen. Zero bytes and failed allocations are not
/// counted. The counters never exceed what is really allocated: a block counts after the upstream gave it and until
/// just before the upstream takes it back.
///
/// @code{.cpp}
/// heddle::tracking memory{heddle::host_resource{}, {.log = true}};
/// heddle::buffer<float, decltype(memory)> a{memory, 1000};   // shares memory's counters
/// // memory.bytes() == 4000, memory.live() == 1
/// @endcode
///
/// State:   counters shared by all copies, 24 bytes per event with `.log`.
/// Order:   any upstream; wrap a pool to see what users ask for, let a pool wrap it to see what the pool holds.
/// Sync:    nothing but what the upstream does. Thread-safe if the upstream is.
/// Throws:  what the upstream throws; `std::bad_alloc` when the log can't grow.
template <class Upstream = host_resource> class tracking : public detail::adaptor<Upstream, detail::tracking_policy> {
  using base = detail::adaptor<Upstream, detail::tracking_policy>;

 public:
  /// Counts from zero over a copy of `upstream`.
  explicit tracking(Upstream upstream = Upstream{}, tracking_options options = {})
      : base(std::move(upstream), options) {}

  /// Bytes in use.
  std::size_t bytes() const {
    std::lock_guard lock(this->policy().mutex);
    return this->policy().bytes;
  }
  /// The most bytes that were in use at once, since construction or `reset_peak`.
  std::size_t peak_bytes() const {
    std::lock_guard lock(this->policy().mutex);
    return this->policy().peak;
  }
  /// Number of allocations not yet given back.
  std::size_t live() const {
    std::lock_guard lock(this->policy().mutex);
    return this->policy().live;
  }
  /// Number of allocations ever made.
  std::size_t allocations() const {
    std::lock_guard lock(this->policy().mutex);
    return this->policy().allocations;
  }
  /// Starts a new peak at the bytes in use now.
  void reset_peak() {
    std::lock_guard lock(this->policy().mutex);
    this->policy().peak = this->policy().bytes;
  }

  /// The timeline so far, in order; empty without `.log`.
  std::vector<memory_sample> samples() const {
    std::lock_guard lock(this->policy().mutex);
    return this->policy().log;
  }
  /// Empties the timeline; events count from 0 again.
  void clear_samples() {
    std::lock_guard lock(this->policy().mutex);
    this->policy().log.clear();
  }
};

static_assert(resource<tracking<>>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/host_resource.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
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
/// Throws:  what the upstream throws; `memory_error` when the log itself can't grow (the block is given back).
template <class Upstream = host_resource>
class tracking {
  static_assert(has_allocate_sync<Upstream>,
                "heddle::tracking: the upstream must provide allocate_sync(bytes, alignment)");
  static_assert(has_deallocate_sync<Upstream>,
                "heddle::tracking: the upstream must provide a noexcept deallocate_sync(pointer, bytes, alignment)");
  static_assert(has_shared_copies<Upstream>, "heddle::tracking: the upstream must be copyable");
  static_assert(has_equality<Upstream>, "heddle::tracking: the upstream must provide ==");

 public:
  /// Counts from zero over a copy of `upstream`.
  explicit tracking(Upstream upstream = Upstream{}, tracking_options options = {})
      : upstream_(std::move(upstream)), state_(std::make_shared<state>(options)) {}

  /// Memory of the upstream for work on `queue`, counted.
  template <class Queue>
  void* allocate(Queue queue, std::size_t bytes, std::size_t alignment)
    requires has_allocate<Upstream, Queue>
  {
    void* p = upstream_.allocate(queue, bytes, alignment);
    if (p && !state_->add(bytes)) {
      upstream_.deallocate(queue, p, bytes, alignment);
      throw memory_error("tracking", bytes, 0, this->bytes(), 0);
    }
    return p;
  }

  /// Gives memory of `allocate` back.
  template <class Queue>
  void deallocate(Queue queue, void* p, std::size_t bytes, std::size_t alignment) noexcept
    requires has_deallocate<Upstream, Queue>
  {
    if (p) state_->remove(bytes);
    upstream_.deallocate(queue, p, bytes, alignment);
  }

  /// Memory of the upstream, usable at once, counted.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    void* p = upstream_.allocate_sync(bytes, alignment);
    if (p && !state_->add(bytes)) {
      upstream_.deallocate_sync(p, bytes, alignment);
      throw memory_error("tracking", bytes, 0, this->bytes(), 0);
    }
    return p;
  }

  /// Gives memory of `allocate_sync` back.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (p) state_->remove(bytes);
    upstream_.deallocate_sync(p, bytes, alignment);
  }

  /// Bytes in use.
  std::size_t bytes() const {
    std::lock_guard lock(state_->mutex);
    return state_->bytes;
  }
  /// The most bytes that were in use at once, since construction or `reset_peak`.
  std::size_t peak_bytes() const {
    std::lock_guard lock(state_->mutex);
    return state_->peak;
  }
  /// Number of allocations not yet given back.
  std::size_t live() const {
    std::lock_guard lock(state_->mutex);
    return state_->live;
  }
  /// Number of allocations ever made.
  std::size_t allocations() const {
    std::lock_guard lock(state_->mutex);
    return state_->allocations;
  }
  /// Starts a new peak at the bytes in use now.
  void reset_peak() {
    std::lock_guard lock(state_->mutex);
    state_->peak = state_->bytes;
  }

  /// The timeline so far, in order; empty without `.log`.
  std::vector<memory_sample> samples() const {
    std::lock_guard lock(state_->mutex);
    return state_->log;
  }
  /// Empties the timeline; events count from 0 again.
  void clear_samples() {
    std::lock_guard lock(state_->mutex);
    state_->log.clear();
  }

  /// Whether both share one set of counters.
  friend bool operator==(const tracking& a, const tracking& b) noexcept { return a.state_ == b.state_; }

 private:
  struct state {
    explicit state(tracking_options o) : options(o), start(std::chrono::steady_clock::now()) {}

    bool add(std::size_t n) noexcept {
      std::lock_guard lock(mutex);
      if (options.log) {
        // Room for this event and for the deallocation of every live block: giving memory back must not fail.
        const std::size_t room = log.size() + live + 2;
        try {
          if (log.capacity() < room) log.reserve(2 * room);
        } catch (...) {
          return false;
        }
      }
      bytes += n;
      if (bytes > peak) peak = bytes;
      ++live;
      ++allocations;
      sample();
      return true;
    }

    void remove(std::size_t n) noexcept {
      std::lock_guard lock(mutex);
      bytes -= n;
      --live;
      sample();
    }

    void sample() noexcept {
      if (!options.log) return;
      const auto since = std::chrono::steady_clock::now() - start;
      log.push_back({log.size(), std::chrono::duration_cast<std::chrono::nanoseconds>(since).count(), bytes});
    }

    std::mutex mutex;
    tracking_options options;
    std::chrono::steady_clock::time_point start;
    std::size_t bytes = 0, peak = 0, live = 0, allocations = 0;
    std::vector<memory_sample> log;
  };

  Upstream upstream_;
  std::shared_ptr<state> state_;
};

}  // namespace v0
}  // namespace heddle

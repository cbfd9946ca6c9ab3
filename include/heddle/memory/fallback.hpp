// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/host_resource.hpp>

#include <cstddef>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief Takes memory from a second resource when the first has none, such as pinned host memory for device memory.
///
/// State:   about 50 bytes for each live block of the second resource, shared by all copies.
/// Order:   any two resources whose memory the program can use alike; they serve the same queues.
/// Sync:    a mutex where the second resource is in use; thread-safe if both are.
/// Throws:  the second resource's error; any error of the first that is not a `memory_error`.
template <class First, class Second = host_resource> class fallback {
  static_assert(has_allocate_sync<First> && has_allocate_sync<Second>,
                "heddle::fallback: both resources must provide allocate_sync(bytes, alignment)");
  static_assert(has_deallocate_sync<First> && has_deallocate_sync<Second>,
                "heddle::fallback: both resources must provide a noexcept deallocate_sync(pointer, bytes, alignment)");

 public:
  /// @param first Is asked first. @param second Is asked when `first` throws a memory_error.
  explicit fallback(First first, Second second = Second{})
      : first_(std::move(first)), second_(std::move(second)), state_(std::make_shared<state>()) {}

  /// Memory for work on `queue`.
  template <class Queue>
  void* allocate(Queue queue, std::size_t bytes, std::size_t alignment)
    requires has_allocate<First, Queue> && has_allocate<Second, Queue>
  {
    try {
      return first_.allocate(queue, bytes, alignment);
    } catch (const memory_error&) {
    }
    return note([&] { return second_.allocate(queue, bytes, alignment); },
                [&](void* p) { second_.deallocate(queue, p, bytes, alignment); });
  }

  /// Gives memory of `allocate` back to where it came from.
  template <class Queue>
  void deallocate(Queue queue, void* p, std::size_t bytes, std::size_t alignment) noexcept
    requires has_deallocate<First, Queue> && has_deallocate<Second, Queue>
  {
    if (!p) return;
    if (forget(p))
      second_.deallocate(queue, p, bytes, alignment);
    else
      first_.deallocate(queue, p, bytes, alignment);
  }

  /// Memory usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    try {
      return first_.allocate_sync(bytes, alignment);
    } catch (const memory_error&) {
    }
    return note([&] { return second_.allocate_sync(bytes, alignment); },
                [&](void* p) { second_.deallocate_sync(p, bytes, alignment); });
  }

  /// Gives memory of `allocate_sync` back to where it came from.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (!p) return;
    if (forget(p))
      second_.deallocate_sync(p, bytes, alignment);
    else
      first_.deallocate_sync(p, bytes, alignment);
  }

  /// Live blocks that came from the second resource.
  std::size_t fallen_back() const {
    std::lock_guard lock(state_->mutex);
    return state_->second.size();
  }

  /// Whether both share one state.
  friend bool operator==(const fallback& a, const fallback& b) noexcept { return a.state_ == b.state_; }

 private:
  struct state {
    std::mutex mutex;
    std::set<void*> second;
  };

  template <class Take, class Give> void* note(Take&& take, Give&& give) {
    void* const p = take();
    try {
      std::lock_guard lock(state_->mutex);
      state_->second.insert(p);
    } catch (...) {
      give(p);
      throw;
    }
    return p;
  }

  bool forget(void* p) noexcept {
    std::lock_guard lock(state_->mutex);
    return state_->second.erase(p) > 0;
  }

  First first_;
  Second second_;
  std::shared_ptr<state> state_;
};

static_assert(resource<fallback<host_resource>>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/memory/detail/adaptor.hpp>

#include <cstddef>
#include <mutex>

namespace heddle {
inline namespace v0 {

namespace detail {
class mutex_policy {
 public:
  template <class Take> void* allocate(std::size_t bytes, std::size_t alignment, Take&& take) {
    std::lock_guard lock(mutex_);
    return take(bytes, alignment);
  }
  template <class Give> void deallocate(void* p, std::size_t bytes, std::size_t alignment, Give&& give) noexcept {
    std::lock_guard lock(mutex_);
    give(p, bytes, alignment);
  }

 private:
  std::mutex mutex_;
};
}  // namespace detail

/// @brief Lets several threads use a resource that serves one at a time, such as `arena` or `planned`.
///
/// State:   a mutex shared by all copies.
/// Order:   any upstream; it guards only what goes through it.
/// Sync:    calls wait for each other.
/// Throws:  what the upstream throws.
template <class Upstream = host_resource> class thread_safe : public detail::adaptor<Upstream, detail::mutex_policy> {
 public:
  /// Guards a copy of `upstream`.
  explicit thread_safe(Upstream upstream = Upstream{})
      : detail::adaptor<Upstream, detail::mutex_policy>(std::move(upstream)) {}
};

static_assert(resource<thread_safe<>>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/detail/adaptor.hpp>

#include <atomic>
#include <cstddef>

namespace heddle {
inline namespace v0 {

namespace detail {
class limit_policy {
 public:
  explicit limit_policy(std::size_t most) : limit(most) {}

  template <class Take> void* allocate(std::size_t bytes, std::size_t alignment, Take&& take) {
    check_alignment("limiting", alignment);
    // Only what fits is ever added, so that a request that is refused never makes another one fail.
    std::size_t before = used.load(std::memory_order_relaxed);
    do {
      if (bytes > limit - before) throw memory_error("limiting", bytes, limit, before, limit - before);
    } while (!used.compare_exchange_weak(before, before + bytes, std::memory_order_relaxed));
    try {
      return take(bytes, alignment);
    } catch (...) {
      used.fetch_sub(bytes, std::memory_order_relaxed);
      throw;
    }
  }

  template <class Give> void deallocate(void* p, std::size_t bytes, std::size_t alignment, Give&& give) noexcept {
    give(p, bytes, alignment);
    used.fetch_sub(bytes, std::memory_order_relaxed);
  }

  const std::size_t limit;
  std::atomic<std::size_t> used{0};
};
}  // namespace detail

/// @brief Refuses what would take the bytes in use above a limit.
///
/// Bytes are those asked for. A refused request changes nothing, also for the moment in which it is judged.
///
/// State:   a counter shared by all copies.
/// Order:   any upstream; outside a pool it limits the program, inside one the pool.
/// Sync:    one compare-and-swap; thread-safe if the upstream is.
/// Throws:  `memory_error` with request, limit, bytes in use and what is left; what the upstream throws.
template <class Upstream = host_resource> class limiting : public detail::adaptor<Upstream, detail::limit_policy> {
  using base = detail::adaptor<Upstream, detail::limit_policy>;

 public:
  /// @param upstream Where the memory comes from. @param limit The most bytes that may be in use at once; 0 refuses
  /// all.
  limiting(Upstream upstream, std::size_t limit) : base(std::move(upstream), limit) {}

  /// The most bytes that may be in use at once.
  std::size_t limit() const noexcept { return this->policy().limit; }
  /// Bytes in use.
  std::size_t in_use() const noexcept { return this->policy().used.load(std::memory_order_relaxed); }
};

static_assert(resource<limiting<>>);

}  // namespace v0
}  // namespace heddle

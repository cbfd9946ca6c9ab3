// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/detail/adaptor.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief What happened between two points of a program.
struct memory_counts {
  std::int64_t bytes = 0;           ///< Bytes in use at the end above those at the beginning; may be negative.
  std::int64_t peak = 0;            ///< The most that `bytes` was in between, at least 0.
  std::uint64_t total = 0;          ///< Bytes ever allocated in between.
  std::uint64_t allocations = 0;    ///< Number of allocations.
  std::uint64_t deallocations = 0;  ///< Number of deallocations.

  friend constexpr bool operator==(const memory_counts&, const memory_counts&) = default;
};

namespace detail {
class statistics_policy {
 public:
  template <class Take> void* allocate(std::size_t bytes, std::size_t alignment, Take&& take) {
    void* const p = take(bytes, alignment);
    std::lock_guard lock(mutex);
    memory_counts& c = scopes.back();
    c.bytes += static_cast<std::int64_t>(bytes);
    c.peak = (std::max)(c.peak, c.bytes);
    c.total += bytes;
    ++c.allocations;
    return p;
  }

  template <class Give> void deallocate(void* p, std::size_t bytes, std::size_t alignment, Give&& give) noexcept {
    {
      std::lock_guard lock(mutex);
      scopes.back().bytes -= static_cast<std::int64_t>(bytes);
      ++scopes.back().deallocations;
    }
    give(p, bytes, alignment);
  }

  std::mutex mutex;
  std::vector<memory_counts> scopes{memory_counts{}};  // an inner one is added to the outer one when it ends
};
}  // namespace detail

/// @brief Counts allocations per part of a program: scopes that nest, each with its bytes, peak and totals.
///
/// @code{.cpp}
/// heddle::statistics memory{heddle::host_resource{}};
/// memory.push();                              // forward begins
/// ...
/// heddle::memory_counts forward = memory.pop();
/// @endcode
///
/// State:   40 bytes per open scope, shared by all copies. For a timeline see `tracking`.
/// Order:   any upstream.
/// Sync:    a mutex; thread-safe if the upstream is. Scopes are the program's, not a thread's.
/// Throws:  what the upstream throws; `argument_error` from a `pop` without a `push`.
template <class Upstream = host_resource>
class statistics : public detail::adaptor<Upstream, detail::statistics_policy> {
  using base = detail::adaptor<Upstream, detail::statistics_policy>;

 public:
  /// Counts from zero over a copy of `upstream`.
  explicit statistics(Upstream upstream = Upstream{}) : base(std::move(upstream)) {}

  /// The counts of the innermost scope so far; without one, since construction.
  memory_counts counts() const {
    std::lock_guard lock(this->policy().mutex);
    return this->policy().scopes.back();
  }

  /// Begins a scope whose counts start from zero.
  void push() {
    std::lock_guard lock(this->policy().mutex);
    this->policy().scopes.push_back({});
  }

  /// @brief Ends the innermost scope and adds its counts to the one around it.
  /// @return Its counts. Throws: argument_error if none is open.
  memory_counts pop() {
    std::lock_guard lock(this->policy().mutex);
    auto& scopes = this->policy().scopes;
    if (scopes.size() == 1) throw argument_error("heddle::statistics::pop: no scope is open; call push() first");
    const memory_counts inner = scopes.back();
    scopes.pop_back();
    memory_counts& outer = scopes.back();
    outer.peak = (std::max)(outer.peak, outer.bytes + inner.peak);
    outer.bytes += inner.bytes;
    outer.total += inner.total;
    outer.allocations += inner.allocations;
    outer.deallocations += inner.deallocations;
    return inner;
  }
};

static_assert(resource<statistics<>>);

}  // namespace v0
}  // namespace heddle

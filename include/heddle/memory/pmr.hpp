// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/checked.hpp>

#include <cstddef>
#include <memory_resource>
#include <new>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief A `std::pmr::memory_resource` over a resource of Heddle, for the standard containers.
///
/// For memory that the host can read: a container touches what it allocates, and knows no queue.
///
/// @code{.cpp}
/// heddle::pmr_over memory{heddle::pool{heddle::host_resource{}}};
/// std::pmr::vector<float> v(&memory);
/// @endcode
///
/// Sync:    as the resource's `_sync` calls.
/// Throws:  what the resource throws, from the container's allocations.
template <class Resource> class pmr_over final : public std::pmr::memory_resource {
  static_assert(has_allocate_sync<Resource> && has_deallocate_sync<Resource>,
                "heddle::pmr_over: the resource must provide allocate_sync and a noexcept deallocate_sync");

 public:
  /// Over a copy of `r`.
  explicit pmr_over(Resource r) : held_(std::move(r)) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    // The standard's containers may ask for zero bytes and expect a pointer of their own.
    return held_.allocate_sync(bytes ? bytes : 1, alignment);
  }
  void do_deallocate(void* p, std::size_t bytes, std::size_t alignment) override {
    held_.deallocate_sync(p, bytes ? bytes : 1, alignment);
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    const auto* const same = dynamic_cast<const pmr_over*>(&other);
    return same && same->held_ == held_;
  }

  Resource held_;
};

/// @brief A resource of Heddle over a `std::pmr::memory_resource`, which must outlive it.
///
/// State:   a pointer.
/// Sync:    as the memory resource: thread-safe if that is.
/// Throws:  `argument_error` on a bad alignment; `memory_error` where the memory resource throws `std::bad_alloc`.
class from_pmr {
 public:
  /// Over `upstream`.
  explicit from_pmr(std::pmr::memory_resource& upstream) noexcept : upstream_(&upstream) {}

  /// Memory usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("from_pmr", alignment);
    if (bytes == 0) return nullptr;
    (void)detail::round_up("from_pmr", bytes, alignment);
    try {
      return upstream_->allocate(bytes, alignment);
    } catch (const std::bad_alloc&) {
      throw memory_error("from_pmr", bytes);
    }
  }
  /// Gives memory of `allocate_sync` or `allocate` back.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (p) upstream_->deallocate(p, bytes, alignment);
  }
  /// As `allocate_sync`: the host's queue does everything at once.
  void* allocate(host::queue, std::size_t bytes, std::size_t alignment) { return allocate_sync(bytes, alignment); }
  /// As `deallocate_sync`.
  void deallocate(host::queue, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    deallocate_sync(p, bytes, alignment);
  }

  /// Whether memory of one may be given back to the other.
  friend bool operator==(const from_pmr& a, const from_pmr& b) noexcept { return a.upstream_->is_equal(*b.upstream_); }

 private:
  std::pmr::memory_resource* upstream_;
};

static_assert(resource<from_pmr>);

}  // namespace v0
}  // namespace heddle

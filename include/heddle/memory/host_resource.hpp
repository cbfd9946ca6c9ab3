// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/checked.hpp>

#include <cstddef>
#include <new>

namespace heddle {
inline namespace v0 {

/// @brief Aligned memory of the host, from `operator new`: what the other host resources build on.
///
/// State:   none; any two compare equal.
/// Sync:    nothing waits; memory is usable at once. Thread-safe.
/// Throws:  `argument_error` on an alignment that is not a power of two in 1..4096; `memory_error` when the system
///          refuses or the size is above PTRDIFF_MAX.
struct host_resource {
  /// Memory usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("host_resource", alignment);
    if (bytes == 0) return nullptr;
    (void)detail::round_up("host_resource", bytes, alignment);
    void* p = ::operator new(bytes, std::align_val_t{alignment}, std::nothrow);
    if (!p) throw memory_error("host_resource", bytes);
    return p;
  }

  /// Gives memory of `allocate_sync` or `allocate` back.
  void deallocate_sync(void* p, std::size_t /*bytes*/, std::size_t alignment) noexcept {
    if (p) ::operator delete(p, std::align_val_t{alignment});
  }

  /// As `allocate_sync`: the host's queue does everything at once.
  void* allocate(host::queue, std::size_t bytes, std::size_t alignment) { return allocate_sync(bytes, alignment); }

  /// As `deallocate_sync`.
  void deallocate(host::queue, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    deallocate_sync(p, bytes, alignment);
  }

  /// Always true.
  friend bool operator==(const host_resource&, const host_resource&) noexcept = default;
};

static_assert(resource<host_resource>);

}  // namespace v0
}  // namespace heddle

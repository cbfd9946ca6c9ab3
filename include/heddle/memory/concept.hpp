// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/host.hpp>

#include <concepts>
#include <cstddef>
#include <type_traits>

namespace heddle {
inline namespace v0 {

/// `allocate(queue, bytes, alignment)` returns `void*`.
template <class Resource, class Queue>
concept has_allocate = requires(Resource& r, Queue q, std::size_t bytes, std::size_t alignment) {
  { r.allocate(q, bytes, alignment) } -> std::same_as<void*>;
};

/// `deallocate(queue, pointer, bytes, alignment)` is there and is `noexcept`.
template <class Resource, class Queue>
concept has_deallocate = requires(Resource& r, Queue q, void* p, std::size_t bytes, std::size_t alignment) {
  { r.deallocate(q, p, bytes, alignment) } noexcept;
};

/// `allocate_sync(bytes, alignment)` returns `void*`.
template <class Resource>
concept has_allocate_sync = requires(Resource& r, std::size_t bytes, std::size_t alignment) {
  { r.allocate_sync(bytes, alignment) } -> std::same_as<void*>;
};

/// `deallocate_sync(pointer, bytes, alignment)` is there and is `noexcept`.
template <class Resource>
concept has_deallocate_sync = requires(Resource& r, void* p, std::size_t bytes, std::size_t alignment) {
  { r.deallocate_sync(p, bytes, alignment) } noexcept;
};

/// Copying is cheap and a copy shares its state with the original.
template <class Resource>
concept has_shared_copies = std::is_copy_constructible_v<Resource>;

/// `a == b` says whether memory from one may be given back to the other.
template <class Resource>
concept has_equality = requires(const Resource& a, const Resource& b) {
  { a == b } -> std::convertible_to<bool>;
};

/// @brief Where memory comes from: what every container, adaptor and recompute chain takes.
///
/// The queue comes first: memory from `allocate` may be used by work on that queue, and `deallocate` makes it available
/// to work that the same queue does afterwards. Memory from `allocate_sync` may be used at once and anywhere;
/// `deallocate_sync` is called when nobody uses it any more. On the host, whose queue does everything at once, both
/// pairs are the same. No parameter has a default value.
///
/// Rules, tested for any model by `tests/memory/conformance.hpp`:
///
/// - zero bytes give nullptr; giving nullptr back does nothing; neither is counted by any adaptor;
/// - the alignment is that of the pointer, a power of two from 1 to 4096; anything else is an `argument_error`,
///   also when zero bytes are asked for;
/// - a size that can't be had, or overflows when rounded up, is a `memory_error`, and nothing has changed;
/// - adaptors hold what is below them by value; a copy shares its state with the original.
///
/// A user's own resource, here one that fills new memory with NaN so that a missing initialisation shows:
///
/// @code{.cpp}
/// struct poisoned {
///   heddle::host_resource upstream{};
///   void* allocate_sync(std::size_t bytes, std::size_t alignment) {
///     void* p = upstream.allocate_sync(bytes, alignment);
///     if (p) std::memset(p, 0xff, bytes);
///     return p;
///   }
///   void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
///     upstream.deallocate_sync(p, bytes, alignment);
///   }
///   void* allocate(heddle::host::queue, std::size_t b, std::size_t a) { return allocate_sync(b, a); }
///   void deallocate(heddle::host::queue, void* p, std::size_t b, std::size_t a) noexcept { deallocate_sync(p, b, a); }
///   friend bool operator==(const poisoned&, const poisoned&) = default;
/// };
/// static_assert(heddle::resource<poisoned>);
/// @endcode
///
/// @tparam Queue The queue of the backend whose memory it is.
template <class Resource, class Queue = host::queue>
concept resource = has_allocate<Resource, Queue> && has_deallocate<Resource, Queue> && has_allocate_sync<Resource> &&
                   has_deallocate_sync<Resource> && has_shared_copies<Resource> && has_equality<Resource>;

}  // namespace v0
}  // namespace heddle

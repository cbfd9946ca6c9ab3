// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/backend.hpp>
#include <heddle/core/detail/radix_sort.hpp>
#include <heddle/core/detail/temporary.hpp>
#include <heddle/core/error.hpp>

#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>

namespace heddle {
inline namespace v0 {

/// @brief The backend of the calling thread: plain loops, the readable reference for every other backend.
///
/// Every operation is done when it returns, so queues and events have nothing to do. It may be called from any number
/// of threads at once.
///
/// Sync:   nothing to synchronise
/// Throws: argument_error on a null pointer with a count, or a size that overflows; what the resource throws
struct host {
  struct event;

  /// The caller's own thread; all queues are the same one.
  struct queue {
    /// Returns at once: all work is done.
    void synchronize() const noexcept {}
    /// Returns at once: what the event marks is done.
    void wait(const event&) const noexcept {}
    /// Always equal.
    friend constexpr bool operator==(queue, queue) noexcept { return true; }
  };

  /// A point in a queue, always in the past.
  struct event {
    /// Marks the present.
    void record(queue) noexcept {}
    /// True.
    bool ready() const noexcept { return true; }
    /// Returns at once.
    void synchronize() const noexcept {}
  };

  /// Memory from operator new; models a resource.
  struct memory {
    /// `bytes` bytes; null for 0. Throws memory_error, or argument_error for an alignment outside 1..4096.
    void* allocate(queue, std::size_t bytes, std::size_t alignment) {
      detail::check_alignment("host::memory", alignment, 4096);
      if (bytes == 0) return nullptr;
      void* p = ::operator new (bytes, std::align_val_t{alignment}, std::nothrow);
      if (p == nullptr) throw memory_error("host::memory", bytes);
      return p;
    }
    /// Gives back what `allocate` gave, with the same size and alignment.
    void deallocate(queue, void* p, std::size_t, std::size_t alignment) noexcept {
      if (p != nullptr) ::operator delete (p, std::align_val_t{alignment});
    }
    /// Any two are interchangeable.
    friend constexpr bool operator==(memory, memory) noexcept { return true; }
  };

  /// Calls f(0), f(1), .. f(n - 1), in this order.
  template <class Function> static void for_each(std::size_t n, Function f, queue) {
    for (std::size_t i = 0; i < n; ++i) f(i);
  }

  /// *result = reduce(.. reduce(reduce(init, transform(0)), transform(1)) .., transform(n - 1)), from left to right.
  template <class Value, class Reduce, class Transform, class Resource>
  static void transform_reduce(std::size_t n, std::type_identity_t<Value> init, Reduce reduce, Transform transform,
                               Value* result, Resource&, queue) {
    detail::check_pointer("host::transform_reduce", result, 1);
    for (std::size_t i = 0; i < n; ++i) init = reduce(init, static_cast<Value>(transform(i)));
    *result = init;
  }

  /// finish(s, what segment s gives from left to right), segment by segment.
  template <class Value, class Begins, class Reduce, class Transform, class Finish, class Resource>
  static void reduce_segments(std::size_t segments, std::size_t, Begins begins, Value zero, Reduce reduce,
                              Transform transform, Finish finish, Resource&, queue) {
    for (std::size_t s = 0; s < segments; ++s) {
      Value all = zero;
      for (std::size_t i = begins(s); i < begins(s + 1); ++i) all = reduce(all, static_cast<Value>(transform(s, i)));
      finish(s, all);
    }
  }

  /// Copies n elements. Throws argument_error on null with n > 0.
  template <class Value> static void copy(const Value* from, Value* to, std::size_t n, queue) {
    static_assert(std::is_trivially_copyable_v<Value>, "heddle::host::copy: elements must be trivially copyable");
    detail::check_pointer("host::copy", from, n);
    detail::check_pointer("host::copy", to, n);
    if (n != 0) std::memcpy(static_cast<void*>(to), from, n * sizeof(Value));
  }

  /// Sets n elements to a value. Throws argument_error on null with n > 0.
  template <class Value> static void fill(Value* to, std::size_t n, std::type_identity_t<Value> value, queue) {
    detail::check_pointer("host::fill", to, n);
    for (std::size_t i = 0; i < n; ++i) to[i] = value;
  }

  /// Calls write(k, i) for the k-th index i with keep(i), in order; *count is how many.
  template <class Keep, class Write, class Resource>
  static void select(std::size_t n, Keep keep, Write write, std::size_t* count, Resource&, queue) {
    detail::check_pointer("host::select", count, 1);
    std::size_t k = 0;
    for (std::size_t i = 0; i < n; ++i)
      if (keep(i)) write(k++, i);
    *count = k;
  }

  /// Stable radix sort in place, ascending by key. Temporary: n keys and n values.
  template <class Key, class Value, class Resource>
  static void sort_pairs(Key* keys, Value* values, std::size_t n, Resource& resource, queue q) {
    static_assert(std::is_arithmetic_v<Key> && sizeof(Key) <= 8, "heddle::host::sort_pairs: keys must be numbers");
    static_assert(std::is_trivially_copyable_v<Value>, "heddle::host::sort_pairs: values must be trivially copyable");
    detail::check_pointer("host::sort_pairs", keys, n);
    detail::check_pointer("host::sort_pairs", values, n);
    const std::size_t key_bytes =
        detail::checked_bytes("host::sort_pairs", n, sizeof(Key) + sizeof(Value)) - n * sizeof(Value);
    if (n < 2) return;
    const detail::temporary block(resource, q, detail::padded(key_bytes) + n * sizeof(Value));
    detail::radix_sort_pairs(keys, values, reinterpret_cast<Key*>(block.data()),
                             reinterpret_cast<Value*>(block.data() + detail::padded(key_bytes)), n);
  }

  /// Exclusive scan from left to right; transform(i) is called before to[i] is written.
  template <class Value, class Reduce, class Transform, class Resource>
  static void scan(std::size_t n, std::type_identity_t<Value> init, Reduce reduce, Transform transform, Value* to,
                   Resource&, queue) {
    detail::check_pointer("host::scan", to, n);
    for (std::size_t i = 0; i < n; ++i) {
      const Value next = static_cast<Value>(transform(i));
      to[i] = init;
      init = reduce(init, next);
    }
  }
};

static_assert(backend<host>);

}  // namespace v0
}  // namespace heddle

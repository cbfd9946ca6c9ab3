// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/config.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace heddle {
inline namespace v0 {

/// @file
/// @brief What a backend is: a memory space, a queue, events and a short vocabulary of bulk operations.
///
/// A strategy is written once against this vocabulary and runs wherever a backend exists. A backend is a type with
/// static member functions only; nothing of it is ever stored. What a user writes (see host.hpp for a whole one):
///
///     struct mine {
///       struct queue  { void synchronize() const; void wait(const event&) const; };           // copyable, ==
///       struct event  { void record(queue); bool ready() const; void synchronize() const; };  // movable
///       struct memory { void* allocate(queue, std::size_t bytes, std::size_t alignment);
///                       void deallocate(queue, void*, std::size_t bytes, std::size_t alignment) noexcept; };
///       static void for_each(n, f, queue);                                          // f(i), any order
///       static void transform_reduce(n, init, reduce, transform, Value* result, resource, queue);
///       static void reduce_segments(segments, n, begins, zero, reduce, transform, finish, resource, queue);
///       static void copy(const Value* from, Value* to, n, queue);
///       static void fill(Value* to, n, Value value, queue);
///       static void select(n, keep, write, std::size_t* count, resource, queue);    // write(k, i)
///       static void sort_pairs(Key* keys, Value* values, n, resource, queue);
///       static void scan(n, init, reduce, transform, Value* to, resource, queue); };
///
/// Rules that hold for each operation:
/// - It only enqueues: results (`*result`, `*count`, arrays) lie in the backend's memory and are there for later
///   operations on the same queue, and for the host after `queue.synchronize()`.
/// - Functors are named, trivially copyable types with a const call operator marked `HEDDLE_HD`; they receive the index
///   as `std::size_t` and reach their data through pointers that they hold.
/// - `resource` is where temporary memory comes from: an object with `memory`'s two functions, a pool if calls must be
///   cheap. What is taken is given back on the same queue before the call returns.
/// - n = 0 is legal: results are `init` or 0, and array pointers may be null.

namespace detail {
/// @cond
struct index_probe {
  HEDDLE_HD constexpr float operator()(std::size_t i) const noexcept { return static_cast<float>(i); }
};
struct keep_probe {
  HEDDLE_HD constexpr bool operator()(std::size_t) const noexcept { return true; }
};
struct write_probe {
  HEDDLE_HD constexpr void operator()(std::size_t, std::size_t) const noexcept {}
};
struct plus_probe {
  HEDDLE_HD constexpr float operator()(float a, float b) const noexcept { return a + b; }
};
struct segment_probe {
  HEDDLE_HD constexpr std::size_t operator()(std::size_t segment) const noexcept { return segment; }
  HEDDLE_HD constexpr float operator()(std::size_t, std::size_t i) const noexcept { return static_cast<float>(i); }
  HEDDLE_HD constexpr void operator()(std::size_t, float) const noexcept {}
};
/// @endcond
}  // namespace detail

/// `queue`: an ordered line of work; `synchronize` blocks the host until it is empty, `wait` makes the queue wait for
/// an event.
template <class Backend>
concept has_queue = std::is_copy_constructible_v<typename Backend::queue> &&
                    std::is_copy_assignable_v<typename Backend::queue> &&
                    requires(const typename Backend::queue q, const typename Backend::event e) {
                      { q == q } -> std::convertible_to<bool>;
                      { q.synchronize() } -> std::same_as<void>;
                      { q.wait(e) } -> std::same_as<void>;
                    };

/// `event`: a point in a queue; an event that was never recorded is ready.
template <class Backend>
concept has_event = std::is_move_constructible_v<typename Backend::event> &&
                    std::is_move_assignable_v<typename Backend::event> &&
                    std::is_default_constructible_v<typename Backend::event> &&
                    requires(typename Backend::event e, const typename Backend::event c, typename Backend::queue q) {
                      { e.record(q) } -> std::same_as<void>;
                      { c.ready() } -> std::same_as<bool>;
                      { c.synchronize() } -> std::same_as<void>;
                    };

/// `memory`: the plainest resource of the backend's memory space.
template <class Backend>
concept has_memory = std::is_default_constructible_v<typename Backend::memory> &&
                     requires(typename Backend::memory m, typename Backend::queue q, void* p, std::size_t n) {
                       { m.allocate(q, n, n) } -> std::same_as<void*>;
                       { m.deallocate(q, p, n, n) } noexcept -> std::same_as<void>;
                     };

/// `for_each(n, f, queue)`: calls f(i) once for each i below n, in any order, possibly at the same time.
template <class Backend>
concept has_for_each = requires(std::size_t n, typename Backend::queue q) {
  { Backend::for_each(n, detail::index_probe{}, q) } -> std::same_as<void>;
};

/// `transform_reduce(n, init, reduce, transform, result, resource, queue)`: *result = init + transform(0) + ... for an
/// associative and commutative `reduce`; grouping is the backend's own, and the same from run to run.
template <class Backend>
concept has_transform_reduce =
    requires(std::size_t n, float* result, typename Backend::memory m, typename Backend::queue q) {
      {
        Backend::transform_reduce(n, 0.0f, detail::plus_probe{}, detail::index_probe{}, result, m, q)
      } -> std::same_as<void>;
    };

/// `reduce_segments(segments, n, begins, zero, reduce, transform, finish, resource, queue)`: elements begins(s) up to
/// begins(s + 1) of n are segment s, where begins(0) = 0 and begins(segments) = n; for each of them, finish(s, zero +
/// transform(s, begins(s)) + ...). `zero` changes nothing; else as transform_reduce. Many segments in one launch.
template <class Backend>
concept has_reduce_segments = requires(std::size_t n, typename Backend::memory m, typename Backend::queue q) {
  {
    Backend::reduce_segments(n, n, detail::segment_probe{}, 0.0f, detail::plus_probe{}, detail::segment_probe{},
                             detail::segment_probe{}, m, q)
  } -> std::same_as<void>;
};

/// `copy(from, to, n, queue)`: elements that don't overlap; either side may be host memory too.
template <class Backend>
concept has_copy = requires(const float* from, float* to, std::size_t n, typename Backend::queue q) {
  { Backend::copy(from, to, n, q) } -> std::same_as<void>;
};

/// `fill(to, n, value, queue)`.
template <class Backend>
concept has_fill = requires(float* to, std::size_t n, typename Backend::queue q) {
  { Backend::fill(to, n, 1.0f, q) } -> std::same_as<void>;
};

/// `select(n, keep, write, count, resource, queue)`: stable compaction. Calls write(k, i) where i is the k-th index
/// with keep(i), and stores how many there are. `write` stores what is wanted: the index, a value, both.
template <class Backend>
concept has_select =
    requires(std::size_t n, std::size_t* count, typename Backend::memory m, typename Backend::queue q) {
      { Backend::select(n, detail::keep_probe{}, detail::write_probe{}, count, m, q) } -> std::same_as<void>;
    };

/// `sort_pairs(keys, values, n, resource, queue)`: in place, stable, ascending by key. Keys are integers or floats;
/// -0 and 0 are equal, a NaN goes behind everything of its sign.
template <class Backend>
concept has_sort_pairs =
    requires(std::uint32_t* keys, float* values, std::size_t n, typename Backend::memory m, typename Backend::queue q) {
      { Backend::sort_pairs(keys, values, n, m, q) } -> std::same_as<void>;
    };

/// `scan(n, init, reduce, transform, to, resource, queue)`: exclusive: to[i] = init + transform(0) + ... +
/// transform(i - 1). `transform` may read to[i] itself, so a scan can be done in place.
template <class Backend>
concept has_scan = requires(std::size_t n, float* to, typename Backend::memory m, typename Backend::queue q) {
  { Backend::scan(n, 0.0f, detail::plus_probe{}, detail::index_probe{}, to, m, q) } -> std::same_as<void>;
};

/// @brief A place to run: everything above. `heddle::host` and `heddle::cuda` are the two that come with the library.
template <class Backend>
concept backend = has_queue<Backend> && has_event<Backend> && has_memory<Backend> && has_for_each<Backend> &&
                  has_transform_reduce<Backend> && has_reduce_segments<Backend> && has_copy<Backend> &&
                  has_fill<Backend> && has_select<Backend> && has_sort_pairs<Backend> && has_scan<Backend>;

}  // namespace v0
}  // namespace heddle

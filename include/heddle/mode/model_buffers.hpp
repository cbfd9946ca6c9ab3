// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/gather.hpp>
#include <heddle/collective/mixed_radix.hpp>

namespace heddle {
inline namespace v0 {

/// @brief What becomes of a buffer where replicas meet.
enum class buffer_policy : std::uint8_t {
  average,   ///< The mean over ranks: running means and variances. Floats.
  maximum,   ///< The largest of each element: counters of steps and samples. NaN if any is.
  keep,      ///< Nothing: each rank keeps its own.
  broadcast  ///< The first rank's.
};

/// @brief State of a model that isn't trained, such as running statistics; borrowed.
struct model_buffer {
  void* data = nullptr;                           ///< `count` elements.
  std::size_t count = 0;                          ///< Number of elements.
  dtype type = dtype::f32;                        ///< f32, f64, i32 or i64.
  buffer_policy policy = buffer_policy::average;  ///< What becomes of it.

  /// Nothing.
  model_buffer() = default;
  /// @param values What it holds. @param p What becomes of it.
  template <class Element>
  model_buffer(std::span<Element> values, buffer_policy p)
      : data(values.data()), count(values.size()), type(dtype_of<Element>), policy(p) {}
};

/// @brief Lets ranks agree on their buffers, each by its policy. Call it where they meet:
///
///     if (dp.step({.lr = x}).met) hd::agree(comm, buffers);
///
/// Means are made in double, in the order of ranks; afterwards all ranks hold the same bits.
/// Sync:   blocks. Collective.
/// Throws: argument_error, before anything has changed, for a null pointer with a count, another type, or an average
/// of integers; comm_error.
/// @param comm All replicas. @param buffers The same kinds on all ranks, in the same order.
template <class Comm> void agree(Comm& comm, std::span<const model_buffer> buffers) {
  for (const model_buffer& b : buffers) {
    const bool integers = b.type == dtype::i32 || b.type == dtype::i64;
    if ((b.count && !b.data) || (!integers && b.type != dtype::f32 && b.type != dtype::f64) ||
        (integers && b.policy == buffer_policy::average))
      throw argument_error(std::string("heddle::agree: a buffer of ") + std::to_string(b.count) + " " +
                           name_of(b.type) + "; allowed are f32 and f64, and but for an average i32 and i64");
  }
  const auto one = [&]<class Element>(const model_buffer& b, Element* data) {
    const std::span<Element> all(data, b.count);
    if (b.policy == buffer_policy::broadcast) broadcast(comm, all);
    if (b.policy == buffer_policy::maximum) all_reduce(comm, direct{}, all, max{});
    if constexpr (std::is_floating_point_v<Element>)
      if (b.policy == buffer_policy::average) all_reduce(comm, direct{}, all, mean{});
  };
  for (const model_buffer& b : buffers) {
    if (b.type == dtype::f32) one(b, static_cast<float*>(b.data));
    if (b.type == dtype::f64) one(b, static_cast<double*>(b.data));
    if (b.type == dtype::i32) one(b, static_cast<std::int32_t*>(b.data));
    if (b.type == dtype::i64) one(b, static_cast<std::int64_t*>(b.data));
  }
}

}  // namespace v0
}  // namespace heddle

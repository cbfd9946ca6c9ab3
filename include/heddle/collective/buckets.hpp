// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <cstddef>
#include <span>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief A run of tensors [first, last) that travels together.
struct bucket {
  std::size_t first = 0;  ///< First tensor.
  std::size_t last = 0;   ///< One past the last tensor.
};

/// @brief How tensors are grouped into messages.
///
/// Buckets are runs of neighbouring tensors from the last to the first, since backward finishes the last layers first.
/// A bucket closes when it has reached its size, so a tensor is never cut and one larger than the cap makes a bucket
/// of its own length. The first bucket is small, so that communication begins early.
/// Source: the rule of PyTorch's DistributedDataParallel (1 MiB, then 25 MiB).
struct buckets {
  std::size_t first = 1u << 20;  ///< Bytes at which the first bucket closes, above 0.
  std::size_t cap = 25u << 20;   ///< Bytes at which every later one closes, above 0.

  /// @brief The buckets in launch order; every tensor is in exactly one.
  /// @param bytes Size of each tensor in bytes; 0 is legal.
  /// Throws: argument_error if a limit is 0.
  template <class Bucket = bucket>
  std::vector<Bucket> plan(std::span<const std::size_t> bytes) const {
    if (first == 0 || cap == 0) throw argument_error("heddle::buckets: first and cap must be above 0 bytes");
    std::vector<Bucket> all;
    std::size_t size = 0, last = bytes.size();
    for (std::size_t i = bytes.size(); i-- > 0;) {
      size += bytes[i];
      if (size >= (all.empty() ? first : cap)) {
        all.push_back({i, last});
        last = i;
        size = 0;
      }
    }
    if (last > 0) all.push_back({0, last});
    return all;
  }
};

}  // namespace v0
}  // namespace heddle

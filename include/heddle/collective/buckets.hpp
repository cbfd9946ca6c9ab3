// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/dtype.hpp>
#include <heddle/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief A run of tensors [first, last) that travels together. Bytes are those that `plan` was told of: trainers count
/// every element as a float, 4 bytes, whatever type it has.
struct bucket {
  std::size_t first = 0;  ///< First tensor.
  std::size_t last = 0;   ///< One past the last tensor.
  std::size_t skip = 0;   ///< Bytes at the begin of the first tensor that travel in a later bucket; 0: none.
  std::size_t cut = 0;    ///< Bytes at the end of the last tensor that travel in an earlier bucket; 0: none.
};

/// @brief Elements [begin, begin + count) of a tensor, and where they are in the buffer of their bucket.
struct bucket_piece {
  std::size_t tensor = 0;  ///< Which tensor.
  std::size_t begin = 0;   ///< Its first element here.
  std::size_t count = 0;   ///< How many, above 0.
  std::size_t offset = 0;  ///< Of the first one in the buffer, in elements.

  /// Equality.
  constexpr bool operator==(const bucket_piece&) const = default;
};

/// @brief A buffer of one element type that travels as a whole.
struct bucket_buffer {
  dtype type = dtype::f32;           ///< Of all its elements.
  std::size_t count = 0;             ///< Elements, with gaps and padding: fill those with zeros.
  std::vector<bucket_piece> pieces;  ///< In the order of their offsets.

  /// Equality.
  bool operator==(const bucket_buffer&) const = default;
};

/// @brief What buffers of `layout` must respect, whose `split` is a caller's for each layout; trainers, which call `plan`,
/// take that of `buckets`.
struct bucket_rules {
  std::size_t align = 1;  ///< Each tensor begins at a multiple of this many elements, 1 or more.
  std::size_t pad = 1;    ///< Each buffer has a multiple of this many elements; for P ranks lcm(P, 128) suits networks.
  bool split = false;     ///< Whether a tensor may be cut where a buffer is full.
};

/// @brief lcm(ranks, 128): what each rank's block is a multiple of 128 bytes or more with. Source: Megatron-Core.
constexpr std::size_t bucket_padding(int ranks) noexcept { return std::lcm(static_cast<std::size_t>(ranks), 128); }

/// @brief How tensors are grouped into messages.
///
/// Buckets are runs of neighbouring tensors from the last to the first, since backward finishes the last layers first.
/// A bucket closes when it has reached its size: a tensor is not cut, and one larger than the cap makes a bucket of its
/// own length; with `split` it is cut there. The first bucket is small, so that communication begins early.
/// Source: the rule of PyTorch's DistributedDataParallel (1 MiB, then 25 MiB).
struct buckets {
  std::size_t first = 1u << 20;  ///< Bytes at which the first bucket closes, above 0.
  std::size_t cap = 25u << 20;   ///< Bytes at which every later one closes, above 0.
  bool split = false;            ///< Whether tensors are cut where a bucket is full, at a multiple of 128 bytes.

  /// @brief The buckets in launch order; every tensor is in exactly one, with `split` every byte is.
  /// @param bytes Size of each tensor in bytes; 0 is legal.
  /// Throws: argument_error if a limit is 0.
  template <class Bucket = bucket> std::vector<Bucket> plan(std::span<const std::size_t> bytes) const {
    if (first == 0 || cap == 0) throw argument_error("heddle::buckets: first and cap must be above 0 bytes");
    std::vector<Bucket> all;
    std::size_t size = 0, last = bytes.size(), cut = 0;  // of the bucket that is open
    for (std::size_t i = bytes.size(); i-- > 0;) {
      std::size_t left = bytes[i];
      for (std::size_t limit; size + left >= (limit = all.empty() ? first : cap);) {
        const std::size_t skip = split ? (size + left - limit) / 128 * 128 : 0;
        all.push_back({i, last, skip, cut});
        last = skip ? i + 1 : i;
        cut = skip ? bytes[i] - skip : 0;
        size = 0;
        left = skip;
        if (left == 0) break;
      }
      size += left;
    }
    if (last > 0) all.push_back({0, last, 0, cut});
    return all;
  }

  /// @brief Buffers for tensors of several types: every element of every tensor is in exactly one, at one place.
  ///
  /// Pure in type, in the order in which backward completes them, the same on all ranks for the same arguments. Each
  /// type has buckets of its own, the first of which closes at `first`. For one buffer per type, the largest cap; for
  /// one per tensor, caps of 1 byte; for one per layer, the largest cap and `layers`.
  /// @param counts Elements of each tensor; those without any are in no buffer. @param types Of each tensor.
  /// @param rules Alignment, padding, and whether tensors may be cut.
  /// @param layers Empty, or a number for each tensor: a buffer also closes where it changes.
  /// Throws: argument_error if the numbers of arguments differ, a limit or rule is 0, or a type has no size.
  template <class Buffer = bucket_buffer>
  std::vector<Buffer> layout(std::span<const std::size_t> counts, std::span<const dtype> types,
                             const bucket_rules& rules = {}, std::span<const int> layers = {}) const {
    if (first == 0 || cap == 0 || rules.align == 0 || rules.pad == 0) {
      throw argument_error("heddle::buckets: first, cap, align and pad must be above 0");
    }
    if (types.size() != counts.size() || (!layers.empty() && layers.size() != counts.size())) {
      throw argument_error("heddle::buckets: " + std::to_string(counts.size()) + " counts, " +
                           std::to_string(types.size()) + " types, " + std::to_string(layers.size()) +
                           " layers; allowed is the same number, or no layers");
    }
    const auto up = [](std::size_t n, std::size_t to) { return (n + to - 1) / to * to; };
    constexpr auto kinds = static_cast<std::size_t>(dtype::other);
    std::vector<Buffer> all, open(kinds);
    std::vector<std::size_t> closed(kinds, 0);
    std::vector<int> layer(kinds, 0);
    const auto close = [&](std::size_t kind) {
      Buffer& b = open[kind];
      if (b.pieces.empty()) return;
      b.count = up(b.count, rules.pad);
      b.type = static_cast<dtype>(kind);
      all.push_back(std::move(b));
      b = {};
      ++closed[kind];
    };
    for (std::size_t i = counts.size(); i-- > 0;) {
      const auto kind = static_cast<std::size_t>(types[i]);
      const std::size_t width = bytes_of(types[i]);
      if (width == 0) throw argument_error("heddle::buckets: tensor " + std::to_string(i) + " has a user's type");
      if (!layers.empty() && layers[i] != layer[kind]) close(kind);
      if (!layers.empty()) layer[kind] = layers[i];
      for (std::size_t begin = 0; begin < counts[i];) {
        Buffer& b = open[kind];
        const std::size_t limit = ((closed[kind] ? cap : first) - 1) / width + 1;  // elements at which it closes
        const std::size_t offset = up(b.count, rules.align);
        if (rules.split && offset >= limit) {  // nothing but a gap fits
          close(kind);
          continue;
        }
        std::size_t n = counts[i] - begin;
        if (rules.split) n = (std::min)(n, limit - offset);
        b.pieces.push_back({i, begin, n, offset});
        b.count = offset + n;
        begin += n;
        if (b.count >= limit) close(kind);
      }
    }
    for (std::size_t kind = 0; kind < kinds; ++kind) close(kind);
    // A bucket is complete with its first tensor, which comes last.
    std::stable_sort(all.begin(), all.end(),
                     [](const Buffer& a, const Buffer& b) { return a.pieces.back().tensor > b.pieces.back().tensor; });
    return all;
  }
};

}  // namespace v0
}  // namespace heddle

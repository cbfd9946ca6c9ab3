// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/dgc.hpp>
#include <heddle/compress/error_feedback.hpp>
#include <heddle/compress/sparse_wire.hpp>

namespace heddle {
inline namespace v0 {

/// @brief The k elements of largest magnitude; ties go to the lower index.
///
/// Wire:    k = ceil(density n) entries in the shortest form of sparse_wire.hpp: at most 8 bytes each, never more than
/// 4
///          per element; 16 per tensor. Gathered from every rank.
/// State:   none; error_feedback holds 4 bytes per element.
/// Traffic: 8 bytes read per element to select, 4 without error feedback; the entries where the sum is added up.
/// Order:   inside error_feedback.
/// Sync:    never.
/// Paper:   Aji and Heafield 2017; the selection is exact and deterministic.
/// Throws:  argument_error unless density is in (0, 1], or if a tensor has 2^32 - 1 elements or more.
struct top_k {
  double density = 0.01;           ///< Part of the elements that travels, in (0, 1].
  std::size_t dense_below = 1024;  ///< Tensors with fewer elements travel as they are.

  static constexpr bool biased = true;  ///< It shortens the gradient.

  /// Throws argument_error unless density is in its range.
  void check() const {
    if (!(density > 0.0 && density <= 1.0))
      throw argument_error("heddle::top_k: density is " + std::to_string(density) + ", allowed is 0 < density <= 1");
  }
  /// Entries of a tensor of n elements: ceil(density n).
  std::size_t entries(std::size_t n) const noexcept { return detail::part_of(density, n); }
  /// The most that a rank sends of a tensor.
  std::size_t wire_bytes(std::size_t n, const encode_context&) const noexcept {
    return 8 + (std::min)(8 * entries(n), 4 * n);
  }
  /// Appends the largest values.
  template <class Allocator>
  void encode(slice<const float> v, const encode_context& x, std::vector<std::byte, Allocator>& packet) const {
    encode_parts(v.count, x, packet, [&](std::size_t at, std::size_t) { return v.data + at; });
  }
  /// The same of n values that are made part by part: values(begin, n) gives those of a part.
  template <class Allocator, class Values>
  void encode_parts(std::size_t count, const encode_context&, std::vector<std::byte, Allocator>& packet,
                    Values&& values) const {
    check();
    if (count >= 0xffffffffull) {
      throw argument_error("heddle::top_k: a tensor of " + std::to_string(count) +
                           " elements, allowed is below 2^32 - 1");
    }
    constexpr std::size_t part = 2048;
    detail::largest found(count, entries(count), 1);  // zeros aren't sent
    for (std::size_t begin = 0, n = 0; begin < count; begin += n) {
      n = (std::min)(part, count - begin);
      detail::offer_all(values(begin, n), begin, n, found);
    }
    std::vector<std::uint32_t> index;
    std::vector<float> value;
    found.finish(index, value);
    append_sparse(count, index.data(), value.data(), index.size(), sparse_values::f32, packet);
  }
  /// Adds them. Throws: argument_error on a damaged payload.
  void decode_add(slice<const std::byte> payload, slice<float> sum) const { add_sparse(payload, sum); }
  /// Throws argument_error unless it is an undamaged payload of a tensor of n elements.
  void check_payload(slice<const std::byte> payload, std::size_t n) const {
    for_each_entry(payload, n, [](std::uint32_t, float) {});
  }
  /// v[index] -= value for each entry. Throws: argument_error on a damaged payload.
  void take_off(slice<const std::byte> payload, slice<float> v) const {
    for_each_entry(payload, v.count, [&](std::uint32_t i, float value) { v[i] -= value; });
  }
  /// "top_k".
  std::string name() const { return "top_k"; }
};
static_assert(codec<top_k>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/detail/codec_loops.hpp>
#include <heddle/compress/error_feedback.hpp>

namespace heddle {
inline namespace v0 {

/// @brief One bit per element: the sign, times the mean magnitude of its block.
///
/// Wire:    1 bit per element, 4 bytes per block, 8 per tensor; gathered from every rank.
/// State:   none; error_feedback holds 4 bytes per element.
/// Traffic: 8 bytes read per element to encode (the second time from cache), 4 read and 4 written per rank to decode.
/// Order:   inside error_feedback.
/// Sync:    never.
/// Paper:   Karimireddy et al. 2019 (EF-SignSGD), with a scale per block. A zero counts as positive.
/// Throws:  argument_error if block is 0.
struct sign {
  std::size_t block = 4096;        ///< Elements that share a scale, above 0.
  std::size_t dense_below = 1024;  ///< Tensors with fewer elements travel as they are.

  static constexpr bool biased = true;  ///< Magnitudes are lost.

  /// Throws argument_error if block is 0.
  void check() const {
    if (block == 0) throw argument_error("heddle::sign: block is 0, allowed is 1 or more");
  }
  /// Bytes of a tensor of n elements.
  std::size_t wire_bytes(std::size_t n, const encode_context&) const {
    check();
    return n / 8 + (n % 8 != 0) + 4 * (n / block + (n % block != 0));
  }
  /// Element i of a payload, on the host or a device; `payload` is aligned to a float.
  HEDDLE_HD float value(const std::byte* payload, std::size_t n, std::size_t i) const {
    const std::size_t scales = n / block + (n % block != 0);
    const auto* const bits = reinterpret_cast<const unsigned char*>(payload + 4 * scales);
    const float scale = reinterpret_cast<const float*>(payload)[i / block];
    return (bits[i / 8] >> i % 8 & 1u) != 0 ? -scale : scale;
  }
  /// Writes the block of n values that begins at element `begin` of a tensor of `total`.
  void encode_block(const float* v, std::size_t begin, std::size_t n, std::size_t total, const encode_context&,
                    std::byte* payload) const {
    const auto scale = static_cast<float>(detail::sum_magnitudes(v, n) / static_cast<double>(n));
    std::memcpy(payload + 4 * (begin / block), &scale, 4);
    std::byte* const bits = payload + 4 * (total / block + (total % block != 0));
    std::size_t i = 0;
    if (begin % 8 == 0) {
      detail::write_negative_bits(v, bits + begin / 8, n / 8);
      i = n / 8 * 8;
    }
    for (; i < n; ++i)  // a byte that blocks share was zero
      bits[(begin + i) / 8] |= static_cast<std::byte>(static_cast<unsigned>(v[i] < 0.0f) << (begin + i) % 8);
  }
  /// Appends scales and bits.
  template <class Allocator>
  void encode(slice<const float> v, const encode_context& x, std::vector<std::byte, Allocator>& packet) const {
    detail::encode_blocks(*this, v.count, x, packet, [&](std::size_t at, std::size_t) { return v.data + at; });
  }
  /// Adds them. Throws: argument_error if the payload has another size.
  void decode_add(slice<const std::byte> payload, slice<float> sum) const {
    if (payload.count != wire_bytes(sum.count, {})) {
      throw argument_error("heddle::sign: damaged packet of " + std::to_string(payload.count) + " bytes for " +
                           std::to_string(sum.count) + " elements");
    }
    for (std::size_t begin = 0, n = 0; begin < sum.count; begin += n) {
      n = (std::min)(block, sum.count - begin);
      add_block(payload.data, begin, n, sum.count, sum.data + begin);
    }
  }
  /// Adds the block of n elements that begins at element `begin` of a tensor of `total`.
  void add_block(const std::byte* payload, std::size_t begin, std::size_t n, std::size_t total,
                 float* sum) const noexcept {
    const std::byte* const bits = payload + 4 * (total / block + (total % block != 0));
    float scale;
    std::memcpy(&scale, payload + 4 * (begin / block), 4);
    std::size_t i = 0;
    if (begin % 8 == 0) {
      detail::add_signs(bits + begin / 8, scale, sum, n / 8);
      i = n / 8 * 8;
    }
    for (; i < n; ++i)
      sum[i] += (static_cast<unsigned>(bits[(begin + i) / 8]) >> (begin + i) % 8 & 1u) != 0 ? -scale : scale;
  }
  /// "sign".
  std::string name() const { return "sign"; }
};
static_assert(codec<sign>);

}  // namespace v0
}  // namespace heddle

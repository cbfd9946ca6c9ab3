// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/detail/codec_loops.hpp>
#include <heddle/compress/error_feedback.hpp>
#include <heddle/core/philox.hpp>

#include <cmath>

namespace heddle {
inline namespace v0 {

/// @brief How a quantised value is rounded.
enum class rounding {
  stochastic,  ///< Up or down by chance, so that the expectation is the value.
  nearest      ///< To the nearest level; inside error_feedback.
};

/// @brief Whole numbers of 8 or 4 bits, times a scale of each block: its largest magnitude over 127 or 7.
///
/// Wire:    Bits per element, 4 bytes per block, 8 per tensor; gathered from every rank.
/// State:   none; error_feedback holds 4 bytes per element.
/// Traffic: 8 bytes read per element to encode (the second time from cache), 4 read and 4 written per rank to decode.
/// Order:   ends a chain; with rounding::nearest inside error_feedback.
/// Sync:    never.
/// Paper:   Alistarh et al. 2017 (QSGD), with the largest magnitude of a block where they have the norm of a bucket.
/// Throws:  argument_error if block is 0.
/// @tparam Bits 8 or 4. @tparam Rounding stochastic or nearest.
template <int Bits, rounding Rounding = rounding::stochastic> struct quantize {
  static_assert(Bits == 8 || Bits == 4, "heddle::quantize: the number of bits must be 8 or 4");

  std::size_t block = 1024;        ///< Elements that share a scale, above 0.
  std::uint64_t seed = 1;          ///< Of the rounding; each rank, tensor and step has numbers of its own.
  std::size_t dense_below = 1024;  ///< Tensors with fewer elements travel as they are.

  static constexpr bool biased = Rounding == rounding::nearest;  ///< Stochastic rounding keeps the expectation.
  static constexpr int levels = (1 << (Bits - 1)) - 1;           ///< 127 or 7, on each side of 0.

  /// Throws argument_error if block is 0.
  void check() const {
    if (block == 0) throw argument_error("heddle::quantize: block is 0, allowed is 1 or more");
  }
  /// Bytes of a tensor of n elements.
  std::size_t wire_bytes(std::size_t n, const encode_context&) const {
    check();
    return 4 * blocks(n) + (Bits == 8 ? n : n / 2 + n % 2);
  }
  /// Of a rank's random numbers.
  HEDDLE_HD std::uint64_t seed_of(int rank) const {
    return seed + 0x9e3779b97f4a7c15ull * static_cast<std::uint64_t>(rank + 1);
  }
  /// The number of a value, given 1 over the scale and a random word.
  HEDDLE_HD static int whole_of(float v, double inverse, std::uint32_t word) {
    // Added before rounding down, which a conversion of what is above 0 does.
    const double up = Rounding == rounding::stochastic ? static_cast<double>(to_uniform(word)) : 0.5;
    const double shifted = static_cast<double>(v) * inverse + up + (levels + 1);
    if (!(shifted >= 1.0)) return -levels;  // also a NaN: a device writes packets that it flags
    return shifted < 2 * levels + 2 ? static_cast<int>(shifted) - (levels + 1) : levels;
  }
  /// Element i of a payload, on the host or a device; `payload` is aligned to a float.
  HEDDLE_HD float value(const std::byte* payload, std::size_t n, std::size_t i) const {
    const std::size_t scales = n / block + (n % block != 0);
    const auto* const in = reinterpret_cast<const unsigned char*>(payload + 4 * scales);
    const int whole = Bits == 8 ? static_cast<int>(in[i] ^ 0x80u) - 0x80
                                : static_cast<int>((in[i / 2] >> (i % 2 * 4) & 0xfu) ^ 8u) - 8;
    return static_cast<float>(whole) * reinterpret_cast<const float*>(payload)[i / block];
  }
  /// Writes the block of n values that begins at element `begin` of a tensor of `total`.
  void encode_block(const float* v, std::size_t begin, std::size_t n, std::size_t total, const encode_context& x,
                    std::byte* payload) const {
    const float most = std::bit_cast<float>(detail::peak_bits(v, n));
    const float scale = most / static_cast<float>(levels);
    std::memcpy(payload + 4 * (begin / block), &scale, 4);
    std::byte* const out = payload + 4 * blocks(total);
    const std::uint64_t mine = seed_of(x.rank), stream = random_stream(x.tensor, static_cast<std::uint32_t>(x.step));
    // 1 / scale of a tiny scale is infinite in float.
    const double inverse = scale > 0.0f ? 1.0 / static_cast<double>(scale) : 0.0;
    std::size_t done = 0;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
    if (begin % 16 == 0 && detail::best_isa() != detail::isa::portable) {
      constexpr bool by_chance = Rounding == rounding::stochastic;
      done = detail::quantize_avx2<Bits, by_chance>(v, n, inverse, levels, mine, stream, begin / 4,
                                                    out + begin * Bits / 8);
    }
#endif
    philox4x32::block words{};
    for (std::size_t i = begin + done; i < begin + n; ++i) {
      if constexpr (Rounding == rounding::stochastic) {
        if (i % 4 == 0 || i == begin + done) words = philox(mine, stream, i / 4);
      }
      const int whole = whole_of(v[i - begin], inverse, words.word[i % 4]);
      if constexpr (Bits == 8) {
        out[i] = static_cast<std::byte>(whole & 0xff);
      } else if (i % 2 == 0) {
        out[i / 2] = static_cast<std::byte>(whole & 0xf);
      } else {
        out[i / 2] |= static_cast<std::byte>((whole & 0xf) << 4);
      }
    }
  }
  /// Appends scales and numbers.
  template <class Allocator>
  void encode(slice<const float> v, const encode_context& x, std::vector<std::byte, Allocator>& packet) const {
    detail::encode_blocks(*this, v.count, x, packet, [&](std::size_t at, std::size_t) { return v.data + at; });
  }
  /// Adds them. Throws: argument_error if the payload has another size.
  void decode_add(slice<const std::byte> payload, slice<float> sum) const {
    if (payload.count != wire_bytes(sum.count, {})) {
      throw argument_error("heddle::quantize: damaged packet of " + std::to_string(payload.count) + " bytes for " +
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
    const std::byte* const in = payload + 4 * blocks(total);
    float scale;
    std::memcpy(&scale, payload + 4 * (begin / block), 4);
    std::size_t done = 0;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
    if (begin % 2 == 0 && detail::best_isa() != detail::isa::portable)
      done = detail::add_wholes_avx2<Bits>(in + begin * Bits / 8, scale, sum, n);
#endif
    for (std::size_t i = begin + done; i < begin + n; ++i) {
      int whole;
      if constexpr (Bits == 8)
        whole = static_cast<signed char>(in[i]);
      else
        whole = static_cast<int>((static_cast<unsigned>(in[i / 2]) >> (i % 2 * 4) & 0xfu) ^ 8u) - 8;
      sum[i - begin] += static_cast<float>(whole) * scale;
    }
  }
  /// For example "quantize<8>" or "quantize<4, nearest>".
  std::string name() const {
    return "quantize<" + std::to_string(Bits) + (Rounding == rounding::nearest ? ", nearest>" : ">");
  }

 private:
  std::size_t blocks(std::size_t n) const noexcept { return n / block + (n % block != 0); }
};
static_assert(codec<quantize<8>> && codec<quantize<4, rounding::nearest>>);

}  // namespace v0
}  // namespace heddle

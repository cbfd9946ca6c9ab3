// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/convert.hpp>
#include <heddle/core/error.hpp>
#include <heddle/core/slice.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @file
/// @brief Some entries of a tensor as bytes, in whichever of four forms is the shortest.
///
/// A packet is a head of 8 bytes (form, number of entries), with 16-bit values a scale of 4 bytes, then the indices in
/// rising order, then the values. With n elements, k entries and b bytes a value (4 or 2), after the head:
///
///     index32   4 k + b k
///     gap16     2 (k + skips) + b k    distances to the previous entry; a skip is one of 65535 without an entry
///     bitmap    n / 8 + b k
///     everything        b n            no indices
///
/// Each part is padded to 4 bytes. Bytes are in the machine's order, as in all messages of a communicator.

/// @brief How the values of a packet travel.
enum class sparse_values : std::uint8_t {
  f32,  ///< As they are.
  f16   ///< As float16, scaled by a power of two of the packet so that the largest is in range; what rounding takes
        ///< off is the sender's to hold.
};

/// @brief How the indices of a packet travel.
enum class sparse_indices : std::uint8_t {
  index32,    ///< 32 bits each.
  gap16,      ///< The distance to the one before in 16 bits.
  bitmap,     ///< One bit for each element.
  everything  ///< None: each element has a value.
};

/// @brief Entries of a tensor in rising order of their index, as `sparse_packet::read` gives them.
struct sparse_block {
  static constexpr std::size_t most = 256;  ///< Entries that a block can hold.
  std::size_t count = 0;                    ///< Entries that it holds.
  std::uint32_t index[most];                ///< Where they belong.
  float value[most];                        ///< What they are.
};

namespace detail {
inline constexpr std::uint32_t gap_skip = 0xffff;
constexpr std::size_t padded4(std::size_t bytes) noexcept { return (bytes + 3) / 4 * 4; }
constexpr std::size_t sparse_value_bytes(sparse_values v) noexcept { return v == sparse_values::f32 ? 4 : 2; }

// Skips that 16-bit distances need besides one word an entry.
inline std::size_t gap_skips(const std::uint32_t* index, std::size_t k) noexcept {
  std::size_t skips = 0;
  std::uint32_t next = 0;  // the first element that the distance is counted from
  for (std::size_t j = 0; j < k; ++j) {
    skips += (index[j] - next) / gap_skip;
    next = index[j] + 1;
  }
  return skips;
}

// The shortest form, and the bytes of its indices.
struct sparse_form {
  sparse_indices indices;
  std::size_t bytes;
};
inline sparse_form shortest_form(std::size_t n, const std::uint32_t* index, std::size_t k, sparse_values v) noexcept {
  const std::size_t b = sparse_value_bytes(v);
  sparse_form best{sparse_indices::index32, 4 * k};
  const auto offer = [&](sparse_indices i, std::size_t bytes) {
    if (bytes < best.bytes) best = {i, bytes};
  };
  if (k) offer(sparse_indices::gap16, padded4(2 * (k + gap_skips(index, k))));
  offer(sparse_indices::bitmap, padded4((n + 7) / 8));
  if (k && padded4(b * n) < best.bytes + padded4(b * k)) best = {sparse_indices::everything, 0};
  return best;
}

inline void write_gaps(const std::uint32_t* index, std::size_t k, std::byte* out) noexcept {
  std::uint32_t next = 0;
  const auto put = [&](std::uint32_t gap) {
    const auto word = static_cast<std::uint16_t>(gap);
    std::memcpy(out, &word, 2);
    out += 2;
  };
  for (std::size_t j = 0; j < k; ++j) {
    std::uint32_t gap = index[j] - next;
    for (; gap >= gap_skip; gap -= gap_skip) put(gap_skip);
    put(gap);
    next = index[j] + 1;
  }
}

// A power of two for which the largest of k values becomes at most 2^15; 1 if all are zero.
inline float half_scale(const float* value, std::size_t k) noexcept {
  std::uint32_t most = 0;
  for (std::size_t j = 0; j < k; ++j) most = (std::max)(most, std::bit_cast<std::uint32_t>(value[j]) & 0x7fffffffu);
  if (most == 0) return 1.0f;
  const int exponent = (std::max)(static_cast<int>(most >> 23), 1) - 127 - 14;  // values below 2^(exponent + 15)
  const int clamped = (std::max)(-126, (std::min)(126, exponent));
  return std::bit_cast<float>(static_cast<std::uint32_t>(clamped + 127) << 23);
}
}  // namespace detail

/// @brief Appends a packet without entries that says: this rank's gradient is not finite.
template <class Allocator> void append_flagged(std::vector<std::byte, Allocator>& packet) {
  packet.resize(packet.size() + 8);
  const std::uint32_t head[2] = {1, 0};
  std::memcpy(packet.data() + packet.size() - sizeof head, head, sizeof head);
}

/// @brief Appends a packet: value[j] at index[j], in the shortest form.
/// @param n Elements of the tensor, below 2^32 - 1. @param index Rising, each below n. @param value As many, finite.
/// @param k How many. @param kind How values travel; with f16, read the packet for what they became.
/// @param packet Where it is appended.
/// Throws: argument_error if n is 2^32 - 1 or more.
template <class Allocator>
void append_sparse(std::size_t n, const std::uint32_t* index, const float* value, std::size_t k, sparse_values kind,
                   std::vector<std::byte, Allocator>& packet) {
  if (n >= 0xffffffffull) {
    throw argument_error("heddle::append_sparse: a tensor of " + std::to_string(n) +
                         " elements, allowed is below 2^32 - 1");
  }
  const detail::sparse_form form = detail::shortest_form(n, index, k, kind);
  const bool all = form.indices == sparse_indices::everything, half = kind == sparse_values::f16;
  const std::size_t values = detail::padded4(detail::sparse_value_bytes(kind) * (all ? n : k)), at = packet.size();
  packet.resize(at + 8 + (half ? 4 : 0) + form.bytes + values);  // what no element reaches is zero
  std::byte* out = packet.data() + at;
  const std::uint32_t head[2] = {static_cast<std::uint32_t>(form.bytes / 4 << 4) |
                                     static_cast<std::uint32_t>(kind) << 3 |
                                     static_cast<std::uint32_t>(form.indices) << 1,
                                 static_cast<std::uint32_t>(all ? n : k)};
  std::memcpy(out, head, sizeof head);
  out += sizeof head;
  const float scale = half ? detail::half_scale(value, k) : 1.0f;
  if (half) {
    std::memcpy(out, &scale, 4);
    out += 4;
  }
  switch (form.indices) {
    case sparse_indices::index32:
      if (k) std::memcpy(out, index, 4 * k);
      break;
    case sparse_indices::gap16: detail::write_gaps(index, k, out); break;
    case sparse_indices::bitmap:
      for (std::size_t j = 0; j < k; ++j) out[index[j] / 8] |= static_cast<std::byte>(1u << index[j] % 8);
      break;
    case sparse_indices::everything: break;
  }
  out += form.bytes;
  if (!half && !all) {
    if (k) std::memcpy(out, value, 4 * k);
  } else if (!half) {
    for (std::size_t j = 0; j < k; ++j) std::memcpy(out + 4 * std::size_t{index[j]}, value + j, 4);
  } else {
    const float inverse = 1.0f / scale;
    for (std::size_t j = 0; j < k; ++j) {
      const float16 h(value[j] * inverse);
      std::memcpy(out + 2 * (all ? std::size_t{index[j]} : j), &h, 2);
    }
  }
}

/// @brief A packet as it arrived: what it says, and its entries block by block.
class sparse_packet {
 public:
  /// @param bytes A packet, and what may follow it. Throws: argument_error if it is cut or its head is damaged.
  explicit sparse_packet(slice<const std::byte> bytes) : at_(bytes.data) {
    std::uint32_t head[2] = {};
    if (bytes.count < sizeof head) refuse("it has " + std::to_string(bytes.count) + " bytes");
    std::memcpy(head, at_, sizeof head);
    flagged_ = head[0] & 1;
    indices_ = static_cast<sparse_indices>(head[0] >> 1 & 3);
    values_ = static_cast<sparse_values>(head[0] >> 3 & 1);
    index_bytes_ = std::size_t{head[0] >> 4} * 4;
    entries_ = head[1];
    const bool half = values_ == sparse_values::f16;
    bytes_ = 8 + (half ? 4 : 0) + index_bytes_ + detail::padded4(detail::sparse_value_bytes(values_) * entries_);
    if (bytes.count < bytes_) {
      refuse("it is cut at " + std::to_string(bytes.count) + " bytes of " + std::to_string(bytes_));
    }
    at_ += 8;
    if (half) {
      std::memcpy(&scale_, at_, 4);
      at_ += 4;
      if (!(scale_ > 0.0f && scale_ <= 0x1p126f)) refuse("its scale is " + std::to_string(scale_));
    }
    value_ = at_ + index_bytes_;
    index_end_ = value_;
    const bool fits = indices_ == sparse_indices::index32  ? index_bytes_ == 4 * entries_
                      : indices_ == sparse_indices::gap16  ? index_bytes_ >= 2 * entries_
                      : indices_ == sparse_indices::bitmap ? 8 * index_bytes_ >= entries_
                                                           : index_bytes_ == 0;
    if (!fits) refuse(std::to_string(index_bytes_) + " bytes of indices for " + std::to_string(entries_) + " entries");
  }

  /// Bytes of the packet.
  std::size_t bytes() const noexcept { return bytes_; }
  /// Number of values; in the form `everything` zeros count.
  std::size_t entries() const noexcept { return entries_; }
  /// Whether its rank's gradient was not finite.
  bool flagged() const noexcept { return flagged_; }
  /// How its indices travel.
  sparse_indices indices() const noexcept { return indices_; }
  /// How its values travel.
  sparse_values values() const noexcept { return values_; }

  /// @brief Reads the next entries. @return Whether there were any.
  /// @param block Receives them. @param n Elements of the tensor.
  /// Throws: argument_error if an index isn't below n and above the one before, or the number of entries is not as the
  /// head says.
  bool read(sparse_block& block, std::size_t n) {
    const std::size_t most = (std::min)(entries_ - done_, sparse_block::most);
    block.count = 0;
    if (most == 0) return false;
    switch (indices_) {
      case sparse_indices::index32:
        std::memcpy(block.index, at_, 4 * most);
        at_ += 4 * most;
        block.count = most;
        break;
      case sparse_indices::gap16: read_gaps(block, most, n); break;
      case sparse_indices::bitmap: read_bits(block, most); break;
      case sparse_indices::everything:
        for (; block.count < most; ++block.count)
          block.index[block.count] = static_cast<std::uint32_t>(done_ + block.count);
        break;
    }
    bool good = block.count == most && block.index[0] >= next_ && block.index[most - 1] < n;
    if (indices_ == sparse_indices::index32) {  // the other forms can't but rise
      for (std::size_t j = 1; j < block.count; ++j) good &= block.index[j] > block.index[j - 1];
    }
    if (!good) refuse("its indices are not " + std::to_string(entries_) + " rising ones below " + std::to_string(n));
    next_ = std::uint64_t{block.index[most - 1]} + 1;
    if (values_ == sparse_values::f32) {
      std::memcpy(block.value, value_, 4 * most);
      value_ += 4 * most;
    } else {
      float16 half[sparse_block::most];
      std::memcpy(static_cast<void*>(half), value_, 2 * most);
      convert_scaled(half, block.value, most, scale_);
      value_ += 2 * most;
    }
    done_ += most;
    return true;
  }

 private:
  [[noreturn]] static void refuse(const std::string& why) {
    throw argument_error("heddle::sparse_packet: damaged packet, " + why);
  }

  void read_gaps(sparse_block& block, std::size_t most, std::size_t n) {
    std::uint64_t place = place_;
    std::size_t count = 0;
    while (count < most && at_ + 2 <= index_end_) {
      std::uint16_t gap;
      std::memcpy(&gap, at_, 2);
      at_ += 2;
      place += gap;
      if (gap != detail::gap_skip) block.index[count++] = static_cast<std::uint32_t>(place++);
    }
    place_ = place;
    block.count = place <= n ? count : 0;  // else damaged
  }

  void read_bits(sparse_block& block, std::size_t most) {
    while (block.count < most) {
      while (bits_ == 0) {
        if (at_ == index_end_) return;
        std::memcpy(&bits_, at_, 4);
        at_ += 4;
        place_ += 32;
      }
      block.index[block.count++] =
          static_cast<std::uint32_t>(place_ - 32) + static_cast<std::uint32_t>(std::countr_zero(bits_));
      bits_ &= bits_ - 1;
    }
    if (done_ + most < entries_) return;
    for (std::uint32_t word; bits_ == 0 && at_ != index_end_; at_ += 4) {
      std::memcpy(&word, at_, 4);
      bits_ = word;
    }
    if (bits_ != 0) refuse("more bits than its " + std::to_string(entries_) + " entries");
  }

  const std::byte *at_, *value_ = nullptr, *index_end_ = nullptr;
  std::size_t bytes_ = 0, index_bytes_ = 0, entries_ = 0, done_ = 0;
  std::uint64_t place_ = 0, next_ = 0;  // where a distance or a word of bits begins; the lowest index allowed
  std::uint32_t bits_ = 0;
  float scale_ = 1.0f;
  sparse_indices indices_{};
  sparse_values values_{};
  bool flagged_ = false;
};

/// @brief Calls f(index, value) for each entry of a packet, in rising order of the index.
/// @param bytes The packet, and what may follow it. @param n Elements of the tensor. @param f What to call.
/// @return Bytes of the packet.
/// Throws: argument_error on a damaged packet, before f has seen the block of entries in which the damage is.
template <class Function> std::size_t for_each_entry(slice<const std::byte> bytes, std::size_t n, Function&& f) {
  sparse_packet packet(bytes);
  sparse_block block;
  while (packet.read(block, n)) {
    for (std::size_t j = 0; j < block.count; ++j) f(block.index[j], block.value[j]);
  }
  return packet.bytes();
}

/// @brief sum[index] += value for each entry of a packet.
/// @return Bytes of the packet. Throws: argument_error on a damaged packet.
inline std::size_t add_sparse(slice<const std::byte> bytes, slice<float> sum) {
  return for_each_entry(bytes, sum.count, [&](std::uint32_t i, float v) { sum[i] += v; });
}

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace detail {

/// @cond
template <std::size_t Bytes> struct unsigned_of;
template <> struct unsigned_of<1> { using type = std::uint8_t; };
template <> struct unsigned_of<2> { using type = std::uint16_t; };
template <> struct unsigned_of<4> { using type = std::uint32_t; };
template <> struct unsigned_of<8> { using type = std::uint64_t; };
/// @endcond

/// A key as an unsigned number that sorts the same way.
template <class Key> inline auto radix_key(Key key) noexcept {
  using bits_type = typename unsigned_of<sizeof(Key)>::type;
  constexpr bits_type top = static_cast<bits_type>(bits_type{1} << (CHAR_BIT * sizeof(Key) - 1));
  if constexpr (std::is_floating_point_v<Key>) {
    if (key == Key{0}) key = Key{0};  // -0 equals 0
  }
  bits_type bits;
  std::memcpy(&bits, &key, sizeof bits);
  if constexpr (std::is_floating_point_v<Key>) {
    return static_cast<bits_type>(bits & top ? ~bits : bits | top);
  } else if constexpr (std::is_signed_v<Key>) {
    return static_cast<bits_type>(bits ^ top);
  } else {
    return bits;
  }
}

/// Stable least-significant-digit radix sort of n pairs; `other_keys` and `other_values` hold n each.
template <class Key, class Value>
void radix_sort_pairs(Key* keys, Value* values, Key* other_keys, Value* other_values, std::size_t n) {
  Key *from_keys = keys, *to_keys = other_keys;
  Value *from_values = values, *to_values = other_values;
  for (std::size_t digit = 0; digit < sizeof(Key); ++digit) {
    const auto digit_of = [digit](Key key) { return static_cast<std::size_t>(radix_key(key) >> (8 * digit)) & 255u; };
    std::size_t start[256] = {};
    for (std::size_t i = 0; i < n; ++i) ++start[digit_of(from_keys[i])];
    if (start[digit_of(from_keys[0])] == n) continue;  // all keys share this digit
    std::size_t sum = 0;
    for (std::size_t& s : start) sum += std::exchange(s, sum);
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t place = start[digit_of(from_keys[i])]++;
      to_keys[place] = from_keys[i];
      to_values[place] = from_values[i];
    }
    std::swap(from_keys, to_keys);
    std::swap(from_values, to_values);
  }
  if (from_keys != keys) {
    for (std::size_t i = 0; i < n; ++i) keys[i] = from_keys[i];
    for (std::size_t i = 0; i < n; ++i) values[i] = from_values[i];
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

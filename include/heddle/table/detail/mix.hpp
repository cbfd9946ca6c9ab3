// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/config.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace heddle {
inline namespace v0 {
namespace detail {

// Spreads a key's bits over all 64 (the finaliser of SplitMix64). It is a bijection, so the mixed key stands for the
// key: two are equal exactly where the keys are, and no value is left over for a sentinel.
HEDDLE_HD constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The key that was mixed.
HEDDLE_HD constexpr std::uint64_t unmix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642b2d24d8ec3ull;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96de1b173f119089ull;
  x = x ^ (x >> 30) ^ (x >> 60);
  return x - 0x9e3779b97f4a7c15ull;
}

// Any integer as 64 bits, and back.
template <class Key> HEDDLE_HD constexpr std::uint64_t widen_key(Key k) noexcept {
  return static_cast<std::uint64_t>(static_cast<std::make_unsigned_t<Key>>(k));
}

// Which virtual shard a mixed key belongs to: its top bits.
HEDDLE_HD constexpr std::uint32_t shard_of(std::uint64_t mixed, unsigned shard_bits) noexcept {
  return shard_bits == 0 ? 0u : static_cast<std::uint32_t>(mixed >> (64u - shard_bits));
}

// floor(x / 2^64 * n) for a fraction x of 64 bits: a place among n, without a division.
HEDDLE_HD constexpr std::uint32_t place_among(std::uint64_t x, std::uint32_t n) noexcept {
  return static_cast<std::uint32_t>(((x >> 32) * n) >> 32);
}

// A check sum over bytes, eight at a time in four chains. Each step is a bijection of the chain for given data and of
// the data for a given chain, so one changed word always shows.
inline std::uint64_t checksum(const void* data, std::size_t n, std::uint64_t seed = 0) noexcept {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint64_t chain[4] = {seed + n, seed ^ 0x9e3779b97f4a7c15ull, ~seed, seed * 3 + 1};
  const auto step = [](std::uint64_t h, std::uint64_t word) {
    h = (h ^ word) * 0x9fb21c651e98df25ull;
    return h ^ (h >> 29);
  };
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (std::size_t k = 0; k < 4; ++k) {
      std::uint64_t word;
      std::memcpy(&word, p + i + 8 * k, 8);
      chain[k] = step(chain[k], word);
    }
  }
  for (std::size_t k = 0; i < n; i += 8, ++k) {
    std::uint64_t word = 0;
    std::memcpy(&word, p + i, n - i < 8 ? n - i : 8);
    chain[k] = step(chain[k], word);
  }
  return mix(step(step(step(chain[0], chain[1]), chain[2]), chain[3]));
}

// The server of a virtual shard, and the first shard of a server: equal runs of shards.
constexpr std::uint32_t first_shard_of(std::uint32_t server, std::uint32_t servers, unsigned shard_bits) noexcept {
  return static_cast<std::uint32_t>((std::uint64_t{server} << shard_bits) / servers);
}
constexpr std::uint32_t server_of(std::uint32_t shard, std::uint32_t servers, unsigned shard_bits) noexcept {
  return static_cast<std::uint32_t>(((std::uint64_t{shard} + 1) * servers - 1) >> shard_bits);
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

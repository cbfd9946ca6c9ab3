// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/config.hpp>

#include <cmath>
#include <cstdint>

namespace heddle {
inline namespace v0 {

/// @brief Philox4x32-10: a random generator that is a pure function of a counter and a key.
///
/// It has no state: any element of any stream can be computed anywhere, in any order, on host or device, with the same
/// bits. So recomputed dropout masks are equal, a resumed run goes on exactly, and ranks agree without talking.
///
/// Paper: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
struct philox4x32 {
  /// Four 32-bit words: a counter, or four independent uniform random words.
  struct block {
    std::uint32_t word[4];  ///< The words.
    /// Equal words.
    HEDDLE_HD friend constexpr bool operator==(const block& a, const block& b) noexcept {
      return a.word[0] == b.word[0] && a.word[1] == b.word[1] && a.word[2] == b.word[2] && a.word[3] == b.word[3];
    }
  };
  /// The key: two 32-bit words.
  struct key {
    std::uint32_t word[2];  ///< The words.
  };

  /// The random words that belong to a counter and a key: ten rounds.
  HEDDLE_HD static constexpr block generate(block counter, key k) noexcept {
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter.word[0];
      const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * counter.word[2];
      counter =
          block{{static_cast<std::uint32_t>(b >> 32) ^ counter.word[1] ^ k.word[0], static_cast<std::uint32_t>(b),
                 static_cast<std::uint32_t>(a >> 32) ^ counter.word[3] ^ k.word[1], static_cast<std::uint32_t>(a)}};
      k.word[0] += 0x9E3779B9u;
      k.word[1] += 0xBB67AE85u;
    }
    return counter;
  }
};

/// @brief Names a stream: one per parameter (or layer) and step, so that no two uses share random words.
/// @param parameter Index of the parameter, layer or other consumer. @param step The training step, below 2^32.
HEDDLE_HD constexpr std::uint64_t random_stream(std::uint32_t parameter, std::uint32_t step) noexcept {
  return (std::uint64_t{parameter} << 32) | step;
}

/// @brief Block `index` of a stream: four random words.
/// @param seed The run's seed, all 64 bits used. @param stream See `random_stream`. @param index Any value.
HEDDLE_HD constexpr philox4x32::block philox(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) noexcept {
  return philox4x32::generate({{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                                static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)}},
                              {{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)}});
}

/// @brief A random word as a float in [0, 1): a multiple of 2^-24, each equally likely, the same bits everywhere.
HEDDLE_HD constexpr float to_uniform(std::uint32_t word) noexcept { return static_cast<float>(word >> 8) * 0x1p-24f; }

/// @brief Two independent standard normal numbers.
struct normal_pair {
  float first;   ///< One.
  float second;  ///< The other.
};

/// @brief Two random words as two standard normal numbers, by Box and Muller's transform; magnitude at most 5.77.
///
/// The logarithm, sine and cosine are the platform's: host and device may differ in the last bits.
HEDDLE_HD inline normal_pair to_normal(std::uint32_t a, std::uint32_t b) noexcept {
  const float radius = ::sqrtf(-2.0f * ::logf(1.0f - to_uniform(a)));  // the argument is in (0, 1]
  const float angle = 6.283185307179586f * to_uniform(b);
  return {radius * ::cosf(angle), radius * ::sinf(angle)};
}

/// @brief Element i of a stream of uniform floats in [0, 1): word i % 4 of block i / 4.
HEDDLE_HD constexpr float random_uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t i) noexcept {
  return to_uniform(philox(seed, stream, i / 4).word[i % 4]);
}

/// @brief Element i of a stream of standard normal floats: of block i / 4, words 0 and 1 give two, words 2 and 3 two.
HEDDLE_HD inline float random_normal(std::uint64_t seed, std::uint64_t stream, std::uint64_t i) noexcept {
  const philox4x32::block b = philox(seed, stream, i / 4);
  const normal_pair p = i % 4 < 2 ? to_normal(b.word[0], b.word[1]) : to_normal(b.word[2], b.word[3]);
  return i % 2 == 0 ? p.first : p.second;
}

}  // namespace v0
}  // namespace heddle

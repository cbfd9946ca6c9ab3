// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/float16.hpp>
#include <heddle/core/philox.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace heddle {
inline namespace v0 {

/// @brief Weights of a row as 8-bit numbers with one scale per row: for tables that are only read.
///
/// weight = scale * q, q in [-127, 127], scale = largest finite magnitude / 127; the error is at most half of scale.
/// Infinity is stored as the largest, NaN as 0.
struct scaled_int8 {};

namespace detail {
// A float that a 16-bit type can hold: within its range, as it is otherwise.
template <class Half> HEDDLE_HD constexpr float held(float x) noexcept {
  constexpr float most = std::is_same_v<Half, float16> ? 65504.0f : 0x1.fep127f;
  return x > most ? most : x < -most ? -most : x;
}

// Rounds to one of the two neighbours, by 16 random bits added below the last bit kept: the mean is x.
template <class Half> HEDDLE_HD constexpr Half round_by(float x, std::uint32_t random) noexcept {
  x = held<Half>(x);
  if (x != x) return Half(x);
  if constexpr (std::is_same_v<Half, float16>) {
    const float magnitude = x < 0 ? -x : x;
    if (magnitude < 0x1p-14f) {  // subnormal: steps of 2^-24
      const float steps = magnitude * 0x1p24f + static_cast<float>(random >> 2) * 0x1p-14f;  // 24 bits at most
      const float cut = static_cast<float>(static_cast<std::uint32_t>(steps)) * 0x1p-24f;
      return Half(x < 0 ? -cut : cut);
    }
    return Half(__builtin_bit_cast(float, (__builtin_bit_cast(std::uint32_t, x) + (random >> 3)) & ~0x1fffu));
  } else {
    return Half(__builtin_bit_cast(float, (__builtin_bit_cast(std::uint32_t, x) + random) & ~0xffffu));
  }
}
}  // namespace detail

/// @brief The weights of a row: how many, and how they are stored.
///
/// Rules compute in float. float16 and bfloat16 weights are rounded stochastically when they are stored after a step,
/// so that small steps count on average; the random bits are a function of the key and of the shard's number of steps.
/// A weight beyond the range of its type is stored as the largest finite one.
/// @tparam Dim Weights in a row, 1 or above. @tparam Weight float, float16, bfloat16 or scaled_int8.
template <std::size_t Dim, class Weight = float> struct row {
  static_assert(Dim >= 1, "heddle::row: Dim must be 1 or above");
  static_assert(std::is_same_v<Weight, float> || std::is_same_v<Weight, float16> || std::is_same_v<Weight, bfloat16> ||
                    std::is_same_v<Weight, scaled_int8>,
                "heddle::row: Weight must be float, float16, bfloat16 or scaled_int8");
  static constexpr std::size_t dim = Dim;  ///< Weights in a row.
  /// Whether weights are stored as the rules see them.
  static constexpr bool plain = std::is_same_v<Weight, float>;
  /// Whether a row can be trained: int8 rows can't.
  static constexpr bool trainable = !std::is_same_v<Weight, scaled_int8>;
  /// Bytes that they take.
  static constexpr std::size_t bytes = trainable ? Dim * sizeof(Weight) : Dim + sizeof(float);
  /// The type's name, in files and messages.
  static constexpr const char* type_name() noexcept {
    return plain ? "f32" : std::is_same_v<Weight, float16> ? "f16" : std::is_same_v<Weight, bfloat16> ? "bf16" : "i8";
  }

  /// Reads the weights. @param from Stored ones. @param to Dim floats.
  HEDDLE_HD static void load(const std::byte* from, float* to) noexcept {
    if constexpr (plain) {
      std::memcpy(to, from, bytes);
    } else if constexpr (trainable) {
      for (std::size_t i = 0; i < Dim; ++i) {
        Weight w;
        std::memcpy(static_cast<void*>(&w), from + 2 * i, 2);
        to[i] = static_cast<float>(w);
      }
    } else {
      float scale;
      std::memcpy(&scale, from, 4);
      for (std::size_t i = 0; i < Dim; ++i) to[i] = scale * static_cast<float>(static_cast<signed char>(from[4 + i]));
    }
  }
  /// Writes weights, rounded to nearest: how a row begins, and how it is served.
  /// @param from Dim floats. @param to Where they are stored.
  HEDDLE_HD static void store(const float* from, std::byte* to) noexcept {
    if constexpr (plain) {
      std::memcpy(to, from, bytes);
    } else if constexpr (trainable) {
      for (std::size_t i = 0; i < Dim; ++i) {
        const Weight w(detail::held<Weight>(from[i]));
        std::memcpy(to + 2 * i, &w, 2);
      }
    } else {
      float most = 0.0f;
      for (std::size_t i = 0; i < Dim; ++i) {
        const float a = std::fabs(from[i]);
        most = a > most && a <= 0x1.fffffep127f ? a : most;
      }
      const float scale = most / 127.0f;
      std::memcpy(to, &scale, 4);
      for (std::size_t i = 0; i < Dim; ++i) {
        const float q = scale > 0.0f ? std::rint(from[i] / scale) : 0.0f;
        to[4 + i] = static_cast<std::byte>(static_cast<signed char>(q > 127.0f    ? 127.0f
                                                                    : q < -127.0f ? -127.0f
                                                                    : q == q      ? q
                                                                                  : 0.0f));
      }
    }
  }
  /// Writes weights after a step, rounded at random where they are rounded.
  /// @param from Dim floats. @param to Where they are stored. @param mixed The mixed key. @param count Any number that
  /// no other step of this row has.
  HEDDLE_HD static void store(const float* from, std::byte* to, std::uint64_t mixed, std::uint64_t count) noexcept {
    if constexpr (plain || !trainable) {
      store(from, to);
    } else {
      philox4x32::block random{};
      for (std::size_t i = 0; i < Dim; ++i) {
        if (i % 8 == 0) random = philox(mixed, i / 8, count);
        const auto w = detail::round_by<Weight>(from[i], random.word[i % 8 / 2] >> (i % 2 * 16) & 0xffffu);
        std::memcpy(to + 2 * i, &w, 2);
      }
    }
  }
};

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/concept.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace heddle {
inline namespace v0 {
namespace detail {

// Where things are in a record: mixed key (8), stamp (4), statistics, optimizer state, weights; whole words of 8.
template <class Row, class Rule, class Eviction> struct row_layout {
  static constexpr std::size_t words = Eviction::words, slots = Rule::slots(Row::dim);
  static constexpr std::size_t state_at = 12, slots_at = 12 + 4 * words, weights_at = slots_at + 4 * slots;
  static constexpr std::size_t used = weights_at + Row::bytes, bytes = (used + 7) / 8 * 8;

  HEDDLE_HD static std::uint32_t* statistics(std::byte* p) noexcept {
    return reinterpret_cast<std::uint32_t*>(p + state_at);
  }
  HEDDLE_HD static float* state(std::byte* p) noexcept { return reinterpret_cast<float*>(p + slots_at); }
  HEDDLE_HD static void stamp(std::byte* p, std::uint32_t epoch) noexcept { std::memcpy(p + 8, &epoch, 4); }
  HEDDLE_HD static std::uint32_t stamp(const std::byte* p) noexcept {
    std::uint32_t s;
    std::memcpy(&s, p + 8, 4);
    return s;
  }
  // What an eviction says of a row's statistics. Where asking has changed them, the row has changed in this epoch.
  template <class Ask> static auto judge(std::byte* p, std::uint32_t epoch, Ask ask) noexcept {
    std::uint32_t* const w = statistics(p);
    std::uint32_t former[words + 1];
    std::memcpy(former, w, 4 * words);
    const auto said = ask(w);
    if (std::memcmp(former, w, 4 * words) != 0) stamp(p, epoch);
    return said;
  }
  template <class Initial>
  HEDDLE_HD static void begin(const Rule& rule, const Initial& initial, std::byte* p, std::uint64_t seed,
                              std::uint32_t table, std::uint64_t key) noexcept {
    std::memset(p + state_at, 0, bytes - state_at);
    if constexpr (requires { rule.template start<Row::dim>(state(p)); }) rule.template start<Row::dim>(state(p));
    float weights[Row::dim];
    initial.template fill<Row::dim>(weights, seed, table, key);
    Row::store(weights, p + weights_at);
  }
  HEDDLE_HD static void update(const Rule& rule, std::byte* p, std::uint64_t mixed, const float* gradient,
                               const row_context& context, std::uint64_t step) noexcept {
    if constexpr (Row::plain) {
      rule.template update<Row::dim>(reinterpret_cast<float*>(p + weights_at), state(p), gradient, context);
    } else {
      float weights[Row::dim];
      Row::load(p + weights_at, weights);
      rule.template update<Row::dim>(weights, state(p), gradient, context);
      Row::store(weights, p + weights_at, mixed, step);
    }
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

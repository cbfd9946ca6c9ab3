// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/detail/shared_loops.hpp>

#include <concepts>

namespace heddle {
inline namespace v0 {

/// @name How threads touch parameters that others change meanwhile (Hogwild)
///
/// All have the same five operations on rows of n floats: `read`, `write`, `add`, `accumulate` for one row, `dots` and
/// `exchange` for several rows at once, as negative sampling needs. What is `shared` or in `rows` may be changed by
/// other threads meanwhile through any of these policies; what is `own`, `error`, `factors` or `out` belongs to the
/// caller. No float is ever torn, whatever its row's alignment; a row as a whole may be of several moments.
/// @{

/// @brief Opaque vector loads and stores: instructions in assembly statements, SSE2, AVX2 or AVX-512 as the processor
/// has them, or NEON. Nearly as fast as a data race, and none: the compiler sees no access to shared memory.
///
/// Guarantee: each float read was written by somebody, or by the caller; an addition may overwrite another thread's.
/// State:     none.
/// Traffic:   add 8 bytes read, 4 written per element; exchange 4 read, 4 written per element and row, if own and error
///            stay in cache.
/// Order:     elsewhere than on x86-64 and AArch64 this is `relaxed`. ThreadSanitizer doesn't see into assembly.
/// Throws:    nothing.
struct vector_asm {
  /// own = shared.
  static void read(const float* shared, float* own, std::size_t n) noexcept {
    detail::with_vectors<true>([&](auto loops) { loops.read(shared, own, n); });
  }
  /// shared = own.
  static void write(float* shared, const float* own, std::size_t n) noexcept {
    detail::with_vectors<true>([&](auto loops) { loops.write(shared, own, n); });
  }
  /// shared += factor * own.
  static void add(float* shared, const float* own, float factor, std::size_t n) noexcept {
    detail::with_vectors<true>([&](auto loops) { loops.add(shared, own, factor, n); });
  }
  /// own += shared.
  static void accumulate(const float* shared, float* own, std::size_t n) noexcept {
    detail::with_vectors<true>([&](auto loops) { loops.accumulate(shared, own, n); });
  }
  /// out[k] = own . rows[k], for `count` rows.
  static void dots(const float* own, float* const* rows, std::size_t count, std::size_t n, float* out) noexcept {
    detail::with_vectors<true>([&](auto loops) { loops.dots(own, rows, count, n, out); });
  }
  /// For each row k: error += factors[k] * rows[k], then rows[k] += factors[k] * own. A row may come twice.
  static void exchange(const float* own, float* const* rows, const float* factors, std::size_t count, std::size_t n,
                       float* error) noexcept {
    detail::with_vectors<true>([&](auto loops) { loops.exchange(own, rows, factors, count, n, error); });
  }
  /// "vector_asm".
  static constexpr const char* name() noexcept { return "vector_asm"; }
};

/// @brief Relaxed atomic loads and stores: portable, seen by ThreadSanitizer, several times slower, since compilers
/// make no vectors of atomics.
///
/// Guarantee: as `vector_asm`.
struct relaxed : detail::shared_elements<detail::relaxed_access> {
  /// "relaxed".
  static constexpr const char* name() noexcept { return "relaxed"; }
};

/// @brief As `relaxed`, but `add` and `exchange` lose no addition of any thread: a compare-and-swap per float.
///
/// Guarantee: every addition is in the final value; sums round in the order in which they happen.
struct fetch_add : detail::shared_elements<detail::fetch_add_access> {
  /// "fetch_add".
  static constexpr const char* name() noexcept { return "fetch_add"; }
};
/// @}

/// @brief A race policy: the operations of `vector_asm`.
template <class Race>
concept race_policy = requires(const float* own, float* mine, float* shared, float* const* rows, std::size_t n) {
  Race::read(own, mine, n);
  Race::write(shared, own, n);
  Race::add(shared, own, 1.0f, n);
  Race::accumulate(own, mine, n);
  Race::dots(own, rows, n, n, mine);
  Race::exchange(own, rows, own, n, n, mine);
  { Race::name() } -> std::convertible_to<const char*>;
};
static_assert(race_policy<vector_asm> && race_policy<relaxed> && race_policy<fetch_add>);

}  // namespace v0
}  // namespace heddle

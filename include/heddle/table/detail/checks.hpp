// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace heddle {
inline namespace v0 {
namespace detail {

// What tables ask of a batch before anything changes. `who`: the class and the function.
[[noreturn]] inline void throw_sizes(const std::string& who, std::size_t keys, std::size_t given, const char* of) {
  throw argument_error("heddle::" + who + ": " + std::to_string(keys) + " keys and " + std::to_string(given) + " " +
                       of + "; allowed are fewer than 2^31 keys, and as much for each");
}
inline void check_sizes(const char* who, std::size_t keys, std::size_t floats, std::size_t dim, const char* of) {
  if (keys >> 31 != 0 || floats != keys * dim) throw_sizes(who, keys, floats, of);
}
// Shows, clicks or times: none, or one for each key, so that sums of a batch are finite.
inline void check_sightings(const char* who, std::size_t keys, std::initializer_list<std::span<const float>> parts) {
  for (const std::span<const float> part : parts) {
    if (part.empty()) continue;
    if (part.size() != keys) throw_sizes(who, keys, part.size(), "shows, clicks or times");
    for (const float x : part) {
      if (!(x >= 0.0f && x <= 0x1p32f))
        throw argument_error("heddle::" + std::string(who) + ": shows, clicks or times hold " + std::to_string(x) +
                             ", allowed is 0 to 2^32");
    }
  }
}
inline void check_worker(std::uint32_t worker) {
  if (worker > 0xffff)
    throw argument_error("heddle::sparse_table: worker is " + std::to_string(worker) + ", allowed is 0 to 65535");
}
template <class... Policy> void check_policies(const Policy&... p) {
  const auto check = [](const auto& x) {
    if constexpr (requires { x.check(); }) x.check();
  };
  (check(p), ...);
}
template <class Settings> void check_shards(const Settings& s) {
  if (s.shard_bits > 20)
    throw argument_error("heddle::sparse_table: shard_bits is " + std::to_string(s.shard_bits) +
                         ", allowed is 0 to 20");
  const std::uint32_t all = std::uint32_t{1} << s.shard_bits, last = s.last_shard == 0 ? all : s.last_shard;
  if (s.first_shard >= last || last > all)
    throw argument_error("heddle::sparse_table: shards are [" + std::to_string(s.first_shard) + ", " +
                         std::to_string(s.last_shard) + "), allowed is a part of [0, " + std::to_string(all) +
                         ") that isn't empty");
}
// A bound in bytes below what each shard takes with its first row can't be kept.
inline void check_bound(std::size_t bytes, unsigned shard_bits, std::size_t least) {
  if (bytes >> shard_bits < least)
    throw argument_error("heddle::sparse_table: the eviction's bytes are " + std::to_string(bytes) + ", allowed is " +
                         std::to_string(least) + " and above for each of the 2^" + std::to_string(shard_bits) +
                         " shards");
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

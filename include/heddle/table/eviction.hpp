// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/table/concept.hpp>

#include <bit>

namespace heddle {
inline namespace v0 {

/// @brief Which rows go; see the concept `table_eviction`. A row that comes again begins anew, with the same initial
/// weights.
namespace evict {

/// @brief None.
struct never {
  static constexpr std::size_t words = 0;  ///< Statistics per row.
  /// Nothing.
  void touch(std::uint32_t*, const sighting&, std::uint32_t, std::uint64_t) const noexcept {}
  /// "never".
  std::string name() const { return "never"; }
};

/// @brief At `evict()`: rows that were not pushed for more than so many ticks of `advance()`.
struct ttl {
  std::uint32_t ticks = 30;  ///< A row that was pushed so many ticks ago stays.

  static constexpr std::size_t words = 1;  ///< Statistics per row: the tick of the last push.
  /// Remembers the tick.
  void touch(std::uint32_t* w, const sighting&, std::uint32_t now, std::uint64_t) const noexcept { w[0] = now; }
  /// Whether it is too long ago.
  bool expired(std::uint32_t* w, std::uint32_t now) const noexcept { return now > w[0] && now - w[0] > ticks; }
  /// "ttl".
  std::string name() const { return "ttl"; }
};

/// @brief At `evict()`: shows and clicks decay, then rows go whose score (show - click) nonclick + click * click_weight
/// is below a threshold, and those not pushed for more than so many ticks.
struct score {
  float decay = 0.98f;        ///< What remains of shows and clicks, in [0, 1].
  float nonclick = 0.1f;      ///< What a show without a click counts.
  float click_weight = 1.0f;  ///< What a click counts.
  float threshold = 0.8f;     ///< Below it a row goes.
  std::uint32_t ticks = 30;   ///< A row that was pushed so many ticks ago may stay.

  static constexpr std::size_t words = 3;  ///< Statistics per row: show, click, the tick of the last push.
  /// Throws argument_error for a number outside its range.
  void check() const {
    if (!(decay >= 0.0f && decay <= 1.0f))
      throw argument_error("heddle::evict::score: decay is " + std::to_string(decay) + ", allowed is [0, 1]");
  }
  /// Adds to shows and clicks.
  void touch(std::uint32_t* w, const sighting& s, std::uint32_t now, std::uint64_t) const noexcept {
    w[0] = std::bit_cast<std::uint32_t>(std::bit_cast<float>(w[0]) + s.show);
    w[1] = std::bit_cast<std::uint32_t>(std::bit_cast<float>(w[1]) + s.click);
    w[2] = now;
  }
  /// Lets time pass, and says whether the row goes.
  bool expired(std::uint32_t* w, std::uint32_t now) const noexcept {
    const float show = std::bit_cast<float>(w[0]) * decay, click = std::bit_cast<float>(w[1]) * decay;
    w[0] = std::bit_cast<std::uint32_t>(show);
    w[1] = std::bit_cast<std::uint32_t>(click);
    return (show - click) * nonclick + click * click_weight < threshold || (now > w[2] && now - w[2] > ticks);
  }
  /// "score".
  std::string name() const { return "score"; }
};

/// @brief As soon as a shard has its part of `bytes`: the eighth of its rows that were pushed longest ago.
struct lru {
  /// What rows and index of the table may take between batches, at least a chunk and a page (some 5 KiB) per shard.
  std::size_t bytes = 0;

  static constexpr std::size_t words = 1;  ///< Statistics per row: the shard's count of steps at the last push.
  /// Throws argument_error for a number outside its range.
  void check() const {
    if (bytes == 0) throw argument_error("heddle::evict::lru: bytes is 0, allowed is 1 and above");
  }
  /// Remembers the count.
  void touch(std::uint32_t* w, const sighting&, std::uint32_t, std::uint64_t count) const noexcept {
    w[0] = static_cast<std::uint32_t>(count);
  }
  /// Lower ones go first; right while no row is older than 2^32 steps of its shard.
  std::uint32_t rank(std::uint32_t* w, std::uint64_t count) const noexcept {
    return ~(static_cast<std::uint32_t>(count) - w[0]);
  }
  /// "lru".
  std::string name() const { return "lru"; }
};

/// @brief As soon as a shard has its part of `bytes`: the eighth of its rows that were pushed least often, where
/// pushes of former times count half each time.
struct lfu {
  /// What rows and index of the table may take between batches, at least a chunk and a page (some 5 KiB) per shard.
  std::size_t bytes = 0;

  static constexpr std::size_t words = 1;  ///< Statistics per row: pushes.
  /// Throws argument_error for a number outside its range.
  void check() const {
    if (bytes == 0) throw argument_error("heddle::evict::lfu: bytes is 0, allowed is 1 and above");
  }
  /// Counts.
  void touch(std::uint32_t* w, const sighting& s, std::uint32_t, std::uint64_t) const noexcept {
    const std::uint32_t more = s.times < 0x1p32f ? static_cast<std::uint32_t>(s.times) : 0xffffffffu;
    w[0] = w[0] > 0xffffffffu - more ? 0xffffffffu : w[0] + more;
  }
  /// Lower ones go first. Asking lets time pass: the count is halved.
  std::uint32_t rank(std::uint32_t* w, std::uint64_t) const noexcept {
    const std::uint32_t former = w[0];
    w[0] /= 2;
    return former;
  }
  /// "lfu".
  std::string name() const { return "lfu"; }
};

static_assert(table_eviction<never> && expiring_eviction<ttl> && expiring_eviction<score> && bounded_eviction<lru> &&
              bounded_eviction<lfu>);

}  // namespace evict
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/concept.hpp>
#include <heddle/mode/race.hpp>

#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief Hogwild: threads update one set of parameters without locks.
///
/// Each thread reads shared parameters as they are, computes a gradient, and adds its update to what is there then.
/// Sparse updates seldom meet; where they do, `vector_asm` and `relaxed` may lose one, `fetch_add` none. With one
/// thread every policy gives the same bits in every run.
///
/// Wire:    nothing.
/// State:   one copy of the parameters for all threads.
/// Traffic: the race policy's.
/// Order:   ranks that are threads of one process; no compressor.
/// Sync:    never.
/// Paper:   Niu, Recht, Re, Wright 2011.
/// Throws:  nothing.
/// @tparam Race A race_policy.
template <class Race = vector_asm> struct hogwild {
  static_assert(race_policy<Race>,
                "heddle::hogwild: the template argument must be a race policy, such as vector_asm; see docs/mode.md");
  using race = Race;                                    ///< How shared parameters are read and changed.
  static constexpr average averages = average::shared;  ///< Nothing: there is one copy.
  static constexpr bool outer_momentum = false;         ///< None.

  /// Never.
  bool meets(std::size_t) const noexcept { return false; }
  /// "hogwild" and the policy.
  std::string name() const { return std::string("hogwild ") + Race::name(); }
};
static_assert(mode<hogwild<>>);

/// @brief Counts what threads have done: each has a counter of its own, so none is lost and none is fought for.
class thread_counters {
 public:
  /// @param threads Number of counters.
  explicit thread_counters(std::size_t threads) : counts_(threads) {}

  /// Adds to the counter of a thread; only that thread may.
  void add(std::size_t thread, std::uint64_t n) noexcept {
    std::atomic<std::uint64_t>& mine = counts_[thread].value;
    mine.store(mine.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  /// Sum over all threads: exact once they have ended, else of some moment of each. From any thread.
  std::uint64_t sum() const noexcept {
    std::uint64_t all = 0;
    for (const one& c : counts_) all += c.value.load(std::memory_order_relaxed);
    return all;
  }

 private:
  struct alignas(64) one {  // a cache line each
    std::atomic<std::uint64_t> value{0};
  };
  std::vector<one> counts_;
};

}  // namespace v0
}  // namespace heddle

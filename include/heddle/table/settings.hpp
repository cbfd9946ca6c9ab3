// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/table/detail/mix.hpp>

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief Settings of a sparse table.
template <class Rule, class Initial, class Admission, class Eviction, class Guard> struct table_settings {
  Rule rule{};               ///< How a push moves a row.
  Initial initial{};         ///< How a row begins.
  Admission admission{};     ///< Which keys get a row.
  Eviction eviction{};       ///< Which rows go.
  Guard guard{};             ///< What becomes of gradients that aren't finite.
  std::uint64_t seed = 0;    ///< Of the initial values, and of `admit::probability`.
  std::uint32_t table = 0;   ///< The table's number: tables of one seed begin differently.
  unsigned shard_bits = 10;  ///< 2^shard_bits virtual shards, 0 to 20. Files keep it; servers share the shards out.
  std::uint32_t first_shard = 0;  ///< This object holds the shards [first_shard, last_shard).
  std::uint32_t last_shard = 0;   ///< 0 is 2^shard_bits.
};

/// @brief What comes with a push.
struct push_options {
  float lr = 0.0f;                  ///< Learning rate.
  std::span<const float> shows{};   ///< A show count per item, or empty: 1 each.
  std::span<const float> clicks{};  ///< Clicks per item, or empty: 0 each.
  std::span<const float> times{};   ///< How many sightings an item stands for, or empty: 1 each.
  std::uint32_t worker = 0;         ///< Who pushes, below 65536; matters with a sequence.
  /// Above 0: the push takes effect in a shard only if no push of this worker with this number or a later one has.
  std::uint64_t sequence = 0;
  /// Gradients are sums that a guard has seen already: each is only looked at for being finite.
  bool summed = false;
};

/// @brief What a push or a pull has done, and what a table has done since it was made.
struct table_counts {
  std::uint64_t applied = 0;   ///< Steps of rows: with a rule that isn't linear a batch's duplicates make one.
  std::uint64_t created = 0;   ///< Rows made.
  std::uint64_t refused = 0;   ///< Keys not admitted, whose gradients were dropped.
  std::uint64_t rejected = 0;  ///< Gradients that weren't finite.
  std::uint64_t repeated = 0;  ///< Gradients dropped since their sequence had been applied before.
  std::uint64_t evicted = 0;   ///< Rows dropped by a bound or by `evict()`.

  /// Adds another's.
  table_counts& operator+=(const table_counts& o) noexcept {
    applied += o.applied, created += o.created, refused += o.refused;
    rejected += o.rejected, repeated += o.repeated, evicted += o.evicted;
    return *this;
  }
};

/// @brief What a push or a pull returns.
template <class Key> struct table_report : table_counts {
  std::vector<Key> gone;  ///< The keys of the rows that a bound dropped.
};

/// Whether a table keeps account of what has changed since the last save, which `save_delta` needs.
namespace changes {
/// 4 bytes per row that are there anyway, and the keys erased since the last save.
struct tracked {
  static constexpr bool on = true;  ///< Account is kept.
};
/// Nothing.
struct untracked {
  static constexpr bool on = false;  ///< No account is kept.
};
}  // namespace changes

/// @brief Settings of a worker's side of a sharded table.
struct worker_options {
  int servers = 1;  ///< Servers have ranks 0 .. servers - 1.
  /// Keys pushed by this worker's threads that are gathered before they are sent; 0 and 1: each push goes at once.
  std::size_t gather = 0;
  std::chrono::nanoseconds gather_for{10'000'000};  ///< And how long at most.
  bool half = false;                                ///< Weights and gradients travel as bfloat16.
  std::size_t log_bytes = std::size_t{64} << 20;  ///< Pushes kept per server until it has saved them; then push waits.
  std::size_t cached_rows = 0;                    ///< Rows kept from former pulls, a power of two, or 0.
  std::uint64_t cached_for = 1;                   ///< For how many pushes of this worker they may be used.
  std::chrono::nanoseconds retry{50'000'000};     ///< First wait for a reply; it doubles up to a second.
  std::chrono::nanoseconds patience{30'000'000'000};  ///< After so long a call without an answer fails.
  /// This worker takes the place of one that died, and makes again the pushes behind `pushed_before()`: a server that
  /// has one of them passes it over.
  bool resumes = false;
  int stands_for = -1;  ///< The worker whose pushes these are, see `sharded_table::next_orphan`; -1: its own.
  /// Where this object's number begins, below 2^63; 0: the wall clock's nanoseconds. A worker's objects have rising
  /// numbers: a server that knows a higher one says so, which costs a round trip. No two objects of a rank begin with
  /// the same: a late answer to the first would count for the second.
  std::uint64_t object = 0;

  /// Throws argument_error for a number outside its range.
  void check() const {
    constexpr std::chrono::nanoseconds year = std::chrono::hours(24 * 365);
    if (!(retry.count() > 0 && retry <= year && patience.count() > 0 && patience <= year && gather_for.count() >= 0 &&
          cached_for > 0 && stands_for >= -1 && stands_for < 0x3fff && object >> 63 == 0))
      throw argument_error("heddle::worker_options: retry " + std::to_string(retry.count()) + " ns, patience " +
                           std::to_string(patience.count()) + " ns, gather_for " + std::to_string(gather_for.count()) +
                           " ns, cached_for " + std::to_string(cached_for) + ", stands_for " +
                           std::to_string(stands_for) + ", object " + std::to_string(object) +
                           "; allowed are more than 0 and up to a year, gather_for also 0, stands_for -1 to 16382, "
                           "object below 2^63");
    if (cached_rows != 0 && !std::has_single_bit(cached_rows))
      throw argument_error("heddle::worker_options: cached_rows is " + std::to_string(cached_rows) +
                           ", allowed is 0 or a power of two");
  }
};

/// @brief What a server does when a worker dies.
enum class worker_death : std::uint8_t {
  report,  ///< Pulls of the others fail, naming it.
  go_on,   ///< The others no longer wait for it; who restarts under its rank is waited for again.
  wait,    ///< The others wait until it is started again under its rank; after `join` its death is reported.
  /// As go_on, and the rest of its data goes to a worker that has finished its own: `sharded_table::next_orphan`. If
  /// none is left to take it, its death is reported.
  reassign
};

/// @brief Settings of a parameter server; the servers have ranks 0 .. servers - 1, the workers those behind them.
struct server_options {
  /// No bound on staleness.
  static constexpr std::uint64_t unbounded = (std::numeric_limits<std::uint64_t>::max)();

  int servers = 1;  ///< How many servers there are.
  int workers = 1;  ///< How many workers there are.
  /// A pull waits until each worker is at most so many pushes behind the one that pulls. With a bound, every worker
  /// must push equally often, also nothing. 0: nobody reads before all have pushed.
  std::uint64_t staleness = unbounded;
  /// Pushes take effect step by step, in the order of workers: with staleness 0 training is synchronous, and repeatable
  /// to the bit, also through a server's death. Every worker must push equally often.
  bool ordered = false;
  worker_death on_death = worker_death::report;  ///< What a worker's death means.
  /// Where the server keeps its part, a full save; empty: nowhere, and what a dead server had is lost. Beside it goes
  /// `path.chain`: which file its deltas follow, and the number of the last one.
  std::string path{};
  std::uint64_t save_every = 0;  ///< Pushes between two saves; 0: when a worker asks, or its log is half full.
  /// How long run() goes on in silence while a worker's messenger hasn't ended, and may wait for a reply that was
  /// lost: many times the second after which it asks again at the latest.
  std::chrono::nanoseconds linger{std::chrono::seconds(10)};
  /// How long run() waits for a worker's first word, and `worker_death::wait` for the next one; then it is dead.
  std::chrono::nanoseconds join{std::chrono::minutes(10)};
};

/// @brief The part of a table's settings that is for one server: an equal run of virtual shards.
/// @param s Settings of the table. @param server Rank. @param servers How many.
template <class Settings> Settings settings_of_server(Settings s, int server, int servers) {
  if (s.shard_bits > 20 || servers < 1 || server < 0 || server >= servers || servers > (1 << s.shard_bits))
    throw argument_error("heddle::settings_of_server: server " + std::to_string(server) + " of " +
                         std::to_string(servers) + " with shard_bits " + std::to_string(s.shard_bits) +
                         "; allowed are at most 2^shard_bits servers");
  s.first_shard =
      detail::first_shard_of(static_cast<std::uint32_t>(server), static_cast<std::uint32_t>(servers), s.shard_bits);
  s.last_shard =
      detail::first_shard_of(static_cast<std::uint32_t>(server) + 1, static_cast<std::uint32_t>(servers), s.shard_bits);
  return s;
}

/// @brief The names under which servers write their parts of a file: the path, `-` and the server's rank.
/// @param path Of the whole. @param servers How many. @return One for each.
inline std::vector<std::string> files_of_servers(const std::string& path, int servers) {
  std::vector<std::string> all;
  for (int k = 0; k < servers; ++k) all.push_back(path + "-" + std::to_string(k));
  return all;
}

/// @brief How old the rows were by which a server's workers made their pushes.
struct table_staleness {
  std::uint64_t pushes = 0;  ///< That have taken effect, those that end a worker's run left out.
  /// Of the pushes of others that had taken effect since its worker last read anything: rows that it asked for earlier,
  /// or keeps, are older.
  std::uint64_t sum = 0;
  std::uint64_t most = 0;    ///< Of one push.
};

}  // namespace v0
}  // namespace heddle

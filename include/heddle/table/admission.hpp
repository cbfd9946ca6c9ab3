// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/philox.hpp>
#include <heddle/table/concept.hpp>
#include <heddle/table/detail/bytes.hpp>
#include <heddle/table/detail/row_store.hpp>

#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief What an admission is given besides the sighting.
struct admission_context {
  std::uint64_t seed;     ///< The table's.
  unsigned shard_bits;    ///< Bits of the mixed key that all keys of the shard share.
  detail::slabs& memory;  ///< Where a state may get memory that stays.
};

namespace detail {
// Nothing is remembered of refused keys.
struct no_admission_state {
  std::size_t bytes() const noexcept { return 0; }
  template <class Out> void save(Out&) const {}
  template <class In> void load(In&, const admission_context&) {}
};

// A sum for every refused key.
class refused_sums {
 public:
  // Adds to a key's sum and returns it.
  float add(std::uint64_t mixed, float x, const admission_context& c) {
    std::uint32_t i = store_.find(mixed, mixed << c.shard_bits);
    if (i == store_.none) {
      i = store_.insert(mixed, mixed << c.shard_bits, c.shard_bits, c.memory);
      const float nothing = 0.0f;
      std::memcpy(store_.at(i) + 12, &nothing, 4);
    }
    float sum;
    std::memcpy(&sum, store_.at(i) + 12, 4);
    sum += x;
    std::memcpy(store_.at(i) + 12, &sum, 4);
    return sum;
  }
  void forget(std::uint64_t mixed, const admission_context& c) noexcept {
    const std::uint32_t i = store_.find(mixed, mixed << c.shard_bits);
    if (i != store_.none) store_.erase(i, c.shard_bits);
  }
  // Its memory is used again, as nothing is given back to slabs.
  void clear(const admission_context& c) noexcept {
    store_.for_each([&](std::uint32_t i, std::byte*) { store_.erase(i, c.shard_bits); });
  }
  std::size_t bytes() const noexcept { return 0; }  // they are in the table's slabs
  template <class Out> void save(Out& out) const {
    out.put(static_cast<std::uint64_t>(store_.size()));
    store_.for_each([&](std::uint32_t, const std::byte* p) {
      out.put(p, 8);
      out.put(p + 12, 4);
    });
  }
  template <class In> void load(In& in, const admission_context& c) {
    for (std::size_t n = in.count(12); n > 0; --n) {
      const auto mixed = in.template get<std::uint64_t>();
      add(mixed, in.template get<float>(), c);
    }
  }

 private:
  row_store<16> store_;
};
}  // namespace detail

/// @brief Which keys get a row; see the concept `table_admission`. A key without a row reads 0, and what is pushed to
/// it is dropped. Sightings are pushes, not pulls: a pull can be repeated without changing anything.
namespace admit {

/// @brief Every key, at its first push or `sparse_table::pull`.
struct always {
  using state = detail::no_admission_state;  ///< Nothing.
  /// Yes.
  bool admit(state&, std::uint64_t, const sighting&, const admission_context&) const noexcept { return true; }
  /// Yes.
  bool admits_unseen(std::uint64_t, std::uint64_t) const noexcept { return true; }
  /// "always".
  std::string name() const { return "always"; }
};

/// @brief A part of all keys, chosen by a hash of seed and key: the same keys on every server and after every retry.
struct probability {
  float p = 1.0f;  ///< The part, in [0, 1].

  using state = detail::no_admission_state;  ///< Nothing.
  /// Throws argument_error for a number outside its range.
  void check() const {
    if (!(p >= 0.0f && p <= 1.0f))
      throw argument_error("heddle::admit::probability: p is " + std::to_string(p) + ", allowed is [0, 1]");
  }
  /// Whether the key is one of them.
  bool admits_unseen(std::uint64_t mixed, std::uint64_t seed) const noexcept {
    return to_uniform(philox(seed, 0x61646d6974ull, mixed).word[0]) < p;
  }
  /// Whether the key is one of them.
  bool admit(state&, std::uint64_t mixed, const sighting&, const admission_context& c) const noexcept {
    return admits_unseen(mixed, c.seed);
  }
  /// "probability".
  std::string name() const { return "probability"; }
};

/// @brief The n-th sighting of a key makes its row; exact.
/// State:   about 22 bytes for each refused key.
struct count {
  float n = 2.0f;  ///< Sightings, 1 or above.

  using state = detail::refused_sums;  ///< How often each key was refused.
  /// Throws argument_error for a number outside its range.
  void check() const {
    if (!(n >= 1.0f && n <= 16777216.0f))
      throw argument_error("heddle::admit::count: n is " + std::to_string(n) + ", allowed is 1 to 2^24");
  }
  /// Counts, and says whether it is enough.
  bool admit(state& s, std::uint64_t mixed, const sighting& x, const admission_context& c) const {
    if (x.times < n && s.add(mixed, x.times, c) < n) return false;
    s.forget(mixed, c);
    return true;
  }
  /// Whether a key that was never pushed may have a row.
  bool admits_unseen(std::uint64_t, std::uint64_t) const noexcept { return n <= 1.0f; }
  /// "count".
  std::string name() const { return "count"; }
};

/// @brief A key gets its row when (show - click) nonclick + click * click_weight, summed, reaches a threshold; exact.
/// State:   about 22 bytes for each refused key.
struct show_click {
  float nonclick = 0.1f;      ///< What a show without a click counts, 0 or above.
  float click_weight = 1.0f;  ///< What a click counts, 0 or above.
  float threshold = 1.0f;     ///< Any number above 0.

  using state = detail::refused_sums;  ///< The score of each refused key.
  /// Throws argument_error for a number outside its range.
  void check() const {
    if (!(nonclick >= 0.0f && click_weight >= 0.0f && threshold > 0.0f))
      throw argument_error("heddle::admit::show_click: nonclick " + std::to_string(nonclick) + ", click_weight " +
                           std::to_string(click_weight) + ", threshold " + std::to_string(threshold) +
                           "; allowed is 0 or above, and a threshold above 0");
  }
  /// Adds to the score, and says whether it is enough.
  bool admit(state& s, std::uint64_t mixed, const sighting& x, const admission_context& c) const {
    if (s.add(mixed, (x.show - x.click) * nonclick + x.click * click_weight, c) < threshold) return false;
    s.forget(mixed, c);
    return true;
  }
  /// No: it has no score.
  bool admits_unseen(std::uint64_t, std::uint64_t) const noexcept { return false; }
  /// "show_click".
  std::string name() const { return "show_click"; }
};

/// @brief As `count`, in fixed memory: a counting Bloom filter with conservative update. It never admits late. A key's
/// estimate is too high only if all its cells are shared: after u distinct refused keys at most about
/// (1 - exp(-hashes u / cells))^hashes of new keys are admitted early.
/// State:   `cells` bytes for the whole table (rounded up to 64 per shard), whatever the number of keys.
/// Paper:   Fan, Cao, Almeida, Broder 2000; Estan and Varghese 2002 for the conservative update.
struct counting_bloom {
  std::uint32_t n = 2;                       ///< Sightings, 1 to 255.
  std::size_t cells = std::size_t{1} << 24;  ///< Counters of one byte, in the whole table, 64 or above.
  std::uint32_t hashes = 4;                  ///< Cells per key, 1 to 8.

  /// Counters of a shard; made at the first sighting.
  class state {
   public:
    /// Bytes held.
    std::size_t bytes() const noexcept { return cells_.capacity(); }
    /// Writes the counters.
    template <class Out> void save(Out& out) const {
      out.put(static_cast<std::uint64_t>(cells_.size()));
      out.put(cells_.data(), cells_.size());
    }
    /// Reads them.
    template <class In> void load(In& in, const admission_context&) {
      const std::size_t n = in.count(1);
      const auto* const p = reinterpret_cast<const std::uint8_t*>(in.take(n));
      cells_.assign(p, p + n);
    }

   private:
    friend struct counting_bloom;
    std::vector<std::uint8_t> cells_;
  };
  /// Throws argument_error for a number outside its range.
  void check() const {
    if (!(n >= 1 && n <= 255 && cells >= 64 && hashes >= 1 && hashes <= 8))
      throw argument_error("heddle::admit::counting_bloom: n " + std::to_string(n) + ", cells " +
                           std::to_string(cells) + ", hashes " + std::to_string(hashes) +
                           "; allowed is 1 to 255, 64 or above, 1 to 8");
  }
  /// Counts, and says whether it is enough.
  bool admit(state& s, std::uint64_t mixed, const sighting& x, const admission_context& c) const {
    if (s.cells_.empty()) s.cells_.resize((std::max<std::size_t>)(1, ((cells >> c.shard_bits) + 63) / 64) * 64);
    const auto size = static_cast<std::uint32_t>((std::min<std::size_t>)(s.cells_.size(), 0xffffffffu));
    std::uint8_t* cell[8];
    std::uint32_t least = 255;
    for (std::uint32_t k = 0; k < hashes; ++k) {
      cell[k] = &s.cells_[place_of(mixed, k, size)];
      least = (std::min<std::uint32_t>)(least, *cell[k]);
    }
    const auto more = static_cast<std::uint32_t>((std::min)(x.times, 255.0f));
    const std::uint32_t now = (std::min)(least + more, 255u);
    for (std::uint32_t k = 0; k < hashes; ++k)
      *cell[k] = static_cast<std::uint8_t>((std::max<std::uint32_t>)(*cell[k], now));
    return now >= n;
  }
  /// Whether a key that was never pushed may have a row.
  bool admits_unseen(std::uint64_t, std::uint64_t) const noexcept { return n <= 1; }
  /// "counting_bloom".
  std::string name() const { return "counting_bloom"; }

 private:
  static std::uint32_t place_of(std::uint64_t mixed, std::uint32_t k, std::uint32_t size) noexcept {
    return detail::place_among(detail::mix(mixed + k * 0x632be59bd9b4e019ull), size);
  }
};

static_assert(table_admission<always> && table_admission<probability> && table_admission<count> &&
              table_admission<show_click> && table_admission<counting_bloom>);

}  // namespace admit
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/schedule.hpp>

#include <algorithm>
#include <array>

namespace heddle {
inline namespace v0 {

/// @brief How the ranks of one dimension talk to each other.
enum class exchange {
  ring,   ///< f - 1 rounds with two neighbours; each hop rounds once.
  direct  ///< One round with everybody; one rounding, in rank order.
};

namespace detail {

// Staged reduce-scatter and all-gather over a factorisation of the ranks, fastest digit first:
// rank = d0 + f0 (d1 + ..).
// Templates over the schedule, so that a file that only includes this doesn't pay for what they need of the vectors.
template <class Schedule>
class staged {
 public:
  constexpr staged(std::vector<int> radices, exchange how) : radices_(std::move(radices)), how_(how) {}

  // Blocks of owners in the order that keeps every union of a stage contiguous: digit 0 most significant.
  constexpr std::vector<interval> balanced(int size, std::size_t count) const {
    std::vector<interval> blocks(static_cast<std::size_t>(size));
    for (int r = 0; r < size; ++r) {
      std::size_t position = 0;
      int rest = r;
      for (const int f : radices_) {
        position = position * static_cast<std::size_t>(f) + static_cast<std::size_t>(rest % f);
        rest /= f;
      }
      blocks[static_cast<std::size_t>(r)] = balanced_block(count, static_cast<std::size_t>(size), position);
    }
    return blocks;
  }

  constexpr void reduce_scatter(Schedule& s, int rank, int size, std::span<const interval> blocks) const {
    int stride = 1;
    for (const int f : radices_) {
      stage(s, rank, size, blocks, stride, f, true);
      stride *= f;
    }
  }

  constexpr void all_gather(Schedule& s, int rank, int size, std::span<const interval> blocks) const {
    int stride = size;
    for (std::size_t j = radices_.size(); j-- > 0;) {
      stride /= radices_[j];
      stage(s, rank, size, blocks, stride, radices_[j], false);
    }
  }

 private:
  // What the rank with digit x in this dimension (and ours below it) is responsible for, as few intervals as possible.
  static constexpr std::vector<interval> part(int rank, int size, std::span<const interval> blocks, int stride, int f,
                                              int x) {
    std::vector<interval> runs;
    for (int owner = rank % stride + stride * x; owner < size; owner += stride * f) {
      const interval b = blocks[static_cast<std::size_t>(owner)];
      if (b.count) runs.push_back(b);
    }
    sort_intervals(runs);
    std::size_t kept = 0;
    for (std::size_t i = 1; i < runs.size(); ++i) {
      if (runs[kept].end() == runs[i].begin) runs[kept].count += runs[i].count;
      else runs[++kept] = runs[i];
    }
    if (!runs.empty()) runs.resize(kept + 1);
    return runs;
  }

  constexpr void stage(Schedule& s, int rank, int size, std::span<const interval> blocks, int stride, int f,
                       bool reducing) const {
    if (f == 1) return;
    const int mine = rank / stride % f;
    const action receive = reducing ? action::reduce : action::copy;
    const auto peer = [&](int x) { return rank + (x - mine) * stride; };
    const auto add = [&](action act, int to, int x) {
      if (stride * f == size) {  // one owner
        s.add(act, peer(to), blocks[static_cast<std::size_t>(rank % stride + stride * x)]);
        return;
      }
      for (const interval b : part(rank, size, blocks, stride, f, x)) s.add(act, peer(to), b);
    };
    if (how_ == exchange::direct) {
      for (int x = 0; x < f; ++x) {
        if (x == mine) continue;
        add(action::send, x, reducing ? x : mine);
        add(receive, x, reducing ? mine : x);
      }
      s.next();
      return;
    }
    const int shift = reducing ? 1 : 0;  // reduce-scatter ends with the own part, all-gather begins with it
    for (int step = 0; step < f - 1; ++step) {
      add(action::send, (mine + 1) % f, (mine - step - shift + 2 * f) % f);
      add(receive, (mine + f - 1) % f, (mine - step - shift - 1 + 2 * f) % f);
      s.next();
    }
  }

  std::vector<int> radices_;
  exchange how_;
};

template <class Schedule>
constexpr Schedule staged_all_reduce(const staged<Schedule>& t, int rank, int size, std::size_t count) {
  Schedule s;
  const std::vector<interval> blocks = t.balanced(size, count);
  t.reduce_scatter(s, rank, size, blocks);
  s.split({blocks[static_cast<std::size_t>(rank)]});
  t.all_gather(s, rank, size, blocks);
  return s;
}

template <class Schedule>
constexpr Schedule staged_reduce_scatter(const staged<Schedule>& t, int rank, int size,
                                         std::span<const interval> blocks) {
  Schedule s;
  t.reduce_scatter(s, rank, size, blocks);
  s.split({blocks[static_cast<std::size_t>(rank)]});
  return s;
}

template <class Schedule>
constexpr Schedule staged_all_gather(const staged<Schedule>& t, int rank, int size, std::span<const interval> blocks) {
  Schedule s;
  t.all_gather(s, rank, size, blocks);
  return s;
}

// The prime factors of n, smallest first.
template <class Number>
constexpr std::vector<Number> prime_factors(Number n) {
  std::vector<Number> f;
  for (Number d = 2; d * d <= n; ++d) {
    for (; n % d == 0; n /= d) f.push_back(d);
  }
  if (n > 1) f.push_back(n);
  return f;
}

// The largest divisor of n that is at most its square root.
constexpr int middle_divisor(int n) {
  int best = 1;
  for (int d = 1; d * d <= n; ++d) {
    if (n % d == 0) best = d;
  }
  return best;
}

constexpr void check_blocks(const char* topology, int rank, int size, std::span<const interval> blocks) {
  check_rank(topology, rank, size);
  if (blocks.size() != static_cast<std::size_t>(size)) {
    throw argument_error(std::string("heddle::") + topology + ": " + std::to_string(blocks.size()) + " blocks for " +
                         std::to_string(size) + " ranks; allowed is one for each");
  }
}
}  // namespace detail

/// @brief Staged reduce-scatter and all-gather over any factorisation of the ranks; ring, torus and halving-doubling
/// are its cases.
///
/// Wire:    2 n (P - 1) / P elements sent per rank, for every factorisation.
/// Rounds:  2 sum(f - 1) with rings, 2 k with direct exchange, for k factors.
/// Error:   P - 1 roundings with rings (f - 1 per dimension), 1 per dimension with direct exchange.
/// Order:   factor 0 varies fastest in the rank: put the fast links there, they carry most of the bytes.
/// Paper:   Rabenseifner 2004 (halving-doubling); Mikami et al. 2018 (2-D torus); nested here for any factors.
/// Throws:  argument_error if the factors don't multiply to the number of ranks.
struct mixed_radix {
  std::array<int, 12> radices{};     ///< Factors, fastest first; 0 ends the list; an empty list means {P}.
  exchange within = exchange::ring;  ///< How a dimension talks.

  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule>
  constexpr Schedule all_reduce(int rank, int size, std::size_t count) const {
    check_rank("mixed_radix", rank, size);
    return detail::staged_all_reduce(stages<Schedule>(size), rank, size, count);
  }
  /// Schedule of a reduce-scatter: rank r ends with block r.
  template <class Schedule = schedule>
  constexpr Schedule reduce_scatter(int rank, int size, std::span<const interval> blocks) const {
    detail::check_blocks("mixed_radix", rank, size, blocks);
    return detail::staged_reduce_scatter(stages<Schedule>(size), rank, size, blocks);
  }
  /// Schedule of an all-gather: rank r begins with block r.
  template <class Schedule = schedule>
  constexpr Schedule all_gather(int rank, int size, std::span<const interval> blocks) const {
    detail::check_blocks("mixed_radix", rank, size, blocks);
    return detail::staged_all_gather(stages<Schedule>(size), rank, size, blocks);
  }
  /// For example "mixed_radix 4x2", "mixed_radix 4x2 direct".
  std::string name() const {
    std::string s = "mixed_radix";
    for (std::size_t i = 0; i < radices.size() && radices[i]; ++i) s += (i ? "x" : " ") + std::to_string(radices[i]);
    return within == exchange::direct ? s + " direct" : s;
  }

 private:
  template <class Schedule>
  constexpr detail::staged<Schedule> stages(int size) const {
    std::vector<int> f;
    long long product = 1;
    for (std::size_t i = 0; i < radices.size() && radices[i]; ++i) {
      if (radices[i] < 1) throw argument_error("heddle::mixed_radix: a factor below 1");
      f.push_back(radices[i]);
      product = (std::min)(product * radices[i], 1ll << 31);  // beyond any number of ranks; can't overflow
    }
    if (f.empty()) f.push_back(size), product = size;
    if (product != size) {
      throw argument_error("heddle::" + name() + ": the factors multiply to " + std::to_string(product) +
                           ", there are " + std::to_string(size) + " ranks");
    }
    return {std::move(f), within};
  }
};

/// @brief The ring: neighbours only, best bandwidth on any network.
///
/// Wire:    2 n (P - 1) / P elements sent per rank.
/// Rounds:  2 (P - 1).
/// Error:   P - 1 roundings.
/// Paper:   Patarasuk and Yuan 2009.
struct ring {
  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule>
  constexpr Schedule all_reduce(int rank, int size, std::size_t count) const {
    check_rank("ring", rank, size);
    return detail::staged_all_reduce(stages<Schedule>(size), rank, size, count);
  }
  /// Schedule of a reduce-scatter: rank r ends with block r.
  template <class Schedule = schedule>
  constexpr Schedule reduce_scatter(int rank, int size, std::span<const interval> blocks) const {
    detail::check_blocks("ring", rank, size, blocks);
    return detail::staged_reduce_scatter(stages<Schedule>(size), rank, size, blocks);
  }
  /// Schedule of an all-gather: rank r begins with block r.
  template <class Schedule = schedule>
  constexpr Schedule all_gather(int rank, int size, std::span<const interval> blocks) const {
    detail::check_blocks("ring", rank, size, blocks);
    return detail::staged_all_gather(stages<Schedule>(size), rank, size, blocks);
  }
  /// "ring".
  std::string name() const { return "ring"; }

 private:
  template <class Schedule>
  static constexpr detail::staged<Schedule> stages(int size) { return {{size}, exchange::ring}; }
};

/// @brief Everybody sends everybody its block: fewest roundings, all links at once. The default for 16-bit elements.
///
/// Wire:    2 n (P - 1) / P elements sent per rank, in messages of n / P.
/// Rounds:  2.
/// Error:   1 rounding, contributions added in rank order: the result doesn't depend on which rank owns what.
struct direct {
  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule>
  constexpr Schedule all_reduce(int rank, int size, std::size_t count) const {
    check_rank("direct", rank, size);
    return detail::staged_all_reduce(stages<Schedule>(size), rank, size, count);
  }
  /// Schedule of a reduce-scatter: rank r ends with block r.
  template <class Schedule = schedule>
  constexpr Schedule reduce_scatter(int rank, int size, std::span<const interval> blocks) const {
    detail::check_blocks("direct", rank, size, blocks);
    return detail::staged_reduce_scatter(stages<Schedule>(size), rank, size, blocks);
  }
  /// Schedule of an all-gather: rank r begins with block r.
  template <class Schedule = schedule>
  constexpr Schedule all_gather(int rank, int size, std::span<const interval> blocks) const {
    detail::check_blocks("direct", rank, size, blocks);
    return detail::staged_all_gather(stages<Schedule>(size), rank, size, blocks);
  }
  /// "direct".
  std::string name() const { return "direct"; }

 private:
  template <class Schedule>
  static constexpr detail::staged<Schedule> stages(int size) { return {{size}, exchange::direct}; }
};

/// @brief Two rings across each other: rows of `width` neighbouring ranks, then columns.
///
/// Wire:    2 n (P - 1) / P elements sent per rank; the column links carry n / width of them.
/// Rounds:  2 (width + P / width - 2).
/// Error:   width + P / width - 2 roundings.
/// Paper:   Mikami et al. 2018.
/// Throws:  argument_error if `width` doesn't divide P.
struct torus_2d {
  int width = 0;  ///< Ranks of a row; 0: the largest divisor of P up to its square root.

  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule>
  constexpr Schedule all_reduce(int rank, int size, std::size_t count) const {
    check_rank("torus_2d", rank, size);
    return detail::staged_all_reduce(stages<Schedule>(size), rank, size, count);
  }
  /// Schedule of a reduce-scatter: rank r ends with block r.
  template <class Schedule = schedule>
  constexpr Schedule reduce_scatter(int rank, int size, std::span<const interval> blocks) const {
    detail::check_blocks("torus_2d", rank, size, blocks);
    return detail::staged_reduce_scatter(stages<Schedule>(size), rank, size, blocks);
  }
  /// Schedule of an all-gather: rank r begins with block r.
  template <class Schedule = schedule>
  constexpr Schedule all_gather(int rank, int size, std::span<const interval> blocks) const {
    detail::check_blocks("torus_2d", rank, size, blocks);
    return detail::staged_all_gather(stages<Schedule>(size), rank, size, blocks);
  }
  /// "torus_2d", or for example "torus_2d 8" for rows of 8.
  std::string name() const { return "torus_2d" + (width ? " " + std::to_string(width) : std::string()); }

 private:
  template <class Schedule>
  constexpr detail::staged<Schedule> stages(int size) const {
    const int x = width ? width : detail::middle_divisor(size);
    if (x < 1 || size % x) {
      throw argument_error("heddle::torus_2d: width " + std::to_string(width) + " does not divide " +
                           std::to_string(size) + " ranks");
    }
    return {{x, size / x}, exchange::ring};
  }
};

/// @brief Recursive halving, then doubling: the fewest rounds at full bandwidth. Ranks that aren't a power of two work
/// by their prime factors, with direct exchange inside each.
///
/// Wire:    2 n (P - 1) / P elements sent per rank.
/// Rounds:  2 log2(P) for a power of two, else twice the number of prime factors.
/// Error:   one rounding per factor.
/// Paper:   Rabenseifner 2004; Thakur et al. 2005.
struct halving_doubling {
  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule>
  constexpr Schedule all_reduce(int rank, int size, std::size_t count) const {
    check_rank("halving_doubling", rank, size);
    return detail::staged_all_reduce(stages<Schedule>(size), rank, size, count);
  }
  /// Schedule of a reduce-scatter: rank r ends with block r.
  template <class Schedule = schedule>
  constexpr Schedule reduce_scatter(int rank, int size, std::span<const interval> blocks) const {
    detail::check_blocks("halving_doubling", rank, size, blocks);
    return detail::staged_reduce_scatter(stages<Schedule>(size), rank, size, blocks);
  }
  /// Schedule of an all-gather: rank r begins with block r.
  template <class Schedule = schedule>
  constexpr Schedule all_gather(int rank, int size, std::span<const interval> blocks) const {
    detail::check_blocks("halving_doubling", rank, size, blocks);
    return detail::staged_all_gather(stages<Schedule>(size), rank, size, blocks);
  }
  /// "halving_doubling".
  std::string name() const { return "halving_doubling"; }

 private:
  template <class Schedule>
  static constexpr detail::staged<Schedule> stages(int size) { return {detail::prime_factors(size), exchange::direct}; }
};
static_assert(topology<mixed_radix> && topology<ring> && topology<direct> && topology<torus_2d> &&
              topology<halving_doubling>);

}  // namespace v0
}  // namespace heddle

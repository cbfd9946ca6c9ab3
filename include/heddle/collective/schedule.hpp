// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/slice.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief A run of elements [begin, begin + count) of the buffer.
struct interval {
  std::size_t begin = 0;  ///< First element.
  std::size_t count = 0;  ///< Number of elements; 0 is legal.

  /// One past the last element.
  constexpr std::size_t end() const noexcept { return begin + count; }
  /// Whether they share an element.
  constexpr bool overlaps(interval o) const noexcept { return begin < o.end() && o.begin < end() && count && o.count; }
  /// Equality.
  constexpr bool operator==(const interval&) const = default;
};

/// @brief What an operation of a schedule does.
enum class action : std::uint32_t {
  send,   ///< Send the interval to the peer, as it was before the round.
  copy,   ///< Receive it from the peer and overwrite the interval.
  reduce  ///< Receive it from the peer and combine it into the interval.
};

/// @brief One operation, 24 bytes.
struct operation {
  std::uint32_t peer;  ///< The other rank.
  action act;          ///< What to do.
  interval range;      ///< Where, in elements.
};

/// @brief One rank's part of a collective, as data: rounds of operations that are posted together.
///
/// Every rank's schedule has the same number of rounds; a round may be empty. Inside a round: sends read the state
/// before the round; several `reduce` of one interval apply in rank order (and may not overlap in part); a `copy`
/// overlaps no send and no other receive. The k-th send to a peer meets the peer's k-th receive from here. `verify`
/// proves all of that.
///
/// The rounds before `half()` are the reduce-scatter half: after them each element is final on one owner, `owned()`
/// says which are this rank's. A schedule without halves has half() == rounds().
///
/// A rank that completes an element, by a reduce, receives that element no more. So the last receive of an element
/// tells whether it was completed here, and a mean divides right there, whatever the topology.
/// @tparam Operation heddle::operation; use the name `schedule`.
template <class Operation>
class basic_schedule {
 public:
  /// Adds an operation to the current round; dropped if `range` is empty.
  constexpr void add(action act, int peer, interval range) {
    if (range.count) operations_.push_back({static_cast<std::uint32_t>(peer), act, range});
  }
  /// Ends the current round.
  constexpr void next() { ends_.push_back(operations_.size()); }
  /// Ends the reduce-scatter half; `owned` is what is final here.
  constexpr void split(std::vector<interval> owned) {
    half_ = ends_.size();
    owned_ = std::move(owned);
    halved_ = true;
  }
  /// Number of rounds.
  constexpr std::size_t rounds() const noexcept { return ends_.size(); }
  /// The operations of round r.
  constexpr std::span<const Operation> round(std::size_t r) const {
    const std::size_t from = r ? ends_[r - 1] : 0;
    return {operations_.data() + from, ends_[r] - from};
  }
  /// All operations, round after round.
  constexpr std::span<const Operation> operations() const noexcept { return detail::as_span(operations_); }
  /// Rounds of the reduce-scatter half.
  constexpr std::size_t half() const noexcept { return halved_ ? half_ : ends_.size(); }
  /// Whether the schedule has halves.
  constexpr bool halved() const noexcept { return halved_; }
  /// What is final here after half() rounds; meaningful where halved().
  constexpr std::span<const interval> owned() const noexcept { return detail::as_span(owned_); }

  /// Appends empty rounds until there are n.
  constexpr void pad(std::size_t n) {
    while (ends_.size() < n) next();
  }
  /// Appends rounds [from, to) of another schedule; `peer` maps its ranks, `offset` is added to its intervals.
  template <class Peer>
  constexpr void append(const basic_schedule& o, std::size_t from, std::size_t to, Peer&& peer, std::size_t offset) {
    for (std::size_t r = from; r < to; ++r) {
      for (const Operation& x : o.round(r)) {
        add(x.act, peer(static_cast<int>(x.peer)), {x.range.begin + offset, x.range.count});
      }
      next();
    }
  }

  /// Appends schedules that run at the same time: round r holds round r - j `skew` of each part j. Without `take_part`
  /// only as many empty rounds. `peer` maps their ranks.
  template <class Peer>
  constexpr void append_merged(std::span<const basic_schedule> parts, bool take_part, Peer&& peer,
                               std::size_t skew = 0) {
    std::size_t rounds = 0, longest = 0;
    for (std::size_t j = 0; j < parts.size(); ++j) {
      rounds = (std::max)(rounds, parts[j].rounds() + j * skew);
      longest = (std::max)(longest, parts[j].rounds());
    }
    for (std::size_t r = 0; r < rounds; ++r) {
      const std::size_t first = skew && r >= longest ? (r - longest) / skew + 1 : 0;  // those before have ended
      for (std::size_t j = first; take_part && j < parts.size() && j * skew <= r; ++j) {
        if (r - j * skew >= parts[j].rounds()) continue;
        for (const Operation& o : parts[j].round(r - j * skew)) add(o.act, peer(static_cast<int>(o.peer)), o.range);
      }
      next();
    }
  }

  /// @brief The same messages in the other direction, last round first: an all-gather becomes a reduce-scatter of the
  /// same blocks, since what carries a block to every rank backwards collects every rank's part of it. Where the first
  /// `handed` rounds only hand blocks to ranks from which they come back, the results are copied there.
  constexpr basic_schedule mirrored(std::size_t handed = 0) const {
    basic_schedule s;
    for (std::size_t r = rounds(); r-- > 0; s.next()) {
      const action receive = r < handed ? action::copy : action::reduce;
      for (const Operation& o : round(r)) {
        s.add(o.act == action::send ? receive : action::send, static_cast<int>(o.peer), o.range);
      }
    }
    return s;
  }

 private:
  std::vector<Operation> operations_;
  std::vector<std::size_t> ends_;
  std::vector<interval> owned_;
  std::size_t half_ = 0;
  bool halved_ = false;
};

/// @brief The schedule of one rank.
using schedule = basic_schedule<operation>;

namespace detail {
template <class Parameter> using schedule_for = basic_schedule<typename dependent<operation, Parameter>::type>;

template <class Interval>
constexpr void sort_intervals(std::vector<Interval>& v) {
  std::sort(v.begin(), v.end(), [](Interval a, Interval b) {
    return a.begin != b.begin ? a.begin < b.begin : a.count < b.count;
  });
}

// Disjoint intervals in order, neighbours joined.
template <class Interval>
class interval_set {
 public:
  enum class cover { none, part, all };

  constexpr void add(Interval b) {
    if (!b.count) return;
    const auto first = std::partition_point(list_.begin(), list_.end(), [b](Interval x) { return x.end() < b.begin; });
    auto last = first;
    std::size_t begin = b.begin, end = b.end();
    for (; last != list_.end() && last->begin <= b.end(); ++last) {
      begin = (std::min)(begin, last->begin);
      end = (std::max)(end, last->end());
    }
    if (first == last) {
      list_.insert(first, b);
    } else {
      *first = {begin, end - begin};
      list_.erase(first + 1, last);
    }
  }
  // How much of b is in the set.
  constexpr cover of(Interval b) const {
    const auto x = std::partition_point(list_.begin(), list_.end(), [b](Interval y) { return y.end() <= b.begin; });
    if (x == list_.end() || x->begin >= b.end()) return cover::none;
    return x->begin <= b.begin && b.end() <= x->end() ? cover::all : cover::part;
  }

 private:
  std::vector<Interval> list_;
};
}  // namespace detail

/// @brief Block i of n elements cut into `parts`: the first n % parts blocks have one element more. 64-bit throughout.
constexpr interval balanced_block(std::size_t n, std::size_t parts, std::size_t i) noexcept {
  const std::size_t q = n / parts, rest = n % parts;
  return {i * q + (i < rest ? i : rest), q + (i < rest ? 1 : 0)};
}

/// Throws argument_error unless 0 <= rank < size.
constexpr void check_rank(const char* topology, int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw argument_error(std::string("heddle::") + topology + ": rank " + std::to_string(rank) + " of " +
                         std::to_string(size) + " ranks; allowed is 0 .. size - 1");
  }
}

/// @name What a topology offers
/// @{
/// Has `all_reduce(rank, size, count)`: the schedule of one rank for `count` elements, a pure function.
template <class Topology>
concept has_all_reduce_schedule = requires(const Topology& t, int rank, int size, std::size_t count) {
  { t.all_reduce(rank, size, count) } -> std::same_as<schedule>;
};
/// Has `reduce_scatter(rank, size, blocks)`: after it rank r holds block r, reduced. Blocks are disjoint.
template <class Topology>
concept has_reduce_scatter_schedule = requires(const Topology& t, int rank, int size) {
  { t.reduce_scatter(rank, size, detail::value_of<std::span<const interval>>()) } -> std::same_as<schedule>;
};
/// Has `all_gather(rank, size, blocks)`: before it rank r holds block r, after it all of them. Blocks are disjoint.
template <class Topology>
concept has_all_gather_schedule = requires(const Topology& t, int rank, int size) {
  { t.all_gather(rank, size, detail::value_of<std::span<const interval>>()) } -> std::same_as<schedule>;
};
/// Has `name()`, for tables and messages.
template <class Topology>
concept has_name = requires(const Topology& t) {
  { t.name() } -> std::convertible_to<std::string>;
};
/// @}

/// @brief A topology: a small aggregate whose member functions return schedules.
///
/// A user's own is about 20 lines; every executor, `verify` and the cost model take it. For example:
///
///     struct hypercube {                                // size must be a power of two
///       constexpr hd::schedule all_reduce(int rank, int size, std::size_t count) const {
///         hd::schedule s;
///         for (int bit = 1; bit < size; bit *= 2) {
///           s.add(hd::action::send, rank ^ bit, {0, count});
///           s.add(hd::action::reduce, rank ^ bit, {0, count});
///           s.next();
///         }
///         return s;
///       }
///     };
///     static_assert(hd::verify(hypercube{}, 8));
template <class Topology>
concept topology = has_all_reduce_schedule<Topology>;

}  // namespace v0
}  // namespace heddle

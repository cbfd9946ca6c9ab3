// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/schedule.hpp>

#include <algorithm>

namespace heddle {
inline namespace v0 {

/// @brief What `verify` found wrong first.
enum class fault {
  none,            ///< Proven right.
  rounds_differ,   ///< Ranks have different numbers of rounds.
  bad_peer,        ///< A peer is not another rank.
  bad_range,       ///< An interval leaves the buffer.
  unmatched,       ///< A send has no receive, or its interval differs from the receive's.
  cycle,           ///< Every send has its receive, but one in another round: ranks wait for each other's later rounds.
  overlap,         ///< A copy overlaps a send or another receive of its round, or two reduces overlap in part.
  double_count,    ///< A contribution arrives twice in an element.
  incomplete,      ///< An element lacks contributions at the end.
  owner,           ///< owned() is not final after half() rounds, or doesn't cover each element once.
  unfinished       ///< A mean would not divide once: a rank completes an element and receives it again, reduces a
                   ///< complete one, or completes a part of what it reduces.
};

/// The name used in messages.
constexpr const char* name_of(fault f) noexcept {
  switch (f) {
    case fault::none: return "none";
    case fault::rounds_differ: return "rounds differ";
    case fault::bad_peer: return "bad peer";
    case fault::bad_range: return "bad range";
    case fault::unmatched: return "unmatched send or receive";
    case fault::cycle: return "cycle: a message is received in another round than it is sent in";
    case fault::overlap: return "overlap inside a round";
    case fault::double_count: return "contribution counted twice";
    case fault::incomplete: return "contribution missing";
    case fault::owner: return "owned() is wrong";
    case fault::unfinished: return "not finished where it is completed";
  }
  return "unknown";
}

/// @brief The result of a proof; converts to true if the schedules are right.
struct verdict {
  fault what = fault::none;  ///< What is wrong.
  int rank = -1;             ///< Where.
  std::size_t round = 0;     ///< When.

  /// Whether the proof succeeded.
  constexpr operator bool() const noexcept { return what == fault::none; }
};

namespace detail {
// A set of contributing ranks: bits up to 64 ranks; beyond, a wrapping sum of one random weight per rank, in which a
// loss or a repetition shows with probability 1 - 2^-64.
constexpr std::uint64_t contribution(int rank, int size) noexcept {
  if (size <= 64) return std::uint64_t{1} << rank;
  std::uint64_t z = (static_cast<std::uint64_t>(rank) + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// The proof and its parts are templates over the schedule, so that a file that only includes this doesn't pay for what
// they need of the vectors.

// The buffer cut where any interval begins or ends: pieces that no operation splits.
template <class Schedule>
class atoms {
 public:
  constexpr atoms(const std::vector<Schedule>& all, std::span<const interval> extra, std::size_t count) {
    std::size_t limit = 1024;
    cuts_.push_back(0);
    cuts_.push_back(count);
    const auto add = [&](interval b) {
      cuts_.push_back(b.begin);
      cuts_.push_back(b.end());
    };
    for (const interval b : extra) add(b);
    for (const Schedule& s : all) {
      for (const operation& o : s.operations()) {
        if (o.act != action::send) continue;  // a receive has the interval of its send
        add(o.range);
        if (cuts_.size() > limit) {  // most cuts repeat
          tidy();
          limit = 2 * cuts_.size() + 1024;
        }
      }
      for (const interval b : s.owned()) add(b);
    }
    tidy();
  }
  constexpr std::size_t size() const { return cuts_.size() - 1; }
  // Atoms [first, second) of an interval.
  constexpr std::pair<std::size_t, std::size_t> of(interval b) const {
    return {index(b.begin), index(b.end())};
  }

 private:
  constexpr void tidy() {
    std::sort(cuts_.begin(), cuts_.end());
    cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
  }
  constexpr std::size_t index(std::size_t at) const {
    return static_cast<std::size_t>(std::lower_bound(cuts_.begin(), cuts_.end(), at) - cuts_.begin());
  }
  std::vector<std::size_t> cuts_;
};

// Of a sorted list; where any two overlap, two neighbours do.
template <class Interval>
constexpr bool neighbours_overlap(const std::vector<Interval>& v) {
  for (std::size_t i = 1; i < v.size(); ++i) {
    if (v[i - 1].overlaps(v[i])) return true;
  }
  return false;
}

// Whether b overlaps one of a sorted, disjoint list.
template <class Interval>
constexpr bool overlaps_any(const std::vector<Interval>& v, Interval b) {
  const auto x = std::partition_point(v.begin(), v.end(), [&](Interval a) { return a.end() <= b.begin; });
  return x != v.end() && x->overlaps(b);
}

// What a send without its receive is, or a receive without its send: where both exist, in different rounds, a cycle.
template <class Schedule> constexpr fault mismatch(const std::vector<Schedule>& all) {
  struct message {
    std::size_t source, destination, begin, count;
    constexpr auto operator<=>(const message&) const = default;
  };
  std::vector<message> sent, received;
  for (std::size_t r = 0; r < all.size(); ++r) {
    for (const operation& o : all[r].operations()) {
      if (o.act == action::send)
        sent.push_back({r, o.peer, o.range.begin, o.range.count});
      else
        received.push_back({o.peer, r, o.range.begin, o.range.count});
    }
  }
  std::sort(sent.begin(), sent.end());
  std::sort(received.begin(), received.end());
  return sent == received ? fault::cycle : fault::unmatched;
}

// What a proof starts from and must reach.
struct goal {
  std::span<const interval> blocks;  // rank r's block; empty for an all-reduce
  bool starts_with_block = false;    // all-gather: only its block is there, and complete
  bool ends_with_block = false;      // reduce-scatter: only its block must be complete
};

template <class Schedule>
constexpr verdict prove(const std::vector<Schedule>& all, std::size_t count, goal g) {
  const int size = static_cast<int>(all.size());
  const auto at = [](int r) { return static_cast<std::size_t>(r); };
  std::uint64_t full = 0;
  for (int r = 0; r < size; ++r) full += contribution(r, size);
  const std::size_t rounds = all[0].rounds();
  for (int r = 0; r < size; ++r) {
    const Schedule& s = all[at(r)];
    if (s.rounds() != rounds || s.half() != all[0].half() || s.halved() != all[0].halved()) {
      return {fault::rounds_differ, r, s.rounds()};
    }
    for (std::size_t k = 0; k < rounds; ++k) {
      for (const operation& o : s.round(k)) {
        if (o.peer >= static_cast<std::uint32_t>(size) || o.peer == static_cast<std::uint32_t>(r)) {
          return {fault::bad_peer, r, k};
        }
        if (o.range.begin > count || o.range.count > count - o.range.begin) return {fault::bad_range, r, k};
      }
    }
    for (const interval b : s.owned()) {
      if (b.begin > count || b.count > count - b.begin) return {fault::owner, r, s.half()};
    }
  }
  const atoms cut(all, g.blocks, count);
  struct element {
    std::uint64_t set = 0;  // contributions in it
    std::size_t last = 0;   // 1 + the round of its last receive, where that may complete it
    bool finished = false;  // complete, and a mean divided
  };
  std::vector<std::vector<element>> state(at(size), std::vector<element>(cut.size()));
  for (int r = 0; r < size; ++r) {
    std::vector<element>& mine = state[at(r)];
    if (g.starts_with_block) {
      const auto [from, to] = cut.of(g.blocks[at(r)]);
      for (std::size_t a = from; a < to; ++a) mine[a] = {full, 0, true};
      continue;
    }
    for (element& x : mine) x.set = contribution(r, size);
    for (std::size_t k = 0; k < rounds; ++k) {
      for (const operation& o : all[at(r)].round(k)) {
        if (o.act == action::send) continue;
        const auto [from, to] = cut.of(o.range);
        for (std::size_t a = from; a < to; ++a) mine[a].last = k + 1;
      }
    }
    if (!g.ends_with_block) continue;
    const interval block = g.blocks[at(r)];
    const auto completes = all[at(r)].halved() ? all[at(r)].owned() : std::span<const interval>(&block, 1);
    std::vector<bool> inside(cut.size(), false);
    for (const interval b : completes) {
      const auto [from, to] = cut.of(b);
      for (std::size_t a = from; a < to; ++a) inside[a] = true;
    }
    for (std::size_t a = 0; a < cut.size(); ++a) mine[a].last = inside[a] ? mine[a].last : 0;
  }
  const auto complete = [&](int r, interval b) {
    const auto [from, to] = cut.of(b);
    for (std::size_t a = from; a < to; ++a) {
      if (state[at(r)][a].set != full) return false;
    }
    return true;
  };
  const auto owners_right = [&]() -> verdict {
    std::vector<int> owners(cut.size(), 0);
    for (int r = 0; r < size; ++r) {
      for (const interval b : all[at(r)].owned()) {
        if (!complete(r, b)) return {fault::owner, r, all[0].half()};
        const auto [from, to] = cut.of(b);
        for (std::size_t a = from; a < to; ++a) ++owners[a];
      }
    }
    for (const int n : owners) {
      if (n != 1 && g.blocks.empty()) return {fault::owner, -1, all[0].half()};
    }
    return {};
  };

  verdict amiss;  // what only means suffer from: reported where nothing else is wrong
  const auto finish_amiss = [&amiss](int r, std::size_t k) {
    if (amiss) amiss = {fault::unfinished, r, k};
  };
  struct sending {
    int source;
    const operation* what;
  };
  struct arrival_of {
    int rank;
    std::size_t atom;
    action act;
    std::uint64_t set;
    bool finished;
  };
  std::vector<std::span<const operation>> now(at(size));  // this round of every rank
  std::vector<sending> sent;                              // its sends: by destination, by source, in list order
  std::vector<std::size_t> first(at(size) + 1, 0), cursor(at(size), 0), nth(at(size), 0);
  std::vector<arrival_of> arriving;
  std::vector<interval> copies, reduces;
  for (std::size_t k = 0; k < rounds; ++k) {
    if (all[0].halved() && k == all[0].half()) {
      if (const verdict v = owners_right(); !v) return v;
    }
    std::fill(first.begin(), first.end(), 0);
    for (int r = 0; r < size; ++r) {
      now[at(r)] = all[at(r)].round(k);
      for (const operation& o : now[at(r)]) first[o.peer + 1] += o.act == action::send;
    }
    for (std::size_t r = 0; r < at(size); ++r) {
      cursor[r] = first[r];
      first[r + 1] += first[r];
    }
    sent.assign(first.back(), {});
    for (int r = 0; r < size; ++r) {
      for (const operation& o : now[at(r)]) {
        if (o.act == action::send) sent[cursor[o.peer]++] = {r, &o};
      }
    }

    arriving.clear();  // all reads see the state before the round, so apply what arrives after the last of them
    std::size_t receives = 0;
    for (int r = 0; r < size; ++r) {
      copies.clear();
      reduces.clear();
      for (const operation& o : now[at(r)]) {
        nth[o.peer] = 0;  // messages taken from each peer in this round
        if (o.act == action::copy) copies.push_back(o.range);
        if (o.act == action::reduce && (reduces.empty() || !(reduces.back() == o.range))) reduces.push_back(o.range);
      }
      sort_intervals(copies);
      sort_intervals(reduces);
      reduces.erase(std::unique(reduces.begin(), reduces.end()), reduces.end());
      if (neighbours_overlap(copies) || neighbours_overlap(reduces)) return {fault::overlap, r, k};
      for (const operation& o : now[at(r)]) {
        if (o.act != action::copy && overlaps_any(copies, o.range)) return {fault::overlap, r, k};
        if (o.act == action::send) continue;
        ++receives;
        // The peer's matching send.
        auto match = sent.begin() + static_cast<std::ptrdiff_t>(first[at(r)]);
        const auto last = sent.begin() + static_cast<std::ptrdiff_t>(first[at(r) + 1]);
        const int peer = static_cast<int>(o.peer);
        match = std::partition_point(match, last, [&](const sending& x) { return x.source < peer; });
        const auto skip = static_cast<std::ptrdiff_t>(nth[o.peer]++);
        if (last - match <= skip || match[skip].source != peer || !(match[skip].what->range == o.range)) {
          return {mismatch(all), r, k};
        }
        const auto [from, to] = cut.of(o.range);
        std::size_t completed = 0;
        for (std::size_t a = from; a < to; ++a) {
          const element& x = state[o.peer][a];
          arriving.push_back({r, a, o.act, x.set, x.finished});
          completed += state[at(r)][a].last == k + 1;
        }
        if (o.act == action::reduce && completed && completed != to - from) finish_amiss(r, k);
      }
    }
    if (sent.size() != receives) return {mismatch(all), -1, k};
    for (const arrival_of& x : arriving) {
      element& here = state[at(x.rank)][x.atom];
      if (x.act == action::copy) {
        here.set = x.set;
        here.finished = x.finished;
        continue;
      }
      if (size <= 64 && (here.set & x.set)) return {fault::double_count, x.rank, k};
      if (here.finished || x.finished) finish_amiss(x.rank, k);
      here.set += x.set;
    }
    for (const arrival_of& x : arriving) {
      element& here = state[at(x.rank)][x.atom];
      here.finished |= x.act == action::reduce && here.last == k + 1;
    }
  }
  if (all[0].halved() && all[0].half() == rounds) {
    if (const verdict v = owners_right(); !v) return v;
  }
  for (int r = 0; r < size; ++r) {
    const interval b = g.ends_with_block ? g.blocks[at(r)] : interval{0, count};
    if (!complete(r, b)) return {fault::incomplete, r, rounds};
    const auto [from, to] = cut.of(b);
    for (std::size_t a = from; size > 1 && a < to; ++a) {
      if (!state[at(r)][a].finished) finish_amiss(r, rounds);
    }
  }
  return amiss;
}
}  // namespace detail

/// @brief Proves an all-reduce topology right for `size` ranks and `count` elements, or says what is wrong first.
///
/// It runs every rank's schedule on sets of contributions: each element of each rank must end with every rank's
/// contribution exactly once, sends must match receives, nothing unordered may overlap, owned() must be true, a mean
/// must divide every element once.
/// Rounds are rendezvous, so schedules of equally many rounds whose messages all match can't deadlock.
/// constexpr up to about 16 ranks at g++'s default limits and 12 at clang's; beyond, call it at run time (above 64
/// ranks sets are compared by 64-bit fingerprints).
/// @param t The topology. @param size Ranks, at least 1. @param count Elements; 0 means size + 1.
/// Throws: argument_error if size < 1, and what the topology throws.
template <class Topology>
constexpr verdict verify(const Topology& t, int size, std::size_t count = 0) {
  static_assert(has_all_reduce_schedule<Topology>,
                "heddle::verify: a topology must provide schedule all_reduce(int rank, int size, size_t count) const");
  if (size < 1) throw argument_error("heddle::verify: " + std::to_string(size) + " ranks, allowed is 1 or more");
  const std::size_t n = count ? count : static_cast<std::size_t>(size) + 1;
  std::vector<decltype(t.all_reduce(0, size, n))> all;
  for (int r = 0; r < size; ++r) all.push_back(t.all_reduce(r, size, n));
  return detail::prove(all, n, {});
}

/// @brief Proves reduce_scatter and all_gather of a topology for blocks in rank order with the given counts.
template <class Topology>
constexpr verdict verify_blocks(const Topology& t, std::span<const std::size_t> counts) {
  if (counts.empty()) throw argument_error("heddle::verify_blocks: no counts, needed is one for each rank");
  std::vector<interval> blocks;
  std::size_t n = 0;
  for (const std::size_t c : counts) {
    blocks.push_back({n, c});
    n += c;
  }
  const int size = static_cast<int>(counts.size());
  std::vector<decltype(t.reduce_scatter(0, size, blocks))> scatter, gather;
  for (int r = 0; r < size; ++r) {
    scatter.push_back(t.reduce_scatter(r, size, blocks));
    gather.push_back(t.all_gather(r, size, blocks));
  }
  if (const verdict v = detail::prove(scatter, n, {blocks, false, true}); !v) return v;
  return detail::prove(gather, n, {blocks, true, false});
}

}  // namespace v0
}  // namespace heddle

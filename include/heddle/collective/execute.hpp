// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/schedule.hpp>
#include <heddle/comm/concept.hpp>
#include <heddle/core/reduction.hpp>

#include <algorithm>
#include <bit>
#include <cstring>

namespace heddle {
inline namespace v0 {

namespace detail {
// A schedule made ready to run: everything about a round that is known before the elements arrive, so that a run only
// sets pointers. A float16 buffer holds sums of different numbers of ranks in different places, stored divided by
// 2^ceil(log2(number)). Which earlier operation gave an interval its number is known beforehand, the number itself
// comes with the messages: each operation that gives one has a place in `numbers`. Messages bring the same numbers in
// every run; what follows from them is worked out in the first one and kept while they do.
//
// A template, as the executor is, so that a file that only includes this doesn't pay for what it needs of the vectors.
template <class Operation>
struct program {
  template <class Element> using list = std::vector<typename dependent<Element, Operation>::type>;
  static constexpr std::uint32_t own = ~std::uint32_t{0};
  static constexpr std::size_t in_place = ~std::size_t{0};

  struct source {  // who gave an interval its number: one operation and, rarely, more that must agree
    std::uint32_t id = 0, more = 0, last = 0;  // places in `numbers`; further ones are further[more, last)
  };
  struct merge {  // all reductions of one interval in one round
    std::size_t offset, count;
    std::size_t staged;             // where in scratch memory the result waits for the end of the round, or in_place
    std::uint32_t operands, inputs;  // the first operand; how many
    std::uint32_t mine;              // which operand is the buffer itself
    std::uint32_t arrival;           // where the other one comes from, of two
    int exponent;                   // of the result
    source before;
    std::uint32_t id;  // its place in `numbers`
    bool final;        // completes its interval: takes the factor of a mean
  };
  struct overwrite {
    std::uint32_t arrival, id;
  };
  struct round {  // where its entries begin in each list, and how many there are
    std::uint32_t out = 0, outs = 0, in = 0, ins = 0, merges = 0, merge_count = 0, overwrites = 0, overwrite_count = 0;
    bool idle = false, staged = false;
    std::uint8_t known = 0;      // the mode that contributors and exponents are set for; 0: none
    std::uint16_t expected = 1;  // contributors of its first message, where known
  };
  list<round> rounds;
  list<outgoing> out;
  list<source> out_sources;
  list<unsigned char> out_stays;  // nobody writes it before the next exchange has brought its messages
  list<std::size_t> out_offsets, in_offsets;
  list<incoming> in;
  list<std::uint16_t> expected;  // contributors of each message to receive, where known
  list<merge> merges;
  list<operand> operands;
  list<std::uint32_t> arrivals;  // of each operand; `own` for the buffer
  list<overwrite> overwrites;
  list<std::uint32_t> further;
  list<std::uint16_t> numbers;  // numbers[0] is 1: a rank's own contribution
  std::size_t scratch = 0;             // bytes
  std::size_t element_bytes = 0;
  bool torn = false;           // a reduction completes a part of its interval only
  std::byte* bound = nullptr;  // the buffer that pointers are set for

  // Inside `completes` the last receive of an element is final, where it is a reduction.
  void build(int rank, const basic_schedule<Operation>& s, std::size_t bytes, std::span<const interval> completes) {
    *this = {};
    element_bytes = bytes;
    numbers.push_back(1);
    runs_.push_back({{0, ~std::size_t{0}}, 0});
    list<unsigned char> final(s.operations().size());
    interval_set<typename dependent<interval, Operation>::type> later;
    for (std::size_t r = s.rounds(); r-- > 0;) {
      auto f = final.begin() + (s.round(r).data() - s.operations().data());
      for (const Operation& o : s.round(r)) *f++ = o.act == action::reduce && is_final(o.range, completes, later);
      for (const Operation& o : s.round(r)) {
        if (o.act != action::send) later.add(o.range);
      }
    }
    const unsigned char* f = final.data();
    for (std::size_t r = 0; r < s.rounds(); f += s.round(r++).size()) add(rank, s.round(r), f);
    out_stays.assign(out.size(), 0);
    for (std::size_t r = s.rounds(), next = 0; r-- > 0;) {  // `next` has messages and is of the same half, or 0
      if (r + 1 == s.half()) next = 0;
      if (rounds[r].idle) continue;
      if (next && !rounds[r].staged) let_stay(rounds[r].out, s.round(r), s.round(next));
      next = r;
    }
  }

  // Sets every pointer. As everything that a repeated run does not need, it stays out of the way of what it needs.
  [[gnu::noinline]] void bind(std::byte* buffer) {
    bound = buffer;
    for (std::size_t i = 0; i < out.size(); ++i) out[i].data = buffer + out_offsets[i];
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (in_offsets[i] != in_place) in[i].into = buffer + in_offsets[i];
    }
    for (const merge& m : merges) operands[m.operands + m.mine].data = buffer + m.offset;
  }

  // For runs that end elsewhere than the schedule or its first half: nothing may be under way then.
  [[gnu::noinline]] void let_none_stay() {
    std::fill(out_stays.begin(), out_stays.end(), 0);
    for (outgoing& m : out) m.stays = false;
  }

  // Before a round: contributors of what it sends.
  [[gnu::noinline]] void set_out(round& x, bool scaled) {
    x.known = 0;
    for (std::uint32_t i = x.out; i < x.out + x.outs; ++i) {
      out[i].contributors = scaled ? number(out_sources[i]) : std::uint16_t{1};
      out[i].stays = out_stays[i] && !scaled;  // number() may throw between two rounds
    }
  }

  bool as_expected(const round& x, std::span<const arrival> got) const {
    if (x.ins == 1) return got[0].contributors == x.expected;
    for (std::uint32_t i = 0; i < x.ins; ++i) {
      if (got[i].contributors != expected[x.in + i]) return false;
    }
    return true;
  }

  // When its messages have come: exponents, and what later rounds must know.
  void set_in(round& x, std::span<const arrival> got, bool scaled, std::uint8_t mode) {
    if (x.known) {
      for (round& y : rounds) y.known = 0;
    }
    x.known = mode;
    for (std::uint32_t i = 0; i < x.ins; ++i) expected[x.in + i] = got[i].contributors;
    if (x.ins) x.expected = got[0].contributors;
    for (std::uint32_t i = x.overwrites; scaled && i < x.overwrites + x.overwrite_count; ++i) {
      numbers[overwrites[i].id] = got[overwrites[i].arrival].contributors;
    }
    for (std::uint32_t i = x.merges; i < x.merges + x.merge_count; ++i) {
      merge& m = merges[i];
      unsigned total = 0;
      for (std::uint32_t k = m.operands; k < m.operands + m.inputs; ++k) {
        const unsigned n = !scaled ? 1 : arrivals[k] == own ? number(m.before) : got[arrivals[k]].contributors;
        operands[k].exponent = exponent(n);
        total += n;
      }
      if (m.final) total = 1;
      m.exponent = scaled ? exponent(total) : 0;
      if (scaled) numbers[m.id] = static_cast<std::uint16_t>(total);
    }
  }

  std::uint16_t number(const source& x) const {
    const std::uint16_t n = numbers[x.id];
    for (std::uint32_t i = x.more; i < x.last; ++i) {
      if (numbers[further[i]] != n) disagree();
    }
    return n;
  }

  // Who has given the interval its number by the last operation added so far.
  source source_of(interval b) {
    source x{0, static_cast<std::uint32_t>(further.size()), 0};
    bool found = false;
    for (const run& r : runs_) {
      if (!r.where.overlaps(b)) continue;
      if (!found) x.id = r.id;
      else if (r.id != x.id) further.push_back(r.id);
      found = true;
    }
    x.last = static_cast<std::uint32_t>(further.size());
    return x;
  }

  static int exponent(unsigned number) noexcept { return std::bit_width(number - 1u); }

 private:
  struct run {
    interval where;
    std::uint32_t id;
  };

  bool is_final(interval b, std::span<const interval> completes, const auto& later) {
    using cover = typename std::remove_cvref_t<decltype(later)>::cover;
    std::size_t n = 0;
    bool part = false;
    for (const interval c : completes) {
      const std::size_t begin = (std::max)(b.begin, c.begin), end = (std::min)(b.end(), c.end());
      if (begin >= end) continue;
      const cover x = later.of({begin, end - begin});
      part |= x == cover::part;
      if (x == cover::none) n += end - begin;
    }
    torn |= part || (n && n != b.count);
    return n == b.count;
  }

  void let_stay(std::size_t i, std::span<const Operation> now, std::span<const Operation> next) {
    for (const Operation& sent : now) {
      if (sent.act != action::send) continue;
      out_stays[i++] = std::none_of(next.begin(), next.end(), [&](const Operation& o) {
        return o.act == action::copy && o.range.overlaps(sent.range);
      });
    }
  }

  [[noreturn]] static void disagree() {
    throw argument_error("heddle::execute: this topology sends elements with different numbers of contributions in "
                         "one message, which float16 can't carry; use bfloat16 or float");
  }

  std::uint32_t give_number(interval b) {
    const auto id = static_cast<std::uint32_t>(numbers.size());
    numbers.push_back(1);
    list<run> kept{{b, id}};
    for (const run& r : runs_) {
      if (!r.where.overlaps(b)) {
        kept.push_back(r);
        continue;
      }
      if (r.where.begin < b.begin) kept.push_back({{r.where.begin, b.begin - r.where.begin}, r.id});
      if (r.where.end() > b.end()) kept.push_back({{b.end(), r.where.end() - b.end()}, r.id});
    }
    runs_ = std::move(kept);
    return id;
  }

  void add(int rank, std::span<const Operation> operations, const unsigned char* final) {
    list<const Operation*> receives;
    program::round x{static_cast<std::uint32_t>(out.size()), 0, static_cast<std::uint32_t>(in.size()), 0,
                     static_cast<std::uint32_t>(merges.size()), 0, static_cast<std::uint32_t>(overwrites.size()), 0};
    for (const Operation& o : operations) {
      const std::size_t n = o.range.count * element_bytes, offset = o.range.begin * element_bytes;
      const int peer = static_cast<int>(o.peer);
      if (o.act == action::send) {
        out.push_back({peer, nullptr, n, 1, false});
        out_offsets.push_back(offset);
        out_sources.push_back(source_of(o.range));
      } else {
        in.push_back({peer, nullptr, n});
        in_offsets.push_back(o.act == action::copy ? offset : in_place);
        receives.push_back(&o);
      }
    }
    std::size_t scratch_used = 0;
    list<unsigned char> done(receives.size());
    for (std::uint32_t i = 0; i < receives.size(); ++i) {
      const Operation& o = *receives[i];
      if (o.act == action::copy) overwrites.push_back({i, give_number(o.range)});
      if (done[i] || o.act == action::copy) continue;
      const auto first = static_cast<std::uint32_t>(operands.size());
      merge m{o.range.begin * element_bytes, o.range.count, in_place, first, 0, 0, i, 0, source_of(o.range), 0,
              final[receives[i] - operations.data()] != 0};
      // All reduces of this interval at once, own contribution at its place in rank order.
      bool placed = false;
      const auto place = [&] {
        m.mine = static_cast<std::uint32_t>(operands.size()) - m.operands;
        operands.push_back({nullptr, 0});
        arrivals.push_back(own);
        placed = true;
      };
      for (std::uint32_t j = i; j < receives.size(); ++j) {
        const Operation& p = *receives[j];
        if (p.act != action::reduce || !(p.range == o.range)) continue;
        done[j] = 1;
        if (!placed && static_cast<int>(p.peer) > rank) place();
        operands.push_back({nullptr, 0});
        arrivals.push_back(j);
      }
      if (!placed) place();
      m.inputs = static_cast<std::uint32_t>(operands.size()) - m.operands;
      for (const Operation& p : operations) {
        if (p.act != action::send || !p.range.overlaps(o.range)) continue;
        m.staged = scratch_used;
        x.staged = true;
        scratch_used += (o.range.count * element_bytes + 63) / 64 * 64;
        break;
      }
      m.id = give_number(o.range);
      merges.push_back(m);
    }
    scratch = (std::max)(scratch, scratch_used);
    x.outs = static_cast<std::uint32_t>(out.size()) - x.out;
    x.ins = static_cast<std::uint32_t>(in.size()) - x.in;
    x.merge_count = static_cast<std::uint32_t>(merges.size()) - x.merges;
    x.overwrite_count = static_cast<std::uint32_t>(overwrites.size()) - x.overwrites;
    x.idle = x.outs == 0 && x.ins == 0;
    expected.resize(in.size());
    rounds.push_back(x);
  }

  list<run> runs_;
};
}  // namespace detail

/// @brief Runs schedules on a communicator; keeps what it prepared and the scratch memory between runs.
///
/// Not a template over topologies: the schedule is data, the inner loop is a `leaf`. What it does round by round is
/// exactly the schedule. A reduction whose result overlaps what its round sends goes through scratch memory, every
/// other one is done in place from the peer's buffer.
/// @tparam Operation heddle::operation; use the name `executor`.
template <class Operation>
class basic_executor {
  using program = detail::program<Operation>;

 public:
  /// Optional record of what was executed: operation by operation, for proofs.
  std::vector<Operation>* trace = nullptr;

  /// @brief Prepares for `s`; runs of it need not do so again.
  /// @param rank This rank. @param s Its schedule. @param bytes Bytes of one element.
  /// @param completes Where a last receive that reduces gives this rank's final value: the buffer for an all-reduce,
  /// what the rank owns for a reduce-scatter. Disjoint intervals.
  void prepare(int rank, const basic_schedule<Operation>& s, std::size_t bytes,
               std::span<const interval> completes = {}) {
    program_.build(rank, s, bytes, completes);
  }
  /// Bytes of an element that it is prepared for; 0 if it isn't.
  std::size_t prepared_bytes() const noexcept { return program_.element_bytes; }

  /// @brief Runs rounds [from, to) of the schedule that it is prepared for; only the first run allocates.
  /// @param comm Communicator. @param s This rank's schedule. @param from First round. @param to One past the last.
  /// @param h Header of the call. @param buffer The elements, in place.
  /// @param l Reduction; null where none occurs. @param factor What final values are multiplied by (mean).
  /// @return Whether a value left float16's range on this rank.
  /// Throws: comm_error; argument_error if the schedule reduces and `l` is null, or can't carry a mean or float16 sum.
  template <communicator Comm>
  bool run_prepared(Comm& comm, const basic_schedule<Operation>& s, std::size_t from, std::size_t to, header h,
                    std::byte* buffer, const leaf* l, double factor = 1.0) {
    program& p = program_;
    if (to != s.rounds() && to != s.half()) p.let_none_stay();
    if (buffer != p.bound) p.bind(buffer);
    std::byte* scratch;
    if constexpr (stream_ordered<Comm>) {
      scratch = static_cast<std::byte*>(comm.scratch(p.scratch));
    } else {
      if (scratch_.size() < p.scratch) scratch_.resize(p.scratch);
      scratch = scratch_.data();
    }
    const bool scaled = l && l->scaled();  // float16 sums carry a power of two
    bool left_range = false;
    const auto mode = static_cast<std::uint8_t>(l ? 2 + scaled : 1);
    typename program::round* round = p.rounds.data() + from;
    for (std::size_t r = from; r < to; ++r, ++round) {
      typename program::round& x = *round;
      if (x.idle) continue;
      if (x.known != mode) p.set_out(x, scaled);
      h.round = static_cast<std::uint8_t>(r);
      comm.exchange(h, std::span<const outgoing>(p.out.data() + x.out, x.outs),
                    std::span<const incoming>(p.in.data() + x.in, x.ins), [&](std::span<const arrival> got) {
                      if (trace) record(s.round(r));
                      if (x.known != mode || !p.as_expected(x, got)) first_time(x, got, l, mode);
                      if (x.merge_count) left_range |= merge(x, got, buffer, scratch, l, factor);
                    });
      if (x.staged) unstage(comm, x, buffer, scratch);
    }
    return left_range;
  }

 private:
  [[gnu::noinline]] void record(std::span<const Operation> round) {
    trace->insert(trace->end(), round.begin(), round.end());
  }

  [[gnu::noinline]] void first_time(typename program::round& x, std::span<const arrival> got, const leaf* l,
                                    std::uint8_t mode) {
    if (x.merge_count && !l) throw argument_error("heddle::execute: the schedule reduces, but no reduction was given");
    if (program_.torn && x.merge_count && (l->average || l->scaled())) {
      throw argument_error("heddle::execute: a round of this topology completes a part of what it reduces; means and "
                           "float16 sums need all or nothing");
    }
    program_.set_in(x, got, l && l->scaled(), mode);
  }

  [[gnu::always_inline]] bool merge(const typename program::round& x, std::span<const arrival> got, std::byte* buffer,
                                    std::byte* scratch, const leaf* l, double factor) {
    program& p = program_;
    bool left_range = false;
    const typename program::merge* m = p.merges.data() + x.merges;
    for (const auto* const end = m + x.merge_count; m != end; ++m) {
      operand* const o = p.operands.data() + m->operands;
      if (m->inputs == 2) {
        o[1 - m->mine].data = got[m->arrival].data;
      } else {
        const std::uint32_t* const from = p.arrivals.data() + m->operands;
        for (std::uint32_t k = 0; k < m->inputs; ++k) {
          if (from[k] != p.own) o[k].data = got[from[k]].data;
        }
      }
      std::byte* const to = m->staged == p.in_place ? buffer + m->offset : scratch + m->staged;
      left_range |= l->reduce(l->context, o, static_cast<int>(m->inputs), to, m->count, m->exponent,
                              m->final ? factor : 1.0);
    }
    return left_range;
  }

  template <communicator Comm>
  [[gnu::noinline]] void unstage([[maybe_unused]] Comm& comm, const typename program::round& x, std::byte* buffer,
                                 const std::byte* scratch) {
    for (std::uint32_t i = x.merges; i < x.merges + x.merge_count; ++i) {
      const typename program::merge& m = program_.merges[i];
      if (m.staged == program_.in_place) continue;
      const std::size_t bytes = m.count * program_.element_bytes;
      if constexpr (stream_ordered<Comm>) comm.copy(buffer + m.offset, scratch + m.staged, bytes);
      else std::memcpy(buffer + m.offset, scratch + m.staged, bytes);
    }
  }

  std::vector<std::byte> scratch_;
  program program_;
};

/// @brief The executor of schedules.
using executor = basic_executor<operation>;

namespace detail {
// What a header says of the topology; nothing for one without a name.
template <class Topology>
header on_topology(const header& h, const Topology& t) {
  if constexpr (has_name<Topology>) return h.on(t.name());
  else return h;
}

// Runs a schedule without reductions once, from its first round to its last.
template <communicator Comm, class Operation>
void run_once(Comm& comm, const basic_schedule<Operation>& s, const header& h, void* buffer, std::size_t bytes) {
  basic_executor<Operation> x;
  x.prepare(comm.rank(), s, bytes);
  x.run_prepared(comm, s, 0, s.rounds(), h, static_cast<std::byte*>(buffer), nullptr);
}
}  // namespace detail

}  // namespace v0
}  // namespace heddle

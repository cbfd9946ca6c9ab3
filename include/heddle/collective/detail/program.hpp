// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/schedule.hpp>
#include <heddle/comm/concept.hpp>
#include <heddle/core/reduction.hpp>

#include <algorithm>
#include <bit>

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
  std::size_t longest = 0;     // bytes of the longest message that is received
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
        longest = (std::max)(longest, n);
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

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/detail/program.hpp>

#include <cstring>

namespace heddle {
inline namespace v0 {

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
                    std::span<const incoming>(p.in.data() + x.in, x.ins),
                    work{*this, s, x, r, to, buffer, scratch, l, factor, mode, left_range});
      if (x.staged) unstage(comm, x, buffer, scratch);
    }
    return left_range;
  }

 private:
  // What happens when the messages of a round have come; see takes_parts, too.
  struct work {
    basic_executor& all;
    const basic_schedule<Operation>& s;
    typename program::round& round;
    std::size_t r, to;
    std::byte *buffer, *scratch;
    const leaf* l;
    double factor;
    std::uint8_t mode;
    bool& left_range;

    [[gnu::always_inline]] void operator()(std::span<const arrival> got) const {
      begin(got);
      if (round.merge_count) left_range |= all.merge(round, got, buffer, scratch, l, factor);
    }
    bool takes(std::size_t bytes) const {
      return round.merge_count && !round.overwrite_count && bytes % all.program_.element_bytes == 0;
    }
    void part(std::span<const arrival> got, std::size_t offset, std::size_t bytes) const {
      if (offset == 0) begin(got);
      left_range |= all.merge_part(*this, got, offset, bytes);
    }
    template <class Function> void expects(std::size_t above, Function&& f) const {
      const program& p = all.program_;
      for (std::size_t k = r; k < to && p.longest > above; ++k) {
        const auto& next = p.rounds[k];
        for (std::uint32_t i = next.in; i < next.in + next.ins; ++i) {
          if (p.in[i].bytes > above) f(static_cast<std::uint8_t>(k), p.in[i]);
        }
      }
    }

    [[gnu::always_inline]] void begin(std::span<const arrival> got) const {
      if (all.trace) all.record(s.round(r));
      if (round.known != mode || !all.program_.as_expected(round, got)) all.first_time(round, got, l, mode);
    }
  };

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

  // Of a part of the round's messages, all of which are reduced and as long as the intervals that they go into.
  [[gnu::noinline]] bool merge_part(const work& w, std::span<const arrival> got, std::size_t offset,
                                    std::size_t bytes) {
    program& p = program_;
    bool left_range = false;
    p.bound = nullptr;  // own pointers are to a part: after a user's operation has thrown, the next run sets them anew
    const typename program::merge* m = p.merges.data() + w.round.merges;
    for (const auto* const end = m + w.round.merge_count; m != end; ++m) {
      operand* const o = p.operands.data() + m->operands;
      for (std::uint32_t k = 0; k < m->inputs; ++k) {
        const std::uint32_t from = p.arrivals[m->operands + k];
        o[k].data = from == p.own ? w.buffer + m->offset + offset : got[from].data;
      }
      std::byte* const to = (m->staged == p.in_place ? w.buffer + m->offset : w.scratch + m->staged) + offset;
      left_range |= w.l->reduce(w.l->context, o, static_cast<int>(m->inputs), to, bytes / p.element_bytes, m->exponent,
                                m->final ? w.factor : 1.0);
      o[m->mine].data = w.buffer + m->offset;
    }
    p.bound = w.buffer;
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

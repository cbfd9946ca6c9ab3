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
// How many ranks are summed in each run of a float16 buffer: stored values are the sum times 2^-ceil(log2(that)).
class contributions {
 public:
  void reset(std::size_t count) { runs_.assign(1, {{0, count}, 1}); }

  // The number for an interval; argument_error if it isn't one number.
  std::uint16_t of(interval b) const {
    std::uint16_t found = 0;
    for (const run& r : runs_) {
      if (!r.where.overlaps(b)) continue;
      if (found && found != r.number) {
        throw argument_error("heddle::execute: this topology sends elements with different numbers of contributions in "
                             "one message, which float16 can't carry; use bfloat16 or float");
      }
      found = r.number;
    }
    return found ? found : std::uint16_t{1};
  }

  void set(interval b, std::uint16_t number) {
    std::vector<run> kept;
    kept.push_back({b, number});
    for (const run& r : runs_) {
      if (!r.where.overlaps(b)) {
        kept.push_back(r);
        continue;
      }
      if (r.where.begin < b.begin) kept.push_back({{r.where.begin, b.begin - r.where.begin}, r.number});
      if (r.where.end() > b.end()) kept.push_back({{b.end(), r.where.end() - b.end()}, r.number});
    }
    runs_ = std::move(kept);
  }

  static int exponent(std::uint16_t number) noexcept { return std::bit_width(static_cast<unsigned>(number) - 1u); }

 private:
  struct run {
    interval where;
    std::uint16_t number;
  };
  std::vector<run> runs_;
};
}  // namespace detail

/// @brief Runs schedules on a communicator; keeps the scratch memory between runs.
///
/// Not a template over topologies: the schedule is data, the inner loop is a `leaf`. What it does round by round is
/// exactly the schedule. A reduction whose result overlaps what its round sends goes through scratch memory, every
/// other one is done in place from the peer's buffer.
class executor {
 public:
  /// Optional record of what was executed: operation by operation, for proofs.
  std::vector<operation>* trace = nullptr;

  /// @brief Runs rounds [from, to) of `s`.
  /// @param comm Communicator. @param s This rank's schedule. @param from First round. @param to One past the last.
  /// @param h Header of the call. @param buffer The elements, in place. @param bytes Bytes of one element.
  /// @param l Reduction; null where none occurs.
  /// @param factor Where `final`, every reduce of the last round multiplies by it (mean).
  /// @param final Whether the last round's reductions give final values.
  /// @return Whether a value left float16's range on this rank.
  template <communicator Comm>
  bool run(Comm& comm, const schedule& s, std::size_t from, std::size_t to, header h, std::byte* buffer,
           std::size_t bytes, const leaf* l, double factor = 1.0, bool final = false) {
    const bool scaled = l && l->scaled();  // float16 sums carry a power of two
    if (scaled && from == 0) contributions_.reset(h.count);
    bool left_range = false;
    for (std::size_t r = from; r < to; ++r) {
      const std::span<const operation> round = s.round(r);
      if (trace) trace->insert(trace->end(), round.begin(), round.end());
      out_.clear();
      in_.clear();
      receives_.clear();
      for (const operation& o : round) {
        const std::size_t n = o.range.count * bytes;
        std::byte* const at = buffer + o.range.begin * bytes;
        const int peer = static_cast<int>(o.peer);
        if (o.act == action::send) {
          out_.push_back({peer, at, n, scaled ? contributions_.of(o.range) : std::uint16_t{1}});
        } else {
          in_.push_back({peer, o.act == action::copy ? at : nullptr, n});
          receives_.push_back(&o);
        }
      }
      h.round = static_cast<std::uint8_t>(r);
      staged_.clear();
      if (out_.empty() && in_.empty()) continue;
      const bool last = final && r + 1 == to;
      comm.exchange(h, out_, in_, [&](std::span<const arrival> arrivals) {
        left_range |= apply(comm.rank(), round, arrivals, buffer, bytes, l, last ? factor : 1.0, last);
      });
      for (const staged& x : staged_) {
        std::memcpy(buffer + x.where.begin * bytes, scratch_.data() + x.at, x.where.count * bytes);
      }
    }
    return left_range;
  }

  /// @brief Multiplies an interval by `factor`, for reductions that the last round could not finish.
  bool finish(interval b, std::byte* buffer, const leaf& l, double factor) {
    if (!b.count) return false;
    std::byte* const at = buffer + b.begin * l.bytes;
    const bool scaled = l.scaled();
    const operand x{at, scaled ? detail::contributions::exponent(contributions_.of(b)) : 0};
    const bool left_range = l.reduce(l.context, &x, 1, at, b.count, 0, factor);
    if (scaled) contributions_.set(b, 1);
    return left_range;
  }

 private:
  struct staged {
    interval where;
    std::size_t at;
  };

  bool apply(int rank, std::span<const operation> round, std::span<const arrival> arrivals, std::byte* buffer,
             std::size_t bytes, const leaf* l, double factor, bool last) {
    const bool scaled = l && l->scaled();
    bool left_range = false;
    done_.assign(receives_.size(), 0);
    scratch_used_ = 0;
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      const operation& o = *receives_[i];
      if (done_[i] || o.act != action::reduce) {
        if (o.act == action::copy && scaled) contributions_.set(o.range, arrivals[i].contributors);
        continue;
      }
      if (!l) throw argument_error("heddle::execute: the schedule reduces, but no reduction was given");
      // All reduces of this interval at once, own contribution at its place in rank order.
      operands_.clear();
      const std::uint16_t own = scaled ? contributions_.of(o.range) : std::uint16_t{1};
      unsigned total = own;
      const operand mine{buffer + o.range.begin * bytes, detail::contributions::exponent(own)};
      bool placed = false;
      for (std::size_t j = i; j < receives_.size(); ++j) {
        const operation& p = *receives_[j];
        if (p.act != action::reduce || !(p.range == o.range)) continue;
        done_[j] = 1;
        if (!placed && static_cast<int>(p.peer) > rank) {
          operands_.push_back(mine);
          placed = true;
        }
        operands_.push_back({arrivals[j].data, detail::contributions::exponent(arrivals[j].contributors)});
        total += arrivals[j].contributors;
      }
      if (!placed) operands_.push_back(mine);
      std::byte* to = buffer + o.range.begin * bytes;
      for (const operation& p : round) {
        if (p.act != action::send || !p.range.overlaps(o.range)) continue;
        scratch_.resize((std::max)(scratch_.size(), scratch_used_ + o.range.count * bytes));
        staged_.push_back({o.range, scratch_used_});
        to = scratch_.data() + scratch_used_;
        scratch_used_ += (o.range.count * bytes + 63) / 64 * 64;
        break;
      }
      const auto sum = static_cast<std::uint16_t>(total);
      const int exponent = scaled && !last ? detail::contributions::exponent(sum) : 0;
      left_range |= l->reduce(l->context, operands_.data(), static_cast<int>(operands_.size()), to, o.range.count,
                              exponent, factor);
      if (scaled) contributions_.set(o.range, last ? std::uint16_t{1} : sum);
    }
    return left_range;
  }

  std::vector<outgoing> out_;
  std::vector<incoming> in_;
  std::vector<const operation*> receives_;
  std::vector<operand> operands_;
  std::vector<staged> staged_;
  std::vector<unsigned char> done_;
  std::vector<std::byte> scratch_;
  std::size_t scratch_used_ = 0;
  detail::contributions contributions_;
};

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/sharded.hpp>
#include <heddle/trainer/detail/device_forms.cuh>
#include <heddle/trainer/strategy.hpp>

#include <bit>
#include <numeric>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace detail {

/// @cond
// A part that entries are of: where its slots begin among those of its list, where they lie in a block, and where what
// they hold is added.
struct dgc_slots {
  std::size_t begin, at, position;
  float* gradient;
  std::uint32_t room;
};
struct slots_begin {
  const dgc_slots* rows;
  HEDDLE_HD std::size_t operator()(std::size_t k) const { return rows[k].begin; }
};
// Adds slot j of a rank's block, if it was filled: to gradients, or to `sum`, where all parts lie one after the other.
struct add_slot {
  const dgc_slots* rows;
  std::size_t parts;
  const std::byte* block;
  float* sum;
  HEDDLE_HD void operator()(std::size_t j) const {
    const std::size_t k = segment_of(slots_begin{rows}, parts, j);
    const dgc_slots& row = rows[k];
    const std::size_t slot = j - row.begin;
    if (slot >= reinterpret_cast<const std::uint32_t*>(block)[k]) return;
    const auto* const index = reinterpret_cast<const std::uint32_t*>(block + row.at);
    (sum ? sum + row.position : row.gradient)[index[slot]] += reinterpret_cast<const float*>(index + row.room)[slot];
  }
};
struct tell_found {  // of each part, as far as there was room
  const dgc_control* control;
  const dgc_slots* rows;
  std::uint32_t* found;
  HEDDLE_HD void operator()(std::size_t k) const {
    found[k] = control[k].found < rows[k].room ? control[k].found : rows[k].room;
  }
};
// As dgc_dense, for one element.
struct dense_velocity {
  float* g;
  const float* w;
  float* u;
  float all, share, momentum, decay;
  bool ahead;
  HEDDLE_HD void move(float& update, float parameter, float& velocity) const {
    const float mean = w ? update + decay * parameter : update, mine = mean * share;
    velocity = ahead ? momentum * (velocity + mine) : momentum * velocity + mine;
    update = (ahead ? velocity + mine : velocity) * all;
  }
  HEDDLE_HD void operator()(std::size_t i) const { move(g[i], w ? w[i] : 0.0f, u[i]); }
};
// *bad becomes 1 where that would leave float's range; moves nothing.
struct dense_velocity_fits {
  dense_velocity of;
  unsigned* bad;
  __device__ void operator()(std::size_t i) const {
    float update = of.g[i], velocity = of.u[i];
    of.move(update, of.w ? of.w[i] : 0.0f, velocity);
    if (!is_finite(update) || !is_finite(velocity)) atomicOr(bad, 1u);
  }
};
/// @endcond

// dgc, and sharded{dgc{}}. A rank's block: how many entries there are of each part; then, part by part, room for their
// indices and values. Parts are whole tensors, or what a rank owns of its group's gradient.
template <class Codec> class dgc_form {
  static constexpr bool shards = shards_packets<Codec>;

 public:
  static constexpr bool exists = true;
  dgc_form(const Codec& c, int ranks, int rank)
      : codec_(c), ranks_(static_cast<std::size_t>(ranks)), rank_(static_cast<std::size_t>(rank)) {
    if (c.values != sparse_values::f32)
      throw argument_error("heddle::data_parallel: dgc's values are f16, over tensors of a device allowed is f32");
    if (c.selection != selection::sampled)
      throw argument_error(
          "heddle::data_parallel: dgc's selection is exact, over tensors of a device allowed is sampled");
  }
  void hold(const std::vector<held_part>& parts, cuda::queue q) {
    state_.hold(2, parts, q);
    begin_at_.assign(parts.size(), 0);
  }
  bool sends(const device_facts& f) const { return codec_.sends(f.count, f.context); }
  std::size_t bytes() const noexcept { return state_.bytes(); }
  float* state(std::size_t slot, std::size_t tensor, std::size_t begin = 0) const noexcept {
    return state_.of(slot, tensor, begin);
  }
  static std::size_t extra(std::size_t n) noexcept { return dgc::extra(n); }

  // f(tensor, begin of its part, magnitude from which on entries are sent; not above 0: to be sampled).
  template <class Function> void thresholds(const device_work& w, cuda::queue q, Function&& f) const {
    if (!w.dgc) return;
    const auto& parts = mine(w).parts;
    std::vector<dgc_control> control(parts.size());
    cuda::copy(static_cast<const dgc_control*>(w.dgc->control()), control.data(), control.size(), q);
    q.synchronize();
    for (std::size_t k = 0; k < parts.size(); ++k)
      f(parts[k].tensor, parts[k].begin, std::bit_cast<float>(control[k].threshold));
  }
  // The same, for the next table.
  void begin_at(std::size_t tensor, std::size_t begin, float magnitude) {
    begin_at_[state_.index(tensor, begin)] = std::bit_cast<std::uint32_t>(magnitude);
  }

  void fits(const device_facts& f, std::size_t i, unsigned* bad, cuda::queue q) const {
    cuda::for_each(f.count, dense_velocity_fits{velocity(f, i), bad}, q);
  }
  void correct(const device_facts& f, std::size_t i, cuda::queue q) const {
    cuda::for_each(f.count, velocity(f, i), q);
  }

  // Facts also gives those of a part: part(p), and the gradient that it is decoded into: target(p).
  template <class Facts, class Sum, class Gather>
  std::size_t prepare(device_work& w, const std::vector<std::size_t>& sent, const Facts& facts, unsigned* bad,
                      cuda::queue q, Sum&& sum, Gather&& gather) {
    set_up(w, sent, facts, q);
    if (sent.empty()) return 0;
    if (w.dgc) {
      const device_facts first = facts.part(mine(w).parts[0]);
      if (!first.factor.at && first.factor.value != std::exchange(w.factor, first.factor.value))
        cuda::fill(factor(w), 1, first.factor.value, q);
      if (late())
        w.dgc->fits(told(w, first), bad, q);
      else
        w.dgc->prepare(codec_, told(w, first), bad, q);
    }
    return late() ? 0 : hand_around(w, sent, facts, q, sum, gather);
  }
  template <class Facts, class Sum, class Gather>
  std::size_t settle(device_work& w, const std::vector<std::size_t>& sent, const Facts& facts, cuda::queue q, Sum&& sum,
                     Gather&& gather) {
    if (sent.empty()) return 0;
    if (w.dgc) {
      const encode_context x = told(w, facts.part(mine(w).parts[0]));
      late() ? w.dgc->step(codec_, x, q) : w.dgc->commit(codec_, x, q);
    }
    const std::size_t n = late() ? hand_around(w, sent, facts, q, sum, gather) : 0;
    const auto* from = reinterpret_cast<const float*>(w.added.data());
    for (const std::size_t i : sent) {
      const device_facts f = facts(i);
      if (w.dense)
        cuda::copy(from, f.gradient, f.count, q);
      else
        cuda::fill(f.gradient, f.count, 0.0f, q);
      from += f.count;
    }
    for (std::size_t r = 0; !w.dense && r < ranks_; ++r) add(w, r, nullptr, q);
    return n;
  }

 private:
  bool late() const noexcept { return codec_.overlap == overlap::none; }
  dense_velocity velocity(const device_facts& f, std::size_t i) const noexcept {
    const encode_context& x = f.context;
    const auto all = static_cast<float>(x.ranks);
    return {f.gradient, x.parameter, state(0, i), all, 1.0f / all, x.momentum, x.weight_decay, x.nesterov};
  }
  static encode_context told(const device_work& w, const device_facts& first) noexcept {
    encode_context x = first.context;
    x.weight_decay = w.decay;
    return x;
  }

  // What a rank sends; where it lies; the table of its parts.
  static const device_work::list& list_of(const device_work& w, std::size_t rank) noexcept {
    return w.lists[shards ? rank : 0];
  }
  const device_work::list& mine(const device_work& w) const noexcept { return list_of(w, rank_); }
  std::byte* block(const device_work& w, std::size_t rank) const noexcept {
    std::byte* at = w.memory.data();
    for (std::size_t r = 0; r < rank; ++r) at += list_of(w, r).block;
    return at;
  }
  static float* factor(const device_work& w) noexcept { return reinterpret_cast<float*>(w.more.data()); }
  static const dgc_slots* rows(const device_work& w, std::size_t rank) noexcept {
    std::size_t at = 0;
    for (std::size_t r = 0; shards && r < rank; ++r) at += w.lists[r].parts.size();
    return reinterpret_cast<const dgc_slots*>(w.more.data() + stream_buffer::rounded(sizeof(float))) + at;
  }
  void add(const device_work& w, std::size_t rank, float* sum, cuda::queue q) const {
    const auto& list = list_of(w, rank);
    cuda::for_each(list.slots, add_slot{rows(w, rank), list.parts.size(), block(w, rank), sum}, q);
  }

  // Hands the blocks around, or a sum of what is in them. How many numbers this rank gave.
  template <class Facts, class Sum, class Gather>
  std::size_t hand_around(device_work& w, const std::vector<std::size_t>& sent, const Facts& facts, cuda::queue q,
                          Sum& sum, Gather& gather) const {
    if (w.dgc) {
      auto* const found = reinterpret_cast<std::uint32_t*>(block(w, rank_));
      cuda::for_each(mine(w).parts.size(), tell_found{w.dgc->control(), rows(w, rank_), found}, q);
    }
    if (!w.dense) {
      std::vector<std::size_t> blocks;
      for (std::size_t r = 0; r < ranks_; ++r) blocks.push_back(list_of(w, r).block);
      gather(w.memory.data(), blocks);
      return mine(w).slots;
    }
    const std::size_t n = elements(sent, facts);
    check_cuda("data_parallel", w.added.reserve(n * sizeof(float)));
    auto* const all = reinterpret_cast<float*>(w.added.data());
    cuda::fill(all, n, 0.0f, q);
    add(w, rank_, all, q);
    sum(all, n);
    return n;
  }
  template <class Facts> static std::size_t elements(const std::vector<std::size_t>& sent, const Facts& facts) {
    return std::accumulate(sent.begin(), sent.end(), std::size_t{0},
                           [&](std::size_t n, std::size_t i) { return n + facts(i).count; });
  }

  // The parts of each rank, and how many entries are sent of them.
  template <class Facts>
  std::vector<device_work::list> lay_out(const device_work& w, const std::vector<std::size_t>& sent,
                                         const Facts& facts) const {
    std::vector<device_work::list> lists(shards ? ranks_ : 1);
    if (sent.empty()) return lists;
    const encode_context x = facts(sent[0]).context;
    for (std::size_t r = 0; r < lists.size(); ++r) {
      device_work::list& l = lists[r];
      if (shards) {
        l.parts = w.owned[r];
      } else {
        std::size_t at = 0;
        for (const std::size_t i : sent) {
          l.parts.push_back({.tensor = i, .count = facts(i).count, .position = at});
          at += l.parts.back().count;
        }
      }
      l.block = l.parts.size() * sizeof(std::uint32_t);
      for (const piece& p : l.parts) {
        const std::size_t k = codec_.entries(p.count, x);
        l.entries.push_back(static_cast<std::uint32_t>(k));
        l.room.push_back(static_cast<std::uint32_t>((std::min)(p.count, k + k / 4)));
        l.at.push_back(l.block);
        l.block += l.room.back() * (sizeof(std::uint32_t) + sizeof(float));
        l.slots += l.room.back();
      }
    }
    return lists;
  }

  // Tables for these tensors and numbers of entries, which change in a warm-up only. A table has one weight decay:
  // data_parallel refuses others.
  template <class Facts>
  void set_up(device_work& w, const std::vector<std::size_t>& sent, const Facts& facts, cuda::queue q) {
    auto lists = lay_out(w, sent, facts);
    const auto& own = lists[shards ? rank_ : 0];
    std::vector<const void*> known;
    w.decay = 0.0f;
    for (const piece& p : own.parts) {
      const device_facts f = facts.part(p);
      known.push_back(f.gradient);
      known.push_back(f.context.weight_decay != 0.0f ? f.context.parameter : nullptr);
      if (f.context.weight_decay != 0.0f) w.decay = f.context.weight_decay;
    }
    bool same = lists.size() == w.lists.size() && known == w.known;
    for (std::size_t r = 0; same && r < lists.size(); ++r) same = lists[r].entries == w.lists[r].entries;
    if (same) return;
    w.dgc.reset();
    w.lists = std::move(lists);
    w.known = std::move(known);
    if (sent.empty()) return;
    std::size_t total = 0, least = ~std::size_t{0};
    for (std::size_t r = 0; r < ranks_; ++r) {
      total += list_of(w, r).block;
      least = (std::min)(least, list_of(w, r).block);
    }
    // As on the host: a ring sends on all blocks but one, or of a dense sum 2 (P - 1) / P of the elements.
    w.dense = ranks_ > 1 && (total - least) / (ranks_ - 1) * ranks_ >= 2 * sizeof(float) * elements(sent, facts);
    std::vector<dgc_slots> table;
    for (const device_work::list& l : w.lists) {
      for (std::size_t k = 0, begin = 0; k < l.parts.size(); begin += l.room[k++])
        table.push_back({begin, l.at[k], l.parts[k].position, facts.target(l.parts[k]), l.room[k]});
    }
    check_cuda("data_parallel", w.memory.reserve(total));
    check_cuda("data_parallel",
               w.more.reserve(stream_buffer::rounded(sizeof(float)) + table.size() * sizeof(dgc_slots)));
    cuda::fill(w.memory.data(), total, std::byte{0}, q);  // all of it travels
    cuda::fill(factor(w), 1, w.factor = 1.0f, q);
    cuda::copy(static_cast<const dgc_slots*>(table.data()), const_cast<dgc_slots*>(rows(w, 0)), table.size(), q);
    std::vector<dgc_segment> segments;
    std::vector<dgc_control> control;
    const device_work::list& l = mine(w);
    for (std::size_t k = 0; k < l.parts.size(); ++k) {
      const piece& p = l.parts[k];
      const device_facts f = facts.part(p);
      auto* const index = reinterpret_cast<std::uint32_t*>(block(w, rank_) + l.at[k]);
      segments.push_back({f.gradient, static_cast<const float*>(w.known[2 * k + 1]), state(0, p.tensor, p.begin),
                          state(1, p.tensor, p.begin), index, reinterpret_cast<float*>(index + l.room[k]), p.count,
                          l.entries[k], l.room[k], f.factor.at ? f.factor.at : factor(w)});
      control.push_back({std::exchange(begin_at_[state_.index(p.tensor, p.begin)], 0), 0, 0, 0});
    }
    if (!segments.empty()) {
      w.dgc = std::make_unique<dgc_device>(segments, q, true);
      cuda::copy(static_cast<const dgc_control*>(control.data()), w.dgc->control(), control.size(), q);
    }
    q.synchronize();  // what was copied is on this stack
  }

  Codec codec_;
  std::size_t ranks_, rank_;
  device_state state_;
  std::vector<std::uint32_t> begin_at_;  // bits of thresholds that were loaded, of each part
};
template <> struct device_form<dgc> : dgc_form<dgc> {
  using dgc_form::dgc_form;
};
template <> struct device_form<sharded<dgc>> : dgc_form<sharded<dgc>> {
  using dgc_form::dgc_form;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

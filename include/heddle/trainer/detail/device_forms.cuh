// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/dgc.cuh>
#include <heddle/compress/none.hpp>
#include <heddle/compress/sparse.cuh>
#include <heddle/trainer/tensor.hpp>

#include <bit>
#include <memory>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace detail {

/// @cond
HEDDLE_HD inline bool is_finite(float x) { return (__builtin_bit_cast(std::uint32_t, x) & 0x7f800000u) != 0x7f800000u; }
// to[i] = from[i] * factor; *bad becomes 1 where that isn't finite. In place, too.
template <class From, class To> struct convert_checked {
  const From* from;
  To* to;
  float factor;
  unsigned* bad;
  __device__ void operator()(std::size_t i) const {
    const To x = static_cast<To>(static_cast<float>(from[i]) * factor);
    to[i] = x;
    if (!is_finite(static_cast<float>(x))) atomicOr(bad, 1u);
  }
};
template <class Element> struct look_at {
  const Element* from;
  unsigned* bad;
  __device__ void operator()(std::size_t i) const {
    if (!is_finite(static_cast<float>(from[i]))) atomicOr(bad, 1u);
  }
};
// sum[index[j]] += value[j] for the entries that a rank found of a tensor.
struct add_found {
  const std::uint32_t *found, *index;
  const float* value;
  float* sum;
  HEDDLE_HD void operator()(std::size_t j) const {
    if (j < *found) sum[index[j]] += value[j];
  }
};
struct tell_found {  // of each tensor, as far as there was room
  const dgc_control* control;
  const std::uint32_t* capacity;
  std::uint32_t* found;
  HEDDLE_HD void operator()(std::size_t t) const {
    found[t] = control[t].found < capacity[t] ? control[t].found : capacity[t];
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

// What a compressor is told of a tensor.
struct device_facts {
  float* gradient;
  std::size_t count;
  float factor;  // multiplies it
  encode_context context;
};

// State of a compressor of so many slots: slot by slot all tensors, one after the other.
class device_state {
 public:
  device_state(std::size_t slots, const std::vector<tensor>& tensors, cuda::queue q)
      : slots_(slots), memory_(q.stream) {
    for (const tensor& t : tensors) {
      at_.push_back(total_);
      total_ += t.count;
    }
    check_cuda("data_parallel", memory_.reserve(bytes()));
    cuda::fill(reinterpret_cast<float*>(memory_.data()), slots_ * total_, 0.0f, q);
  }
  float* of(std::size_t slot, std::size_t tensor) const noexcept {
    return slots_ ? reinterpret_cast<float*>(memory_.data()) + slot * total_ + at_[tensor] : nullptr;
  }
  std::size_t bytes() const noexcept { return slots_ * total_ * sizeof(float); }

 private:
  std::size_t slots_, total_ = 0;
  std::vector<std::size_t> at_;
  stream_buffer memory_;
};

// Where a bucket's messages lie; a compressor's own besides.
struct device_work {
  explicit device_work(cudaStream_t s) : memory(s), more(s) {}
  stream_buffer memory, more;
  std::vector<std::size_t> at;  // of each tensor that is sent
  std::size_t block = 0;        // of a rank
  std::unique_ptr<dgc_device> dgc{};
  std::vector<std::uint32_t> entries{};
  std::vector<const void*> known{};  // tensors and parameters that dgc was made for
  float decay = 0.0f;                // of those that have one

  void forget() noexcept {
    dgc.reset();
    entries.clear();
    known.clear();
  }
};

// How data_parallel runs a compressor over tensors of a device. prepare() is called during backward and moves no
// state, settle() when all ranks know that the step counts; sum(p, n) adds up n floats over all ranks, gather(p,
// bytes) hands around as many of each rank. Both halves return how many elements they have handed around. A tensor
// that isn't sent is averaged in float; then fits() flags it if correct() would leave float's range, to which it is
// given where the step counts.
template <class Compressor> struct device_form {
  static constexpr bool exists = false;
};

struct elementwise_form {
  static constexpr bool exists = true;
  template <class Compressor> elementwise_form(const Compressor&, int, int, const std::vector<tensor>&, cuda::queue) {}
  static bool sends(const device_facts&) noexcept { return false; }
  static std::size_t bytes() noexcept { return 0; }
};
template <> struct device_form<none> : elementwise_form {
  using elementwise_form::elementwise_form;
};
template <class Wire> struct device_form<cast<Wire>> : elementwise_form {
  using elementwise_form::elementwise_form;
};

// What codecs with state have in common.
template <class Codec, class Device, bool Feedback> class codec_form {
 public:
  static constexpr bool exists = true;
  codec_form(const Codec& c, int ranks, int rank, const std::vector<tensor>& tensors, cuda::queue q)
      : codec_(c), device_(c), ranks_(ranks), rank_(rank), state_(Feedback, tensors, q) {}
  bool sends(const device_facts& f) const noexcept { return f.count > 0 && f.count >= codec_.dense_below; }
  static void fits(const device_facts&, std::size_t, unsigned*, cuda::queue) noexcept {}
  static void correct(const device_facts&, std::size_t, cuda::queue) noexcept {}
  std::size_t bytes() const noexcept { return state_.bytes(); }
  float* state(std::size_t slot, std::size_t tensor) const noexcept { return state_.of(slot, tensor); }
  static std::size_t extra(std::size_t) noexcept { return 0; }
  template <class Function>
  static void thresholds(const device_work&, const std::vector<std::size_t>&, cuda::queue, Function&&) noexcept {}
  static void begin_at(std::size_t, float) noexcept {}

 protected:
  Codec codec_;
  Device device_;
  int ranks_, rank_;
  device_state state_;
};

template <bool Feedback> struct random_form : codec_form<random_k, random_k_device, Feedback> {
  using codec_form<random_k, random_k_device, Feedback>::codec_form;

  template <class Facts, class Sum, class Gather>
  std::size_t prepare(device_work& w, const std::vector<std::size_t>& sent, Facts&& facts, unsigned* bad, cuda::queue q,
                      Sum&& sum, Gather&&) {
    w.at.clear();
    std::size_t n = 0;
    for (const std::size_t i : sent) {
      w.at.push_back(n);
      n += this->device_.picked(facts(i).count);
    }
    check_cuda("data_parallel", w.memory.reserve(n * sizeof(float)));
    auto* const sums = reinterpret_cast<float*>(w.memory.data());
    for (std::size_t k = 0; k < sent.size(); ++k) {
      const device_facts f = facts(sent[k]);
      this->device_.send(f.gradient, f.factor, this->state(0, sent[k]), f.count, f.context, sums + w.at[k], bad, q);
    }
    if (n) sum(sums, n);
    return n;
  }
  template <class Facts, class Sum, class Gather>
  std::size_t settle(device_work& w, const std::vector<std::size_t>& sent, Facts&& facts, cuda::queue q, Sum&&,
                     Gather&&) {
    for (std::size_t k = 0; k < sent.size(); ++k) {
      const device_facts f = facts(sent[k]);
      this->device_.commit(f.gradient, f.factor, this->state(0, sent[k]), f.count, f.context,
                           reinterpret_cast<const float*>(w.memory.data()) + w.at[k], q);
    }
    return 0;
  }
};
template <> struct device_form<random_k> : random_form<false> {
  using random_form<false>::random_form;
};
template <> struct device_form<error_feedback<random_k>> : random_form<true> {
  device_form(const error_feedback<random_k>& c, int ranks, int rank, const std::vector<tensor>& t, cuda::queue q)
      : random_form(c.codec, ranks, rank, t, q) {}
};

// A rank's block: indices of all tensors, then values.
template <> struct device_form<error_feedback<top_k>> : codec_form<top_k, top_k_device, true> {
  device_form(const error_feedback<top_k>& c, int ranks, int rank, const std::vector<tensor>& t, cuda::queue q)
      : codec_form(c.codec, ranks, rank, t, q) {}

  // Where all ranks' slots of 8 bytes are together no less than a dense ring moves, twice 4 bytes, that is taken.
  bool sends(const device_facts& f) const noexcept {
    return codec_form::sends(f) && device_.entries(f.count) * static_cast<std::size_t>(ranks_) < f.count;
  }

  template <class Facts, class Sum, class Gather>
  std::size_t prepare(device_work& w, const std::vector<std::size_t>& sent, Facts&& facts, unsigned* bad, cuda::queue q,
                      Sum&&, Gather&& gather) {
    w.at.clear();
    std::size_t n = 0;
    for (const std::size_t i : sent) {
      w.at.push_back(n);
      n += device_.entries(facts(i).count);
    }
    if (n == 0) return 0;
    w.block = n * (sizeof(std::uint32_t) + sizeof(float));
    check_cuda("data_parallel", w.memory.reserve(w.block * static_cast<std::size_t>(ranks_)));
    for (std::size_t k = 0; k < sent.size(); ++k) {
      const device_facts f = facts(sent[k]);
      device_.encode(f.gradient, f.factor, state(0, sent[k]), f.count, f.context, index(w, rank_) + w.at[k],
                     value(w, rank_) + w.at[k], bad, memory_, q);
    }
    gather(w.memory.data(), w.block);
    return n;
  }
  template <class Facts, class Sum, class Gather>
  std::size_t settle(device_work& w, const std::vector<std::size_t>& sent, Facts&& facts, cuda::queue q, Sum&&,
                     Gather&&) {
    for (std::size_t k = 0; k < sent.size(); ++k) {
      const device_facts f = facts(sent[k]);
      device_.hold(f.gradient, f.factor, state(0, sent[k]), f.count, f.context, index(w, rank_) + w.at[k], q);
      cuda::fill(f.gradient, f.count, 0.0f, q);
      for (int r = 0; r < ranks_; ++r)
        device_.add(index(w, r) + w.at[k], value(w, r) + w.at[k], f.count, f.gradient, q);
    }
    return 0;
  }

 private:
  std::byte* block(const device_work& w, int rank) const noexcept {
    return w.memory.data() + w.block * static_cast<std::size_t>(rank);
  }
  std::uint32_t* index(const device_work& w, int rank) const noexcept {
    return reinterpret_cast<std::uint32_t*>(block(w, rank));
  }
  float* value(const device_work& w, int rank) const noexcept {
    return reinterpret_cast<float*>(block(w, rank) + w.block / 2);
  }
  cuda::memory memory_;
};

// A rank's block: how many entries there are of each tensor; room for its indices and values, tensor by tensor.
template <> class device_form<dgc> {
 public:
  static constexpr bool exists = true;
  device_form(const dgc& c, int ranks, int rank, const std::vector<tensor>& tensors, cuda::queue q)
      : codec_(c), ranks_(ranks), rank_(rank), state_(2, tensors, q), begin_at_(tensors.size(), 0) {
    if (c.values != sparse_values::f32)
      throw argument_error("heddle::data_parallel: dgc's values are f16, over tensors of a device allowed is f32");
    if (c.selection != selection::sampled)
      throw argument_error(
          "heddle::data_parallel: dgc's selection is exact, over tensors of a device allowed is sampled");
  }
  bool sends(const device_facts& f) const noexcept { return codec_.sends(f.count, f.context); }
  std::size_t bytes() const noexcept { return state_.bytes(); }
  float* state(std::size_t slot, std::size_t tensor) const noexcept { return state_.of(slot, tensor); }
  static std::size_t extra(std::size_t n) noexcept { return dgc::extra(n); }

  // f(tensor, magnitude from which on entries are sent; not above 0: to be sampled).
  template <class Function>
  void thresholds(const device_work& w, const std::vector<std::size_t>& sent, cuda::queue q, Function&& f) const {
    std::vector<dgc_control> control(w.dgc ? sent.size() : 0);
    if (w.dgc) cuda::copy(static_cast<const dgc_control*>(w.dgc->control()), control.data(), control.size(), q);
    q.synchronize();
    for (std::size_t k = 0; k < control.size(); ++k) f(sent[k], std::bit_cast<float>(control[k].threshold));
  }
  // The same, for the next table.
  void begin_at(std::size_t tensor, float magnitude) { begin_at_[tensor] = std::bit_cast<std::uint32_t>(magnitude); }

  void fits(const device_facts& f, std::size_t i, unsigned* bad, cuda::queue q) const {
    cuda::for_each(f.count, dense_velocity_fits{velocity(f, i), bad}, q);
  }
  void correct(const device_facts& f, std::size_t i, cuda::queue q) const {
    cuda::for_each(f.count, velocity(f, i), q);
  }

  template <class Facts, class Sum, class Gather>
  std::size_t prepare(device_work& w, const std::vector<std::size_t>& sent, Facts&& facts, unsigned* bad, cuda::queue q,
                      Sum&&, Gather&&) {
    set_up(w, sent, facts, q);
    if (!w.dgc) return 0;
    const device_facts first = facts(sent[0]);
    if (first.factor != 1.0f) cuda::fill(factors(w, sent), sent.size(), first.factor, q);
    w.dgc->fits(told(w, first), first.factor != 1.0f ? factors(w, sent) : nullptr, bad, q);
    return 0;
  }
  template <class Facts, class Sum, class Gather>
  std::size_t settle(device_work& w, const std::vector<std::size_t>& sent, Facts&& facts, cuda::queue q, Sum&& sum,
                     Gather&& gather) {
    if (!w.dgc) return 0;
    const device_facts first = facts(sent[0]);
    w.dgc->step(codec_, told(w, first), first.factor != 1.0f ? factors(w, sent) : nullptr, q);
    cuda::for_each(sent.size(), tell_found{w.dgc->control(), capacity(w), found(w, rank_)}, q);
    std::size_t n = 0, elements = 0;
    for (const std::size_t i : sent) elements += facts(i).count;
    // Where all blocks are together no less than a dense ring moves, twice the elements, that adds up what is in them.
    const bool dense = ranks_ > 1 && w.block * static_cast<std::size_t>(ranks_) >= 2 * sizeof(float) * elements;
    if (!dense) gather(w.memory.data(), w.block);
    for (std::size_t k = 0; k < sent.size(); ++k) {
      const device_facts f = facts(sent[k]);
      n += dense ? f.count : room(w.entries[k], f.count);
      cuda::fill(f.gradient, f.count, 0.0f, q);
      for (int r = dense ? rank_ : 0; r < (dense ? rank_ + 1 : ranks_); ++r) {
        const auto* const index = reinterpret_cast<const std::uint32_t*>(block(w, r) + w.at[k]);
        cuda::for_each(room(w.entries[k], f.count),
                       add_found{found(w, r) + k, index,
                                 reinterpret_cast<const float*>(index + room(w.entries[k], f.count)), f.gradient},
                       q);
      }
      if (dense) sum(f.gradient, f.count);
    }
    return n;
  }

 private:
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
  static std::uint32_t* capacity(const device_work& w) noexcept {
    return reinterpret_cast<std::uint32_t*>(w.more.data());
  }
  static float* factors(const device_work& w, const std::vector<std::size_t>& sent) noexcept {
    return reinterpret_cast<float*>(capacity(w) + sent.size());
  }
  static std::uint32_t room(std::uint32_t entries, std::size_t n) noexcept {
    return static_cast<std::uint32_t>((std::min)(n, std::size_t{entries} + entries / 4));
  }
  std::byte* block(const device_work& w, int rank) const noexcept {
    return w.memory.data() + w.block * static_cast<std::size_t>(rank);
  }
  std::uint32_t* found(const device_work& w, int rank) const noexcept {
    return reinterpret_cast<std::uint32_t*>(block(w, rank));
  }

  // Tables for these tensors and numbers of entries, which change in a warm-up only. A table has one weight decay:
  // data_parallel refuses others.
  template <class Facts>
  void set_up(device_work& w, const std::vector<std::size_t>& sent, Facts&& facts, cuda::queue q) {
    std::vector<std::uint32_t> entries;
    std::vector<const void*> known;
    w.decay = 0.0f;
    for (const std::size_t i : sent) {
      const device_facts f = facts(i);
      entries.push_back(static_cast<std::uint32_t>(codec_.entries(f.count, f.context)));
      known.push_back(f.gradient);
      known.push_back(f.context.weight_decay != 0.0f ? f.context.parameter : nullptr);
      if (f.context.weight_decay != 0.0f) w.decay = f.context.weight_decay;
    }
    if (entries == w.entries && known == w.known) return;
    w.dgc.reset();
    w.entries = std::move(entries);
    w.known = std::move(known);
    w.at.clear();
    if (sent.empty()) return;
    w.block = sent.size() * sizeof(std::uint32_t);
    std::vector<std::uint32_t> most;
    for (std::size_t k = 0; k < sent.size(); ++k) {
      most.push_back(room(w.entries[k], facts(sent[k]).count));
      w.at.push_back(w.block);
      w.block += most[k] * (sizeof(std::uint32_t) + sizeof(float));
    }
    check_cuda("data_parallel", w.memory.reserve(w.block * static_cast<std::size_t>(ranks_)));
    check_cuda("data_parallel", w.more.reserve(sent.size() * (sizeof(std::uint32_t) + sizeof(float))));
    cuda::fill(w.memory.data(), w.block * static_cast<std::size_t>(ranks_), std::byte{0}, q);  // all of it travels
    cuda::copy(most.data(), capacity(w), most.size(), q);
    std::vector<dgc_segment> segments;
    for (std::size_t k = 0; k < sent.size(); ++k) {
      const device_facts f = facts(sent[k]);
      auto* const index = reinterpret_cast<std::uint32_t*>(block(w, rank_) + w.at[k]);
      segments.push_back({f.gradient, static_cast<const float*>(w.known[2 * k + 1]), state(0, sent[k]),
                          state(1, sent[k]), index, reinterpret_cast<float*>(index + most[k]), f.count, w.entries[k],
                          most[k]});
    }
    w.dgc = std::make_unique<dgc_device>(segments, q, true);
    std::vector<dgc_control> control;
    for (const std::size_t i : sent) control.push_back({std::exchange(begin_at_[i], 0), 0, 0});
    cuda::copy(control.data(), w.dgc->control(), control.size(), q);
    q.synchronize();  // what was copied is on this stack
  }

  dgc codec_;
  int ranks_, rank_;
  device_state state_;
  std::vector<std::uint32_t> begin_at_;  // bits of thresholds that were loaded
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

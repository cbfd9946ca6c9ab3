// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/detail/pieces.hpp>
#include <heddle/compress/dgc.cuh>
#include <heddle/compress/none.hpp>
#include <heddle/compress/sparse.cuh>
#include <heddle/trainer/detail/held.hpp>
#include <heddle/trainer/tensor.hpp>

#include <memory>
#include <optional>

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
// to[i] = from[i] factor / over. In place, too.
template <class From, class To> struct convert_by {
  const From* from;
  To* to;
  device_factor factor;
  float over;
  HEDDLE_HD void operator()(std::size_t i) const {
    to[i] = static_cast<To>(static_cast<float>(from[i]) * (factor.get() / over));
  }
};
/// @endcond

// What a compressor is told of a tensor.
struct device_facts {
  float* gradient;
  std::size_t count;
  device_factor factor;
  encode_context context;
};

// State of a compressor of so many slots: slot by slot all parts, in the order of tensors, each aligned for vectors.
class device_state {
 public:
  void hold(std::size_t slots, const std::vector<held_part>& parts, cuda::queue q) {
    memory_.emplace(q.stream);
    slots_ = slots;
    for (const held_part& p : parts) {
      first_of_.resize((std::max)(first_of_.size(), p.tensor + 1), begins_.size());
      begins_.push_back(p.begin);
      at_.push_back(stride_);
      stride_ += (p.count + 3) / 4 * 4;
      elements_ += p.count;
    }
    check_cuda("data_parallel", memory_->reserve(slots_ * stride_ * sizeof(float)));
    cuda::fill(reinterpret_cast<float*>(memory_->data()), slots_ * stride_, 0.0f, q);
  }
  // Which part of them it is that begins there.
  std::size_t index(std::size_t tensor, std::size_t begin) const noexcept {
    std::size_t k = first_of_[tensor];
    while (begins_[k] != begin) ++k;
    return k;
  }
  float* of(std::size_t slot, std::size_t tensor, std::size_t begin = 0) const noexcept {
    return slots_ ? reinterpret_cast<float*>(memory_->data()) + slot * stride_ + at_[index(tensor, begin)] : nullptr;
  }
  std::size_t parts() const noexcept { return at_.size(); }
  std::size_t bytes() const noexcept { return slots_ * elements_ * sizeof(float); }

 private:
  std::size_t slots_ = 0, elements_ = 0, stride_ = 0;
  std::vector<std::size_t> first_of_, begins_, at_;
  std::optional<stream_buffer> memory_;
};

// Where a bucket's messages lie; a compressor's own besides.
struct device_work {
  explicit device_work(cudaStream_t s) : memory(s), more(s), added(s) {}
  stream_buffer memory, more, added;
  std::vector<std::size_t> at;            // of each tensor that is sent
  std::size_t block = 0;                  // of a rank
  std::vector<std::vector<piece>> owned;  // with sharded{} what each rank owns of its group's gradient
  std::unique_ptr<dgc_device> dgc{};
  struct list {  // the parts that a rank sends entries of, or all ranks alike
    std::vector<piece> parts;
    std::vector<std::uint32_t> entries, room;
    std::vector<std::size_t> at;  // where in the rank's block
    std::size_t block = 0, slots = 0;
  };
  std::vector<list> lists{};
  std::vector<const void*> known{};  // gradients and parameters that dgc was made for
  float decay = 0.0f, factor = 0.0f;
  bool dense = false;  // whether what is in the lists travels as one sum

  void forget() noexcept {
    dgc.reset();
    lists.clear();
    known.clear();
  }
};

// How data_parallel runs a compressor over tensors of a device. hold() is told what there is to be state of. prepare()
// is called during backward and moves no state, settle() when all ranks know that the step counts; sum(p, n) adds up n
// floats over all ranks, gather(p, blocks) hands around so many bytes of each rank. Both halves return how many
// elements they have handed around. A tensor that isn't sent is averaged in float; then fits() flags it if correct()
// would leave float's range, to which it is given where the step counts.
template <class Compressor> struct device_form {
  static constexpr bool exists = false;
};

struct elementwise_form {
  static constexpr bool exists = true;
  template <class Compressor> elementwise_form(const Compressor&, int, int) {}
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
  codec_form(const Codec& c, int ranks, int rank) : codec_(c), device_(c), ranks_(ranks), rank_(rank) {}
  void hold(const std::vector<held_part>& parts, cuda::queue q) { state_.hold(Feedback, parts, q); }
  bool sends(const device_facts& f) const noexcept { return f.count > 0 && f.count >= codec_.dense_below; }
  static void fits(const device_facts&, std::size_t, unsigned*, cuda::queue) noexcept {}
  static void correct(const device_facts&, std::size_t, cuda::queue) noexcept {}
  std::size_t bytes() const noexcept { return state_.bytes(); }
  float* state(std::size_t slot, std::size_t tensor, std::size_t begin = 0) const noexcept {
    return state_.of(slot, tensor, begin);
  }
  static std::size_t extra(std::size_t) noexcept { return 0; }
  template <class Function> static void thresholds(const device_work&, cuda::queue, Function&&) noexcept {}
  static void begin_at(std::size_t, std::size_t, float) noexcept {}

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
  device_form(const error_feedback<random_k>& c, int ranks, int rank) : random_form(c.codec, ranks, rank) {}
};

// A rank's block: indices of all tensors, then values.
template <> struct device_form<error_feedback<top_k>> : codec_form<top_k, top_k_device, true> {
  device_form(const error_feedback<top_k>& c, int ranks, int rank) : codec_form(c.codec, ranks, rank) {}

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
    gather(w.memory.data(), std::vector<std::size_t>(static_cast<std::size_t>(ranks_), w.block));
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

}  // namespace detail
}  // namespace v0
}  // namespace heddle

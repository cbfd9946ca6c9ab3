// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/buckets.hpp>
#include <heddle/collective/detail/pieces.hpp>
#include <heddle/compress/cast.hpp>
#include <heddle/trainer/detail/held.hpp>
#include <heddle/trainer/strategy.hpp>
#include <heddle/trainer/tensor.hpp>

#include <atomic>
#include <optional>

namespace heddle {
inline namespace v0 {
namespace detail {

// A type that cast<> takes, where nothing is cast.
template <class Element> using narrow_or_bf16 = std::conditional_t<std::is_same_v<Element, float>, bfloat16, Element>;

// The elements of tensor i, which has `count`, that travel in a bucket that was planned for floats.
inline interval part_of_bucket(const bucket& b, std::size_t i, std::size_t count) noexcept {
  const std::size_t begin = i == b.first ? b.skip / sizeof(float) : 0;
  return {begin, count - begin - (i + 1 == b.last ? b.cut / sizeof(float) : 0)};
}

// What follows from a strategy for the exchange of gradients. Some of its names are there to depend on the strategy, so
// that a file that trains nothing doesn't pay for what they need of the vectors.
template <class Strategy> struct exchange_kind {
  using piece = detail::piece;
  using operation = heddle::operation;
  template <class Element> using list = std::vector<typename dependent<Element, Strategy>::type>;
  using compressor_type = last_part<decltype(Strategy::compressor)>;
  using topology_type = std::remove_cvref_t<decltype(Strategy::topology)>;
  using memory_type = std::remove_cvref_t<decltype(Strategy::memory)>;
  using mode_type = std::remove_cvref_t<decltype(Strategy::mode)>;
  using carrier_type = decltype(carried(std::declval<const compressor_type&>()));
  static_assert(!codec<carrier_type>,
                "heddle::data_parallel: .compressor is a codec; include heddle/compress/error_feedback.hpp, which has "
                "what runs it");
  static constexpr bool packets = packet_compressor<carrier_type>;
  static constexpr bool reduces = reducing_compressor<carrier_type>;
  static constexpr bool holds = packets || reduces;
  static constexpr bool transforms =
      !std::is_same_v<std::remove_cvref_t<decltype(Strategy::compressor)>, compressor_type>;
  static constexpr bool cuts = !holds && !transforms;  // whether tensors may be in several buckets
  static constexpr bool shards_held = shards_packets<compressor_type>;
  static constexpr bool shards = shards_optimizer<mode_type>;
  using element = typename std::remove_cvref_t<decltype(Strategy::precision)>::element;
  static constexpr bool mixes = !std::is_same_v<element, float>;
  static constexpr bool of_gradients = mode_type::averages != heddle::average::parameters;
  // Whether the compressor moves tensors that travelled dense, in one pass with their momentum, in the rule's place.
  static constexpr bool steps_dense = of_gradients && owns_momentum<compressor_type> && has_step_dense<carrier_type>;
  static constexpr bool as_they_are =
      mixes && of_gradients && std::is_same_v<std::remove_cvref_t<decltype(Strategy::compressor)>, none>;
  static constexpr bool widens = mixes && !as_they_are;
  using gradient_type = std::conditional_t<as_they_are, element, float>;
  // What encodes elements on their way to the mean: gradients of 16 bits keep these.
  using codec_type =
      std::conditional_t<holds, none,
                         std::conditional_t<mixes && of_gradients && std::is_same_v<compressor_type, none>,
                                            cast<narrow_or_bf16<element>>, compressor_type>>;
  using wire = typename codec_type::wire;
  static constexpr int slots = [] {
    if constexpr (holds)
      return carrier_type::slots;
    else
      return 0;
  }();
  // Why there can be no limit on the norm or the elements of the average; null: there can.
  static constexpr const char* refuses_limits =
      !(of_gradients && holds) ? nullptr
      : slots                  ? "this compressor holds gradients back"
                               : "what this compressor sends is added up after a limit would have to be known";
};

// Throws argument_error if tensors are to be cut where what travels is made of whole ones.
template <bool Cuts, class Rule, class Sizes> auto planned_buckets(const Rule& rule, const Sizes& bytes) {
  if (rule.split && !Cuts)
    throw argument_error(
        "heddle::data_parallel: .buckets has split set, allowed only where .compressor is elementwise "
        "without a transform, such as none{} or cast<>{}: others send whole tensors");
  return rule.plan(bytes);
}

// The tensors of an exchange: their gradients, what is held of them, and what transforms and compressors are told.
template <class Strategy> class exchanged {
 public:
  using kind = exchange_kind<Strategy>;
  using element = typename kind::element;
  using gradient_type = typename kind::gradient_type;
  using held_type = held_state<typename kind::memory_type>;

  exchanged(const Strategy& plan, int rank, int ranks, const std::vector<tensor>& tensors)
      : plan_(plan),
        carrier_(carried(last_of(plan_.compressor))),
        rank_(rank),
        ranks_(ranks),
        tensors_(tensors),
        wide_(plan.memory, fill_offsets() * kind::widens),
        factors_(tensors.size(), 1.0f) {}
  exchanged(const exchanged&) = delete;
  exchanged& operator=(const exchanged&) = delete;

  const Strategy& plan() const noexcept { return plan_; }
  const typename kind::carrier_type& carrier() const noexcept { return carrier_; }
  int rank() const noexcept { return rank_; }
  int ranks() const noexcept { return ranks_; }
  const std::vector<tensor>& tensors() const noexcept { return tensors_; }
  std::size_t count(std::size_t i) const noexcept { return tensors_[i].count; }
  std::size_t offset(std::size_t i) const noexcept { return offsets_[i]; }
  float factor(std::size_t i) const noexcept { return factors_[i]; }
  // The elements of tensor i that travel in a bucket.
  interval part(const bucket& b, std::size_t i) const noexcept { return part_of_bucket(b, i, tensors_[i].count); }
  std::size_t elements_of(const bucket& b) const noexcept {
    std::size_t n = 0;
    for (std::size_t i = b.first; i < b.last; ++i) n += part(b, i).count;
    return n;
  }

  // An exchange begins.
  void begin(const encode_context& context, std::span<const float> decay_scales, float loss_scale) {
    context_ = context;
    decay_scales_.assign(decay_scales.begin(), decay_scales.end());
    loss_scale_ = loss_scale;
  }
  // All ranks' weights are known. That of a rank is samples * ranks / sum; encoders multiply by samples / most, at most
  // 1, so that a 16-bit wire isn't left by a mean that fits it; decoders by the rest.
  void weigh(double samples, double most, double sum) noexcept {
    weight_ = most > 0.0 ? static_cast<float>(samples / most) : 0.0f;
    rest_ = most > 0.0 ? static_cast<float>(most * ranks_ / sum) : 1.0f;
    std::fill(factors_.begin(), factors_.end(),
              weight_ == 0.0f ? 1.0f : weight_ * rest_);  // unless transforms change it
  }
  // What is held counts this much, as is known when states move: `late` times as much as before.
  void held_scale(float x, float late = 1.0f) noexcept {
    context_.held_scale = x;
    context_.held_late = late;
  }
  float weight() const noexcept { return weight_; }
  float rest() const noexcept { return rest_; }
  // Float parameters, for compressors that look at them.
  void parameters(std::vector<const float*> all) { parameters_ = std::move(all); }

  // The gradient in floats; not where 16-bit ones travel as they are.
  slice<float> gradient(std::size_t i) const {
    if constexpr (kind::widens)
      return {const_cast<float*>(wide_.data()) + offsets_[i], tensors_[i].count};
    else
      return {static_cast<float*>(tensors_[i].gradient), tensors_[i].count};
  }
  // Where the result of tensor i is, and what it is to be multiplied by.
  gradient_type* result(std::size_t i) const noexcept {
    if constexpr (kind::as_they_are)
      return static_cast<element*>(tensors_[i].gradient);
    else
      return gradient(i).data;
  }
  float unscale() const noexcept { return kind::as_they_are ? rest_ / loss_scale_ : 1.0f; }

  // Unscales the gradient of tensor i into floats, where these are this object's.
  void widen(std::size_t i, float scale) const { widen(i, scale, {0, tensors_[i].count}); }
  void widen(std::size_t i, float scale, interval part) const {
    if constexpr (kind::widens) {
      convert_scaled(static_cast<const element*>(tensors_[i].gradient) + part.begin, gradient(i).data + part.begin,
                     part.count, 1.0f / scale);
    }
  }
  // Makes a part of the gradient of tensor i, and its factor, what compressors are given. Where there are transforms,
  // the part is all of it.
  void prepare(std::size_t i, interval part) {
    const slice<float> g = gradient(i).subslice(part.begin, part.count);
    if (kind::of_gradients) widen(i, loss_scale_, part);
    if (weight_ == 0.0f) std::fill(g.begin(), g.end(), 0.0f);  // a rank without samples; its memory may hold anything
    if (kind::transforms && weight_ != 0.0f)
      factors_[i] = scale_of(plan_.compressor, g, weight_ * rest_, context_of(i));
  }

  // f(floats, n) for blocks of a run of results, unscaled.
  template <class Function> void each_block(const gradient_type* from, std::size_t count, Function&& f) const {
    if constexpr (kind::as_they_are) {
      float block[2048];
      for (std::size_t at = 0; at < count; at += std::size(block)) {
        const std::size_t n = (std::min)(count - at, std::size(block));
        convert_scaled(from + at, block, n, unscale());
        f(block, n);
      }
    } else {
      f(from, count);
    }
  }

  // The first element of a bucket, if one tensor's memory follows the other's; else null.
  element* run_of(const bucket& b, void* tensor::* memory) const {
    element *start = nullptr, *end = nullptr;
    for (std::size_t i = b.first; i < b.last; ++i) {
      const interval p = part(b, i);
      if (p.count == 0) continue;
      element* const here = static_cast<element*>(tensors_[i].*memory) + p.begin;
      if (start && here != end) return nullptr;
      if (!start) start = here;
      end = here + p.count;
    }
    return start;
  }

  encode_context context_of(std::size_t i) const {
    encode_context x = context_;
    if (x.weight_decay != 0.0f) x.parameter = parameters_[i];
    x.weight_decay *= decay_scales_.empty() ? 1.0f : decay_scales_[i];
    x.tensor = static_cast<std::uint32_t>(i);
    x.rank = rank_;
    x.rows = tensors_[i].rows;
    return x;
  }
  // Whether tensor i is compressed with something held back, in this step or in another.
  bool sends(std::size_t i) const {
    if constexpr (kind::holds)
      return carrier_.sends(tensors_[i].count, context_of(i));
    else
      return false;
  }
  bool sends_at(std::size_t i, std::size_t step) const {
    if constexpr (kind::holds) {
      encode_context x = context_of(i);
      x.step = step;
      x.ranks = ranks_;
      return carrier_.sends(tensors_[i].count, x);
    } else {
      return (void)i, (void)step, false;
    }
  }

  // What the compressor keeps; empty where it keeps nothing.
  std::optional<held_type>& held() noexcept { return held_; }
  const std::optional<held_type>& held() const noexcept { return held_; }
  void hold(typename kind::template list<held_part> parts) {
    held_.emplace(plan_.memory, static_cast<std::size_t>(kind::slots), std::move(parts));
  }
  // What f(gradient, state, context) says of tensor i as a whole.
  template <class Function> decltype(auto) with_whole(std::size_t i, Function&& f) {
    float* state[kind::slots + 1];
    held_->pointers(i, 0, state);
    return f(gradient(i), static_cast<float* const*>(state), context_of(i));
  }
  // A tensor that travelled dense takes what was held of it when it was compressed.
  void release(std::size_t i) {
    if constexpr (has_release<typename kind::carrier_type>) {
      if (held_->strays())
        with_whole(i, [&](auto mean, auto state, const auto& x) { carrier_.release(mean, state, x); });
    }
  }
  // Whether its mean stays finite by that: tried on copies.
  bool fits_release(std::size_t i) const {
    if constexpr (has_release<typename kind::carrier_type>) {
      if (!held_->strays()) return true;
      float* state[kind::slots + 1];
      const auto copy = held_->copy(i, state);
      const slice<float> g = gradient(i);
      typename kind::template list<float> mean(g.begin(), g.end());
      carrier_.release({mean.data(), mean.size()}, state, context_of(i));
      return all_finite(mean.data(), mean.size());
    }
    return (void)i, true;
  }

  void count_sent(std::size_t elements) noexcept { elements_sent_ += elements; }
  std::uint64_t elements_sent() const noexcept { return elements_sent_; }
  std::size_t bytes() const noexcept { return (held_ ? held_->bytes() : 0) + wide_.bytes(); }

 private:
  std::size_t fill_offsets() {
    std::size_t total = 0;
    for (const tensor& t : tensors_) {
      offsets_.push_back(total);
      total += t.count;
    }
    return total;
  }

  Strategy plan_;
  typename kind::carrier_type carrier_;
  int rank_, ranks_;
  std::vector<tensor> tensors_;
  std::vector<std::size_t> offsets_;
  buffer<float, typename kind::memory_type> wide_;  // gradients in float, where those of the model aren't
  std::optional<held_type> held_;
  std::vector<float> factors_, decay_scales_;
  std::vector<const float*> parameters_;  // in float
  encode_context context_;
  float loss_scale_ = 1.0f, weight_ = 1.0f, rest_ = 1.0f;
  std::atomic<std::uint64_t> elements_sent_{0};  // read while jobs run
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/optim/multi_tensor.hpp>
#include <heddle/trainer/data_parallel.hpp>
#include <heddle/trainer/detail/device_exchange.cuh>

namespace heddle {
inline namespace v0 {

/// @brief `data_parallel` over tensors of a device: what the communicator makes of it, where that works in a stream
/// (`nccl::communicator`, `threads::device_communicator`, `staged`).
///
///     hd::nccl::communicator comm = hd::nccl::connect(others, exchange_stream);
///     hd::data_parallel dp{plan, comm, model.tensors(), hd::adamw{}};                       // device pointers
///     for (...) {
///       model.backward(batch, [&](std::size_t i) { dp.ready(i, hd::cuda::queue{stream}); });
///       dp.step({.lr = 1e-3f}, hd::cuda::queue{stream});
///     }
///     dp.join(hd::cuda::queue{stream});
///
/// A bucket leaves in the communicator's stream as soon as the work that was enqueued before `ready` is done; give that
/// stream nothing else to do, and backward another. The update is one kernel over all tensors. Everything else is as on
/// the host: weights by samples, skipped steps, groups, mixed precision, checkpoints, which either can load.
/// Wire:    as on the host.
/// State:   the rule's and the compressor's, in device memory from `cuda::memory`; a buffer of the wire type for
///          buckets that aren't one run of memory, or are cast; 4 B per element where a compressor works on the floats
///          of 16-bit gradients.
/// Traffic: 4 B read per element to look for infinities, 2 of 16 bits; 4 more with max_norm; the rule's.
/// Order:   `.mode` every_step; `.compressor` none, cast, dgc, sharded{dgc{}}, random_k or error_feedback of top_k or
///          random_k, after clip{} or transforms with scale_of(); rules with element_step() or layer_step().
/// Sync:    ready() only enqueues. An exchange begins behind the last update, whatever queues these were given. step()
///          waits on the host until the averages are there, enqueues the update in its
///          queue and returns. The constructor, save() and load() return when what they enqueued is done.
/// Throws:  as the other data_parallel; argument_error, too, for dgc by selection::exact or with values of 16 bits;
///          cuda_error.
/// @tparam Strategy A heddle::strategy. @tparam Comm A communicator that works in a stream. @tparam Optimizer An update
/// rule.
template <class Strategy, class Comm, class Optimizer>
  requires(stream_ordered<Comm>)
class data_parallel<Strategy, Comm, Optimizer> {
  using exchange_kind = detail::exchange_kind<Strategy>;
  static_assert(
      std::remove_cvref_t<decltype(Strategy::mode)>::averages == average::gradients,
      "heddle::data_parallel: over tensors of a device .mode must be every_step{}, other modes have no device "
      "form; see docs/trainer.md");
  static_assert(
      detail::scales_from_squares<std::remove_cvref_t<decltype(Strategy::compressor)>>,
      "heddle::data_parallel: over tensors of a device transforms before .compressor must have scale_of(), such as "
      "clip{}; see docs/trainer.md");
  static_assert(
      detail::device_form<typename exchange_kind::compressor_type>::exists,
      "heddle::data_parallel: this .compressor has no form in the trainer of devices; there it must be none{}, "
      "cast<>{}, dgc{}, sharded{dgc{}}, random_k{} or error_feedback{} of top_k{} or random_k{}; see docs/trainer.md");
  static_assert(std::is_same_v<std::remove_cvref_t<decltype(Strategy::memory)>, host_resource>,
                "heddle::data_parallel: over tensors of a device state lies in cuda::memory, so .memory must be left "
                "out; see docs/trainer.md");
  static_assert(has_element_step<Optimizer> || has_layer_step<Optimizer>,
                "heddle::data_parallel: this update rule (per_group, for one) has no device form: element_step() or "
                "layer_step(); see docs/trainer.md");
  using kind = detail::training_kind<Strategy, Comm, Optimizer>;
  using exchange_type = detail::device_exchange<Strategy, Comm>;
  static constexpr bool mixes = exchange_kind::mixes;
  static constexpr std::size_t slots = kind::slots;
  using item = update_item<typename exchange_kind::element, typename exchange_kind::gradient_type>;

 public:
  /// Element type of parameters and gradients: float, or that of mixed precision.
  using element = typename exchange_kind::element;

  /// @brief As the other data_parallel; the tensors are in device memory.
  ///
  /// It reads and writes parameters in the communicator's stream: let the work that initialises them be done, or be in
  /// that stream. Any stream may use them when it returns.
  /// Throws: argument_error, too, for memory that isn't a device's, or more than one lane; cuda_error.
  data_parallel(const Strategy& plan, Comm& comm, std::span<const tensor> tensors, Optimizer rule,
                unused missing = unused::error)
      : plan_(checked_plan(plan, rule)),
        tensors_(checked_memory(detail::checked(tensors, dtype_of<element>, rule))),
        rule_(rule),
        step_(tensors_, missing),
        decay_scales_(tensors_.size(), 1.0f),
        average_(std::make_unique<exchange_type>(plan_, comm, tensors_)),
        drift_(plan_.mode, plan_.memory, 0),
        unwinding_(std::uncaught_exceptions()) {
    for (const tensor& t : tensors_) parameters_.push_back(static_cast<element*>(t.parameter));
    if constexpr (mixes) scale_ = plan_.precision.begin();
    detail::require_same(average_->control(), "data_parallel", detail::fingerprint(tensors_, signature()),
                         "they bring tensors of different names, sizes or types, or different kinds of strategy");
    for (const tensor& t : tensors_)
      broadcast(average_->comm(), std::span<element>(static_cast<element*>(t.parameter), t.count));
    update_.emplace(kind::applied(rule), items(), memory_, average_->queue());  // waits for the stream
    std::vector<const float*> masters;
    std::size_t at = 0;
    for (const tensor& t : tensors_) {
      offsets_.push_back(at);
      masters.push_back(mixes ? update_->state(static_cast<int>(slots)) + at : static_cast<const float*>(t.parameter));
      at += t.count;
    }
    average_->parameters(std::move(masters));
  }

  data_parallel(const data_parallel&) = delete;
  data_parallel& operator=(const data_parallel&) = delete;
  /// Waits for the last update. If an exception is on its way, tells the peers, so that none of them waits.
  ~data_parallel() {
    if (std::uncaught_exceptions() > unwinding_)
      average_->comm().fail("rank " + std::to_string(average_->comm().rank()) +
                            " left its training loop by an exception");
    if (updated_.get()) static_cast<void>(cudaEventSynchronize(updated_.get()));
  }

  /// Parameters to read in forward and backward, one device pointer per tensor.
  std::span<element* const> parameters() const noexcept { return detail::as_span(parameters_); }

  /// What to multiply the loss by before backward; 1 in full precision.
  float loss_scale() const noexcept { return scale_.scale; }

  /// @brief Sets learning rate and decay factors of tensors by their group; groups beyond the list keep factor 1.
  /// Waits for the last update.
  /// Throws: argument_error for a factor that is negative or not finite, if a step is open, or if tensors that dgc sends
  /// would differ in weight decay that isn't 0; nothing has changed then.
  void groups(std::span<const group_options> options) {
    step_.require_closed("groups");
    if constexpr (kind::moves_momentum) {
      average_->check_decay([&](std::size_t i) {
        const std::size_t g = tensors_[i].group;
        return rule_.weight_decay * (g < options.size() ? options[g].decay_scale : 1.0f);
      });
    }
    step_.groups(options);
    for (std::size_t i = 0; i < tensors_.size(); ++i) decay_scales_[i] = step_.context(i, 0.0f, 0).decay_scale;
    updated_.synchronize();
    update_->items(items(), average_->queue());
  }

  /// @brief Opens a step; optional, the first ready() opens one with weight 1.
  /// Throws: argument_error for a negative weight or rate, or if a step is open.
  void begin(const begin_options& o = {}) {
    step_.begin(o);
    rate_.next = o.lr;
    announce(o.samples, false);
  }

  /// @brief Gradient i is final when the work enqueued in q so far is done: it may travel then. Only enqueues.
  /// Throws: argument_error if there is no tensor i, or it was ready before in this step; cuda_error.
  void ready(std::size_t i, cuda::queue q) {
    step_.ready(i, [&] { begin(); });
    average_->ready(i, q);
  }

  /// @brief Waits for the exchange and enqueues the update in q, where the next forward belongs.
  /// Throws: as the other data_parallel's; cuda_error.
  step_result step(const step_options& o, cuda::queue q) {
    detail::check_step(o, exchange_kind::refuses_limits, rate_.next);
    if (!step_.is_open()) begin();
    step_.close([&](const tensor& t) { cuda::fill(static_cast<element*>(t.gradient), t.count, element(0.0f), q); },
                [&](std::size_t i) { average_->ready(i, q); });
    average_->finish();
    if (average_->agreed().any_joined)
      detail::tell_ranks(average_->control(),
                         detail::announcement{.lr = o.lr, .max_norm = o.max_norm, .max_value = o.max_value});
    return update_all(o, q);
  }

  /// @brief Nothing: replicas are equal after every step. Throws argument_error if one is open.
  void synchronize() { step_.require_closed("synchronize"); }

  /// @brief Says that this rank has no more batches and answers the others until nobody has any; what it updates is
  /// enqueued in q. Collective.
  void join(cuda::queue q) {
    step_.require_closed("join");
    for (;;) {
      announce(0.0, true);
      average_->wait();
      if (average_->agreed().all_joined) break;
      for (std::size_t i = 0; i < tensors_.size(); ++i) average_->ready(i, q);
      average_->finish();
      const auto told = detail::tell_ranks(average_->control(), detail::announcement{.joined = 1});
      update_all(detail::told_options(told), q);
    }
  }

  /// @brief A copy of what the compressor holds back of a tensor on this rank, of DGC U and V; with sharded{} of what
  /// it owns of it. Waits for the device.
  /// Throws: argument_error if there is no such tensor or slot; cuda_error.
  std::vector<float> held(std::size_t tensor, int slot) const {
    if (tensor >= tensors_.size() || slot < 0 || slot >= exchange_kind::slots)
      throw argument_error("heddle::data_parallel::held: tensor " + std::to_string(tensor) + ", slot " +
                           std::to_string(slot) + "; there are " + std::to_string(tensors_.size()) + " tensors and " +
                           std::to_string(exchange_kind::slots) + " slots");
    return average_->held(tensor, static_cast<std::size_t>(slot));
  }

  /// @brief As the other data_parallel's, which loads it, too. Collective; waits for the last update.
  /// Throws: file_error on every rank if any rank can't write; the older checkpoint stays. cuda_error.
  void save(const std::string& directory) {
    step_.require_closed("save");
    auto& control = average_->control();
    detail::save_all(control, directory, [&](const detail::generation& now) {
      std::vector<float> values = copies();
      const auto mirror = average_->open_mirror();
      auto file = detail::pack(now, control.rank(), signature(), counters(), tensors_, visitor(values));
      average_->pack_held(file, update_->steps());
      return file;
    });
  }

  /// @brief Restores what save() wrote, or that of the other data_parallel. Collective; also on another number of
  /// ranks.
  /// Throws: file_error on every rank if any file is missing, damaged, or of another model or kind of strategy, or
  /// holds back parts of a tensor that isn't compressed here; nothing has changed then. cuda_error.
  void load(const std::string& directory) {
    step_.require_closed("load");
    auto& control = average_->control();
    std::vector<detail::saved> old;
    std::vector<float> values(copied());
    const auto mirror = average_->open_mirror();
    detail::together all(control, "load");
    for (bool exact = true, settled = false; !settled; exact = false, settled = average_->held_settled()) {
      all.succeed([&] {
        old =
            detail::unpack_all(directory, control.rank(), control.size(), false, signature(), tensors_, visitor(values),
                               drift_, static_cast<detail::shards<detail::piece>*>(nullptr), *average_, exact);
      });
      all.check();
    }
    const detail::saved& mine = *std::find_if(old.begin(), old.end(), [](const detail::saved& l) { return l.own; });
    done_.skipped = mine.counts.skipped;
    done_.meetings = mine.counts.meetings;
    scale_ = mine.counts.scale;
    rate_ = {mine.counts.last_lr, 0.0f};
    detail::restore(mine, tensors_, visitor(values));
    average_->restore_held();
    put(values);
    update_->steps(static_cast<std::size_t>(mine.counts.steps));
  }

  /// What this rank has done. Seconds are the host's in exchanges, not the device's.
  heddle::report report() const {
    heddle::report r = average_->report(done_);
    r.steps = update_->steps();
    r.state_bytes += update_->size() * sizeof(float) * (slots + mixes);
    return r;
  }

 private:
  static const Strategy& checked_plan(const Strategy& plan, const Optimizer& rule) {
    if (plan.lanes > 1)
      throw argument_error("heddle::data_parallel: lanes is " + std::to_string(plan.lanes) +
                           ", over tensors of a device allowed is 1");
    return kind::checked(plan, rule);
  }
  static std::vector<tensor> checked_memory(std::vector<tensor> tensors) {
    for (const tensor& t : tensors) {
      for (const void* p : {t.parameter, t.gradient}) {
        if (t.count == 0) continue;
        cudaPointerAttributes a{};
        detail::check_cuda("data_parallel: cudaPointerGetAttributes", cudaPointerGetAttributes(&a, p));
        if (a.type == cudaMemoryTypeUnregistered)
          throw argument_error("heddle::data_parallel: tensor \"" + t.name +
                               "\" is in host memory; allowed is memory of a device, or hosted{communicator}");
      }
    }
    return tensors;
  }

  detail::counters counters() const {
    return {update_->steps(), 0, done_.skipped, done_.meetings, 0, 0, 0, {}, scale_, 0, rate_.last};
  }

  // Floats of a checkpoint: of each tensor the parameters, then the rule's slots.
  std::size_t copied() const noexcept { return update_->size() * (1 + slots); }
  auto visitor(std::vector<float>& values) const {
    return [this, &values](std::size_t i, auto&& f) {
      float* at = values.data() + offsets_[i] * (1 + slots);
      f(at, detail::state_kind::parameter);
      for (std::size_t k = 0; k != slots; ++k) f(at += tensors_[i].count, detail::state_kind::rule);
    };
  }
  // each(floats there, count, where they are on the device).
  template <class Function> void each_copy(std::vector<float>& values, Function&& f) {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      float* at = values.data() + offsets_[i] * (1 + slots);
      const std::size_t n = tensors_[i].count;
      f(at, n,
        mixes ? update_->state(static_cast<int>(slots)) + offsets_[i] : static_cast<float*>(tensors_[i].parameter));
      for (std::size_t k = 0; k != slots; ++k) f(at += n, n, update_->state(static_cast<int>(k)) + offsets_[i]);
    }
    average_->queue().synchronize();
  }
  std::vector<float> copies() {
    std::vector<float> values(copied());
    updated_.synchronize();
    each_copy(values,
              [&](float* here, std::size_t n, const float* there) { cuda::copy(there, here, n, average_->queue()); });
    return values;
  }
  void put(std::vector<float>& values) {
    updated_.synchronize();
    const cuda::queue q = average_->queue();
    each_copy(values, [&](const float* here, std::size_t n, float* there) { cuda::copy(here, there, n, q); });
    if constexpr (mixes) {
      for (std::size_t i = 0; i < tensors_.size(); ++i)
        cuda::for_each(tensors_[i].count,
                       detail::convert_one<float, element>{update_->state(static_cast<int>(slots)) + offsets_[i],
                                                           static_cast<element*>(tensors_[i].parameter), 1.0f},
                       q);
      q.synchronize();
    }
  }

  std::string signature() const { return kind::signature(plan_, rule_, tensors_); }

  std::vector<item> items() const {
    std::vector<item> all;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const update_context x = step_.context(i, 1.0f, 0);
      all.push_back({static_cast<element*>(tensors_[i].parameter), average_->gradient(i), tensors_[i].count, x.lr,
                     x.decay_scale});
    }
    return all;
  }

  void announce(double samples, bool joined) {
    encode_context x{.step = update_->steps(), .ranks = average_->comm().size(), .held_scale = rate_.held_scale()};
    if constexpr (kind::moves_momentum) {
      x.momentum = rule_.momentum;
      x.nesterov = rule_.nesterov;
      x.weight_decay = rule_.weight_decay;
    }
    average_->begin({.exchange = sequence_++,
                     .step = x.step,
                     .samples = samples,
                     .joined = joined,
                     .loss_scale = scale_.scale,
                     .held_scale = x.held_scale},
                    x, decay_scales_, updated_);
  }

  // The norm of the averaged gradient, the same bits on all ranks: rank 0's.
  double norm() {
    const cuda::queue q = average_->queue();
    double squares = 0.0;
    {
      const detail::temporary sum(memory_, q, sizeof(double));
      update_->squares(reinterpret_cast<double*>(sum.data()), memory_, q);
      average_->comm().copy(&squares, sum.data(), sizeof squares);
      average_->comm().synchronize();
    }
    return std::sqrt(detail::tell_ranks(average_->control(), squares)[0]) * static_cast<double>(average_->unscale());
  }

  step_result update_all(const step_options& o, cuda::queue q) {
    bool take = average_->counts();
    const double norm = take && o.max_norm > 0.0f ? this->norm() : 0.0;
    take = take && std::isfinite(norm);
    average_->settle(take, rate_.held_scale(o.lr), q);
    if constexpr (mixes) {
      if (average_->agreed().weights > 0.0) plan_.precision.count(scale_, !take);
    }
    if (!take) {
      ++done_.skipped;
      return {.skipped = true, .norm = norm};
    }
    const double clip = o.max_norm > 0.0f && norm > o.max_norm ? o.max_norm / norm : 1.0;
    update_->step(o.lr, static_cast<float>(clip * average_->unscale()), o.max_value, q);
    updated_.record(q);
    rate_ = {o.lr, 0.0f};
    ++done_.meetings;
    return {.met = true, .norm = norm};
  }

  Strategy plan_;
  std::vector<tensor> tensors_;
  Optimizer rule_;
  detail::open_step<element> step_;
  std::vector<float> decay_scales_;
  std::vector<element*> parameters_;
  std::vector<std::size_t> offsets_;  // of each tensor's state
  cuda::memory memory_;
  std::unique_ptr<exchange_type> average_;
  detail::drift<every_step, host_resource> drift_;
  std::optional<
      multi_tensor<cuda, typename kind::rule_type, element, cuda::memory, typename exchange_kind::gradient_type>>
      update_;
  cuda::event updated_;
  int unwinding_;
  detail::known_rate rate_;
  loss_scale_state scale_;
  std::uint64_t sequence_ = 0;  // exchanges opened
  heddle::report done_;
};

}  // namespace v0
}  // namespace heddle

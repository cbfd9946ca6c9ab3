// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/trainer/detail/drift.hpp>
#include <heddle/trainer/detail/kind.hpp>
#include <heddle/trainer/detail/open_step.hpp>
#include <heddle/trainer/options.hpp>

#include <exception>
#include <memory>

namespace heddle {
inline namespace v0 {

/// @brief Trains replicas of a model on the ranks of a communicator, by a strategy.
///
/// The caller owns parameters and gradients; this object owns optimizer, compressor and mode state, and duplicates of
/// the communicator with threads to serve them. All ranks construct it, step and destroy it together. The constructor
/// copies rank 0's parameters to every rank.
///
///     hd::data_parallel dp{plan, comm, model.tensors(), hd::adamw{}};
///     for (...) {
///       model.backward(batch, [&](std::size_t i) { dp.ready(i); });   // the exchange overlaps with backward
///       dp.step({.lr = 0.1f});
///     }
///     dp.join();                                                      // others may have more batches
///
/// Sync:   ready() only enqueues; step(), synchronize(), join(), save() and load() block until their part is done.
/// Throws: argument_error on wrong use, with no state changed; comm_error when a peer fails or does something else.
/// @tparam Strategy A heddle::strategy. @tparam Comm A communicator. @tparam Optimizer An update rule.
template <class Strategy, class Comm, class Optimizer> class data_parallel {
  static_assert(!stream_ordered<Comm>,
                "heddle::data_parallel: this communicator works in a stream; include heddle/trainer/data_parallel.cuh, "
                "which trains tensors of its device, or put it in hosted{}; see docs/trainer.md");
  using kind = detail::training_kind<Strategy, Comm, Optimizer>;
  using averager = typename kind::averager_type;
  template <class Element> using list = typename averager::template list<Element>;
  using drift_type = detail::drift<std::remove_cvref_t<decltype(Strategy::mode)>, typename averager::memory_type>;
  static constexpr bool averages_gradients = averager::of_gradients;
  static constexpr bool shards = averager::shards;
  static constexpr bool mixes = averager::mixes;
  static constexpr std::size_t slots = kind::slots;
  static constexpr std::size_t held_slots = kind::held_slots;

 public:
  /// Element type of parameters and gradients: float, or that of mixed precision.
  using element = typename averager::element;

  /// @param plan The strategy. @param comm Communicator of all replicas; must outlive the constructor only.
  /// @param tensors The model's tensors, the same names and sizes in the same order on all ranks. @param rule Update
  /// rule.
  /// @param missing What step() does with tensors that were not ready.
  /// Throws: argument_error for a null pointer with a count, a type other than `element`, a repeated name, tensors that
  /// share memory, or a number of the strategy or the rule outside its range; comm_error if ranks bring different
  /// tensors or kinds of strategy.
  data_parallel(const Strategy& plan, Comm& comm, std::span<const tensor> tensors, Optimizer rule,
                unused missing = unused::error)
      : plan_(kind::checked(plan, rule)),
        tensors_(detail::checked(tensors, dtype_of<element>, rule)),
        rule_(rule),
        step_(tensors_, missing),
        decay_scales_(tensors_.size(), 1.0f),
        whole_(detail::whole(tensors_)),
        drift_(plan_.mode, plan.memory, averages_gradients ? 0 : detail::extent(whole_)),
        average_(std::make_unique<averager>(plan_, comm, tensors_)),
        update_(kind::applied(rule), plan.memory, detail::extent(shards ? average_->pieces() : whole_),
                tensors_.size()),
        unwinding_(std::uncaught_exceptions()) {
    for (const tensor& t : tensors_) parameters_.push_back(static_cast<element*>(t.parameter));
    if constexpr (mixes) scale_ = plan_.precision.begin();
    const std::uint64_t mine = detail::fingerprint(tensors_, signature() + ", lanes " + std::to_string(plan_.lanes));
    detail::require_same(average_->comm(), "data_parallel", mine,
                         "they bring tensors of different names, sizes or types, or different kinds of strategy");
    average_->open_lanes();
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      broadcast(average_->comm(), std::span<element>(parameters_[i], tensors_[i].count));
      if constexpr (!averages_gradients) convert(parameters_[i], drift_.agreed(whole_[i].state), tensors_[i].count);
    }
    if constexpr (mixes) {
      for (const detail::piece& p : state_pieces())
        convert(parameters_[p.tensor] + p.begin, update_.state(slots, p.state), p.count);
    }
    if constexpr (!mixes) masters_ = parameters_;
    for (std::size_t i = 0; mixes && !shards && i < tensors_.size(); ++i)
      masters_.push_back(update_.state(slots, whole_[i].state));
    average_->parameters({masters_.begin(), masters_.end()});
  }

  data_parallel(const data_parallel&) = delete;
  data_parallel& operator=(const data_parallel&) = delete;
  /// If an exception is on its way, tells the peers, so that none of them waits.
  ~data_parallel() {
    if (std::uncaught_exceptions() > unwinding_)
      average_->comm().fail("rank " + std::to_string(average_->comm().rank()) +
                            " left its training loop by an exception");
  }

  /// Parameters to read in forward and backward, one pointer per tensor.
  std::span<element* const> parameters() const noexcept { return detail::as_span(parameters_); }

  /// @brief What the rule updates, for a second trainer over other ranks (docs/mode.md, "Groups"): under mixed precision
  /// the float masters, with gradients of their own, 4 bytes per element; else the model's tensors. The second trainer
  /// must go before this one. Not where masters are sharded.
  std::vector<tensor> masters()
    requires(!(mixes && shards))
  {
    std::vector<tensor> all = tensors_;
    if constexpr (mixes) {
      if (!master_gradients_) master_gradients_.emplace(plan_.memory, detail::extent(whole_));
      for (std::size_t i = 0; i < all.size(); ++i) {
        all[i].parameter = masters_[i];
        all[i].gradient = master_gradients_->data() + whole_[i].state;
        all[i].type = dtype::f32;
      }
    }
    return all;
  }

  /// Writes the parameters that masters stand for, after somebody else has changed these. In full precision nothing.
  void round_masters() {
    if constexpr (mixes) {
      for (const detail::piece& p : state_pieces())
        convert(update_.state(slots, p.state), parameters_[p.tensor] + p.begin, p.count);
    }
  }

  /// What to multiply the loss by before backward, so that 16-bit gradients keep small values; 1 in full precision. The
  /// same on all ranks, and until the next step().
  float loss_scale() const noexcept { return scale_.scale; }

  /// @brief Sets learning rate and decay factors of tensors by their group; groups beyond the list keep factor 1.
  /// Throws: argument_error for a factor that is negative or not finite, or if a step is open.
  void groups(std::span<const group_options> options) {
    step_.groups(options);
    for (std::size_t i = 0; i < tensors_.size(); ++i) decay_scales_[i] = step_.context(i, 0.0f, 0).decay_scale;
  }

  /// @brief Opens a step; optional, the first ready() opens one with weight 1.
  /// Throws: argument_error for a negative weight or rate, or if a step is open.
  void begin(const begin_options& o = {}) {
    step_.begin(o);
    rate_.next = o.lr;
    if constexpr (averages_gradients) announce(o.samples, false);
  }

  /// @brief Gradient i is final: it may travel. Only enqueues.
  /// Throws: argument_error if there is no tensor i, or it was ready before in this step.
  void ready(std::size_t i) {
    step_.ready(i, [&] { begin(); });
    if constexpr (averages_gradients) average_->ready(i);
  }

  /// @brief Waits for the exchange and updates the parameters.
  /// Throws: argument_error for a rate or limit that is negative or not finite, for a limit on an average that a
  /// compressor sends as packets or sums, or naming a tensor that was never ready (with unused::error); comm_error.
  step_result step(const step_options& o) {
    detail::check_step(o, averager::refuses_limits, rate_.next);
    if (!step_.is_open()) begin();
    step_.close([&](std::size_t i) {
      if constexpr (averages_gradients) average_->ready(i);
    });
    if constexpr (averages_gradients) {
      average_->wait();
      if (average_->any_joined())
        detail::tell_ranks(average_->comm(),
                           detail::announcement{.lr = o.lr, .max_norm = o.max_norm, .max_value = o.max_value});
      return update_all(o);
    } else {
      return local_step(o);
    }
  }

  /// @brief Lets replicas meet now, if the mode lets them drift; nothing else. Collective.
  /// Throws: argument_error if a step is open; comm_error if ranks call it after different numbers of steps.
  void synchronize() {
    step_.require_closed("synchronize");
    if constexpr (!averages_gradients) meet(false);
  }

  /// @brief Says that this rank has no more batches and answers the others until nobody has. Collective; call it once
  /// at the end of an epoch on every rank. Afterwards all replicas are equal, and training may go on.
  void join() {
    step_.require_closed("join");
    if constexpr (averages_gradients) {
      for (;;) {
        announce(0.0, true);
        average_->wait();
        if (average_->all_joined()) break;
        for (std::size_t i = 0; i < tensors_.size(); ++i) average_->ready(i);
        average_->wait();
        const auto told = detail::tell_ranks(average_->comm(), detail::announcement{.joined = 1});
        update_all(detail::told_options(told));
      }
      average_->settle(false);
    } else {
      while (!meet(true).everybody) {
      }
    }
  }

  /// @brief What replicas agreed on of a tensor when they met last, in a mode that lets them drift; `count` elements.
  ///
  /// Under `geo_sgd` and `elastic_sgd` these are the parameters to evaluate and to keep; a replica holds its own.
  /// Throws: argument_error if there is no such tensor.
  std::span<const float> agreed(std::size_t tensor) const
    requires(!averages_gradients)
  {
    if (tensor >= tensors_.size())
      throw argument_error("heddle::data_parallel::agreed: tensor " + std::to_string(tensor) + " of " +
                           std::to_string(tensors_.size()));
    return {drift_.agreed(whole_[tensor].state), tensors_[tensor].count};
  }

  /// @brief What the compressor holds back of a tensor here, of DGC U and V; under `sharded`, of what this rank owns.
  /// Throws: argument_error if there is no such tensor or slot.
  std::span<const float> held(std::size_t tensor, int slot) const { return average_->held(tensor, slot); }

  /// @brief Why `automatic_compressor` compresses a tensor in the next step, or doesn't, in its words.
  /// Throws: argument_error if there is no such tensor.
  std::string why(std::size_t tensor) const
    requires(detail::is_automatic<typename averager::compressor_type>)
  {
    return average_->why(tensor, counted());
  }

  /// What this rank has done.
  heddle::report report() const {
    heddle::report r = average_->report(done_);
    r.steps = steps_;
    r.state_bytes += update_.bytes() + drift_.bytes() + (master_gradients_ ? master_gradients_->bytes() : 0);
    return r;
  }

  /// @brief Writes parameters and all state to a directory, which is made if it isn't there. Collective.
  ///
  /// Each rank writes a new file, then rank 0 replaces the manifest, then the older files go: whenever it is
  /// interrupted, the older or the newer checkpoint is whole.
  /// Throws: file_error on every rank if any rank can't write; the older checkpoint stays.
  void save(const std::string& directory) {
    step_.require_closed("save");
    auto& comm = average_->comm();
    detail::save_all(comm, directory, [&](const detail::generation& now) {
      auto file = detail::pack(now, comm.rank(), signature(), counters(), tensors_, visitor());
      average_->pack_held(file, counted());
      if constexpr (shards)
        detail::pack_shards(file, average_->pieces(), held_slots,
                            [&](auto k, auto at) { return update_.state(k, at); });
      return file;
    });
  }

  /// @brief Restores what save() wrote. Collective; also on another number of ranks.
  ///
  /// On as many ranks as saved it continues bit for bit. On another number, rank r takes the optimizer state of old
  /// rank r modulo their number; replicas that had drifted first meet, weighted as their mode weighs; what compressors
  /// hold is divided evenly, so that its sum is conserved.
  /// Throws: file_error on every rank if any file is missing, damaged, or of another model or kind of strategy; nothing
  /// has changed then.
  void load(const std::string& directory) {
    step_.require_closed("load");
    auto& comm = average_->comm();
    std::vector<detail::saved> old;
    detail::shards state(shards ? average_->pieces() : whole_, shards ? held_slots : 0);
    detail::together all(comm, "load");
    // What compressors hold goes on bit for bit on all ranks, or on none.
    for (bool exact = true, settled = false; !settled; exact = false, settled = average_->held_settled()) {
      all.succeed([&] {
        old = detail::unpack_all(directory, comm.rank(), comm.size(), !averages_gradients, signature(), tensors_,
                                 visitor(), drift_, shards ? &state : nullptr, *average_, exact);
      });
      all.check();
    }
    const detail::saved& mine = *std::find_if(old.begin(), old.end(), [](const detail::saved& l) { return l.own; });
    steps_ = mine.counts.steps;
    drift_.load(mine.counts);
    done_.skipped = mine.counts.skipped;
    done_.meetings = mine.counts.meetings;
    scale_ = mine.counts.scale;
    rate_ = {mine.counts.last_lr, 0.0f};
    bad_ = mine.counts.bad;
    detail::restore(mine, tensors_, visitor());
    if constexpr (averager::holds) average_->holding()->restore();
    for (std::size_t k = 0; shards && k != held_slots; ++k)
      std::copy_n(state.values(k), state.elements(), update_.state(k, 0));
    if constexpr (mixes) {
      round_masters();
      for (std::size_t b = 0; shards && b < average_->buckets(); ++b) average_->gather(b);
      average_->wait();
    }
  }

 private:
  std::string signature() const { return kind::signature(plan_, rule_, tensors_); }
  detail::counters counters() const {
    return drift_.save({steps_, drift_.clock(), done_.skipped, done_.meetings, 0, 0, 0, {}, scale_, bad_, rate_.last});
  }

  // Everything that has optimizer state here.
  const std::vector<detail::piece>& state_pieces() { return shards ? average_->pieces() : whole_; }

  auto visitor() {
    return [this](std::size_t i, auto&& f) { each_state(i, f); };
  }

  // Every float that a checkpoint holds of tensor i: f(pointer, what it is).
  template <class Function> void each_state(std::size_t i, Function&& f) {
    if constexpr (!(mixes && shards)) f(masters_[i], detail::state_kind::parameter);
    for (std::size_t k = 0; !shards && k != slots; ++k) f(update_.state(k, whole_[i].state), detail::state_kind::rule);
    if constexpr (!averages_gradients) f(drift_.agreed(whole_[i].state), detail::state_kind::agreed);
    if constexpr (!averages_gradients && drift_type::has_momentum)
      f(drift_.momentum(whole_[i].state), detail::state_kind::rule);
  }

  // What compressors count, the same on all ranks: steps, or meetings where steps are local.
  std::size_t counted() const noexcept { return averages_gradients ? steps_ : done_.meetings; }

  void announce(double samples, bool joined) {
    encode_context x{.step = counted(), .ranks = average_->comm().size(), .held_scale = rate_.held_scale()};
    if constexpr (kind::moves_momentum) {
      x.momentum = rule_.momentum;
      x.nesterov = rule_.nesterov;
      x.weight_decay = rule_.weight_decay;
    }
    detail::announcement a{.exchange = sequence_++,
                           .step = x.step,
                           .clock = drift_.clock(),
                           .samples = samples,
                           .joined = joined,
                           .loss_scale = scale_.scale,
                           .bad = bad_,
                           .held_scale = x.held_scale};
    if constexpr (!averages_gradients) drift_.announce(a);
    average_->begin(a, x, decay_scales_);
  }

  // Applies the rule to a gradient of norm `norm`, by owner where norms of several ranks' parts are added up.
  void apply_rule(const step_options& o, double norm) {
    const bool by_owner = shards || (averages_gradients && (layerwise<Optimizer> || o.max_norm > 0.0f));
    const std::vector<detail::piece>& pieces = by_owner ? average_->pieces() : whole_;
    const double clip = o.max_norm > 0.0f && norm > o.max_norm ? o.max_norm / norm : 1.0;
    const detail::scaling scale{static_cast<float>(clip * average_->unscale()), o.max_value};
    const auto view = [&](const detail::piece& p) {
      return detail::piece_view<element, typename averager::gradient_type>{
          parameters_[p.tensor] + p.begin, average_->result(p.tensor) + p.begin, step_.context(p.tensor, o.lr, steps_)};
    };
    update_.advance(averages_gradients ? &average_->comm() : nullptr, pieces, view, scale);
    std::size_t bucket = 0;
    for (const detail::piece& p : pieces) {
      for (; shards && bucket < p.bucket; ++bucket) average_->gather(bucket);
      if (stepped_dense(p, o)) continue;
      update_.apply(p, view, scale);
    }
    if constexpr (shards) {
      for (; bucket < average_->buckets(); ++bucket) average_->gather(bucket);
      average_->wait();
    }
    ++steps_;
  }

  // Where the compressor has the momentum and the tensor travelled dense: whether the compressor did the update.
  bool stepped_dense(const detail::piece& p, const step_options& o) {
    if constexpr (!averager::steps_dense) {
      return (void)p, (void)o, false;
    } else {
      static_assert(averager::refuses_limits && !averager::as_they_are && !averager::cuts && !averager::shards,
                    "what a compressor moves by itself is a whole tensor, without a limit or a scale");
      const float rate = step_.context(p.tensor, o.lr, steps_).lr;
      if (!average_->step_dense(p.tensor, masters_[p.tensor], rate)) return false;
      if constexpr (mixes) convert(masters_[p.tensor], parameters_[p.tensor], p.count);
      return true;
    }
  }

  step_result update_all(const step_options& o) {
    const double norm = shards || o.max_norm > 0.0f ? average_->norm() : 0.0;
    const bool take = average_->counts() && std::isfinite(norm);
    average_->settle(take, rate_.held_scale(o.lr));
    if (average_->counted()) count_scale(!take);
    if (!take) {
      ++done_.skipped;
      return {.skipped = true, .norm = norm};
    }
    apply_rule(o, norm);
    rate_ = {o.lr, 0.0f};
    ++done_.meetings;
    return {.met = true, .norm = norm};
  }

  step_result local_step(const step_options& o) {
    const bool counted = step_.samples() > 0.0;  // without samples the gradient may hold anything
    double squares = 0.0;
    for (std::size_t i = 0; counted && i < tensors_.size(); ++i) {
      average_->widen(i, scale_.scale);
      squares += detail::squares(average_->result(i), tensors_[i].count);
    }
    const double norm = std::sqrt(squares);
    const bool finite = std::isfinite(norm);
    if (!finite) {
      ++done_.skipped;
      ++bad_;
    } else if (counted) {
      apply_rule(o, norm);
      drift_.add(step_.samples(), o.loss);
    }
    if (!drift_.tick(o.lr)) return {.skipped = !finite, .norm = norm};
    const detail::meeting m = meet(false);
    return {.skipped = !finite, .met = m.taken, .reverted = m.counted && !m.taken, .norm = norm};
  }

  void count_scale(bool skipped) {
    if constexpr (mixes) plan_.precision.count(scale_, skipped);
  }

  detail::meeting meet(bool joined) {
    announce(0.0, joined);
    const detail::meeting m = drift_.meet(*average_, masters_, whole_);
    round_masters();
    count_scale(average_->any_bad());
    bad_ = 0;
    done_.meetings += m.taken;
    done_.reverted += m.counted && !m.taken;
    return m;
  }

  Strategy plan_;
  std::vector<tensor> tensors_;
  Optimizer rule_;
  detail::open_step<element> step_;
  std::vector<float> decay_scales_;
  std::vector<element*> parameters_;
  std::vector<float*> masters_;  // of whole tensors, which the rule updates
  detail::known_rate rate_;
  loss_scale_state scale_;
  std::uint32_t bad_ = 0;      // local steps skipped for an infinity since the last meeting
  list<detail::piece> whole_;  // every tensor as one piece
  drift_type drift_;
  std::unique_ptr<averager> average_;
  detail::piecewise<typename kind::rule_type, static_cast<int>(held_slots), typename averager::memory_type, element,
                    typename averager::gradient_type>
      update_;
  std::optional<buffer<float, typename averager::memory_type>> master_gradients_;  // for another trainer
  int unwinding_;
  std::size_t steps_ = 0;       // steps taken
  std::uint64_t sequence_ = 0;  // exchanges opened
  heddle::report done_;
};

}  // namespace v0
}  // namespace heddle

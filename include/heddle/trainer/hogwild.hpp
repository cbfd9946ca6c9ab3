// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/hogwild.hpp>
#include <heddle/trainer/data_parallel.hpp>
#include <heddle/trainer/detail/shared_parameters.hpp>

#include <optional>

namespace heddle {
inline namespace v0 {

/// @brief `data_parallel` under `hogwild`: ranks are threads of one process that change one copy of the parameters.
///
/// The copy belongs to all trainers together and begins with rank 0's parameters. Each step updates it with the rank's
/// own gradient, at once and without waiting; optimizer state stays local. Read parameters through the race policy,
/// `Race::read`, while others train; or plainly in the one-thread form, a communicator of one rank, which gives the
/// bits of `every_step` there.
///
///     using race = hd::vector_asm;
///     hd::data_parallel dp{hd::strategy{.mode = hd::hogwild<race>{}}, comm, model.tensors(), hd::sgd{}};
///     race::read(dp.parameters()[i], model.w.data(), n);   // then backward, ready, step as ever
///     dp.join();                                           // everybody's; model.tensors() then hold the result
///
/// Sync:   step() never waits; join(), synchronize(), save() and load() wait for all ranks, however long these train.
/// Throws: as `data_parallel`; comm_error from the constructor if a rank is another process, and from join() and
///         synchronize() if a rank has left.
template <class Strategy, class Comm, class Optimizer>
  requires(detail::shares_parameters<Strategy>)
class data_parallel<Strategy, Comm, Optimizer> {
  using race = typename std::remove_cvref_t<decltype(Strategy::mode)>::race;
  using memory_type = std::remove_cvref_t<decltype(Strategy::memory)>;
  using block = detail::shared_parameters<memory_type>;
  static_assert(communicator<Comm>,
                "heddle::data_parallel: the second argument must be a communicator; see docs/comm.md");
  static_assert(
      optimizer<Optimizer>,
      "heddle::data_parallel: the fourth argument must be an update rule with slots and update(); see docs/optim.md");
  static_assert(std::is_same_v<std::remove_cvref_t<decltype(Strategy::compressor)>, none>,
                "heddle::data_parallel: .mode shares parameters and sends nothing, so .compressor must be none{}; see "
                "docs/mode.md");
  static_assert(std::is_same_v<std::remove_cvref_t<decltype(Strategy::precision)>, full_precision>,
                "heddle::data_parallel: .mode shares float parameters, so .precision must be full_precision{}; see "
                "docs/mode.md");
  static_assert(!has_derived_parameter<Optimizer>,
                "heddle::data_parallel: this update rule makes parameters of its own state, so .mode must average "
                "gradients, such as every_step{}; see docs/optim.md");
  static constexpr std::size_t slots = static_cast<std::size_t>(Optimizer::slots);

 public:
  /// Element type of parameters and gradients.
  using element = float;

  /// As the other data_parallel.
  data_parallel(const Strategy& plan, Comm& comm, std::span<const tensor> tensors, Optimizer rule,
                unused missing = unused::error)
      : plan_(checked(plan, rule)),
        tensors_(detail::checked(tensors, dtype::f32, rule)),
        rule_(rule),
        step_(tensors_, missing),
        comm_(comm.duplicate()) {
    std::size_t total = 0, largest = 0;
    for (const tensor& t : tensors_) {
      offsets_.push_back(total);
      total += t.count;
      largest = (std::max)(largest, t.count);
    }
    piece_ = layerwise<Optimizer> ? largest : (std::min)(largest, std::size_t{4096});
    state_.emplace(plan.memory, slots * total);
    std::fill(state_->begin(), state_->end(), 0.0f);
    scratch_.emplace(plan.memory, 3 * piece_);
    parameters_.reserve(tensors_.size());  // nothing may fail behind share(): the others would wait for this rank
    shared_ = block::share(comm_, detail::fingerprint(tensors_, signature()), plan.memory, total, [&](float* values) {
      for (std::size_t i = 0; i < tensors_.size(); ++i)
        std::copy_n(static_cast<const float*>(tensors_[i].parameter), tensors_[i].count, values + offsets_[i]);
    });
    for (const std::size_t at : offsets_) parameters_.push_back(shared_->values() + at);
  }

  data_parallel(const data_parallel&) = delete;
  data_parallel& operator=(const data_parallel&) = delete;
  /// The copy of the parameters goes with the last rank. Ranks that wait for this one learn that it has left.
  ~data_parallel() { shared_->leave(); }

  /// The shared parameters, one pointer per tensor.
  std::span<float* const> parameters() const noexcept { return detail::as_span(parameters_); }
  /// 1.
  float loss_scale() const noexcept { return 1.0f; }

  /// As the other data_parallel.
  void groups(std::span<const group_options> options) { step_.groups(options); }

  /// As the other data_parallel; a weight of 0 means that the gradient doesn't count, others are not used.
  void begin(const begin_options& o = {}) { step_.begin(o); }

  /// As the other data_parallel.
  void ready(std::size_t i) {
    step_.ready(i, [&] { begin(); });
  }

  /// @brief Updates the shared parameters by this rank's gradient. Skipped if that isn't finite.
  /// Throws: argument_error as the other data_parallel.
  step_result step(const step_options& o) {
    detail::check_step(o, nullptr);
    if (!step_.is_open()) begin();
    step_.close([](std::size_t) {});
    double squares = 0.0;
    for (std::size_t i = 0; step_.samples() > 0.0 && i < tensors_.size(); ++i)
      squares += detail::squares(gradient(i), tensors_[i].count);
    const double norm = std::sqrt(squares);
    if (!(step_.samples() > 0.0) || !std::isfinite(norm)) {
      const bool bad = !std::isfinite(norm);
      skipped_ += bad;
      return {.skipped = bad, .norm = norm};
    }
    const float factor = o.max_norm > 0.0f && norm > o.max_norm ? static_cast<float>(o.max_norm / norm) : 1.0f;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      for (std::size_t at = 0; at < tensors_[i].count; at += piece_)
        update(i, at, (std::min)(piece_, tensors_[i].count - at), o, factor);
    }
    ++steps_;
    return {.norm = norm};
  }

  /// @brief Waits until every rank is here, and copies the shared parameters to the tensors' own memory. Collective.
  /// Throws: argument_error if a step is open; comm_error if a rank has left.
  void synchronize() {
    step_.require_closed("synchronize");
    shared_->meet(comm_.rank(), "synchronize");
    for (std::size_t i = 0; i < tensors_.size(); ++i) race::read(parameters_[i], replica(i), tensors_[i].count);
    shared_->meet(comm_.rank(), "synchronize");  // nobody goes on before all have copied
  }

  /// Says that this rank has no more batches, and waits until nobody has: as synchronize().
  void join() { synchronize(); }

  /// @brief Writes parameters and every rank's state to a directory, after synchronize(). Collective.
  /// Throws: file_error on every rank if any rank can't write; the older checkpoint stays.
  void save(const std::string& directory) {
    synchronize();
    detail::save_all(comm_, directory, [&](const detail::generation& now) {
      detail::counters c{};
      c.steps = steps_;
      c.skipped = skipped_;
      return detail::pack(now, comm_.rank(), signature(), c, tensors_, visitor());
    });
  }

  /// @brief Restores what save() wrote. Collective; also on another number of ranks, where rank r takes the optimizer
  /// state of old rank r modulo their number. One rank goes on bit for bit.
  /// Throws: file_error on every rank if any file is missing, damaged, or of another model or kind of strategy; nothing
  /// has changed then.
  void load(const std::string& directory) {
    step_.require_closed("load");
    shared_->meet(comm_.rank(), "load");
    detail::saved mine;
    detail::together all(comm_, "load");
    all.succeed([&] {
      const detail::checkpoint files(directory);
      const detail::generation g = files.published();
      mine = detail::unpack(files, g, comm_.rank() % static_cast<int>(g.ranks), true, signature(), tensors_, visitor(),
                            [](archive_reader&, const detail::counters&) {});
    });
    all.check();
    steps_ = mine.counts.steps;
    skipped_ = mine.counts.skipped;
    detail::restore(mine, tensors_, visitor());
    for (std::size_t i = 0; comm_.rank() == 0 && i < tensors_.size(); ++i)
      race::write(parameters_[i], replica(i), tensors_[i].count);
    shared_->meet(comm_.rank(), "load");
  }

  /// What this rank has done.
  heddle::report report() const {
    heddle::report r;
    r.steps = steps_;
    r.skipped = skipped_;
    r.state_bytes = state_->bytes() + scratch_->bytes() + shared_->bytes();
    r.executor = std::string("shared memory: ") + race::name();
    return r;
  }

 private:
  static const Strategy& checked(const Strategy& plan, const Optimizer& rule) {
    plan.check();
    detail::check_part(rule);
    return plan;
  }

  std::string signature() const {
    return detail::name_or(plan_.mode, "mode") + ", " + detail::rule_signature(rule_, slots, tensors_);
  }
  auto visitor() {
    return [this](std::size_t i, auto&& f) {
      f(replica(i), detail::state_kind::parameter);
      for (std::size_t k = 0; k < slots; ++k) f(state(k, i), detail::state_kind::rule);
    };
  }

  float* replica(std::size_t i) const noexcept { return static_cast<float*>(tensors_[i].parameter); }
  float* gradient(std::size_t i) const noexcept { return static_cast<float*>(tensors_[i].gradient); }
  float* state(std::size_t k, std::size_t i) noexcept { return state_->data() + k * shared_->count() + offsets_[i]; }

  // Adds what the rule would change of a copy; alone, writes the copy back, so that nothing rounds twice.
  void update(std::size_t i, std::size_t at, std::size_t n, const step_options& o, float factor) {
    float *const shared = parameters_[i] + at, *const now = scratch_->data(), *const before = now + piece_,
                 *const scaled = before + piece_;
    const float* g = gradient(i) + at;
    if (factor != 1.0f || o.max_value > 0.0f) {
      const float most = o.max_value > 0.0f ? o.max_value : std::numeric_limits<float>::infinity();
      for (std::size_t k = 0; k < n; ++k) scaled[k] = std::clamp(g[k] * factor, -most, most);
      g = scaled;
    }
    race::read(shared, now, n);
    std::copy_n(now, n, before);
    float* states[slots + 1] = {};
    for (std::size_t k = 0; k < slots; ++k) states[k] = state(k, i) + at;
    rule_.update(now, g, states, n, step_.context(i, o.lr, steps_));
    if (shared_->ranks() == 1) {
      race::write(shared, now, n);
    } else {
      for (std::size_t k = 0; k < n; ++k) now[k] -= before[k];
      race::add(shared, now, 1.0f, n);
    }
  }

  Strategy plan_;
  std::vector<tensor> tensors_;
  Optimizer rule_;
  detail::open_step<float> step_;
  Comm comm_;
  std::vector<std::size_t> offsets_;  // of tensors in the shared copy and in the state
  std::size_t piece_ = 0;             // elements updated at once: few, so that scratch stays in cache
  std::optional<buffer<float, memory_type>> state_, scratch_;
  typename block::handle shared_;
  std::vector<float*> parameters_;
  std::size_t steps_ = 0, skipped_ = 0;
};

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/trainer/detail/checkpoint.hpp>
#include <heddle/trainer/detail/dense.hpp>
#include <heddle/trainer/detail/packets.hpp>
#include <heddle/trainer/detail/sums.hpp>
#include <heddle/trainer/detail/worker.hpp>

#include <memory>

namespace heddle {
inline namespace v0 {
namespace detail {

// The exchange of compressors that hold nothing back.
struct no_exchange {
  no_exchange(auto&, const std::vector<bucket>&) noexcept {}
  static constexpr bool late() noexcept { return false; }
};

// Averages the vectors in the tensors' gradient memory over all ranks, bucket by bucket, on threads of its own. The
// result is in the same memory: the weighted mean, or for packets the sum of what was sent. State of a packet
// compressor moves only in settle(), after every rank knows whether the step counts. In a mode that shards the
// optimizer only what this rank owns is final, and gather() hands the updated parameters around.
// In mixed precision gradients of 16 bits travel as they are where nothing but the mean is asked for; the result is
// still to be multiplied by unscale(). Else they are unscaled into floats of this object's own, where the result is.
template <class Strategy, class Comm> class averager : public exchange_kind<Strategy> {
  using kind = exchange_kind<Strategy>;
  using typename kind::carrier_type;
  using typename kind::topology_type;
  using all_type = exchanged<Strategy>;
  using held_exchange =
      std::conditional_t<kind::packets, packet_exchange<Strategy, Comm>,
                         std::conditional_t<kind::reduces, sum_exchange<Strategy, Comm>, no_exchange>>;

 public:
  using kind::holds;
  using kind::shards;
  using typename kind::element;
  using typename kind::gradient_type;
  using held_type = typename all_type::held_type;

  averager(const Strategy& plan, Comm& comm, const std::vector<tensor>& tensors)
      : comm_(comm.duplicate()),
        all_(plan, comm_.rank(), comm_.size(), tensors),
        ranges_(plan_buckets()),
        dense_(all_, ranges_),
        held_(all_, ranges_),
        work_(job_runner{this}, plan.lanes, comm.size() > 1 && threads(comm)) {
    buckets_of_.resize(tensors.size(), {ranges_.size(), 0});
    for (const bucket b : ranges_) {
      for (std::size_t i = b.first; i < b.last; ++i) {
        buckets_of_[i].first = (std::min)(buckets_of_[i].first, buckets_.size());
        buckets_of_[i].last = buckets_.size() + 1;
      }
      buckets_.push_back({.range = b});
    }
  }

  counting<Comm>& comm() noexcept { return comm_; }

  // Opens a communicator for each lane; collective, the number must be the same on all ranks.
  void open_lanes() {
    for (std::size_t k = 1; k < all_.plan().lanes; ++k) duplicates_.push_back(comm_.duplicate());
  }
  const std::vector<announcement>& announced() const noexcept { return announce_.all(); }
  bool all_joined() const noexcept { return agreed_.all_joined; }
  bool any_joined() const noexcept { return agreed_.any_joined; }
  // What the compressor keeps; empty without packets.
  std::optional<held_type>& holding() noexcept { return all_.held(); }
  // Whether tensor i is compressed in the first step after a checkpoint.
  bool sends_next(std::size_t i, const counters& c) const {
    return all_.sends_at(i, static_cast<std::size_t>(kind::of_gradients ? c.steps : c.meetings));
  }
  // After `steps` steps.
  void pack_held(archive_writer& out, std::size_t steps) const {
    if (all_.held()) all_.held()->pack(out, [&](std::size_t i) { return steps > 0 && all_.sends_at(i, steps - 1); });
  }
  // Whether all ranks can go on with what was staged; collective.
  bool held_settled() { return !holding() || everywhere(comm_, holding()->staged_settled()); }
  // Throws file_error if a checkpoint holds something of a tensor that travels dense, and can't be made to send it.
  void check_strays(const std::string& directory) {
    if (holding() && holding()->staged_strays() && !has_release<carrier_type>)
      throw file_error("heddle::data_parallel::load: " + directory +
                       " holds back parts of tensors that aren't compressed here, and the compressor has no release()");
  }
  std::span<const float> held(std::size_t tensor, int slot) const {
    if (tensor >= all_.tensors().size() || slot < 0 || slot >= kind::slots) {
      throw argument_error("heddle::data_parallel::held: tensor " + std::to_string(tensor) + ", slot " +
                           std::to_string(slot) + "; there are " + std::to_string(all_.tensors().size()) +
                           " tensors and " + std::to_string(kind::slots) + " slots");
    }
    const slice<const float> here = all_.held()->view(tensor, static_cast<std::size_t>(slot));
    return {here.data, here.count};
  }
  // Why a tensor is compressed at a step, or isn't.
  std::string why(std::size_t tensor, std::size_t step) const {
    if (tensor >= all_.tensors().size())
      throw argument_error("heddle::data_parallel::why: tensor " + std::to_string(tensor) + " of " +
                           std::to_string(all_.tensors().size()));
    encode_context x = all_.context_of(tensor);
    x.step = step;
    x.ranks = all_.ranks();
    return last_of(all_.plan().compressor).why(all_.count(tensor), x);
  }
  // Where the result of tensor i is, and what it is to be multiplied by.
  gradient_type* result(std::size_t i) const noexcept { return all_.result(i); }
  float unscale() const noexcept { return all_.unscale(); }
  // Unscales the gradient of tensor i into floats, where these are this object's.
  void widen(std::size_t i, float scale) const { all_.widen(i, scale); }
  // Float parameters, for compressors that look at them.
  void parameters(std::vector<const float*> all) { all_.parameters(std::move(all)); }
  // Local steps that ranks skipped for an infinity before this exchange.
  bool any_bad() const noexcept { return agreed_.any_bad; }
  double exposed_seconds() const { return work_.exposed_seconds(); }
  heddle::report report(heddle::report r) const {
    const traffic t = comm_.sent();
    r.bytes_sent = t.bytes;
    r.control_bytes = t.control_bytes;
    r.messages = t.messages;
    r.elements_sent = all_.elements_sent();
    r.state_bytes = all_.bytes();
    r.comm_seconds = work_.busy_seconds();
    r.exposed_seconds = work_.exposed_seconds();
    r.executor = executor();
    return r;
  }

  // What moves the bytes, for reports.
  std::string executor() const {
    std::string text = "schedule";
    if constexpr (std::is_same_v<topology_type, native>)
      text = shards ? "schedule: direct" : "native";
    else if constexpr (has_name<topology_type>)
      text += ": " + all_.plan().topology.name();
    if constexpr (kind::packets && !has_all_gather_schedule<topology_type>) text += "; packets: ring";
    return text;
  }

  // Begins an exchange: what this rank announces and what transforms and compressors are told, tensor by tensor.
  void begin(const announcement& mine, const encode_context& context, std::span<const float> decay_scales) {
    announcement_ = mine;
    all_.begin(context, decay_scales, mine.loss_scale);
    for (one& b : buckets_) b.missing = b.range.last - b.range.first;
    next_ = 0;
    late_ = held_.late() && !buckets_.empty();
    work_.push(0);
  }

  // Tensor i is final. Buckets leave in registered order, whichever is complete first.
  void ready(std::size_t i) {
    for (std::size_t b = buckets_of_[i].first; b < buckets_of_[i].last; ++b) --buckets_[b].missing;
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) work_.push(++next_);
  }

  // Returns when everything that was pushed is done; throws what the exchange threw.
  void wait() {
    work_.wait();
    if (late_ && next_ == buckets_.size()) run_late();
  }

  // After wait(): whether anybody had samples; and whether, besides, every value that arrived is finite.
  bool counted() const noexcept { return agreed_.weights > 0.0; }
  bool counts() const noexcept {
    bool good = counted();
    for (const one& b : buckets_) good &= b.finite;
    return good;
  }

  // What an update rule is to work on; without shards only after an exchange.
  const std::vector<piece>& pieces() { return dense_.pieces(); }

  // The norm of the averaged gradient, the same bits on all ranks and with or without shards; not finite if an element
  // isn't. Collective, after wait().
  double norm() {
    double mine = 0.0, all = 0.0;
    pieces();
    for (std::size_t k = 0; k < buckets_.size(); ++k) mine += dense_.squares(k);
    for (const double theirs : tell_number_(comm_, mine)) all += theirs;
    return std::sqrt(all);
  }

  // After settle(): if the compressor moves tensor i and its momentum in one pass, does so. Whether it did.
  bool step_dense(std::size_t i, float* parameter, float rate) {
    if constexpr (kind::steps_dense) {
      if (!steps_dense_ || all_.sends(i)) return false;
      all_.with_whole(
          i, [&](auto g, auto state, const auto& x) { all_.carrier().step_dense(g, parameter, state, x, rate); });
      return true;
    }
    return (void)i, (void)parameter, (void)rate, false;
  }

  // Hands a bucket's parameters from their owners to all ranks. Only enqueues, in order; wait() waits.
  std::size_t buckets() const noexcept { return buckets_.size(); }
  void gather(std::size_t bucket) { work_.push(1 + buckets_.size() + bucket); }

  // Ends the exchange. If `take`, states move and gradients become what the update rule is to apply. `held_scale`: by
  // the rate of the step, whatever begin was told of it.
  void settle(bool take, float held_scale = 1.0f) {
    if constexpr (holds) {
      if (!take) return;
      all_.held_scale(agreed_.held_scale, held_scale / agreed_.held_scale);
      if constexpr (kind::packets) steps_dense_ = held_.steps_dense();
      for (std::size_t k = 0; k < buckets_.size(); ++k) held_.settle(k);
      holding()->released();
    }
  }

 private:
  struct one {
    bucket range;
    std::size_t missing = 0;
    bool finite = true;
  };

  // Whether other threads than the program's own may communicate.
  static bool threads(const Comm& comm) {
    if constexpr (has_progress<Comm>)
      return comm.progress() == progress::thread;
    else
      return true;
  }

  std::vector<bucket> plan_buckets() const {
    const auto& rule = all_.plan().buckets;
    std::vector<std::size_t> bytes;
    for (const tensor& t : all_.tensors()) bytes.push_back(t.count * sizeof(float));
    if constexpr (plans_by_topology<std::remove_cvref_t<decltype(Strategy::buckets)>, topology_type>)
      return rule.plan(all_.plan().topology, comm_.size(), bytes, sizeof(typename kind::wire));
    else
      return planned_buckets<kind::cuts>(rule, bytes);
  }

  void open() {
    agreed_ = agree(announce_(comm_, announcement_), announcement_, comm_.rank());
    all_.held_scale(agreed_.held_scale);
    all_.weigh(announcement_.samples, agreed_.most, agreed_.weights);
  }

  void run(std::size_t bucket, counting<Comm>& comm) {
    one& b = buckets_[bucket];
    std::size_t dense = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      if constexpr (!kind::as_they_are) all_.prepare(i, all_.part(b.range, i));
      if (!all_.sends(i)) dense += all_.part(b.range, i).count;
    }
    b.finite = !(dense || !holds) || dense_.run(bucket, dense, comm);
    if constexpr (has_fits_dense<carrier_type>) {
      for (std::size_t i = b.range.first; i < b.range.last; ++i) {
        b.finite &= all_.sends(i) || all_.with_whole(i, [&](auto g, auto state, const auto& x) {
          return all_.carrier().fits_dense(g, state, x);
        });
      }
    } else if constexpr (holds) {
      for (std::size_t i = b.range.first; i < b.range.last; ++i) b.finite &= all_.sends(i) || all_.fits_release(i);
    }
    if constexpr (holds) b.finite &= held_.run(bucket, comm);
  }

  // After backward: if the step counts for all ranks, what late compressors do.
  void run_late() {
    late_ = false;
    bool all = true;
    for (const double good : tell_number_(comm_, counts() ? 1.0 : 0.0)) all &= good == 1.0;
    if (!all) {
      buckets_.front().finite = false;
      return;
    }
    for (std::size_t k = 0; k < buckets_.size(); ++k) work_.push(1 + buckets_.size() + k);
    work_.wait();
  }

  counting<Comm>& lane(std::size_t k) noexcept { return k == 0 ? comm_ : duplicates_[k - 1]; }

  counting<Comm> comm_;
  all_type all_;
  std::vector<bucket> ranges_;
  dense_exchange<Strategy, Comm> dense_;
  held_exchange held_;
  std::vector<one> buckets_;
  std::vector<bucket> buckets_of_;  // of each tensor
  std::size_t next_ = 0;
  bool late_ = false;         // packets are to be made after backward
  bool steps_dense_ = false;  // means of tensors that travelled dense wait for step_dense()
  announcement announcement_;
  tell_plan<announcement, counting<Comm>> announce_;
  tell_plan<double, counting<Comm>> tell_number_;
  std::vector<counting<Comm>> duplicates_;
  agreement agreed_{.all_joined = false};
  struct job_runner {
    averager* self;
    void operator()(std::size_t job, std::size_t lane) const {
      const std::size_t all = self->buckets_.size();
      counting<Comm>& comm = self->lane(lane);
      if (job == 0)
        self->open();
      else if (job <= all)
        self->run(job - 1, comm);
      else if constexpr (shards)
        self->dense_.gather(job - 1 - all, comm);
      else if constexpr (kind::packets)
        self->held_.run_late(job - 1 - all, comm);
    }
  };
  worker<job_runner> work_;  // last: its thread uses everything above
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/counting.hpp>
#include <heddle/comm/hosted.cuh>
#include <heddle/trainer/detail/device_bucket.cuh>
#include <heddle/trainer/detail/device_dgc.cuh>
#include <heddle/trainer/detail/device_factors.cuh>
#include <heddle/trainer/detail/device_held.cuh>
#include <heddle/trainer/detail/worker.hpp>

#include <atomic>
#include <limits>

namespace heddle {
inline namespace v0 {
namespace detail {

// What `averager` is on the host, over tensors of a device: bucket by bucket, in the communicator's stream, from a
// thread of its own, so that neither the program nor its streams wait before settle().
template <class Strategy, class Comm> class device_exchange {
  using kind = exchange_kind<Strategy>;
  using element = typename kind::element;
  using gradient_type = typename kind::gradient_type;
  using wire = typename kind::wire;
  using counted_type = counting<Comm>;
  using control_type = hosted<counted_type>;
  using one = device_bucket<Strategy>;
  template <class Value> using list = std::vector<typename dependent<Value, Strategy>::type>;

 public:
  device_exchange(const Strategy& plan, Comm& comm, const std::vector<tensor>& tensors)
      : plan_(plan),
        control_(counted_type(comm.duplicate())),
        queue_{control_.inner().stream()},
        tensors_(tensors),
        wide_(queue_.stream),
        form_(last_of(plan_.compressor), control_.size(), control_.rank()),
        held_(form_, queue_),
        flag_(queue_.stream),
        factors_(queue_.stream),
        ready_(tensors.size()),
        buckets_of_(tensors.size()),
        work_(job_runner{this}, 1, control_.size() > 1 && threads(comm)) {
    check_cuda("data_parallel", cudaGetDevice(&device_));
    check_cuda("data_parallel", flag_.reserve(sizeof(unsigned)));
    for (const tensor& t : tensors_) {
      wide_at_.push_back(elements_);
      elements_ += t.count;
    }
    wide_at_.push_back(elements_);
    if (kind::widens) check_cuda("data_parallel", wide_.reserve(elements_ * sizeof(float)));
    if constexpr (kind::transforms) tell_norms();
    cut_buckets();
    held_.begin();
  }
  device_exchange(const device_exchange&) = delete;
  device_exchange& operator=(const device_exchange&) = delete;

  // For messages between hosts: what is checked, agreed on, saved.
  control_type& control() noexcept { return control_; }
  // For device memory.
  counted_type& comm() noexcept { return control_.inner(); }
  cuda::queue queue() const noexcept { return queue_; }
  auto& form() noexcept { return form_; }

  // ---- Checkpoints: what the compressor holds, on the host.
  using held_type = typename device_held<Strategy>::held_type;
  std::optional<held_type>& holding() noexcept { return held_.mirror(); }
  bool sends_next(std::size_t i, const counters& c) const { return sends_at(i, static_cast<std::size_t>(c.steps)); }
  bool held_settled() { return !holding() || everywhere(control_, holding()->staged_settled()); }
  void check_strays(const std::string& directory) const {
    if (held_.mirror() && held_.mirror()->staged_strays())
      throw file_error("heddle::data_parallel::load: " + directory +
                       " holds back parts of tensors that aren't compressed here; load it on the host");
  }
  // Opens the mirror, until what it returns goes away.
  [[nodiscard]] auto open_mirror() { return held_.open(); }
  void pack_held(archive_writer& out, std::size_t steps) {
    held_.pack(out, buckets_, [&](std::size_t i) { return steps > 0 && sends_at(i, steps - 1); });
  }
  void restore_held() { held_.restore(buckets_); }
  // A slot of what is held of tensor i here; a copy.
  std::vector<float> held(std::size_t i, std::size_t slot) const { return held_.copy(i, slot); }

  // Throws argument_error where the compressor would meet two weight decays, each above 0; decay(i): of tensor i.
  template <class Function> void check_decay(Function&& decay) const {
    float known = 0.0f;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const float mine = sends_at(i, ~std::size_t{0}) ? decay(i) : 0.0f;
      if (mine == 0.0f) continue;
      if (known != 0.0f && mine != known)
        throw argument_error(
            "heddle::data_parallel::groups: tensors under dgc differ in weight decay; over tensors of a device "
            "decay_scale must be 0 or one same number");
      known = mine;
    }
  }

  // Float parameters, for compressors that look at them.
  void parameters(std::vector<const float*> all) { parameters_ = std::move(all); }

  // Begins an exchange; see averager. `updated`: when the last update is done, which reads gradients and writes what
  // compressors look at.
  void begin(const announcement& mine, const encode_context& context, std::span<const float> decay_scales,
             const cuda::event& updated) {
    queue_.wait(updated);
    announcement_ = mine;
    context_ = context;
    decay_scales_.assign(decay_scales.begin(), decay_scales.end());
    for (one& b : buckets_) b.missing = b.tensors;
    next_ = 0;
    work_.push(0);
  }

  // The work in q so far makes tensor i final.
  void ready(std::size_t i, cuda::queue q) {
    under_way_ = true;
    ready_[i].record(q);
    for (const std::size_t b : buckets_of_[i]) --buckets_[b].missing;
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) work_.push(++next_);
  }

  // Returns when it is known who takes part; throws what the exchange threw.
  void wait() { work_.wait(); }
  // Returns when the averages are there and it is known whether they count.
  void finish() {
    work_.push(1 + buckets_.size());
    work_.wait();
    under_way_ = false;
  }

  const agreement& agreed() const noexcept { return agreed_; }
  bool counts() const noexcept { return agreed_.weights > 0.0 && bad_ == 0; }
  // Where the result of tensor i is: its gradient, or where compressors work on floats a float copy.
  gradient_type* gradient(std::size_t i) const noexcept {
    if constexpr (kind::widens)
      return reinterpret_cast<float*>(wide_.data()) + wide_at_[i];
    else
      return static_cast<gradient_type*>(tensors_[i].gradient);
  }
  // What gradients are still to be multiplied by.
  float unscale() const noexcept { return kind::as_they_are ? rest_ / announcement_.loss_scale : 1.0f; }

  // See averager. If `take`, states move and gradients become what the rule is to apply, for the later work of q.
  void settle(bool take, float held_scale, cuda::queue q) {
    if constexpr (kind::holds) {
      if (!take) return;
      const float late = held_scale / agreed_.held_scale;
      context_.held_late = late > 0.0f && late <= (std::numeric_limits<float>::max)() ? late : 1.0f;
      for (one& b : buckets_) {
        for (const bucket_piece& p : b.pieces) form_.correct(facts(p.tensor), p.tensor, queue_);
        with_messages(b, [&](const auto&... messages) {
          return form_.settle(b.work, b.sent, told{this, &b}, queue_, messages...);
        });
      }
      settled_.record(queue_);
      q.wait(settled_);
    }
    static_cast<void>(take), static_cast<void>(held_scale), static_cast<void>(q);
  }

  std::string executor() const {
    std::string text = "native";
    if constexpr (!std::is_same_v<typename kind::topology_type, native>) {
      text = "schedule";
      if constexpr (has_name<typename kind::topology_type>) text += ": " + plan_.topology.name();
    }
    return text;
  }
  heddle::report report(heddle::report r) {
    const traffic t = control_.inner().sent();
    r.bytes_sent = t.bytes;
    r.control_bytes = t.control_bytes;
    r.messages = t.messages;
    r.elements_sent = elements_sent_;
    r.state_bytes = form_.bytes() + elements_ * sizeof(float) * kind::widens;
    r.comm_seconds = work_.busy_seconds();
    r.exposed_seconds = work_.exposed_seconds();
    r.executor = executor();
    return r;
  }

 private:
  // What compressors ask of a bucket's tensors and parts.
  struct told {
    const device_exchange* self;
    const one* b;
    device_facts operator()(std::size_t i) const { return self->facts(i); }
    float* target(const piece& p) const { return self->gradient(p.tensor) + p.begin; }
    device_facts part(const piece& p) const {
      device_facts f = self->facts(p.tensor);
      if constexpr (kind::shards_held) {
        if (f.context.parameter) f.context.parameter += p.begin;
        f.gradient = reinterpret_cast<float*>(b->sums.data()) + p.position;
        f.count = p.count;
        f.context.ranks = self->senders();
        f.factor = static_cast<float>(f.context.ranks) / static_cast<float>(self->control_.size());
      }
      return f;
    }
  };
  static bool threads(const Comm& comm) {
    if constexpr (has_progress<Comm>)
      return comm.progress() == progress::thread;
    else
      return true;
  }

  bool sends_at(std::size_t i, std::size_t step) const {
    device_facts f = facts(i);
    f.context.step = step;
    f.context.ranks = control_.size();
    return form_.sends(f);
  }
  void cut_buckets() {
    const auto& rule = plan_.buckets;
    std::vector<std::size_t> bytes;
    for (const tensor& t : tensors_) bytes.push_back(t.count * sizeof(float));
    std::vector<bucket> ranges;
    if constexpr (plans_by_topology<std::remove_cvref_t<decltype(Strategy::buckets)>, typename kind::topology_type>)
      ranges = rule.plan(plan_.topology, control_.size(), bytes, sizeof(wire));
    else
      ranges = planned_buckets<kind::cuts>(rule, bytes);
    for (const bucket& range : ranges) {
      one& b = buckets_.emplace_back(queue_.stream);
      for (std::size_t i = range.first; i < range.last; ++i) {
        b.all.push_back(i);
        b.parts.push_back(part_of_bucket(range, i, tensors_[i].count));
        buckets_of_[i].push_back(buckets_.size() - 1);
      }
      b.tensors = b.all.size();
      if constexpr (kind::shards_held) {
        b.lay_out_shards(plan_.topology, control_.rank(), control_.size(), range,
                         [&](std::size_t k) { return form_.sends(facts(k)) ? tensors_[k].count : 0; });
      }
      if constexpr (kind::holds) hold_parts(b);
    }
  }
  // Ranks that each compress a gradient of the same elements.
  int senders() const {
    if constexpr (kind::shards_held)
      return plan_.topology.groups(control_.size());
    else
      return control_.size();
  }
  void hold_parts(const one& b) {
    for (const std::size_t i : b.all) {
      if constexpr (kind::shards_held) {
        for (const piece& p : b.work.owned[static_cast<std::size_t>(control_.rank())]) {
          if (p.tensor == i)
            held_.add({i, p.begin, p.count, static_cast<std::size_t>(senders()), form_.extra(p.count)});
        }
        if (form_.sends(facts(i))) continue;
      }
      held_.add({i, 0, tensors_[i].count, static_cast<std::size_t>(control_.size()), form_.extra(tensors_[i].count)});
    }
  }

  void tell_norms() {
    std::vector<norm_row> rows;
    for (std::size_t i = 0; i < tensors_.size(); ++i) rows.push_back({gradient(i), wide_at_[i]});
    rows.push_back({nullptr, elements_});
    factors_.tell(rows, queue_);
  }
  // What transforms multiply the gradients of a bucket by.
  void find_factors(const one& b) {
    const std::size_t first = b.all.front(), last = b.all.back() + 1;
    if (weight_ == 0.0f) return cuda::fill(factors_.of(first), last - first, 1.0f, queue_);
    factors_.find(plan_.compressor, first, last - first, wide_at_[last] - wide_at_[first], weight_ * rest_,
                  control_.size(), queue_);
  }

  // Which tensors of a bucket are averaged in this step, and where.
  void lay_out(one& b) {
    const std::size_t before = b.count;
    b.pieces.clear();
    b.sent.clear();
    b.count = 0;
    b.run = nullptr;
    bool one_run = std::is_same_v<wire, gradient_type>;
    for (std::size_t k = 0; k < b.all.size(); ++k) {
      const std::size_t i = b.all[k];
      const auto [begin, n] = b.parts[k];
      if (n == 0) continue;
      if (form_.sends(facts(i))) {
        b.sent.push_back(i);
        continue;
      }
      gradient_type* const here = gradient(i) + begin;
      one_run &= b.pieces.empty() || b.run + b.count == here;
      if (b.pieces.empty()) b.run = here;
      b.pieces.push_back({i, begin, n, b.count});
      b.count += n;
    }
    if (!one_run || !b.sent.empty()) b.run = nullptr;
    if (!b.run) check_cuda("data_parallel", b.elements.reserve(b.count * sizeof(wire)));
    if (!b.reduce || before != b.count) b.reduce.emplace(plan_.topology, control_.rank(), control_.size(), b.count);
  }

  // What compressors are told of tensor i.
  device_facts facts(std::size_t i) const {
    encode_context x = context_;
    if (x.weight_decay != 0.0f) x.parameter = parameters_[i];
    x.weight_decay *= decay_scales_.empty() ? 1.0f : decay_scales_[i];
    x.tensor = static_cast<std::uint32_t>(i);
    x.rank = control_.rank();
    x.rows = tensors_[i].rows;
    x.held_scale = agreed_.held_scale;
    float* g = nullptr;  // of what is sent as floats
    if constexpr (!kind::as_they_are) g = gradient(i);
    device_facts f{g, tensors_[i].count, weight_ * rest_, x};
    if constexpr (kind::transforms) f.factor = device_factor(factors_.of(i));
    return f;
  }

  // f(sum, gather), what forms hand around by.
  template <class Function> void with_messages(one& b, Function&& f) {
    elements_sent_ += f([&](float* x, std::size_t n) { b.add_up(plan_.topology, control_.inner(), queue_, x, n); },
                        [&](std::byte* all, const std::vector<std::size_t>& blocks) {
                          one::gather(plan_.topology, control_.inner(), all, blocks);
                        });
  }

  void open() {
    agreed_ = agree(announce_(control_, announcement_), announcement_, control_.rank());
    weight_ = agreed_.most > 0.0 ? static_cast<float>(announcement_.samples / agreed_.most) : 0.0f;
    rest_ = agreed_.most > 0.0 ? static_cast<float>(agreed_.most * control_.size() / agreed_.weights) : 1.0f;
    cuda::fill(flag(), 1, 0u, queue_);
  }

  void run(one& b) {
    for (std::size_t k = 0; k < b.all.size(); ++k) {
      const std::size_t i = b.all[k];
      queue_.wait(ready_[i]);
      if constexpr (kind::widens) {
        const element* const from = static_cast<const element*>(tensors_[i].gradient) + b.parts[k].begin;
        const convert_one<element, float> unscaled{from, gradient(i) + b.parts[k].begin,
                                                   1.0f / announcement_.loss_scale};
        if (weight_ != 0.0f) cuda::for_each(b.parts[k].count, unscaled, queue_);
      }
    }
    lay_out(b);
    if constexpr (kind::transforms) find_factors(b);
    if constexpr (kind::holds) {
      for (const std::size_t i : b.sent) {
        if (weight_ == 0.0f) cuda::fill(gradient(i), tensors_[i].count, 0.0f, queue_);
      }
      if constexpr (kind::shards_held) {
        if (!b.sent.empty())
          b.sum_inside(plan_.topology, control_.inner(), queue_, [&](std::size_t i) { return facts(i); });
      }
      with_messages(b, [&](const auto&... messages) {
        return form_.prepare(b.work, b.sent, told{this, &b}, flag(), queue_, messages...);
      });
    }
    if (b.count == 0) return;
    wire* const start = b.run ? reinterpret_cast<wire*>(b.run) : reinterpret_cast<wire*>(b.elements.data());
    const float before = kind::as_they_are ? weight_ : weight_ * rest_, over = b.run ? 1.0f : rest_;
    for (const bucket_piece& p : b.pieces) {
      const gradient_type* const from = gradient(p.tensor) + p.begin;
      if (weight_ == 0.0f)
        cuda::fill(start + p.offset, p.count, wire(0.0f), queue_);  // its memory may hold anything
      else if (!b.run || before != 1.0f || kind::transforms)
        cuda::for_each(p.count,
                       convert_by<gradient_type, wire>{
                           from, start + p.offset, kind::transforms ? facts(p.tensor).factor : device_factor(before),
                           kind::as_they_are ? 1.0f : over},
                       queue_);
    }
    const bulk_leaf<cuda, wire, mean> l(mean{}, queue_);
    (*b.reduce)(control_.inner(), start, l.get());
    elements_sent_ += b.count;
    const float after = kind::as_they_are ? 1.0f : rest_;
    if (b.run) cuda::for_each(b.count, look_at<wire>{start, flag()}, queue_);
    for (const bucket_piece& p : b.pieces) {
      gradient_type* const to = gradient(p.tensor) + p.begin;
      if (!b.run)
        cuda::for_each(p.count, convert_checked<wire, gradient_type>{start + p.offset, to, after, flag()}, queue_);
      if constexpr (kind::holds) form_.fits(facts(p.tensor), p.tensor, flag(), queue_);  // its tensors aren't cut
    }
  }

  void close() {
    control_.inner().copy(&bad_, flag(), sizeof bad_);
    control_.inner().synchronize();
    // Compressors look at what a rank sends, not at the sum; and sums whose bits differ must not let ranks drift apart.
    for (const unsigned theirs : tell_flag_(control_, bad_)) bad_ |= theirs;
  }

  unsigned* flag() const noexcept { return reinterpret_cast<unsigned*>(flag_.data()); }

  Strategy plan_;
  control_type control_;
  cuda::queue queue_;
  int device_ = 0;
  std::vector<tensor> tensors_;
  std::vector<std::size_t> wide_at_;  // of each tensor
  std::size_t elements_ = 0;          // of all
  stream_buffer wide_;
  device_form<typename kind::compressor_type> form_;
  device_held<Strategy> held_;
  stream_buffer flag_;
  device_factors factors_;
  list<cuda::event> ready_;  // of each tensor
  std::vector<std::vector<std::size_t>> buckets_of_;
  list<one> buckets_;
  std::size_t next_ = 0;
  announcement announcement_;
  encode_context context_;
  std::vector<float> decay_scales_;
  std::vector<const float*> parameters_;
  tell_plan<announcement, control_type> announce_;
  tell_plan<unsigned, control_type> tell_flag_;
  agreement agreed_{.all_joined = false};
  float weight_ = 1.0f, rest_ = 1.0f;
  unsigned bad_ = 0;
  std::atomic<std::uint64_t> elements_sent_{0};  // read while jobs run
  cuda::event settled_;
  struct job_runner {
    device_exchange* self;
    void operator()(std::size_t job, std::size_t) const {
      check_cuda("data_parallel", cudaSetDevice(self->device_));  // the communication thread's, too
      if (job == 0)
        self->open();
      else if (job <= self->buckets_.size())
        self->run(self->buckets_[job - 1]);
      else
        self->close();
    }
  };
  bool under_way_ = false;
  // Nothing in the stream may use the program's memory when this has gone. Where a peer has failed the communicator has
  // ended its kernels (`fail` aborts NCCL's), so what is freed in the order of the stream has no user then either.
  struct drain {
    device_exchange* self;
    ~drain() {
      try {
        if (self->under_way_) self->control_.inner().synchronize();
      } catch (...) {
      }
    }
  } drain_{this};
  worker<job_runner> work_;  // last: its thread uses everything above
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

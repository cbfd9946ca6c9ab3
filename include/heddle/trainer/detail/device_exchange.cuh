// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/all_reduce.cuh>
#include <heddle/comm/counting.hpp>
#include <heddle/comm/hosted.cuh>
#include <heddle/trainer/detail/checkpoint.hpp>
#include <heddle/trainer/detail/device_dgc.cuh>
#include <heddle/trainer/detail/exchanged.hpp>
#include <heddle/trainer/detail/worker.hpp>

#include <atomic>
#include <optional>

namespace heddle {
inline namespace v0 {
namespace detail {

/// @cond
struct norm_row {  // of a tensor: its gradient, and where it would begin behind the others
  const float* gradient;
  std::size_t begin;
};
struct norm_begin {
  const norm_row* rows;
  HEDDLE_HD std::size_t operator()(std::size_t i) const { return rows[i].begin - rows[0].begin; }
};
struct norm_square {
  const norm_row* rows;
  HEDDLE_HD double operator()(std::size_t tensor, std::size_t i) const {
    const auto g = static_cast<double>(rows[tensor].gradient[i - (rows[tensor].begin - rows[0].begin)]);
    return g * g;
  }
};
template <class Transforms> struct norm_scale {
  Transforms transforms;
  float before;
  int ranks;
  float* factors;
  HEDDLE_HD void operator()(std::size_t tensor, double squares) const {
    factors[tensor] = scale_from(transforms, squares, before, ranks);
  }
};
struct norm_add {
  HEDDLE_HD double operator()(double a, double b) const { return a + b; }
};
/// @endcond

// What `averager` is on the host, over tensors of a device: bucket by bucket, in the communicator's stream, from a
// thread of its own, so that neither the program nor its streams wait before settle().
template <class Strategy, class Comm> class device_exchange {
  using kind = exchange_kind<Strategy>;
  using element = typename kind::element;
  using gradient_type = typename kind::gradient_type;
  using wire = typename kind::wire;
  using counted_type = counting<Comm>;
  using control_type = hosted<counted_type>;
  template <class Value> using list = std::vector<typename dependent<Value, Strategy>::type>;

 public:
  device_exchange(const Strategy& plan, Comm& comm, const std::vector<tensor>& tensors)
      : plan_(plan),
        control_(counted_type(comm.duplicate())),
        queue_{control_.inner().stream()},
        tensors_(tensors),
        wide_(queue_.stream),
        form_(last_of(plan_.compressor), control_.size(), control_.rank()),
        flag_(queue_.stream),
        norms_(queue_.stream),
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
    if constexpr (kind::holds) {
      std::sort(parts_.begin(), parts_.end(), [](const held_part& a, const held_part& b) {
        return a.tensor != b.tensor ? a.tensor < b.tensor : a.begin < b.begin;
      });
      form_.hold(parts_, queue_);
    }
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
  using held_type = held_state<host_resource>;
  std::optional<held_type>& holding() noexcept { return mirror_; }
  bool sends_next(std::size_t i, const counters& c) const { return sends_at(i, static_cast<std::size_t>(c.steps)); }
  bool held_settled() { return !mirror_ || everywhere(control_, mirror_->staged_settled()); }
  void check_strays(const std::string& directory) const {
    if (mirror_ && mirror_->staged_strays())
      throw file_error("heddle::data_parallel::load: " + directory +
                       " holds back parts of tensors that aren't compressed here; load it on the host");
  }
  // Opens the mirror, until what it returns goes away.
  struct open_mirror_type {
    device_exchange* self;
    explicit open_mirror_type(device_exchange* s) : self(s) {}
    open_mirror_type(const open_mirror_type&) = delete;
    open_mirror_type& operator=(const open_mirror_type&) = delete;
    ~open_mirror_type() { self->mirror_.reset(); }
  };
  [[nodiscard]] open_mirror_type open_mirror() {
    if constexpr (kind::holds) {
      mirror_.emplace(host_resource{}, static_cast<std::size_t>(kind::slots), parts_);
    }
    return open_mirror_type(this);
  }
  void pack_held(archive_writer& out, std::size_t steps) {
    if constexpr (kind::holds) {
      each_held([&](float* here, float* there, std::size_t n) { cuda::copy(there, here, n, queue_); });
      for (const one& b : buckets_) {
        form_.thresholds(b.work, queue_,
                         [&](std::size_t i, std::size_t begin, float from) { *extra_of(i, begin) = from; });
      }
      mirror_->pack(out, [&](std::size_t i) { return steps > 0 && sends_at(i, steps - 1); });
    }
    static_cast<void>(out), static_cast<void>(steps);
  }
  void restore_held() {
    if constexpr (kind::holds) {
      mirror_->restore();
      each_held([&](float* here, float* there, std::size_t n) { cuda::copy(here, there, n, queue_); });
      for (const held_part& p : parts_) {
        if (p.extra) form_.begin_at(p.tensor, p.begin, *extra_of(p.tensor, p.begin));
      }
      for (one& b : buckets_) b.work.forget();  // tables are made anew, from the thresholds
      queue_.synchronize();
    }
  }
  // A slot of what is held of tensor i here; a copy.
  std::vector<float> held(std::size_t i, std::size_t slot) const {
    std::vector<float> all;
    if constexpr (kind::holds) {
      for (const held_part& p : parts_) {
        if (p.tensor != i) continue;
        all.resize(all.size() + p.count);
        cuda::copy(static_cast<const float*>(form_.state(slot, i, p.begin)), all.data() + all.size() - p.count, p.count,
                   queue_);
        queue_.synchronize();
      }
    }
    return all;
  }

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

  // If `take`, states move and gradients become what the rule is to apply, for the later work of q.
  void settle(bool take, cuda::queue q) {
    if constexpr (kind::holds) {
      if (!take) return;
      for (one& b : buckets_) {
        for (const bucket_piece& p : b.pieces) form_.correct(facts(p.tensor), p.tensor, queue_);
        elements_sent_ += form_.settle(
            b.work, b.sent, told{this, &b}, queue_, [&](float* x, std::size_t n) { add_up(b, x, n); },
            [&](std::byte* all, const std::vector<std::size_t>& blocks) { gather(all, blocks); });
      }
      settled_.record(queue_);
      q.wait(settled_);
    }
    static_cast<void>(take), static_cast<void>(q);
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
  struct one {
    std::vector<bucket_piece> pieces;    // of what is averaged
    std::vector<std::size_t> all, sent;  // its tensors, and those that a compressor with state sends
    std::vector<interval> parts;         // the elements of each
    std::size_t tensors = 0, missing = 0, count = 0;
    gradient_type* run = nullptr;  // its elements, where these are one run of memory and travel as they are
    stream_buffer elements, sums;  // what is averaged; with shards_held what is added up inside the group
    device_work work;
    std::optional<all_reduce_plan<typename kind::topology_type>> reduce{}, add{};
    basic_schedule<typename kind::operation> inside{};
    basic_executor<typename kind::operation> inside_engine{};

    explicit one(cudaStream_t s) : elements(s), sums(s), work(s) {}
  };
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
  // f(in the mirror, on the device, count) for all that is held.
  template <class Function> void each_held(Function&& f) {
    float* here[kind::slots + 1];
    for (const held_part& p : parts_) {
      mirror_->pointers(p.tensor, p.begin, here);
      for (int k = 0; k < kind::slots; ++k)
        f(here[k], form_.state(static_cast<std::size_t>(k), p.tensor, p.begin), p.count);
    }
    queue_.synchronize();
  }
  float* extra_of(std::size_t i, std::size_t begin) {
    float* here[kind::slots + 1];
    mirror_->pointers(i, begin, here);
    return here[kind::slots];
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
      if constexpr (kind::shards_held) lay_out_shards(b, range);
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
  // What each rank owns of its group's gradient of the tensors that are sent; these are the same in all steps.
  void lay_out_shards(one& b, const bucket& range) {
    const auto size = [&](std::size_t i) { return form_.sends(facts(i)) ? tensors_[i].count : 0; };
    std::size_t n = 0;
    for (std::size_t i = range.first; i < range.last; ++i) n += size(i);
    b.work.owned.resize(static_cast<std::size_t>(control_.size()));
    for (int r = 0; r < control_.size(); ++r) {
      auto s = plan_.topology.inside(r, control_.size(), n);
      cut(s.owned(), range.first, range.last, size, [&](const piece& p) {
        if (p.own) b.work.owned[static_cast<std::size_t>(r)].push_back(p);
      });
      if (r == control_.rank()) b.inside = std::move(s);
    }
    b.inside_engine.prepare(control_.rank(), b.inside, sizeof(float), b.inside.owned());
    check_cuda("data_parallel", b.sums.reserve(n * sizeof(float)));
  }
  void hold_parts(const one& b) {
    for (const std::size_t i : b.all) {
      if constexpr (kind::shards_held) {
        for (const piece& p : b.work.owned[static_cast<std::size_t>(control_.rank())]) {
          if (p.tensor == i)
            parts_.push_back({i, p.begin, p.count, static_cast<std::size_t>(senders()), form_.extra(p.count)});
        }
        if (form_.sends(facts(i))) continue;
      }
      parts_.push_back(
          {i, 0, tensors_[i].count, static_cast<std::size_t>(control_.size()), form_.extra(tensors_[i].count)});
    }
  }

  // Tables for the norms of tensors, and what they give: factors of gradients.
  void tell_norms() {
    std::vector<norm_row> rows;
    for (std::size_t i = 0; i < tensors_.size(); ++i) rows.push_back({gradient(i), wide_at_[i]});
    rows.push_back({nullptr, elements_});
    check_cuda("data_parallel",
               norms_.reserve(rows.size() * sizeof(norm_row) + stream_buffer::rounded(rows.size() * sizeof(float))));
    cuda::copy(rows.data(), norm_rows(), rows.size(), queue_);
    queue_.synchronize();  // what was copied is on this stack
  }
  float* factors() const noexcept { return reinterpret_cast<float*>(norms_.data()); }
  norm_row* norm_rows() const noexcept {
    return reinterpret_cast<norm_row*>(norms_.data() + stream_buffer::rounded((tensors_.size() + 1) * sizeof(float)));
  }
  // What transforms multiply the gradients of a bucket by: found and left on the device, in one launch.
  void find_factors(const one& b) {
    const std::size_t first = b.all.front(), last = b.all.back() + 1;
    if (weight_ == 0.0f) return cuda::fill(factors() + first, last - first, 1.0f, queue_);
    cuda::reduce_segments(last - first, wide_at_[last] - wide_at_[first], norm_begin{norm_rows() + first}, 0.0,
                          norm_add{}, norm_square{norm_rows() + first},
                          norm_scale<std::remove_cvref_t<decltype(Strategy::compressor)>>{
                              plan_.compressor, weight_ * rest_, control_.size(), factors() + first},
                          pool_, queue_);
  }

  // The sum over the group of what is sent, of which this rank owns a part.
  void sum_inside(one& b) {
    std::size_t n = 0;
    auto* const sums = reinterpret_cast<float*>(b.sums.data());
    for (const std::size_t i : b.sent) {
      cuda::for_each(tensors_[i].count, convert_by<float, float>{gradient(i), sums + n, facts(i).factor, 1.0f}, queue_);
      n += tensors_[i].count;
    }
    const bulk_leaf<cuda, float, heddle::sum> added(heddle::sum{}, queue_);
    const leaf l = added.get();
    const header h = begin_call(
        control_.inner(), on_topology({operation_kind::reduce_scatter, l.type, l.id, 0, 0, 1, n}, plan_.topology));
    b.inside_engine.run_prepared(control_.inner(), b.inside, 0, b.inside.rounds(), h,
                                 reinterpret_cast<std::byte*>(sums), &l);
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
    if constexpr (kind::transforms) f.factor = device_factor(factors() + i);
    return f;
  }

  void add_up(one& b, float* x, std::size_t n) {
    if (!b.add || b.add->count() != n) b.add.emplace(plan_.topology, control_.rank(), control_.size(), n);
    (*b.add)(control_.inner(), x, bulk_leaf<cuda, float, heddle::sum>(heddle::sum{}, queue_).get());
  }
  // Every rank's block of so many bytes, the own one being in its place.
  void gather(std::byte* all, const std::vector<std::size_t>& blocks) {
    std::size_t bytes = 0;
    for (const std::size_t n : blocks) bytes += n;
    const std::span<std::byte> data(all, bytes);
    if constexpr (has_all_gather_schedule<typename kind::topology_type>)
      all_gather(control_.inner(), plan_.topology, data, std::span<const std::size_t>(blocks));
    else
      all_gather(control_.inner(), ring{}, data, std::span<const std::size_t>(blocks));
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
        if (!b.sent.empty()) sum_inside(b);
      }
      elements_sent_ += form_.prepare(
          b.work, b.sent, told{this, &b}, flag(), queue_, [&](float* x, std::size_t n) { add_up(b, x, n); },
          [&](std::byte* all, const std::vector<std::size_t>& blocks) { gather(all, blocks); });
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
  std::optional<held_type> mirror_;
  stream_buffer flag_, norms_;
  cuda::memory pool_;
  typename kind::template list<held_part> parts_;  // whose state is here
  list<cuda::event> ready_;                        // of each tensor
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

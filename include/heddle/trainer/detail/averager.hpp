// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/detail/pieces.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/compress/cast.hpp>
#include <heddle/compress/detail/carrier.hpp>
#include <heddle/core/detail/squares.hpp>
#include <heddle/trainer/detail/checkpoint.hpp>
#include <heddle/trainer/detail/held.hpp>
#include <heddle/trainer/detail/tell.hpp>
#include <heddle/trainer/detail/worker.hpp>
#include <heddle/trainer/options.hpp>
#include <heddle/trainer/strategy.hpp>
#include <heddle/trainer/tensor.hpp>

#include <atomic>
#include <limits>
#include <memory>
#include <optional>

namespace heddle {
inline namespace v0 {
namespace detail {

// A type that cast<> takes, where nothing is cast.
template <class Element> using narrow_or_bf16 = std::conditional_t<std::is_same_v<Element, float>, bfloat16, Element>;

// Averages the vectors in the tensors' gradient memory over all ranks, bucket by bucket, on threads of its own. The
// result is in the same memory: the weighted mean, or for packets the sum of what was sent. State of a packet
// compressor moves only in settle(), after every rank knows whether the step counts. In a mode that shards the
// optimizer only what this rank owns is final, and gather() hands the updated parameters around.
// In mixed precision gradients of 16 bits travel as they are where nothing but the mean is asked for; the result is
// still to be multiplied by unscale(). Else they are unscaled into floats of this object's own, where the result is.
template <class Strategy, class Comm> class averager {
 public:
  using compressor_type = last_part<decltype(Strategy::compressor)>;
  using topology_type = std::remove_cvref_t<decltype(Strategy::topology)>;
  using memory_type = std::remove_cvref_t<decltype(Strategy::memory)>;
  using carrier_type = decltype(carried(std::declval<const compressor_type&>()));
  static constexpr bool packets = packet_compressor<carrier_type>;
  static constexpr bool reduces = reducing_compressor<carrier_type>;
  static constexpr bool holds = packets || reduces;
  static constexpr bool shards_held = shards_packets<compressor_type>;
  static constexpr bool shards = shards_optimizer<std::remove_cvref_t<decltype(Strategy::mode)>>;
  using element = typename std::remove_cvref_t<decltype(Strategy::precision)>::element;
  static constexpr bool mixes = !std::is_same_v<element, float>;
  static constexpr bool of_gradients =
      std::remove_cvref_t<decltype(Strategy::mode)>::averages != heddle::average::parameters;
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
  using held_type = held_state<memory_type>;
  // Why there can be no limit on the norm or the elements of the average; null: there can.
  static constexpr const char* refuses_limits =
      !(of_gradients && holds) ? nullptr
      : slots                  ? "this compressor holds gradients back"
                               : "what this compressor sends is added up after a limit would have to be known";

  averager(const Strategy& plan, Comm& comm, const std::vector<tensor>& tensors)
      : plan_(plan),
        carrier_(carried(last_of(plan_.compressor))),
        comm_(comm.duplicate()),
        tensors_(tensors),
        wide_(plan.memory, fill_offsets() * widens),
        work_(job_runner{this}, plan.lanes, comm.size() > 1 && threads(comm)) {
    std::vector<std::size_t> bytes;
    for (const tensor& t : tensors_) bytes.push_back(t.count * sizeof(float));
    for (const bucket b : plan_buckets(bytes)) buckets_.emplace_back(b);
    factors_.assign(tensors_.size(), 1.0f);
    bucket_of_.resize(tensors_.size());
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      for (std::size_t i = buckets_[b].range.first; i < buckets_[b].range.last; ++i) bucket_of_[i] = b;
    }
    if constexpr (holds) lay_out_held();
    if constexpr (shards) {
      for (one& b : buckets_) b.reduce.emplace(plan_.topology, comm_.rank(), comm_.size(), elements_of(b));
      pieces();
    }
  }

  counting<Comm>& comm() noexcept { return comm_; }

  // Opens a communicator for each lane; collective, the number must be the same on all ranks.
  void open_lanes() {
    duplicates_.reserve(plan_.lanes);  // lanes point at them
    for (std::size_t k = 1; k < plan_.lanes; ++k) duplicates_.push_back(comm_.duplicate());
    lanes_.emplace_back(comm_);
    for (counting<Comm>& c : duplicates_) lanes_.emplace_back(c);
  }
  const std::vector<announcement>& announced() const noexcept { return announce_.all(); }
  bool all_joined() const noexcept { return all_joined_; }
  bool any_joined() const noexcept { return any_joined_; }
  // What the compressor keeps; empty without packets.
  std::optional<held_type>& holding() noexcept { return held_; }
  // Whether tensor i is compressed in a step.
  bool sends_at(std::size_t i, std::size_t step) const {
    if constexpr (holds) {
      encode_context x = context_of(i);
      x.step = step;
      x.ranks = comm_.size();
      return carrier_.sends(tensors_[i].count, x);
    } else {
      return (void)i, (void)step, false;
    }
  }
  // Likewise in the first step after a checkpoint.
  bool sends_next(std::size_t i, const counters& c) const {
    return sends_at(i, static_cast<std::size_t>(of_gradients ? c.steps : c.meetings));
  }
  // After `steps` steps.
  void pack_held(archive_writer& out, std::size_t steps) const {
    if (held_) held_->pack(out, [&](std::size_t i) { return steps > 0 && sends_at(i, steps - 1); });
  }
  // Whether all ranks can go on with what was staged; collective.
  bool held_settled() { return !held_ || everywhere(comm_, held_->staged_settled()); }
  // Throws file_error if a checkpoint holds something of a tensor that travels dense, and can't be made to send it.
  void check_strays(const std::string& directory) const {
    if (held_ && held_->staged_strays() && !has_release<carrier_type>)
      throw file_error("heddle::data_parallel::load: " + directory +
                       " holds back parts of tensors that aren't compressed here, and the compressor has no release()");
  }
  std::span<const float> held(std::size_t tensor, int slot) const {
    if (tensor >= tensors_.size() || slot < 0 || slot >= slots) {
      throw argument_error("heddle::data_parallel::held: tensor " + std::to_string(tensor) + ", slot " +
                           std::to_string(slot) + "; there are " + std::to_string(tensors_.size()) + " tensors and " +
                           std::to_string(slots) + " slots");
    }
    const slice<const float> here = held_->view(tensor, static_cast<std::size_t>(slot));
    return {here.data, here.count};
  }
  // Where the result of tensor i is.
  gradient_type* result(std::size_t i) const noexcept {
    if constexpr (as_they_are)
      return static_cast<element*>(tensors_[i].gradient);
    else
      return gradient(i).data;
  }
  // What it is to be multiplied by.
  float unscale() const noexcept { return as_they_are ? rest_ / announcement_.loss_scale : 1.0f; }
  // Unscales the gradient of tensor i into floats, where these are this object's.
  void widen(std::size_t i, float scale) const {
    if constexpr (widens) {
      const slice<float> g = gradient(i);
      convert_scaled(static_cast<const element*>(tensors_[i].gradient), g.data, g.count, 1.0f / scale);
    }
  }
  // Float parameters, for compressors that look at them.
  void parameters(std::vector<const float*> all) { parameters_ = std::move(all); }
  // Local steps that ranks skipped for an infinity before this exchange.
  bool any_bad() const noexcept { return any_bad_; }
  double exposed_seconds() const { return work_.exposed_seconds(); }
  heddle::report report(heddle::report r) const {
    const traffic t = comm_.sent();
    r.bytes_sent = t.bytes;
    r.control_bytes = t.control_bytes;
    r.messages = t.messages;
    r.elements_sent = elements_sent_;
    r.state_bytes = (held_ ? held_->bytes() : 0) + wide_.bytes();
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
      text += ": " + plan_.topology.name();
    if constexpr (packets && !has_all_gather_schedule<topology_type>) text += "; packets: ring";
    return text;
  }

  // Begins an exchange: what this rank announces and what transforms and compressors are told, tensor by tensor.
  void begin(const announcement& mine, const encode_context& context, std::span<const float> decay_scales) {
    announcement_ = mine;
    context_ = context;
    decay_scales_.assign(decay_scales.begin(), decay_scales.end());
    for (one& b : buckets_) b.missing = b.range.last - b.range.first;
    next_ = 0;
    late_ = fuses() && !buckets_.empty();
    work_.push(0);
  }

  // Tensor i is final. Buckets leave in registered order, whichever is complete first.
  void ready(std::size_t i) {
    --buckets_[bucket_of_[i]].missing;
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) work_.push(++next_);
  }

  // Returns when everything that was pushed is done; throws what the exchange threw.
  void wait() {
    work_.wait();
    if (late_ && next_ == buckets_.size()) run_late();
  }

  // After wait(): whether anybody had samples; and whether, besides, every value that arrived is finite.
  bool counted() const noexcept { return weights_ > 0.0; }
  bool counts() const noexcept {
    bool good = weights_ > 0.0;
    for (const one& b : buckets_) good &= b.finite;
    return good;
  }

  // What an update rule is to work on, bucket by bucket: with shards what this rank owns, else everything, cut where
  // what it would own ends. Without shards only after an exchange.
  const std::vector<piece>& pieces() {
    std::size_t at = 0;
    for (std::size_t k = pieces_.empty() ? 0 : buckets_.size(); k < buckets_.size(); ++k) {
      one& b = buckets_[k];
      const auto [first, last] = b.range;
      b.first_piece = pieces_.size();
      cut(
          owned_of(b), first, last, [&](std::size_t i) { return tensors_[i].count; },
          [&](piece p) {
            if (shards && !p.own) return;
            p.bucket = k;
            p.state = shards ? at : offsets_[p.tensor] + p.begin;
            at += p.count;
            pieces_.push_back(p);
          });
      b.last_piece = pieces_.size();
    }
    return pieces_;
  }

  // The norm of the averaged gradient, the same bits on all ranks and with or without shards; not finite if an element
  // isn't. Collective, after wait().
  double norm() {
    double mine = 0.0, all = 0.0;
    pieces();
    for (one& b : buckets_) mine += shards ? b.squares : squares_of(b);
    for (const double theirs : tell_number_(comm_, mine)) all += theirs;
    return std::sqrt(all);
  }

  // Hands a bucket's parameters from their owners to all ranks. Only enqueues, in order; wait() waits.
  std::size_t buckets() const noexcept { return buckets_.size(); }
  void gather(std::size_t bucket) { work_.push(1 + buckets_.size() + bucket); }

  // Ends the exchange. If `take`, states move and gradients become what the update rule is to apply.
  void settle(bool take) {
    if constexpr (holds) {
      if (!take) return;
      for (one& b : buckets_) settle(b);
      held_->released();
    }
  }

 private:
  struct one {
    explicit one(bucket b) : range(b) {}
    bucket range;
    std::size_t missing = 0;
    bool finite = true;
    std::optional<std::conditional_t<shards, halved_plan<topology_type>, all_reduce_plan<topology_type>>> reduce;
    std::size_t first_piece = 0, last_piece = 0;
    double squares = 0.0;  // of what this rank owns
    std::vector<wire> elements;
    std::vector<element> parameters;        // on their way, where their memory isn't one run
    std::size_t travelling = 0;             // elements of tensors that go as packets in this step
    std::vector<std::vector<piece>> parts;  // with shards_held what each rank's packets are of
    schedule inside;                        // and how gradients are summed inside a group
    heddle::executor inside_engine;
    std::vector<float> sums;          // what that gives
    std::vector<std::byte> mine;      // this rank's packets, one after the other
    std::vector<std::byte> gathered;  // everybody's
    std::vector<std::size_t> sizes;   // bytes of each rank's packets
    std::vector<float> added;         // what is in all packets, where they travelled as one dense sum
    std::optional<all_reduce_plan<topology_type>> add;
    std::vector<std::vector<float>> totals;  // what all ranks add up, round by round
    std::vector<std::optional<all_reduce_plan<topology_type>>> total_plans;
  };

  // Whether other threads than the program's own may communicate.
  static bool threads(const Comm& comm) {
    if constexpr (has_progress<Comm>)
      return comm.progress() == progress::thread;
    else
      return true;
  }

  // What buckets travel on, one at a time.
  struct lane {
    explicit lane(counting<Comm>& c) : comm(c) {}
    counting<Comm>& comm;
    tell_plan<std::uint64_t, counting<Comm>> tell_size{};  // of packets
  };

  auto plan_buckets(const std::vector<std::size_t>& bytes) const {
    if constexpr (plans_by_topology<std::remove_cvref_t<decltype(Strategy::buckets)>, topology_type>)
      return plan_.buckets.plan(plan_.topology, comm_.size(), bytes, sizeof(wire));
    else
      return plan_.buckets.plan(bytes);
  }

  std::size_t fill_offsets() {
    for (const tensor& t : tensors_) {
      offsets_.push_back(total_);
      total_ += t.count;
    }
    return total_;
  }

  // The gradient in floats; not where 16-bit ones travel as they are.
  slice<float> gradient(std::size_t i) const {
    if constexpr (widens)
      return {const_cast<float*>(wide_.data()) + offsets_[i], tensors_[i].count};
    else
      return {static_cast<float*>(tensors_[i].gradient), tensors_[i].count};
  }

  // f(floats, n) for blocks of a run of results, unscaled.
  template <class Function> void each_block(const gradient_type* from, std::size_t count, Function&& f) const {
    if constexpr (as_they_are) {
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
  bool finite(const gradient_type* from, std::size_t count) const {
    bool good = true;
    each_block(from, count, [&](const float* x, std::size_t n) { good &= all_finite(x, n); });
    return good;
  }

  std::size_t elements_of(const one& b) const {
    std::size_t n = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) n += tensors_[i].count;
    return n;
  }

  // What this rank owns of a bucket; where nobody does, equal blocks.
  std::vector<interval> owned_of(const one& b) const {
    const auto copy = [](std::span<const interval> s) { return std::vector<interval>(s.begin(), s.end()); };
    if constexpr (shards) {
      return copy(b.reduce->owned());
    } else {
      if (!holds && b.reduce && b.reduce->plan().halved()) return copy(b.reduce->plan().owned());
      const auto size = static_cast<std::size_t>(comm_.size()), rank = static_cast<std::size_t>(comm_.rank());
      return {balanced_block(elements_of(b), size, rank)};
    }
  }

  double squares_of(const one& b) const {
    double sum = 0.0;
    for (std::size_t k = b.first_piece; k < b.last_piece; ++k) {
      const piece& p = pieces_[k];
      if (!p.own) continue;
      each_block(result(p.tensor) + p.begin, p.count,
                 [&](const float* x, std::size_t n) { sum += detail::squares(x, n); });
    }
    return sum;
  }

  // The first element, if one tensor's memory follows the other's; else null.
  element* run_of(const one& b, void* tensor::* memory) const {
    element *start = nullptr, *end = nullptr;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      if (tensors_[i].count == 0) continue;
      element* const here = static_cast<element*>(tensors_[i].*memory);
      if (start && here != end) return nullptr;
      if (!start) start = here;
      end = here + tensors_[i].count;
    }
    return start;
  }

  encode_context context_of(std::size_t i) const {
    encode_context x = context_;
    if (x.weight_decay != 0.0f) x.parameter = parameters_[i];
    x.weight_decay *= decay_scales_.empty() ? 1.0f : decay_scales_[i];
    x.tensor = static_cast<std::uint32_t>(i);
    x.rank = comm_.rank();
    x.rows = tensors_[i].rows;
    return x;
  }

  bool sends_packet(std::size_t i) const {
    if constexpr (holds)
      return carrier_.sends(tensors_[i].count, context_of(i));
    else
      return false;
  }

  // What f(gradient, state, context) says of tensor i as a whole.
  template <class Function> decltype(auto) with_whole(std::size_t i, Function&& f) {
    float* state[slots + 1];
    held_->pointers(i, 0, state);
    return f(gradient(i), static_cast<float* const*>(state), context_of(i));
  }

  void open() {
    const std::vector<announcement>& announced = announce_(comm_, announcement_);
    weights_ = most_ = 0.0;
    any_joined_ = any_bad_ = false;
    all_joined_ = true;
    for (std::size_t r = 0; r < announced.size(); ++r) {
      const announcement& a = announced[r];
      const bool apart = a.exchange != announcement_.exchange || a.step != announcement_.step ||
                         (a.clock != announcement_.clock && !a.joined && !announcement_.joined);
      if (apart) {
        const auto where = [](const announcement& x) {
          return "exchange " + std::to_string(x.exchange) + ", step " + std::to_string(x.step) + ", local step " +
                 std::to_string(x.clock);
        };
        throw comm_error("data_parallel", comm_.rank(), static_cast<int>(r),
                         "this rank is in " + where(announcement_) + ", rank " + std::to_string(r) + " in " + where(a));
      }
      if (a.loss_scale != announcement_.loss_scale) {
        throw comm_error("data_parallel", comm_.rank(), static_cast<int>(r),
                         "this rank's loss scale is " + std::to_string(announcement_.loss_scale) + ", rank " +
                             std::to_string(r) + "'s is " + std::to_string(a.loss_scale));
      }
      if (announcement_.joined && !a.joined) context_.held_scale = a.held_scale;  // the same on all of these
      any_bad_ |= a.bad != 0;
      weights_ += a.samples;
      most_ = (std::max)(most_, a.samples);
      any_joined_ |= a.joined != 0;
      all_joined_ &= a.joined != 0;
    }
    // The weight of a rank is samples * ranks / sum. Encoders multiply by samples / most, at most 1, so that a 16-bit
    // wire isn't left by a mean that fits it; decoders by the rest.
    weight_ = most_ > 0.0 ? static_cast<float>(announcement_.samples / most_) : 0.0f;
    rest_ = most_ > 0.0 ? static_cast<float>(most_ * comm_.size() / weights_) : 1.0f;
  }

  void run(one& b, lane& l) {
    b.finite = true;
    if constexpr (as_they_are)
      average_as_they_are(b, l.comm);
    else
      run_floats(b, l);
  }

  void run_floats(one& b, lane& l) {
    std::size_t dense = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      const slice<float> g = gradient(i);
      if (of_gradients) widen(i, announcement_.loss_scale);
      if (weight_ == 0.0f) std::fill(g.begin(), g.end(), 0.0f);  // a rank without samples; its memory may hold anything
      factors_[i] = weight_ == 0.0f ? 1.0f : scale_of(plan_.compressor, g, weight_ * rest_, context_of(i));
      if (!sends_packet(i)) dense += g.count;
    }
    if (dense || !holds) average(b, dense, l.comm);
    if constexpr (has_fits_dense<carrier_type>) {
      for (std::size_t i = b.range.first; i < b.range.last; ++i) {
        b.finite &= sends_packet(i) ||
                    with_whole(i, [&](auto g, auto state, const auto& x) { return codec().fits_dense(g, state, x); });
      }
    }
    if constexpr (packets) prepare(b, l);
    if constexpr (reduces) sum_up(b, l.comm);
  }

  // Gradients of 16 bits: in place where they are one run, through a buffer elsewhere. The weight is at most 1, so no
  // finite element leaves the range.
  void average_as_they_are(one& b, counting<Comm>& comm) {
    const std::size_t count = elements_of(b);
    if (!b.reduce) b.reduce.emplace(plan_.topology, comm.rank(), comm.size(), count);
    elements_sent_ += count;
    element* const run = run_of(b, &tensor::gradient);
    if (!run) b.elements.resize(count);
    element* const start = run ? run : b.elements.data();
    std::size_t at = 0;
    for (std::size_t i = b.range.first; i < b.range.last; at += tensors_[i++].count) {
      const std::size_t n = tensors_[i].count;
      if (!run) std::copy_n(result(i), n, start + at);
      if (weight_ == 0.0f)
        std::fill_n(start + at, n, element(0.0f));
      else if (weight_ != 1.0f)
        multiply(start + at, n, weight_);
    }
    reduce(b, comm, start);
    at = 0;
    for (std::size_t i = b.range.first; !run && i < b.range.last; at += tensors_[i++].count)
      std::copy_n(start + at, tensors_[i].count, result(i));
    if constexpr (shards)
      b.squares = squares_of(b);
    else
      b.finite = finite(start, count);
  }
  static void multiply(element* x, std::size_t count, float factor) {
    float block[2048];
    for (std::size_t at = 0; at < count; at += std::size(block)) {
      const std::size_t n = (std::min)(count - at, std::size(block));
      convert_scaled(x + at, block, n, factor);
      convert(block, x + at, n);
    }
  }

  // The elementwise part: encode, all-reduce with mean or its first half, decode.
  void average(one& b, std::size_t count, counting<Comm>& comm) {
    if (!b.reduce || b.reduce->count() != count) b.reduce.emplace(plan_.topology, comm.rank(), comm.size(), count);
    elements_sent_ += count;
    bool in_place = std::is_same_v<wire, float>;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) in_place &= !sends_packet(i) || !tensors_[i].count;
    float* start = nullptr;
    if constexpr (widens)
      start = in_place ? gradient(b.range.first).data : nullptr;
    else if constexpr (!mixes)
      start = in_place ? run_of(b, &tensor::gradient) : nullptr;
    if (start) {
      for (std::size_t i = b.range.first; i < b.range.last; ++i) {
        const slice<float> g = gradient(i);
        if (factors_[i] != 1.0f) convert_scaled(g.data, g.data, g.count, factors_[i]);
      }
      reduce(b, comm, start);
      if constexpr (!shards) b.finite &= all_finite(start, count);
    } else if constexpr (std::is_same_v<codec_type, compressor_type>) {
      copy_through(b, last_of(plan_.compressor), count, comm);
    } else {
      copy_through(b, codec_type{}, count, comm);
    }
    if constexpr (shards) b.squares = squares_of(b);
  }

  void reduce(one& b, counting<Comm>& comm, void* elements) {
    const leaf l = leaf_of<wire>(mean{});
    if constexpr (shards)
      b.reduce->reduce_scatter(comm, elements, l);
    else
      (*b.reduce)(comm, elements, l);
  }

  template <class Codec> void copy_through(one& b, const Codec& codec, std::size_t count, counting<Comm>& comm) {
    b.elements.resize(count);
    std::size_t at = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      if (sends_packet(i)) continue;
      const slice<float> g = gradient(i);
      codec.encode(g, b.elements.data() + at, factors_[i] / rest_);
      at += g.count;
    }
    reduce(b, comm, b.elements.data());
    const auto decode = [&](slice<float> g, std::size_t from) {
      codec.decode(b.elements.data() + from, g);
      if (rest_ != 1.0f) convert_scaled(g.data, g.data, g.count, rest_);
    };
    if constexpr (shards) {
      for (std::size_t k = b.first_piece; k < b.last_piece; ++k) {
        const piece& p = pieces_[k];
        decode(gradient(p.tensor).subslice(p.begin, p.count), p.position);
      }
    } else {
      at = 0;
      for (std::size_t i = b.range.first; i < b.range.last; ++i) {
        if (sends_packet(i)) continue;
        const slice<float> g = gradient(i);
        decode(g, at);
        b.finite &= all_finite(g.data, g.count);
        at += g.count;
      }
    }
  }

  // The second half of a bucket whose optimizer is sharded: parameters.
  void gather(one& b, counting<Comm>& comm) {
    if (element* const start = run_of(b, &tensor::parameter)) {
      b.reduce->all_gather(comm, start);
      return;
    }
    const auto parameter = [&](std::size_t i) { return static_cast<element*>(tensors_[i].parameter); };
    b.parameters.resize(b.reduce->count());
    for (std::size_t k = b.first_piece; k < b.last_piece; ++k) {
      const piece& p = pieces_[k];
      std::copy_n(parameter(p.tensor) + p.begin, p.count, b.parameters.data() + p.position);
    }
    b.reduce->all_gather(comm, b.parameters.data());
    const element* from = b.parameters.data();
    for (std::size_t i = b.range.first; i < b.range.last; from += tensors_[i++].count) {
      std::copy_n(from, tensors_[i].count, parameter(i));
    }
  }

  // The packet part. Packets are of parts of tensors: of whole ones, or where held state is sharded of what a rank owns
  // of its group's gradient.

  const carrier_type& codec() const { return carrier_; }
  std::size_t rank() const { return static_cast<std::size_t>(comm_.rank()); }
  // Ranks that each compress a gradient of the same elements.
  int senders() const {
    if constexpr (shards_held)
      return plan_.topology.groups(comm_.size());
    else
      return comm_.size();
  }

  // Whether the compressor works after backward, in one pass.
  bool fuses() const {
    if constexpr (has_fused<carrier_type>)
      return codec().overlap == overlap::none;
    else
      return false;
  }

  void lay_out_held() {
    const auto extra = [&](std::size_t i, std::size_t n) -> std::size_t {
      if constexpr (reduces)
        return codec().extra(n, context_of(i));
      else if constexpr (has_extra<carrier_type>)
        return codec().extra(n);
      else
        return (void)i, (void)n, 0;
    };
    const auto all = static_cast<std::size_t>(comm_.size());
    std::vector<held_part> parts;
    for (one& b : buckets_) {
      const auto [first, last] = b.range;
      if constexpr (shards_held) {
        const auto size = [&](std::size_t i) { return sends_packet(i) ? tensors_[i].count : 0; };
        std::size_t n = 0;
        for (std::size_t i = first; i < last; ++i) n += size(i);
        b.parts.resize(all);
        for (std::size_t r = 0; r < all; ++r) {
          schedule s = plan_.topology.inside(static_cast<int>(r), comm_.size(), n);
          cut(s.owned(), first, last, size, [&](const piece& p) {
            if (p.own) b.parts[r].push_back(p);
          });
          if (r == rank()) b.inside = std::move(s);
        }
        b.inside_engine.prepare(comm_.rank(), b.inside, sizeof(float), b.inside.owned());
        b.sums.resize(n);
      }
      for (std::size_t i = first; i < last; ++i) {
        if (!shards_held || !sends_packet(i)) {
          parts.push_back({i, 0, tensors_[i].count, all, extra(i, tensors_[i].count)});
          continue;
        }
        for (const piece& p : b.parts[rank()]) {
          if (p.tensor == i)
            parts.push_back({i, p.begin, p.count, static_cast<std::size_t>(senders()), extra(i, p.count)});
        }
      }
    }
    held_.emplace(plan_.memory, static_cast<std::size_t>(slots), std::move(parts));
  }

  // f(part) for each packet of rank r, in order.
  template <class Function> void each_part(const one& b, std::size_t r, Function&& f) const {
    if constexpr (shards_held) {
      for (const piece& p : b.parts[r]) f(p);
    } else {
      std::size_t at = 0;
      for (std::size_t i = b.range.first; i < b.range.last; ++i) {
        if (!sends_packet(i)) continue;
        f(piece{.tensor = i, .count = tensors_[i].count, .position = at});
        at += tensors_[i].count;
      }
    }
  }

  // What the compressor is told of a part of this rank's: f(gradient, factor, state, context).
  template <class Function> decltype(auto) with(one& b, const piece& p, Function&& f) {
    float* state[slots + 1];
    held_->pointers(p.tensor, p.begin, state);
    encode_context x = context_of(p.tensor);
    if (!shards_held) return f(slice<const float>(gradient(p.tensor)), factors_[p.tensor], &state[0], x);
    if (x.parameter) x.parameter += p.begin;
    x.ranks = senders();
    const float share = static_cast<float>(x.ranks) / static_cast<float>(comm_.size());
    return f(slice<const float>{b.sums.data() + p.position, p.count}, share, &state[0], x);
  }

  // f(part, packet and what follows it) -> bytes of the packet, for each of rank r's, which begin at `bytes`.
  template <class Function> void each_packet(const one& b, std::size_t r, slice<const std::byte> bytes, Function&& f) {
    each_part(b, r, [&](const piece& p) {
      const std::size_t n = f(p, bytes);
      bytes = {bytes.data + n, bytes.count - n};
    });
  }
  // The same for each rank, in rank order.
  template <class Function> void each_packet(const one& b, Function&& f) {
    const std::byte* at = b.gathered.data();
    for (std::size_t r = 0; r < b.sizes.size(); at += b.sizes[r++]) each_packet(b, r, {at, b.sizes[r]}, f);
  }

  void sum_inside(one& b, counting<Comm>& comm) {
    std::size_t at = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      if (!sends_packet(i)) continue;
      convert_scaled(gradient(i).data, b.sums.data() + at, tensors_[i].count, factors_[i]);
      at += tensors_[i].count;
    }
    const leaf l = leaf_of<float>(sum{});
    const header h = begin_call(
        comm, on_topology({operation_kind::reduce_scatter, l.type, l.id, 0, 0, 1, b.sums.size()}, plan_.topology));
    b.inside_engine.run_prepared(comm, b.inside, 0, b.inside.rounds(), h, reinterpret_cast<std::byte*>(b.sums.data()),
                                 &l);
  }

  // During backward: encodes without touching state and hands packets around, or only looks whether it may later.
  void prepare(one& b, lane& l) {
    b.travelling = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) b.travelling += sends_packet(i) ? tensors_[i].count : 0;
    b.mine.clear();
    b.gathered.clear();
    b.sizes.clear();
    if (b.travelling == 0) return;
    if constexpr (shards_held) sum_inside(b, l.comm);
    if constexpr (has_fused<carrier_type>) {
      if (fuses()) {
        each_part(b, rank(), [&](const piece& p) {
          b.finite &= with(b, p, [&](auto... known) { return codec().fits(known...); });
        });
        return;
      }
    }
    each_part(b, rank(), [&](const piece& p) { with(b, p, [&](auto... known) { codec().encode(known..., b.mine); }); });
    exchange(b, l);
    if (!b.added.empty()) b.finite &= all_finite(b.added.data(), b.added.size());
    each_packet(b, [&](const piece&, slice<const std::byte> p) {
      b.finite &= !codec().flagged(p);
      return codec().measure(p);
    });
  }

  // After backward: if the step counts for all ranks, both halves in one pass.
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
  void run_late(one& b, lane& l) {
    if constexpr (has_fused<carrier_type>) {
      each_part(b, rank(),
                [&](const piece& p) { with(b, p, [&](auto... known) { codec().fused(known..., b.mine); }); });
      exchange(b, l);
    }
  }

  // Everybody's packets, gathered; or where that moves no less than a dense sum, such a sum of what is in them.
  void exchange(one& b, lane& l) {
    b.added.clear();
    if (b.travelling == 0) return;
    std::size_t total = 0, before = 0;
    for (const std::uint64_t n : l.tell_size(l.comm, b.mine.size())) {
      if (b.sizes.size() == rank()) before = total;
      b.sizes.push_back(static_cast<std::size_t>(n));
      total += static_cast<std::size_t>(n);
    }
    const slice<const std::byte> mine{b.mine.data(), b.mine.size()};
    if constexpr (has_elements<carrier_type>) {
      each_packet(b, rank(), mine, [&](const piece&, slice<const std::byte> p) {
        elements_sent_ += codec().elements(p);
        return codec().measure(p);
      });
    }
    // On a ring a rank sends on all packets but one, or of a dense sum 2 (P - 1) / P of the elements.
    const std::size_t all = b.sizes.size(), least = *std::min_element(b.sizes.begin(), b.sizes.end());
    if (all > 1 && (total - least) / (all - 1) * all >= 2 * sizeof(float) * b.travelling) return add_up(b, l, mine);
    b.gathered.resize(total);
    std::copy(mine.begin(), mine.end(), b.gathered.data() + before);
    all_gather(l.comm, gather_topology(), std::span<std::byte>(b.gathered), std::span<const std::size_t>(b.sizes));
  }

  void add_up(one& b, lane& l, slice<const std::byte> mine) {
    b.sizes.clear();
    b.added.assign(b.travelling, 0.0f);
    each_packet(b, rank(), mine, [&](const piece& p, slice<const std::byte> packet) {
      if (codec().flagged(packet)) b.added[p.position] = std::numeric_limits<float>::quiet_NaN();
      codec().decode_add(packet, {b.added.data() + p.position, p.count});
      return codec().measure(packet);
    });
    if (!b.add || b.add->count() != b.travelling)
      b.add.emplace(plan_.topology, comm_.rank(), comm_.size(), b.travelling);
    (*b.add)(l.comm, b.added.data(), leaf_of<float>(sum{}));
  }

  // Packets travel on the plan's topology where it can gather blocks of any size, else on a ring.
  auto gather_topology() const {
    if constexpr (has_all_gather_schedule<topology_type>)
      return plan_.topology;
    else
      return ring{};
  }

  // Sums that all ranks have of what the compressor sends, round after round, each with a flag at its end: not a number
  // where a rank's gradient isn't finite.
  void sum_up(one& b, counting<Comm>& comm) {
    constexpr int rounds = carrier_type::rounds;
    b.totals.assign(rounds, {});
    b.total_plans.resize(rounds);
    for (int round = 0; round < rounds; ++round) {
      std::vector<float>& total = b.totals[static_cast<std::size_t>(round)];
      std::size_t n = 0;
      for (std::size_t i = b.range.first; i < b.range.last; ++i)
        n += sends_packet(i) ? codec().sum_count(round, tensors_[i].count, context_of(i)) : 0;
      if (n == 0) return;
      total.assign(n + 1, 0.0f);
      each_total(b, [&](std::size_t i, float* const* sums) {
        float* state[slots + 1];
        held_->pointers(i, 0, state);
        if (!codec().send(round, gradient(i), factors_[i], state, context_of(i), sums))
          total[n] = std::numeric_limits<float>::quiet_NaN();
      });
      auto& plan = b.total_plans[static_cast<std::size_t>(round)];
      if (!plan || plan->count() != n + 1) plan.emplace(plan_.topology, comm_.rank(), comm_.size(), n + 1);
      (*plan)(comm, total.data(), leaf_of<float>(sum{}));
      b.finite &= all_finite(total.data(), total.size());
      elements_sent_ += n;
    }
  }
  // f(tensor, where its sums are, round by round)
  template <class Function> void each_total(one& b, Function&& f) {
    float* sums[static_cast<std::size_t>(carrier_type::rounds)];
    std::size_t at[static_cast<std::size_t>(carrier_type::rounds)] = {};
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      if (!sends_packet(i)) continue;
      for (std::size_t r = 0; r < b.totals.size(); ++r) {
        sums[r] = b.totals[r].data() + at[r];
        at[r] += b.totals[r].empty() ? 0 : codec().sum_count(static_cast<int>(r), tensors_[i].count, context_of(i));
      }
      f(i, static_cast<float* const*>(sums));
    }
  }

  void settle(one& b) {
    if constexpr (reduces) {
      each_total(b, [&](std::size_t i, float* const* sums) {
        float* state[slots + 1];
        held_->pointers(i, 0, state);
        codec().commit(gradient(i), factors_[i], state, context_of(i), sums);
      });
      for (std::size_t i = b.range.first; i < b.range.last; ++i) {
        if (!sends_packet(i)) release(i);
      }
    } else {
      settle_packets(b);
    }
  }

  // A tensor that travelled dense takes what was held of it when it was compressed.
  void release(std::size_t i) {
    if constexpr (has_release<carrier_type>) {
      if (held_->strays())
        with_whole(i, [&](auto mean, auto state, const auto& x) { codec().release(mean, state, x); });
    }
  }

  void settle_packets(one& b) {
    if (!fuses()) {  // own state first: it reads the gradient
      each_packet(b, rank(), {b.mine.data(), b.mine.size()}, [&](const piece& p, slice<const std::byte> packet) {
        const std::size_t n = codec().measure(packet);
        with(b, p, [&](auto... known) { codec().commit(known..., slice<const std::byte>{packet.data, n}); });
        return n;
      });
    }
    const float* from = b.added.data();
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      const slice<float> g = gradient(i);
      if (!sends_packet(i)) {
        with_whole(i, [&](auto mean, auto state, const auto& x) { codec().correct(mean, state, x); });
        release(i);
      } else if (b.added.empty()) {
        std::fill(g.begin(), g.end(), 0.0f);
      } else {
        std::copy_n(from, g.count, g.data);
        from += g.count;
      }
    }
    each_packet(b, [&](const piece& p, slice<const std::byte> packet) {
      codec().decode_add(packet, gradient(p.tensor).subslice(p.begin, p.count));
      return codec().measure(packet);
    });
  }

  Strategy plan_;
  carrier_type carrier_;
  counting<Comm> comm_;
  std::vector<tensor> tensors_;
  std::size_t total_ = 0;
  std::vector<std::size_t> offsets_;
  std::optional<held_type> held_;
  buffer<float, memory_type> wide_;  // gradients in float, where those of the model aren't
  std::vector<one> buckets_;
  std::vector<piece> pieces_;
  std::vector<float> factors_, decay_scales_;
  std::vector<std::size_t> bucket_of_;  // of each tensor
  std::size_t next_ = 0;
  bool late_ = false;  // packets are to be made after backward
  announcement announcement_;
  encode_context context_;
  tell_plan<announcement, counting<Comm>> announce_;
  tell_plan<double, counting<Comm>> tell_number_;
  std::vector<counting<Comm>> duplicates_;
  std::vector<lane> lanes_;
  double weights_ = 0.0, most_ = 0.0;  // sum and maximum of all ranks' samples
  float weight_ = 1.0f, rest_ = 1.0f;
  bool any_joined_ = false, all_joined_ = false, any_bad_ = false;
  std::vector<const float*> parameters_;         // in float
  std::atomic<std::uint64_t> elements_sent_{0};  // read while jobs run
  struct job_runner {
    averager* self;
    void operator()(std::size_t job, std::size_t lane) const {
      auto& all = self->buckets_;
      if (job == 0)
        self->open();
      else if (job <= all.size())
        self->run(all[job - 1], self->lanes_[lane]);
      else if constexpr (shards)
        self->gather(all[job - 1 - all.size()], self->lanes_[lane].comm);
      else if constexpr (packets)
        self->run_late(all[job - 1 - all.size()], self->lanes_[lane]);
    }
  };
  worker<job_runner> work_;  // last: its thread uses everything above
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

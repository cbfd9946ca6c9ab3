// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/gather.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/memory/buffer.hpp>
#include <heddle/trainer/detail/worker.hpp>
#include <heddle/trainer/strategy.hpp>
#include <heddle/trainer/tensor.hpp>

#include <atomic>
#include <memory>
#include <optional>

namespace heddle {
inline namespace v0 {
namespace detail {

// What each rank tells the others when an exchange opens.
struct announcement {
  std::uint64_t exchange = 0;  // number of the exchange: the same on all ranks
  std::uint64_t step = 0;      // what compressors count: the same on all ranks
  std::uint64_t clock = 0;     // what the mode counts: the same on all ranks that have not joined
  double samples = 0.0;        // weight of this rank's contribution
  std::uint32_t joined = 0;    // has no more batches
  float lr = 0.0f;             // for those who have joined
};

// Tells a small record to all ranks and gives theirs, in rank order. Keeps what it prepared, as all_reduce_plan does.
template <class Record, class Comm, class Operation = operation> class tell_plan {
  static_assert(std::is_trivially_copyable_v<Record>);

 public:
  const std::vector<Record>& operator()(Comm& comm, const Record& mine) {
    if (all_.empty()) {
      all_.resize(static_cast<std::size_t>(comm.size()));
      schedule_ = direct{}.all_gather(comm.rank(), comm.size(), equal_blocks(comm.size(), 1));
      executor_.prepare(comm.rank(), schedule_, sizeof(Record));
    }
    all_[static_cast<std::size_t>(comm.rank())] = mine;
    const header h = begin_call(comm, {operation_kind::control, dtype::other, 0, 0, 0, 1, sizeof(Record)});
    executor_.run_prepared(comm, schedule_, 0, schedule_.rounds(), h, reinterpret_cast<std::byte*>(all_.data()),
                           nullptr);
    return all_;
  }

  // What the last call gave.
  const std::vector<Record>& all() const noexcept { return all_; }

 private:
  std::vector<Record> all_;
  schedule schedule_;
  basic_executor<Operation> executor_;
};

// The same, once.
template <class Record, class Comm> std::vector<Record> tell_all(Comm& comm, const Record& mine) {
  return tell_plan<Record, Comm>{}(comm, mine);
}

// Something that every rank does and that counts only if all of them succeed: one rank's failure is everybody's, and
// nobody waits for it.
template <class Comm> class together {
 public:
  together(Comm& comm, const char* what) : comm_(comm), what_(what) {}

  // Runs f here and on all ranks; whether it succeeded everywhere.
  template <class Function> bool succeed(Function&& f) {
    try {
      f();
    } catch (const std::exception& e) {
      failure_ = *e.what() ? e.what() : "unknown failure";
    }
    const auto failed = tell_all(comm_, static_cast<std::uint32_t>(!failure_.empty()));
    first_ = std::find(failed.begin(), failed.end(), 1u) - failed.begin();
    return first_ == comm_.size();
  }

  // Throws file_error if it did not.
  void check() const {
    if (!failure_.empty()) throw file_error(failure_);
    if (first_ == comm_.size()) return;
    throw file_error(std::string("heddle::data_parallel::") + what_ + ": rank " + std::to_string(first_) +
                     " failed; nothing has changed here");
  }

 private:
  Comm& comm_;
  const char* what_;
  std::string failure_;
  std::ptrdiff_t first_ = 0;
};

// Averages the vectors in the tensors' gradient memory over all ranks, bucket by bucket, on threads of its own. The
// result is in the same memory: the weighted mean, or for packets the sum of what was sent. State of a packet
// compressor moves only in settle(), after every rank knows whether the step counts.
template <class Strategy, class Comm> class averager {
 public:
  using compressor_type = last_part<decltype(Strategy::compressor)>;
  using topology_type = std::remove_cvref_t<decltype(Strategy::topology)>;
  using memory_type = std::remove_cvref_t<decltype(Strategy::memory)>;
  static constexpr bool packets = packet_compressor<compressor_type>;
  using wire = typename std::conditional_t<packets, none, compressor_type>::wire;
  static constexpr int slots = [] {
    if constexpr (packets)
      return compressor_type::slots;
    else
      return 0;
  }();

  averager(const Strategy& plan, Comm& comm, const std::vector<tensor>& tensors)
      : plan_(plan),
        comm_(comm.duplicate()),
        tensors_(tensors),
        state_(plan.memory, fill_offsets() * slots),
        work_(job_runner{this}, plan.lanes, comm.size() > 1 && threads(comm)) {
    if (slots) std::fill(state_.begin(), state_.end(), 0.0f);
    std::vector<std::size_t> bytes;
    for (const tensor& t : tensors_) bytes.push_back(t.count * sizeof(float));
    for (const bucket b : plan_.buckets.plan(bytes)) buckets_.emplace_back(b);
    factors_.assign(tensors_.size(), 1.0f);
    bucket_of_.resize(tensors_.size());
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      for (std::size_t i = buckets_[b].range.first; i < buckets_[b].range.last; ++i) bucket_of_[i] = b;
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
  float* state(std::size_t tensor, int slot) noexcept {
    return state_.data() + static_cast<std::size_t>(slot) * total_ + offsets_[tensor];
  }
  std::size_t state_bytes() const noexcept { return state_.bytes(); }
  std::uint64_t elements_sent() const noexcept { return elements_sent_; }
  double busy_seconds() const { return work_.busy_seconds(); }
  double exposed_seconds() const { return work_.exposed_seconds(); }

  // Begins an exchange: what this rank announces and what transforms and compressors are told, tensor by tensor.
  void begin(const announcement& mine, const encode_context& context, std::span<const float> decay_scales) {
    announcement_ = mine;
    context_ = context;
    decay_scales_.assign(decay_scales.begin(), decay_scales.end());
    for (one& b : buckets_) b.missing = b.range.last - b.range.first;
    next_ = 0;
    work_.push(0);
  }

  // Tensor i is final. Buckets leave in registered order, whichever is complete first.
  void ready(std::size_t i) {
    --buckets_[bucket_of_[i]].missing;
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) work_.push(++next_);
  }

  // Returns when everything that was pushed is done; throws what the exchange threw.
  void wait() { work_.wait(); }

  // After wait(): whether anybody had samples; and whether, besides, every value that arrived is finite.
  bool counted() const noexcept { return weights_ > 0.0; }
  bool counts() const noexcept {
    bool good = weights_ > 0.0;
    for (const one& b : buckets_) good &= b.finite;
    return good;
  }

  // Ends the exchange. If `take`, states move and gradients become what the update rule is to apply.
  void settle(bool take) {
    if constexpr (packets) {
      if (!take) return;
      for (one& b : buckets_) settle(b);
    }
  }

 private:
  struct one {
    explicit one(bucket b) : range(b) {}
    bucket range;
    std::size_t missing = 0;
    bool finite = true;
    std::optional<all_reduce_plan<topology_type>> reduce;
    std::vector<wire> elements;
    std::vector<std::byte> gathered;
    std::vector<std::size_t> sizes;  // bytes of each rank's packets
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

  std::size_t fill_offsets() {
    for (const tensor& t : tensors_) {
      offsets_.push_back(total_);
      total_ += t.count;
    }
    return total_;
  }

  slice<float> gradient(std::size_t i) const { return {static_cast<float*>(tensors_[i].gradient), tensors_[i].count}; }

  encode_context context_of(std::size_t i) const {
    encode_context x = context_;
    if (x.weight_decay != 0.0f) x.parameter = static_cast<const float*>(tensors_[i].parameter);
    x.weight_decay *= decay_scales_.empty() ? 1.0f : decay_scales_[i];
    return x;
  }

  bool sends_packet(std::size_t i) const {
    if constexpr (packets)
      return last_of(plan_.compressor).sends(tensors_[i].count, context_);
    else
      return false;
  }

  void open() {
    const std::vector<announcement>& announced = announce_(comm_, announcement_);
    weights_ = most_ = 0.0;
    any_joined_ = false;
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
    std::size_t dense = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      const slice<float> g = gradient(i);
      if (weight_ == 0.0f) std::fill(g.begin(), g.end(), 0.0f);  // a rank without samples; its memory may hold anything
      factors_[i] = weight_ == 0.0f ? 1.0f : scale_of(plan_.compressor, g, weight_ * rest_, context_of(i));
      if (!sends_packet(i)) dense += g.count;
    }
    b.finite = true;
    if (dense || !packets) average(b, dense, l.comm);
    if constexpr (packets) gather(b, l);
  }

  // The elementwise part: encode, all-reduce with mean, decode.
  void average(one& b, std::size_t count, counting<Comm>& comm) {
    if (!b.reduce || b.reduce->count() != count) b.reduce.emplace(plan_.topology, comm.rank(), comm.size(), count);
    const leaf l = leaf_of<wire>(mean{});
    bool contiguous = std::is_same_v<wire, float>;
    const float* expected = nullptr;
    float* start = nullptr;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      const slice<float> g = gradient(i);
      if (g.empty()) continue;
      contiguous &= !sends_packet(i) && (!expected || expected == g.data);
      if (!start) start = g.data;
      expected = g.end();
    }
    elements_sent_ += count;
    if (contiguous) {  // in place, no copy
      for (std::size_t i = b.range.first; i < b.range.last; ++i) {
        const slice<float> g = gradient(i);
        if (factors_[i] != 1.0f) convert_scaled(g.data, g.data, g.count, factors_[i]);
      }
      (*b.reduce)(comm, start, l);
      b.finite &= all_finite(start, count);
      return;
    }
    if constexpr (packets) {
      copy_through(b, none{}, l, count, comm);
    } else {
      copy_through(b, last_of(plan_.compressor), l, count, comm);
    }
  }

  template <class Codec>
  void copy_through(one& b, const Codec& codec, const leaf& l, std::size_t count, counting<Comm>& comm) {
    b.elements.resize(count);
    std::size_t at = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      if (sends_packet(i)) continue;
      const slice<float> g = gradient(i);
      codec.encode(g, b.elements.data() + at, factors_[i] / rest_);
      at += g.count;
    }
    (*b.reduce)(comm, b.elements.data(), l);
    at = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      if (sends_packet(i)) continue;
      const slice<float> g = gradient(i);
      codec.decode(b.elements.data() + at, g);
      if (rest_ != 1.0f) convert_scaled(g.data, g.data, g.count, rest_);
      b.finite &= all_finite(g.data, g.count);
      at += g.count;
    }
  }

  // The packet part: encode without touching state, gather everybody's packets; settle() adds them up.
  void gather(one& b, lane& l) {
    const auto& codec = last_of(plan_.compressor);
    std::vector<std::byte> mine;
    std::size_t packets_here = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      if (!sends_packet(i)) continue;
      ++packets_here;
      float* state_of[slots > 0 ? slots : 1];
      for (int k = 0; k < slots; ++k) state_of[k] = state(i, k);
      codec.encode(gradient(i), factors_[i], state_of, context_of(i), mine);
    }
    b.gathered.clear();
    b.sizes.clear();
    if (packets_here == 0) return;
    for (const std::uint64_t n : l.tell_size(l.comm, mine.size())) b.sizes.push_back(static_cast<std::size_t>(n));
    std::size_t total_bytes = 0, before = 0;
    for (std::size_t r = 0; r < b.sizes.size(); ++r) {
      if (r == static_cast<std::size_t>(l.comm.rank())) before = total_bytes;
      total_bytes += b.sizes[r];
    }
    b.gathered.resize(total_bytes);
    std::memcpy(b.gathered.data() + before, mine.data(), mine.size());
    all_gather(l.comm, gather_topology(), std::span<std::byte>(b.gathered), std::span<const std::size_t>(b.sizes));
    walk(b, [&](std::size_t, slice<const std::byte> p, int) {
      b.finite &= !codec.flagged(p);
      return codec.measure(p);
    });
    elements_sent_ += (mine.size() - 8 * packets_here) / 8;
  }

  // Packets travel on the plan's topology where it can gather blocks of any size, else on a ring.
  auto gather_topology() const {
    if constexpr (has_all_gather_schedule<topology_type>)
      return plan_.topology;
    else
      return ring{};
  }

  // f(tensor, packet and what follows it, rank) -> bytes of the packet, for each tensor and rank, in rank order.
  template <class Function> void walk(one& b, Function&& f) {
    std::size_t at = 0;
    for (std::size_t r = 0; r < b.sizes.size(); ++r) {
      std::size_t p = at;
      for (std::size_t i = b.range.first; i < b.range.last; ++i) {
        if (sends_packet(i))
          p += f(i, slice<const std::byte>{b.gathered.data() + p, at + b.sizes[r] - p}, static_cast<int>(r));
      }
      at += b.sizes[r];
    }
  }

  void settle(one& b) {
    const auto& codec = last_of(plan_.compressor);
    float* state_of[slots > 0 ? slots : 1];
    const auto states = [&](std::size_t i) {
      for (int k = 0; k < slots; ++k) state_of[k] = state(i, k);
      return state_of;
    };
    walk(b, [&](std::size_t i, slice<const std::byte> p, int r) {  // own state first: it reads the gradient
      if (r == comm_.rank()) codec.commit(gradient(i), factors_[i], states(i), context_of(i), p);
      return codec.measure(p);
    });
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      const slice<float> g = gradient(i);
      if (sends_packet(i))
        std::fill(g.begin(), g.end(), 0.0f);
      else
        codec.correct(g, states(i), context_of(i));
    }
    walk(b, [&](std::size_t i, slice<const std::byte> p, int) { return codec.decode_add(p, gradient(i)); });
  }

  Strategy plan_;
  counting<Comm> comm_;
  std::vector<tensor> tensors_;
  std::size_t total_ = 0;
  std::vector<std::size_t> offsets_;
  buffer<float, memory_type> state_;
  std::vector<one> buckets_;
  std::vector<float> factors_, decay_scales_;
  std::vector<std::size_t> bucket_of_;  // of each tensor
  std::size_t next_ = 0;
  announcement announcement_;
  encode_context context_;
  tell_plan<announcement, counting<Comm>> announce_;
  std::vector<counting<Comm>> duplicates_;
  std::vector<lane> lanes_;
  double weights_ = 0.0, most_ = 0.0;  // sum and maximum of all ranks' samples
  float weight_ = 1.0f, rest_ = 1.0f;
  bool any_joined_ = false, all_joined_ = false;
  std::atomic<std::uint64_t> elements_sent_{0};  // read while jobs run
  struct job_runner {
    averager* self;
    void operator()(std::size_t job, std::size_t lane) const {
      job == 0 ? self->open() : self->run(self->buckets_[job - 1], self->lanes_[lane]);
    }
  };
  worker<job_runner> work_;  // last: its thread uses everything above
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

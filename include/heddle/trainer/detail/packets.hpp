// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/detail/pieces.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/trainer/detail/exchanged.hpp>
#include <heddle/trainer/detail/tell.hpp>

#include <limits>

namespace heddle {
inline namespace v0 {
namespace detail {

// The exchange of packets, bucket by bucket. Packets are of parts of tensors: of whole ones, or where held state is
// sharded of what a rank owns of its group's gradient.
template <class Strategy, class Comm> class packet_exchange {
  using kind = exchange_kind<Strategy>;
  using piece = typename kind::piece;
  using topology_type = typename kind::topology_type;
  using carrier_type = typename kind::carrier_type;
  static constexpr bool shards_held = kind::shards_held;

 public:
  packet_exchange(exchanged<Strategy>& all, const std::vector<bucket>& buckets) : all_(all) {
    typename kind::template list<held_part> parts;
    for (const bucket& range : buckets) {
      one& b = buckets_.emplace_back();
      b.range = range;
      if constexpr (shards_held) lay_out_shards(b);
      for (std::size_t i = range.first; i < range.last; ++i) {
        if constexpr (shards_held) {
          if (all_.sends(i)) {
            for (const piece& p : b.parts[rank()]) {
              if (p.tensor == i)
                parts.push_back({i, p.begin, p.count, static_cast<std::size_t>(senders()), extra(p.count)});
            }
            continue;
          }
        }
        parts.push_back({i, 0, all_.count(i), static_cast<std::size_t>(all_.ranks()), extra(all_.count(i))});
      }
    }
    all_.hold(std::move(parts));
  }

  // Whether the compressor works after backward, in one pass.
  bool late() const {
    if constexpr (has_fused<carrier_type>)
      return codec().overlap == overlap::none;
    else
      return false;
  }

  // During backward: encodes without touching state and hands packets around, or only looks whether it may later.
  // Whether everything is finite.
  bool run(std::size_t bucket, counting<Comm>& comm) {
    one& b = buckets_[bucket];
    b.travelling = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) b.travelling += all_.sends(i) ? all_.count(i) : 0;
    b.mine.clear();
    b.gathered.clear();
    b.sizes.clear();
    if (b.travelling == 0) return true;
    if constexpr (shards_held) sum_inside(b, comm);
    bool finite = true;
    if constexpr (has_fused<carrier_type>) {
      if (late()) {
        each_part(b, rank(),
                  [&](const piece& p) { finite &= with(b, p, [&](auto... known) { return codec().fits(known...); }); });
        return finite;
      }
    }
    each_part(b, rank(), [&](const piece& p) { with(b, p, [&](auto... known) { codec().encode(known..., b.mine); }); });
    exchange(b, comm);
    if (!b.added.empty()) finite &= all_finite(b.added.data(), b.added.size());
    each_packet(b, [&](const piece&, slice<const std::byte> p) {
      finite &= !codec().flagged(p);
      return codec().measure(p);
    });
    return finite;
  }

  // After backward, if the step counts for all ranks: both halves in one pass.
  void run_late(std::size_t bucket, counting<Comm>& comm) {
    if constexpr (has_fused<carrier_type>) {
      one& b = buckets_[bucket];
      each_part(b, rank(),
                [&](const piece& p) { with(b, p, [&](auto... known) { codec().fused(known..., b.mine); }); });
      exchange(b, comm);
    }
  }

  // Whether tensors that travelled dense keep their mean in settle(), and are to be moved by step_dense().
  bool steps_dense() const {
    if constexpr (kind::steps_dense)
      return !all_.held()->strays();
    else
      return false;
  }

  void settle(std::size_t bucket) {
    one& b = buckets_[bucket];
    if (!late()) {  // own state first: it reads the gradient
      each_packet(b, rank(), {b.mine.data(), b.mine.size()}, [&](const piece& p, slice<const std::byte> packet) {
        const std::size_t n = codec().measure(packet);
        with(b, p, [&](auto... known) { codec().commit(known..., slice<const std::byte>{packet.data, n}); });
        return n;
      });
    }
    const float* from = b.added.data();
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      const slice<float> g = all_.gradient(i);
      if (!all_.sends(i)) {
        if (steps_dense()) continue;
        all_.with_whole(i, [&](auto mean, auto state, const auto& x) { codec().correct(mean, state, x); });
        all_.release(i);
      } else if (b.added.empty()) {
        std::fill(g.begin(), g.end(), 0.0f);
      } else {
        std::copy_n(from, g.count, g.data);
        from += g.count;
      }
    }
    each_packet(b, [&](const piece& p, slice<const std::byte> packet) {
      codec().decode_add(packet, all_.gradient(p.tensor).subslice(p.begin, p.count));
      return codec().measure(packet);
    });
  }

 private:
  struct one {
    bucket range;
    std::size_t travelling = 0;                       // elements of tensors that go as packets in this step
    std::vector<std::vector<piece>> parts;            // with shards_held what each rank's packets are of
    basic_schedule<typename kind::operation> inside;  // and how gradients are summed inside a group
    basic_executor<typename kind::operation> inside_engine;
    std::vector<float> sums;          // what that gives
    std::vector<std::byte> mine;      // this rank's packets, one after the other
    std::vector<std::byte> gathered;  // everybody's
    std::vector<std::size_t> sizes;   // bytes of each rank's packets
    std::vector<float> added;         // what is in all packets, where they travelled as one dense sum
    tell_plan<std::uint64_t, counting<Comm>> tell_size{};
    std::optional<all_reduce_plan<topology_type>> add{};
  };

  const carrier_type& codec() const noexcept { return all_.carrier(); }
  std::size_t rank() const noexcept { return static_cast<std::size_t>(all_.rank()); }
  // Ranks that each compress a gradient of the same elements.
  int senders() const {
    if constexpr (shards_held)
      return all_.plan().topology.groups(all_.ranks());
    else
      return all_.ranks();
  }
  std::size_t extra(std::size_t n) const {
    if constexpr (has_extra<carrier_type>)
      return codec().extra(n);
    else
      return (void)n, 0;
  }

  void lay_out_shards(one& b) {
    const std::size_t first = b.range.first, last = b.range.last;
    const auto size = [&](std::size_t i) { return all_.sends(i) ? all_.count(i) : 0; };
    std::size_t n = 0;
    for (std::size_t i = first; i < last; ++i) n += size(i);
    b.parts.resize(static_cast<std::size_t>(all_.ranks()));
    for (std::size_t r = 0; r < b.parts.size(); ++r) {
      auto s = all_.plan().topology.inside(static_cast<int>(r), all_.ranks(), n);
      cut(s.owned(), first, last, size, [&](const piece& p) {
        if (p.own) b.parts[r].push_back(p);
      });
      if (r == rank()) b.inside = std::move(s);
    }
    b.inside_engine.prepare(all_.rank(), b.inside, sizeof(float), b.inside.owned());
    b.sums.resize(n);
  }

  // f(part) for each packet of rank r, in order.
  template <class Function> void each_part(const one& b, std::size_t r, Function&& f) const {
    if constexpr (shards_held) {
      for (const piece& p : b.parts[r]) f(p);
    } else {
      std::size_t at = 0;
      for (std::size_t i = b.range.first; i < b.range.last; ++i) {
        if (!all_.sends(i)) continue;
        f(piece{.tensor = i, .count = all_.count(i), .position = at});
        at += all_.count(i);
      }
    }
  }

  // What the compressor is told of a part of this rank's: f(gradient, factor, state, context).
  template <class Function> decltype(auto) with(one& b, const piece& p, Function&& f) {
    float* state[kind::slots + 1];
    all_.held()->pointers(p.tensor, p.begin, state);
    encode_context x = all_.context_of(p.tensor);
    if (!shards_held) return f(slice<const float>(all_.gradient(p.tensor)), all_.factor(p.tensor), &state[0], x);
    if (x.parameter) x.parameter += p.begin;
    x.ranks = senders();
    const float share = static_cast<float>(x.ranks) / static_cast<float>(all_.ranks());
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
      if (!all_.sends(i)) continue;
      convert_scaled(all_.gradient(i).data, b.sums.data() + at, all_.count(i), all_.factor(i));
      at += all_.count(i);
    }
    const leaf l = leaf_of<float>(sum{});
    const header h = begin_call(
        comm,
        on_topology({operation_kind::reduce_scatter, l.type, l.id, 0, 0, 1, b.sums.size()}, all_.plan().topology));
    b.inside_engine.run_prepared(comm, b.inside, 0, b.inside.rounds(), h, reinterpret_cast<std::byte*>(b.sums.data()),
                                 &l);
  }

  // Everybody's packets, gathered; or where that moves no less than a dense sum, such a sum of what is in them.
  void exchange(one& b, counting<Comm>& comm) {
    b.added.clear();
    if (b.travelling == 0) return;
    std::size_t total = 0, before = 0;
    for (const std::uint64_t n : b.tell_size(comm, b.mine.size())) {
      if (b.sizes.size() == rank()) before = total;
      b.sizes.push_back(static_cast<std::size_t>(n));
      total += static_cast<std::size_t>(n);
    }
    const slice<const std::byte> mine{b.mine.data(), b.mine.size()};
    if constexpr (has_elements<carrier_type>) {
      each_packet(b, rank(), mine, [&](const piece&, slice<const std::byte> p) {
        all_.count_sent(codec().elements(p));
        return codec().measure(p);
      });
    }
    // On a ring a rank sends on all packets but one, or of a dense sum 2 (P - 1) / P of the elements.
    const std::size_t all = b.sizes.size(), least = *std::min_element(b.sizes.begin(), b.sizes.end());
    if (all > 1 && (total - least) / (all - 1) * all >= 2 * sizeof(float) * b.travelling) return add_up(b, comm, mine);
    b.gathered.resize(total);
    std::copy(mine.begin(), mine.end(), b.gathered.data() + before);
    all_gather(comm, gather_topology(), std::span<std::byte>(b.gathered), std::span<const std::size_t>(b.sizes));
  }

  void add_up(one& b, counting<Comm>& comm, slice<const std::byte> mine) {
    b.sizes.clear();
    b.added.assign(b.travelling, 0.0f);
    each_packet(b, rank(), mine, [&](const piece& p, slice<const std::byte> packet) {
      if (codec().flagged(packet)) b.added[p.position] = std::numeric_limits<float>::quiet_NaN();
      codec().decode_add(packet, {b.added.data() + p.position, p.count});
      return codec().measure(packet);
    });
    if (!b.add || b.add->count() != b.travelling)
      b.add.emplace(all_.plan().topology, all_.rank(), all_.ranks(), b.travelling);
    (*b.add)(comm, b.added.data(), leaf_of<float>(sum{}));
  }

  // Packets travel on the plan's topology where it can gather blocks of any size, else on a ring.
  auto gather_topology() const {
    if constexpr (has_all_gather_schedule<topology_type>)
      return all_.plan().topology;
    else
      return ring{};
  }

  exchanged<Strategy>& all_;
  std::vector<one> buckets_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

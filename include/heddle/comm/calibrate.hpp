// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/concept.hpp>
#include <heddle/comm/links.hpp>
#include <heddle/core/reduction.hpp>

#include <algorithm>
#include <cstring>
#include <vector>

namespace heddle {
inline namespace v0 {

namespace detail {
// Measures with one communicator; every rank makes the same calls. The times are rank 0's.
template <class Clock, class Comm, class Byte = std::byte> class stopwatch {
 public:
  static constexpr std::size_t large = std::size_t{1} << 20, asked = large / 8;

  explicit stopwatch(Comm& comm) : comm_(comm), from_(2 * large), to_(2 * large) { head_ = begin_call(comm, head_); }

  // Median seconds of a round in which this rank exchanges `bytes` with each of the peers; and of the fastest one.
  double exchange(const std::vector<int>& peers, std::size_t bytes, int times) {
    return seconds(peers, bytes, times, false)[static_cast<std::size_t>(times) / 2];
  }
  double fastest(const std::vector<int>& peers, std::size_t bytes, int times) {
    return seconds(peers, bytes, times, false).front();
  }

  // How much longer a round takes in which a call begins.
  double ask(const std::vector<int>& peers) {
    const std::vector<double> again = seconds(peers, asked, 31, false), first = seconds(peers, asked, 31, true);
    return (std::max)(0.0, first.front() - again.front());  // of the fastest: the difference is small
  }

  // Median seconds of reducing `large` bytes into a buffer.
  double reduce() {
    const leaf l = leaf_of<float>(sum{});
    const operand both[] = {{from_.data(), 0}, {to_.data(), 0}};
    return sorted(5, [&](int) { l.reduce(l.context, both, 2, to_.data(), large / l.bytes, 0, 1.0); })[2];
  }

  // Rank 0's value on every rank.
  template <class Value> void share(Value& v) {
    ++head_.count;
    std::vector<outgoing> out;
    std::vector<incoming> in;
    for (int r = 1; r < comm_.size() && comm_.rank() == 0; ++r) out.push_back({r, &v, sizeof v, 1});
    if (comm_.rank()) in.push_back({0, &v, sizeof v});
    comm_.exchange(head_, std::span<const outgoing>(out.data(), out.size()),
                   std::span<const incoming>(in.data(), in.size()), [](std::span<const arrival>) {});
  }

 private:
  // Seconds of rounds, the shortest first. All are of one call, or each begins one.
  std::vector<double> seconds(const std::vector<int>& peers, std::size_t bytes, int times, bool begins) {
    meet();
    header h = head_;
    head_.count += static_cast<std::uint64_t>(begins ? times + 2 : 1);  // both sides count alike
    if (peers.empty()) return std::vector<double>(static_cast<std::size_t>(times));
    std::vector<outgoing> out;
    std::vector<incoming> in;
    for (std::size_t i = 0; i < peers.size(); ++i) {
      out.push_back({peers[i], from_.data() + i * large, bytes, 1});
      in.push_back({peers[i], to_.data() + i * large, bytes});
    }
    return sorted(times, [&](int i) {
      h.count += begins || i == 0;
      h.round = static_cast<std::uint8_t>(i);
      comm_.exchange(h, std::span<const outgoing>(out.data(), out.size()),
                     std::span<const incoming>(in.data(), in.size()), [](std::span<const arrival>) {});
    });
  }

  // Waits for all ranks: what pairs measure at the same time shall begin at the same time.
  void meet() {
    header h = head_;
    h.count = ++head_.count;
    const int rank = comm_.rank(), size = comm_.size();
    for (int reach = 1; reach < size; reach *= 2, ++h.round) {
      const outgoing out{(rank + reach) % size, from_.data(), 1, 1};
      const incoming in{(rank - reach + size) % size, to_.data(), 1};
      comm_.exchange(h, std::span<const outgoing>(&out, 1), std::span<const incoming>(&in, 1),
                     [](std::span<const arrival>) {});
    }
  }

  template <class Function> static std::vector<double> sorted(int times, Function&& f) {
    std::vector<double> all;
    for (int i = 0; i < times + 2; ++i) {
      const auto start = Clock::now();
      f(i);
      const double s = std::chrono::duration<double>(Clock::now() - start).count();
      if (i > 1) all.push_back(s);  // the first two warm up
    }
    std::sort(all.begin(), all.end());
    return all;
  }

  Comm& comm_;
  header head_{};
  std::vector<Byte> from_, to_;
};
}  // namespace detail

/// @brief Measures what messages and reductions cost on a communicator, in a second or so.
///
/// Pairs of ranks exchange 8 bytes and 1 MiB, all pairs at the same time, one pair alone, and one rank with two others:
/// that gives latency and bandwidth, and who shares the latter; 128 KiB, at the beginning of a call and in it; and
/// 1 MiB with ranks 2, 4, 8 .. away, all at the same time; 8 bytes and 1 MiB where only 2, 4, 8 .. ranks of a machine,
/// or machines, take part, the others waiting. Medians, or the fastest, of rank 0, which every rank gets.
/// Collective. It gives messages of host memory: wrap a communicator that works in a stream, `hosted(comm)`.
/// @param comm Communicator. @param node Ranks of one machine, consecutive ones; 0: all are on one.
/// @tparam Clock What measures; for example the clock of a simulator.
/// Throws: argument_error if `node` is negative; comm_error.
template <class Clock = std::chrono::steady_clock, communicator Comm> links calibrate(Comm& comm, int node = 0) {
  static_assert(!stream_ordered<Comm>,
                "heddle::calibrate: this communicator works in a stream; give it a hosted(comm)");
  links l{.node = node};
  l.check();
  const int rank = comm.rank(), size = comm.size();
  using watch_type = detail::stopwatch<Clock, Comm>;
  watch_type watch(comm);
  const auto seconds_per_byte = [](double s) { return s / static_cast<double>(watch_type::large); };
  const int group = node > 0 && node < size ? node : size;
  // Rank i of one side pairs with its counterpart; rank 0 is always in the first pair.
  // `place` is this rank's, or its machine's, among `places`; partner(other) the rank at another one, or -1.
  const auto measure = [&](link_class& c, int place, int places, auto&& partner, int first, int second,
                           int concurrent, auto&& shared_by) {
    using list = std::vector<int>;
    const auto only = [&](bool take_part, list peers) { return take_part ? std::move(peers) : list{}; };
    const auto at_distance = [&](int d) {
      const int other = partner(place ^ d);
      return only(other >= 0 && other < size, {other});
    };
    const list all = at_distance(1);
    c.cost.alpha = watch.exchange(all, 8, 31);
    c.first = watch.ask(all);
    const double together = watch.exchange(all, watch.large, 7);
    const double alone = watch.exchange(only(rank == 0 || rank == first, {rank == 0 ? first : 0}), watch.large, 7);
    double twice = alone;
    if (second < size) {
      const list star = rank == 0 ? list{first, second} : only(rank == first || rank == second, {0});
      twice = watch.exchange(star, watch.large, 7);
    }
    if (concurrent > 1 && together > 1.5 * alone) {  // neither one flow nor the rank is the limit
      c.shared = sharing::node;
      c.cost.beta = seconds_per_byte((std::max)(0.0, together - c.cost.alpha) / concurrent);
    } else {
      c.shared = second < size && twice < 1.5 * alone ? sharing::pair : sharing::rank;
      c.cost.beta = seconds_per_byte((std::max)(0.0, together - c.cost.alpha));
    }
    const double near = watch.fastest(all, watch.large, 7) - c.cost.alpha;
    for (std::size_t k = 1, d = 2; k < c.distances; ++k, d *= 2) {
      c.far[k] = c.far[k - 1];
      if (2 * d > static_cast<std::size_t>(places)) continue;  // counted around, nobody is that far apart
      const double s = watch.fastest(at_distance(static_cast<int>(d)), watch.large, 7) - c.cost.alpha;
      c.far[k] = near > 0.0 ? (std::max)(1.0, s / near) : 1.0;
    }
    // Fewer of them: sizes with another place in the table than all have.
    for (std::size_t k = 0, s = 2; 2 * s <= static_cast<std::size_t>(places); ++k, s *= 2) {
      const list few = only(place < static_cast<int>(s), all);
      const double alpha = watch.exchange(few, 8, 31);
      const double bytes = watch.fastest(few, watch.large, 7) - alpha;
      const double share = shared_by(static_cast<int>(s));  // of how many flows in all
      if (c.cost.alpha > 0.0 && alpha > 0.0) c.sized[k].alpha = alpha / c.cost.alpha;
      if (near > 0.0 && bytes > 0.0) c.sized[k].beta = bytes / near / (c.shared == sharing::node ? share : 1.0);
    }
  };
  if (group > 1) {
    const int local = rank % group, base = rank - local, end = (std::min)(base + group, size);
    measure(
        l.intra, local, group, [&](int other) { return base + other < end ? base + other : -1; }, 1,
        group > 2 ? group - 1 : size, group / 2 * 2, [&](int ranks) { return ranks / (group / 2 * 2.0); });
  }
  if (group < size) {
    const int machines = (size - 1) / group + 1, second = machines > 2 ? (machines - 1) * group : size;
    measure(
        l.inter, rank / group, machines, [&](int other) { return other * group + rank % group; }, group, second,
        (std::min)(group, size - group), [](int) { return 1.0; });
  } else {
    l.inter = l.intra;
  }
  if (group == 1) l.intra = l.inter;
  l.gamma = seconds_per_byte(watch.reduce());
  if (size > 1) watch.share(l);
  return l;
}

}  // namespace v0
}  // namespace heddle

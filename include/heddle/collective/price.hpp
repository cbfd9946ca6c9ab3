// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/schedule.hpp>
#include <heddle/comm/links.hpp>

#include <cmath>

namespace heddle {
inline namespace v0 {

namespace detail {
// What ports have to carry in one round. Everything that meets at a port ends together.
template <class Operation> class port_loads {
 public:
  port_loads(const links& l, std::size_t size, std::size_t element_bytes)
      : links_(&l), size_(size), element_bytes_(static_cast<double>(element_bytes)) {
    for (std::size_t kind = 0; kind < 2; ++kind) {
      const bool pairs = of(kind).shared == sharing::pair;
      for (std::vector<double>* v : {loads_[kind], loads_[kind] + 2}) {
        v[0].assign(pairs ? size * size : size, 0.0);
        v[1] = v[0];
      }
    }
  }

  void add(std::size_t from, const Operation& o) {
    each(from, o, [](double& port, double s) { port += s; });
  }
  void remove(std::size_t from, const Operation& o) {
    each(from, o, [](double& port, double) { port = 0.0; });
  }
  // Seconds that the message takes: the latencies of its sender's or receiver's messages, then the bytes at its ports.
  double seconds(std::size_t from, const Operation& o) {
    double most[2] = {0.0, 0.0};
    std::size_t k = 0;
    each(from, o, [&](double& port, double) {
      most[k / 2] = (std::max)(most[k / 2], port);
      ++k;
    });
    return most[0] + most[1];
  }
  // What it takes longer if it is the first one from `from` to its peer.
  double ask(std::size_t from, const Operation& o) const {
    const link_class& c = links_->between(static_cast<int>(from), static_cast<int>(o.peer));
    return c.ask(bytes_of(o));
  }

 private:
  const link_class& of(std::size_t kind) const noexcept { return kind ? links_->inter : links_->intra; }
  double bytes_of(const Operation& o) const { return static_cast<double>(o.range.count) * element_bytes_; }

  // f(port, seconds there): latency at the sender, at the receiver, bytes at both.
  template <class Function> void each(std::size_t from, const Operation& o, Function&& f) {
    const std::size_t to = o.peer;
    const int node = links_->node_of(static_cast<int>(from)), other = links_->node_of(static_cast<int>(to));
    const std::size_t kind = node != other;
    const link_class& c = of(kind);
    const bool pair = c.shared == sharing::pair, by_node = c.shared == sharing::node;
    const std::size_t a = pair ? from * size_ + to : from, b = pair ? a : to;
    const double s = links_->beta(static_cast<int>(from), static_cast<int>(to), static_cast<int>(size_)) * bytes_of(o);
    const double alpha = links_->alpha(static_cast<int>(from), static_cast<int>(to), static_cast<int>(size_));
    f(loads_[kind][0][a], alpha);
    f(loads_[kind][1][b], alpha);
    f(loads_[kind][2][by_node ? static_cast<std::size_t>(node) : a], s);
    f(loads_[kind][3][by_node ? static_cast<std::size_t>(other) : b], s);
  }

  const links* links_;
  std::size_t size_;
  double element_bytes_;
  std::vector<double> loads_[2][4];  // of each kind: latency out, latency in, bytes out, bytes in
};

// Seconds until the last rank has done its schedule.
template <class Schedule, class Operation = operation>
double price_of(const std::vector<Schedule>& all, std::size_t element_bytes, const links& l) {
  const std::size_t size = all.size();
  port_loads<Operation> ports(l, size, element_bytes);
  std::vector<double> clock(size, 0.0), next(size);
  std::vector<bool> met(size * size);  // there was a message from one to the other
  for (std::size_t k = 0; k < all[0].rounds(); ++k) {
    const auto each_message = [&](auto&& f) {
      for (std::size_t r = 0; r < size; ++r) {
        for (const Operation& o : all[r].round(k)) {
          if (o.act == action::send) f(r, o);
        }
      }
    };
    next = clock;
    each_message([&](std::size_t r, const Operation& o) { ports.add(r, o); });
    each_message([&](std::size_t r, const Operation& o) {
      const double asked = met[r * size + o.peer] ? 0.0 : ports.ask(r, o);
      const double there = (std::max)(clock[r], clock[o.peer]) + asked + ports.seconds(r, o);
      next[r] = (std::max)(next[r], there);
      next[o.peer] = (std::max)(next[o.peer], there);
    });
    each_message([&](std::size_t r, const Operation& o) {
      ports.remove(r, o);
      met[r * size + o.peer] = true;
    });
    for (std::size_t r = 0; r < size; ++r) {
      for (const Operation& o : all[r].round(k)) {
        if (o.act == action::reduce) next[r] += l.gamma * static_cast<double>(o.range.count * element_bytes);
      }
    }
    clock.swap(next);
  }
  return *std::max_element(clock.begin(), clock.end());
}
}  // namespace detail

/// @brief Seconds that an all-reduce takes by the model: the schedules of all ranks run on virtual clocks.
///
/// A round of a rank begins when its previous one has ended. A message is there when sender and receiver have begun
/// the round and its ports have carried what they have to carry in it: alpha for each message that its sender sends or
/// its receiver receives, then beta for each byte, by its distance, at the ports that share the bandwidth; the first
/// one between two ranks comes later by what asking costs (`link_class::first`); alpha and beta are those among as many
/// ranks and machines as take part (`link_class::sized`). Then gamma for each byte that is
/// reduced. Ports send and receive at the same time; computation and messages of a round don't overlap.
/// Cost:    O(operations of all ranks): some 10 ms for a ring of 256.
/// @param t The topology. @param size Ranks, at least 1. @param bytes Of the buffer. @param l What links cost.
/// @param element_bytes Bytes of an element, at least 1.
/// Throws: argument_error for a size or element below 1, costs that aren't, and what the topology throws.
template <class Topology>
double price(const Topology& t, int size, std::size_t bytes, const links& l, std::size_t element_bytes = 4) {
  l.check();
  if (size < 1 || element_bytes < 1) {
    throw argument_error("heddle::price: " + std::to_string(size) + " ranks, elements of " +
                         std::to_string(element_bytes) + " bytes; allowed is 1 or more");
  }
  const std::size_t count = (bytes + element_bytes - 1) / element_bytes;
  std::vector<decltype(t.all_reduce(0, size, count))> all;
  for (int r = 0; r < size; ++r) all.push_back(t.all_reduce(r, size, count));
  return detail::price_of(all, element_bytes, l);
}

/// @brief How many buckets of equal size expose the least where `bytes` are reduced while backward goes on: the last
/// one can't hide, and each costs its latency, so sqrt(time for bytes / latency).
/// @return Bytes of a bucket, at least 1, for `buckets{.first = b, .cap = b}`.
/// Throws: as price.
template <class Topology>
std::size_t bucket_bytes(const Topology& t, int size, std::size_t bytes, const links& l,
                         std::size_t element_bytes = 4) {
  const double latency = price(t, size, element_bytes, l, element_bytes);
  const double rest = price(t, size, bytes, l, element_bytes) - latency;
  const double most = static_cast<double>((std::max<std::size_t>)(bytes, 1));
  const double n = rest > 0.0 && latency > 0.0 ? std::sqrt(rest / latency) : rest > 0.0 ? most : 1.0;
  return static_cast<std::size_t>(std::ceil(most / std::clamp(n, 1.0, most)));
}

}  // namespace v0
}  // namespace heddle

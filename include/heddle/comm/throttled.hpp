// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/wrapper.hpp>
#include <heddle/comm/links.hpp>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief Makes a communicator as slow as a network: a message is there when its link has carried it.
///
/// There is one link per ordered pair of ranks. Links work at the same time; what is sent over one link queues up, also
/// from duplicates: a link has one virtual clock, which says until when it is busy. A message enters the link when it
/// is posted or when the link is free, and leaves it alpha + beta n later; sender and receiver sleep until then, so
/// that computation of other threads goes on. The bytes themselves travel at once.
/// Wire:   8 bytes more per peer and round: when the messages are there. For this, ranks must read the same clock, as
///         threads and processes of one machine do.
/// @tparam Comm The communicator underneath, held by value.
/// @tparam Clock Whose time it is. One with a `sleep_until(time_point)` of its own isn't slept by: in a simulation it
/// moves on to that time.
template <class Comm, class Clock = std::chrono::steady_clock>
class throttled : public detail::wrapper<Comm> {
  using detail::wrapper<Comm>::inner_;
  using clock = Clock;
  static constexpr typename clock::time_point nothing{}, expected{typename clock::duration(1)};  // before any time that it shows

 public:
  /// @param inner The communicator underneath. @param cost Of every link.
  /// Throws: argument_error if a cost is negative.
  throttled(Comm inner, link_cost cost) : throttled(std::move(inner), links{.intra = {cost}}) {}
  /// @param inner The communicator underneath. @param costs Of links inside machines and between them; who shares them
  /// isn't looked at.
  /// Throws: argument_error if a cost is negative.
  throttled(Comm inner, const links& costs) : throttled(std::move(inner), costs, std::make_shared<wires>()) {
    wires_->busy_until.resize(static_cast<std::size_t>(this->size()));
    costs.check();
  }

  /// A duplicate that shares the links.
  throttled duplicate() { return {inner_.duplicate(), costs_, wires_}; }

  /// Forwards, then sleeps until the links have carried what this rank sends and receives.
  template <class Apply>
  void exchange(header h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    const std::size_t ranks = wires_->busy_until.size();
    stamps_.assign(2 * ranks, nothing);  // when messages to, then from, each rank are there
    const std::span<const outgoing> payloads = this->settled(out);
    out_.assign(payloads.begin(), payloads.end());
    in_.assign(in.begin(), in.end());
    send(out);
    for (const incoming& m : in) {
      if (!is_rank(m.peer)) break;  // the communicator underneath refuses it
      typename clock::time_point& there = stamps_[ranks + static_cast<std::size_t>(m.peer)];
      if (there != nothing) continue;
      there = expected;
      in_.push_back({m.peer, &there, sizeof there});
    }
    // Whole: among the round's messages are the stamps, and parts are of equally long ones.
    inner_.exchange(h, out_, in_, [&](std::span<const arrival> got) { apply(got.first(in.size())); });
    const auto last = std::max_element(stamps_.begin(), stamps_.end());
    if (last == stamps_.end()) return;
    if constexpr (requires { clock::sleep_until(*last); }) clock::sleep_until(*last);
    else std::this_thread::sleep_until(*last);
  }

 private:
  struct wires {
    std::mutex mutex;
    std::vector<typename clock::time_point> busy_until;  // of the links from this rank
  };

  throttled(Comm inner, const links& costs, std::shared_ptr<wires> shared)
      : detail::wrapper<Comm>(std::move(inner)), costs_(costs), wires_(std::move(shared)) {}

  bool is_rank(int peer) const { return peer >= 0 && peer < this->size(); }

  // Lets the messages enter their links, and adds one to each peer that tells when they are there.
  void send(std::span<const outgoing> out) {
    const auto now = clock::now();
    std::lock_guard lock(wires_->mutex);
    for (const outgoing& m : out) {
      if (!is_rank(m.peer)) return;
      const auto peer = static_cast<std::size_t>(m.peer);
      const double alpha = costs_.alpha(this->rank(), m.peer, this->size());
      const double beta = costs_.beta(this->rank(), m.peer, this->size());
      typename clock::time_point& busy = wires_->busy_until[peer];
      busy = (std::max)(busy, now) + std::chrono::duration_cast<typename clock::duration>(
                                         std::chrono::duration<double>(alpha + beta * static_cast<double>(m.bytes)));
      if (stamps_[peer] == nothing) out_.push_back({m.peer, &stamps_[peer], sizeof busy, 1});
      stamps_[peer] = busy;
    }
  }

  links costs_;
  std::shared_ptr<wires> wires_;
  std::vector<typename clock::time_point> stamps_;
  std::vector<outgoing> out_;
  std::vector<incoming> in_;
};

}  // namespace v0
}  // namespace heddle

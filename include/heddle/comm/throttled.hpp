// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/concept.hpp>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief The cost of a link: a message of n bytes takes alpha + beta n seconds.
struct link_cost {
  double alpha = 0.0;  ///< Seconds per message, 0 or above.
  double beta = 0.0;   ///< Seconds per byte, 0 or above.
};

/// @brief Makes a communicator as slow as a network: a round lasts at least as long as its busiest link needs.
///
/// Links are directed, one per peer and direction, and work at the same time; messages of one link queue up. The rank
/// sleeps for what is missing, so that computation of other threads goes on.
/// @tparam Comm The communicator underneath, held by value.
template <class Comm>
class throttled {
  static_assert(communicator<Comm>, "heddle::throttled: needs a communicator; see docs/comm.md");

 public:
  /// @param inner The communicator underneath. @param cost Of every link.
  /// Throws: argument_error if a cost is negative.
  throttled(Comm inner, link_cost cost) : inner_(std::move(inner)), cost_(cost) {
    if (!(cost.alpha >= 0.0) || !(cost.beta >= 0.0)) {
      throw argument_error("heddle::throttled: alpha " + std::to_string(cost.alpha) + " s, beta " +
                           std::to_string(cost.beta) + " s/byte; allowed is 0 or above");
    }
  }

  /// This rank.
  int rank() const { return inner_.rank(); }
  /// Number of ranks.
  int size() const { return inner_.size(); }
  /// Number of the next call.
  std::uint16_t next_sequence() { return inner_.next_sequence(); }
  /// A duplicate with links of its own, of the same cost.
  throttled duplicate() { return {inner_.duplicate(), cost_}; }
  /// Forwards.
  void fail(const std::string& text) { inner_.fail(text); }

  /// Forwards, then sleeps until the busiest link would be done.
  template <class Apply>
  void exchange(header h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    const auto start = std::chrono::steady_clock::now();
    inner_.exchange(h, out, in, std::forward<Apply>(apply));
    const double seconds = (std::max)(busiest(out), busiest(in));
    std::this_thread::sleep_until(start + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                              std::chrono::duration<double>(seconds)));
  }

 private:
  template <class Messages>
  double busiest(const Messages& messages) {
    links_.assign(static_cast<std::size_t>(size()), 0.0);
    double most = 0.0;
    for (const auto& m : messages) {
      double& link = links_[static_cast<std::size_t>(m.peer)];
      link += cost_.alpha + cost_.beta * static_cast<double>(m.bytes);
      most = (std::max)(most, link);
    }
    return most;
  }

  Comm inner_;
  link_cost cost_;
  std::vector<double> links_;
};

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/threads_messenger.hpp>
#include <heddle/mode/concept.hpp>
#include <heddle/table/settings.hpp>

#include <cmath>
#include <limits>

namespace heddle {
inline namespace v0 {

/// @brief Parameter server: ranks push gradients to servers, which hold the parameters and the update rule's state, and
/// go on with the parameters that come back.
///
/// The first `servers` ranks hold an equal share of the parameters each. A rank that has no batches, and so calls
/// join() at once, is a server alone. A push takes effect when it comes, or in a mean with others (`merge`); a rank
/// that is too far ahead waits (`staleness`). With staleness 0 training is synchronous: servers wait for everybody's
/// push, add them up in the order of ranks, divide once and update once: the bits of `every_step` over `native` on
/// threads.
///
/// Gradients travel as they become ready, in parts of `strategy::buckets.first` bytes for each server.
///
/// Wire:    per step a worker sends its gradient, and receives the parameters that have changed.
/// State:   parameters and the rule's state once, spread over the servers; with compensation, parameters once more for
///          each rank.
/// Order:   no compressor; single precision.
/// Sync:    ready() only enqueues; step() waits for the servers' answers, under a bound until others are near enough.
/// Paper:   Li et al. 2014; compensation: Zheng et al. 2017 (DC-ASGD), g + lambda g^2 (w now - w read).
/// Throws:  argument_error for a number outside its range.
/// @tparam Connection Opens a messenger between the ranks: `threads::connection`, `mpi::connection`, `zmq::connection`.
template <class Connection = threads::connection> struct async_ps {
  /// No bound on staleness.
  static constexpr std::uint64_t unbounded = (std::numeric_limits<std::uint64_t>::max)();

  Connection connection{};              ///< How messengers are opened.
  int servers = 0;                      ///< Ranks below it hold the parameters; 0: all ranks.
  std::uint64_t staleness = unbounded;  ///< A rank may be so many steps ahead of the slowest one that has batches.
  std::uint32_t merge = 1;              ///< Pushes of different ranks that make one update, by their mean; 1: each one.
  /// Lambda of the correction for a gradient that comes late; 0: none. Not with staleness 0, nor with `merge` above 1,
  /// where a rank goes on before its gradient is used.
  float compensation = 0.0f;
  bool sparse = false;  ///< Of tensors with `rows`, only rows with a gradient are pushed; a rule sees only these.
  /// step() takes the answer to the push before, and doesn't wait for that of its own: parameters travel while the next
  /// gradient is computed, and are one step older. Not with staleness 0, nor with compensation.
  bool background = false;
  /// What happens when a rank that isn't a server dies, or leaves without join(): others report it, or go on, which
  /// needs ranks that aren't servers. Each server counts what has been pushed to it as a whole, so the last gradient of
  /// one that dies inside step() may have moved the parameters of some servers and not those of others.
  worker_death on_death = worker_death::report;

  static constexpr average averages = average::server;  ///< What ranks send is not their own average.
  static constexpr bool outer_momentum = false;         ///< None.

  /// Throws: argument_error for a number outside its range.
  void check() const {
    if (servers < 0)
      throw argument_error("heddle::async_ps: servers is " + std::to_string(servers) + ", allowed is 0 or above");
    if (merge == 0) throw argument_error("heddle::async_ps: merge is 0, allowed is 1 or above");
    if (!(compensation >= 0.0f) || !std::isfinite(compensation) ||
        (compensation > 0.0f && (staleness == 0 || merge > 1)))
      throw argument_error("heddle::async_ps: compensation is " + std::to_string(compensation) +
                           ", allowed is 0 or above, and 0 where staleness is 0 or merge is above 1");
    if (background && (staleness == 0 || compensation > 0.0f))
      throw argument_error("heddle::async_ps: background is true, allowed with staleness above 0 and compensation 0");
    if (on_death != worker_death::report && on_death != worker_death::go_on)
      throw argument_error("heddle::async_ps: on_death is neither report nor go_on, which are allowed");
  }
  /// Always.
  bool meets(std::size_t) const noexcept { return true; }
  /// "async_ps".
  std::string name() const { return "async_ps"; }
};
static_assert(mode<async_ps<>>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/threads_messenger.hpp>
#include <heddle/mode/concept.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Geo-SGD over servers: replicas train alone and never wait; their moves are added up on servers meanwhile.
///
/// With L the replica, O the parameters as the rank last knew the server's S, and N ranks: every `period` steps, if the
/// answer to the push before has come,
///
///     push:    d = (L - O) / N;  O = O + d;  the server: S = S + d
///     answer:  L = L + (S - O);  O = S
///
/// It is a sum: what isn't sent stays in the replica and is sent later, so that t pushes without new steps leave
/// (1 - 1/N)^t of a move; join() and synchronize() send the rest. Of tensors with `rows`, rows that had a gradient
/// since the last push are sent, and rows that have changed on the server come back; so a row seldom used keeps its rest
/// until then. The effective learning rate is N times that of averaging. Only plain SGD is coherent with it. Take the
/// parameters to save from save(), or after join().
///
/// Wire:    per push the moves of rows, and the rows that others have moved.
/// State:   4 bytes per element (O) on every rank, and S, spread over the servers.
/// Order:   no compressor; single precision.
/// Sync:    step() never waits; join(), synchronize(), save() and load() wait for all ranks.
/// System:  PaddlePaddle's Geo-SGD; `geo_sgd` is its deterministic form over a communicator.
/// Throws:  argument_error for a number outside its range.
/// @tparam Connection Opens a messenger between the ranks: `threads::connection`, `mpi::connection`, `zmq::connection`.
template <class Connection = threads::connection> struct async_geo_sgd {
  Connection connection{};  ///< How messengers are opened.
  int servers = 0;          ///< Ranks below it hold the parameters; 0: all ranks.
  std::size_t period = 8;   ///< Steps between pushes, at least 1.

  static constexpr average averages = average::server;  ///< Moves are added up.
  static constexpr bool outer_momentum = false;         ///< None.

  /// Throws: argument_error for a number outside its range.
  void check() const {
    if (servers < 0)
      throw argument_error("heddle::async_geo_sgd: servers is " + std::to_string(servers) + ", allowed is 0 or above");
    if (period == 0) throw argument_error("heddle::async_geo_sgd: period is 0, allowed is 1 or above");
  }
  /// Whether a push is due at the end of this step.
  bool meets(std::size_t step) const noexcept { return step % period == period - 1; }
  /// "async_geo_sgd".
  std::string name() const { return "async_geo_sgd"; }
};
static_assert(mode<async_geo_sgd<>>);

}  // namespace v0
}  // namespace heddle

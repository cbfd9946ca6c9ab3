// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/buckets.hpp>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/collective/native.hpp>
#include <heddle/collective/price.hpp>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief As many buckets of about equal size as the model of the cluster finds to be done first, behind a backward
/// that takes as long as all bytes at once and completes them evenly.
///
///     hd::strategy{.topology = hd::ring{}, .buckets = hd::automatic_buckets{hd::calibrate(comm)}}
///
/// Few buckets expose the last one, many their latencies; for equal tensors the best number is near the square root of
/// the time for all bytes over the latency of one. Numbers up to twice that are tried with the tensors at hand, each of
/// which stays whole. No size is built in. Every rank must have the same costs, as it has from `calibrate` or from a
/// table. native{} is priced as direct{}, also inside other topologies.
struct automatic_buckets {
  links costs{};  ///< The cluster.

  /// @brief The buckets in launch order; every tensor is in exactly one.
  /// @param t The topology that they travel on. @param ranks Number of ranks. @param bytes Size of each tensor as
  /// floats. @param wire Bytes of an element on the wire, at least 1.
  /// Throws: as price.
  template <class Topology>
  std::vector<bucket> plan(const Topology& t, int ranks, std::span<const std::size_t> bytes,
                           std::size_t wire = sizeof(float)) const {
    double total = 0.0;
    for (const std::size_t n : bytes) total += static_cast<double>(n);
    const auto seconds = [&](double floats) {
      const auto sent = static_cast<std::size_t>(floats / sizeof(float)) * wire;
      return price(detail::as_schedules(t), ranks, sent, costs, wire);
    };
    const double latency = seconds(sizeof(float)), all = (std::max)(seconds(total), latency);
    const double most = latency > 0.0 ? 2.0 * std::sqrt(all / latency) : static_cast<double>(bytes.size());
    std::vector<bucket> best;
    double least = 0.0;
    for (std::size_t k = 1; k == 1 || (k <= bytes.size() && static_cast<double>(k) <= most + 1.0); ++k) {
      const std::size_t limit =
          (std::max<std::size_t>)(1, static_cast<std::size_t>(std::ceil(total / static_cast<double>(k))));
      std::vector<bucket> these = buckets{limit, limit}.plan(bytes);
      double now = 0.0, done = 0.0;
      for (const bucket b : these) {
        double part = 0.0;
        for (std::size_t i = b.first; i < b.last; ++i) part += static_cast<double>(bytes[i]);
        if (part == 0.0) continue;
        done += part;
        now = (std::max)(now, all * done / total) + latency + (all - latency) * part / total;
      }
      if (k == 1 || now < least) {
        least = now;
        best = std::move(these);
      }
    }
    return best;
  }
};

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/links.hpp>
#include <heddle/compress/detail/carrier.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Compresses the tensors for which that takes less time than a dense sum, by what links cost, and says why.
///
///     const hd::links costs = hd::calibrate(comm);
///     hd::automatic_compressor c{.compressor = hd::dgc{}, .costs = costs};
///     hd::data_parallel dp{hd::strategy{.compressor = c}, comm, tensors, hd::sgd{.momentum = 0.9f}};
///     std::puts(dp.why(0).c_str());  // of the first tensor; or c.why(count, {.ranks = 8})
///
/// A dense sum of n floats moves 8 n (P - 1) / P bytes on the slowest link that is used and reduces n floats; packets
/// of b bytes move b (P - 1) and cost `traffic` bytes of memory per element. Start-up costs are left out: tensors share
/// them with their bucket. Where the network isn't the limit nothing is compressed, and a step moves the bytes that it
/// moves with none{}.
/// Wire:    that of the compressor, or dense.
/// State:   that of the compressor.
/// Traffic: that of the compressor, or none.
/// Order:   ends a chain.
/// Sync:    never.
/// Throws:  argument_error if a cost, margin or traffic is negative or not finite.
/// @tparam Compressor One that sends packets or sums.
template <class Compressor> struct automatic_compressor {
  using carrier = decltype(detail::carried(std::declval<const Compressor&>()));  ///< What runs.
  static_assert(packet_compressor<carrier> || reducing_compressor<carrier>,
                "heddle::automatic_compressor: .compressor must send packets or sums, such as dgc{} or "
                "error_feedback{top_k{}}; see docs/compress.md");
  static_assert(!requires { requires Compressor::shards_packets; },
                "heddle::automatic_compressor: .compressor must not be sharded{}; see docs/compress.md");
  static_assert(!detail::needs_feedback<Compressor>,
                "heddle::automatic_compressor: .compressor is biased, so it must be inside error_feedback{}; see "
                "docs/compress.md");

  Compressor compressor{};  ///< What is used where it is faster.
  links costs{};            ///< What the network costs; the same on all ranks, as calibrate() returns it.
  double traffic = 44.0;    ///< Bytes of memory that the compressor moves per element, 0 or above.
  double margin = 1.0;      ///< How many times faster it must be, 0 or above; below 1 it may be slower.

  /// Whether the compressor moves the momentum.
  static constexpr bool owns_momentum = requires { requires Compressor::owns_momentum; };

  /// Throws argument_error for a number outside its range.
  void check() const {
    if constexpr (requires { compressor.check(); }) compressor.check();
    costs.check();
    if (!(traffic >= 0.0 && traffic < 1e30 && margin >= 0.0 && margin < 1e30)) {
      throw argument_error("heddle::automatic_compressor: traffic is " + std::to_string(traffic) + " and margin is " +
                           std::to_string(margin) + ", allowed are finite numbers of 0 or above");
    }
  }

  /// Seconds of a dense sum of n floats.
  double dense_seconds(std::size_t n, const encode_context& x) const noexcept {
    const double part = 4.0 * static_cast<double>(n) * (x.ranks - 1) / x.ranks;
    return part * (2.0 * seconds_per_byte(x.ranks) + costs.gamma);
  }
  /// Seconds of the same, compressed.
  double compressed_seconds(std::size_t n, const encode_context& x) const {
    const auto bytes = static_cast<double>(bytes_of(n, x));
    const double passes = reducing_compressor<carrier> ? 2.0 / x.ranks : 1.0;
    // A reduced byte is three moved ones: two read, one written.
    return bytes * passes * (x.ranks - 1) * seconds_per_byte(x.ranks) +
           traffic * static_cast<double>(n) * costs.gamma / 3.0;
  }
  /// Whether a tensor of n elements is compressed at this step.
  bool sends(std::size_t n, const encode_context& x) const {
    return detail::carried(compressor).sends(n, x) && compressed_seconds(n, x) * margin < dense_seconds(n, x);
  }
  /// The reason, in words: "compressed: 0.10 ms, dense 0.80 ms", "dense: 0.01 ms, compressed 0.10 ms" or "dense: the
  /// compressor leaves tensors of 10 elements as they are".
  std::string why(std::size_t n, const encode_context& x) const {
    if (!detail::carried(compressor).sends(n, x))
      return "dense: the compressor leaves tensors of " + std::to_string(n) + " elements as they are";
    const auto ms = [](double seconds) {
      char text[32];
      std::snprintf(text, sizeof text, "%.3g ms", seconds * 1e3);
      return std::string(text);
    };
    const std::string a = ms(compressed_seconds(n, x)), b = ms(dense_seconds(n, x));
    return sends(n, x) ? "compressed: " + a + ", dense " + b : "dense: " + b + ", compressed " + a;
  }
  /// For example "automatic<dgc>".
  std::string name() const { return "automatic<" + compressor.name() + ">"; }

 private:
  double seconds_per_byte(int ranks) const noexcept {
    const bool outside = costs.node > 0 && ranks > costs.node;
    const link_class& l = outside ? costs.inter : costs.intra;
    return l.cost.beta * (l.shared == sharing::node ? (costs.node > 0 ? (std::min)(costs.node, ranks) : ranks) : 1);
  }
  std::size_t bytes_of(std::size_t n, const encode_context& x) const {
    if constexpr (has_wire_bytes<carrier>)
      return detail::carried(compressor).wire_bytes(n, x);
    else
      return 8 + 8 * compressor.entries(n, x);
  }
};

namespace detail {
// The compressor, with its say about which tensors it is for.
template <class Compressor> class automatic_carrier : public automatic_compressor<Compressor>::carrier {
 public:
  explicit automatic_carrier(const automatic_compressor<Compressor>& c)
      : automatic_compressor<Compressor>::carrier(carried(c.compressor)), choice_(c) {}
  bool sends(std::size_t n, const encode_context& x) const { return choice_.sends(n, x); }

 private:
  automatic_compressor<Compressor> choice_;
};
template <class Compressor> struct carried_as<automatic_compressor<Compressor>> {
  static automatic_carrier<Compressor> make(const automatic_compressor<Compressor>& c) {
    return automatic_carrier<Compressor>(c);
  }
};
}  // namespace detail

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/buckets.hpp>
#include <heddle/collective/gather.hpp>
#include <heddle/compress/none.hpp>
#include <heddle/memory/host_resource.hpp>
#include <heddle/mode/every_step.hpp>
#include <heddle/optim/mixed.hpp>
#include <heddle/recompute/none.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Single precision everywhere: parameters, gradients and optimizer state are float.
struct full_precision {
  using element = float;  ///< Of parameters and gradients.
  /// "full_precision".
  std::string name() const { return "full_precision"; }
};

namespace detail {
template <class Topology>
inline constexpr bool is_topology =
    has_all_reduce_schedule<Topology> || std::is_same_v<Topology, native> || has_native_leaf<Topology>;
template <class Compressor> using last_part = std::remove_cvref_t<decltype(last_of(std::declval<const Compressor&>()))>;
template <class Compressor> inline constexpr bool owns_momentum = requires { requires Compressor::owns_momentum; };
template <class Compressor> inline constexpr bool shards_packets = requires { requires Compressor::shards_packets; };
template <class Topology>
concept has_inside = requires(const Topology& t, int rank, int size, std::size_t count) {
  { t.inside(rank, size, count) } -> std::same_as<schedule>;
  { t.groups(size) } -> std::same_as<int>;
};
template <class Mode> inline constexpr bool outer_momentum = requires { requires Mode::outer_momentum; };
// Replicas go on apart from a meeting, by an amount that follows from what was sent of each.
template <class Outer> inline constexpr bool keeps_apart = requires { &Outer::restart; } || requires { &Outer::flush; };
template <class Mode> constexpr bool leaves_apart() {
  if constexpr (requires(const Mode& m) { m.outer_step().outer; })
    return keeps_apart<std::remove_cvref_t<decltype(std::declval<const Mode&>().outer_step().outer)>>;
  else if constexpr (requires(const Mode& m) { m.outer; })
    return keeps_apart<std::remove_cvref_t<decltype(std::declval<const Mode&>().outer)>>;
  else
    return false;
}
template <class Mode> inline constexpr bool shards_optimizer = requires { requires Mode::averages == average::shards; };
template <class Precision>
inline constexpr bool is_precision =
    std::is_same_v<Precision, full_precision> || requires(const Precision& p, loss_scale_state& s) {
      typename Precision::element;
      s = p.begin();
      p.count(s, true);
    };
template <class Buckets, class Topology>
inline constexpr bool plans_by_topology =
    requires(const Buckets& b, const Topology& t, std::span<const std::size_t> n) { b.plan(t, 1, n, sizeof(float)); };
template <class Buckets, class Topology>
inline constexpr bool plans_buckets = std::is_same_v<Buckets, buckets> || plans_by_topology<Buckets, Topology>;
}  // namespace detail

/// @brief How a model is trained, chosen at compile time slot by slot.
///
///     constexpr auto plan = hd::strategy{.topology = hd::ring{}, .compressor = hd::clip{} | hd::dgc{.sparsity =
///     0.99}};
///
/// Types choose code, fields choose numbers; an omitted slot takes its default. Each slot can be used on its own too.
template <class Topology = ring, class Compressor = none, class Mode = every_step, class Precision = full_precision,
          class Recompute = recompute::none, class Memory = host_resource, class Buckets = heddle::buckets>
struct strategy {
  Topology topology{};      ///< How bytes travel.
  Compressor compressor{};  ///< What a gradient becomes before it travels.
  Mode mode{};              ///< When replicas meet.
  Precision precision{};    ///< Number formats.
  Buckets buckets{};        ///< How tensors are grouped into messages.
  Recompute recompute{};    ///< Which activations are computed again; taken by recompute::chain.
  Memory memory{};          ///< Where optimizer, compressor and mode state live.
  std::size_t lanes = 1;    ///< How many buckets may travel at the same time, 1 .. 64; the same on all ranks.

  /// Throws: argument_error if lanes is outside its range.
  void check() const {
    if (lanes < 1 || lanes > 64)
      throw argument_error("heddle::strategy: lanes is " + std::to_string(lanes) + ", allowed is 1 .. 64");
  }

  static_assert(
      detail::is_topology<Topology>,
      "heddle::strategy: .topology must provide all_reduce(rank, size, count) or be native{}; see docs/collective.md");
  static_assert(
      heddle::compressor<detail::last_part<Compressor>>,
      "heddle::strategy: .compressor must provide encode(), or be transforms | compressor; see docs/compress.md");
  static_assert(heddle::mode<Mode>,
                "heddle::strategy: .mode must provide averages, outer_momentum and meets(); see docs/mode.md");
  static_assert(!(detail::owns_momentum<detail::last_part<Compressor>> && detail::outer_momentum<Mode>),
                "heddle::strategy: .compressor corrects momentum itself, so .mode must not have an outer momentum; see "
                "docs/compress.md");
  static_assert(!detail::shards_optimizer<Mode> || has_owners<Topology>,
                "heddle::strategy: .mode shards the optimizer, so .topology must leave each element on one owner, such "
                "as ring{}; see docs/mode.md");
  static_assert(!detail::needs_feedback<detail::last_part<Compressor>>,
                "heddle::strategy: .compressor is biased, so it must be inside error_feedback{}; see docs/compress.md");
  static_assert(!detail::shards_optimizer<Mode> || elementwise_compressor<detail::last_part<Compressor>>,
                "heddle::strategy: .mode shards the optimizer, so .compressor must be elementwise, such as none{} or "
                "cast<>{}; see docs/mode.md");
  static_assert(!detail::leaves_apart<Mode>() || elementwise_compressor<Compressor>,
                "heddle::strategy: .mode leaves replicas apart by what was sent, so .compressor must be elementwise "
                "without a transform, such as none{} or cast<>{}; see docs/mode.md");
  static_assert(detail::is_precision<Precision>,
                "heddle::strategy: .precision must be full_precision{} or mixed<>{}; see docs/trainer.md");
  static_assert(!detail::shards_packets<detail::last_part<Compressor>> ||
                    (detail::has_inside<Topology> && has_all_gather_schedule<Topology>),
                "heddle::strategy: .compressor is sharded{}, so .topology must have groups, such as hierarchical{}; see "
                "docs/compress.md");
  static_assert(recompute::policy<Recompute>,
                "heddle::strategy: .recompute must provide plan(); see docs/recompute.md");
  static_assert(detail::plans_buckets<Buckets, Topology>,
                "heddle::strategy: .buckets must be buckets{} or provide plan(topology, ranks, bytes, wire); see "
                "docs/collective.md");
  static_assert(resource<Memory>,
                "heddle::strategy: .memory must provide allocate() and deallocate(); see docs/memory.md");
};

}  // namespace v0
}  // namespace heddle

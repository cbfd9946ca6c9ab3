// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/leaders.hpp>
#include <heddle/collective/pipelined.hpp>
#include <heddle/collective/price.hpp>
#include <heddle/collective/recursive_doubling.hpp>
#include <heddle/comm/concept.hpp>

#include <cstdio>

namespace heddle {
inline namespace v0 {

/// @brief One of Heddle's topologies with its settings, as a value: what `automatic` chooses among. A topology itself.
struct choice {
  /// Which topology, before pipelining.
  enum class shape : std::uint8_t {
    ring,                    ///< ring{}
    direct,                  ///< direct{}
    halving_doubling,        ///< halving_doubling{}
    recursive_doubling,      ///< recursive_doubling{}
    tree,                    ///< tree{}
    double_tree,             ///< double_tree{}
    torus_2d,                ///< torus_2d{width}
    rings_across_rings,      ///< hierarchical{ring{}, ring{}, width}
    halving_across_rings,    ///< hierarchical{ring{}, halving_doubling{}, width}
    halving_across_halving,  ///< hierarchical{halving_doubling{}, halving_doubling{}, width}
    ring_of_leaders,         ///< leaders{ring{}, width}
    doubling_of_leaders,     ///< leaders{recursive_doubling{}, width}
  };

  shape which = shape::ring;  ///< Which topology.
  int width = 0;              ///< Its width or group, where it has one.
  int chunks = 1;             ///< Above 1: pipelined{topology, chunks, skew}.
  int skew = 1;               ///< Of the pipeline.
  double seconds = 0.0;       ///< What the model says that it takes.

 private:
  template <class Function> auto visit(Function&& f) const {
    switch (which) {
      case shape::direct: return f(direct{});
      case shape::halving_doubling: return f(halving_doubling{});
      case shape::recursive_doubling: return f(recursive_doubling{});
      case shape::tree: return f(tree{});
      case shape::double_tree: return f(double_tree{});
      case shape::torus_2d: return f(torus_2d{width});
      case shape::rings_across_rings: return f(hierarchical<ring, ring>{.group = width});
      case shape::halving_across_rings: return f(hierarchical<ring, halving_doubling>{.group = width});
      case shape::halving_across_halving: return f(hierarchical<halving_doubling, halving_doubling>{.group = width});
      case shape::ring_of_leaders: return f(leaders<ring>{.group = width});
      case shape::doubling_of_leaders: return f(leaders<recursive_doubling>{.group = width});
      case shape::ring: break;
    }
    return f(ring{});
  }

 public:
  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule> Schedule all_reduce(int rank, int size, std::size_t count) const {
    if (chunks > 1)
      return pipelined<choice>{{which, width}, chunks, skew}.template all_reduce<Schedule>(rank, size, count);
    return visit([&](const auto& t) { return t.all_reduce(rank, size, count); });
  }
  /// The name of the topology.
  template <class String = std::string>
  String name() const {
    if (chunks > 1) return pipelined<choice>{{which, width}, chunks, skew}.name();
    return visit([](const auto& t) { return t.name(); });
  }
};

/// @brief Chooses the topology that the model of the cluster finds cheapest for this many ranks and bytes.
///
/// No size is built in: crossovers follow from what links cost. Every rank computes the same choice from the same
/// `costs`, which it has from `calibrate`, from a table, or from you.
/// Wire, Rounds, Error: of the choice; `explain` says which. Where few roundings matter more than time, name `direct`.
/// Cost:    the schedules of all ranks for some 20 candidates and numbers of chunks: 30 ms for 16 ranks, half a second
///          for 256. So keep an `all_reduce_plan`, or let one rank `choose` and hand its `choice` around.
/// Throws:  argument_error if a cost is negative or an element has no bytes.
struct automatic {
  links costs{};                  ///< The cluster.
  std::size_t element_bytes = 4;  ///< Bytes of an element, at least 1.

  /// @brief All candidates with what they take, the cheapest first.
  /// @param size Ranks, at least 1. @param bytes Of the buffer.
  template <class Choice = choice> std::vector<Choice> explain(int size, std::size_t bytes) const {
    using shape = typename Choice::shape;
    const int group = costs.node > 1 && costs.node < size ? costs.node : 0, square = detail::middle_divisor(size);
    std::vector<Choice> all;
    const auto with = [&](Choice c) {
      c.seconds = price(c, size, bytes, costs, element_bytes);
      return c;
    };
    const auto add = [&](shape which, int width = 0) { all.push_back(with({which, width})); };
    // Twice as many chunks as long as that helps.
    const auto add_pipelined = [&](shape which, int width, int skew) {
      Choice best = with({which, width, 2, skew});
      const std::size_t most = bytes / element_bytes;
      for (int chunks = 4; static_cast<std::size_t>(chunks) <= most; chunks *= 2) {
        const Choice next = with({which, width, chunks, skew});
        if (next.seconds < best.seconds)
          best = next;
        else
          break;
      }
      all.push_back(best);
    };
    for (const shape s : {shape::ring, shape::direct, shape::halving_doubling, shape::recursive_doubling, shape::tree,
                          shape::double_tree}) {
      add(s);
    }
    for (const shape s : {shape::tree, shape::double_tree}) add_pipelined(s, 0, 1);
    if (square > 1) add(shape::torus_2d, square);
    if (group && size % group == 0 && group != square) add(shape::torus_2d, group);
    for (const shape s : {shape::rings_across_rings, shape::halving_across_rings, shape::halving_across_halving,
                          shape::ring_of_leaders, shape::doubling_of_leaders}) {
      if (!group) break;
      add(s, group);
      add_pipelined(s, group, 1);
      if (group > 3) add_pipelined(s, group, group - 1);
    }
    std::stable_sort(all.begin(), all.end(), [](const Choice& a, const Choice& b) { return a.seconds < b.seconds; });
    return all;
  }
  /// The cheapest candidate.
  template <class Choice = choice>
  Choice choose(int size, std::size_t bytes) const {
    return explain<Choice>(size, bytes).front();
  }

  /// Schedule of an all-reduce of `count` elements.
  template <class Schedule = schedule>
  Schedule all_reduce(int rank, int size, std::size_t count) const {
    check_rank("automatic", rank, size);
    return choose(size, count * element_bytes).template all_reduce<Schedule>(rank, size, count);
  }
  /// "automatic" and a tag of the costs, so that ranks with different ones are told apart.
  std::string name() const { return "automatic (" + std::to_string(detail::topology_tag(costs.text())) + ")"; }
};
static_assert(topology<choice> && topology<automatic>);

/// @brief A table of candidates, one line each: milliseconds, name.
template <class Choice> std::string table(const std::vector<Choice>& candidates) {
  std::string text;
  for (const Choice& c : candidates) {
    char number[32];
    std::snprintf(number, sizeof number, "%12.6f ms  ", c.seconds * 1e3);
    text += number + c.name() + '\n';
  }
  return text;
}

}  // namespace v0
}  // namespace heddle

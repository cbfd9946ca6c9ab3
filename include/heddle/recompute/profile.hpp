// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/archive.hpp>
#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/recompute/layer.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief What was measured of a chain's layers; a policy plans from `costs`.
struct chain_profile {
  std::vector<layer_cost> costs;  ///< Bytes, and seconds, of each layer in order.

  /// Writes it to a file. Throws: file_error.
  void save(const std::string& path) const {
    archive_writer out;
    out.put(std::string("heddle::recompute::chain_profile 1"));
    out.put(static_cast<std::uint64_t>(costs.size()));
    for (const layer_cost& c : costs) {
      out.put(c.name);
      for (const std::size_t bytes : {c.output_bytes, c.saved_bytes, c.forward_workspace, c.backward_workspace})
        out.put(static_cast<std::uint64_t>(bytes));
      for (const double time : {c.forward_time, c.backward_time, c.restore_time}) out.put(time);
      out.put(static_cast<std::uint64_t>(c.once));
      out.put(static_cast<std::uint64_t>(c.also_reads.size()));
      for (const std::size_t j : c.also_reads) out.put(static_cast<std::uint64_t>(j));
    }
    out.write(path);
  }

  /// Reads it from a file. Throws: file_error if it is missing, damaged or something else.
  static chain_profile load(const std::string& path) {
    archive_reader in(path);
    if (in.get_string() != "heddle::recompute::chain_profile 1") in.refuse("it is not a profile of layers");
    const auto number = [&] { return static_cast<std::size_t>(in.get<std::uint64_t>()); };
    chain_profile found;
    for (std::size_t left = number(); left > 0; --left) {
      layer_cost c;
      c.name = in.get_string();
      for (std::size_t* bytes : {&c.output_bytes, &c.saved_bytes, &c.forward_workspace, &c.backward_workspace})
        *bytes = number();
      for (double* time : {&c.forward_time, &c.backward_time, &c.restore_time}) *time = in.get<double>();
      c.once = number() != 0;
      for (std::size_t reads = number(); reads > 0; --reads) c.also_reads.push_back(number());
      found.costs.push_back(std::move(c));
    }
    in.finish();
    return found;
  }

  friend bool operator==(const chain_profile&, const chain_profile&) = default;
};

/// @brief How `profile` measures.
struct profile_options {
  std::size_t repetitions = 3;  ///< Calls of each forward and backward; the fastest counts. At least 1.
};

/// @brief Runs every layer a few times, one after the other, and measures what a policy must know.
///
/// Sizes are the layers' own statements, times are measured. Where the resource counts (`tracking`), what a layer takes
/// from it beside its blocks while it runs, gives the workspaces. A layer runs with `pass::again`, so that statistics
/// and counters stay as they are; one that may run only `once` does so, with `pass::first`: if it communicates, all
/// ranks profile. Backward gets the layer's output for a gradient, so parameter gradients are garbage
/// afterwards. At no time are more than one layer's blocks held, beside outputs that later layers also read: this works
/// for a chain that fits no memory without recomputation.
///
/// @code{.cpp}
/// heddle::tracking memory{heddle::host_resource{}};
/// auto measured = heddle::recompute::profile(layers, x, memory);
/// measured.save("layers.profile");
/// c.use(heddle::recompute::optimal{.budget = 512 << 20}.plan(measured.costs));
/// @endcode
///
/// @param layers In their order. @param in The input of the first one. @param memory Memory of the layers' backend.
/// @param options How often to run. @param work The queue on which the layers enqueue.
/// Sync:    waits for the queue after each call.
/// Throws:  `argument_error` for 0 repetitions, or a layer that keeps memory; what layers and the resource throw.
template <class Resource, class Queue = host::queue>
chain_profile profile(const std::vector<layer>& layers, const void* in, Resource memory, profile_options options = {},
                      Queue work = {}) {
  if (options.repetitions == 0)
    throw argument_error("heddle::recompute::profile: .repetitions is 0, allowed is 1 or more");
  constexpr bool counts = requires {
    memory.reset_peak();
    memory.peak_bytes() - memory.bytes();
  };
  struct block {
    Resource* from;
    Queue work;
    std::size_t bytes;
    void* data;
    block(Resource& r, Queue q, std::size_t n) : from(&r), work(q), bytes(n), data(r.allocate(q, n, 64)) {}
    block(block&& other) noexcept
        : from(other.from), work(other.work), bytes(other.bytes), data(std::exchange(other.data, nullptr)) {}
    block& operator=(block&& other) noexcept {
      std::swap(from, other.from);
      std::swap(work, other.work);
      std::swap(bytes, other.bytes);
      std::swap(data, other.data);
      return *this;
    }
    ~block() {
      if (data) from->deallocate(work, data, bytes, 64);
    }
  };
  chain_profile result;
  const std::size_t n = layers.size();
  for (const layer& l : layers) result.costs.push_back(l.cost());
  heddle::detail::check_reads(std::span<const layer_cost>(result.costs));
  std::vector<std::size_t> last_reader(n);
  for (std::size_t i = 0; i < n; ++i) {
    for (const std::size_t j : layers[i].also_reads()) last_reader[j] = i;
  }
  std::vector<block> outputs;
  for (std::size_t i = 0; i < n; ++i) {
    layer_cost& cost = result.costs[i];
    std::vector<const void*> from{i ? outputs[i - 1].data : in};
    std::vector<void*> to;
    std::vector<block> gradients;
    if (i > 0) gradients.emplace_back(memory, work, outputs[i - 1].bytes);
    for (const std::size_t j : cost.also_reads) {
      from.push_back(outputs[j].data);
      gradients.emplace_back(memory, work, outputs[j].bytes);
    }
    for (const block& g : gradients) to.push_back(g.data);
    if (i == 0) to.push_back(nullptr);
    const inputs reads{from.data(), from.size()};
    outputs.emplace_back(memory, work, cost.output_bytes);
    const block saved(memory, work, cost.saved_bytes);
    const block forward_room(memory, work, cost.forward_workspace);
    const block backward_room(memory, work, cost.backward_workspace);
    const auto measure = [&](std::size_t times, double& time, std::size_t& workspace, std::size_t given, auto&& call) {
      std::size_t before = 0;
      if constexpr (counts) before = memory.bytes();
      for (std::size_t k = 0; k < times; ++k) {
        if constexpr (counts) memory.reset_peak();
        work.synchronize();
        const auto start = std::chrono::steady_clock::now();
        call();
        work.synchronize();
        const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (k == 0 || took < time) time = took;
        if constexpr (counts) {
          if (memory.bytes() != before) {
            throw argument_error("heddle::recompute::profile: layer " + std::to_string(i) + " (" + cost.name +
                                 ") keeps memory that it takes while it runs");
          }
          workspace = (std::max)(workspace, given + memory.peak_bytes() - before);
        }
      }
    };
    void* const out = outputs[i].data;
    const bool restores = cost.restore_time > 0;
    const pass forward_pass = cost.once ? pass::first : pass::again;
    measure(cost.once ? 1 : options.repetitions, cost.forward_time, cost.forward_workspace, forward_room.bytes,
            [&] { layers[i].forward(reads, out, saved.data, forward_pass, forward_room.data); });
    if (restores) {
      measure(options.repetitions, cost.restore_time, cost.forward_workspace, forward_room.bytes,
              [&] { layers[i].restore(reads, saved.data, forward_room.data); });
    }
    measure(options.repetitions, cost.backward_time, cost.backward_workspace, backward_room.bytes,
            [&] { layers[i].backward(reads, saved.data, out, {to.data(), to.size()}, backward_room.data); });
    for (std::size_t j = 0; j < i; ++j) {
      if (last_reader[j] <= i && outputs[j].data) outputs[j] = block(memory, work, 0);
    }
  }
  return result;
}

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

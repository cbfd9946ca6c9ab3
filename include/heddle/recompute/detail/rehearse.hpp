// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/concept.hpp>
#include <heddle/recompute/schedule.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Outputs with several readers, and those that are computed once a step, are freed by no rule of an action: they live
// from the step that writes them to the last one that reads them before they are written again.
struct liveness {
  std::vector<bool> shared;                    // by layer
  std::vector<std::vector<std::size_t>> ends;  // by step: which of these outputs to free after it

  liveness() = default;
  template <class Schedule> liveness(const Schedule& what, std::span<const recompute::layer_cost> costs) {
    constexpr std::size_t never = static_cast<std::size_t>(-1);
    const std::size_t n = costs.size();
    shared.resize(n);
    bool any = false;
    for (std::size_t i = 0; i < n; ++i) {
      if (costs[i].once) shared[i] = any = true;
      for (const std::size_t j : costs[i].also_reads) shared[j] = any = true;
    }
    if (!any) return;
    ends.resize(what.steps.size());
    std::vector<std::size_t> last(n, never);  // step of the last use of what is held
    std::vector<bool> ran(n);
    for (std::size_t k = 0; k < what.steps.size(); ++k) {
      const std::size_t i = what.steps[k].layer;
      if (i >= n) continue;  // for the simulator to refuse
      const recompute::action a = what.steps[k].what;
      const bool skipped = costs[i].once && ran[i] && (is_forward(a) || a == recompute::action::restore);
      if (!skipped && (is_forward(a) || a == recompute::action::restore || a == recompute::action::backward)) {
        if (i > 0) last[i - 1] = k;
        for (const std::size_t j : costs[i].also_reads) last[j] = k;
        if (i + 1 == n) last[i] = k;
      }
      if (is_forward(a)) ran[i] = true;
      if ((is_forward(a) && !skipped) || a == recompute::action::fetch) {
        if (last[i] != never && last[i] != k && shared[i]) ends[last[i]].push_back(i);
        last[i] = k;
      }
      if (a == recompute::action::offload) last[i] = k;
      if (a == recompute::action::evict) last[i] = never;
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (shared[i] && last[i] != never) ends[last[i]].push_back(i);
    }
  }
};

// The kinds of block a chain allocates, one of each per layer.
enum class block_kind : std::uint8_t { output, saved, gradient, workspace, spare };

// Checks and prices a schedule; calls sink(step, kind, layer, bytes, taken) for every allocation and deallocation.
template <class Simulation, class Schedule, class Sink>
Simulation rehearse(const Schedule& what, std::span<const recompute::layer_cost> costs, Sink&& sink) {
  const std::size_t n = costs.size();
  struct flags {
    bool output = false, saved = false, gradient = false, ran = false;
    bool output_away = false, saved_away = false, leaving = false, stored_output = false, stored_saved = false;
  };
  std::vector<flags> held(n);
  Simulation result;
  std::size_t bytes = 0;
  std::size_t k = 0;      // the step
  std::size_t ahead = n;  // layers whose backward is to come
  bool forward_over = n == 0;

  const auto fail = [&](const std::string& detail) {
    const std::size_t i = what.steps[k].layer;
    throw recompute::schedule_error("simulate", k, recompute::name_of(what.steps[k].what), i,
                                    i < n ? costs[i].name : std::string{}, detail);
  };
  check_reads(costs);
  const liveness share(what, costs);
  const auto record = [&] {
    if (bytes > result.peak_bytes) {
      result.peak_bytes = bytes;
      result.peak_step = k;
    }
    result.timeline.push_back({k, bytes});
  };
  const auto take = [&](block_kind kind, std::size_t i, std::size_t size) {
    if (size == 0) return;
    if (size > static_cast<std::size_t>(PTRDIFF_MAX) - bytes) fail("more bytes are held than can be addressed");
    bytes += size;
    sink(k, kind, i, size, true);
    record();
  };
  const auto give = [&](block_kind kind, std::size_t i, std::size_t size) {
    if (size == 0) return;
    bytes -= size;
    sink(k, kind, i, size, false);
    record();
  };
  const auto stays = [&](std::size_t i) {
    if (held[i].leaving) fail("frees what is being offloaded of layer " + std::to_string(i) + "; evict it first");
  };
  const auto give_output = [&](std::size_t i) {
    if (held[i].output) stays(i);
    if (held[i].output) give(block_kind::output, i, costs[i].output_bytes);
    held[i].output = false;
  };
  const auto needs = [&](std::size_t j) {
    if (!held[j].output) fail("needs its input, the output of layer " + std::to_string(j) + ", which is not held");
  };
  const auto needs_inputs = [&](std::size_t i) {
    if (i > 0) needs(i - 1);
    for (const std::size_t j : costs[i].also_reads) needs(j);
  };
  const auto forward = [&](recompute::action a, std::size_t i) {
    const recompute::layer_cost& cost = costs[i];
    const bool whole = is_forward(a);  // or a restore
    const double time = whole ? cost.forward_time : cost.again();
    const bool spare = !whole && !(cost.restore_time > 0);
    const bool keeps = a == recompute::action::forward_keep_all || !whole || cost.once;
    if (i >= ahead) fail("its backward has already run");
    if (!cost.once || !held[i].ran) {
      needs_inputs(i);
      if (whole && held[i].output) fail("its output is already held; drop it first");
      if (keeps && held[i].saved) fail("its saved block is already held");
      if (whole) take(block_kind::output, i, cost.output_bytes);
      if (spare) take(block_kind::spare, i, cost.output_bytes);
      if (keeps) take(block_kind::saved, i, cost.saved_bytes);
      take(block_kind::workspace, i, cost.forward_workspace);
      give(block_kind::workspace, i, cost.forward_workspace);
      if (spare) give(block_kind::spare, i, cost.output_bytes);
      held[i].output = held[i].output || whole;
      held[i].saved = held[i].saved || keeps;
      result.forward_time += time;
      if (held[i].ran) {
        ++result.extra_forwards;
        result.extra_time += time;
      }
      if (!whole && !held[i].ran) fail("its forward has not run yet");
      held[i].ran = true;
    }
    if (a == recompute::action::forward_drop && i > 0 && !share.shared[i - 1]) give_output(i - 1);
    if (whole && i + 1 == n && !forward_over) {
      forward_over = true;
      result.forward_steps = k + 1;
    }
  };
  const auto backward = [&](std::size_t i) {
    const recompute::layer_cost& cost = costs[i];
    if (!forward_over) fail("no forward of the last layer comes before it");
    if (i + 1 != ahead)
      fail(i < ahead ? "the backward of layer " + std::to_string(ahead - 1) + " must come first"
                     : std::string("it has already run"));
    needs_inputs(i);
    if (!held[i].saved && cost.saved_bytes != 0) fail("needs its saved block, which is not held");
    const auto gradient = [&](std::size_t j, bool begin) {
      const block_kind kind = held[j].gradient ? block_kind::spare : block_kind::gradient;
      if (begin) return take(kind, j, costs[j].output_bytes);
      if (held[j].gradient) give(kind, j, costs[j].output_bytes);  // added to what is there
      held[j].gradient = true;
    };
    for (const bool begin : {true, false}) {
      if (i > 0) gradient(i - 1, begin);
      for (const std::size_t j : cost.also_reads) gradient(j, begin);
      if (begin) take(block_kind::workspace, i, cost.backward_workspace);
      if (begin) give(block_kind::workspace, i, cost.backward_workspace);
    }
    result.backward_time += cost.backward_time;
    if (i + 1 < n) give(block_kind::gradient, i, cost.output_bytes);
    if (held[i].saved) stays(i);
    if (held[i].saved) give(block_kind::saved, i, cost.saved_bytes);
    if (!share.shared[i]) give_output(i);
    if (i > 0 && !share.shared[i - 1]) give_output(i - 1);
    held[i].saved = false;
    ahead = i;
  };
  const auto copied = [&](std::size_t size, bool& stored) {
    result.copied_bytes += size;
    if (!stored) result.stored_bytes += size;
    stored = true;
  };

  for (; k < what.steps.size(); ++k) {
    const recompute::action a = what.steps[k].what;
    const std::size_t i = what.steps[k].layer;
    if (i >= n) fail("there are " + std::to_string(n) + " layers");
    if (a > recompute::action::fetch) fail("there is no such action");
    flags& own = held[i];
    const recompute::layer_cost& cost = costs[i];
    if (is_forward(a) || a == recompute::action::restore) {
      forward(a, i);
    } else if (a == recompute::action::backward) {
      backward(i);
    } else if (a == recompute::action::drop) {
      if (!own.output && !share.shared[i]) fail("its output is not held");
      if (!share.shared[i]) give_output(i);
    } else if (a == recompute::action::offload) {
      if (own.leaving || own.output_away || own.saved_away) fail("it is already offloaded");
      if (!own.output && !own.saved) fail("nothing of it is held");
      own.leaving = true;
      own.output_away = own.output;
      own.saved_away = own.saved;
      if (own.output) copied(cost.output_bytes, own.stored_output);
      if (own.saved) copied(cost.saved_bytes, own.stored_saved);
    } else if (a == recompute::action::evict) {
      if (!own.leaving) fail("no offload comes before it");
      if (own.output_away != own.output || own.saved_away != own.saved) fail("what is held is not what was offloaded");
      own.leaving = false;
      give_output(i);
      if (own.saved) give(block_kind::saved, i, cost.saved_bytes);
      own.saved = false;
    } else {
      if (own.leaving || !(own.output_away || own.saved_away)) fail("nothing of it was evicted");
      if ((own.output_away && own.output) || (own.saved_away && own.saved)) fail("it is already held");
      if (own.output_away) {
        take(block_kind::output, i, cost.output_bytes);
        result.copied_bytes += cost.output_bytes;
        own.output = true;
      }
      if (own.saved_away) {
        take(block_kind::saved, i, cost.saved_bytes);
        result.copied_bytes += cost.saved_bytes;
        own.saved = true;
      }
      own.output_away = own.saved_away = false;
    }
    if (!share.ends.empty()) {
      for (const std::size_t j : share.ends[k]) give_output(j);
    }
  }
  if (ahead != 0) {
    throw recompute::schedule_error("simulate", k, "end", ahead - 1, costs[ahead - 1].name,
                                    "the schedule ends before the layer's backward");
  }
  return result;
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

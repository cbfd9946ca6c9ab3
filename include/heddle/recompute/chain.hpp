// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/core/slice.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/host_resource.hpp>
#include <heddle/recompute/concept.hpp>
#include <heddle/recompute/detail/chain_parts.hpp>
#include <heddle/recompute/detail/rehearse.hpp>
#include <heddle/recompute/layer.hpp>
#include <heddle/recompute/schedule.hpp>
#include <heddle/recompute/simulate.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief The store of a chain that offloads nothing: only the queue on which the layers work.
template <class Queue = host::queue> struct no_store {
  Queue queue{};  ///< Where memory is taken and given back.
  /// The queue.
  Queue compute() const { return queue; }
};

/// @brief Runs layers one after another, forward and backward, holding in memory what a policy's schedule says.
///
/// @code{.cpp}
/// heddle::tracking memory{heddle::host_resource{}};
/// heddle::recompute::chain c{heddle::recompute::sqrt{}, memory, first, second, third};   // or a std::vector<layer>
/// const void* y = c.forward(x);                       // valid until backward returns
/// loss_gradient(y, dy);
/// c.backward(dy, nullptr);                            // nullptr: no gradient of x is wanted
/// assert(memory.peak_bytes() == c.simulated().peak_bytes);
/// @endcode
///
/// The caller's: the input, alive until `backward` returns; the gradient of the last output; the gradient of the input.
/// The chain's, from the resource: every output, every saved block, every gradient between two layers. `action` says
/// when each is allocated and freed. The last output lives until the backward of the last layer has run. After
/// `backward` nothing is held.
///
/// Layers are asked for their sizes when `forward` begins. If these differ from the time before, the policy plans
/// again. Within a training step a layer must keep its sizes.
///
/// A layer may read outputs of earlier layers beside that of the one before it (`layer`'s `also_reads`): then the
/// chain adds the gradients that such an output gets from its readers, the last reader's first.
///
/// On a device the chain takes memory on the store's queue; layers enqueue their work on the same one.
///
/// State:   between forward and backward what the schedule holds, else nothing; some 300 bytes per layer beside it.
/// Sync:    runs on the caller's thread, one at a time; only enqueues, where layers do.
/// Throws:  `schedule_error` when a schedule doesn't fit the layers, before anything runs, and when a layer's sizes
///          (under `checked`, its values) differ on recomputation, naming layer and step; `argument_error` on a missing
///          gradient or a call out of order; what layers and the resource throw. After an exception from a running
///          layer or the resource everything is given back and the next `forward` starts anew.
///
/// @tparam Policy Anything with `plan`: `none`, `sqrt`, a `schedule` written by hand, a user's own.
/// @tparam Resource Memory of the backend that the layers work on; held by value.
/// @tparam Store Where offloaded blocks go, and the queue: `no_store`, or `offload_store` of recompute/offload.hpp.
template <class Policy, class Resource = host_resource, class Store = no_store<>> class chain {
  static_assert(has_plan<Policy>,
                "heddle::recompute::chain: the policy must provide plan(span of layer_cost) const; "
                "see recompute/concept.hpp");
  using queue = std::remove_cvref_t<decltype(std::declval<const Store&>().compute())>;
  static_assert(has_allocate<Resource, queue> && has_deallocate<Resource, queue>,
                "heddle::recompute::chain: the resource must provide allocate and a noexcept deallocate for the "
                "queue of the layers; see memory/concept.hpp");

 public:
  /// The alignment of every block that the chain allocates.
  static constexpr std::size_t alignment = 64;

  /// A chain of layers in the order of the vector.
  /// Throws: also `argument_error` where an output with several readers has a layer without `add_gradient`.
  chain(Policy policy, Resource resource, std::vector<layer> layers, Store store = Store{})
      : policy_(std::move(policy)),
        resource_(std::move(resource)),
        store_(std::move(store)),
        layers_(std::move(layers)),
        state_(layers_.size()) {
    adopt(ask());
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      for (const std::size_t j : layers_[i].also_reads()) {
        if (layers_[j].adds_gradients()) continue;
        throw argument_error("heddle::recompute::chain: layer " + std::to_string(j) + " (" + layers_[j].name() +
                             ") is read by several layers, so it must provide add_gradient(more, sum)");
      }
    }
  }

  /// A chain of layers, by reference, in the order of the arguments; a `recompute::layer` may stand for one.
  template <class... Layers>
    requires(!(std::same_as<std::remove_cvref_t<Layers>, std::vector<layer>> || ...))
  chain(Policy policy, Resource resource, Layers&&... layers)
      : chain(std::move(policy), std::move(resource), gather(layers...)) {
    static_assert(((std::is_lvalue_reference_v<Layers> || std::same_as<std::remove_cvref_t<Layers>, layer>) && ...),
                  "heddle::recompute::chain: layers are held by reference; a temporary would be gone");
  }

  chain(chain&&) = default;
  chain(const chain&) = delete;
  chain& operator=(const chain&) = delete;
  chain& operator=(chain&&) = delete;

  /// Gives everything back.
  ~chain() { discard(); }

  /// @brief Runs the forward phase of the schedule and returns the last output.
  ///
  /// The output is valid until `backward` returns (or until the schedule drops it there); `in` must stay alive and
  /// unchanged until then. What an earlier `forward` without `backward` holds is given back first. A chain of no layers
  /// returns `in`.
  const void* forward(const void* in) {
    discard();
    if (std::vector<layer_cost> now = ask(); now != costs_) adopt(std::move(now));
    input_ = in;
    step_ = 0;
    try {
      run_to(simulated_.forward_steps);
    } catch (...) {
      discard();
      throw;
    }
    pending_ = true;
    return layers_.empty() ? in : state_.back().output.data;
  }

  /// @brief Runs the backward phase of the schedule.
  ///
  /// @param grad_out Gradient of the last output, of that output's size; the caller's.
  /// @param grad_in Where layer 0 writes the gradient of the input, or nullptr when nobody wants it. In a chain of no
  ///        layers `grad_out` is that gradient, and this must be nullptr or equal to it.
  void backward(const void* grad_out, void* grad_in) {
    if (!pending_) throw argument_error("heddle::recompute::chain::backward: no forward came before it");
    if (layers_.empty()) {
      if (grad_in && grad_in != grad_out) {
        throw argument_error(
            "heddle::recompute::chain::backward: a chain of no layers doesn't know the size of a gradient");
      }
    } else if (!grad_out && costs_.back().output_bytes) {
      throw argument_error("heddle::recompute::chain::backward: grad_out is null, and the output has " +
                           std::to_string(costs_.back().output_bytes) + " bytes");
    }
    grad_out_ = grad_out;
    grad_in_ = grad_in;
    try {
      run_to(plan().steps.size());
    } catch (...) {
      discard();
      throw;
    }
    discard();
  }

  /// @brief Runs all layers with `pass::inference`, saving nothing.
  ///
  /// Holds at most the outputs of two neighbouring layers; the last layer writes to `out`, which is the caller's and
  /// not counted. May be called between `forward` and `backward`. With no layers `out` must equal `in`. An output that
  /// several layers read is held until the last of them has run.
  void infer(const void* in, void* out) {
    if (layers_.empty()) {
      if (out != in) {
        throw argument_error(
            "heddle::recompute::chain::infer: a chain of no layers doesn't know the size of its output");
      }
      return;
    }
    if (const std::size_t bytes = layers_.back().cost().output_bytes; !out && bytes) {
      throw argument_error("heddle::recompute::chain::infer: out is null, and the output has " + std::to_string(bytes) +
                           " bytes");
    }
    detail::run_inference(
        layers_, in, out, [&](std::size_t bytes) { return resource_.allocate(store_.compute(), bytes, alignment); },
        [&](void* p, std::size_t bytes) noexcept { resource_.deallocate(store_.compute(), p, bytes, alignment); });
  }

  /// Gives back what a `forward` holds, when no `backward` will follow.
  void discard() noexcept {
    if constexpr (stores) store_.settle();
    for (layer_state& s : state_) {
      for (block* b : {&s.output, &s.saved, &s.gradient}) release(*b);
      s = {};
    }
    release(workspace_);
    for (block& b : spares_) release(b);
    pending_ = false;
  }

  /// @brief Uses this schedule from the next `forward` on, in place of the policy's.
  ///
  /// Throws `schedule_error` if it isn't legal for the layers, `argument_error` between forward and backward; then
  /// nothing has changed.
  void use(schedule what) {
    if (pending_) throw argument_error("heddle::recompute::chain::use: called between forward and backward");
    take_over(std::move(what), ask());
    fixed_ = true;
  }

  /// Uses this policy from the next `forward` on. Throws as the other `use`.
  void use(Policy policy)
    requires(!std::same_as<Policy, schedule>)
  {
    use(schedule(policy.plan(detail::as_span(ask()))));
    policy_ = std::move(policy);
    fixed_ = false;
  }

  /// The schedule in use.
  const schedule& plan() const noexcept { return schedule_; }
  /// What it costs by simulation; `peak_bytes` is what `tracking` measures.
  const simulation& simulated() const noexcept { return simulated_; }
  /// The layers' costs as last read; a policy plans from these.
  std::span<const layer_cost> costs() const noexcept { return detail::as_span(costs_); }
  /// Number of layers.
  std::size_t size() const noexcept { return layers_.size(); }
  /// The policy.
  const Policy& policy() const noexcept { return policy_; }
  /// A copy of the resource.
  Resource resource() const { return resource_; }

 private:
  static constexpr bool stores = requires(Store& s, void* p, std::size_t n) { s.put(n, p, n); };
  static constexpr bool checks = requires { requires Policy::checks_values; };
  static_assert(!checks || std::same_as<queue, host::queue>,
                "heddle::recompute::checked: values are compared on the host, so layers must work on host::queue");

  struct block {
    void* data = nullptr;
    std::size_t bytes = 0;
  };

  // What is held of a layer, and what happened to it in this training step.
  struct layer_state {
    block output, saved, gradient;  // the gradient is that of the output
    bool ran = false, has_gradient = false;
    bool output_away = false, saved_away = false;          // in the store
    bool output_arriving = false, saved_arriving = false;  // fetched, not waited for yet
    detail::made_first made{};                             // under `checked`
  };

  template <class... Layers> static std::vector<layer> gather(Layers&... layers) { return {layer(layers)...}; }

  std::vector<layer_cost> ask() const {
    std::vector<layer_cost> now;
    now.reserve(layers_.size());
    for (const layer& l : layers_) now.push_back(l.cost());
    detail::check_reads(detail::as_span(now));  // policies rely on it
    return now;
  }

  // Plans for these costs; changes nothing if that fails.
  void adopt(std::vector<layer_cost> costs) {
    schedule next = fixed_ ? schedule_ : schedule(policy_.plan(detail::as_span(costs)));
    take_over(std::move(next), std::move(costs));
  }

  void take_over(schedule next, std::vector<layer_cost> costs) {
    simulation result = simulate(next, detail::as_span(costs));
    if (!stores && result.stored_bytes != 0) {
      throw argument_error("heddle::recompute::chain: the schedule offloads, but this chain has no store");
    }
    detail::liveness alive(next, detail::as_span(costs));
    simulated_ = std::move(result);
    liveness_ = std::move(alive);
    schedule_ = std::move(next);
    costs_ = std::move(costs);
  }

  void allocate(block& b, std::size_t bytes) {
    b.data = resource_.allocate(store_.compute(), bytes, alignment);
    b.bytes = bytes;
  }

  void release(block& b) noexcept {
    if (b.data) resource_.deallocate(store_.compute(), b.data, b.bytes, alignment);
    b = {};
  }

  void run_to(std::size_t end) {
    const std::vector<operation>& steps = plan().steps;
    for (; step_ < end; ++step_) {
      const operation step = steps[step_];
      switch (step.what) {
        case action::drop:
          if (!liveness_.shared[step.layer]) release(arrived(step.layer).output);
          break;
        case action::backward: run_backward(step.layer); break;
        case action::offload:
        case action::evict:
        case action::fetch: move(step.what, step.layer); break;
        default: run_forward(step.what, step.layer);
      }
      if (!liveness_.ends.empty()) {
        for (const std::size_t j : liveness_.ends[step_]) release(arrived(j).output);
      }
    }
  }

  // What layer i reads, usable from here on in the queue.
  inputs inputs_of(std::size_t i) {
    from_.assign(1, i ? arrived(i - 1).output.data : input_);
    for (const std::size_t j : costs_[i].also_reads) from_.push_back(arrived(j).output.data);
    return {from_.data(), from_.size()};
  }

  layer_state& arrived(std::size_t i) {
    layer_state& s = state_[i];
    if constexpr (stores) {
      if (std::exchange(s.output_arriving, false)) store_.finish(2 * i);
      if (std::exchange(s.saved_arriving, false)) store_.finish(2 * i + 1);
    }
    return s;
  }

  // Offload, evict, fetch: output and saved block of layer i have the slots 2 i and 2 i + 1.
  void move([[maybe_unused]] action what, [[maybe_unused]] std::size_t i) {
    if constexpr (stores) {
      layer_state& s = arrived(i);
      const auto both = [&](block& b, std::size_t slot, std::size_t bytes, bool& away, bool& arriving) {
        if (what == action::offload) {
          away = b.data != nullptr;
          if (away) store_.put(slot, b.data, b.bytes);
        } else if (what == action::evict && away) {
          store_.finish(slot);
          release(b);
        } else if (what == action::fetch && std::exchange(away, false)) {
          allocate(b, bytes);
          store_.get(slot, b.data, bytes);
          arriving = true;
        }
      };
      both(s.output, 2 * i, costs_[i].output_bytes, s.output_away, s.output_arriving);
      both(s.saved, 2 * i + 1, costs_[i].saved_bytes, s.saved_away, s.saved_arriving);
    }
  }

  void run_forward(action what, std::size_t i) {
    layer_state& own = state_[i];
    const layer_cost& cost = costs_[i];
    const bool again = own.ran, whole = what != action::restore;
    if (!again || !cost.once) {
      const layer_cost now = layers_[i].cost();
      same_size(i, again, "output", now.output_bytes, cost.output_bytes);
      same_size(i, again, "saved block", now.saved_bytes, cost.saved_bytes);
      same_size(i, again, "forward workspace", now.forward_workspace, cost.forward_workspace);
      const bool early = !whole && cost.restore_time > 0;
      block& output = whole ? own.output : spares_[0];
      if (!early) allocate(output, cost.output_bytes);
      if (what == action::forward_keep_all || !whole || cost.once) allocate(own.saved, cost.saved_bytes);
      allocate(workspace_, cost.forward_workspace);
      const inputs in = inputs_of(i);
      void* saved = own.saved.data;
      [[maybe_unused]] std::vector<detail::cache_line> unkept;
      if constexpr (checks) saved = detail::marked(saved, cost.saved_bytes, again, unkept);
      if (early) {
        layers_[i].restore(in, saved, workspace_.data);
      } else {
        layers_[i].forward(in, output.data, saved, again ? pass::again : pass::first, workspace_.data);
      }
      release(workspace_);
      if constexpr (checks) {
        const char* const changed = own.made.differs(again, output.data, output.bytes, saved, cost.saved_bytes);
        if (changed) complain(i, std::string("its ") + changed + " differs in value from the first one");
      }
      if (!whole) release(spares_[0]);
      own.ran = true;
    }
    if (what == action::forward_drop && i > 0 && !liveness_.shared[i - 1]) release(arrived(i - 1).output);
  }

  void run_backward(std::size_t i) {
    layer_state& own = arrived(i);
    const layer_cost& cost = costs_[i];
    same_size(i, false, "backward workspace", layers_[i].cost().backward_workspace, cost.backward_workspace);
    if (spares_.size() <= cost.also_reads.size()) spares_.resize(cost.also_reads.size() + 1);
    const auto reads = [&](std::size_t r) { return r == 0 ? i - 1 : cost.also_reads[r - 1]; };
    const std::size_t count = i > 0 ? cost.also_reads.size() + 1 : 0;
    to_.assign(cost.also_reads.size() + 1, grad_in_);
    for (std::size_t r = 0; r < count; ++r) {
      layer_state& s = state_[reads(r)];
      block& b = s.has_gradient ? spares_[r] : s.gradient;
      allocate(b, costs_[reads(r)].output_bytes);
      to_[r] = b.data;
    }
    allocate(workspace_, cost.backward_workspace);
    const bool top = i + 1 == layers_.size();
    layers_[i].backward(inputs_of(i), own.saved.data, top ? grad_out_ : own.gradient.data, {to_.data(), to_.size()},
                        workspace_.data);
    release(workspace_);
    for (std::size_t r = 0; r < count; ++r) {
      layer_state& s = state_[reads(r)];
      if (std::exchange(s.has_gradient, true)) {
        layers_[reads(r)].add_gradient(spares_[r].data, s.gradient.data);
        release(spares_[r]);
      }
    }
    release(own.gradient);
    release(own.saved);
    if (!liveness_.shared[i]) release(own.output);
    if (i > 0 && !liveness_.shared[i - 1]) release(state_[i - 1].output);
  }

  void same_size(std::size_t i, bool again, const char* what, std::size_t now, std::size_t before) {
    if (now == before) return;
    complain(i, std::string("its ") + what + " has " + std::to_string(now) + " bytes" +
                    (again ? " on recomputation" : "") + ", but had " + std::to_string(before));
  }

  [[noreturn]] void complain(std::size_t i, const std::string& detail) {
    throw schedule_error("chain", step_, name_of(plan().steps[step_].what), i, layers_[i].name(), detail);
  }

  Policy policy_;
  Resource resource_;
  Store store_;
  std::vector<layer> layers_;
  std::vector<layer_cost> costs_;
  schedule schedule_;
  simulation simulated_;
  detail::liveness liveness_;
  std::vector<layer_state> state_;
  block workspace_;               // of the layer that runs
  std::vector<block> spares_{1};  // an output nobody wants, gradients to be added
  std::vector<const void*> from_;
  std::vector<void*> to_;
  const void* input_ = nullptr;
  const void* grad_out_ = nullptr;
  void* grad_in_ = nullptr;
  std::size_t step_ = 0;
  bool fixed_ = false;    // the schedule was given by use(): don't ask the policy
  bool pending_ = false;  // between forward and backward
};

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

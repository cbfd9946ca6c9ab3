// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/core/slice.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/host_resource.hpp>
#include <heddle/recompute/concept.hpp>
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
/// State:   between forward and backward what the schedule holds, else nothing; some 100 bytes per layer beside it.
/// Sync:    runs on the caller's thread; one thread at a time per chain.
/// Throws:  `schedule_error` when a schedule doesn't fit the layers, before anything runs, and when a layer's sizes
///          (with `check`, its values) differ on recomputation, naming layer and step; `argument_error` on a missing
///          gradient or a call out of order; what layers and the resource throw. After an exception from a running
///          layer or the resource everything is given back and the next `forward` starts anew.
///
/// @tparam Policy Anything with `plan`: `none`, `sqrt`, a `schedule` written by hand, a user's own.
/// @tparam Resource Host memory; held by value.
template <class Policy, class Resource = host_resource> class chain {
  static_assert(has_plan<Policy>,
                "heddle::recompute::chain: the policy must provide plan(span of layer_cost) const; "
                "see recompute/concept.hpp");
  static_assert(has_allocate<Resource, host::queue> && has_deallocate<Resource, host::queue>,
                "heddle::recompute::chain: the resource must provide allocate and a noexcept deallocate for "
                "host::queue; see memory/concept.hpp");

 public:
  /// The alignment of every block that the chain allocates.
  static constexpr std::size_t alignment = 64;

  /// A chain of layers in the order of the vector.
  chain(Policy policy, Resource resource, std::vector<layer> layers)
      : policy_(std::move(policy)), resource_(std::move(resource)), layers_(std::move(layers)) {
    adopt(ask());
    outputs_.resize(layers_.size());
    saved_.resize(layers_.size());
    gradients_.resize(layers_.size());
    ran_.resize(layers_.size());
    hashes_.resize(layers_.size());
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
    checking_ = check_;
    try {
      run_to(simulated_.forward_steps);
    } catch (...) {
      discard();
      throw;
    }
    pending_ = true;
    return layers_.empty() ? in : outputs_.back().data;
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
  /// not counted. May be called between `forward` and `backward`. With no layers `out` must equal `in`.
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
    block held[2];
    try {
      for (std::size_t i = 0; i < layers_.size(); ++i) {
        const bool last = i + 1 == layers_.size();
        if (!last) allocate(held[i % 2], layers_[i].cost().output_bytes);
        layers_[i].forward(i ? held[(i - 1) % 2].data : in, last ? out : held[i % 2].data, nullptr, pass::inference);
        if (i) release(held[(i - 1) % 2]);
      }
    } catch (...) {
      release(held[0]);
      release(held[1]);
      throw;
    }
  }

  /// Gives back what a `forward` holds, when no `backward` will follow.
  void discard() noexcept {
    for (block& b : outputs_) release(b);
    for (block& b : saved_) release(b);
    for (block& b : gradients_) release(b);
    pending_ = false;
  }

  /// @brief Uses this schedule from the next `forward` on, in place of the policy's.
  ///
  /// Throws `schedule_error` if it isn't legal for the layers, `argument_error` between forward and backward; then
  /// nothing has changed.
  void use(schedule what) {
    if (pending_) throw argument_error("heddle::recompute::chain::use: called between forward and backward");
    std::vector<layer_cost> now = ask();
    simulation result = simulate(what, detail::as_span(now));
    schedule_ = std::move(what);
    simulated_ = std::move(result);
    costs_ = std::move(now);
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

  /// @brief Compares every recomputed output, bit for bit, with the first one by a 64-bit hash; off by default.
  ///
  /// Takes effect at the next `forward`; reads each output once more. A difference is a `schedule_error` naming layer
  /// and step: a layer that draws its randomness from a state, or changes under `pass::again`.
  void check(bool on) noexcept { check_ = on; }

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
  struct block {
    void* data = nullptr;
    std::size_t bytes = 0;
  };

  template <class... Layers> static std::vector<layer> gather(Layers&... layers) {
    std::vector<layer> all;
    all.reserve(sizeof...(layers));
    (all.emplace_back(layers), ...);
    return all;
  }

  std::vector<layer_cost> ask() const {
    std::vector<layer_cost> now;
    now.reserve(layers_.size());
    for (const layer& l : layers_) now.push_back(l.cost());
    return now;
  }

  // Plans for these costs; changes nothing if that fails.
  void adopt(std::vector<layer_cost> costs) {
    schedule next = fixed_ ? schedule_ : schedule(policy_.plan(detail::as_span(costs)));
    simulated_ = simulate(next, detail::as_span(costs));
    schedule_ = std::move(next);
    costs_ = std::move(costs);
  }

  void allocate(block& b, std::size_t bytes) {
    b.data = resource_.allocate(host::queue{}, bytes, alignment);
    b.bytes = bytes;
  }

  void release(block& b) noexcept {
    if (b.data) resource_.deallocate(host::queue{}, b.data, b.bytes, alignment);
    b = {};
  }

  void run_to(std::size_t end) {
    const std::vector<operation>& steps = plan().steps;
    if (step_ == 0) ran_.assign(layers_.size(), false);
    for (; step_ < end; ++step_) {
      const operation step = steps[step_];
      if (step.what == action::drop) {
        release(outputs_[step.layer]);
      } else if (step.what == action::backward) {
        run_backward(step.layer);
      } else {
        run_forward(step.what, step.layer);
      }
    }
  }

  void run_forward(action what, std::size_t i) {
    const bool again = ran_[i];
    const layer_cost now = layers_[i].cost();
    same_size(i, again, "output", now.output_bytes, costs_[i].output_bytes);
    same_size(i, again, "saved block", now.saved_bytes, costs_[i].saved_bytes);
    allocate(outputs_[i], now.output_bytes);
    if (what == action::forward_keep_all) allocate(saved_[i], now.saved_bytes);
    void* saved = what == action::forward_keep_all ? saved_[i].data : nullptr;
    layers_[i].forward(i ? outputs_[i - 1].data : input_, outputs_[i].data, saved, again ? pass::again : pass::first);
    ran_[i] = true;
    if (checking_) {
      const std::uint64_t hash = hash_of(outputs_[i]);
      if (again && hash != hashes_[i]) complain(i, "its output differs in value from the first one");
      hashes_[i] = hash;
    }
    if (what == action::forward_drop && i > 0) release(outputs_[i - 1]);
  }

  void run_backward(std::size_t i) {
    const bool top = i + 1 == layers_.size();
    if (i > 0) allocate(gradients_[i - 1], costs_[i - 1].output_bytes);
    layers_[i].backward(i ? outputs_[i - 1].data : input_, saved_[i].data, top ? grad_out_ : gradients_[i].data,
                        i ? gradients_[i - 1].data : grad_in_);
    release(gradients_[i]);
    release(saved_[i]);
    release(outputs_[i]);
    if (i > 0) release(outputs_[i - 1]);
  }

  void same_size(std::size_t i, bool again, const char* what, std::size_t now, std::size_t before) {
    if (now == before) return;
    complain(i, std::string("its ") + what + " has " + std::to_string(now) + " bytes" +
                    (again ? " on recomputation" : "") + ", but had " + std::to_string(before));
  }

  [[noreturn]] void complain(std::size_t i, const std::string& detail) {
    throw schedule_error("chain", step_, name_of(plan().steps[step_].what), i, layers_[i].name(), detail);
  }

  // FNV-1a over 8-byte words, then over the rest: finds accidents, not forgeries.
  static std::uint64_t hash_of(const block& b) noexcept {
    const unsigned char* p = static_cast<const unsigned char*>(b.data);
    std::uint64_t hash = 14695981039346656037u;
    std::size_t k = 0;
    for (; k + 8 <= b.bytes; k += 8) {
      std::uint64_t word = 0;
      for (std::size_t j = 0; j < 8; ++j) word |= static_cast<std::uint64_t>(p[k + j]) << (8 * j);
      hash = (hash ^ word) * 1099511628211u;
      hash ^= hash >> 32;
    }
    for (; k < b.bytes; ++k) hash = (hash ^ p[k]) * 1099511628211u;
    return hash;
  }

  Policy policy_;
  Resource resource_;
  std::vector<layer> layers_;
  std::vector<layer_cost> costs_;
  schedule schedule_;
  simulation simulated_;
  std::vector<block> outputs_, saved_, gradients_;  // gradients_[i] is that of layer i's output
  std::vector<bool> ran_;                           // in this training step
  std::vector<std::uint64_t> hashes_;
  const void* input_ = nullptr;
  const void* grad_out_ = nullptr;
  void* grad_in_ = nullptr;
  std::size_t step_ = 0;
  bool fixed_ = false;    // the schedule was given by use(): don't ask the policy
  bool pending_ = false;  // between forward and backward
  bool check_ = false, checking_ = false;
};

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

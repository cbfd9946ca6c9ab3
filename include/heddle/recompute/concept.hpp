// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/slice.hpp>
#include <heddle/recompute/schedule.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief Why a layer's forward is called.
enum class pass : std::uint8_t {
  first,     ///< The only one of this training step that may change the layer: statistics, step counters.
  again,     ///< Recomputation: must give the bits of the first pass and change nothing.
  inference  ///< No backward will follow; statistics are used, not updated.
};

/// `plan(costs)` returns a schedule and changes nothing.
template <class Policy>
concept has_plan = requires(const Policy& p) {
  { p.plan(heddle::detail::value_of<std::span<const layer_cost>>()) } -> std::convertible_to<schedule>;
};

/// @brief Decides which activations a chain keeps and which it computes again.
///
/// One function from the layers' costs to a schedule. It is called again when sizes change, so it must be pure. What it
/// returns is checked by `simulate` before anything runs. A user's own policy, which recomputes every layer that costs
/// less than a threshold from its input, and keeps all of the others:
///
/// @code{.cpp}
/// struct cheap_again {
///   double threshold = 0.1;
///   heddle::recompute::schedule plan(std::span<const heddle::recompute::layer_cost> costs) const {
///     using enum heddle::recompute::action;
///     heddle::recompute::schedule s;
///     auto cheap = [&](std::size_t i) { return i + 1 < costs.size() && costs[i].forward_time < threshold; };
///     for (std::size_t i = 0; i < costs.size(); ++i) {
///       s.steps.push_back({cheap(i) ? forward_keep_input : forward_keep_all, i});
///     }
///     for (std::size_t i = costs.size(); i-- > 0;) {
///       if (cheap(i)) s.steps.insert(s.steps.end(), {{forward_keep_all, i}, {drop, i}});  // its saved block is back
///       s.steps.push_back({backward, i});
///     }
///     return s;
///   }
/// };
/// static_assert(heddle::recompute::policy<cheap_again>);
/// @endcode
template <class Policy>
concept policy = has_plan<Policy> && std::is_copy_constructible_v<Policy>;

/// `output_bytes() const` returns a size.
template <class Layer>
concept has_output_bytes = requires(const Layer& l) {
  { l.output_bytes() } -> std::convertible_to<std::size_t>;
};

/// `saved_bytes() const` returns a size.
template <class Layer>
concept has_saved_bytes = requires(const Layer& l) {
  { l.saved_bytes() } -> std::convertible_to<std::size_t>;
};

/// The inputs of a layer that reads several outputs: first that of the layer before it, then those it also reads.
using inputs = std::span<const void* const>;
/// Where the gradients of these inputs go; the first may be null.
using input_gradients = std::span<void* const>;

}  // namespace recompute
/// @cond
namespace detail {
template <class Layer, class In>
concept forwards_with_room = requires(Layer& l, In in, void* p, recompute::pass kind) { l.forward(in, p, p, kind, p); };
template <class Layer, class In>
concept forwards = forwards_with_room<Layer, In> ||
                   requires(Layer& l, In in, void* p, recompute::pass kind) { l.forward(in, p, p, kind); };
template <class Layer, class In, class Gradients>
concept backwards_with_room =
    requires(Layer& l, In in, const void* p, Gradients g, void* w) { l.backward(in, p, p, g, w); };
template <class Layer, class In, class Gradients>
concept backwards = backwards_with_room<Layer, In, Gradients> ||
                    requires(Layer& l, In in, const void* p, Gradients g) { l.backward(in, p, p, g); };
template <class Layer, class In>
concept restores_with_room = requires(Layer& l, In in, void* p) { l.restore(in, p, p); };
template <class Layer, class In>
concept restores = restores_with_room<Layer, In> || requires(Layer& l, In in, void* p) { l.restore(in, p); };
}  // namespace detail
/// @endcond
namespace recompute {

/// `forward(in, out, saved, pass)`, or with a workspace behind; `in` is a pointer, or `inputs`.
template <class Layer>
concept has_forward = detail::forwards<Layer, const void*> || detail::forwards<Layer, inputs>;

/// `backward(in, saved, grad_out, grad_in)`, or with a workspace behind; pointers, or `inputs` and `input_gradients`.
template <class Layer>
concept has_backward =
    detail::backwards<Layer, const void*, void*> || detail::backwards<Layer, inputs, input_gradients>;

/// @brief What a chain runs: a layer, a function of its input, its parameters and counter-based randomness.
///
/// - `forward` writes `output_bytes()` bytes to `out` and, unless `saved` is null, `saved_bytes()` bytes to `saved`.
/// - `backward` gets the same input and saved block (null when `saved_bytes()` is 0) and the gradient of the output. It
///   accumulates or writes parameter gradients as the layer likes: it is called once per training step. Unless
///   `grad_in` is null it writes the gradient of the input there.
/// - All blocks are aligned to 64 bytes, but those that the caller brings. None overlap.
/// - Recomputation runs `forward` again with `pass::again`; whatever must happen once per step (running statistics, the
///   step of a dropout's random numbers) happens under `pass::first`.
/// - Optional, for policies: `forward_time()`, `backward_time()`; `name()`, for messages.
/// - Optional: `restore(in, saved)` computes the saved block again and stops there, in `restore_time()`: the last layer
/// of
///   a segment that runs again owes nobody its output. With a workspace behind, if it has a forward workspace.
/// - Optional: `forward_workspace()` and `backward_workspace()` say how many bytes to hand to the call as a last
/// argument,
///   `forward(in, out, saved, pass, workspace)`, `backward(in, saved, grad_out, grad_in, workspace)`.
/// - Optional: `once()` is true where forward must not run again, because it communicates or acts on the outside. Its
///   output and saved block are kept, whatever the policy.
/// - A layer that reads outputs of other layers too takes `inputs` for `in` and `input_gradients` for `grad_in`; each
///   output that several layers read has a layer with `add_gradient(more, sum)`, which adds one gradient of its output
///   to another.
///
/// @code{.cpp}
/// struct relu {   // saves nothing: its input says it all
///   std::size_t n;
///   std::size_t output_bytes() const { return n * sizeof(float); }
///   std::size_t saved_bytes() const { return 0; }
///   void forward(const void* in, void* out, void*, heddle::recompute::pass) {
///     auto x = static_cast<const float*>(in);
///     for (std::size_t i = 0; i < n; ++i) static_cast<float*>(out)[i] = x[i] > 0 ? x[i] : 0;
///   }
///   void backward(const void* in, const void*, const void* grad_out, void* grad_in) {
///     auto x = static_cast<const float*>(in), g = static_cast<const float*>(grad_out);
///     for (std::size_t i = 0; grad_in && i < n; ++i) static_cast<float*>(grad_in)[i] = x[i] > 0 ? g[i] : 0;
///   }
/// };
/// static_assert(heddle::recompute::chainable<relu>);
/// @endcode
template <class Layer>
concept chainable = has_output_bytes<Layer> && has_saved_bytes<Layer> && has_forward<Layer> && has_backward<Layer>;

static_assert(policy<schedule>);

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

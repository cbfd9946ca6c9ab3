// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/recompute/concept.hpp>
#include <heddle/recompute/schedule.hpp>

#include <concepts>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief A reference to a layer of any type, with a name: an element of a chain whose length is known late.
///
/// It owns nothing; the layer must outlive it. A call costs one indirect call more than the layer's own.
///
/// @code{.cpp}
/// std::vector<heddle::recompute::layer> layers;
/// for (linear& l : model.linears) layers.emplace_back(l, l.label);
/// layers.emplace_back(join, "join", std::vector<std::size_t>{2});   // reads the last layer and, over a skip, layer 2
/// heddle::recompute::chain c{heddle::recompute::sqrt{}, heddle::host_resource{}, layers};
/// @endcode
class layer {
 public:
  /// @brief Refers to `target`.
  /// @param target The layer. @param name Without one it takes `target.name()` if there is one. @param also_reads Which
  /// earlier layers' outputs it reads beside that of the layer before it, in ascending order, for a layer that takes
  /// `inputs`.
  template <class Layer>
    requires(!std::same_as<std::remove_cv_t<Layer>, layer>)
  layer(Layer& target, std::string name = {}, std::vector<std::size_t> also_reads = {})
      : target_(const_cast<void*>(static_cast<const void*>(std::addressof(target)))),
        name_(std::move(name)),
        also_reads_(std::move(also_reads)) {
    static_assert(has_output_bytes<Layer>,
                  "heddle::recompute::layer: a layer must provide output_bytes() const; see recompute/concept.hpp");
    static_assert(has_saved_bytes<Layer>,
                  "heddle::recompute::layer: a layer must provide saved_bytes() const; see recompute/concept.hpp");
    static_assert(has_forward<Layer>,
                  "heddle::recompute::layer: a layer must provide forward(in, out, saved, pass); "
                  "see recompute/concept.hpp");
    static_assert(has_backward<Layer>,
                  "heddle::recompute::layer: a layer must provide backward(in, saved, grad_out, "
                  "grad_in); see recompute/concept.hpp");
    if constexpr (chainable<Layer>) {
      cost_ = [](const void* p) { return cost_of(*static_cast<const Layer*>(p)); };
      forward_ = [](void* p, inputs in, void* out, void* saved, pass kind, void* workspace) {
        run_forward(*static_cast<Layer*>(p), in, out, saved, kind, workspace);
      };
      backward_ = [](void* p, inputs in, const void* saved, const void* grad_out, input_gradients grad_in,
                     void* workspace) {
        run_backward(*static_cast<Layer*>(p), in, saved, grad_out, grad_in, workspace);
      };
      if constexpr (detail::restores<Layer, const void*> || detail::restores<Layer, inputs>) {
        restore_ = [](void* p, inputs in, void* saved, void* workspace) {
          run_restore(*static_cast<Layer*>(p), in, saved, workspace);
        };
      }
      if constexpr (requires { target.add_gradient(nullptr, nullptr); }) {
        add_ = [](void* p, const void* more, void* sum) { static_cast<Layer*>(p)->add_gradient(more, sum); };
      }
      if constexpr (requires { name_ = target.name(); }) {
        if (name_.empty()) name_ = target.name();
      }
      if (!also_reads_.empty() && !detail::forwards<Layer, inputs>) {
        throw argument_error("heddle::recompute::layer: " + (name_.empty() ? "a layer" : name_) +
                             " is to read several outputs, so its forward must take recompute::inputs");
      }
    }
  }

  /// The name, may be empty.
  const std::string& name() const noexcept { return name_; }
  /// Which earlier layers it reads beside the one before it.
  const std::vector<std::size_t>& also_reads() const noexcept { return also_reads_; }
  /// Whether gradients of its output can be added.
  bool adds_gradients() const noexcept { return add_ != nullptr; }
  /// Sizes as the layer reports them now; times if it has `forward_time()` and `backward_time()`, else 1 and 2.
  layer_cost cost() const {
    layer_cost cost = cost_(target_);
    if (!restore_) cost.restore_time = 0;
    cost.also_reads = also_reads_;
    cost.name = name_;
    return cost;
  }
  /// The layer's forward.
  void forward(inputs in, void* out, void* saved, pass kind, void* workspace) const {
    forward_(target_, in, out, saved, kind, workspace);
  }
  /// The layer's backward.
  void backward(inputs in, const void* saved, const void* grad_out, input_gradients grad_in, void* workspace) const {
    backward_(target_, in, saved, grad_out, grad_in, workspace);
  }
  /// The layer's own way to its saved block alone; only where `cost().restore_time` isn't 0.
  void restore(inputs in, void* saved, void* workspace) const { restore_(target_, in, saved, workspace); }
  /// Adds a gradient of the output to another one; only where `adds_gradients()`.
  void add_gradient(const void* more, void* sum) const { add_(target_, more, sum); }

 private:
  template <class Layer> static layer_cost cost_of(const Layer& target) {
    layer_cost cost;
    cost.output_bytes = target.output_bytes();
    cost.saved_bytes = target.saved_bytes();
    if constexpr (requires { static_cast<double>(target.forward_time()); }) cost.forward_time = target.forward_time();
    if constexpr (requires { static_cast<double>(target.backward_time()); })
      cost.backward_time = target.backward_time();
    cost.restore_time = cost.forward_time;
    if constexpr (requires { static_cast<double>(target.restore_time()); }) cost.restore_time = target.restore_time();
    if constexpr (requires { target.forward_workspace(); }) cost.forward_workspace = target.forward_workspace();
    if constexpr (requires { target.backward_workspace(); }) cost.backward_workspace = target.backward_workspace();
    if constexpr (requires { target.once(); }) cost.once = target.once();
    return cost;
  }

  // A layer takes one input or several, and a workspace or none.
  template <class Layer>
  static void run_forward(Layer& l, inputs in, void* out, void* saved, pass kind, [[maybe_unused]] void* workspace) {
    if constexpr (detail::forwards_with_room<Layer, const void*>) {
      l.forward(in[0], out, saved, kind, workspace);
    } else if constexpr (detail::forwards<Layer, const void*>) {
      l.forward(in[0], out, saved, kind);
    } else if constexpr (detail::forwards_with_room<Layer, inputs>) {
      l.forward(in, out, saved, kind, workspace);
    } else {
      l.forward(in, out, saved, kind);
    }
  }

  template <class Layer> static void run_restore(Layer& l, inputs in, void* saved, [[maybe_unused]] void* workspace) {
    if constexpr (detail::restores_with_room<Layer, const void*>) {
      l.restore(in[0], saved, workspace);
    } else if constexpr (detail::restores<Layer, const void*>) {
      l.restore(in[0], saved);
    } else if constexpr (detail::restores_with_room<Layer, inputs>) {
      l.restore(in, saved, workspace);
    } else {
      l.restore(in, saved);
    }
  }

  template <class Layer>
  static void run_backward(Layer& l, inputs in, const void* saved, const void* grad_out, input_gradients grad_in,
                           [[maybe_unused]] void* workspace) {
    if constexpr (detail::backwards_with_room<Layer, const void*, void*>) {
      l.backward(in[0], saved, grad_out, grad_in[0], workspace);
    } else if constexpr (detail::backwards<Layer, const void*, void*>) {
      l.backward(in[0], saved, grad_out, grad_in[0]);
    } else if constexpr (detail::backwards_with_room<Layer, inputs, input_gradients>) {
      l.backward(in, saved, grad_out, grad_in, workspace);
    } else {
      l.backward(in, saved, grad_out, grad_in);
    }
  }

  void* target_;
  layer_cost (*cost_)(const void*) = nullptr;
  void (*forward_)(void*, inputs, void*, void*, pass, void*) = nullptr;
  void (*backward_)(void*, inputs, const void*, const void*, input_gradients, void*) = nullptr;
  void (*restore_)(void*, inputs, void*, void*) = nullptr;
  void (*add_)(void*, const void*, void*) = nullptr;
  std::string name_;
  std::vector<std::size_t> also_reads_;
};

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

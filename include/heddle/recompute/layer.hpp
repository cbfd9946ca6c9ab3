// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/concept.hpp>
#include <heddle/recompute/schedule.hpp>

#include <concepts>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

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
/// heddle::recompute::chain c{heddle::recompute::sqrt{}, heddle::host_resource{}, layers};
/// @endcode
class layer {
 public:
  /// Refers to `target`. Without a name it takes `target.name()` if there is one.
  template <class Layer>
    requires(!std::same_as<std::remove_cv_t<Layer>, layer>)
  layer(Layer& target, std::string name = {})
      : target_(const_cast<void*>(static_cast<const void*>(std::addressof(target)))), name_(std::move(name)) {
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
      forward_ = [](void* p, const void* in, void* out, void* saved, pass kind) {
        static_cast<Layer*>(p)->forward(in, out, saved, kind);
      };
      backward_ = [](void* p, const void* in, const void* saved, const void* grad_out, void* grad_in) {
        static_cast<Layer*>(p)->backward(in, saved, grad_out, grad_in);
      };
      if constexpr (requires { name_ = target.name(); }) {
        if (name_.empty()) name_ = target.name();
      }
    }
  }

  /// The name, may be empty.
  const std::string& name() const noexcept { return name_; }
  /// Sizes as the layer reports them now; times if it has `forward_time()` and `backward_time()`, else 1 and 2.
  layer_cost cost() const { return cost_(target_); }
  /// The layer's forward.
  void forward(const void* in, void* out, void* saved, pass kind) const { forward_(target_, in, out, saved, kind); }
  /// The layer's backward.
  void backward(const void* in, const void* saved, const void* grad_out, void* grad_in) const {
    backward_(target_, in, saved, grad_out, grad_in);
  }

 private:
  template <class Layer> static layer_cost cost_of(const Layer& target) {
    layer_cost cost;
    cost.output_bytes = target.output_bytes();
    cost.saved_bytes = target.saved_bytes();
    if constexpr (requires { static_cast<double>(target.forward_time()); }) cost.forward_time = target.forward_time();
    if constexpr (requires { static_cast<double>(target.backward_time()); })
      cost.backward_time = target.backward_time();
    return cost;
  }

  void* target_;
  layer_cost (*cost_)(const void*) = nullptr;
  void (*forward_)(void*, const void*, void*, void*, pass) = nullptr;
  void (*backward_)(void*, const void*, const void*, const void*, void*) = nullptr;
  std::string name_;
};

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/float16.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace heddle {
inline namespace v0 {

/// @brief Where a loss scale stands, the same on all ranks.
struct loss_scale_state {
  float scale = 1.0f;       ///< What the loss is multiplied by.
  std::uint32_t clean = 0;  ///< Steps taken since it last changed.
  std::uint32_t bad = 0;    ///< Steps skipped in a row.
};

/// @brief Mixed precision: the model reads parameters and writes gradients in 16 bits, the update works in float.
///
///     hd::data_parallel dp{hd::strategy{.precision = hd::mixed<hd::float16>{}}, comm, tensors, hd::adamw{}};
///     model.backward(batch, dp.loss_scale(), ...);    // gradients of loss times scale
///     dp.step({.lr = 1e-3f});
///
/// Float copies of the parameters (masters) are what the rule updates; parameters are these, rounded. Gradients travel
/// as the model wrote them, in 16 bits, added in a wide accumulator; 1 over the scale is part of the pass that updates.
/// Where a compressor or a mode works on floats, gradients are unscaled first: momentum and what is held back never see
/// the scale. Whether any rank met an infinity is agreed on before state moves; such a step is skipped on every rank.
/// After `patience` skips in a row the scale is halved, after `growth` taken steps it is doubled, everywhere at once;
/// scales that differ between ranks are a comm_error. In modes that average parameters both count meetings: give a
/// scale that fits, or patience 1.
/// Wire:    2 bytes per element where float has 4; under zero1 parameters too.
/// State:   4 bytes per element, under zero1 divided by the ranks; 4 more where floats are needed in between.
/// Traffic: the rule's, with 2 bytes less for the gradient and 2 more for the parameter: sgd with momentum 20, adamw 28.
/// Order:   any topology, compressor and mode. float16 needs the scale, bfloat16 has float's range.
/// Sync:    never by itself.
/// Paper:   Micikevicius et al. 2018.
/// Throws:  argument_error from check() unless scale is a power of two from 2^-24 to 2^24, and patience is above 0.
/// @tparam Element float16 or bfloat16.
template <class Element> struct mixed {
  static_assert(std::is_same_v<Element, float16> || std::is_same_v<Element, bfloat16>,
                "heddle::mixed: the element type must be float16 or bfloat16");
  using element = Element;                                        ///< Of parameters and gradients.
  static constexpr bool half = std::is_same_v<Element, float16>;  ///< Whether the range is narrow.

  float scale = half ? 65536.0f : 1.0f;    ///< First scale, a power of two from 2^-24 to 2^24.
  std::uint32_t growth = half ? 2000 : 0;  ///< Steps after which it is doubled; 0: it never changes.
  std::uint32_t patience = 2;              ///< Skips in a row after which it is halved, above 0.

  /// Throws argument_error for a number outside its range.
  void check() const {
    float power = 0x1p-24f;
    while (power < scale && power < largest) power *= 2.0f;
    if (power != scale) {
      throw argument_error("heddle::mixed: scale is " + std::to_string(scale) +
                           ", allowed is a power of two from 2^-24 to 2^24");
    }
    if (patience == 0) throw argument_error("heddle::mixed: patience is 0, allowed is 1 or more");
  }
  /// Where it stands at the start.
  loss_scale_state begin() const noexcept { return {scale, 0, 0}; }
  /// After a step that was skipped for an infinity, or taken.
  void count(loss_scale_state& s, bool skipped) const noexcept {
    if (growth == 0) return;
    s.clean = skipped ? 0 : s.clean + 1;
    s.bad = skipped ? s.bad + 1 : 0;
    if (s.bad == patience) s = {s.scale > 0x1p-24f ? s.scale * 0.5f : s.scale, 0, 0};
    if (s.clean == growth) s = {s.scale < largest ? s.scale * 2.0f : s.scale, 0, 0};
  }
  /// "mixed<f16>" or "mixed<bf16>".
  std::string name() const { return half ? "mixed<f16>" : "mixed<bf16>"; }

 private:
  static constexpr float largest = 0x1p24f;
};

}  // namespace v0
}  // namespace heddle

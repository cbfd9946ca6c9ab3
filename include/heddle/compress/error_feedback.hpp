// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/detail/carrier.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Holds back what a lossy codec loses, and sends it with the next gradient.
///
///     v = g / P + e;   send codec(v);   e = v - codec(v)
///
/// so that on each rank what was sent and what is held add up to its gradients. Biased codecs must be inside it; others
/// may be, and random_k then sends elements as they are instead of n / k times as large.
/// Where the rate of steps changes to x, what is held counts x_before / x times as much: it was to move the parameter at
/// the rate before. begin({.lr = x}) tells it before anything is sent. A rate that is known from step({.lr = x}) only
/// counts from then on: what was sent is as large as at the rate before, and what that lacks is held. Steps at rate 0
/// don't scale it.
/// Wire:    the codec's.
/// State:   4 bytes per element (e).
/// Traffic: beside the codec's, 8 bytes per element read to make v and 12 to make it again as e, in one pass with what
///          was sent; a codec of your own without add_block() needs 16 more, and 4 bytes an element of memory, as its
///          packet is decoded before e moves. In a step whose rate is another and wasn't told to begin(), 4 more to see
///          that e, scaled, stays a float.
/// Order:   ends a chain: clip{} | error_feedback{top_k{}}.
/// Sync:    never.
/// Paper:   Stich et al. 2018; Karimireddy et al. 2019.
/// Throws:  what the codec throws.
/// @tparam Codec What loses.
template <class Codec> struct error_feedback {
  static_assert(heddle::codec<Codec>,
                "heddle::error_feedback: the argument must be a codec with biased, encode() and decode_add(), such as "
                "top_k{}; see docs/compress.md");
  Codec codec{};  ///< What loses.

  /// Throws what the codec's check() throws.
  void check() const {
    if constexpr (requires { codec.check(); }) codec.check();
  }
  /// For example "error_feedback<top_k>".
  std::string name() const { return "error_feedback<" + codec.name() + ">"; }
};

namespace detail {
template <class Codec> struct carried_as<error_feedback<Codec>> {
  static carrier<Codec, true> make(const error_feedback<Codec>& c) { return carrier<Codec, true>(c.codec); }
};
}  // namespace detail

}  // namespace v0
}  // namespace heddle

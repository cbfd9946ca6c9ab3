// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/convert.hpp>
#include <heddle/core/error.hpp>
#include <heddle/core/slice.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief When a compressor does its work.
enum class overlap : std::uint8_t {
  transactional,  ///< Packets are prepared and travel during backward; states move once all ranks know that the step
                  ///< counts.
  none            ///< After backward, when that is known: one pass that prepares and moves the state.
};

/// @brief What a compressor or transform may know about the tensor it is given.
struct encode_context {
  std::size_t step = 0;              ///< Step number, from 0; skipped steps don't count.
  int ranks = 1;                     ///< Number of ranks.
  const float* parameter = nullptr;  ///< The tensor's parameter, for weight decay; null for a delta.
  float momentum = 0.0f;             ///< Of the optimizer, for compressors that correct momentum.
  bool nesterov = false;             ///< Of the optimizer.
  float weight_decay = 0.0f;         ///< Of the optimizer.
};

/// @name Requirements of compressors and transforms, one by one
/// @{
/// Has `scale(gradient, before, context)`: the number to multiply the gradient by, when it is `before` so far.
template <class Transform>
concept has_scale = requires(const Transform& t, slice<const float> g, float before, const encode_context& c) {
  { t.scale(g, before, c) } -> std::convertible_to<float>;
};
/// Has `wire`: an element type in which the mean of all ranks can be taken.
template <class Compressor>
concept has_wire = requires { typename Compressor::wire; };
/// Has `encode(gradient, wire, factor)`, for compressors with a wire type.
template <class Compressor>
concept has_elementwise_encode = has_wire<Compressor> &&
    requires(const Compressor& c, slice<const float> g, typename Compressor::wire* w, float f) { c.encode(g, w, f); };
/// Has `decode(wire, gradient)`, for compressors with a wire type.
template <class Compressor>
concept has_elementwise_decode = has_wire<Compressor> &&
    requires(const Compressor& c, const typename Compressor::wire* w, slice<float> g) { c.decode(w, g); };
/// Has `encode(gradient, factor, state, context, packet)`, for compressors that send packets.
template <class Compressor>
concept has_packet_encode = requires(const Compressor& c, slice<const float> g, float f, float* const* state,
                                     const encode_context& x, std::vector<std::byte>& packet) {
  c.encode(g, f, state, x, packet);
};
/// Has `commit(gradient, factor, state, context, packet)`: moves the state as `encode` promised.
template <class Compressor>
concept has_commit = requires(const Compressor& c, slice<const float> g, float f, float* const* state,
                              const encode_context& x, slice<const std::byte> packet) {
  c.commit(g, f, state, x, packet);
};
/// Has `decode_add(packet, sum)`: adds a rank's packet.
template <class Compressor>
concept has_decode_add = requires(const Compressor& c, slice<const std::byte> packet, slice<float> sum) {
  c.decode_add(packet, sum);
};
/// Has `sends(count, context)`: whether a tensor of that size travels as a packet in this step, the same on all ranks.
template <class Compressor>
concept has_sends = requires(const Compressor& c, std::size_t n, const encode_context& x) {
  { c.sends(n, x) } -> std::convertible_to<bool>;
};
/// Has `measure(packets)`: bytes of the first packet in a run of packets.
template <class Compressor>
concept has_measure = requires(const Compressor& c, slice<const std::byte> packets) {
  { c.measure(packets) } -> std::convertible_to<std::size_t>;
};
/// Has `flagged(packet)`: whether its rank's gradient was not finite.
template <class Compressor>
concept has_flagged = requires(const Compressor& c, slice<const std::byte> packet) {
  { c.flagged(packet) } -> std::convertible_to<bool>;
};
/// Has `correct(gradient, state, context)`: makes the update of a mean gradient that travelled dense.
template <class Compressor>
concept has_correct = requires(const Compressor& c, slice<float> g, float* const* state, const encode_context& x) {
  c.correct(g, state, x);
};
/// Has `slots`: floats of state per element.
template <class Compressor>
concept has_slots = requires {
  { Compressor::slots } -> std::convertible_to<int>;
};
/// Has `extra(count)`: floats of state of a tensor besides the slots, after which they follow in `state`. They are zero
/// at first, and again after a change of the number of ranks.
template <class Compressor>
concept has_extra = requires(const Compressor& c, std::size_t n) {
  { c.extra(n) } -> std::convertible_to<std::size_t>;
};
/// Has `elements(packet)`: how many values it holds, for reports.
template <class Compressor>
concept has_elements = requires(const Compressor& c, slice<const std::byte> packet) {
  { c.elements(packet) } -> std::convertible_to<std::size_t>;
};
/// Has `fits(gradient, factor, state, context)` and `fused(gradient, factor, state, context, packet)`: encode and commit
/// in one, for steps of which all ranks know that they count; and `overlap` that says whether to use it.
template <class Compressor>
concept has_fused = requires(const Compressor& c, slice<const float> g, float f, float* const* state,
                             const encode_context& x, std::vector<std::byte>& packet) {
  { c.fits(g, f, state, x) } -> std::convertible_to<bool>;
  c.fused(g, f, state, x, packet);
  c.overlap;
};
/// @}

/// @brief A compressor whose wire form can be averaged by an all-reduce, element by element, without state.
///
/// What to write:
///
///     struct halves {                                    // send the upper half of each float
///       using wire = hd::bfloat16;
///       void encode(hd::slice<const float> g, wire* out, float factor) const {
///         hd::convert_scaled(g.data, out, g.count, factor);
///       }
///       void decode(const wire* in, hd::slice<float> g) const { hd::convert(in, g.data, g.count); }
///       std::string name() const { return "halves"; }
///     };
template <class Compressor>
concept elementwise_compressor = has_elementwise_encode<Compressor> && has_elementwise_decode<Compressor>;

/// @brief A compressor that sends a packet per tensor and holds back the rest (error feedback).
///
/// Two halves, so that a step that must be skipped leaves the state bit for bit as it was: `encode` reads gradient and
/// state and writes only the packet; `commit` moves the state. The packets of all ranks are gathered and added in rank
/// order: a packet holds its rank's share of the mean, 1 / ranks inside. `sends(count, context)` says whether a tensor
/// travels as a packet in this step; otherwise its mean is all-reduced as float and `correct` makes the update of it.
template <class Compressor>
concept packet_compressor =
    has_packet_encode<Compressor> && has_commit<Compressor> && has_decode_add<Compressor> && has_slots<Compressor> &&
    has_sends<Compressor> && has_measure<Compressor> && has_flagged<Compressor> && has_correct<Compressor>;

/// @brief Any compressor; see docs/compress.md for what each kind must provide.
template <class Compressor>
concept compressor = elementwise_compressor<Compressor> || packet_compressor<Compressor>;

/// @brief A gradient transform: scales the gradient by a number that it computes from it.
template <class Transform>
concept transform = has_scale<Transform> && !compressor<Transform>;

template <class First, class Second>
struct chain;

namespace detail {
template <class Part>
inline constexpr bool is_gradient_part = transform<Part> || compressor<Part>;
template <class First, class Second>
inline constexpr bool is_gradient_part<chain<First, Second>> = true;

template <class Part>
inline constexpr bool ends_in_compressor = compressor<Part>;
template <class First, class Second>
inline constexpr bool ends_in_compressor<chain<First, Second>> = ends_in_compressor<Second>;
}  // namespace detail

/// @brief `first | second`: transforms, applied from left to right, and a compressor at the end where one travels.
///
/// Made by `operator|`, not by hand.
template <class First, class Second>
struct chain {
  static_assert(!detail::ends_in_compressor<First>,
                "heddle::operator|: the left side must be a gradient transform such as clip; "
                "a compressor ends the chain");
  First first;    ///< Applied first.
  Second second;  ///< Applied to what the first gives.

  /// For example "clip | dgc".
  std::string name() const { return first.name() + " | " + second.name(); }
};

/// @brief Chains gradient transforms, and a compressor at the end.
template <class First, class Second>
  requires detail::is_gradient_part<First> && detail::is_gradient_part<Second>
constexpr auto operator|(First first, Second second) {
  return chain<First, Second>{first, second};
}

namespace detail {
// The compressor at the end of a chain, or the thing itself.
template <class Part>
constexpr const Part& last_of(const Part& p) {
  return p;
}
template <class First, class Second>
constexpr const auto& last_of(const chain<First, Second>& c) { return last_of(c.second); }

// What all transforms of a chain together multiply the gradient by.
template <class Part>
float scale_of(const Part& p, slice<const float> g, float before, const encode_context& x) {
  if constexpr (transform<Part>) return p.scale(g, before, x);
  else return before;
}
template <class First, class Second>
float scale_of(const chain<First, Second>& c, slice<const float> g, float before, const encode_context& x) {
  return scale_of(c.second, g, scale_of(c.first, g, before, x), x);
}
}  // namespace detail

}  // namespace v0
}  // namespace heddle

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
  std::uint32_t tensor = 0;          ///< Which tensor, the same number on all ranks: names a stream of random numbers.
  int rank = 0;                      ///< This rank.
  std::size_t rows = 0;              ///< Rows of the matrix that the tensor is; 0: not said.
  float held_scale = 1.0f;           ///< What was held back counts this much: the last rate over this step's.
  float held_late = 1.0f;            ///< In the committing half: and this much more, as is known since the first one.
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
/// Has `step_dense(gradient, parameter, state, context, rate)`: `correct`, and plain descent along what it makes at
/// that rate, in one pass, of the same bits; the gradient stays the mean. Used for both where nothing is released, if
/// the compressor has `owns_momentum` set, too: else the update is another rule's to make.
template <class Compressor>
concept has_step_dense = requires(const Compressor& c, slice<const float> g, float* p, float* const* state,
                                  const encode_context& x, float rate) { c.step_dense(g, p, state, x, rate); };
/// Has `fits_dense(gradient, state, context)`: whether `correct`, and `release`, leave float's range nowhere; false for
/// a gradient that isn't finite. The same on all ranks, which hold equal state of a tensor that travels dense.
template <class Compressor>
concept has_fits_dense =
    requires(const Compressor& c, slice<const float> g, float* const* state, const encode_context& x) {
      { c.fits_dense(g, state, x) } -> std::convertible_to<bool>;
    };
/// Has `release(gradient, state, context)`: adds to a mean gradient that travelled dense what is held of it, in equal
/// parts on all ranks, and holds nothing any more. Called after a checkpoint was saved where the tensor was compressed.
template <class Compressor>
concept has_release = requires(const Compressor& c, slice<float> g, float* const* state, const encode_context& x) {
  c.release(g, state, x);
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
/// Has `biased`: whether the expectation of what it makes of a gradient is something else.
template <class Codec>
concept has_biased = requires {
  { Codec::biased } -> std::convertible_to<bool>;
};
/// Has `encode(values, context, packet)` and `decode_add(payload, sum)`: one tensor as bytes and back.
template <class Codec>
concept has_payload = requires(const Codec& c, slice<const float> v, const encode_context& x,
                               std::vector<std::byte>& packet, slice<const std::byte> payload, slice<float> sum) {
  c.encode(v, x, packet);
  c.decode_add(payload, sum);
};
/// Has `picked(count, context)` and `pick(count, context, f)`: calls f(j, index, weight) for the elements that it picks,
/// the same ones on all ranks; weight is 1 over the chance of being picked.
template <class Codec>
concept has_pick =
    requires(const Codec& c, std::size_t n, const encode_context& x, void (*f)(std::size_t, std::size_t, float)) {
      { c.picked(n, x) } -> std::convertible_to<std::size_t>;
      c.pick(n, x, f);
    };
/// Has `wire_bytes(count, context)`: bytes that a rank sends of a tensor, or the most it may send.
template <class Compressor>
concept has_wire_bytes = requires(const Compressor& c, std::size_t n, const encode_context& x) {
  { c.wire_bytes(n, x) } -> std::convertible_to<std::size_t>;
};
/// Has `rounds`: how many sums over all ranks it takes, one after the other.
template <class Compressor>
concept has_rounds = requires {
  { Compressor::rounds } -> std::convertible_to<int>;
};
/// Has `sum_count(round, count, context)`, `send(round, ...)`, `commit(...)` and `extra(count, context)`: see
/// reducing_compressor.
template <class Compressor>
concept has_sums = requires(const Compressor& c, slice<const float> g, slice<float> result, float f,
                            float* const* state, const encode_context& x, float* const* sums) {
  { c.extra(g.count, x) } -> std::convertible_to<std::size_t>;
  { c.sum_count(0, g.count, x) } -> std::convertible_to<std::size_t>;
  { c.send(0, g, f, state, x, sums) } -> std::convertible_to<bool>;
  c.commit(result, f, state, x, sums);
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

/// @brief A compressor whose wire form is numbers that all ranks add up by an all-reduce, once or several times.
///
/// In round r `send(r, gradient, factor, state, context, sums)` writes sum_count(r) floats to sums[r], and may read (and
/// change) what earlier rounds gave, which are sums over all ranks by then; it returns whether this rank's gradient is
/// finite. `commit(gradient, factor, state, context, sums)` makes the sum of all ranks' shares of it and moves the
/// state: `slots` floats an element, and `extra` more behind them. A rank's share is gradient times factor over ranks.
template <class Compressor>
concept reducing_compressor = has_rounds<Compressor> && has_slots<Compressor> && has_sends<Compressor> &&
                              has_sums<Compressor>;

/// @brief A way to write a tensor in fewer bytes, without state.
///
/// Used by itself where it isn't `biased`, inside error_feedback where it is. heddle/compress/error_feedback.hpp, which
/// the codecs of this library include, has what runs either. What to write:
///
///     struct signs {                                     // one byte an element: only the sign
///       static constexpr bool biased = true;
///       void encode(hd::slice<const float> v, const hd::encode_context&, std::vector<std::byte>& packet) const {
///         for (float x : v) packet.push_back(std::byte{x < 0});
///       }
///       void decode_add(hd::slice<const std::byte> payload, hd::slice<float> sum) const {
///         for (std::size_t i = 0; i < sum.count; ++i) sum[i] += payload[i] == std::byte{1} ? -1e-3f : 1e-3f;
///       }
///       std::string name() const { return "signs"; }
///     };
template <class Codec>
concept codec = has_biased<Codec> && (has_payload<Codec> || has_pick<Codec>);

template <class Codec> struct error_feedback;
template <class Compressor> struct automatic_compressor;

namespace detail {
template <class Compressor> inline constexpr bool is_error_feedback = false;
template <class Codec> inline constexpr bool is_error_feedback<error_feedback<Codec>> = true;
template <class Compressor> inline constexpr bool is_automatic = false;
template <class Compressor> inline constexpr bool is_automatic<automatic_compressor<Compressor>> = true;
template <class Compressor> inline constexpr bool needs_feedback = false;
template <codec Compressor> inline constexpr bool needs_feedback<Compressor> = Compressor::biased;

// What data_parallel runs a compressor as.
template <class Compressor> struct carried_as {
  static Compressor make(const Compressor& c) { return c; }
};
template <class Compressor> auto carried(const Compressor& c) { return carried_as<Compressor>::make(c); }
}  // namespace detail

/// @brief Any compressor; see docs/compress.md for what each kind must provide.
template <class Compressor>
concept compressor = elementwise_compressor<Compressor> || packet_compressor<Compressor> ||
                     reducing_compressor<Compressor> || codec<Compressor> || detail::is_error_feedback<Compressor> ||
                     detail::is_automatic<Compressor>;

/// @brief A gradient transform: scales the gradient by a number that it computes from it.
template <class Transform>
concept transform = has_scale<Transform> && !compressor<Transform>;

/// Has `scale_of(squares, before, ranks)`: `scale` from nothing but the sum of the gradient's squares; marked
/// HEDDLE_HD, so that it can be found where the gradient is. Transforms that have it run over tensors of a device.
template <class Transform>
concept has_scale_of = requires(const Transform& t, double squares, float before, int ranks) {
  { t.scale_of(squares, before, ranks) } -> std::same_as<float>;
};

template <class First, class Second>
struct chain;

namespace detail {
// What a rank may send of an element, so that the sum over all ranks, rounded, stays in float's range.
constexpr float most_sent(int ranks) noexcept { return 3.4e38f / static_cast<float>(ranks); }

// part of n elements, rounded up but for what `part` may be off; at least one, of none 0.
constexpr std::size_t part_of(double part, std::size_t n) noexcept {
  const double wanted = part * static_cast<double>(n) - 1e-3;
  if (!(wanted > 1.0)) return n ? 1 : 0;
  const auto whole = static_cast<std::size_t>(wanted);
  const std::size_t all = whole + (static_cast<double>(whole) < wanted ? 1 : 0);
  return all < n ? all : n;
}

// Adds what is held, in equal parts on all ranks, to a mean that travelled dense.
inline void release_held(slice<float> g, float* held, float factor) noexcept {
  for (std::size_t i = 0; i < g.count; ++i) {
    g[i] += held[i] * factor;
    held[i] = 0.0f;
  }
}

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

// The same from the sum of its squares.
template <class Part>
HEDDLE_HD float scale_from(const Part& p, double squares, float before, int ranks) {
  if constexpr (has_scale_of<Part>) return p.scale_of(squares, before, ranks);
  else return before;
}
template <class First, class Second>
HEDDLE_HD float scale_from(const chain<First, Second>& c, double squares, float before, int ranks) {
  return scale_from(c.second, squares, scale_from(c.first, squares, before, ranks), ranks);
}
// Whether all transforms of a chain have it.
template <class Part>
inline constexpr bool scales_from_squares = compressor<Part> || has_scale_of<Part>;
template <class First, class Second>
inline constexpr bool scales_from_squares<chain<First, Second>> =
    scales_from_squares<First> && scales_from_squares<Second>;
}  // namespace detail

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/dtype.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace heddle {
inline namespace v0 {

/// @brief Elementwise sum.
struct sum {};
/// @brief Elementwise sum divided once, by the number of ranks, in the wide accumulator. Integers round toward zero.
struct mean {};
/// @brief Elementwise minimum; a NaN of any rank reaches every rank.
struct min {};
/// @brief Elementwise maximum; a NaN of any rank reaches every rank.
struct max {};

/// @brief One operand of a reduction: elements and, for float16, the power of two their stored values were divided by.
struct operand {
  const void* data;  ///< First element.
  int exponent;      ///< value = stored * 2^exponent; 0 but for float16.
};

/// @brief The compiled inner loop of a reduction, the only code instantiated per (type, operation).
///
/// `reduce(context, in, inputs, out, count, exponent, factor)` writes out[i] = (in[0][i] op in[1][i] op ...) * factor,
/// in the order given, in a wide accumulator (fp64 for float, fp32 for 16-bit types, the type itself for user
/// operations), rounded once. `out` may be one of the inputs. Returns true if a finite result left float16's range.
struct leaf {
  /// Shape of the inner loop.
  using function = bool (*)(const void* context, const operand* in, int inputs, void* out, std::size_t count,
                            int exponent, double factor);
  dtype type;             ///< Element type, for headers.
  std::uint8_t id;        ///< Identity of the operation, for headers.
  bool average;           ///< Divide by the number of ranks at the end.
  std::size_t bytes;      ///< Size of one element.
  function reduce;        ///< The loop.
  const void* context;    ///< The user's functor, or null. Must outlive the call.

  /// Whether partial results are stored divided by a power of two: float16 sums, which would leave the range otherwise.
  constexpr bool scaled() const noexcept { return type == dtype::f16 && (id == 1 || id == 2); }
};

namespace detail {
template <class Element>
struct wide {
  using type = Element;
};
template <> struct wide<float> { using type = double; };
template <> struct wide<float16> { using type = float; };
template <> struct wide<bfloat16> { using type = float; };
template <> struct wide<std::int32_t> { using type = std::int64_t; };
template <> struct wide<std::uint8_t> { using type = std::uint32_t; };

template <class Op>
inline constexpr std::uint8_t reduction_id = 255;  // user operations
template <> inline constexpr std::uint8_t reduction_id<sum> = 1;
template <> inline constexpr std::uint8_t reduction_id<mean> = 2;
template <> inline constexpr std::uint8_t reduction_id<min> = 3;
template <> inline constexpr std::uint8_t reduction_id<max> = 4;

template <class Op, class A>
constexpr A combine(const Op& op, A a, A b) {
  constexpr bool adds = std::is_same_v<Op, sum> || std::is_same_v<Op, mean>;
  if constexpr (adds && std::is_integral_v<A>) {  // integers wrap around
    using bits = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<bits>(static_cast<bits>(a) + static_cast<bits>(b)));
  } else if constexpr (adds) return static_cast<A>(a + b);
  else if constexpr (std::is_same_v<Op, min>) return (a < b || a != a) ? a : b;
  else if constexpr (std::is_same_v<Op, max>) return (a > b || a != a) ? a : b;
  else return op(a, b);
}

// Power of two as a float factor; |e| <= 126 covers every float16 exponent of 65535 ranks.
constexpr float pow2(int e) noexcept { return std::bit_cast<float>(static_cast<std::uint32_t>(127 + e) << 23); }

template <class Element, class Op>
bool reduce_loop(const void* context, const operand* in, int inputs, void* out, std::size_t count, int exponent,
                 double factor) {
  constexpr bool builtin = reduction_id<Op> != 255;
  using acc = std::conditional_t<builtin, typename wide<Element>::type, Element>;
  constexpr bool adds = std::is_same_v<Op, sum> || std::is_same_v<Op, mean>;
  const auto both = [context](acc a, acc b) -> acc {
    if constexpr (builtin) return (void)context, combine(Op{}, a, b);
    else return combine(*static_cast<const Op*>(context), a, b);
  };
  (void)exponent, (void)factor;
  Element* const o = static_cast<Element*>(out);

  // Two floats, nothing to scale: the sum of two floats rounds the same from double as from float.
  if constexpr (std::is_same_v<Element, float> && builtin) {
    if (inputs == 2 && factor == 1.0) {
      const float *a = static_cast<const float*>(in[0].data), *b = static_cast<const float*>(in[1].data);
      for (std::size_t i = 0; i < count; ++i) o[i] = combine(Op{}, a[i], b[i]);
      return false;
    }
  }
  // Blocks that stay in the first-level cache, so that each input is read once and the loops stay simple to vectorise.
  constexpr std::size_t block = (std::max<std::size_t>)(1, 4096 / sizeof(acc));
  acc a[block];
  bool left_range = false;
  for (std::size_t base = 0; base < count; base += block) {
    const std::size_t m = (std::min)(block, count - base);
    for (int k = 0; k < inputs; ++k) {
      const Element* const x = static_cast<const Element*>(in[k].data) + base;
      const auto load = [&](std::size_t i) -> acc {
        if constexpr (std::is_same_v<Element, float16> && builtin) return static_cast<float>(x[i]) * pow2(in[k].exponent);
        else return static_cast<acc>(x[i]);
      };
      if (k == 0) {
        for (std::size_t i = 0; i < m; ++i) a[i] = load(i);
      } else {
        for (std::size_t i = 0; i < m; ++i) a[i] = both(a[i], load(i));
      }
    }
    Element* const y = o + base;
    if constexpr (std::is_same_v<Element, float16> && builtin) {
      const double f = (adds ? factor : 1.0) * pow2(-exponent);
      unsigned inf = 0;
      for (std::size_t i = 0; i < m; ++i) {
        y[i] = float16(static_cast<float>(a[i] * f));
        inf |= (y[i].bits & 0x7c00u) == 0x7c00u && std::isfinite(a[i]);
      }
      left_range |= inf != 0;
    } else if constexpr (builtin && adds && std::is_integral_v<Element>) {
      const acc divisor = static_cast<acc>(1.0 / factor + 0.5);
      for (std::size_t i = 0; i < m; ++i) y[i] = static_cast<Element>(divisor == 1 ? a[i] : a[i] / divisor);
    } else if constexpr (builtin && adds) {
      for (std::size_t i = 0; i < m; ++i) y[i] = static_cast<Element>(static_cast<acc>(static_cast<double>(a[i]) * factor));
    } else {
      for (std::size_t i = 0; i < m; ++i) y[i] = static_cast<Element>(a[i]);
    }
  }
  return left_range;
}
}  // namespace detail

/// @brief The leaf of element type Element and operation Op (sum, mean, min, max, or a user's `Element operator()(Element, Element) const`).
///
/// A user operation must be associative and commutative up to rounding and must not throw. `op` is borrowed.
template <class Element, class Op>
leaf leaf_of(const Op& op) {
  static_assert(std::is_trivially_copyable_v<Element>, "heddle: an element type must be trivially copyable");
  constexpr bool builtin = detail::reduction_id<Op> != 255;
  static_assert(!builtin || dtype_of<Element> != dtype::other,
                "heddle: sum, mean, min and max need a built-in element type; pass your own operation for your own type");
  return {dtype_of<Element>, detail::reduction_id<Op>, std::is_same_v<Op, mean>, sizeof(Element), &detail::reduce_loop<Element, Op>,
          builtin ? nullptr : &op};
}

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/config.hpp>
#include <heddle/core/detail/convert_loops.hpp>
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
/// @brief Elementwise product. Integers wrap around.
struct product {};
/// @brief Elementwise minimum; a NaN of any rank reaches every rank.
struct min {};
/// @brief Elementwise maximum; a NaN of any rank reaches every rank.
struct max {};

/// @brief An operation with an accumulator of your choice; made by `accumulate_in`.
template <class Accumulator, class Op>
struct accumulating {
  Op op{};  ///< What combines two accumulators.
};
/// @brief Lets an operation combine in Accumulator instead of the type's own choice (double for float, float for 16-bit
/// types, the element itself for a user's operation):
///
///     hd::all_reduce(comm, hd::direct{}, data, hd::accumulate_in<float>(hd::sum{}));     // float in float: faster
///     hd::all_reduce(comm, hd::direct{}, data, hd::accumulate_in<exact_sum>(add{}));     // your type, your functor
///
/// Each step of a topology converts its operands with static_cast, combines them in order, and converts the result back;
/// so partial results travel as elements, and with `direct` and `native` nothing is rounded in between. An element of
/// your own may have a built-in operation this way, if the accumulator is a number.
/// @tparam Accumulator Default constructible, from and to the element by static_cast; a number for sum to mean.
template <class Accumulator, class Op>
constexpr accumulating<Accumulator, Op> accumulate_in(const Op& op) {
  return {op};
}

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
  /// The same loop with several outputs, for memory of a device: each element goes to all of them. Null: none. Its
  /// exponents are 0.
  bool (*reduce_to)(const void* context, const operand* in, int inputs, void* const* out, int outputs,
                    std::size_t count, double factor) = nullptr;

  /// Whether partial results are stored divided by a power of two: float16 sums, which would leave the range otherwise.
  constexpr bool scaled() const noexcept { return type == dtype::f16 && ((id & 15) == 1 || (id & 15) == 2); }
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
template <> inline constexpr std::uint8_t reduction_id<product> = 5;

// What an operation is made of: itself, and the accumulator for an element type.
template <class Op>
struct operation_parts {
  using plain = Op;
  static constexpr bool chosen = false;
  template <class Element>
  using accumulator = std::conditional_t<reduction_id<Op> != 255, typename wide<Element>::type, Element>;
  HEDDLE_HD static constexpr const Op& get(const Op& o) noexcept { return o; }
};
template <class Accumulator, class Op>
struct operation_parts<accumulating<Accumulator, Op>> {
  using plain = Op;
  static constexpr bool chosen = true;
  template <class Element>
  using accumulator = Accumulator;
  HEDDLE_HD static constexpr const Op& get(const accumulating<Accumulator, Op>& o) noexcept { return o.op; }
};
// 5 or fewer say which built-in operation, the upper bits which accumulator, 0 for the type's own.
template <class Accumulator, class Op>
inline constexpr std::uint8_t reduction_id<accumulating<Accumulator, Op>> =
    reduction_id<Op> == 255 ? 255 : reduction_id<Op> + 16 * (1 + static_cast<int>(dtype_of<Accumulator>));

// static_cast, through float where one side is a 16-bit float.
template <class To, class From>
HEDDLE_HD constexpr To cast_to(const From& x) {
  constexpr bool from_half = std::is_same_v<From, float16> || std::is_same_v<From, bfloat16>;
  constexpr bool to_half = std::is_same_v<To, float16> || std::is_same_v<To, bfloat16>;
  if constexpr (std::is_same_v<To, From>) return x;
  else if constexpr (from_half || to_half) return static_cast<To>(static_cast<float>(x));
  else return static_cast<To>(x);
}

template <class Op, class A>
HEDDLE_HD constexpr A combine(const Op& op, A a, A b) {
  constexpr bool adds = std::is_same_v<Op, sum> || std::is_same_v<Op, mean>;
  if constexpr (adds && std::is_integral_v<A>) {  // integers wrap around
    using bits = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<bits>(static_cast<bits>(a) + static_cast<bits>(b)));
  } else if constexpr (adds) return static_cast<A>(a + b);
  else if constexpr (std::is_same_v<Op, product> && std::is_integral_v<A>) {
    using bits = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<bits>(static_cast<bits>(a) * static_cast<bits>(b)));
  } else if constexpr (std::is_same_v<Op, product>) return static_cast<A>(a * b);
  else if constexpr (std::is_same_v<Op, min>) return (a < b || a != a) ? a : b;
  else if constexpr (std::is_same_v<Op, max>) return (a > b || a != a) ? a : b;
  else return op(a, b);
}

// Power of two as a float factor; |e| <= 126 covers every float16 exponent of 65535 ranks.
constexpr float pow2(int e) noexcept { return std::bit_cast<float>(static_cast<std::uint32_t>(127 + e) << 23); }

// Elements of a block, which stays in the first-level cache: each input is read once and the loops stay simple.
template <class Wide>
inline constexpr std::size_t reduce_block = (std::max<std::size_t>)(1, 4096 / sizeof(Wide));

// The 16-bit types: converted block by block with the loops of `which`. A factor that is a power of two goes into the
// operands' own, which is exact: their products and sums stay far inside float's normal range.
template <class Half, class Op>
[[gnu::always_inline]] inline bool reduce_halves(const operand* in, int inputs, Half* out, std::size_t count,
                                                 int exponent, double factor, isa which) {
  constexpr bool adds = std::is_same_v<Op, sum> || std::is_same_v<Op, mean>, scaled = std::is_same_v<Half, float16>;
  const double f = (adds ? factor : 1.0) * pow2(-exponent);
  const bool folded = scaled && std::bit_cast<std::uint64_t>(f) << 12 == 0;
  const float every = folded ? static_cast<float>(f) : 1.0f;
  float a[reduce_block<float>], t[reduce_block<float>];
  bool left_range = false;
  for (std::size_t base = 0; base < count; base += reduce_block<float>) {
    const std::size_t m = (std::min)(reduce_block<float>, count - base);
    for (int k = 0; k < inputs; ++k) {
      const Half* const x = static_cast<const Half*>(in[k].data) + base;
      widen<scaled>(x, k ? t : a, m, scaled ? pow2(in[k].exponent) * every : 1.0f, which);
      for (std::size_t i = 0; k && i < m; ++i) a[i] = combine(Op{}, a[i], t[i]);
    }
    if (!folded) {
      for (std::size_t i = 0; i < m; ++i) t[i] = static_cast<float>(a[i] * f);
    }
    if (!narrow<false, scaled>(folded ? a : t, out + base, m, 1.0f, which)) continue;
    for (std::size_t i = 0; i < m; ++i) {  // something isn't finite: is it new?
      left_range |= (out[base + i].bits & exponent_mask<Half>) == exponent_mask<Half> && std::isfinite(a[i]);
    }
  }
  return left_range;
}

// A user's functor. A small one is taken by value: what it holds stays in registers, since no store of a result can
// change it, so its loop is vectorised as that of an operation without members. A built-in operation holds nothing.
template <class Op>
using held_functor =
    std::conditional_t<std::is_trivially_copyable_v<Op> && sizeof(Op) <= 64, const Op, const Op&>;
template <class Op>
[[gnu::always_inline]] inline held_functor<Op> functor_at(const void* context) {
  if constexpr (reduction_id<Op> != 255) return (void)context, Op{};
  else return *static_cast<const Op*>(context);
}

// Every other type, and user operations.
template <class Element, class Op>
[[gnu::always_inline]] inline void reduce_elements(const void* context, const operand* in, int inputs, Element* out,
                                                   std::size_t count, double factor) {
  constexpr bool builtin = reduction_id<Op> != 255;
  using acc = std::conditional_t<builtin, typename wide<Element>::type, Element>;
  constexpr bool adds = std::is_same_v<Op, sum> || std::is_same_v<Op, mean>;
  const held_functor<Op> both = functor_at<Op>(context);
  // Two operands and nothing to scale, in one pass without a wide accumulator: the sum or product of two floats rounds
  // the same from double as from float, and integers wrap around. The same loop, laid out alike, for operations of
  // users and built-in ones.
  if (inputs == 2 && (!builtin || factor == 1.0)) [[likely]] {
    const Element *x = static_cast<const Element*>(in[0].data), *y = static_cast<const Element*>(in[1].data);
    for (std::size_t i = 0; i < count; ++i) out[i] = combine(both, x[i], y[i]);
    return;
  }
  acc a[reduce_block<acc>];
  for (std::size_t base = 0; base < count; base += reduce_block<acc>) {
    const std::size_t m = (std::min)(reduce_block<acc>, count - base);
    const Element* const first = static_cast<const Element*>(in[0].data) + base;
    int k = 1;
    if (inputs > 1) {
      const Element* const second = static_cast<const Element*>(in[k++].data) + base;
      for (std::size_t i = 0; i < m; ++i) {
        a[i] = combine(both, static_cast<acc>(first[i]), static_cast<acc>(second[i]));
      }
    } else {
      for (std::size_t i = 0; i < m; ++i) a[i] = static_cast<acc>(first[i]);
    }
    for (; k < inputs; ++k) {
      const Element* const x = static_cast<const Element*>(in[k].data) + base;
      for (std::size_t i = 0; i < m; ++i) a[i] = combine(both, a[i], static_cast<acc>(x[i]));
    }
    Element* const y = out + base;
    if constexpr (builtin && adds && std::is_integral_v<Element>) {
      const acc divisor = static_cast<acc>(1.0 / factor + 0.5);
      for (std::size_t i = 0; i < m; ++i) y[i] = static_cast<Element>(divisor == 1 ? a[i] : a[i] / divisor);
    } else if constexpr (builtin && adds) {
      for (std::size_t i = 0; i < m; ++i) {
        y[i] = static_cast<Element>(static_cast<acc>(static_cast<double>(a[i]) * factor));
      }
    } else {
      for (std::size_t i = 0; i < m; ++i) y[i] = static_cast<Element>(a[i]);
    }
  }
}

// Any type and operation in a chosen accumulator.
template <class Element, class Op>
[[gnu::always_inline]] inline bool reduce_chosen(const void* context, const operand* in, int inputs, Element* out,
                                                 std::size_t count, int exponent, double factor) {
  using plain = typename operation_parts<Op>::plain;
  using acc = typename operation_parts<Op>::template accumulator<Element>;
  constexpr bool adds = std::is_same_v<plain, sum> || std::is_same_v<plain, mean>, numbers = std::is_arithmetic_v<acc>;
  constexpr bool scaled = adds && numbers && std::is_same_v<Element, float16>;
  static_assert(reduction_id<plain> == 255 || numbers,
                "heddle::accumulate_in: sum, mean, product, min and max need a number to accumulate in");
  const auto load = [in](int k, std::size_t i) -> acc {
    const acc x = cast_to<acc>(static_cast<const Element*>(in[k].data)[i]);
    if constexpr (scaled) return static_cast<acc>(x * static_cast<acc>(pow2(in[k].exponent)));
    else return x;
  };
  const held_functor<plain> both = functor_at<plain>(context);
  bool left_range = false;
  acc a[reduce_block<acc>];
  for (std::size_t base = 0; base < count; base += reduce_block<acc>) {
    const std::size_t m = (std::min)(reduce_block<acc>, count - base);
    for (std::size_t i = 0; i < m; ++i) a[i] = load(0, base + i);
    for (int k = 1; k < inputs; ++k) {
      for (std::size_t i = 0; i < m; ++i) a[i] = combine(both, a[i], load(k, base + i));
    }
    if constexpr (adds && numbers) {
      const double f = factor * pow2(scaled ? -exponent : 0);
      for (std::size_t i = 0; i < m && f != 1.0; ++i) {
        if constexpr (std::is_integral_v<acc>) a[i] = static_cast<acc>(a[i] / static_cast<acc>(1.0 / f + 0.5));
        else a[i] = static_cast<acc>(a[i] * f);
      }
    }
    for (std::size_t i = 0; i < m; ++i) {
      out[base + i] = cast_to<Element>(a[i]);
      if constexpr (scaled && std::is_floating_point_v<acc>)
        left_range |= (out[base + i].bits & 0x7c00u) == 0x7c00u && std::isfinite(a[i]);
    }
  }
  return left_range;
}

template <class Element, class Op>
inline constexpr bool reduces_halves =
    !operation_parts<Op>::chosen && reduction_id<Op> != 255 &&
    (std::is_same_v<Element, float16> || std::is_same_v<Element, bfloat16>);

// A leaf's loop, for any processor.
template <class Element, class Op>
bool reduce_loop(const void* context, const operand* in, int inputs, void* out, std::size_t count, int exponent,
                 double factor) {
  Element* const o = static_cast<Element*>(out);
  if constexpr (operation_parts<Op>::chosen) {
    return reduce_chosen<Element, Op>(context, in, inputs, o, count, exponent, factor);
  } else if constexpr (reduces_halves<Element, Op>) {
    return reduce_halves<Element, Op>(in, inputs, o, count, exponent, factor, isa::portable);
  } else {
    reduce_elements<Element, Op>(context, in, inputs, o, count, factor);
    return false;
  }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
/// @cond
using word_x8 = std::uint32_t __attribute__((vector_size(32)));
using long_x4 = long long __attribute__((vector_size(32)));
/// @endcond

// o[i] = x[i] fx + y[i] fy; true if `any` or if a finite sum left float16's range.
[[gnu::noinline]] inline bool add_halves(const float16* x, float fx, const float16* y, float fy, float16* o,
                                         std::size_t n, bool any) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    const float v = static_cast<float>(x[i]) * fx + static_cast<float>(y[i]) * fy;
    o[i] = float16(v);
    any |= (o[i].bits & 0x7c00u) == 0x7c00u && std::isfinite(v);
  }
  return any;
}

// Eight of them, in vector form; returns a mask of those that left the range.
__attribute__((target("avx2,f16c"), always_inline)) inline int_x8 add_halves_x8(const float16* x, float fx,
                                                                                const float16* y, float fy,
                                                                                float16* o) {
  short_x8 hx, hy;
  std::memcpy(&hx, x, sizeof hx);
  std::memcpy(&hy, y, sizeof hy);
  const float_x8 v = __builtin_ia32_vcvtph2ps256(hx) * fx + __builtin_ia32_vcvtph2ps256(hy) * fy;
  const short_x8 h = __builtin_ia32_vcvtps2ph256(v, 0);
  std::memcpy(static_cast<void*>(o), &h, sizeof h);
  // Twice the bits of a float have no sign. Shifted so that 65520 becomes the least int, those that turn infinite are
  // the ints below `finite`, which infinities and NaNs are not.
  constexpr std::uint32_t first = 0x477ff000u << 1, past = 0x7f800000u << 1;
  word_x8 bits, shift{};
  int_x8 finite{};
  std::memcpy(&bits, &v, sizeof bits);
  shift += 0x80000000u - first;
  finite += static_cast<int>(0x80000000u + (past - first));
  return (int_x8)(bits + bits + shift) < finite;
}

// The hop of a ring, for powers of two fx and fy, so that products are exact.
__attribute__((target("avx2,f16c"))) inline bool add_halves_avx2(const float16* x, float fx, const float16* y, float fy,
                                                                 float16* o, std::size_t n) noexcept {
  int_x8 left{};
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    left |= add_halves_x8(x + i, fx, y + i, fy, o + i);
    left |= add_halves_x8(x + i + 8, fx, y + i + 8, fy, o + i + 8);
  }
  const bool any = __builtin_ia32_ptestz256((long_x4)left, (long_x4)left) == 0;
  if (i == n) return any;
  return add_halves(x + i, fx, y + i, fy, o + i, n - i, any);
}

template <class Half, class Op>
__attribute__((target("avx2,f16c"), noinline)) bool reduce_halves_avx2(const operand* in, int inputs, Half* out,
                                                                       std::size_t count, int exponent, double factor) {
  return reduce_halves<Half, Op>(in, inputs, out, count, exponent, factor, isa::avx2);
}

// A leaf's loop with AVX2 and F16C, which round every operation as the portable one does: no fused multiply-add.
template <class Element, class Op>
__attribute__((target("avx2,f16c"))) bool reduce_loop_avx2(const void* context, const operand* in, int inputs,
                                                           void* out, std::size_t count, int exponent, double factor) {
  Element* const o = static_cast<Element*>(out);
  if constexpr (operation_parts<Op>::chosen) {
    return reduce_chosen<Element, Op>(context, in, inputs, o, count, exponent, factor);
  } else if constexpr (reduces_halves<Element, Op>) {
    if constexpr (std::is_same_v<Element, float16> && (std::is_same_v<Op, sum> || std::is_same_v<Op, mean>)) {
      if (inputs == 2 && std::bit_cast<std::uint64_t>(factor) << 12 == 0) {  // a power of two
        const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(factor));
        const auto times = [bits](int e) { return std::bit_cast<float>(bits + (static_cast<std::uint32_t>(e) << 23)); };
        return add_halves_avx2(static_cast<const float16*>(in[0].data), times(in[0].exponent - exponent),
                               static_cast<const float16*>(in[1].data), times(in[1].exponent - exponent), o, count);
      }
    }
    return reduce_halves_avx2<Element, Op>(in, inputs, o, count, exponent, factor);
  } else {
    reduce_elements<Element, Op>(context, in, inputs, o, count, factor);
    return false;
  }
}

// The loop for this processor.
template <class Element, class Op>
leaf::function best_reduce_loop() noexcept {
  return best_isa() == isa::portable ? &reduce_loop<Element, Op> : &reduce_loop_avx2<Element, Op>;
}
#else
template <class Element, class Op>
leaf::function best_reduce_loop() noexcept {
  return &reduce_loop<Element, Op>;
}
#endif
}  // namespace detail

/// @brief The leaf of element type Element and operation Op: sum, mean, product, min, max, or a user's
/// `Element operator()(Element, Element) const`.
///
/// A user operation must be associative and commutative up to rounding and must not throw. `op` is borrowed.
template <class Element, class Op>
leaf leaf_of(const Op& op) {
  static_assert(std::is_trivially_copyable_v<Element>, "heddle: an element type must be trivially copyable");
  using parts = detail::operation_parts<Op>;
  constexpr bool builtin = detail::reduction_id<Op> != 255;
  static_assert(!builtin || parts::chosen || dtype_of<Element> != dtype::other,
                "heddle: sum, mean, product, min and max need a built-in element type; pass your own operation for "
                "your own type, or accumulate_in a number");
  return {dtype_of<Element>, detail::reduction_id<Op>, std::is_same_v<typename parts::plain, mean>, sizeof(Element),
          detail::best_reduce_loop<Element, Op>(), builtin ? nullptr : &parts::get(op)};
}

}  // namespace v0
}  // namespace heddle

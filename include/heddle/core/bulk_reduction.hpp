// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/backend.hpp>
#include <heddle/core/error.hpp>
#include <heddle/core/reduction.hpp>

#include <string>

namespace heddle {
inline namespace v0 {

namespace detail {
// One element of a reduction: the same values as a host leaf computes, for one index, to each output.
template <class Element, class Op, int Most>
struct reduce_operands {
  const Element* in[Most];
  Element* out[Most];
  int inputs, outputs;
  double factor;
  Op op;

  HEDDLE_HD void operator()(std::size_t i) const {
    using parts = operation_parts<Op>;
    using plain = typename parts::plain;
    using acc = typename parts::template accumulator<Element>;
    constexpr bool adds = std::is_same_v<plain, sum> || std::is_same_v<plain, mean>;
    acc a = cast_to<acc>(in[0][i]);
    for (int k = 1; k < inputs; ++k) a = combine(parts::get(op), a, cast_to<acc>(in[k][i]));
    if constexpr (adds && std::is_integral_v<acc>) {
      const acc divisor = static_cast<acc>(1.0 / factor + 0.5);
      if (divisor != 1) a /= divisor;
    } else if constexpr (adds) {
      a = static_cast<acc>(static_cast<double>(a) * factor);
    }
    const Element result = cast_to<Element>(a);
    for (int k = 0; k < outputs; ++k) out[k][i] = result;
  }
};
}  // namespace detail

/// @brief A leaf whose inner loop is a bulk operation of a backend, in a queue: what reduces device memory.
///
/// The values are those of the leaf of the same element type and operation on the host, bit for bit, but float16 isn't
/// scaled. It must outlive the collective's call, not the work that this enqueues.
/// Traffic: each input read once, the result written once.
/// Sync:    only enqueues; nothing tells whether a value left float16's range.
/// Throws:  argument_error for more than 64 operands, which a direct exchange of more ranks than that has.
/// @tparam Backend heddle::cuda, heddle::host or one of your own.
template <backend Backend, class Element, class Op>
class bulk_leaf {
 public:
  static_assert(std::is_trivially_copyable_v<Element>, "heddle: an element type must be trivially copyable");

  /// @param op sum{}, mean{}, min{}, max{}, or a user's functor, marked HEDDLE_HD and trivially copyable; it is copied.
  /// @param q Where the work goes.
  bulk_leaf(const Op& op, typename Backend::queue q) : op_(op), queue_(q) {}

  /// The leaf; it refers to this object.
  leaf get() const noexcept {
    return {dtype_of<Element>, detail::reduction_id<Op>, std::is_same_v<typename detail::operation_parts<Op>::plain, mean>,
            sizeof(Element), &reduce, this, &reduce_to};
  }

 private:
  static constexpr int most = 64;

  static bool reduce(const void* context, const operand* in, int inputs, void* out, std::size_t count, int,
                     double factor) {
    return reduce_to(context, in, inputs, &out, 1, count, factor);
  }
  static bool reduce_to(const void* context, const operand* in, int inputs, void* const* out, int outputs,
                        std::size_t count, double factor) {
    const bulk_leaf& self = *static_cast<const bulk_leaf*>(context);
    if (inputs > most) {
      throw argument_error("heddle::bulk_leaf: " + std::to_string(inputs) +
                           " operands in one step, allowed are 64; choose a topology with smaller dimensions");
    }
    detail::reduce_operands<Element, Op, most> f{{}, {}, inputs, outputs, factor, self.op_};
    for (int k = 0; k < inputs; ++k) f.in[k] = static_cast<const Element*>(in[k].data);
    for (int k = 0; k < outputs; ++k) f.out[k] = static_cast<Element*>(out[k]);
    Backend::for_each(count, f, self.queue_);
    return false;
  }

  Op op_;
  typename Backend::queue queue_;
};

}  // namespace v0
}  // namespace heddle

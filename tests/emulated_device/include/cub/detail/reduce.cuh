// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   the order in which device-wide reductions combine: CUB asks for an associative and commutative operator and
//         promises no order, so every seventh item goes together, and the seven results from the last to the first.

#include <cub/detail/device_call.cuh>

#include <cstdint>
#include <optional>

namespace cub::detail {

/// The items first .. last - 1, of which there is at least one.
template <class Accumulator, class Iterator, class Operator, class Transform>
Accumulator reduce(Iterator in, std::uint64_t first, std::uint64_t last, Operator op, Transform transform) {
  constexpr std::uint64_t strands = 7;
  std::optional<Accumulator> partial[strands];
  for (std::uint64_t i = first; i < last; ++i) {
    std::optional<Accumulator>& p = partial[(i - first) % strands];
    Accumulator item = static_cast<Accumulator>(transform(at(in, i)));
    if (p)
      p.emplace(static_cast<Accumulator>(op(*p, item)));
    else
      p.emplace(item);
  }
  std::uint64_t k = last - first < strands ? last - first : strands;
  Accumulator all = *partial[--k];
  while (k > 0) {
    Accumulator next = static_cast<Accumulator>(op(all, *partial[--k]));
    all = next;
  }
  return all;
}

struct identity {
  template <class T> T operator()(T x) const { return x; }
};

}  // namespace cub::detail

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/dtype.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>

// What ranks reduce, and what must come out, in double precision.
namespace exact {

// Small integers and halves: their sums are exact in every type, in any order.
template <class T> T value(int rank, std::size_t i) {
  const auto x = static_cast<float>((static_cast<std::size_t>(rank) * 7 + i * 5) % 16);
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(x);
  else
    return T(x * 0.5f);
}
template <class T> double as_double(T x) {
  if constexpr (sizeof(T) == 2)
    return static_cast<float>(x);
  else
    return static_cast<double>(x);
}

enum class what { sum, mean, least, most };

// How far `got`, element i of the result of `ranks` ranks, is from what it should be, beyond what a mean may be rounded.
template <class T> double excess(T got, what w, int ranks, std::size_t i) {
  double sum = 0, least = 1e9, most = -1e9;
  for (int r = 0; r < ranks; ++r) {
    const double x = as_double(value<T>(r, i));
    sum += x, least = std::min(least, x), most = std::max(most, x);
  }
  double expected = w == what::sum ? sum : w == what::least ? least : w == what::most ? most : sum / ranks;
  if (std::is_integral_v<T>) expected = std::trunc(expected);
  const double unit = std::is_integral_v<T> || w != what::mean ? 0
                      : sizeof(T) == 2                         ? 0x1p-8
                      : sizeof(T) == 4                         ? 0x1p-24
                                                               : 0x1p-52;
  return std::abs(as_double(got) - expected) - unit * expected;
}

}  // namespace exact

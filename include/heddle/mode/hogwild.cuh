// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/cuda.cuh>

#include <cstdint>

namespace heddle {
inline namespace v0 {

namespace detail {
/// table[rows[k] * width + j] += factor * own[k * width + j]; without rows, row k is row k.
struct add_by_reduction {
  float* table;
  const std::uint32_t* rows;
  const float* own;
  std::size_t width;
  float factor;
  /// Element i of own.
  __device__ void operator()(std::size_t i) const {
    const std::size_t row = rows ? rows[i / width] : i / width;
    atomicAdd(table + row * width + i % width, factor * own[i]);
  }
};
}  // namespace detail

/// @brief Hogwild on a device: blocks and streams add to parameters that all share, by the memory's own reductions.
///
/// No addition is lost. The answer of `atomicAdd` isn't used, so that the assembler may leave it out. Sums round in the
/// order in which they happen, which differs between runs.
///
/// Traffic: 8 bytes read, 4 written per element, the reduction in the second cache.
/// Order:   any streams at once; kernels that read the parameters meanwhile see each float as somebody left it.
/// Sync:    only enqueues.
/// Throws:  cuda_error; argument_error on a null pointer with a count.
struct red {
  /// shared += factor * own, for n floats.
  static void add(float* shared, const float* own, float factor, std::size_t n, cuda::queue q) {
    add_rows(shared, nullptr, own, factor, n, 1, q);
  }
  /// Row rows[k] of the table += factor * row k of own, for `count` rows of `width` floats; a row may come twice. With
  /// null for rows, row k of the table.
  static void add_rows(float* table, const std::uint32_t* rows, const float* own, float factor, std::size_t count,
                       std::size_t width, cuda::queue q) {
    if (count == 0 || width == 0) return;
    if (!table || !own)
      throw argument_error("heddle::red::add_rows: a null pointer with " + std::to_string(count) + " rows");
    if (count > ~std::size_t{0} / width)
      throw argument_error("heddle::red::add_rows: " + std::to_string(count) + " rows of " + std::to_string(width) +
                           " floats overflow");
    cuda::for_each(count * width, detail::add_by_reduction{table, rows, own, width, factor}, q);
  }
  /// "red".
  static constexpr const char* name() noexcept { return "red"; }
};

}  // namespace v0
}  // namespace heddle

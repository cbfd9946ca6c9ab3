// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/dtype.hpp>
#include <heddle/core/error.hpp>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief A trainable tensor, borrowed: the memory stays the caller's and must outlive whoever is given it.
struct tensor {
  void* parameter = nullptr;  ///< `count` elements.
  void* gradient = nullptr;   ///< `count` elements; written by backward, overwritten by the exchange.
  std::size_t count = 0;      ///< Number of elements; 0 is legal.
  dtype type = dtype::f32;    ///< Element type of both.
  std::string name;           ///< Unique; state and errors are keyed by it.
  unsigned group = 0;         ///< Index into the list given to data_parallel::groups.
  std::size_t rows = 0;       ///< Rows of the matrix that it is, for compressors that ask; 0: not said.
};

/// @brief Tensors over flat parameter and gradient buffers, one after the other, named "0", "1", ...
/// @param parameters Flat buffer. @param gradients Flat buffer of the same layout. @param sizes Elements of each
/// tensor. @tparam Element float, float16 or bfloat16.
/// Throws: argument_error if a buffer is null while there are elements.
template <class Element, class Tensor = tensor>
std::vector<Tensor> tensors(std::type_identity_t<Element>* parameters, Element* gradients,
                            std::span<const std::size_t> sizes) {
  std::vector<Tensor> all;
  all.reserve(sizes.size());
  std::size_t at = 0;
  for (const std::size_t n : sizes) {
    if (n && (!parameters || !gradients))
      throw argument_error("heddle::tensors: null buffer for tensor " + std::to_string(all.size()));
    all.push_back({parameters + at, gradients + at, n, dtype_of<Element>, std::to_string(all.size()), 0, 0});
    at += n;
  }
  return all;
}

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/trainer/detail/device_forms.cuh>

#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

/// @cond
struct norm_row {  // of a tensor: its gradient, and where it would begin behind the others
  const float* gradient;
  std::size_t begin;
};
struct norm_begin {
  const norm_row* rows;
  HEDDLE_HD std::size_t operator()(std::size_t i) const { return rows[i].begin - rows[0].begin; }
};
struct norm_square {
  const norm_row* rows;
  HEDDLE_HD double operator()(std::size_t tensor, std::size_t i) const {
    const auto g = static_cast<double>(rows[tensor].gradient[i - (rows[tensor].begin - rows[0].begin)]);
    return g * g;
  }
};
template <class Transforms> struct norm_scale {
  Transforms transforms;
  float before;
  int ranks;
  float* factors;
  HEDDLE_HD void operator()(std::size_t tensor, double squares) const {
    factors[tensor] = scale_from(transforms, squares, before, ranks);
  }
};
struct norm_add {
  HEDDLE_HD double operator()(double a, double b) const { return a + b; }
};
/// @endcond

// What transforms multiply the gradients of tensors by: found and left on the device.
class device_factors {
 public:
  explicit device_factors(cudaStream_t s) : memory_(s) {}

  // Rows of all tensors, and one more where the last ends; read before this returns.
  void tell(const std::vector<norm_row>& rows, cuda::queue q) {
    tensors_ = rows.size() - 1;
    const std::size_t bytes = rows.size() * sizeof(norm_row) + stream_buffer::rounded(rows.size() * sizeof(float));
    check_cuda("data_parallel", memory_.reserve(bytes));
    cuda::copy(rows.data(), this->rows(), rows.size(), q);
    q.synchronize();
  }
  float* of(std::size_t tensor) const noexcept { return reinterpret_cast<float*>(memory_.data()) + tensor; }

  // Those of tensors [first, first + n), which have so many elements; their gradients being multiplied by `before`
  // already. One launch.
  template <class Transforms>
  void find(const Transforms& transforms, std::size_t first, std::size_t n, std::size_t elements, float before,
            int ranks, cuda::queue q) {
    cuda::reduce_segments(n, elements, norm_begin{rows() + first}, 0.0, norm_add{}, norm_square{rows() + first},
                          norm_scale<Transforms>{transforms, before, ranks, of(first)}, pool_, q);
  }

 private:
  norm_row* rows() const noexcept {
    return reinterpret_cast<norm_row*>(memory_.data() + stream_buffer::rounded((tensors_ + 1) * sizeof(float)));
  }

  stream_buffer memory_;
  cuda::memory pool_;
  std::size_t tensors_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

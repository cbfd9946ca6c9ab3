// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the fidelity tests share. They use CUDA and nothing of the emulated device: what they say holds on a GPU too.

#include "../support/catch.hpp"

#include <heddle/core/shared.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

// The call's error by its name, so that a failure can be read.
#define REQUIRE_CUDA(...) REQUIRE(std::string(cudaGetErrorName(__VA_ARGS__)) == "cudaSuccess")
#define CHECK_CUDA(...) CHECK(std::string(cudaGetErrorName(__VA_ARGS__)) == "cudaSuccess")
// A call that must fail with this error; it is taken from the thread's slot.
#define CHECK_ERROR(error, ...)                                  \
  do {                                                           \
    CHECK(std::string(cudaGetErrorName(__VA_ARGS__)) == #error); \
    static_cast<void>(cudaGetLastError());                       \
  } while (false)
// A call that must fail where the documentation leaves it at several errors.
#define CHECK_ONE_OF(call, ...)                            \
  do {                                                     \
    CHECK(fidelity::outside(call, {__VA_ARGS__}).empty()); \
    static_cast<void>(cudaGetLastError());                 \
  } while (false)

namespace fidelity {

// The error's name if it is none of these.
inline std::string outside(cudaError_t error, std::initializer_list<cudaError_t> allowed) {
  return std::find(allowed.begin(), allowed.end(), error) == allowed.end() ? cudaGetErrorName(error) : "";
}

// Where and how a kernel runs.
struct shape {
  dim3 blocks = dim3(1), threads = dim3(1);
  std::size_t shared = 0;
  cudaStream_t stream = nullptr;
};

template <class... Parameters, class... Arguments>
cudaError_t launch(const shape& s, void (*kernel)(Parameters...), Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = s.blocks;
  config.blockDim = s.threads;
  config.dynamicSmemBytes = s.shared;
  config.stream = s.stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// Device memory with known contents; every element begins with the same value.
template <class Value> class device_array {
 public:
  device_array(std::size_t n, Value value) : device_array(std::vector<Value>(n, value)) {}
  explicit device_array(const std::vector<Value>& values) : n_(values.size()) {
    REQUIRE_CUDA(cudaMalloc(&data_, bytes()));
    REQUIRE_CUDA(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyDefault));
    REQUIRE_CUDA(cudaDeviceSynchronize());
  }
  device_array(const device_array&) = delete;
  ~device_array() { static_cast<void>(cudaFree(data_)); }

  Value* data() const { return data_; }
  std::size_t bytes() const { return n_ * sizeof(Value); }
  // What is there when all work of the device is done.
  std::vector<Value> get() const {
    REQUIRE_CUDA(cudaDeviceSynchronize());
    std::vector<Value> values(n_);
    REQUIRE_CUDA(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDefault));
    return values;
  }

 private:
  std::size_t n_;
  Value* data_ = nullptr;
};

}  // namespace fidelity

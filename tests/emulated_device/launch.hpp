// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What tests need to run a kernel, in the spelling that nvcc and the emulated device share: cudaLaunchKernelEx and
// plain arrays. A call that fails throws.
#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

inline void require_success(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

/// The shape of a launch; what is left out is 1, 0 or the default stream.
struct launch_shape {
  dim3 blocks{1};
  dim3 threads{1};
  std::size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};

/// kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...), as a call that returns CUDA's error.
template <class... Parameters>
cudaError_t launch(const launch_shape& shape, void (*kernel)(Parameters...),
                   std::type_identity_t<Parameters>... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// The same on the default stream; throws unless it succeeds.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, std::type_identity_t<Parameters>... arguments) {
  require_success(launch(launch_shape{blocks, threads}, kernel, arguments...), "cudaLaunchKernelEx");
}

/// An array in device memory, of the size and, if given, the contents of a host vector.
template <class T> class device_array {
 public:
  explicit device_array(std::size_t count) : count_(count) {
    require_success(cudaMalloc(reinterpret_cast<void**>(&data_), bytes()), "cudaMalloc");
  }
  explicit device_array(const std::vector<T>& host) : device_array(host.size()) {
    require_success(cudaMemcpy(data_, host.data(), bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~device_array() { cudaFree(data_); }
  device_array(const device_array&) = delete;
  device_array& operator=(const device_array&) = delete;

  T* data() const { return data_; }
  std::size_t size() const { return count_; }

  /// Waits for the device, then copies the contents back.
  std::vector<T> host() const {
    require_success(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<T> copy(count_);
    require_success(cudaMemcpy(copy.data(), data_, bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return copy;
  }

 private:
  std::size_t bytes() const { return count_ * sizeof(T); }

  T* data_ = nullptr;
  std::size_t count_ = 0;
};

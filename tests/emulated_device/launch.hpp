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

/// Enqueues a kernel on a stream. Arguments convert to its parameters as in a call.
template <class... Parameters>
void launch_on(cudaStream_t stream, void (*kernel)(Parameters...), dim3 blocks, dim3 threads, std::size_t shared_bytes,
               std::type_identity_t<Parameters>... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  require_success(cudaLaunchKernelEx(&config, kernel, arguments...), "cudaLaunchKernelEx");
}

/// The same on the default stream, without dynamic shared memory.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, std::type_identity_t<Parameters>... arguments) {
  launch_on(nullptr, kernel, blocks, threads, 0, arguments...);
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

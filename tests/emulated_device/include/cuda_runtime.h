// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief The CUDA runtime with its C++ interface: typed calls, and launches through cudaLaunchKernelEx.

#include <cuda_runtime_api.h>
#include <emulated/kernel.h>
#include <vector_functions.h>

#include <functional>
#include <tuple>
#include <type_traits>

namespace emulated {

/// A launch that has passed CUDA's checks is queued; `body` runs once per device thread.
cudaError_t launch(const void* kernel, const cudaLaunchConfig_t* config, std::size_t parameter_bytes,
                   std::function<void()> body);
/// Queues work that isn't a kernel of the user's but runs on the device in stream order: what a library call does.
cudaError_t enqueue(cudaStream_t stream, const char* name, std::function<void()> body);
/// Queues something that is done when `ready` says so: a library waits there for what other host threads will call.
cudaError_t enqueue_wait(cudaStream_t stream, const char* name, std::function<bool()> ready);
/// From now on a symbol's address is one of device memory.
cudaError_t symbol_address(void** pointer, void* symbol, std::size_t bytes);
/// Copies a symbol: `offset` and `bytes` are checked against its size.
cudaError_t copy_symbol(void* symbol, std::size_t size, void* other, std::size_t bytes, std::size_t offset,
                        bool to_symbol, cudaStream_t stream, bool wait);

}  // namespace emulated

/// Arguments are converted to the kernel's parameters and copied when this returns, as CUDA does.
template <class... Parameters, class... Arguments>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                                      Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "cudaLaunchKernelEx: wrong number of arguments");
  static_assert((std::is_trivially_destructible_v<std::remove_cvref_t<Parameters>> && ...),
                "cudaLaunchKernelEx: kernel parameters are copied as bytes");
  static_assert((!std::is_reference_v<Parameters> && ...), "cudaLaunchKernelEx: a kernel can't take references");
  std::tuple<std::remove_cv_t<Parameters>...> copies{static_cast<Parameters>(arguments)...};
  return emulated::launch(reinterpret_cast<const void*>(kernel), config, (sizeof(Parameters) + ... + 0),
                          [kernel, copies] { std::apply(kernel, copies); });
}

// Typed forms

template <class Value> inline cudaError_t cudaMalloc(Value** pointer, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}
template <class Value> inline cudaError_t cudaMallocHost(Value** pointer, std::size_t bytes, unsigned flags = 0) {
  return cudaMallocHost(reinterpret_cast<void**>(pointer), bytes, flags);
}
template <class Value> inline cudaError_t cudaHostAlloc(Value** pointer, std::size_t bytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(pointer), bytes, flags);
}
template <class Value>
inline cudaError_t cudaMallocManaged(Value** pointer, std::size_t bytes, unsigned flags = cudaMemAttachGlobal) {
  return cudaMallocManaged(reinterpret_cast<void**>(pointer), bytes, flags);
}
template <class Value> inline cudaError_t cudaMallocAsync(Value** pointer, std::size_t bytes, cudaStream_t stream) {
  return cudaMallocAsync(reinterpret_cast<void**>(pointer), bytes, stream);
}
template <class Value>
inline cudaError_t cudaMallocAsync(Value** pointer, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  return cudaMallocFromPoolAsync(reinterpret_cast<void**>(pointer), bytes, pool, stream);
}
template <class Value>
inline cudaError_t cudaMallocFromPoolAsync(Value** pointer, std::size_t bytes, cudaMemPool_t pool,
                                           cudaStream_t stream) {
  return cudaMallocFromPoolAsync(reinterpret_cast<void**>(pointer), bytes, pool, stream);
}
template <class Value>
inline cudaError_t cudaMallocPitch(Value** pointer, std::size_t* pitch, std::size_t width, std::size_t height) {
  return cudaMallocPitch(reinterpret_cast<void**>(pointer), pitch, width, height);
}
template <class Value> inline cudaError_t cudaHostGetDevicePointer(Value** device, void* host, unsigned flags) {
  return cudaHostGetDevicePointer(reinterpret_cast<void**>(device), host, flags);
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event, unsigned flags) {
  return cudaEventCreateWithFlags(event, flags);
}

template <class... Parameters>
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <class... Parameters>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
template <class... Parameters>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(Parameters...),
                                                                 int threads, std::size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, reinterpret_cast<const void*>(kernel), threads,
                                                       shared_bytes);
}
/// As many threads as the kernel's launch bounds allow, since no registers are counted.
template <class... Parameters>
inline cudaError_t cudaOccupancyMaxPotentialBlockSize(int* min_grid, int* threads, void (*kernel)(Parameters...),
                                                      std::size_t shared_bytes = 0, int limit = 0) {
  int blocks = 0, processors = 0, device = 0;
  cudaFuncAttributes attributes{};
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  *threads = limit > 0 && limit < attributes.maxThreadsPerBlock ? limit : attributes.maxThreadsPerBlock;
  if (status == cudaSuccess)
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, *threads, shared_bytes);
  if (status == cudaSuccess) status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  *min_grid = blocks * processors;
  return status;
}

// Symbols: one copy per process, shared by all devices.

template <class Value> inline cudaError_t cudaGetSymbolAddress(void** pointer, const Value& symbol) {
  return emulated::symbol_address(pointer, const_cast<std::remove_const_t<Value>*>(&symbol), sizeof(Value));
}
template <class Value> inline cudaError_t cudaGetSymbolSize(std::size_t* bytes, const Value&) {
  *bytes = sizeof(Value);
  return cudaSuccess;
}
template <class Value>
inline cudaError_t cudaMemcpyToSymbol(const Value& symbol, const void* from, std::size_t bytes, std::size_t offset = 0,
                                      cudaMemcpyKind = cudaMemcpyHostToDevice) {
  return emulated::copy_symbol(const_cast<std::remove_const_t<Value>*>(&symbol), sizeof(Value),
                               const_cast<void*>(from), bytes, offset, true, nullptr, true);
}
template <class Value>
inline cudaError_t cudaMemcpyFromSymbol(void* to, const Value& symbol, std::size_t bytes, std::size_t offset = 0,
                                        cudaMemcpyKind = cudaMemcpyDeviceToHost) {
  return emulated::copy_symbol(const_cast<std::remove_const_t<Value>*>(&symbol), sizeof(Value), to, bytes, offset,
                               false, nullptr, true);
}
template <class Value>
inline cudaError_t cudaMemcpyToSymbolAsync(const Value& symbol, const void* from, std::size_t bytes,
                                           std::size_t offset, cudaMemcpyKind, cudaStream_t stream = nullptr) {
  return emulated::copy_symbol(const_cast<std::remove_const_t<Value>*>(&symbol), sizeof(Value),
                               const_cast<void*>(from), bytes, offset, true, stream, false);
}
template <class Value>
inline cudaError_t cudaMemcpyFromSymbolAsync(void* to, const Value& symbol, std::size_t bytes, std::size_t offset,
                                             cudaMemcpyKind, cudaStream_t stream = nullptr) {
  return emulated::copy_symbol(const_cast<std::remove_const_t<Value>*>(&symbol), sizeof(Value), to, bytes, offset,
                               false, stream, false);
}

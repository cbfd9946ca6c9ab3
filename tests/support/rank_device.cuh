// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/cuda.cuh>
#include <heddle/core/float16.hpp>
#include <heddle/core/reduction.hpp>

#include <cmath>
#include <span>
#include <vector>

/// @file
/// What tests of ranks with a device each need: memory on it, elements that depend on the rank, and their reduction in
/// double precision.
namespace device_test {
namespace hd = heddle;

// A rank's stream and device memory.
class rank_device {
 public:
  explicit rank_device(int device) {
    hd::detail::check_cuda("device", cudaSetDevice(device));
    hd::detail::check_cuda("stream", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  rank_device(const rank_device&) = delete;
  ~rank_device() {
    for (void* p : blocks_) cudaFreeAsync(p, stream_);
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  cudaStream_t stream() const { return stream_; }
  hd::cuda::queue queue() const { return {stream_}; }
  // Device memory with these elements; `host` must stay until the stream is waited for.
  template <class Value> std::span<Value> put(const std::vector<Value>& host) {
    if (host.empty()) return {};
    void* p = nullptr;
    hd::detail::check_cuda("put", cudaMallocAsync(&p, host.size() * sizeof(Value), stream_));
    blocks_.push_back(p);
    const std::size_t bytes = host.size() * sizeof(Value);
    hd::detail::check_cuda("put", cudaMemcpyAsync(p, host.data(), bytes, cudaMemcpyDefault, stream_));
    return {static_cast<Value*>(p), host.size()};
  }
  template <class Value, class Comm> std::vector<Value> get(Comm& comm, std::span<const Value> at) {
    std::vector<Value> host(at.size());
    comm.copy(host.data(), at.data(), at.size_bytes());
    comm.synchronize();
    return host;
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<void*> blocks_;
};

template <class Value> Value element(int rank, std::size_t i) {
  const auto x = static_cast<double>((i * 7 + static_cast<std::size_t>(rank) * 13) % 31) - 15.0;
  return static_cast<Value>(static_cast<float>(x * 0.25));
}
template <> inline int element<int>(int rank, std::size_t i) { return static_cast<int>(i % 97) * (rank + 1) - 40; }
template <class Value> std::vector<Value> elements(int rank, std::size_t n) {
  std::vector<Value> v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = element<Value>(rank, i);
  return v;
}
inline double wide(hd::bfloat16 x) { return static_cast<float>(x); }
inline double wide(double x) { return x; }

struct largest_magnitude {
  HEDDLE_HD float operator()(float a, float b) const {
    const float x = a < 0 ? -a : a, y = b < 0 ? -b : b;
    return x > y || (x == y && a > b) ? a : b;
  }
};

template <class Value, class Op> std::vector<double> reference(int ranks, std::size_t n, const Op&) {
  std::vector<double> want(n);
  for (std::size_t i = 0; i < n; ++i) {
    double a = wide(element<Value>(0, i));
    for (int r = 1; r < ranks; ++r) {
      const double b = wide(element<Value>(r, i));
      if constexpr (std::is_same_v<Op, hd::max>)
        a = a > b ? a : b;
      else if constexpr (std::is_same_v<Op, hd::min>)
        a = a < b ? a : b;
      else if constexpr (std::is_same_v<Op, hd::product>)
        a *= b;
      else if constexpr (std::is_same_v<Op, largest_magnitude>)
        a = std::fabs(a) > std::fabs(b) || (std::fabs(a) == std::fabs(b) && a > b) ? a : b;
      else
        a += b;
    }
    want[i] = std::is_same_v<Op, hd::mean> ? a / ranks : a;
  }
  return want;
}

}  // namespace device_test

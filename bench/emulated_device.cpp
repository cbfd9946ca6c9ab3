// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: the emulated device: nanoseconds of a thread, a barrier and a shuffle; limits 100 ns a thread, 1000 under ASan
// needs: libboost-context-dev boost/context/detail/fcontext.hpp
// links: emulated_device
#include <cuda_runtime.h>
#include <emulated/control.h>

#include <benchmark/benchmark.h>

#include <chrono>

namespace {

constexpr int count = 1 << 18;
#if defined(__SANITIZE_ADDRESS__)
constexpr double limit_of_thread = 1000e-9;
#else
constexpr double limit_of_thread = 100e-9;
#endif

__global__ void add(float* p, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) p[i] += 1.0f;
}
template <int Barriers> __global__ void barriers(float* p, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  for (int b = 0; b < Barriers; ++b) __syncthreads();
  if (i < n) p[i] += 1.0f;
}
template <int Shuffles> __global__ void shuffles(float* p, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  float x = 0.0f;
  for (int s = 0; s < Shuffles; ++s) x += __shfl_xor_sync(0xffffffffu, x, 1 << s % 5);
  if (i < n) p[i] += x;
}

// Seconds of one thread of a kernel.
void time_threads(benchmark::State& state, void (*kernel)(float*, int), int operations) {
  emulated::reset();
  float* p = nullptr;
  cudaMalloc(&p, count * sizeof(float));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(count / 256);
  config.blockDim = dim3(256);
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    cudaLaunchKernelEx(&config, kernel, p, count);
    if (cudaDeviceSynchronize() != cudaSuccess) state.SkipWithError("the kernel failed");
    const auto end = std::chrono::steady_clock::now();
    state.SetIterationTime(std::chrono::duration<double>(end - start).count() / count / operations);
  }
  cudaFree(p);
}

void thread(benchmark::State& state) { time_threads(state, add, 1); }
void thread_limit(benchmark::State& state) {
  for (auto _ : state) state.SetIterationTime(limit_of_thread);
}
void barrier(benchmark::State& state) { time_threads(state, barriers<16>, 16); }
void shuffle(benchmark::State& state) { time_threads(state, shuffles<16>, 16); }

}  // namespace

BENCHMARK(thread)->Name("thread/ours")->UseManualTime()->Iterations(10)->Unit(benchmark::kNanosecond);
BENCHMARK(thread_limit)->Name("thread/floor_limit")->UseManualTime()->Iterations(10)->Unit(benchmark::kNanosecond);
BENCHMARK(barrier)->Name("barrier")->UseManualTime()->Iterations(3)->Unit(benchmark::kNanosecond);
BENCHMARK(shuffle)->Name("shuffle")->UseManualTime()->Iterations(3)->Unit(benchmark::kNanosecond);

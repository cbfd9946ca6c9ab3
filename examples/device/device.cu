// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Clips gradients by their norm: written once against a backend's vocabulary, run on the host and on CUDA, with a kernel
// of its own in between. nvcc builds it for a GPU; the same file built as C++ runs on the emulated device of the tests.
#include <heddle/core/cuda.cuh>
#include <heddle/core/host.hpp>
#include <heddle/core/shared.cuh>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

namespace hd = heddle;

namespace clipping {

struct square {
  const float* gradient;
  HEDDLE_HD double operator()(std::size_t i) const {
    const double g = gradient[i];
    return g * g;
  }
};
struct plus {
  HEDDLE_HD double operator()(double a, double b) const { return a + b; }
};
struct scale {
  float* gradient;
  const double* squared;
  double most;
  HEDDLE_HD void operator()(std::size_t i) const {
    if (*squared > most * most) gradient[i] *= static_cast<float>(most / std::sqrt(*squared));
  }
};

// The norm is taken on one queue and used on another; an event orders the two.
template <hd::backend Backend>
void clip(float* gradient, std::size_t n, double most, double* squared, typename Backend::queue norms,
          typename Backend::queue updates) {
  typename Backend::memory memory;
  typename Backend::event ready;
  Backend::transform_reduce(n, 0.0, plus{}, square{gradient}, squared, memory, norms);
  ready.record(norms);
  updates.wait(ready);
  Backend::for_each(n, scale{gradient, squared, most}, updates);
}

// A kernel beside the vocabulary: the largest magnitude of each block of 256, by a tree in shared memory.
__global__ void largest_of_block(const float* gradient, int n, float* largest) {
  HEDDLE_SHARED(float[256], tile);
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  tile[threadIdx.x] = i < n ? fabsf(gradient[i]) : 0.0f;
  for (unsigned half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) tile[threadIdx.x] = fmaxf(tile[threadIdx.x], tile[threadIdx.x + half]);
  }
  if (threadIdx.x == 0) largest[blockIdx.x] = tile[0];
}

}  // namespace clipping

int main(int argc, char** argv) try {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIP: no CUDA device\n");
    return argc > 1 && std::strcmp(argv[1], "--need-device") == 0 ? 77 : 0;
  }
  constexpr int n = 10'007, blocks = (n + 255) / 256;
  std::vector<float> expected(n), got(n), largest(blocks);
  for (int i = 0; i < n; ++i) expected[static_cast<std::size_t>(i)] = std::sin(0.1f * static_cast<float>(i));

  struct stream {
    stream() { hd::detail::check_cuda("example", cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
    ~stream() { static_cast<void>(cudaStreamDestroy(handle)); }
    cudaStream_t handle = nullptr;
  } first, second;
  const hd::cuda::queue norms{first.handle}, updates{second.handle};
  hd::cuda::memory memory;
  float* gradient = static_cast<float*>(memory.allocate(norms, n * sizeof(float), 256));
  float* maxima = static_cast<float*>(memory.allocate(norms, blocks * sizeof(float), 256));
  double* squared = static_cast<double*>(memory.allocate(norms, sizeof(double), 256));
  hd::cuda::copy(expected.data(), gradient, n, norms);
  norms.synchronize();

  clipping::clip<hd::cuda>(gradient, n, 1.0, squared, norms, updates);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(256);
  config.stream = updates.stream;
  hd::detail::check_cuda("example", cudaLaunchKernelEx(&config, clipping::largest_of_block,
                                                       static_cast<const float*>(gradient), n, maxima));
  hd::cuda::copy(gradient, got.data(), n, updates);
  hd::cuda::copy(maxima, largest.data(), blocks, updates);
  updates.synchronize();
  for (void* p : {static_cast<void*>(gradient), static_cast<void*>(maxima), static_cast<void*>(squared)})
    memory.deallocate(updates, p, 0, 256);
  updates.synchronize();

  double norm = 0.0;
  clipping::clip<hd::host>(expected.data(), n, 1.0, &norm, {}, {});
  float difference = 0.0f, greatest = 0.0f;
  for (std::size_t i = 0; i < n; ++i) difference = std::fmax(difference, std::fabs(got[i] - expected[i]));
  for (const float x : largest) greatest = std::fmax(greatest, x);
  cudaDeviceProp properties;
  hd::detail::check_cuda("example", cudaGetDeviceProperties(&properties, 0));
  std::printf("%s: norm %.4f clipped to 1, largest element %.6f, difference from the host %.1e\n", properties.name,
              std::sqrt(norm), static_cast<double>(greatest), static_cast<double>(difference));
  return difference < 1e-6f ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}

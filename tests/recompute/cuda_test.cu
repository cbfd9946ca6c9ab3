// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// A chain on the device whose blocks wait in pinned host memory: copies on a stream of their own, ordered by events.

#include "../support/catch.hpp"

#include <heddle/core/cuda.cuh>
#include <heddle/recompute/chain.hpp>
#include <heddle/recompute/none.hpp>
#include <heddle/recompute/offload.hpp>
#include <heddle/recompute/sqrt.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {
namespace hd = heddle;
namespace rc = heddle::recompute;

struct pinned {
  void* allocate_sync(std::size_t bytes, std::size_t) {
    void* p = nullptr;
    if (cudaMallocHost(&p, bytes) != cudaSuccess) throw hd::memory_error("pinned", bytes);
    return p;
  }
  void deallocate_sync(void* p, std::size_t, std::size_t) noexcept {
    if (p != nullptr) static_cast<void>(cudaFreeHost(p));
  }
};

/// cuda::memory that counts.
struct counted {
  std::size_t* live;
  std::size_t* peak;
  void* allocate(hd::cuda::queue q, std::size_t bytes, std::size_t alignment) {
    void* const p = hd::cuda::memory{}.allocate(q, bytes, alignment);
    *live += bytes;
    *peak = *live > *peak ? *live : *peak;
    return p;
  }
  void deallocate(hd::cuda::queue q, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    *live -= bytes;
    hd::cuda::memory{}.deallocate(q, p, bytes, alignment);
  }
};

struct forward_element {
  const std::uint32_t* x;
  std::uint32_t *y, *saved;
  std::uint32_t factor;
  HEDDLE_HD void operator()(std::size_t i) const {
    y[i] = x[i] * factor + 1;
    if (saved != nullptr) saved[i] = x[i] ^ factor;
  }
};

struct backward_element {
  const std::uint32_t *x, *saved, *d_y;
  std::uint32_t* d_x;
  std::uint32_t factor;
  HEDDLE_HD void operator()(std::size_t i) const { d_x[i] = d_y[i] * factor + x[i] + 3 * saved[i]; }
};

/// y = factor x + 1 in arithmetic modulo 2^32, with a backward that needs input and saved block.
struct affine {
  std::size_t n;
  std::uint32_t factor;
  hd::cuda::queue work;
  std::size_t output_bytes() const { return n * sizeof(std::uint32_t); }
  std::size_t saved_bytes() const { return n * sizeof(std::uint32_t); }
  void forward(const void* in, void* out, void* saved, rc::pass) {
    hd::cuda::for_each(n,
                       forward_element{static_cast<const std::uint32_t*>(in), static_cast<std::uint32_t*>(out),
                                       static_cast<std::uint32_t*>(saved), factor},
                       work);
  }
  void backward(const void* in, const void* saved, const void* grad_out, void* grad_in) {
    hd::cuda::for_each(
        n,
        backward_element{static_cast<const std::uint32_t*>(in), static_cast<const std::uint32_t*>(saved),
                         static_cast<const std::uint32_t*>(grad_out), static_cast<std::uint32_t*>(grad_in), factor},
        work);
  }
};

template <class Policy> void trains(const Policy& policy, std::size_t layers, bool copies_expected) {
  const std::size_t n = 33;
  cudaStream_t streams[2] = {};
  for (cudaStream_t& s : streams) REQUIRE(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  const hd::cuda::queue compute{streams[0]}, copies{streams[1]};
  std::vector<affine> all;
  for (std::size_t i = 0; i < layers; ++i) all.push_back({n, static_cast<std::uint32_t>(2 * i + 3), compute});

  // On the host, in plain loops.
  std::vector<std::vector<std::uint32_t>> x(layers + 1, std::vector<std::uint32_t>(n));
  for (std::size_t i = 0; i < n; ++i) x[0][i] = static_cast<std::uint32_t>(7 * i + 1);
  for (std::size_t l = 0; l < layers; ++l) {
    for (std::size_t i = 0; i < n; ++i) x[l + 1][i] = x[l][i] * all[l].factor + 1;
  }
  std::vector<std::uint32_t> expected(n, 5);
  const std::vector<std::uint32_t> top = expected;
  for (std::size_t l = layers; l-- > 0;) {
    for (std::size_t i = 0; i < n; ++i) {
      expected[i] = expected[i] * all[l].factor + x[l][i] + 3 * (x[l][i] ^ all[l].factor);
    }
  }

  std::size_t live = 0, peak = 0;
  {
    hd::cuda::memory device;
    const std::size_t bytes = n * sizeof(std::uint32_t);
    auto* const in = static_cast<std::uint32_t*>(device.allocate(compute, bytes, 64));
    auto* const d_out = static_cast<std::uint32_t*>(device.allocate(compute, bytes, 64));
    auto* const d_in = static_cast<std::uint32_t*>(device.allocate(compute, bytes, 64));
    hd::cuda::copy(x[0].data(), in, n, compute);
    hd::cuda::copy(top.data(), d_out, n, compute);
    std::vector<rc::layer> list(all.begin(), all.end());
    rc::chain c{policy, counted{&live, &peak}, list, rc::offload_store<hd::cuda, pinned>{pinned{}, compute, copies}};
    CHECK((c.simulated().copied_bytes > 0) == copies_expected);
    for (int step = 0; step < 3; ++step) {
      std::vector<std::uint32_t> got(n);
      c.forward(in);
      if (step == 1) {  // a step that is given up, while copies may be under way
        c.discard();
        CHECK(live == 0);
        continue;
      }
      c.backward(d_out, d_in);
      hd::cuda::copy(d_in, got.data(), n, compute);
      compute.synchronize();
      CHECK(got == expected);
      CHECK(live == 0);
      CHECK(peak == c.simulated().peak_bytes);
    }
    for (std::uint32_t* p : {in, d_out, d_in}) device.deallocate(compute, p, bytes, 64);
    compute.synchronize();
  }
  for (cudaStream_t s : streams) CHECK(cudaStreamDestroy(s) == cudaSuccess);
}
}  // namespace

TEST_CASE("recompute: a chain on the device, with its blocks offloaded to pinned memory") {
  trains(rc::sqrt{}, 9, false);
  trains(rc::offload<>{}, 9, true);
  trains(rc::offload{.policy = rc::sqrt{}, .ahead = 2}, 16, true);
  trains(rc::offload{.bytes_per_time = 100.0}, 12, true);
}

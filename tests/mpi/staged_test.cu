// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Device memory of processes: under mpirun, each process on a device of its own, on the emulated device.
#include "../support/catch.hpp"

#include <heddle/collective/all_reduce.cuh>
#include <heddle/collective/gather.cuh>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/comm/mpi.hpp>
#include <heddle/comm/staged.cuh>

#include <cmath>
#include <string>
#include <vector>

namespace hd = heddle;

namespace {
class buffer {
 public:
  buffer(const std::vector<float>& host, cudaStream_t stream) : size_(host.size()), stream_(stream) {
    hd::detail::check_cuda("buffer", cudaMallocAsync(&data_, bytes() + 1, stream));
    hd::detail::check_cuda("buffer", cudaMemcpyAsync(data_, host.data(), bytes(), cudaMemcpyDefault, stream));
    hd::detail::check_cuda("buffer", cudaStreamSynchronize(stream));
  }
  buffer(const buffer&) = delete;
  ~buffer() { cudaFreeAsync(data_, stream_); }
  std::span<float> span() const { return {static_cast<float*>(data_), size_}; }
  std::vector<float> get() const {
    std::vector<float> host(size_);
    hd::detail::check_cuda("get", cudaMemcpyAsync(host.data(), data_, bytes(), cudaMemcpyDefault, stream_));
    hd::detail::check_cuda("get", cudaStreamSynchronize(stream_));
    return host;
  }

 private:
  std::size_t bytes() const { return size_ * sizeof(float); }
  void* data_ = nullptr;
  std::size_t size_;
  cudaStream_t stream_;
};

float element(int rank, std::size_t i) {
  return static_cast<float>((i * 7 + static_cast<std::size_t>(rank) * 13) % 31) - 15.0f;
}
std::vector<float> elements(int rank, std::size_t n) {
  std::vector<float> v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = element(rank, i);
  return v;
}
}  // namespace

TEST_CASE("device memory of processes is reduced through pinned memory") {
  hd::mpi::communicator world = hd::mpi::world();
  const int me = world.rank(), p = world.size();
  REQUIRE(cudaSetDevice(me) == cudaSuccess);
  cudaStream_t stream;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  const hd::cuda::queue q{stream};
  {
    // Chunks above and below MPI's limit between short and long messages, and ranks with different numbers of chunks.
    for (const std::size_t chunk : {std::size_t{1000}, std::size_t{6000}, std::size_t{1} << 20}) {
      hd::staged comm(world.duplicate(), stream, {.chunk = chunk});
      for (const std::size_t n : {1, 17, 10'007}) {
        INFO("rank " << me << ", chunk " << chunk << ", " << n << " elements");
        std::vector<float> want(n);
        for (std::size_t i = 0; i < n; ++i) {
          for (int r = 0; r < p; ++r) want[i] += element(r, i);  // small whole numbers: exact in any order
        }
        const std::vector<float> mine = elements(me, n);
        const buffer a(mine, stream), b(mine, stream), c(mine, stream);
        hd::all_reduce(comm, hd::ring{}, a.span(), hd::sum{}, q);
        hd::all_reduce(comm, hd::direct{}, b.span(), hd::sum{}, q);
        CHECK(a.get() == want);
        CHECK(b.get() == want);
        std::vector<std::size_t> counts(static_cast<std::size_t>(p), n / 8);  // all but the first of one chunk
        counts[0] = n;
        for (std::size_t r = 1; r < counts.size(); ++r) counts[0] -= counts[r];
        hd::reduce_scatter(comm, hd::ring{}, c.span(), std::span<const std::size_t>(counts), hd::sum{}, q);
        hd::all_gather(comm, hd::ring{}, c.span(), std::span<const std::size_t>(counts));
        CHECK(c.get() == want);
      }
      hd::barrier(comm);
      comm.synchronize();
    }
    CHECK_FALSE(hd::mpi::cuda_aware());  // the distribution's isn't
  }
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

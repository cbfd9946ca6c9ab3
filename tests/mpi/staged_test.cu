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
#include <stdexcept>
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

// MPI, and where what it is given lies.
struct watched : hd::detail::wrapper<hd::mpi::communicator> {
  watched(hd::mpi::communicator c, bool* device) : wrapper(std::move(c)), device_(device) {}
  watched duplicate() { return {inner_.duplicate(), device_}; }
  template <class Apply>
  void exchange(const hd::header& h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in,
                Apply&& apply) {
    for (const hd::outgoing& m : out) see(m.data);
    for (const hd::incoming& m : in) see(m.into);
    inner_.exchange(h, out, in, std::forward<Apply>(apply));
  }
  void see(const void* p) {
    cudaPointerAttributes a{};
    hd::detail::check_cuda("attributes", cudaPointerGetAttributes(&a, p));
    if ((a.type == cudaMemoryTypeDevice) != *device_) throw std::logic_error("a message in another kind of memory");
  }
  bool* device_;
};
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
    // Chunk 0 stands for an MPI that is given the device's pointers; on the emulated device they are the process's own.
    for (const std::size_t chunk : {1000, 6000, 1 << 20, 0}) {
      bool direct = chunk == 0;
      hd::staged comm(watched(world.duplicate(), &direct), stream, {.chunk = direct ? 1 : chunk, .direct = direct});
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

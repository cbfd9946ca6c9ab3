// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Ranks are threads with a device each, which find each other through threads::communicator.

#include "../support/catch.hpp"

#include <heddle/collective/all_reduce.cuh>
#include <heddle/collective/gather.hpp>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/comm/nccl.hpp>
#include <heddle/comm/threads.hpp>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

namespace hd = heddle;

namespace nccl_test {

// A rank's stream and device memory.
class rank_device {
 public:
  explicit rank_device(int device) {
    if (cudaSetDevice(device) != cudaSuccess) throw std::runtime_error("no device " + std::to_string(device));
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
    hd::detail::check_cuda("put", cudaMemcpyAsync(p, host.data(), host.size() * sizeof(Value), cudaMemcpyDefault, stream_));
    return {static_cast<Value*>(p), host.size()};
  }
  template <class Value> std::vector<Value> get(hd::nccl::communicator& comm, std::span<const Value> at) {
    std::vector<Value> host(at.size());
    comm.copy(host.data(), at.data(), at.size_bytes());
    comm.synchronize();
    return host;
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<void*> blocks_;
};

bool enough_devices(int ranks) {
  int count = 0;
  static_cast<void>(cudaGetDeviceCount(&count));
  static_cast<void>(cudaGetLastError());
  if (count < ranks) std::printf("SKIP: %d devices for %d ranks\n", count, ranks);
  return count >= ranks;
}

// Runs f(host communicator, NCCL communicator, device) on every rank.
template <class Function> void run(int ranks, const hd::nccl::options& o, Function&& f) {
  hd::threads::run(ranks, [&](auto& host) {
    rank_device device(host.rank());
    hd::nccl::communicator comm = hd::nccl::connect(host, device.stream(), o);
    f(host, comm, device);
    comm.synchronize();
  });
}

template <class Value> Value element(int rank, std::size_t i) {
  const auto x = static_cast<double>((i * 7 + static_cast<std::size_t>(rank) * 13) % 31) - 15.0;
  return static_cast<Value>(static_cast<float>(x * 0.25));
}
template <> int element<int>(int rank, std::size_t i) { return static_cast<int>(i % 97) * (rank + 1) - 40; }
template <class Value> std::vector<Value> elements(int rank, std::size_t n) {
  std::vector<Value> v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = element<Value>(rank, i);
  return v;
}
double wide(hd::bfloat16 x) { return static_cast<float>(x); }
double wide(double x) { return x; }

struct largest_magnitude {
  HEDDLE_HD float operator()(float a, float b) const {
    const float x = a < 0 ? -a : a, y = b < 0 ? -b : b;
    return x > y || (x == y && a > b) ? a : b;
  }
};

enum class expected { sum, mean, max, magnitude };

template <class Value, class Op> std::vector<double> reference(int ranks, std::size_t n, const Op&) {
  std::vector<double> want(n);
  for (std::size_t i = 0; i < n; ++i) {
    double a = wide(element<Value>(0, i));
    for (int r = 1; r < ranks; ++r) {
      const double b = wide(element<Value>(r, i));
      if constexpr (std::is_same_v<Op, hd::max>) a = a > b ? a : b;
      else if constexpr (std::is_same_v<Op, largest_magnitude>)
        a = std::fabs(a) > std::fabs(b) || (std::fabs(a) == std::fabs(b) && a > b) ? a : b;
      else a += b;
    }
    want[i] = std::is_same_v<Op, hd::mean> ? a / ranks : a;
  }
  return want;
}

// One all-reduce of every size after the other, without waiting in between; what is wrong, in words.
template <class Value, class Op, class Topology>
std::string all_reduces(int ranks, const Topology& t, double roundoff, const Op& op = {}) {
  const auto p = static_cast<std::size_t>(ranks);
  std::vector<std::size_t> sizes{0, 1, p - 1, p, p + 1, 17, 1025};
  std::vector<std::vector<std::vector<Value>>> got(sizes.size(), std::vector<std::vector<Value>>(p));
  run(ranks, {}, [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
    std::vector<std::vector<Value>> in;
    std::vector<std::span<Value>> there;
    for (const std::size_t n : sizes) in.push_back(elements<Value>(comm.rank(), n));
    for (const auto& v : in) there.push_back(device.put(v));
    for (const auto s : there) hd::all_reduce(comm, t, s, op, device.queue());
    for (std::size_t k = 0; k < sizes.size(); ++k)
      got[k][static_cast<std::size_t>(comm.rank())] = device.template get<Value>(comm, there[k]);
  });
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    const auto want = reference<Value>(ranks, sizes[k], op);
    for (std::size_t r = 0; r < p; ++r) {
      for (std::size_t i = 0; i < sizes[k]; ++i) {
        const double have = wide(got[k][r][i]);
        const double off = std::fabs(have - want[i]);
        if (!(off <= roundoff * (1 + std::fabs(want[i]))) || have != wide(got[k][0][i])) {
          return t.name() + ", " + std::to_string(ranks) + " ranks, " + std::to_string(sizes[k]) + " elements: rank " +
                 std::to_string(r) + " has " + std::to_string(have) + " at " + std::to_string(i) + ", not " +
                 std::to_string(want[i]);
        }
      }
    }
  }
  return {};
}

}  // namespace nccl_test

using namespace nccl_test;

TEST_CASE("nccl: schedules reduce device memory") {
  for (const int ranks : {1, 2, 3, 4, 5}) {
    if (!enough_devices(ranks)) return;
    CHECK(all_reduces<float, hd::sum>(ranks, hd::ring{}, 1e-6) == "");
    CHECK(all_reduces<float, hd::mean>(ranks, hd::halving_doubling{}, 1e-6) == "");
  }
  CHECK(all_reduces<int, hd::sum>(3, hd::ring{}, 0.0) == "");
  CHECK(all_reduces<hd::bfloat16, hd::mean>(4, hd::ring{}, 0.02) == "");
  CHECK(all_reduces<float, largest_magnitude>(4, hd::ring{}, 0.0) == "");
  CHECK(all_reduces<float, hd::max>(5, hd::halving_doubling{}, 0.0) == "");
}

TEST_CASE("nccl: the library's own all-reduce") {
  for (const int ranks : {1, 2, 5}) {
    if (!enough_devices(ranks)) return;
    CHECK(all_reduces<float, hd::sum>(ranks, hd::native{}, 1e-6) == "");
    CHECK(all_reduces<float, hd::max>(ranks, hd::native{}, 0.0) == "");
  }
  CHECK(all_reduces<hd::bfloat16, hd::mean>(3, hd::native{}, 0.02) == "");
}

TEST_CASE("nccl: the mean of ones is one, also in bfloat16") {
  if (!enough_devices(7)) return;
  std::vector<int> wrong(7, -1);
  run(7, {}, [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
    const std::vector<hd::bfloat16> ones(5, hd::bfloat16(1.0f));
    const auto a = device.put(ones), b = device.put(ones);
    hd::all_reduce(comm, hd::native{}, a, hd::mean{}, device.queue());
    hd::all_reduce(comm, hd::ring{}, b, hd::mean{}, device.queue());
    int bad = 0;
    for (const auto s : {a, b})
      for (const hd::bfloat16 x : device.get<hd::bfloat16>(comm, s)) bad += static_cast<float>(x) != 1.0f;
    wrong[static_cast<std::size_t>(comm.rank())] = bad;
  });
  CHECK(wrong == std::vector<int>(7, 0));
}

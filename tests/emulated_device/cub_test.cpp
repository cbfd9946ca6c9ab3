// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// What the stand-in for CUB adds to CUB: it finds out callers who rely on what CUB doesn't promise.

#include "../support/catch.hpp"
#include "launch.hpp"
#include "programs.hpp"

#include <emulated/control.h>
#include <cub/cub.cuh>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

namespace cub_test {

template <class T> class pinned {
 public:
  pinned() { REQUIRE(cudaMallocHost(&data_, sizeof(T)) == cudaSuccess); }
  pinned(const pinned&) = delete;
  ~pinned() { cudaFreeHost(data_); }
  T* data() const { return data_; }
  T value() const { return *data_; }

 private:
  T* data_ = nullptr;
};

std::vector<int> ones(std::size_t n) { return std::vector<int>(n, 1); }

// The only fault so far says this; it is forgotten.
void one_fault(const char* words) {
  REQUIRE(emulated::faults().size() == 1);
  INFO(emulated::faults().front());
  CHECK(emulated::faults().front().find(words) != std::string::npos);
  emulated::clear_faults();
}

TEST_CASE("cub stand-in: the first phase asks for an odd size and queues nothing") {
  const device_array<int> in(ones(1000)), out(ones(1));
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  const std::uint64_t before = emulated::items_run();
  std::size_t last = 0;
  for (const int n : {0, 1, 14, 500, 1000}) {
    std::size_t bytes = 0;
    REQUIRE(cub::DeviceReduce::Sum(nullptr, bytes, in.data(), out.data(), n) == cudaSuccess);
    CHECK(bytes % 2 == 1);
    CHECK(bytes > last);
    last = bytes;
  }
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(emulated::items_run() == before);
}

TEST_CASE("cub stand-in: what a call refuses") {
  const int n = 100;
  const device_array<int> in(ones(n)), out(ones(n));
  std::size_t bytes = 0;
  REQUIRE(cub::DeviceReduce::Sum(nullptr, bytes, in.data(), out.data(), n) == cudaSuccess);
  const device_array<char> storage(std::vector<char>(bytes + 1));
  const auto sum = [&](void* at, std::size_t size, const int* from, int* to, int count) {
    return cub::DeviceReduce::Sum(at, size, from, to, count);
  };

  SECTION("nothing") { CHECK(sum(storage.data(), bytes, in.data(), out.data(), n) == cudaSuccess); }
  SECTION("too little storage") {
    CHECK(sum(storage.data(), bytes - 1, in.data(), out.data(), n) == cudaErrorInvalidValue);
    CHECK(sum(storage.data(), 0, in.data(), out.data(), n) == cudaErrorInvalidValue);
  }
  SECTION("a negative count") {
    CHECK(sum(storage.data(), bytes, in.data(), out.data(), -1) == cudaErrorInvalidValue);
    CHECK(sum(nullptr, bytes, in.data(), out.data(), -1) == cudaErrorInvalidValue);
    CHECK(cub::DeviceFor::Bulk(-1, [](int) {}) == cudaErrorInvalidValue);
  }
  SECTION("storage of the host's") {
    std::vector<char> own(bytes);
    CHECK(sum(own.data(), bytes, in.data(), out.data(), n) == cudaErrorInvalidValue);
    one_fault("cub::DeviceReduce::Sum: its temporary storage isn't device memory");
  }
  SECTION("storage that is shorter than it says") {
    CHECK(sum(storage.data(), bytes + 2, in.data(), out.data(), n) == cudaErrorInvalidValue);
    one_fault("temporary storage");
  }
  SECTION("arguments in the host's memory") {
    int result = 0;
    CHECK(sum(storage.data(), bytes, in.data(), &result, n) == cudaErrorInvalidValue);
    one_fault("cub::DeviceReduce::Sum: no 4 bytes of device memory");
    const std::vector<int> own = ones(n);
    CHECK(sum(storage.data(), bytes, own.data(), out.data(), n) == cudaErrorInvalidValue);
    one_fault("no 400 bytes");
    static int variable = 0;
    CHECK(sum(storage.data(), bytes, in.data(), &variable, n) == cudaErrorInvalidValue);
    one_fault("no 4 bytes");
  }
  SECTION("an input that ends too early") {
    CHECK(sum(storage.data(), bytes, in.data() + 1, out.data(), n) == cudaErrorInvalidValue);
    one_fault("no 400 bytes");
  }
  SECTION("a misaligned pointer") {
    int* const odd = reinterpret_cast<int*>(reinterpret_cast<char*>(out.data()) + 1);
    CHECK(sum(storage.data(), bytes, in.data(), odd, n) == cudaErrorInvalidValue);
    one_fault("misaligned");
  }
  SECTION("ranges that overlap") {
    CHECK(sum(storage.data(), bytes, in.data(), in.data() + 5, n) == cudaErrorInvalidValue);
    one_fault("overlap");
    CHECK(cub::DeviceScan::InclusiveSum(storage.data(), bytes, in.data(), in.data() + 1, n - 1) ==
          cudaErrorInvalidValue);
    one_fault("overlap");
    CHECK(cub::DeviceRadixSort::SortKeys(storage.data(), bytes, in.data(), in.data(), n) == cudaErrorInvalidValue);
    one_fault("overlap");
  }
  SECTION("bits that a key doesn't have") {
    CHECK(cub::DeviceRadixSort::SortKeys(storage.data(), bytes, in.data(), out.data(), n, 0, 33) ==
          cudaErrorInvalidValue);
  }
  SECTION("a stream that isn't one, or another device's") {
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    REQUIRE(cudaSetDevice(1) == cudaSuccess);
    CHECK(cub::DeviceReduce::Sum(storage.data(), bytes, in.data(), out.data(), n, stream) ==
          cudaErrorInvalidResourceHandle);
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
    CHECK(cub::DeviceReduce::Sum(storage.data(), bytes, in.data(), out.data(), n, stream) ==
          cudaErrorInvalidResourceHandle);
  }
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("cub stand-in: work runs in the order of its stream, not before") {
  emulated::reset({.seed = emulated::current().seed, .eagerness = emulated::eagerness::lazy});
  const int n = 1000;
  std::size_t bytes = 0;
  cudaStream_t stream = nullptr, other = nullptr;
  cudaEvent_t filled = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaEventCreateWithFlags(&filled, cudaEventDisableTiming) == cudaSuccess);
  {
    const device_array<unsigned char> in(std::vector<unsigned char>(n, 1));
    const pinned<int> sum, later;
    REQUIRE(cub::DeviceReduce::Sum(nullptr, bytes, in.data(), sum.data(), n) == cudaSuccess);
    const device_array<char> storage{std::vector<char>(bytes)};
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);

    REQUIRE(cudaMemsetAsync(in.data(), 2, n, other) == cudaSuccess);
    REQUIRE(cudaEventRecord(filled, other) == cudaSuccess);
    REQUIRE(cudaStreamWaitEvent(stream, filled, 0) == cudaSuccess);
    REQUIRE(cub::DeviceReduce::Sum(storage.data(), bytes, in.data(), sum.data(), n, stream) == cudaSuccess);
    REQUIRE(cudaMemsetAsync(in.data(), 3, n, stream) == cudaSuccess);
    REQUIRE(cub::DeviceReduce::Sum(storage.data(), bytes, in.data(), later.data(), n, stream) == cudaSuccess);
    if (!emulated::watches_races()) {
      CHECK(sum.value() == -1);  // poison: nothing has run
      CHECK(later.value() == -1);
    }
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(sum.value() == 2 * n);
    CHECK(later.value() == 3 * n);
  }
  REQUIRE(cudaEventDestroy(filled) == cudaSuccess);
  REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
  REQUIRE(cudaStreamDestroy(other) == cudaSuccess);
}

TEST_CASE("cub stand-in: temporary storage that is shared with data ruins it") {
  const int n = 1000;
  std::size_t bytes = 0;
  const device_array<int> in(ones(n));
  REQUIRE(cub::DeviceReduce::Sum(nullptr, bytes, in.data(), in.data(), n) == cudaSuccess);
  // The result where the storage ends, as if its size were a multiple of four.
  const std::size_t place = bytes / 4;
  const device_array<int> block(std::vector<int>(place + 1, 7));
  REQUIRE(cub::DeviceReduce::Sum(block.data(), bytes, in.data(), block.data() + place, n) == cudaSuccess);
  CHECK(block.host()[place] != n);
  CHECK(block.host()[0] == static_cast<int>(0xcdcdcdcdu));
  // An input in it.
  std::size_t few = 0;
  const device_array<int> result(ones(1));
  REQUIRE(cub::DeviceReduce::Sum(nullptr, few, block.data(), result.data(), 20) == cudaSuccess);
  REQUIRE(cub::DeviceReduce::Sum(in.data(), few, in.data(), result.data(), 20) == cudaSuccess);
  CHECK(result.host()[0] != 20);
}

struct minus {
  int operator()(int a, int b) const { return a - b; }
};

TEST_CASE("cub stand-in: no order of operands can be relied on, but it repeats") {
  const int n = 1000;
  std::vector<float> values(n);
  for (int i = 0; i < n; ++i) values[static_cast<std::size_t>(i)] = 1.0f / static_cast<float>(i + 1);
  const float in_order = std::accumulate(values.begin(), values.end(), 0.0f);
  const device_array<float> in(values), out(std::vector<float>(1));
  const device_array<char> storage(std::vector<char>(1001));
  std::size_t bytes = 1001;
  float sums[2];
  for (float& s : sums) {
    REQUIRE(cub::DeviceReduce::Sum(storage.data(), bytes, in.data(), out.data(), n) == cudaSuccess);
    s = out.host()[0];
  }
  CHECK(sums[0] == sums[1]);
  CHECK(sums[0] != in_order);
  CHECK(sums[0] == Approx(in_order));

  const device_array<int> two(std::vector<int>{5, 3}), difference(ones(1));
  REQUIRE(cub::DeviceReduce::Reduce(storage.data(), bytes, two.data(), difference.data(), 2, minus{}, 0) ==
          cudaSuccess);
  CHECK(difference.host()[0] != 0 - 5 - 3);

  const device_array<float> scanned(values);
  REQUIRE(cub::DeviceScan::InclusiveSum(storage.data(), bytes, scanned.data(), n) == cudaSuccess);
  std::partial_sum(values.begin(), values.end(), values.begin());
  CHECK(scanned.host() != values);
  CHECK(scanned.host().back() == Approx(values.back()));
}

TEST_CASE("cub stand-in: a double buffer's result lies in either buffer, and the other one is lost") {
  bool moved[2] = {};
  for (int n = 2; n < 8; ++n) {
    std::vector<int> keys(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i) keys[static_cast<std::size_t>(i)] = n - i;
    const device_array<int> a(keys), b(keys);
    cub::DoubleBuffer<int> both(a.data(), b.data());
    std::size_t bytes = 0;
    REQUIRE(cub::DeviceRadixSort::SortKeys(nullptr, bytes, both, n) == cudaSuccess);
    CHECK(both.selector == 0);
    const device_array<char> storage{std::vector<char>(bytes)};
    REQUIRE(cub::DeviceRadixSort::SortKeys(storage.data(), bytes, both, n) == cudaSuccess);
    moved[both.selector] = true;
    std::sort(keys.begin(), keys.end());
    CHECK((both.selector == 0 ? a : b).host() == keys);
    CHECK((both.selector == 0 ? b : a).host() == std::vector<int>(keys.size(), static_cast<int>(0xcdcdcdcdu)));
  }
  CHECK(moved[0]);
  CHECK(moved[1]);
}

struct failing_sum {
  int operator()(int a, int) const {
    __trap();
    return a;
  }
};

TEST_CASE("cub stand-in: a functor that fails breaks the device") {
  {
    const device_array<int> in(ones(10)), out(ones(1));
    const device_array<char> storage(std::vector<char>(100));
    std::size_t bytes = 100;
    REQUIRE(cub::DeviceReduce::Reduce(storage.data(), bytes, in.data(), out.data(), 10, failing_sum{}, 0) ==
            cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaErrorLaunchFailure);
    CHECK(cub::DeviceReduce::Sum(storage.data(), bytes, in.data(), out.data(), 10) == cudaErrorLaunchFailure);
    one_fault("cub::DeviceReduce::Reduce");
    static_cast<void>(cudaGetLastError());
  }
}

__global__ void all_results(int* reduced, int* scanned) {
  using reduce = cub::BlockReduce<int, 64>;
  using scan = cub::BlockScan<int, 64>;
  HEDDLE_SHARED(reduce::TempStorage, for_reduce);
  HEDDLE_SHARED(scan::TempStorage, for_scan);
  reduced[threadIdx.x] = reduce(for_reduce).Sum(1);
  scan(for_scan).ExclusiveScan(1, scanned[threadIdx.x], cuda::std::plus<>{});
}

TEST_CASE("cub stand-in: undefined results are poison") {
  const device_array<int> reduced(ones(64)), scanned(ones(64));
  REQUIRE(launch({.threads = dim3(64)}, all_results, reduced.data(), scanned.data()) == cudaSuccess);
  const auto sums = reduced.host(), before = scanned.host();
  CHECK(sums[0] == 64);
  CHECK(std::vector<int>(sums.begin() + 1, sums.end()) == std::vector<int>(63, -1));
  CHECK(before[0] == -1);
  CHECK(before[63] == 63);
}

__global__ void two_sums(int* out, bool with_barrier) {
  using reduce = cub::BlockReduce<int, 64>;
  HEDDLE_SHARED(reduce::TempStorage, temporary);
  const int first = reduce(temporary).Sum(1);
  if (with_barrier) __syncthreads();
  const int second = reduce(temporary).Sum(2);
  if (threadIdx.x == 0) {
    out[0] = first;
    out[1] = second;
  }
}

// How many of the seeds give wrong results.
int wrong_sums(bool with_barrier, int seeds) {
  int wrong = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    emulated::reset({.seed = static_cast<std::uint64_t>(seed)});
    const device_array<int> out(ones(2));
    require_success(launch({.threads = dim3(64)}, two_sums, out.data(), with_barrier), "launch");
    wrong += out.host() != std::vector<int>{64, 128};
  }
  return wrong;
}
const emulated_test::program two_sums_program("two block sums", [](int barrier) { wrong_sums(barrier != 0, 1); });

TEST_CASE("cub stand-in: storage used again without a barrier is a race") {
  CHECK(wrong_sums(true, 40) == 0);
  if (emulated::watches_races()) {
    CHECK(emulated_test::run("two block sums", 1).well);
    CHECK(emulated_test::run("two block sums", 0).says("data race"));
  } else {
    CHECK(wrong_sums(false, 40) > 0);
  }
}

TEST_CASE("cub stand-in: a primitive for another block") {
  {
    const device_array<int> out(ones(2));
    REQUIRE(launch({.threads = dim3(32)}, two_sums, out.data(), true) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaErrorLaunchFailure);
    REQUIRE(emulated::faults().size() == 2);
    CHECK(emulated::faults()[0].find("cub::BlockReduce is for blocks of another shape") != std::string::npos);
    emulated::clear_faults();
  }
  static_cast<void>(cudaGetLastError());
}

}  // namespace cub_test

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// What tests can choose: seeds, eagerness, failures on purpose; and what is refused with a reason.

#include "../support/catch.hpp"
#include "launch.hpp"

#include <emulated/control.h>

#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace control {

__global__ void note_order(int* order, unsigned* next, int who) {
  order[atomicAdd(next, 1u)] = who + static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}
__global__ void nothing() {}
__global__ void add_one(int* sum) { atomicAdd(sum, 1); }

// Twelve kernels on four streams; the order in which their threads ran.
std::vector<int> order_under(const emulated::options& o) {
  emulated::reset(o);
  constexpr int n = 4 * 3 * 16;
  const device_array<int> order(std::vector<int>(n, 0));
  const device_array<unsigned> next(std::vector<unsigned>(1, 0u));
  cudaDeviceSynchronize();  // a copy from pageable memory may only be staged when it returns
  cudaStream_t streams[4];
  for (cudaStream_t& s : streams) cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
  for (int round = 0; round < 3; ++round)
    for (int s = 0; s < 4; ++s)
      launch({2, 8, 0, streams[s]}, note_order, order.data(), next.data(), 1000 * s + 100 * round);
  std::vector<int> got = order.host();
  for (cudaStream_t s : streams) cudaStreamDestroy(s);
  return got;
}

}  // namespace control

using namespace control;

TEST_CASE("emulated: a run under a seed repeats exactly") {
  std::set<std::vector<int>> different;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    const std::vector<int> once = order_under({.seed = seed});
    const std::uint64_t choices = emulated::choices();
    CHECK(once == order_under({.seed = seed}));
    CHECK(choices == emulated::choices());
    different.insert(once);
  }
  CHECK(different.size() == 12);
}

TEST_CASE("emulated: work keeps the order of its stream under every seed") {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const std::vector<int> order = order_under({.seed = seed});
    int round_of[4] = {};
    for (const int who : order) {
      int& round = round_of[who / 1000];
      CHECK(who % 1000 / 100 >= round);
      round = who % 1000 / 100;
    }
  }
}

TEST_CASE("emulated: lazy work waits for somebody who needs it, eager work for nobody") {
  emulated::reset({.eagerness = emulated::eagerness::lazy});
  cudaStream_t one, other;
  cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  for (int i = 0; i < 5; ++i) {
    launch({1, 1, 0, one}, nothing);
    launch({1, 1, 0, other}, nothing);
  }
  CHECK(emulated::items_run() == 0);
  CHECK(cudaStreamSynchronize(one) == cudaSuccess);
  CHECK(emulated::items_run() == 5);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(emulated::items_run() == 10);
  cudaStreamDestroy(one);
  cudaStreamDestroy(other);

  emulated::reset({.eagerness = emulated::eagerness::eager});
  launch({1, 1}, nothing);
  int device = 0;
  cudaEvent_t event;
  cudaEventCreate(&event);
  CHECK(cudaStreamQuery(nullptr) == cudaSuccess);
  CHECK(emulated::items_run() == 1);
  CHECK(cudaGetDevice(&device) == cudaSuccess);
  cudaEventDestroy(event);
}

TEST_CASE("emulated: asking again and again ends") {
  for (std::uint64_t seed = 0; seed < 9; ++seed) {
    emulated::reset({.seed = seed});
    cudaEvent_t event;
    cudaEventCreate(&event);
    for (int i = 0; i < 10; ++i) launch({1, 1}, nothing);
    cudaEventRecord(event);
    int asked = 0;
    while (cudaEventQuery(event) == cudaErrorNotReady && asked < 1000) ++asked;
    CHECK(asked < 1000);
    static_cast<void>(cudaGetLastError());
    cudaEventDestroy(event);
  }
}

TEST_CASE("emulated: allocations and launches fail when they are told to") {
  int* p = nullptr;
  emulated::fail_allocation(1);
  int* q = nullptr;
  CHECK(cudaMalloc(&p, 4) == cudaSuccess);
  CHECK(cudaMalloc(&q, 4) == cudaErrorMemoryAllocation);
  CHECK(q == nullptr);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  CHECK(cudaMalloc(&q, 4) == cudaSuccess);
  emulated::fail_allocation(0);
  int* r = nullptr;
  CHECK(cudaMallocAsync(&r, 4, nullptr) == cudaErrorMemoryAllocation);
  emulated::fail_launch(2, cudaErrorLaunchFailure);
  CHECK(launch({1, 1}, nothing) == cudaSuccess);
  CHECK(launch({1, 1}, nothing) == cudaSuccess);
  CHECK(launch({1, 1}, nothing) == cudaErrorLaunchFailure);
  CHECK(launch({1, 1}, nothing) == cudaSuccess);
  static_cast<void>(cudaGetLastError());
  cudaFree(p);
  cudaFree(q);
}

TEST_CASE("emulated: a device has as much memory as it was given") {
  emulated::reset({.devices = 1, .memory_bytes = 1000});
  char *p = nullptr, *q = nullptr;
  CHECK(cudaMalloc(&p, 600) == cudaSuccess);
  CHECK(cudaMalloc(&q, 401) == cudaErrorMemoryAllocation);
  CHECK(cudaMalloc(&q, 400) == cudaSuccess);
  std::size_t free = 1, total = 0;
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  CHECK(free == 0);
  CHECK(total == 1000);
  cudaFree(p);
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  CHECK(free == 600);
  cudaFree(q);
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("emulated: sizes that don't fit in 64 bits are refused") {
  constexpr std::size_t half = std::size_t{1} << 63;
  void* p = nullptr;
  std::size_t pitch = 0;
  CHECK(cudaMallocHost(&p, half) == cudaErrorMemoryAllocation);
  CHECK(cudaMallocPitch(&p, &pitch, ~std::size_t{0}, 1) == cudaErrorMemoryAllocation);
  CHECK(cudaMallocPitch(&p, &pitch, 512, half) == cudaErrorMemoryAllocation);
  char here[64] = {};
  REQUIRE(cudaMalloc(&p, 64) == cudaSuccess);
  CHECK(cudaMemcpy2D(p, 64, here, 64, 64, (half >> 5) + 1, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemset2D(p, 64, 0, 64, (half >> 5) + 1) == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  cudaFree(p);
}

TEST_CASE("emulated: any number of devices, also none") {
  emulated::reset({.devices = 0});
  int count = 7;
  CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice);
  CHECK(count == 0);
  int* p = nullptr;
  CHECK(cudaMalloc(&p, 4) == cudaErrorNoDevice);
  emulated::reset({.devices = 64});
  CHECK(cudaGetDeviceCount(&count) == cudaSuccess);
  CHECK(count == 64);
  CHECK(cudaSetDevice(63) == cudaSuccess);
  CHECK(cudaSetDevice(64) == cudaErrorInvalidDevice);
  CHECK(launch({1, 1}, nothing) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  static_cast<void>(cudaGetLastError());
  emulated::reset({.peers = false});
  int can = 1;
  CHECK(cudaDeviceCanAccessPeer(&can, 0, 1) == cudaSuccess);
  CHECK(can == 0);
}

TEST_CASE("emulated: handles of pools that are gone, or never were, are refused") {
  cudaMemPoolProps like{};
  like.allocType = cudaMemAllocationTypePinned;
  like.location = {cudaMemLocationTypeDevice, 0};
  cudaMemPool_t pool = nullptr;
  REQUIRE(cudaMemPoolCreate(&pool, &like) == cudaSuccess);
  REQUIRE(cudaMemPoolDestroy(pool) == cudaSuccess);
  int number = 0;
  void* p = nullptr;
  for (const cudaMemPool_t wrong : {pool, reinterpret_cast<cudaMemPool_t>(&number), cudaMemPool_t{nullptr}}) {
    CHECK(cudaMallocFromPoolAsync(&p, 4, wrong, nullptr) == cudaErrorInvalidValue);
    CHECK(cudaMemPoolTrimTo(wrong, 0) == cudaErrorInvalidValue);
    CHECK(cudaDeviceSetMemPool(0, wrong) == cudaErrorInvalidValue);
    CHECK(cudaMemPoolDestroy(wrong) == cudaErrorInvalidValue);
  }
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
}

TEST_CASE("emulated: a device that is reset ends its work and forgets its handles, and no others") {
  cudaStream_t streams[2];
  cudaEvent_t events[2];
  int* numbers[2];
  for (const int device : {1, 0}) {
    REQUIRE(cudaSetDevice(device) == cudaSuccess);
    REQUIRE(cudaStreamCreate(&streams[device]) == cudaSuccess);
    REQUIRE(cudaEventCreate(&events[device]) == cudaSuccess);
    REQUIRE(cudaMalloc(&numbers[device], 64 * sizeof(int)) == cudaSuccess);
    for (int i = 0; i < 5; ++i) {
      CHECK(launch({1, 1, 0, streams[device]}, nothing) == cudaSuccess);
      CHECK(cudaMemsetAsync(numbers[device], 7, 64 * sizeof(int), streams[device]) == cudaSuccess);
      CHECK(cudaEventRecord(events[device], streams[device]) == cudaSuccess);
    }
  }
  CHECK(cudaDeviceReset() == cudaSuccess);
  CHECK(cudaStreamSynchronize(streams[0]) == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventSynchronize(events[0]) == cudaErrorInvalidResourceHandle);
  CHECK(cudaFree(numbers[0]) == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(launch({1, 1}, nothing) == cudaSuccess);
  CHECK(cudaStreamSynchronize(streams[1]) == cudaSuccess);
  int got = 0;
  CHECK(cudaMemcpy(&got, numbers[1], sizeof got, cudaMemcpyDefault) == cudaSuccess);
  CHECK(got == 0x07070707);
  CHECK(cudaEventDestroy(events[1]) == cudaSuccess);
  CHECK(cudaStreamDestroy(streams[1]) == cudaSuccess);
  CHECK(cudaFree(numbers[1]) == cudaSuccess);
}

TEST_CASE("emulated: stream capture is refused") {
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaErrorNotSupported);
  cudaGraph_t graph;
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorNotSupported);
  CHECK(cudaGetLastError() == cudaErrorNotSupported);
  cudaStreamDestroy(stream);
}

TEST_CASE("emulated: a host function may not call CUDA") {
  static cudaError_t inside;
  inside = cudaSuccess;
  cudaLaunchHostFunc(
      nullptr, [](void*) { inside = cudaStreamSynchronize(nullptr); }, nullptr);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(inside == cudaErrorNotPermitted);
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("emulated: other threads may call CUDA while a host function runs") {
  struct meeting {
    std::atomic<bool> entered = false, leave = false;
  } m;
  cudaStream_t slow, other;
  cudaStreamCreateWithFlags(&slow, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  const device_array<int> sum(std::vector<int>(1, 0));
  cudaDeviceSynchronize();
  std::thread waits([&] {
    cudaLaunchHostFunc(
        slow,
        [](void* p) {
          auto& here = *static_cast<meeting*>(p);
          here.entered = true;
          while (!here.leave) std::this_thread::yield();
        },
        &m);
    cudaStreamSynchronize(slow);
  });
  while (!m.entered) std::this_thread::yield();
  CHECK(launch({1, 32, 0, other}, add_one, sum.data()) == cudaSuccess);
  CHECK(cudaStreamSynchronize(other) == cudaSuccess);
  CHECK(cudaStreamQuery(slow) == cudaErrorNotReady);
  static_cast<void>(cudaGetLastError());
  m.leave = true;
  waits.join();
  CHECK(cudaStreamQuery(slow) == cudaSuccess);
  CHECK(sum.host()[0] == 32);
  cudaStreamDestroy(slow);
  cudaStreamDestroy(other);
}

TEST_CASE("emulated: an item waits for what another host thread does") {
  emulated::reset({.seed = emulated::current().seed, .devices = 3});
  std::atomic<int> arrived = 0, wrong = 0;
  std::vector<std::thread> hosts;
  std::vector<int> sums(3, 0);
  for (int h = 0; h < 3; ++h) {
    hosts.emplace_back([&, h] {
      cudaSetDevice(h);  // of its own: who waits for a device waits for all that is on it
      cudaStream_t stream;
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      const device_array<int> sum(std::vector<int>(1, 0));
      cudaDeviceSynchronize();
      launch({1, 32, 0, stream}, add_one, sum.data());
      wrong += emulated::enqueue(stream, "arrive", [&] { ++arrived; }) != cudaSuccess;
      wrong += emulated::enqueue_wait(stream, "wait for three", [&] { return arrived == 3; }) != cudaSuccess;
      launch({1, 32, 0, stream}, add_one, sum.data());
      wrong += cudaStreamSynchronize(stream) != cudaSuccess || arrived != 3;
      sums[static_cast<std::size_t>(h)] = sum.host()[0];
      cudaStreamDestroy(stream);
    });
  }
  for (std::thread& t : hosts) t.join();
  CHECK(wrong == 0);
  CHECK(sums == std::vector<int>(3, 64));
}

TEST_CASE("emulated: hosts that wait for each other for ever are a deadlock, by name") {
  emulated::reset({.stall_seconds = 0.3});
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  launch({1, 1, 0, stream}, nothing);
  emulated::enqueue_wait(stream, "wait for Godot", [] { return false; });
  launch({1, 1, 0, stream}, nothing);
  CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
  CHECK(cudaStreamSynchronize(stream) == cudaErrorLaunchTimeout);
  REQUIRE(emulated::faults().size() == 1);
  const std::string said = emulated::faults()[0];
  CHECK(said.find("a deadlock: a host thread waits for stream 2 of device 0, and nothing can run.") == 0);
  CHECK(said.find("\n  stream 2 of device 0: wait for Godot, which isn't ready, and 1 more") != said.npos);
  emulated::clear_faults();
  static_cast<void>(cudaGetLastError());
  cudaStreamDestroy(stream);
}

TEST_CASE("emulated: several host threads share the devices") {
  std::vector<int> sums(4, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      cudaSetDevice(t % 2);
      const device_array<int> order(std::vector<int>(64, 0));
      const device_array<unsigned> next(std::vector<unsigned>(1, 0u));
      cudaStream_t stream;
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      cudaStreamSynchronize(nullptr);
      launch({4, 16, 0, stream}, note_order, order.data(), next.data(), 0);
      cudaStreamSynchronize(stream);
      for (const int i : order.host()) sums[static_cast<std::size_t>(t)] += i;
      cudaStreamDestroy(stream);
    });
  }
  for (std::thread& t : threads) t.join();
  for (const int sum : sums) CHECK(sum == 63 * 64 / 2);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Programs with one fault each: the emulated device must find it. What a sanitizer finds ends the process, so those
// programs run in a child, and the twin without the fault runs beside it.

#include "../support/catch.hpp"
#include "launch.hpp"
#include "programs.hpp"

#include <emulated/control.h>

#undef NDEBUG
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
constexpr bool with_asan = true;
#else
constexpr bool with_asan = false;
#endif

// Named, since kernels without a symbol have no name in messages.
namespace detects {}
using namespace detects;

namespace detects {

using emulated::watches_races;
using emulated_test::ending;
using emulated_test::program;
using emulated_test::run;

// The faults of one launch, which has the device to itself.
template <class... Parameters, class... Arguments>
std::string fault_of(const launch_shape& shape, void (*kernel)(Parameters...), Arguments... arguments) {
  cudaError_t code = launch(shape, kernel, arguments...);
  if (code == cudaSuccess) code = cudaDeviceSynchronize();
  std::string text = cudaGetErrorName(code);
  for (const std::string& f : emulated::faults()) text += "\n" + f;
  static_cast<void>(cudaGetLastError());
  emulated::clear_faults();
  return text;
}

bool contains(const std::string& text, const char* words) { return text.find(words) != std::string::npos; }

template <class Value> Value* zeros(std::size_t n) {
  Value* p = nullptr;
  if (cudaMalloc(&p, n * sizeof(Value)) != cudaSuccess || cudaMemset(p, 0, n * sizeof(Value)) != cudaSuccess ||
      cudaDeviceSynchronize() != cudaSuccess) {
    std::abort();  // programs can't use Catch
  }
  return p;
}

// ---- Order between streams

__global__ void write_index(int* p, int n, int plus) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) p[i] = i + plus;
}
__global__ void add_to(const int* from, int* to, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) to[i] += from[i];
}

// A staging buffer is filled on one stream and used on another, four times. `full` and `empty` are the two events that
// it needs. True if the sum is right.
bool pipeline(bool full, bool empty) {
  constexpr int n = 64, rounds = 4;
  cudaStream_t fill, use;
  cudaStreamCreateWithFlags(&fill, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&use, cudaStreamNonBlocking);
  cudaEvent_t filled, used;
  cudaEventCreateWithFlags(&filled, cudaEventDisableTiming);
  cudaEventCreateWithFlags(&used, cudaEventDisableTiming);
  int *staging = nullptr, *sum = nullptr;
  cudaMalloc(&staging, n * sizeof(int));
  cudaMalloc(&sum, n * sizeof(int));
  cudaMemset(sum, 0, n * sizeof(int));
  cudaDeviceSynchronize();
  for (int round = 0; round < rounds; ++round) {
    if (empty) cudaStreamWaitEvent(fill, used);
    launch({2, 32, 0, fill}, write_index, staging, n, 100 * round);
    cudaEventRecord(filled, fill);
    if (full) cudaStreamWaitEvent(use, filled);
    launch({2, 32, 0, use}, add_to, static_cast<const int*>(staging), sum, n);
    cudaEventRecord(used, use);
  }
  std::vector<int> got(n);
  cudaMemcpyAsync(got.data(), sum, n * sizeof(int), cudaMemcpyDeviceToHost, use);
  cudaStreamSynchronize(use);
  cudaStreamSynchronize(fill);
  bool right = true;
  for (int i = 0; i < n; ++i) right &= got[static_cast<std::size_t>(i)] == 4 * i + 600;
  cudaFree(staging);
  cudaFree(sum);
  cudaEventDestroy(filled);
  cudaEventDestroy(used);
  cudaStreamDestroy(fill);
  cudaStreamDestroy(use);
  return right;
}

const program pipeline_program("pipeline", [](int events) { pipeline(events & 1, events & 2); });

// Two streams, with others between them, that write the same.
const program two_writers("two writers", [](int others) {
  std::vector<cudaStream_t> streams(static_cast<std::size_t>(others) + 2);
  for (cudaStream_t& s : streams) cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
  int* p = zeros<int>(32);
  launch({1, 32, 0, streams.front()}, write_index, p, 32, 0);
  launch({1, 32, 0, streams.back()}, write_index, p, 32, 0);
  cudaDeviceSynchronize();
});

int wrong_of(int seeds, bool full, bool empty) {
  int wrong = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    emulated::reset({.seed = static_cast<std::uint64_t>(seed), .eagerness = emulated::eagerness::random});
    wrong += !pipeline(full, empty);
  }
  return wrong;
}

}  // namespace detects

TEST_CASE("emulated: a missing event between streams gives wrong results") {
  CHECK(wrong_of(100, true, true) == 0);
  if (watches_races()) return;  // the faulty ones would end the process
  CHECK(wrong_of(100, false, true) > 50);
  CHECK(wrong_of(100, true, false) > 50);
}

TEST_CASE("emulated: a missing event is a race, whatever the seed") {
  if (!watches_races()) return;
  CHECK(run("pipeline", 3).well);
  for (const int missing : {1, 2}) {
    const ending e = run("pipeline", 3 - missing);
    CHECK(!e.well);
    CHECK(e.says("data race"));
  }
  for (const int others : {0, 1, 2, 3, 4, 5, 6}) CHECK(run("two writers", others).says("data race"));
}

// ---- Barriers

namespace detects {

template <bool Barrier> __global__ void reverse(int* p) {
  HEDDLE_SHARED(int[64], tile);
  const unsigned i = threadIdx.x;
  tile[i] = p[i];
  if (Barrier) __syncthreads();
  p[i] = tile[63 - i];
}
template <bool Barrier> __global__ void rotate_in_warp(int* p) {
  HEDDLE_SHARED(int[32], tile);
  const unsigned i = threadIdx.x;
  tile[i] = p[i];
  if (Barrier) __syncwarp();
  p[i] = tile[(i + 1) % 32];
}

// How many of the seeds give wrong results.
template <class Kernel, class Expected> int wrong_blocks(Kernel kernel, unsigned n, int seeds, Expected expected) {
  int wrong = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    emulated::reset({.seed = static_cast<std::uint64_t>(seed)});
    int* p = zeros<int>(n);
    launch({1, n}, write_index, p, static_cast<int>(n), 0);
    launch({1, n}, kernel, p);
    std::vector<int> got(n);
    cudaMemcpy(got.data(), p, n * sizeof(int), cudaMemcpyDeviceToHost);
    cudaFree(p);
    bool right = true;
    for (unsigned i = 0; i < n; ++i) right &= got[i] == static_cast<int>(expected(i));
    wrong += !right;
  }
  return wrong;
}

unsigned reversed(unsigned i) { return 63 - i; }
unsigned rotated(unsigned i) { return (i + 1) % 32; }
const program no_barrier("no __syncthreads", [](int) { wrong_blocks(reverse<false>, 64, 1, reversed); });
const program no_warp_barrier("no __syncwarp", [](int) { wrong_blocks(rotate_in_warp<false>, 32, 1, rotated); });

}  // namespace detects

TEST_CASE("emulated: a missing barrier gives wrong results") {
  CHECK(wrong_blocks(reverse<true>, 64, 50, reversed) == 0);
  CHECK(wrong_blocks(rotate_in_warp<true>, 32, 50, rotated) == 0);
  if (watches_races()) {
    for (const char* faulty : {"no __syncthreads", "no __syncwarp"}) {
      const ending e = run(faulty);
      CHECK(!e.well);
      CHECK(e.says("data race"));
    }
  } else {
    CHECK(wrong_blocks(reverse<false>, 64, 50, reversed) > 40);
    CHECK(wrong_blocks(rotate_in_warp<false>, 32, 50, rotated) > 40);
  }
}

namespace detects {

template <bool Atomic> __global__ void count(int* counter) {
  if (Atomic)
    atomicAdd(counter, 1);
  else
    *counter += 1;
}

// The last block to end adds up what the others left: right only with the fence.
template <bool Fence> __global__ void sum_blocks(int* parts, unsigned* ended, int* sum) {
  if (threadIdx.x != 0) return;
  parts[blockIdx.x] = static_cast<int>(blockIdx.x);
  if (Fence) __threadfence();
  if (atomicAdd(ended, 1u) + 1 != gridDim.x) return;
  int all = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) all += parts[i];
  *sum = all;
}

void run_count(int atomic) {
  int* p = zeros<int>(1);
  launch({4, 32}, atomic ? count<true> : count<false>, p);
  cudaDeviceSynchronize();
  cudaFree(p);
}
void run_sum(int fence) {
  int* parts = zeros<int>(8);
  unsigned* ended = zeros<unsigned>(1);
  int* sum = zeros<int>(1);
  launch({8, 32}, fence ? sum_blocks<true> : sum_blocks<false>, parts, ended, sum);
  int got = 0;
  cudaMemcpy(&got, sum, sizeof got, cudaMemcpyDeviceToHost);
  if (got != 28) std::fprintf(stderr, "wrong sum %d\n", got);
  cudaFree(parts);
  cudaFree(ended);
  cudaFree(sum);
}
const program count_program("count", run_count), sum_program("sum of blocks", run_sum);

}  // namespace detects

TEST_CASE("emulated: a race between blocks is found without luck") {
  if (!watches_races()) return;
  for (const char* name : {"count", "sum of blocks"}) {
    CHECK(run(name, 1).well);
    const ending e = run(name, 0);
    CHECK(!e.well);
    CHECK(e.says("data race"));
  }
}

// ---- Misuse of barriers and warps

namespace detects {

__global__ void divergent(int* p) {
  if (threadIdx.x % 2)
    __syncthreads();
  else
    __syncthreads();
  p[threadIdx.x] = 1;
}
__global__ void names_ended_lanes(int* p) {
  if (threadIdx.x >= 16) return;
  p[threadIdx.x] = __shfl_xor_sync(0xffffffffu, static_cast<int>(threadIdx.x), 1);
}
__global__ void not_in_own_mask(int* p) { p[threadIdx.x] = __any_sync(0xffffffffu & ~2u, 1); }
__global__ void beyond_the_block(int* p) { p[threadIdx.x] = static_cast<int>(__ballot_sync(0xffffffffu, 1)); }
__global__ void barrier_and_warp(int* p) {
  if (threadIdx.x == 0)
    __syncwarp();
  else
    __syncthreads();
  p[threadIdx.x] = 1;
}
// Loops that wait for what nobody does.
__global__ void spins_on_atomics(int* p) {
  while (atomicAdd(p, 0) == 0) {
  }
}
__global__ void spins_on_barriers(int* p) {
  while (__syncthreads_or(*p) == 0) {
  }
}
__global__ void spins_on_votes(int* p) {
  while (__any_sync(3u, *p) == 0) {
  }
}
__global__ void shuffles(int* p, int width) { p[threadIdx.x] = __shfl_down_sync(0xffffffffu, 1, 1, width); }
__global__ void mixes_reductions(int* p) {
  p[threadIdx.x] = threadIdx.x < 16 ? __reduce_min_sync(0xffffffffu, 1) : __reduce_max_sync(0xffffffffu, 1);
}
__global__ void mixes_shuffles(int* p) {
  p[threadIdx.x] = threadIdx.x < 16 ? __shfl_up_sync(0xffffffffu, 1, 1) : __shfl_xor_sync(0xffffffffu, 1, 1);
}
__global__ void static_shared() {
  HEDDLE_SHARED(char[40'000], bytes);
  bytes[0] = 1;
}
__device__ int depth(volatile int* p, int n) { return *p != 0 ? n : 1 + depth(p, n + 1) / 2 + *p; }
__global__ void recurses(int* p, int n) { *p = depth(p, n); }
__global__ void large_frame(int* p) {
  volatile char own[400 * 1024];
  for (int i = 0; i < 400 * 1024; i += 4096) own[i] = static_cast<char>(threadIdx.x);
  __syncthreads();
  for (int i = 0; i < 400 * 1024; i += 4096)
    if (own[i] != static_cast<char>(threadIdx.x)) __trap();
  if (threadIdx.x == 0) *p = own[0];
}
__global__ void asserts(int* p) {
  assert(threadIdx.x != 3);
  p[threadIdx.x] = 1;
}
__global__ void traps(int* p) {
  if (threadIdx.x == 3) __trap();
  p[threadIdx.x] = 1;
}

const program wild("wild", [](int) { fault_of({1, 32}, write_index, reinterpret_cast<int*>(4096), 1, 0); });
const program deep("deep", [](int) { fault_of({1, 1}, recurses, zeros<int>(1), 1); });
const program large("large", [](int) {
  int* p = zeros<int>(1);
  if (fault_of({1, 64}, large_frame, p) != "cudaSuccess") std::_Exit(3);
});
const program throwing_function("throw", [](int) {
  cudaLaunchHostFunc(nullptr, [](void*) { throw std::runtime_error("from a host function"); }, nullptr);
  try {
    cudaDeviceSynchronize();
  } catch (const std::exception&) {
    std::_Exit(0);
  }
});

}  // namespace detects

TEST_CASE("emulated: a host function that throws ends the process") {
  const ending thrown = run("throw");
  CHECK(!thrown.well);
  CHECK(thrown.says("from a host function"));
}

TEST_CASE("emulated: a wild access ends the process and says where") {
  const ending e = run("wild");
  CHECK(!e.well);
  if (!watches_races()) CHECK(e.says("in kernel detects::write_index, block (0, 0, 0), thread (0, 0, 0)"));
}

TEST_CASE("emulated: a device thread has 512 KiB for its own") {
  CHECK(run("large").well);
  const ending e = run("deep");
  CHECK(!e.well);
  CHECK(e.says(with_asan || watches_races() ? "stack-overflow" : "thread (0, 0, 0): the stack is full at"));
}

TEST_CASE("emulated: a divergent barrier is an error that says where") {
  int* p = zeros<int>(64);
  const std::string text = fault_of({2, 64}, divergent, p);
  CHECK(contains(text, "cudaErrorLaunchFailure"));
  CHECK(contains(text, "divergent barrier"));
  CHECK(contains(text, "kernel detects::divergent, block ("));
  CHECK(contains(text, ", thread ("));
  CHECK(contains(text, "detects_test.cpp:"));
  const std::string mixed = fault_of({1, 64}, barrier_and_warp, p);
  CHECK(contains(mixed, "no thread can go on"));
  CHECK(contains(mixed, "__syncwarp"));
  cudaFree(p);
}

TEST_CASE("emulated: a warp operation whose mask names absent lanes is an error") {
  int* p = zeros<int>(64);
  const std::string ended = fault_of({1, 32}, names_ended_lanes, p);
  const bool told = contains(ended, "absent lanes 0x") || contains(ended, "for lanes 0x");
  INFO(ended);
  CHECK(told);
  CHECK(contains(fault_of({1, 32}, not_in_own_mask, p), "doesn't name the calling lane 1"));
  CHECK(contains(fault_of({1, 48}, beyond_the_block, p), "absent lanes 0xffff0000"));
  cudaFree(p);
}

TEST_CASE("emulated: lanes that call different warp operations don't meet") {
  int* p = zeros<int>(32);
  const std::string reductions = fault_of({1, 32}, mixes_reductions, p);
  CHECK(contains(reductions, "no thread can go on"));
  CHECK(contains(reductions, "waits at __reduce_min_sync"));
  CHECK(contains(fault_of({1, 32}, mixes_shuffles, p), "waits at __shfl_up_sync"));
  cudaFree(p);
}

TEST_CASE("emulated: a shuffle whose width is no power of two is an error") {
  int* p = zeros<int>(32);
  CHECK(fault_of({1, 32}, shuffles, p, 16) == "cudaSuccess");
  for (const int width : {-32, 0, 12, 33, 64})
    CHECK(contains(fault_of({1, 32}, shuffles, p, width), ("a shuffle of width " + std::to_string(width)).c_str()));
  cudaFree(p);
}

TEST_CASE("emulated: static and dynamic shared memory have one limit") {
  const unsigned rest = 48 * 1024 - 40'000;
  CHECK(fault_of({1, 1, rest}, static_shared) == "cudaSuccess");
  CHECK(contains(fault_of({1, 1, rest + 1}, static_shared), "40000 bytes of static and 9153 of dynamic shared memory"));
  REQUIRE(cudaFuncSetAttribute(static_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 100'000) == cudaSuccess);
  CHECK(fault_of({1, 1, 100'000}, static_shared) == "cudaSuccess");
}

TEST_CASE("emulated: a fault ends the kernel, and the device returns it until it is reset") {
  int* p = zeros<int>(64);
  CHECK(launch({1, 32}, traps, p) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaErrorLaunchFailure);
  CHECK(launch({1, 32}, write_index, p, 32, 0) == cudaErrorLaunchFailure);
  CHECK(cudaMemset(p, 0, 4) == cudaErrorLaunchFailure);
  CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
  CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
  REQUIRE(emulated::faults().size() == 1);
  CHECK(contains(emulated::faults()[0], "thread (3, 0, 0): __trap()"));
  CHECK(cudaDeviceReset() == cudaSuccess);
  CHECK(cudaGetLastError() == cudaSuccess);
  emulated::clear_faults();
  p = zeros<int>(64);
  CHECK(launch({1, 64}, write_index, p, 64, 0) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  cudaFree(p);
}

TEST_CASE("emulated: an assertion of a kernel is an error of the device") {
  int* p = zeros<int>(32);
  const std::string text = fault_of({1, 32}, asserts, p);
  CHECK(contains(text, "cudaErrorAssert"));
  CHECK(contains(text, "thread (3, 0, 0): assertion threadIdx.x != 3 failed at detects_test.cpp:"));
  cudaFree(p);
}

TEST_CASE("emulated: after a fault callbacks are told and host functions don't run") {
  struct record {
    int functions = 0;
    std::vector<cudaError_t> states;
  } seen;
  emulated::reset({.eagerness = emulated::eagerness::lazy});
  int* p = zeros<int>(32);
  cudaStream_t stream;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  const auto count = [](void* r) { ++static_cast<record*>(r)->functions; };
  const auto note = [](cudaStream_t, cudaError_t state, void* r) { static_cast<record*>(r)->states.push_back(state); };
  CHECK(cudaLaunchHostFunc(stream, count, &seen) == cudaSuccess);
  CHECK(cudaStreamAddCallback(stream, note, &seen, 0) == cudaSuccess);
  CHECK(launch({1, 32, 0, stream}, traps, p) == cudaSuccess);
  CHECK(cudaLaunchHostFunc(stream, count, &seen) == cudaSuccess);
  CHECK(cudaStreamAddCallback(stream, note, &seen, 0) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaErrorLaunchFailure);
  CHECK(seen.functions == 1);
  CHECK(seen.states == std::vector<cudaError_t>{cudaSuccess, cudaErrorLaunchFailure});
  CHECK(cudaDeviceReset() == cudaSuccess);
  emulated::clear_faults();
  cudaStreamDestroy(stream);
}

TEST_CASE("emulated: who waits for a stream of another device gets that device's fault") {
  emulated::reset({.eagerness = emulated::eagerness::lazy});
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  int* p = zeros<int>(32);
  cudaStream_t other;
  cudaEvent_t event;
  REQUIRE(cudaStreamCreate(&other) == cudaSuccess);
  REQUIRE(cudaEventCreate(&event) == cudaSuccess);
  CHECK(launch({1, 32, 0, other}, traps, p) == cudaSuccess);
  CHECK(cudaEventRecord(event, other) == cudaSuccess);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  CHECK(cudaStreamSynchronize(other) == cudaErrorLaunchFailure);
  CHECK(cudaStreamQuery(other) == cudaErrorLaunchFailure);
  CHECK(cudaEventSynchronize(event) == cudaErrorLaunchFailure);
  CHECK(cudaEventQuery(event) == cudaErrorLaunchFailure);
  CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  emulated::clear_faults();
  cudaEventDestroy(event);
  cudaStreamDestroy(other);
  cudaFree(p);
}

TEST_CASE("emulated: a block that never ends is given up") {
  emulated::options with = emulated::current();
  with.patience = 10'000;
  emulated::reset(with);
  int* p = zeros<int>(1);
  for (const auto kernel : {spins_on_atomics, spins_on_barriers, spins_on_votes})
    CHECK(contains(fault_of({1, 2}, kernel, p), "the block doesn't end: 2 threads still run"));
  cudaFree(p);
}

// ---- Memory

namespace detects {

__global__ void write_up_to(int* p, int n) { p[threadIdx.x < static_cast<unsigned>(n) ? threadIdx.x : 0] = 1; }
__global__ void read_at(const int* p, int at, int* to) { *to = p[at]; }
__global__ void write_shared(int n) {
  HEDDLE_SHARED(int[32], tile);
  volatile int* t = tile;
  t[n - 1] = 1;
}
__global__ void write_dynamic(int n) {
  HEDDLE_DYNAMIC_SHARED(int, tile);
  volatile int* t = tile;
  t[n - 1] = 1;
}
template <class Vector> __global__ void read_vector(const char* p, Vector* to) {
  *to = *reinterpret_cast<const Vector*>(p);
}
template <class Vector> __global__ void write_vector(const Vector* p, char* to) {
  *reinterpret_cast<Vector*>(to) = *p;
}
__global__ void read_element(const char* p, float* to) { *to = reinterpret_cast<const float4*>(p)->y; }
__global__ void load_vector(const float* p, float* to) { *to = __ldg(reinterpret_cast<const float4*>(p)).y; }
__global__ void read_shared(int* to) {
  HEDDLE_SHARED(int[4], tile);
  *to = tile[2];
}

// Plain accesses through a pointer, at an address that is good for half of the type's alignment, and at a good one.
template <class... Vectors> void check_plain_vectors(float* p) {
  char* const bytes = reinterpret_cast<char*>(p);
  const auto one = [&](auto vector) {
    using type = decltype(vector);
    auto* const end = reinterpret_cast<type*>(bytes + 32);
    for (const char* bad : {bytes + alignof(type) / 2, bytes + 1}) {
      const std::string read = fault_of({1, 1}, read_vector<type>, bad, end);
      CHECK(contains(read, "cudaErrorMisalignedAddress"));
      CHECK(contains(read, "kernel detects::read_vector<"));
      CHECK(contains(read, "block (0, 0, 0), thread ("));
      CHECK(contains(read, "detects_test.cpp:"));
      CHECK(contains(fault_of({1, 1}, write_vector<type>, static_cast<const type*>(end), const_cast<char*>(bad)),
                     "cudaErrorMisalignedAddress"));
    }
    const char* const good = bytes + alignof(type);
    CHECK(fault_of({1, 1}, read_vector<type>, good, end) == "cudaSuccess");
    const auto* const from = static_cast<const type*>(end);
    CHECK(fault_of({1, 1}, write_vector<type>, from, const_cast<char*>(good)) == "cudaSuccess");
  };
  (one(Vectors{}), ...);
}

const program beyond_end("write", [](int n) {
  int* p = zeros<int>(100);
  fault_of({1, static_cast<unsigned>(n)}, write_up_to, p, n);
  cudaFree(p);
});
const program read_outside("read", [](int at) {
  int *p = zeros<int>(100), *q = zeros<int>(1);
  fault_of({1, 1}, read_at, static_cast<const int*>(p), at, q);
  cudaFree(p);
  cudaFree(q);
});
const program beyond_shared("write shared", [](int n) { fault_of({1, 1}, write_shared, n); });
const program beyond_dynamic("write dynamic", [](int n) { fault_of({1, 1, 64}, write_dynamic, n); });
const program host_reads("host reads", [](int) {
  int* p = zeros<int>(4);
  std::printf("%d", *const_cast<volatile int*>(p));
});

}  // namespace detects

TEST_CASE("emulated: a write beyond an allocation is found, by one element") {
  int* p = zeros<int>(100);
  if (with_asan) {
    CHECK(run("write", 100).well);
    const ending beyond = run("write", 101);
    CHECK(!beyond.well);
    CHECK(beyond.says("heap-buffer-overflow"));
    CHECK(beyond.says("in kernel detects::write_up_to, block (0, 0, 0), thread (100, 0, 0)"));
    CHECK(run("read", 99).well);
    CHECK(!run("read", 100).well);
    CHECK(!run("read", -1).well);
    CHECK(run("write shared", 32).well);
    CHECK(run("write shared", 33).says("heap-buffer-overflow"));
    CHECK(run("write dynamic", 16).well);
    CHECK(run("write dynamic", 17).says("heap-buffer-overflow"));
  } else {
    CHECK(fault_of({1, 100}, write_up_to, p, 100) == "cudaSuccess");
    const std::string beyond = fault_of({1, 101}, write_up_to, p, 101);
    CHECK(contains(beyond, "write_up_to wrote at byte 400 of device memory of 400 bytes"));
  }
  CHECK(cudaMemset(p, 0, 404) == cudaErrorInvalidValue);
  std::vector<int> host(101);
  CHECK(cudaMemcpy(host.data(), p, 404, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  static_cast<void>(cudaGetLastError());
  cudaFree(p);
}

TEST_CASE("emulated: a misaligned vector load is an error") {
  float* p = zeros<float>(16);
  const float* const odd = p + 1;
  CHECK(contains(fault_of({1, 1}, load_vector, odd, p), "cudaErrorMisalignedAddress"));
  CHECK(fault_of({1, 1}, load_vector, static_cast<const float*>(p + 4), p) == "cudaSuccess");
  check_plain_vectors<float4, double2, uint4, float2, int2, double, float>(p);
  char* const bytes = reinterpret_cast<char*>(p);
  CHECK(contains(fault_of({1, 1}, read_element, static_cast<const char*>(bytes + 4), p), "MisalignedAddress"));
  CHECK(fault_of({1, 1}, read_element, static_cast<const char*>(bytes + 16), p) == "cudaSuccess");
  cudaFree(p);
}

namespace detects {

__global__ void read_number(const int* p, int* to) { *to = *p; }

// A kernel of device 0 reads what lies on device 1: 0 without access, 1 with access, from a pool 2 without and 3 with.
const program read_of_a_peer("read of a peer", [](int how) {
  int *here = zeros<int>(1), *there = nullptr;
  cudaMemPool_t pool = nullptr;
  if (how == 1) cudaDeviceEnablePeerAccess(1, 0);
  cudaSetDevice(1);
  if (how < 2) {
    there = zeros<int>(1);
  } else {
    cudaMallocAsync(&there, sizeof(int), nullptr);
    cudaMemsetAsync(there, 0, sizeof(int));
    cudaDeviceGetDefaultMemPool(&pool, 1);
    const cudaMemAccessDesc access{{cudaMemLocationTypeDevice, 0}, cudaMemAccessFlagsProtReadWrite};
    if (how == 3) cudaMemPoolSetAccess(pool, &access, 1);
  }
  cudaDeviceSynchronize();
  cudaSetDevice(0);
  cudaMemcpy(here, there, sizeof(int), cudaMemcpyDefault);  // CUDA copies between devices in any case
  launch({1, 1}, read_number, static_cast<const int*>(there), here);
  cudaDeviceSynchronize();
  cudaFree(here);
  cudaFree(there);
});

}  // namespace detects

TEST_CASE("emulated: a kernel that reads another device's memory without peer access is found") {
  for (const int how : {0, 1, 2, 3}) {
    const ending e = run("read of a peer", how);
    CHECK(e.well == (!with_asan || how % 2 == 1));
    CHECK(e.says("in kernel detects::read_number") == !e.well);
  }
}

TEST_CASE("emulated: memory is poisoned until it is written") {
  int *p = nullptr, *q = nullptr, got = 0;
  REQUIRE(cudaMalloc(&p, 4 * sizeof(int)) == cudaSuccess);
  REQUIRE(cudaMalloc(&q, sizeof(int)) == cudaSuccess);
  REQUIRE(cudaMemcpy(&got, p + 3, sizeof got, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(got == -1);
  for (int block = 0; block < 2; ++block) {
    CHECK(launch({1, 1}, read_shared, q) == cudaSuccess);
    CHECK(cudaMemcpy(&got, q, sizeof got, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(got == -1);
  }
  cudaFree(p);
  cudaFree(q);
}

TEST_CASE("emulated: the host can't read device memory") {
  if (!with_asan) return;
  const ending read = run("host reads");
  CHECK(!read.well);
  CHECK(read.says("use-after-poison"));
}

namespace detects {

// Memory freed in the order of one stream and read on another. With `wait` the free waits for the reader.
bool free_too_early(bool wait) {
  cudaStream_t one, other;
  cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  cudaEvent_t ready, read;
  cudaEventCreate(&ready);
  cudaEventCreate(&read);
  int *p = nullptr, *to = nullptr, got = 0;
  cudaMalloc(&to, sizeof(int));
  cudaMallocAsync(&p, 64 * sizeof(int), one);
  launch({1, 64, 0, one}, write_index, p, 64, 0);
  cudaEventRecord(ready, one);
  cudaStreamWaitEvent(other, ready);
  launch({1, 1, 0, other}, read_at, static_cast<const int*>(p), 7, to);
  cudaEventRecord(read, other);
  if (wait) cudaStreamWaitEvent(one, read);
  cudaFreeAsync(p, one);
  cudaStreamSynchronize(one);
  cudaStreamSynchronize(other);
  cudaMemcpy(&got, to, sizeof got, cudaMemcpyDeviceToHost);
  cudaFree(to);
  cudaEventDestroy(ready);
  cudaEventDestroy(read);
  cudaStreamDestroy(one);
  cudaStreamDestroy(other);
  return got == 7;
}

const program late_write("late write", [](int late) {
  int* p = zeros<int>(64);
  if (!late) launch({1, 1}, write_index, p + 7, 1, 0);
  cudaFree(p);
  if (late) launch({1, 1}, write_index, p + 7, 1, 0);
  cudaDeviceSynchronize();
});

// Memory used on a stream that isn't ordered after its cudaMallocAsync. False if what was written is gone.
bool use_too_early(bool wait) {
  cudaStream_t one, other;
  cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  int* p = nullptr;
  cudaMallocAsync(&p, 64 * sizeof(int), one);
  if (wait) cudaStreamSynchronize(one);
  launch({1, 64, 0, other}, write_index, p, 64, 0);
  cudaStreamSynchronize(other);
  cudaStreamSynchronize(one);
  int got = 0;
  cudaMemcpy(&got, p + 7, sizeof got, cudaMemcpyDeviceToHost);
  cudaFreeAsync(p, other);
  cudaStreamSynchronize(other);
  cudaStreamDestroy(one);
  cudaStreamDestroy(other);
  return got == 7;
}

const program early_free("free", [](int number) {
  emulated::reset({.seed = static_cast<std::uint64_t>(number / 2)});
  if (!free_too_early(number % 2 != 0)) std::_Exit(3);
});
const program early_use("use", [](int wait) {
  emulated::reset({.eagerness = emulated::eagerness::lazy});
  if (!use_too_early(wait != 0)) std::_Exit(3);
});

}  // namespace detects

TEST_CASE("emulated: use after free across streams is found") {
  int found = 0;
  for (int seed = 0; seed < 12; ++seed) {
    CHECK(run("free", 2 * seed + 1).well);
    found += !run("free", 2 * seed).well;
  }
  CHECK(found >= 3);
}

TEST_CASE("emulated: a write after the end of memory is found") {
  CHECK(run("late write", 0).text.empty());
  const ending late = run("late write", 1);
  CHECK(late.says(with_asan ? "heap-use-after-free" : "byte 28 was written after the end of device memory of 256 bytes"));
}

TEST_CASE("emulated: use before a stream-ordered allocation is found") {
  CHECK(run("use", 1).well);
  const ending early = run("use", 0);
  CHECK(!early.well);
  if (with_asan) CHECK(early.says("use-after-poison"));
  if (watches_races()) CHECK(early.says("data race"));
}

TEST_CASE("emulated: what is left behind has a name") {
  cudaEvent_t event;
  cudaStream_t stream;
  int* p = nullptr;
  REQUIRE(cudaEventCreate(&event) == cudaSuccess);
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  REQUIRE(cudaMalloc(&p, 12) == cudaSuccess);
  const std::vector<std::string> leaks = emulated::leaks();
  REQUIRE(leaks.size() == 3);
  CHECK(contains(leaks[0], "stream"));
  CHECK(contains(leaks[1], "event"));
  CHECK(contains(leaks[2], "device memory of 12 bytes"));
  cudaEventDestroy(event);
  cudaStreamDestroy(stream);
  cudaFree(p);
  CHECK(emulated::leaks().empty());
}

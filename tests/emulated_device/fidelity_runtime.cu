// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Small programs with outcomes that the CUDA Runtime API reference fixes: errors, devices, events, streams, memory,
// symbols and launches. Where it allows several outcomes, all of them pass.

#include "fidelity.cuh"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>

namespace fidelity::runtime {

struct stream {
  explicit stream(unsigned flags = cudaStreamNonBlocking) { REQUIRE_CUDA(cudaStreamCreateWithFlags(&handle, flags)); }
  stream(const stream&) = delete;
  ~stream() {
    if (handle) static_cast<void>(cudaStreamDestroy(handle));
  }
  operator cudaStream_t() const { return handle; }
  cudaStream_t handle = nullptr;
};

struct event {
  explicit event(unsigned flags = cudaEventDefault) { REQUIRE_CUDA(cudaEventCreateWithFlags(&handle, flags)); }
  event(const event&) = delete;
  ~event() {
    if (handle) static_cast<void>(cudaEventDestroy(handle));
  }
  operator cudaEvent_t() const { return handle; }
  cudaEvent_t handle = nullptr;
};

// Page-locked memory, which kernels reach at the same address where there is unified addressing.
template <class Value> struct pinned {
  explicit pinned(std::size_t n, Value value = {}) {
    REQUIRE_CUDA(cudaHostAlloc(&data, n * sizeof(Value), cudaHostAllocMapped));
    std::fill_n(data, n, value);
  }
  pinned(const pinned&) = delete;
  ~pinned() { static_cast<void>(cudaFreeHost(data)); }
  Value& operator[](std::size_t i) const { return data[i]; }
  Value* data = nullptr;
};

// Work that isn't done at once, so that a GPU that doesn't wait is found out.
__device__ void linger() {
  const long long begin = clock64();
  while (clock64() - begin < 20'000) {
  }
}

__global__ void write_late(int* to, int value) {
  linger();
  *to = value;
}
__global__ void add_late(int* to, int value) {
  linger();
  *to += value;
}
__global__ void copy_late(int* to, const int* from) {
  linger();
  *to = *from;
}
__global__ void nothing() {}

int device_count() {
  int count = 0;
  REQUIRE_CUDA(cudaGetDeviceCount(&count));
  return count;
}
int current_device() {
  int device = -1;
  REQUIRE_CUDA(cudaGetDevice(&device));
  return device;
}
cudaDeviceProp properties() {
  cudaDeviceProp p{};
  REQUIRE_CUDA(cudaGetDeviceProperties(&p, current_device()));
  return p;
}
// Makes another device the current one for a while.
struct on_device {
  explicit on_device(int device) { REQUIRE_CUDA(cudaSetDevice(device)); }
  ~on_device() { static_cast<void>(cudaSetDevice(before)); }
  int before = current_device();
};

// ---- Errors

TEST_CASE("fidelity: a device that doesn't exist is refused") {
  const int count = device_count(), before = current_device();
  REQUIRE(count >= 1);
  cudaDeviceProp p{};
  int value = 0;
  for (const int device : {-1, count, count + 100}) {
    CHECK_ERROR(cudaErrorInvalidDevice, cudaSetDevice(device));
    CHECK_ERROR(cudaErrorInvalidDevice, cudaGetDeviceProperties(&p, device));
    CHECK_ERROR(cudaErrorInvalidDevice, cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, device));
    CHECK(current_device() == before);
  }
}

TEST_CASE("fidelity: a result needs a place") {
  CHECK_ERROR(cudaErrorInvalidValue, cudaMalloc(static_cast<void**>(nullptr), 16));
  CHECK_ERROR(cudaErrorInvalidValue, cudaMallocHost(static_cast<void**>(nullptr), 16));
  CHECK_ERROR(cudaErrorInvalidValue, cudaGetDevice(nullptr));
  CHECK_ERROR(cudaErrorInvalidValue, cudaStreamCreate(nullptr));
  CHECK_ERROR(cudaErrorInvalidValue, cudaEventCreateWithFlags(nullptr, cudaEventDefault));
  CHECK_ERROR(cudaErrorInvalidValue, cudaDeviceGetAttribute(nullptr, cudaDevAttrWarpSize, current_device()));
}

TEST_CASE("fidelity: an error stays until cudaGetLastError takes it") {
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(cudaSetDevice(-1) == cudaErrorInvalidDevice);
  int device = -1;
  CHECK(cudaGetDevice(&device) == cudaSuccess);  // a call that succeeds doesn't clear it
  CHECK(cudaPeekAtLastError() == cudaErrorInvalidDevice);
  CHECK(cudaPeekAtLastError() == cudaErrorInvalidDevice);
  CHECK(cudaMalloc(static_cast<void**>(nullptr), 16) == cudaErrorInvalidValue);  // one that fails overwrites it
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("fidelity: each thread has its own last error") {
  CHECK(cudaSetDevice(-1) == cudaErrorInvalidDevice);
  cudaError_t seen = cudaErrorUnknown, own = cudaErrorUnknown;
  std::thread([&] {
    seen = cudaGetLastError();
    static_cast<void>(cudaMalloc(static_cast<void**>(nullptr), 16));
    own = cudaPeekAtLastError();
  }).join();
  CHECK(seen == cudaSuccess);
  CHECK(own == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
}

TEST_CASE("fidelity: errors have names and descriptions") {
  CHECK(std::string(cudaGetErrorName(cudaSuccess)) == "cudaSuccess");
  CHECK(std::string(cudaGetErrorName(cudaErrorMemoryAllocation)) == "cudaErrorMemoryAllocation");
  CHECK(std::string(cudaGetErrorName(cudaErrorInvalidResourceHandle)) == "cudaErrorInvalidResourceHandle");
  CHECK(std::string(cudaGetErrorString(cudaSuccess)) == "no error");
  CHECK(std::string(cudaGetErrorString(cudaErrorInvalidValue)) == "invalid argument");
  CHECK(std::string(cudaGetErrorString(cudaErrorNotReady)) == "device not ready");
  CHECK(std::string(cudaGetErrorName(static_cast<cudaError_t>(997))) == "unrecognized error code");
  CHECK(std::string(cudaGetErrorString(static_cast<cudaError_t>(997))) == "unrecognized error code");
  CHECK(static_cast<int>(cudaErrorInvalidValue) == 1);
  CHECK(static_cast<int>(cudaErrorMemoryAllocation) == 2);
  CHECK(static_cast<int>(cudaErrorNotReady) == 600);
}

TEST_CASE("fidelity: to be not ready is no error") {
  stream s;
  event e(cudaEventDisableTiming);
  pinned<int> value(1, 0);
  for (int i = 0; i < 5; ++i) REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, add_late, value.data, 1));
  REQUIRE_CUDA(cudaEventRecord(e, s));
  cudaError_t state = cudaErrorUnknown;
  while ((state = cudaEventQuery(e)) == cudaErrorNotReady)
    CHECK_ONE_OF(cudaGetLastError(), cudaSuccess, cudaErrorNotReady);  // documented as the first, seen as the second
  CHECK(state == cudaSuccess);
  CHECK(value[0] == 5);
  while ((state = cudaStreamQuery(s)) == cudaErrorNotReady)
    CHECK_ONE_OF(cudaGetLastError(), cudaSuccess, cudaErrorNotReady);
  CHECK(state == cudaSuccess);
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("fidelity: copies and sets of nothing succeed") {
  device_array<int> a(4, 1), b(4, 2);
  stream s;
  CHECK_CUDA(cudaMemcpy(a.data(), b.data(), 0, cudaMemcpyDefault));
  CHECK_CUDA(cudaMemcpyAsync(a.data(), b.data(), 0, cudaMemcpyDeviceToDevice, s));
  CHECK_CUDA(cudaMemset(a.data(), 7, 0));
  CHECK_CUDA(cudaMemsetAsync(a.data(), 7, 0, s));
  CHECK_CUDA(cudaMemcpy2D(a.data(), 8, b.data(), 8, 4, 0, cudaMemcpyDefault));
  CHECK_CUDA(cudaMemcpy2D(a.data(), 8, b.data(), 8, 0, 2, cudaMemcpyDefault));
  CHECK_CUDA(cudaStreamSynchronize(s));
  CHECK(a.get() == std::vector<int>(4, 1));
}

TEST_CASE("fidelity: a copy has one of five directions") {
  device_array<int> a(4, 1);
  int values[4] = {};
  const auto kind = static_cast<cudaMemcpyKind>(7);
  CHECK_ERROR(cudaErrorInvalidMemcpyDirection, cudaMemcpy(values, a.data(), sizeof values, kind));
  CHECK_ERROR(cudaErrorInvalidMemcpyDirection, cudaMemcpyAsync(values, a.data(), sizeof values, kind, nullptr));
  CHECK_ERROR(cudaErrorInvalidMemcpyDirection, cudaMemcpy2D(values, 8, a.data(), 8, 8, 2, kind));
}

TEST_CASE("fidelity: only living memory is freed") {
  CHECK_CUDA(cudaFree(nullptr));
  int* p = nullptr;
  REQUIRE_CUDA(cudaMalloc(&p, 64));
  CHECK_CUDA(cudaFree(p));
  CHECK_ERROR(cudaErrorInvalidValue, cudaFree(p));
  std::vector<int> host(64);
  CHECK_ERROR(cudaErrorInvalidValue, cudaFree(host.data()));
  CHECK_ERROR(cudaErrorInvalidValue, cudaFreeHost(host.data()));
}

TEST_CASE("fidelity: more memory than there is is refused, and that is forgotten") {
  void* p = nullptr;
  CHECK_ERROR(cudaErrorMemoryAllocation, cudaMalloc(&p, std::size_t{1} << 50));
  REQUIRE_CUDA(cudaMalloc(&p, 1 << 10));
  CHECK_CUDA(cudaMemset(p, 0, 1 << 10));
  CHECK_CUDA(cudaFree(p));
  std::size_t free_bytes = 0, total = 0;
  REQUIRE_CUDA(cudaMemGetInfo(&free_bytes, &total));
  CHECK(free_bytes > 0);
  CHECK(free_bytes <= total);
  CHECK(total < std::size_t{1} << 50);
}

// ---- Limits of launches

TEST_CASE("fidelity: a block has its limits") {
  const cudaDeviceProp p = properties();
  const auto limit = [&](int i) { return static_cast<unsigned>(p.maxThreadsDim[i]); };
  const unsigned threads = static_cast<unsigned>(p.maxThreadsPerBlock);
  CHECK_ERROR(cudaErrorInvalidConfiguration, launch({dim3(1), dim3(threads + 1)}, nothing));
  CHECK_ERROR(cudaErrorInvalidConfiguration, launch({dim3(1), dim3(1, limit(1) + 1)}, nothing));
  CHECK_ERROR(cudaErrorInvalidConfiguration, launch({dim3(1), dim3(1, 1, limit(2) + 1)}, nothing));
  CHECK_ERROR(cudaErrorInvalidConfiguration, launch({dim3(1), dim3(threads / 2, 2, 2)}, nothing));
}

__global__ void count_threads(int* threads) { atomicAdd(threads, 1); }

TEST_CASE("fidelity: a block of exactly the limit runs", "[big]") {
  const cudaDeviceProp p = properties();
  const unsigned threads = static_cast<unsigned>(p.maxThreadsPerBlock),
                 deep = static_cast<unsigned>(p.maxThreadsDim[2]);
  device_array<int> count(1, 0);
  CHECK_CUDA(launch({dim3(1), dim3(threads)}, count_threads, count.data()));
  CHECK_CUDA(launch({dim3(1), dim3(1, threads)}, count_threads, count.data()));
  CHECK_CUDA(launch({dim3(1), dim3(threads / deep, 1, deep)}, count_threads, count.data()));
  CHECK(count.get()[0] == static_cast<int>(3 * threads));
}

TEST_CASE("fidelity: a grid has its limits") {
  const cudaDeviceProp p = properties();
  const auto beyond = [&](int i) { return static_cast<unsigned>(p.maxGridSize[i]) + 1; };
  CHECK_ERROR(cudaErrorInvalidConfiguration, launch({dim3(beyond(0)), dim3(1)}, nothing));
  CHECK_ERROR(cudaErrorInvalidConfiguration, launch({dim3(1, beyond(1)), dim3(1)}, nothing));
  CHECK_ERROR(cudaErrorInvalidConfiguration, launch({dim3(1, 1, beyond(2)), dim3(1)}, nothing));
}

TEST_CASE("fidelity: a launch needs a kernel") {
  CHECK_ERROR(cudaErrorInvalidDeviceFunction, launch({dim3(1), dim3(1)}, static_cast<void (*)()>(nullptr)));
}

TEST_CASE("fidelity: nothing is launched with an extent of zero") {
  for (int i = 0; i < 3; ++i) {
    unsigned extents[3] = {1, 1, 1};
    extents[i] = 0;
    const dim3 empty(extents[0], extents[1], extents[2]);
    CHECK_ONE_OF(launch({empty, dim3(1)}, nothing), cudaErrorInvalidConfiguration, cudaErrorInvalidValue);
    CHECK_ONE_OF(launch({dim3(1), empty}, nothing), cudaErrorInvalidConfiguration, cudaErrorInvalidValue);
  }
}

TEST_CASE("fidelity: a grid of exactly the limit runs") {
  const cudaDeviceProp p = properties();
  device_array<int> count(1, 0);
  CHECK_CUDA(launch({dim3(1, static_cast<unsigned>(p.maxGridSize[1])), dim3(1)}, count_threads, count.data()));
  CHECK(count.get()[0] == p.maxGridSize[1]);
}

TEST_CASE("fidelity: a refused launch leaves no trace") {
  stream s;
  device_array<int> count(1, 0);
  CHECK_CUDA(launch({dim3(1), dim3(3), 0, s}, count_threads, count.data()));
  CHECK_ERROR(cudaErrorInvalidConfiguration, launch({dim3(1), dim3(5000), 0, s}, count_threads, count.data()));
  CHECK_CUDA(launch({dim3(1), dim3(4), 0, s}, count_threads, count.data()));
  CHECK_CUDA(cudaStreamSynchronize(s));
  CHECK(count.get()[0] == 7);
  CHECK(cudaGetLastError() == cudaSuccess);
}

__global__ void fill_dynamic(unsigned bytes, unsigned* sum) {
  HEDDLE_DYNAMIC_SHARED(unsigned char, all);
  for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x) all[i] = static_cast<unsigned char>(i % 7);
  __syncthreads();
  unsigned own = 0;
  for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x) own += all[bytes - 1 - i];
  atomicAdd(sum, own);
}
// The same, for whom no limit is raised.
__global__ void fill_default(unsigned bytes, unsigned* sum) {
  HEDDLE_DYNAMIC_SHARED(unsigned char, all);
  for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x) all[i] = static_cast<unsigned char>(i % 7);
  __syncthreads();
  if (threadIdx.x == 0) *sum = all[bytes - 1];
}

TEST_CASE("fidelity: dynamic shared memory has a default limit") {
  const auto most = static_cast<unsigned>(properties().sharedMemPerBlock);
  device_array<unsigned> last(1, 99);
  CHECK_CUDA(launch({dim3(1), dim3(128), most}, fill_default, most, last.data()));
  CHECK(last.get()[0] == (most - 1) % 7);
  CHECK_ONE_OF(launch({dim3(1), dim3(128), most + 1}, fill_default, most, last.data()), cudaErrorInvalidValue,
               cudaErrorInvalidConfiguration, cudaErrorLaunchOutOfResources);
}

TEST_CASE("fidelity: a kernel may ask for more dynamic shared memory") {
  const auto most = static_cast<unsigned>(properties().sharedMemPerBlockOptin);
  CHECK_ERROR(cudaErrorInvalidValue, cudaFuncSetAttribute(fill_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                          static_cast<int>(most) + 1));
  REQUIRE_CUDA(cudaFuncSetAttribute(fill_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)));
  cudaFuncAttributes a{};
  REQUIRE_CUDA(cudaFuncGetAttributes(&a, fill_dynamic));
  CHECK(a.maxDynamicSharedSizeBytes == static_cast<int>(most));
  device_array<unsigned> sum(1, 0);
  CHECK_CUDA(launch({dim3(1), dim3(128), most}, fill_dynamic, most, sum.data()));
  unsigned expected = 0;
  for (unsigned i = 0; i < most; ++i) expected += i % 7;
  CHECK(sum.get()[0] == expected);
  CHECK_ONE_OF(launch({dim3(1), dim3(128), most + 1}, fill_dynamic, most, sum.data()), cudaErrorInvalidValue,
               cudaErrorInvalidConfiguration, cudaErrorLaunchOutOfResources);
}

TEST_CASE("fidelity: what is asked for one kernel holds for that kernel") {
  const cudaDeviceProp p = properties();
  const auto usual = static_cast<unsigned>(p.sharedMemPerBlock);
  if (p.sharedMemPerBlockOptin < p.sharedMemPerBlock + 16) return;
  REQUIRE_CUDA(cudaFuncSetAttribute(fill_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(p.sharedMemPerBlockOptin)));
  device_array<unsigned> sum(1, 0);
  CHECK_CUDA(launch({dim3(1), dim3(32), usual + 16}, fill_dynamic, usual, sum.data()));
  CHECK_ONE_OF(launch({dim3(1), dim3(32), usual + 16}, fill_default, usual, sum.data()), cudaErrorInvalidValue,
               cudaErrorInvalidConfiguration, cudaErrorLaunchOutOfResources);
  CHECK_CUDA(cudaDeviceSynchronize());
}

// ---- Devices

TEST_CASE("fidelity: a device's properties fit together") {
  const int count = device_count();
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp p{};
    REQUIRE_CUDA(cudaGetDeviceProperties(&p, device));
    CHECK(std::strlen(p.name) > 0);
    CHECK(p.warpSize == 32);
    CHECK(p.major >= 7);
    CHECK(p.maxThreadsPerBlock == 1024);
    CHECK(p.maxThreadsDim[0] == 1024);
    CHECK(p.maxThreadsDim[1] == 1024);
    CHECK(p.maxThreadsDim[2] == 64);
    CHECK(p.maxGridSize[0] == 2147483647);
    CHECK(p.maxGridSize[1] == 65535);
    CHECK(p.maxGridSize[2] == 65535);
    CHECK(p.maxThreadsPerMultiProcessor >= p.maxThreadsPerBlock);
    CHECK(p.maxThreadsPerMultiProcessor % p.warpSize == 0);
    CHECK(p.multiProcessorCount >= 1);
    CHECK(p.sharedMemPerBlock == 48 * 1024);
    CHECK(p.sharedMemPerBlockOptin >= p.sharedMemPerBlock);
    CHECK(p.sharedMemPerMultiprocessor >= p.sharedMemPerBlockOptin);
    CHECK(p.regsPerMultiprocessor >= p.regsPerBlock);
    CHECK(p.totalConstMem == 64 * 1024);
    CHECK(p.totalGlobalMem > 0);
    CHECK(p.unifiedAddressing == 1);
    CHECK(p.asyncEngineCount >= 1);
  }
}

TEST_CASE("fidelity: attributes and properties of a device agree") {
  const cudaDeviceProp p = properties();
  const auto value = [](cudaDeviceAttr attribute) {
    int v = -1;
    REQUIRE_CUDA(cudaDeviceGetAttribute(&v, attribute, current_device()));
    return v;
  };
  CHECK(value(cudaDevAttrWarpSize) == p.warpSize);
  CHECK(value(cudaDevAttrMaxThreadsPerBlock) == p.maxThreadsPerBlock);
  CHECK(value(cudaDevAttrMaxBlockDimX) == p.maxThreadsDim[0]);
  CHECK(value(cudaDevAttrMaxBlockDimZ) == p.maxThreadsDim[2]);
  CHECK(value(cudaDevAttrMaxGridDimX) == p.maxGridSize[0]);
  CHECK(value(cudaDevAttrMaxGridDimY) == p.maxGridSize[1]);
  CHECK(value(cudaDevAttrMultiProcessorCount) == p.multiProcessorCount);
  CHECK(value(cudaDevAttrMaxSharedMemoryPerBlock) == static_cast<int>(p.sharedMemPerBlock));
  CHECK(value(cudaDevAttrMaxSharedMemoryPerBlockOptin) == static_cast<int>(p.sharedMemPerBlockOptin));
  CHECK(value(cudaDevAttrMaxThreadsPerMultiProcessor) == p.maxThreadsPerMultiProcessor);
  CHECK(value(cudaDevAttrMaxBlocksPerMultiprocessor) == p.maxBlocksPerMultiProcessor);
  CHECK(value(cudaDevAttrComputeCapabilityMajor) == p.major);
  CHECK(value(cudaDevAttrComputeCapabilityMinor) == p.minor);
  CHECK(value(cudaDevAttrL2CacheSize) == p.l2CacheSize);
  CHECK(value(cudaDevAttrManagedMemory) == p.managedMemory);
  int runtime = 0, driver = 0;
  CHECK_CUDA(cudaRuntimeGetVersion(&runtime));
  CHECK_CUDA(cudaDriverGetVersion(&driver));
  CHECK(runtime == CUDART_VERSION);
  CHECK(driver / 1000 >= runtime / 1000);  // minor versions are compatible both ways
}

TEST_CASE("fidelity: each thread begins with device 0 and chooses for itself") {
  const int last = device_count() - 1;
  const on_device here(last);
  int begins = -1, chosen = -1;
  std::thread([&] {
    static_cast<void>(cudaGetDevice(&begins));
    static_cast<void>(cudaSetDevice(0));
    static_cast<void>(cudaGetDevice(&chosen));
  }).join();
  CHECK(begins == 0);
  CHECK(chosen == 0);
  CHECK(current_device() == last);
}

TEST_CASE("fidelity: memory and streams belong to the device that was current") {
  const int last = device_count() - 1;
  const on_device here(last);
  int* p = nullptr;
  REQUIRE_CUDA(cudaMalloc(&p, 64));
  stream s;
  cudaPointerAttributes a{};
  CHECK_CUDA(cudaPointerGetAttributes(&a, p));
  CHECK(a.device == last);
  int device = -1;
  CHECK_CUDA(cudaStreamGetDevice(s, &device));
  CHECK(device == last);
  {
    const on_device there(0);
    CHECK_CUDA(cudaStreamGetDevice(s, &device));
    CHECK(device == last);
    CHECK_CUDA(cudaMemsetAsync(p, 0, 64, s));  // a set or copy needn't be issued from there
    CHECK_CUDA(cudaStreamSynchronize(s));
  }
  CHECK_CUDA(cudaFree(p));
}

// Section "Stream and event behavior" of the programming guide.
TEST_CASE("fidelity: what works across devices, and what doesn't") {
  if (device_count() < 2) return;
  stream first;
  event on_first;
  pinned<int> value(1, 0);
  {
    const on_device second(1);
    stream other;
    event on_second;
    CHECK(launch({dim3(1), dim3(1), 0, first}, nothing) != cudaSuccess);
    CHECK(cudaGetLastError() != cudaSuccess);
    CHECK(cudaEventRecord(on_first, other) != cudaSuccess);
    CHECK(cudaGetLastError() != cudaSuccess);
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, other}, write_late, value.data, 5));
    REQUIRE_CUDA(cudaEventRecord(on_second, other));
    CHECK_CUDA(cudaStreamWaitEvent(first, on_second));
    {
      const on_device back(0);
      REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, first}, add_late, value.data, 10));
      REQUIRE_CUDA(cudaEventRecord(on_first, first));
    }
    CHECK_CUDA(cudaEventSynchronize(on_first));
    CHECK(value[0] == 15);
    CHECK_CUDA(cudaEventQuery(on_first));
    float milliseconds = 0;
    CHECK(cudaEventElapsedTime(&milliseconds, on_second, on_first) != cudaSuccess);
    CHECK(cudaGetLastError() != cudaSuccess);
  }
}

TEST_CASE("fidelity: a copy between devices waits for both and holds both back") {
  const int last = device_count() - 1;
  device_array<int> to(1, 0);
  int* from = nullptr;
  {
    const on_device there(last);
    REQUIRE_CUDA(cudaMalloc(&from, sizeof(int)));
    REQUIRE_CUDA(launch({}, write_late, from, 7));
  }
  REQUIRE_CUDA(cudaMemcpyPeer(to.data(), 0, from, last, sizeof(int)));
  {
    const on_device there(last);
    REQUIRE_CUDA(launch({}, write_late, from, 8));
    REQUIRE_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaFree(from));
  }
  CHECK(to.get()[0] == 7);
}

TEST_CASE("fidelity: peer access is enabled once and disabled once") {
  int can = -1;
  REQUIRE_CUDA(cudaDeviceCanAccessPeer(&can, 0, 0));
  CHECK(can == 0);
  CHECK_ERROR(cudaErrorInvalidDevice, cudaDeviceCanAccessPeer(&can, 0, device_count()));
  CHECK_ERROR(cudaErrorInvalidDevice, cudaDeviceEnablePeerAccess(0, 0));
  if (device_count() < 2) return;
  REQUIRE_CUDA(cudaDeviceCanAccessPeer(&can, 0, 1));
  CHECK_ERROR(cudaErrorPeerAccessNotEnabled, cudaDeviceDisablePeerAccess(1));
  if (can == 0) {
    CHECK_ERROR(cudaErrorPeerAccessUnsupported, cudaDeviceEnablePeerAccess(1, 0));
    return;
  }
  CHECK_ERROR(cudaErrorInvalidValue, cudaDeviceEnablePeerAccess(1, 1));
  REQUIRE_CUDA(cudaDeviceEnablePeerAccess(1, 0));
  CHECK_ERROR(cudaErrorPeerAccessAlreadyEnabled, cudaDeviceEnablePeerAccess(1, 0));
  int* there = nullptr;
  {
    const on_device second(1);
    REQUIRE_CUDA(cudaMalloc(&there, sizeof(int)));
    REQUIRE_CUDA(launch({}, write_late, there, 7));
    REQUIRE_CUDA(cudaDeviceSynchronize());
  }
  REQUIRE_CUDA(launch({}, add_late, there, 10));  // a kernel of the first device
  int got = 0;
  REQUIRE_CUDA(cudaMemcpy(&got, there, sizeof got, cudaMemcpyDefault));
  CHECK(got == 17);
  REQUIRE_CUDA(cudaDeviceDisablePeerAccess(1));
  CHECK_ERROR(cudaErrorPeerAccessNotEnabled, cudaDeviceDisablePeerAccess(1));
  REQUIRE_CUDA(cudaFree(there));
}

__global__ void __launch_bounds__(96) bounded(int* p) { p[threadIdx.x + blockDim.x * threadIdx.y] = 1; }
template <int Threads> __global__ void __launch_bounds__(Threads, 1) bounded_by(int* p) { p[threadIdx.x] = 2; }

TEST_CASE("fidelity: a block is no larger than the kernel's launch bounds") {
  device_array<int> at(256, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(32, 3)}, bounded, at.data()));
  CHECK_ONE_OF(launch({dim3(1), dim3(97)}, bounded, at.data()), cudaErrorInvalidValue, cudaErrorInvalidConfiguration,
               cudaErrorLaunchOutOfResources);
  REQUIRE_CUDA(launch({dim3(1), dim3(224)}, bounded_by<224>, at.data()));
  CHECK_ONE_OF(launch({dim3(1), dim3(7, 33)}, bounded_by<224>, at.data()), cudaErrorInvalidValue,
               cudaErrorInvalidConfiguration, cudaErrorLaunchOutOfResources);
  const auto got = at.get();
  CHECK(std::count(got.begin(), got.end(), 2) == 224);
  cudaFuncAttributes attributes{};
  REQUIRE_CUDA(cudaFuncGetAttributes(&attributes, bounded_by<224>));
  CHECK(attributes.maxThreadsPerBlock == 224);
  int grid = 0, threads = 0;
  REQUIRE_CUDA(cudaOccupancyMaxPotentialBlockSize(&grid, &threads, bounded, 0, 0));
  CHECK(threads > 0);
  CHECK(threads <= 96);
}

TEST_CASE("fidelity: occupancy keeps to the limits of a multiprocessor") {
  const cudaDeviceProp p = properties();
  int before = p.maxBlocksPerMultiProcessor;
  for (const int threads : {32, 64, 128, 256, 512, 1024}) {
    int blocks = -1;
    REQUIRE_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing, threads, 0));
    CHECK(blocks >= 1);
    CHECK(blocks <= before);
    CHECK(blocks * threads <= p.maxThreadsPerMultiProcessor);
    before = blocks;
    int fewer = -1;
    REQUIRE_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fewer, nothing, threads, p.sharedMemPerBlock));
    CHECK(fewer >= 1);
    CHECK(fewer <= blocks);
    CHECK(static_cast<std::size_t>(fewer) * p.sharedMemPerBlock <= p.sharedMemPerMultiprocessor);
  }
  int blocks = -1;
  CHECK_ERROR(cudaErrorInvalidValue, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing, 0, 0));
  int grid = 0, threads = 0;
  REQUIRE_CUDA(cudaOccupancyMaxPotentialBlockSize(&grid, &threads, nothing, 0, 0));
  CHECK(grid >= p.multiProcessorCount);
  CHECK(threads >= p.warpSize);
  CHECK(threads <= p.maxThreadsPerBlock);
  REQUIRE_CUDA(cudaOccupancyMaxPotentialBlockSize(&grid, &threads, nothing, 0, 128));
  CHECK(threads <= 128);
  cudaFuncAttributes a{};
  REQUIRE_CUDA(cudaFuncGetAttributes(&a, nothing));
  CHECK(a.maxThreadsPerBlock >= p.warpSize);
  CHECK(a.maxThreadsPerBlock <= p.maxThreadsPerBlock);
}

// ---- Events

TEST_CASE("fidelity: an event that wasn't recorded stands for no work") {
  event e;
  stream s;
  pinned<int> value(1, 0);
  CHECK_CUDA(cudaEventQuery(e));
  CHECK_CUDA(cudaEventSynchronize(e));
  CHECK_CUDA(cudaStreamWaitEvent(s, e));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, write_late, value.data, 3));
  CHECK_CUDA(cudaStreamSynchronize(s));
  CHECK(value[0] == 3);
}

TEST_CASE("fidelity: an event covers the work before it") {
  stream s;
  event e(cudaEventDisableTiming);
  pinned<int> value(1, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, write_late, value.data, 3));
  REQUIRE_CUDA(cudaEventRecord(e, s));
  REQUIRE_CUDA(cudaEventSynchronize(e));
  CHECK(value[0] == 3);
  CHECK_CUDA(cudaEventQuery(e));
}

TEST_CASE("fidelity: an event orders two streams") {
  stream producer, consumer;
  event written(cudaEventDisableTiming), read(cudaEventDisableTiming);
  device_array<int> slot(1, -1), out(20, -1);
  for (int i = 0; i < 20; ++i) {
    REQUIRE_CUDA(cudaStreamWaitEvent(producer, read));
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, producer}, write_late, slot.data(), i));
    REQUIRE_CUDA(cudaEventRecord(written, producer));
    REQUIRE_CUDA(cudaStreamWaitEvent(consumer, written));
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, consumer}, copy_late, out.data() + i, slot.data()));
    REQUIRE_CUDA(cudaEventRecord(read, consumer));
  }
  std::vector<int> expected(20);
  std::iota(expected.begin(), expected.end(), 0);
  CHECK(out.get() == expected);
}

// Would a wait mean the record that comes later, the two streams would wait for each other.
TEST_CASE("fidelity: a wait means what was recorded when it was called") {
  stream a, b;
  event forth(cudaEventDisableTiming), back(cudaEventDisableTiming);
  device_array<int> value(1, 1);
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, a}, add_late, value.data(), 10));
  REQUIRE_CUDA(cudaEventRecord(forth, a));
  REQUIRE_CUDA(cudaStreamWaitEvent(b, forth));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, b}, add_late, value.data(), 100));
  REQUIRE_CUDA(cudaEventRecord(back, b));
  REQUIRE_CUDA(cudaStreamWaitEvent(a, back));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, a}, add_late, value.data(), 1000));
  REQUIRE_CUDA(cudaEventRecord(forth, a));
  REQUIRE_CUDA(cudaEventSynchronize(forth));
  CHECK(value.get()[0] == 1111);
}

TEST_CASE("fidelity: an event that is recorded again covers the later work") {
  stream a, b;
  event e(cudaEventDisableTiming);
  pinned<int> values(2, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, a}, write_late, values.data, 1));
  REQUIRE_CUDA(cudaEventRecord(e, a));
  REQUIRE_CUDA(cudaStreamWaitEvent(b, e));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, b}, copy_late, values.data + 1, values.data));
  REQUIRE_CUDA(cudaEventRecord(e, b));  // another stream will do
  REQUIRE_CUDA(cudaEventSynchronize(e));
  CHECK(values[1] == 1);
}

TEST_CASE("fidelity: an event may be destroyed while streams wait for it") {
  stream a, b;
  device_array<int> values(2, 0);
  for (int i = 1; i <= 10; ++i) {
    event e(cudaEventDisableTiming);
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, a}, add_late, values.data(), i));
    REQUIRE_CUDA(cudaEventRecord(e, a));
    REQUIRE_CUDA(cudaStreamWaitEvent(b, e));
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, b}, copy_late, values.data() + 1, values.data()));
    event done(cudaEventDisableTiming);
    REQUIRE_CUDA(cudaEventRecord(done, b));
    REQUIRE_CUDA(cudaStreamWaitEvent(a, done));
  }
  CHECK(values.get() == std::vector<int>{55, 55});
}

TEST_CASE("fidelity: times between events need two that were recorded with time") {
  event timed, never, untimed(cudaEventDisableTiming);
  float milliseconds = -1;
  REQUIRE_CUDA(cudaEventRecord(timed));
  REQUIRE_CUDA(cudaEventRecord(untimed));
  REQUIRE_CUDA(cudaDeviceSynchronize());
  CHECK_ERROR(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, timed, never));
  CHECK_ERROR(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, never, timed));
  CHECK_ERROR(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, timed, untimed));
  CHECK_ERROR(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, untimed, timed));
  CHECK_CUDA(cudaEventElapsedTime(&milliseconds, timed, timed));
  CHECK(milliseconds == 0.0f);
}

TEST_CASE("fidelity: times between events add up") {
  stream s;
  event first, second, third;
  pinned<int> value(1, 0);
  REQUIRE_CUDA(cudaEventRecord(first, s));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, write_late, value.data, 1));
  REQUIRE_CUDA(cudaEventRecord(second, s));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, write_late, value.data, 2));
  REQUIRE_CUDA(cudaEventRecord(third, s));
  float early = -1, late = -1, all = -1;
  CHECK_ONE_OF(cudaEventElapsedTime(&all, first, third), cudaSuccess, cudaErrorNotReady);
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  REQUIRE_CUDA(cudaEventElapsedTime(&early, first, second));
  REQUIRE_CUDA(cudaEventElapsedTime(&late, second, third));
  REQUIRE_CUDA(cudaEventElapsedTime(&all, first, third));
  CHECK(early > 0);
  CHECK(late > 0);
  CHECK(std::abs(early + late - all) < 0.01f);
}

TEST_CASE("fidelity: events know three flags") {
  cudaEvent_t e = nullptr;
  CHECK_ERROR(cudaErrorInvalidValue, cudaEventCreateWithFlags(&e, 0x100u));
  CHECK(cudaEventCreateWithFlags(&e, cudaEventInterprocess) != cudaSuccess);  // only without timing
  static_cast<void>(cudaGetLastError());
  for (const unsigned flags : {cudaEventDefault, cudaEventBlockingSync, cudaEventDisableTiming,
                               cudaEventBlockingSync | cudaEventDisableTiming}) {
    event known(flags);
    CHECK_CUDA(cudaEventRecord(known));
    CHECK_CUDA(cudaEventSynchronize(known));
  }
}

// ---- Streams

TEST_CASE("fidelity: a stream does one thing after the other") {
  stream s;
  device_array<int> value(1, 0);
  pinned<int> copies(30, -1);
  for (int i = 0; i < 30; ++i) {
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, add_late, value.data(), i));
    REQUIRE_CUDA(cudaMemcpyAsync(copies.data + i, value.data(), sizeof(int), cudaMemcpyDeviceToHost, s));
  }
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  for (int i = 0; i < 30; ++i) CHECK(copies[static_cast<std::size_t>(i)] == i * (i + 1) / 2);
}

TEST_CASE("fidelity: a stream that is destroyed ends its work") {
  for (const unsigned flags : {cudaStreamDefault, cudaStreamNonBlocking}) {
    device_array<int> value(1, 0);
    cudaStream_t s = nullptr;
    REQUIRE_CUDA(cudaStreamCreateWithFlags(&s, flags));
    for (int i = 0; i < 10; ++i) REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, add_late, value.data(), 1));
    event e(cudaEventDisableTiming);
    REQUIRE_CUDA(cudaEventRecord(e, s));
    REQUIRE_CUDA(cudaStreamDestroy(s));
    CHECK_CUDA(cudaEventSynchronize(e));  // the event outlives the stream
    CHECK(value.get()[0] == 10);
  }
}

TEST_CASE("fidelity: the device is synchronized when all its streams are done") {
  stream a, b(cudaStreamDefault);
  pinned<int> values(4, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, a}, write_late, values.data, 1));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, b}, write_late, values.data + 1, 2));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, cudaStreamPerThread}, write_late, values.data + 2, 3));
  REQUIRE_CUDA(launch({}, write_late, values.data + 3, 4));
  REQUIRE_CUDA(cudaDeviceSynchronize());
  for (int i = 0; i < 4; ++i) CHECK(values[static_cast<std::size_t>(i)] == i + 1);
}

TEST_CASE("fidelity: the legacy default stream and blocking streams wait for each other") {
  stream a(cudaStreamDefault), b(cudaStreamDefault);
  device_array<int> values(4, 0);
  int* const v = values.data();
  for (int i = 1; i <= 10; ++i) {
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, a}, write_late, v, i));
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, b}, write_late, v + 1, 10 * i));
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, i % 2 ? nullptr : cudaStreamLegacy}, copy_late, v + 2, v));
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, b}, copy_late, v + 3, v + 2));
    REQUIRE_CUDA(launch({}, add_late, v + 3, 0));
  }
  CHECK(values.get() == std::vector<int>{10, 100, 10, 10});
}

TEST_CASE("fidelity: an event in the legacy default stream covers blocking streams") {
  stream s(cudaStreamDefault);
  event e(cudaEventDisableTiming);
  pinned<int> value(1, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, write_late, value.data, 6));
  REQUIRE_CUDA(cudaEventRecord(e, nullptr));
  REQUIRE_CUDA(cudaEventSynchronize(e));
  CHECK(value[0] == 6);
}

TEST_CASE("fidelity: a wait in the legacy default stream holds blocking streams back") {
  stream free_one, blocking(cudaStreamDefault);
  event e(cudaEventDisableTiming);
  device_array<int> values(2, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, free_one}, write_late, values.data(), 8));
  REQUIRE_CUDA(cudaEventRecord(e, free_one));
  REQUIRE_CUDA(cudaStreamWaitEvent(nullptr, e));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, blocking}, copy_late, values.data() + 1, values.data()));
  CHECK(values.get() == std::vector<int>{8, 8});
}

TEST_CASE("fidelity: the default stream of a thread waits for the legacy one and is waited for") {
  device_array<int> values(3, 0);
  int* const v = values.data();
  REQUIRE_CUDA(launch({}, write_late, v, 4));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, cudaStreamPerThread}, copy_late, v + 1, v));
  REQUIRE_CUDA(launch({}, copy_late, v + 2, v + 1));
  CHECK(values.get() == std::vector<int>{4, 4, 4});
}

TEST_CASE("fidelity: each thread has its own default stream") {
  pinned<int> values(3, 0);
  int* const v = values.data;
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, cudaStreamPerThread}, write_late, v, 1));
  event e(cudaEventDisableTiming);
  REQUIRE_CUDA(cudaEventRecord(e, cudaStreamPerThread));
  cudaError_t codes[4] = {};
  int seen = 0;
  std::thread([&] {
    codes[0] = cudaStreamWaitEvent(cudaStreamPerThread, e);
    codes[1] = launch({dim3(1), dim3(1), 0, cudaStreamPerThread}, copy_late, v + 1, v);
    codes[2] = launch({dim3(1), dim3(1), 0, cudaStreamPerThread}, add_late, v + 1, 10);
    codes[3] = cudaStreamSynchronize(cudaStreamPerThread);
    seen = v[1];
  }).join();
  for (const cudaError_t code : codes) CHECK_CUDA(code);
  CHECK(seen == 11);
  CHECK_CUDA(cudaStreamSynchronize(cudaStreamPerThread));
  CHECK(v[0] == 1);
}

TEST_CASE("fidelity: streams keep their flags") {
  stream a, b(cudaStreamDefault);
  unsigned flags = 99;
  CHECK_CUDA(cudaStreamGetFlags(a, &flags));
  CHECK(flags == cudaStreamNonBlocking);
  CHECK_CUDA(cudaStreamGetFlags(b, &flags));
  CHECK(flags == cudaStreamDefault);
  cudaStream_t none = nullptr;
  CHECK_ERROR(cudaErrorInvalidValue, cudaStreamCreateWithFlags(&none, 0x40u));
}

TEST_CASE("fidelity: a stream's number is its own, also after its end") {
  unsigned long long first = 0, second = 0, third = 0, again = 0;
  {
    stream a, b;
    CHECK_CUDA(cudaStreamGetId(a, &first));
    CHECK_CUDA(cudaStreamGetId(b, &second));
    CHECK_CUDA(cudaStreamGetId(a, &again));
    CHECK(first != second);
    CHECK(again == first);
    CHECK_ERROR(cudaErrorInvalidValue, cudaStreamGetId(a, nullptr));
  }
  stream c;
  CHECK_CUDA(cudaStreamGetId(c, &third));
  CHECK(third != first);
  CHECK(third != second);
  CHECK_CUDA(cudaStreamGetId(nullptr, &first));
  CHECK_CUDA(cudaStreamGetId(cudaStreamLegacy, &second));
  CHECK(first == second);
  CHECK_CUDA(cudaStreamGetId(cudaStreamPerThread, &second));
  CHECK(first != second);
}

TEST_CASE("fidelity: a stream's priority is clamped to the device's range") {
  int least = -99, greatest = -99;
  REQUIRE_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CHECK(greatest <= least);
  CHECK(least == 0);
  CHECK_CUDA(cudaDeviceGetStreamPriorityRange(nullptr, nullptr));
  for (const int wanted : {greatest - 5, greatest, least, least + 5}) {
    cudaStream_t s = nullptr;
    REQUIRE_CUDA(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, wanted));
    int got = -99;
    CHECK_CUDA(cudaStreamGetPriority(s, &got));
    CHECK(got == (std::min)((std::max)(wanted, greatest), least));
    CHECK_CUDA(cudaStreamDestroy(s));
  }
  stream plain;
  int got = -99;
  CHECK_CUDA(cudaStreamGetPriority(plain, &got));
  CHECK(got == 0);
}

TEST_CASE("fidelity: a stream without work is ready") {
  stream s;
  CHECK_CUDA(cudaStreamQuery(s));
  CHECK_CUDA(cudaStreamSynchronize(s));
  CHECK_CUDA(cudaStreamSynchronize(cudaStreamPerThread));
  CHECK_CUDA(cudaStreamSynchronize(nullptr));
}

TEST_CASE("fidelity: work of several threads in one stream") {
  stream s;
  device_array<int> value(1, 0);
  cudaError_t codes[3] = {};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 8; ++i) {
        const cudaError_t code = launch({dim3(1), dim3(1), 0, s}, add_late, value.data(), 1 + t);
        if (code != cudaSuccess) codes[t] = code;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const cudaError_t code : codes) CHECK_CUDA(code);
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  CHECK(value.get()[0] == 48);
}

// ---- Host functions

struct seen_by_host {
  int* value;
  std::vector<int> log;
};

void CUDART_CB look(void* data) {
  auto& seen = *static_cast<seen_by_host*>(data);
  seen.log.push_back(*seen.value);
  *seen.value += 100;
}

TEST_CASE("fidelity: a host function runs at its place in the stream") {
  stream s;
  pinned<int> value(1, 0);
  seen_by_host seen{value.data, {}};
  for (int i = 1; i <= 5; ++i) {
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, add_late, value.data, i));
    REQUIRE_CUDA(cudaLaunchHostFunc(s, look, &seen));
  }
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  CHECK(seen.log == std::vector<int>{1, 103, 206, 310, 415});
  CHECK(value[0] == 515);
}

TEST_CASE("fidelity: a host function sees what joined streams did") {
  stream a, b;
  event e(cudaEventDisableTiming);
  pinned<int> value(1, 0);
  seen_by_host seen{value.data, {}};
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, a}, write_late, value.data, 9));
  REQUIRE_CUDA(cudaEventRecord(e, a));
  REQUIRE_CUDA(cudaStreamWaitEvent(b, e));
  REQUIRE_CUDA(cudaLaunchHostFunc(b, look, &seen));
  REQUIRE_CUDA(cudaStreamSynchronize(b));
  CHECK(seen.log == std::vector<int>{9});
}

struct callback_log {
  std::vector<cudaStream_t> streams;
  std::vector<cudaError_t> states;
};

void CUDART_CB note(cudaStream_t s, cudaError_t state, void* data) {
  auto& log = *static_cast<callback_log*>(data);
  log.streams.push_back(s);
  log.states.push_back(state);
}

TEST_CASE("fidelity: each callback is called once, with its stream") {
  stream s;
  callback_log log;
  for (int i = 0; i < 4; ++i) REQUIRE_CUDA(cudaStreamAddCallback(s, note, &log, 0));
  CHECK_ERROR(cudaErrorInvalidValue, cudaStreamAddCallback(s, note, &log, 1));
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  CHECK(log.streams == std::vector<cudaStream_t>(4, s.handle));
  CHECK(log.states == std::vector<cudaError_t>(4, cudaSuccess));
}

// ---- Copies and sets

TEST_CASE("fidelity: copies in every direction") {
  const std::vector<int> values{3, 1, 4, 1, 5, 9, 2, 6};
  const std::size_t bytes = values.size() * sizeof(int);
  device_array<int> a(8, 0), b(8, 0);
  std::vector<int> middle(8, 0), got(8, 0);
  for (const bool inferred : {false, true}) {
    const auto kind = [inferred](cudaMemcpyKind k) { return inferred ? cudaMemcpyDefault : k; };
    CHECK_CUDA(cudaMemcpy(middle.data(), values.data(), bytes, kind(cudaMemcpyHostToHost)));
    CHECK(middle == values);
    CHECK_CUDA(cudaMemcpy(a.data(), middle.data(), bytes, kind(cudaMemcpyHostToDevice)));
    CHECK_CUDA(cudaMemcpy(b.data(), a.data(), bytes, kind(cudaMemcpyDeviceToDevice)));
    CHECK_CUDA(cudaMemcpy(got.data(), b.data(), bytes, kind(cudaMemcpyDeviceToHost)));
    CHECK(got == values);
    CHECK_CUDA(cudaMemcpy(a.data() + 2, b.data() + 5, 3 * sizeof(int), kind(cudaMemcpyDeviceToDevice)));
    CHECK(a.get() == std::vector<int>{3, 1, 9, 2, 6, 9, 2, 6});
    std::fill(got.begin(), got.end(), 0);
  }
}

TEST_CASE("fidelity: a copy to pageable memory is done when it returns") {
  device_array<int> value(1, 0);
  REQUIRE_CUDA(launch({}, write_late, value.data(), 12));
  int got = 0;
  REQUIRE_CUDA(cudaMemcpy(&got, value.data(), sizeof got, cudaMemcpyDeviceToHost));
  CHECK(got == 12);
}

TEST_CASE("fidelity: pageable memory may change when a copy from it has returned") {
  device_array<int> value(1, 0), copies(8, 0);
  for (int i = 0; i < 8; ++i) {
    int number = 10 * i;
    REQUIRE_CUDA(cudaMemcpy(value.data(), &number, sizeof number, cudaMemcpyHostToDevice));
    number = -1;
    REQUIRE_CUDA(launch({}, copy_late, copies.data() + i, value.data()));
  }
  CHECK(copies.get() == std::vector<int>{0, 10, 20, 30, 40, 50, 60, 70});
}

TEST_CASE("fidelity: a copy from host to host is done when it returns") {
  stream s;
  pinned<int> from(2, 0), to(2, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, write_late, from.data, 5));
  REQUIRE_CUDA(cudaMemcpyAsync(to.data, from.data, sizeof(int), cudaMemcpyHostToHost, s));
  CHECK(to[0] == 5);
  from[1] = 6;
  REQUIRE_CUDA(cudaMemcpy(to.data + 1, from.data + 1, sizeof(int), cudaMemcpyDefault));
  CHECK(to[1] == 6);
}

TEST_CASE("fidelity: asynchronous copies keep their place in the stream") {
  stream s;
  const std::size_t n = 1000, bytes = n * sizeof(int);
  pinned<int> in(n), out(n, -1);
  std::iota(in.data, in.data + n, 0);
  device_array<int> a(n, -2), b(n, -3);
  REQUIRE_CUDA(cudaMemcpyAsync(a.data(), in.data, bytes, cudaMemcpyHostToDevice, s));
  REQUIRE_CUDA(cudaMemcpyAsync(b.data(), a.data(), bytes, cudaMemcpyDeviceToDevice, s));
  REQUIRE_CUDA(cudaMemsetAsync(a.data(), 0, bytes, s));
  REQUIRE_CUDA(cudaMemcpyAsync(out.data, b.data(), bytes, cudaMemcpyDeviceToHost, s));
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  CHECK(std::equal(in.data, in.data + n, out.data));
  CHECK(a.get() == std::vector<int>(n, 0));
}

TEST_CASE("fidelity: a set writes bytes") {
  device_array<unsigned> values(4, 0);
  CHECK_CUDA(cudaMemset(values.data(), 0x1234ab, 9));  // its lowest byte
  CHECK(values.get() == std::vector<unsigned>{0xababababu, 0xababababu, 0xabu, 0});
  CHECK_CUDA(cudaMemsetAsync(values.data() + 1, -1, 4, nullptr));
  CHECK(values.get() == std::vector<unsigned>{0xababababu, 0xffffffffu, 0xabu, 0});
  pinned<unsigned char> host(4, 1);
  CHECK_CUDA(cudaMemset(host.data, 7, 2));  // of pinned memory, it waits
  CHECK(host[0] == 7);
  CHECK(host[1] == 7);
  CHECK(host[2] == 1);
}

TEST_CASE("fidelity: memory with a pitch is copied by rows") {
  const std::size_t width = 100, height = 7;
  unsigned char* p = nullptr;
  std::size_t pitch = 0;
  REQUIRE_CUDA(cudaMallocPitch(&p, &pitch, width, height));
  CHECK(pitch >= width);
  std::vector<unsigned char> in(width * height), out(120 * height, 255);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i % 251);
  CHECK_CUDA(cudaMemset2D(p, pitch, 9, width, height));
  CHECK_CUDA(cudaMemcpy2D(p, pitch, in.data(), width, width - 1, height, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemcpy2D(out.data(), 120, p, pitch, width, height, cudaMemcpyDeviceToHost));
  std::size_t wrong = 0;
  for (std::size_t row = 0; row < height; ++row)
    for (std::size_t x = 0; x < 120; ++x)
      wrong += out[row * 120 + x] != (x < width - 1 ? in[row * width + x] : x < width ? 9 : 255);
  CHECK(wrong == 0);
  CHECK_CUDA(cudaMemset2DAsync(p + 10, pitch, 77, 20, 2, nullptr));
  CHECK_CUDA(cudaMemcpy2DAsync(out.data(), 120, p, pitch, width, 3, cudaMemcpyDefault, nullptr));
  CHECK_CUDA(cudaStreamSynchronize(nullptr));
  CHECK(out[10] == 77);
  CHECK(out[120 + 29] == 77);
  CHECK(out[120 + 30] == in[width + 30]);
  CHECK(out[240 + 10] == in[2 * width + 10]);
  CHECK_CUDA(cudaFree(p));
}

TEST_CASE("fidelity: rows are no longer than the pitch") {
  device_array<unsigned char> a(256, 0), b(256, 0);
  CHECK_ERROR(cudaErrorInvalidPitchValue, cudaMemcpy2D(a.data(), 15, b.data(), 32, 16, 4, cudaMemcpyDeviceToDevice));
  CHECK_ERROR(cudaErrorInvalidPitchValue, cudaMemcpy2D(a.data(), 32, b.data(), 15, 16, 4, cudaMemcpyDeviceToDevice));
  CHECK_ONE_OF(cudaMemset2D(a.data(), 15, 0, 16, 4), cudaErrorInvalidValue, cudaErrorInvalidPitchValue);
  CHECK_CUDA(cudaMemset2D(a.data(), 4, 1, 16, 1));  // of a single row the pitch isn't used
  CHECK(a.get()[15] == 1);
}

// ---- Kinds of memory

TEST_CASE("fidelity: a pointer tells its kind") {
  const int device = current_device();
  cudaPointerAttributes a{};
  device_array<int> on_the_device(8, 0);
  CHECK_CUDA(cudaPointerGetAttributes(&a, on_the_device.data() + 3));
  CHECK(a.type == cudaMemoryTypeDevice);
  CHECK(a.device == device);
  CHECK(a.devicePointer == on_the_device.data() + 3);
  CHECK(a.hostPointer == nullptr);

  pinned<int> locked(8);
  CHECK_CUDA(cudaPointerGetAttributes(&a, locked.data + 2));
  CHECK(a.type == cudaMemoryTypeHost);
  CHECK(a.device == device);
  CHECK(a.hostPointer == locked.data + 2);
  CHECK(a.devicePointer != nullptr);

  int* managed = nullptr;
  REQUIRE_CUDA(cudaMallocManaged(&managed, 64));
  CHECK_CUDA(cudaPointerGetAttributes(&a, managed));
  CHECK(a.type == cudaMemoryTypeManaged);
  CHECK(a.devicePointer == managed);
  CHECK(a.hostPointer == managed);
  CHECK_CUDA(cudaFree(managed));

  const auto own = std::make_unique<int[]>(8);
  CHECK_CUDA(cudaPointerGetAttributes(&a, own.get()));
  CHECK(a.type == cudaMemoryTypeUnregistered);
  CHECK(a.hostPointer == own.get());
}

TEST_CASE("fidelity: kernels reach mapped host memory") {
  pinned<int> value(2, 5);
  int* mapped = nullptr;
  REQUIRE_CUDA(cudaHostGetDevicePointer(&mapped, value.data, 0));
  REQUIRE_CUDA(launch({}, copy_late, mapped + 1, mapped));
  REQUIRE_CUDA(launch({}, add_late, mapped + 1, 1));
  REQUIRE_CUDA(cudaDeviceSynchronize());
  CHECK(value[0] == 5);
  CHECK(value[1] == 6);
  CHECK_ERROR(cudaErrorInvalidValue, cudaHostGetDevicePointer(&mapped, value.data, 8));
}

TEST_CASE("fidelity: host memory is registered once and given back") {
  const std::size_t page = 4096;
  const auto memory = std::make_unique<unsigned char[]>(3 * page);
  void* const p = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(memory.get()) + page - 1) / page * page);
  int* const values = static_cast<int*>(p);
  values[0] = 40;
  CHECK_ERROR(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(p));
  REQUIRE_CUDA(cudaHostRegister(p, page, cudaHostRegisterMapped));
  CHECK_ERROR(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(p, page, cudaHostRegisterMapped));
  cudaPointerAttributes a{};
  CHECK_CUDA(cudaPointerGetAttributes(&a, values));
  CHECK(a.type == cudaMemoryTypeHost);
  int* mapped = nullptr;
  REQUIRE_CUDA(cudaHostGetDevicePointer(&mapped, values, 0));
  REQUIRE_CUDA(launch({}, add_late, mapped, 2));
  REQUIRE_CUDA(cudaDeviceSynchronize());
  CHECK(values[0] == 42);
  CHECK_CUDA(cudaHostUnregister(p));
  CHECK_ERROR(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(p));
  CHECK_CUDA(cudaPointerGetAttributes(&a, values));
  CHECK(a.type == cudaMemoryTypeUnregistered);
  CHECK(values[0] == 42);
}

TEST_CASE("fidelity: flags of host memory") {
  void* p = nullptr;
  CHECK_ERROR(cudaErrorInvalidValue, cudaHostAlloc(&p, 64, 0x1000u));
  for (const unsigned flags : {cudaHostAllocDefault, cudaHostAllocPortable, cudaHostAllocMapped | cudaHostAllocPortable,
                               cudaHostAllocWriteCombined}) {
    REQUIRE_CUDA(cudaHostAlloc(&p, 64, flags));
    std::memset(p, 1, 64);
    CHECK_CUDA(cudaFreeHost(p));
  }
}

TEST_CASE("fidelity: managed memory is shared by host and device") {
  if (!properties().managedMemory) return;
  int* values = nullptr;
  REQUIRE_CUDA(cudaMallocManaged(&values, 4 * sizeof(int)));
  values[0] = 11;
  values[1] = 0;
  REQUIRE_CUDA(launch({}, copy_late, values + 1, values));
  REQUIRE_CUDA(launch({}, add_late, values, 1));
  REQUIRE_CUDA(cudaDeviceSynchronize());
  CHECK(values[0] == 12);
  CHECK(values[1] == 11);
  int got = 0;
  CHECK_CUDA(cudaMemcpy(&got, values, sizeof got, cudaMemcpyDefault));
  CHECK(got == 12);
  if (properties().concurrentManagedAccess) {
    cudaMemLocation here{};
    here.type = cudaMemLocationTypeDevice;
    here.id = current_device();
    CHECK_CUDA(cudaMemPrefetchAsync(values, 4 * sizeof(int), here, 0, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  CHECK(values[1] == 11);
  CHECK_CUDA(cudaFree(values));
  CHECK_ERROR(cudaErrorInvalidValue, cudaMallocManaged(&values, 0));
}

TEST_CASE("fidelity: device memory is aligned for every type") {
  std::vector<char*> pointers;
  for (const std::size_t bytes : {1, 3, 100, 257, 4096}) {
    char* p = nullptr;
    REQUIRE_CUDA(cudaMalloc(&p, bytes));
    CHECK(reinterpret_cast<std::uintptr_t>(p) % 256 == 0);
    CHECK_CUDA(cudaMemset(p, 1, bytes));
    pointers.push_back(p);
  }
  for (char* p : pointers) CHECK_CUDA(cudaFree(p));
}

// ---- Memory in stream order

TEST_CASE("fidelity: memory from a stream is usable there at once") {
  stream s;
  pinned<int> out(10, -1);
  for (int i = 0; i < 10; ++i) {
    int* p = nullptr;
    REQUIRE_CUDA(cudaMallocAsync(&p, 64 * sizeof(int), s));
    CHECK(reinterpret_cast<std::uintptr_t>(p) % 256 == 0);
    REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, write_late, p + 63, i));
    REQUIRE_CUDA(cudaMemcpyAsync(out.data + i, p + 63, sizeof(int), cudaMemcpyDefault, s));
    REQUIRE_CUDA(cudaFreeAsync(p, s));
  }
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  for (int i = 0; i < 10; ++i) CHECK(out[static_cast<std::size_t>(i)] == i);
}

TEST_CASE("fidelity: another stream may use memory after an event, and free it") {
  stream a, b;
  event allocated(cudaEventDisableTiming);
  pinned<int> out(1, 0);
  int* p = nullptr;
  REQUIRE_CUDA(cudaMallocAsync(&p, sizeof(int), a));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, a}, write_late, p, 20));
  REQUIRE_CUDA(cudaEventRecord(allocated, a));
  REQUIRE_CUDA(cudaStreamWaitEvent(b, allocated));
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, b}, add_late, p, 3));
  REQUIRE_CUDA(cudaMemcpyAsync(out.data, p, sizeof(int), cudaMemcpyDefault, b));
  REQUIRE_CUDA(cudaFreeAsync(p, b));
  REQUIRE_CUDA(cudaStreamSynchronize(b));
  CHECK(out[0] == 23);
}

TEST_CASE("fidelity: after synchronization stream-ordered memory is like any other") {
  stream a, b;
  int* p = nullptr;
  REQUIRE_CUDA(cudaMallocAsync(&p, sizeof(int), a));
  REQUIRE_CUDA(cudaStreamSynchronize(a));
  cudaPointerAttributes attributes{};
  CHECK_CUDA(cudaPointerGetAttributes(&attributes, p));
  CHECK(attributes.type == cudaMemoryTypeDevice);
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, b}, write_late, p, 31));
  REQUIRE_CUDA(cudaStreamSynchronize(b));
  int got = 0;
  CHECK_CUDA(cudaMemcpy(&got, p, sizeof got, cudaMemcpyDefault));
  CHECK(got == 31);
  CHECK_CUDA(cudaFree(p));
  REQUIRE_CUDA(cudaMalloc(&p, sizeof(int)));  // and the other way round
  CHECK_CUDA(cudaFreeAsync(p, a));
  CHECK_CUDA(cudaStreamSynchronize(a));
}

std::uint64_t attribute(cudaMemPool_t pool, cudaMemPoolAttr which) {
  std::uint64_t value = 77;
  REQUIRE_CUDA(cudaMemPoolGetAttribute(pool, which, &value));
  return value;
}
int reuse(cudaMemPool_t pool, cudaMemPoolAttr which) {
  int value = 77;
  REQUIRE_CUDA(cudaMemPoolGetAttribute(pool, which, &value));
  return value;
}

struct pool {
  explicit pool(std::size_t most = 0) {
    cudaMemPoolProps p{};
    p.allocType = cudaMemAllocationTypePinned;
    p.location.type = cudaMemLocationTypeDevice;
    p.location.id = current_device();
    p.maxSize = most;
    REQUIRE_CUDA(cudaMemPoolCreate(&handle, &p));
  }
  pool(const pool&) = delete;
  ~pool() {
    if (handle) static_cast<void>(cudaMemPoolDestroy(handle));
  }
  operator cudaMemPool_t() const { return handle; }
  cudaMemPool_t handle = nullptr;
};

TEST_CASE("fidelity: a pool's attributes have their defaults and keep what is set") {
  pool own;
  CHECK(attribute(own, cudaMemPoolAttrReleaseThreshold) == 0);
  CHECK(attribute(own, cudaMemPoolAttrUsedMemCurrent) == 0);
  const cudaMemPoolAttr flags[] = {cudaMemPoolReuseFollowEventDependencies, cudaMemPoolReuseAllowOpportunistic,
                                   cudaMemPoolReuseAllowInternalDependencies};
  for (const cudaMemPoolAttr flag : flags) {
    CHECK(reuse(own, flag) == 1);
    int off = 0;
    CHECK_CUDA(cudaMemPoolSetAttribute(own, flag, &off));
    CHECK(reuse(own, flag) == 0);
  }
  std::uint64_t threshold = std::uint64_t{1} << 40;
  CHECK_CUDA(cudaMemPoolSetAttribute(own, cudaMemPoolAttrReleaseThreshold, &threshold));
  CHECK(attribute(own, cudaMemPoolAttrReleaseThreshold) == threshold);
  CHECK_ERROR(cudaErrorInvalidValue, cudaMemPoolSetAttribute(own, cudaMemPoolAttrUsedMemHigh, &threshold));
}

TEST_CASE("fidelity: a pool counts what is in use") {
  pool own;
  stream s;
  void *p = nullptr, *q = nullptr;
  REQUIRE_CUDA(cudaMallocFromPoolAsync(&p, 1 << 16, own, s));
  REQUIRE_CUDA(cudaMallocFromPoolAsync(&q, 1 << 18, own, s));
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  const std::uint64_t both = attribute(own, cudaMemPoolAttrUsedMemCurrent);
  CHECK(both >= (1 << 16) + (1 << 18));
  CHECK(attribute(own, cudaMemPoolAttrReservedMemCurrent) >= both);
  REQUIRE_CUDA(cudaFreeAsync(q, s));
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  const std::uint64_t one = attribute(own, cudaMemPoolAttrUsedMemCurrent);
  CHECK(one >= 1 << 16);
  CHECK(one <= both - (1 << 18));
  CHECK(attribute(own, cudaMemPoolAttrUsedMemHigh) >= both);
  std::uint64_t zero = 0;
  CHECK_CUDA(cudaMemPoolSetAttribute(own, cudaMemPoolAttrUsedMemHigh, &zero));
  CHECK(attribute(own, cudaMemPoolAttrUsedMemHigh) < both);
  CHECK_CUDA(cudaMemPoolTrimTo(own, 0));  // keeps what is in use
  CHECK(attribute(own, cudaMemPoolAttrReservedMemCurrent) >= one);
  CHECK_CUDA(cudaMemsetAsync(p, 0, 1 << 16, s));
  REQUIRE_CUDA(cudaFreeAsync(p, s));
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  CHECK(attribute(own, cudaMemPoolAttrUsedMemCurrent) == 0);
}

TEST_CASE("fidelity: memory outlives its pool") {
  stream s;
  pinned<int> out(1, 0);
  int* p = nullptr;
  {
    pool own;
    REQUIRE_CUDA(cudaMallocFromPoolAsync(&p, sizeof(int), own, s));
  }
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, write_late, p, 15));
  REQUIRE_CUDA(cudaMemcpyAsync(out.data, p, sizeof(int), cudaMemcpyDefault, s));
  REQUIRE_CUDA(cudaFreeAsync(p, s));
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  CHECK(out[0] == 15);
}

TEST_CASE("fidelity: a device has a current pool, at first the default one") {
  const int device = current_device();
  cudaMemPool_t usual = nullptr, now = nullptr;
  REQUIRE_CUDA(cudaDeviceGetDefaultMemPool(&usual, device));
  REQUIRE_CUDA(cudaDeviceGetMemPool(&now, device));
  CHECK(now == usual);
  CHECK(cudaMemPoolDestroy(usual) != cudaSuccess);
  static_cast<void>(cudaGetLastError());
  {
    pool own;
    stream s;
    REQUIRE_CUDA(cudaDeviceSetMemPool(device, own));
    REQUIRE_CUDA(cudaDeviceGetMemPool(&now, device));
    CHECK(now == own.handle);
    void* p = nullptr;
    REQUIRE_CUDA(cudaMallocAsync(&p, 1 << 12, s));
    REQUIRE_CUDA(cudaStreamSynchronize(s));
    CHECK(attribute(own, cudaMemPoolAttrUsedMemCurrent) >= 1 << 12);
    REQUIRE_CUDA(cudaFreeAsync(p, s));
    REQUIRE_CUDA(cudaStreamSynchronize(s));
  }
  REQUIRE_CUDA(cudaDeviceGetMemPool(&now, device));  // destroying the current one brings the default back
  CHECK(now == usual);
}

// ---- Symbols

__constant__ int factors[8];
__device__ int totals[8];
__device__ double scale = 2.5;

__global__ void use_symbols() {
  const unsigned i = threadIdx.x;
  totals[i] += factors[i] * static_cast<int>(scale * 2);
}

TEST_CASE("fidelity: variables of the device are read and written by name") {
  const int given[8] = {1, 2, 3, 4, 5, 6, 7, 8}, zeros[8] = {}, middle[2] = {-40, -50};
  int got[8] = {};
  REQUIRE_CUDA(cudaMemcpyToSymbol(factors, given, sizeof given));
  REQUIRE_CUDA(cudaMemcpyToSymbol(totals, zeros, sizeof zeros));
  REQUIRE_CUDA(cudaMemcpyToSymbol(factors, middle, sizeof middle, 3 * sizeof(int)));
  REQUIRE_CUDA(launch({dim3(1), dim3(8)}, use_symbols));
  REQUIRE_CUDA(cudaMemcpyFromSymbol(got, totals, sizeof got));
  CHECK(std::vector<int>(got, got + 8) == std::vector<int>{5, 10, 15, -200, -250, 30, 35, 40});
  REQUIRE_CUDA(cudaMemcpyFromSymbol(got, totals, 2 * sizeof(int), 6 * sizeof(int)));
  CHECK(got[0] == 35);
  CHECK(got[1] == 40);
  double initial = 0;
  REQUIRE_CUDA(cudaMemcpyFromSymbol(&initial, scale, sizeof initial));
  CHECK(initial == 2.5);
}

TEST_CASE("fidelity: copies of variables keep their place in a stream") {
  stream s;
  pinned<int> in(8, 2), out(8, -1);
  for (std::size_t i = 0; i < 8; ++i) in[i] = 0;
  REQUIRE_CUDA(cudaMemcpyToSymbolAsync(totals, in.data, 8 * sizeof(int), 0, cudaMemcpyHostToDevice, s));
  pinned<int> ones(8, 1);
  REQUIRE_CUDA(cudaMemcpyToSymbolAsync(factors, ones.data, 8 * sizeof(int), 0, cudaMemcpyHostToDevice, s));
  REQUIRE_CUDA(launch({dim3(1), dim3(8), 0, s}, use_symbols));
  REQUIRE_CUDA(launch({dim3(1), dim3(8), 0, s}, use_symbols));
  REQUIRE_CUDA(cudaMemcpyFromSymbolAsync(out.data, totals, 8 * sizeof(int), 0, cudaMemcpyDeviceToHost, s));
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  for (std::size_t i = 0; i < 8; ++i) CHECK(out[i] == 10);
}

TEST_CASE("fidelity: a variable of the device has an address and a size") {
  std::size_t bytes = 0;
  REQUIRE_CUDA(cudaGetSymbolSize(&bytes, totals));
  CHECK(bytes == 8 * sizeof(int));
  void* address = nullptr;
  REQUIRE_CUDA(cudaGetSymbolAddress(&address, totals));
  int values[8] = {9, 8, 7, 6, 5, 4, 3, 2}, got[8] = {};
  CHECK_CUDA(cudaMemcpy(address, values, sizeof values, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemset(static_cast<int*>(address) + 1, 0, sizeof(int)));
  REQUIRE_CUDA(launch({}, add_late, static_cast<int*>(address), 100));
  CHECK_CUDA(cudaMemcpyFromSymbol(got, totals, sizeof got));
  CHECK(std::vector<int>(got, got + 8) == std::vector<int>{109, 0, 7, 6, 5, 4, 3, 2});
  CHECK_CUDA(cudaMemcpy(got, address, sizeof(int), cudaMemcpyDeviceToHost));
  CHECK(got[0] == 109);
  cudaPointerAttributes a{};
  CHECK_CUDA(cudaPointerGetAttributes(&a, address));
  CHECK(a.type == cudaMemoryTypeDevice);
}

TEST_CASE("fidelity: a copy stays inside of its variable") {
  int values[9] = {};
  CHECK_ERROR(cudaErrorInvalidValue, cudaMemcpyToSymbol(totals, values, 9 * sizeof(int)));
  CHECK_ERROR(cudaErrorInvalidValue, cudaMemcpyFromSymbol(values, totals, 8 * sizeof(int), sizeof(int)));
}

// ---- Arguments

struct many {
  int values[500];
};

__global__ void store_arguments(many m, const many* other, int* out, float scaled) {
  int sum = 0;
  for (const int v : m.values) sum += v;
  linger();
  out[0] = sum;
  out[1] = static_cast<int>(scaled * 2);
  out[2] = other->values[0];
}

TEST_CASE("fidelity: arguments are copied when a kernel is launched") {
  stream s;
  pinned<int> out(3, 0);
  pinned<many> other(1);
  other[0].values[0] = 1;
  many m{};
  std::fill_n(m.values, 500, 2);
  int number = 7;
  REQUIRE_CUDA(launch({dim3(1), dim3(1), 0, s}, store_arguments, m, other.data, out.data, number));  // int to float
  std::fill_n(m.values, 500, -1);
  number = 0;
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  CHECK(out[0] == 1000);
  CHECK(out[1] == 14);
  CHECK(out[2] == 1);
}

template <class First, class Second> struct both {
  First first;
  Second second;
  __device__ void operator()(int* to, int i) const {
    first(to, i);
    second(to, i);
  }
};
struct add_number {
  int number;
  __device__ void operator()(int* to, int i) const { to[i] += number; }
};
struct multiply_index {
  __device__ void operator()(int* to, int i) const { to[i] *= i; }
};
template <class Function> __global__ void apply(Function f, int* to) { f(to, static_cast<int>(threadIdx.x)); }

TEST_CASE("fidelity: kernels take functors by value") {
  device_array<int> values(5, 1);
  REQUIRE_CUDA(launch({dim3(1), dim3(5)}, apply<both<add_number, multiply_index>>,
                      both<add_number, multiply_index>{{4}, {}}, values.data()));
  CHECK(values.get() == std::vector<int>{0, 5, 10, 15, 20});
}

TEST_CASE("fidelity: a configuration may be reused and changed after a launch") {
  stream s;
  device_array<int> count(1, 0);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(2);
  config.blockDim = dim3(3);
  config.stream = s;
  REQUIRE_CUDA(cudaLaunchKernelEx(&config, count_threads, count.data()));
  config.gridDim = dim3(10);
  REQUIRE_CUDA(cudaLaunchKernelEx(&config, count_threads, count.data()));
  config.blockDim = dim3(1);
  REQUIRE_CUDA(cudaStreamSynchronize(s));
  CHECK(count.get()[0] == 36);
}

}  // namespace fidelity::runtime

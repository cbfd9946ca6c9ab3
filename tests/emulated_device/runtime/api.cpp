// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// The functions of cuda_runtime_api.h that aren't about memory.

#include "machine.hpp"
#include "sanitizers.hpp"

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace emulated {
namespace {

constexpr std::size_t shared_default = 48 * 1024, shared_most = 227 * 1024;
constexpr std::size_t parameters_most = 32764;
constexpr int priority_least = 0, priority_greatest = -5;

bool no_device(const machine& m, int d) { return d < 0 || static_cast<std::size_t>(d) >= m.devices.size(); }

device& own_device(machine& m) { return m.devices[static_cast<std::size_t>(me().device)]; }

std::string name_of_kernel(const void* kernel) {
  Dl_info info{};
  if (dladdr(const_cast<void*>(kernel), &info) == 0 || !info.dli_sname) {
    char text[32];
    std::snprintf(text, sizeof text, "at %p", kernel);
    return text;
  }
  int status = 0;
  char* readable = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = status == 0 ? readable : info.dli_sname;
  std::free(readable);
  // "void name<arguments>(parameters)" -> "name<arguments>"
  int depth = 0;
  std::size_t end = name.size();
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0 && name.compare(i, 11, "(anonymous ") != 0) {
      end = i;
      break;
    }
  }
  name.resize(end);
  return name.rfind("void ", 0) == 0 ? name.substr(5) : name;
}

#if defined(__x86_64__)
// Where NOPs begin: qualifiers.h puts them before kernels that have launch bounds.
using code = const unsigned char*;
extern "C" {
[[gnu::weak, gnu::visibility("hidden")]] extern const code __start___patchable_function_entries[];
[[gnu::weak, gnu::visibility("hidden")]] extern const code __stop___patchable_function_entries[];
}

// Threads that a block of this kernel may have.
int bound_of(const void* kernel) {
  const code end = static_cast<code>(kernel);
  for (const code* p = __start___patchable_function_entries; p != __stop___patchable_function_entries; ++p) {
    if (*p < end && end - *p <= 1024 && std::all_of(*p, end, [](unsigned char c) { return c == 0x90; }))
      return static_cast<int>(end - *p);
  }
  return 1024;
}
#else
int bound_of(const void*) { return 1024; }
#endif

// The dynamic shared memory that cudaFuncSetAttribute has granted a kernel, or null.
const int* granted(machine& m, const void* kernel) {
  const auto found = own_device(m).dynamic_shared.find(kernel);
  return found == own_device(m).dynamic_shared.end() ? nullptr : &found->second;
}

cudaError_t check_config(machine& m, const void* kernel, const cudaLaunchConfig_t& c) {
  const dim3 b = c.blockDim, g = c.gridDim;
  if (!b.x || !b.y || !b.z || !g.x || !g.y || !g.z) return cudaErrorInvalidConfiguration;
  if (b.x > 1024 || b.y > 1024 || b.z > 64 || b.x * b.y * b.z > 1024) return cudaErrorInvalidConfiguration;
  if (b.x * b.y * b.z > static_cast<unsigned>(bound_of(kernel))) return cudaErrorInvalidValue;
  if (g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) return cudaErrorInvalidConfiguration;
  const int* const more = granted(m, kernel);
  if (c.dynamicSmemBytes > (more ? static_cast<std::size_t>(*more) : shared_default)) return cudaErrorInvalidValue;
  for (unsigned i = 0; i < c.numAttrs; ++i) {
    switch (c.attrs[i].id) {
      case cudaLaunchAttributeCooperative:
        if (c.attrs[i].val.cooperative) return cudaErrorNotSupported;
        break;
      case cudaLaunchAttributeClusterDimension: return cudaErrorNotSupported;
      default: break;  // a hint
    }
  }
  return cudaSuccess;
}

// Runs the grid in stream order, unless a fault has broken its device before.
void queue_grid(machine& m, const std::shared_ptr<stream>& s, grid g, std::function<void()> body) {
  const auto failed = std::make_shared<std::optional<fault>>();
  cudaError_t& broken = m.devices[static_cast<std::size_t>(s->device)].broken;
  std::string name = g.name;
  m.push(
      s, name,
      [&m, &broken, on = s->device, failed, g = std::move(g), body = std::move(body)] {
        if (broken != cudaSuccess) return;
        m.conceal_peers(on, true);
        *failed = run_grid(g, body);
        m.conceal_peers(on, false);
      },
      {},
      [&m, &broken, failed, name] {
        if (*failed) {
          broken = (*failed)->code;
          m.blame((*failed)->text);
        }
        m.check_guards("kernel " + name);
      });
}

}  // namespace

cudaError_t launch(const void* kernel, const cudaLaunchConfig_t* config, std::size_t parameter_bytes,
                   std::function<void()> body) {
  call c;
  cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!kernel) return c.end(cudaErrorInvalidDeviceFunction);
  if (!config || (config->numAttrs != 0 && !config->attrs)) return c.end(cudaErrorInvalidValue);
  if (parameter_bytes > parameters_most) return c.end(cudaErrorInvalidValue);
  const std::shared_ptr<stream> s = c.m.find(config->stream);
  if (!s || s->device != me().device) return c.end(cudaErrorInvalidResourceHandle);
  code = check_config(c.m, kernel, *config);
  if (code != cudaSuccess) return c.end(code);
  if (c.m.launches_until_failure && --c.m.launches_until_failure == 0) return c.end(c.m.launch_failure);
  grid g{.name = name_of_kernel(kernel),
         .blocks = config->gridDim,
         .threads = config->blockDim,
         .dynamic_shared = config->dynamicSmemBytes,
         .shared_limit = granted(c.m, kernel) ? shared_most : shared_default,
         .seed = c.m.random.next(),
         .stream = s->nth,
         .patience = c.m.with.patience};
  queue_grid(c.m, s, std::move(g), std::move(body));
  return c.end(cudaSuccess);
}

cudaError_t enqueue(cudaStream_t stream, const char* name, std::function<void()> body) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  if (c.m.launches_until_failure && --c.m.launches_until_failure == 0) return c.end(c.m.launch_failure);
  grid g{.name = name,
         .seed = c.m.random.next(),
         .stream = s->nth,
         .patience = c.m.with.patience};
  queue_grid(c.m, s, std::move(g), std::move(body));
  return c.end(cudaSuccess);
}

cudaError_t enqueue_wait(cudaStream_t stream, const char* name, std::function<bool()> ready) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  c.m.push(s, name, [] {}, {}, {}, std::move(ready));
  return c.end(cudaSuccess);
}

}  // namespace emulated

using namespace emulated;

// ---- Errors

cudaError_t cudaGetLastError() {
  const call c(false);
  const cudaError_t last = std::exchange(me().last, cudaSuccess);
  const cudaError_t state = c.start();
  return last != cudaSuccess || state == cudaErrorNoDevice || state == cudaErrorNotPermitted ? last : state;
}
cudaError_t cudaPeekAtLastError() {
  const cudaError_t last = cudaGetLastError();
  return me().last = last;
}
const char* cudaGetErrorName(cudaError_t error) {
#define EMULATED_NAME(name, value, text) \
  if (error == name) return #name;
  EMULATED_CUDA_ERRORS(EMULATED_NAME)
#undef EMULATED_NAME
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
#define EMULATED_TEXT(name, value, text) \
  if (error == name) return text;
  EMULATED_CUDA_ERRORS(EMULATED_TEXT)
#undef EMULATED_TEXT
  return "unrecognized error code";
}

// ---- Devices

cudaError_t cudaGetDeviceCount(int* count) {
  call c(false);
  if (!count) return c.end(cudaErrorInvalidValue);
  *count = static_cast<int>(c.m.devices.size());
  return c.end(*count == 0 ? cudaErrorNoDevice : cudaSuccess);
}
cudaError_t cudaSetDevice(int device) {
  call c(false);
  if (me().in_item) return c.end(cudaErrorNotPermitted);
  if (c.m.devices.empty()) return c.end(cudaErrorNoDevice);
  if (no_device(c.m, device)) return c.end(cudaErrorInvalidDevice);
  me().device = device;
  return c.end(cudaSuccess);
}
cudaError_t cudaGetDevice(int* device) {
  call c(false);
  if (!device) return c.end(cudaErrorInvalidValue);
  if (c.m.devices.empty()) return c.end(cudaErrorNoDevice);
  *device = me().device;
  return c.end(cudaSuccess);
}
cudaError_t cudaDeviceSynchronize() {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  c.m.wait_for_device(me().device);
  return c.end(c.start());
}
cudaError_t cudaDeviceReset() {
  call c(false);
  if (me().in_item) return c.end(cudaErrorNotPermitted);
  if (c.m.devices.empty()) return c.end(cudaErrorNoDevice);
  const int on = me().device;
  c.m.wait_for_device(on);
  for (auto a = c.m.memory.begin(); a != c.m.memory.end();) {
    allocation& here = a->second;
    ++a;
    if (here.device == on && here.kind != memory_kind::registered) c.m.release(here);
  }
  c.m.forget_handles(on);
  device& own = own_device(c.m);
  own.broken = cudaSuccess;
  own.peers.clear();
  own.dynamic_shared.clear();
  own.pool = &own.own_pool;
  me().last = cudaSuccess;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  call c(false);
  if (!p) return c.end(cudaErrorInvalidValue);
  if (no_device(c.m, device)) return c.end(cudaErrorInvalidDevice);
  *p = {};
  std::snprintf(p->name, sizeof p->name, "Heddle emulated device %d", device);
  p->totalGlobalMem = c.m.with.memory_bytes;
  p->sharedMemPerBlock = shared_default;
  p->sharedMemPerBlockOptin = shared_most;
  p->sharedMemPerMultiprocessor = shared_most + 1024;
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 0x7fffffff;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = 9;
  p->textureAlignment = 512;
  p->multiProcessorCount = 4;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
  p->managedMemory = p->concurrentManagedAccess = p->hostRegisterSupported = p->memoryPoolsSupported = 1;
  p->pciBusID = device;
  p->asyncEngineCount = 2;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  return c.end(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (!value) {
    call c(false);
    return c.end(cudaErrorInvalidValue);
  }
  const cudaError_t code = cudaGetDeviceProperties(&p, device);
  if (code != cudaSuccess) return code;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *value = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[2]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
    case cudaDevAttrTotalConstantMemory: *value = static_cast<int>(p.totalConstMem); break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrConcurrentKernels: *value = p.concurrentKernels; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrUnifiedAddressing: *value = p.unifiedAddressing; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(p.sharedMemPerMultiprocessor); break;
    case cudaDevAttrManagedMemory: *value = p.managedMemory; break;
    case cudaDevAttrPageableMemoryAccess: *value = p.pageableMemoryAccess; break;
    case cudaDevAttrConcurrentManagedAccess: *value = p.concurrentManagedAccess; break;
    case cudaDevAttrCooperativeLaunch: *value = p.cooperativeLaunch; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMemoryPoolsSupported: *value = p.memoryPoolsSupported; break;
    case cudaDevAttrClusterLaunch: *value = p.clusterLaunch; break;
    default: {
      call c(false);
      return c.end(cudaErrorInvalidValue);
    }
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = priority_least;
  if (greatest) *greatest = priority_greatest;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  call c(false);
  if (!version) return c.end(cudaErrorInvalidValue);
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  call c(false);
  if (!can) return c.end(cudaErrorInvalidValue);
  if (no_device(c.m, device) || no_device(c.m, peer)) return c.end(cudaErrorInvalidDevice);
  *can = device != peer && c.m.with.peers;
  return c.end(cudaSuccess);
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  call c(false);
  if (flags != 0) return c.end(cudaErrorInvalidValue);
  if (no_device(c.m, peer) || peer == me().device) return c.end(cudaErrorInvalidDevice);
  if (!c.m.with.peers) return c.end(cudaErrorPeerAccessUnsupported);
  return c.end(own_device(c.m).peers.insert(peer).second ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled);
}
cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  call c(false);
  if (no_device(c.m, peer)) return c.end(cudaErrorInvalidDevice);
  return c.end(own_device(c.m).peers.erase(peer) ? cudaSuccess : cudaErrorPeerAccessNotEnabled);
}

// ---- Streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!stream || (flags & ~cudaStreamNonBlocking)) return c.end(cudaErrorInvalidValue);
  auto s = c.m.make_stream(me().device, flags, std::clamp(priority, priority_greatest, priority_least));
  *stream = new CUstream_st{std::move(s), ++c.m.made};
  c.m.streams.insert(*stream);
  return c.end(cudaSuccess);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

// Returns at once; what is in the stream still runs.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  call c;
  if (me().in_item) return c.end(cudaErrorNotPermitted);
  const auto found = c.m.streams.find(stream);
  if (found == c.m.streams.end()) return c.end(cudaErrorInvalidResourceHandle);
  c.m.streams.erase(found);
  c.m.destroy(stream);
  return c.end(cudaSuccess);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  c.m.ask(machine::end_of(s));  // asking again and again must end
  if (!machine::reached(machine::end_of(s))) return c.end(cudaErrorNotReady);
  c.m.wait_for(machine::end_of(s));
  return c.end(c.state(s->device));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  // The legacy default stream stands for the blocking streams too: what is pushed to it waits for them.
  c.m.wait_for(s == own_device(c.m).legacy ? c.m.push(s, "synchronize", [] {}) : machine::end_of(s));
  return c.end(c.state(s->device));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (flags != 0) return c.end(cudaErrorInvalidValue);
  const auto s = c.m.find(stream);
  if (!s || !c.m.events.count(event)) return c.end(cudaErrorInvalidResourceHandle);
  if (event->last) {
    // What is recorded now counts: a later record changes nothing.
    c.m.push(s, "wait for an event", [] {}, {event->last->at});
  }
  return c.end(cudaSuccess);
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  call c(false);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  if (!id) return c.end(cudaErrorInvalidValue);
  *id = s->id;
  return c.end(cudaSuccess);
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  call c(false);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  if (!flags) return c.end(cudaErrorInvalidValue);
  *flags = s->flags;
  return c.end(cudaSuccess);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  call c(false);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  if (!priority) return c.end(cudaErrorInvalidValue);
  *priority = s->priority;
  return c.end(cudaSuccess);
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  call c(false);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  if (!device) return c.end(cudaErrorInvalidValue);
  *device = s->device;
  return c.end(cudaSuccess);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  if (!function) return c.end(cudaErrorInvalidValue);
  c.m.push(s, "host function", [&m = c.m, function, data, on = s->device] {
    if (m.devices[static_cast<std::size_t>(on)].broken != cudaSuccess) return;  // unlike callbacks, CUDA says
    m.run_unlocked([=] { function(data); });
  });
  return c.end(cudaSuccess);
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned flags) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  if (!callback || flags != 0) return c.end(cudaErrorInvalidValue);
  c.m.push(s, "callback", [&m = c.m, callback, stream, data, on = s->device] {
    const cudaError_t state = m.devices[static_cast<std::size_t>(on)].broken;
    m.run_unlocked([=] { callback(stream, state, data); });
  });
  return c.end(cudaSuccess);
}

// Capture isn't emulated. The error differs from any that a real capture gives, and the reason is printed.
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  call c(false);
  std::fprintf(stderr, "emulated device: stream capture is not emulated\n");
  return c.end(cudaErrorNotSupported);
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  call c(false);
  if (graph) *graph = nullptr;
  return c.end(cudaErrorNotSupported);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  call c(false);
  if (!status) return c.end(cudaErrorInvalidValue);
  *status = cudaStreamCaptureStatusNone;
  return c.end(cudaSuccess);
}

// ---- Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  call c(false);
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  constexpr unsigned known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
  if (!event || (flags & ~known)) return c.end(cudaErrorInvalidValue);
  if ((flags & cudaEventInterprocess) && !(flags & cudaEventDisableTiming)) return c.end(cudaErrorInvalidValue);
  *event = new CUevent_st{me().device, flags, ++c.m.made, nullptr};
  c.m.events.insert(*event);
  return c.end(cudaSuccess);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

// Who waits for it already still does.
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  call c(false);
  if (me().in_item) return c.end(cudaErrorNotPermitted);
  if (!c.m.events.erase(event)) return c.end(cudaErrorInvalidResourceHandle);
  delete event;
  return c.end(cudaSuccess);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (flags != 0) return c.end(cudaErrorInvalidValue);
  const auto s = c.m.find(stream);
  if (!s || !c.m.events.count(event) || event->device != s->device) return c.end(cudaErrorInvalidResourceHandle);
  auto r = std::make_shared<recording>();
  r->at = c.m.push(s, "record an event", [] {}, {}, [r, &m = c.m] {
    r->done = true;
    r->milliseconds = m.now;
  });
  event->last = std::move(r);
  return c.end(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaEventQuery(cudaEvent_t event) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!c.m.events.count(event)) return c.end(cudaErrorInvalidResourceHandle);
  if (!event->last) return c.end(cudaSuccess);
  const std::shared_ptr<recording> last = event->last;
  const int on = event->device;
  c.m.ask(last->at);
  if (!last->done) return c.end(cudaErrorNotReady);
  c.m.wait_for(last->at);
  return c.end(c.state(on));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!c.m.events.count(event)) return c.end(cudaErrorInvalidResourceHandle);
  const int on = event->device;
  if (event->last) c.m.wait_for(event->last->at);
  return c.end(c.state(on));
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  call c(false);
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!milliseconds) return c.end(cudaErrorInvalidValue);
  for (cudaEvent_t e : {start, end}) {
    if (!c.m.events.count(e) || !e->last || (e->flags & cudaEventDisableTiming))
      return c.end(cudaErrorInvalidResourceHandle);
  }
  if (start->device != end->device) return c.end(cudaErrorInvalidResourceHandle);
  if (!start->last->done || !end->last->done) return c.end(cudaErrorNotReady);
  *milliseconds = static_cast<float>(end->last->milliseconds - start->last->milliseconds);
  return c.end(cudaSuccess);
}

// ---- Kernels

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  call c(false);
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!kernel) return c.end(cudaErrorInvalidDeviceFunction);
  switch (attribute) {
    case cudaFuncAttributeMaxDynamicSharedMemorySize:
      if (value < 0 || static_cast<std::size_t>(value) > shared_most) return c.end(cudaErrorInvalidValue);
      own_device(c.m).dynamic_shared[kernel] = value;
      return c.end(cudaSuccess);
    case cudaFuncAttributePreferredSharedMemoryCarveout:
      return c.end(value < -1 || value > 100 ? cudaErrorInvalidValue : cudaSuccess);
  }
  return c.end(cudaErrorInvalidValue);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  call c(false);
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!attributes) return c.end(cudaErrorInvalidValue);
  if (!kernel) return c.end(cudaErrorInvalidDeviceFunction);
  const int* const more = granted(c.m, kernel);
  *attributes = {0, 0, 0, bound_of(kernel), 32, 90, 90, 0, more ? *more : static_cast<int>(shared_default), -1};
  return c.end(cudaSuccess);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads,
                                                          std::size_t shared_bytes) {
  call c(false);
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!blocks || threads <= 0) return c.end(cudaErrorInvalidValue);
  if (!kernel) return c.end(cudaErrorInvalidDeviceFunction);
  const int warps = (threads + 31) / 32;
  *blocks = threads > bound_of(kernel) ? 0 : (std::min)(32, 64 / warps);
  *blocks = static_cast<int>(
      (std::min)(static_cast<std::size_t>(*blocks), (shared_most + 1024) / (shared_bytes + 1024)));
  return c.end(cudaSuccess);
}

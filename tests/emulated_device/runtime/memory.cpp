// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// The functions of cuda_runtime_api.h about memory: allocations, pools, copies.

#include "machine.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace emulated {
namespace {

bool no_device(const machine& m, int d) { return d < 0 || static_cast<std::size_t>(d) >= m.devices.size(); }

bool on_device(const allocation* a) { return a && (of_device_only(a->kind) || a->kind == memory_kind::managed); }

// What CUDA calls pageable: memory that it doesn't know.
bool pageable(machine& m, const void* p) { return m.find(p) == nullptr; }

cudaError_t make(void** pointer, std::size_t bytes, memory_kind kind) {
  call c;
  const cudaError_t code = c.start();
  return c.end(code != cudaSuccess ? code : c.m.allocate(pointer, bytes, kind, me().device));
}

cudaError_t check_kind(machine& m, const void* to, const void* from, cudaMemcpyKind kind) {
  const allocation *t = m.find(to), *f = m.find(from);
  switch (kind) {
    case cudaMemcpyHostToHost:
      return (t && of_device_only(t->kind)) || (f && of_device_only(f->kind)) ? cudaErrorInvalidValue : cudaSuccess;
    case cudaMemcpyHostToDevice:
      return !t || (f && of_device_only(f->kind)) ? cudaErrorInvalidValue : cudaSuccess;
    case cudaMemcpyDeviceToHost:
      return !f || (t && of_device_only(t->kind)) ? cudaErrorInvalidValue : cudaSuccess;
    case cudaMemcpyDeviceToDevice: return !t || !f ? cudaErrorInvalidValue : cudaSuccess;
    case cudaMemcpyDefault: return cudaSuccess;
  }
  return cudaErrorInvalidMemcpyDirection;
}

// Bytes from the first to the last of `height` rows, neither of which is empty; too many are all that there are.
std::size_t reach(std::size_t pitch, std::size_t width, std::size_t height) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(pitch, height - 1, &bytes) || __builtin_add_overflow(bytes, width, &bytes))
    return ~std::size_t{0};
  return bytes;
}

// Copies of rectangles; a plain copy is one row.
struct rectangle {
  void* to;
  std::size_t to_pitch;
  const void* from;
  std::size_t from_pitch;
  std::size_t width, height;

  void run() const {
    for (std::size_t row = 0; row < height; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  }
};

cudaError_t copy(const rectangle& r, cudaMemcpyKind kind, cudaStream_t handle, bool wait) {
  call c;
  cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const auto s = c.m.find(handle);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  if (r.width == 0 || r.height == 0) return c.end(cudaSuccess);
  if (!r.to || !r.from) return c.end(cudaErrorInvalidValue);
  if (r.to_pitch < r.width || r.from_pitch < r.width) return c.end(cudaErrorInvalidPitchValue);
  code = check_kind(c.m, r.to, r.from, kind);
  if (code == cudaSuccess) code = c.m.check_range(r.to, reach(r.to_pitch, r.width, r.height));
  if (code == cudaSuccess) code = c.m.check_range(r.from, reach(r.from_pitch, r.width, r.height));
  if (code != cudaSuccess) return c.end(code);
  const bool pages = pageable(c.m, r.to) || pageable(c.m, r.from);
  const bool to_device = on_device(c.m.find(r.to)), from_device = on_device(c.m.find(r.from));
  if (wait && to_device && pageable(c.m, r.from) && c.m.random.coin()) {
    // CUDA returns when it has read the source: what it has read may come to the device later.
    c.m.wait_for(c.m.push(s, "synchronize", [] {}));
    const auto staged = std::make_shared<std::vector<char>>(r.width * r.height);
    rectangle{staged->data(), r.width, r.from, r.from_pitch, r.width, r.height}.run();
    c.m.push(s, "copy", [r, staged] {
      rectangle{r.to, r.to_pitch, staged->data(), r.width, r.width, r.height}.run();
    });
    return c.end(c.state(s->device));
  }
  const point p = c.m.push(s, "copy", [r] { r.run(); });
  // A copy inside of the host always waits, one inside of a device needn't; asynchronous ones of pageable memory may.
  const bool inside_host = !to_device && !from_device, inside_device = to_device && from_device;
  if (inside_host || (wait && !inside_device) || ((wait || pages) && c.m.random.coin())) {
    c.m.wait_for(p);
    code = c.state(s->device);
  }
  return c.end(code);
}

cudaError_t set(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height, cudaStream_t handle,
                bool wait) {
  call c;
  cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const auto s = c.m.find(handle);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  if (width == 0 || height == 0) return c.end(cudaSuccess);
  if (!c.m.find(to)) return c.end(cudaErrorInvalidValue);
  if (height > 1 && pitch < width) return c.end(cudaErrorInvalidValue);
  code = c.m.check_range(to, reach(pitch, width, height));
  if (code != cudaSuccess) return c.end(code);
  const point p = c.m.push(s, "set", [=] {
    for (std::size_t row = 0; row < height; ++row) std::memset(static_cast<char*>(to) + row * pitch, value, width);
  });
  // CUDA's plain memset of device memory doesn't wait for it either.
  if (wait && !on_device(c.m.find(to))) c.m.wait_for(p);
  return c.end(c.state(s->device));
}

bool known(machine& m, cudaMemPool_t pool) {
  return m.pools.count(pool) || std::any_of(m.devices.begin(), m.devices.end(),
                                            [pool](const device& d) { return pool == &d.own_pool; });
}

// Without a pool, from the current one of the stream's device.
cudaError_t allocate_in_order(void** pointer, std::size_t bytes, std::optional<cudaMemPool_t> from, cudaStream_t handle) {
  call c;
  cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const auto s = c.m.find(handle);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  if (from && !known(c.m, *from)) return c.end(cudaErrorInvalidValue);
  const cudaMemPool_t pool = from ? *from : c.m.devices[static_cast<std::size_t>(s->device)].pool;
  if (pool->most && pool->used + bytes > pool->most) return c.end(cudaErrorMemoryAllocation);
  code = c.m.allocate(pointer, bytes, memory_kind::pooled, pool->device, pool);
  if (code != cudaSuccess || !*pointer) return c.end(code);
  pool->used += bytes;
  if (pool->used > pool->used_high) pool->used_high = pool->used;
  c.m.push(s, "allocate", [&m = c.m, p = *pointer, number = c.m.made] { m.bear(p, number); });
  return c.end(cudaSuccess);
}

}  // namespace

cudaError_t symbol_address(void** pointer, void* symbol, std::size_t bytes) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!pointer) return c.end(cudaErrorInvalidValue);
  if (!c.m.find(symbol)) c.m.adopt(symbol, bytes, memory_kind::symbol, me().device);
  *pointer = symbol;
  return c.end(cudaSuccess);
}

cudaError_t copy_symbol(void* symbol, std::size_t size, void* other, std::size_t bytes, std::size_t offset,
                        bool to_symbol, cudaStream_t stream, bool wait) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (offset > size || bytes > size - offset) return c.end(cudaErrorInvalidValue);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  char* const at = static_cast<char*>(symbol) + offset;
  const point p = c.m.push(s, "copy of a symbol", [=] {
    if (to_symbol)
      std::memcpy(at, other, bytes);
    else
      std::memcpy(other, at, bytes);
  });
  if (wait || (pageable(c.m, other) && c.m.random.coin())) c.m.wait_for(p);
  return c.end(c.start());
}

}  // namespace emulated

using namespace emulated;

// ---- Allocation

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  call c(false);
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const std::size_t used = c.m.devices[static_cast<std::size_t>(me().device)].used;
  if (free) *free = c.m.with.memory_bytes - (used < c.m.with.memory_bytes ? used : c.m.with.memory_bytes);
  if (total) *total = c.m.with.memory_bytes;
  return c.end(cudaSuccess);
}

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) { return make(pointer, bytes, memory_kind::device); }
cudaError_t cudaMallocHost(void** pointer, std::size_t bytes, unsigned) {
  return make(pointer, bytes, memory_kind::pinned);
}
cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned flags) {
  if (flags & ~(cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined)) {
    call c(false);
    return c.end(cudaErrorInvalidValue);
  }
  return make(pointer, bytes, memory_kind::pinned);
}
cudaError_t cudaMallocManaged(void** pointer, std::size_t bytes, unsigned flags) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (bytes == 0 || (flags != cudaMemAttachGlobal && flags != cudaMemAttachHost)) return c.end(cudaErrorInvalidValue);
  return c.end(c.m.allocate(pointer, bytes, memory_kind::managed, me().device));
}
cudaError_t cudaMallocPitch(void** pointer, std::size_t* pitch, std::size_t width, std::size_t height) {
  constexpr std::size_t step = 512;
  std::size_t bytes = 0;
  if (!pitch || width > ~std::size_t{0} - step ||
      __builtin_mul_overflow((width + step - 1) / step * step, height, &bytes)) {
    call c(false);
    return c.end(pitch ? cudaErrorMemoryAllocation : cudaErrorInvalidValue);
  }
  *pitch = (width + step - 1) / step * step;
  return cudaMalloc(pointer, bytes);
}

// Waits for the device, as CUDA does, but not for memory in stream order.
cudaError_t cudaFree(void* pointer) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!pointer) return c.end(cudaSuccess);
  allocation* a = c.m.find_start(pointer);
  if (!a || !a->alive || !on_device(a) || a->kind == memory_kind::symbol) return c.end(cudaErrorInvalidValue);
  if (a->kind != memory_kind::pooled) c.m.wait_for_device(a->device);
  return c.end(c.m.release_start(pointer) ? c.start() : cudaErrorInvalidValue);
}
cudaError_t cudaFreeHost(void* pointer) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!pointer) return c.end(cudaSuccess);
  allocation* a = c.m.find_start(pointer);
  if (!a || a->kind != memory_kind::pinned) return c.end(cudaErrorInvalidValue);
  c.m.wait_for_device(a->device);
  return c.end(c.m.release_start(pointer) ? c.start() : cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned flags) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!pointer || bytes == 0 || (flags & ~(cudaHostRegisterPortable | cudaHostRegisterMapped)))
    return c.end(cudaErrorInvalidValue);
  const auto next = c.m.memory.lower_bound(static_cast<char*>(pointer));
  if (c.m.find(pointer) || (next != c.m.memory.end() && next->first < static_cast<char*>(pointer) + bytes))
    return c.end(cudaErrorHostMemoryAlreadyRegistered);
  c.m.adopt(pointer, bytes, memory_kind::registered, me().device);
  return c.end(cudaSuccess);
}
cudaError_t cudaHostUnregister(void* pointer) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  allocation* a = c.m.find_start(pointer);
  if (!a || a->kind != memory_kind::registered) return c.end(cudaErrorHostMemoryNotRegistered);
  c.m.release(*a);
  return c.end(cudaSuccess);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  call c(false);
  const allocation* a = c.m.find(host);
  if (!device || flags != 0 || !a || on_device(a)) return c.end(cudaErrorInvalidValue);
  *device = host;
  return c.end(cudaSuccess);
}

cudaError_t cudaMemPrefetchAsync(const void* pointer, std::size_t bytes, cudaMemLocation location, unsigned flags,
                                 cudaStream_t stream) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const allocation* a = c.m.find(pointer);
  if (!a || a->kind != memory_kind::managed || bytes == 0 || flags != 0) return c.end(cudaErrorInvalidValue);
  if (location.type == cudaMemLocationTypeDevice && no_device(c.m, location.id)) return c.end(cudaErrorInvalidDevice);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  const cudaError_t inside = c.m.check_range(pointer, bytes);
  if (inside == cudaSuccess) c.m.push(s, "prefetch", [] {});
  return c.end(inside);
}
cudaError_t cudaMemAdvise(const void* pointer, std::size_t bytes, cudaMemoryAdvise, cudaMemLocation) {
  call c(false);
  const allocation* a = c.m.find(pointer);
  if (!a || a->kind != memory_kind::managed || bytes == 0) return c.end(cudaErrorInvalidValue);
  return c.end(c.m.check_range(pointer, bytes));
}

// ---- Stream order

cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t stream) {
  return allocate_in_order(pointer, bytes, std::nullopt, stream);
}
cudaError_t cudaMallocFromPoolAsync(void** pointer, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  return allocate_in_order(pointer, bytes, pool, stream);
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  const auto s = c.m.find(stream);
  if (!s) return c.end(cudaErrorInvalidResourceHandle);
  if (!pointer) return c.end(cudaSuccess);
  allocation* a = c.m.find_start(pointer);
  if (!a || !a->alive || (a->kind != memory_kind::pooled && a->kind != memory_kind::device))
    return c.end(cudaErrorInvalidValue);
  a->alive = false;
  c.m.push(s, "free", [&m = c.m, pointer] {
    m.release_start(pointer);
  });
  return c.end(cudaSuccess);
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* p) {
  call c(false);
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  if (!pool || !p || p->allocType != cudaMemAllocationTypePinned) return c.end(cudaErrorInvalidValue);
  if (p->location.type != cudaMemLocationTypeDevice || no_device(c.m, p->location.id))
    return c.end(cudaErrorInvalidValue);
  *pool = new CUmemPoolHandle_st{p->location.id, ++c.m.made, 0, 0, 0, p->maxSize, {1, 1, 1}, {}};
  c.m.pools.insert(*pool);
  return c.end(cudaSuccess);
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  call c(false);
  if (me().in_item) return c.end(cudaErrorNotPermitted);
  if (!c.m.pools.erase(pool)) return c.end(cudaErrorInvalidValue);
  for (device& d : c.m.devices)
    if (d.pool == pool) d.pool = &d.own_pool;
  for (auto& [begin, a] : c.m.memory)
    if (a.pool == pool) a.pool = nullptr;  // lives on
  delete pool;
  return c.end(cudaSuccess);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  call c(false);
  if (!known(c.m, pool) || !value) return c.end(cudaErrorInvalidValue);
  switch (attribute) {
    case cudaMemPoolReuseFollowEventDependencies:
    case cudaMemPoolReuseAllowOpportunistic:
    case cudaMemPoolReuseAllowInternalDependencies:
      pool->reuse[attribute - cudaMemPoolReuseFollowEventDependencies] = *static_cast<int*>(value);
      return c.end(cudaSuccess);
    case cudaMemPoolAttrReleaseThreshold:
      pool->release_threshold = *static_cast<std::uint64_t*>(value);
      return c.end(cudaSuccess);
    case cudaMemPoolAttrUsedMemHigh:
    case cudaMemPoolAttrReservedMemHigh:
      if (*static_cast<std::uint64_t*>(value) != 0) return c.end(cudaErrorInvalidValue);
      pool->used_high = pool->used;
      return c.end(cudaSuccess);
    default: return c.end(cudaErrorInvalidValue);
  }
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  call c(false);
  if (!known(c.m, pool) || !value) return c.end(cudaErrorInvalidValue);
  std::uint64_t& number = *static_cast<std::uint64_t*>(value);
  switch (attribute) {
    case cudaMemPoolReuseFollowEventDependencies:
    case cudaMemPoolReuseAllowOpportunistic:
    case cudaMemPoolReuseAllowInternalDependencies:
      *static_cast<int*>(value) = pool->reuse[attribute - cudaMemPoolReuseFollowEventDependencies];
      break;
    case cudaMemPoolAttrReleaseThreshold: number = pool->release_threshold; break;
    case cudaMemPoolAttrUsedMemCurrent:
    case cudaMemPoolAttrReservedMemCurrent: number = pool->used; break;
    case cudaMemPoolAttrUsedMemHigh:
    case cudaMemPoolAttrReservedMemHigh: number = pool->used_high; break;
    default: return c.end(cudaErrorInvalidValue);
  }
  return c.end(cudaSuccess);
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t) {
  call c(false);
  return c.end(known(c.m, pool) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* list, std::size_t count) {
  call c(false);
  if (!known(c.m, pool) || (count && !list)) return c.end(cudaErrorInvalidValue);
  for (std::size_t i = 0; i < count; ++i)
    if (no_device(c.m, list[i].location.id)) return c.end(cudaErrorInvalidDevice);
  for (std::size_t i = 0; i < count; ++i) {
    pool->readers.erase(list[i].location.id);
    if (list[i].flags != cudaMemAccessFlagsProtNone) pool->readers.insert(list[i].location.id);
  }
  return c.end(cudaSuccess);
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  call c(false);
  if (!pool) return c.end(cudaErrorInvalidValue);
  if (no_device(c.m, device)) return c.end(cudaErrorInvalidDevice);
  *pool = &c.m.devices[static_cast<std::size_t>(device)].own_pool;
  return c.end(cudaSuccess);
}
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  call c(false);
  if (!pool) return c.end(cudaErrorInvalidValue);
  if (no_device(c.m, device)) return c.end(cudaErrorInvalidDevice);
  *pool = c.m.devices[static_cast<std::size_t>(device)].pool;
  return c.end(cudaSuccess);
}
cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool) {
  call c(false);
  if (no_device(c.m, device)) return c.end(cudaErrorInvalidDevice);
  if (!known(c.m, pool) || pool->device != device) return c.end(cudaErrorInvalidValue);
  c.m.devices[static_cast<std::size_t>(device)].pool = pool;
  return c.end(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  call c(false);
  if (!attributes) return c.end(cudaErrorInvalidValue);
  const allocation* a = c.m.find(pointer);
  void* const p = const_cast<void*>(pointer);
  if (!a)
    *attributes = {cudaMemoryTypeUnregistered, cudaInvalidDeviceId, nullptr, p};
  else if (a->kind == memory_kind::managed)
    *attributes = {cudaMemoryTypeManaged, a->device, p, p};
  else if (on_device(a))
    *attributes = {cudaMemoryTypeDevice, a->device, p, nullptr};
  else
    *attributes = {cudaMemoryTypeHost, a->device, p, p};
  return c.end(cudaSuccess);
}

// ---- Copies

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return copy({to, bytes, from, bytes, bytes, 1}, kind, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy({to, bytes, from, bytes, bytes, 1}, kind, stream, false);
}
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                         std::size_t height, cudaMemcpyKind kind) {
  return copy({to, to_pitch, from, from_pitch, width, height}, kind, nullptr, true);
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy({to, to_pitch, from, from_pitch, width, height}, kind, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                                cudaStream_t stream) {
  {
    call c(false);
    if (no_device(c.m, to_device) || no_device(c.m, from_device)) return c.end(cudaErrorInvalidDevice);
    const allocation *t = c.m.find(to), *f = c.m.find(from);
    if (bytes != 0 && (!on_device(t) || !on_device(f) || t->device != to_device || f->device != from_device))
      return c.end(cudaErrorInvalidValue);
  }
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
// Serialized with all pending and future work of three devices: the current one and the two that are named.
cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device, std::size_t bytes) {
  call c;
  const cudaError_t code = c.start();
  if (code != cudaSuccess) return c.end(code);
  for (const int device : {me().device, to_device, from_device})
    if (!no_device(c.m, device)) c.m.wait_for_device(device);
  const cudaError_t copied = cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, nullptr);
  if (copied != cudaSuccess) return copied;
  c.m.wait_for_device(me().device);
  return c.end(c.start());
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) { return set(to, bytes, value, bytes, 1, nullptr, true); }
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return set(to, bytes, value, bytes, 1, stream, false);
}
cudaError_t cudaMemset2D(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height) {
  return set(to, pitch, value, width, height, nullptr, true);
}
cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height,
                              cudaStream_t stream) {
  return set(to, pitch, value, width, height, stream, false);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// CUDA's resources, and the order of streams over them.

// CCCL's own concepts, where there is CCCL: not on the emulated device.
#if __has_include(<cuda/memory_resource>)
#define LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE
#include <cuda/memory_resource>
#define HEDDLE_TEST_CCCL 1
#endif

#include <heddle/memory/any_resource.hpp>
#include <heddle/memory/arena.hpp>
#include <heddle/memory/binning.hpp>
#include <heddle/memory/cuda_async.hpp>
#include <heddle/memory/cuda_memory.hpp>
#include <heddle/memory/cuda_mr.hpp>
#include <heddle/memory/fallback.hpp>
#include <heddle/memory/limiting.hpp>
#include <heddle/memory/planned.hpp>
#include <heddle/memory/pool.hpp>
#include <heddle/memory/queue_pool.hpp>
#include <heddle/memory/tracking.hpp>

#include "conformance.hpp"

#include <algorithm>
#include <cstring>

namespace hd = heddle;

namespace memory_test {

using queue = hd::cuda_order::queue;

class stream {
 public:
  stream() { hd::detail::check_cuda("stream", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  stream(const stream&) = delete;
  ~stream() {
    static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  operator queue() const { return {stream_}; }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

void set(void* p, unsigned char value, std::size_t bytes, queue q) {
  hd::detail::check_cuda("set", cudaMemsetAsync(p, value, bytes, q.stream));
}
void copy(void* to, const void* from, std::size_t bytes, queue q) {
  hd::detail::check_cuda("copy", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, q.stream));
}

// Page-locked bytes that streams write results to.
struct results {
  explicit results(std::size_t n) : bytes(n), data(static_cast<unsigned char*>(from.allocate_sync(n, 64))) {
    std::fill_n(data, n, static_cast<unsigned char>(0));
  }
  results(const results&) = delete;
  ~results() { from.deallocate_sync(data, bytes, 64); }
  bool all(std::size_t begin, std::size_t n, unsigned char value) const {
    return std::all_of(data + begin, data + begin + n, [=](unsigned char c) { return c == value; });
  }
  hd::cuda_pinned from{};
  std::size_t bytes;
  unsigned char* data;
};

template <class Resource> void obeys_the_rules(Resource r) {
  heddle_test::by_queue<Resource, queue> calls{r, queue{}};
  heddle_test::obeys_the_rules(calls);
  heddle_test::at_once<Resource> sync{r};
  heddle_test::obeys_the_rules(sync);
}

}  // namespace memory_test

using namespace memory_test;

TEST_CASE("memory: CUDA's resources conform") {
  heddle_test::conforms_to_resource([] { return hd::cuda_pinned{}; }, queue{});
  heddle_test::conforms_to_resource([] { return hd::cuda_managed{}; }, queue{});
  heddle_test::conforms_to_resource([] { return hd::queue_pool{hd::cuda_order{}, hd::cuda_pinned{}}; }, queue{});
  obeys_the_rules(hd::cuda_device{});
  obeys_the_rules(hd::cuda_async{});
  obeys_the_rules(hd::queue_pool{hd::cuda_order{}, hd::cuda_device{}, {.max = 1 << 20}});
  obeys_the_rules(hd::any_resource<queue>{hd::tracking{hd::cuda_device{}}});
  obeys_the_rules(hd::arena{hd::cuda_device{}, 10000});
  obeys_the_rules(hd::binning{hd::cuda_device{}, {.smallest = 100, .largest = 3000, .chunk = 5000}, hd::cuda_order{}});
  static_assert(!hd::has_allocate<hd::binning<hd::cuda_device>, queue>);  // without the order of streams
  static_assert(hd::resource<hd::fallback<hd::cuda_device, hd::cuda_pinned>, queue>);
}

TEST_CASE("memory: what the device can't give is refused with its figures") {
  const std::size_t too_much = std::size_t{1} << 50;
  std::size_t left = 0, all = 0;
  REQUIRE(cudaMemGetInfo(&left, &all) == cudaSuccess);
  hd::cuda_async limited{{.max = std::size_t{1} << 26}};
  const auto refusal = [&](auto&& resource) {
    try {
      resource.allocate_sync(too_much, 256);
    } catch (const hd::memory_error& e) {
      CHECK(e.requested() == too_much);
      return e;
    }
    throw std::runtime_error("a pebibyte was given");
  };
  CHECK(refusal(hd::cuda_device{}).limit() == all);
  CHECK(refusal(hd::cuda_device{}).largest_free() + refusal(hd::cuda_device{}).in_use() == all);
  hd::cuda_pinned pinned;
  void* const some = pinned.allocate_sync(1000, 4096);
  CHECK(std::string(refusal(pinned).what()) ==
        "heddle::cuda_pinned: can't allocate 1125899906842624 bytes (in use 1000)");
  pinned.deallocate_sync(some, 1000, 4096);
  CHECK(refusal(pinned).in_use() == 0);
  CHECK(refusal(hd::cuda_async{}).limit() == all);
  CHECK(refusal(limited).limit() == std::size_t{1} << 26);
  CHECK(refusal(hd::queue_pool{hd::cuda_order{}, hd::cuda_device{}}).in_use() == 0);
  CHECK(cudaGetLastError() == cudaSuccess);  // nothing is left behind
}

TEST_CASE("memory: pinned host memory stands in where the device has none") {
  stream q;
  results r(1 << 17);
  hd::fallback memory{hd::limiting{hd::cuda_device{}, 1 << 16}, hd::cuda_pinned{}};
  void* const on_device = memory.allocate(queue{q}, 50000, 256);
  void* const on_host = memory.allocate(queue{q}, 50000, 256);
  CHECK(memory.fallen_back() == 1);
  cudaPointerAttributes about{};
  REQUIRE(cudaPointerGetAttributes(&about, on_device) == cudaSuccess);
  CHECK(about.type == cudaMemoryTypeDevice);
  REQUIRE(cudaPointerGetAttributes(&about, on_host) == cudaSuccess);
  CHECK(about.type == cudaMemoryTypeHost);
  set(on_device, 1, 50000, q);
  copy(on_host, on_device, 50000, q);
  copy(r.data, on_host, 50000, q);
  memory.deallocate(queue{q}, on_device, 50000, 256);
  memory.deallocate(queue{q}, on_host, 50000, 256);
  CHECK(memory.fallen_back() == 0);
  queue{q}.synchronize();
  CHECK(r.all(0, 50000, 1));
}

TEST_CASE("memory: cuda_async gives memory in stream order") {
  hd::cuda_async memory;
  CHECK(memory == hd::cuda_async{memory});
  CHECK_FALSE(memory == hd::cuda_async{});
  stream a, b;
  results r(9000);
  void* const p = memory.allocate(a, 1000, 4096);
  set(p, 3, 1000, a);
  copy(r.data, p, 1000, a);
  memory.deallocate(a, p, 1000, 4096);
  for (unsigned char k = 1; k <= 8; ++k) {
    void* const now = memory.allocate_sync(1000, 256);  // at once, on any stream
    CHECK(memory.in_use() >= 1000);
    set(now, static_cast<unsigned char>(k + 3), 1000, b);
    set(r.data + 1000 * k, 0, 1000, b);
    copy(r.data + 1000 * k, now, 1000, b);
    queue{b}.synchronize();
    memory.deallocate_sync(now, 1000, 256);
  }
  queue{a}.synchronize();
  memory.trim();
  CHECK(memory.in_use() == 0);
  CHECK(memory.held() == 0);
  for (unsigned char k = 0; k <= 8; ++k) CHECK(r.all(1000u * k, 1000, static_cast<unsigned char>(k + 3)));
}

TEST_CASE("memory: of three streams in turn, each waits for the one before", "[seeds]") {
  stream a, b, c;
  results r(3 * 4096);
  hd::queue_pool memory{hd::cuda_order{}, hd::cuda_device{}, {.initial = 4096, .max = 4096}};
  void* last = nullptr;
  unsigned char value = 1;
  for (const queue q : {queue{a}, queue{b}, queue{c}}) {
    void* const x = memory.allocate(q, 4096, 256);
    CHECK((last == nullptr || x == last));
    last = x;
    set(x, value, 4096, q);
    copy(r.data + 4096 * (value - 1), x, 4096, q);  // given back while this still reads
    memory.deallocate(q, x, 4096, 256);
    ++value;
  }
  for (const queue q : {queue{a}, queue{b}, queue{c}}) q.synchronize();
  for (unsigned char k = 0; k < 3; ++k) CHECK(r.all(4096u * k, 4096, static_cast<unsigned char>(k + 1)));
}

TEST_CASE("memory: a buffer that a collective works on is not the compute stream's before its event", "[seeds]") {
  stream compute, communication;
  results r(2 * 2048);
  hd::queue_pool memory{hd::cuda_order{}, hd::cuda_device{}, {.initial = 4096, .max = 4096}};
  void* const gradient = memory.allocate(compute, 2048, 256);
  void* const other = memory.allocate(compute, 2048, 256);
  set(gradient, 7, 2048, compute);
  hd::cuda_order::event made;
  made.record(compute);
  queue{communication}.wait(made);
  copy(r.data, gradient, 2048, communication);  // stands for the collective
  memory.deallocate(communication, gradient, 2048, 256);
  memory.deallocate(compute, other, 2048, 256);
  void* const next = memory.allocate(compute, 4096, 256);  // both, joined
  set(next, 9, 4096, compute);
  copy(r.data + 2048, next, 2048, compute);
  memory.deallocate(compute, next, 4096, 256);
  queue{communication}.synchronize();
  queue{compute}.synchronize();
  CHECK(r.all(0, 2048, 7));
  CHECK(r.all(2048, 2048, 9));
}

namespace memory_test {

// Random work of three streams on random blocks.
template <class Memory> void whatever_streams_do(Memory memory, unsigned seed) {
  std::mt19937 random(seed);
  constexpr std::size_t count = 200, most = 256;
  stream streams[3];
  results r(count * most);
  struct piece {
    void* p;
    std::size_t bytes, number;
    unsigned on;
  };
  std::vector<piece> held;
  std::vector<std::size_t> sizes;
  const auto end = [&](std::size_t k) {
    piece x = held[k];
    const unsigned on = random() % 4 ? x.on : static_cast<unsigned>(random() % 3);
    hd::cuda_order::event done;
    if (on != x.on) {
      done.record(streams[x.on]);
      queue{streams[on]}.wait(done);
    }
    copy(r.data + x.number * most, x.p, x.bytes, streams[on]);
    if (random() % 10 == 0) {
      queue{streams[on]}.synchronize();
      memory.deallocate_sync(x.p, x.bytes, 64);
    } else {
      memory.deallocate(streams[on], x.p, x.bytes, 64);
    }
    held[k] = held.back();
    held.pop_back();
  };
  while (sizes.size() < count) {
    const std::size_t bytes = 1 + random() % most;
    const auto on = static_cast<unsigned>(random() % 3);
    void* p = nullptr;
    try {
      p = random() % 10 ? memory.allocate(streams[on], bytes, 64) : memory.allocate_sync(bytes, 64);
    } catch (const hd::memory_error&) {
      end(random() % held.size());
      continue;
    }
    set(p, static_cast<unsigned char>(1 + sizes.size()), bytes, streams[on]);
    held.push_back({p, bytes, sizes.size(), on});
    sizes.push_back(bytes);
    if (random() % 2) end(random() % held.size());
  }
  while (!held.empty()) end(held.size() - 1);
  for (const queue q : streams) q.synchronize();
  std::size_t spoiled = 0;
  for (std::size_t i = 0; i < count; ++i) spoiled += !r.all(i * most, sizes[i], static_cast<unsigned char>(1 + i));
  CHECK(spoiled == 0);
  CHECK(memory.in_use() == 0);
}

}  // namespace memory_test

TEST_CASE("memory: no block is used again before the work on it, whatever streams do", "[seeds]") {
  for (unsigned round = 0; round < 4; ++round) {
    hd::queue_pool memory{hd::cuda_order{},
                          hd::tracking{hd::cuda_device{}},
                          {.initial = 1024 * (round % 2), .max = 4096, .growth = 512 * round}};
    whatever_streams_do(memory, round);
    CHECK(memory.refused() == 0);
  }
  hd::limiting limited{hd::cuda_device{}, 6 * 1024};  // four bins
  whatever_streams_do(hd::binning{limited, {.smallest = 32, .largest = 256, .chunk = 1024}, hd::cuda_order{}}, 4);
}

TEST_CASE("memory: an arena on a stream", "[seeds]") {
  stream q;
  results r(8 * 1500);
  hd::tracking upstream{hd::cuda_async{}};
  {
    hd::arena memory{upstream, 1};
    for (unsigned k = 0; k < 8; ++k) {  // one block after the other in one place, then in two chunks
      const auto value = static_cast<unsigned char>(1 + k);
      void* const a = memory.allocate(queue{q}, 1500, 256);
      void* const b = k < 4 ? nullptr : memory.allocate(queue{q}, 5000, 256);
      set(a, value, 1500, q);
      if (b) copy(b, a, 1500, q);
      copy(r.data + 1500 * k, b ? b : a, 1500, q);
      memory.deallocate(queue{q}, a, 1500, 256);
      memory.deallocate(queue{q}, b, 5000, 256);
    }
    queue{q}.synchronize();
  }
  CHECK(upstream.bytes() == 0);
  for (unsigned k = 0; k < 8; ++k) CHECK(r.all(1500u * k, 1500, static_cast<unsigned char>(1 + k)));
}

TEST_CASE("memory: a planned step on a stream", "[seeds]") {
  stream q;
  results r(6 * 4 * 1000);
  hd::tracking upstream{hd::cuda_async{}};
  hd::planned memory{upstream};
  std::size_t recorded = 0;
  for (unsigned step = 0; step < 6; ++step) {
    memory.begin_step(queue{q});
    CHECK(memory.replaying() == (step != 0 && step != 4));
    upstream.deallocate_sync(upstream.allocate_sync(64, 64), 64, 64);  // what the upstream has to do is done
    // The fourth step deviates, the fifth is recorded, and the sixth has a larger block, while work on the first may
    // wait.
    const std::size_t most = step < 3 ? 700 : 1000;
    for (unsigned k = 0; k < 4; ++k) {
      const auto value = static_cast<unsigned char>(1 + 4 * step + k);
      void* const a = memory.allocate(queue{q}, most, 256);
      void* const b = memory.allocate(queue{q}, most, 256);
      set(a, value, most, q);
      copy(b, a, most, q);
      memory.deallocate(queue{q}, a, most, 256);
      void* const c = memory.allocate(queue{q}, most / 2, 256);  // where `a` was, while it is still copied
      set(c, 0, most / 2, q);
      copy(r.data + 1000 * (4 * step + k), b, most, q);
      memory.deallocate(queue{q}, c, most / 2, 256);
      memory.deallocate(queue{q}, b, most, 256);
    }
    if (step == 0) recorded = upstream.allocations();
    if (step == 2) CHECK(upstream.allocations() == recorded + 3);  // the plan's block, and twice the 64 bytes above
  }
  CHECK(memory.deviations() == 1);
  queue{q}.synchronize();
  for (std::size_t i = 0; i < 24; ++i) CHECK(r.all(1000 * i, i < 12 ? 700 : 1000, static_cast<unsigned char>(1 + i)));
}

namespace memory_test {

// What RMM publishes: its stream, and its references of both generations, here to one resource and not to any.
struct rmm_stream {
  rmm_stream(cudaStream_t s) : stream(s) {}
  operator cudaStream_t() const { return stream; }
  cudaStream_t stream;
};
struct cccl_stream {
  cccl_stream(cudaStream_t s) : stream(s) {}
  cudaStream_t get() const { return stream; }
  cudaStream_t stream;
};
template <class Resource, class Stream> struct older_ref {
  Resource* to;
  void* allocate(std::size_t bytes, std::size_t alignment) { return to->allocate(bytes, alignment); }
  void deallocate(void* p, std::size_t bytes, std::size_t alignment) { to->deallocate(p, bytes, alignment); }
  void* allocate_async(std::size_t bytes, std::size_t alignment, Stream s) {
    return to->allocate_async(bytes, alignment, s);
  }
  void deallocate_async(void* p, std::size_t bytes, std::size_t alignment, Stream s) {
    to->deallocate_async(p, bytes, alignment, s);
  }
  friend bool operator==(const older_ref&, const older_ref&) = default;
};
template <class Resource, class Stream> struct newer_ref {
  Resource* to;
  void* allocate_sync(std::size_t bytes, std::size_t alignment) { return to->allocate_sync(bytes, alignment); }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    to->deallocate_sync(p, bytes, alignment);
  }
  void* allocate(Stream s, std::size_t bytes, std::size_t alignment) { return to->allocate(s, bytes, alignment); }
  void deallocate(Stream s, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    to->deallocate(s, p, bytes, alignment);
  }
  friend bool operator==(const newer_ref&, const newer_ref&) = default;
};

// As CCCL after 3.0 words its concepts.
template <class R>
concept synchronous_resource = std::equality_comparable<R> && requires(R& r, void* p, std::size_t n) {
  { r.allocate_sync(n, n) } -> std::same_as<void*>;
  { r.deallocate_sync(p, n, n) } noexcept -> std::same_as<void>;
};
template <class R, class Stream>
concept stream_resource = synchronous_resource<R> && requires(R& r, Stream s, void* p, std::size_t n) {
  { r.allocate(s, n, n) } -> std::same_as<void*>;
  { r.deallocate(s, p, n, n) } noexcept -> std::same_as<void>;
};

// Takes no heed of alignments, as RMM's cuda_memory_resource doesn't, and throws what the standard does.
struct careless {
  hd::tracking<hd::cuda_device> from{};
  void* allocate_sync(std::size_t bytes, std::size_t) {
    if (bytes > 1 << 20) throw std::bad_alloc();
    return from.allocate_sync(bytes, 256);
  }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t) noexcept { from.deallocate_sync(p, bytes, 256); }
  void* allocate(cudaStream_t, std::size_t bytes, std::size_t a) { return allocate_sync(bytes, a); }
  void deallocate(cudaStream_t, void* p, std::size_t bytes, std::size_t a) noexcept { deallocate_sync(p, bytes, a); }
};

// Resources without streams, of both generations.
struct newer_sync {
  void* allocate_sync(std::size_t bytes, std::size_t a) { return from.allocate_sync(bytes, a); }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t a) noexcept { from.deallocate_sync(p, bytes, a); }
  hd::pool<hd::cuda_pinned> from{};
};
struct older_sync {
  void* allocate(std::size_t bytes, std::size_t a) { return from.allocate_sync(bytes, a); }
  void deallocate(void* p, std::size_t bytes, std::size_t a) noexcept { from.deallocate_sync(p, bytes, a); }
  hd::pool<hd::cuda_pinned> from{};
};

struct on_device {};
using bridged_pool = hd::cuda_mr_over<hd::queue_pool<hd::cuda_order, hd::cuda_device>, on_device>;
static_assert(stream_resource<bridged_pool, cccl_stream> && stream_resource<bridged_pool, rmm_stream>);
template <class Property>
concept bridged_has = requires(const bridged_pool& r, Property p) { get_property(r, p); };
static_assert(bridged_has<on_device> && !bridged_has<int>);
using without_streams = hd::cuda_mr_over<hd::pool<hd::cuda_pinned>>;
static_assert(synchronous_resource<without_streams> && !stream_resource<without_streams, rmm_stream>);

#ifdef HEDDLE_TEST_CCCL
using device = cuda::mr::device_accessible;
using both = hd::cuda_mr_over<hd::fallback<hd::cuda_managed, hd::cuda_pinned>, device, cuda::mr::host_accessible>;
static_assert(cuda::mr::async_resource_with<both, device, cuda::mr::host_accessible>);
static_assert(cuda::mr::resource_with<both, device, cuda::mr::host_accessible>);
static_assert(!cuda::mr::resource_with<hd::cuda_mr_over<hd::cuda_device, device>, cuda::mr::host_accessible>);
static_assert(stream_resource<both, cuda::stream_ref>);
static_assert(cuda::mr::resource_with<hd::cuda_mr_over<hd::pool<hd::cuda_pinned>, cuda::mr::host_accessible>,
                                      cuda::mr::host_accessible>);
static_assert(hd::resource<hd::from_cuda_mr<cuda::mr::resource_ref<cuda::mr::host_accessible>>, queue>);
static_assert(hd::resource<hd::from_cuda_mr<cuda::mr::async_resource_ref<device>>, queue>);
#endif

}  // namespace memory_test

TEST_CASE("memory: what has no streams gets memory back after the work on it", "[seeds]") {
  stream q;
  results r(4 * 1000);
  hd::from_cuda_mr memory{newer_sync{}};
  for (unsigned k = 0; k < 4; ++k) {
    void* const p = memory.allocate(queue{q}, 1000, 64);
    set(p, static_cast<unsigned char>(1 + k), 1000, q);
    copy(r.data + 1000 * k, p, 1000, q);
    memory.deallocate(queue{q}, p, 1000, 64);
    std::memset(memory.allocate_sync(1000, 64), 99, 1000);  // at the same place, at once
  }
  queue{q}.synchronize();
  for (unsigned k = 0; k < 4; ++k) CHECK(r.all(1000u * k, 1000, static_cast<unsigned char>(1 + k)));
}

TEST_CASE("memory: a resource of ours under the names of cuda::mr, and back") {
  stream q;
  hd::tracking below{hd::cuda_device{}};
  {
    bridged_pool over{hd::queue_pool{hd::cuda_order{}, hd::cuda_device{}, {.max = 1 << 20}}};
    CHECK(over == bridged_pool{over});
    obeys_the_rules(hd::from_cuda_mr{older_ref<bridged_pool, rmm_stream>{&over}});
    obeys_the_rules(hd::from_cuda_mr{older_ref<bridged_pool, cccl_stream>{&over}});
    obeys_the_rules(hd::from_cuda_mr{newer_ref<bridged_pool, rmm_stream>{&over}});
    obeys_the_rules(hd::from_cuda_mr{newer_ref<bridged_pool, cccl_stream>{&over}});
    obeys_the_rules(hd::from_cuda_mr{over});
    obeys_the_rules(hd::from_cuda_mr{newer_sync{}});
    obeys_the_rules(hd::from_cuda_mr{older_sync{}});
    obeys_the_rules(hd::from_cuda_mr{without_streams{hd::pool{hd::cuda_pinned{}}}});
#ifdef HEDDLE_TEST_CCCL
    hd::cuda_mr_over<hd::cuda_device, device> plain{hd::cuda_device{}};
    obeys_the_rules(hd::from_cuda_mr{cuda::mr::async_resource_ref<device>{plain}});
#endif
    obeys_the_rules(hd::from_cuda_mr{careless{below}});
  }
  CHECK(below.live() == 0);
  CHECK(below.bytes() == 0);  // what was taken for an alignment went back with its size
}

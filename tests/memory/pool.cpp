// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/memory/pool.hpp>
#include <heddle/memory/tracking.hpp>

#include "conformance.hpp"

#include <map>

namespace hd = heddle;

namespace {
constexpr std::size_t mebi = std::size_t{1} << 20;

/// An upstream that refuses single requests above a size; counts nothing.
struct stingy {
  std::size_t most;
  hd::host_resource upstream{};
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    if (bytes > most) throw hd::memory_error("stingy", bytes, most);
    return upstream.allocate_sync(bytes, alignment);
  }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    upstream.deallocate_sync(p, bytes, alignment);
  }
  void* allocate(hd::host::queue, std::size_t b, std::size_t a) { return allocate_sync(b, a); }
  void deallocate(hd::host::queue, void* p, std::size_t b, std::size_t a) noexcept { deallocate_sync(p, b, a); }
  friend bool operator==(const stingy&, const stingy&) = default;
};
}  // namespace

TEST_CASE("pool conforms", "[memory][pool]") {
  heddle_test::conforms_to_resource([] { return hd::pool{hd::host_resource{}}; });
  heddle_test::conforms_to_resource([] {
    return hd::pool{hd::host_resource{}, {.initial = 1000192, .max = 64 * mebi}};
  });
  heddle_test::conforms_to_resource([] { return hd::pool{hd::host_resource{}, {.growth = 0, .granularity = 1}}; });
  heddle_test::conforms_to_resource([] { return hd::pool{hd::host_resource{}, {.granularity = 4096}}; });
  heddle_test::conforms_to_resource([] { return hd::pool{hd::tracking{hd::host_resource{}}}; });
  heddle_test::conforms_to_resource([] { return hd::pool{hd::pool{hd::host_resource{}}}; });
}

TEST_CASE("a pool's growth strands nothing", "[memory][pool]") {
  SECTION("all of it at once") {
    hd::pool memory{hd::host_resource{}, {.initial = 256, .max = 1024}};
    void* p = memory.allocate_sync(1024, 64);
    CHECK(p != nullptr);
    CHECK(memory.held() == 1024);
    memory.deallocate_sync(p, 1024, 64);
  }
  SECTION("whatever the first chunk and the limit, any size up to the limit while nothing is live") {
    for (std::size_t most : {1, 63, 64, 1000, 1024, 100000}) {
      for (std::size_t initial : {std::size_t{0}, std::size_t{1}, most / 3, most}) {
        hd::tracking upstream{hd::host_resource{}};
        hd::pool memory{upstream, {.initial = initial, .max = most}};
        for (std::size_t bytes : {most, std::size_t{1}, most / 2 + 1, most, most - most / 7}) {
          INFO("max " << most << " initial " << initial << " bytes " << bytes);
          void* p = memory.allocate_sync(bytes, 64);
          CHECK(p != nullptr);
          CHECK(upstream.bytes() <= most);
          CHECK(upstream.bytes() == memory.held());
          memory.deallocate_sync(p, bytes, 64);
          CHECK(memory.in_use() == 0);
        }
        CHECK_THROWS_AS(memory.allocate_sync(most + 1, 1), hd::memory_error);
      }
    }
  }
  SECTION("eight times an eighth, beside a first chunk of an odd size") {
    hd::pool memory{hd::host_resource{}, {.initial = 1000192, .max = 64 * mebi}};
    for (int round = 0; round < 3; ++round) {
      std::vector<void*> held;
      for (int i = 0; i < 8; ++i) held.push_back(memory.allocate_sync(8 * mebi, 256));
      CHECK(memory.held() == 64 * mebi);
      CHECK_THROWS_AS(memory.allocate_sync(1, 1), hd::memory_error);
      for (void* p : held) memory.deallocate_sync(p, 8 * mebi, 256);
    }
  }
  SECTION("small, then large, then small again, each filling it") {
    hd::pool memory{hd::host_resource{}, {.max = 4 * mebi}};
    for (std::size_t bytes : {4096, 65536, 1048576, 64, 2097152, 4194304, 1024}) {
      std::vector<void*> held;
      for (std::size_t sum = 0; sum + bytes <= 4 * mebi; sum += bytes) held.push_back(memory.allocate_sync(bytes, 64));
      CHECK(memory.in_use() == 4 * mebi);
      for (void* p : held) memory.deallocate_sync(p, bytes, 64);
      CHECK(memory.in_use() == 0);
    }
  }
}

TEST_CASE("a pool's error has all figures and changes nothing", "[memory][pool]") {
  hd::pool memory{hd::host_resource{}, {.initial = 1024, .max = 4096}};
  void* p = memory.allocate_sync(512, 64);
  try {
    memory.allocate_sync(3500, 64);
    FAIL("3500 of 4096 with 512 in use in a chunk of 1024");
  } catch (const hd::memory_error& e) {
    CHECK(e.requested() == 3500);
    CHECK(e.limit() == 4096);
    CHECK(e.in_use() == 512);
    CHECK(e.largest_free() == 3072);
  }
  CHECK(memory.held() == 1024);
  CHECK(memory.in_use() == 512);
  void* q = memory.allocate_sync(3072, 64);  // what the error promised
  CHECK(memory.held() == 4096);
  memory.deallocate_sync(q, 3072, 64);
  memory.deallocate_sync(p, 512, 64);

  hd::pool unlimited{stingy{10000}};
  void* r = unlimited.allocate_sync(9000, 1);  // growth is refused, the exact size is not
  try {
    unlimited.allocate_sync(20000, 1);
    FAIL("the upstream gives 10000 at most");
  } catch (const hd::memory_error& e) {
    CHECK(e.requested() == 20000);
    CHECK(e.limit() == hd::memory_error::unknown);
    CHECK(e.in_use() == 9024);
    CHECK(e.largest_free() == unlimited.largest_free());
  }
  unlimited.deallocate_sync(r, 9000, 1);
}

TEST_CASE("a pool fits best and merges neighbours", "[memory][pool]") {
  hd::tracking upstream{hd::host_resource{}};
  hd::pool memory{upstream, {.initial = 64 * 100, .max = 64 * 100}};
  auto take = [&](std::size_t units) { return static_cast<char*>(memory.allocate_sync(64 * units, 64)); };
  auto give = [&](char* p, std::size_t units) { memory.deallocate_sync(p, 64 * units, 64); };
  char* a = take(10);
  char* b = take(1);
  char* c = take(4);
  char* d = take(1);
  char* e = take(6);
  char* f = take(78);  // the rest
  give(a, 10);
  give(c, 4);
  give(e, 6);
  CHECK(memory.largest_free() == 640);
  char* g = take(5);
  CHECK(g == e);  // the smallest hole that holds it
  char* h = take(4);
  CHECK(h == c);
  give(g, 5);
  CHECK(memory.largest_free() == 640);
  give(h, 4);
  give(b, 1);  // a, b, c become one
  CHECK(memory.largest_free() == 64 * 15);
  give(d, 1);  // and with e
  CHECK(memory.largest_free() == 64 * 22);
  give(f, 78);
  CHECK(memory.largest_free() == 6400);
  CHECK(upstream.allocations() == 1);
  CHECK(memory.refused() == 0);
  give(f, 78);  // twice
  int foreign = 0;
  memory.deallocate_sync(&foreign, 4, 4);
  CHECK(memory.refused() == 2);
  CHECK(memory.largest_free() == 6400);
}

TEST_CASE("a warm pool asks its upstream for nothing, and gives all back", "[memory][pool]") {
  hd::tracking upstream{hd::host_resource{}};
  {
    hd::pool memory{upstream};
    for (int step = 0; step < 10; ++step) {
      std::vector<void*> held;
      for (std::size_t i = 1; i <= 100; ++i) held.push_back(memory.allocate_sync(i * 1000, 64));
      if (step == 1) upstream.reset_peak();
      for (std::size_t i = 1; i <= 100; ++i) memory.deallocate_sync(held[i - 1], i * 1000, 64);
    }
    CHECK(upstream.allocations() <= 5);  // 5 MB in chunks of 2 MiB
    CHECK(memory.trim() == upstream.peak_bytes());
    CHECK(memory.held() == 0);
    CHECK(upstream.bytes() == 0);
    memory.allocate_sync(100, 1);  // left behind on purpose: the pool owns its chunks
    auto copy = memory;
    CHECK(upstream.live() == 1);
  }
  CHECK(upstream.live() == 0);
}

TEST_CASE("a pool reserves the same whatever the order of sizes", "[memory][pool]") {
  const auto reserved = [](std::vector<std::pair<int, std::size_t>> phases) {
    hd::pool memory{hd::host_resource{}};
    for (const auto& [count, bytes] : phases) {
      std::vector<void*> held;
      for (int i = 0; i < count; ++i) held.push_back(memory.allocate_sync(bytes, 256));
      for (void* p : held) memory.deallocate_sync(p, bytes, 256);
    }
    return memory.held();
  };
  CHECK(reserved({{8, 16 * mebi}, {4, 32 * mebi}}) == 128 * mebi);
  CHECK(reserved({{4, 32 * mebi}, {8, 16 * mebi}}) == 128 * mebi);
}

TEST_CASE("a pool refuses options that make no sense", "[memory][pool]") {
  CHECK_THROWS_AS((hd::pool{hd::host_resource{}, {.initial = 2, .max = 1}}), hd::argument_error);
  for (std::size_t bad : {0, 3, 8192}) {
    CHECK_THROWS_AS((hd::pool{hd::host_resource{}, {.granularity = bad}}), hd::argument_error);
  }
}

TEST_CASE("a pool survives any sequence of calls", "[memory][pool]") {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    hd::tracking upstream{hd::host_resource{}};
    const hd::pool_options options{.initial = random() % 5000,
                                   .max = 200000 + random() % 100000,
                                   .growth = random() % 30000,
                                   .granularity = std::size_t{1} << (random() % 9)};
    hd::pool memory{upstream, options};
    struct piece {
      unsigned char* p;
      std::size_t bytes, alignment;
      unsigned char mark;
    };
    std::vector<piece> held;
    std::size_t asked = 0, spoiled = 0, misaligned = 0;
    for (int i = 0; i < 3000; ++i) {
      if (held.empty() || random() % 5 < 3) {
        const std::size_t bytes = 1 + (random() % 8 ? random() % 2000 : random() % 60000);
        const std::size_t alignment = std::size_t{1} << (random() % 13);
        try {
          auto* p = static_cast<unsigned char*>(memory.allocate_sync(bytes, alignment));
          misaligned += reinterpret_cast<std::uintptr_t>(p) % alignment != 0;
          const auto mark = static_cast<unsigned char>(random());
          std::memset(p, mark, bytes);
          held.push_back({p, bytes, alignment, mark});
          asked += bytes;
        } catch (const hd::memory_error& e) {
          CHECK(e.requested() + alignment - 1 > memory.largest_free());
        }
      } else {
        const std::size_t k = random() % held.size();
        const piece x = held[k];
        for (std::size_t j = 0; j < x.bytes; ++j) spoiled += x.p[j] != x.mark;
        memory.deallocate_sync(x.p, x.bytes, x.alignment);
        asked -= x.bytes;
        held[k] = held.back();
        held.pop_back();
      }
      REQUIRE(memory.in_use() >= asked);
      REQUIRE(memory.in_use() <= asked + held.size() * (options.granularity - 1));
      REQUIRE(memory.held() <= options.max);
      REQUIRE(memory.held() == upstream.bytes());
    }
    for (const piece& x : held) memory.deallocate_sync(x.p, x.bytes, x.alignment);
    CHECK(spoiled == 0);
    CHECK(misaligned == 0);
    CHECK(memory.in_use() == 0);
    CHECK(memory.refused() == 0);
    void* all = memory.allocate_sync(options.max, 4096);  // everything has merged
    CHECK(all != nullptr);
    memory.deallocate_sync(all, options.max, 4096);
    memory.trim();
    CHECK(upstream.live() == 0);
  }
}

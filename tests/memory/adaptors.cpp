// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/memory/any_resource.hpp>
#include <heddle/memory/arena.hpp>
#include <heddle/memory/binning.hpp>
#include <heddle/memory/fallback.hpp>
#include <heddle/memory/fixed_size.hpp>
#include <heddle/memory/lifetimes_csv.hpp>
#include <heddle/memory/limiting.hpp>
#include <heddle/memory/logging.hpp>
#include <heddle/memory/plan.hpp>
#include <heddle/memory/pmr.hpp>
#include <heddle/memory/pool.hpp>
#include <heddle/memory/retry_on_failure.hpp>
#include <heddle/memory/statistics.hpp>
#include <heddle/memory/thread_safe.hpp>
#include <heddle/memory/tracking.hpp>

#include "conformance.hpp"

#include <atomic>
#include <memory_resource>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace hd = heddle;
constexpr std::size_t large = std::size_t{1} << 28;

// Whether f throws a memory_error with these figures.
template <class Function>
bool refuses(Function&& f, std::size_t requested, std::size_t limit, std::size_t in_use, std::size_t largest) {
  try {
    f();
  } catch (const hd::memory_error& e) {
    return e.requested() == requested && e.limit() == limit && e.in_use() == in_use && e.largest_free() == largest;
  }
  return false;
}

}  // namespace

TEST_CASE("adaptors conform", "[memory]") {
  using heddle_test::conforms_to_resource;
  conforms_to_resource([] { return hd::limiting{hd::host_resource{}, large}; });
  conforms_to_resource([] { return hd::statistics{hd::host_resource{}}; });
  conforms_to_resource([] { return hd::logging{hd::host_resource{}}; });
  conforms_to_resource([] { return hd::fallback{hd::limiting{hd::host_resource{}, 3000}, hd::host_resource{}}; });
  conforms_to_resource(
      [] { return hd::retry_on_failure{hd::host_resource{}, [](std::size_t, int) { return false; }}; });
  conforms_to_resource([] { return hd::fixed_size{hd::host_resource{}, {.block = 8192, .per_chunk = 3}}; });
  conforms_to_resource(
      [] { return hd::binning{hd::host_resource{}, {.smallest = 100, .largest = 3000, .chunk = 5000}}; });
  conforms_to_resource([] { return hd::thread_safe{hd::arena{hd::host_resource{}, 10000}}; });
  conforms_to_resource([] { return hd::any_resource<>{hd::tracking{hd::host_resource{}}}; });
  conforms_to_resource([] { return hd::from_pmr{*std::pmr::new_delete_resource()}; });
  // Composed: what stands above sees what stands below.
  conforms_to_resource([] { return hd::statistics{hd::limiting{hd::logging{hd::pool{hd::host_resource{}}}, large}}; });
}

TEST_CASE("limiting refuses by what is in use, and what it refuses leaves no trace", "[memory]") {
  hd::limiting memory{hd::host_resource{}, 100};
  void* const a = memory.allocate_sync(60, 8);
  CHECK(refuses([&] { memory.allocate_sync(41, 8); }, 41, 100, 60, 40));
  CHECK(refuses([&] { memory.allocate_sync(SIZE_MAX, 8); }, SIZE_MAX, 100, 60, 40));
  void* const b = memory.allocate(hd::host::queue{}, 40, 8);
  CHECK(memory.in_use() == 100);
  memory.deallocate_sync(a, 60, 8);
  memory.deallocate(hd::host::queue{}, b, 40, 8);
  CHECK(memory.in_use() == 0);
  // The upstream's refusal doesn't count either.
  hd::limiting outer{memory, 1000};
  CHECK_THROWS_AS(outer.allocate_sync(500, 8), hd::memory_error);
  CHECK(outer.in_use() == 0);
}

TEST_CASE("limiting: a request that is always too large never makes a smaller one fail", "[memory]") {
  hd::limiting memory{hd::host_resource{}, 100};
  std::atomic<bool> stop{false};
  std::thread greedy([&, mine = memory]() mutable {
    while (!stop) {
      try {
        mine.allocate_sync(1000, 1);
      } catch (const hd::memory_error&) {
      }
    }
  });
  std::size_t failed = 0;
  for (int i = 0; i < 20000; ++i) {
    try {
      memory.deallocate_sync(memory.allocate_sync(50, 1), 50, 1);
    } catch (const hd::memory_error&) {
      ++failed;
    }
  }
  stop = true;
  greedy.join();
  CHECK(failed == 0);
}

TEST_CASE("statistics: scopes nest, and an inner one is part of the outer one", "[memory]") {
  hd::statistics memory{hd::host_resource{}};
  void* const a = memory.allocate_sync(100, 8);
  memory.push();
  void* const b = memory.allocate_sync(50, 8);
  memory.push();
  memory.deallocate_sync(a, 100, 8);
  void* const c = memory.allocate_sync(30, 8);
  CHECK(memory.counts() == hd::memory_counts{-70, 0, 30, 1, 1});
  CHECK(memory.pop() == hd::memory_counts{-70, 0, 30, 1, 1});
  CHECK(memory.pop() == hd::memory_counts{-20, 50, 80, 2, 1});
  CHECK(memory.counts() == hd::memory_counts{80, 150, 180, 3, 1});
  CHECK_THROWS_AS(memory.pop(), hd::argument_error);
  memory.deallocate_sync(b, 50, 8);
  memory.deallocate_sync(c, 30, 8);
  CHECK(memory.counts().bytes == 0);
}

TEST_CASE("logging: events in order, and lifetimes that a planner takes", "[memory]") {
  hd::logging memory{hd::host_resource{}};
  void* const old = memory.allocate_sync(8, 8);
  memory.clear();
  void* const a = memory.allocate_sync(100, 64);
  void* const b = memory.allocate(hd::host::queue{}, 200, 8);
  CHECK_THROWS_AS(memory.allocate_sync(SIZE_MAX, 8), hd::memory_error);
  memory.deallocate_sync(a, 100, 64);
  void* const c = memory.allocate_sync(50, 8);
  memory.deallocate_sync(b, 200, 8);
  memory.deallocate_sync(old, 8, 8);
  const std::vector<hd::lifetime> expected{{0, 2, 100, 64}, {1, 4, 200, 8}, {3, 6, 50, 8}};
  CHECK(memory.lifetimes() == expected);
  CHECK(hd::plan_memory(std::span<const hd::lifetime>(expected)).peak >= 300);
  std::stringstream trace;
  hd::write_lifetimes(trace, expected);
  CHECK(hd::read_lifetimes(trace).lifetimes == expected);
  std::ostringstream table;
  memory.write_csv(table);
  const std::string text = table.str();
  CHECK(std::count(text.begin(), text.end(), '\n') == 7);
  CHECK(text.find(",deallocate,") != std::string::npos);
  CHECK(text.rfind(",8,8,42\n") != std::string::npos);  // 50 of c, less the 8 of a block from before the log
  memory.deallocate_sync(c, 50, 8);
}

TEST_CASE("retry_on_failure: as often as the handler says", "[memory]") {
  hd::pool cache{hd::host_resource{}};
  hd::limiting limited{hd::host_resource{}, 100};
  void* held = limited.allocate_sync(80, 8);
  std::vector<int> attempts;
  hd::retry_on_failure memory{limited, [&](std::size_t bytes, int attempt) {
                                attempts.push_back(attempt);
                                if (bytes != 50 || attempt == 3) return false;
                                if (attempt == 2) limited.deallocate_sync(std::exchange(held, nullptr), 80, 8);
                                return true;
                              }};
  void* const p = memory.allocate_sync(50, 8);
  CHECK(attempts == std::vector<int>{1, 2});
  memory.deallocate_sync(p, 50, 8);
  CHECK(refuses([&] { memory.allocate_sync(101, 8); }, 101, 100, 0, 100));
  CHECK(attempts == std::vector<int>{1, 2, 1});
  CHECK_THROWS_AS(memory.allocate_sync(1, 3), hd::argument_error);  // no memory would help
  CHECK(attempts.size() == 3);
}

TEST_CASE("fallback: each block goes back to where it came from", "[memory]") {
  hd::tracking first{hd::host_resource{}}, second{hd::host_resource{}};
  hd::fallback memory{hd::limiting{first, 100}, second};
  void* const a = memory.allocate_sync(80, 8);
  void* const b = memory.allocate_sync(40, 8);
  void* const c = memory.allocate(hd::host::queue{}, 20, 8);
  CHECK(first.bytes() == 100);
  CHECK(second.bytes() == 40);
  CHECK(memory.fallen_back() == 1);
  memory.deallocate_sync(a, 80, 8);
  memory.deallocate(hd::host::queue{}, b, 40, 8);
  memory.deallocate_sync(c, 20, 8);
  CHECK(first.bytes() == 0);
  CHECK(second.bytes() == 0);
  CHECK(memory.fallen_back() == 0);
}

TEST_CASE("fixed_size and binning: blocks come back, and the upstream sees chunks", "[memory]") {
  hd::tracking upstream{hd::host_resource{}};
  {
    hd::fixed_size memory{upstream, {.block = 100, .per_chunk = 4}};
    CHECK(memory.block_bytes() == 128);
    void* const a = memory.allocate_sync(1, 128);
    CHECK(upstream.bytes() == 512);
    CHECK(memory.in_use() == 128);
    memory.deallocate_sync(a, 1, 128);
    CHECK(memory.allocate_sync(128, 1) == a);
    memory.deallocate_sync(a, 128, 1);
    CHECK(refuses([&] { memory.allocate_sync(129, 1); }, 129, 128, 0, 128));
    CHECK_THROWS_AS(memory.allocate_sync(1, 256), hd::argument_error);
    std::vector<void*> all;
    for (int i = 0; i < 100; ++i) all.push_back(memory.allocate_sync(100, 8));
    CHECK(memory.held() == 25 * 512);
    for (void* p : all) memory.deallocate_sync(p, 100, 8);
    CHECK(memory.in_use() == 0);
    CHECK_THROWS_AS((hd::fixed_size{upstream, {.block = 0}}), hd::argument_error);
    CHECK_THROWS_AS((hd::fixed_size{upstream, {.per_chunk = 0}}), hd::argument_error);
  }
  CHECK(upstream.bytes() == 0);
  {
    hd::binning memory{upstream, {.smallest = 64, .largest = 1024, .chunk = 2048}};
    for (const std::size_t bytes : {1, 64, 65, 128, 1000, 1024}) {
      void* const p = memory.allocate_sync(bytes, 8);
      CHECK(memory.in_use() == (bytes <= 64 ? 64 : bytes <= 128 ? 128 : 1024));
      memory.deallocate_sync(p, bytes, 8);
    }
    const std::size_t before = upstream.bytes();
    void* const p = memory.allocate_sync(1025, 8);
    CHECK(upstream.bytes() == before + 1025);
    memory.deallocate_sync(p, 1025, 8);
    CHECK_THROWS_AS((hd::binning{upstream, {.smallest = 0}}), hd::argument_error);
    CHECK_THROWS_AS((hd::binning{upstream, {.smallest = 64, .largest = 32}}), hd::argument_error);
  }
  CHECK(upstream.bytes() == 0);
}

TEST_CASE("arena: addresses go up, the last block's room is free at once, an empty arena begins again", "[memory]") {
  hd::tracking upstream{hd::host_resource{}};
  {
    hd::arena memory{upstream, 1000};
    CHECK(upstream.bytes() == 0);
    auto* const a = static_cast<std::byte*>(memory.allocate_sync(100, 8));
    auto* const b = static_cast<std::byte*>(memory.allocate_sync(100, 64));
    CHECK(b == a + 128);
    memory.deallocate_sync(b, 100, 64);
    CHECK(memory.allocate_sync(50, 8) == a + 128);
    CHECK(memory.live() == 2);
    void* const c = memory.allocate_sync(5000, 8);  // more than a chunk
    CHECK(memory.held() == 4096 + 8192);
    memory.deallocate_sync(a + 128, 50, 8);
    memory.deallocate_sync(c, 5000, 8);
    memory.deallocate_sync(a, 100, 8);
    CHECK(memory.live() == 0);
    void* const d = memory.allocate_sync(9000, 8);  // what the busiest round took, now in one piece
    CHECK(upstream.live() == 1);
    CHECK(upstream.bytes() == 4096 + 8192);
    memory.deallocate_sync(d, 9000, 8);
    CHECK_THROWS_AS((hd::arena{upstream, 0}), hd::argument_error);
  }
  CHECK(upstream.bytes() == 0);
}

TEST_CASE("arena: a round in one piece is a wish that the upstream need not grant", "[memory]") {
  hd::limiting upstream{hd::host_resource{}, 10000};
  hd::arena memory{upstream, 1000};
  std::vector<void*> blocks;
  for (int k = 0; k < 2; ++k) blocks.push_back(memory.allocate_sync(4000, 8));
  for (void* p : blocks) memory.deallocate_sync(p, 4000, 8);
  void* const other = upstream.allocate_sync(5000, 8);
  void* const p = memory.allocate_sync(100, 8);
  CHECK(memory.held() == 4096);
  memory.deallocate_sync(p, 100, 8);
  upstream.deallocate_sync(other, 5000, 8);
  memory.deallocate_sync(memory.allocate_sync(5000, 8), 5000, 8);
  CHECK(memory.held() == 8192);
}

TEST_CASE("any_resource: one type for many, equal where what they hold is", "[memory]") {
  hd::tracking one{hd::host_resource{}}, two{hd::host_resource{}};
  hd::any_resource<> a{one}, b{one}, c{two}, d{hd::host_resource{}};
  CHECK(a == b);
  CHECK_FALSE(a == c);
  CHECK_FALSE(a == d);
  CHECK(d == hd::any_resource<>{hd::host_resource{}});
  void* const p = a.allocate_sync(10, 8);
  CHECK(one.bytes() == 10);
  b.deallocate_sync(p, 10, 8);
  CHECK(one.bytes() == 0);
}

TEST_CASE("pmr: standard containers over a resource, and back", "[memory]") {
  hd::tracking memory{hd::host_resource{}};
  {
    hd::pmr_over bridge{memory};
    std::pmr::vector<std::pmr::string> words(&bridge);
    for (int i = 0; i < 100; ++i) words.emplace_back("a string that is too long for its own little room");
    CHECK(memory.live() > 100);
    CHECK(bridge.is_equal(hd::pmr_over{memory}));
    CHECK_FALSE(bridge.is_equal(hd::pmr_over{hd::tracking{hd::host_resource{}}}));
    CHECK_FALSE(bridge.is_equal(*std::pmr::new_delete_resource()));
  }
  CHECK(memory.bytes() == 0);
  std::pmr::monotonic_buffer_resource arena;
  hd::from_pmr there{arena};
  CHECK(there == hd::from_pmr{arena});
  CHECK_FALSE(there == hd::from_pmr{*std::pmr::new_delete_resource()});
  hd::from_pmr none{*std::pmr::null_memory_resource()};
  constexpr std::size_t unknown = hd::memory_error::unknown;
  CHECK(refuses([&] { none.allocate_sync(10, 8); }, 10, unknown, unknown, unknown));
}

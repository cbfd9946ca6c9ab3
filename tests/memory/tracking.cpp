// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/memory/pool.hpp>
#include <heddle/memory/tracking.hpp>

#include "conformance.hpp"

#include <algorithm>

namespace hd = heddle;

TEST_CASE("tracking conforms", "[memory][tracking]") {
  heddle_test::conforms_to_resource([] { return hd::tracking{hd::host_resource{}}; });
  heddle_test::conforms_to_resource([] { return hd::tracking{hd::host_resource{}, {.log = true}}; });
  heddle_test::conforms_to_resource([] { return hd::tracking{hd::pool{hd::host_resource{}}}; });
}

TEST_CASE("tracking counts bytes, peak and live allocations", "[memory][tracking]") {
  hd::tracking memory{hd::host_resource{}};
  auto copy = memory;
  void* a = memory.allocate_sync(100, 8);
  void* b = copy.allocate(hd::host::queue{}, 50, 4096);
  CHECK(memory.bytes() == 150);
  CHECK(memory.live() == 2);
  memory.deallocate_sync(a, 100, 8);
  CHECK(copy.bytes() == 50);
  CHECK(copy.peak_bytes() == 150);
  memory.deallocate_sync(memory.allocate_sync(20, 1), 20, 1);  // below the peak
  CHECK(copy.peak_bytes() == 150);
  copy.reset_peak();
  CHECK(memory.peak_bytes() == 50);
  a = memory.allocate_sync(10, 1);
  CHECK(memory.peak_bytes() == 60);
  // Nothing and failures are not counted.
  CHECK(memory.allocate_sync(0, 8) == nullptr);
  CHECK_THROWS_AS(memory.allocate_sync(SIZE_MAX - 10, 8), hd::memory_error);
  CHECK_THROWS_AS(memory.allocate_sync(1, 3), hd::argument_error);
  memory.deallocate_sync(nullptr, 0, 8);
  CHECK(memory.bytes() == 60);
  CHECK(memory.peak_bytes() == 60);
  CHECK(memory.live() == 2);
  CHECK(memory.allocations() == 4);
  memory.deallocate(hd::host::queue{}, a, 10, 1);
  memory.deallocate(hd::host::queue{}, b, 50, 4096);
  CHECK(memory.bytes() == 0);
  CHECK(memory.live() == 0);
  CHECK(memory.samples().empty());
  CHECK_FALSE(memory == hd::tracking{hd::host_resource{}});
}

TEST_CASE("tracking logs every event for a timeline", "[memory][tracking]") {
  hd::tracking memory{hd::host_resource{}, {.log = true}};
  std::vector<void*> held;
  std::vector<std::size_t> expected;
  std::size_t sum = 0;
  for (std::size_t i = 1; i <= 100; ++i) {
    held.push_back(memory.allocate_sync(i, 1));
    expected.push_back(sum += i);
  }
  for (std::size_t i = 1; i <= 100; ++i) {  // all at the end: room for these was kept
    memory.deallocate_sync(held[i - 1], i, 1);
    expected.push_back(sum -= i);
  }
  const auto log = memory.samples();
  REQUIRE(log.size() == expected.size());
  for (std::size_t i = 0; i < log.size(); ++i) {
    CHECK(log[i].event == i);
    CHECK(log[i].bytes == expected[i]);
    if (i) CHECK(log[i].nanoseconds >= log[i - 1].nanoseconds);
  }
  memory.clear_samples();
  CHECK(memory.samples().empty());
  memory.deallocate_sync(memory.allocate_sync(5, 1), 5, 1);
  CHECK(memory.samples().size() == 2);
  CHECK(memory.samples()[1].event == 1);
}

TEST_CASE("tracking counts exactly from many threads", "[memory][tracking]") {
  hd::tracking memory{hd::host_resource{}, {.log = true}};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([memory]() mutable {
      for (int i = 0; i < 1000; ++i) memory.deallocate_sync(memory.allocate_sync(10, 1), 10, 1);
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(memory.bytes() == 0);
  CHECK(memory.live() == 0);
  CHECK(memory.allocations() == 4000);
  CHECK(memory.peak_bytes() >= 10);
  CHECK(memory.peak_bytes() <= 40);
  const auto log = memory.samples();
  REQUIRE(log.size() == 8000);
  std::size_t peak = 0, wrong = 0, before = 0;
  for (const auto& s : log) {
    peak = std::max(peak, s.bytes);
    wrong += s.bytes != before + 10 && s.bytes + 10 != before;
    before = s.bytes;
  }
  CHECK(peak == memory.peak_bytes());
  CHECK(wrong == 0);
}

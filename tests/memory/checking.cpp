// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/memory/checking.hpp>
#include <heddle/memory/limiting.hpp>
#include <heddle/memory/tracking.hpp>

#include "conformance.hpp"

#include <string>
#include <vector>

namespace {
namespace hd = heddle;
using hd::memory_misuse;

// Two different call sites each.
[[gnu::noinline]] void free_here(hd::checking<hd::tracking<>>& m, void* p, std::size_t n) {
  m.deallocate_sync(p, n, 8);
  asm volatile("");
}
[[gnu::noinline]] void free_there(hd::checking<hd::tracking<>>& m, void* p, std::size_t n) {
  m.deallocate_sync(p, n, 8);
  asm volatile("");
}
}  // namespace

TEST_CASE("checking conforms and finds nothing in it", "[memory]") {
  hd::checking kept{hd::host_resource{}};
  heddle_test::conforms_to_resource([&] { return kept; });
  CHECK(kept.faults().empty());
  CHECK(kept.leaks().empty());
  CHECK_NOTHROW(kept.check());
}

TEST_CASE("checking: a double free, with all three call sites; the block isn't given back twice", "[memory]") {
  hd::tracking upstream{hd::host_resource{}};
  hd::checking memory{upstream};
  void* const p = memory.allocate_sync(100, 8);
  free_here(memory, p, 100);
  free_there(memory, p, 100);
  const std::vector<hd::memory_fault> f = memory.faults();
  REQUIRE(f.size() == 1);
  CHECK(f[0].what == memory_misuse::double_free);
  CHECK(f[0].pointer == p);
  CHECK(f[0].bytes == 100);
  CHECK(f[0].allocated != nullptr);
  CHECK(f[0].freed != nullptr);
  CHECK(f[0].again != nullptr);
  CHECK(f[0].freed != f[0].again);
  CHECK(f[0].freed != f[0].allocated);
  CHECK(upstream.live() == 0);
  try {
    memory.check();
    FAIL("nothing was thrown");
  } catch (const hd::argument_error& e) {
    CHECK(std::string(e.what()).find("given back twice") != std::string::npos);
    CHECK(std::string(e.what()).find(" and by 0x") != std::string::npos);
  }
}

TEST_CASE("checking: of two threads that give one block back, the second is told", "[memory]") {
  hd::tracking upstream{hd::host_resource{}};
  hd::checking memory{upstream};
  for (int k = 1; k <= 20; ++k) {
    void* const p = memory.allocate_sync(100, 8);
    std::thread other([&, mine = memory]() mutable { mine.deallocate_sync(p, 100, 8); });
    memory.deallocate_sync(p, 100, 8);
    other.join();
    REQUIRE(memory.faults().size() == static_cast<std::size_t>(k));
    CHECK(memory.faults().back().what == memory_misuse::double_free);
  }
  CHECK(upstream.live() == 0);
}

TEST_CASE("checking: an error has the size that was asked for and says what canaries need", "[memory]") {
  hd::limiting upstream{hd::host_resource{}, 1000};
  hd::checking memory{upstream};
  void* const p = memory.allocate_sync(100, 8);
  try {
    memory.allocate_sync(700, 256);
    FAIL("with its canaries it needs 1020 bytes of 772");
  } catch (const hd::memory_error& e) {
    CHECK(e.requested() == 700);
    CHECK(e.limit() == 1000);
    CHECK(e.in_use() == 100 + 64 + 64);
    CHECK(e.largest_free() == 1000 - 228);
    CHECK(std::string(e.what()) ==
          "heddle::checking, with 320 bytes of canaries beside them: can't allocate 700 bytes "
          "(limit 1000, in use 228, largest free block 772)");
  }
  memory.deallocate_sync(p, 100, 8);
  CHECK(upstream.in_use() == 0);
  CHECK(memory.faults().empty());
}

TEST_CASE("checking: foreign pointers, wrong sizes and alignments", "[memory]") {
  hd::tracking upstream{hd::host_resource{}};
  hd::checking memory{upstream};
  int foreign = 0;
  memory.deallocate_sync(&foreign, 4, 4);
  auto* const p = static_cast<std::byte*>(memory.allocate_sync(100, 8));
  memory.deallocate_sync(p + 1, 99, 1);
  CHECK(upstream.live() == 1);
  memory.deallocate_sync(p, 99, 8);
  void* const q = memory.allocate(hd::host::queue{}, 100, 8);
  memory.deallocate(hd::host::queue{}, q, 100, 16);
  CHECK(upstream.live() == 0);  // with the size it was asked for
  CHECK(upstream.bytes() == 0);
  const std::vector<hd::memory_fault> f = memory.faults();
  REQUIRE(f.size() == 4);
  CHECK(f[0].what == memory_misuse::foreign_pointer);
  CHECK(f[1].what == memory_misuse::foreign_pointer);
  CHECK(f[2].what == memory_misuse::wrong_size);
  CHECK(f[2].bytes == 100);
  CHECK(f[2].given == 99);
  CHECK(f[3].what == memory_misuse::wrong_size);
}

TEST_CASE("checking: one byte written before or after a block", "[memory]") {
  for (const std::size_t alignment : {1, 8, 64, 4096}) {
    for (const std::ptrdiff_t at : {-64, -1, 100, 163}) {
      hd::checking memory{hd::host_resource{}};
      auto* const p = static_cast<unsigned char*>(memory.allocate_sync(100, alignment));
      p[at] ^= 1;
      REQUIRE(memory.leaks().size() == 1);
      CHECK(memory.leaks()[0].what == memory_misuse::overrun);
      memory.deallocate_sync(p, 100, alignment);
      REQUIRE(memory.faults().size() == 1);
      CHECK(memory.faults()[0].what == memory_misuse::overrun);
    }
    hd::checking memory{hd::host_resource{}};
    auto* const p = static_cast<unsigned char*>(memory.allocate_sync(100, alignment));
    for (int i = 0; i < 100; ++i) p[i] = static_cast<unsigned char>(i);
    CHECK(memory.leaks()[0].what == memory_misuse::leak);
    memory.deallocate_sync(p, 100, alignment);
    CHECK(memory.faults().empty());
    CHECK(memory.leaks().empty());
  }
}

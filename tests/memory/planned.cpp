// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/memory/limiting.hpp>
#include <heddle/memory/planned.hpp>
#include <heddle/memory/thread_safe.hpp>
#include <heddle/memory/tracking.hpp>

#include "conformance.hpp"

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {
namespace hd = heddle;

// A step of random blocks, the same for the same seed; each is filled with a mark of its own and looked at before it is
// given back. Returns how many bytes were spoiled.
template <class Memory> std::size_t step(Memory& memory, unsigned seed, int calls = 200) {
  struct piece {
    unsigned char* p;
    std::size_t bytes, alignment;
    unsigned char mark;
  };
  std::mt19937 random(seed);
  std::vector<piece> live;
  std::size_t spoiled = 0;
  const auto give = [&](std::size_t k) {
    const piece x = live[k];
    for (std::size_t i = 0; i < x.bytes; ++i) spoiled += x.p[i] != x.mark;
    memory.deallocate_sync(x.p, x.bytes, x.alignment);
    live.erase(live.begin() + static_cast<std::ptrdiff_t>(k));
  };
  for (int i = 0; i < calls; ++i) {
    if (live.empty() || random() % 3) {
      const std::size_t bytes = 1 + random() % 5000, alignment = std::size_t{1} << random() % 9;
      auto* const p = static_cast<unsigned char*>(memory.allocate_sync(bytes, alignment));
      CHECK(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
      std::memset(p, i, bytes);
      live.push_back({p, bytes, alignment, static_cast<unsigned char>(i)});
    } else {
      give(random() % live.size());
    }
  }
  while (!live.empty()) give(live.size() - 1);
  return spoiled;
}

std::string temporary(const char* name) { return (std::filesystem::temp_directory_path() / name).string(); }

}  // namespace

TEST_CASE("planned conforms, as a recorder and as a plan of another step", "[memory][planned]") {
  heddle_test::conforms_to_resource([] { return hd::thread_safe{hd::planned{hd::host_resource{}}}; });
  heddle_test::conforms_to_resource([] {
    hd::planned memory{hd::host_resource{}};
    memory.begin_step();
    step(memory, 3);
    memory.begin_step();
    return hd::thread_safe{memory};
  });
}

TEST_CASE("planned: a step that repeats asks the upstream for nothing", "[memory][planned]") {
  hd::tracking upstream{hd::host_resource{}};
  hd::planned memory{upstream};
  for (const unsigned seed : {1u, 2u, 3u}) {
    memory.begin_step();
    for (int repeat = 0; repeat < 5; ++repeat) {
      if (memory.replaying()) {
        // What was planned for another seed doesn't fit: one step falls back, the next is recorded.
        CHECK(step(memory, seed) == 0);
        memory.begin_step();
      }
      if (repeat == 0) {
        CHECK(step(memory, seed) == 0);
        memory.begin_step();
      }
      REQUIRE(memory.replaying());
      const std::size_t before = upstream.allocations();
      CHECK(step(memory, seed) == 0);
      memory.begin_step();
      CHECK(memory.replaying());
      CHECK(upstream.allocations() == before);
    }
    CHECK(hd::is_valid(memory.plan(), std::span<const hd::lifetime>(memory.lifetimes())));
    CHECK(memory.plan().peak <= memory.plan().lower_bound + memory.plan().lower_bound / 4);
  }
  CHECK(memory.deviations() == 2);
}

TEST_CASE("planned: a step that deviates falls back, says so once, and is planned anew", "[memory][planned]") {
  hd::tracking upstream{hd::host_resource{}};
  hd::planned memory{upstream};
  const auto steps = [&](int n, unsigned seed, int calls) {
    for (int i = 0; i < n; ++i) {
      memory.begin_step();
      CHECK(step(memory, seed, calls) == 0);
    }
  };
  steps(3, 7, 100);
  CHECK(memory.deviations() == 0);
  CHECK(memory.last_deviation().empty());
  steps(1, 8, 100);  // other sizes
  CHECK(memory.deviations() == 1);
  CHECK(memory.last_deviation().find("call ") != std::string::npos);
  CHECK_FALSE(memory.replaying());
  steps(3, 8, 100);
  CHECK(memory.deviations() == 1);
  CHECK(memory.replaying());
  steps(1, 8, 60);  // the same, but it ends early
  memory.begin_step();
  CHECK(memory.deviations() == 2);
  CHECK(step(memory, 8, 60) == 0);
  memory.begin_step();
  CHECK(memory.replaying());
  CHECK(step(memory, 8, 140) == 0);  // and one that goes on for longer
  CHECK(memory.deviations() == 3);
  CHECK(upstream.live() == 1);  // the plan's block, which may be that of an earlier and larger plan
  CHECK(upstream.bytes() >= memory.plan().peak);
}

TEST_CASE("planned: blocks that outlive their step are the upstream's", "[memory][planned]") {
  hd::tracking upstream{hd::host_resource{}};
  {
    hd::planned memory{upstream};
    void* kept = nullptr;
    for (int i = 0; i < 6; ++i) {
      memory.begin_step();
      void* const a = memory.allocate_sync(1000, 8);
      void* const b = memory.allocate_sync(300, 8);
      std::memset(b, i, 300);
      memory.deallocate_sync(a, 1000, 8);
      if (kept) memory.deallocate_sync(kept, 300, 8);
      kept = b;
      void* const c = memory.allocate_sync(1000, 8);
      std::memset(c, 99, 1000);
      CHECK(static_cast<unsigned char*>(kept)[299] == i);
      memory.deallocate_sync(c, 1000, 8);
      CHECK(memory.deviations() == 0);
      if (i > 0) CHECK(memory.plan().peak == 1000);
    }
    memory.deallocate_sync(kept, 300, 8);
  }
  CHECK(upstream.bytes() == 0);
  CHECK(upstream.live() == 0);
}

TEST_CASE("planned: without room for the plan the step is served and recorded again", "[memory][planned]") {
  hd::limiting upstream{hd::host_resource{}, 10000};
  hd::planned memory{upstream};
  const auto small_step = [&] {
    void* const a = memory.allocate_sync(4000, 8);
    memory.deallocate_sync(a, 4000, 8);
  };
  memory.begin_step();
  small_step();
  void* const other = upstream.allocate_sync(7000, 8);
  CHECK_THROWS_AS(memory.begin_step(), hd::memory_error);
  upstream.deallocate_sync(other, 7000, 8);
  memory.begin_step();
  small_step();
  memory.begin_step();
  CHECK(memory.replaying());
  small_step();
  CHECK(memory.deviations() == 0);
}

TEST_CASE("planned: a plan that grows needs no room beside the old one", "[memory][planned]") {
  hd::limiting upstream{hd::host_resource{}, 10000};
  hd::planned memory{upstream};
  const auto one_block = [&](std::size_t bytes) {
    void* const p = memory.allocate_sync(bytes, 8);
    memory.deallocate_sync(p, bytes, 8);
  };
  for (const std::size_t bytes : {6000, 6000, 9000, 9000, 9000}) {
    one_block(bytes);
    memory.begin_step();
  }
  CHECK(memory.deviations() == 1);
  CHECK(memory.replaying());
  CHECK(upstream.in_use() == 9000);
  // Where there is no room for the new one, the old one stays, wherever it lies now, and is replayed.
  std::vector<hd::lifetime> larger{{0, 3, 6000}, {1, 2, 6000}};
  CHECK_THROWS_AS(memory.expect(larger, hd::plan_memory(std::span<const hd::lifetime>(larger))), hd::memory_error);
  CHECK(upstream.in_use() == 9000);
  CHECK(memory.plan().peak == 9000);
  memory.begin_step();
  void* const p = memory.allocate_sync(9000, 8);
  std::memset(p, 1, 9000);
  CHECK(upstream.in_use() == 9000);
  memory.deallocate_sync(p, 9000, 8);
  CHECK(memory.deviations() == 1);
}

TEST_CASE("planned: allocations in either order reserve the same", "[memory][planned]") {
  std::vector<std::size_t> held;
  for (const bool small_first : {true, false}) {
    hd::tracking upstream{hd::host_resource{}};
    hd::planned memory{upstream};
    const auto half = [&](std::size_t count, std::size_t bytes) {
      std::vector<void*> blocks;
      for (std::size_t k = 0; k < count; ++k) blocks.push_back(memory.allocate_sync(bytes, 8));
      for (void* p : blocks) memory.deallocate_sync(p, bytes, 8);
    };
    for (int step = 0; step < 3; ++step) {
      memory.begin_step();
      half(small_first ? 8 : 4, small_first ? 16 : 32);
      half(small_first ? 4 : 8, small_first ? 32 : 16);
    }
    CHECK(memory.deviations() == 0);
    held.push_back(upstream.bytes());
  }
  CHECK(held == std::vector<std::size_t>{128, 128});
}

TEST_CASE("planned: what comes early or late is noticed before a place is used twice", "[memory][planned]") {
  hd::planned memory{hd::host_resource{}};
  const auto take = [&] { return memory.allocate_sync(100, 8); };
  const auto give = [&](void* p) { memory.deallocate_sync(p, 100, 8); };
  const auto record = [&] {  // two blocks in one place, one after the other
    for (int k = 0; k < 2; ++k) {
      memory.begin_step();
      void* const a = take();
      give(a);
      void* const b = take();
      give(b);
    }
    memory.begin_step();
    REQUIRE(memory.replaying());
    REQUIRE(memory.plan().peak == 100);
  };
  record();
  void* const a = take();
  void* const b = take();  // while the first is live
  CHECK(a != b);
  CHECK(memory.deviations() == 1);
  CHECK(memory.last_deviation() == "call 1 of a step of 4: the step allocates 100 bytes");
  give(a);
  give(b);
  record();
  give(take());
  void* const other = memory.allocate_sync(100, 16);  // another alignment
  CHECK(memory.deviations() == 2);
  memory.deallocate_sync(other, 100, 16);
  for (std::size_t bit = 1; bit < 64; ++bit) {  // no alignment stands for another one at another moment
    record();
    void* const first = take();
    const std::size_t alignment = std::size_t{8} ^ (std::size_t{1} << bit);
    if (alignment != 0) CHECK_THROWS_AS(memory.allocate_sync(100, alignment), hd::argument_error);
    give(first);
  }
  record();
  void* const kept = take();
  memory.begin_step();
  CHECK(memory.last_deviation() == "call 1 of a step of 4: the step ends early and leaves 1 block(s)");
  give(kept);
  const std::size_t before = memory.deviations();
  record();
  give(take());
  CHECK(memory.allocate_sync(0, 8) == nullptr);
  give(nullptr);
  CHECK(memory.replaying());
  give(take());
  memory.begin_step();
  CHECK(memory.deviations() == before);
}

TEST_CASE("planned: a plan is saved and loaded; a damaged one is refused and changes nothing", "[memory][planned]") {
  const std::string path = temporary("heddle-planned-test");
  hd::planned first{hd::host_resource{}};
  CHECK_THROWS_AS(first.save(path), hd::argument_error);
  first.begin_step();
  void* const escaped = first.allocate_sync(64, 8);
  step(first, 5);
  first.begin_step();
  first.deallocate_sync(escaped, 64, 8);
  first.save(path);

  hd::tracking upstream{hd::host_resource{}};
  hd::planned second{upstream};
  second.load(path);
  second.begin_step();  // changes nothing: the next step is replayed
  CHECK(second.replaying());
  CHECK(second.plan().offsets == first.plan().offsets);
  CHECK(second.plan().peak == first.plan().peak);
  CHECK(second.lifetimes() == first.lifetimes());
  CHECK(upstream.allocations() == 1);
  void* const again = second.allocate_sync(64, 8);
  CHECK(step(second, 5) == 0);
  CHECK(upstream.allocations() == 2);  // the block that outlives its step
  CHECK(second.deviations() == 0);
  second.begin_step();
  second.deallocate_sync(again, 64, 8);

  std::string content;
  {
    std::ifstream file(path, std::ios::binary);
    content.assign(std::istreambuf_iterator<char>(file), {});
  }
  for (const std::size_t at : {std::size_t{0}, std::size_t{20}, content.size() / 2, content.size() - 1}) {
    std::string damaged = content;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    std::ofstream(path, std::ios::binary) << damaged;
    CHECK_THROWS_AS(second.load(path), hd::file_error);
  }
  std::ofstream(path, std::ios::binary) << content.substr(0, content.size() - 9);
  CHECK_THROWS_AS(second.load(path), hd::file_error);
  std::filesystem::remove(path);
  CHECK_THROWS_AS(second.load(path), hd::file_error);
  CHECK(second.plan().offsets == first.plan().offsets);
}

TEST_CASE("planned: steps of other threads, empty steps, and a plan within a plan", "[memory][planned]") {
  hd::tracking upstream{hd::host_resource{}};
  hd::planned inner{upstream};
  hd::planned memory{inner};
  for (int k = 0; k < 6; ++k) {
    inner.begin_step();
    memory.begin_step();
    memory.begin_step();  // without a call it is no step, recorded or replayed
    std::size_t spoiled = 1;
    std::thread([&] { spoiled = step(memory, 12); }).join();
    CHECK(spoiled == 0);
    CHECK(memory.replaying() == (k > 0));
  }
  CHECK(memory.deviations() == 0);
  CHECK(inner.deviations() == 0);
}

TEST_CASE("planned: what the upstream refuses is no deviation, and may be tried again", "[memory][planned]") {
  hd::limiting upstream{hd::host_resource{}, 1000};
  hd::planned memory{upstream};
  void* kept = nullptr;
  for (int k = 0; k < 4; ++k) {
    memory.begin_step();
    void* const a = memory.allocate_sync(100, 8);
    memory.deallocate_sync(a, 100, 8);
    if (k == 3) {
      void* const other = upstream.allocate_sync(600, 8);
      CHECK_THROWS_AS(memory.allocate_sync(300, 8), hd::memory_error);
      CHECK(memory.replaying());
      upstream.deallocate_sync(other, 600, 8);
    }
    void* const b = memory.allocate_sync(300, 8);  // outlives its step
    memory.deallocate_sync(kept, 300, 8);
    kept = b;
  }
  memory.begin_step();
  CHECK(memory.deviations() == 0);
  memory.deallocate_sync(kept, 300, 8);
}

TEST_CASE("planned: sizes and alignments that nobody can have, in the middle of a replay", "[memory][planned]") {
  hd::planned memory{hd::host_resource{}};
  std::size_t deviations = 0;
  for (const auto& [bytes, alignment] : std::vector<std::pair<std::size_t, std::size_t>>{
           {SIZE_MAX, 8}, {SIZE_MAX - 99, 8}, {100, 0}, {100, 3}, {100, 8192}, {100, SIZE_MAX}, {0, 3}}) {
    for (int k = 0; k < 2; ++k) {
      memory.begin_step();
      CHECK(step(memory, 12, 20) == 0);
    }
    memory.begin_step();
    REQUIRE(memory.replaying());
    volatile std::size_t hidden = bytes;
    if (hd::detail::is_alignment(alignment))
      CHECK_THROWS_AS(memory.allocate_sync(hidden, alignment), hd::memory_error);
    else
      CHECK_THROWS_AS(memory.allocate_sync(hidden, alignment), hd::argument_error);
    CHECK(step(memory, 12, 20) == 0);
    deviations += bytes != 0;
    CHECK(memory.deviations() == deviations);
  }
}

TEST_CASE("planned: a plan with live blocks is not replaced", "[memory][planned]") {
  const std::string path = (std::filesystem::temp_directory_path() / "heddle_planned_live").string();
  hd::planned memory{hd::host_resource{}};
  for (int k = 0; k < 3; ++k) {
    memory.begin_step();
    void* const a = memory.allocate_sync(100, 8);
    void* const b = memory.allocate_sync(50, 8);
    if (k > 0) {
      memory.save(path);
      CHECK_THROWS_AS(memory.load(path), hd::argument_error);
    }
    memory.deallocate_sync(a, 100, 8);
    if (k == 2) {
      void* const other = memory.allocate_sync(7, 8);  // a deviation while b lives
      CHECK(memory.deviations() == 1);
      CHECK_THROWS_AS(memory.load(path), hd::argument_error);
      memory.deallocate_sync(other, 7, 8);
    }
    memory.deallocate_sync(b, 50, 8);
  }
  memory.load(path);
  CHECK(memory.replaying());
  std::filesystem::remove(path);
}

TEST_CASE("planned: a block given back twice is counted, and no other block's place is given away",
          "[memory][planned]") {
  for (const bool at_next_call : {false, true}) {
    hd::limiting upstream{hd::host_resource{}, 1000};
    hd::planned memory{upstream};
    const auto take = [&](std::size_t bytes) { return memory.allocate_sync(bytes, 8); };
    const auto give = [&](void* p, std::size_t bytes) { memory.deallocate_sync(p, bytes, 8); };
    for (int k = 0; k < 2; ++k) {  // a and b in one place, one after the other, beside c
      memory.begin_step();
      void* const c = take(50);
      give(take(400), 400);
      give(take(400), 400);
      give(c, 50);
    }
    memory.begin_step();
    REQUIRE(memory.replaying());
    REQUIRE(memory.plan().peak == 450);
    auto* const c = static_cast<unsigned char*>(take(50));
    void* const a = take(400);
    std::memset(c, 7, 50);
    if (at_next_call) {
      give(a, 400);
      give(a, 400);  // as the plan would give b back
      const std::vector<hd::lifetime> other{{0, 1, 10}};
      try {
        memory.expect(other, hd::plan_memory(std::span<const hd::lifetime>(other)));
        FAIL("c is live");
      } catch (const hd::argument_error& e) {
        CHECK(std::string(e.what()).find(": 1 blocks of the present plan are live") != std::string::npos);
      }
      void* const b = take(400);
      CHECK(memory.last_deviation() == "call 4 of a step of 6: the step allocates 400 bytes");
      give(b, 400);
    } else {
      give(c, 50);
      CHECK(memory.last_deviation() == "call 2 of a step of 6: the step gives back 50 bytes");
      give(c, 50);
      give(c, 50);
      CHECK(memory.refused() == 2);
      give(a, 400);
      CHECK(upstream.in_use() == 450);
      memory.begin_step();
      give(take(999), 999);  // nothing is live, so the plan's block makes room
      CHECK(upstream.in_use() == 0);
      continue;
    }
    CHECK(memory.refused() == 1);
    CHECK(memory.deviations() == 1);
    CHECK_THROWS_AS(take(600), hd::memory_error);  // the plan's block stays, since c lives in it
    memory.begin_step();
    CHECK_THROWS_AS(take(600), hd::memory_error);
    CHECK(upstream.in_use() == 450);
    CHECK(c[49] == 7);
    give(c, 50);
    for (int k = 0; k < 2; ++k) {
      memory.begin_step();
      give(take(600), 600);
    }
    CHECK(memory.replaying());
    CHECK(memory.refused() == 1);
    CHECK(memory.deviations() == 1);
  }
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>

#include "../support/catch.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

/// @file
/// What every memory resource must do, whatever it is made of. To test your own:
///
///     #include "conformance.hpp"
///     TEST_CASE("my resource conforms") {
///       heddle_test::conforms_to_resource([] { return my_resource{heddle::host_resource{}}; });
///     }
///
/// The factory gives a fresh resource that can hold 64 MiB and can't hold PTRDIFF_MAX.
namespace heddle_test {

/// The two pairs of calls, by one name.
template <class Resource, class Queue = heddle::host::queue> struct by_queue {
  Resource resource;
  Queue queue{};
  void* take(std::size_t bytes, std::size_t alignment) { return resource.allocate(queue, bytes, alignment); }
  void give(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    resource.deallocate(queue, p, bytes, alignment);
  }
};
template <class Resource> struct at_once {
  Resource resource;
  void* take(std::size_t bytes, std::size_t alignment) { return resource.allocate_sync(bytes, alignment); }
  void give(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    resource.deallocate_sync(p, bytes, alignment);
  }
};

/// What can be seen without touching the memory, which may be out of the host's reach.
template <class Calls> void obeys_the_rules(Calls& calls) {
  // Zero bytes.
  for (std::size_t alignment : {1, 64, 4096}) {
    CHECK(calls.take(0, alignment) == nullptr);
    calls.give(nullptr, 0, alignment);
  }
  // The alignment is the pointer's.
  for (std::size_t alignment = 1; alignment <= 4096; alignment *= 2) {
    void* const p = calls.take(100, alignment);
    CHECK(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
    void* const q = calls.take(1, alignment);
    CHECK(reinterpret_cast<std::uintptr_t>(q) % alignment == 0);
    calls.give(p, 100, alignment);
    calls.give(q, 1, alignment);
  }
  // Bad alignments, also with zero bytes; the message says which.
  for (std::size_t alignment : {std::size_t{0}, std::size_t{3}, std::size_t{24}, std::size_t{8192}, SIZE_MAX}) {
    for (std::size_t bytes : {std::size_t{0}, std::size_t{1}, SIZE_MAX}) {
      try {
        calls.take(bytes, alignment);
        FAIL("alignment " << alignment << " was accepted");
      } catch (const heddle::argument_error& e) {
        CHECK(std::string(e.what()).find(std::to_string(alignment)) != std::string::npos);
      }
    }
  }
  // Sizes that overflow when they are rounded, and those above PTRDIFF_MAX.
  for (std::size_t alignment : {1, 64, 4096}) {
    for (std::size_t bytes : {SIZE_MAX, SIZE_MAX - 10, SIZE_MAX / 2 + 1}) {
      try {
        // Through a volatile, so that no compiler knows the size and warns.
        volatile std::size_t hidden = bytes;
        calls.take(hidden, alignment);
        FAIL(bytes << " bytes were given");
      } catch (const heddle::memory_error& e) {
        CHECK(e.requested() == bytes);
      }
    }
  }
  // After all these errors it still works.
  void* p = calls.take(1000, 64);
  REQUIRE(p != nullptr);
  calls.give(p, 1000, 64);
}

template <class Calls> void conforms_to_calls(Calls calls) {
  // All bytes may be written; nothing overlaps.
  struct piece {
    unsigned char* p;
    std::size_t bytes, alignment;
    unsigned char mark;
  };
  std::vector<piece> pieces;
  unsigned char mark = 1;
  for (std::size_t alignment = 1; alignment <= 4096; alignment *= 2) {
    for (std::size_t bytes : {1, 7, 64, 100, 4097}) {
      auto* p = static_cast<unsigned char*>(calls.take(bytes, alignment));
      REQUIRE(p != nullptr);
      CHECK(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
      std::memset(p, mark, bytes);
      pieces.push_back({p, bytes, alignment, mark++});
    }
  }
  std::size_t spoiled = 0;
  for (const piece& x : pieces) {
    for (std::size_t i = 0; i < x.bytes; ++i) spoiled += x.p[i] != x.mark;
  }
  CHECK(spoiled == 0);
  std::mt19937 random(7);
  while (!pieces.empty()) {
    const std::size_t k = random() % pieces.size();
    calls.give(pieces[k].p, pieces[k].bytes, pieces[k].alignment);
    pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(k));
  }
  obeys_the_rules(calls);
}

/// Equality, sharing by copies, and the same rules for both pairs of calls, from several threads too.
/// @param queue A queue of the resource's backend, where that isn't the host; its memory must be in the host's reach.
template <class Factory, class Queue = heddle::host::queue> void conforms_to_resource(Factory make, Queue queue = {}) {
  using resource = decltype(make());
  static_assert(heddle::resource<resource, Queue>);

  resource a = make();
  resource copy = a;
  CHECK(a == copy);
  CHECK_FALSE(a != copy);
  void* p = a.allocate_sync(100, 16);
  copy.deallocate_sync(p, 100, 16);  // equal resources free each other's memory
  p = copy.allocate(queue, 100, 16);
  a.deallocate(queue, p, 100, 16);

  conforms_to_calls(by_queue<resource, Queue>{a, queue});
  conforms_to_calls(at_once<resource>{a});

  std::vector<std::thread> threads;
  std::vector<std::size_t> spoiled(4, 0);
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&spoiled, t, mine = a]() mutable {
      std::mt19937 random(t);
      const unsigned char mark = static_cast<unsigned char>(t + 1);
      std::vector<std::pair<unsigned char*, std::size_t>> held;
      for (int i = 0; i < 500; ++i) {
        if (held.size() < 8) {
          const std::size_t bytes = 1 + random() % 5000;
          auto* q = static_cast<unsigned char*>(mine.allocate_sync(bytes, 32));
          std::memset(q, mark, bytes);
          held.emplace_back(q, bytes);
        } else {
          const auto [q, bytes] = held.front();
          for (std::size_t k = 0; k < bytes; ++k) spoiled[t] += q[k] != mark;
          mine.deallocate_sync(q, bytes, 32);
          held.erase(held.begin());
        }
      }
      for (const auto& [q, bytes] : held) mine.deallocate_sync(q, bytes, 32);
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(spoiled == std::vector<std::size_t>(4, 0));
}

}  // namespace heddle_test

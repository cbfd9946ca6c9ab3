// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// The resource of the concept's documentation, word for word, goes through the suite and under every adaptor.

#include <heddle/memory/host_resource.hpp>
#include <heddle/memory/pool.hpp>
#include <heddle/memory/tracking.hpp>

#include "conformance.hpp"

#include <cstring>

namespace {
struct poisoned {
  heddle::host_resource upstream{};
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    void* p = upstream.allocate_sync(bytes, alignment);
    if (p) std::memset(p, 0xff, bytes);
    return p;
  }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    upstream.deallocate_sync(p, bytes, alignment);
  }
  void* allocate(heddle::host::queue, std::size_t b, std::size_t a) { return allocate_sync(b, a); }
  void deallocate(heddle::host::queue, void* p, std::size_t b, std::size_t a) noexcept { deallocate_sync(p, b, a); }
  friend bool operator==(const poisoned&, const poisoned&) = default;
};
static_assert(heddle::resource<poisoned>);

struct throwing_deallocate : poisoned {
  void deallocate_sync(void*, std::size_t, std::size_t) {}
};
static_assert(!heddle::resource<throwing_deallocate> && !heddle::has_deallocate_sync<throwing_deallocate>);
static_assert(heddle::has_allocate_sync<throwing_deallocate>);
}  // namespace

TEST_CASE("a user's resource conforms, alone and under adaptors", "[memory]") {
  heddle_test::conforms_to_resource([] { return poisoned{}; });
  heddle_test::conforms_to_resource([] { return heddle::tracking{poisoned{}}; });
  heddle_test::conforms_to_resource([] { return heddle::pool{poisoned{}, {.initial = 1000}}; });
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/memory/buffer.hpp>
#include <heddle/memory/tracking.hpp>

#include "conformance.hpp"

#include <algorithm>
#include <utility>

namespace hd = heddle;

TEST_CASE("buffer owns, moves and gives back", "[memory][buffer]") {
  hd::tracking memory{hd::host_resource{}};
  {
    hd::buffer<double, decltype(memory)> a{memory, 10};
    CHECK(memory.bytes() == 80);
    CHECK(a.bytes() == 80);
    CHECK(reinterpret_cast<std::uintptr_t>(a.data()) % 64 == 0);
    std::fill(a.begin(), a.end(), 2.0);
    a[3] = 1;
    auto b = std::move(a);
    CHECK(b.size() == 10);
    CHECK(b[3] == 1.0);
    CHECK(std::as_const(b)[4] == 2.0);
    CHECK(b.view().size() == 10);
    CHECK(b.resource() == memory);
    CHECK(memory.live() == 1);
    hd::buffer<double, decltype(memory)> none{memory, 0};
    CHECK(none.data() == nullptr);
    CHECK(none.empty());
    CHECK(memory.live() == 1);
  }
  CHECK(memory.live() == 0);
  CHECK_THROWS_AS((hd::buffer<double, decltype(memory)>{memory, SIZE_MAX / 8 + 2}), hd::memory_error);
  CHECK(memory.live() == 0);

  struct alignas(256) wide {
    float x[64];
  };
  hd::buffer<wide> w{hd::host_resource{}, 3};
  CHECK(reinterpret_cast<std::uintptr_t>(w.data()) % 256 == 0);
}

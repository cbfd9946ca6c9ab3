// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include "../support/catch.hpp"

#include <heddle/core/dtype.hpp>
#include <heddle/core/error.hpp>
#include <heddle/core/philox.hpp>
#include <heddle/core/slice.hpp>

#include <cmath>
#include <set>
#include <string>
#include <vector>

namespace hd = heddle;

TEST_CASE("core: errors say what happened and keep the figures") {
  const hd::comm_error c("all_reduce", 2, 5, "no answer within 30 s");
  CHECK(std::string(c.what()) == "heddle::all_reduce on rank 2 (peer 5): no answer within 30 s");
  CHECK(c.operation() == "all_reduce");
  CHECK(c.rank() == 2);
  CHECK(c.peer() == 5);
  CHECK(std::string(hd::comm_error("barrier", 0, -1, "x").what()) == "heddle::barrier on rank 0: x");

  const hd::memory_error m("limiting", 100, 64, 60, 4);
  CHECK(m.requested() == 100);
  CHECK(m.limit() == 64);
  CHECK(m.in_use() == 60);
  CHECK(m.largest_free() == 4);
  CHECK(std::string(m.what()) ==
        "heddle::limiting: can't allocate 100 bytes (limit 64, in use 60, largest free block 4)");
  // What isn't known isn't named; nothing is what is known to be so.
  CHECK(std::string(hd::memory_error("host", 100).what()) == "heddle::host: can't allocate 100 bytes");
  CHECK(hd::memory_error("host", 100).limit() == hd::memory_error::unknown);
  CHECK(std::string(hd::memory_error("limiting", 1, 0, 0, 0).what()) ==
        "heddle::limiting: can't allocate 1 bytes (limit 0, in use 0, largest free block 0)");

  CHECK_THROWS_AS([] { throw hd::file_error("a"); }(), hd::error);
  CHECK_THROWS_AS([] { throw hd::argument_error("a"); }(), std::runtime_error);
}

TEST_CASE("core: a slice is a pointer and a count") {
  std::vector<int> v{1, 2, 3, 4, 5};
  const hd::slice<int> s = hd::as_slice(v);
  CHECK(s.size() == 5);
  CHECK(s.bytes() == 20);
  CHECK_FALSE(s.empty());
  CHECK(hd::slice<int>{}.empty());
  const hd::slice<int> middle = s.subslice(1, 3);
  int sum = 0;
  for (int x : middle) sum += x;
  CHECK(sum == 9);
  middle[0] = 20;
  CHECK(v[1] == 20);
  const hd::slice<const int> read = s;
  CHECK(read[1] == 20);
  CHECK(s.subslice(5, 0).empty());
}

TEST_CASE("core: dtypes have sizes and names") {
  static_assert(hd::dtype_of<float> == hd::dtype::f32 && hd::bytes_of(hd::dtype::bf16) == 2);
  static_assert(hd::dtype_of<hd::float16> == hd::dtype::f16 && hd::dtype_of<std::string> == hd::dtype::other);
  CHECK(std::string(hd::name_of(hd::dtype_of<std::int64_t>)) == "i64");
  CHECK(hd::bytes_of(hd::dtype_of<double>) == sizeof(double));
}

// The vectors published with Random123 for philox4x32, 10 rounds.
using block = hd::philox4x32::block;
static_assert(hd::philox4x32::generate({{0, 0, 0, 0}}, {{0, 0}}) ==
              block{{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
static_assert(hd::philox4x32::generate({{~0u, ~0u, ~0u, ~0u}}, {{~0u, ~0u}}) ==
              block{{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
static_assert(hd::philox4x32::generate({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
                                       {{0xa4093822, 0x299f31d0}}) ==
              block{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});

TEST_CASE("core: philox places index, stream and seed in counter and key") {
  // the same published vectors through the keyed form
  CHECK(hd::philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88) ==
        block{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
  CHECK(hd::random_stream(7, 9) == 0x0000000700000009);
  CHECK(hd::random_uniform(1, 2, 14) == hd::to_uniform(hd::philox(1, 2, 3).word[2]));
  std::set<std::uint32_t> seen;
  for (std::uint32_t seed = 0; seed < 4; ++seed)
    for (std::uint32_t parameter = 0; parameter < 4; ++parameter)
      for (std::uint32_t step = 0; step < 4; ++step)
        seen.insert(hd::philox(seed, hd::random_stream(parameter, step), 0).word[0]);
  CHECK(seen.size() == 64);
}

TEST_CASE("core: uniform numbers lie in [0, 1) and have the moments of the distribution") {
  CHECK(hd::to_uniform(0) == 0.0f);
  CHECK(hd::to_uniform(~0u) == 1.0f - 0x1p-24f);
  const int n = 1 << 20;
  double sum = 0, squares = 0;
  for (int i = 0; i < n; ++i) {
    const double u = hd::random_uniform(11, 0, static_cast<std::uint64_t>(i));
    sum += u;
    squares += u * u;
  }
  CHECK(sum / n == Approx(0.5).margin(5 * std::sqrt(1.0 / 12 / n)));
  CHECK(squares / n == Approx(1.0 / 3).margin(5 * std::sqrt(4.0 / 45 / n)));
}

TEST_CASE("core: a block gives four normal numbers from its four words") {
  const block b = hd::philox(5, 1, 3);
  const hd::normal_pair p = hd::to_normal(b.word[0], b.word[1]), q = hd::to_normal(b.word[2], b.word[3]);
  const float want[] = {p.first, p.second, q.first, q.second};
  for (std::uint64_t i = 0; i < 4; ++i) CHECK(hd::random_normal(5, 1, 12 + i) == want[i]);
}

TEST_CASE("core: normal numbers are finite and have the moments of the distribution") {
  for (std::uint32_t a : {0u, ~0u})
    for (std::uint32_t b : {0u, 0x80000000u, ~0u}) {
      const hd::normal_pair p = hd::to_normal(a, b);
      CHECK(std::fabs(p.first) < 5.78f);
      CHECK(std::fabs(p.second) < 5.78f);
    }
  const int n = 1 << 20;
  double sum = 0, squares = 0, fourth = 0, neighbours = 0, last = 0;
  for (int i = 0; i < n; ++i) {
    const double x = hd::random_normal(5, 1, static_cast<std::uint64_t>(i));
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
    neighbours += x * last;
    last = x;
  }
  CHECK(sum / n == Approx(0).margin(5 / std::sqrt(double(n))));
  CHECK(squares / n == Approx(1).margin(5 * std::sqrt(2.0 / n)));
  CHECK(fourth / n == Approx(3).margin(5 * std::sqrt(96.0 / n)));
  CHECK(neighbours / n == Approx(0).margin(5 / std::sqrt(double(n))));
}

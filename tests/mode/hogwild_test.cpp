// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/mode/hogwild.hpp>

#include "../support/catch.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <thread>

namespace hd = heddle;

namespace {

std::vector<float> random_floats(std::mt19937& random, std::size_t n) {
  std::vector<float> x(n);
  for (float& v : x) v = static_cast<float>(random() % 2001) * 1e-3f - 1.0f;
  return x;
}

// Every operation against its definition in double precision; rows begin at addresses that no vector divides.
template <class Race> void check_operations(Race, const char* name) {
  INFO(name);
  std::mt19937 random(11);
  for (const std::size_t n : {0, 1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 100, 1023, 1024, 1025}) {
    for (const std::size_t count : {0, 1, 2, 3, 4, 6, 7}) {
      std::vector<float> memory = random_floats(random, (n + 3) * 8), own = random_floats(random, n),
                         error = random_floats(random, n), factors = random_floats(random, count), out(count, 7.0f);
      std::vector<float*> rows;
      for (std::size_t k = 0; k < count; ++k) rows.push_back(memory.data() + 1 + (n + 3) * (k == 5 ? 2 : k));  // twice
      std::vector<double> expected(memory.begin(), memory.end()), expected_error(error.begin(), error.end());
      const auto at = [&](std::size_t k, std::size_t i) -> double& {
        return expected[static_cast<std::size_t>(rows[k] - memory.data()) + i];
      };
      Race::dots(own.data(), rows.data(), count, n, out.data());
      for (std::size_t k = 0; k < count; ++k) {
        double dot = 0.0;
        for (std::size_t i = 0; i < n; ++i) dot += at(k, i) * own[i];
        REQUIRE(std::abs(out[k] - dot) < 1e-4);
      }
      Race::exchange(own.data(), rows.data(), factors.data(), count, n, error.data());
      for (std::size_t k = 0; k < count; ++k) {
        for (std::size_t i = 0; i < n; ++i) {
          expected_error[i] += factors[k] * at(k, i);
          at(k, i) += factors[k] * own[i];
        }
      }
      for (std::size_t i = 0; i < n; ++i) REQUIRE(std::abs(error[i] - expected_error[i]) < 1e-4);
      if (count > 0) {
        Race::add(rows[0], own.data(), -0.5f, n);
        for (std::size_t i = 0; i < n; ++i) at(0, i) += -0.5 * own[i];
        std::vector<float> copy(n), sum = own;
        Race::read(rows[0], copy.data(), n);
        CHECK(std::equal(copy.begin(), copy.end(), rows[0]));
        Race::accumulate(rows[0], sum.data(), n);
        for (std::size_t i = 0; i < n; ++i) REQUIRE(sum[i] == own[i] + rows[0][i]);
        if (count > 1) {
          Race::write(rows[1], own.data(), n);
          for (std::size_t i = 0; i < n; ++i) at(1, i) = own[i];
        }
      }
      for (std::size_t i = 0; i < memory.size(); ++i) REQUIRE(std::abs(memory[i] - expected[i]) < 1e-4);
    }
  }
}

// Threads write rows of one bit pattern or the other, across lines of the cache; every float read is one of the two.
template <class Loops> void check_tearing(Loops) {
  constexpr std::size_t n = 103;
  alignas(64) float memory[n + 1];
  float* const shared = memory + 1;
  const float a = std::bit_cast<float>(0x3f0000ffu), b = std::bit_cast<float>(0xbfff0100u);
  const std::vector<float> first(n, a), second(n, b);
  Loops::write(shared, first.data(), n);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (int w = 0; w < 2; ++w) {
    writers.emplace_back([&, w] {
      while (!stop.load(std::memory_order_relaxed)) Loops::write(shared, (w ? first : second).data(), n);
    });
  }
  std::size_t torn = 0, seen[2] = {};
  std::vector<float> own(n);
  for (int i = 0; i < 20000; ++i) {
    Loops::read(shared, own.data(), n);
    for (const float x : own) {
      torn += x != a && x != b;
      ++seen[x == a];
    }
  }
  stop = true;
  for (std::thread& t : writers) t.join();
  CHECK(torn == 0);
  CHECK(seen[0] + seen[1] == 20000 * n);
}

template <class Race> float add_from_threads(std::size_t n) {
  std::vector<float> shared(n, 0.0f);
  const std::vector<float> ones(n, 1.0f);
  hd::thread_counters counts(4);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5000; ++i) {
        Race::add(shared.data(), ones.data(), 1.0f, n);
        counts.add(t, 2);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(counts.sum() == 40000);
  float least = shared[0];
  for (const float x : shared) least = (std::min)(least, x);
  for (const float x : shared) CHECK((x > 0.0f && x <= 20000.0f));
  return least;
}

}  // namespace

TEST_CASE("Race policies do what their definitions say, alone") {
  check_operations(hd::vector_asm{}, "vector_asm");
  check_operations(hd::relaxed{}, "relaxed");
  check_operations(hd::fetch_add{}, "fetch_add");
#if defined(__x86_64__)
  check_operations(hd::detail::vectors_x4<true>{}, "SSE2");
  if (hd::detail::opaque_lanes() >= 8) check_operations(hd::detail::vectors_x8<true>{}, "AVX2");
#endif
}

TEST_CASE("No float is torn, in any instruction set") {
  check_tearing(hd::relaxed{});
  check_tearing(hd::vector_asm{});
#if defined(__x86_64__)
  check_tearing(hd::detail::vectors_x4<true>{});
  if (hd::detail::opaque_lanes() >= 8) check_tearing(hd::detail::vectors_x8<true>{});
#endif
}

TEST_CASE("fetch_add loses no addition, the others may; counters lose none") {
  CHECK(add_from_threads<hd::fetch_add>(37) == 20000.0f);
  CHECK(add_from_threads<hd::relaxed>(37) > 0.0f);
  CHECK(add_from_threads<hd::vector_asm>(37) > 0.0f);
}

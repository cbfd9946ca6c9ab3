// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include "../support/catch.hpp"
#include "conformance.hpp"

#include <heddle/core/host.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace hd = heddle;

namespace {

// A backend that breaks laws, to see that the suite finds it: sorts unstably, swaps operands, drops the last index.
struct broken : hd::host {
  template <class Function> static void for_each(std::size_t n, Function f, queue q) {
    hd::host::for_each(n == 0 ? 0 : n - 1, f, q);
  }
  template <class Value, class Reduce, class Transform, class Resource>
  static void scan(std::size_t n, std::type_identity_t<Value> init, Reduce reduce, Transform transform, Value* to,
                   Resource& resource, queue q) {
    hd::host::scan(
        n, init, [&](const Value& a, const Value& b) { return reduce(b, a); }, transform, to, resource, q);
  }
  template <class Key, class Value, class Resource>
  static void sort_pairs(Key* keys, Value* values, std::size_t n, Resource& resource, queue q) {
    for (std::size_t i = 0; i < n / 2; ++i) {
      std::swap(keys[i], keys[n - 1 - i]);
      std::swap(values[i], values[n - 1 - i]);
    }
    hd::host::sort_pairs(keys, values, n, resource, q);
  }
};

struct no_scan : hd::host {
  static void scan() = delete;
};

}  // namespace

static_assert(hd::backend<hd::host> && hd::backend<broken>);
static_assert(hd::has_select<no_scan> && !hd::has_scan<no_scan> && !hd::backend<no_scan>);
static_assert(!hd::backend<int>);

TEST_CASE("core: the host backend obeys the laws") {
  for (const std::string& failure : heddle_test::backend_failures<hd::host>({})) FAIL_CHECK(failure);
}

TEST_CASE("core: the conformance suite finds a broken backend") {
  std::string all;
  for (const std::string& failure : heddle_test::backend_failures<broken>({})) all += failure + "\n";
  CHECK(all.find("for_each visits every index") != std::string::npos);
  CHECK(all.find("keeps the order of operands") != std::string::npos);
  CHECK(all.find("ascending and stable") != std::string::npos);
  CHECK(all.find("select") == std::string::npos);
}

TEST_CASE("core: the host backend refuses bad arguments and changes nothing") {
  hd::host::memory m;
  const hd::host::queue q;
  for (std::size_t alignment : {0, 3, 48, 8192}) CHECK_THROWS_AS(m.allocate(q, 16, alignment), hd::argument_error);
  for (std::size_t alignment : {1, 16, 4096}) {
    void* p = m.allocate(q, 16, alignment);
    CHECK(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
    m.deallocate(q, p, 16, alignment);
  }
  CHECK(m.allocate(q, 0, 16) == nullptr);
  m.deallocate(q, nullptr, 0, 16);

  float x = 3.0f;
  float* none = nullptr;
  CHECK_THROWS_AS(hd::host::copy(none, &x, 1, q), hd::argument_error);
  CHECK_THROWS_AS(hd::host::copy(&x, none, 1, q), hd::argument_error);
  CHECK_THROWS_AS(hd::host::fill(none, 1, 0.0f, q), hd::argument_error);
  CHECK_THROWS_AS(hd::host::sort_pairs(&x, none, 1, m, q), hd::argument_error);
  std::uint64_t value = 4;
  CHECK_THROWS_AS(hd::host::sort_pairs(&x, &value, ~std::size_t{0} / 2, m, q), hd::argument_error);
  CHECK(x == 3.0f);
  hd::host::copy(none, none, 0, q);
  hd::host::fill(none, 0, 0.0f, q);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Tables on a device against the table of the host, which has the same rows, rules and initial values.
#include "../support/catch.hpp"

#include <heddle/memory/cuda_memory.hpp>
#include <heddle/table/device_table.cuh>
#include <heddle/table/sparse_table.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

namespace hd = heddle;

namespace {
constexpr std::size_t dim = 4;
using keys_type = std::vector<std::uint64_t>;
using floats = std::vector<float>;

// What the host gives and takes, in the backend's memory for one call.
template <class Backend, class Value> class there {
 public:
  there(const std::vector<Value>& v, typename Backend::queue q) : n_(v.size()), queue_(q) {
    data_ = static_cast<Value*>(memory_.allocate(q, n_ * sizeof(Value) + 1, 256));
    Backend::copy(v.data(), data_, n_, q);
    q.synchronize();
  }
  ~there() { memory_.deallocate(queue_, data_, n_ * sizeof(Value) + 1, 256); }
  Value* data() const { return data_; }
  std::vector<Value> get() const {
    std::vector<Value> v(n_);
    Backend::copy(data_, v.data(), n_, queue_);
    queue_.synchronize();
    return v;
  }

 private:
  typename Backend::memory memory_;
  std::size_t n_;
  typename Backend::queue queue_;
  Value* data_;
};

// Equal, or for each step two units in the last place apart, of the weight or of what the first step takes from it: a
// device may contract.
bool near(const floats& a, const floats& b, std::uint64_t steps) {
  bool good = a.size() == b.size();
  for (std::size_t i = 0; good && i < a.size(); ++i) {
    const float most = std::max(0.1f, std::max(std::abs(a[i]), std::abs(b[i])));
    good = std::abs(a[i] - b[i]) <= 2.0f * static_cast<float>(steps) * (std::nextafter(most, 2.0f * most) - most);
  }
  return good;
}

// @param room Rows on the device; the others, to 700, spill into memory that the policy names.
template <class Backend, class Rule, class Initial = hd::initial::uniform, class Spill = hd::spill::none>
void compare(std::size_t room, Spill spill = {}) {
  const typename Backend::queue q{};
  typename Backend::memory memory;
  hd::sparse_table<std::uint64_t, hd::row<dim>, Rule, Initial> host({.seed = 4, .table = 3});
  hd::device_table<Backend, std::uint64_t, hd::row<dim>, Rule, Initial, typename Backend::memory, Spill> device(
      {.seed = 4, .table = 3, .capacity = room}, memory, q, spill);
  const keys_type special{0, 1, std::uint64_t{1} << 63, ~std::uint64_t{0}, ~std::uint64_t{1}};
  std::uint64_t round = 0;
  for (const std::size_t n : {5, 0, 1, 17, 257, 600}) {
    keys_type keys(n);
    floats g(n * dim), out(n * dim), expected(n * dim);
    for (std::size_t i = 0; i < n; ++i) keys[i] = n == 5 ? special[i] : hd::philox(1, round, i).word[0] % 400;
    for (std::size_t i = 0; i < g.size(); ++i) g[i] = hd::random_uniform(2, round, i) - 0.5f;
    if (n > 1) g[3] = std::nanf("");
    const there<Backend, std::uint64_t> k(keys, q);
    const there<Backend, float> o(out, q), gradients(g, q);
    device.pull(k.data(), n, o.data(), q);
    host.pull(keys, expected);
    CHECK(near(o.get(), expected, round));
    if (round == 0) CHECK(o.get() == expected);  // initial values, to the bit
    device.push(k.data(), n, gradients.data(), 0.1f, q);
    host.push(keys, g, {.lr = 0.1f});
    device.read(k.data(), n, o.data(), q);
    host.read(keys, expected);
    CHECK(near(o.get(), expected, ++round));
    CHECK(device.counts(q).rows == host.size());
    CHECK(device.counts(q).rejected == host.counts().rejected);
  }
  CHECK(device.counts(q).refused == 0);
  constexpr std::size_t record = hd::sparse_table<std::uint64_t, hd::row<dim>, Rule>::record_bytes;
  CHECK(device.bytes() < room * record + 700 * 8 + 2000);
  CHECK(device.spilled_bytes() == (700 - room) * record);
  CHECK(host.size() > 300);
}

// Sums and means of rows, and their gradients, against loops.
template <class Backend> void bags() {
  const typename Backend::queue q{};
  typename Backend::memory memory;
  hd::device_table<Backend, std::int32_t, hd::row<dim>, hd::rule::sgd> t({.seed = 1, .capacity = 10}, memory, q);
  hd::sparse_table<std::int32_t, hd::row<dim>, hd::rule::sgd> host({.seed = 1});
  const std::vector<std::int32_t> keys{-1, 7, 7, 3, -1, 9};
  const std::vector<std::size_t> offsets{0, 3, 3, 6};
  const floats g{1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4};
  const there<Backend, std::int32_t> k(keys, q);
  const there<Backend, std::size_t> at(offsets, q);
  const there<Backend, float> gradients(g, q);
  floats rows(keys.size() * dim), each(keys.size() * dim);
  host.pull(keys, rows);
  for (const bool mean : {false, true}) {
    const there<Backend, float> o(floats(3 * dim), q);
    t.pool(k.data(), keys.size(), at.data(), 3, mean, o.data(), q);
    const floats pooled = o.get();
    for (std::size_t b = 0; b < 3; ++b) {
      for (std::size_t c = 0; c < dim; ++c) {
        double sum = 0;
        for (std::size_t i = offsets[b]; i < offsets[b + 1]; ++i) {
          sum += rows[i * dim + c];
          each[i * dim + c] = g[b * dim + c] * (mean ? 1.0f / 3 : 1.0f);
        }
        CHECK(pooled[b * dim + c] == Approx(mean && b != 1 ? sum / 3 : sum).margin(1e-6));
      }
    }
    t.push_pooled(k.data(), keys.size(), at.data(), 3, mean, gradients.data(), 0.5f, q);
    host.push(keys, each, {.lr = 0.5f});
    host.read(keys, rows);
    const there<Backend, float> now(floats(keys.size() * dim), q);
    t.read(k.data(), keys.size(), now.data(), q);
    const floats got = now.get();
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(rows[i]).margin(1e-5));
  }
  // A full table: later keys read 0.
  std::vector<std::int32_t> many(20);
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = 100 + static_cast<std::int32_t>(i);
  const there<Backend, std::int32_t> m(many, q);
  const there<Backend, float> o(floats(many.size() * dim, 5.0f), q);
  t.pull(m.data(), many.size(), o.data(), q);
  CHECK(t.counts(q).rows == 10);
  CHECK(t.counts(q).refused == 14);
  const floats got = o.get();
  int zeros = 0;
  for (std::size_t i = 0; i < got.size(); i += dim) zeros += got[i] == 0.0f && got[i + 1] == 0.0f;
  CHECK(zeros == 14);
}
}  // namespace

TEST_CASE("a table on a device is the host's table") {
  compare<hd::cuda, hd::rule::adagrad>(700);
  compare<hd::host, hd::rule::adagrad>(700);
}

// Rules that aren't linear take a batch's duplicates as one sum on both sides; the others are rounded in another order.
TEST_CASE("every rule moves rows of a device as it moves those of the host") {
  compare<hd::cuda, hd::rule::sgd>(700);
  compare<hd::cuda, hd::rule::sum>(700);
  compare<hd::cuda, hd::rule::row_adagrad>(700);
  compare<hd::cuda, hd::rule::adam>(700);
  compare<hd::cuda, hd::rule::ftrl, hd::initial::zero>(700);
  compare<hd::host, hd::rule::adam>(700);
  compare<hd::host, hd::rule::ftrl, hd::initial::zero>(700);
}

TEST_CASE("rows that find no room on a device spill into the host's memory") {
  hd::cuda_pinned pinned;
  compare<hd::cuda, hd::rule::adagrad, hd::initial::uniform>(100, hd::spill::to<hd::cuda_pinned>{&pinned, 600});
  const hd::cuda::queue q{};
  hd::cuda::memory memory;
  using table = hd::device_table<hd::cuda, std::uint64_t, hd::row<dim>, hd::rule::adagrad, hd::initial::uniform,
                                 hd::cuda::memory, hd::spill::to<hd::cuda_pinned>>;
  CHECK_THROWS_AS(table({.capacity = 1}, memory, q, {&pinned, std::size_t{1} << 30}), hd::argument_error);
  CHECK_THROWS_AS(table({.capacity = 1}, memory, q, {nullptr, 1}), hd::argument_error);
  CHECK_THROWS_AS(table({.capacity = 0}, memory, q, {nullptr, 0}), hd::argument_error);
  CHECK_THROWS_AS(table({.capacity = (std::size_t{1} << 30) + 1}, memory, q, {nullptr, 0}), hd::argument_error);
  CHECK_THROWS_AS(table({.capacity = ~std::size_t{0}}, memory, q, {nullptr, 0}), hd::argument_error);
  CHECK(table({.capacity = 1}, memory, q, {nullptr, 0}).spilled_bytes() == 0);
}

TEST_CASE("as many rows as a device's table may have lie apart, far behind 2^32 bytes") {
  using layout = hd::detail::row_layout<hd::row<16>, hd::rule::adagrad, hd::evict::never>;
  constexpr std::uintptr_t records = std::uintptr_t{1} << 44, spilled = std::uintptr_t{1} << 45;
  constexpr std::uint32_t near = 1u << 29, most = 1u << 30;
  hd::detail::device_rows<layout> t{};
  t.records = reinterpret_cast<std::byte*>(records);
  t.spilled = reinterpret_cast<std::byte*>(spilled);
  t.near = near;
  t.capacity = most;
  t.slot_count = 2 * most;
  const auto place = [&](std::uint32_t row) { return reinterpret_cast<std::uintptr_t>(t.at(row)); };
  CHECK(place(near - 1) == records + ((std::uintptr_t{1} << 29) - 1) * layout::bytes);
  CHECK(place(near) == spilled);
  CHECK(place(most - 1) == spilled + ((std::uintptr_t{1} << 29) - 1) * layout::bytes);
  CHECK(t.home(~std::uint64_t{0}) == 2 * most - 1);
  CHECK(t.after(2 * most - 1) == 0);
}

TEST_CASE("bags of rows are pooled, and their gradients pushed") { bags<hd::cuda>(); }

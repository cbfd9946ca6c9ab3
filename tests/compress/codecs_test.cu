// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Codecs on the device against those of the host: each reads the other's payloads, and holds the same.
#include "../support/catch.hpp"

#include <heddle/compress/codecs.cuh>
#include <heddle/compress/power_sgd.cuh>
#include <heddle/compress/sparse.cuh>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace hd = heddle;

namespace {
template <class Codec> void check(const Codec& codec, std::size_t n, bool feedback) {
  const hd::cuda::queue q{};
  hd::cuda::memory memory;
  const auto host = hd::detail::carrier<Codec, true>(codec);
  const hd::codec_device device(codec);
  const hd::encode_context x{.step = 3, .ranks = 2, .tensor = 7, .rank = 1, .held_scale = 2.0f};
  std::mt19937 random(6);
  std::vector<float> g(n), e(n, 0.0f);
  for (float& v : g) v = std::normal_distribution<float>()(random);
  for (float& v : e) v = feedback ? std::normal_distribution<float>()(random) : 0.0f;
  std::vector<std::byte> packet;
  std::vector<float> held = e;
  float* const state[1] = {held.data()};
  host.encode({g.data(), n}, 0.5f, state, x, packet);
  const std::size_t bytes = packet.size() - 8;  // without the carrier's head
  const auto get = [&](std::size_t size) { return memory.allocate(q, size ? size : 1, 256); };
  auto *const dg = static_cast<float*>(get(4 * n)), *const de = static_cast<float*>(get(4 * n)), *const sum = static_cast<float*>(get(4 * n));
  auto* const payload = static_cast<std::byte*>(get(bytes));
  auto* const flag = static_cast<unsigned*>(get(4));
  hd::cuda::copy(g.data(), dg, n, q);
  hd::cuda::copy(e.data(), de, n, q);
  hd::cuda::fill(sum, n, 0.0f, q);
  hd::cuda::fill(flag, 1, 0u, q);
  device.encode(dg, 0.5f, feedback ? de : nullptr, n, x, payload, flag, q);
  device.decode_add(payload, sum, n, q);
  if (feedback) device.hold(dg, 0.5f, de, n, x, payload, q);
  std::vector<std::byte> got(bytes);
  std::vector<float> decoded(n), rest(n), expected(n, 0.0f), reread(n, 0.0f);
  unsigned bad = 7;
  hd::cuda::copy(payload, got.data(), bytes, q);
  hd::cuda::copy(sum, decoded.data(), n, q);
  hd::cuda::copy(de, rest.data(), n, q);
  hd::cuda::copy(flag, &bad, 1, q);
  q.synchronize();
  CHECK(bad == 0);
  host.decode_add({packet.data(), packet.size()}, {expected.data(), n});
  codec.decode_add({got.data(), bytes}, {reread.data(), n});
  CHECK(reread == decoded);
  double worst = 0.0, apart = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    apart = (std::max)(apart, std::fabs(static_cast<double>(expected[i]) - decoded[i]));
    const double v = static_cast<double>(g[i]) * 0.25 + 2.0 * e[i];
    if (feedback) worst = (std::max)(worst, std::fabs(v - decoded[i] - rest[i]));
  }
  CHECK(apart < 1e-6);
  CHECK(worst < 1e-6);
  for (const float much : {NAN, std::numeric_limits<float>::max()}) {  // twice half of that is rounded
    if (n == 0) break;
    g[n / 2] = much;
    hd::cuda::copy(g.data(), dg, n, q);
    hd::cuda::fill(flag, 1, 0u, q);
    device.encode(dg, 1.0f, nullptr, n, x, payload, flag, q);
    hd::cuda::copy(flag, &bad, 1, q);
    q.synchronize();
    CHECK(bad == 1);
  }
  for (float* p : {dg, de, sum}) memory.deallocate(q, p, n ? 4 * n : 1, 256);
  memory.deallocate(q, payload, bytes ? bytes : 1, 256);
  memory.deallocate(q, flag, 4, 256);
  q.synchronize();
}

// Arrays of the device, filled from the host and read back.
template <class Value> class on_device {
 public:
  explicit on_device(std::vector<Value> v) : values_(std::move(v)) {
    data_ = static_cast<Value*>(memory_.allocate({}, bytes(), 256));
    hd::cuda::copy(values_.data(), data_, values_.size(), {});
  }
  on_device(const on_device&) = delete;
  on_device& operator=(const on_device&) = delete;
  ~on_device() { memory_.deallocate({}, data_, bytes(), 256); }
  operator Value*() const { return data_; }
  const std::vector<Value>& read() {
    hd::cuda::copy(static_cast<const Value*>(data_), values_.data(), values_.size(), {});
    hd::cuda::queue{}.synchronize();
    return values_;
  }

 private:
  std::size_t bytes() const { return (values_.empty() ? 1 : values_.size()) * sizeof(Value); }
  hd::cuda::memory memory_;
  std::vector<Value> values_;
  Value* data_ = nullptr;
};

// Gradients of each kind on which a selection may go wrong.
std::vector<std::vector<float>> hard_gradients(std::size_t n) {
  std::mt19937 random(n);
  std::vector<std::vector<float>> all(5, std::vector<float>(n, 0.0f));
  for (std::size_t i = 0; i < n; ++i) {
    all[0][i] = std::normal_distribution<float>()(random);
    all[1][i] = i % 2 ? 3.0f : -3.0f;  // all equal
    all[3][i] = i % 3 ? (i % 2 ? 0.0f : -0.0f) : 1e-42f;  // zeros and denormals
    all[4][i] = static_cast<float>(i / 4);  // ties
  }
  return all;
}

void check_top_k(double density, const std::vector<float>& g, bool feedback) {
  const hd::top_k codec{.density = density};
  const hd::top_k_device device(codec);
  const hd::encode_context x{.ranks = 2, .held_scale = 2.0f};
  const std::size_t n = g.size(), k = device.entries(n);
  std::vector<float> v(n), e(n);
  for (std::size_t i = 0; i < n; ++i) {
    e[i] = feedback ? 0.25f * g[n - 1 - i] : 0.0f;
    v[i] = feedback ? g[i] * 0.5f + e[i] * 2.0f : g[i] * 0.5f;
  }
  std::vector<std::byte> packet;
  codec.encode({v.data(), n}, x, packet);
  std::vector<float> expected(n, 0.0f);
  codec.decode_add({packet.data(), packet.size()}, {expected.data(), n});

  hd::cuda::memory pool;
  on_device<float> dg(g), de(e), value(std::vector<float>(k, 0.0f)), sum(std::vector<float>(n, 0.0f));
  on_device<std::uint32_t> index(std::vector<std::uint32_t>(k, 0u));
  on_device<unsigned> flag({0u});
  device.encode(dg, 1.0f, feedback ? static_cast<float*>(de) : nullptr, n, x, index, value, flag, pool, {});
  device.add(index, value, n, sum, {});
  CHECK(sum.read() == expected);
  CHECK(flag.read() == std::vector<unsigned>{0u});
  CHECK(std::is_sorted(index.read().begin(), index.read().end()));
  if (!feedback) return;
  device.hold(dg, 1.0f, de, n, x, index, {});
  for (std::size_t i = 0; i < n; ++i) v[i] -= expected[i];
  CHECK(de.read() == v);
}

void check_random_k(std::size_t n, bool feedback) {
  const hd::random_k codec{.density = 0.1};
  const hd::random_k_device device(codec);
  const hd::encode_context x{.step = 3, .ranks = 2, .tensor = 7, .rank = 1, .held_scale = 2.0f};
  std::vector<float> g = hard_gradients(n)[0], e(n);
  for (std::size_t i = 0; i < n; ++i) e[i] = 0.25f * g[n - 1 - i];
  on_device<float> dg(g), de(e), sums(std::vector<float>(device.picked(n), 0.0f));
  on_device<unsigned> flag({0u});
  float* const held = feedback ? static_cast<float*>(de) : nullptr;
  device.send(dg, 0.5f, held, n, x, sums, flag, {});
  std::vector<float> expected(device.picked(n));
  float *const state[1] = {e.data()}, *const to[1] = {expected.data()};
  const auto compare = [&](const auto& host) {
    CHECK(host.send(0, {g.data(), n}, 0.5f, state, x, to));
    CHECK(sums.read() == expected);
    CHECK(flag.read() == std::vector<unsigned>{0u});
    device.commit(dg, 0.5f, held, n, x, sums, {});
    host.commit({g.data(), n}, 0.5f, state, x, to);
    CHECK(dg.read() == g);
    if (feedback) CHECK(de.read() == e);
  };
  if (feedback)
    compare(hd::detail::carrier<hd::random_k, true>(codec));
  else
    compare(hd::detail::carrier<hd::random_k, false>(codec));
}
}  // namespace

TEST_CASE("compress: top_k and random_k on the device pick what the host picks, and hold the rest") {
  for (const std::size_t n : {0u, 1u, 17u, 1025u}) {
    for (const double density : {1e-9, 0.1, 1.0}) {
      for (const auto& g : hard_gradients(n)) check_top_k(density, g, density == 0.1);
    }
    for (const bool feedback : {false, true}) check_random_k(n, feedback);
  }
  hd::cuda::memory pool;
  for (const float much : {NAN, std::numeric_limits<float>::max()}) {
    on_device<float> g({1.0f, much, 1.0f}), value({0.0f}), sums({0.0f});
    on_device<std::uint32_t> index({0u});
    on_device<unsigned> one({0u}), two({0u});
    hd::top_k_device(hd::top_k{.density = 0.3}).encode(g, 2.0f, nullptr, 3, {.ranks = 2}, index, value, one, pool, {});
    hd::random_k_device(hd::random_k{.density = 0.3}).send(g, 2.0f, nullptr, 3, {.ranks = 2}, sums, two, {});
    CHECK(one.read() == std::vector<unsigned>{1u});
    CHECK(two.read() == std::vector<unsigned>{1u});
  }
  // Without what is held a value is sent three times as large, the length of its run.
  on_device<float> g({1e38f, 1e38f, 1e38f}), e({0.0f, 0.0f, 0.0f}), sums({0.0f});
  on_device<unsigned> flag({0u}), held_flag({0u});
  const hd::random_k_device third(hd::random_k{.density = 0.3});
  third.send(g, 2.0f, nullptr, 3, {.ranks = 2}, sums, flag, {});
  CHECK(flag.read() == std::vector<unsigned>{1u});
  third.send(g, 2.0f, e, 3, {.ranks = 2}, sums, held_flag, {});
  CHECK(held_flag.read() == std::vector<unsigned>{0u});
}

TEST_CASE("compress: casts on the device give the host's bits") {
  const auto check = [](auto wire) {
    using element = decltype(wire);
    for (const std::size_t n : {0u, 1u, 1025u}) {
      std::vector<float> g = hard_gradients(n)[0];
      if (n > 4) g[1] = 1e9f, g[2] = 1e-9f, g[3] = -0.0f, g[4] = std::numeric_limits<float>::infinity();
      std::vector<element> expected(n);
      hd::cast<element>{}.encode({g.data(), n}, expected.data(), 0.3f);
      on_device<float> from(g);
      on_device<element> to((std::vector<element>(n)));
      const hd::cast_device<element> device;
      device.encode(from, to, n, 0.3f, {});
      const std::vector<element>& got = to.read();
      for (std::size_t i = 0; i < n; ++i) CHECK(got[i].bits == expected[i].bits);
      device.decode(to, from, n, {});
      hd::cast<element>{}.decode(expected.data(), {g.data(), n});
      CHECK(from.read() == g);
    }
  };
  check(hd::float16{});
  check(hd::bfloat16{});
}

TEST_CASE("compress: codecs on the device write what the host reads, and hold the rest") {
  for (const std::size_t n : {0u, 1u, 7u, 64u, 65u, 1025u}) {
    check(hd::sign{.block = 64}, n, true);
    check(hd::quantize<8>{.block = 256}, n, false);
    check(hd::quantize<4, hd::rounding::nearest>{.block = 32}, n, true);
  }
}

double largest(const std::vector<float>& v) {
  double most = 0.0;
  for (const float x : v) most = (std::max)(most, std::fabs(static_cast<double>(x)));
  return most;
}

// Steps of three ranks, whose gradients differ, on the host and on the device: any matrix; one of rank 1, so that
// columns of the factors become zero; one that is nearly so; any, with what is held counted twice.
void check_power_sgd(std::size_t n, std::size_t rows, std::size_t rank) {
  constexpr std::size_t ranks = 3;
  const hd::power_sgd codec{.rank = rank, .worth = 0.0, .dense_below = 0};
  const hd::power_sgd_device device(codec);
  hd::encode_context x{.ranks = ranks, .tensor = 7, .rows = rows};
  const hd::power_sgd::shape s(n, x, rank);
  const std::size_t counts[2] = {codec.sum_count(0, n, x), codec.sum_count(1, n, x)};
  std::vector<std::vector<float>> e(ranks, std::vector<float>(n, 0.0f)), g = e;
  std::vector<float> r(counts[1], 0.0f), total[2], sums[2], device_total[2];
  on_device<float> de0(e[0]), de1(e[1]), de2(e[2]), dg0(g[0]), dg1(g[1]), dg2(g[2]), dr(r);
  on_device<float>*const de[ranks] = {&de0, &de1, &de2}, *const dg[ranks] = {&dg0, &dg1, &dg2};
  on_device<float> dleft(std::vector<float>(counts[0], 0.0f)), dright(r);
  on_device<unsigned> flag({0u});
  float* const dsums[2] = {dleft, dright};
  std::mt19937 random(3);
  for (std::size_t step = 0; step < 4; ++step) {
    x.held_scale = step == 0 ? 1.0f : step == 3 ? 2.0f : 0.0f;
    std::vector<std::vector<float>> before;
    for (std::size_t k = 0; k < ranks; ++k) {
      for (std::size_t i = 0; i < n; ++i) {
        const float any = std::normal_distribution<float>()(random);
        const float one = static_cast<float>((k + 1) * (1 + i % s.columns % 7)) * (i / s.columns % 3 ? 1.0f : -1.0f);
        g[k][i] = step == 1 ? one : step == 2 ? one + 1e-3f * any : any;
      }
      hd::cuda::copy(g[k].data(), static_cast<float*>(*dg[k]), n, {});
      hd::cuda::queue{}.synchronize();
      before.push_back(de[k]->read());
    }
    const std::vector<std::vector<float>> given = g;
    for (int round = 0; round < 2; ++round) {
      total[round].assign(counts[round], 0.0f);
      device_total[round].assign(counts[round], 0.0f);
      for (std::size_t k = 0; k < ranks; ++k) {
        sums[0] = total[0];
        sums[1].resize(counts[1]);
        float *const state[2] = {e[k].data(), r.data()}, *const here[2] = {sums[0].data(), sums[1].data()};
        CHECK(codec.send(round, {g[k].data(), n}, 0.5f, state, x, here));
        if (round) hd::cuda::copy(device_total[0].data(), dsums[0], counts[0], {});
        device.send(round, *dg[k], 0.5f, *de[k], dr, n, x, dsums, flag, {});
        const std::vector<float>& mine = (round ? dright : dleft).read();
        for (std::size_t i = 0; i < counts[round]; ++i) {
          total[round][i] += sums[round][i];
          device_total[round][i] += mine[i];
        }
      }
    }
    hd::cuda::copy(device_total[1].data(), dsums[1], counts[1], {});
    const std::vector<float>& left = dleft.read();
    for (std::size_t one = 0; one < s.rank; ++one) {
      for (std::size_t two = 0; two <= one; ++two) {
        double dot = 0.0;
        for (std::size_t i = 0; i < s.rows; ++i)
          dot += static_cast<double>(left[i * s.rank + one]) * left[i * s.rank + two];
        const bool zero = step == 1 && one > 0;  // where the last row isn't padded, which is a second one
        if (!zero) CHECK(std::fabs(dot - (one == two ? 1.0 : 0.0)) < 1e-5);
        if (zero && n == s.rows * s.columns) CHECK(dot == 0.0);
      }
    }
    for (std::size_t k = 0; k < ranks; ++k) {
      float *const state[2] = {e[k].data(), r.data()}, *const all[2] = {sums[0].data(), total[1].data()};
      codec.commit({g[k].data(), n}, 0.5f, state, x, all);
      device.commit(*dg[k], 0.5f, *de[k], dr, n, x, dsums, {});
      const std::vector<float>&update = dg[k]->read(), &held = de[k]->read();
      double apart = 0.0, lost = 0.0;
      for (std::size_t i = 0; i < n; ++i) {
        apart = (std::max)(apart, std::fabs(static_cast<double>(update[i]) - g[k][i]));
        const double input = static_cast<double>(given[k][i]) / 6.0 + static_cast<double>(x.held_scale) * before[k][i];
        lost = (std::max)(lost, std::fabs(input - static_cast<double>(update[i]) / 3.0 - held[i]));
      }
      INFO("n " << n << ", rank " << rank << ", step " << step);
      CHECK(apart < 1e-4);
      CHECK(lost <= 4e-7 * (std::max)(largest(given[k]), largest(update)));
      CHECK(update == dg[0]->read());
    }
    CHECK(dr.read() == dright.read());
  }
  CHECK(flag.read() == std::vector<unsigned>{0u});
  // With two ranks a share is half of the gradient, exactly.
  x = {.ranks = 2, .tensor = 7, .rows = rows};
  const float limit = 2.0f * codec.limit(s, x), above = std::nextafter(limit, INFINITY);
  for (const float much : {limit, -limit, above, -above, NAN}) {
    const bool good = std::fabs(much) <= limit;
    g[0].assign(n, 0.0f);
    g[0][n - 1] = much;
    e[0].assign(n, 0.0f);
    hd::cuda::copy(g[0].data(), static_cast<float*>(dg0), n, {});
    hd::cuda::fill(static_cast<float*>(de0), n, 0.0f, {});
    on_device<unsigned> bad({0u});
    device.send(0, dg0, 1.0f, de0, dr, n, x, dsums, bad, {});
    CHECK(bad.read() == std::vector<unsigned>{good ? 0u : 1u});
    sums[0].resize(counts[0]);
    float *const state[2] = {e[0].data(), r.data()}, *const here[2] = {sums[0].data(), sums[1].data()};
    CHECK(codec.send(0, {g[0].data(), n}, 1.0f, state, x, here) == good);
  }
}

TEST_CASE("compress: power_sgd on the device makes the host's update, but for rounding, and holds the rest") {
  check_power_sgd(1, 0, 2);
  check_power_sgd(35, 5, 2);
  check_power_sgd(37, 0, 6);  // the whole matrix, its last row padded
  check_power_sgd(1200, 400, 3);
  check_power_sgd(2100, 14, 10);  // more columns than one pass makes
  const hd::power_sgd_device device;
  CHECK_THROWS_AS(hd::power_sgd_device({.rank = 0}), hd::argument_error);
  float* const none[2] = {};
  device.send(0, nullptr, 1.0f, nullptr, nullptr, 0, {}, none, nullptr, {});
  CHECK_THROWS_AS(device.send(0, nullptr, 1.0f, nullptr, nullptr, 3, {}, none, nullptr, {}), hd::argument_error);
}

TEST_CASE("compress: a block that isn't a multiple of 8 is refused on the device", "[host]") {
  CHECK_THROWS_AS(hd::codec_device(hd::sign{.block = 12}), hd::argument_error);
  const hd::codec_device device(hd::quantize<8>{});
  CHECK_THROWS_AS(device.encode(nullptr, 1.0f, nullptr, 3, {}, nullptr, nullptr, {}), hd::argument_error);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Codecs on the device against those of the host: each reads the other's payloads, and holds the same.
#include "../support/catch.hpp"

#include <heddle/compress/codecs.cuh>

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
}  // namespace

TEST_CASE("compress: codecs on the device write what the host reads, and hold the rest") {
  for (const std::size_t n : {0u, 1u, 7u, 64u, 65u, 1025u}) {
    check(hd::sign{.block = 64}, n, true);
    check(hd::quantize<8>{.block = 256}, n, false);
    check(hd::quantize<4, hd::rounding::nearest>{.block = 32}, n, true);
  }
}

TEST_CASE("compress: a block that isn't a multiple of 8 is refused on the device", "[host]") {
  CHECK_THROWS_AS(hd::codec_device(hd::sign{.block = 12}), hd::argument_error);
  const hd::codec_device device(hd::quantize<8>{});
  CHECK_THROWS_AS(device.encode(nullptr, 1.0f, nullptr, 3, {}, nullptr, nullptr, {}), hd::argument_error);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>

#include "../support/catch.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

/// What every elementwise compressor must do; run it on your own.
namespace conformance {

/// decode(encode(g, f)) is g f within `roundoff`, relative, for every size; it doesn't write past the end.
template <class Compressor>
void elementwise(const Compressor& c, double roundoff) {
  static_assert(heddle::elementwise_compressor<Compressor>);
  std::mt19937 random(11);
  for (const std::size_t n : {0u, 1u, 17u, 1023u, 1024u, 1025u, 10007u}) {
    for (const float factor : {1.0f, 0.375f, -2.5f}) {
      std::vector<float> g(n), back(n + 1, 7.0f);
      for (float& x : g) x = std::normal_distribution<float>()(random);
      std::vector<typename Compressor::wire> wire(n + 1);
      c.encode({g.data(), n}, wire.data(), factor);
      c.decode(wire.data(), {back.data(), n});
      CHECK(back[n] == 7.0f);
      double worst = 0.0;
      for (std::size_t i = 0; i < n; ++i) {
        const double exact = static_cast<double>(g[i]) * factor;
        worst = std::max(worst, std::fabs(back[i] - exact) / (std::fabs(exact) + 0x1p-14));
      }
      CHECK(worst <= roundoff + 0x1p-23);
    }
  }
  const float bad[2] = {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
  float back[2];
  typename Compressor::wire wire[2];
  c.encode({bad, 2}, wire, 1.0f);
  c.decode(wire, {back, 2});
  CHECK(std::isinf(back[0]));
  CHECK(std::isnan(back[1]));
}

}  // namespace conformance

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of reductions, as compiled for this processor and for any, against their definition element by element.
#include <heddle/core/reduction.hpp>

#include "../support/catch.hpp"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace hd = heddle;

namespace {
template <class Element>
constexpr bool is_half = std::is_same_v<Element, hd::float16> || std::is_same_v<Element, hd::bfloat16>;
template <class Op>
constexpr bool adds = std::is_same_v<Op, hd::sum> || std::is_same_v<Op, hd::mean>;

template <class Element>
bool same_bits(Element a, Element b) {
  if constexpr (is_half<Element> || std::is_floating_point_v<Element>) {
    if (std::isnan(static_cast<float>(a)) && std::isnan(static_cast<float>(b))) return true;
  }
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// out[i] = (in[0][i] op in[1][i] op ...) * factor in the wide type, rounded once; true if a finite one left float16.
template <class Element, class Op>
bool definition(const hd::operand* in, int inputs, Element* out, std::size_t n, int exponent, double factor) {
  using wide = typename hd::detail::wide<Element>::type;
  constexpr bool half = std::is_same_v<Element, hd::float16>;
  const auto scale = [](int e) { return std::ldexp(1.0f, e); };
  bool left = false;
  for (std::size_t i = 0; i < n; ++i) {
    wide a{};
    for (int k = 0; k < inputs; ++k) {
      const Element e = static_cast<const Element*>(in[k].data)[i];
      wide x;
      if constexpr (half) x = static_cast<float>(e) * scale(in[k].exponent);
      else x = static_cast<wide>(e);
      if (k == 0) a = x;
      else if constexpr (adds<Op>) a = static_cast<wide>(a + x);
      else if constexpr (std::is_same_v<Op, hd::min>) a = (a < x || a != a) ? a : x;
      else a = (a > x || a != a) ? a : x;
    }
    if constexpr (half) {
      out[i] = hd::float16(static_cast<float>(a * ((adds<Op> ? factor : 1.0) * static_cast<double>(scale(-exponent)))));
      left |= (out[i].bits & 0x7c00) == 0x7c00 && std::isfinite(a);
    } else if constexpr (adds<Op> && std::is_integral_v<Element>) {
      out[i] = static_cast<Element>(a / static_cast<wide>(1.0 / factor + 0.5));
    } else if constexpr (adds<Op>) {
      out[i] = Element(static_cast<wide>(static_cast<double>(a) * factor));
    } else {
      out[i] = Element(a);
    }
  }
  return left;
}

// Any encoding for the 16-bit types and float (infinities and NaN too, if `special`), small numbers for integers.
template <class Element>
Element draw(std::mt19937_64& random, bool special) {
  Element x;
  if constexpr (is_half<Element>) {
    x.bits = static_cast<std::uint16_t>(random());
    if (!special) x.bits &= 0xbfff;
  } else if constexpr (std::is_same_v<Element, float>) {
    auto u = static_cast<std::uint32_t>(random());
    if (!special) u = (u & 0x80ffffffu) | 0x3f000000u;
    std::memcpy(&x, &u, 4);
  } else {
    x = static_cast<Element>(random() % 1000);
  }
  return x;
}

template <class Element, class Op>
std::size_t wrong() {
  std::mt19937_64 random(1);
  std::size_t bad = 0;
  const hd::leaf chosen = hd::leaf_of<Element>(Op{});
  for (const int inputs : {1, 2, 3, 5}) {
    for (const std::size_t n : {0u, 1u, 7u, 16u, 17u, 1024u, 1025u, 5000u}) {
      for (const double factor : {1.0, 0.25, 1.0 / 3.0}) {
        for (const int exponent : {0, 2}) {
          if (!std::is_same_v<Element, hd::float16> && exponent) continue;
          const bool special = random() % 2;
          const int place = static_cast<int>(random() % static_cast<unsigned>(inputs + 1)) - 1;  // in place, or apart
          std::vector<std::vector<Element>> data[3];
          std::vector<hd::operand> in[3];
          std::vector<Element> apart[3];
          for (int k = 0; k < inputs; ++k) {
            std::vector<Element> v(n + 1);
            for (Element& x : v) x = draw<Element>(random, special);
            for (auto& d : data) d.push_back(v);
          }
          const int e = std::is_same_v<Element, hd::float16> ? static_cast<int>(random() % 3) : 0;
          Element* out[3];
          for (int j = 0; j < 3; ++j) {
            for (int k = 0; k < inputs; ++k) in[j].push_back({data[j][static_cast<std::size_t>(k)].data(), (e + k) % 3 * (e ? 1 : 0)});
            apart[j].resize(n + 1);
            out[j] = place < 0 ? apart[j].data() : data[j][static_cast<std::size_t>(place)].data();
          }
          const bool left[3] = {definition<Element, Op>(in[0].data(), inputs, out[0], n, exponent, factor),
                                chosen.reduce(chosen.context, in[1].data(), inputs, out[1], n, exponent, factor),
                                hd::detail::reduce_loop<Element, Op>(nullptr, in[2].data(), inputs, out[2], n, exponent, factor)};
          bool good = left[0] == left[1] && left[0] == left[2];
          for (std::size_t i = 0; i < n; ++i) good &= same_bits(out[0][i], out[1][i]) && same_bits(out[0][i], out[2][i]);
          bad += !good;
        }
      }
    }
  }
  return bad;
}
}  // namespace

TEST_CASE("reductions give the bits of their definition on every path") {
  CHECK(wrong<hd::float16, hd::sum>() == 0);
  CHECK(wrong<hd::float16, hd::mean>() == 0);
  CHECK(wrong<hd::float16, hd::max>() == 0);
  CHECK(wrong<hd::bfloat16, hd::sum>() == 0);
  CHECK(wrong<hd::bfloat16, hd::mean>() == 0);
  CHECK(wrong<hd::bfloat16, hd::min>() == 0);
  CHECK(wrong<float, hd::sum>() == 0);
  CHECK(wrong<float, hd::mean>() == 0);
  CHECK(wrong<float, hd::max>() == 0);
  CHECK(wrong<std::int32_t, hd::mean>() == 0);
  CHECK(wrong<std::uint8_t, hd::sum>() == 0);
}

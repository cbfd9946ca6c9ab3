// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include "../support/catch.hpp"

#include <heddle/core/convert.hpp>
#include <heddle/core/philox.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace hd = heddle;

namespace {

// The value of a 16-bit encoding with this many exponent and mantissa bits, from the definition of the format.
double value_of(std::uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(double(mantissa), 1 - bias - mantissa_bits);
  return sign * std::ldexp(double((1 << mantissa_bits) + mantissa), exponent - bias - mantissa_bits);
}

// Nearest even in double precision: scale to units in the last place, let nearbyint round, scale back.
double nearest(double x, int exponent_bits, int mantissa_bits) {
  if (std::isnan(x) || std::isinf(x) || x == 0) return x;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int e = std::max(std::ilogb(x), 1 - bias);
  const double r = std::ldexp(std::nearbyint(std::ldexp(x, mantissa_bits - e)), e - mantissa_bits);
  const double largest = std::ldexp(2.0 - std::ldexp(1.0, -mantissa_bits), bias);
  return std::fabs(r) > largest ? std::copysign(std::numeric_limits<double>::infinity(), x) : r;
}

bool same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b); }

template <class Half> bool rounds_like_oracle(float f, int exponent_bits, int mantissa_bits) {
  const Half h(f);
  if (std::isnan(f) && (h.bits >> 15) != (std::bit_cast<std::uint32_t>(f) >> 31)) return false;  // keeps the sign
  return same(value_of(h.bits, exponent_bits, mantissa_bits), nearest(double(f), exponent_bits, mantissa_bits));
}

// Floats that matter: everything near a boundary between two halves, and every exponent with odd mantissas.
std::vector<float> hard_floats() {
  std::vector<float> v;
  for (std::uint32_t top = 0; top < 0x10000; ++top)
    for (std::uint32_t low : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x2000u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      v.push_back(std::bit_cast<float>((top << 16) | low));
  return v;
}

template <class Half> void round_trips(int exponent_bits, int mantissa_bits) {
  for (std::uint32_t b = 0; b < 0x10000; ++b) {
    const auto bits = static_cast<std::uint16_t>(b);
    const float f = static_cast<float>(Half::from_bits(bits));
    REQUIRE(same(double(f), value_of(bits, exponent_bits, mantissa_bits)));
    const std::uint16_t quiet = std::isnan(f) ? std::uint16_t(1u << (mantissa_bits - 1)) : std::uint16_t{0};
    REQUIRE(Half(f).bits == (bits | quiet));
  }
}

template <class Half> void rounds(int exponent_bits, int mantissa_bits) {
  for (float f : hard_floats())
    if (!rounds_like_oracle<Half>(f, exponent_bits, mantissa_bits)) FAIL_CHECK(std::bit_cast<std::uint32_t>(f));
  for (std::uint64_t i = 0; i < 1000000; ++i)
    for (std::uint32_t word : hd::philox(1, 0, i).word) {
      // the second: exponents where binary16 has its values
      const std::uint32_t inside = (word & 0x807fffffu) | ((100u + (word >> 23) % 48u) << 23);
      for (std::uint32_t x : {word, inside})
        if (!rounds_like_oracle<Half>(std::bit_cast<float>(x), exponent_bits, mantissa_bits)) FAIL_CHECK(x);
    }
}

constexpr hd::detail::isa all_isas[] = {hd::detail::isa::portable, hd::detail::isa::avx2, hd::detail::isa::avx512};

// How many results of a loop aren't the scalar conversion's, bit for bit.
template <bool Scaled, bool Checked, class Half>
std::size_t wrong_ones(const std::vector<float>& floats, float scale, hd::detail::isa which) {
  std::vector<Half> got(floats.size(), Half(0.0f));
  hd::detail::narrow<Scaled, Checked>(floats.data(), got.data(), floats.size(), scale, which);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < floats.size(); ++i)
    wrong += got[i].bits != Half(Scaled ? floats[i] * scale : floats[i]).bits;
  return wrong;
}

template <class Half> void bulk_is_scalar() {
  auto floats = hard_floats();
  for (std::uint64_t i = 0; i < 5000; ++i)
    for (std::uint32_t w : hd::philox(2, 0, i).word) floats.push_back(std::bit_cast<float>(w));
  std::vector<Half> halves(0x10000, Half(0.0f));
  for (std::uint32_t b = 0; b < 0x10000; ++b) halves[b].bits = static_cast<std::uint16_t>(b);

  for (hd::detail::isa which : all_isas) {
    if (which > hd::detail::best_isa()) continue;
    INFO("instruction set " << int(which));
    CHECK(wrong_ones<false, false, Half>(floats, 1.0f, which) == 0);
    CHECK(wrong_ones<false, true, Half>(floats, 1.0f, which) == 0);
    for (float scale : {1.0f, 0.125f, 3.0f, 65536.0f, -1e-30f}) {
      CHECK(wrong_ones<true, false, Half>(floats, scale, which) == 0);
      CHECK(wrong_ones<true, true, Half>(floats, scale, which) == 0);

      std::vector<float> wide(halves.size());
      hd::detail::widen<true>(halves.data(), wide.data(), halves.size(), scale, which);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < halves.size(); ++i) {
        const float want = static_cast<float>(halves[i]) * scale;
        wrong += std::memcmp(&want, &wide[i], 4) != 0;
      }
      CHECK(wrong == 0);
    }
    std::vector<float> wide(halves.size());
    hd::detail::widen<false>(halves.data(), wide.data(), halves.size(), 1.0f, which);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < halves.size(); ++i) {
      const float want = static_cast<float>(halves[i]);
      wrong += std::memcmp(&want, &wide[i], 4) != 0;
    }
    CHECK(wrong == 0);
  }
}

template <class Half> void sizes_and_alignments() {
  for (std::size_t n : {0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 1023, 1024, 1025, 10007})
    for (std::size_t shift : {0, 1, 3}) {
      std::vector<float> from(n + shift + 1), back(n + shift + 2, 77.0f);
      for (std::size_t i = 0; i < from.size(); ++i) from[i] = 4.0f * hd::random_uniform(3, n, i) - 2.0f;
      std::vector<Half> to(n + shift + 2, Half(77.0f));
      hd::convert(from.data() + shift, to.data() + shift + 1, n);
      hd::convert(to.data() + shift + 1, back.data() + shift, n);
      for (std::size_t i = 0; i < n; ++i) {
        REQUIRE(to[shift + 1 + i].bits == Half(from[shift + i]).bits);
        REQUIRE(back[shift + i] == static_cast<float>(Half(from[shift + i])));
      }
      CHECK(to[shift].bits == Half(77.0f).bits);  // nothing outside is touched
      CHECK(back[shift + n] == 77.0f);
      REQUIRE_FALSE(hd::convert_checked(from.data() + shift, to.data() + shift, n));
    }
}

// One bad value at every place of a run that has vector blocks and a tail.
template <class Half> void finds_bad(float bad, bool expected, float scale) {
  const std::size_t n = 67;
  for (hd::detail::isa which : all_isas) {
    if (which > hd::detail::best_isa()) continue;
    for (std::size_t place = 0; place < n; ++place) {
      std::vector<float> from(n, 0.5f);
      from[place] = bad;
      std::vector<Half> to(n, Half(0.0f));
      if (scale == 1.0f) REQUIRE(hd::detail::narrow<false, true>(from.data(), to.data(), n, scale, which) == expected);
      REQUIRE(hd::detail::narrow<true, true>(from.data(), to.data(), n, scale, which) == expected);
      REQUIRE(to[place].bits == Half(bad * scale).bits);
      REQUIRE(to[(place + 1) % n].bits == Half(0.5f * scale).bits);
    }
  }
  std::vector<float> from(n, bad);
  std::vector<Half> to(n, Half(0.0f));
  CHECK(hd::convert_checked(from.data(), to.data(), n, scale) == expected);
}

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

}  // namespace

static_assert(hd::float16(1.0f).bits == 0x3c00 && hd::float16(65519.99f).bits == 0x7bff);
static_assert(hd::float16(65520.0f).bits == 0x7c00 && hd::float16(0x1p-25f).bits == 0);
static_assert(hd::float16(0x1.000002p-25f).bits == 1 && hd::bfloat16(1.0f).bits == 0x3f80);
static_assert(std::is_trivially_copyable_v<hd::float16> && std::is_trivially_default_constructible_v<hd::bfloat16>);

TEST_CASE("core: every float16 and bfloat16 widens to its value and rounds back to itself") {
  round_trips<hd::float16>(5, 10);
  round_trips<hd::bfloat16>(8, 7);
}

TEST_CASE("core: float16 rounds to nearest even") { rounds<hd::float16>(5, 10); }
TEST_CASE("core: bfloat16 rounds to nearest even") { rounds<hd::bfloat16>(8, 7); }

TEST_CASE("core: bulk conversions have the scalar ones' bits on every instruction set") {
  bulk_is_scalar<hd::float16>();
  bulk_is_scalar<hd::bfloat16>();
}

TEST_CASE("core: bulk conversions take any size and alignment") {
  sizes_and_alignments<hd::float16>();
  sizes_and_alignments<hd::bfloat16>();
  hd::convert(static_cast<const float*>(nullptr), static_cast<hd::float16*>(nullptr), 0);
  hd::convert(static_cast<const float*>(nullptr), static_cast<float*>(nullptr), 0);
}

TEST_CASE("core: convert_checked tells lost values from kept ones") {
  for (float bad : {infinity, -infinity, not_a_number, -not_a_number}) {
    finds_bad<hd::float16>(bad, true, 1.0f);
    finds_bad<hd::bfloat16>(bad, true, 1.0f);
  }
  finds_bad<hd::float16>(65520.0f, true, 1.0f);
  finds_bad<hd::float16>(-65520.0f, true, 1.0f);
  finds_bad<hd::float16>(65519.0f, false, 1.0f);
  finds_bad<hd::float16>(65520.0f, false, 0.5f);
  finds_bad<hd::float16>(40000.0f, true, 2.0f);
  finds_bad<hd::float16>(1e-20f, false, 1.0f);
  finds_bad<hd::bfloat16>(std::numeric_limits<float>::max(), true, 1.0f);  // rounds up to infinity
  finds_bad<hd::bfloat16>(std::bit_cast<float>(0x7f7f8000u), true, 1.0f);  // the least that does
  finds_bad<hd::bfloat16>(std::bit_cast<float>(0x7f7f7fffu), false, 1.0f);
  finds_bad<hd::bfloat16>(1e30f, true, 1e30f);
  const float values[] = {1.0f, infinity, 1e38f};
  float out[3];
  CHECK_FALSE(hd::convert_checked(values, out, 1));
  CHECK(hd::convert_checked(values, out, 2));
  CHECK(hd::convert_checked(values + 2, out, 1, 10.0f));
}

TEST_CASE("core: convert_scaled multiplies in float") {
  const float from[] = {1.0f, 3.0f, 1e-7f};
  hd::float16 half[3];
  hd::convert_scaled(from, half, 3, 1024.0f);
  for (int i = 0; i < 3; ++i) CHECK(half[i].bits == hd::float16(from[i] * 1024.0f).bits);
  float back[3];
  hd::convert_scaled(half, back, 3, 1.0f / 1024.0f);
  CHECK(back[0] == 1.0f);
  CHECK(back[2] == Approx(1e-7).epsilon(1e-3));
  hd::convert_scaled(from, back, 3, 2.0f);
  CHECK(back[1] == 6.0f);
}

TEST_CASE("core: convert_scaled from float to float takes any size, in place too, on every instruction set") {
  for (hd::detail::isa which : all_isas) {
    if (which > hd::detail::best_isa()) continue;
    for (std::size_t n : {0, 1, 7, 8, 9, 70, 1023, 1024, 1025}) {
      std::vector<float> from(n + 1), to(n + 2, 77.0f), want(n);
      for (std::size_t i = 0; i < n; ++i) from[i + 1] = hd::random_normal(5, n, i);
      for (std::size_t i = 0; i < n; ++i) want[i] = from[i + 1] * -3.3f;
      hd::detail::multiply(from.data() + 1, to.data() + 1, n, -3.3f, which);
      CHECK(std::equal(want.begin(), want.end(), to.begin() + 1));
      CHECK((to.front() == 77.0f && to.back() == 77.0f));
      hd::detail::multiply(from.data() + 1, from.data() + 1, n, -3.3f, which);
      CHECK(std::equal(want.begin(), want.end(), from.begin() + 1));
    }
  }
}

TEST_CASE("core: all_finite finds one value at any position, on every instruction set") {
  using limits = std::numeric_limits<float>;
  std::vector<float> finite = {0.0f, -0.0f, limits::max(), -limits::max(), limits::min(), limits::denorm_min(),
                               -limits::denorm_min(), std::bit_cast<float>(0x007fffffu)};
  std::vector<float> others = {infinity, -infinity, not_a_number, -not_a_number};
  for (std::uint32_t nan : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu})
    others.push_back(std::bit_cast<float>(nan));
  std::vector<std::size_t> sizes = {1023, 1024, 1025};
  for (std::size_t n = 0; n <= 70; ++n) sizes.push_back(n);
  std::size_t wrong = 0;
  for (std::size_t n : sizes) {
    // neither the element before nor the one after counts
    std::vector<float> x(n + 2, not_a_number);
    for (std::size_t i = 0; i < n; ++i) x[i + 1] = finite[i % finite.size()];
    const auto count = [&](bool expected) {
      wrong += hd::all_finite(x.data() + 1, n) != expected;
      for (hd::detail::isa which : all_isas)
        wrong += which <= hd::detail::best_isa() && hd::detail::finite(x.data() + 1, n, which) != expected;
    };
    count(true);
    for (std::size_t place = 1; place <= n; ++place) {
      const float before = x[place];
      for (float bad : others) {
        std::memcpy(&x[place], &bad, sizeof bad);
        count(false);
      }
      x[place] = before;
    }
  }
  CHECK(wrong == 0);
  CHECK(hd::all_finite(nullptr, 0));
}

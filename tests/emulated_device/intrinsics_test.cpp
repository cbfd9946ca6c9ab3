// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// The stateless part of the emulated device against oracles that share nothing with it: tables of all numbers of a
// format and quadruple precision for half and bfloat16, the processor's own rounding modes for float and double, and
// naive loops for integers.
#include "emulated_device/include/emulated/intrinsics.h"
#include "emulated_device/include/cuda_bf16.h"
#include "emulated_device/include/cuda_fp16.h"
#include "emulated_device/include/vector_functions.h"

#include "support/catch.hpp"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

// The runtime's, where it is linked in; alone, the tests bring their own.

namespace {

#ifdef __SIZEOF_FLOAT128__
__extension__ typedef __float128 quad;
#else
typedef long double quad;  // 113 bits wherever there is no __float128
#endif

using emulated::rounding;
constexpr rounding all_modes[] = {rounding::nearest, rounding::zero, rounding::down, rounding::up};
constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();
constexpr double inf_d = std::numeric_limits<double>::infinity();

// ---- Narrow formats ----

struct half_case {
  using type = __half;
  static constexpr int exponent_bits = 5, fraction_bits = 10;
  static unsigned short bits(__half x) { return __half_as_ushort(x); }
  static __half make(unsigned b) { return __ushort_as_half(static_cast<unsigned short>(b)); }
  static __half from(float x, rounding mode) {
    switch (mode) {
      case rounding::nearest: return __float2half_rn(x);
      case rounding::zero: return __float2half_rz(x);
      case rounding::down: return __float2half_rd(x);
      case rounding::up: break;
    }
    return __float2half_ru(x);
  }
  static __half from(double x) { return __double2half(x); }
};

struct bfloat16_case {
  using type = __nv_bfloat16;
  static constexpr int exponent_bits = 8, fraction_bits = 7;
  static unsigned short bits(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
  static __nv_bfloat16 make(unsigned b) { return __ushort_as_bfloat16(static_cast<unsigned short>(b)); }
  static __nv_bfloat16 from(float x, rounding mode) {
    switch (mode) {
      case rounding::nearest: return __float2bfloat16_rn(x);
      case rounding::zero: return __float2bfloat16_rz(x);
      case rounding::down: return __float2bfloat16_rd(x);
      case rounding::up: break;
    }
    return __float2bfloat16_ru(x);
  }
  static __nv_bfloat16 from(double x) { return __double2bfloat16(x); }
};

/// What the bits mean, by the definition of the format.
template <class C> double meaning(unsigned bits) {
  const int bias = (1 << (C::exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> C::fraction_bits & ((1u << C::exponent_bits) - 1));
  const double fraction = std::ldexp(static_cast<double>(bits & ((1u << C::fraction_bits) - 1)), -C::fraction_bits);
  double x = 0;
  if (exponent == (1 << C::exponent_bits) - 1)
    x = fraction == 0 ? inf_d : std::nan("");
  else if (exponent == 0)
    x = std::ldexp(fraction, 1 - bias);
  else
    x = std::ldexp(1 + fraction, exponent - bias);
  return bits & 0x8000 ? -x : x;
}

template <class C> constexpr unsigned infinity = ((1u << C::exponent_bits) - 1) << C::fraction_bits;

/// The non-negative finite numbers in order, then what would be the next: a number's bits are its index.
template <class C> const std::vector<double>& numbers() {
  static const std::vector<double> table = [] {
    std::vector<double> t;
    for (unsigned b = 0; b != infinity<C>; ++b) t.push_back(meaning<C>(b));
    t.push_back(std::ldexp(1.0, 1 << (C::exponent_bits - 1)));
    return t;
  }();
  return table;
}

/// The bits of an exact number, rounded by looking it up.
template <class C> unsigned reference(quad x, bool negative, rounding mode) {
  const auto& t = numbers<C>();
  const unsigned sign = negative ? 0x8000 : 0;
  const quad m = negative ? -x : x;
  const auto after = std::upper_bound(t.begin(), t.end(), m, [](quad a, double b) { return a < static_cast<quad>(b); });
  const bool away = mode == (negative ? rounding::down : rounding::up);
  if (after == t.end()) return sign | (mode == rounding::nearest || away ? infinity<C> : infinity<C> - 1);
  const auto high = static_cast<unsigned>(after - t.begin());
  const unsigned low = high - 1;
  if (m == static_cast<quad>(t[low])) return sign | low;
  if (mode == rounding::zero) return sign | low;
  if (mode != rounding::nearest) return sign | (away ? high : low);
  const quad middle = (static_cast<quad>(t[low]) + static_cast<quad>(t[high])) / 2;
  if (m == middle) return sign | (low % 2 == 0 ? low : high);
  return sign | (m < middle ? low : high);
}

template <class C> unsigned reference(quad x, rounding mode = rounding::nearest) {
  return reference<C>(x, x < 0, mode);
}

/// Passes over millions of comparisons and reports the first few that fail.
struct counter {
  int failures = 0;
  template <class T> void expect(T actual, T expected, const char* what, double a, double b = 0, double c = 0) {
    if (actual == expected || ++failures > 3) return;
    UNSCOPED_INFO(what << ": " << +actual << " instead of " << +expected << " of " << a << ", " << b << ", " << c);
  }
  ~counter() { CHECK(failures == 0); }
};

template <class C> unsigned random_bits(std::mt19937_64& random) {
  unsigned b = static_cast<unsigned>(random() & 0xffff);
  if ((b & 0x7fff) > infinity<C>) b &= 0x8000 | infinity<C>;
  return b;
}

}  // namespace

TEMPLATE_TEST_CASE("All 65,536 narrow numbers convert to float exactly", "[numbers]", half_case, bfloat16_case) {
  counter count;
  for (unsigned b = 0; b != 65536; ++b) {
    const auto h = TestType::make(b);
    const double expected = meaning<TestType>(b);
    const float actual = static_cast<float>(h);
    if (std::isnan(expected)) {
      count.expect(std::isnan(actual), true, "NaN", b);
      count.expect<unsigned>(TestType::bits(TestType::from(actual, rounding::nearest)), 0x7fff, "canonical NaN", b);
      count.expect(__hisnan(h), true, "__hisnan", b);
    } else {
      count.expect<double>(actual, expected, "value", b);
      count.expect(std::signbit(actual), std::signbit(expected), "sign", b);
      count.expect<unsigned>(TestType::bits(TestType::from(actual, rounding::nearest)), b, "round trip", b);
      count.expect<unsigned>(TestType::bits(TestType::from(expected)), b, "round trip of double", b);
    }
    count.expect(__hisinf(h), std::isinf(expected) ? (expected > 0 ? 1 : -1) : 0, "__hisinf", b);
    count.expect(static_cast<bool>(h), expected != 0, "bool", b);
  }
  CHECK(__float_as_uint(__half2float(__ushort_as_half(0xfc01))) == 0x7fffffff);
  CHECK(__float_as_uint(__bfloat162float(__ushort_as_bfloat16(0xff81))) == 0xff810000);
}

TEMPLATE_TEST_CASE("Narrow numbers round from float and double at every boundary", "[numbers]", half_case,
                   bfloat16_case) {
  counter count;
  const auto check = [&](float x) {
    for (const float signed_x : {x, -x}) {
      for (const auto mode : all_modes) {
        count.expect<unsigned>(TestType::bits(TestType::from(signed_x, mode)),
                               reference<TestType>(static_cast<quad>(signed_x), std::signbit(signed_x), mode),
                               "from float", signed_x);
      }
    }
  };
  const auto check_double = [&](double x) {
    for (const double signed_x : {x, -x}) {
      count.expect<unsigned>(
          TestType::bits(TestType::from(signed_x)),
          reference<TestType>(static_cast<quad>(signed_x), std::signbit(signed_x), rounding::nearest), "from double",
          signed_x);
    }
  };
  const auto& t = numbers<TestType>();
  for (std::size_t i = 0; i + 1 != t.size(); ++i) {
    const double middle = (t[i] + t[i + 1]) / 2;
    for (const double x : {t[i], middle}) {
      const auto f = static_cast<float>(x);
      check(f);
      check(std::nextafter(f, inf));
      check(std::nextafter(f, 0.0f));
      check_double(x);
      check_double(std::nextafter(x, inf_d));
      check_double(std::nextafter(x, 0.0));
    }
  }
  for (const float x : {std::numeric_limits<float>::max(), std::numeric_limits<float>::min(), 0x1p-149f}) check(x);
  for (const double x : {1e300, 1e-300, 5e-324}) check_double(x);
  std::mt19937_64 random(1);
  for (int i = 0; i != 200000; ++i) {
    const auto x = std::bit_cast<float>(static_cast<unsigned>(random()));
    if (std::isfinite(x)) check(x);
    check_double(std::ldexp(static_cast<double>(random()), static_cast<int>(random() % 60) - 95));
  }
  for (const auto mode : all_modes) {
    CHECK(TestType::bits(TestType::from(quiet_nan, mode)) == 0x7fff);
    CHECK(TestType::bits(TestType::from(-quiet_nan, mode)) == 0x7fff);
    CHECK(TestType::bits(TestType::from(inf, mode)) == infinity<TestType>);
    CHECK(TestType::bits(TestType::from(-inf, mode)) == (infinity<TestType> | 0x8000));
  }
  CHECK(TestType::bits(TestType::from(std::nan(""))) == 0x7fff);
}

TEMPLATE_TEST_CASE("Narrow arithmetic is the exact result, rounded once", "[numbers]", half_case, bfloat16_case) {
  using H = typename TestType::type;
  counter count;
  std::mt19937_64 random(2);
  for (int i = 0; i != 200000; ++i) {
    const H a = TestType::make(random_bits<TestType>(random));
    const H b = TestType::make(random_bits<TestType>(random));
    const double x = static_cast<float>(a);
    const double y = static_cast<float>(b);
    const auto check = [&](H actual, double special, quad exact, const char* what) {
      unsigned expected = 0x7fff;
      if (std::isinf(special))
        expected = infinity<TestType> | (special < 0 ? 0x8000 : 0);
      else if (!std::isnan(special))
        expected = reference<TestType>(exact, std::signbit(special), rounding::nearest);
      count.expect<unsigned>(TestType::bits(actual), expected, what, x, y);
    };
    check(a + b, x + y, static_cast<quad>(x) + static_cast<quad>(y), "a + b");
    check(a - b, x - y, static_cast<quad>(x) - static_cast<quad>(y), "a - b");
    check(a * b, x * y, static_cast<quad>(x) * static_cast<quad>(y), "a * b");
    if (y != 0) check(a / b, x / y, static_cast<quad>(x) / static_cast<quad>(y), "a / b");
  }
}

TEMPLATE_TEST_CASE("Narrow fused multiply-add rounds once", "[numbers]", half_case, bfloat16_case) {
  using H = typename TestType::type;
  counter count;
  std::mt19937_64 random(3);
  int differs_from_float = 0;
  for (int i = 0; i != 1000000; ++i) {
    // Exponents within +-20, so that quadruple precision holds the sum exactly.
    const auto draw = [&](int least, int most) {
      const double sign = random() & 1 ? -1 : 1;
      const auto significand =
          static_cast<double>((random() & ((1u << TestType::fraction_bits) - 1)) | 1u << TestType::fraction_bits);
      const int exponent = least + static_cast<int>(random() % static_cast<unsigned>(most - least + 1));
      return TestType::from(std::ldexp(sign * significand, exponent - TestType::fraction_bits));
    };
    const H a = draw(-7, 7);
    const H b = draw(-7, 7);
    const H c = draw(-20, 14);
    const float x = a, y = b, z = c;
    const quad exact = static_cast<quad>(x) * static_cast<quad>(y) + static_cast<quad>(z);
    const unsigned expected = reference<TestType>(exact);
    count.expect<unsigned>(TestType::bits(__hfma(a, b, c)), expected, "__hfma", x, y, z);
    count.expect<unsigned>(TestType::bits(__hfma_relu(a, b, c)), exact < 0 ? 0 : expected, "__hfma_relu", x, y, z);
    const unsigned one = TestType::bits(TestType::from(1.0));
    count.expect<unsigned>(TestType::bits(__hfma_sat(a, b, c)), exact < 0 ? 0 : std::min(expected, one), "__hfma_sat",
                           x, y, z);
    if (TestType::bits(TestType::from(std::fma(x, y, z), rounding::nearest)) != expected) ++differs_from_float;
  }
  CHECK(differs_from_float > 0);  // the cases do tell one rounding from two
  // 1.001 * 1.001 and a little more than half a unit, less, and with either sign.
  const H one = TestType::from(1.0);
  const H tiny = TestType::from(std::ldexp(1.0, -14));
  const H unit = TestType::from(1 + std::ldexp(1.0, -TestType::fraction_bits));
  const quad exact = static_cast<quad>(static_cast<float>(unit)) * static_cast<quad>(static_cast<float>(unit));
  CHECK(TestType::bits(__hfma(unit, unit, tiny)) == reference<TestType>(exact + static_cast<quad>(0x1p-14)));
  CHECK(TestType::bits(__hfma(unit, unit, __hneg(tiny))) == reference<TestType>(exact - static_cast<quad>(0x1p-14)));
  CHECK(TestType::bits(__hfma(one, one, __hneg(one))) == 0);
}

TEST_CASE("Half's fused multiply-add rounds once over its whole range", "[numbers]") {
  counter count;
  std::mt19937_64 random(4);
  for (int i = 0; i != 500000; ++i) {
    const __half a = half_case::make(random_bits<half_case>(random));
    const __half b = half_case::make(random_bits<half_case>(random));
    const __half c = half_case::make(random_bits<half_case>(random));
    const double x = static_cast<float>(a), y = static_cast<float>(b), z = static_cast<float>(c);
    const double special = x * y + z;
    if (!std::isfinite(special) || special == 0) continue;
    const quad exact = static_cast<quad>(x) * static_cast<quad>(y) + static_cast<quad>(z);
    count.expect<unsigned>(__half_as_ushort(__hfma(a, b, c)), reference<half_case>(exact), "__hfma", x, y, z);
  }
}

TEMPLATE_TEST_CASE("Narrow comparisons and extremes know NaN and the sign of zero", "[numbers]", half_case,
                   bfloat16_case) {
  using H = typename TestType::type;
  const H values[] = {TestType::make(0x0000),
                      TestType::make(0x8000),
                      TestType::make(0x0001),
                      TestType::make(0x8001),
                      TestType::make(infinity<TestType> - 1),
                      TestType::make(infinity<TestType>),
                      TestType::make(infinity<TestType> | 0x8000),
                      TestType::make(infinity<TestType> | 0x0001),
                      TestType::make(0xffff),
                      TestType::from(1.0),
                      TestType::from(-2.0)};
  for (const H a : values) {
    for (const H b : values) {
      const float x = a;
      const float y = b;
      const bool either = std::isnan(x) || std::isnan(y);
      CHECK(__heq(a, b) == (x == y));
      CHECK(__hne(a, b) == (!either && x != y));
      CHECK(__hlt(a, b) == (x < y));
      CHECK(__hle(a, b) == (x <= y));
      CHECK(__hgt(a, b) == (x > y));
      CHECK(__hge(a, b) == (x >= y));
      CHECK(__hequ(a, b) == (either || x == y));
      CHECK(__hneu(a, b) == (x != y));
      CHECK(__hltu(a, b) == !(x >= y));
      CHECK(__hleu(a, b) == !(x > y));
      CHECK(__hgtu(a, b) == !(x <= y));
      CHECK(__hgeu(a, b) == !(x < y));
      CHECK((a != b) == (x != y));
      if (std::isnan(x) && std::isnan(y)) {
        CHECK(TestType::bits(__hmax(a, b)) == 0x7fff);
        CHECK(TestType::bits(__hmin(a, b)) == 0x7fff);
      } else {
        const float larger = std::isnan(x) ? y : std::isnan(y) ? x : std::max(x, y);
        const float smaller = std::isnan(x) ? y : std::isnan(y) ? x : std::min(x, y);
        CHECK(static_cast<float>(__hmax(a, b)) == larger);
        CHECK(static_cast<float>(__hmin(a, b)) == smaller);
      }
      if (either)
        CHECK(TestType::bits(__hmax_nan(a, b)) == 0x7fff);
      else
        CHECK(TestType::bits(__hmax_nan(a, b)) == TestType::bits(__hmax(a, b)));
      if (either)
        CHECK(TestType::bits(__hmin_nan(a, b)) == 0x7fff);
      else
        CHECK(TestType::bits(__hmin_nan(a, b)) == TestType::bits(__hmin(a, b)));
    }
  }
  CHECK(TestType::bits(__hmax(values[0], values[1])) == 0x0000);
  CHECK(TestType::bits(__hmax(values[1], values[0])) == 0x0000);
  CHECK(TestType::bits(__hmin(values[0], values[1])) == 0x8000);
  CHECK(TestType::bits(__hmin(values[1], values[0])) == 0x8000);
  CHECK(TestType::bits(__hadd_sat(TestType::make(0x7fff), values[0])) == 0);
  CHECK(TestType::bits(__hmul_sat(TestType::from(3.0), TestType::from(3.0))) == TestType::bits(TestType::from(1.0)));
  CHECK(TestType::bits(__hsub_sat(values[0], TestType::from(3.0))) == 0);
}

TEMPLATE_TEST_CASE("Narrow numbers convert to integers in every mode, saturating", "[numbers]", half_case,
                   bfloat16_case) {
  counter count;
  const auto check = [&](auto actual, double x, double whole, const char* what) {
    using limits = std::numeric_limits<decltype(actual)>;
    auto expected = limits::max();
    if (std::isnan(x))
      expected = sizeof actual == 8 ? static_cast<decltype(actual)>(1ull << 63) : 0;
    else if (whole < static_cast<double>(limits::max())) {
      expected = whole <= static_cast<double>(limits::min()) ? limits::min() : static_cast<decltype(actual)>(whole);
    }
    count.expect(actual, expected, what, x);
  };
  for (unsigned b = 0; b != 65536; ++b) {
    const auto h = TestType::make(b);
    const double x = meaning<TestType>(b);
    const double near = std::nearbyint(x), down = std::floor(x), up = std::ceil(x), zero = std::trunc(x);
    check(static_cast<signed char>(h), x, zero, "signed char");
    check(static_cast<unsigned char>(h), x, zero, "unsigned char");
    check(static_cast<long>(h), x, zero, "long");
    if constexpr (std::is_same_v<TestType, half_case>) {
      check(__half2short_rn(h), x, near, "short_rn");
      check(__half2ushort_rd(h), x, down, "ushort_rd");
      check(__half2int_rn(h), x, near, "int_rn");
      check(__half2int_rz(h), x, zero, "int_rz");
      check(__half2int_rd(h), x, down, "int_rd");
      check(__half2int_ru(h), x, up, "int_ru");
      check(__half2uint_rn(h), x, near, "uint_rn");
      check(__half2ll_ru(h), x, up, "ll_ru");
      check(__half2ull_rn(h), x, near, "ull_rn");
    } else {
      check(__bfloat162short_ru(h), x, up, "short_ru");
      check(__bfloat162ushort_rz(h), x, zero, "ushort_rz");
      check(__bfloat162int_rn(h), x, near, "int_rn");
      check(__bfloat162int_rd(h), x, down, "int_rd");
      check(__bfloat162uint_ru(h), x, up, "uint_ru");
      check(__bfloat162ll_rn(h), x, near, "ll_rn");
      check(__bfloat162ull_rz(h), x, zero, "ull_rz");
    }
  }
}

TEST_CASE("Integers convert to narrow numbers in every mode", "[numbers]") {
  counter count;
  std::mt19937_64 random(5);
  for (int i = 0; i != 300000; ++i) {
    const auto u = random() >> random() % 64;
    const auto s = static_cast<long long>(random()) >> random() % 64;
    const auto n = static_cast<int>(s);
    const auto qu = static_cast<quad>(u);
    const auto qs = static_cast<quad>(s);
    const auto qn = static_cast<quad>(n);
    const auto d = static_cast<double>(s);
    count.expect<unsigned>(half_case::bits(__ull2half_rn(u)), reference<half_case>(qu), "ull_rn", d);
    count.expect<unsigned>(half_case::bits(__ll2half_rz(s)), reference<half_case>(qs, rounding::zero), "ll_rz", d);
    count.expect<unsigned>(half_case::bits(__int2half_rd(n)), reference<half_case>(qn, rounding::down), "int_rd", d);
    count.expect<unsigned>(half_case::bits(__half(n)), reference<half_case>(qn), "int", d);
    count.expect<unsigned>(bfloat16_case::bits(__ull2bfloat16_ru(u)), reference<bfloat16_case>(qu, rounding::up),
                           "bf16 ull_ru", d);
    count.expect<unsigned>(bfloat16_case::bits(__ll2bfloat16_rd(s)), reference<bfloat16_case>(qs, rounding::down),
                           "bf16 ll_rd", d);
    count.expect<unsigned>(bfloat16_case::bits(__int2bfloat16_rz(n)), reference<bfloat16_case>(qn, rounding::zero),
                           "bf16 int_rz", d);
    count.expect<unsigned>(bfloat16_case::bits(__nv_bfloat16(s)), reference<bfloat16_case>(qs), "bf16 long", d);
  }
}

TEST_CASE("Functions of half and bfloat16 match double precision", "[numbers]") {
  counter count;
  for (unsigned b = 0; b != 65536; ++b) {
    const __half h = half_case::make(b);
    const double x = meaning<half_case>(b);
    const auto check = [&](__half actual, double expected, const char* what) {
      const unsigned bits = std::isnan(expected)   ? 0x7fff
                            : std::isinf(expected) ? infinity<half_case> | (expected < 0 ? 0x8000 : 0)
                                                   : reference<half_case>(static_cast<quad>(expected),
                                                                          std::signbit(expected), rounding::nearest);
      count.expect<unsigned>(__half_as_ushort(actual), bits, what, x);
    };
    check(hexp(h), std::exp(x), "hexp");
    check(hlog2(h), std::log2(x), "hlog2");
    check(hsqrt(h), std::sqrt(x), "hsqrt");
    check(hrsqrt(h), 1 / std::sqrt(x), "hrsqrt");
    check(hrcp(h), 1 / x, "hrcp");
    check(htanh(h), std::tanh(x), "htanh");
    check(hceil(h), std::ceil(x), "hceil");
    check(hfloor(h), std::floor(x), "hfloor");
    check(htrunc(h), std::trunc(x), "htrunc");
    check(hrint(h), std::nearbyint(x), "hrint");
    check(__hneg(h), -x, "__hneg");
    check(__habs(h), std::fabs(x), "__habs");
  }
  const __nv_bfloat162 pair(__nv_bfloat16(4.0f), __nv_bfloat16(0.25f));
  CHECK(static_cast<float>(h2sqrt(pair).x) == 2.0f);
  CHECK(static_cast<float>(h2rcp(pair).y) == 4.0f);
  CHECK(static_cast<float>(h2log2(pair).y) == -2.0f);
}

TEST_CASE("Pairs keep their halves apart", "[numbers]") {
  const __half a(1.0f), b(2.0f);
  const __half2 p = __halves2half2(a, b);
  const __half2 q = make_half2(b, b);
  CHECK(__low2float(p) == 1.0f);
  CHECK(__high2float(p) == 2.0f);
  CHECK(__low2float(__lowhigh2highlow(p)) == 2.0f);
  CHECK(static_cast<float>(__high2half(__lows2half2(p, q))) == 2.0f);
  CHECK(static_cast<float>(__low2half(__highs2half2(p, q))) == 2.0f);
  CHECK(__half22float2(__half2half2(b)).y == 2.0f);
  CHECK(__half22float2(__float22half2_rn(make_float2(3.0f, 4.0f))).x == 3.0f);
  CHECK(__high2float(__floats2half2_rn(5.0f, 6.0f)) == 6.0f);
  CHECK(__low2float(p + q) == 3.0f);
  CHECK(__high2float(__hfma2(p, q, q)) == 6.0f);
  CHECK(__heq2_mask(p, q) == 0xffff0000);
  CHECK(__hlt2_mask(p, q) == 0x0000ffff);
  CHECK(__low2float(__heq2(p, q)) == 0.0f);
  CHECK(__high2float(__heq2(p, q)) == 1.0f);
  CHECK_FALSE(p == q);
  CHECK_FALSE(p != q);  // true only if both halves differ
  CHECK(__hble2(p, q));
  __half2 r = p;
  CHECK(__low2float(r++) == 1.0f);
  CHECK(__high2float(--r) == 2.0f);
  const __half2 c = __hcmadd(make_half2(a, b), make_half2(b, a), make_half2(a, a));  // (1+2i)(2+i) + 1+i
  CHECK(__low2float(c) == 1.0f);
  CHECK(__high2float(c) == 6.0f);
  CHECK(static_cast<float>(__half(__nv_bfloat16(1.5f))) == 1.5f);
  CHECK(static_cast<float>(__nv_bfloat16(__half(1.5f))) == 1.5f);
}

// ---- Float and double ----

namespace {

int fenv_mode(rounding mode) {
  switch (mode) {
    case rounding::nearest: return FE_TONEAREST;
    case rounding::zero: return FE_TOWARDZERO;
    case rounding::down: return FE_DOWNWARD;
    case rounding::up: break;
  }
  return FE_UPWARD;
}

/// A value that the compiler knows nothing about and computes neither earlier nor later.
template <class T> T opaque(T x) {
  asm volatile("" : "+m"(x)::"memory");
  return x;
}

/// Evaluates in the processor's mode.
template <class Function, class... T> auto in_mode(rounding mode, Function f, T... operands) {
  std::fesetround(fenv_mode(mode));
  const auto result = opaque(f(opaque(operands)...));
  std::fesetround(FE_TONEAREST);
  return result;
}

template <class T> T random_number(std::mt19937_64& random, bool near_one) {
  using format = emulated::format_of<T>;
  static constexpr T special[] = {T(0),
                                  T(1),
                                  T(2),
                                  std::numeric_limits<T>::infinity(),
                                  std::numeric_limits<T>::max(),
                                  std::numeric_limits<T>::min(),
                                  std::numeric_limits<T>::denorm_min(),
                                  T(1.5)};
  if (random() % 16 == 0) {
    const T x = special[random() % 8];
    return random() & 1 ? -x : x;
  }
  auto bits = static_cast<typename format::bits>(random());
  if (random() % 4 == 0) bits &= static_cast<typename format::bits>(~std::uint64_t{0} << format::fraction / 2);
  auto x = std::bit_cast<T>(bits);
  if (std::isnan(x)) x = T(1);
  if (!near_one || !std::isfinite(x)) return x;
  int exponent = 0;
  return std::ldexp(std::frexp(x, &exponent), static_cast<int>(random() % 8));
}

}  // namespace

#define CHECK_IN_ALL_MODES(name, expression)                                   \
  same(name##_rn(OPERANDS),                                                    \
       in_mode(                                                                \
           rounding::nearest, [](auto... o) { return expression; }, OPERANDS), \
       #name "_rn");                                                           \
  same(name##_rz(OPERANDS),                                                    \
       in_mode(                                                                \
           rounding::zero, [](auto... o) { return expression; }, OPERANDS),    \
       #name "_rz");                                                           \
  same(name##_rd(OPERANDS),                                                    \
       in_mode(                                                                \
           rounding::down, [](auto... o) { return expression; }, OPERANDS),    \
       #name "_rd");                                                           \
  same(name##_ru(OPERANDS),                                                    \
       in_mode(                                                                \
           rounding::up, [](auto... o) { return expression; }, OPERANDS),      \
       #name "_ru")

TEST_CASE("Directed float arithmetic matches the processor's modes", "[numbers]") {
  counter count;
  std::mt19937_64 random(6);
  for (int i = 0; i != 200000; ++i) {
    const bool near_one = i % 2 == 0;
    const auto x = random_number<float>(random, near_one);
    const auto y = i % 64 == 1 ? -x : random_number<float>(random, near_one);
    const auto z = i % 64 == 2 ? -x * y : random_number<float>(random, near_one);
    const auto same = [&](float actual, float expected, const char* what) {
      const unsigned bits = std::isnan(expected) ? 0x7fffffff : std::bit_cast<unsigned>(expected);
      count.expect(std::bit_cast<unsigned>(actual), bits, what, x, y, z);
    };
#define OPERANDS x, y
    CHECK_IN_ALL_MODES(__fadd, (o + ...));
    CHECK_IN_ALL_MODES(__fsub, (o - ...));
    CHECK_IN_ALL_MODES(__fmul, (o * ...));
    CHECK_IN_ALL_MODES(__fdiv, (o / ...));
#undef OPERANDS
#define OPERANDS x
    CHECK_IN_ALL_MODES(__frcp, (1.0f / ... / o));
    CHECK_IN_ALL_MODES(__fsqrt, std::sqrt(o...));
#undef OPERANDS
#define OPERANDS x, y, z
    CHECK_IN_ALL_MODES(__fmaf, std::fma(o...));
#undef OPERANDS
  }
}

TEST_CASE("Directed double arithmetic matches the processor's modes", "[numbers]") {
  counter count;
  std::mt19937_64 random(7);
  for (int i = 0; i != 200000; ++i) {
    const bool near_one = i % 2 == 0;
    const auto x = random_number<double>(random, near_one);
    const auto y = i % 64 == 1 ? -x : random_number<double>(random, near_one);
    const auto z = i % 64 == 2 ? -x * y : random_number<double>(random, near_one);
    const auto same = [&](double actual, double expected, const char* what) {
      if (std::isnan(expected)) return count.expect(std::isnan(actual), true, what, x, y, z);
      count.expect(std::bit_cast<std::uint64_t>(actual), std::bit_cast<std::uint64_t>(expected), what, x, y, z);
    };
#define OPERANDS x, y
    CHECK_IN_ALL_MODES(__dadd, (o + ...));
    CHECK_IN_ALL_MODES(__dsub, (o - ...));
    CHECK_IN_ALL_MODES(__dmul, (o * ...));
    CHECK_IN_ALL_MODES(__ddiv, (o / ...));
#undef OPERANDS
#define OPERANDS x
    CHECK_IN_ALL_MODES(__drcp, (1.0 / ... / o));
    CHECK_IN_ALL_MODES(__dsqrt, std::sqrt(o...));
#undef OPERANDS
#define OPERANDS x, y, z
    CHECK_IN_ALL_MODES(__fma, std::fma(o...));
#undef OPERANDS
  }
}

TEST_CASE("A directed rounding is on its side of the exact value", "[numbers]") {
  CHECK(__fadd_ru(1.0f, 0x1p-149f) == std::nextafter(1.0f, inf));
  CHECK(__fadd_rd(1.0f, 0x1p-149f) == 1.0f);
  CHECK(__fadd_rd(1.0f, -0x1p-149f) == std::nextafter(1.0f, 0.0f));
  CHECK(__fadd_rz(-1.0f, 0x1p-149f) == std::nextafter(-1.0f, 0.0f));
  CHECK(std::signbit(__fadd_rd(1.0f, -1.0f)));
  CHECK_FALSE(std::signbit(__fadd_rn(1.0f, -1.0f)));
  CHECK(__fmul_rz(0x1p127f, 4.0f) == std::numeric_limits<float>::max());
  CHECK(__fmul_ru(-0x1p127f, 4.0f) == -std::numeric_limits<float>::max());
  CHECK(__fmul_rd(-0x1p127f, 4.0f) == -inf);
  CHECK(__fmul_ru(0x1p-149f, 0x1p-149f) == 0x1p-149f);
  CHECK(__dmul_ru(0x1p-1074, 0x1p-1074) == 0x1p-1074);
  CHECK(__fma_rd(0x1p-1074, 0x1p-1074, 1.0) == 1.0);
  CHECK(__fma_rd(-0x1p-1074, 0x1p-1074, 1.0) == std::nextafter(1.0, 0.0));
  CHECK(__float_as_uint(__fmul_rn(inf, 0.0f)) == 0x7fffffff);
}

TEST_CASE("The reciprocal root is the nearest float", "[numbers]") {
  counter count;
  std::mt19937_64 random(8);
  for (int i = 0; i != 500000; ++i) {
    const float x = std::fabs(random_number<float>(random, i % 2 == 0));
    if (x == 0 || std::isinf(x)) continue;
    const float r = __frsqrt_rn(x);
    // The exact value lies between the midpoints to r's neighbours; a midpoint's square times x is exact here.
    const auto squared_midpoint = [&](float neighbour) {
      const quad middle = (static_cast<quad>(r) + static_cast<quad>(neighbour)) / 2;
      return middle * middle * static_cast<quad>(x);
    };
    count.expect(squared_midpoint(std::nextafter(r, 0.0f)) < 1, true, "above", x);
    count.expect(squared_midpoint(std::nextafter(r, inf)) > 1, true, "below", x);
  }
  CHECK(__frsqrt_rn(4.0f) == 0.5f);
  CHECK(__frsqrt_rn(0.0f) == inf);
  CHECK(__frsqrt_rn(-0.0f) == -inf);
  CHECK(__frsqrt_rn(inf) == 0.0f);
  CHECK(std::isnan(__frsqrt_rn(-1.0f)));
}

TEST_CASE("Floating point converts to integers in every mode, saturating", "[numbers]") {
  counter count;
  std::mt19937_64 random(9);
  const auto check = [&](auto actual, auto x, long double whole, const char* what) {
    using limits = std::numeric_limits<decltype(actual)>;
    auto expected = limits::max();
    if (std::isnan(x)) {
      const bool wide = sizeof actual == 8 || sizeof x == 8;
      expected = wide ? static_cast<decltype(actual)>(1ull << (sizeof actual * 8 - 1)) : 0;
    } else if (whole <= static_cast<long double>(limits::min()))
      expected = limits::min();
    else if (whole < static_cast<long double>(limits::max()))
      expected = static_cast<decltype(actual)>(whole);
    count.expect(actual, expected, what, x);
  };
  const auto whole = [](rounding mode, auto x) -> long double {
    const auto l = static_cast<long double>(x);
    switch (mode) {
      case rounding::nearest: return std::nearbyint(l);
      case rounding::zero: return std::trunc(l);
      case rounding::down: return std::floor(l);
      case rounding::up: break;
    }
    return std::ceil(l);
  };
#define CHECK_TO(name)                                              \
  check(name##_rn(x), x, whole(rounding::nearest, x), #name "_rn"); \
  check(name##_rz(x), x, whole(rounding::zero, x), #name "_rz");    \
  check(name##_rd(x), x, whole(rounding::down, x), #name "_rd");    \
  check(name##_ru(x), x, whole(rounding::up, x), #name "_ru")
  const auto check_float = [&](float x) {
    CHECK_TO(__float2int);
    CHECK_TO(__float2uint);
    CHECK_TO(__float2ll);
    CHECK_TO(__float2ull);
  };
  const auto check_double = [&](double x) {
    CHECK_TO(__double2int);
    CHECK_TO(__double2uint);
    CHECK_TO(__double2ll);
    CHECK_TO(__double2ull);
  };
#undef CHECK_TO
  for (const double edge : {0.0, 0.5, 1.0, 1.5, 2.5, 0x1p23, 0x1p24, 0x1p31, 0x1p32, 0x1p52, 0x1p53, 0x1p63, 0x1p64,
                            0x1p100, inf_d, std::nan("")}) {
    for (const double x : {edge, -edge, std::nextafter(edge, inf_d), -std::nextafter(edge, inf_d),
                           std::nextafter(edge, 0.0), -std::nextafter(edge, 0.0), edge - 0.5, 0.5 - edge, edge - 1}) {
      check_double(x);
      check_float(static_cast<float>(x));
      check_float(std::nextafter(static_cast<float>(x), 0.0f));
    }
  }
  for (int i = 0; i != 100000; ++i) {
    const double x =
        std::ldexp(static_cast<double>(static_cast<long long>(random())), -static_cast<int>(random() % 70));
    check_double(x);
    check_float(static_cast<float>(x));
  }
}

TEST_CASE("Integers and doubles convert to floating point in every mode", "[numbers]") {
  counter count;
  std::mt19937_64 random(10);
  for (int i = 0; i != 200000; ++i) {
    const auto s = static_cast<long long>(random()) >> random() % 64;
    const auto u = random() >> random() % 64;
    const auto n = static_cast<int>(s);
    const auto m = static_cast<unsigned>(u);
    const auto d = random_number<double>(random, i % 2 == 0);
    const auto same = [&](auto actual, auto expected, const char* what) {
      count.expect(actual, expected, what, static_cast<double>(s), static_cast<double>(u), d);
    };
#define CHECK_TO(name, type, x)                                           \
  {                                                                       \
    const auto cast = [](auto o) { return static_cast<type>(o); };        \
    same(name##_rn(x), in_mode(rounding::nearest, cast, x), #name "_rn"); \
    same(name##_rz(x), in_mode(rounding::zero, cast, x), #name "_rz");    \
    same(name##_rd(x), in_mode(rounding::down, cast, x), #name "_rd");    \
    same(name##_ru(x), in_mode(rounding::up, cast, x), #name "_ru");      \
  }
    CHECK_TO(__int2float, float, n)
    CHECK_TO(__uint2float, float, m)
    CHECK_TO(__ll2float, float, s)
    CHECK_TO(__ll2double, double, s)
    CHECK_TO(__double2float, float, d)
#undef CHECK_TO
    const auto from_unsigned = [&](rounding mode, auto zero) {
      // Through long double, which holds all 64 bits: x86 converts unsigned numbers in several roundings.
      return in_mode(
          mode, [](long double o) { return static_cast<decltype(zero)>(o); }, static_cast<long double>(u));
    };
    same(__ull2float_rn(u), from_unsigned(rounding::nearest, 0.0f), "__ull2float_rn");
    same(__ull2float_rz(u), from_unsigned(rounding::zero, 0.0f), "__ull2float_rz");
    same(__ull2float_ru(u), from_unsigned(rounding::up, 0.0f), "__ull2float_ru");
    same(__ull2double_rn(u), from_unsigned(rounding::nearest, 0.0), "__ull2double_rn");
    same(__ull2double_rd(u), from_unsigned(rounding::down, 0.0), "__ull2double_rd");
    same(__int2double_rn(n), static_cast<double>(n), "__int2double_rn");
    same(__uint2double_rn(m), static_cast<double>(m), "__uint2double_rn");
  }
  CHECK(__float_as_uint(__double2float_rn(std::nan(""))) == 0x7fffffff);
}

TEST_CASE("Floating-point bits come apart and together", "[numbers]") {
  CHECK(__float_as_int(-0.0f) == std::numeric_limits<int>::min());
  CHECK(__int_as_float(0x3f800000) == 1.0f);
  CHECK(__uint_as_float(0xbf800000u) == -1.0f);
  CHECK(__double_as_longlong(1.0) == 0x3ff0000000000000);
  CHECK(__longlong_as_double(0x3ff0000000000000) == 1.0);
  CHECK(__double2hiint(-2.0) == static_cast<int>(0xc0000000));
  CHECK(__double2loint(__hiloint2double(0x3ff00000, -5)) == -5);
  CHECK(__double2hiint(__hiloint2double(0x3ff00000, -5)) == 0x3ff00000);
}

// ---- Integers ----

TEST_CASE("Bit counts and permutations match loops over bits", "[numbers]") {
  counter count;
  std::mt19937_64 random(11);
  for (int i = 0; i != 100000; ++i) {
    const std::uint64_t x = i == 0 ? 0 : i == 1 ? ~std::uint64_t{0} : random() >> random() % 64 << random() % 64;
    const auto y = static_cast<unsigned>(x);
    int ones = 0, ones_y = 0, first = 0, first_y = 0, leading = 64, leading_y = 32;
    std::uint64_t reversed = 0;
    for (int b = 0; b != 64; ++b) {
      if ((x >> b & 1) == 0) continue;
      ++ones;
      if (first == 0) first = b + 1;
      leading = 63 - b;
      reversed |= std::uint64_t{1} << (63 - b);
      if (b >= 32) continue;
      ++ones_y;
      if (first_y == 0) first_y = b + 1;
      leading_y = 31 - b;
    }
    const auto d = static_cast<double>(x);
    count.expect(__popcll(x), ones, "__popcll", d);
    count.expect(__popc(y), ones_y, "__popc", d);
    count.expect(__ffsll(static_cast<long long>(x)), first, "__ffsll", d);
    count.expect(__ffs(static_cast<int>(y)), first_y, "__ffs", d);
    count.expect(__clzll(static_cast<long long>(x)), leading, "__clzll", d);
    count.expect(__clz(static_cast<int>(y)), leading_y, "__clz", d);
    count.expect<std::uint64_t>(__brevll(x), reversed, "__brevll", d);
    count.expect(__brev(static_cast<unsigned>(x >> 32)), static_cast<unsigned>(reversed), "__brev", d);

    const auto hi = static_cast<unsigned>(x >> 32);
    const auto selector = static_cast<unsigned>(random());
    unsigned permuted = 0;
    for (int b = 0; b != 4; ++b) {
      const unsigned from = selector >> 4 * b & 7;
      const unsigned byte = (from < 4 ? y >> 8 * from : hi >> 8 * (from - 4)) & 0xff;
      permuted |= byte << 8 * b;
    }
    count.expect(__byte_perm(y, hi, selector), permuted, "__byte_perm", d, selector);

    for (const unsigned shift : {0u, 1u, 31u, 32u, 33u, 63u, 64u, selector}) {
      const auto funnel = [&](bool left, unsigned by) {
        std::uint64_t v = x;
        for (unsigned k = 0; k != by; ++k) v = left ? v << 1 : v >> 1;
        return static_cast<unsigned>(left ? v >> 32 : v);
      };
      count.expect(__funnelshift_l(y, hi, shift), funnel(true, shift % 32), "__funnelshift_l", d, shift);
      count.expect(__funnelshift_r(y, hi, shift), funnel(false, shift % 32), "__funnelshift_r", d, shift);
      count.expect(__funnelshift_lc(y, hi, shift), funnel(true, std::min(shift, 32u)), "__funnelshift_lc", d, shift);
      count.expect(__funnelshift_rc(y, hi, shift), funnel(false, std::min(shift, 32u)), "__funnelshift_rc", d, shift);
    }
  }
}

TEST_CASE("Integer products, sums and averages match wider arithmetic", "[numbers]") {
  counter count;
  std::mt19937_64 random(12);
  const auto draw = [&] {
    const std::uint64_t edges[] = {0, 1, ~std::uint64_t{0}, std::uint64_t{1} << 63, 0x7fffffffffffffff, 0x80000000};
    return random() % 8 == 0 ? edges[random() % 6] : random() >> random() % 64;
  };
  for (int i = 0; i != 100000; ++i) {
    const std::uint64_t x = draw(), y = draw();
    const auto sx = static_cast<long long>(x), sy = static_cast<long long>(y);
    const auto ix = static_cast<int>(x), iy = static_cast<int>(y);
    const auto ux = static_cast<unsigned>(x), uy = static_cast<unsigned>(y);
    const auto z = static_cast<unsigned>(random());
    const auto dx = static_cast<double>(x), dy = static_cast<double>(y);

    // Schoolbook: four products of 32-bit digits.
    const std::uint64_t low = (x & 0xffffffff) * (y & 0xffffffff);
    const std::uint64_t cross = (x >> 32) * (y & 0xffffffff) + (low >> 32);
    const std::uint64_t other = (x & 0xffffffff) * (y >> 32) + (cross & 0xffffffff);
    const std::uint64_t high = (x >> 32) * (y >> 32) + (cross >> 32) + (other >> 32);
    count.expect<std::uint64_t>(__umul64hi(x, y), high, "__umul64hi", dx, dy);
    __extension__ typedef __int128 wide;
    count.expect<long long>(__mul64hi(sx, sy), static_cast<long long>(static_cast<wide>(sx) * sy >> 64), "__mul64hi",
                            dx, dy);
    count.expect(__mulhi(ix, iy), static_cast<int>(std::int64_t{ix} * iy >> 32), "__mulhi", ix, iy);
    count.expect(__umulhi(ux, uy), static_cast<unsigned>(std::uint64_t{ux} * uy >> 32), "__umulhi", ux, uy);
    const auto low24 = [](int v) {
      const int m = v & 0xffffff;
      return std::int64_t{m >= 0x800000 ? m - 0x1000000 : m};
    };
    count.expect(__mul24(ix, iy), static_cast<int>(static_cast<unsigned>(low24(ix) * low24(iy))), "__mul24", ix, iy);
    count.expect(__umul24(ux, uy), static_cast<unsigned>(std::uint64_t{ux % 0x1000000} * (uy % 0x1000000)), "__umul24",
                 ux, uy);
    count.expect(__sad(ix, iy, z), static_cast<unsigned>(std::abs(std::int64_t{ix} - iy)) + z, "__sad", ix, iy);
    count.expect(__usad(ux, uy, z), static_cast<unsigned>(std::abs(std::int64_t{ux} - std::int64_t{uy})) + z, "__usad",
                 ux, uy);
    count.expect<double>(__hadd(ix, iy), std::floor((double{1} * ix + iy) / 2), "__hadd", ix, iy);
    count.expect<double>(__rhadd(ix, iy), std::floor((double{1} * ix + iy + 1) / 2), "__rhadd", ix, iy);
    count.expect<double>(__uhadd(ux, uy), std::floor((double{1} * ux + uy) / 2), "__uhadd", ux, uy);
    count.expect<double>(__urhadd(ux, uy), std::floor((double{1} * ux + uy + 1) / 2), "__urhadd", ux, uy);
  }
}

TEST_CASE("Packed integers match loops over lanes", "[numbers]") {
  counter count;
  std::mt19937_64 random(13);
  const auto lanes = [](unsigned a, unsigned b, int bits, bool is_signed, auto f) {
    unsigned result = 0;
    for (int i = 0; i != 32; i += bits) {
      const int range = 1 << bits;
      int x = static_cast<int>(a >> i) & (range - 1);
      int y = static_cast<int>(b >> i) & (range - 1);
      if (is_signed && x >= range / 2) x -= range;
      if (is_signed && y >= range / 2) y -= range;
      result |= (static_cast<unsigned>(f(x, y)) & static_cast<unsigned>(range - 1)) << i;
    }
    return result;
  };
  for (int i = 0; i != 50000; ++i) {
    const auto a = static_cast<unsigned>(random());
    const auto b = i % 4 == 0 ? a ^ 0x00ff0001u : static_cast<unsigned>(random());
#define CHECK_LANES(name, bits, is_signed, expression) \
  count.expect(name(a, b), lanes(a, b, bits, is_signed, [](int x, int y) -> int { return expression; }), #name, a, b)
    CHECK_LANES(__vadd4, 8, false, x + y);
    CHECK_LANES(__vadd2, 16, false, x + y);
    CHECK_LANES(__vsub4, 8, false, x - y);
    CHECK_LANES(__vsub2, 16, false, x - y);
    CHECK_LANES(__vaddss4, 8, true, std::min(127, std::max(-128, x + y)));
    CHECK_LANES(__vsubus2, 16, false, std::max(0, x - y));
    CHECK_LANES(__vaddus4, 8, false, std::min(255, x + y));
    CHECK_LANES(__vabsdiffu4, 8, false, std::abs(x - y));
    CHECK_LANES(__vabsdiffs2, 16, true, std::abs(x - y));
    CHECK_LANES(__vmaxu4, 8, false, std::max(x, y));
    CHECK_LANES(__vminu4, 8, false, std::min(x, y));
    CHECK_LANES(__vmaxs4, 8, true, std::max(x, y));
    CHECK_LANES(__vmins2, 16, true, std::min(x, y));
    CHECK_LANES(__vavgu4, 8, false, (x + y + 1) / 2);
    CHECK_LANES(__vcmpeq4, 8, false, x == y ? 0xff : 0);
    CHECK_LANES(__vcmpgts4, 8, true, x > y ? 0xff : 0);
    CHECK_LANES(__vcmpleu2, 16, false, x <= y ? 0xffff : 0);
#undef CHECK_LANES
    const auto c = static_cast<int>(random());
    const char4 a4 = std::bit_cast<char4>(a), b4 = std::bit_cast<char4>(b);
    const short2 a2 = std::bit_cast<short2>(a);
    const std::int64_t dot4 = std::int64_t{c} + a4.x * b4.x + a4.y * b4.y + a4.z * b4.z + a4.w * b4.w;
    const std::int64_t low2 = std::int64_t{c} + a2.x * b4.x + a2.y * b4.y;
    const std::int64_t high2 = std::int64_t{c} + a2.x * b4.z + a2.y * b4.w;
    count.expect(__dp4a(a4, b4, c), static_cast<int>(dot4), "__dp4a", a, b, c);
    count.expect(__dp4a(static_cast<int>(a), static_cast<int>(b), c), static_cast<int>(dot4), "__dp4a", a, b, c);
    count.expect(__dp2a_lo(a2, b4, c), static_cast<int>(low2), "__dp2a_lo", a, b, c);
    count.expect(__dp2a_hi(a2, b4, c), static_cast<int>(high2), "__dp2a_hi", a, b, c);
    const uchar4 ua = std::bit_cast<uchar4>(a), ub = std::bit_cast<uchar4>(b);
    const unsigned udot = 7u + ua.x * ub.x + ua.y * ub.y + ua.z * ub.z + ua.w * ub.w;
    count.expect(__dp4a(a, b, 7u), udot, "unsigned __dp4a", a, b);
    count.expect(__vsadu4(a, b),
                 static_cast<unsigned>(std::abs(ua.x - ub.x) + std::abs(ua.y - ub.y) + std::abs(ua.z - ub.z) +
                                       std::abs(ua.w - ub.w)),
                 "__vsadu4", a, b);
  }
}

// ---- Mathematics ----

TEST_CASE("Functions that the C library lacks satisfy their definitions", "[numbers]") {
  for (const double x : {-0.999999, -0.9, -0.3, -1e-5, 1e-300, 1e-9, 0.01, 0.499, 0.501, 0.75, 0.9999999999}) {
    CHECK(std::erf(erfinv(x)) == Approx(x).epsilon(1e-14));
    CHECK(normcdf(normcdfinv(0.5 + x / 2)) == Approx(0.5 + x / 2).epsilon(1e-13));
  }
  for (const double y : {1e-300, 1e-20, 0.1, 0.9, 1.0, 1.3, 1.999}) {
    CHECK(std::erfc(erfcinv(y)) == Approx(y).epsilon(1e-12).margin(1e-305));
  }
  CHECK(erfinv(1.0) == inf_d);
  CHECK(erfinvf(-1.0f) == -inf);
  CHECK(std::isnan(erfinv(1.1)));
  CHECK(normcdf(0.0) == 0.5);
  CHECK(normcdfinv(0.5) == 0.0);
  CHECK(erfcx(0.0) == 1.0);
  CHECK(erfcx(4.999) == Approx(erfcx(5.001)).epsilon(1e-3));
  CHECK(erfcx(1e10) == Approx(std::numbers::inv_sqrtpi / 1e10));
  CHECK(erfcx(-30.0) == inf_d);
  for (const double x : {0.0, 1.0, -3.0, 1e15, 4503599627370497.0}) {
    CHECK(sinpi(x) == 0.0);
    CHECK(std::fabs(cospi(x)) == 1.0);
    CHECK(cospi(x + 0.5) == Approx(0.0).margin(1));
  }
  CHECK(sinpi(0.5) == 1.0);
  CHECK(sinpi(1.5) == -1.0);
  CHECK(cospi(0.5) == 0.0);
  CHECK(cospi(1.0) == -1.0);
  for (const double x : {-5.3, -0.9, -0.2, 0.1, 0.3, 0.6, 1.1, 1.7, 2.4}) {
    CHECK(sinpi(x) == Approx(std::sin(std::numbers::pi * x)));
    CHECK(cospi(x) == Approx(std::cos(std::numbers::pi * x)));
  }
  CHECK(rsqrtf(16.0f) == 0.25f);
  CHECK(rsqrt(0.0) == inf_d);
  CHECK(rcbrt(8.0) == 0.5);
  CHECK(exp10f(2.0f) == 100.0f);
  CHECK(norm3df(2.0f, 3.0f, 6.0f) == 7.0f);
  CHECK(rnorm3d(2.0, 3.0, 6.0) == Approx(1.0 / 7.0));
  CHECK(norm4d(1.0, 1.0, 1.0, 1.0) == Approx(2.0));
  CHECK(rhypotf(3.0f, 4.0f) == 0.2f);
  const double v[] = {2.0, 3.0, 6.0};
  CHECK(norm(3, v) == Approx(7.0));
  CHECK(cyl_bessel_i0(0.0) == 1.0);
  CHECK(cyl_bessel_i1f(-1.0f) == Approx(-0.5651591040f));
}

TEST_CASE("Fast mathematics has CUDA's special cases", "[numbers]") {
  CHECK(__expf(1.0f) == Approx(2.7182818f));
  CHECK(__exp10f(-1.0f) == Approx(0.1f));
  CHECK(__log2f(8.0f) == 3.0f);
  CHECK(__sinf(0.5f) == Approx(std::sin(0.5f)));
  CHECK(__powf(2.0f, 0.5f) == Approx(std::sqrt(2.0f)));
  CHECK(std::isnan(__powf(-2.0f, 2.0f)));
  CHECK(__fdividef(6.0f, 3.0f) == 2.0f);
  CHECK(__fdividef(0x1p127f, 0x1p127f) == 0.0f);
  CHECK(std::isnan(__fdividef(inf, 0x1p127f)));
  CHECK(__saturatef(quiet_nan) == 0.0f);
  CHECK_FALSE(std::signbit(__saturatef(-0.0f)));
  CHECK(__saturatef(2.0f) == 1.0f);
  CHECK(__saturatef(0.25f) == 0.25f);
}

TEST_CASE("min and max choose among mixed types, NaN and zeros as CUDA does", "[numbers]") {
  static_assert(std::is_same_v<decltype(max(1, 1u)), unsigned>);
  static_assert(std::is_same_v<decltype(min(1L, 1L)), long>);
  static_assert(std::is_same_v<decltype(min(1ll, 1ull)), unsigned long long>);
  static_assert(std::is_same_v<decltype(max(1.0f, 1.0)), double>);
  CHECK(max(-1, 2) == 2);
  CHECK(max(-1, 2u) == 0xffffffff);
  CHECK(min(-5ll, 3ll) == -5);
  CHECK(max(quiet_nan, 1.0f) == 1.0f);
  CHECK(min(1.0f, quiet_nan) == 1.0f);
  CHECK(__float_as_uint(max(quiet_nan, -quiet_nan)) == 0x7fffffff);
  CHECK_FALSE(std::signbit(max(-0.0f, 0.0f)));
  CHECK(std::signbit(min(0.0f, -0.0f)));
}

// ---- Memory and types ----

namespace {
struct not_cached {
  int x;
};
template <class T>
concept loads = requires(const T* p) {
  __ldg(p);
};
}  // namespace

TEST_CASE("Cached accesses load and store what CUDA has them for", "[numbers]") {
  static_assert(loads<float4> && loads<unsigned char> && loads<__half2> && loads<__nv_bfloat16> && loads<double2>);
  static_assert(!loads<not_cached> && !loads<float3> && !loads<bool> && !loads<long double>);
  alignas(16) float memory[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  CHECK(__ldg(memory + 1) == 2.0f);
  CHECK(__ldg(reinterpret_cast<const float4*>(memory)).w == 4.0f);
  CHECK(__ldcs(reinterpret_cast<const float2*>(memory + 2)).x == 3.0f);
  __stcg(reinterpret_cast<float4*>(memory + 4), make_float4(0, 0, 0, 9));
  CHECK(memory[7] == 9.0f);
  __stwt(memory, 2);  // converts
  CHECK(memory[0] == 2.0f);
  __half halves[2] = {1.0f, 2.0f};
  CHECK(static_cast<float>(__ldg(halves + 1)) == 2.0f);
}

TEST_CASE("Vector types have CUDA's layout", "[numbers]") {
  const auto is = [](std::size_t size, std::size_t alignment, std::size_t s, std::size_t a) {
    return size == s && alignment == a;
  };
#define CHECK_LAYOUT(type, size, alignment)                \
  CHECK(is(sizeof(type), alignof(type), size, alignment)); \
  static_assert(std::is_trivially_copyable_v<type> && std::is_aggregate_v<type> && std::is_trivial_v<type>)
  CHECK_LAYOUT(char1, 1, 1);
  CHECK_LAYOUT(char2, 2, 2);
  CHECK_LAYOUT(uchar3, 3, 1);
  CHECK_LAYOUT(uchar4, 4, 4);
  CHECK_LAYOUT(short3, 6, 2);
  CHECK_LAYOUT(ushort4, 8, 8);
  CHECK_LAYOUT(int2, 8, 8);
  CHECK_LAYOUT(int3, 12, 4);
  CHECK_LAYOUT(uint4, 16, 16);
  CHECK_LAYOUT(long2, 16, 16);
  CHECK_LAYOUT(ulong4, 32, 16);
  CHECK_LAYOUT(longlong3, 24, 8);
  CHECK_LAYOUT(longlong4, 32, 16);
  CHECK_LAYOUT(ulonglong4_32a, 32, 32);
  CHECK_LAYOUT(float2, 8, 8);
  CHECK_LAYOUT(float3, 12, 4);
  CHECK_LAYOUT(float4, 16, 16);
  CHECK_LAYOUT(double2, 16, 16);
  CHECK_LAYOUT(double4, 32, 16);
  CHECK_LAYOUT(double4_16a, 32, 16);
  CHECK_LAYOUT(double4_32a, 32, 32);
#undef CHECK_LAYOUT
  static_assert(sizeof(dim3) == 12 && sizeof(__half) == 2 && sizeof(__nv_bfloat162) == 4 && alignof(__half2) == 4);
  static_assert(std::is_trivially_copyable_v<__half> && std::is_trivially_copyable_v<__nv_bfloat16>);
  constexpr dim3 grid = 7;
  static_assert(grid.x == 7 && grid.y == 1 && grid.z == 1);
  constexpr float4 constant{1, 2, 3, 4};
  static_assert(constant.w == 4);
  constexpr __half one(__half_raw{0x3c00});
  static_assert(static_cast<bool>(one));
  const dim3 from_uint3 = make_uint3(1, 2, 3);
  CHECK(from_uint3.z == 3);
  CHECK(make_uchar4(1, 2, 3, 4).w == 4);
}

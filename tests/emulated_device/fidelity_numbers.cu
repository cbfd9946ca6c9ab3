// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// What CUDA defines for numbers on a device, run in kernels. The same file is built by nvcc for a GPU and by a host
// compiler for the emulated device: an expectation that holds on one and not on the other is a fault of the emulation.
#include "emulated_device/launch.hpp"

#include "support/catch.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace {

template <class T> struct two { T a, b; };
template <class T> struct three { T a, b, c; };

template <class Function, class In, class Out>
__global__ void apply(Function f, const In* in, Out* out, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = f(in[i]);
}

template <class Out, class In, class Function> std::vector<Out> on_device(Function f, const std::vector<In>& inputs) {
  const device_array<In> in(inputs);
  device_array<Out> out(inputs.size());
  const auto count = static_cast<unsigned>(inputs.size());
  launch(apply<Function, In, Out>, (count + 31) / 32, 32, f, in.data(), out.data(), count);
  return out.host();
}

/// Each input and what a kernel must make of it.
template <class In, class Out, class Function> void expect(Function f, const std::vector<std::pair<In, Out>>& cases) {
  std::vector<In> inputs;
  for (const auto& [input, output] : cases) inputs.push_back(input);
  const auto outputs = on_device<Out>(f, inputs);
  for (std::size_t i = 0; i != cases.size(); ++i) {
    INFO("case " << i);
    CHECK(outputs[i] == cases[i].second);
  }
}

/// The same where a device's function is an approximation.
template <class In, class Function>
void expect_close(Function f, float relative, const std::vector<std::pair<In, float>>& cases) {
  std::vector<In> inputs;
  for (const auto& [input, output] : cases) inputs.push_back(input);
  const auto outputs = on_device<float>(f, inputs);
  for (std::size_t i = 0; i != cases.size(); ++i) {
    INFO("case " << i);
    CHECK(outputs[i] == Approx(cases[i].second).epsilon(relative));
  }
}

float power(int exponent) { return std::ldexp(1.0f, exponent); }

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr double not_a_double = std::numeric_limits<double>::quiet_NaN();
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

#define DEVICE_FUNCTION(name, in, expression)                     \
  struct name {                                                   \
    __device__ auto operator()(in x) const { return expression; } \
  };

// Half and bfloat16, by their bits.
__device__ __half h(u16 bits) { return __ushort_as_half(bits); }
__device__ __nv_bfloat16 b(u16 bits) { return __ushort_as_bfloat16(bits); }
__device__ u16 bits(__half x) { return __half_as_ushort(x); }
__device__ u16 bits(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
__device__ __half2 pair(u32 x) { return __halves2half2(h(static_cast<u16>(x)), h(static_cast<u16>(x >> 16))); }
__device__ u32 bits(__half2 x) { return bits(__low2half(x)) | static_cast<u32>(bits(__high2half(x))) << 16; }

}  // namespace

// ---- To and from half and bfloat16 ----

namespace {
DEVICE_FUNCTION(half_rn, float, bits(__float2half_rn(x)))
DEVICE_FUNCTION(half_rz, float, bits(__float2half_rz(x)))
DEVICE_FUNCTION(half_rd, float, bits(__float2half_rd(x)))
DEVICE_FUNCTION(half_ru, float, bits(__float2half_ru(x)))
DEVICE_FUNCTION(half_from_double, double, bits(__double2half(x)))
DEVICE_FUNCTION(float_from_half, u16, __half2float(h(x)))
DEVICE_FUNCTION(bfloat16_rn, float, bits(__float2bfloat16_rn(x)))
DEVICE_FUNCTION(bfloat16_rz, float, bits(__float2bfloat16_rz(x)))
DEVICE_FUNCTION(bfloat16_rd, float, bits(__float2bfloat16_rd(x)))
DEVICE_FUNCTION(bfloat16_ru, float, bits(__float2bfloat16_ru(x)))
DEVICE_FUNCTION(bfloat16_from_double, double, bits(__double2bfloat16(x)))
DEVICE_FUNCTION(float_from_bfloat16, u16, __bfloat162float(b(x)))
DEVICE_FUNCTION(half_is_nan, u16, static_cast<int>(__hisnan(h(x))))
}  // namespace

TEST_CASE("float becomes the nearest half, ties to even", "[fidelity][numbers]") {
  expect<float, u16>(half_rn{}, {{1.0f, 0x3c00},
                                 {-0.0f, 0x8000},
                                 {65504.0f, 0x7bff},
                                 {std::nextafter(65520.0f, 0.0f), 0x7bff},
                                 {65520.0f, 0x7c00},
                                 {power(-24), 0x0001},
                                 {power(-25), 0x0000},
                                 {std::nextafter(power(-25), 1.0f), 0x0001},
                                 {1 + power(-11), 0x3c00},
                                 {1 + 3 * power(-11), 0x3c02},
                                 {-inf, 0xfc00},
                                 {not_a_number, 0x7fff},
                                 {-not_a_number, 0x7fff}});
}

TEST_CASE("float becomes half in directed modes", "[fidelity][numbers]") {
  const float inputs[] = {65520.0f, -65520.0f, power(-30), -power(-30), 1 + power(-20), inf};
  const u16 zero[] = {0x7bff, 0xfbff, 0x0000, 0x8000, 0x3c00, 0x7c00};
  const u16 down[] = {0x7bff, 0xfc00, 0x0000, 0x8001, 0x3c00, 0x7c00};
  const u16 up[] = {0x7c00, 0xfbff, 0x0001, 0x8000, 0x3c01, 0x7c00};
  for (int i = 0; i != 6; ++i) {
    expect<float, u16>(half_rz{}, {{inputs[i], zero[i]}});
    expect<float, u16>(half_rd{}, {{inputs[i], down[i]}});
    expect<float, u16>(half_ru{}, {{inputs[i], up[i]}});
  }
}

TEST_CASE("double becomes half in one rounding", "[fidelity][numbers]") {
  expect<double, u16>(half_from_double{}, {{1 + std::ldexp(1.0, -11) + std::ldexp(1.0, -40), 0x3c01},
                                           {1 + 3 * std::ldexp(1.0, -11) - std::ldexp(1.0, -40), 0x3c01},
                                           {1e300, 0x7c00},
                                           {-1e-300, 0x8000},
                                           {not_a_double, 0x7fff}});
}

TEST_CASE("half becomes float exactly", "[fidelity][numbers]") {
  expect<u16, float>(float_from_half{}, {{0x0001, power(-24)},
                                         {0x03ff, 1023 * power(-24)},
                                         {0x0400, power(-14)},
                                         {0x7bff, 65504.0f},
                                         {0xfc00, -inf},
                                         {0xc000, -2.0f}});
  expect<u16, int>(half_is_nan{}, {{0x7c01, 1}, {0xffff, 1}, {0x7c00, 0}});
}

TEST_CASE("float becomes the nearest bfloat16, ties to even", "[fidelity][numbers]") {
  expect<float, u16>(bfloat16_rn{}, {{1 + power(-8), 0x3f80},
                                     {1 + 3 * power(-8), 0x3f82},
                                     {std::nextafter(1 + power(-8), 2.0f), 0x3f81},
                                     {std::numeric_limits<float>::max(), 0x7f80},
                                     {power(-149), 0x0000},
                                     {power(-133), 0x0001},
                                     {-0.0f, 0x8000},
                                     {not_a_number, 0x7fff}});
  expect<u16, float>(float_from_bfloat16{}, {{0x0001, power(-133)}, {0xbf80, -1.0f}, {0x7f80, inf}});
}

TEST_CASE("float becomes bfloat16 in directed modes", "[fidelity][numbers]") {
  const float x = 1 + power(-20);
  expect<float, u16>(bfloat16_rz{}, {{x, 0x3f80}, {-x, 0xbf80}, {std::numeric_limits<float>::max(), 0x7f7f}});
  expect<float, u16>(bfloat16_rd{}, {{x, 0x3f80}, {-x, 0xbf81}});
  expect<float, u16>(bfloat16_ru{}, {{x, 0x3f81}, {-x, 0xbf80}, {power(-149), 0x0001}});
}

TEST_CASE("double becomes bfloat16 in one rounding", "[fidelity][numbers]") {
  expect<double, u16>(bfloat16_from_double{}, {{1 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40), 0x3f81},
                                               {1 + 3 * std::ldexp(1.0, -8) - std::ldexp(1.0, -40), 0x3f81},
                                               {not_a_double, 0x7fff}});
}

namespace {
DEVICE_FUNCTION(int_rn, u16, __half2int_rn(h(x)))
DEVICE_FUNCTION(int_rz, u16, __half2int_rz(h(x)))
DEVICE_FUNCTION(int_rd, u16, __half2int_rd(h(x)))
DEVICE_FUNCTION(int_ru, u16, __half2int_ru(h(x)))
DEVICE_FUNCTION(short_rn, u16, __half2short_rn(h(x)))
DEVICE_FUNCTION(ushort_rn, u16, __half2ushort_rn(h(x)))
DEVICE_FUNCTION(longlong_rn, u16, __half2ll_rn(h(x)))
DEVICE_FUNCTION(half_of_int_rn, int, bits(__int2half_rn(x)))
DEVICE_FUNCTION(half_of_int_rz, int, bits(__int2half_rz(x)))
DEVICE_FUNCTION(half_of_int_ru, int, bits(__int2half_ru(x)))
DEVICE_FUNCTION(half_of_ull, u64, bits(__ull2half_rn(x)))
DEVICE_FUNCTION(bfloat16_of_int, int, bits(__int2bfloat16_rn(x)))
}  // namespace

TEST_CASE("half becomes an integer, rounded and saturated", "[fidelity][numbers]") {
  constexpr u16 plus = 0x4100, minus = 0xc100;  // +-2.5
  constexpr int least = std::numeric_limits<int>::min();
  expect<u16, int>(int_rn{}, {{plus, 2}, {minus, -2}, {0x4300, 4}, {0x7c00, 0x7fffffff}, {0xfc00, least}, {0x7fff, 0}});
  expect<u16, int>(int_rz{}, {{plus, 2}, {minus, -2}});
  expect<u16, int>(int_rd{}, {{plus, 2}, {minus, -3}});
  expect<u16, int>(int_ru{}, {{plus, 3}, {minus, -2}});
  expect<u16, short>(short_rn{}, {{0x7bff, 32767}, {0xfbff, -32768}, {0x7fff, 0}});
  expect<u16, u16>(ushort_rn{}, {{0x7bff, 65504}, {0xbc00, 0}, {0x7c00, 65535}});
  expect<u16, long long>(longlong_rn{}, {{0x7fff, std::numeric_limits<long long>::min()}, {0x4100, 2}});
}

TEST_CASE("An integer becomes half or bfloat16, rounded", "[fidelity][numbers]") {
  expect<int, u16>(half_of_int_rn{}, {{2049, 0x6800}, {2051, 0x6802}, {65519, 0x7bff}, {65520, 0x7c00}, {-1, 0xbc00}});
  expect<int, u16>(half_of_int_rz{}, {{2049, 0x6800}, {65535, 0x7bff}, {-2051, 0xe801}});
  expect<int, u16>(half_of_int_ru{}, {{2049, 0x6801}, {-2051, 0xe801}});
  expect<u64, u16>(half_of_ull{}, {{0, 0x0000}, {~0ull, 0x7c00}});
  expect<int, u16>(bfloat16_of_int{}, {{257, 0x4380}, {(1 << 30) + (1 << 22) + 1, 0x4e81}});
}

// ---- Arithmetic of half and bfloat16 ----

namespace {
DEVICE_FUNCTION(half_add, two<u16>, bits(__hadd(h(x.a), h(x.b))))
DEVICE_FUNCTION(half_subtract, two<u16>, bits(h(x.a) - h(x.b)))
DEVICE_FUNCTION(half_multiply, two<u16>, bits(h(x.a) * h(x.b)))
DEVICE_FUNCTION(half_divide, two<u16>, bits(__hdiv(h(x.a), h(x.b))))
DEVICE_FUNCTION(half_fma, three<u16>, bits(__hfma(h(x.a), h(x.b), h(x.c))))
DEVICE_FUNCTION(half_fma_relu, three<u16>, bits(__hfma_relu(h(x.a), h(x.b), h(x.c))))
DEVICE_FUNCTION(half_fma_sat, three<u16>, bits(__hfma_sat(h(x.a), h(x.b), h(x.c))))
DEVICE_FUNCTION(bfloat16_add, two<u16>, bits(__hadd(b(x.a), b(x.b))))
DEVICE_FUNCTION(bfloat16_fma, three<u16>, bits(__hfma(b(x.a), b(x.b), b(x.c))))
}  // namespace

TEST_CASE("half arithmetic rounds to nearest", "[fidelity][numbers]") {
  expect<two<u16>, u16>(half_add{}, {{{0x6800, 0x3c00}, 0x6800},    // 2048 + 1
                                     {{0x6800, 0x4200}, 0x6802},    // 2048 + 3
                                     {{0x7b53, 0x7b53}, 0x7c00},    // 60,000 twice
                                     {{0x0001, 0x0001}, 0x0002},    // subnormal
                                     {{0x7c00, 0xfc00}, 0x7fff}});  // inf - inf
  expect<two<u16>, u16>(half_subtract{}, {{{0x3c00, 0x3c00}, 0x0000}, {{0x0400, 0x0001}, 0x03ff}});
  expect<two<u16>, u16>(half_multiply{}, {{{0x0001, 0x3800}, 0x0000},  // half the smallest: a tie, to even
                                          {{0x0003, 0x3800}, 0x0002},
                                          {{0x3c01, 0x3c01}, 0x3c02},
                                          {{0x0000, 0x7c00}, 0x7fff}});
  expect<two<u16>, u16>(half_divide{}, {{{0x3c00, 0x4200}, 0x3555}, {{0x3c00, 0x8000}, 0xfc00}});
}

TEST_CASE("half's fused multiply-add rounds once", "[fidelity][numbers]") {
  // 3 * 683 = 2049 is a tie between 2048 and 2050, which the smallest subnormal breaks; a float would lose it.
  expect<three<u16>, u16>(half_fma{}, {{{0x4200, 0x6156, 0x0001}, 0x6801},
                                       {{0x4200, 0x6156, 0x0000}, 0x6800},
                                       {{0x4200, 0x6156, 0x8001}, 0x6800},
                                       {{0x3c01, 0x3c01, 0xbc02}, 0x0010}});  // 2^-20
}

TEST_CASE("bfloat16's fused multiply-add rounds once", "[fidelity][numbers]") {
  // 7 * 37 = 259 is a tie between 258 and 260.
  expect<three<u16>, u16>(
      bfloat16_fma{},
      {{{0x40e0, 0x4214, 0xb580}, 0x4381}, {{0x40e0, 0x4214, 0x0000}, 0x4382}, {{0x40e0, 0x4214, 0x3580}, 0x4382}});
  expect<two<u16>, u16>(bfloat16_add{}, {{{0x4380, 0x3f80}, 0x4380}, {{0x7f7f, 0x7f7f}, 0x7f80}});
}

TEST_CASE("relu and saturation choose what becomes of NaN", "[fidelity][numbers]") {
  expect<three<u16>, u16>(
      half_fma_relu{},
      {{{0x3c00, 0x3c00, 0xc000}, 0x0000}, {{0x3c00, 0x3c00, 0x3c00}, 0x4000}, {{0x7fff, 0x3c00, 0x3c00}, 0x7fff}});
  expect<three<u16>, u16>(half_fma_sat{}, {{{0x3c00, 0x3c00, 0x3c00}, 0x3c00},
                                           {{0x3c00, 0x3c00, 0xc000}, 0x0000},
                                           {{0x7fff, 0x3c00, 0x3c00}, 0x0000},
                                           {{0x3800, 0x3800, 0x0000}, 0x3400}});
}

namespace {
DEVICE_FUNCTION(half_max, two<u16>, bits(__hmax(h(x.a), h(x.b))))
DEVICE_FUNCTION(half_min, two<u16>, bits(__hmin(h(x.a), h(x.b))))
DEVICE_FUNCTION(half_max_nan, two<u16>, bits(__hmax_nan(h(x.a), h(x.b))))
DEVICE_FUNCTION(bfloat16_max, two<u16>, bits(__hmax(b(x.a), b(x.b))))
struct half_compare {
  __device__ u32 operator()(two<u16> x) const {
    const __half p = h(x.a), q = h(x.b);
    return static_cast<u32>(__heq(p, q)) | static_cast<u32>(__hne(p, q)) << 1 | static_cast<u32>(__hlt(p, q)) << 2 |
           static_cast<u32>(__hge(p, q)) << 3 | static_cast<u32>(__hequ(p, q)) << 4 |
           static_cast<u32>(__hneu(p, q)) << 5 | static_cast<u32>(__hltu(p, q)) << 6 |
           static_cast<u32>(__hgeu(p, q)) << 7 | static_cast<u32>(p == q) << 8 | static_cast<u32>(p != q) << 9;
  }
};
}  // namespace

TEST_CASE("The larger half ignores one NaN and orders the zeros", "[fidelity][numbers]") {
  expect<two<u16>, u16>(half_max{}, {{{0x7fff, 0x3c00}, 0x3c00},
                                     {{0xbc00, 0x7e00}, 0xbc00},
                                     {{0x7fff, 0x7fff}, 0x7fff},
                                     {{0x8000, 0x0000}, 0x0000},
                                     {{0x3c00, 0x4000}, 0x4000}});
  expect<two<u16>, u16>(half_min{}, {{{0x0000, 0x8000}, 0x8000}, {{0x7fff, 0x3c00}, 0x3c00}});
  expect<two<u16>, u16>(half_max_nan{}, {{{0x7fff, 0x3c00}, 0x7fff}, {{0x3c00, 0x4000}, 0x4000}});
  expect<two<u16>, u16>(bfloat16_max{}, {{{0x7fff, 0x3f80}, 0x3f80}, {{0x8000, 0x0000}, 0x0000}});
}

TEST_CASE("Comparisons of half know ordered from unordered", "[fidelity][numbers]") {
  expect<two<u16>, u32>(half_compare{}, {{{0x3c00, 0x3c00}, 0b01'1001'1001},
                                         {{0x3c00, 0x4000}, 0b10'0110'0110},
                                         {{0x8000, 0x0000}, 0b01'1001'1001},
                                         {{0x7fff, 0x3c00}, 0b10'1111'0000},
                                         {{0x7fff, 0x7fff}, 0b10'1111'0000}});
}

namespace {
DEVICE_FUNCTION(pair_add, two<u32>, bits(__hadd2(pair(x.a), pair(x.b))))
DEVICE_FUNCTION(pair_fma, three<u32>, bits(__hfma2(pair(x.a), pair(x.b), pair(x.c))))
DEVICE_FUNCTION(pair_equal_mask, two<u32>, __heq2_mask(pair(x.a), pair(x.b)))
DEVICE_FUNCTION(pair_equal, two<u32>, bits(__heq2(pair(x.a), pair(x.b))))
DEVICE_FUNCTION(pair_lows, two<u32>, bits(__lows2half2(pair(x.a), pair(x.b))))
DEVICE_FUNCTION(pair_swap, u32, bits(__lowhigh2highlow(pair(x))))
DEVICE_FUNCTION(pair_of_floats, float2, bits(__float22half2_rn(x)))
DEVICE_FUNCTION(sum_of_pair, u32, __half22float2(pair(x)).x + 100 * __high2float(pair(x)))
}  // namespace

TEST_CASE("A pair of halves is two halves", "[fidelity][numbers]") {
  expect<two<u32>, u32>(pair_add{}, {{{0x40003c00, 0x3c003c00}, 0x42004000}});
  expect<three<u32>, u32>(pair_fma{}, {{{0x42004200, 0x61566156, 0x80010001}, 0x68006801}});
  expect<two<u32>, u32>(pair_equal_mask{},
                        {{{0x40003c00, 0x40003c01}, 0xffff0000}, {{0x7fff0000, 0x7fff8000}, 0xffff}});
  expect<two<u32>, u32>(pair_equal{}, {{{0x40003c00, 0x40003c01}, 0x3c000000}});
  expect<two<u32>, u32>(pair_lows{}, {{{0x22221111, 0x44443333}, 0x33331111}});
  expect<u32, u32>(pair_swap{}, {{0x22221111, 0x11112222}});
  expect<float2, u32>(pair_of_floats{}, {{make_float2(1, 2), 0x40003c00}});
  expect<u32, float>(sum_of_pair{}, {{0x40003c00, 201.0f}});
}

namespace {
DEVICE_FUNCTION(half_rint, u16, bits(hrint(h(x))))
DEVICE_FUNCTION(half_ceil, u16, bits(hceil(h(x))))
DEVICE_FUNCTION(half_floor, u16, bits(hfloor(h(x))))
DEVICE_FUNCTION(half_trunc, u16, bits(htrunc(h(x))))
DEVICE_FUNCTION(half_sqrt, u16, bits(hsqrt(h(x))))
DEVICE_FUNCTION(half_exp, float, __half2float(hexp(__float2half(x))))
DEVICE_FUNCTION(half_log, float, __half2float(hlog(__float2half(x))))
DEVICE_FUNCTION(half_tanh, float, __half2float(htanh(__float2half(x))))
DEVICE_FUNCTION(half_rsqrt, float, __half2float(hrsqrt(__float2half(x))))
DEVICE_FUNCTION(half_sin, float, __half2float(hsin(__float2half(x))))
}  // namespace

TEST_CASE("half has functions of its own", "[fidelity][numbers]") {
  expect<u16, u16>(half_rint{}, {{0x4100, 0x4000}, {0x4300, 0x4400}, {0xb800, 0x8000}});
  expect<u16, u16>(half_ceil{}, {{0x4100, 0x4200}, {0xb800, 0x8000}});
  expect<u16, u16>(half_floor{}, {{0x4100, 0x4000}, {0xb800, 0xbc00}});
  expect<u16, u16>(half_trunc{}, {{0x4100, 0x4000}, {0xc100, 0xc000}});
  expect<u16, u16>(half_sqrt{}, {{0x4400, 0x4000}, {0xbc00, 0x7fff}, {0x7c00, 0x7c00}});
  expect_close<float>(half_exp{}, 0.002f, {{0.0f, 1.0f}, {1.0f, 2.71828f}, {-3.0f, 0.049787f}});
  expect_close<float>(half_log{}, 0.002f, {{2.0f, 0.693147f}, {1000.0f, 6.90776f}});
  expect_close<float>(half_tanh{}, 0.002f, {{0.5f, 0.462117f}, {-20.0f, -1.0f}});
  expect_close<float>(half_rsqrt{}, 0.002f, {{4.0f, 0.5f}, {3.0f, 0.57735f}});
  expect_close<float>(half_sin{}, 0.002f, {{1.0f, 0.841471f}, {-2.0f, -0.909297f}});
}

// ---- float and double ----

namespace {
struct in_all_modes {
  float nearest, zero, up, down;
};
bool operator==(const in_all_modes& a, const in_all_modes& b) { return std::memcmp(&a, &b, sizeof a) == 0; }
std::ostream& operator<<(std::ostream& out, const in_all_modes& x) {
  return out << std::hexfloat << x.nearest << ' ' << x.zero << ' ' << x.up << ' ' << x.down;
}
struct double_in_all_modes {
  double nearest, zero, up, down;
};
bool operator==(const double_in_all_modes& a, const double_in_all_modes& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}
std::ostream& operator<<(std::ostream& out, const double_in_all_modes& x) {
  return out << std::hexfloat << x.nearest << ' ' << x.zero << ' ' << x.up << ' ' << x.down;
}

#define DEVICE_MODES(name, result, in, prefix, ...)                                                     \
  DEVICE_FUNCTION(name, in,                                                                             \
                  (result{prefix##_rn(__VA_ARGS__), prefix##_rz(__VA_ARGS__), prefix##_ru(__VA_ARGS__), \
                          prefix##_rd(__VA_ARGS__)}))

DEVICE_MODES(add_modes, in_all_modes, two<float>, __fadd, x.a, x.b)
DEVICE_MODES(multiply_modes, in_all_modes, two<float>, __fmul, x.a, x.b)
DEVICE_MODES(divide_modes, in_all_modes, two<float>, __fdiv, x.a, x.b)
DEVICE_MODES(fma_modes, in_all_modes, three<float>, __fmaf, x.a, x.b, x.c)
DEVICE_MODES(root_modes, in_all_modes, float, __fsqrt, x)
DEVICE_MODES(reciprocal_modes, in_all_modes, float, __frcp, x)
DEVICE_MODES(int_modes, in_all_modes, int, __int2float, x)
DEVICE_MODES(narrowing_modes, in_all_modes, double, __double2float, x)
DEVICE_MODES(add_double_modes, double_in_all_modes, two<double>, __dadd, x.a, x.b)
DEVICE_MODES(divide_double_modes, double_in_all_modes, two<double>, __ddiv, x.a, x.b)
DEVICE_MODES(fma_double_modes, double_in_all_modes, three<double>, __fma, x.a, x.b, x.c)
DEVICE_MODES(longlong_modes, double_in_all_modes, long long, __ll2double, x)

constexpr float ulp = 0x1p-23f;
}  // namespace

TEST_CASE("float arithmetic obeys the rounding mode that its name has", "[fidelity][numbers]") {
  constexpr float most = std::numeric_limits<float>::max();
  expect<two<float>, in_all_modes>(add_modes{}, {{{1.0f, 0x1p-149f}, {1.0f, 1.0f, 1 + ulp, 1.0f}},
                                                 {{-1.0f, -0x1p-30f}, {-1.0f, -1.0f, -1.0f, -1 - ulp}},
                                                 {{1.0f, ulp / 2}, {1.0f, 1.0f, 1 + ulp, 1.0f}},
                                                 {{1.0f, -1.0f}, {0.0f, 0.0f, 0.0f, -0.0f}},
                                                 {{most, most}, {inf, most, inf, most}}});
  expect<two<float>, in_all_modes>(multiply_modes{},
                                   {{{1 + ulp, 1 + ulp}, {1 + 2 * ulp, 1 + 2 * ulp, 1 + 3 * ulp, 1 + 2 * ulp}},
                                    {{0x1p-149f, 0.25f}, {0.0f, 0.0f, 0x1p-149f, 0.0f}}});
  expect<two<float>, in_all_modes>(divide_modes{},
                                   {{{1.0f, 3.0f}, {0x1.555556p-2f, 0x1.555554p-2f, 0x1.555556p-2f, 0x1.555554p-2f}},
                                    {{-1.0f, 0.0f}, {-inf, -inf, -inf, -inf}}});
  // (1 + 2^-12)^2 - (1 + 2^-11) = 2^-24, which a rounded product would lose.
  expect<three<float>, in_all_modes>(
      fma_modes{}, {{{1 + 0x1p-12f, 1 + 0x1p-12f, -1 - 0x1p-11f}, {0x1p-24f, 0x1p-24f, 0x1p-24f, 0x1p-24f}},
                    {{1 + ulp, 1 + ulp, 0.0f}, {1 + 2 * ulp, 1 + 2 * ulp, 1 + 3 * ulp, 1 + 2 * ulp}}});
  expect<float, in_all_modes>(root_modes{}, {{2.0f, {0x1.6a09e6p+0f, 0x1.6a09e6p+0f, 0x1.6a09e8p+0f, 0x1.6a09e6p+0f}}});
  expect<float, in_all_modes>(reciprocal_modes{},
                              {{3.0f, {0x1.555556p-2f, 0x1.555554p-2f, 0x1.555556p-2f, 0x1.555554p-2f}}});
}

TEST_CASE("double arithmetic obeys the rounding mode that its name has", "[fidelity][numbers]") {
  constexpr double unit = 0x1p-52;
  expect<two<double>, double_in_all_modes>(
      add_double_modes{},
      {{{1.0, 0x1p-60}, {1.0, 1.0, 1 + unit, 1.0}}, {{-1.0, 0x1p-60}, {-1.0, -1 + unit / 2, -1 + unit / 2, -1.0}}});
  expect<two<double>, double_in_all_modes>(
      divide_double_modes{},
      {{{1.0, 3.0}, {0x1.5555555555555p-2, 0x1.5555555555555p-2, 0x1.5555555555556p-2, 0x1.5555555555555p-2}}});
  expect<three<double>, double_in_all_modes>(
      fma_double_modes{}, {{{1 + unit, 1 + unit, 0.0}, {1 + 2 * unit, 1 + 2 * unit, 1 + 3 * unit, 1 + 2 * unit}},
                           {{0x1p-1074, 0x1p-1074, 1.0}, {1.0, 1.0, 1 + unit, 1.0}}});
  const long long big = (1ll << 53) + 1;
  expect<long long, double_in_all_modes>(longlong_modes{}, {{big, {0x1p53, 0x1p53, 0x1p53 + 2, 0x1p53}}});
}

TEST_CASE("Conversions to float obey the rounding mode that their name has", "[fidelity][numbers]") {
  expect<int, in_all_modes>(int_modes{}, {{16777217, {0x1p24f, 0x1p24f, 0x1p24f + 2, 0x1p24f}},
                                          {-16777217, {-0x1p24f, -0x1p24f, -0x1p24f, -0x1p24f - 2}}});
  expect<double, in_all_modes>(
      narrowing_modes{}, {{1 + 0x1p-30, {1.0f, 1.0f, 1 + ulp, 1.0f}},
                          {0x1p-150, {0.0f, 0.0f, 0x1p-149f, 0.0f}},
                          {1e300, {inf, std::numeric_limits<float>::max(), inf, std::numeric_limits<float>::max()}}});
}

namespace {
DEVICE_FUNCTION(float_to_int_rn, float, __float2int_rn(x))
DEVICE_FUNCTION(float_to_int_rz, float, __float2int_rz(x))
DEVICE_FUNCTION(float_to_int_rd, float, __float2int_rd(x))
DEVICE_FUNCTION(float_to_int_ru, float, __float2int_ru(x))
DEVICE_FUNCTION(float_to_uint, float, __float2uint_rn(x))
DEVICE_FUNCTION(float_to_longlong, float, static_cast<u64>(__float2ll_rz(x)))
DEVICE_FUNCTION(float_to_ull, float, __float2ull_rz(x))
DEVICE_FUNCTION(double_to_int, double, static_cast<u32>(__double2int_rn(x)))
DEVICE_FUNCTION(double_to_ull, double, __double2ull_rd(x))
}  // namespace

TEST_CASE("float and double become integers, rounded and saturated", "[fidelity][numbers]") {
  constexpr int least = std::numeric_limits<int>::min();
  expect<float, int>(
      float_to_int_rn{},
      {{2.5f, 2}, {3.5f, 4}, {-2.5f, -2}, {3e9f, 0x7fffffff}, {-3e9f, least}, {inf, 0x7fffffff}, {not_a_number, 0}});
  expect<float, int>(float_to_int_rz{}, {{2.9f, 2}, {-2.9f, -2}});
  expect<float, int>(float_to_int_rd{}, {{2.9f, 2}, {-2.1f, -3}});
  expect<float, int>(float_to_int_ru{}, {{2.1f, 3}, {-2.9f, -2}});
  expect<float, u32>(float_to_uint{}, {{-1.0f, 0}, {5e9f, 0xffffffff}, {not_a_number, 0}, {3e9f, 3000000000u}});
  expect<float, u64>(float_to_longlong{}, {{not_a_number, 1ull << 63}, {1e30f, ~0ull >> 1}, {-1e30f, 1ull << 63}});
  expect<float, u64>(float_to_ull{}, {{not_a_number, 1ull << 63}, {1e30f, ~0ull}, {-1.0f, 0}});
  expect<double, u32>(double_to_int{}, {{not_a_double, 0x80000000u}, {2.5, 2}, {1e10, 0x7fffffff}});
  expect<double, u64>(double_to_ull{}, {{not_a_double, 1ull << 63}, {-0.5, 0}, {2.9, 2}});
}

namespace {
DEVICE_FUNCTION(float_max, two<float>, __float_as_uint(max(x.a, x.b)))
DEVICE_FUNCTION(float_min, two<float>, __float_as_uint(min(x.a, x.b)))
DEVICE_FUNCTION(mixed_max, two<int>, max(x.a, static_cast<unsigned>(x.b)))
DEVICE_FUNCTION(saturated, float, __float_as_uint(__saturatef(x)))
DEVICE_FUNCTION(fast_quotient, two<float>, __fdividef(x.a, x.b))
DEVICE_FUNCTION(fast_power_is_nan, two<float>, static_cast<int>(isnan(__powf(x.a, x.b))))
DEVICE_FUNCTION(invalid_sum, two<float>, __float_as_uint(__fadd_rn(x.a, x.b)))
}  // namespace

TEST_CASE("max and min ignore one NaN and order the zeros", "[fidelity][numbers]") {
  expect<two<float>, u32>(float_max{}, {{{not_a_number, 1.0f}, 0x3f800000},
                                        {{1.0f, not_a_number}, 0x3f800000},
                                        {{-0.0f, 0.0f}, 0x00000000},
                                        {{not_a_number, not_a_number}, 0x7fffffff}});
  expect<two<float>, u32>(float_min{}, {{{not_a_number, 1.0f}, 0x3f800000}, {{0.0f, -0.0f}, 0x80000000}});
  expect<two<int>, u32>(mixed_max{}, {{{-1, 2}, 0xffffffff}});
}

TEST_CASE("Fast mathematics has special cases", "[fidelity][numbers]") {
  expect<float, u32>(saturated{}, {{not_a_number, 0}, {2.0f, 0x3f800000}, {-1.0f, 0}, {0.5f, 0x3f000000}});
  expect<two<float>, float>(fast_quotient{}, {{{0x1p127f, 0x1p127f}, 0.0f}, {{6.0f, 2.0f}, 3.0f}});
  expect<two<float>, int>(fast_power_is_nan{}, {{{-2.0f, 2.0f}, 1}, {{2.0f, 2.0f}, 0}});
  expect<two<float>, u32>(invalid_sum{}, {{{inf, -inf}, 0x7fffffff}});
}

namespace {
DEVICE_FUNCTION(call_rsqrtf, float, rsqrtf(x))
DEVICE_FUNCTION(call_sinpif, float, sinpif(x))
DEVICE_FUNCTION(call_cospif, float, cospif(x))
DEVICE_FUNCTION(call_erfinvf, float, erfinvf(x))
DEVICE_FUNCTION(call_normcdff, float, normcdff(x))
DEVICE_FUNCTION(call_exp10f, float, exp10f(x))
DEVICE_FUNCTION(call_norm3df, three<float>, norm3df(x.a, x.b, x.c))
DEVICE_FUNCTION(call_expf, float, __expf(x))
DEVICE_FUNCTION(call_logf, float, __logf(x))
}  // namespace

TEST_CASE("CUDA's own functions approximate what they name", "[fidelity][numbers]") {
  expect_close<float>(call_rsqrtf{}, 1e-6f, {{4.0f, 0.5f}, {2.0f, 0.707106781f}});
  expect<float, float>(call_sinpif{}, {{1.0f, 0.0f}, {0.5f, 1.0f}, {1.5f, -1.0f}});
  expect<float, float>(call_cospif{}, {{1.0f, -1.0f}, {0.5f, 0.0f}});
  expect_close<float>(call_sinpif{}, 1e-6f, {{0.25f, 0.707106781f}});
  expect_close<float>(call_erfinvf{}, 1e-6f, {{0.5f, 0.476936276f}, {-0.99f, -1.82138637f}});
  expect_close<float>(call_normcdff{}, 1e-6f, {{0.0f, 0.5f}, {-3.0f, 0.00134989803f}});
  expect_close<float>(call_exp10f{}, 1e-6f, {{2.0f, 100.0f}});
  expect_close<three<float>>(call_norm3df{}, 1e-6f, {{{2.0f, 3.0f, 6.0f}, 7.0f}});
  expect_close<float>(call_expf{}, 1e-5f, {{1.0f, 2.71828183f}, {-5.0f, 0.00673794700f}});
  expect_close<float>(call_logf{}, 1e-5f, {{10.0f, 2.30258509f}});
}

// ---- Integers ----

namespace {
struct bit_counts {
  __device__ u32 operator()(u64 x) const {
    const auto low = static_cast<int>(x);
    const auto all = static_cast<long long>(x);
    return static_cast<u32>(__popc(static_cast<u32>(x))) + 100u * static_cast<u32>(__clz(low)) +
           10000u * static_cast<u32>(__ffs(low)) +
           1000000u * static_cast<u32>(__popcll(x) + __clzll(all) + __ffsll(all));
  }
};
DEVICE_FUNCTION(reverse, u32, __brev(x))
DEVICE_FUNCTION(reverse_long, u64, __brevll(x))
DEVICE_FUNCTION(permute, three<u32>, __byte_perm(x.a, x.b, x.c))
DEVICE_FUNCTION(funnel_left, three<u32>, __funnelshift_l(x.a, x.b, x.c))
DEVICE_FUNCTION(funnel_left_clamped, three<u32>, __funnelshift_lc(x.a, x.b, x.c))
DEVICE_FUNCTION(funnel_right, three<u32>, __funnelshift_r(x.a, x.b, x.c))
DEVICE_FUNCTION(funnel_right_clamped, three<u32>, __funnelshift_rc(x.a, x.b, x.c))
}  // namespace

TEST_CASE("Bits are counted and reversed", "[fidelity][numbers]") {
  // popc + 100 clz + 10,000 ffs + 1,000,000 (popcll + clzll + ffsll)
  expect<u64, u32>(bit_counts{}, {{0, 64003200u}, {1, 65013101u}, {0x80000000u, 65320001u}, {~0ull, 65010032u}});
  expect<u32, u32>(reverse{}, {{0x1, 0x80000000}, {0x12345678, 0x1e6a2c48}});
  expect<u64, u64>(reverse_long{}, {{1, 1ull << 63}, {0x12345678ull << 32, 0x1e6a2c48}});
}

TEST_CASE("Bytes are permuted by three bits of each nibble", "[fidelity][numbers]") {
  expect<three<u32>, u32>(permute{}, {{{0x33221100, 0x77665544, 0x3210}, 0x33221100},
                                      {{0x33221100, 0x77665544, 0x7654}, 0x77665544},
                                      {{0x33221100, 0x77665544, 0x0426}, 0x00442266},
                                      {{0x33221100, 0x77665544, 0xfedc}, 0x77665544},
                                      {{0x33221100, 0x77665544, 0xffff3210}, 0x33221100}});
}

TEST_CASE("Funnel shifts wrap or clamp", "[fidelity][numbers]") {
  constexpr u32 lo = 0x89abcdef, hi = 0x01234567;
  expect<three<u32>, u32>(
      funnel_left{}, {{{lo, hi, 0}, hi}, {{lo, hi, 8}, 0x23456789}, {{lo, hi, 32}, hi}, {{lo, hi, 40}, 0x23456789}});
  expect<three<u32>, u32>(funnel_left_clamped{}, {{{lo, hi, 8}, 0x23456789}, {{lo, hi, 32}, lo}, {{lo, hi, 40}, lo}});
  expect<three<u32>, u32>(funnel_right{}, {{{lo, hi, 0}, lo}, {{lo, hi, 8}, 0x6789abcd}, {{lo, hi, 32}, lo}});
  expect<three<u32>, u32>(funnel_right_clamped{}, {{{lo, hi, 8}, 0x6789abcd}, {{lo, hi, 32}, hi}, {{lo, hi, 99}, hi}});
}

namespace {
DEVICE_FUNCTION(high_product, two<int>, __mulhi(x.a, x.b))
DEVICE_FUNCTION(high_product_long, two<long long>, __mul64hi(x.a, x.b))
DEVICE_FUNCTION(unsigned_high_product_long, two<u64>, __umul64hi(x.a, x.b))
DEVICE_FUNCTION(product24, two<int>, __mul24(x.a, x.b))
DEVICE_FUNCTION(unsigned_product24, two<u32>, __umul24(x.a, x.b))
DEVICE_FUNCTION(absolute_difference, two<int>, __sad(x.a, x.b, 1u))
DEVICE_FUNCTION(average, two<int>, __hadd(x.a, x.b))
DEVICE_FUNCTION(rounded_average, two<int>, __rhadd(x.a, x.b))
DEVICE_FUNCTION(unsigned_average, two<u32>, __uhadd(x.a, x.b))
DEVICE_FUNCTION(dot4, three<int>, __dp4a(x.a, x.b, x.c))
DEVICE_FUNCTION(unsigned_dot4, three<u32>, __dp4a(x.a, x.b, x.c))
DEVICE_FUNCTION(dot2_high, three<int>, __dp2a_hi(x.a, x.b, x.c))
DEVICE_FUNCTION(packed_add, two<u32>, __vadd4(x.a, x.b))
DEVICE_FUNCTION(packed_difference, two<u32>, __vabsdiffu4(x.a, x.b))
DEVICE_FUNCTION(packed_max, two<u32>, __vmaxu4(x.a, x.b))
DEVICE_FUNCTION(packed_equal, two<u32>, __vcmpeq4(x.a, x.b))
}  // namespace

TEST_CASE("Products and averages keep what an int can't", "[fidelity][numbers]") {
  constexpr int least = std::numeric_limits<int>::min();
  constexpr int most = std::numeric_limits<int>::max();
  expect<two<int>, int>(high_product{}, {{{least, least}, 0x40000000}, {{-1, 1}, -1}});
  expect<two<long long>, long long>(high_product_long{}, {{{-1, 1}, -1}, {{1ll << 62, 4}, 1}});
  expect<two<u64>, u64>(unsigned_high_product_long{}, {{{~0ull, ~0ull}, ~0ull - 1}});
  expect<two<int>, int>(product24{}, {{{0x01000003, 5}, 15}, {{0x00ffffff, 2}, -2}});
  expect<two<u32>, u32>(unsigned_product24{}, {{{0xff000003, 5}, 15}, {{0x00ffffff, 2}, 0x01fffffe}});
  expect<two<int>, u32>(absolute_difference{}, {{{least, most}, 0}, {{3, 5}, 3}});
  expect<two<int>, int>(average{}, {{{most, most}, most}, {{-3, -2}, -3}});
  expect<two<int>, int>(rounded_average{}, {{{most, most}, most}, {{-3, -2}, -2}});
  expect<two<u32>, u32>(unsigned_average{}, {{{~0u, ~0u}, ~0u}});
}

TEST_CASE("Bytes packed in a word are numbers of their own", "[fidelity][numbers]") {
  const auto word = [](u32 x) { return static_cast<int>(x); };
  expect<three<int>, int>(dot4{}, {{{word(0xff020304), word(0x01020304), 10}, 10 - 1 + 4 + 9 + 16}});
  expect<three<u32>, u32>(unsigned_dot4{}, {{{0xff020304, 0x01020304, 10}, 10 + 255 + 4 + 9 + 16}});
  expect<three<int>, int>(dot2_high{}, {{{word(0xffff0003), word(0x02050101), 1}, 1 - 2 + 15}});
  expect<two<u32>, u32>(packed_add{}, {{{0xff01ff01, 0x01010101}, 0x00020002}});
  expect<two<u32>, u32>(packed_difference{}, {{{0xff010005, 0x01ff0005}, 0xfefe0000}});
  expect<two<u32>, u32>(packed_max{}, {{{0xff010005, 0x01ff0004}, 0xffff0005}});
  expect<two<u32>, u32>(packed_equal{}, {{{0xff010005, 0x01010004}, 0x00ffff00}});
}

// ---- Memory ----

namespace {
__global__ void copy_cached(const float4* from, float4* to, const __half2* halves, __half2* out) {
  __stcg(to + threadIdx.x, __ldg(from + threadIdx.x));
  out[threadIdx.x] = __ldg(halves + threadIdx.x);
}
DEVICE_FUNCTION(bits_and_back, int, __double2hiint(__hiloint2double(x, 7)) + __double2loint(__hiloint2double(0, x)))
}  // namespace

TEST_CASE("Cached accesses move whole vectors", "[fidelity][numbers]") {
  const device_array<float4> from(std::vector<float4>{make_float4(1, 2, 3, 4), make_float4(5, 6, 7, 8)});
  const device_array<float4> to(2);
  const device_array<__half2> halves(std::vector<__half2>(2, __floats2half2_rn(1.0f, 2.0f)));
  const device_array<__half2> out(2);
  launch(copy_cached, 1, 2, from.data(), to.data(), halves.data(), out.data());
  CHECK(to.host()[1].w == 8.0f);
  CHECK(to.host()[0].x == 1.0f);
  CHECK(__high2float(out.host()[1]) == 2.0f);
  expect<int, int>(bits_and_back{}, {{21, 42}, {-3, -6}});
}

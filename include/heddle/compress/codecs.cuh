// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/cast.hpp>
#include <heddle/compress/quantize.hpp>
#include <heddle/compress/sign.hpp>
#include <heddle/core/cuda.cuh>
#include <heddle/core/shared.cuh>

namespace heddle {
inline namespace v0 {

/// @brief What a gradient is multiplied by on a device: a number, or one in device memory that an earlier kernel made.
struct device_factor {
  float value = 1.0f;                                                           ///< The number, where `at` is null.
  const float* at = nullptr;                                                    ///< Where it is.
  constexpr device_factor(float number = 1.0f) noexcept : value(number) {}      ///< A number.
  constexpr explicit device_factor(const float* where) noexcept : at(where) {}  ///< One in device memory.
  /// What it is; on the device only, if it is there.
  HEDDLE_HD float get() const noexcept { return at ? *at : value; }
};

namespace detail {
/// @cond
inline constexpr unsigned codec_threads = 128;

// v = g factor / ranks + held e, as the host's carrier makes it.
struct fed_value {
  const float *g, *e;
  float share, held, limit;
  const float* factor;  // null: share has it
  float ranks;
  float late;  // held is this many times what it was when v was sent
  HEDDLE_HD float operator()(std::size_t i) const {
    const float by = factor ? *factor / ranks : share;
    return e ? g[i] * by + e[i] * held : g[i] * by;
  }
  HEDDLE_HD float early(std::size_t i) const {  // what was sent of
    return g[i] * (factor ? *factor / ranks : share) + e[i] * (held / late);
  }
  // What v, v being there, has more than what was sent of it.
  HEDDLE_HD float missed(std::size_t i, float v) const {
    return late == 1.0f ? 0.0f : (v - g[i] * (factor ? *factor / ranks : share)) * (1.0f - 1.0f / late);
  }
};

inline fed_value fed(const float* g, device_factor factor, const float* e, const encode_context& x) noexcept {
  const float ranks = static_cast<float>(x.ranks);
  return {g, e, factor.value / ranks, x.held_scale * x.held_late, most_sent(x.ranks), factor.at, ranks, x.held_late};
}

template <class From, class To> struct convert_one {
  const From* from;
  To* to;
  float factor;
  HEDDLE_HD void operator()(std::size_t i) const { to[i] = static_cast<To>(static_cast<float>(from[i]) * factor); }
};

template <class Codec> inline constexpr bool has_device_blocks = false;
template <> inline constexpr bool has_device_blocks<sign> = true;
template <int Bits, rounding Rounding> inline constexpr bool has_device_blocks<quantize<Bits, Rounding>> = true;

template <class Codec> struct codec_scale;  // reduces a block to its scale
template <> struct codec_scale<sign> {
  HEDDLE_HD static double join(double a, double b) { return a + b; }
  HEDDLE_HD static float finish(double all, std::size_t n) { return static_cast<float>(all / static_cast<double>(n)); }
};
template <int Bits, rounding Rounding> struct codec_scale<quantize<Bits, Rounding>> {
  HEDDLE_HD static double join(double a, double b) { return a > b ? a : b; }
  HEDDLE_HD static float finish(double all, std::size_t) {
    return static_cast<float>(all) / static_cast<float>(quantize<Bits, Rounding>::levels);
  }
};

struct codec_numbers {  // of the random ones
  std::uint64_t seed, stream;
};

// Eight elements from i on, which share bytes of the payload.
HEDDLE_HD inline void write_eight(const sign&, const fed_value& v, std::size_t i, std::size_t end, float,
                                  const codec_numbers&, unsigned char* out) {
  unsigned byte = 0;
  for (std::size_t k = 0; k < 8 && i + k < end; ++k) byte |= static_cast<unsigned>(v(i + k) < 0.0f) << k;
  out[i / 8] = static_cast<unsigned char>(byte);
}
template <int Bits, rounding Rounding>
HEDDLE_HD inline void write_eight(const quantize<Bits, Rounding>& c, const fed_value& v, std::size_t i, std::size_t end,
                                  float scale, const codec_numbers& x, unsigned char* out) {
  const double inverse = scale > 0.0f ? 1.0 / static_cast<double>(scale) : 0.0;
  philox4x32::block words{};
  for (std::size_t k = 0; k < 8 && i + k < end; ++k) {
    if (Rounding == rounding::stochastic && k % 4 == 0) words = philox(x.seed, x.stream, (i + k) / 4);
    const int whole = c.whole_of(v(i + k), inverse, words.word[k % 4]);
    if (Bits == 8)
      out[i + k] = static_cast<unsigned char>(whole & 0xff);
    else if (k % 2 == 0)
      out[(i + k) / 2] = static_cast<unsigned char>(whole & 0xf);
    else
      out[(i + k) / 2] = static_cast<unsigned char>(out[(i + k) / 2] | (whole & 0xf) << 4);
  }
}

// One block of the codec after the other: its scale, then its elements, which are in cache by then.
template <class Codec>
__global__ void encode_blocks(Codec c, fed_value v, std::size_t n, codec_numbers x, std::byte* payload,
                              unsigned* not_finite) {
  HEDDLE_SHARED(double[codec_threads], part);
  const std::size_t blocks = n / c.block + (n % c.block != 0);
  auto* const scales = reinterpret_cast<float*>(payload);
  auto* const out = reinterpret_cast<unsigned char*>(payload + 4 * blocks);
  for (std::size_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    const std::size_t begin = b * c.block, end = begin + c.block < n ? begin + c.block : n;
    double mine = 0.0;
    for (std::size_t i = begin + threadIdx.x; i < end; i += codec_threads) {
      const float value = v(i);
      const float magnitude = value < 0.0f ? -value : value;
      if (!(magnitude <= v.limit)) atomicOr(not_finite, 1u);
      mine = codec_scale<Codec>::join(mine, static_cast<double>(magnitude));
    }
    part[threadIdx.x] = mine;
    __syncthreads();
    for (unsigned half = codec_threads / 2; half; half /= 2) {
      if (threadIdx.x < half) part[threadIdx.x] = codec_scale<Codec>::join(part[threadIdx.x], part[threadIdx.x + half]);
      __syncthreads();
    }
    const float scale = codec_scale<Codec>::finish(part[0], end - begin);
    if (threadIdx.x == 0) scales[b] = scale;
    for (std::size_t i = begin + 8 * threadIdx.x; i < end; i += 8 * codec_threads)
      write_eight(c, v, i, end, scale, x, out);
    __syncthreads();  // part is written again
  }
}

template <class Codec> struct add_payload {
  Codec c;
  const std::byte* payload;
  std::size_t n;
  float* sum;
  HEDDLE_HD void operator()(std::size_t i) const { sum[i] += c.value(payload, n, i); }
};
template <class Codec> struct hold_rest {
  Codec c;
  fed_value v;
  const std::byte* payload;
  std::size_t n;
  float* e;
  HEDDLE_HD void operator()(std::size_t i) const { e[i] = v(i) - c.value(payload, n, i); }
};
/// @endcond
}  // namespace detail

/// @brief `sign` and `quantize` on a device, with error feedback or without, in the payloads of the host.
///
///     hd::codec_device device(hd::quantize<8>{});
///     device.encode(g, 1.0f, e, n, context, payload, flag, queue);   // moves no state
///     ...                                        // payloads travel; all ranks look at all flags
///     device.hold(g, 1.0f, e, n, context, payload, queue);           // e = v - what was sent
///     device.decode_add(payload, sum, n, queue);
///
/// Payloads of the host and the device are read by either. Sums of a block are added in another order than on the
/// host, so its scale may differ in the last bit.
/// Wire:    the codec's.
/// State:   4 bytes per element (e), the caller's.
/// Traffic: `encode` reads 8 bytes per element, 4 without e, and again from cache; `hold` reads 8 and the payload and
///          writes 4; `decode_add` reads the payload and 4 and writes 4.
/// Order:   as the codec.
/// Sync:    everything only enqueues.
/// Throws:  argument_error if the codec's block isn't a multiple of 8, or a pointer is null; cuda_error.
/// @tparam Codec sign or quantize.
template <class Codec> class codec_device {
  static_assert(
      detail::has_device_blocks<Codec>,
      "heddle::codec_device: the codec must be sign{} or quantize<>{}; top_k{}, random_k{} and power_sgd{} have "
      "top_k_device, random_k_device and power_sgd_device; see docs/compress.md");

 public:
  /// @param c The codec; its block is a multiple of 8.
  explicit codec_device(const Codec& c) : codec_(c) {
    c.check();
    if (c.block % 8 != 0) {
      throw argument_error("heddle::codec_device: block is " + std::to_string(c.block) +
                           ", allowed is a multiple of 8");
    }
  }

  /// @brief Writes the payload of g factor / ranks + held_scale e, e being null or a tensor.
  /// @param g Gradient, n elements. @param factor Multiplies it. @param e What is held. @param n Elements.
  /// @param x Step, tensor, rank and ranks. @param payload wire_bytes(n) bytes, aligned to a float.
  /// @param not_finite Set to 1 where a value, or the sum of all ranks', may not be finite; else left. @param q Where the
  /// work goes.
  void encode(const float* g, device_factor factor, const float* e, std::size_t n, const encode_context& x,
              std::byte* payload, unsigned* not_finite, cuda::queue q) const {
    for (const void* p :
         {static_cast<const void*>(g), static_cast<const void*>(payload), static_cast<const void*>(not_finite)})
      detail::check_pointer("codec_device::encode", p, n);
    if (n == 0) return;
    std::uint64_t seed = 0;
    if constexpr (requires { codec_.seed_of(0); }) seed = codec_.seed_of(x.rank);
    const detail::codec_numbers numbers{seed, random_stream(x.tensor, static_cast<std::uint32_t>(x.step))};
    const std::size_t blocks = n / codec_.block + (n % codec_.block != 0);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>((std::min)(blocks, std::size_t{65535})));
    config.blockDim = dim3(detail::codec_threads);
    config.stream = q.stream;
    detail::check_cuda("codec_device::encode",
                       cudaLaunchKernelEx(&config, detail::encode_blocks<Codec>, codec_, detail::fed(g, factor, e, x),
                                          n, numbers, payload, not_finite));
  }
  /// @brief e becomes what the payload lacks, at the scale of x.held_scale and x.held_late.
  void hold(const float* g, device_factor factor, float* e, std::size_t n, const encode_context& x,
            const std::byte* payload, cuda::queue q) const {
    for (const void* p : {static_cast<const void*>(g), static_cast<const void*>(payload), static_cast<const void*>(e)})
      detail::check_pointer("codec_device::hold", p, n);
    cuda::for_each(n, detail::hold_rest<Codec>{codec_, detail::fed(g, factor, e, x), payload, n, e}, q);
  }
  /// @brief sum[i] += element i of the payload.
  void decode_add(const std::byte* payload, float* sum, std::size_t n, cuda::queue q) const {
    for (const void* p : {static_cast<const void*>(payload), static_cast<const void*>(sum)})
      detail::check_pointer("codec_device::decode_add", p, n);
    cuda::for_each(n, detail::add_payload<Codec>{codec_, payload, n, sum}, q);
  }

 private:
  Codec codec_;
};

/// @brief `cast` on a device: the host's bits, NaN payloads aside.
/// Wire:    2 bytes per element.
/// State:   none.
/// Traffic: 6 bytes per element each way, the least possible.
/// Order:   as cast.
/// Sync:    everything only enqueues.
/// Throws:  argument_error for a null pointer; cuda_error.
/// @tparam Wire float16 or bfloat16.
template <class Wire> class cast_device {
 public:
  /// @param c The compressor on the host.
  explicit cast_device(const cast<Wire>& c = {}) noexcept { static_cast<void>(c); }

  /// @brief out[i] = Wire(g[i] * factor) for n elements, to nearest even.
  void encode(const float* g, Wire* out, std::size_t n, float factor, cuda::queue q) const {
    run("cast_device::encode", g, out, n, factor, q);
  }
  /// @brief g[i] = float(in[i]) for n elements, exact.
  void decode(const Wire* in, float* g, std::size_t n, cuda::queue q) const {
    run("cast_device::decode", in, g, n, 1.0f, q);
  }

 private:
  template <class From, class To>
  static void run(const char* what, const From* from, To* to, std::size_t n, float factor, cuda::queue q) {
    detail::check_pointer(what, from, n);
    detail::check_pointer(what, to, n);
    cuda::for_each(n, detail::convert_one<From, To>{from, to, factor}, q);
  }
};

}  // namespace v0
}  // namespace heddle

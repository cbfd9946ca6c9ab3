// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>
#include <heddle/compress/detail/largest.hpp>
#include <heddle/core/detail/elementwise.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

// What a step of DGC does to one element:
//     G = share g + decay w;  U = momentum U + own G;  V = V + U + ahead G
// with own = 1, ahead = 0, or for Nesterov own = momentum, ahead = 1.
struct dgc_rule {
  dgc_rule(float factor, const encode_context& x)
      : share(factor / static_cast<float>(x.ranks)),
        decay(x.parameter ? x.weight_decay / static_cast<float>(x.ranks) : 0.0f),
        momentum(x.momentum),
        own(x.nesterov ? x.momentum : 1.0f),
        ahead(x.nesterov ? 1.0f : 0.0f) {}
  float share, decay, momentum, own, ahead;
};

// The tensor and its state; w is null without weight decay.
struct dgc_tensor {
  const float *g, *w;
  float *u, *v;
};

// Steps elements [i, end) one by one. With Write U and V move. Offers V to `out`; returns the largest bits of |V|, with
// Write of |U| too.
template <bool Write, class Largest>
std::uint32_t dgc_scalar(const dgc_rule& r, const dgc_tensor& t, std::size_t i, std::size_t end, Largest& out) {
  std::uint32_t peak = 0;
  for (; i < end; ++i) {
    const float g = t.w ? t.g[i] * r.share + t.w[i] * r.decay : t.g[i] * r.share;
    const float u = t.u[i] * r.momentum + g * r.own, v = t.v[i] + u + g * r.ahead;
    peak = (std::max)(peak, std::bit_cast<std::uint32_t>(v) & magnitude_mask);
    if constexpr (Write) {
      peak = (std::max)(peak, std::bit_cast<std::uint32_t>(u) & magnitude_mask);
      t.u[i] = u;
      t.v[i] = v;
    }
    if ((std::bit_cast<std::uint32_t>(v) & magnitude_mask) >= out.limit()) out.offer(&v, i, 1);
  }
  return peak;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
/// @cond
template <bool Write, class Largest>
__attribute__((target("avx2"))) inline std::uint32_t dgc_avx2(const dgc_rule& r, const dgc_tensor& t, std::size_t n,
                                                              Largest& out) {
  float_x8 share{}, decay{}, momentum{}, own{}, ahead{};
  int_x8 peak{}, magnitude{};
  share += r.share;
  decay += r.decay;
  momentum += r.momentum;
  own += r.own;
  ahead += r.ahead;
  magnitude += static_cast<int>(magnitude_mask);
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    int_x8 limit{}, hit{};
    limit += static_cast<int>((std::min)(out.limit(), magnitude_mask));
    float sums[32];
    for (std::size_t j = 0; j < 32; j += 8) {
      float_x8 g, u, v, w;
      std::memcpy(&g, t.g + i + j, sizeof g);
      std::memcpy(&u, t.u + i + j, sizeof u);
      std::memcpy(&v, t.v + i + j, sizeof v);
      g = g * share;
      if (t.w) {
        std::memcpy(&w, t.w + i + j, sizeof w);
        g = g + w * decay;
      }
      u = u * momentum + g * own;
      v = v + u + g * ahead;
      int_x8 bits;
      std::memcpy(&bits, &v, sizeof bits);
      bits &= magnitude;
      hit |= bits >= limit;
      peak = bits > peak ? bits : peak;
      if constexpr (Write) {
        std::memcpy(&bits, &u, sizeof bits);
        bits &= magnitude;
        peak = bits > peak ? bits : peak;
        std::memcpy(t.u + i + j, &u, sizeof u);
        std::memcpy(t.v + i + j, &v, sizeof v);
      } else {
        std::memcpy(sums + j, &v, sizeof v);
      }
    }
    std::uint64_t word[4];
    std::memcpy(word, &hit, sizeof word);
    if (word[0] | word[1] | word[2] | word[3]) offer_those_avx2(Write ? t.v + i : sums, i, out);
  }
  std::uint32_t lanes[8], most = dgc_scalar<Write>(r, t, i, n, out);
  std::memcpy(lanes, &peak, sizeof lanes);
  for (const std::uint32_t lane : lanes) most = (std::max)(most, lane);
  return most;
}
/// @endcond
#endif

// The pass over a tensor: 12 bytes read per element and with Write 8 written, 4 more read with weight decay.
template <bool Write, class Largest>
std::uint32_t dgc_pass(const dgc_rule& r, const dgc_tensor& t, std::size_t n, Largest& out) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
  if (best_isa() != isa::portable) return dgc_avx2<Write>(r, t, n, out);
#endif
  return dgc_scalar<Write>(r, t, 0, n, out);
}

// A step of the dense phase: g, the mean gradient, becomes the update of momentum SGD, of which u is the velocity over
// the number of ranks; w is null without weight decay.
template <class Context> void dgc_dense(float* g, const float* w, float* u, std::size_t n, const Context& x) noexcept {
  const float all = static_cast<float>(x.ranks), share = 1.0f / all, momentum = x.momentum, decay = x.weight_decay;
  const bool ahead = x.nesterov;
  const auto move = [=](auto& update, const auto& mean, auto& velocity) {
    const auto mine = mean * share;
    velocity = ahead ? momentum * (velocity + mine) : momentum * velocity + mine;
    update = (ahead ? velocity + mine : velocity) * all;
  };
  const auto decayed = [=](auto& update, const auto& parameter, auto& velocity) {
    const auto mean = update + decay * parameter;
    move(update, mean, velocity);
  };
  if (w)
    update_elements(n, decayed, g, w, u);
  else
    update_elements(n, move, g, g, u);
}

// The same and p -= rate times the update, in one pass of 12 bytes read and 8 written; g stays. p is the parameter, of
// which weight decay is.
template <class Context>
void dgc_dense_step(const float* g, float* p, float* u, std::size_t n, const Context& x, float rate) noexcept {
  const float all = static_cast<float>(x.ranks), share = 1.0f / all, momentum = x.momentum, decay = x.weight_decay;
  const auto heavy_ball = [=](auto& parameter, const auto& mean, auto& velocity) {
    velocity = momentum * velocity + mean * share;
    parameter -= rate * (velocity * all);
  };
  const auto look_ahead = [=](auto& parameter, const auto& mean, auto& velocity) {
    const auto mine = mean * share;
    velocity = momentum * (velocity + mine);
    parameter -= rate * ((velocity + mine) * all);
  };
  const auto decayed = [=](const auto& move) {
    return [=](auto& parameter, const auto& gradient, auto& velocity) {
      const auto mean = gradient + decay * parameter;
      move(parameter, mean, velocity);
    };
  };
  if (x.parameter)
    x.nesterov ? update_elements(n, decayed(look_ahead), p, g, u) : update_elements(n, decayed(heavy_ball), p, g, u);
  else
    x.nesterov ? update_elements(n, look_ahead, p, g, u) : update_elements(n, heavy_ball, p, g, u);
}

// A magnitude's bits that about `wanted` of n elements reach after this step, from a sample of at most n elements, one
// at a random place of each stretch. Reads only. 1, what any but zero reaches, if too few reach more.
template <class Bits = std::uint32_t>
std::uint32_t dgc_sampled(const dgc_rule& r, const dgc_tensor& t, std::size_t n, std::size_t wanted,
                          std::uint64_t seed) {
  constexpr std::size_t reach = 16;  // of the sample
  const std::size_t count = (std::min)(n, (std::max)(n / 100 + 1, n / wanted * reach));
  const std::size_t rank =
      static_cast<std::size_t>(static_cast<double>(wanted) / static_cast<double>(n) * static_cast<double>(count));
  basic_largest<> none(0, 0, 0);
  std::vector<Bits> sample(count);
  for (std::size_t j = 0; j < count; ++j) {
    const std::size_t from = n / count * j + n % count * j / count,
                      to = n / count * (j + 1) + n % count * (j + 1) / count;
    std::uint64_t mixed = (seed + j) * 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93ull;
    const std::size_t i = from + (mixed >> 32) % (to - from);
    const dgc_tensor one{t.g + i, t.w ? t.w + i : nullptr, t.u + i, t.v + i};
    sample[j] = dgc_scalar<false>(r, one, 0, 1, none);
  }
  const auto at = sample.begin() + static_cast<std::ptrdiff_t>((std::min)(rank, count - 1));
  std::nth_element(sample.begin(), at, sample.end(), [](Bits a, Bits b) { return a > b; });
  return (std::max)(*at, std::uint32_t{1});
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

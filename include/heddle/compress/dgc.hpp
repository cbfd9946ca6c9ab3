// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

namespace heddle {
inline namespace v0 {

namespace detail {
// The k elements of largest magnitude, as indices in rising order. Total order: larger bits of |v| first, then the
// lower index; so +0 and -0 are equal, and ties are the same on every run. v must be finite.
template <class Index>
void select_largest(slice<const float> v, std::size_t k, std::vector<Index>& chosen) {
  chosen.clear();
  if (k == 0) return;
  const auto key = [&](std::size_t i) { return std::bit_cast<std::uint32_t>(v[i]) & 0x7fffffffu; };
  // Histogram of the leading bits (exponent and 3 of the mantissa) finds the bin of the k-th; only that bin is ordered.
  constexpr int shift = 20;
  std::array<std::uint32_t, 1u << (31 - shift)> bins{};
  for (std::size_t i = 0; i < v.count; ++i) ++bins[key(i) >> shift];
  std::size_t above = 0;
  std::uint32_t bin = static_cast<std::uint32_t>(bins.size() - 1);
  while (above + bins[bin] < k) above += bins[bin--];
  std::vector<std::uint64_t> boundary;
  boundary.reserve(bins[bin]);
  for (std::size_t i = 0; i < v.count; ++i) {
    const std::uint32_t b = key(i) >> shift;
    if (b > bin)
      chosen.push_back(static_cast<std::uint32_t>(i));
    else if (b == bin)
      boundary.push_back(std::uint64_t{key(i)} << 32 | (0xffffffffu - static_cast<std::uint32_t>(i)));
  }
  const std::size_t rest = k - above;
  if (rest < boundary.size()) {
    std::nth_element(boundary.begin(), boundary.begin() + static_cast<std::ptrdiff_t>(rest), boundary.end(),
                     [](std::uint64_t a, std::uint64_t b) { return a > b; });
  }
  for (std::size_t j = 0; j < rest; ++j) chosen.push_back(0xffffffffu - static_cast<std::uint32_t>(boundary[j]));
  std::sort(chosen.begin(), chosen.end());
}
}  // namespace detail

/// @brief Deep Gradient Compression: send only the largest entries of the accumulated gradient, keep the rest.
///
/// Per step and rank, with P ranks, rank's gradient g (clipped by a transform before), parameter w:
///
///     G = g / P + (weight_decay / P) w
///     U = momentum U + G          (Nesterov: U = momentum (U + G))
///     V = V + U                   (Nesterov: V = V + U + G)
///     send V where it is among the k largest |V|; there V = 0 and, with masking, U = 0
///     w = w - lr sum over ranks of what was sent
///
/// Momentum and decay are the optimizer's (`sgd`), applied here and nowhere else. In the dense phase (before
/// `begin_step`) and for tensors below `dense_below` elements the mean gradient is all-reduced and U is the velocity of
/// momentum SGD (divided by P), so that momentum survives the switch.
/// Wire:    8 bytes per entry plus 8 per tensor, k = ceil((1 - sparsity) n) entries, gathered from every rank.
/// State:   8 bytes per element (U and V).
/// Traffic: 52 bytes per element, 4 more in each half with weight decay: `encode` reads g, U and V, writes what V would
///          be to scratch and reads it twice to select (28); `commit` reads g, U and V and writes U and V (20), plus 4
///          where the sum is added up. The least for two halves is 32, for one fused pass 20.
/// Order:   ends a chain; after clip. Needs the optimizer `sgd`; not with a mode that has an outer momentum.
/// Sync:    never.
/// Paper:   Lin et al. 2018, arXiv 1712.01887. Differences: exact, deterministic top-k instead of a sampled threshold
///          (ties by index); a non-finite gradient makes every rank skip the step; decay inside the local gradient.
/// Throws:  argument_error if sparsity is outside [0, 1) or a tensor has 2^32 - 1 elements or more.
struct dgc {
  double sparsity = 0.999;       ///< Fraction held back after warm-up, in [0, 1).
  std::size_t begin_step = 0;    ///< Steps before it are dense.
  std::size_t warmup_steps = 0;  ///< Steps after `begin_step` over which sparsity rises: 75, 93.75, 98.4375, 99.6 %, as
                                 ///< far as these are below `sparsity`, a fourth of the steps each.
  std::size_t dense_below = 16384;  ///< Tensors with fewer elements are never sparsified.
  bool masking = true;              ///< Momentum factor masking: zero U where V is sent.

  static constexpr int slots = 2;              ///< U and V.
  static constexpr bool owns_momentum = true;  ///< Momentum and decay are applied here, not by the optimizer.

  /// Throws argument_error unless sparsity is in its range.
  void check() const {
    if (!(sparsity >= 0.0 && sparsity < 1.0)) {
      throw argument_error("heddle::dgc: sparsity is " + std::to_string(sparsity) + ", allowed is 0 <= sparsity < 1");
    }
  }

  /// Sparsity in force at a step.
  double sparsity_at(std::size_t step) const noexcept {
    constexpr double stages[4] = {0.75, 0.9375, 0.984375, 0.996};
    if (step < begin_step || step >= begin_step + warmup_steps) return sparsity;
    const double s = stages[(std::min<std::size_t>)(3, (step - begin_step) * 4 / warmup_steps)];
    return (std::min)(s, sparsity);
  }

  /// Whether a tensor of n elements travels as a packet at this step.
  bool sends(std::size_t n, const encode_context& x) const noexcept {
    return x.step >= begin_step && n >= dense_below && n > 0;
  }

  /// Number of entries sent of a tensor of n elements: ceil((1 - sparsity) n), at most n.
  std::size_t entries(std::size_t n, const encode_context& x) const {
    check();
    const double kept = 1.0 - sparsity_at(x.step);
    return (std::min)(n, static_cast<std::size_t>(std::ceil(kept * static_cast<double>(n) * (1.0 - 1e-7))));
  }

  /// @brief Appends this rank's packet; reads gradient and state, changes neither.
  /// Packet: u32 flag (1: the gradient isn't finite, nothing follows), u32 entries, u32 indices rising, f32 values.
  template <class Allocator>
  void encode(slice<const float> g, float factor, float* const* state, const encode_context& x,
              std::vector<std::byte, Allocator>& packet) const {
    if (g.count >= 0xffffffffull) {
      throw argument_error("heddle::dgc: a tensor of " + std::to_string(g.count) +
                           " elements, allowed is below 2^32 - 1");
    }
    const std::size_t k = entries(g.count, x);
    std::vector<float> v(g.count);
    const update rule(factor, x);
    bool finite = true;
    for (std::size_t i = 0; i < g.count; ++i) {
      const moved m = rule(g[i], x.parameter ? x.parameter[i] : 0.0f, state[0][i], state[1][i]);
      v[i] = m.v;
      finite &= std::isfinite(m.v);
    }
    std::vector<std::uint32_t> chosen;
    if (finite) detail::select_largest({v.data(), v.size()}, k, chosen);
    std::erase_if(chosen, [&](std::uint32_t i) { return v[i] == 0.0f; });  // zeros need no message
    const std::uint32_t head[2] = {finite ? 0u : 1u, static_cast<std::uint32_t>(chosen.size())};
    const std::size_t at = packet.size(), n = chosen.size();
    packet.resize(at + sizeof head + 8 * n);
    std::byte* out = packet.data() + at;
    std::memcpy(out, head, sizeof head);
    if (n) std::memcpy(out + sizeof head, chosen.data(), 4 * n);
    for (std::size_t j = 0; j < n; ++j) std::memcpy(out + sizeof head + 4 * (n + j), &v[chosen[j]], 4);
  }

  /// @brief Moves U and V as `encode` computed them and zeroes what the packet holds.
  void commit(slice<const float> g, float factor, float* const* state, const encode_context& x,
              slice<const std::byte> packet) const {
    const update rule(factor, x);
    for (std::size_t i = 0; i < g.count; ++i) {
      const moved m = rule(g[i], x.parameter ? x.parameter[i] : 0.0f, state[0][i], state[1][i]);
      state[0][i] = m.u;
      state[1][i] = m.v;
    }
    const view p(packet);
    for (std::size_t j = 0; j < p.count; ++j) {
      const std::uint32_t i = p.index(j);
      state[1][i] = 0.0f;
      if (masking) state[0][i] = 0.0f;
    }
  }

  /// @brief sum[index] += value for each entry; entries beyond the tensor are an error.
  /// @return Bytes of the packet.
  /// Throws: argument_error on a damaged packet.
  std::size_t decode_add(slice<const std::byte> packet, slice<float> sum) const {
    const view p(packet);
    for (std::size_t j = 0; j < p.count; ++j) {
      const std::uint32_t i = p.index(j);
      if (i >= sum.count)
        throw argument_error("heddle::dgc: damaged packet, index " + std::to_string(i) + " of " +
                             std::to_string(sum.count));
      sum[i] += p.value(j);
    }
    return p.bytes();
  }

  /// Whether the packet says that its rank's gradient is not finite.
  bool flagged(slice<const std::byte> packet) const { return view(packet).flag != 0; }
  /// Bytes of the first packet in a run of packets.
  std::size_t measure(slice<const std::byte> packets) const { return view(packets).bytes(); }

  /// @brief Dense phase: turns the mean gradient (scaled already) into the update of momentum SGD, U being its
  /// velocity.
  void correct(slice<float> g, float* const* state, const encode_context& x) const noexcept {
    const float share = 1.0f / static_cast<float>(x.ranks), all = static_cast<float>(x.ranks);
    for (std::size_t i = 0; i < g.count; ++i) {
      const float mean = (g[i] + (x.parameter ? x.weight_decay * x.parameter[i] : 0.0f)) * share;
      float& u = state[0][i];
      if (x.nesterov) {
        u = x.momentum * (u + mean);
        g[i] = (u + mean) * all;
      } else {
        u = x.momentum * u + mean;
        g[i] = u * all;
      }
    }
  }

  /// "dgc".
  std::string name() const { return "dgc"; }

 private:
  struct moved {
    float u, v;
  };
  // One element's step, used by both halves. Where a compiler fuses multiplications and additions differently in the
  // two, what was sent and what is held may differ by a rounding.
  struct update {
    update(float factor, const encode_context& x)
        : share(factor / static_cast<float>(x.ranks)),
          decay(x.weight_decay / static_cast<float>(x.ranks)),
          momentum(x.momentum),
          nesterov(x.nesterov) {}
    moved operator()(float g, float w, float u, float v) const noexcept {
      const float mine = g * share + decay * w;
      const float next = nesterov ? momentum * (u + mine) : momentum * u + mine;
      return {next, v + next + (nesterov ? mine : 0.0f)};
    }
    float share, decay, momentum;
    bool nesterov;
  };
  struct view {
    explicit view(slice<const std::byte> p) : data(p.data) {
      std::uint32_t head[2] = {};
      if (p.count < sizeof head)
        throw argument_error("heddle::dgc: damaged packet of " + std::to_string(p.count) + " bytes");
      std::memcpy(head, data, sizeof head);
      flag = head[0];
      count = head[1];
      if (p.count < bytes())
        throw argument_error("heddle::dgc: packet cut at " + std::to_string(p.count) + " bytes of " +
                             std::to_string(bytes()));
    }
    std::size_t bytes() const noexcept { return 8 + 8 * count; }
    std::uint32_t index(std::size_t j) const noexcept {
      std::uint32_t i;
      std::memcpy(&i, data + 8 + 4 * j, 4);
      return i;
    }
    float value(std::size_t j) const noexcept {
      float f;
      std::memcpy(&f, data + 8 + 4 * (count + j), 4);
      return f;
    }
    const std::byte* data;
    std::uint32_t flag = 0;
    std::size_t count = 0;
  };
};
static_assert(packet_compressor<dgc>);

}  // namespace v0
}  // namespace heddle

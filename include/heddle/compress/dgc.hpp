// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/detail/dgc_pass.hpp>
#include <heddle/compress/sparse_wire.hpp>

#include <cmath>

namespace heddle {
inline namespace v0 {

/// @brief How a compressor chooses what it sends.
enum class selection : std::uint8_t {
  exact,   ///< The k of largest magnitude, ties by the lower index.
  sampled  ///< What reaches a threshold that is sampled at first and then steered: k/2 to 1.25 k entries, the largest.
};

/// @brief Deep Gradient Compression: send only the largest entries of the accumulated gradient, keep the rest.
///
/// Per step and rank, with P ranks, rank's gradient g (clipped by a transform before), parameter w:
///
///     G = g / P + (weight_decay / P) w
///     U = momentum U + G          (Nesterov: U = momentum (U + G))
///     V = V + U                   (Nesterov: V = V + U + G)
///     send V where it is among the k largest |V|; take off V what was sent, and with masking set U = 0 there
///     w = w - lr sum over ranks of what was sent
///
/// Momentum and decay are the optimizer's (`sgd`), applied here and nowhere else. In the dense phase (before
/// `begin_step`) and for tensors below `dense_below` elements the mean gradient is all-reduced and U is the velocity of
/// momentum SGD (divided by P; with Nesterov momentum times the velocity), so that momentum survives the switch.
/// Wire:    8 bytes per tensor and, with k = ceil((1 - sparsity) n) entries and b = 4 or 2 bytes a value, the least of
///          (4 + b) k, (2 + b) k, n / 8 + b k and b n bytes (`sparse_wire.hpp`), gathered from every rank; where a
///          bucket's packets are together no less than an all-reduce of floats moves, that runs instead.
/// State:   8 bytes per element (U and V), 8 bytes per tensor.
/// Traffic: per element, 4 more for each pass with weight decay. `overlap::transactional`: `encode` reads g, U and V
///          (12), `commit` reads them and writes U and V (20): 32, the least for two halves. `overlap::none`: `fused`
///          reads g, U, V and writes U and V: 20, the least; `fits` reads g before (4). A threshold that was too high
///          is mended by one more read of V, or in `encode` by one more pass. Dense: 20 with the update, the least;
///          over tensors of a device 28, in two passes.
/// Order:   ends a chain; after clip. Needs the optimizer `sgd`; not with a mode that has an outer momentum.
/// Sync:    never.
/// Paper:   Lin et al. 2018, arXiv 1712.01887. Differences: the selection is exact unless asked otherwise; a non-finite
///          gradient makes every rank skip the step; decay inside the local gradient; rounding of 16-bit values is
///          held.
/// Throws:  argument_error if sparsity is outside [0, 1) or a tensor has 2^32 - 1 elements or more.
struct dgc {
  double sparsity = 0.999;       ///< Fraction held back after warm-up, in [0, 1).
  std::size_t begin_step = 0;    ///< Steps before it are dense.
  std::size_t warmup_steps = 0;  ///< Steps after `begin_step` over which sparsity rises: 75, 93.75, 98.4375, 99.6 %, as
                                 ///< far as these are below `sparsity`, a fourth of the steps each.
  std::size_t dense_below = 16384;                           ///< Tensors with fewer elements are never sparsified.
  bool masking = true;                                       ///< Momentum factor masking: zero U where V is sent.
  heddle::selection selection = heddle::selection::exact;    ///< How entries are chosen.
  sparse_values values = sparse_values::f32;                 ///< How their values travel.
  heddle::overlap overlap = heddle::overlap::transactional;  ///< Whether it works during backward or after it.

  static constexpr int slots = 2;              ///< U and V.
  static constexpr bool owns_momentum = true;  ///< Momentum and decay are applied here, not by the optimizer.

  /// Floats of state of a tensor besides the slots, which follow them: where the search for the largest begins, and the
  /// largest magnitude in U and V.
  static constexpr std::size_t extra(std::size_t /*count*/) noexcept { return 2; }

  /// Throws argument_error unless sparsity is in its range.
  void check() const {
    if (!(sparsity >= 0.0 && sparsity < 1.0)) {
      throw argument_error("heddle::dgc: sparsity is " + std::to_string(sparsity) + ", allowed is 0 <= sparsity < 1");
    }
  }

  /// Sparsity in force at a step.
  double sparsity_at(std::size_t step) const noexcept {
    constexpr double stages[4] = {0.75, 0.9375, 0.984375, 0.996};
    if (step < begin_step || step - begin_step >= warmup_steps) return sparsity;
    const double done = static_cast<double>(step - begin_step) / static_cast<double>(warmup_steps);
    return (std::min)(stages[(std::min)(3, static_cast<int>(done * 4))], sparsity);
  }

  /// Whether a tensor of n elements travels as a packet at this step.
  bool sends(std::size_t n, const encode_context& x) const noexcept {
    return x.step >= begin_step && n >= dense_below && n > 0;
  }

  /// Number of entries to send of a tensor of n elements: ceil((1 - sparsity) n), before `begin_step` n.
  std::size_t entries(std::size_t n, const encode_context& x) const {
    check();
    if (x.step < begin_step) return n;
    const double kept = 1.0 - sparsity_at(x.step);
    return detail::part_of(kept, n);
  }

  /// @brief The preparing half: appends this rank's packet; reads gradient and state, changes neither.
  /// @param g Gradient. @param factor What to multiply it by. @param state U, V and the extra numbers.
  /// @param x Context. @param packet Where a packet of `sparse_wire.hpp` is appended; without entries and flagged if a
  /// sum is not finite.
  template <class Allocator>
  void encode(slice<const float> g, float factor, float* const* state, const encode_context& x,
              std::vector<std::byte, Allocator>& packet) const {
    std::uint32_t peak = 0;
    detail::largest found = search<false>(g, factor, state, x, peak);
    if (!small_enough(peak, x)) return append_flagged(packet);
    append(g.count, found, packet);
  }

  /// @brief The committing half: moves U and V as `encode` computed them and takes off what the packet holds.
  template <class Context>
  void commit(slice<const float> g, float factor, float* const* state, const Context& x,
              slice<const std::byte> packet) const {
    detail::largest none(0, 0, 0);
    const detail::dgc_tensor t{g.data, x.parameter, state[0], state[1]};
    const std::uint32_t peak = detail::dgc_pass<true>(detail::dgc_rule(factor, x), t, g.count, none);
    release(g.count, state, x, packet, peak);
  }

  /// @brief Whether `fused` may run on this rank: the gradient is finite and no sum leaves float's range, as `encode`
  /// would find. Reads only g, and with weight decay the parameter, unless numbers are near the end of that range.
  template <class Context = encode_context>
  bool fits(slice<const float> g, float factor, float* const* state, const Context& x) const noexcept {
    const detail::dgc_rule rule(factor, x);
    const double input =
        reach(g.data, g.count, rule.share) + (x.parameter ? reach(x.parameter, g.count, rule.decay) : 0.0);
    double held = state[2][1];
    if (held == 0.0) held = (std::max)(reach(state[0], g.count, 1.0f), reach(state[1], g.count, 1.0f));  // not known
    if (2.0 * (held + input) <= detail::most_sent(x.ranks)) return true;  // |V + momentum U + 2 G|
    detail::largest none(0, 0, 0);
    const detail::dgc_tensor t{g.data, x.parameter, state[0], state[1]};
    return small_enough(detail::dgc_pass<false>(rule, t, g.count, none), x);
  }

  /// @brief Both halves in one pass, for a step of which all ranks know that it counts.
  template <class Allocator>
  void fused(slice<const float> g, float factor, float* const* state, const encode_context& x,
             std::vector<std::byte, Allocator>& packet) const {
    std::uint32_t peak = 0;
    detail::largest found = search<true>(g, factor, state, x, peak);
    const std::size_t at = packet.size();
    append(g.count, found, packet);
    release(g.count, state, x, {packet.data() + at, packet.size() - at}, peak);
  }

  /// @brief sum[index] += value for each entry; entries beyond the tensor are an error.
  /// @return Bytes of the packet.
  /// Throws: argument_error on a damaged packet.
  std::size_t decode_add(slice<const std::byte> packet, slice<float> sum) const { return add_sparse(packet, sum); }

  /// Whether the packet says that its rank's gradient is not finite.
  bool flagged(slice<const std::byte> packet) const { return sparse_packet(packet).flagged(); }
  /// Bytes of the first packet in a run of packets.
  std::size_t measure(slice<const std::byte> packets) const { return sparse_packet(packets).bytes(); }
  /// Values in a packet.
  std::size_t elements(slice<const std::byte> packet) const { return sparse_packet(packet).entries(); }

  /// @brief Dense phase: turns the mean gradient (scaled already) into the update of momentum SGD, U being its
  /// velocity.
  template <class Context = encode_context>
  void correct(slice<float> g, float* const* state, const Context& x) const noexcept {
    constexpr std::size_t block = 2048;  // still in cache when its largest magnitude is looked for
    for (std::size_t i = 0, n = 0; i < g.count; i += n) {
      n = (std::min)(block, g.count - i);
      detail::dgc_dense(g.data + i, x.parameter ? x.parameter + i : nullptr, state[0] + i, n, x);
      state[2][1] = (std::max)(state[2][1], std::bit_cast<float>(detail::peak_bits(state[0] + i, n)));
    }
  }
  /// @brief `correct`, and p -= rate times the update, in one pass of 20 bytes per element; g stays the mean.
  template <class Context = encode_context>
  void step_dense(slice<const float> g, float* p, float* const* state, const Context& x, float rate) const noexcept {
    constexpr std::size_t block = 2048;  // as there
    float peak = state[2][1];
    for (std::size_t i = 0, n = 0; i < g.count; i += n) {
      n = (std::min)(block, g.count - i);
      detail::dgc_dense_step(g.data + i, p + i, state[0] + i, n, x, rate);
      peak = (std::max)(peak, std::bit_cast<float>(detail::peak_bits(state[0] + i, n)));
    }
    state[2][1] = peak;
  }
  /// @brief Whether that leaves float's range nowhere, what `release` adds included.
  template <class Context = encode_context>
  bool fits_dense(slice<const float> g, float* const* state, const Context& x) const noexcept {
    const double input =
        reach(g.data, g.count, 1.0f) + (x.parameter ? reach(x.parameter, g.count, x.weight_decay) : 0.0);
    const auto fits = [&](double held) { return 2.0 * (held * x.ranks + input) < 3.4e38; };
    if (state[2][1] > 0.0f && fits(state[2][1])) return true;
    if (fits((std::max)(reach(state[0], g.count, 1.0f), reach(state[1], g.count, 1.0f)))) return true;
    bool good = true;
    for (std::size_t i = 0; i < g.count; ++i) {
      float u = state[0][i], moved = g[i];
      detail::dgc_dense(&moved, x.parameter ? x.parameter + i : nullptr, &u, 1, x);
      good &= std::isfinite(u) && std::isfinite(moved + state[1][i] * static_cast<float>(x.ranks));
    }
    return good;
  }
  /// @brief Adds V, which is the same on all ranks, to such an update.
  void release(slice<float> g, float* const* state, const encode_context& x) const noexcept {
    detail::release_held(g, state[1], static_cast<float>(x.ranks));
  }

  /// "dgc".
  std::string name() const { return "dgc"; }

 private:
  // Largest magnitude, times a factor. Infinity and NaN pass through.
  static double reach(const float* of, std::size_t n, float by) noexcept {
    return static_cast<double>(std::bit_cast<float>(detail::peak_bits(of, n))) * std::fabs(by);
  }
  // Whether all ranks together can send entries of such magnitudes.
  static bool small_enough(std::uint32_t peak, const encode_context& x) noexcept {
    return std::bit_cast<float>(peak) <= detail::most_sent(x.ranks);  // false for NaN
  }
  // The pass that finds what is to be sent, and the largest magnitude; with Write U and V move. Where a threshold was
  // too high, once more.
  template <bool Write>
  detail::largest search(slice<const float> g, float factor, float* const* state, const encode_context& x,
                         std::uint32_t& peak) const {
    const goal want = aim(g.count, x);
    const detail::dgc_rule rule(factor, x);
    const detail::dgc_tensor t{g.data, x.parameter, state[0], state[1]};
    const std::uint32_t from = begin(rule, t, g.count, want, state[2], x);
    detail::largest found(g.count, want.most, from);
    peak = detail::dgc_pass<Write>(rule, t, g.count, found);
    if (found.count() >= want.fewest || from <= 1 || (!Write && !small_enough(peak, x))) return found;
    found = detail::largest(g.count, want.most, 1);
    if constexpr (Write)
      detail::offer_all(state[1], 0, g.count, found);
    else
      detail::dgc_pass<false>(rule, t, g.count, found);
    return found;
  }
  // How many entries of a tensor are wanted, and allowed.
  struct goal {
    std::size_t entries, fewest, most;
  };
  goal aim(std::size_t n, const encode_context& x) const {
    if (n >= 0xffffffffull) {
      throw argument_error("heddle::dgc: a tensor of " + std::to_string(n) + " elements, allowed is below 2^32 - 1");
    }
    const std::size_t k = entries(n, x);
    if (selection == heddle::selection::exact) return {k, k, k};
    return {k, k - k / 2, (std::min)(n, k + k / 4)};
  }

  // Magnitude's bits from which on elements are looked at: what the last step left, or a sample's.
  template <class Context>
  std::uint32_t begin(const detail::dgc_rule& rule, const detail::dgc_tensor& t, std::size_t n, const goal& want,
                      const float* numbers, const Context& x) const {
    if (want.entries == 0 || 4 * want.entries > n) return 1;  // most will do
    if (numbers[0] > 0.0f) return std::bit_cast<std::uint32_t>(numbers[0]);
    const std::size_t spare = selection == heddle::selection::exact ? want.entries / 2 : 0;
    return detail::dgc_sampled(rule, t, n, want.entries + spare, x.step);
  }

  template <class Allocator>
  void append(std::size_t n, detail::largest& found, std::vector<std::byte, Allocator>& packet) const {
    std::vector<std::uint32_t> index;
    std::vector<float> value;
    found.finish(index, value);
    append_sparse(n, index.data(), value.data(), index.size(), values, packet);
  }

  // Takes off what was sent, and steers where the next search begins.
  template <class Context>
  void release(std::size_t n, float* const* state, const Context& x, slice<const std::byte> packet,
               std::uint32_t peak) const {
    const bool mask = masking && x.step >= begin_step;
    std::vector<float> sent;
    for_each_entry(packet, n, [&](std::uint32_t i, float value) {
      if (value == 0.0f) return;  // rounded away, or an element that was not chosen
      state[1][i] -= value;
      if (mask) state[0][i] = 0.0f;
      sent.push_back(std::fabs(value));
    });
    const std::size_t k = entries(n, x);
    float next = 0.0f;  // sample again
    const auto larger = [](float a, float b) { return a > b; };
    if (sent.size() >= k && k > 0 && selection == heddle::selection::exact) {  // these are k
      next = *std::min_element(sent.begin(), sent.end());
      // About 2 k reach what is as far below as the k/2-th, found among some of them, is above; of many 1.4 k will do.
      std::size_t some = 0;
      for (std::size_t j = 0; j < sent.size(); j += sent.size() / 4096 + 1) sent[some++] = sent[j];
      const auto half = sent.begin() + static_cast<std::ptrdiff_t>((some - 1) / 2);
      std::nth_element(sent.begin(), half, sent.begin() + static_cast<std::ptrdiff_t>(some), larger);
      const float below = 32 * k >= n ? std::sqrt(next / *half) : next / *half;
      next *= (std::min)(below, k < 16 ? 0.7f : 1.0f);
    } else if (sent.size() >= k && k > 0) {
      const auto last = sent.begin() + static_cast<std::ptrdiff_t>(k - 1);
      std::nth_element(sent.begin(), last, sent.end(), larger);
      next = *last;
    } else if (2 * sent.size() >= k && selection == heddle::selection::sampled) {
      const float fell = static_cast<float>(sent.size()) / static_cast<float>(k);
      next = std::sqrt(fell) * *std::min_element(sent.begin(), sent.end());
    }
    state[2][0] = next;
    state[2][1] = std::bit_cast<float>(peak);
  }
};
static_assert(packet_compressor<dgc>);

}  // namespace v0
}  // namespace heddle

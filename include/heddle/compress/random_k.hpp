// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/error_feedback.hpp>
#include <heddle/core/philox.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Random elements, the same ones on all ranks: they agree on them by a counter, so no index travels.
///
/// The tensor is cut into k runs, as equal as can be, and one element of each is picked. The values are added up by an
/// all-reduce on the plan's topology. By itself an element is sent times the length of its run, so that its expectation
/// is the gradient's; inside error_feedback as it is. With density 1 it is the dense mean.
/// Wire:    an all-reduce of k = ceil(density n) floats, and one a bucket for the flag.
/// State:   none; error_feedback holds 4 bytes per element.
/// Traffic: 12 bytes per element to make what is sent; the picked ones afterwards, and 4 written. Where a rate that
///          begin() wasn't told has changed what is held, the picked ones once more, kept as floats meanwhile.
/// Order:   ends a chain, or inside error_feedback, which converges where this alone is too noisy.
/// Sync:    never.
/// Paper:   Stich et al. 2018 (rand-k); Wangni et al. 2018. Stratified, where they draw without rule: no element is
///          drawn twice, and memory is read in order.
/// Throws:  argument_error unless density is in (0, 1].
struct random_k {
  double density = 0.1;            ///< Part of the elements that travels, in (0, 1].
  std::uint64_t seed = 1;          ///< The same on all ranks.
  std::size_t dense_below = 1024;  ///< Tensors with fewer elements travel as they are.

  static constexpr bool biased = false;  ///< Its expectation is the gradient.

  /// Throws argument_error unless density is in its range.
  void check() const {
    if (!(density > 0.0 && density <= 1.0))
      throw argument_error("heddle::random_k: density is " + std::to_string(density) + ", allowed is 0 < density <= 1");
  }
  /// Elements picked of n: ceil(density n).
  std::size_t picked(std::size_t n, const encode_context&) const {
    check();
    return detail::part_of(density, n);
  }
  /// A picked element.
  struct choice {
    std::size_t index;  ///< Which.
    std::size_t run;    ///< The length of its run.
  };
  /// The j-th of k picked of n elements, given the numbers that runs j and j ^ 1 share; on the host or a device.
  HEDDLE_HD static choice chosen(std::size_t n, std::size_t k, std::size_t j, const philox4x32::block& words) {
    const std::size_t length = n / k, longer = n % k, run = length + (j < longer ? 1 : 0);
    const std::uint64_t word = std::uint64_t{words.word[j % 2 * 2]} << 32 | words.word[j % 2 * 2 + 1];
    return {j * length + (j < longer ? j : longer) + static_cast<std::size_t>(word % run), run};
  }
  /// Calls f(j, index, length of the run) for each.
  template <class Function> void pick(std::size_t n, const encode_context& x, Function&& f) const {
    const std::size_t k = picked(n, x);
    const std::uint64_t stream = random_stream(x.tensor, static_cast<std::uint32_t>(x.step));
    philox4x32::block words{};
    for (std::size_t j = 0; j < k; ++j) {
      if (j % 2 == 0) words = philox(seed, stream, j / 2);
      const choice c = chosen(n, k, j, words);
      f(j, c.index, static_cast<float>(c.run));
    }
  }
  /// "random_k".
  std::string name() const { return "random_k"; }
};
static_assert(codec<random_k>);

}  // namespace v0
}  // namespace heddle

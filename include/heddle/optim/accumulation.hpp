// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/archive.hpp>
#include <heddle/core/convert.hpp>
#include <heddle/core/error.hpp>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief Adds up the gradients of several batches before they travel, in float whatever they are stored in.
///
///     hd::accumulation sums(sizes);
///     for (auto batch : micro_batches) {
///       model.backward(batch);
///       for (std::size_t i = 0; i < sizes.size(); ++i) sums.add(i, gradients[i], batch.size());
///       sums.count(batch.size());
///     }
///     dp.begin({.samples = sums.samples()});
///     for (std::size_t i = 0; i < sizes.size(); ++i) sums.take(i, gradients[i]), dp.ready(i);
///     sums.clear();
///
/// The mean weighs each gradient by its samples, so that k batches of n are one of k n. A backward that adds to its
/// gradients by itself, in float, needs none of this: call ready() after the last batch.
/// State:   4 bytes per element.
/// Traffic: 12 bytes per element and batch, 8 to take the mean.
/// Sync:    never.
/// Throws:  argument_error for a tensor that isn't there, or samples that are negative or not finite; file_error.
class accumulation {
 public:
  /// @param sizes Elements of each tensor.
  explicit accumulation(std::span<const std::size_t> sizes) {
    for (const std::size_t n : sizes) sums_.emplace_back(n, 0.0f);
  }

  /// @brief Adds `samples` times a mean gradient of tensor i. @tparam Element float, float16 or bfloat16.
  template <class Element> void add(std::size_t i, const Element* gradient, double samples) {
    std::vector<float>& sum = sums_[checked(i)];
    check(samples);
    if (samples == 0.0) return;  // the gradient of no samples may hold anything
    const auto weight = static_cast<float>(samples);
    float block[512];
    for (std::size_t k = 0; k < sum.size(); k += std::size(block)) {
      const std::size_t n = (std::min)(sum.size() - k, std::size(block));
      convert_scaled(gradient + k, block, n, weight);
      for (std::size_t j = 0; j < n; ++j) sum[k + j] += block[j];
    }
  }
  /// Counts a batch: once, after add() for each of its tensors.
  void count(double samples) {
    check(samples);
    samples_ += samples;
  }
  /// Samples counted, for data_parallel::begin.
  double samples() const noexcept { return samples_; }
  /// @brief Writes the mean of tensor i over all samples; zeros if there were none.
  template <class Element> void take(std::size_t i, Element* gradient) const {
    const std::vector<float>& sum = sums_[checked(i)];
    convert_scaled(sum.data(), gradient, sum.size(), samples_ > 0.0 ? static_cast<float>(1.0 / samples_) : 0.0f);
  }
  /// @brief Writes sums and samples of this rank, in the middle of a step.
  /// Throws: file_error.
  void save(const std::string& path) const {
    archive_writer out;
    out.put(static_cast<std::uint64_t>(sums_.size()));
    for (const std::vector<float>& sum : sums_) out.put(sum.data(), sum.size());
    out.put(samples_);
    out.write(path);
  }
  /// @brief Goes on with what was saved: with this rank's file as if nothing had happened, with several files, of ranks
  /// that are there no more, with all that is in them. So each file goes to one rank, and the mean stays.
  /// @param paths Files of save(); none: as clear(). Throws: file_error if one is missing, damaged or of other tensors;
  /// nothing has changed then.
  void load(std::span<const std::string> paths) {
    accumulation all(*this);
    all.clear();
    for (const std::string& path : paths) {
      archive_reader in(path);
      if (in.get<std::uint64_t>() != sums_.size()) in.refuse("it has another number of tensors");
      std::vector<float> block;
      for (std::vector<float>& sum : all.sums_) {
        block.resize(sum.size());
        in.get(block.data(), block.size());
        for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += block[k];
      }
      all.samples_ += in.get<double>();
      in.finish();
    }
    sums_ = std::move(all.sums_);
    samples_ = all.samples_;
  }
  /// Forgets everything.
  void clear() noexcept {
    for (std::vector<float>& sum : sums_) std::fill(sum.begin(), sum.end(), 0.0f);
    samples_ = 0.0;
  }

 private:
  std::size_t checked(std::size_t i) const {
    if (i >= sums_.size())
      throw argument_error("heddle::accumulation: tensor " + std::to_string(i) + " of " + std::to_string(sums_.size()));
    return i;
  }
  static void check(double samples) {
    if (!(samples >= 0.0) || !std::isfinite(samples)) {
      throw argument_error("heddle::accumulation: samples is " + std::to_string(samples) +
                           ", allowed is a finite number of 0 or above");
    }
  }

  std::vector<std::vector<float>> sums_;
  double samples_ = 0.0;
};

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// A text as characters: the first nine tenths to learn from, the last tenth to be judged on.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "model.hpp"

namespace gpt {

class corpus {
 public:
  explicit corpus(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + path);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    std::array<std::int32_t, 256> id;
    id.fill(-1);
    for (const unsigned char c : text) id[c] = 0;
    for (auto& entry : id) {
      if (entry == 0) entry = static_cast<std::int32_t>(vocabulary_++);
    }
    tokens_.reserve(text.size());
    for (const unsigned char c : text) tokens_.push_back(id[c]);
    split_ = tokens_.size() / 10 * 9;
  }

  std::size_t vocabulary() const { return vocabulary_; }
  std::span<const std::int32_t> training() const { return std::span(tokens_).first(split_); }
  std::span<const std::int32_t> validation() const { return std::span(tokens_).subspan(split_); }

 private:
  std::vector<std::int32_t> tokens_;
  std::size_t vocabulary_ = 0;
  std::size_t split_ = 0;
};

struct sequences {
  std::vector<std::int32_t> inputs, targets;

  /// Puts the `length` characters from `start` into row `row`, with the character after each as its target.
  void set(std::size_t row, std::span<const std::int32_t> text, std::size_t start, std::size_t length) {
    inputs.resize(std::max(inputs.size(), (row + 1) * length));
    targets.resize(inputs.size());
    for (std::size_t t = 0; t < length; ++t) {
      inputs[row * length + t] = text[start + t];
      targets[row * length + t] = text[start + t + 1];
    }
  }
};

/// The batch of one rank: sequence `rank * batch + b` of the global batch begins at a hash of (seed, step, sequence).
/// So the global batch doesn't depend on the number of ranks, and a resumed run sees what it would have seen.
inline void draw(const corpus& text, const shape& dims, std::uint64_t seed, std::uint64_t step, std::size_t rank,
                 sequences& out) {
  const auto from = text.training();
  for (std::size_t b = 0; b < dims.batch; ++b) {
    const std::uint64_t place = hash(hash(seed, step), rank * dims.batch + b);
    out.set(b, from, place % (from.size() - dims.context), dims.context);
  }
}

}  // namespace gpt

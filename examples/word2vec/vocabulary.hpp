// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The words of a text, as word2vec.c keeps them: number 0 is the end of a line, the others follow by falling count.

#pragma once

#include <heddle/data/concept.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace word2vec {

/// Calls f with each word of a line.
template <class Function> void for_each_word(std::string_view line, Function f) {
  const auto space = [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; };
  for (std::size_t at = 0;;) {
    while (at < line.size() && space(line[at])) ++at;
    if (at == line.size()) return;
    const std::size_t begin = at;
    while (at < line.size() && !space(line[at])) ++at;
    f(line.substr(begin, at - begin));
  }
}

class vocabulary {
 public:
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  vocabulary() : slots_(1 << 16, none) { number("</s>"); }

  /// Counts a word of the text.
  void count(std::string_view word) { ++counts_[number(word)]; }
  /// Counts an end of a line.
  void count_line() { ++counts_[0]; }

  /// Drops words that are too rare and orders the others by count; words of equal count by their letters.
  void finish(std::uint64_t min_count) {
    std::vector<std::uint32_t> order;
    for (std::uint32_t i = 1; i < words_.size(); ++i) {
      if (counts_[i] >= min_count) order.push_back(i);
    }
    std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
      return counts_[a] != counts_[b] ? counts_[a] > counts_[b] : words_[a] < words_[b];
    });
    std::vector<std::string> words{words_[0]};
    std::vector<std::uint64_t> counts{counts_[0]};
    for (const std::uint32_t i : order) {
      words.push_back(std::move(words_[i]));
      counts.push_back(counts_[i]);
    }
    words_ = std::move(words);
    counts_ = std::move(counts);
    total_ = 0;
    for (const std::uint64_t c : counts_) total_ += c;
    rehash();
  }

  std::size_t size() const { return words_.size(); }
  /// All words of the text that are kept, line ends too.
  std::uint64_t total() const { return total_; }
  const std::string& word(std::size_t i) const { return words_[i]; }
  std::uint64_t count(std::size_t i) const { return counts_[i]; }
  /// The number of a word, `none` if it isn't kept.
  std::uint32_t find(std::string_view word) const { return slots_[slot(word)]; }

 private:
  std::size_t slot(std::string_view word) const {
    const std::size_t mask = slots_.size() - 1;
    std::size_t at = heddle::record_hash(word) & mask;
    while (slots_[at] != none && words_[slots_[at]] != word) at = (at + 1) & mask;
    return at;
  }
  std::uint32_t number(std::string_view word) {
    const std::size_t at = slot(word);
    if (slots_[at] != none) return slots_[at];
    const auto added = static_cast<std::uint32_t>(words_.size());
    slots_[at] = added;
    words_.emplace_back(word);
    counts_.push_back(0);
    if (2 * words_.size() > slots_.size()) {
      slots_.resize(2 * slots_.size());
      rehash();
    }
    return added;
  }
  void rehash() {
    std::fill(slots_.begin(), slots_.end(), none);
    for (std::uint32_t i = 0; i < words_.size(); ++i) slots_[slot(words_[i])] = i;
  }

  std::vector<std::string> words_;
  std::vector<std::uint64_t> counts_;
  std::vector<std::uint32_t> slots_;  // open addressing, at most half full
  std::uint64_t total_ = 0;
};

/// Draws numbers with given weights in constant time (Walker's aliases).
class alias_table {
 public:
  explicit alias_table(const std::vector<double>& weights) : entries_(weights.size()) {
    const std::size_t n = weights.size();
    double sum = 0.0;
    for (const double w : weights) sum += w;
    std::vector<double> scaled(n);
    std::vector<std::uint32_t> less, more;
    for (std::uint32_t i = 0; i < n; ++i) {
      scaled[i] = weights[i] / sum * static_cast<double>(n);
      (scaled[i] < 1.0 ? less : more).push_back(i);
    }
    for (std::uint32_t i = 0; i < n; ++i) entries_[i] = {std::numeric_limits<std::uint32_t>::max(), i};
    while (!less.empty() && !more.empty()) {
      const std::uint32_t a = less.back(), b = more.back();
      less.pop_back();
      entries_[a] = {static_cast<std::uint32_t>(scaled[a] * 0x1p32), b};
      scaled[b] -= 1.0 - scaled[a];
      if (scaled[b] < 1.0) {
        more.pop_back();
        less.push_back(b);
      }
    }
  }

  /// The number that 64 random bits stand for.
  std::uint32_t draw(std::uint64_t random) const {
    const std::uint64_t i = (random >> 32) * entries_.size() >> 32;
    return static_cast<std::uint32_t>(random) < entries_[i].below ? static_cast<std::uint32_t>(i) : entries_[i].other;
  }

 private:
  struct entry {
    std::uint32_t below, other;
  };
  std::vector<entry> entries_;
};

}  // namespace word2vec

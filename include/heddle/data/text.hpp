// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/data/concept.hpp>
#include <heddle/data/detail/fields.hpp>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief Texts, one after the other in one piece of memory.
class text_batch {
 public:
  /// Number of texts.
  std::size_t size() const noexcept { return ends_.size(); }
  /// Text i; valid until the batch changes.
  std::string_view operator[](std::size_t i) const noexcept {
    const std::size_t begin = i ? ends_[i - 1] : 0;
    return {bytes_.data() + begin, ends_[i] - begin};
  }
  /// Adds a text.
  void push_back(std::string_view text) {
    const std::size_t used = ends_.empty() ? 0 : ends_.back();
    if (bytes_.size() - used < text.size())
      bytes_.resize(2 * used + text.size());  // never shrinks: no byte is written twice
    if (!text.empty()) std::memcpy(bytes_.data() + used, text.data(), text.size());
    ends_.push_back(used + text.size());
  }
  /// Adds text i of another batch.
  void append(const text_batch& from, std::size_t i) { push_back(from[i]); }
  /// Removes all texts and keeps the memory.
  void clear() noexcept { ends_.clear(); }

 private:
  std::vector<char> bytes_;
  std::vector<std::size_t> ends_;
};

/// @brief Records are lines, without their line feed and the carriage return before it. An empty line is a record.
struct lines {
  using batch = text_batch;  ///< Texts.

  /// Where the first line feed is, n if there is none.
  std::size_t delimiter(const char* text, std::size_t n) const noexcept { return detail::line_end(text, n); }
  /// Appends the line.
  parsed parse(std::string_view record, batch& to) const {
    if (!record.empty() && record.back() == '\r') record.remove_suffix(1);
    to.push_back(record);
    return {};
  }
};
static_assert(record_format<lines>);

/// @brief Records are words: what lies between blanks, tabs, line ends and other ASCII white space. For texts without
/// line ends, and where order beyond a word means nothing.
struct words {
  using batch = text_batch;  ///< Texts.

  /// Where the first white space is, n if there is none.
  std::size_t delimiter(const char* text, std::size_t n) const noexcept {
    std::size_t i = 0;
    while (i < n && text[i] != ' ' && static_cast<unsigned char>(text[i] - '\t') > '\r' - '\t') ++i;
    return i;
  }
  /// Appends the word.
  parsed parse(std::string_view record, batch& to) const {
    if (record.empty()) return parsed::blank();
    to.push_back(record);
    return {};
  }
};
static_assert(record_format<words>);

}  // namespace v0
}  // namespace heddle

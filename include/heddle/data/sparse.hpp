// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/data/concept.hpp>
#include <heddle/data/detail/fields.hpp>

#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief Rows of a label and features, of which most are absent.
struct sparse_batch {
  std::vector<float> labels;           ///< One a row.
  std::vector<std::size_t> ends;       ///< One a row: where its features end, which begin where those before it end.
  std::vector<std::uint64_t> indices;  ///< One a feature.
  std::vector<float> values;           ///< One a feature.
  std::vector<std::uint32_t> fields;   ///< One a feature, if the format has fields; else empty.

  /// Number of rows.
  std::size_t size() const noexcept { return labels.size(); }
  /// Number of the first feature of row i.
  std::size_t begin(std::size_t i) const noexcept { return i ? ends[i - 1] : 0; }
  /// One past the number of the last feature of row i.
  std::size_t end(std::size_t i) const noexcept { return ends[i]; }
  /// Removes all rows and keeps the memory.
  void clear() noexcept {
    labels.clear();
    ends.clear();
    drop_open();
  }
  /// Removes features that belong to no row yet.
  void drop_open() noexcept {
    const std::size_t used = ends.empty() ? 0 : ends.back();
    indices.resize(used);
    values.resize(used);
    if (fields.size() > used) fields.resize(used);
  }
  /// Adds row i of another batch.
  void append(const sparse_batch& from, std::size_t i) {
    const auto copy = [first = from.begin(i), last = from.end(i)](const auto& source, auto& to) {
      if (source.size() >= last) to.insert(to.end(), source.data() + first, source.data() + last);
    };
    copy(from.indices, indices);
    copy(from.values, values);
    if (!from.fields.empty()) copy(from.fields, fields);
    labels.push_back(from.labels[i]);
    ends.push_back(indices.size());
  }
};

namespace detail {

/// Parses `label index:value ...` or, with fields, `label field:index:value ...`; a # begins a comment.
template <bool Fields> parsed parse_sparse(std::string_view record, sparse_batch& to) {
  const char *const begin = record.data(), *end = begin + record.size(), *p = begin;
  if (const void* const comment = record.empty() ? nullptr : std::memchr(begin, '#', record.size()))
    end = static_cast<const char*>(comment);
  const auto skip_spaces = [&] {
    while (p != end && is_space(*p)) ++p;
  };
  const auto wrong = [&](const char* at, const char* problem) {
    to.drop_open();
    return parsed::malformed(static_cast<std::size_t>(at - begin), problem);
  };
  const auto colon = [&] { return p != end && *p == ':' && (++p, true); };
  skip_spaces();
  if (p == end) return parsed::blank();
  float label = 0.0f;
  if (!read_number(p, end, label)) return wrong(p, "expected a label, a finite number");
  if (p != end && !is_space(*p)) return wrong(p, "expected a space after the label");
  for (skip_spaces(); p != end; skip_spaces()) {
    const char* const feature = p;
    std::uint32_t field = 0;
    std::uint64_t index = 0;
    float value = 0.0f;
    if constexpr (Fields) {
      if (!read_integer(p, end, field) || !colon())
        return wrong(feature, "expected field:index:value, field below 2^32");
    }
    if (!read_integer(p, end, index) || !colon())
      return wrong(feature, "expected index:value, index from 0 to 2^64 - 1");
    if (!read_number(p, end, value)) return wrong(p, "expected a value, a finite number");
    if (p != end && !is_space(*p)) return wrong(p, "expected a space after the value");
    if constexpr (Fields) to.fields.push_back(field);
    to.indices.push_back(index);
    to.values.push_back(value);
  }
  to.labels.push_back(label);
  to.ends.push_back(to.indices.size());
  return {};
}

}  // namespace detail

/// @brief Records are lines `label index:value index:value ...`, as LIBSVM and SVMlight have them. Empty lines and what
/// follows a # are no records. Indices need no order and may be any 64-bit number.
struct libsvm {
  using batch = sparse_batch;  ///< Rows, without fields.

  /// Where the first line feed is, n if there is none.
  std::size_t delimiter(const char* text, std::size_t n) const noexcept { return detail::line_end(text, n); }
  /// Appends the row.
  parsed parse(std::string_view record, batch& to) const { return detail::parse_sparse<false>(record, to); }
};
static_assert(record_format<libsvm>);

/// @brief Records are lines `label field:index:value field:index:value ...`, as LIBFFM has them.
struct libffm {
  using batch = sparse_batch;  ///< Rows, with fields.

  /// Where the first line feed is, n if there is none.
  std::size_t delimiter(const char* text, std::size_t n) const noexcept { return detail::line_end(text, n); }
  /// Appends the row.
  parsed parse(std::string_view record, batch& to) const { return detail::parse_sparse<true>(record, to); }
};
static_assert(record_format<libffm>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/data/concept.hpp>
#include <heddle/data/detail/fields.hpp>

#include <limits>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief What a column of a table holds.
enum class column : std::uint8_t {
  label,   ///< The label; at most one column.
  number,  ///< A number.
  text,    ///< A category: any text, kept as its hash.
  hex,     ///< A category: a hexadecimal number below 2^60.
  skip     ///< Nothing of interest.
};

/// @brief Rows of a label, numbers and categories, the same number of each in every row.
struct table_batch {
  std::vector<float> labels;              ///< One a row; 0 if there is no label column.
  std::vector<float> numbers;             ///< `number_columns` a row; NaN where the field is missing.
  std::vector<std::uint64_t> categories;  ///< `category_columns` a row.
  std::size_t number_columns = 0;         ///< Numbers in a row.
  std::size_t category_columns = 0;       ///< Categories in a row.

  /// The category of a missing field; no other field has it.
  static constexpr std::uint64_t missing = ~std::uint64_t{0};

  /// Number of rows.
  std::size_t size() const noexcept { return labels.size(); }
  /// The numbers of row i.
  const float* numbers_of(std::size_t i) const noexcept { return numbers.data() + i * number_columns; }
  /// The categories of row i.
  const std::uint64_t* categories_of(std::size_t i) const noexcept { return categories.data() + i * category_columns; }
  /// Removes all rows and keeps the memory.
  void clear() noexcept {
    labels.clear();
    drop_open();
  }
  /// Removes fields that belong to no row yet.
  void drop_open() noexcept {
    numbers.resize(labels.size() * number_columns);
    categories.resize(labels.size() * category_columns);
  }
  /// Adds row i of another batch.
  void append(const table_batch& from, std::size_t i) {
    number_columns = from.number_columns;
    category_columns = from.category_columns;
    numbers.insert(numbers.end(), from.numbers_of(i), from.numbers_of(i) + number_columns);
    categories.insert(categories.end(), from.categories_of(i), from.categories_of(i) + category_columns);
    labels.push_back(from.labels[i]);
  }
};

/// @brief A key for a sparse table: equal categories of different columns get different keys.
constexpr std::uint64_t feature_key(std::uint64_t column, std::uint64_t category) noexcept {
  std::uint64_t x = category + (column + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93u;
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93u;
  return x ^ (x >> 32);
}

/// @brief Records are lines of fields between separators. Spaces around a field don't count. A field may stand in
/// double quotes, with quotes doubled inside, and may then hold separators, but no line feed: a record never crosses a
/// line. A line of nothing but spaces is blank, also where there is one column only: write `missing` there, or "".
struct csv {
  using batch = table_batch;  ///< Rows.

  std::vector<column> columns{};  ///< What each field is.
  char separator = ',';           ///< Between fields.
  bool header = false;            ///< Whether the first line of each file is a title.
  std::string missing = "?";      ///< A field that says this is missing, like an empty one.
  std::string positive{};         ///< If not empty, labels are texts: this one is 1, others are 0.

  /// Throws argument_error for no columns, two labels, or a separator that is a quote, a space or a line end.
  void check() const {
    std::size_t labels = 0;
    for (const column c : columns) labels += c == column::label;
    if (columns.empty() || labels > 1) {
      throw argument_error("heddle::csv: " + std::to_string(columns.size()) + " columns with " +
                           std::to_string(labels) + " labels, allowed are 1 or more with at most 1 label");
    }
    if (separator == '"' || separator == ' ' || separator == '\n' || separator == '\r') {
      throw argument_error("heddle::csv: the separator is character " +
                           std::to_string(static_cast<unsigned char>(separator)) +
                           ", allowed is any but a quote, a space, a line feed and a carriage return");
    }
  }
  /// Where the first line feed is, n if there is none.
  std::size_t delimiter(const char* text, std::size_t n) const noexcept { return detail::line_end(text, n); }
  /// Appends the row.
  parsed parse(std::string_view record, batch& to) const {
    if (to.size() == 0) {
      to.number_columns = to.category_columns = 0;
      for (const column c : columns) {
        to.number_columns += c == column::number;
        to.category_columns += c == column::text || c == column::hex;
      }
    }
    detail::line_fields line(record, separator);
    if (line.blank()) return parsed::blank();
    float label = 0.0f;
    const char* problem = nullptr;
    for (std::size_t i = 0; i < columns.size() && !problem; ++i) {
      problem = line.next();
      if (!problem) problem = store(columns[i], line.field(), label, to);
    }
    if (!problem && line.more()) problem = "expected the end of the line: more fields than there are columns";
    if (problem) {
      to.drop_open();
      return parsed::malformed(line.column(), problem);
    }
    to.labels.push_back(label);
    return {};
  }

 private:
  // Returns what is wrong with the field, or nullptr.
  const char* store(column kind, std::string_view field, float& label, batch& to) const {
    const char *p = field.data(), *const end = p + field.size();
    const bool absent = field.empty() || field == missing;
    switch (kind) {
      case column::number: {
        float x = std::numeric_limits<float>::quiet_NaN();
        if (!absent && (!detail::read_number(p, end, x) || p != end)) return "expected a finite number, or nothing";
        to.numbers.push_back(x);
        return nullptr;
      }
      case column::hex: {
        std::uint64_t x = batch::missing;
        if (!absent && (!detail::read_integer(p, end, x, 16) || p != end || x >> 60))
          return "expected a hexadecimal number below 2^60, or nothing";
        to.categories.push_back(x);
        return nullptr;
      }
      case column::text: {
        const std::uint64_t x = record_hash(field);
        to.categories.push_back(absent ? batch::missing : x == batch::missing ? 0 : x);
        return nullptr;
      }
      case column::label:
        if (absent) return "expected a label";
        if (!positive.empty())
          label = field == positive ? 1.0f : 0.0f;
        else if (!detail::read_number(p, end, label) || p != end)
          return "expected a label, a finite number";
        return nullptr;
      case column::skip: break;
    }
    return nullptr;
  }
};
static_assert(record_format<csv>);

/// @brief The layout of Criteo's click logs: tabs between a label, 13 numbers and 26 hexadecimal categories, any of
/// which but the label may be missing. @param labelled False for the test file, which has no labels.
inline csv criteo(bool labelled = true) {
  csv format{.columns = {}, .separator = '\t', .missing = {}};
  format.columns.assign(labelled ? 1 : 0, column::label);
  format.columns.insert(format.columns.end(), 13, column::number);
  format.columns.insert(format.columns.end(), 26, column::hex);
  return format;
}

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/plan.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <istream>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief A list of buffers as a file gives it: each has a name and one lifetime, or several with gaps between them.
struct lifetime_table {
  std::vector<std::string> names;      ///< Of each buffer.
  std::vector<lifetime> lifetimes;     ///< What planners take; those of one buffer have its number for a group.
  std::vector<std::size_t> buffer_of;  ///< The buffer of each lifetime.
  std::vector<std::size_t> offsets;    ///< Of each buffer, where the file had them; else empty.
};

namespace detail {

inline std::vector<std::string_view> split(std::string_view line, char separator) {
  std::vector<std::string_view> out;
  for (std::size_t at = 0; at <= line.size();) {
    const std::size_t end = (std::min)(line.find(separator, at), line.size());
    out.push_back(line.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

class lifetime_reader {
 public:
  explicit lifetime_reader(std::istream& in) : in_(in) {}

  lifetime_table read() {
    std::string line;
    if (!next(line)) fail("the header is missing");
    std::vector<column> columns;
    for (const std::string_view name : split(line, ',')) columns.push_back(column_of(name));
    for (std::size_t k = 0; k < columns.size(); ++k) {
      if (columns[k] != column::ignored && std::count(columns.begin(), columns.end(), columns[k]) > 1) {
        fail("column " + std::to_string(k + 1) + " says what another one says");
      }
    }
    for (const column c : {column::id, column::lower, column::upper, column::size}) {
      if (std::find(columns.begin(), columns.end(), c) == columns.end() &&
          !(c == column::upper && std::find(columns.begin(), columns.end(), column::end) != columns.end())) {
        fail("the header lacks one of id, lower, upper, size");
      }
    }
    while (next(line) && !line.empty()) {
      const std::vector<std::string_view> fields = split(line, ',');
      if (fields.size() != columns.size()) {
        fail(std::to_string(fields.size()) + " fields, the header has " + std::to_string(columns.size()));
      }
      add(columns, fields);
    }
    if (!table_.offsets.empty() && table_.offsets.size() != table_.names.size()) fail("some offsets are missing");
    return std::move(table_);
  }

 private:
  enum class column { id, lower, upper, end, size, alignment, gaps, offset, ignored };

  [[noreturn]] void fail(const std::string& why) const {
    throw file_error("heddle::read_lifetimes: line " + std::to_string(line_) + ": " + why);
  }

  bool next(std::string& line) {
    ++line_;
    if (!std::getline(in_, line)) return false;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    return true;
  }

  column column_of(std::string_view name) const {
    static constexpr std::pair<std::string_view, column> known[] = {{"id", column::id},
                                                                    {"buffer", column::id},
                                                                    {"buffer_id", column::id},
                                                                    {"lower", column::lower},
                                                                    {"start", column::lower},
                                                                    {"begin", column::lower},
                                                                    {"upper", column::upper},
                                                                    {"end", column::end},
                                                                    {"size", column::size},
                                                                    {"gaps", column::gaps},
                                                                    {"alignment", column::alignment},
                                                                    {"offset", column::offset},
                                                                    {"hint", column::ignored}};
    for (const auto& [word, c] : known) {
      if (word == name) return c;
    }
    fail("unknown column '" + std::string(name) + "'");
  }

  std::size_t number(std::string_view text, std::string_view what) const {
    std::size_t out = 0;
    const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), out);
    if (fault != std::errc{} || end != text.data() + text.size()) {
      fail(std::string(what) + " is '" + std::string(text) + "', allowed is a whole number of 0 or above");
    }
    return out;
  }

  void add(const std::vector<column>& columns, const std::vector<std::string_view>& fields) {
    lifetime x;
    std::string_view gaps;
    const std::size_t buffer = table_.names.size();
    for (std::size_t k = 0; k < columns.size(); ++k) {
      const std::string_view f = fields[k];
      switch (columns[k]) {
        case column::id: table_.names.emplace_back(f); break;
        case column::lower: x.first = number(f, "lower"); break;
        case column::upper: x.last = number(f, "upper"); break;
        case column::end:  // the last moment, not the one after it
          x.last = number(f, "end") + 1;
          if (x.last == 0) fail("end is too large");
          break;
        case column::size: x.bytes = number(f, "size"); break;
        case column::alignment: x.alignment = number(f, "alignment"); break;
        case column::gaps: gaps = f; break;
        case column::offset: table_.offsets.push_back(number(f, "offset")); break;
        case column::ignored: break;
      }
    }
    if (x.last < x.first) fail("it ends before it begins");
    if (x.alignment == 0 || (x.alignment & (x.alignment - 1)) != 0) fail("the alignment is no power of two");
    const std::size_t end = x.last;
    for (const std::string_view gap : split(gaps, ' ')) {
      // a-b@lo:hi says that bytes lo to hi are live in the gap: here all of them stay.
      if (gap.empty() || gap.find('@') != gap.npos) continue;
      const std::vector<std::string_view> ends = split(gap, '-');
      if (ends.size() != 2) fail("a gap is written first-last, not '" + std::string(gap) + "'");
      const std::size_t from = number(ends[0], "gap"), to = number(ends[1], "gap");
      if (from < x.first || to < from || to > end)
        fail("the gap '" + std::string(gap) + "' lies outside or out of order");
      x.group = buffer;
      x.last = from;
      push(x, buffer);
      x.first = to;
      x.last = end;
    }
    push(x, buffer);
  }

  void push(const lifetime& x, std::size_t buffer) {
    table_.lifetimes.push_back(x);
    table_.buffer_of.push_back(buffer);
  }

  std::istream& in_;
  std::size_t line_ = 0;
  lifetime_table table_;
};

}  // namespace detail

/// @brief Reads buffers from MiniMalloc's comma-separated format.
///
/// The header names the columns, in any order: `id` (or buffer, buffer_id), `lower` (start, begin), `upper` (or `end`,
/// the last moment itself), `size`, and optionally `alignment`, `gaps` ("3-5 8-9": not live there), `offset`, `hint`
/// (ignored). An empty line ends the table. A gap with a window of live bytes ("3-5@0:64") counts as live throughout.
/// Source: google/minimalloc, README.
/// Throws:  file_error naming the line: a wrong number of fields, a number that isn't one, an unknown column.
inline lifetime_table read_lifetimes(std::istream& in) { return detail::lifetime_reader(in).read(); }

/// @brief Writes buffers and their offsets in the same format, with the columns id, lower, upper, size, alignment, gaps
/// and offset.
/// @param plan A plan for `table.lifetimes`.
/// Throws:  argument_error if the plan has another number of offsets; file_error if the stream fails.
inline void write_lifetimes(std::ostream& out, const lifetime_table& table, const memory_plan& plan) {
  if (plan.offsets.size() != table.lifetimes.size()) {
    throw argument_error("heddle::write_lifetimes: the plan has " + std::to_string(plan.offsets.size()) +
                         " offsets, there are " + std::to_string(table.lifetimes.size()) + " lifetimes");
  }
  out << "id,lower,upper,size,alignment,gaps,offset\n";
  for (std::size_t i = 0; i < table.lifetimes.size();) {
    const lifetime& first = table.lifetimes[i];
    const std::size_t buffer = table.buffer_of[i];
    std::size_t offset = plan.offsets[i];
    std::string gaps;
    std::size_t end = first.last;
    for (++i; i < table.lifetimes.size() && table.buffer_of[i] == buffer; ++i) {
      const lifetime& x = table.lifetimes[i];
      if (x.first != x.last) offset = plan.offsets[i];  // before a gap at the very beginning it takes no room
      gaps += (gaps.empty() ? "" : " ") + std::to_string(end) + "-" + std::to_string(x.first);
      end = x.last;
    }
    out << table.names[buffer] << ',' << first.first << ',' << end << ',' << first.bytes << ',' << first.alignment
        << ',' << gaps << ',' << offset << '\n';
  }
  if (!out) throw file_error("heddle::write_lifetimes: the stream can't be written");
}

/// @brief Writes lifetimes without offsets, such as those that `logging` saw: each a buffer with its number for a name.
/// Throws:  file_error if the stream fails.
inline void write_lifetimes(std::ostream& out, std::span<const lifetime> lifetimes) {
  out << "id,lower,upper,size,alignment\n";
  for (std::size_t i = 0; i < lifetimes.size(); ++i) {
    const lifetime& x = lifetimes[i];
    out << i << ',' << x.first << ',' << x.last << ',' << x.bytes << ',' << x.alignment << '\n';
  }
  if (!out) throw file_error("heddle::write_lifetimes: the stream can't be written");
}

}  // namespace v0
}  // namespace heddle

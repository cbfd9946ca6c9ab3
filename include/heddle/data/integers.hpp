// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/data/concept.hpp>

#include <cstring>
#include <limits>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief Rows of integers, all of one width.
template <class Integer> struct integer_batch {
  std::vector<Integer> values;  ///< Row after row.
  std::size_t width = 1;        ///< Integers in a row.

  /// Number of rows.
  std::size_t size() const noexcept { return values.size() / width; }
  /// Row i: `width` integers.
  const Integer* operator[](std::size_t i) const noexcept { return values.data() + i * width; }
  /// Removes all rows and keeps the memory.
  void clear() noexcept { values.clear(); }
  /// Adds row i of another batch.
  void append(const integer_batch& from, std::size_t i) {
    width = from.width;
    values.insert(values.end(), from[i], from[i] + width);
  }
};

/// @brief Records are `per_record` integers of a binary file in this machine's byte order: token numbers, samples of
/// fixed size.
/// @tparam Integer The type in the file.
template <class Integer> struct integers {
  static_assert(std::is_integral_v<Integer>, "heddle::integers: the template argument must be an integer type");
  using batch = integer_batch<Integer>;  ///< Rows.

  std::size_t per_record = 1;  ///< Integers in a record, at least 1.

  /// Throws argument_error unless per_record is 1 or more and its bytes can be counted.
  void check() const {
    constexpr std::size_t most = (std::numeric_limits<std::size_t>::max)() / sizeof(Integer);
    if (per_record == 0 || per_record > most) {
      throw argument_error("heddle::integers: per_record is " + std::to_string(per_record) + ", allowed is 1 to " +
                           std::to_string(most));
    }
  }
  /// Bytes of a record.
  std::size_t width() const noexcept { return per_record * sizeof(Integer); }
  /// Appends the row.
  parsed parse(std::string_view record, batch& to) const {
    to.width = per_record;
    const std::size_t used = to.values.size();
    to.values.resize(used + per_record);
    std::memcpy(to.values.data() + used, record.data(), record.size());
    return {};
  }
};
static_assert(record_format<integers<std::uint16_t>>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief A record that can't be parsed, or a file that can't be read; `what()` begins with the place.
class record_error : public file_error {
 public:
  /// @param path The file. @param offset Byte of the file at fault. @param line Its line, from 1; 0 where lines mean
  /// nothing or are too many to count. @param detail What is wrong and what is allowed.
  record_error(std::string path, std::uint64_t offset, std::uint64_t line, const std::string& detail)
      : file_error("heddle::multi_queue_reader: " + path + (line ? ":" + std::to_string(line) : std::string{}) +
                   ": byte " + std::to_string(offset) + ": " + detail),
        path_(std::move(path)),
        offset_(offset),
        line_(line) {}

  /// The file.
  const std::string& path() const noexcept { return path_; }
  /// Byte of the file at fault, from 0.
  std::uint64_t offset() const noexcept { return offset_; }
  /// Line of the file, from 1; 0 where lines mean nothing, and beyond the first GiB.
  std::uint64_t line() const noexcept { return line_; }

 private:
  std::string path_;
  std::uint64_t offset_, line_;
};

/// @brief What became of the bytes of one record.
struct parsed {
  /// The cases.
  enum class kind : std::uint8_t {
    record,    ///< It was appended to the batch.
    blank,     ///< There was nothing: not a record.
    malformed  ///< It can't be parsed; the batch is as it was.
  };
  kind what = kind::record;       ///< The case.
  std::size_t column = 0;         ///< Where in the record the fault is.
  const char* problem = nullptr;  ///< What was expected there: a literal.

  /// Nothing there.
  static constexpr parsed blank() noexcept { return {kind::blank, 0, nullptr}; }
  /// A fault at `column`. @param problem What was expected, a string literal.
  static constexpr parsed malformed(std::size_t column, const char* problem) noexcept {
    return {kind::malformed, column, problem};
  }
};

/// @name Requirements of a record format, one by one
/// @{
/// Has `batch`: a container of parsed records, reused once it is cleared.
template <class Format>
concept has_batch = std::default_initializable<typename Format::batch> && std::movable<typename Format::batch> &&
                    requires(typename Format::batch& to, const typename Format::batch& from, std::size_t i) {
                      { from.size() } -> std::convertible_to<std::size_t>;
                      to.clear();
                      to.append(from, i);
                    };
/// Has `delimiter(text, n)`: where the first byte is that ends a record, n if there is none.
template <class Format>
concept has_delimiter = requires(const Format& f, const char* text, std::size_t n) {
  { f.delimiter(text, n) } -> std::convertible_to<std::size_t>;
};
/// Has `width()`: the bytes of each record, at least 1.
template <class Format>
concept has_width = requires(const Format& f) {
  { f.width() } -> std::convertible_to<std::size_t>;
};
/// Has `parse(record, batch)`: appends what the bytes of a record say.
template <class Format>
concept has_parse =
    has_batch<Format> && requires(const Format& f, std::string_view record, typename Format::batch& to) {
      { f.parse(record, to) } -> std::same_as<parsed>;
    };
/// Has `header`: whether the first record of each file is a title.
template <class Format>
concept has_header = requires(const Format& f) {
  { f.header } -> std::convertible_to<bool>;
};
/// @}

/// @brief How the bytes of a file are cut into records and what a record becomes.
///
/// Records end with a delimiter (the last one of a file needs none) or have a fixed width. `parse` gets the record
/// without its delimiter. It is called by several threads at once. A batch is what queues carry.
///
///     struct numbers {                                                   // one number a line
///       struct batch {
///         std::vector<double> values;
///         std::size_t size() const { return values.size(); }
///         void clear() { values.clear(); }
///         void append(const batch& from, std::size_t i) { values.push_back(from.values[i]); }
///       };
///       std::size_t delimiter(const char* text, std::size_t n) const { return std::find(text, text + n, '\n') - text;
///       } hd::parsed parse(std::string_view record, batch& to) const {
///         double x;
///         if (std::from_chars(record.data(), record.data() + record.size(), x).ec != std::errc{})
///           return hd::parsed::malformed(0, "expected a number");
///         to.values.push_back(x);
///         return {};
///       }
///     };
template <class Format>
concept record_format = has_parse<Format> && (has_delimiter<Format> != has_width<Format>);

/// @brief 64-bit hash of a record's bytes, the same on every little-endian machine. Sums of it tell whether two runs
/// read the same records, in whatever order. Not for keys of tables, nor against an adversary.
inline std::uint64_t record_hash(std::string_view bytes) noexcept {
  constexpr std::uint64_t odd = 0x9E3779B97F4A7C15u;
  const auto load = [](const char* p, auto word) {
    __builtin_memcpy(&word, p, sizeof word);
    return std::uint64_t{word};
  };
  const auto mix = [](std::uint64_t h) { return (h ^ (h >> 29)) * odd; };
  const char* p = bytes.data();
  std::size_t n = bytes.size();
  std::uint64_t a = n * odd, b = ~a;  // chains, so that one multiplication needn't wait for the other
  if (n > 32) {
    std::uint64_t c = odd, d = ~odd;
    for (; n > 32; n -= 32, p += 32) {
      a = mix(a ^ load(p, std::uint64_t{}));
      b = mix(b ^ load(p + 8, std::uint64_t{}));
      c = mix(c ^ load(p + 16, std::uint64_t{}));
      d = mix(d ^ load(p + 24, std::uint64_t{}));
    }
    a = mix(a + mix(c));  // one mixed once more, so that equal changes in both differ
    b = mix(b + mix(d));
  }
  // What is left may overlap: its length is in the chains' beginning.
  if (n > 16) {
    a = mix(a ^ load(p, std::uint64_t{}));
    b = mix(b ^ load(p + 8, std::uint64_t{}));
    n -= 16, p += 16;
    a ^= n < 8 ? load(p + n - 8, std::uint64_t{}) : load(p, std::uint64_t{});
    b ^= load(p + n - 8, std::uint64_t{});
  } else if (n >= 8) {
    a ^= load(p, std::uint64_t{});
    b ^= load(p + n - 8, std::uint64_t{});
  } else if (n >= 4) {
    a ^= load(p, std::uint32_t{}) << 32 | load(p + n - 4, std::uint32_t{});
  } else if (n > 0) {
    a ^= load(p, std::uint8_t{}) << 16 | load(p + n / 2, std::uint8_t{}) << 8 | load(p + n - 1, std::uint8_t{});
  }
  const std::uint64_t h = mix(a + mix(mix(b)));
  return h ^ (h >> 32);
}

}  // namespace v0
}  // namespace heddle

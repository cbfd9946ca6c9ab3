// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace heddle {
inline namespace v0 {
namespace detail {

/// Whether a byte separates words within a line.
constexpr bool is_space(char c) noexcept { return c == ' ' || c == '\t' || c == '\r' || c == '\v' || c == '\f'; }

/// Where the first line feed is, n if there is none.
inline std::size_t line_end(const char* text, std::size_t n) noexcept {
  const void* const at = n ? std::memchr(text, '\n', n) : nullptr;
  return at ? static_cast<std::size_t>(static_cast<const char*>(at) - text) : n;
}

/// Whether a number that no double can hold is too small, not too large: the place of its first digit says so.
inline bool is_tiny(const char* p, const char* end) noexcept {
  std::ptrdiff_t place = 0;
  bool point = false, digit = false;
  for (; p != end && *p != 'e' && *p != 'E'; ++p) {
    point = point || *p == '.';
    digit = digit || (*p != '0' && *p != '.');
    if (*p != '.') place += digit ? !point : -point;
  }
  int exponent = 0;
  if (end - p > 1) {
    const bool negative = p[1] == '-';
    p += p[1] == '+' ? 2 : 1;
    if (std::from_chars(p, end, exponent).ec != std::errc{}) return negative;
  }
  return place + exponent < 0;
}

/// Reads a finite decimal number, with a sign or not, rounded to double and then to float. On success `p` is behind it;
/// on failure nothing changes. What is too small for a
/// double is 0.
inline bool read_number(const char*& p, const char* end, float& value) noexcept {
  const char* q = p;
  const bool negative = q != end && *q == '-';
  if (q != end && (*q == '-' || *q == '+')) ++q;
  // Most numbers have few digits: exact in a double, so that one division rounds as it should.
  static constexpr double power[] = {1.,  1e1, 1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                     1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
  std::uint64_t digits = 0;
  int count = 0, decimals = 0;
  const char* r = q;
  for (; r != end && static_cast<unsigned char>(*r - '0') < 10; ++r, ++count)
    digits = 10 * digits + static_cast<unsigned char>(*r - '0');
  if (r != end && *r == '.') {
    const char* const point = r++;
    for (; r != end && static_cast<unsigned char>(*r - '0') < 10; ++r, ++count)
      digits = 10 * digits + static_cast<unsigned char>(*r - '0');
    decimals = static_cast<int>(r - point) - 1;
  }
  double x;
  if (count > 0 && count <= 15 && (r == end || (*r != 'e' && *r != 'E'))) {
    x = static_cast<double>(digits) / power[decimals];
  } else {
    if (q != end && (*q == '-' || *q == '+')) return false;
    const auto [stop, error] = std::from_chars(q, end, x);
    if (error == std::errc::result_out_of_range && is_tiny(q, stop))
      x = 0.0;
    else if (error != std::errc{})
      return false;
    r = stop;
  }
  const float rounded = static_cast<float>(negative ? -x : x);
  if (!std::isfinite(rounded)) return false;
  value = rounded;
  p = r;
  return true;
}

/// Reads an unsigned number in base 10 or 16 that fits. On success `p` is behind it; on failure nothing changes.
template <class Integer> bool read_integer(const char*& p, const char* end, Integer& value, int base = 10) noexcept {
  const auto [stop, error] = std::from_chars(p, end, value, base);
  if (error != std::errc{}) return false;
  p = stop;
  return true;
}

/// The fields of a line, one after the other; see csv.
class line_fields {
 public:
  line_fields(std::string_view record, char separator)
      : begin_(record.data()), end_(begin_ + record.size()), at_(begin_), start_(begin_), separator_(separator) {
    if (at_ != end_ && end_[-1] == '\r') --end_;
    skip_spaces();
  }

  /// Whether there is nothing but spaces.
  bool blank() const noexcept { return at_ == end_; }
  /// Whether there is another field.
  bool more() const noexcept { return more_; }
  /// The field that next() found; valid until the next call.
  std::string_view field() const noexcept { return field_; }
  /// Where it, or the fault, begins.
  std::size_t column() const noexcept { return static_cast<std::size_t>(start_ - begin_); }

  /// Takes the next field. Returns what is wrong, or nullptr.
  const char* next() {
    start_ = at_;
    if (!more_) return "expected another field: fewer than there are columns";
    skip_spaces();
    start_ = at_;
    if (at_ != end_ && *at_ == '"') {
      const char* const problem = quoted();
      if (problem) return problem;
    } else {
      const void* const stop =
          at_ == end_ ? nullptr : std::memchr(at_, separator_, static_cast<std::size_t>(end_ - at_));
      at_ = stop ? static_cast<const char*>(stop) : end_;
      const char* last = at_;
      while (last != start_ && last[-1] == ' ') --last;
      field_ = {start_, static_cast<std::size_t>(last - start_)};
    }
    more_ = at_ != end_;
    if (more_) ++at_;
    return nullptr;
  }

 private:
  void skip_spaces() noexcept {
    while (at_ != end_ && *at_ == ' ') ++at_;
  }

  const char* quoted() {
    unescaped_.clear();
    const char* from = ++at_;
    for (;; ++at_) {
      while (at_ != end_ && *at_ != '"') ++at_;
      if (at_ == end_) return "expected a closing quote on this line";
      if (at_ + 1 == end_ || at_[1] != '"') break;
      unescaped_.append(from, ++at_);  // the first of two quotes stays
      from = at_ + 1;
    }
    field_ = {from, static_cast<std::size_t>(at_ - from)};
    if (!unescaped_.empty()) field_ = unescaped_.append(field_);
    ++at_;
    skip_spaces();
    return at_ == end_ || *at_ == separator_ ? nullptr : "expected a separator after the closing quote";
  }

  const char *begin_, *end_, *at_, *start_;
  char separator_;
  bool more_ = true;
  std::string unescaped_;
  std::string_view field_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

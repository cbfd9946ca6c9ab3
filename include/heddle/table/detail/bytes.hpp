// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Bytes that grow.
class byte_writer {
 public:
  template <class Value> void put(const Value& v) {
    static_assert(std::is_trivially_copyable_v<Value>);
    put(&v, sizeof v);
  }
  void put(const void* p, std::size_t n) {
    if (n == 0) return;  // p may be null
    const auto* const first = static_cast<const std::byte*>(p);
    content_.insert(content_.end(), first, first + n);
  }
  void clear() noexcept { content_.clear(); }
  std::vector<std::byte> release() noexcept { return std::move(content_); }
  std::byte* data() noexcept { return content_.data(); }
  std::size_t size() const noexcept { return content_.size(); }

 private:
  std::vector<std::byte> content_;
};

// Reads them; throws file_error naming `where` if they end early.
class byte_reader {
 public:
  byte_reader(const std::byte* p, std::size_t n, std::string where) : at_(p), left_(n), where_(std::move(where)) {}
  template <class Value> Value get() {
    static_assert(std::is_trivially_copyable_v<Value>);
    Value v;
    std::memcpy(static_cast<void*>(&v), take(sizeof v), sizeof v);
    return v;
  }
  // The next n bytes.
  const std::byte* take(std::size_t n) {
    if (n > left_) refuse("it ends early");
    const std::byte* const p = at_;
    at_ += n;
    left_ -= n;
    return p;
  }
  // A number of things of so many bytes each, all of which are still to come.
  std::size_t count(std::size_t each) {
    const auto n = get<std::uint64_t>();
    if (n > left_ / each) refuse("it says that " + std::to_string(n) + " things follow, more than it has");
    return static_cast<std::size_t>(n);
  }
  std::size_t left() const noexcept { return left_; }
  [[noreturn]] void refuse(const std::string& why) const { throw file_error("heddle: " + where_ + ": " + why); }

 private:
  const std::byte* at_;
  std::size_t left_;
  std::string where_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/config.hpp>

#include <cstddef>
#include <iterator>

namespace heddle {
inline namespace v0 {
namespace detail {

/// @cond
// What both iterators below share: a position and its arithmetic. `Derived` adds what it refers to.
template <class Derived> struct position {
  using difference_type = std::ptrdiff_t;
  using iterator_category = std::random_access_iterator_tag;

  std::size_t at;

  HEDDLE_HD friend constexpr Derived operator+(Derived a, difference_type d) {
    a.at += static_cast<std::size_t>(d);
    return a;
  }
  HEDDLE_HD friend constexpr Derived operator+(difference_type d, Derived a) { return a + d; }
  HEDDLE_HD friend constexpr Derived operator-(Derived a, difference_type d) { return a + (-d); }
  HEDDLE_HD friend constexpr difference_type operator-(const Derived& a, const Derived& b) {
    return static_cast<difference_type>(a.at - b.at);
  }
  HEDDLE_HD friend constexpr Derived& operator+=(Derived& a, difference_type d) { return a = a + d; }
  HEDDLE_HD friend constexpr Derived& operator-=(Derived& a, difference_type d) { return a = a - d; }
  HEDDLE_HD friend constexpr Derived& operator++(Derived& a) { return a += 1; }
  HEDDLE_HD friend constexpr Derived& operator--(Derived& a) { return a -= 1; }
  HEDDLE_HD friend constexpr Derived operator++(Derived& a, int) {
    const Derived before = a;
    a += 1;
    return before;
  }
  HEDDLE_HD friend constexpr bool operator==(const Derived& a, const Derived& b) { return a.at == b.at; }
  HEDDLE_HD friend constexpr bool operator!=(const Derived& a, const Derived& b) { return a.at != b.at; }
  HEDDLE_HD friend constexpr bool operator<(const Derived& a, const Derived& b) { return a.at < b.at; }
};

// The sequence f(0), f(1), .. as an input iterator for CUB.
template <class Function, class Value> struct index_iterator : position<index_iterator<Function, Value>> {
  using value_type = Value;
  using pointer = const Value*;
  using reference = Value;

  Function f;

  HEDDLE_HD constexpr index_iterator(std::size_t first, Function function)
      : position<index_iterator>{first}, f(function) {}
  HEDDLE_HD constexpr Value operator*() const { return static_cast<Value>(f(this->at)); }
  HEDDLE_HD constexpr Value operator[](std::ptrdiff_t d) const { return *(*this + d); }
};

// An output iterator for CUB: storing i at place k calls write(k, i).
template <class Write> struct write_iterator : position<write_iterator<Write>> {
  using value_type = void;
  using pointer = void;

  struct reference {
    std::size_t at;
    const Write& write;
    HEDDLE_HD constexpr const reference& operator=(std::size_t i) const {
      write(at, i);
      return *this;
    }
  };

  Write write;

  HEDDLE_HD constexpr write_iterator(std::size_t first, Write function)
      : position<write_iterator>{first}, write(function) {}
  HEDDLE_HD constexpr reference operator*() const { return reference{this->at, write}; }
  HEDDLE_HD constexpr reference operator[](std::ptrdiff_t d) const {
    return reference{this->at + static_cast<std::size_t>(d), write};
  }
};

struct identity_index {
  HEDDLE_HD constexpr std::size_t operator()(std::size_t i) const { return i; }
};
/// @endcond

}  // namespace detail
}  // namespace v0
}  // namespace heddle

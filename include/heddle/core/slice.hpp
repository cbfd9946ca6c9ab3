// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/config.hpp>

#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

namespace heddle {
inline namespace v0 {

namespace detail {
// Element, as a name that depends on Parameter: a file that only includes a template with it doesn't pay for what it
// needs of the vectors.
template <class Element, class Parameter> struct dependent {
  using type = Element;
};
}  // namespace detail

/// @brief A borrowed run of elements, usable in device code (where `std::span` indexing is not).
///
/// It owns nothing; copying it is copying a pointer and a count. `slice<Element>` converts to `slice<const Element>`.
template <class Element>
struct slice {
  Element* data = nullptr;      ///< First element; may be null only when count is 0.
  std::size_t count = 0;  ///< Number of elements.

  /// Number of elements.
  HEDDLE_HD constexpr std::size_t size() const noexcept { return count; }
  /// Whether there is no element.
  HEDDLE_HD constexpr bool empty() const noexcept { return count == 0; }
  /// Size in bytes.
  HEDDLE_HD constexpr std::size_t bytes() const noexcept { return count * sizeof(Element); }
  /// First element.
  HEDDLE_HD constexpr Element* begin() const noexcept { return data; }
  /// One past the last element.
  HEDDLE_HD constexpr Element* end() const noexcept { return data + count; }
  /// Element i, unchecked.
  HEDDLE_HD constexpr Element& operator[](std::size_t i) const noexcept { return data[i]; }
  /// Elements [offset, offset + n), unchecked.
  HEDDLE_HD constexpr slice subslice(std::size_t offset, std::size_t n) const noexcept { return {data + offset, n}; }
  /// A view that can't write.
  template <class Other>
    requires(std::is_const_v<Other> && std::is_same_v<Other, const Element> && !std::is_const_v<Element>)
  HEDDLE_HD constexpr operator slice<Other>() const noexcept {
    return {data, count};
  }
};

/// A host container with `data()` and `size()` seen as a slice.
template <class Container>
constexpr auto as_slice(Container& c) noexcept {
  return slice<std::remove_pointer_t<decltype(c.data())>>{c.data(), c.size()};
}

namespace detail {
// A vector seen as a span. A template, so that what std::span asks of its iterators is checked only where it is called.
template <class Element>
constexpr std::span<const Element> as_span(const std::vector<Element>& v) noexcept {
  return {v.data(), v.size()};
}

// Whether a span of In may be the input where Element is what comes out.
template <class In, class Element>
concept reads = std::is_same_v<std::remove_const_t<In>, Element>;

// A value for requirements, never defined. It initialises a parameter without a constructor, so that asking whether a
// function takes a std::span doesn't weigh all of std::span's constructors, as std::declval would.
template <class Value>
Value value_of() noexcept;
}  // namespace detail

}  // namespace v0
}  // namespace heddle

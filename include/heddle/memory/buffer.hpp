// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/slice.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/checked.hpp>
#include <heddle/memory/host_resource.hpp>

#include <cstddef>
#include <type_traits>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief An uninitialised run of elements that a resource owns and the buffer gives back.
///
/// Fixed size, movable, not copyable. It holds a copy of the resource, which shares the resource's state. Memory is
/// aligned to 64 bytes, or to the element if that needs more. Zero elements have a null `data()`.
///
/// @code{.cpp}
/// heddle::buffer<float, heddle::host_resource> x{heddle::host_resource{}, 1024};
/// std::fill(x.begin(), x.end(), 0.0f);
/// @endcode
///
/// Sync:    allocates and gives back with the resource's `_sync` calls: usable at once, anywhere.
/// Throws:  what the resource throws; `memory_error` when count * sizeof(Element) overflows.
///
/// @tparam Element A trivially copyable type.
template <class Element, class Resource = host_resource>
class buffer {
  static_assert(std::is_trivially_copyable_v<Element> && std::is_trivially_destructible_v<Element>,
                "heddle::buffer: the element must be trivially copyable");
  static_assert(has_allocate_sync<Resource> && has_deallocate_sync<Resource>,
                "heddle::buffer: the resource must provide allocate_sync and a noexcept deallocate_sync");

 public:
  /// The alignment of `data()`.
  static constexpr std::size_t alignment = alignof(Element) > 64 ? alignof(Element) : 64;

  /// `count` uninitialised elements.
  buffer(Resource from, std::size_t count)
      : resource_(std::move(from)),
        data_(static_cast<Element*>(
            resource_.allocate_sync(detail::checked_multiply("buffer", count, sizeof(Element)), alignment))),
        count_(count) {}

  /// Takes the memory over; `other` is left empty.
  buffer(buffer&& other) noexcept(std::is_nothrow_copy_constructible_v<Resource>)
      : resource_(other.resource_),
        data_(std::exchange(other.data_, nullptr)),
        count_(std::exchange(other.count_, std::size_t{0})) {}
  buffer(const buffer&) = delete;
  buffer& operator=(const buffer&) = delete;
  buffer& operator=(buffer&&) = delete;

  /// Gives the memory back.
  ~buffer() { resource_.deallocate_sync(data_, bytes(), alignment); }

  /// First element, null if there is none.
  Element* data() noexcept { return data_; }
  /// First element, null if there is none.
  const Element* data() const noexcept { return data_; }
  /// Number of elements.
  std::size_t size() const noexcept { return count_; }
  /// Whether there is no element.
  bool empty() const noexcept { return count_ == 0; }
  /// Size in bytes.
  std::size_t bytes() const noexcept { return count_ * sizeof(Element); }
  /// First element.
  Element* begin() noexcept { return data_; }
  /// One past the last element.
  Element* end() noexcept { return data_ + count_; }
  /// First element.
  const Element* begin() const noexcept { return data_; }
  /// One past the last element.
  const Element* end() const noexcept { return data_ + count_; }
  /// Element i, unchecked.
  Element& operator[](std::size_t i) noexcept { return data_[i]; }
  /// Element i, unchecked.
  const Element& operator[](std::size_t i) const noexcept { return data_[i]; }
  /// A view of all elements.
  slice<Element> view() noexcept { return {data_, count_}; }
  /// A copy of the resource.
  Resource resource() const { return resource_; }

 private:
  Resource resource_;
  Element* data_;
  std::size_t count_;
};

}  // namespace v0
}  // namespace heddle

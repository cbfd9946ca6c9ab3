// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <bit>
#include <cstddef>
#include <string>

namespace heddle {
inline namespace v0 {
namespace detail {

/// Memory from a resource for the duration of one call, also when it ends in an exception.
template <class Resource, class Queue> class temporary {
 public:
  static constexpr std::size_t alignment = 256;

  temporary(Resource& resource, Queue queue, std::size_t bytes)
      : resource_(resource), queue_(queue), bytes_(bytes), data_(resource.allocate(queue, bytes, alignment)) {}
  temporary(const temporary&) = delete;
  temporary& operator=(const temporary&) = delete;
  ~temporary() { resource_.deallocate(queue_, data_, bytes_, alignment); }

  std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }

 private:
  Resource& resource_;
  Queue queue_;
  std::size_t bytes_;
  void* data_;
};

/// Bytes rounded up so that another array may follow.
constexpr std::size_t padded(std::size_t bytes) noexcept { return (bytes + 255u) & ~std::size_t{255}; }

/// n elements of a size in bytes; throws argument_error when that is no number.
inline std::size_t checked_bytes(const char* where, std::size_t n, std::size_t size) {
  if (n > (~std::size_t{0} - 512) / size)
    throw argument_error("heddle::" + std::string{where} + ": " + std::to_string(n) + " elements of " +
                         std::to_string(size) + " bytes overflow std::size_t");
  return n * size;
}

/// Throws argument_error unless the alignment is a power of two from 1 to `most`.
inline void check_alignment(const char* where, std::size_t alignment, std::size_t most) {
  if (!std::has_single_bit(alignment) || alignment > most)
    throw argument_error("heddle::" + std::string{where} + ": alignment " + std::to_string(alignment) +
                         " is not a power of two from 1 to " + std::to_string(most));
}

/// Throws argument_error for a null pointer that should hold n > 0 elements.
inline void check_pointer(const char* where, const void* p, std::size_t n) {
  if (p == nullptr && n != 0)
    throw argument_error("heddle::" + std::string{where} + ": null pointer given for " + std::to_string(n) +
                         " elements");
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   what all device-wide functions do: two phases, checks of the arguments, work in the order of the stream.
//         The temporary storage has an odd size that depends on the number of items, must be stated truthfully, and is
//         overwritten before and after the work: whoever shares it with anything is found out. Arguments that CUB's
//         documentation forbids (memory of the host, ranges that overlap) are faults, which fail a test.
// Limits: the work runs as one device thread: no races between CUB's own threads are seen. Functors are copied once.

#include <emulated/control.h>
#include <cub/util_type.cuh>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>

namespace cub::detail {

template <class Iterator> using value_of = typename std::iterator_traits<Iterator>::value_type;
/// What an output iterator takes, or Otherwise where it doesn't say.
template <class Iterator, class Otherwise>
using value_or = std::conditional_t<std::is_void_v<value_of<Iterator>>, Otherwise, value_of<Iterator>>;
/// The type of intermediate results: what the operator makes of an initial value and an item.
template <class Operator, class Input, class Init = Input>
using accumulator = std::decay_t<std::invoke_result_t<Operator&, Init, Input>>;

template <class Iterator> decltype(auto) at(Iterator& i, std::uint64_t n) {
  return i[static_cast<typename std::iterator_traits<Iterator>::difference_type>(n)];
}

/// One call of a device-wide function.
class device_call {
 public:
  template <class Count>
  device_call(const char* name, void* storage, std::size_t& bytes, Count n, cudaStream_t stream)
      : name_(name), storage_(storage), bytes_(bytes), stream_(stream) {
    static_assert(std::is_integral_v<Count>, "cub: the number of items must be an integer");
    if constexpr (std::is_signed_v<Count>) negative_ = n < 0;
    count_ = negative_ ? 0 : static_cast<std::uint64_t>(n);
  }

  /// The number of items.
  std::uint64_t count() const { return count_; }

  /// The function reads or writes n elements from here: if it is a pointer, the device must reach them.
  template <class Iterator> void touches(Iterator from, std::uint64_t n) {
    if constexpr (std::is_pointer_v<Iterator>) {
      using value = std::remove_pointer_t<Iterator>;
      if (n == 0) return;
      if (!emulated::is_device_memory(from, n * sizeof(value)))
        wrong("no " + std::to_string(n * sizeof(value)) + " bytes of device memory lie at an argument");
      else if (reinterpret_cast<std::uintptr_t>(from) % alignof(value) != 0)
        wrong("an argument is a misaligned pointer");
    }
  }

  /// These ranges must not overlap.
  template <class A, class B> void apart(A a, std::uint64_t n, B b, std::uint64_t m) {
    if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
      const auto first = reinterpret_cast<std::uintptr_t>(a), second = reinterpret_cast<std::uintptr_t>(b);
      if (n != 0 && m != 0 && first < second + m * sizeof(*b) && second < first + n * sizeof(*a))
        wrong("two arguments overlap");
    }
  }
  /// These ranges must not overlap, unless they are the same.
  template <class A, class B> void same_or_apart(A a, B b, std::uint64_t n) {
    if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
      if (static_cast<const void*>(a) == static_cast<const void*>(b) && sizeof(*a) == sizeof(*b)) return;
    }
    apart(a, n, b, n);
  }

  /// Whether this is the phase that only asks for the size.
  bool asks() const { return storage_ == nullptr; }

  /// The first phase, or the second one.
  cudaError_t run(std::function<void()> body) {
    if (negative_) return cudaErrorInvalidValue;
    const std::size_t needed = 1 + 2 * (count_ / 13 + (count_ % 13 != 0));
    if (asks()) {
      bytes_ = needed;
      return cudaSuccess;
    }
    if (bytes_ < needed) return cudaErrorInvalidValue;
    if (!emulated::is_device_memory(storage_, bytes_))
      wrong("its temporary storage isn't device memory of " + std::to_string(bytes_) + " bytes");
    if (!wrong_.empty()) {
      emulated::report_fault(std::string(name_) + ": " + wrong_);
      return cudaErrorInvalidValue;
    }
    int device = 0, of_stream = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess) code = cudaStreamGetDevice(stream_, &of_stream);
    if (code != cudaSuccess) return code;
    if (device != of_stream) return cudaErrorInvalidResourceHandle;
    return emulated::enqueue(stream_, name_, [storage = storage_, bytes = bytes_, body = std::move(body)] {
      std::memset(storage, 0xcd, bytes);
      body();
      std::memset(storage, 0xcd, bytes);
    });
  }

 private:
  void wrong(std::string text) {
    if (wrong_.empty()) wrong_ = std::move(text);
  }

  const char* name_;
  void* storage_;
  std::size_t& bytes_;
  cudaStream_t stream_;
  std::uint64_t count_ = 0;
  bool negative_ = false;
  std::string wrong_;
};

}  // namespace cub::detail

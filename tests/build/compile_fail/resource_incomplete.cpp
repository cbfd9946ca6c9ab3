// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// An adaptor says what the resource below it lacks.
// EXPECT: heddle: the upstream must provide allocate_sync(bytes, alignment)
// EXPECT: heddle: the upstream must provide a noexcept deallocate_sync(pointer, bytes, alignment)
// EXPECT: heddle: the upstream must provide allocate_sync(bytes, alignment)
// EXPECT: heddle::checking: the upstream must serve host::queue, since the host reads and writes around blocks
#include <heddle/memory/checking.hpp>
#include <heddle/memory/host_resource.hpp>
#include <heddle/memory/pool.hpp>
#include <heddle/memory/tracking.hpp>

namespace hd = heddle;

struct nothing {
  friend bool operator==(const nothing&, const nothing&) = default;
};

struct may_throw {
  hd::host_resource upstream{};
  void* allocate_sync(std::size_t bytes, std::size_t alignment) { return upstream.allocate_sync(bytes, alignment); }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) {  // not noexcept
    upstream.deallocate_sync(p, bytes, alignment);
  }
  friend bool operator==(const may_throw&, const may_throw&) = default;
};

struct of_a_device {
  struct queue {};
  hd::host_resource upstream{};
  void* allocate_sync(std::size_t bytes, std::size_t alignment) { return upstream.allocate_sync(bytes, alignment); }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    upstream.deallocate_sync(p, bytes, alignment);
  }
  void* allocate(queue, std::size_t bytes, std::size_t alignment) { return allocate_sync(bytes, alignment); }
  void deallocate(queue, void* p, std::size_t b, std::size_t a) noexcept { deallocate_sync(p, b, a); }
  friend bool operator==(const of_a_device&, const of_a_device&) = default;
};

template class hd::tracking<hd::pool<hd::host_resource>>;
template class hd::checking<hd::pool<of_a_device>>;

#if FAIL == 1
template class hd::tracking<nothing>;
#elif FAIL == 2
template class hd::tracking<may_throw>;
#elif FAIL == 3
template class hd::pool<nothing>;
#elif FAIL == 4
template class hd::checking<of_a_device>;
#endif

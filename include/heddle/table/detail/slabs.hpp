// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include <sched.h>
#include <sys/mman.h>

namespace heddle {
inline namespace v0 {
namespace detail {

// A lock for a few hundred nanoseconds; who waits longer gives the processor away.
class spin_lock {
 public:
  void lock() noexcept {
    while (held_.exchange(true, std::memory_order_acquire)) {
      for (int spins = 0; held_.load(std::memory_order_relaxed);) {
        if (++spins > 100) ::sched_yield();
      }
    }
  }
  void unlock() noexcept { held_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> held_{false};
};

class spin_guard {
 public:
  explicit spin_guard(spin_lock& l) noexcept : lock_(l) { lock_.lock(); }
  spin_guard(const spin_guard&) = delete;
  spin_guard& operator=(const spin_guard&) = delete;
  ~spin_guard() { lock_.unlock(); }

 private:
  spin_lock& lock_;
};

// Memory that never moves and is given back all at once. It comes in slabs: small ones while there is little, then
// 2 MiB each, on huge pages where the system has them, since rows are visited at random and would miss the TLB.
// Every page of a slab is touched when it is taken, so bytes() is what the process grew by.
class slabs {
 public:
  static constexpr std::size_t little = std::size_t{1} << 16, big = std::size_t{1} << 21;

  slabs() = default;
  slabs(const slabs&) = delete;
  slabs& operator=(const slabs&) = delete;
  ~slabs() {
    for (const slab& s : slabs_) ::munmap(s.first, s.bytes);
  }

  // Bytes aligned to 64. Any thread may call it. Throws std::bad_alloc.
  std::byte* take(std::size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    const spin_guard guard(lock_);
    if (left_ < bytes) {
      if (slabs_.size() == slabs_.capacity()) slabs_.reserve(2 * slabs_.size() + 4);
      const bool young = total_.load(std::memory_order_relaxed) < 2 * big;
      const std::size_t size = young && bytes <= little ? little : (std::max)(big, (bytes + 4095) / 4096 * 4096);
      std::byte* const first = map(size);
      if (size >= big) ::madvise(first, size, MADV_HUGEPAGE);  // a wish: where it isn't granted nothing is lost
      for (std::size_t i = 0; i < size; i += 4096) *static_cast<volatile std::byte*>(first + i) = std::byte{0};
      slabs_.push_back({first, size});
      total_.store(total_.load(std::memory_order_relaxed) + size, std::memory_order_relaxed);
      next_ = first;
      left_ = size;
    }
    left_ -= bytes;
    std::byte* const p = next_;
    next_ += bytes;
    return p;
  }
  std::size_t bytes() const noexcept { return total_.load(std::memory_order_relaxed); }

 private:
  // From the system itself, since an allocator's own account would add a page to every slab. Aligned to `big`, or to
  // its size where that is less.
  static std::byte* map(std::size_t size) {
    const std::size_t alignment = (std::min)(size, big);
    void* const p = ::mmap(nullptr, size + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    auto* const start = static_cast<std::byte*>(p);
    const std::size_t before = (alignment - reinterpret_cast<std::uintptr_t>(p) % alignment) % alignment;
    if (before != 0) ::munmap(start, before);
    ::munmap(start + before + size, alignment - before);
    return start + before;
  }

  struct slab {
    std::byte* first;
    std::size_t bytes;
  };
  spin_lock lock_;
  std::vector<slab> slabs_;
  std::byte* next_ = nullptr;
  std::size_t left_ = 0;
  std::atomic<std::size_t> total_{0};
};

// Pointers one after the other, in memory of slabs, which keep what it has outgrown: no more than it has.
template <class Pointer> class pointer_list {
 public:
  std::uint32_t size() const noexcept { return size_; }
  Pointer operator[](std::uint32_t i) const noexcept { return data_[i]; }
  const Pointer* begin() const noexcept { return data_; }
  const Pointer* end() const noexcept { return data_ + size_; }
  // Throws std::bad_alloc; then nothing has changed.
  void reserve(std::size_t n, slabs& memory) {
    if (n <= capacity_) return;
    const std::size_t capacity = n < 8 ? 8 : n < 2 * std::size_t{capacity_} ? 2 * std::size_t{capacity_} : n;
    auto* const data = new (memory.take(capacity * sizeof(Pointer))) Pointer[capacity];
    for (std::uint32_t i = 0; i < size_; ++i) data[i] = data_[i];
    data_ = data;
    capacity_ = static_cast<std::uint32_t>(capacity);
  }
  void push_back(Pointer p) noexcept { data_[size_++] = p; }

 private:
  Pointer* data_ = nullptr;
  std::uint32_t size_ = 0, capacity_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
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
    for (const slab& s : slabs_) ::operator delete(s.first, std::align_val_t{s.bytes});
  }

  // Bytes (at most `big`) aligned to 64. Any thread may call it. Throws std::bad_alloc.
  std::byte* take(std::size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    const spin_guard guard(lock_);
    if (left_ < bytes) {
      slabs_.reserve(slabs_.size() + 1);
      const std::size_t size = total_.load(std::memory_order_relaxed) < 2 * big && bytes <= little ? little : big;
      auto* const first = static_cast<std::byte*>(::operator new(size, std::align_val_t{size}));
      if (size == big) ::madvise(first, size, MADV_HUGEPAGE);  // a wish: where it isn't granted nothing is lost
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

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/memory/detail/checked.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace heddle {
inline namespace v0 {
namespace detail {

// More alignment than an allocator promises. What it gives is often aligned to pages, so that is tried first; else more
// is taken, and where that began is kept here, as the memory itself may be out of the host's reach.
class over_aligned {
 public:
  explicit over_aligned(std::size_t promised) : promised_(promised) {}

  template <class Take, class Give> void* allocate(std::size_t bytes, std::size_t alignment, Take&& take, Give&& give) {
    void* p = take(bytes);
    if (alignment <= promised_ || reinterpret_cast<std::uintptr_t>(p) % alignment == 0) return p;
    give(p, bytes);
    const std::size_t more = bytes + alignment - promised_;
    p = take(more);
    void* const moved = static_cast<std::byte*>(p) + ((0 - reinterpret_cast<std::uintptr_t>(p)) & (alignment - 1));
    try {
      std::lock_guard lock(mutex_);
      begins_[moved] = p;
    } catch (...) {
      give(p, more);
      throw;
    }
    return moved;
  }

  // Turns a block into what was taken for it, and forgets it.
  void restore(void*& p, std::size_t& bytes, std::size_t alignment) noexcept {
    if (alignment <= promised_) return;
    std::lock_guard lock(mutex_);
    const auto found = begins_.find(p);
    if (found == begins_.end()) return;
    p = found->second;
    bytes += alignment - promised_;
    begins_.erase(found);
  }

 private:
  const std::size_t promised_;
  std::mutex mutex_;
  std::map<void*, void*> begins_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

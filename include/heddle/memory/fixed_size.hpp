// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/checked.hpp>
#include <heddle/memory/host_resource.hpp>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief The blocks of a `fixed_size` resource.
struct fixed_size_options {
  std::size_t block = 4096;    ///< Bytes of a block, at least 1; rounded up to a power of two.
  std::size_t per_chunk = 64;  ///< Blocks taken from the upstream at once, at least 1.

  friend constexpr bool operator==(const fixed_size_options&, const fixed_size_options&) = default;
};

/// @brief Blocks of one size: each request gets a whole one.
///
/// Blocks are aligned to their size, at most to 4096 bytes.
///
/// State:   8 bytes a block, shared by all copies; the memory itself is never touched.
/// Traffic: constant time: the block that was given back last goes out first.
/// Order:   any upstream; see `binning` for several sizes.
/// Sync:    a mutex; thread-safe. The last copy's destruction gives all chunks back.
/// Throws:  `memory_error` for a request above a block; `argument_error` on a bad alignment or option, or an alignment
///          above the block's; what the upstream throws.
template <class Upstream = host_resource> class fixed_size {
  static_assert(has_allocate_sync<Upstream> && has_deallocate_sync<Upstream>,
                "heddle::fixed_size: the upstream must provide allocate_sync and a noexcept deallocate_sync");

 public:
  /// @param upstream Where chunks come from. @param options Sizes. Takes nothing yet.
  explicit fixed_size(Upstream upstream = Upstream{}, fixed_size_options options = {})
      : state_(std::make_shared<state>(std::move(upstream), options)) {}

  /// A block, usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("fixed_size", alignment);
    if (bytes == 0) return nullptr;
    state& s = *state_;
    std::lock_guard lock(s.mutex);
    if (bytes > s.block) throw memory_error("fixed_size", bytes, s.block, s.in_use, s.block);
    if (alignment > s.block) {
      throw argument_error("heddle::fixed_size: alignment " + std::to_string(alignment) + " of a block of " +
                           std::to_string(s.block) + " bytes");
    }
    if (s.free.empty()) s.grow();
    void* const p = s.free.back();
    s.free.pop_back();
    s.in_use += s.block;
    return p;
  }

  /// Gives a block back.
  void deallocate_sync(void* p, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    if (!p) return;
    state& s = *state_;
    std::lock_guard lock(s.mutex);
    s.free.push_back(p);  // has room for every block there is
    s.in_use -= s.block;
  }

  /// As `allocate_sync`: the host's queue does everything at once.
  void* allocate(host::queue, std::size_t bytes, std::size_t alignment) { return allocate_sync(bytes, alignment); }

  /// As `deallocate_sync`.
  void deallocate(host::queue, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    deallocate_sync(p, bytes, alignment);
  }

  /// Bytes of a block.
  std::size_t block_bytes() const noexcept { return state_->block; }
  /// Bytes in live blocks.
  std::size_t in_use() const {
    std::lock_guard lock(state_->mutex);
    return state_->in_use;
  }
  /// Bytes held from the upstream.
  std::size_t held() const {
    std::lock_guard lock(state_->mutex);
    return state_->chunks.size() * state_->chunk_bytes();
  }

  /// Whether both are one resource.
  friend bool operator==(const fixed_size& a, const fixed_size& b) noexcept { return a.state_ == b.state_; }

 private:
  struct state {
    state(Upstream u, fixed_size_options o) : upstream(std::move(u)), per_chunk(o.per_chunk) {
      if (o.block == 0 || o.block > (std::size_t{1} << 40) || o.per_chunk == 0 ||
          o.per_chunk > (std::size_t{1} << 20)) {
        throw argument_error("heddle::fixed_size: .block " + std::to_string(o.block) + " and .per_chunk " +
                             std::to_string(o.per_chunk) + "; allowed is 1 to 2^40 and 1 to 2^20");
      }
      while (block < o.block) block *= 2;
    }
    state(const state&) = delete;
    state& operator=(const state&) = delete;
    ~state() {
      for (void* p : chunks) upstream.deallocate_sync(p, chunk_bytes(), detail::max_alignment);
    }

    std::size_t chunk_bytes() const noexcept { return block * per_chunk; }

    void grow() {
      chunks.reserve(chunks.size() + 1);
      free.reserve((chunks.size() + 1) * per_chunk);
      auto* const p = static_cast<std::byte*>(upstream.allocate_sync(chunk_bytes(), detail::max_alignment));
      chunks.push_back(p);
      for (std::size_t k = per_chunk; k-- > 0;) free.push_back(p + k * block);
    }

    Upstream upstream;
    std::size_t block = 1, per_chunk;
    std::mutex mutex;
    std::vector<void*> chunks, free;
    std::size_t in_use = 0;
  };

  std::shared_ptr<state> state_;
};

static_assert(resource<fixed_size<>>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/fixed_size.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief The size classes of a `binning` resource; both are rounded up to powers of two.
struct binning_options {
  std::size_t smallest = 64;       ///< Bytes of the blocks of the first bin, at least 1.
  std::size_t largest = 1u << 16;  ///< Bytes of the blocks of the last bin, at least `smallest`, at most 2^40.
  std::size_t chunk = 1u << 18;    ///< Bytes that a bin takes from the upstream at once, or one block if that is more.

  friend constexpr bool operator==(const binning_options&, const binning_options&) = default;
};

/// @brief Serves requests up to a size from bins of power-of-two blocks, larger ones from the upstream.
///
/// State:   one `fixed_size` resource a bin, shared by all copies.
/// Traffic: constant time for what fits a bin; a block is at most twice the request.
/// Order:   any upstream; below it a `pool`, on a device a `queue_pool`, serves the bins' chunks and large requests.
/// Sync:    as `fixed_size`; thread-safe if the upstream is.
/// Throws:  `argument_error` on a bad alignment or option; what the upstream throws.
/// @tparam Backend A type with a queue and an event, such as a backend.
template <class Upstream = host_resource, class Backend = host> class binning {
  using bin_type = fixed_size<Upstream, Backend>;

 public:
  /// The queue that calls take.
  using queue = typename Backend::queue;

  /// @param upstream Where chunks and large blocks come from. @param options Size classes. Takes nothing yet.
  /// @param order Only its type matters: whose queues and events they are.
  explicit binning(Upstream upstream = Upstream{}, binning_options options = {}, Backend order = {})
      : upstream_(std::move(upstream)) {
    if (options.smallest == 0 || options.largest < options.smallest || options.largest > (std::size_t{1} << 40)) {
      throw argument_error("heddle::binning: .smallest " + std::to_string(options.smallest) + " and .largest " +
                           std::to_string(options.largest) + "; allowed is 1 or more, and that up to 2^40");
    }
    const std::size_t last = std::bit_ceil(options.largest);
    for (std::size_t block = std::bit_ceil(options.smallest); block <= last; block *= 2) {
      const fixed_size_options of_bin{block, std::clamp<std::size_t>(options.chunk / block, 1, 1024)};
      bins_.emplace_back(upstream_, of_bin, order);
    }
  }

  /// Memory for later work on `q`.
  void* allocate(queue q, std::size_t bytes, std::size_t alignment)
    requires has_allocate<Upstream, queue>
  {
    bin_type* const bin = bin_of(bytes, alignment);
    return bin ? bin->allocate(q, bytes, alignment) : upstream_.allocate(q, bytes, alignment);
  }

  /// Gives memory of `allocate` back; work that `q` has now may use it still.
  void deallocate(queue q, void* p, std::size_t bytes, std::size_t alignment) noexcept
    requires has_deallocate<Upstream, queue>
  {
    if (!p) return;
    if (bin_type* const bin = bin_of(bytes, alignment))
      bin->deallocate(q, p, bytes, alignment);
    else
      upstream_.deallocate(q, p, bytes, alignment);
  }

  /// Memory usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    bin_type* const bin = bin_of(bytes, alignment);
    return bin ? bin->allocate_sync(bytes, alignment) : upstream_.allocate_sync(bytes, alignment);
  }

  /// Gives memory of `allocate_sync` back.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (!p) return;
    if (bin_type* const bin = bin_of(bytes, alignment))
      bin->deallocate_sync(p, bytes, alignment);
    else
      upstream_.deallocate_sync(p, bytes, alignment);
  }

  /// Bytes in the live blocks of all bins; what went to the upstream isn't counted.
  std::size_t in_use() const {
    std::size_t sum = 0;
    for (const bin_type& bin : bins_) sum += bin.in_use();
    return sum;
  }

  /// Whether both share their bins.
  friend bool operator==(const binning& a, const binning& b) noexcept { return a.bins_ == b.bins_; }

 private:
  // Null where the upstream serves it: no bytes, a bad alignment, or more than the largest block.
  bin_type* bin_of(std::size_t bytes, std::size_t alignment) noexcept {
    const std::size_t need = (std::max)(bytes, alignment), first = bins_.front().block_bytes();
    if (bytes == 0 || !detail::is_alignment(alignment) || need > bins_.back().block_bytes()) return nullptr;
    const int steps = static_cast<int>(std::bit_width((need - 1) / first));
    return &bins_[static_cast<std::size_t>(steps)];
  }

  Upstream upstream_;
  std::vector<bin_type> bins_;
};

static_assert(resource<binning<>>);

}  // namespace v0
}  // namespace heddle

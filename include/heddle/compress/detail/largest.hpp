// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/convert_loops.hpp>
#include <heddle/core/slice.hpp>

#include <algorithm>
#include <vector>

#if defined(__GNUC__) && !defined(__NVCOMPILER)
#define HEDDLE_DETAIL_VECTORS 1
#define HEDDLE_DETAIL_INLINE [[gnu::always_inline]] inline
#else
#define HEDDLE_DETAIL_INLINE inline
#endif

namespace heddle {
inline namespace v0 {
namespace detail {

inline constexpr std::uint32_t magnitude_mask = 0x7fffffffu, infinite_bits = 0x7f800000u;

// The entries of largest magnitude of a tensor that is looked at once, from first to last. Total order: larger bits of
// |v| first, then the lower index; so +0 and -0 are equal, and ties are the same on every run. Values must be finite.
// An element below limit() needn't be offered; the limit rises while better ones come, so that memory for twice the
// number wanted suffices and each element costs O(1) on average, in whatever order they are.
class largest {
 public:
  // At most `most` of n elements, none whose magnitude has bits below `from`.
  largest(std::size_t n, std::size_t most, std::uint32_t from)
      : most_((std::min)(most, n)), room_((std::min)(n, 2 * most_)), limit_(most_ ? from : ~std::uint32_t{0}) {
    keys_.reserve(room_);
  }

  std::uint32_t limit() const noexcept { return limit_; }
  std::size_t count() const noexcept { return keys_.size(); }

  // Offers elements [first, first + n), whose values begin at v.
  void offer(const float* v, std::size_t first, std::size_t n) {
    for (std::size_t j = 0; j < n; ++j) {
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(v[j]), magnitude = bits & magnitude_mask;
      if (magnitude < limit_) continue;
      // 31 bits of magnitude, 32 that fall with the index, 1 of sign.
      keys_.push_back(std::uint64_t{magnitude} << 33 | std::uint64_t{~static_cast<std::uint32_t>(first + j)} << 1 |
                      bits >> 31);
      if (keys_.size() == room_ && room_ > most_) shrink();
    }
  }

  // Entries in rising order of their index.
  void finish(std::vector<std::uint32_t>& index, std::vector<float>& value) {
    if (keys_.size() > most_) shrink();
    index.resize(keys_.size());
    value.resize(keys_.size());
    for (std::size_t j = 0; j < keys_.size(); ++j) {
      index[j] = ~static_cast<std::uint32_t>(keys_[j] >> 1);
      value[j] = std::bit_cast<float>(static_cast<std::uint32_t>(keys_[j] >> 33) |
                                      static_cast<std::uint32_t>(keys_[j] & 1) << 31);
    }
  }

 private:
  // Keeps the best; those who come later need a larger magnitude, since of equal ones the lower index wins.
  void shrink() {
    work_ = keys_;
    const auto last = work_.begin() + static_cast<std::ptrdiff_t>(most_ - 1);
    std::nth_element(work_.begin(), last, work_.end(), [](std::uint64_t a, std::uint64_t b) { return a > b; });
    const std::uint64_t least = *last;
    std::erase_if(keys_, [least](std::uint64_t k) { return k < least; });
    limit_ = static_cast<std::uint32_t>(least >> 33) + 1;
  }

  std::size_t most_, room_;
  std::uint32_t limit_;
  std::vector<std::uint64_t> keys_, work_;
};

inline constexpr std::size_t vector_block = 32;  // elements looked at together
#ifdef HEDDLE_DETAIL_VECTORS
/// @cond
using any_float_x8 = float __attribute__((vector_size(32)));  // eight floats on any processor
using any_int_x8 = std::int32_t __attribute__((vector_size(32)));
/// @endcond

// Whether any lane is set.
HEDDLE_DETAIL_INLINE bool any_of(const any_int_x8& mask) noexcept {
  std::uint64_t word[4];
  std::memcpy(word, &mask, sizeof word);
  return (word[0] | word[1] | word[2] | word[3]) != 0;
}

HEDDLE_DETAIL_INLINE std::size_t offer_blocks(const float* v, std::size_t n, largest& out) {
  std::size_t i = 0;
  for (; i + vector_block <= n; i += vector_block) {
    any_int_x8 limit{}, hit{}, magnitude{};
    limit += static_cast<std::int32_t>((std::min)(out.limit(), magnitude_mask));
    magnitude += static_cast<std::int32_t>(magnitude_mask);
    for (std::size_t j = 0; j < vector_block; j += 8) {
      any_int_x8 bits;
      std::memcpy(&bits, v + i + j, sizeof bits);
      hit |= (bits & magnitude) >= limit;
    }
    if (any_of(hit)) out.offer(v + i, i, vector_block);
  }
  return i;
}
#else
inline std::size_t offer_blocks(const float*, std::size_t, largest&) { return 0; }
#endif

// The largest bits of |x|; infinite_bits or more if an element is not finite.
HEDDLE_DETAIL_INLINE std::uint32_t peak_loop(const float* x, std::size_t n) noexcept {
  std::uint32_t most = 0;
  std::size_t i = 0;
#ifdef HEDDLE_DETAIL_VECTORS
  any_int_x8 peak{}, magnitude{};
  magnitude += static_cast<std::int32_t>(magnitude_mask);
  for (; i + 8 <= n; i += 8) {
    any_int_x8 bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits = bits & magnitude;
    const any_int_x8 greater = bits > peak;
    peak = (bits & greater) | (peak & ~greater);
  }
  std::uint32_t lanes[8];
  std::memcpy(lanes, &peak, sizeof lanes);
  for (const std::uint32_t lane : lanes) most = (std::max)(most, lane);
#endif
  for (; i < n; ++i) most = (std::max)(most, std::bit_cast<std::uint32_t>(x[i]) & magnitude_mask);
  return most;
}

#if defined(__x86_64__) && defined(HEDDLE_DETAIL_VECTORS)
/// @cond
__attribute__((target("avx2"))) inline std::size_t offer_blocks_avx2(const float* v, std::size_t n, largest& out) {
  return offer_blocks(v, n, out);
}
__attribute__((target("avx2"))) inline std::uint32_t peak_avx2(const float* x, std::size_t n) noexcept {
  return peak_loop(x, n);
}
/// @endcond
#endif

// Offers a whole tensor.
inline void offer_all(const float* v, std::size_t n, largest& out) {
#if defined(__x86_64__) && defined(HEDDLE_DETAIL_VECTORS)
  const std::size_t done = best_isa() == isa::portable ? offer_blocks(v, n, out) : offer_blocks_avx2(v, n, out);
#else
  const std::size_t done = offer_blocks(v, n, out);
#endif
  out.offer(v + done, done, n - done);
}

inline std::uint32_t peak_bits(const float* x, std::size_t n) noexcept {
#if defined(__x86_64__) && defined(HEDDLE_DETAIL_VECTORS)
  if (best_isa() != isa::portable) return peak_avx2(x, n);
#endif
  return peak_loop(x, n);
}

// The k elements of largest magnitude of a tensor, as indices in rising order.
inline void select_largest(slice<const float> v, std::size_t k, std::vector<std::uint32_t>& chosen) {
  largest out(v.count, k, 0);
  offer_all(v.data, v.count, out);
  std::vector<float> values;
  out.finish(chosen, values);
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

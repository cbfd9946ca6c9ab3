// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/convert_loops.hpp>
#include <heddle/core/slice.hpp>

#include <algorithm>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

inline constexpr std::uint32_t magnitude_mask = 0x7fffffffu, infinite_bits = 0x7f800000u;

// The entries of largest magnitude of a tensor that is looked at once, from first to last. Total order: larger bits of
// |v| first, then the lower index; so +0 and -0 are equal, and ties are the same on every run. Values must be finite.
// An element below limit() needn't be offered; the limit rises while better ones come, so that memory for twice the
// number wanted suffices and each element costs O(1) on average, in whatever order they are.
// A template, so that its algorithms cost only those who select.
template <class Key = std::uint64_t> class basic_largest {
 public:
  // At most `most` of n elements, none whose magnitude has bits below `from`.
  basic_largest(std::size_t n, std::size_t most, std::uint32_t from)
      : most_((std::min)(most, n)), room_((std::min)(n, 2 * most_)), limit_(most_ ? from : ~std::uint32_t{0}) {}

  std::uint32_t limit() const noexcept { return limit_; }
  std::size_t count() const noexcept { return count_; }

  // Offers elements [first, first + n), whose values begin at v.
  void offer(const float* v, std::size_t first, std::size_t n) {
    constexpr std::size_t block = 32;
    for (; n > block; v += block, first += block, n -= block) offer(v, first, block);
    if (keys_.size() < count_ + n) keys_.resize((std::max)(2 * keys_.size(), count_ + 8 * block));
    std::uint64_t* const keys = keys_.data();
    std::size_t count = count_;
    for (std::size_t j = 0; j < n; ++j) {  // no branch: in a block that has one there may be many
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(v[j]), magnitude = bits & magnitude_mask;
      // 31 bits of magnitude, 32 that fall with the index, 1 of sign.
      keys[count] =
          std::uint64_t{magnitude} << 33 | std::uint64_t{~static_cast<std::uint32_t>(first + j)} << 1 | bits >> 31;
      count += magnitude >= limit_;
    }
    count_ = count;
    if (count_ >= room_ + block && room_ > most_) shrink();
  }

  // Entries in rising order of their index.
  void finish(std::vector<std::uint32_t>& index, std::vector<float>& value) {
    if (count_ > most_) shrink();
    index.resize(count_);
    value.resize(count_);
    for (std::size_t j = 0; j < count_; ++j) {
      index[j] = ~static_cast<std::uint32_t>(keys_[j] >> 1);
      value[j] = std::bit_cast<float>(static_cast<std::uint32_t>(keys_[j] >> 33) |
                                      static_cast<std::uint32_t>(keys_[j] & 1) << 31);
    }
  }

 private:
  // Keeps the best; those who come later need a larger magnitude, since of equal ones the lower index wins. The bin of
  // the leading bits in which the last of them is found by counting; only that bin is ordered.
  void shrink() {
    constexpr int shift = 53;  // exponent and 3 bits of the mantissa
    std::uint32_t bins[std::size_t{1} << (64 - shift)] = {};
    for (std::size_t j = 0; j < count_; ++j) ++bins[keys_[j] >> shift];
    std::size_t bin = std::size(bins) - 1, left = most_;
    while (bins[bin] < left) left -= bins[bin--];
    work_.clear();
    for (std::size_t j = 0; j < count_; ++j) {
      if (keys_[j] >> shift == bin) work_.push_back(keys_[j]);
    }
    const auto last = work_.begin() + static_cast<std::ptrdiff_t>(left - 1);
    std::nth_element(work_.begin(), last, work_.end(), [](Key a, Key b) { return a > b; });
    const std::uint64_t least = *last;
    std::size_t kept = 0;
    for (std::size_t j = 0; j < count_; ++j) {
      const std::uint64_t key = keys_[j];
      keys_[kept] = key;
      kept += key >= least;
    }
    count_ = kept;
    limit_ = static_cast<std::uint32_t>(least >> 33) + 1;
  }

  std::size_t most_, room_, count_ = 0;
  std::uint32_t limit_;
  std::vector<Key> keys_, work_;
};
using largest = basic_largest<>;

// The largest bits of |x|; infinite_bits or more if an element is not finite.
inline std::uint32_t peak_portable(const float* x, std::size_t n) noexcept {
  std::uint32_t most = 0;
  for (std::size_t i = 0; i < n; ++i) most = (std::max)(most, std::bit_cast<std::uint32_t>(x[i]) & magnitude_mask);
  return most;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
/// @cond
// Offers what begins with whole blocks; returns how many elements those have.
template <class Largest>
__attribute__((target("avx2"))) inline std::size_t offer_avx2(const float* v, std::size_t first, std::size_t n,
                                                              Largest& out) {
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    int_x8 limit{}, hit{}, magnitude{};
    limit += static_cast<int>((std::min)(out.limit(), magnitude_mask));
    magnitude += static_cast<int>(magnitude_mask);
    for (std::size_t j = 0; j < 32; j += 8) {
      int_x8 bits;
      std::memcpy(&bits, v + i + j, sizeof bits);
      hit |= (bits & magnitude) >= limit;
    }
    std::uint64_t word[4];
    std::memcpy(word, &hit, sizeof word);
    if (word[0] | word[1] | word[2] | word[3]) out.offer(v + i, first + i, 32);
  }
  return i;
}

__attribute__((target("avx2"))) inline std::uint32_t peak_avx2(const float* x, std::size_t n) noexcept {
  int_x8 peak{}, magnitude{};
  magnitude += static_cast<int>(magnitude_mask);
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    int_x8 bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= magnitude;
    const int_x8 greater = bits > peak;
    peak = (bits & greater) | (peak & ~greater);
  }
  std::uint32_t lanes[8], most = peak_portable(x + i, n - i);
  std::memcpy(lanes, &peak, sizeof lanes);
  for (const std::uint32_t lane : lanes) most = (std::max)(most, lane);
  return most;
}
/// @endcond
#endif

inline std::uint32_t peak_bits(const float* x, std::size_t n) noexcept {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
  if (best_isa() != isa::portable) return peak_avx2(x, n);
#endif
  return peak_portable(x, n);
}

// Offers elements [first, first + n) of a tensor, whose values begin at v.
template <class Largest> void offer_all(const float* v, std::size_t first, std::size_t n, Largest& out) {
  std::size_t done = 0;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__NVCOMPILER)
  if (best_isa() != isa::portable) done = offer_avx2(v, first, n, out);
#endif
  out.offer(v + done, first + done, n - done);
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

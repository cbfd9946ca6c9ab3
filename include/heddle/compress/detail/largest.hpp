// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/convert_loops.hpp>
#include <heddle/core/slice.hpp>

#include <algorithm>
#include <utility>
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
    for (; n > block; v += block, first += block, n -= block) offer(v, first, block);
    std::uint64_t* const keys = room_for(n);
    std::size_t count = count_;
    for (std::size_t j = 0; j < n; ++j) {  // no branch: there may be many
      keys[count] = key_of(v[j], first + j);
      count += (std::bit_cast<std::uint32_t>(v[j]) & magnitude_mask) >= limit_;
    }
    keep(count);
  }
  // The same of the elements of such a block, of which it is known which reach the limit: a bit each.
  void offer_those(const float* v, std::size_t first, std::uint32_t those) {
    if (limit_ > magnitude_mask) return;  // nothing reaches it, though vectors compare with less
    std::uint64_t* const keys = room_for(block);
    std::size_t count = count_;
    for (; those; those &= those - 1) {
      const auto j = static_cast<std::size_t>(std::countr_zero(those));
      keys[count++] = key_of(v[j], first + j);
    }
    keep(count);
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
  static constexpr std::size_t block = 32;

  // 31 bits of magnitude, 32 that fall with the index, 1 of sign.
  static std::uint64_t key_of(float v, std::size_t index) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(v);
    return std::uint64_t{bits & magnitude_mask} << 33 | std::uint64_t{~static_cast<std::uint32_t>(index)} << 1 |
           bits >> 31;
  }
  // As std::unique_ptr, which all who include this would have to compile.
  struct memory {
    Key* data = nullptr;
    memory() = default;
    memory(memory&& other) noexcept : data(std::exchange(other.data, nullptr)) {}
    memory& operator=(memory&& other) noexcept {
      std::swap(data, other.data);
      return *this;
    }
    ~memory() { delete[] data; }
    Key& operator[](std::size_t j) const noexcept { return data[j]; }
  };
  // Memory for as many as there ever are, which nobody clears: a few or a few million. It is there when the first come.
  Key* room_for(std::size_t n) {
    if (size_ < count_ + n) {
      const std::size_t size = (std::max)(room_ + 2 * block, count_ + n);
      Key* const more = new Key[size];
      std::copy_n(keys_.data, count_, more);
      delete[] keys_.data;
      keys_.data = more;
      size_ = size;
    }
    return keys_.data;
  }
  void keep(std::size_t count) {
    count_ = count;
    if (count_ >= room_ + block && room_ > most_) shrink();
  }
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

  std::size_t most_, room_, size_ = 0, count_ = 0;
  std::uint32_t limit_;
  memory keys_;
  std::vector<Key> work_;
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
// Offers those of 32 elements that reach the limit, of which there are some.
template <class Largest>
__attribute__((target("avx2"))) inline void offer_those_avx2(const float* v, std::size_t first, Largest& out) {
  int_x8 limit{}, magnitude{};
  limit += static_cast<int>((std::min)(out.limit(), magnitude_mask));
  magnitude += static_cast<int>(magnitude_mask);
  std::uint32_t those = 0;
  for (std::size_t j = 0; j < 32; j += 8) {
    int_x8 bits;
    std::memcpy(&bits, v + j, sizeof bits);
    const int_x8 hit = (bits & magnitude) >= limit;
    float_x8 signs;
    std::memcpy(&signs, &hit, sizeof signs);
    those |= static_cast<std::uint32_t>(__builtin_ia32_movmskps256(signs)) << j;
  }
  out.offer_those(v, first, those);
}

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
    if (word[0] | word[1] | word[2] | word[3]) offer_those_avx2(v + i, first + i, out);
  }
  return i;
}

__attribute__((target("avx2"))) inline std::uint32_t peak_avx2(const float* x, std::size_t n) noexcept {
  constexpr std::size_t side_by_side = 4;  // none waits for another
  int_x8 peak[side_by_side] = {}, magnitude{};
  magnitude += static_cast<int>(magnitude_mask);
  std::size_t i = 0;
  for (; i + 8 * side_by_side <= n; i += 8 * side_by_side) {
    for (std::size_t k = 0; k < side_by_side; ++k) {
      int_x8 bits;
      std::memcpy(&bits, x + i + 8 * k, sizeof bits);
      bits &= magnitude;
      peak[k] = bits > peak[k] ? bits : peak[k];
    }
  }
  std::uint32_t lanes[8 * side_by_side], most = peak_portable(x + i, n - i);
  std::memcpy(lanes, peak, sizeof lanes);
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

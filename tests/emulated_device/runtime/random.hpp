// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

namespace emulated {

// splitmix64: any seed is good, and it costs a nanosecond.
class generator {
 public:
  explicit generator(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // 0 .. n - 1; n > 0
  std::uint64_t below(std::uint64_t n) {
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(next()) * n) >> 64);
  }
  bool coin() {
    if (bits_ == 1) bits_ = next() | (std::uint64_t{1} << 63);
    const bool b = bits_ & 1;
    bits_ >>= 1;
    return b;
  }
  std::uint64_t state() const { return state_; }

 private:
  std::uint64_t state_;
  std::uint64_t bits_ = 1;
};

}  // namespace emulated

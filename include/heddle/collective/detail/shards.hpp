// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/detail/pieces.hpp>
#include <heddle/core/archive.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

// The optimizer state of what a rank owns; state(slot, at) is where it begins.
template <class Piece, class State>
void pack_shards(archive_writer& out, const std::vector<Piece>& pieces, std::size_t slots, State&& state) {
  out.put(static_cast<std::uint64_t>(pieces.size()));
  for (const Piece& p : pieces) {
    const std::uint64_t where[3] = {p.tensor, p.begin, p.count};
    for (const std::uint64_t x : where) out.put(x);
    for (std::size_t k = 0; k < slots; ++k) out.put(state(k, p.state), p.count);
  }
}

// Puts it together again, from the files of ranks that may have owned something else.
template <class Piece> class shards {
 public:
  shards(const std::vector<Piece>& pieces, std::size_t slots) : pieces_(pieces), slots_(slots) {
    for (const Piece& p : pieces) missing_ += p.count;
    elements_ = missing_;
    values_.resize(elements_ * slots);
    have_.resize(elements_);
  }

  bool complete() const noexcept { return missing_ == 0; }
  // Of a slot, in the order of the pieces.
  const float* values(std::size_t slot) const noexcept { return values_.data() + slot * elements_; }
  std::size_t elements() const noexcept { return elements_; }

  void read(archive_reader& in) {
    std::vector<float> block;
    const auto next = [&] { return static_cast<std::size_t>(in.get<std::uint64_t>()); };
    for (std::size_t n = next(); n; --n) {
      const std::size_t tensor = next(), begin = next(), count = next();
      block.resize(count * slots_);
      for (std::size_t k = 0; k < slots_; ++k) in.get(block.data() + k * count, count);
      for (const Piece& p : pieces_) {
        const std::size_t from = (std::max)(begin, p.begin), to = (std::min)(begin + count, p.begin + p.count);
        if (p.tensor != tensor || from >= to) continue;
        const std::size_t at = p.state + from - p.begin;
        for (std::size_t i = at; i < at + to - from; ++i) {  // a file may be given twice
          missing_ -= !have_[i];
          have_[i] = true;
        }
        for (std::size_t k = 0; k < slots_; ++k) {
          std::copy_n(block.data() + k * count + from - begin, to - from, values_.data() + k * elements_ + at);
        }
      }
    }
  }

 private:
  const std::vector<Piece>& pieces_;
  std::size_t slots_, elements_ = 0, missing_ = 0;
  std::vector<float> values_;
  std::vector<bool> have_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

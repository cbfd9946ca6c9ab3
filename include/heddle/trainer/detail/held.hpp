// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/archive.hpp>
#include <heddle/core/slice.hpp>
#include <heddle/memory/buffer.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// A run of elements of a tensor whose compressor state is on this rank.
struct held_part {
  std::size_t tensor, begin, count;
  std::size_t owners;  // ranks that have state of these elements, each its own
  std::size_t extra;   // further numbers
  std::size_t at = 0, extra_at = 0;

  bool same(const held_part& o) const noexcept {
    return tensor == o.tensor && begin == o.begin && count == o.count && extra == o.extra;
  }
};

// The state of a packet compressor: slot by slot the elements of all parts, then all their further numbers.
template <class Memory> class held_state {
 public:
  held_state(const Memory& memory, std::size_t slots, std::vector<held_part> parts)
      : slots_(slots), parts_(std::move(parts)), values_(memory, lay_out()) {
    std::fill(values_.begin(), values_.end(), 0.0f);
  }

  std::size_t bytes() const noexcept { return values_.bytes(); }

  // Pointers to the state of the part of `tensor` that begins at `begin`: one for each slot, and the further numbers.
  void pointers(std::size_t tensor, std::size_t begin, float** to) noexcept {
    const held_part& p = *std::find_if(first_of(tensor), parts_.cend(),
                                       [&](const held_part& x) { return x.tensor != tensor || x.begin == begin; });
    for (std::size_t k = 0; k < slots_; ++k) to[k] = values_.data() + k * elements_ + p.at;
    to[slots_] = values_.data() + slots_ * elements_ + p.extra_at;
  }

  // What is here of a slot of a tensor, part after part.
  slice<const float> view(std::size_t tensor, std::size_t slot) const noexcept {
    std::size_t n = 0;
    const auto first = first_of(tensor);
    for (auto p = first; p != parts_.end() && p->tensor == tensor; ++p) n += p->count;
    return {n ? values_.data() + slot * elements_ + first->at : nullptr, n};
  }

  void pack(archive_writer& out) const {
    out.put(static_cast<std::uint64_t>(parts_.size()));
    for (const held_part& p : parts_) {
      for (const std::size_t x : {p.tensor, p.begin, p.count, p.extra}) out.put(static_cast<std::uint64_t>(x));
      for (std::size_t k = 0; k < slots_; ++k) out.put(values_.data() + k * elements_ + p.at, p.count);
      out.put(values_.data() + slots_ * elements_ + p.extra_at, p.extra);
    }
  }

  // What a checkpoint holds for this rank, to be taken over when all files are read.
  class restored {
   public:
    restored(const held_state& to, int ranks, int saved) : to_(to), left_(saved), sums_(to.slots_ * to.elements_) {
      may_be_own_ = ranks == saved;
    }

    // Whether no other file is needed.
    bool complete() const noexcept { return left_ == 0 || !values_.empty(); }

    // Reads a rank's file; with as many ranks as saved the own one comes first. Where this rank holds the same as when
    // it was saved it goes on bit for bit; else what all held of an element is divided evenly among its owners, and the
    // further numbers are zero.
    void read(archive_reader& in) {
      const auto next = [&] { return static_cast<std::size_t>(in.get<std::uint64_t>()); };
      std::vector<float> exact(may_be_own_ ? to_.values_.size() : 0);
      const std::size_t n = next();
      bool own = may_be_own_ && n == to_.parts_.size();
      may_be_own_ = false;
      std::vector<float> block, extra;
      for (std::size_t j = 0; j < n; ++j) {
        held_part p{next(), next(), next(), 1, next()};
        block.resize(p.count);
        own = own && p.same(to_.parts_[j]);
        for (std::size_t k = 0; k < to_.slots_; ++k) {
          in.get(block.data(), p.count);
          if (own) std::copy(block.begin(), block.end(), exact.data() + k * to_.elements_ + to_.parts_[j].at);
          add(p, block.data(), k);
        }
        extra.resize(p.extra);
        in.get(extra.data(), p.extra);
        if (own)
          std::copy(extra.begin(), extra.end(), exact.data() + to_.slots_ * to_.elements_ + to_.parts_[j].extra_at);
      }
      --left_;
      if (own) values_ = std::move(exact);
    }

    // The state to go on with.
    std::vector<float> take() {
      if (!values_.empty()) return std::move(values_);
      values_.assign(to_.values_.size(), 0.0f);
      for (const held_part& p : to_.parts_) {
        for (std::size_t k = 0; k < to_.slots_; ++k) {
          const std::size_t at = k * to_.elements_ + p.at;
          for (std::size_t i = at; i < at + p.count; ++i) {
            values_[i] = static_cast<float>(sums_[i] / static_cast<double>(p.owners));
          }
        }
      }
      return std::move(values_);
    }

   private:
    void add(const held_part& from, const float* values, std::size_t slot) {
      for (const held_part& p : to_.parts_) {
        if (p.tensor != from.tensor) continue;
        const std::size_t first = (std::max)(p.begin, from.begin);
        const std::size_t last = (std::min)(p.begin + p.count, from.begin + from.count);
        for (std::size_t i = first; i < last; ++i) {
          sums_[slot * to_.elements_ + p.at + i - p.begin] += values[i - from.begin];
        }
      }
    }

    const held_state& to_;
    int left_;
    bool may_be_own_;
    std::vector<double> sums_;
    std::vector<float> values_;
  };

  // Takes over what a checkpoint gave, once it is known to be whole on all ranks.
  void stage(std::vector<float> values) noexcept { staged_ = std::move(values); }
  void restore() noexcept {
    std::copy(staged_.begin(), staged_.end(), values_.begin());
    staged_ = {};
  }

 private:
  std::size_t lay_out() {
    std::sort(parts_.begin(), parts_.end(), [](const held_part& a, const held_part& b) {
      return a.tensor != b.tensor ? a.tensor < b.tensor : a.begin < b.begin;
    });
    std::size_t extra = 0;
    for (held_part& p : parts_) {
      p.at = elements_;
      p.extra_at = extra;
      elements_ += p.count;
      extra += p.extra;
    }
    return slots_ * elements_ + extra;
  }
  auto first_of(std::size_t tensor) const noexcept {
    return std::partition_point(parts_.begin(), parts_.end(), [&](const held_part& p) { return p.tensor < tensor; });
  }

  std::size_t slots_, elements_ = 0;
  std::vector<held_part> parts_;  // in the order of tensors, whatever buckets they travel in
  buffer<float, Memory> values_;
  std::vector<float> staged_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

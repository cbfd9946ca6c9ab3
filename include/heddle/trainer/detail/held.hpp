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
    return tensor == o.tensor && begin == o.begin && count == o.count && owners == o.owners && extra == o.extra;
  }
};

// The state of a packet compressor: slot by slot the elements of all parts, then all their further numbers.
template <class Memory> class held_state {
  template <class Element> using list = std::vector<typename dependent<Element, Memory>::type>;

 public:
  held_state(const Memory& memory, std::size_t slots, list<held_part> parts)
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

  // A copy of the state of a tensor that is here as a whole, and pointers to it.
  std::vector<float> copy(std::size_t tensor, float** to) const {
    const held_part& p = *first_of(tensor);
    std::vector<float> all(slots_ * p.count + p.extra);
    for (std::size_t k = 0; k <= slots_; ++k) {
      to[k] = all.data() + k * p.count;
      std::copy_n(values_.data() + k * elements_ + (k < slots_ ? p.at : p.extra_at), k < slots_ ? p.count : p.extra,
                  to[k]);
    }
    return all;
  }

  // What is here of a slot of a tensor, part after part.
  slice<const float> view(std::size_t tensor, std::size_t slot) const noexcept {
    std::size_t n = 0;
    const auto first = first_of(tensor);
    for (auto p = first; p != parts_.end() && p->tensor == tensor; ++p) n += p->count;
    return {n ? values_.data() + slot * elements_ + first->at : nullptr, n};
  }

  // sends(tensor): whether it is compressed, so that something may be held.
  template <class Sends> void pack(archive_writer& out, Sends&& sends) const {
    out.put(static_cast<std::uint64_t>(parts_.size()));
    for (const held_part& p : parts_) {
      const std::size_t sent = strays_ || sends(p.tensor);
      for (const std::size_t x : {p.tensor, p.begin, p.count, p.owners, p.extra, sent})
        out.put(static_cast<std::uint64_t>(x));
      for (std::size_t k = 0; k < slots_; ++k) out.put(values_.data() + k * elements_ + p.at, p.count);
      out.put(values_.data() + slots_ * elements_ + p.extra_at, p.extra);
    }
  }

  // What a checkpoint holds for this rank, to be taken over when all files are read. Ranks that hold the same as when
  // it was saved go on bit for bit, if all of them do: then each reads its own file only. Else each reads all of them, in
  // the same order: what all held of an element is divided evenly among its owners, and the further numbers are zero.
  class restored {
   public:
    restored(const held_state& to, bool exact)
        : to_(to), exact_(exact), values_(exact ? to.values_.size() : 0), sums_(exact ? 0 : to.slots_ * to.elements_) {}

    // sends(tensor): whether it is compressed now. What is held of one that isn't any more has strayed.
    template <class Sends> void read(archive_reader& in, Sends&& sends) {
      const auto next = [&] { return static_cast<std::size_t>(in.get<std::uint64_t>()); };
      const std::size_t n = next();
      bool own = exact_ && n == to_.parts_.size();
      std::vector<float> block;
      for (std::size_t j = 0; j < n; ++j) {
        const held_part p{next(), next(), next(), next(), next()};
        const bool strayed = next() != 0 && to_.slots_ != 0 && !sends(p.tensor);
        strays_ |= strayed;
        own = own && !strayed && p.same(to_.parts_[j]);
        for (std::size_t k = 0; k <= to_.slots_; ++k) {
          const bool further = k == to_.slots_;
          block.resize(further ? p.extra : p.count);
          in.get(block.data(), block.size());
          if (own)
            std::copy(block.begin(), block.end(),
                      values_.data() + k * to_.elements_ + (further ? to_.parts_[j].extra_at : to_.parts_[j].at));
          else if (!exact_ && !further)
            add(p, block.data(), k);
        }
      }
      settled_ = own || !exact_;
    }

    // Whether this rank can go on with it.
    bool settled() const noexcept { return settled_; }
    // Whether some of it is of tensors that travel dense now.
    bool strays() const noexcept { return strays_; }

    // The state to go on with.
    std::vector<float> take() {
      if (exact_) return std::move(values_);
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
    bool exact_, settled_ = false, strays_ = false;
    std::vector<float> values_;
    std::vector<double> sums_;
  };

  // Takes over what a checkpoint gave, once it is known to be whole on all ranks.
  void stage(restored& from) {
    staged_settled_ = from.settled();
    staged_strays_ = from.strays();
    staged_ = from.take();
  }
  bool staged_settled() const noexcept { return staged_settled_; }
  bool staged_strays() const noexcept { return staged_strays_; }
  void restore() noexcept {
    std::copy(staged_.begin(), staged_.end(), values_.begin());
    staged_ = {};
    strays_ = staged_strays_;
  }

  // Whether something is held, in equal parts on all ranks, of a tensor that travels dense.
  bool strays() const noexcept { return strays_; }
  void released() noexcept { strays_ = false; }

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
  list<held_part> parts_;  // in the order of tensors, whatever buckets they travel in
  buffer<float, Memory> values_;
  std::vector<float> staged_;
  bool staged_settled_ = false, staged_strays_ = false, strays_ = false;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

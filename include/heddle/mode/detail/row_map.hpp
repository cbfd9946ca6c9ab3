// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Deals the rows of several tensors out to servers, a few consecutive rows at a time, so that rows that are used more
// than others, such as those of common words, which lie together, are every server's. Numbers them by server, then by
// tensor, then in order.
class row_map {
 public:
  struct shape {
    std::size_t count = 0, width = 1;  // elements; of a row, the last one may be shorter
  };
  struct row {
    std::size_t number = 0, tensor = 0, begin = 0, count = 0;  // elements [begin, begin + count) of the tensor
    std::size_t at = 0;                                        // elements of all rows of smaller numbers
  };

  row_map(const std::vector<shape>& tensors, int servers) : servers_(static_cast<std::size_t>(servers)) {
    // A tensor's first rows go to the server that has the least so far.
    std::vector<std::size_t> load(servers_);
    for (const shape& s : tensors) {
      const std::size_t rows = (s.count + s.width - 1) / s.width;
      const auto turn = static_cast<std::size_t>(std::min_element(load.begin(), load.end()) - load.begin());
      tensors_.push_back(
          {s.count, s.width, rows, elements_, turn, std::clamp<std::size_t>(rows / servers_ / 8, 1, 16)});
      rows_ += rows;
      elements_ += s.count;
      for (std::size_t k = 0; k < servers_; ++k) load[k] += dealt(tensors_.back(), k).elements;
    }
    run next;
    for (std::size_t k = 0; k < servers_; ++k) {
      for (const placed& t : tensors_) {
        runs_.push_back(next);
        const share mine = dealt(t, k);
        next.first += mine.rows;
        next.at += mine.elements;
      }
    }
    runs_.push_back(next);
  }

  std::size_t rows() const noexcept { return rows_; }
  std::size_t elements() const noexcept { return elements_; }
  // The rows [first(k), first(k + 1)) are server k's, of which those of a tensor [first(k, t), first(k, t + 1)).
  std::size_t first(int server, std::size_t tensor = 0) const noexcept {
    return runs_[static_cast<std::size_t>(server) * tensors_.size() + tensor].first;
  }
  // Where the elements of a row begin, also of the one behind the last.
  std::size_t start(std::size_t number) const noexcept { return number == rows_ ? elements_ : (*this)[number].at; }
  // Elements of the tensors before it, and its rows.
  std::size_t before(std::size_t tensor) const noexcept { return tensors_[tensor].before; }
  std::size_t rows_of(std::size_t tensor) const noexcept { return tensors_[tensor].rows; }
  // The number of a tensor's row i.
  std::size_t number(std::size_t tensor, std::size_t i) const noexcept {
    const placed& t = tensors_[tensor];
    const std::size_t block = i / t.block, server = (block + t.turn) % servers_;
    return runs_[server * tensors_.size() + tensor].first + block / servers_ * t.block + i % t.block;
  }

  row operator[](std::size_t number) const noexcept { return in(run_of(number), number); }
  // f(row) for rows [first, last).
  template <class Function> void each(std::size_t first, std::size_t last, Function&& f) const {
    for (std::size_t r = first, k = run_of(first); r < last; ++r) {
      while (runs_[k + 1].first <= r) ++k;
      f(in(k, r));
    }
  }

 private:
  struct placed {
    std::size_t count, width, rows, before;
    std::size_t turn, block;  // the server of the first rows; rows dealt at a time
  };
  struct share {
    std::size_t rows, elements;
  };
  struct run {  // a tensor's rows on a server
    std::size_t first = 0, at = 0;
  };

  // The first of a tensor's blocks that a server has.
  std::size_t first_block(const placed& t, std::size_t server) const noexcept {
    return (server + servers_ - t.turn) % servers_;
  }
  share dealt(const placed& t, std::size_t server) const noexcept {
    const std::size_t blocks = (t.rows + t.block - 1) / t.block, first = first_block(t, server);
    if (first >= blocks) return {0, 0};
    const std::size_t mine = (blocks - 1 - first) / servers_ + 1;
    const bool last = first + (mine - 1) * servers_ == blocks - 1;  // that block, and its last row, may be shorter
    const std::size_t rows = mine * t.block - (last ? blocks * t.block - t.rows : 0);
    return {rows, rows * t.width - (last ? t.rows * t.width - t.count : 0)};
  }
  std::size_t run_of(std::size_t number) const noexcept {
    // Of runs that begin with the same row all but the last are empty.
    const auto behind =
        std::upper_bound(runs_.begin(), runs_.end(), number, [](std::size_t x, const run& r) { return x < r.first; });
    return static_cast<std::size_t>(behind - runs_.begin()) - 1;
  }
  row in(std::size_t k, std::size_t number) const noexcept {
    const std::size_t server = k / tensors_.size(), tensor = k % tensors_.size();
    const placed& t = tensors_[tensor];
    const std::size_t i = number - runs_[k].first;
    const std::size_t block = first_block(t, server) + i / t.block * servers_;
    const std::size_t begin = (block * t.block + i % t.block) * t.width;
    return {number, tensor, begin, (std::min)(t.width, t.count - begin), runs_[k].at + i * t.width};
  }

  std::size_t servers_;
  std::vector<placed> tensors_;
  std::size_t rows_ = 0, elements_ = 0;
  std::vector<run> runs_;  // by server, then tensor; at last what is behind all
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

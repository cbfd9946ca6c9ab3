// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Numbers the rows of several tensors one after the other, and gives each server an equal run of them.
class row_map {
 public:
  struct shape {
    std::size_t count = 0, width = 1;  // elements; of a row, the last one may be shorter
  };
  struct row {
    std::size_t number = 0, tensor = 0, begin = 0, count = 0;  // elements [begin, begin + count) of the tensor
    std::size_t at = 0;                                        // of its first element among those of all tensors
  };

  row_map(const std::vector<shape>& tensors, int servers) {
    for (const shape& s : tensors) {
      tensors_.push_back({s.count, s.width, rows_, elements_});
      rows_ += (s.count + s.width - 1) / s.width;
      elements_ += s.count;
    }
    // By elements: a server begins with the first row that begins behind those of the servers before it.
    for (int k = 0; k <= servers; ++k) {
      const auto n = static_cast<std::size_t>(servers), i = static_cast<std::size_t>(k);
      first_.push_back(row_from(elements_ / n * i + elements_ % n * i / n));
    }
  }

  std::size_t rows() const noexcept { return rows_; }
  std::size_t elements() const noexcept { return elements_; }
  // The rows [first(k), first(k + 1)) are server k's.
  std::size_t first(int server) const noexcept { return first_[static_cast<std::size_t>(server)]; }
  // Where the elements of a row begin, also of the one behind the last.
  std::size_t start(std::size_t r) const noexcept { return r == rows_ ? elements_ : (*this)[r].at; }
  std::size_t first_of(std::size_t tensor) const noexcept { return tensors_[tensor].row; }
  std::size_t rows_of(std::size_t tensor) const noexcept {
    return (tensor + 1 < tensors_.size() ? tensors_[tensor + 1].row : rows_) - tensors_[tensor].row;
  }

  row operator[](std::size_t r) const noexcept {
    const auto behind =
        std::upper_bound(tensors_.begin(), tensors_.end(), r, [](std::size_t x, const placed& t) { return x < t.row; });
    // Of tensors that begin with the same row all but the last are empty.
    return in(static_cast<std::size_t>(behind - tensors_.begin()) - 1, r);
  }
  // f(row) for rows [first, last).
  template <class Function> void each(std::size_t first, std::size_t last, Function&& f) const {
    if (first >= last) return;
    for (std::size_t r = first, t = (*this)[first].tensor; r < last; ++r) {
      while (t + 1 < tensors_.size() && tensors_[t + 1].row <= r) ++t;
      f(in(t, r));
    }
  }

 private:
  struct placed {
    std::size_t count, width, row, at;
  };
  row in(std::size_t t, std::size_t r) const noexcept {
    const placed& p = tensors_[t];
    const std::size_t begin = (r - p.row) * p.width;
    return {r, t, begin, (std::min)(p.width, p.count - begin), p.at + begin};
  }
  std::size_t row_from(std::size_t element) const noexcept {
    if (element >= elements_) return rows_;
    const auto behind = std::upper_bound(tensors_.begin(), tensors_.end(), element,
                                         [](std::size_t x, const placed& t) { return x < t.at; });
    const placed& p = *(behind - 1);
    return p.row + (element - p.at + p.width - 1) / p.width;
  }

  std::vector<placed> tensors_;
  std::size_t rows_ = 0, elements_ = 0;
  std::vector<std::size_t> first_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/detail/mix.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Rows of former pulls, each for some pushes of its worker. A place is its key's and others'.
template <class Key, std::size_t Dim> class hot_rows {
 public:
  explicit hot_rows(std::size_t places) : rows_(places) {}

  // Whether a key's row is here, after so many pushes; then it is copied.
  bool recall(Key key, std::uint64_t pushes, float* to) {
    if (rows_.empty()) return false;
    kept& c = at(key);
    if (c.until < pushes + 1 || c.key != key) return false;
    c.uses += c.uses < 255;
    std::memcpy(to, c.row, sizeof c.row);
    return true;
  }
  // Keeps a row that is as of a push, for so many more.
  void remember(Key key, const float* row, std::uint64_t as_of, std::uint64_t pushes, std::uint64_t more) {
    const std::uint64_t until = as_of + (std::min)(more, (std::numeric_limits<std::uint64_t>::max)() - as_of);
    if (rows_.empty() || until < pushes + 1) return;
    kept& c = at(key);
    if (c.until >= pushes + 1 && c.key != key && c.uses > 0) {
      --c.uses;
      return;
    }
    if (c.key != key) c.uses = 0;
    c.key = key;
    c.until = until;
    std::memcpy(c.row, row, sizeof c.row);
  }
  void clear() noexcept {
    for (kept& c : rows_) c.until = 0;
  }

 private:
  struct kept {
    Key key{};
    std::uint64_t until = 0;  // pushes; 0: nothing is here
    std::uint32_t uses = 0;   // a row that is used isn't given up for one that may not be
    float row[Dim] = {};
  };
  kept& at(Key key) noexcept { return rows_[mix(widen_key(key)) & (rows_.size() - 1)]; }
  std::vector<kept> rows_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

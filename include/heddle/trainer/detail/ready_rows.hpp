// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/detail/row_wire.hpp>

#include <algorithm>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// The rows of one server whose gradient is ready and hasn't been sent.
class ready_rows {
 public:
  // The map must outlive this.
  ready_rows(const row_map& map, int server) : map_(&map), server_(server) {}

  void add(std::size_t tensor) {
    const std::size_t first = map_->first(server_, tensor), last = map_->first(server_, tensor + 1);
    if (first == last) return;
    runs_.push_back({first, last});
    elements_ += map_->start(last) - map_->start(first);
  }
  std::size_t elements() const noexcept { return elements_; }
  // All of them; then there are none. gradient(row) points to a row's floats, or is null if it needn't be sent.
  template <class Gradient> row_writer take(Gradient&& gradient) {
    std::sort(runs_.begin(), runs_.end());
    row_writer out(false);
    const std::size_t base = map_->first(server_);
    for (const auto& [first, last] : std::exchange(runs_, {})) {
      map_->each(first, last, [&](const row_map::row& r) {
        if (const float* const g = gradient(r)) out.add(static_cast<std::uint32_t>(r.number - base), g, r.count);
      });
    }
    elements_ = 0;
    return out;
  }

 private:
  const row_map* map_;
  int server_;
  std::vector<std::pair<std::size_t, std::size_t>> runs_;
  std::size_t elements_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

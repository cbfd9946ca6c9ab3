// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/concept.hpp>

#include <memory>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Whether errors of parts number the ranks of the part. Those of threads know all by the numbers of threads::run.
template <class Comm> inline constexpr bool parts_count_anew = requires { requires Comm::parts_count_anew; };

// What a rank is part of on two levels: its run of consecutive ranks, and those that have its place in the other runs.
template <class Comm> struct level_pair {
  int group;
  Comm inside, across;
};

// The pairs of a communicator, made by splitting it when they are first asked for and kept as long as it or a copy that
// was made afterwards. Ranks without a counterpart in the last run, which may be shorter, are among themselves across.
template <class Comm> class level_cache {
 public:
  level_pair<Comm>& of(Comm& whole, int group) {
    if (group < 1)
      throw argument_error("heddle::levels: group is " + std::to_string(group) + ", allowed is 1 or above");
    using list = std::vector<std::shared_ptr<level_pair<Comm>>>;
    if (!all_) all_ = std::make_shared<list>();
    list& all = *static_cast<list*>(all_.get());
    for (const auto& p : all) {
      if (p->group == group) return *p;
    }
    const int rank = whole.rank(), size = whole.size(), columns = size - (size - 1) / group * group;
    Comm inside = whole.split(rank / group, rank);
    Comm across = whole.split((std::min)(rank % group, columns), rank);
    all.push_back(std::make_shared<level_pair<Comm>>(group, std::move(inside), std::move(across)));
    return *all.back();
  }

 private:
  std::shared_ptr<void> all_;  // a list, whose type only those compile who ask for a pair
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

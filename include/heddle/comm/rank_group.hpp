// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/tell_ranks.hpp>
#include <heddle/comm/detail/wrapper.hpp>

namespace heddle {
inline namespace v0 {

/// @brief A communicator of some of another one's ranks: those that give the same number, in the order of their ranks.
///
///     hd::rank_group inside(comm, comm.rank() / 4);    // four neighbours
///     hd::rank_group between(comm, comm.rank() % 4);   // one of each four
///
/// For communicators that can't be split themselves. A failure is everybody's, in all groups; errors name ranks of
/// the communicator underneath.
/// Wire:   what goes through it; the constructor tells each rank's number to all.
/// Sync:   the constructor and duplicate() are collective over all ranks of the communicator underneath: all groups
///         must make as many duplicates, in the same order, so all ranks build equal trainers on their groups.
/// Throws: what the communicator underneath throws.
/// @tparam Comm The communicator underneath, of which it makes a duplicate.
template <class Comm> class rank_group : public detail::wrapper<Comm> {
  using detail::wrapper<Comm>::inner_;

 public:
  /// @param whole The communicator underneath. @param number Which group this rank is in.
  rank_group(Comm& whole, int number) : detail::wrapper<Comm>(whole.duplicate()) {
    const std::vector<int> all = detail::tell_ranks(inner_, number);
    for (int r = 0; r < inner_.size(); ++r) {
      if (all[static_cast<std::size_t>(r)] != number) continue;
      if (r == inner_.rank()) rank_ = static_cast<int>(members_.size());
      members_.push_back(r);
    }
  }

  /// This rank among the group's.
  int rank() const noexcept { return rank_; }
  /// Number of ranks in the group.
  int size() const noexcept { return static_cast<int>(members_.size()); }
  /// A second communicator of the same groups; see above.
  rank_group duplicate() { return {inner_.duplicate(), members_, rank_}; }

  /// One round among the group's ranks; see the communicator concept.
  template <class Apply>
  void exchange(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    out_.assign(out.begin(), out.end());
    in_.assign(in.begin(), in.end());
    for (outgoing& m : out_) m.peer = member(m.peer);
    for (incoming& m : in_) m.peer = member(m.peer);
    inner_.exchange(h, out_, in_, detail::applying{apply, [] {}, [this](int peer) { return member(peer); }});
  }

 private:
  rank_group(Comm inner, std::vector<int> members, int rank)
      : detail::wrapper<Comm>(std::move(inner)), members_(std::move(members)), rank_(rank) {}

  int member(int peer) const {
    if (peer < 0 || peer >= size())
      throw argument_error("heddle::rank_group::exchange: peer " + std::to_string(peer) + " of a group of " +
                           std::to_string(size()));
    return members_[static_cast<std::size_t>(peer)];
  }

  std::vector<int> members_;  // their ranks underneath
  int rank_ = 0;
  std::vector<outgoing> out_;
  std::vector<incoming> in_;
};

}  // namespace v0
}  // namespace heddle

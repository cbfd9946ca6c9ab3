// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/wrapper.hpp>

#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief For debugging: before each call all ranks compare operation, count, type, reduction and number of the call.
///
/// The headers of messages are compared in any case, but only between ranks that send to each other, and only if the
/// communicator carries them. Here every rank learns of every difference before the first message, also where ranks
/// would wait for each other in vain.
/// Wire:   16 (P - 1) bytes per rank and call more, in one round.
/// Sync:   no rank begins a call before all have come to it; over a stream it waits for the stream.
/// Throws: comm_error on every rank, naming rank 0's call and that of the first rank which differs.
/// @tparam Comm The communicator underneath, held by value.
template <class Comm>
class fingerprint : public detail::wrapper<Comm> {
  using detail::wrapper<Comm>::inner_;

 public:
  /// Wraps a communicator.
  explicit fingerprint(Comm inner) : detail::wrapper<Comm>(std::move(inner)) {}

  /// A duplicate that compares its own calls.
  fingerprint duplicate() {
    compare({});
    return fingerprint(inner_.duplicate());
  }

  /// Compares; every collective calls it.
  void begin(const header& h) {
    compare(h);
    if constexpr (has_begin<Comm>) inner_.begin(h);
  }

  /// Forwards.
  template <class Apply>
  void exchange(header h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    inner_.exchange(h, out, in, std::forward<Apply>(apply));
  }

  /// Forwards.
  bool native_all_reduce(header h, const void* in, void* out, std::size_t count, const leaf& l)
    requires has_native_all_reduce<Comm>
  {
    return inner_.native_all_reduce(h, in, out, count, l);
  }

 private:
  void compare(const header& mine) {
    const auto ranks = static_cast<std::size_t>(this->size()), me = static_cast<std::size_t>(this->rank());
    calls_.assign(ranks, mine);
    if constexpr (stream_ordered<Comm>) {  // headers travel through the device's memory
      const std::size_t bytes = ranks * sizeof(header);
      auto* const there = static_cast<header*>(inner_.scratch(bytes));
      inner_.copy(there + me, &calls_[me], sizeof(header));
      gather(there, ranks, me);
      inner_.copy(calls_.data(), there, bytes);
      inner_.synchronize();
    } else {
      gather(calls_.data(), ranks, me);
    }
    for (std::size_t r = 1; r < ranks; ++r) {
      if (calls_[r].matches(calls_[0])) continue;
      const std::string text = "calls differ: rank 0 is in " + detail::describe(calls_[0]) + ", rank " +
                               std::to_string(r) + " is in " + detail::describe(calls_[r]);
      inner_.fail(text);
      throw comm_error(name_of(mine.kind), this->rank(), me == r ? 0 : static_cast<int>(r), text);
    }
  }

  // Every rank's header into its place.
  void gather(header* calls, std::size_t ranks, std::size_t me) {
    out_.clear();
    in_.clear();
    for (std::size_t step = 1; step < ranks; ++step) {
      out_.push_back({static_cast<int>((me + step) % ranks), &calls[me], sizeof(header), 1});
      const std::size_t from = (me + ranks - step) % ranks;
      in_.push_back({static_cast<int>(from), &calls[from], sizeof(header)});
    }
    inner_.exchange(header{.count = sizeof(header)}, out_, in_, [](std::span<const arrival>) {});
  }

  std::vector<header> calls_;  // of every rank
  std::vector<outgoing> out_;
  std::vector<incoming> in_;
};

}  // namespace v0
}  // namespace heddle

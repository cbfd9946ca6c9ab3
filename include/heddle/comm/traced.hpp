// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/wrapper.hpp>

#include <atomic>
#include <chrono>
#include <memory>

namespace heddle {
inline namespace v0 {

/// @brief Records each exchange and each native all-reduce: who, when, how long, what was sent.
///
/// A rank is a process of the timeline, a duplicate a thread of it.
/// @tparam Comm The communicator underneath, held by value.
/// @tparam Timeline heddle::timeline, or what has its `add`; borrowed, one for all ranks of a process.
template <class Comm, class Timeline>
class traced : public detail::wrapper<Comm> {
  using detail::wrapper<Comm>::inner_;
  using clock = std::chrono::steady_clock;

 public:
  /// @param inner The communicator underneath. @param to Where events go; must outlive this and its duplicates.
  traced(Comm inner, Timeline& to) : traced(std::move(inner), to, std::make_shared<std::atomic<int>>(0)) {}

  /// A duplicate that records into the same timeline, as another thread.
  traced duplicate() { return {inner_.duplicate(), *to_, lanes_}; }

  /// Forwards and records. An exchange that throws is recorded, too.
  template <class Apply>
  void exchange(header h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    std::string more = "\"call\":" + std::to_string(h.sequence) + ",\"count\":" + std::to_string(h.elements()) +
                       ",\"type\":\"" + name_of(h.type) + "\",\"to\":" + messages(out) + ",\"from\":" + messages(in);
    const span_of_time s{*this, std::string(name_of(h.kind)) + " round " + std::to_string(h.round), std::move(more)};
    inner_.exchange(h, this->settled(out), in, std::forward<Apply>(apply));
  }

  /// Forwards and records.
  bool native_all_reduce(header h, const void* in, void* out, std::size_t count, const leaf& l)
    requires has_native_all_reduce<Comm>
  {
    const span_of_time s{*this, std::string(name_of(h.kind)) + " native",
                         "\"call\":" + std::to_string(h.sequence) + ",\"count\":" + std::to_string(count) +
                             ",\"type\":\"" + name_of(h.type) + "\""};
    return inner_.native_all_reduce(h, in, out, count, l);
  }

 private:
  // From its making to its end.
  struct span_of_time {
    traced& who;
    std::string name, more;
    clock::time_point start = clock::now();
    ~span_of_time() { who.to_->add(name, "comm", who.rank(), who.lane_, start, clock::now(), more); }
  };

  traced(Comm inner, Timeline& to, std::shared_ptr<std::atomic<int>> lanes)
      : detail::wrapper<Comm>(std::move(inner)), to_(&to), lane_((*lanes)++), lanes_(std::move(lanes)) {}

  // {"peer":bytes,...}; several messages to one peer are summed.
  template <class Messages>
  std::string messages(const Messages& all) const {
    std::string text;
    for (int peer = 0; peer < this->size(); ++peer) {
      std::size_t bytes = 0;
      for (const auto& m : all) bytes += m.peer == peer ? m.bytes : 0;
      if (!bytes) continue;
      text += (text.empty() ? "\"" : ",\"") + std::to_string(peer) + "\":" + std::to_string(bytes);
    }
    return "{" + text + "}";
  }

  Timeline* to_;
  int lane_;
  std::shared_ptr<std::atomic<int>> lanes_;  // how many there are
};

}  // namespace v0
}  // namespace heddle

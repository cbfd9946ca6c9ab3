// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/concept.hpp>

#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// An `apply` for the communicator underneath, which does what the caller's does, and in parts what that takes in parts.
// `first()` is called before anything of the round is applied, `there(peer)` is the number underneath of a rank here.
template <class Apply, class First, class There> struct applying {
  Apply& apply;
  First first;
  There there;

  void operator()(std::span<const arrival> got) const {
    first();
    apply(got);
  }
  bool takes(std::size_t bytes) const
    requires takes_parts<Apply>
  {
    return apply.takes(bytes);
  }
  void part(std::span<const arrival> got, std::size_t offset, std::size_t bytes) const
    requires takes_parts<Apply>
  {
    if (offset == 0) first();
    apply.part(got, offset, bytes);
  }
  template <class Function>
  void expects(std::size_t above, Function&& f) const
    requires takes_parts<Apply>
  {
    apply.expects(above, [&](std::uint8_t round, incoming m) {
      m.peer = there(m.peer);
      f(round, m);
    });
  }
};
template <class Apply, class First, class There> applying(Apply&, First, There) -> applying<Apply, First, There>;

// What every wrapper forwards unchanged. The communicator underneath is held by value.
template <class Comm> class wrapper {
  static_assert(communicator<Comm>, "heddle: a wrapper needs a communicator; see docs/comm.md");

 public:
  explicit wrapper(Comm inner) : inner_(std::move(inner)) {}

  /// This rank.
  int rank() const { return inner_.rank(); }
  /// Number of ranks.
  int size() const { return inner_.size(); }
  /// Number of the next call.
  std::uint16_t next_sequence() { return inner_.next_sequence(); }
  /// Forwards.
  void fail(const std::string& text) { inner_.fail(text); }
  /// Forwards.
  void begin(const header& h)
    requires has_begin<Comm>
  {
    inner_.begin(h);
  }
  /// Forwards.
  void* scratch(std::size_t bytes)
    requires stream_ordered<Comm>
  {
    return inner_.scratch(bytes);
  }
  /// Forwards.
  void copy(void* to, const void* from, std::size_t bytes)
    requires stream_ordered<Comm>
  {
    inner_.copy(to, from, bytes);
  }
  /// Forwards.
  auto stream() const
    requires requires(const Comm& c) { c.stream(); }
  {
    return inner_.stream();
  }
  /// Forwards.
  void synchronize()
    requires requires(Comm& c) { c.synchronize(); }
  {
    inner_.synchronize();
  }
  /// Forwards.
  heddle::progress progress() const
    requires has_progress<Comm>
  {
    return inner_.progress();
  }
  /// The communicator underneath.
  Comm& inner() noexcept { return inner_; }

 protected:
  // The same messages, none of which stays.
  std::span<const outgoing> settled(std::span<const outgoing> out) {
    settled_.assign(out.begin(), out.end());
    for (outgoing& m : settled_) m.stays = false;
    return {settled_.data(), settled_.size()};
  }

  Comm inner_;

 private:
  std::vector<typename dependent<outgoing, Comm>::type> settled_;  // so that only who uses it pays for the vector
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

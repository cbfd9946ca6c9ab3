// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/concept.hpp>

namespace heddle {
inline namespace v0 {

/// @brief The communicator of one rank: every collective is the identity, no message is ever sent.
class self {
 public:
  /// Always 0.
  int rank() const noexcept { return 0; }
  /// Always 1.
  int size() const noexcept { return 1; }
  /// Number of the next call.
  std::uint16_t next_sequence() noexcept { return sequence_++; }
  /// Another communicator of one.
  self duplicate() noexcept { return {}; }
  /// Nobody to tell.
  void fail(const std::string&) noexcept {}
  /// @brief Nothing can be exchanged with nobody.
  /// Throws: argument_error if a message is given.
  template <class Apply>
  void exchange(header, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    if (!out.empty() || !in.empty())
      throw argument_error("heddle::self::exchange: a communicator of 1 rank has no peer");
    apply(std::span<const arrival>{});
  }

 private:
  std::uint16_t sequence_ = 0;
};
static_assert(communicator<self>);

}  // namespace v0
}  // namespace heddle

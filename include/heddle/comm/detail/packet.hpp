// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/messenger.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

enum class packet_kind : std::uint8_t { data, beat, ask, bye, refuse };

// What stands before the bytes of every packet of a messenger.
struct packet_head {
  std::uint32_t magic = 0x31444548;  // "HED1"
  packet_kind kind = packet_kind::data;
  std::uint8_t reserved[3] = {};
  std::int32_t source = 0;
  std::uint32_t tag = 0;
  std::uint64_t from = 0, to = 0;  // lives; `to` is 0 if the sender knows none
  std::uint64_t id = 0;
  std::uint64_t place = 0;   // units sent before, in this pair of lives
  std::uint64_t credit = 0;  // units received by the sender's program
  std::uint64_t bytes = 0;   // length of what follows
};
static_assert(sizeof(packet_head) == payload::room);

// A number above that of the life before, and above those that other processes took earlier, as far as clocks agree.
inline std::uint64_t next_life(std::uint64_t before) noexcept {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto ns = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  return ns > before ? ns : before + 1;
}

inline std::string milliseconds(std::chrono::nanoseconds t) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(t).count()) + " ms";
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

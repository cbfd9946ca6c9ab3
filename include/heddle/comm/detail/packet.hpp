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
  std::uint64_t id = 0;            // without a message: the latest life of the receiver's rank that the sender knows
  std::uint64_t place = 0;         // units sent before, in this pair of lives
  std::uint64_t credit = 0;        // units received by the sender's program
  std::uint64_t bytes = 0;         // length of what follows
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

// Another rank, as far as one life of it goes. Units are bytes with `payload::room` per message, counted from 0 in
// each pair of lives: a place in the stream of messages.
struct correspondent {
  std::uint64_t life = 0, ended = 0;  // the one that is up; the latest that is over
  bool up = false;
  bool wanted = false;                   // somebody asked for it and it hasn't come yet
  bool sought = false;                   // it died: a successor is looked for
  bool open = false;                     // the transport can send to it
  bool said = false;                     // something was sent to it since the last look
  bool refused = false;                  // it holds this life for dead
  bool asked = false;                    // it knows that this rank has no room, and tells it when something is received
  bool asks = false;                     // the other way round
  int owed = 0;                          // how often to try yet to tell it of this life at once
  std::uint64_t sent = 0, credited = 0;  // handed over; received by it
  std::uint64_t arrived = 0, consumed = 0, told = 0;  // of what it sent: come; received here; known to it as such
  std::chrono::steady_clock::time_point heard{};
};

// A message or news that nobody has received yet.
struct arrival_of_message {
  message what;
  std::uint64_t end = 0;  // place behind it
};

// Throw unless the settings, or a rank, are in range.
inline const messenger_options& checked(const messenger_options& o) {
  const auto text = [](std::chrono::nanoseconds t) { return std::to_string(t.count()) + " ns"; };
  if (o.beat.count() < 1 || o.silence / 2 < o.beat || o.silence > std::chrono::hours(10'000) ||
      o.patience.count() < 0 || o.patience > std::chrono::hours(10'000)) {
    throw argument_error("heddle::messenger: beat " + text(o.beat) + ", silence " + text(o.silence) + ", patience " +
                         text(o.patience) +
                         "; allowed is a beat above 0, a silence of two beats or more, and none above 10000 h");
  }
  if (o.window < 1) throw argument_error("heddle::messenger: window 0; allowed is 1 byte and above");
  return o;
}

inline std::size_t checked(const char* what, int rank, int size) {
  if (rank >= 0 && rank < size) return static_cast<std::size_t>(rank);
  throw argument_error("heddle::messenger::" + std::string(what) + ": rank " + std::to_string(rank) +
                       "; allowed is 0 to " + std::to_string(size - 1));
}

// Why a message can't be sent.
[[noreturn]] inline void throw_over(int rank, address to, const correspondent& p) {
  const std::string other = "rank " + std::to_string(to.rank), life = std::to_string(to.life ? to.life : p.ended);
  throw peer_error("messenger::send", rank, to.rank,
                   p.refused ? other + " holds this life for dead; renew() begins another"
                             : "the life " + life + " of " + other + " is over");
}
[[noreturn]] inline void throw_unsent(int rank, address to, const correspondent& p, std::size_t bytes,
                                      const messenger_options& o) {
  const std::string other = "rank " + std::to_string(to.rank), within = " within " + milliseconds(o.patience);
  if (!p.up) throw peer_error("messenger::send", rank, to.rank, "nobody answered at " + other + within);
  throw congestion_error("messenger::send", rank, to.rank,
                         other + " has not received " + std::to_string(p.sent - p.credited) + " bytes sent before" +
                             within + ", and the window of " + std::to_string(o.window) + " has no room for " +
                             std::to_string(payload::room + bytes));
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/numbered.hpp>
#include <heddle/table/detail/table_wire.hpp>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>

namespace heddle {
inline namespace v0 {
namespace detail {

// Zeroes for a body that is too short, which is refused for its layout.
inline table_request head_of(const payload& body) {
  table_request head;
  if (body.size() >= sizeof head) std::memcpy(&head, body.data(), sizeof head);
  return head;
}

// A request that a server has got.
struct server_request {
  std::uint32_t tag;
  std::uint64_t id;
  address from;
  payload body;
  std::size_t worker;  // whose pushes, pulls and saves these are
  table_request head;
};

// What a server knows of a worker.
struct server_worker : numbered_inbox<payload> {  // pushes; kept until they are applied
  std::uint64_t applied = 0, saved = 0;           // number of the last push of which that is true
  std::uint64_t presence = 0, object = 0;         // odd: it has left; the sharded_table that greeted last
  std::uint64_t read_at = 0;                      // pushes of others when it last read
  int voice = 0;                                  // the rank that speaks for it
  bool dead = false;                              // that rank
  bool here = false, heard = false;               // its own rank: now, ever
  std::chrono::steady_clock::time_point died_at{};
  std::string epitaph;
  bool left() const noexcept { return presence % 2 != 0; }
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

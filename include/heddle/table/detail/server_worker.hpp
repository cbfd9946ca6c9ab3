// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/numbered.hpp>
#include <heddle/table/detail/table_wire.hpp>
#include <heddle/table/settings.hpp>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

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

struct server_answer {
  reply_status status = reply_status::done;
  std::vector<std::byte> body;
};

// What a server knows of a worker.
struct server_worker : numbered_inbox<payload> {  // pushes; kept until they are applied
  std::uint64_t applied = 0, saved = 0;           // number of the last push of which that is true
  std::uint64_t in_save = 0;                      // applied when the save that is under way was begun
  std::uint64_t presence = 0, object = 0;         // odd: it has left; the sharded_table that greeted last
  std::uint64_t read_at = 0;                      // pushes of others when it last read
  // What commands are answered that must not be carried out again, by their id; of those below `open` all is known.
  std::map<std::uint64_t, server_answer> answers;
  std::uint64_t open = 0;
  int voice = 0;                     // the rank that speaks for it
  bool dead = false;                 // that rank
  bool here = false, heard = false;  // its own rank: now, ever
  bool parted = false;               // that has ended
  std::chrono::steady_clock::time_point died_at{};
  std::string epitaph;
  bool left() const noexcept { return presence % 2 != 0; }
};

// All of them, and what a death means to the others.
struct server_workers : std::vector<server_worker> {
  std::uint32_t number_of(const server_worker& w) const noexcept { return static_cast<std::uint32_t>(&w - data()); }
  bool anyone_here() const noexcept {
    for (const server_worker& w : *this)
      if (w.here) return true;
    return false;
  }
  // Whether others go on without it. Whoever makes up for a dead one begins where that one ended, far behind the rest,
  // so nobody waits for it.
  bool passed_over(const server_worker& w, const server_options& o) const noexcept {
    if (o.on_death == worker_death::reassign) return w.dead || w.voice != o.servers + static_cast<int>(number_of(w));
    return w.dead && o.on_death == worker_death::go_on;
  }
  // Whether nobody hopes for it any more.
  bool lost(const server_worker& w, const server_options& o) const noexcept {
    if (o.on_death == worker_death::reassign) return w.dead && !anyone_here();
    return w.dead && (o.on_death != worker_death::wait || std::chrono::steady_clock::now() - w.died_at >= o.join);
  }
  // Whom one that has made so many pushes would wait for.
  const server_worker* laggard(std::uint64_t pushes, const server_options& o) const noexcept {
    if (o.staleness == server_options::unbounded) return nullptr;
    for (const server_worker& w : *this)
      if (!w.left() && !passed_over(w, o) && w.applied < pushes && pushes - w.applied > o.staleness) return &w;
    return nullptr;
  }
  const server_worker* died(const server_options& o) const noexcept {
    if (o.on_death == worker_death::go_on) return nullptr;
    for (const server_worker& w : *this)
      if (lost(w, o)) return &w;
    return nullptr;
  }
  // A dead worker whose data goes to this rank: the one that it had before, if it hasn't finished that.
  std::uint32_t orphan_for(int rank, const server_options& o) {
    std::uint32_t said = no_orphan;
    for (server_worker& w : *this) {
      if (w.left()) continue;
      const bool had = w.voice == rank && rank != o.servers + static_cast<int>(number_of(w));
      said = no_orphan_yet;
      if (!had && !w.dead) continue;
      w.voice = rank;
      w.dead = false;
      return number_of(w);
    }
    return said;
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

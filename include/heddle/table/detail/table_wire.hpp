// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief What workers and servers of a sharded table say to each other.
///
/// Requests have tags of their own. A push's id is its number among those of its worker to this server, from 1 on;
/// other requests have any id, which the reply repeats. Whatever changes the table is a push, of one operation or
/// another; what such a change has done, and everything else, is asked for by a command.

#include <heddle/comm/messenger.hpp>
#include <heddle/core/convert.hpp>
#include <heddle/table/detail/bytes.hpp>
#include <heddle/table/detail/mix.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace heddle {
inline namespace v0 {
namespace detail {

enum class table_tag : std::uint32_t {
  hello = 1,
  pull = 2,
  read = 3,
  push = 4,
  save = 5,
  reply = 6,
  orphan = 7,
  command = 8
};

// Of a push: what it changes; a change that says what it has done begins with the id of the command that will ask. Of a
// command: what is wanted; it begins with the lowest id of those whose answers may still be missing, then has
enum class table_op : std::uint8_t {
  gradients = 0,
  erase = 1,
  evict = 2,
  advance = 3,
  outcome = 8,    // nothing; the answer: rows gone; an evict's keys
  size = 9,       // nothing
  bytes = 10,     // nothing
  checksum = 11,  // nothing
  rows = 12,      // a shard; the answer: the shard behind those that follow, their rows
  full = 16,      // a path, to which the server's part of a file goes, as for the others
  delta = 17,     // before the path a zero, if one before may have failed somewhere: so it must need none
  serving = 18,   // before the path, and a zero: the type of weights
  text = 19
};

struct table_request {
  std::uint64_t layout = 0;  // of the rows: both sides must agree
  std::uint64_t pushes = 0;  // of a pull or a save: the answer is to be as of so many pushes of this worker, at least
  std::uint64_t first = 0;   // number of the first push in the worker's log
  std::uint64_t items = 0;   // keys that follow
  std::uint64_t object = 0;  // which of the worker's sharded_tables it is from: later ones have higher numbers
  float lr = 0.0f;           // of a push
  std::uint16_t stands_for = 0;  // 1 + the worker whose pushes these are; 0: the sender's own
  std::uint8_t half = 0;         // the floats that follow, or those wanted, have 16 bits
  std::uint8_t sightings = 0;    // three floats per key follow the keys
  std::uint8_t crowded = 0;      // the worker's log is half full: a save would help
  std::uint8_t last = 0;         // of a push: no more follow; of others: that push was made
  std::uint8_t gathers = 0;      // of a greeting: pushes are gathered, so their number says nothing
  std::uint8_t resumes = 0;      // pushes behind what the server has applied are made again
  table_op op = table_op::gradients;
  std::uint8_t unused[3] = {};
};

// outdated: to a greeting whose number isn't above that of the sharded_table that greeted last, which follows.
// refused: the call fails, and nothing else; 1 follows for a file_error, 0 for an argument_error, and what it says.
// working: a file is being written; patience begins anew.
enum class reply_status : std::uint32_t { done = 1, behind = 2, failed = 3, outdated = 4, refused = 5, working = 6 };

struct table_reply {
  std::uint64_t next = 0;     // the number of the worker's push that the server expects
  std::uint64_t covered = 0;  // pushes up to this number needn't be repeated whatever happens
  std::uint64_t object = 0;   // the request's
  reply_status status = reply_status::done;
  std::uint16_t half = 0;
  std::uint16_t in_steps = 0;  // a pull reads one step exactly, so the worker's later pushes must come after it
};

// What the reply to `orphan` holds: a worker, or these.
inline constexpr std::uint32_t no_orphan_yet = 0xffffffff, no_orphan = 0xfffffffe;

inline constexpr float most_half = 65504.0f;  // what is beyond travels as this: float16 would make it infinite

// Floats in a message: as they are, or narrow where asked.
template <class Half = bfloat16> void put_floats(byte_writer& out, const float* x, std::size_t n, bool half) {
  if (!half) return out.put(x, 4 * n);
  constexpr std::size_t most = 256;
  float clamped[most];
  Half narrow[most];
  for (std::size_t at = 0; at < n; at += most) {
    const std::size_t m = (std::min)(most, n - at);
    const float* from = x + at;
    if constexpr (std::is_same_v<Half, float16>) {
      for (std::size_t i = 0; i < m; ++i)
        clamped[i] = std::isfinite(from[i]) ? std::clamp(from[i], -most_half, most_half) : from[i];
      from = clamped;
    }
    convert(from, narrow, m);
    out.put(narrow, 2 * m);
  }
}
template <class Half = bfloat16> void take_floats(byte_reader& in, float* x, std::size_t n, bool half) {
  const std::byte* const p = in.take((half ? 2 : 4) * n);
  if (!half) {
    if (n != 0) std::memcpy(x, p, 4 * n);
    return;
  }
  constexpr std::size_t most = 256;
  Half narrow[most];
  for (std::size_t at = 0; at < n; at += most) {
    const std::size_t m = (std::min)(most, n - at);
    std::memcpy(static_cast<void*>(narrow), p + 2 * at, 2 * m);
    convert(narrow, x + at, m);
  }
}

// A replica of Geo-SGD takes a row that servers have: it moves by what they have moved since it last knew theirs. Where
// nothing of its own is kept, or is to be, it is theirs to the bit.
inline void follow(const float* servers, float* own, float* known, std::size_t n, bool keep = true) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    own[i] = !keep || own[i] == known[i] ? servers[i] : own[i] + (servers[i] - known[i]);
    known[i] = servers[i];
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

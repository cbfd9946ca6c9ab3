// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/concept.hpp>
#include <heddle/comm/detail/session.hpp>

#include <vector>

namespace heddle {
inline namespace v0 {
namespace threads::detail {
using namespace heddle::detail;

// What the ranks share. A template, as the communicator is, so that a file that only includes this doesn't pay for what
// they need of the vectors.
template <class Session>
struct world {
  // Up to so many bytes of all ranks together are told, not pointed at.
  static constexpr std::size_t few_bytes = 4096, few_bytes_of_all = 32768;

  // Messages of one round from one rank to another. The sender fills it, the receiver reads the sender's buffers
  // through it and empties it; a sender that gives up takes it back unless it is being read.
  struct alignas(64) box {
    enum : int { empty, posted, reading };
    std::atomic<int> state{empty};
    heddle::header head;
    std::vector<outgoing> messages;
    bool filling = false;   // the sender's mark while it collects a round
    std::size_t taken = 0;  // the receiver's count while it matches a round
  };

  // What a rank tells the others in a native all-reduce, and its elements if they are few. Two per rank: what it tells
  // in call k is read until all have come to call k + 1, so it may be overwritten in call k + 2.
  struct alignas(64) told {
    std::atomic<std::uint64_t> call{0};  // which call this belongs to; the first is 1
    heddle::header head;
    const void* in = nullptr;
    void* out = nullptr;
    alignas(64) std::byte elements[few_bytes];
  };

  // Where a rank stands, for the message of a peer that has waited too long.
  struct alignas(64) standing {
    std::atomic<int> waits_for{-1};       // the peer of a pending exchange
    std::atomic<std::uint64_t> gates{0};  // how often it has come to the gate
    std::uint64_t calls = 0;              // how many native all-reduces it has begun; its own
  };

  world(std::shared_ptr<Session> s, int n)
      : shared(std::move(s)), ranks(n), boxes(std::make_unique<box[]>(static_cast<std::size_t>(n) * n)),
        standings(std::make_unique<standing[]>(static_cast<std::size_t>(n))),
        tellings(std::make_unique<told[]>(2 * static_cast<std::size_t>(n))) {}
  box& between(int source, int destination) { return boxes[static_cast<std::size_t>(source) * ranks + destination]; }

  // What `rank` tells in a call.
  told& tells(int rank, std::uint64_t call) { return tellings[2 * static_cast<std::size_t>(rank) + call % 2]; }

  // Follows who waits for whom to a rank that waits for nobody; in a circle, `peer` itself.
  int culprit(int peer) const {
    int at = peer;
    for (int hops = 0; hops < ranks; ++hops) {
      const int next = standings[static_cast<std::size_t>(at)].waits_for.load(std::memory_order_acquire);
      if (next < 0) return at;
      at = next;
    }
    return peer;
  }
  std::shared_ptr<Session> shared;
  int ranks;
  std::unique_ptr<box[]> boxes;
  std::unique_ptr<standing[]> standings;
  std::unique_ptr<told[]> tellings;
  gate door;
  std::shared_ptr<world> child;  // handed over by duplicate()
};
}  // namespace threads::detail
}  // namespace v0
}  // namespace heddle

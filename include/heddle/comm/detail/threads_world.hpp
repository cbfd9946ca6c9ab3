// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/concept.hpp>
#include <heddle/comm/detail/session.hpp>

#include <algorithm>
#include <exception>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace threads::detail {
using namespace heddle::detail;

// What an exception says.
inline std::string text_of(const std::exception_ptr& e) {
  try {
    std::rethrow_exception(e);
  } catch (const std::exception& x) {
    return x.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

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
    std::size_t element = 0;  // its bytes: types of users are told apart by no more
    const void* in = nullptr;
    void* out = nullptr;
    alignas(64) std::byte elements[few_bytes];
  };

  // Where a rank stands, for the message of a peer that has waited too long.
  struct alignas(64) standing {
    std::atomic<int> waits_for{-1};       // the peer of a pending exchange
    std::atomic<std::uint64_t> gates{0};  // how often it has come to the gate
    std::uint64_t calls = 0;              // how many native all-reduces it has begun; its own
    int color = 0, key = 0;               // what it says in split()
  };

  world(std::shared_ptr<Session> s, std::vector<int> numbers)
      : shared(std::move(s)), members(std::move(numbers)), ranks(static_cast<int>(members.size())),
        boxes(std::make_unique<box[]>(members.size() * members.size())),
        standings(std::make_unique<standing[]>(members.size())),
        tellings(std::make_unique<told[]>(2 * members.size())),
        children(std::make_unique<std::shared_ptr<world>[]>(members.size())) {}
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
  standing& standing_of(int rank) { return standings[static_cast<std::size_t>(rank)]; }

  // After all have said a color and a key: those of `rank`'s color, by their keys.
  std::vector<int> part_of(int rank) {
    std::vector<int> part;
    for (int r = 0; r < ranks; ++r) {
      if (standing_of(r).color == standing_of(rank).color) part.push_back(r);
    }
    std::stable_sort(part.begin(), part.end(), [&](int a, int b) { return standing_of(a).key < standing_of(b).key; });
    return part;
  }
  // What the ranks of a part share.
  std::shared_ptr<world> child(std::vector<int> part) {
    for (int& r : part) r = known(r);
    return std::make_shared<world>(shared, std::move(part));
  }

  // A rank's number in the session, which bells and messages go by.
  int known(int rank) const noexcept { return members[static_cast<std::size_t>(rank)]; }
  void ring(int rank) noexcept { shared->ring(known(rank)); }

  std::shared_ptr<Session> shared;
  std::vector<int> members;
  int ranks;
  std::unique_ptr<box[]> boxes;
  std::unique_ptr<standing[]> standings;
  std::unique_ptr<told[]> tellings;
  gate door;
  std::unique_ptr<std::shared_ptr<world>[]> children;  // handed over by the first rank of each, of those that split
};
}  // namespace threads::detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace detail {

// When to say again what isn't answered: ever more seldom.
struct repetition {
  std::chrono::steady_clock::time_point due{};
  std::chrono::nanoseconds wait{};

  void begin(std::chrono::nanoseconds first) noexcept {
    wait = first;
    due = std::chrono::steady_clock::now() + first;
  }
  void later(std::chrono::steady_clock::time_point now, std::chrono::nanoseconds longest) noexcept {
    wait = (std::min)(2 * wait, longest);
    due = now + wait;
  }
};

// What one side has sent and may have to send again, numbered from 1 on.
template <class Body> struct numbered_log {
  std::uint64_t sent = 0;   // numbered
  std::uint64_t next = 1;   // the first that the other side hasn't got, as far as is known here
  std::uint64_t first = 1;  // of those kept
  std::size_t bytes = 0;    // of those kept
  std::deque<Body> kept;

  Body& operator[](std::uint64_t number) { return kept[number - first]; }
  std::uint64_t post(Body&& b) {
    kept.push_back(std::move(b));
    bytes += kept.back().size();
    return ++sent;
  }
  // Numbers the last one no more.
  void take_back() noexcept {
    bytes -= kept.back().size();
    kept.pop_back();
    --sent;
  }
  // Up to this number nothing will be asked for again.
  void drop(std::uint64_t number) {
    for (; first <= number && !kept.empty(); ++first) {
      bytes -= kept.front().size();
      kept.pop_front();
    }
  }
};

// So many numbers are kept for one that hasn't come yet.
inline constexpr std::uint64_t most_early = 4096;

// What the other side has taken: in order and each number once. What comes too early waits for those before it.
template <class Body> struct numbered_inbox {
  std::uint64_t taken = 0;
  std::map<std::uint64_t, Body> kept;  // taken and not used yet, or too early

  // Whether it is new; then it is taken, with what has waited for it, or waits.
  bool put(std::uint64_t number, Body&& b) {
    if (number <= taken || number - taken > most_early || !kept.try_emplace(number, std::move(b)).second) return false;
    while (kept.contains(taken + 1)) ++taken;
    return true;
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/concept.hpp>

#include "../support/catch.hpp"

#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

/// @file
/// What every communicator must do. To test your own:
///
///     #include "conformance.hpp"
///     TEST_CASE("my communicator conforms") {
///       heddle_test::conforms_to_communicator({1, 2, 5}, [](int ranks, auto f) { my_run(ranks, f); });
///     }
///
/// The second argument runs f(communicator&) on every rank and returns when all have ended; what a rank throws it
/// throws. A deadline of a second or two is enough. f checks nothing through Catch itself, so ranks may be threads.
namespace heddle_test {
namespace hd = heddle;

/// What ranks found wrong; Catch's own checks may be used by one thread only.
class findings {
 public:
  /// Notes the first few wrong things. Costs nothing where all is right.
  /// @param right Whether it is. @param rank Who looked. @param what What is wrong. @param where In which case.
  void expect(bool right, int rank, const char* what, const std::string& where = {}) {
    if (!right) note(rank, what, where);
  }
  /// Empty where all was right.
  std::string text() const {
    std::lock_guard lock(mutex_);
    return count_ > 5 ? text_ + std::to_string(count_) + " in all" : text_;
  }

 private:
  [[gnu::noinline]] void note(int rank, const char* what, const std::string& where) {
    std::lock_guard lock(mutex_);
    if (++count_ <= 5)
      text_ += "rank " + std::to_string(rank) + ": " + what + (where.empty() ? "" : ", ") + where + "\n";
  }

  mutable std::mutex mutex_;
  std::string text_;
  std::size_t count_ = 0;
};

namespace detail {
// Every rank to every other: `messages` messages each, half of them only lent to apply.
template <class Comm>
void all_to_all(Comm& comm, findings& found, std::size_t messages, std::size_t length, std::uint32_t salt) {
  const int me = comm.rank(), p = comm.size();
  const auto word = [&](int from, int to, std::size_t k) {
    return salt + static_cast<std::uint32_t>(from * 1000003 + to * 10007) + static_cast<std::uint32_t>(k) * 101;
  };
  const auto size = [&](std::size_t k) { return length + k; };  // messages of different lengths
  std::vector<std::vector<std::uint32_t>> sent, received;
  std::vector<hd::outgoing> out;
  std::vector<hd::incoming> in;
  struct meaning {
    int peer;
    std::size_t k;
  };
  std::vector<meaning> order;
  for (std::size_t k = 0; k < messages; ++k) {
    for (int step = 1; step < p; ++step) {
      const int to = (me + step) % p, from = (me - step + p) % p;
      sent.emplace_back(size(k), word(me, to, k));
      received.emplace_back(size(k), 0u);
      out.push_back({to, sent.back().data(), sent.back().size() * 4, static_cast<std::uint16_t>(me + 1)});
      in.push_back({from, k % 2 ? nullptr : received.back().data(), received.back().size() * 4});
      order.push_back({from, k});
    }
  }
  hd::header h{.kind = hd::operation_kind::control, .sequence = comm.next_sequence(), .count = length};
  int calls = 0;
  comm.exchange(h, out, in, [&](std::span<const hd::arrival> arrivals) {
    ++calls;
    found.expect(arrivals.size() == in.size(), me, "an arrival is missing");
    for (std::size_t i = 0; i < arrivals.size() && i < order.size(); ++i) {
      const auto [peer, k] = order[i];
      std::vector<std::uint32_t> got(size(k));
      std::memcpy(got.data(), arrivals[i].data, got.size() * 4);
      found.expect(got == std::vector<std::uint32_t>(size(k), word(peer, me, k)), me, "apply saw another message");
      found.expect(arrivals[i].contributors == peer + 1, me, "contributors differ");
      if (in[i].into) found.expect(arrivals[i].data == in[i].into, me, "the arrival isn't where it was asked for");
    }
  });
  found.expect(calls == 1, me, "apply must be called once");
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (!in[i].into) continue;
    const auto [peer, k] = order[i];
    found.expect(received[i] == std::vector<std::uint32_t>(size(k), word(peer, me, k)), me, "another message landed");
  }
  for (auto& s : sent) s.assign(s.size(), 0xdeadbeefu);  // nobody may read them any more
}
}  // namespace detail

/// Runs the whole suite for each number of ranks.
/// @param sizes Numbers of ranks to try. @param run run(ranks, f).
template <class Run> void conforms_to_communicator(const std::vector<int>& sizes, Run run) {
  for (const int p : sizes) {
    INFO(p << " ranks");
    findings found;
    std::mutex mutex;
    std::set<int> ranks;
    run(p, [&](auto& comm) {
      static_assert(hd::communicator<std::decay_t<decltype(comm)>>);
      {
        std::lock_guard lock(mutex);
        ranks.insert(comm.rank());
      }
      const int me = comm.rank();
      found.expect(comm.size() == p && me >= 0 && me < p, me, "rank or size");

      const std::uint16_t first = comm.next_sequence();
      found.expect(comm.next_sequence() == static_cast<std::uint16_t>(first + 1), me, "sequence numbers must count up");

      // The k-th message to a peer meets the k-th one it expects; a round sends and receives at once.
      for (std::uint32_t round = 0; round < 20; ++round)
        detail::all_to_all(comm, found, 1 + round % 3, 1 + round, round);
      detail::all_to_all(comm, found, 2, 50'000, 77);

      // A round without messages.
      int calls = 0;
      comm.exchange(hd::header{}, {}, {}, [&](std::span<const hd::arrival> a) { calls += a.empty(); });
      found.expect(calls == 1, me, "apply must be called once in an empty round");

      // One direction only: rank 0 sends, the last one receives, the others have an empty round.
      if (p > 1) {
        std::vector<hd::outgoing> out;
        std::vector<hd::incoming> in;
        std::uint64_t word = me == 0 ? 42 : 0;
        if (me == 0) out.push_back({p - 1, &word, sizeof word, 1});
        if (me == p - 1) in.push_back({0, &word, sizeof word});
        comm.exchange(hd::header{.round = 9}, out, in, [](std::span<const hd::arrival>) {});
        if (me == p - 1) found.expect(word == 42, me, "one direction");
      }

      // A duplicate has traffic of its own: two threads at once, on different numbers of rounds.
      auto second = comm.duplicate();
      found.expect(second.rank() == me && second.size() == p, me, "rank or size of a duplicate");
      std::exception_ptr thrown;
      std::thread other([&] {
        try {
          for (std::uint32_t round = 0; round < 40; ++round) detail::all_to_all(second, found, 2, 10, 5000 + round);
        } catch (...) {
          thrown = std::current_exception();
        }
      });
      try {
        for (std::uint32_t round = 0; round < 30; ++round) detail::all_to_all(comm, found, 1, 100, 9000 + round);
      } catch (...) {
        other.join();
        throw;
      }
      other.join();
      if (thrown) std::rethrow_exception(thrown);
      auto third = comm.duplicate();  // again, and from a duplicate
      auto fourth = second.duplicate();
      detail::all_to_all(fourth, found, 1, 3, 1);
      detail::all_to_all(third, found, 1, 3, 2);
    });
    CHECK(found.text() == "");
    // Where ranks are processes, a process sees itself only, or nobody if it looks on.
    CHECK((ranks.size() == static_cast<std::size_t>(p) || ranks.size() <= 1));
    if (p == 1) continue;

    // fail() wakes who waits and stops who comes later.
    findings after;
    run(p, [&](auto& comm) {
      const int me = comm.rank();
      if (me == 1) comm.fail("the reason");
      for (int attempt = 0; attempt < 2; ++attempt) {
        try {
          findings ignored;
          detail::all_to_all(comm, ignored, 1, 1, 0);
          after.expect(false, me, "a call succeeded after fail()");
        } catch (const hd::comm_error& e) {
          after.expect(e.peer() == 1, me, "the error names another rank");
          after.expect(std::string(e.what()).find("the reason") != std::string::npos, me, "the error hides the reason");
        }
      }
    });
    CHECK(after.text() == "");

    // Ranks that don't agree on the call, or on a length, all learn of it.
    for (const int what : {0, 1, 2, 3, 4}) {
      findings differ;
      run(p, [&](auto& comm) {
        const int me = comm.rank();
        const bool odd = me == 0;
        hd::header h{.kind = hd::operation_kind::all_reduce, .type = hd::dtype::f32, .reduction = 1, .count = 8};
        if (odd && what == 0) h.count = 9;
        if (odd && what == 1) h.type = hd::dtype::f16;
        if (odd && what == 2) h.kind = hd::operation_kind::broadcast;
        if (odd && what == 3) h.sequence = 1;
        std::uint64_t sent[2]{}, received[2]{};
        const std::size_t bytes = odd && what == 4 ? 16 : 8;
        const hd::outgoing out{(me + 1) % p, sent, bytes, 1};
        const hd::incoming in{(me - 1 + p) % p, received, 8};
        bool threw = false;
        try {
          comm.exchange(h, std::span(&out, 1), std::span(&in, 1), [](std::span<const hd::arrival>) {});
          comm.exchange(h, {}, {}, [](std::span<const hd::arrival>) {});
          // Whoever had only right neighbours meets the failure in one of the next rounds.
          for (int round = 0; round < p; ++round) {
            comm.exchange(h, std::span(&out, 1), std::span(&in, 1), [](std::span<const hd::arrival>) {});
          }
        } catch (const hd::comm_error& e) {
          threw = std::string(e.what()).find("rank 0") != std::string::npos;
        }
        differ.expect(threw, me, "no error, or it doesn't name the odd rank", std::to_string(what));
      });
      CHECK(differ.text() == "");
    }
  }
}

}  // namespace heddle_test

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/messenger.hpp>

#include "conformance.hpp"

#include <deque>
#include <map>
#include <thread>

/// @file
/// What every messenger must do. To test your own:
///
///     #include "messenger_conformance.hpp"
///     TEST_CASE("my messenger conforms") {
///       heddle_test::conforms_to_messenger({1, 2, 5}, [](int ranks, const hd::messenger_options& o, auto f) { ... });
///     }
///
/// The second argument makes a messenger for every rank and runs f(messenger&) on it, each on a thread or in a process
/// of its own; a messenger goes away as soon as its f has ended, and all have ended when it returns. f checks nothing
/// through Catch itself.
namespace heddle_test {

/// Numbers that depend on who sends what.
inline hd::payload numbers(int from, int to, std::uint64_t k, std::size_t bytes) {
  hd::payload p(bytes);
  auto x = static_cast<std::uint32_t>(from * 7919 + to * 104729) + static_cast<std::uint32_t>(k) * 31;
  for (std::size_t i = 0; i < bytes; ++i) p.data()[i] = static_cast<std::byte>((x += 0x9e3779b9u) >> 24);
  return p;
}
inline bool same(const hd::payload& a, const hd::payload& b) {
  return a.size() == b.size() && (a.size() == 0 || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

/// Takes messages out of order: the next one of a kind and tag, within 20 s; others wait.
template <class M> class inbox {
 public:
  explicit inbox(M& m) : m_(m) {}
  hd::message next(hd::message_kind kind, std::uint32_t tag = 0, int from = -1) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (std::size_t i = 0;; ++i) {
      while (i == waiting_.size()) {
        auto m = m_.receive(std::chrono::milliseconds(100));
        if (m) waiting_.push_back(std::move(*m));
        if (std::chrono::steady_clock::now() > end) {
          throw std::runtime_error("rank " + std::to_string(m_.rank()) + ": no " + hd::name_of(kind) + " of rank " +
                                   std::to_string(from) + " with tag " + std::to_string(tag));
        }
      }
      hd::message& w = waiting_[i];
      if (w.kind != kind || w.tag != tag || (from >= 0 && w.from.rank != from)) continue;
      hd::message found = std::move(w);
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
      return found;
    }
  }
  /// Puts a message behind those that wait.
  void keep(hd::message m) { waiting_.push_back(std::move(m)); }
  /// All ranks come here before one goes on; `tag` is used for nothing else.
  void meet(std::uint32_t tag) {
    for (int r = 0; r < m_.size(); ++r) {
      for (bool sent = false; !sent;) {
        try {
          m_.send(r, tag, 0, hd::payload(0));
          sent = true;
        } catch (const hd::congestion_error&) {
        }
      }
    }
    for (int r = 0; r < m_.size(); ++r) next(hd::message_kind::data, tag, r);
  }

 private:
  M& m_;
  std::deque<hd::message> waiting_;
};

/// Runs f on a thread per rank, each with a messenger; throws what they threw.
template <class Make, class Function> void on_threads(int ranks, Make make, Function f) {
  std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        auto m = make(r);
        f(*m);
      } catch (...) {
        thrown[static_cast<std::size_t>(r)] = std::current_exception();
      }
    });
  }
  for (auto& t : threads) t.join();
  std::string text;
  for (auto& e : thrown) {
    try {
      if (e) std::rethrow_exception(e);
    } catch (const std::exception& x) {
      text += x.what() + std::string("\n");
    }
  }
  if (!text.empty()) throw std::runtime_error(text);
}

namespace detail {
using kind = hd::message_kind;

// Every rank to every one, itself too, all at once.
template <class M> void talk_to_all(M& m, inbox<M>& in, findings& found) {
  static constexpr std::size_t sizes[] = {0, 1, 7, 17, 1023, 1024, 1025, 4031, 4033, 10'007, 300'001};
  const int me = m.rank(), p = m.size();
  found.expect(me >= 0 && me < p && m.life() > 0 && m.life_of(me) == m.life(), me, "rank, size or life");
  std::uint64_t k = 0;
  for (const std::size_t bytes : sizes) {
    for (int to = 0; to < p; ++to) {
      if (k % 2)
        m.send(to, 5, k, numbers(me, to, k, bytes));
      else
        m.send(to, 5, k, numbers(me, to, k, bytes).bytes());
    }
    ++k;
  }
  std::vector<std::uint64_t> next(static_cast<std::size_t>(p), 0), life(next);
  life[static_cast<std::size_t>(me)] = m.life();
  for (std::size_t n = 0; n < std::size(sizes) * static_cast<std::size_t>(p);) {
    auto got = m.receive(std::chrono::seconds(20));
    found.expect(got.has_value(), me, "a message is missing");
    if (!got) return;
    const auto from = static_cast<std::size_t>(got->from.rank);
    if (got->kind == kind::joined) life[from] = got->from.life;
    if (got->kind == kind::died || got->kind == kind::gap)
      found.expect(false, me, "news that isn't so", std::string(got->body.text()));
    if (got->kind != kind::data) continue;
    if (got->tag != 5) {  // of a rank that has gone on
      in.keep(std::move(*got));
      continue;
    }
    ++n;
    found.expect(got->from.life == life[from] && life[from] != 0, me, "a message before its sender has joined");
    found.expect(got->id == next[from]++, me, "messages out of order");
    found.expect(got->id < std::size(sizes) && same(got->body, numbers(got->from.rank, me, got->id, sizes[got->id])),
                 me, "another message arrived", std::to_string(got->id));
    found.expect(reinterpret_cast<std::uintptr_t>(got->body.data()) % 8 == 0, me, "a message isn't aligned");
  }
}

// Sends, however long the peer takes for it.
template <class M> void persist(M& m, int to, std::uint32_t tag, std::uint64_t id, hd::payload body) {
  for (;;) {
    try {
      return m.send(to, tag, id, std::move(body));
    } catch (const hd::congestion_error&) {
    }
  }
}

// Of two ranks, the second takes nothing for a second.
template <class M> void congest(M& m, findings& found) {
  inbox<M> in(m);
  const int me = m.rank();
  std::uint64_t sent = 0;
  in.meet(1);
  if (me == 0) {
    hd::payload body;
    std::string text;
    int peer = -1;
    try {
      for (; sent < 1000; ++sent) {
        body = numbers(0, 1, sent, 5000);
        m.send(1, 5, sent, std::move(body));
      }
    } catch (const hd::congestion_error& e) {
      text = e.what();
      peer = e.peer();
    }
    found.expect(peer == 1 && text.find("rank 1 has not received") != std::string::npos, me, "no congestion", text);
    found.expect(sent > 3 && sent < 20, me, "the window is ignored", std::to_string(sent));
    found.expect(same(body, numbers(0, 1, sent, 5000)), me, "a message that wasn't sent is gone");
    found.expect(!m.try_send(1, 5, sent, std::move(body)) && same(body, numbers(0, 1, sent, 5000)), me, "try_send");
    m.send(0, 6, sent, hd::payload(0));  // to others there is room
    in.next(kind::data, 6);
  }
  if (me == 0) {
    std::thread other([&] {  // a second thread of a messenger; the last message is above the window
      for (std::uint64_t k = sent; k < sent + 100; ++k) persist(m, 1, 5, k, numbers(0, 1, k, 5000));
      persist(m, 1, 5, sent + 100, numbers(0, 1, sent + 100, 200'000));
    });
    persist(m, 1, 3, sent, hd::payload(0));
    other.join();
  }
  if (me == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    const std::uint64_t told = in.next(kind::data, 3).id;
    for (std::uint64_t k = 0; k <= told + 100; ++k) {
      const hd::message got = in.next(kind::data, 5, 0);
      found.expect(got.id == k && same(got.body, numbers(0, 1, k, k == told + 100 ? 200'000 : 5000)), me,
                   "after congestion", std::to_string(got.id));
    }
  }
  in.meet(4);
}

// Nothing comes; what isn't allowed.
template <class M> void stay_silent(M& m, inbox<M>& in, findings& found) {
  const int me = m.rank();
  in.meet(1);
  if (me != 0) {
    in.next(kind::data, 3, 0);
    return in.meet(2);
  }
  std::optional<hd::message> got = m.receive(std::chrono::milliseconds(30));
  while (got) got = m.receive(std::chrono::milliseconds(30));  // news of peers that have been met before
  const auto start = std::chrono::steady_clock::now();
  found.expect(!m.receive(std::chrono::milliseconds(30)), me, "a message from nobody");
  found.expect(std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(30), me, "receive returns early");
  found.expect(!m.receive(std::chrono::nanoseconds(0)), me, "a message from nobody");
  for (const int wrong : {-1, m.size()}) {
    bool threw = false;
    hd::payload body = numbers(0, 0, 0, 10);
    try {
      m.send(wrong, 1, 1, std::move(body));
    } catch (const hd::argument_error& e) {
      threw = std::string(e.what()).find("rank " + std::to_string(wrong)) != std::string::npos;
    }
    found.expect(threw && body.size() == 10, me, "a rank that doesn't exist");
  }
  for (int r = 1; r < m.size(); ++r) m.send(r, 3, 0, hd::payload(0));
  in.meet(2);
}

// The last rank says goodbye; then rank 0 begins another life, and rank 1 has a message of the former one.
template <class M> void come_and_go(M& m, findings& found) {
  inbox<M> in(m);
  const int me = m.rank(), last = m.size() - 1;
  in.meet(1);
  if (me == last) return;
  const hd::message left = in.next(kind::left, 0, last);
  found.expect(left.from.life != 0 && m.life_of(last) == 0, me, "a life that left is still there");
  bool threw = false;
  try {
    m.send(last, 1, 1, hd::payload(0));
  } catch (const hd::peer_error& e) {
    threw = e.peer() == last && std::string(e.what()).find("is over") != std::string::npos;
  }
  found.expect(threw, me, "a message to one that has left");
  if (last < 2) return;
  if (me == 0) {
    const hd::message one = in.next(kind::data, 2, 1);  // so rank 1 has sent another one, to this life
    const std::uint64_t before = m.life();
    m.renew();
    found.expect(m.life() > before, me, "lives don't count up");
    m.connect(1);
    found.expect(in.next(kind::joined, 0, 1).from == one.from, me, "another life of a peer that has only one");
    m.send(one.from, 3, 0, numbers(0, 1, 3, 100));
    const hd::message answer = in.next(kind::data, 4, 1);
    found.expect(answer.id == 44, me, "the answer to the new life");
    auto stale = m.receive(std::chrono::milliseconds(50));
    while (stale && stale->kind != kind::data) stale = m.receive(std::chrono::milliseconds(50));
    found.expect(!stale, me, "a message to a former life was delivered");
  } else if (me == 1) {
    const hd::address former{0, m.life_of(0)};
    m.send(former, 2, 0, hd::payload(0));
    try {
      m.send(former, 4, 43, hd::payload(0));  // under way when the life ends, refused there, or after its end
    } catch (const hd::peer_error&) {
    }
    const hd::message died = in.next(kind::died, 0, 0);
    const hd::message joined = in.next(kind::joined, 0, 0);  // of all that is known, the first is the former life
    const hd::address now = joined.from == former ? in.next(kind::joined, 0, 0).from : joined.from;
    found.expect(died.from == former && now.life > former.life, me, "another life died");
    const hd::message first = in.next(kind::data, 3, 0);
    found.expect(first.from == now && same(first.body, numbers(0, 1, 3, 100)), me, "the new life's first message");
    bool refused = false;
    try {
      m.send(former, 4, 45, hd::payload(0));
    } catch (const hd::peer_error& e) {
      refused = e.peer() == 0 && e.rank() == 1;
    }
    found.expect(refused, me, "a message to a former life");
    m.send(0, 4, 44, hd::payload(0));
    in.next(kind::left, 0, 0);  // not before it has got that
  }
}
}  // namespace detail

/// Runs the whole suite for each number of ranks. Takes two seconds.
/// @param sizes Numbers of ranks to try. @param run run(ranks, options, f).
template <class Run> void conforms_to_messenger(const std::vector<int>& sizes, Run run) {
  hd::messenger_options o;
  o.beat = std::chrono::milliseconds(50);
  o.silence = std::chrono::seconds(20);
  for (const int p : sizes) {
    INFO(p << " ranks");
    findings found;
    run(p, o, [&](auto& m) {
      static_assert(hd::messenger<std::decay_t<decltype(m)>>);
      found.expect(m.size() == p, m.rank(), "size");
      inbox in(m);
      detail::talk_to_all(m, in, found);
      detail::stay_silent(m, in, found);
    });
    CHECK(found.text() == "");
    if (p == 1) continue;
    if (p == 2) {
      auto narrow = o;
      narrow.window = 64 << 10;
      narrow.patience = std::chrono::milliseconds(100);
      run(p, narrow, [&](auto& m) { detail::congest(m, found); });
      CHECK(found.text() == "");
    }
    run(p, o, [&](auto& m) { detail::come_and_go(m, found); });
    CHECK(found.text() == "");
  }
}

}  // namespace heddle_test

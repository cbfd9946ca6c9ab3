// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/comm/lossy.hpp>
#include <heddle/comm/threads_messenger.hpp>

#include "messenger_conformance.hpp"

#include <algorithm>
#include <atomic>

namespace hd = heddle;

namespace {
using namespace std::chrono_literals;
using hd::message_kind;
using heddle_test::inbox;

}  // namespace

TEST_CASE("messengers between threads conform") {
  heddle_test::conforms_to_messenger({1, 2, 3, 5}, [](int ranks, const hd::messenger_options& o, auto f) {
    const hd::threads::meeting_place place(ranks);
    heddle_test::on_threads(ranks, [&](int r) { return std::make_unique<hd::threads::messenger>(o, place, r); }, f);
  });
}

namespace {
hd::messenger_options quick() {
  hd::messenger_options o;
  o.beat = 10ms;
  o.silence = 200ms;
  return o;
}

// Loses the packets whose numbers it is told, and those that carry no message from then on.
struct leaky : hd::threads::transport {
  leaky(hd::threads::meeting_place place, int rank, std::vector<int> lost)
      : transport(std::move(place), rank), lost_(std::move(lost)) {}
  bool put(int peer, hd::payload& p) {
    if (p.size() == 0 || std::find(lost_.begin(), lost_.end(), sent_++) == lost_.end()) return transport::put(peer, p);
    p = {};
    return true;
  }
  std::vector<int> lost_;
  int sent_ = 0;
};
}  // namespace

TEST_CASE("a peer that falls silent is named once, and its successor is another life") {
  hd::threads::meeting_place place(3);
  // One of them without a thread of its own: calling receive is enough.
  hd::messenger_options polled = quick();
  polled.thread = false;
  hd::threads::messenger a(polled, place, 0), c(quick(), place, 2);
  auto b = std::make_unique<hd::threads::messenger>(quick(), place, 1);
  inbox in(a);
  a.connect(1);
  a.connect(2);
  const hd::address first = in.next(message_kind::joined, 0, 1).from;
  in.next(message_kind::joined, 0, 2);
  CHECK(first == hd::address(1, b->life()));
  a.send(1, 1, 1, hd::payload(9));
  REQUIRE(inbox(*b).next(message_kind::data, 1, 0).body.size() == 9);
  b->send(0, 2, 0, hd::payload(3));  // sent before its death, received after it
  place.kill(1);
  std::this_thread::sleep_for(100ms);
  CHECK(in.next(message_kind::data, 2, 1).from == first);
  const hd::message died = in.next(message_kind::died);
  CHECK(died.from == first);
  CHECK(died.body.text().find("rank 1 was silent for ") == 0);
  CHECK(a.life_of(1) == 0);
  CHECK(a.life_of(2) != 0);
  try {
    a.send(1, 1, 2, hd::payload(0));
    CHECK(false);
  } catch (const hd::peer_error& e) {
    CHECK(e.peer() == 1);
    CHECK(std::string(e.what()) ==
          "heddle::messenger::send on rank 0 (peer 1): the life " + std::to_string(first.life) + " of rank 1 is over");
  }
  auto d = std::make_unique<hd::threads::messenger>(quick(), place, 1);  // restarted; knows of nobody
  const hd::message again = in.next(message_kind::joined, 0, 1);
  CHECK(again.from.life > first.life);
  CHECK_THROWS_AS(a.send(first, 1, 3, hd::payload(0)), hd::peer_error);
  a.send(again.from, 1, 4, hd::payload(0));
  const hd::message got = inbox(*d).next(message_kind::data, 1, 0);
  CHECK(got.id == 4);
  d->send(got.from, 2, 5, hd::payload(0));
  CHECK(in.next(message_kind::data, 2, 1).id == 5);
  b.reset();  // the dead one's goodbye is heard by nobody
  d.reset();
  CHECK(in.next(message_kind::left).from == again.from);
  const auto rest = a.receive(300ms);
  CHECK(!rest);  // rank 2 was there all the time
}

namespace {
// Between two ranks that may be cut off from each other for a while.
struct partitioned : hd::threads::transport {
  partitioned(hd::threads::meeting_place place, int rank, std::atomic<bool>& cut)
      : transport(std::move(place), rank), cut_(&cut) {}
  bool put(int peer, hd::payload& p) {
    if (!*cut_) return transport::put(peer, p);
    p = {};
    return true;
  }
  std::atomic<bool>* cut_;
};
}  // namespace

TEST_CASE("two ranks that hold each other for dead learn it, and meet again in other lives") {
  hd::threads::meeting_place place(2);
  std::atomic<bool> cut{false};
  hd::basic_messenger<partitioned> a(quick(), place, 0, cut), b(quick(), place, 1, cut);
  inbox in_a(a), in_b(b);
  a.connect(1);
  in_a.next(message_kind::joined, 0, 1);
  in_b.next(message_kind::joined, 0, 0);
  cut = true;
  in_a.next(message_kind::died, 0, 1);
  in_b.next(message_kind::died, 0, 0);
  cut = false;
  const std::uint64_t of_a = a.life(), of_b = b.life();
  CHECK(in_a.next(message_kind::refused).from == hd::address(1, of_b));
  CHECK(in_b.next(message_kind::refused).from == hd::address(0, of_a));
  a.renew();
  b.renew();
  const hd::message joined = in_a.next(message_kind::joined, 0, 1);
  CHECK(joined.from == hd::address(1, b.life()));
  CHECK(in_b.next(message_kind::joined, 0, 0).from == hd::address(0, a.life()));
  a.send(joined.from, 1, 7, hd::payload(0));
  CHECK(in_b.next(message_kind::data, 1, 0).id == 7);
}

TEST_CASE("a send to the own rank wakes all threads that wait for messages, one for each") {
  hd::messenger_options o = quick();
  o.beat = 5s;
  o.silence = 20s;
  hd::threads::messenger m(o, hd::threads::meeting_place(1), 0);
  const auto start = std::chrono::steady_clock::now();
  std::atomic<int> got{0};
  std::vector<std::thread> waiting;
  for (int i = 0; i < 3; ++i) waiting.emplace_back([&] { got += m.receive(10s).has_value(); });
  std::this_thread::sleep_for(50ms);
  for (std::uint64_t k = 0; k < 3; ++k) m.send(0, 1, k, hd::payload(0));
  for (auto& t : waiting) t.join();
  CHECK(got == 3);
  CHECK(std::chrono::steady_clock::now() - start < 2s);
}

namespace {
// Fails once when something is sent to a peer, as if memory were short.
struct failing : hd::threads::transport {
  using transport::transport;
  bool put(int peer, hd::payload& p) {
    if (failed_.exchange(true)) return transport::put(peer, p);
    throw std::bad_alloc();
  }
  std::atomic<bool> failed_{true};
};
struct failing_messenger : hd::basic_messenger<failing> {
  using basic_messenger::basic_messenger;
  void fail() { const_cast<failing&>(carrier()).failed_ = false; }
};
}  // namespace

TEST_CASE("what is thrown in the messenger's own thread is thrown by the next call") {
  hd::threads::meeting_place place(2);
  failing_messenger a(quick(), place, 0);
  hd::threads::messenger b(quick(), place, 1);
  a.connect(1);
  inbox(a).next(message_kind::joined, 0, 1);
  a.fail();
  std::this_thread::sleep_for(100ms);  // a beat fails
  CHECK_THROWS_AS(a.receive(0ms), std::bad_alloc);
  a.send(1, 1, 3, hd::payload(0));
  CHECK(inbox(b).next(message_kind::data, 1, 0).id == 3);
  a.fail();  // its goodbye
}

TEST_CASE("nobody answers at a rank") {
  hd::messenger_options o = quick();
  o.patience = 50ms;
  hd::threads::messenger m(o, hd::threads::meeting_place(2), 0);
  CHECK_THROWS_WITH(m.send(1, 0, 0, hd::payload(0)), Catch::Contains("nobody answered at rank 1 within 50 ms"));
  CHECK(!m.try_send(1, 0, 0, hd::payload(0)));
  o.silence = 15ms;
  CHECK_THROWS_AS(hd::threads::messenger(o, hd::threads::meeting_place(2), 0), hd::argument_error);
  CHECK_THROWS_AS(hd::threads::messenger(quick(), hd::threads::meeting_place(2), 2), hd::argument_error);
  CHECK_THROWS_AS(hd::threads::meeting_place(0), hd::argument_error);
}

TEST_CASE("a life with a number below a former one's is refused") {
  hd::threads::meeting_place place(2);
  hd::threads::messenger a(quick(), place, 0);
  inbox in(a);
  hd::messenger_options o = quick();
  constexpr std::uint64_t ahead = std::uint64_t{1} << 62;  // of this machine's clock
  o.life = ahead;
  {
    hd::threads::messenger b(o, place, 1);
    b.connect(0);
    CHECK(in.next(message_kind::joined).from == hd::address(1, ahead));
  }
  in.next(message_kind::left);
  o.life = 0;
  hd::threads::messenger c(o, place, 1);
  c.connect(0);
  const hd::message refused = inbox(c).next(message_kind::refused);
  CHECK(refused.body.text() == "rank 0 holds this life for dead");
  CHECK_THROWS_AS(c.send(0, 1, 1, hd::payload(0)), hd::peer_error);
  CHECK(a.life_of(1) == 0);
  c.renew();
  CHECK(c.life() > ahead);
  c.send(0, 1, 2, hd::payload(0));
  CHECK(in.next(message_kind::joined).from == hd::address(1, c.life()));
  CHECK(in.next(message_kind::data, 1).id == 2);
}

TEST_CASE("messages lost on the way are told, and cost no room") {
  hd::threads::meeting_place place(2);
  hd::messenger_options o = quick();
  o.window = 1000;
  o.patience = 10s;
  hd::basic_messenger<leaky> a(o, place, 0, std::vector<int>{3, 4, 9});
  hd::threads::messenger b(o, place, 1);
  inbox in(b);
  for (std::uint64_t k = 0; k < 10; ++k) {
    a.send(1, 1, k, hd::payload(400));  // of them, 0 to 2, 5 to 8 and no more come
    if (k == 3 || k == 4 || k == 9) {
      // Told by the next message or the next sign of life, before it is missed.
      const hd::message gap = in.next(message_kind::gap, 0, 0);
      CHECK(gap.body.text() == "464 bytes of rank 0 are lost");
      CHECK(gap.from.life == a.life());
    } else {
      CHECK(in.next(message_kind::data, 1, 0).id == k);
    }
  }
  a.send(1, 1, 10, hd::payload(900));  // there is room for all of the window
  CHECK(in.next(message_kind::data, 1, 0).id == 10);
}

TEST_CASE("a bad network, and exactly once above it") {
  hd::threads::meeting_place place(2);
  hd::messenger_options o = quick();
  o.silence = 20s;
  auto a = std::make_unique<hd::threads::messenger>(o, place, 0);
  hd::threads::messenger b(o, place, 1);
  const hd::losses bad{.drop = 0.2, .duplicate = 0.1, .reorder = 0.2, .delay = 0.1, .longest = 2ms, .seed = 11};
  hd::lossy worker(*a, bad), server(b, bad);
  static_assert(hd::messenger<decltype(worker)>);
  std::uint64_t total = 0, repeated = 0;
  std::thread serving([&] {
    std::uint64_t done = 0;  // the highest id served; a worker has one request at a time
    for (;;) {
      const auto got = server.receive(10s);
      if (!got || got->kind == message_kind::left) return;
      if (got->kind != message_kind::data) continue;
      if (got->id == done + 1) {
        ++total;
        ++done;
      } else {
        ++repeated;
      }
      server.send(got->from, 1, done, hd::payload(0));
    }
  });
  for (std::uint64_t id = 1; id <= 300; ++id) {
    for (bool answered = false; !answered;) {
      worker.send(1, 1, id, hd::payload(8));
      const auto until = std::chrono::steady_clock::now() + 3ms;
      while (!answered && std::chrono::steady_clock::now() < until) {
        const auto got = worker.receive(1ms);
        answered = got && got->kind == message_kind::data && got->id >= id;
      }
    }
  }
  a.reset();
  serving.join();
  CHECK(total == 300);
  CHECK(repeated > 20);
  CHECK_THROWS_AS(hd::lossy(b, {.drop = 1.5}), hd::argument_error);

  // What is late doesn't wait for room, nor go to a successor.
  {
    hd::threads::meeting_place here(2);
    hd::messenger_options narrow = quick();
    narrow.window = 200;
    narrow.patience = 10s;
    hd::threads::messenger from(narrow, here, 0), to(narrow, here, 1);
    inbox arrived(to);
    from.connect(1);
    inbox(from).next(message_kind::joined, 0, 1);
    hd::lossy late(from, {.delay = 1.0, .longest = 1ms});
    const auto start = std::chrono::steady_clock::now();
    for (std::uint64_t k = 0; k < 20; ++k) late.send(1, 1, k, hd::payload(100));
    while (std::chrono::steady_clock::now() < start + 20ms) late.receive(1ms);
    CHECK(std::chrono::steady_clock::now() - start < 5s);
    arrived.next(message_kind::data, 1, 0);
    to.renew();
    while (inbox(from).next(message_kind::joined, 0, 1).from.life != to.life()) continue;
    while (const auto got = to.receive(0ms)) CHECK(got->kind != message_kind::data);
    for (int i = 0; i < 20; ++i) late.receive(1ms);
    while (const auto got = to.receive(10ms)) CHECK(got->kind != message_kind::data);
  }

  // The same seed does the same to the same messages.
  const auto fates = [&](std::uint64_t seed) {
    hd::threads::meeting_place here(1);
    hd::threads::messenger m(o, here, 0);
    hd::lossy l(m, {.drop = 0.3, .duplicate = 0.3, .reorder = 0.3, .longest = 1h, .seed = seed});
    std::vector<std::uint64_t> ids;
    for (std::uint64_t k = 0; k < 200; ++k) l.send(0, 0, k, hd::payload(0));
    while (const auto got = l.receive(0ms)) ids.push_back(got->id);
    return ids;
  };
  const auto one = fates(1);
  CHECK(one == fates(1));
  CHECK(one != fates(2));
  CHECK(!std::is_sorted(one.begin(), one.end()));
}

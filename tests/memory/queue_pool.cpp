// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// The order of queues, against queues that do nothing but keep books: each knows what its work comes after.

#include <heddle/memory/queue_pool.hpp>
#include <heddle/memory/tracking.hpp>

#include "../support/lane.hpp"
#include "conformance.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>

namespace hd = heddle;

namespace {

constexpr std::size_t queues = 3;
using moments = std::array<std::size_t, queues>;  // of each queue

struct books {
  moments end{}, done{};                                   // work that was given to each queue, and that is done
  std::array<moments, queues> after{};                     // what each queue's next work comes after
  std::vector<std::pair<std::size_t, std::size_t>> waits;  // which queue waited for which
  std::size_t blocked = 0;                                 // how often the host waited
  std::size_t events = 0;                                  // that were recorded and are alive
  std::size_t broken = queues;                             // the queue that can't be waited for, if there is one
  // Work is done only when what it comes after is.
  void finish(std::size_t q, std::size_t until) {
    if (done[q] < until) done[q] = until;
    for (std::size_t i = 0; i < queues; ++i) done[i] = std::max(done[i], after[q][i]);
  }
};

struct scripted {
  struct event;
  struct queue {
    books* of = nullptr;
    std::size_t number = 0;
    void synchronize() const { of->finish(number, of->end[number]); }
    void wait(const event& e) const;
    friend bool operator==(queue, queue) = default;
  };
  struct event {
    books* of = nullptr;
    std::size_t number = 0, moment = 0;
    moments after{};
    event() = default;
    event(event&& e) noexcept { *this = std::move(e); }
    event& operator=(event&& e) noexcept {
      std::swap(of, e.of);
      std::swap(number, e.number);
      std::swap(moment, e.moment);
      std::swap(after, e.after);
      return *this;
    }
    ~event() {
      if (of) --of->events;
    }
    void record(queue q) {
      if (!of) ++q.of->events;
      of = q.of;
      number = q.number;
      moment = ++of->end[number];
      after = of->after[number];
      after[number] = moment;
    }
    bool ready() const { return !of || of->done[number] >= moment; }
    void synchronize() const {
      if (ready()) return;
      if (number == of->broken) throw std::runtime_error("this queue is broken");
      ++of->blocked;
      of->finish(number, moment);
    }
  };
};
void scripted::queue::wait(const event& e) const {
  of->waits.push_back({number, e.number});
  for (std::size_t i = 0; i < queues; ++i) of->after[number][i] = std::max(of->after[number][i], e.after[i]);
}

using pair = std::pair<std::size_t, std::size_t>;
using pool = hd::queue_pool<scripted, hd::tracking<>>;

struct fixture {
  books b;
  hd::tracking<> upstream{};
  pool memory;
  std::array<scripted::queue, queues> q;
  explicit fixture(hd::pool_options o) : memory(scripted{}, upstream, o) {
    for (std::size_t i = 0; i < queues; ++i) q[i] = {&b, i};
  }
  char* take(std::size_t i, std::size_t bytes) { return static_cast<char*>(memory.allocate(q[i], bytes, 64)); }
  void give(std::size_t i, void* p, std::size_t bytes) {
    ++b.end[i];  // work on it
    memory.deallocate(q[i], p, bytes, 64);
  }
};

}  // namespace

TEST_CASE("queue_pool: at its end it waits for every queue that can be waited for", "[memory][queue_pool]") {
  books b;
  hd::tracking<> upstream{};
  {
    pool memory{scripted{}, upstream, {}};
    for (std::size_t q = 0; q < queues; ++q) {
      const scripted::queue on{&b, q};
      void* const p = memory.allocate(on, 100, 64);
      ++b.end[q];
      memory.deallocate(on, p, 100, 64);
    }
    b.broken = 0;
    CHECK_THROWS_AS(memory.trim(), std::runtime_error);
  }
  CHECK(b.done == moments{0, b.end[1], b.end[2]});
  CHECK(upstream.bytes() == 0);
  CHECK(b.events == 0);
}

TEST_CASE("queue_pool: several threads on one pool, each with a queue of its own", "[memory][queue_pool]") {
  hd::tracking<> upstream{};
  std::atomic<std::size_t> spoiled = 0, refused = 0;
  {
    std::array<heddle_test::lane, 3> lanes;
    hd::queue_pool memory{heddle_test::lane_order{}, upstream, {.max = 1 << 14, .growth = 1 << 12}};
    const auto client = [&](std::size_t me) {
      std::mt19937 random(static_cast<unsigned>(me));
      const heddle_test::lane_order::queue q{&lanes[me]};
      for (unsigned k = 0; k < 300; ++k) {
        const std::size_t bytes = 1 + random() % 3000;
        unsigned char* p = nullptr;
        try {
          p = static_cast<unsigned char*>(random() % 20 ? memory.allocate(q, bytes, 64)
                                                        : memory.allocate_sync(bytes, 64));
        } catch (const hd::memory_error&) {  // the others have it
          ++refused;
          continue;
        }
        const auto mark = static_cast<unsigned char>(3 * k + me);
        lanes[me].push([p, bytes, mark] { std::memset(p, mark, bytes); });
        lanes[me].push([p, bytes, mark, &spoiled] {
          spoiled += static_cast<std::size_t>(std::count_if(p, p + bytes, [=](unsigned char c) { return c != mark; }));
        });
        if (k % 50 == 49) {
          q.synchronize();
          memory.deallocate_sync(p, bytes, 64);
          memory.trim();
        } else {
          memory.deallocate(q, p, bytes, 64);  // while it is written
        }
      }
    };
    std::array<std::thread, 3> clients;
    for (std::size_t i = 0; i < clients.size(); ++i) clients[i] = std::thread(client, i);
    for (std::thread& t : clients) t.join();
    CHECK(memory.in_use() == 0);
    CHECK(memory.refused() == 0);
  }
  CHECK(spoiled == 0);
  CHECK(refused < 900);
  CHECK(upstream.bytes() == 0);
}

TEST_CASE("queue_pool conforms", "[memory][queue_pool]") {
  heddle_test::conforms_to_resource([] { return hd::queue_pool{hd::host{}, hd::host_resource{}}; });
  heddle_test::conforms_to_resource([] {
    return hd::queue_pool{hd::host{}, hd::host_resource{}, {.initial = 1000192, .max = std::size_t{64} << 20}};
  });
  static_assert(hd::resource<pool, scripted::queue>);
}

TEST_CASE("queue_pool: its own queue has a block again at once, another one waits for the event",
          "[memory][queue_pool]") {
  fixture f({.initial = 1024, .max = 1024});
  char* const x = f.take(0, 1024);
  f.give(0, x, 1024);
  CHECK(f.take(0, 1024) == x);
  f.give(0, x, 1024);
  CHECK(f.b.waits.empty());
  CHECK(f.take(1, 256) == x);
  CHECK(f.b.waits == std::vector<pair>{{1, 0}});
  CHECK(f.take(2, 256) == x + 256);  // of the rest, which is still the first queue's
  CHECK(f.b.waits == std::vector<pair>{{1, 0}, {2, 0}});
  f.give(1, x, 256);
  f.b.finish(0, f.b.end[0]);
  CHECK(f.take(2, 512) == x + 512);  // done: nothing to wait for
  CHECK(f.b.waits.size() == 2);
  // X was the first queue's, then the second's: the third comes after both.
  CHECK(f.take(2, 256) == x);
  CHECK(f.b.after[2][1] == f.b.end[1]);
  CHECK(f.b.blocked == 0);
}

TEST_CASE("queue_pool: who gives a little back doesn't take what is free for all", "[memory][queue_pool]") {
  fixture f({.initial = 4096, .max = 4096});
  char* const x = f.take(0, 64);
  f.give(0, x, 64);
  CHECK(f.take(1, 1024) == x + 64);
  CHECK(f.memory.allocate_sync(1024, 64) == x + 64 + 1024);
  CHECK(f.b.waits.empty());
  CHECK(f.b.blocked == 0);
}

TEST_CASE("queue_pool: three queues, and the last comes after the first", "[memory][queue_pool]") {
  fixture f({.initial = 64, .max = 64});
  char* const x = f.take(0, 64);
  f.give(0, x, 64);
  const std::size_t first = f.b.end[0];
  f.take(1, 64);
  f.give(1, x, 64);
  f.take(2, 64);
  CHECK(f.b.waits == std::vector<pair>{{1, 0}, {2, 1}});
  CHECK(f.b.after[2][0] >= first);
}

TEST_CASE("queue_pool: neighbours of different queues are joined when nothing else will do", "[memory][queue_pool]") {
  fixture f({.initial = 1024, .max = 1024});
  char* const a = f.take(0, 512);
  char* const b = f.take(1, 512);
  f.give(0, a, 512);
  f.give(1, b, 512);
  SECTION("a third one waits for both, and what is left comes after its waits") {
    CHECK(f.take(2, 960) == a);
    CHECK(f.b.waits == std::vector<pair>{{2, 0}, {2, 1}});
    CHECK(f.take(1, 64) == a + 960);
    CHECK(f.b.waits.back() == pair{1, 2});
    CHECK(f.b.after[1][0] == f.b.end[0]);
    CHECK_THROWS_AS(f.take(1, 64), hd::memory_error);
  }
  SECTION("one of the two waits for the other") {
    CHECK(f.take(0, 1024) == a);
    CHECK(f.b.waits == std::vector<pair>{{0, 1}});
  }
  SECTION("usable at once means that the host waits") {
    CHECK(f.memory.allocate_sync(1024, 64) == a);
    CHECK(f.b.waits.empty());
    CHECK(f.b.blocked == 2);
  }
  SECTION("what goes back to the upstream is done with") {
    CHECK(f.memory.trim() == 1024);
    CHECK(f.b.blocked == 2);
    CHECK(f.upstream.bytes() == 0);
  }
}

TEST_CASE("queue_pool: any size up to the limit, while nothing is live", "[memory][queue_pool]") {
  fixture f({.initial = 256, .max = 8192});
  f.give(0, f.take(0, 256), 256);
  f.give(0, f.take(0, 8192), 8192);  // the first chunk must go, so the host waits for what uses it
  CHECK(f.b.blocked == 1);
  for (const std::size_t bytes : {8192, 64, 4097, 8192, 100, 8191}) {
    for (std::size_t i = 0; i < queues; ++i) f.give(i, f.take(i, bytes), bytes);
    CHECK(f.memory.held() <= 8192);
    CHECK(f.memory.in_use() == 0);
  }
  char* const p = f.take(0, 4096);
  try {
    f.take(1, 5000);
    FAIL("5000 beside 4096 of 8192");
  } catch (const hd::memory_error& e) {
    CHECK(e.requested() == 5000);
    CHECK(e.limit() == 8192);
    CHECK(e.in_use() == 4096);
    CHECK(e.largest_free() == 4096);
  }
  f.give(0, p, 4096);
  f.give(0, p, 4096);
  CHECK(f.memory.refused() == 1);
}

TEST_CASE("queue_pool: a step that gives all back soon runs in one chunk", "[memory][queue_pool]") {
  fixture f({});
  for (int step = 0; step < 3; ++step) {
    std::array<void*, 6> held{};
    for (std::size_t i = 0; i < 6; ++i) held[i] = f.take(i % queues, std::size_t{3} << 20);
    for (std::size_t i = 0; i < 6; ++i) f.give(i % queues, held[i], std::size_t{3} << 20);
    for (const scripted::queue& q : f.q) q.synchronize();
  }
  f.take(0, 64);
  CHECK(f.upstream.live() == 1);
  CHECK(f.b.blocked == 0);
}

TEST_CASE("queue_pool: a queue that never comes forward holds few events", "[memory][queue_pool]") {
  fixture f({.initial = 1 << 20, .max = 1 << 20});
  std::vector<void*> all;
  for (int i = 0; i < 1000; ++i) all.push_back(f.take(0, 64));
  for (void* p : all) f.give(0, p, 64);
  CHECK(f.b.events <= 32);
  char* const last = f.take(1, 1 << 20);
  CHECK(f.b.after[1][0] == f.b.end[0]);
  f.give(1, last, 1 << 20);
  CHECK(f.b.events <= 2 * 32);
}

TEST_CASE("queue_pool: a queue with the handle of an earlier one is another queue", "[memory][queue_pool]") {
  struct numbered : scripted {
    struct queue : scripted::queue {
      unsigned long long serial = 0;
      unsigned long long id() const { return serial; }
      bool operator==(const queue& b) const { return number == b.number; }
    };
  };
  books b;
  hd::queue_pool memory{numbered{}, hd::host_resource{}, {.initial = 64, .max = 64}};
  const numbered::queue first{{&b, 0}, 1}, second{{&b, 0}, 2};
  CHECK(first == second);
  memory.deallocate(first, memory.allocate(first, 64, 64), 64, 64);
  memory.deallocate(first, memory.allocate(first, 64, 64), 64, 64);
  CHECK(b.waits.empty());
  memory.allocate(second, 64, 64);
  CHECK(b.waits.size() == 1);
}

TEST_CASE("queue_pool: a queue that can't be marked keeps its block", "[memory][queue_pool]") {
  struct gone : scripted {
    struct event : scripted::event {
      void record(queue) { throw hd::error("the queue is no more"); }
    };
  };
  books b;
  hd::queue_pool memory{gone{}, hd::host_resource{}, {.initial = 64, .max = 64}};
  void* const p = memory.allocate({&b, 0}, 64, 64);
  memory.deallocate({&b, 0}, p, 64, 64);
  CHECK(memory.refused() == 1);
  CHECK(memory.in_use() == 64);
  memory.deallocate_sync(p, 64, 64);
  CHECK(memory.in_use() == 0);
}

namespace {

// Who used a byte last, and until when.
struct use {
  std::size_t number, moment;
};
struct ledger {
  books b;
  std::map<const char*, use> uses;  // by the first byte of each 64
  std::size_t early = 0;
  bool done(const use& u) const { return b.done[u.number] >= u.moment; }
};

// Takes note of chunks that come back while a queue may use them.
struct watched {
  std::shared_ptr<ledger> l;
  hd::host_resource upstream{};
  void* allocate_sync(std::size_t bytes, std::size_t alignment) { return upstream.allocate_sync(bytes, alignment); }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    const auto begin = l->uses.lower_bound(static_cast<char*>(p));
    const auto end = l->uses.lower_bound(static_cast<char*>(p) + bytes);
    for (auto u = begin; u != end; ++u) l->early += !l->done(u->second);
    l->uses.erase(begin, end);
    upstream.deallocate_sync(p, bytes, alignment);
  }
  friend bool operator==(const watched& a, const watched& b) { return a.l == b.l; }
};

}  // namespace

TEST_CASE("queue_pool: no byte is used again before the work on it, whatever the order of calls",
          "[memory][queue_pool]") {
  std::size_t waits = 0;
  for (unsigned seed = 0; seed < 500; ++seed) {
    std::mt19937 random(seed);
    const auto l = std::make_shared<ledger>();
    hd::queue_pool memory{scripted{},
                          watched{l},
                          {.initial = random() % 4096, .max = 8192 + random() % 65536, .growth = random() % 9000}};
    struct piece {
      char* p;
      std::size_t bytes;
    };
    std::vector<piece> held;
    std::size_t bytes_live = 0;
    for (int i = 0; i < 300; ++i) {
      const std::size_t n = random() % queues;
      const scripted::queue q{&l->b, n};
      if (random() % 4 == 0) l->b.finish(n, l->b.done[n] + random() % 4);
      if (l->b.done[n] > l->b.end[n]) l->b.done[n] = l->b.end[n];
      if (random() % 9 < 5) {
        const std::size_t bytes = 1 + random() % (random() % 5 ? 700 : 9000);
        const bool at_once = random() % 12 == 0;
        char* p = nullptr;
        try {
          p = static_cast<char*>(at_once ? memory.allocate_sync(bytes, 64) : memory.allocate(q, bytes, 64));
        } catch (const hd::memory_error& e) {
          CHECK(e.in_use() == memory.in_use());
          CHECK(e.requested() > e.largest_free());
          continue;
        }
        for (auto u = l->uses.lower_bound(p); u != l->uses.end() && u->first < p + bytes; ++u) {
          const bool after = !at_once && (u->second.number == n || l->b.after[n][u->second.number] >= u->second.moment);
          l->early += !after && !l->done(u->second);
        }
        l->b.end[n] += !at_once;  // work on it
        held.push_back({p, bytes});
        bytes_live += bytes;
      } else if (!held.empty()) {
        const std::size_t k = random() % held.size();
        const piece x = held[k];
        const bool at_once = random() % 12 == 0;
        if (at_once) {
          memory.deallocate_sync(x.p, x.bytes, 64);
        } else {
          const std::size_t moment = ++l->b.end[n];  // the last work on it
          memory.deallocate(q, x.p, x.bytes, 64);
          for (std::size_t at = 0; at < x.bytes; at += 64) l->uses[x.p + at] = {n, moment};
        }
        if (at_once) l->uses.erase(l->uses.lower_bound(x.p), l->uses.lower_bound(x.p + x.bytes));
        bytes_live -= x.bytes;
        held[k] = held.back();
        held.pop_back();
      }
      REQUIRE(memory.in_use() >= bytes_live);
      REQUIRE(memory.held() <= memory.options().max);
    }
    for (const piece& x : held) memory.deallocate({&l->b, 0}, x.p, x.bytes, 64);
    waits += l->b.waits.size();
    memory.trim();
    CHECK(memory.held() == 0);
    CHECK(memory.refused() == 0);
    REQUIRE(l->early == 0);
  }
  CHECK(waits > 3000);
}

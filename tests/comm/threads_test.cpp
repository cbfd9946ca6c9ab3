// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/gather.hpp>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/comm/self.hpp>
#include <heddle/comm/threads.hpp>

#include "../support/catch.hpp"
#include "conformance.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace hd = heddle;
using namespace std::chrono_literals;
using heddle_test::conforms_to_communicator;
using heddle_test::findings;

namespace {

hd::threads::options few(int ranks, std::chrono::nanoseconds deadline = 300ms) {
  return {.ranks = ranks, .deadline = deadline};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// What each rank's f ended with: its comm_error, or nothing.
struct ended {
  std::optional<hd::comm_error> error;
  bool other = false;  // an exception of another type
};

std::vector<ended> outcome(const hd::threads::options& o, const std::function<void(hd::threads::communicator&)>& f) {
  std::vector<ended> all(static_cast<std::size_t>(o.ranks));
  try {
    hd::threads::run(o, [&](auto& comm) {
      ended& mine = all[static_cast<std::size_t>(comm.rank())];
      try {
        f(comm);
      } catch (const hd::comm_error& e) {
        mine.error = e;
        throw;
      } catch (...) {
        mine.other = true;
        throw;
      }
    });
  } catch (...) {
  }
  return all;
}

struct boom : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace

TEST_CASE("self conforms") {
  conforms_to_communicator({1}, [](int, auto f) {
    hd::self comm;
    f(comm);
  });
  hd::self comm;
  int word = 0;
  const hd::outgoing out{0, &word, 4, 1};
  CHECK_THROWS_AS(comm.exchange({}, std::span(&out, 1), {}, [](std::span<const hd::arrival>) {}), hd::argument_error);
}

TEST_CASE("threads conforms") {
  conforms_to_communicator({1, 2, 3, 5, 8}, [](int ranks, auto f) { hd::threads::run(few(ranks, 2s), f); });
}

TEST_CASE("counting conforms") {
  conforms_to_communicator({1, 2, 5}, [](int ranks, auto f) {
    hd::threads::run(few(ranks, 2s), [&](auto& comm) {
      hd::counting counted(comm);
      f(counted);
    });
  });
}

TEST_CASE("a run needs a rank") {
  CHECK_THROWS_AS(hd::threads::run(0, [](auto&) {}), hd::argument_error);
  CHECK_THROWS_AS(hd::threads::run(-3, [](auto&) {}), hd::argument_error);
}

TEST_CASE("a peer that isn't another rank is an argument error") {
  for (const int peer : {-1, 0, 2, 7}) {
    findings found;
    CHECK_THROWS_AS(hd::threads::run(few(2),
                                     [&](auto& comm) {
                                       int word = 0;
                                       const hd::outgoing out{peer, &word, 4, 1};
                                       const hd::incoming in{peer, &word, 4};
                                       if (comm.rank() == 0 && peer % 2 == 0)
                                         comm.exchange({}, {}, std::span(&in, 1), [](std::span<const hd::arrival>) {});
                                       else if (comm.rank() == 0)
                                         comm.exchange({}, std::span(&out, 1), {}, [](std::span<const hd::arrival>) {});
                                     }),
                    hd::argument_error);
  }
}

TEST_CASE("a rank that throws between two collectives is named by the others' pending call") {
  for (const int guilty : {0, 2, 4}) {
    const auto all = outcome(few(5, 20s), [&](auto& comm) {
      hd::barrier(comm);
      if (comm.rank() == guilty) throw boom("the disk is full");
      std::vector<float> data(100);
      hd::all_reduce(comm, hd::ring{}, std::span<float>(data));
    });
    for (int r = 0; r < 5; ++r) {
      const ended& e = all[static_cast<std::size_t>(r)];
      INFO("rank " << r << ", guilty " << guilty);
      if (r == guilty) {
        CHECK(e.other);
        continue;
      }
      REQUIRE(e.error);
      CHECK(e.error->peer() == guilty);
      CHECK(e.error->rank() == r);
      // Or the barrier, where the guilty one was through before this rank.
      CHECK((e.error->operation() == "all_reduce" || e.error->operation() == "barrier"));
      CHECK(has(e.error->what(), "the disk is full"));
    }
  }
}

TEST_CASE("run rethrows the first exception, after every rank has ended") {
  std::atomic<int> running{0};
  try {
    hd::threads::run(few(4, 20s), [&](auto& comm) {
      struct guard {
        std::atomic<int>& n;
        ~guard() { --n; }
      };
      ++running;
      const guard last{running};
      if (comm.rank() == 3) throw boom("first");
      hd::barrier(comm);
    });
    FAIL("nothing was thrown");
  } catch (const boom& e) {
    CHECK(std::string(e.what()) == "first");
  }
  CHECK(running == 0);
  CHECK_THROWS_AS(hd::threads::run(2,
                                   [](auto& comm) {
                                     if (comm.rank() == 1)
                                       throw 42;
                                     else
                                       hd::barrier(comm);
                                   }),
                  int);
}

TEST_CASE("a rank that returns early is named within the deadline") {
  const auto use = [](const char* name, const auto& call) {
    const auto all = outcome(few(4), [&](auto& comm) {
      hd::barrier(comm);
      if (comm.rank() == 2) return;
      call(comm);
    });
    for (const int r : {0, 1, 3}) {
      const ended& e = all[static_cast<std::size_t>(r)];
      INFO(name << " on rank " << r);
      REQUIRE(e.error);
      INFO(e.error->what());
      CHECK(has(e.error->what(), "rank 2"));
      CHECK(has(e.error->what(), "within 300 ms"));
      CHECK(e.error->operation() == name);
      CHECK(e.error->peer() == 2);
    }
  };
  std::vector<std::vector<float>> data(4, std::vector<float>(100));
  const auto mine = [&](auto& comm) { return std::span<float>(data[static_cast<std::size_t>(comm.rank())]); };
  use("all_reduce", [&](auto& comm) { hd::all_reduce(comm, hd::ring{}, mine(comm)); });
  use("all_reduce", [&](auto& comm) { hd::all_reduce(comm, hd::direct{}, mine(comm)); });
  use("all_reduce", [&](auto& comm) { hd::all_reduce(comm, hd::native{}, mine(comm)); });
  use("barrier", [&](auto& comm) { hd::barrier(comm); });
  use("control", [&](auto& comm) { (void)comm.duplicate(); });
}

TEST_CASE("who waits for one that waits itself blames the last in the chain") {
  const auto all = outcome(few(4), [&](auto& comm) {
    if (comm.rank() == 3) return;
    std::this_thread::sleep_for(comm.rank() * 70ms);  // rank 0 is the first whose patience ends
    int word = 0;
    const hd::incoming in{comm.rank() + 1, &word, sizeof word};
    comm.exchange({}, {}, std::span(&in, 1), [](std::span<const hd::arrival>) {});
  });
  for (const int r : {0, 1, 2}) {
    REQUIRE(all[static_cast<std::size_t>(r)].error);
    CHECK(all[static_cast<std::size_t>(r)].error->peer() == 3);
  }
}

TEST_CASE("a wait that lasts is reported with operation and missing ranks") {
  struct listener {
    std::mutex mutex;
    std::vector<std::string> reports;
    std::atomic<int> count{0};
  } heard;
  std::vector<std::string>& reports = heard.reports;
  std::atomic<int>& count = heard.count;
  hd::threads::options o = few(4, 60s);
  o.stall = 30ms;
  o.stall_context = &heard;
  o.on_stall = [](void* context, const std::string& report) {
    auto& l = *static_cast<listener*>(context);
    std::lock_guard lock(l.mutex);
    l.reports.push_back(report);
    ++l.count;
  };
  const auto of_rank = [&](int rank, const std::string& part) {
    int n = 0;
    for (const std::string& r : reports) n += has(r, "rank " + std::to_string(rank) + " has waited") && has(r, part);
    return n;
  };
  hd::threads::run(o, [&](auto& comm) {  // at the gate: ranks 1 and 3 come late
    std::vector<float> data(10, 1.0f);
    while (comm.rank() % 2 && count < 2) std::this_thread::yield();
    hd::all_reduce(comm, hd::native{}, std::span<float>(data));
  });
  const std::string expected = "all_reduce(count 10, f32, native, reduction 1, call 0) for more than 30 ms for rank 1, 3";
  for (const int r : {0, 2}) CHECK(of_rank(r, expected) == 1);
  reports.clear();
  count = 0;
  hd::threads::run(o, [&](auto& comm) {  // in an exchange: rank 2 comes late
    std::vector<float> data(10, 1.0f);
    while (comm.rank() == 2 && count < 3) std::this_thread::yield();
    hd::all_reduce(comm, hd::ring{}, std::span<float>(data));
  });
  CHECK(of_rank(3, "for rank 2; not waiting: rank ") == 1);
  CHECK(of_rank(0, "all_reduce(") == 1);
  CHECK(of_rank(1, "all_reduce(") == 1);
  reports.clear();
  o.stall = 0ms;  // off
  hd::threads::run(o, [&](auto& comm) {
    if (comm.rank() == 1) std::this_thread::sleep_for(50ms);
    hd::barrier(comm);
  });
  CHECK(reports.empty());
}

TEST_CASE("a rank in another call gives an error on every rank") {
  const auto differ = [](const char* name, bool names_it, const auto& usual, const auto& odd) {
    for (const int ranks : {3, 4}) {
      const auto all = outcome(few(ranks, names_it ? 20s : 300ms), [&](auto& comm) {
        if (comm.rank() == 2)
          odd(comm);
        else
          usual(comm);
        hd::barrier(comm);
      });
      for (int r = 0; r < ranks; ++r) {
        const ended& e = all[static_cast<std::size_t>(r)];
        INFO("another " << name << ", rank " << r << " of " << ranks);
        REQUIRE(e.error);
        INFO(e.error->what());
        if (names_it) {
          CHECK(has(e.error->what(), "calls differ: rank "));
          CHECK(has(e.error->what(), "rank 2 is in "));
        } else {
          CHECK((has(e.error->what(), "calls differ") || has(e.error->what(), "did not reach")));
        }
      }
    }
  };
  const auto reduce = [](auto topology, auto zero, std::size_t n, auto op) {
    return [=](auto& comm) {
      std::vector<decltype(zero)> data(n, zero);
      hd::all_reduce(comm, topology, std::span<decltype(zero)>(data), op);
    };
  };
  const auto ring = reduce(hd::ring{}, 1.0f, 24, hd::sum{});
  differ("count", true, ring, reduce(hd::ring{}, 1.0f, 36, hd::sum{}));
  differ("type of the same size", true, ring, reduce(hd::ring{}, 1, 24, hd::sum{}));
  differ("type of another size", true, ring, reduce(hd::ring{}, 1.0, 24, hd::sum{}));
  differ("operation", true, ring, reduce(hd::ring{}, 1.0f, 24, hd::max{}));
  differ("mean", true, ring, reduce(hd::ring{}, 1.0f, 24, hd::mean{}));
  differ("kind", true, ring, [](auto& comm) {
    std::vector<float> data(24);
    std::vector<std::size_t> counts(static_cast<std::size_t>(comm.size()), 24 / static_cast<std::size_t>(comm.size()));
    hd::all_gather(comm, hd::ring{}, std::span<float>(data), std::span<const std::size_t>(counts));
  });
  differ("kind that waits elsewhere", false, ring, [](auto& comm) {
    std::vector<float> data(24);
    hd::broadcast(comm, std::span<float>(data));
  });
  differ("topology", true, ring, reduce(hd::direct{}, 1.0f, 24, hd::sum{}));
  differ("topology of the same messages", true, ring, reduce(hd::mixed_radix{}, 1.0f, 24, hd::sum{}));
  const auto pairs = reduce(hd::hierarchical<>{.group = 2}, 1.0f, 24, hd::sum{});
  differ("group size", false, pairs, reduce(hd::hierarchical<>{.group = 3}, 1.0f, 24, hd::sum{}));
  differ("call earlier", true, ring, [&](auto& comm) {
    comm.next_sequence();
    ring(comm);
  });
  const auto native = reduce(hd::native{}, 1.0f, 24, hd::sum{});
  const auto each = [&](const char* name, const auto& odd) {
    for (int r = 0; r < 3; ++r) {
      const auto all = outcome(few(3, 20s), [&](auto& comm) {
        if (comm.rank() == r)
          odd(comm);
        else
          native(comm);
      });
      for (const ended& e : all) {
        INFO("native, another " << name << " on rank " << r);
        REQUIRE(e.error);
        CHECK(has(e.error->what(), "rank " + std::to_string(r)));
        CHECK(has(e.error->what(), "calls differ"));
      }
    }
  };
  each("count", reduce(hd::native{}, 1.0f, 25, hd::sum{}));
  each("count, a long one", reduce(hd::native{}, 1.0f, 1 << 20, hd::sum{}));
  each("type", reduce(hd::native{}, 1, 24, hd::sum{}));
  each("operation", reduce(hd::native{}, 1.0f, 24, hd::min{}));
  differ("topology, native", false, native, ring);
}

TEST_CASE("ranks on different topologies hear the names of both") {
  const auto all = outcome(few(2, 20s), [&](auto& comm) {
    std::vector<float> data(24);
    if (comm.rank() == 0) hd::all_reduce(comm, hd::ring{}, std::span<float>(data));
    else hd::all_reduce(comm, hd::hierarchical<>{.group = 1}, std::span<float>(data));
  });
  for (const ended& e : all) {
    REQUIRE(e.error);
    INFO(e.error->what());
    CHECK(has(e.error->what(), "ring, reduction"));
    CHECK(has(e.error->what(), "hierarchical (settings "));
  }
  // Names without settings have a tag of their own, settings change it, and names of users have one, too.
  using hd::detail::topology_tag;
  CHECK(topology_tag("") == 0);
  CHECK(topology_tag("ring") != topology_tag("direct"));
  CHECK(topology_tag("torus_2d 4") != topology_tag("torus_2d 8"));
  CHECK(topology_tag("torus_2d 4") >> 11 == topology_tag("torus_2d") >> 11);
  CHECK(topology_tag("star") != topology_tag("snowflake"));
  CHECK(hd::detail::topology_text(topology_tag("torus_2d")) == "torus_2d");
  CHECK(has(hd::detail::topology_text(topology_tag("star")), "user's (settings "));
}

TEST_CASE("a rank may throw before any of its calls while its buffers are on its stack") {
  // Every kind of call, its buffers local to it, so that a peer that still reads them is seen by AddressSanitizer.
  using call = std::function<void(hd::threads::communicator&)>;
  const auto reduce = [](auto topology, auto zero) -> call {
    return [topology, zero](hd::threads::communicator& comm) {
      std::array<decltype(zero), 300> data;
      data.fill(zero);
      hd::all_reduce(comm, topology, std::span<decltype(zero)>(data), hd::mean{});
    };
  };
  const std::vector<call> calls{
      reduce(hd::ring{}, 1.0f),
      reduce(hd::direct{}, hd::bfloat16(1.0f)),
      reduce(hd::native{}, 1.0),
      [](auto& comm) {
        std::array<int, 100> data{};
        hd::broadcast(comm, std::span<int>(data), 1);
      },
      [](auto& comm) { hd::barrier(comm); },
      [](auto& comm) {
        std::array<int, 3> mine{};
        std::vector<int> all(3 * static_cast<std::size_t>(comm.size()));
        hd::all_gather(comm, hd::halving_doubling{}, std::span<const int>(mine), std::span<int>(all));
      },
      [](auto& comm) {
        auto second = comm.duplicate();
        std::array<int, 1> word{};
        hd::broadcast(second, std::span<int>(word));
      },
      reduce(hd::torus_2d{}, hd::float16(1.0f)),
  };
  for (const int ranks : {2, 4}) {
    for (int guilty = 0; guilty < ranks; ++guilty) {
      for (std::size_t k = 0; k <= calls.size(); ++k) {
        INFO("rank " << guilty << " of " << ranks << " throws before call " << k);
        std::vector<int> failed(static_cast<std::size_t>(ranks), -1);
        std::string thrown;
        try {
          hd::threads::run(few(ranks, 20s), [&](auto& comm) {
            try {
              for (std::size_t i = 0; i < calls.size(); ++i) {
                if (comm.rank() == guilty && i == k) throw boom("at call " + std::to_string(k));
                calls[i](comm);
              }
              if (comm.rank() == guilty && k == calls.size()) throw boom("at call " + std::to_string(k));
            } catch (const hd::comm_error& e) {
              failed[static_cast<std::size_t>(comm.rank())] = e.peer();
              throw;
            }
          });
        } catch (const boom& e) {
          thrown = e.what();
        }
        CHECK(thrown == "at call " + std::to_string(k));
        for (int r = 0; r < ranks; ++r) {
          const int named = failed[static_cast<std::size_t>(r)];
          if (r == guilty)
            CHECK(named == -1);
          else if (k < calls.size())
            CHECK(named == guilty);
          else
            CHECK((named == guilty || named == -1));  // the last call may be over
        }
      }
    }
  }
}

TEST_CASE("a user's function that throws inside a call doesn't hang the others") {
  // In apply of an exchange.
  auto all = outcome(few(4, 20s), [&](auto& comm) {
    std::array<int, 64> mine{}, theirs{};
    for (int round = 0; round < 3; ++round) {
      const hd::outgoing out{(comm.rank() + 1) % 4, mine.data(), sizeof mine, 1};
      const hd::incoming in{(comm.rank() + 3) % 4, theirs.data(), sizeof theirs};
      comm.exchange({}, std::span(&out, 1), std::span(&in, 1), [&](std::span<const hd::arrival>) {
        if (comm.rank() == 1 && round == 1) throw boom("in apply");
      });
    }
  });
  for (const int r : {0, 2, 3}) {
    REQUIRE(all[static_cast<std::size_t>(r)].error);
    CHECK(all[static_cast<std::size_t>(r)].error->peer() == 1);
    CHECK(has(all[static_cast<std::size_t>(r)].error->what(), "in apply"));
  }
  CHECK(all[1].other);

  // In the operation of an all-reduce.
  const auto inside = [&](const auto& topology) {
    return outcome(few(4, 20s), [&](auto& comm) {
      std::vector<int> data(400, comm.rank());
      const auto op = [&](int a, int b) {
        if (comm.rank() == 1) throw boom("in the operation");
        return a > b ? a : b;
      };
      for (int k = 0; k < 2; ++k) hd::all_reduce(comm, topology, std::span<int>(data), op);
    });
  };
  for (const auto& outcomes : {inside(hd::ring{}), inside(hd::direct{}), inside(hd::native{})}) {
    for (const int r : {0, 2, 3}) {
      REQUIRE(outcomes[static_cast<std::size_t>(r)].error);
      CHECK(outcomes[static_cast<std::size_t>(r)].error->peer() == 1);
      CHECK(has(outcomes[static_cast<std::size_t>(r)].error->what(), "in the operation"));
    }
    CHECK(outcomes[1].other);
  }
}

TEST_CASE("a failing rank waits until nobody reads its buffers") {
  findings found;
  std::atomic<bool> reading{false};
  CHECK_THROWS_AS(hd::threads::run(few(3, 20s),
                                   [&](auto& comm) {
                                     std::vector<int> words(1000, 7);
                                     const std::size_t bytes = words.size() * sizeof(int);
                                     if (comm.rank() == 0) {  // lends its buffer to rank 1; fails because rank 2 does
                                       const hd::outgoing out{1, words.data(), bytes, 1};
                                       const hd::incoming in{2, words.data(), bytes};
                                       try {
                                         comm.exchange({}, std::span(&out, 1), std::span(&in, 1),
                                                       [](std::span<const hd::arrival>) {});
                                       } catch (const hd::comm_error&) {
                                         std::fill(words.begin(), words.end(), -1);
                                         throw;
                                       }
                                     } else if (comm.rank() == 1) {  // reads it slowly
                                       const hd::incoming in{0, nullptr, bytes};
                                       comm.exchange({}, {}, std::span(&in, 1), [&](std::span<const hd::arrival> a) {
                                         reading = true;
                                         std::this_thread::sleep_for(100ms);
                                         std::vector<int> seen(1000);
                                         std::memcpy(seen.data(), a[0].data, bytes);
                                         found.expect(seen == std::vector<int>(1000, 7), 1,
                                                      "the buffer went away while it was read");
                                       });
                                     } else {
                                       while (!reading) std::this_thread::yield();
                                       throw boom("gone");
                                     }
                                   }),
                  boom);
  CHECK(found.text() == "");
}

TEST_CASE("a failure on one thread of a rank wakes the peers of its other threads") {
  const auto all = outcome(few(3, 20s), [&](auto& comm) {
    auto second = comm.duplicate();
    std::exception_ptr thrown;
    std::thread other([&] {
      try {
        for (int k = 0; k < 1000000; ++k) hd::barrier(second);
      } catch (const hd::comm_error&) {
        thrown = std::current_exception();
      }
    });
    if (comm.rank() == 1) comm.fail("given up");
    other.join();
    if (thrown) std::rethrow_exception(thrown);
  });
  for (const ended& e : all) {
    REQUIRE(e.error);
    CHECK(e.error->peer() == 1);
  }
}

TEST_CASE("many more ranks than cores") {
  findings found;
  hd::threads::run(8, [&](auto& comm) {
    for (int k = 0; k < 300; ++k) hd::barrier(comm);
    std::vector<float> data(64, 1.0f);
    for (int k = 0; k < 100; ++k) hd::all_reduce(comm, hd::native{}, std::span<float>(data), hd::mean{});
    found.expect(data == std::vector<float>(64, 1.0f), comm.rank(), "mean");
  });
  hd::threads::run(33, [&](auto& comm) {
    std::vector<int> data(10, 1);
    hd::all_reduce(comm, hd::ring{}, std::span<int>(data));
    found.expect(data == std::vector<int>(10, 33), comm.rank(), "sum of 33 ranks");
  });
  CHECK(found.text() == "");
}

TEST_CASE("the native all-reduce of any lengths in a row, on a communicator and its copies") {
  // Up to 4 KiB elements are copied to where all see them, above each rank reduces a block; 33 ranks have less room.
  for (const int p : {1, 2, 3, 5, 8, 33}) {
    findings found;
    hd::threads::run(few(p, 30s), [&](auto& comm) {
      auto copy = comm;
      std::uint32_t state = 1;  // the same lengths on every rank
      for (int k = 0; k < 60; ++k) {
        state = state * 1664525u + 1013904223u;
        static constexpr std::size_t sizes[] = {0, 1, 17, 992, 1023, 1024, 1025, 10007};
        const std::size_t n = state >> 28 < 8 ? sizes[state >> 28] : (state >> 8) % 2500;
        const auto value = [&](int rank, std::size_t i) {
          return static_cast<float>((static_cast<std::size_t>(rank + k) * 7 + i) % 1000);
        };
        // Anywhere in a cache line, mostly everywhere in the same place.
        const auto at = static_cast<std::size_t>(k % 5 ? k : k + 3 * comm.rank()) % 16;
        std::vector<float> space(n + 32, -3.0f), more(n + 32, -3.0f);
        const std::span<float> in(space.data() + at, n), out(more.data() + at, n);
        for (std::size_t i = 0; i < n; ++i) in[i] = value(comm.rank(), i);
        const bool apart = k % 3 == 0;
        if (!apart) std::copy(in.begin(), in.end(), out.begin());
        const hd::leaf l = hd::leaf_of<float>(hd::sum{});
        const hd::header h{hd::operation_kind::all_reduce, l.type, l.id, 0, static_cast<std::uint16_t>(k), 1, n};
        (k % 2 ? copy : comm).native_all_reduce(h, apart ? in.data() : out.data(), out.data(), n, l);
        for (std::size_t i = 0; i < n; ++i) {
          double sum = 0.0;
          for (int r = 0; r < p; ++r) sum += value(r, i);
          found.expect(out[i] == sum, comm.rank(), "sum", std::to_string(n));
        }
        const auto outside = std::count(more.begin(), more.end(), -3.0f);
        found.expect(outside == 32, comm.rank(), "what is beside the buffer", std::to_string(n));
        if (n) in[0] = out[0] = -7.0f;  // nobody reads them any more
      }
    });
    CHECK(found.text() == "");
  }
}

TEST_CASE("the native all-reduce of buffers that no near cache holds") {
  for (const int p : {1, 2, 3}) {
    findings found;
    hd::threads::run(few(p, 30s), [&](auto& comm) {
      for (const std::size_t n : {std::size_t{1 << 20} + 1, std::size_t{1'100'003}, std::size_t{1'507'328}}) {
        // Not at a cache line; upwards and backwards; every element has a value of its own, exact as a float.
        std::vector<float> space(n + 5, -3.0f), out(n + 5, -3.0f);
        const hd::leaf l = hd::leaf_of<float>(hd::sum{});
        const hd::header h{hd::operation_kind::all_reduce, l.type, l.id, 0, 0, 1, n};
        for (std::size_t i = 0; i < n; ++i) space[i + 3] = static_cast<float>(i + comm.rank());
        for (const bool apart : {true, true, false, false}) {
          if (!apart) std::copy(space.begin(), space.end(), out.begin());
          comm.native_all_reduce(h, apart ? space.data() + 3 : out.data() + 3, out.data() + 3, n, l);
          std::size_t wrong = 0;
          for (std::size_t i = 0; i < n; ++i)
            wrong += out[i + 3] != static_cast<float>(p * static_cast<double>(i) + p * (p - 1) / 2);
          for (const std::size_t i : {std::size_t{0}, std::size_t{1}, std::size_t{2}, n + 3, n + 4})
            wrong += out[i] != -3.0f;
          found.expect(wrong == 0, comm.rank(), "sum", std::to_string(n));
          std::fill(out.begin() + 3, out.end() - 2, -7.0f);
        }
      }
    });
    CHECK(found.text() == "");
  }
}

TEST_CASE("counting counts what the formula says") {
  for (const int p : {1, 2, 3, 4, 7, 8}) {
    for (const std::size_t n : {0, 1, 8, 17, 168, 1025}) {
      const auto total = [&](const auto& topology) {
        std::atomic<std::uint64_t> bytes{0}, messages{0}, control{0};
        hd::threads::run(p, [&](auto& comm) {
          hd::counting counted(comm);
          std::vector<float> data(n);
          hd::all_reduce(counted, topology, std::span<float>(data));
          hd::barrier(counted);
          const hd::traffic t = counted.sent();
          bytes += t.bytes;
          messages += t.messages;
          control += t.control_bytes;
        });
        std::uint64_t log = 0;
        while ((1u << log) < static_cast<unsigned>(p)) ++log;
        CHECK(control == log * static_cast<std::uint64_t>(p));  // the barrier: a byte a round
        return std::pair<std::uint64_t, std::uint64_t>(bytes, messages);
      };
      INFO(p << " ranks, " << n << " elements");
      const std::uint64_t wire = 2 * n * 4 * static_cast<std::uint64_t>(p - 1);
      const auto ring = total(hd::ring{});
      CHECK(ring.first == wire);
      const std::uint64_t blocks =
          std::min<std::uint64_t>(n, static_cast<std::uint64_t>(p));  // none is empty on the wire
      CHECK(ring.second == 2 * blocks * static_cast<std::uint64_t>(p - 1));
      CHECK(total(hd::direct{}).first == wire);
      CHECK(total(hd::halving_doubling{}).first == wire);
      const auto native = total(hd::native{});
      CHECK(native.first / static_cast<std::uint64_t>(p) == wire / static_cast<std::uint64_t>(p));
    }
  }
  // A duplicate counts into the same figures.
  hd::threads::run(2, [](auto& comm) {
    hd::counting counted(comm);
    auto second = counted.duplicate();
    std::vector<float> data(10);
    hd::all_reduce(second, hd::ring{}, std::span<float>(data));
    if (counted.sent().bytes != 40) throw boom("a duplicate counts elsewhere");
  });
}

TEST_CASE("the example of the documentation") {
  std::vector<float> gradient(300, 1.0f);
  std::uint64_t bytes = 0;
  // example-begin counting
  hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(2)}, [&](auto& comm) {
    hd::counting counted(comm);  // a wrapper holds its communicator by value; the copy shares the ranks
    std::vector<float> mine = gradient;
    hd::all_reduce(counted, hd::ring{}, std::span(mine), hd::mean{});
    if (counted.rank() == 0) bytes = counted.sent().bytes;  // 2 n (P - 1) / P floats: 1600
  });
  // example-end
  CHECK(bytes == 1600);
}

TEST_CASE("levels of groups without a rank are refused by name, and the communicator goes on") {
  findings found;
  hd::threads::run(few(3, 2s), [&](auto& comm) {
    for (const int group : {0, -2}) {
      std::string said;
      try {
        (void)comm.levels(group);
      } catch (const hd::argument_error& e) {
        said = e.what();
      }
      found.expect(said.find("group is " + std::to_string(group) + ", allowed is 1") != said.npos, comm.rank(), "what it says", said);
    }
    found.expect(comm.levels(2).inside.size() == (comm.rank() < 2 ? 2 : 1), comm.rank(), "ranks of a group");
  });
  CHECK(found.text() == "");
}

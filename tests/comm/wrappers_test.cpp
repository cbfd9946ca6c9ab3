// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/gather.hpp>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/comm/faulty.hpp>
#include <heddle/comm/fingerprint.hpp>
#include <heddle/comm/rank_group.hpp>
#include <heddle/comm/self.hpp>
#include <heddle/comm/threads.hpp>
#include <heddle/comm/throttled.hpp>
#include <heddle/comm/traced.hpp>
#include <heddle/trace/timeline.hpp>

#include "../support/catch.hpp"
#include "conformance.hpp"

#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace hd = heddle;
using namespace std::chrono_literals;
using heddle_test::conforms_to_communicator;
using heddle_test::findings;

namespace {

using comm_type = hd::threads::communicator;

hd::threads::options few(int ranks, std::chrono::nanoseconds deadline = 20s) {
  return {.ranks = ranks, .deadline = deadline};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The suite, each rank's communicator wrapped by wrap(comm).
template <class Wrap>
void conforms(const std::vector<int>& sizes, Wrap wrap) {
  conforms_to_communicator(sizes, [wrap](int ranks, auto f) {
    hd::threads::run(few(ranks), [&](auto& comm) {
      auto wrapped = wrap(comm);
      f(wrapped);
    });
  });
}

}  // namespace

TEST_CASE("every wrapper conforms") {
  hd::timeline times;
  conforms({2, 3}, [](comm_type& c) { return hd::throttled(c, hd::link_cost{.alpha = 1e-5, .beta = 1e-9}); });
  conforms({1, 3}, [](comm_type& c) { return hd::faulty(c, hd::failures{.late = 0.1, .longest = 200us, .seed = 7}); });
  conforms({1, 4}, [](comm_type& c) { return hd::fingerprint(c); });
  conforms({1, 3}, [](comm_type& c) { return hd::rank_group(c, 7); });
  conforms({1, 3}, [&](comm_type& c) { return hd::traced(c, times); });
  CHECK(times.size() > 0);
}

TEST_CASE("wrappers of wrappers conform") {
  hd::timeline times;
  conforms({3}, [&](comm_type& c) {
    const hd::failures late{.late = 0.05, .longest = 100us, .seed = 3};
    return hd::traced(hd::fingerprint(hd::faulty(hd::throttled(hd::counting(c), hd::link_cost{}), late)), times);
  });
  conforms({3}, [&](comm_type& c) {
    const hd::throttled slow(hd::traced(hd::fingerprint{c}, times), hd::link_cost{});
    return hd::counting(hd::faulty(slow, hd::failures{}));
  });
}

TEST_CASE("collectives give the same through every wrapper") {
  for (const int p : {1, 2, 3, 5}) {
    for (const std::size_t n : {0, 1, 17, 1025}) {
      findings found;
      hd::timeline times;
      hd::threads::run(few(p), [&](auto& comm) {
        const hd::failures late{.late = 0.1, .longest = 50us};
        hd::traced all(hd::fingerprint(hd::faulty(hd::counting{comm}, late)), times);
        std::vector<double> data(n);
        for (std::size_t i = 0; i < n; ++i) data[i] = static_cast<double>(i + 1) * (comm.rank() + 1);
        const auto expect = [&](double factor, const char* what) {
          for (std::size_t i = 0; i < n; ++i)
            found.expect(data[i] == static_cast<double>(i + 1) * factor, comm.rank(), what);
        };
        hd::all_reduce(all, hd::native{}, std::span<double>(data));
        expect(p * (p + 1) / 2, "native");
        hd::all_reduce(all, hd::ring{}, std::span<double>(data), hd::max{});
        expect(p * (p + 1) / 2, "ring");
        for (double& x : data) x *= comm.rank() == p - 1 ? 2.0 : 1.0;
        hd::broadcast(all, std::span<double>(data), p - 1);
        expect(p * (p + 1), "broadcast");
        hd::barrier(all);
      });
      CHECK(found.text() == "");
    }
  }
}

// ---- throttled

TEST_CASE("throttled takes at least as long as the links need") {
  findings found;
  const auto least = [&](int rank, double seconds, const auto& call) {
    const auto start = std::chrono::steady_clock::now();
    call();
    const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    found.expect(took >= seconds, rank, "shorter than the links need", std::to_string(took) + " s");
  };
  const auto nothing = [](std::span<const hd::arrival>) {};
  hd::threads::run(few(3), [&](auto& comm) {
    hd::throttled slow(comm, hd::link_cost{.alpha = 2e-3, .beta = 1e-6});
    std::array<std::byte, 5000> mine{}, theirs{};
    const int to = (comm.rank() + 1) % 3, from = (comm.rank() + 2) % 3;
    const std::array<hd::outgoing, 2> out{{{to, mine.data(), 5000, 1}, {to, mine.data(), 1000, 1}}};
    const std::array<hd::incoming, 2> in{{{from, theirs.data(), 5000}, {from, nullptr, 1000}}};
    hd::barrier(slow);
    least(comm.rank(), 2 * 2e-3 + 6000 * 1e-6, [&] { slow.exchange({}, out, in, nothing); });
    // A ring: 2 (P - 1) rounds of one message of n / P elements.
    std::vector<float> data(3000);
    least(comm.rank(), 4 * (2e-3 + 4000 * 1e-6), [&] { hd::all_reduce(slow, hd::ring{}, std::span<float>(data)); });

    // Ranks that are further apart take longer for a byte.
    hd::link_class far{.cost = {.beta = 1e-7}};
    far.far.fill(30.0);
    hd::throttled apart(comm, hd::links{.intra = far});
    hd::barrier(apart);
    least(comm.rank(), 5000 * 30e-7,
          [&] { apart.exchange({}, std::span(out).first(1), std::span(in).first(1), nothing); });

    // A message that is posted late takes its time, too, for who has waited for it.
    least(comm.rank(), comm.rank() < 2 ? 30e-3 + 7e-3 : 0.0, [&] {
      hd::barrier(slow);  // the clocks of both ranks have started
      if (comm.rank() == 0) {
        std::this_thread::sleep_for(30ms);
        const hd::outgoing late{1, mine.data(), 5000, 1};
        slow.exchange({}, std::span(&late, 1), {}, nothing);
      } else if (comm.rank() == 1) {
        const hd::incoming late{0, nullptr, 5000};
        slow.exchange({}, {}, std::span(&late, 1), nothing);
      }
    });
  });
  CHECK(found.text() == "");
  CHECK_THROWS_AS(hd::throttled(hd::self{}, hd::link_cost{.alpha = -1}), hd::argument_error);
  CHECK_THROWS_AS(hd::throttled(hd::self{}, hd::link_cost{.beta = std::numeric_limits<double>::quiet_NaN()}),
                  hd::argument_error);
}

TEST_CASE("duplicates of a throttled communicator share the links") {
  findings found;
  constexpr int lanes = 4, rounds = 5;
  hd::threads::run(few(2), [&](auto& comm) {
    hd::throttled slow(comm, hd::link_cost{.alpha = 2e-3});
    std::vector<decltype(slow)> lane;
    for (int k = 0; k < lanes; ++k) lane.push_back(k == 2 ? lane[1].duplicate() : slow.duplicate());
    const auto start = std::chrono::steady_clock::now();
    hd::barrier(slow);  // the clocks of both ranks have started
    std::vector<std::jthread> threads;
    for (auto& l : lane) {
      threads.emplace_back([&l] {
        for (int k = 0; k < rounds; ++k) {
          std::uint32_t word = 0;
          const hd::outgoing out{1, &word, 4, 1};
          const hd::incoming in{0, &word, 4};
          const auto none = [](std::span<const hd::arrival>) {};
          if (l.rank() == 0) l.exchange({}, std::span(&out, 1), {}, none);
          else l.exchange({}, {}, std::span(&in, 1), none);
        }
      });
    }
    threads.clear();
    const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    found.expect(took >= lanes * rounds * 2e-3, comm.rank(), "lanes don't share the link", std::to_string(took) + " s");
  });
  CHECK(found.text() == "");
}

TEST_CASE("links of a throttled communicator work at the same time", "[timing]") {
  double least = 1e9;  // of several: other programs may use the cores
  for (int attempt = 0; attempt < 5; ++attempt) {
    double seconds = 0.0;
    hd::threads::run(few(4), [&](auto& comm) {
      hd::throttled slow(comm, hd::link_cost{.alpha = 20e-3});
      const auto start = std::chrono::steady_clock::now();
      std::vector<float> data(4);
      hd::all_reduce(slow, hd::direct{}, std::span<float>(data));  // two rounds, to and from three peers each
      if (comm.rank() == 0) seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    });
    least = std::min(least, seconds);
  }
  CHECK(least >= 40e-3);
  CHECK(least < 60e-3);
}

// ---- faulty

TEST_CASE("whatever goes wrong at whichever call, nobody hangs or reads memory that is gone") {
  // Every kind of call, its buffers local to it, so that a peer that still reads them is seen by AddressSanitizer.
  using rank_type = hd::faulty<comm_type>;
  const auto work = [](rank_type& comm) {
    const auto reduce = [](auto& c, const auto& topology) {
      std::vector<float> data(300, 1.0f);
      hd::all_reduce(c, topology, std::span<float>(data), hd::mean{});
      if (data != std::vector<float>(300, 1.0f)) throw std::runtime_error("a wrong mean");
    };
    reduce(comm, hd::ring{});
    reduce(comm, hd::native{});
    auto second = comm.duplicate();
    std::vector<int> word(50, comm.rank());
    hd::broadcast(second, std::span<int>(word), 1);
    reduce(comm, hd::direct{});
    std::vector<float> few(3, 1.0f);
    hd::all_reduce(comm, hd::native{}, std::span<float>(few));
    hd::barrier(comm);
  };
  for (const int ranks : {2, 3}) {
    std::vector<std::uint64_t> calls(static_cast<std::size_t>(ranks));
    hd::threads::run(few(ranks), [&](auto& comm) {
      rank_type counted(comm, hd::failures{});
      work(counted);
      calls[static_cast<std::size_t>(comm.rank())] = counted.calls();
    });
    using enum hd::failure;
    for (const hd::failure what : {drop, delay, throw_before, throw_within, throw_after}) {
      for (int guilty = 0; guilty < ranks; ++guilty) {
        for (std::uint64_t call = 0; call < calls[static_cast<std::size_t>(guilty)]; ++call) {
          INFO("failure " << static_cast<int>(what) << " in call " << call << " of rank " << guilty << " of " << ranks);
          const hd::failures f{.what = what, .rank = guilty, .call = call, .late = 0.2, .longest = 300us, .seed = call};
          findings found;
          std::string thrown;
          std::vector<int> blamed(static_cast<std::size_t>(ranks), -1);
          try {
            hd::threads::run(few(ranks), [&](auto& comm) {
              rank_type bad(comm, f);
              try {
                work(bad);
              } catch (const hd::comm_error& e) {
                blamed[static_cast<std::size_t>(comm.rank())] = e.peer();
                throw;
              }
            });
          } catch (const hd::injected_failure& e) {
            thrown = e.what();
          } catch (const hd::comm_error& e) {
            thrown = e.what();
          }
          if (what == hd::failure::delay) {
            CHECK(thrown == "");
            continue;
          }
          CHECK(has(thrown, "rank " + std::to_string(guilty)));
          CHECK(has(thrown, what == hd::failure::drop ? "was dropped" : "fails in call"));
          // In the last call a peer may have got all it needs.
          const bool over = what >= hd::failure::throw_within && call + 1 == calls[static_cast<std::size_t>(guilty)];
          for (int r = 0; r < ranks; ++r) {
            const int b = blamed[static_cast<std::size_t>(r)];
            if (r == guilty) CHECK(b == (what == hd::failure::drop ? guilty : -1));
            else CHECK((b == guilty || (over && b == -1)));
          }
        }
      }
    }
  }
}

TEST_CASE("a delay beyond the deadline is a rank that is missing") {
  std::optional<hd::comm_error> error;
  try {
    hd::threads::run(few(3, 200ms), [&](auto& comm) {
      hd::faulty bad(comm, hd::failures{.what = hd::failure::delay, .rank = 1, .call = 1, .longest = 600ms});
      try {
        hd::barrier(bad);  // two rounds
        hd::barrier(bad);
      } catch (const hd::comm_error& e) {
        if (comm.rank() == 2) error = e;
        throw;
      }
    });
  } catch (const hd::comm_error&) {
  }
  REQUIRE(error);
  CHECK(error->peer() == 1);
  CHECK_THROWS_AS(hd::faulty(hd::self{}, hd::failures{.late = 1.5}), hd::argument_error);
  CHECK_THROWS_AS(hd::faulty(hd::self{}, hd::failures{.longest = -1ns}), hd::argument_error);
}

// ---- fingerprint

TEST_CASE("a fingerprint names both sides on every rank, also of ranks that send each other nothing") {
  const auto reduce = [](auto& comm, auto zero, std::size_t n, const auto& topology, const auto& op) {
    std::vector<decltype(zero)> data(n, zero);
    hd::all_reduce(comm, topology, std::span<decltype(zero)>(data), op);
  };
  for (const int odd : {0, 2, 4}) {
    for (int what = 0; what < 6; ++what) {
      findings found;
      try {
        hd::threads::run(few(5), [&](auto& comm) {
          hd::fingerprint checked(comm);
          try {
            reduce(checked, 1.0f, 40, hd::ring{}, hd::sum{});
            if (comm.rank() != odd) {
              reduce(checked, 1.0f, 40, hd::ring{}, hd::sum{});
            } else if (what == 0) {
              reduce(checked, 1.0f, 41, hd::direct{}, hd::sum{});  // another topology wouldn't even meet
            } else if (what == 1) {
              reduce(checked, 1, 40, hd::ring{}, hd::sum{});
            } else if (what == 2) {
              reduce(checked, 1.0f, 40, hd::ring{}, hd::max{});
            } else if (what == 3) {
              hd::barrier(checked);
            } else if (what == 4) {
              std::vector<float> none;
              hd::broadcast(checked, std::span<float>(none));  // no message at all
            } else {
              (void)checked.duplicate();
            }
            found.expect(false, comm.rank(), "no error", std::to_string(what));
          } catch (const hd::comm_error& e) {
            const std::string text = e.what();
            const std::string other = std::to_string(odd ? odd : 1);
            found.expect(has(text, "rank 0 is in ") && has(text, "rank " + other + " is in "), comm.rank(),
                         "doesn't name both sides", text);
            found.expect(has(text, "all_reduce(count 40, f32, ring, reduction 1, call 1)"), comm.rank(), "the call", text);
            throw;
          }
        });
      } catch (const hd::comm_error&) {
      }
      CHECK(found.text() == "");
    }
  }
}

// ---- traced

TEST_CASE("a trace holds every exchange, and is JSON") {
  hd::timeline times;
  const auto start = hd::timeline::clock::now();
  hd::threads::run(few(3), [&](auto& comm) {
    hd::traced seen(comm, times);
    std::vector<float> data(30, 1.0f);
    hd::all_reduce(seen, hd::ring{}, std::span<float>(data));    // 4 rounds
    hd::all_reduce(seen, hd::native{}, std::span<float>(data));  // 1
    auto second = seen.duplicate();
    hd::barrier(second);  // 2 rounds
  });
  CHECK(times.size() == 3 * 7);
  times.add("quoted \"\\\n", "other", 7, 0, start, start, "\"a\":1");
  const std::string text = times.json();
  const auto count = [&](const std::string& part) {
    std::size_t n = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
    return n;
  };
  CHECK(count("\"ph\":\"X\"") == 22);
  CHECK(count("\"process_name\"") == 4);
  CHECK(count("\"thread_name\"") == 7);
  CHECK(count("\"name\":\"all_reduce round 0\"") == 3);
  CHECK(count("\"name\":\"all_reduce native\"") == 3);
  CHECK(count("\"name\":\"barrier round 1\"") == 3);
  CHECK(count("\"count\":30,\"type\":\"f32\",\"to\":{\"1\":40},\"from\":{\"2\":40}") == 4);  // rank 0, each round
  CHECK(count("\"quoted \\\"\\\\\\u000a\"") == 1);
  // Brackets match outside strings, and nothing follows.
  std::string open;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '\\') ++i;
    else if (c == '"') quoted = !quoted;
    else if (!quoted && (c == '{' || c == '[')) open += c == '{' ? '}' : ']';
    else if (!quoted && (c == '}' || c == ']')) {
      REQUIRE((!open.empty() && open.back() == c));
      open.pop_back();
    }
  }
  CHECK((open.empty() && !quoted));
  CHECK_THROWS_AS(times.write("/nowhere/at/all.json"), hd::file_error);
}

TEST_CASE("writes the trace that check_trace.py reads", "[.trace]") {
  const char* const path = std::getenv("HEDDLE_TRACE");
  if (!path) return;  // ctest's comm.trace sets it
  hd::timeline times;
  hd::threads::run(few(3), [&](auto& comm) {
    hd::traced seen(comm, times);
    auto second = seen.duplicate();
    const auto start = hd::timeline::clock::now();
    std::vector<float> data(30, 1.0f);
    hd::all_reduce(seen, hd::ring{}, std::span<float>(data));  // 4 rounds
    hd::all_reduce(second, hd::native{}, std::span<float>(data));
    times.add("a \"step\"\\\n", "mine", comm.rank(), 0, start, hd::timeline::clock::now(), "\"loss\":1.5");
  });
  times.write(path);
}

TEST_CASE("the example of the wrappers") {
  const std::string path = (std::filesystem::temp_directory_path() / "heddle_comm_trace.json").string();
  // example-begin traced
  hd::timeline times;
  hd::threads::run(2, [&](auto& comm) {
    hd::traced seen(hd::fingerprint{comm}, times);  // compares the calls of all ranks, and records every round
    std::vector<float> gradient(1 << 16, 1.0f);
    hd::all_reduce(seen, hd::ring{}, std::span(gradient));
  });
  times.write(path);  // open it in https://ui.perfetto.dev
  // example-end
  CHECK(times.size() == 2 * 2);
  CHECK(std::filesystem::remove(path));
}

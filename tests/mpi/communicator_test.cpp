// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/gather.hpp>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/comm/throttled.hpp>

#include "../comm/conformance.hpp"
#include "support.hpp"

#include <numeric>
#include <thread>
#include <vector>

using heddle_test::conforms_to_communicator;

namespace {

hd::mpi::options in_pieces(std::size_t piece) {
  hd::mpi::options o = settings();
  o.piece = piece;
  return o;
}

std::vector<int> parts() {  // numbers of ranks to try: some processes look on
  const int n = world_size();
  return n > 2 ? std::vector<int>{1, 2, n} : n == 2 ? std::vector<int>{1, 2} : std::vector<int>{1};
}

template <class T> std::vector<T> filled(std::size_t n, int rank) {
  std::vector<T> v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = static_cast<T>(i % 1000) + static_cast<T>(rank * 7);
  return v;
}

struct boom : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A ring shift of n words.
template <class Comm> std::vector<int> shift(Comm& comm, std::size_t n, hd::header h = {}) {
  const int p = comm.size();
  std::vector<int> mine = filled<int>(n, comm.rank()), theirs(n, -1);
  const hd::outgoing out{(comm.rank() + 1) % p, mine.data(), n * sizeof(int), 1};
  const hd::incoming in{(comm.rank() + p - 1) % p, theirs.data(), n * sizeof(int)};
  comm.exchange(h, std::span(&out, 1), std::span(&in, 1), [](std::span<const hd::arrival>) {});
  return theirs;
}

}  // namespace

TEST_CASE("mpi conforms", "[threads]") {
  conforms_to_communicator(parts(), [](int ranks, auto f) { on_ranks(ranks, settings(), f); });
}

TEST_CASE("mpi in small pieces conforms", "[threads]") {
  for (const std::size_t piece : {std::size_t{701}, std::size_t{4001}}) {
    INFO("pieces of " << piece);
    conforms_to_communicator({world_size()}, [&](int ranks, auto f) { on_ranks(ranks, in_pieces(piece), f); });
  }
}

TEST_CASE("wrappers of mpi conform", "[threads]") {
  conforms_to_communicator({world_size()}, [](int ranks, auto f) {
    on_ranks(ranks, settings(), [&](auto& comm) {
      hd::counting<hd::throttled<hd::mpi::communicator>> both(
          hd::throttled(comm, hd::link_cost{.alpha = 1e-6, .beta = 1e-10}));
      f(both);
    });
  });
}

TEST_CASE("messages of any length arrive, split and whole") {
  const int p = world_size();
  if (p == 1) return;
  for (const std::size_t piece : {std::size_t{1}, std::size_t{64}, std::size_t{4096}, std::size_t{1} << 30}) {
    on_ranks(p, in_pieces(piece), [&](auto& comm) {
      for (const std::size_t n : {0u, 1u, 15u, 16u, 17u, 999u, 1000u, 1001u, 1024u, 1025u, 10007u, 300000u}) {
        if (n > 100 * piece) continue;
        INFO(n << " words in pieces of " << piece << " bytes");
        CHECK(shift(comm, n) == filled<int>(n, (comm.rank() + p - 1) % p));
      }
    });
  }
}

TEST_CASE("pieces must be cut alike") {
  for (const std::size_t piece : {std::size_t{0}, std::size_t{1} << 31}) {
    CHECK_THROWS_AS(hd::mpi::communicator(MPI_COMM_WORLD, in_pieces(piece)), hd::argument_error);
  }
  if (world_size() == 1) return;
  CHECK_THROWS_AS(hd::mpi::communicator(MPI_COMM_WORLD, in_pieces(world_rank() == 0 ? 10 : 11)), hd::argument_error);
  hd::mpi::options o = settings();
  if (world_rank() == 0) o.time = hd::mpi::time_source::simulator;
  CHECK_THROWS_AS(hd::mpi::communicator(MPI_COMM_WORLD, o), hd::argument_error);
}

TEST_CASE("a call is one, however many rounds it has") {
  if (world_size() == 1) return;
  on_ranks(2, settings(10s), [](auto& comm) {
    hd::header h = hd::begin_call(comm, {.count = 1});
    const auto nothing = [](std::span<const hd::arrival>) {};
    for (const int round : {10, 255, 256, 300}) {  // rank 0 is idle where numbers begin again
      h.round = static_cast<std::uint8_t>(round);
      if (round % 10 == 0)
        CHECK(shift(comm, 100000, h) == filled<int>(100000, 1 - comm.rank()));
      else if (comm.rank() == 1)
        comm.exchange(h, {}, {}, nothing);
    }
  });
}

TEST_CASE("ranks in other calls are named on both sides") {
  const int p = world_size();
  if (p == 1) return;
  const int odd_one = p - 1;
  const auto differ = [&](const char* name, const auto& usual, const auto& odd) {
    INFO("another " << name);
    const ended e = outcome(p, settings(), [&](auto& comm) {
      if (comm.rank() == odd_one)
        odd(comm);
      else
        usual(comm);
      hd::barrier(comm);
    });
    INFO(e.text);
    CHECK(e.error);
    CHECK(has(e.text, "calls differ: rank "));
    CHECK(has(e.text, "rank " + std::to_string(odd_one) + " is in "));
  };
  const auto reduce = [](auto zero, std::size_t n, auto op) {
    return [=](auto& comm) {
      std::vector<decltype(zero)> data(n, zero);
      hd::all_reduce(comm, hd::ring{}, std::span<decltype(zero)>(data), op);
    };
  };
  for (const std::size_t n : {std::size_t{60}, std::size_t{600000}}) {  // behind the header, and called for
    const auto usual = reduce(1.0f, n, hd::sum{});
    differ("count", usual, reduce(1.0f, n + 120, hd::sum{}));
    differ("count by far", usual, reduce(1.0f, n == 60 ? 600000 : 60, hd::sum{}));
    differ("type of the same size", usual, reduce(1, n, hd::sum{}));
    differ("type of another size", usual, reduce(1.0, n, hd::sum{}));
    differ("operation", usual, reduce(1.0f, n, hd::max{}));
    differ("order", usual, [&](auto& comm) {
      comm.next_sequence();
      usual(comm);
    });
  }
}

TEST_CASE("a rank that throws is named by every other rank's pending call") {
  const int p = world_size();
  for (int guilty = 0; guilty < p; ++guilty) {
    for (const std::size_t n : {std::size_t{100}, std::size_t{500000}}) {
      const ended e = outcome(p, settings(), [&](auto& comm) {
        hd::barrier(comm);
        if (comm.rank() == guilty) throw boom("the disk is full");
        std::vector<float> data(n);
        hd::all_reduce(comm, hd::ring{}, std::span<float>(data));
        hd::barrier(comm);
      });
      INFO("rank " << guilty << " throws, n " << n << ": " << e.text);
      if (world_rank() == guilty) {
        CHECK(e.other);
        continue;
      }
      REQUIRE(e.error);
      CHECK(e.error->peer() == guilty);
      CHECK(e.error->rank() == world_rank());
      CHECK((e.error->operation() == "all_reduce" || e.error->operation() == "barrier"));
      CHECK(has(e.text, "the disk is full"));
    }
  }
}

TEST_CASE("a rank may throw inside a call while its buffers are on the way") {
  const int p = world_size();
  if (p == 1) return;
  for (int guilty = 0; guilty < p; ++guilty) {
    for (const std::size_t piece : {std::size_t{1000}, std::size_t{1} << 30}) {
      for (int at = 0; at < 4; ++at) {
        if (at == 3 && guilty > 0) continue;  // the others have left, and are waited for in vain for a second
        std::vector<int> shared(200000, -1);
        const ended e = outcome(p, in_pieces(piece), [&](auto& comm) {
          std::vector<int> mine = filled<int>(shared.size(), comm.rank());  // goes away with the exception
          for (int round = 0; round < 4; ++round) {
            std::vector<hd::outgoing> out;
            std::vector<hd::incoming> in;
            for (int step = 1; step < p; ++step) {
              out.push_back({(comm.rank() + step) % p, mine.data(), mine.size() * 4, 1, round < 3});
              in.push_back({(comm.rank() + step) % p, step == 1 ? shared.data() : nullptr, mine.size() * 4});
            }
            comm.exchange({.round = static_cast<std::uint8_t>(round)}, out, in, [&](std::span<const hd::arrival>) {
              if (comm.rank() == guilty && round == at) throw boom("in apply");
            });
          }
        });
        INFO("rank " << guilty << " throws in round " << at << ": " << e.text);
        const std::vector<int> after(shared.size(), -2);
        shared = after;
        if (world_rank() == guilty) {
          CHECK(e.other);
        } else if (at < 3) {
          CHECK(e.error);
          CHECK(has(e.text, "in apply"));
        }
        // Messages go on arriving, but not in memory that was given back.
        for (int k = 0; k < 100; ++k) {
          int found = 0;
          MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
        }
        CHECK(shared == after);
      }
    }
  }
}

namespace {
// Takes messages in parts of whole words, checks them, and throws where it is told to.
struct in_parts {
  std::size_t words = 0, throws_at = 0;
  int* parts = nullptr;
  std::size_t* taken = nullptr;
  bool* right = nullptr;
  const std::vector<int>* from = nullptr;  // rank of each arrival

  void operator()(std::span<const hd::arrival> got) const { part(got, 0, words * 4); }
  bool takes(std::size_t bytes) const { return bytes % 4 == 0; }
  void part(std::span<const hd::arrival> got, std::size_t offset, std::size_t bytes) const {
    if (++*parts == static_cast<int>(throws_at)) throw boom("in a part");
    *right &= offset == *taken && offset + bytes <= words * 4 && got.size() == from->size();
    for (std::size_t k = 0; k < got.size(); ++k) {
      const int* const x = static_cast<const int*>(got[k].data);
      for (std::size_t i = 0; i < bytes / 4; ++i)
        *right &= x[i] == static_cast<int>((offset / 4 + i) % 1000) + (*from)[k] * 7;
    }
    *taken = offset + bytes;
  }
  template <class Function> void expects(std::size_t, Function&&) const {}
};

// Receives a word in round 0, and says that a long message follows in round 1. Doesn't come back before its sender has
// told, beside the communicator, that it has begun to send it.
struct long_one_follows {
  std::size_t bytes;
  bool* told;

  void operator()(std::span<const hd::arrival>) const {
    const auto begin = std::chrono::steady_clock::now();
    int found = 0;
    while (!found && std::chrono::steady_clock::now() - begin < 10s) {
      MPI_Iprobe(1, 1, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
    }
    *told = found;
  }
  bool takes(std::size_t) const { return false; }
  void part(std::span<const hd::arrival>, std::size_t, std::size_t) const {}
  template <class Function> void expects(std::size_t, Function&& f) const {
    f(std::uint8_t{1}, hd::incoming{1, nullptr, bytes});
  }
};
}  // namespace

TEST_CASE("what is received in a later round is sent before its receiver is there") {
  if (world_size() == 1) return;
  bool told = world_rank() != 0;
  on_ranks(2, settings(), [&](auto& comm) {
    hd::header h = hd::begin_call(comm, {.count = 1});
    const int peer = 1 - comm.rank();
    int word = 7;
    std::vector<int> data = filled<int>(100000, comm.rank()), theirs(data.size());
    const hd::outgoing out{peer, &word, 4, 1}, long_out{peer, data.data(), data.size() * 4, 1, true};
    const hd::incoming in{peer, &word, 4}, long_in{peer, theirs.data(), data.size() * 4};
    const auto nothing = [](std::span<const hd::arrival>) {};
    if (comm.rank() == 0) {
      comm.exchange(h, {}, std::span(&in, 1), long_one_follows{long_in.bytes, &told});
      if (told) MPI_Recv(&word, 1, MPI_INT, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      h.round = 1;
      comm.exchange(h, {}, std::span(&long_in, 1), nothing);
      CHECK(theirs == filled<int>(theirs.size(), 1));
      h.round = 2;
      comm.exchange(h, std::span(&out, 1), {}, nothing);
      if (!told) MPI_Recv(&word, 1, MPI_INT, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
      comm.exchange(h, std::span(&out, 1), {}, nothing);
      h.round = 1;
      comm.exchange(h, std::span(&long_out, 1), {}, nothing);
      MPI_Send(&word, 1, MPI_INT, 0, 1, MPI_COMM_WORLD);
      h.round = 2;
      comm.exchange(h, {}, std::span(&in, 1), nothing);
    }
  });
  CHECK(told);
}

TEST_CASE("a message is handed over in parts, and a rank may throw between them") {
  const int p = world_size();
  if (p == 1) return;
  const std::size_t words = 50000;
  for (const std::size_t piece : {std::size_t{1} << 30, std::size_t{36000}}) {
    for (std::size_t at = 0; at < 8; ++at) {  // part 6 is the last one of the first round
      if (piece != 36000 && at > 1) continue;
      int parts = 0;
      bool right = true;
      const int guilty = static_cast<int>(at) % p;
      const ended e = outcome(p, in_pieces(piece), [&](auto& comm) {
        std::vector<int> mine = filled<int>(words, comm.rank()), from;  // goes away with the exception
        for (std::uint8_t round = 0; round < 3; ++round) {
          std::vector<hd::outgoing> out;
          std::vector<hd::incoming> in;
          from.clear();
          for (int step = 1; step < p; ++step) {
            out.push_back({(comm.rank() + step) % p, mine.data(), words * 4, 1, round < 2});
            in.push_back({(comm.rank() + step) % p, nullptr, words * 4});
            from.push_back(in.back().peer);
          }
          std::size_t taken = 0;
          const std::size_t throws_at = comm.rank() == guilty ? at : 0;
          comm.exchange({.round = round}, out, in, in_parts{words, throws_at, &parts, &taken, &right, &from});
          right &= taken == words * 4;
        }
      });
      INFO("rank " << guilty << " throws at part " << at << " of pieces of " << piece << ": " << e.text);
      CHECK(right);
      if (at == 0) {
        CHECK(e.text == "");
        CHECK(parts == (piece == 36000 ? 18 : 3));
      } else if (world_rank() == guilty) {
        CHECK(e.other);
      } else {
        CHECK(e.error);
        CHECK(has(e.text, "in a part"));
      }
    }
  }
}

TEST_CASE("ranks that differ later in a call are named, and what they sent is taken in") {
  const int p = world_size();
  if (p == 1) return;
  enum { longer, shorter, tiny, other_count, other_call };
  for (const int odd : {0, p - 1}) {
    for (const int what : {longer, shorter, tiny, other_count, other_call}) {
#ifndef OMPI_MAJOR_VERSION
      if (what == longer || what == shorter) continue;  // too long for a receive: MPICH lets MPI_COMM_WORLD abort
#endif
      for (const std::size_t piece : {std::size_t{30000}, std::size_t{1} << 30}) {
        std::vector<int> received(60000, -1);
        const ended e = outcome(p, in_pieces(piece), [&](auto& comm) {
          std::vector<int> mine = filled<int>(received.size(), comm.rank());  // goes away with the exception
          const bool differs = comm.rank() == odd;
          for (int round = 0; round < 9; ++round) {
            hd::header h{.round = static_cast<std::uint8_t>(round)};
            std::size_t words = 50000;
            if (differs && round == 2) {
              words = what == longer ? 60000 : what == shorter ? 40000 : what == tiny ? 3 : words;
              if (what == other_count) h.count = 1;
              if (what == other_call) h = {.sequence = 1};
            }
            const hd::outgoing out{(comm.rank() + 1) % p, mine.data(), words * 4, 1};
            const hd::incoming in{(comm.rank() + p - 1) % p, received.data(), words * 4};
            comm.exchange(h, std::span(&out, 1), std::span(&in, 1), [](std::span<const hd::arrival>) {});
          }
        });
        INFO("rank " << odd << " differs, kind " << what << ", pieces of " << piece << ": " << e.text);
        REQUIRE(e.error);
        CHECK(has(e.text, "calls differ: rank "));
        CHECK(has(e.text, "rank " + std::to_string(odd) + " is in "));
        const std::vector<int> after(received.size(), -2);
        received = after;
        for (int k = 0; k < 100; ++k) {
          int found = 0;
          MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
        }
        CHECK(received == after);
      }
    }
  }
}

TEST_CASE("the deadline names operation, rank and peer") {
  const int p = world_size();
  if (p == 1) return;
  const int absent = p - 1;
  for (const std::size_t n : {std::size_t{10}, std::size_t{100000}}) {
    for (const bool sends : {false, true}) {
      if (sends && n == 10) continue;  // a short message needs nobody to take it
      const ended e = outcome(p, settings(600ms), [&](auto& comm) {
        while (comm.rank() == absent) {  // until it hears that the others have given up; sends nothing meanwhile
          std::this_thread::sleep_for(10ms);
          comm.exchange({}, {}, {}, [](std::span<const hd::arrival>) {});
        }
        std::vector<int> words(n, 3);
        const hd::header h{.kind = hd::operation_kind::all_gather, .count = n};
        const hd::outgoing out{absent, words.data(), n * 4, 1};
        const hd::incoming in{absent, words.data(), n * 4};
        if (sends)
          comm.exchange(h, std::span(&out, 1), {}, [](std::span<const hd::arrival>) {});
        else
          comm.exchange(h, {}, std::span(&in, 1), [](std::span<const hd::arrival>) {});
      });
      INFO((sends ? "sending " : "receiving ") << n << ": " << e.text);
      CHECK(e.error);
      CHECK(has(e.text, "rank " + std::to_string(absent) + " did not reach all_gather"));
      CHECK(has(e.text, "within 600 ms"));
      if (!e.error) continue;
      CHECK(e.error->rank() == world_rank());
      CHECK(e.error->peer() == absent);
      if (world_rank() != absent) CHECK(e.error->operation() == "all_gather");
    }
  }
}

TEST_CASE("a call isn't late while messages come") {
  const int p = world_size();
  if (p < 3) return;
  on_ranks(p, settings(2500ms), [&](auto& comm) {
    std::vector<int> words(2, comm.rank());
    const hd::outgoing out{0, words.data(), 4, 1};
    const hd::incoming in[2] = {{1, words.data(), 4}, {2, words.data() + 1, 4}};
    // The second message comes later than the deadline after the beginning, but not after the first message.
    if (comm.rank() <= 2) std::this_thread::sleep_for(comm.rank() * 1500ms);
    if (comm.rank() == 0) {
      comm.exchange({}, {}, in, [](std::span<const hd::arrival>) {});
      CHECK(words == std::vector<int>{1, 2});
    } else if (comm.rank() <= 2) {
      comm.exchange({}, std::span(&out, 1), {}, [](std::span<const hd::arrival>) {});
    }
  });
}

TEST_CASE("a failure on one thread of a rank wakes the peers of its other threads", "[threads]") {
  const int p = world_size();
  if (p == 1) return;
  const ended e = outcome(p, settings(), [&](auto& comm) {
    auto second = comm.duplicate();
    std::exception_ptr thrown;
    std::thread other([&] {
      try {
        for (int k = 0; k < 100000000; ++k) hd::barrier(second);
      } catch (const hd::comm_error&) {
        thrown = std::current_exception();
      }
    });
    if (comm.rank() == 1) comm.fail("given up");
    other.join();
    if (thrown) std::rethrow_exception(thrown);
  });
  CHECK(e.error);
  if (e.error) CHECK(e.error->peer() == 1);
}

TEST_CASE("a peer that isn't another rank is an argument error") {
  for (const int peer : {-1, world_rank(), world_size()}) {
    const ended e = outcome(world_size(), settings(), [&](auto& comm) {
      int word = 0;
      const hd::incoming in{peer, &word, 4};
      comm.exchange({}, {}, std::span(&in, 1), [](std::span<const hd::arrival>) {});
    });
    CHECK((e.other || e.error));  // one's own, or another's that came first
  }
}

TEST_CASE("a communicator leaves the user's alone") {
  const int p = world_size(), me = world_rank();
  MPI_Comm mine = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &mine);
  MPI_Comm_set_errhandler(mine, MPI_ERRORS_ARE_FATAL);
  std::vector<int> received(static_cast<std::size_t>(p), -1);
  std::vector<MPI_Request> requests;
  for (int r = 0; r < p; ++r) {  // receives of the user that would take any message
    MPI_Irecv(&received[static_cast<std::size_t>(r)], 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, mine,
              &requests.emplace_back());
  }
  {
    hd::mpi::communicator comm(mine, settings());
    CHECK(comm.host() != "");
    auto second = comm.duplicate();
    std::vector<float> data(5000, 1.0f);
    hd::all_reduce(comm, hd::ring{}, std::span<float>(data));
    hd::all_reduce(second, hd::direct{}, std::span<float>(data));
    CHECK(data == std::vector<float>(5000, static_cast<float>(p) * static_cast<float>(p)));
  }
  for (int r = 0; r < p; ++r) MPI_Send(&me, 1, MPI_INT, r, 7, mine);
  MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
  std::sort(received.begin(), received.end());
  std::vector<int> everybody(static_cast<std::size_t>(p));
  std::iota(everybody.begin(), everybody.end(), 0);
  CHECK(received == everybody);
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(mine, &handler);
  CHECK(handler == MPI_ERRORS_ARE_FATAL);
  MPI_Comm_free(&mine);
}

TEST_CASE("ranks of a sub-communicator are numbered as MPI numbers them") {
  const int p = world_size(), me = world_rank();
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, me % 2, -me, &half);  // odd and even, in descending order
  {
    hd::mpi::communicator comm(half, settings());
    const int members = (p + 1 - me % 2) / 2;
    CHECK(comm.size() == members);
    CHECK(comm.rank() == (members - 1) - me / 2);
    std::vector<int> ranks(static_cast<std::size_t>(members));
    hd::all_gather(comm, hd::ring{}, std::span<const int>(&me, 1), std::span<int>(ranks));
    for (int r = 0; r < members; ++r) CHECK(ranks[static_cast<std::size_t>(r)] == 2 * (members - 1 - r) + me % 2);
  }
  MPI_Comm_free(&half);
}

TEST_CASE("a communicator is split by color and key") {
  const int p = world_size(), me = world_rank();
  on_ranks([&](auto& comm) {
    auto part = comm.split(me % 2, -me);  // odd and even, in descending order
    const int members = (p + 1 - me % 2) / 2;
    CHECK(part.size() == members);
    CHECK(part.rank() == (members - 1) - me / 2);
    std::vector<int> ranks(static_cast<std::size_t>(members));
    hd::all_gather(part, hd::ring{}, std::span<const int>(&me, 1), std::span<int>(ranks));
    for (int r = 0; r < members; ++r) CHECK(ranks[static_cast<std::size_t>(r)] == 2 * (members - 1 - r) + me % 2);
    auto again = part.duplicate().split(0);
    CHECK(again.size() == members);
    hd::barrier(again);
    hd::barrier(comm);
  });
  const ended e = outcome(p, settings(), [](auto& comm) { comm.split(comm.rank() == 0 ? -1 : 0); });
  CHECK(has(e.text, "color is -1, allowed is 0 or above"));
  CHECK(e.error.has_value() == (me > 0));
}

TEST_CASE("ranks know which of them share a machine") {
  using hd::mpi::detail::numbered;
  using hd::mpi::detail::per_node;
  CHECK(numbered({0, 0, 2, 2, 0, 5}) == std::vector<int>{0, 0, 1, 1, 0, 2});
  CHECK(per_node({0, 0, 1, 1, 2}) == 2);
  CHECK(per_node({0, 0, 0}) == 3);
  CHECK(per_node({0, 1, 2}) == 1);
  CHECK(per_node({0, 1, 0, 1}) == 0);
  CHECK(per_node({0, 1, 1}) == 0);
  CHECK(per_node({0, 0, 1, 2, 2}) == 0);
  on_ranks([](auto& comm) {  // which machine this is, MPI says in another way
    std::vector<int> nodes;
    std::vector<std::string> hosts;
    for (int r = 0; r < comm.size(); ++r) {
      std::string name = comm.rank() == r ? comm.host() : "";
      name.resize(MPI_MAX_PROCESSOR_NAME);
      hd::broadcast(comm, std::span<char>(name), r);
      const auto at = std::find(hosts.begin(), hosts.end(), name);
      nodes.push_back(static_cast<int>(at - hosts.begin()));
      if (at == hosts.end()) hosts.push_back(name);
      CHECK(comm.node_of(r) == nodes.back());
    }
    CHECK(comm.ranks_per_node() == per_node(nodes));
  });
}

TEST_CASE("time may be the engine's") {
  const int p = world_size();
  hd::mpi::options o = settings();
  for (const auto t : {hd::mpi::time_source::simulator, hd::mpi::time_source::engine}) {
    o.time = t;
    on_ranks(p, o, [&](auto& comm) {
      if (p > 1) CHECK(shift(comm, 50000) == filled<int>(50000, (comm.rank() + p - 1) % p));
      std::vector<float> data(100, 1.0f);
      hd::all_reduce(comm, hd::native{}, std::span<float>(data));
      CHECK(data[99] == static_cast<float>(p));
    });
  }
  if (p == 1) return;
  o.deadline = 200ms;
  const ended e = outcome(p, o, [&](auto& comm) {
    while (comm.rank() == p - 1) comm.exchange({}, {}, {}, [](std::span<const hd::arrival>) {});
    std::vector<int> word(1);
    const hd::incoming in{p - 1, word.data(), 4};
    comm.exchange({.kind = hd::operation_kind::broadcast}, {}, std::span(&in, 1), [](std::span<const hd::arrival>) {});
  });
  CHECK(e.error);
  CHECK(has(e.text, "within 200 ms"));
}

TEST_CASE("a wait in which nothing moves is reported with operation and missing ranks") {
  const int p = world_size();
  if (p == 1) return;
  std::vector<std::string> heard;
  hd::mpi::options o = settings();
  o.stall = 100ms;
  o.stall_context = &heard;
  o.on_stall = [](void* context, const std::string& text) {
    static_cast<std::vector<std::string>*>(context)->push_back(text);
  };
  on_ranks(p, o, [&](auto& comm) {
    const int next = (comm.rank() + 1) % p, before = (comm.rank() + p - 1) % p;
    std::vector<float> sent(1, 1.0f), got(1);
    const hd::outgoing out{next, sent.data(), 4, 1};
    const hd::incoming in{before, got.data(), 4};
    if (comm.rank() == p - 1) std::this_thread::sleep_for(1000ms);
    comm.exchange({.kind = hd::operation_kind::broadcast, .count = 7}, std::span(&out, 1), std::span(&in, 1),
                  [](std::span<const hd::arrival>) {});
  });
  if (world_rank() != 0) return;
  REQUIRE(heard.size() == 1);
  CHECK(has(heard[0], "rank 0 has waited in broadcast(count 7,"));
  CHECK(has(heard[0], "for more than 100 ms for rank " + std::to_string(p - 1)));
}

TEST_CASE("what isn't an intra-communicator is an argument error") {
  CHECK_THROWS_AS(hd::mpi::communicator(MPI_COMM_NULL, settings()), hd::argument_error);
  if (world_size() == 1) return;
  MPI_Comm half = MPI_COMM_NULL, between = MPI_COMM_NULL;
  const int side = world_rank() > 0;
  MPI_Comm_split(MPI_COMM_WORLD, side, 0, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, side ? 0 : 1, 5, &between);
  CHECK_THROWS_AS(hd::mpi::communicator(between, settings()), hd::argument_error);
  MPI_Comm_free(&between);
  MPI_Comm_free(&half);
}

TEST_CASE("a level that is too low is refused by name") {
  int given = 0;
  MPI_Query_thread(&given);
  for (const auto wanted : {hd::mpi::thread_level::single, hd::mpi::thread_level::funneled,
                            hd::mpi::thread_level::serialized, hd::mpi::thread_level::multiple}) {
    hd::mpi::options o = settings();
    o.level = wanted;
    try {
      hd::mpi::communicator comm(MPI_COMM_WORLD, o);
      hd::mpi::communicator again = hd::mpi::world(o);  // MPI runs already: not initialised, not finalised
      CHECK(static_cast<int>(wanted) <= given);
    } catch (const hd::mpi::thread_level_error& e) {
      CHECK(static_cast<int>(wanted) > given);
      CHECK(static_cast<int>(e.given()) == given);
      CHECK(e.needed() == wanted);
      CHECK(has(e.what(), std::string("MPI gives ") + name_of(e.given())));
      CHECK(has(e.what(), std::string("needs ") + name_of(wanted)));
    }
  }
  CHECK_FALSE(hd::mpi::detail::finalised());
}

TEST_CASE("below serialized, another thread is refused by name") {
  int given = 0;
  MPI_Query_thread(&given);
  if (given >= MPI_THREAD_SERIALIZED) return;
  on_ranks([&](auto& comm) {
    std::string text;
    std::thread([&] {
      try {
        hd::barrier(comm);
        comm.exchange({}, {}, {}, [](std::span<const hd::arrival>) {});
      } catch (const hd::mpi::thread_level_error& e) {
        text = e.what();
      }
    }).join();
    CHECK(has(text, "needs MPI_THREAD_SERIALIZED"));
    CHECK(has(text, name_of(static_cast<hd::mpi::thread_level>(given))));
    hd::barrier(comm);  // nothing has happened
  });
}

TEST_CASE("an error of MPI is reported in its words") {
  const hd::mpi::detail::session s(MPI_COMM_WORLD, settings(), false);
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(MPI_ERR_TRUNCATE, text, &length);
  s.check(MPI_SUCCESS, "MPI_Irecv");
  try {
    s.check(MPI_ERR_TRUNCATE, "MPI_Irecv", "all_reduce", 3);
    FAIL_CHECK("no error");
  } catch (const hd::comm_error& e) {
    CHECK(e.operation() == "all_reduce");
    CHECK(e.rank() == world_rank());
    CHECK(e.peer() == 3);
    CHECK(has(e.what(), std::string("MPI_Irecv: ") + text));
  }
}

TEST_CASE("run tells the others what a rank threw") {
  const int p = world_size();
  std::string text;
  try {
    hd::mpi::options o = settings();
    hd::mpi::run(o, [&](auto& comm) {
      if (comm.rank() == 0) throw boom("no data");
      hd::barrier(comm);
    });
  } catch (const std::exception& e) {
    text = e.what();
  }
  if (world_rank() == 0)
    CHECK(text == "no data");
  else
    CHECK(has(text, "rank 0 threw: no data"));
  CHECK(p == world_size());
}

TEST_CASE("a communicator that goes away by an exception tells the others") {
  std::string text;
  try {
    hd::mpi::communicator comm(MPI_COMM_WORLD, settings());
    if (comm.rank() == 0) throw boom("not caught in time");
    hd::barrier(comm);
  } catch (const std::exception& e) {
    text = e.what();
  }
  if (world_rank() == 0)
    CHECK(text == "not caught in time");
  else
    CHECK(has(text, "rank 0 left by an exception"));
}

// In the place of MPI's own: what MPI says of device memory.
namespace {
int says_aware = 0;
}
extern "C" int MPIX_Query_cuda_support() { return says_aware; }

TEST_CASE("whether MPI takes device memory is what it says") {
  for (const int says : {0, 1, 0}) {
    says_aware = says;
    CHECK(hd::mpi::cuda_aware() == (says == 1));
  }
}

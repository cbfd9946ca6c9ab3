// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/gather.hpp>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/leaders.hpp>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/collective/pipelined.hpp>
#include <heddle/collective/recursive_doubling.hpp>
#include <heddle/collective/tree.hpp>
#include <heddle/collective/verify.hpp>

#include "../support/catch.hpp"
#include "topologies.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <numeric>
#include <vector>

namespace hd = heddle;
using heddle_test::binomial_tree;
using heddle_test::half_wanted;
using heddle_test::hypercube;

namespace {

// ---- At compile time

template <class Topology, int Size> constexpr bool proven = static_cast<bool>(hd::verify(Topology{}, Size));
template <class Topology>
constexpr bool proven_to_8 = proven<Topology, 1>&& proven<Topology, 2>&& proven<Topology, 3>&& proven<Topology, 4>&&
    proven<Topology, 5>&& proven<Topology, 6>&& proven<Topology, 7>&& proven<Topology, 8>;
static_assert(proven_to_8<hd::ring>);
static_assert(proven_to_8<hd::direct>);
static_assert(proven_to_8<hd::torus_2d>);
static_assert(proven_to_8<hd::halving_doubling>);
static_assert(proven_to_8<hd::mixed_radix>);
static_assert(proven_to_8<hd::hierarchical<>>);
static_assert(proven_to_8<hd::hierarchical<hd::direct, hd::halving_doubling>>);
static_assert(proven_to_8<hd::recursive_doubling>);
static_assert(proven_to_8<hd::tree>);
static_assert(proven_to_8<hd::double_tree>);
static_assert(proven_to_8<hd::leaders<>>);
static_assert(proven_to_8<hd::leaders<hd::recursive_doubling>>);
static_assert(proven_to_8<hd::pipelined<hd::tree>>);
static_assert(proven_to_8<hd::pipelined<hd::hierarchical<>>>);
static_assert(hd::verify(hd::pipelined<hd::hierarchical<>>{{.group = 3}, 3, 2}, 7));
static_assert(proven_to_8<binomial_tree>);
static_assert(proven<hypercube, 1> && proven<hypercube, 2> && proven<hypercube, 4>);
static_assert(hd::verify(hd::ring{}, 16) && hd::verify(hd::direct{}, 16));
static_assert(hd::verify(hd::hierarchical<>{.group = 3}, 7));  // 3 + 3 + 1
static_assert(hd::verify(hd::mixed_radix{.radices = {2, 2, 2}, .within = hd::exchange::direct}, 8));
static_assert(hd::verify(hd::ring{}, 4, 3) && hd::verify(hd::ring{}, 4, 1));

// ---- Helpers

std::string describe(const hd::verdict& v) {
  return std::string(name_of(v.what)) + " on rank " + std::to_string(v.rank) + " in round " + std::to_string(v.round);
}

std::size_t sent_by(const hd::schedule& s) {
  std::size_t n = 0;
  for (const hd::operation& o : s.operations()) n += o.act == hd::action::send ? o.range.count : 0;
  return n;
}

// Every ordered factorisation of n into factors of at least 2; of 1, the empty one.
void factorisations(int n, std::vector<int>& prefix, const std::function<void(const std::vector<int>&)>& visit) {
  if (n == 1) visit(prefix);
  for (int f = 2; f <= n; ++f) {
    if (n % f) continue;
    prefix.push_back(f);
    factorisations(n / f, prefix, visit);
    prefix.pop_back();
  }
}

hd::mixed_radix radix(const std::vector<int>& f, hd::exchange within) {
  hd::mixed_radix t{.radices = {}, .within = within};
  std::copy(f.begin(), f.end(), t.radices.begin());
  return t;
}

// A ring of 4 ranks whose schedule somebody has edited.
struct edited {
  using rounds = std::vector<std::vector<hd::operation>>;
  std::function<void(int rank, rounds&, std::vector<hd::interval>& owned)> edit;

  hd::schedule all_reduce(int rank, int size, std::size_t count) const {
    const hd::schedule good = hd::ring{}.all_reduce(rank, size, count);
    rounds list;
    for (std::size_t r = 0; r < good.rounds(); ++r) list.emplace_back(good.round(r).begin(), good.round(r).end());
    std::vector<hd::interval> owned(good.owned().begin(), good.owned().end());
    edit(rank, list, owned);
    hd::schedule s;
    for (std::size_t r = 0; r < list.size(); ++r) {
      if (r == good.half()) s.split(owned);
      for (const hd::operation& o : list[r]) s.add(o.act, static_cast<int>(o.peer), o.range);
      s.next();
    }
    return s;
  }
};

// Correct sums, but no mean: up a tree, and down again to rank 0, too.
struct returned {
  hd::schedule all_reduce(int rank, int size, std::size_t count) const {
    hd::schedule s;
    s.append(binomial_tree{}.all_reduce(rank, size, count), 0, 4, [](int peer) { return peer; }, 0);
    if (rank == 1) s.add(hd::action::send, 0, {0, count});
    if (rank == 0) s.add(hd::action::copy, 1, {0, count});
    s.next();
    return s;
  }
};

hd::verdict verify_edited(std::function<void(int, edited::rounds&, std::vector<hd::interval>&)> edit) {
  return hd::verify(edited{std::move(edit)}, 4, 8);
}

}  // namespace

TEST_CASE("every topology is proven for 1 to 64 ranks") {
  for (int size = 1; size <= 64; ++size) {
    for (const std::size_t count :
         {std::size_t{0}, std::size_t{1}, static_cast<std::size_t>(size), std::size_t{1000}}) {
      INFO(size << " ranks, " << count << " elements");
      CHECK(hd::verify(hd::ring{}, size, count));
      CHECK(hd::verify(hd::direct{}, size, count));
      CHECK(hd::verify(hd::torus_2d{}, size, count));
      CHECK(hd::verify(hd::halving_doubling{}, size, count));
      CHECK(hd::verify(hd::hierarchical<>{}, size, count));
      CHECK(hd::verify(hd::recursive_doubling{}, size, count));
      CHECK(hd::verify(hd::tree{}, size, count));
      CHECK(hd::verify(hd::double_tree{}, size, count));
      CHECK(hd::verify(hd::leaders<>{}, size, count));
      CHECK(hd::verify(hd::pipelined{hd::double_tree{}, 5}, size, count));
      CHECK(hd::verify(hd::pipelined{hd::torus_2d{}, 3, 2}, size, count));
      CHECK(hd::verify(binomial_tree{}, size, count));
    }
    for (int width = 1; width <= size; ++width) {
      if (size % width == 0) CHECK(hd::verify(hd::torus_2d{width}, size));
    }
    if ((size & (size - 1)) == 0) CHECK(hd::verify(hypercube{}, size));
  }
}

TEST_CASE("hierarchies of every group size are proven, ragged groups too") {
  for (int size = 1; size <= 64; ++size) {
    const bool every = size <= 32 || size == 37 || size == 48 || size == 49 || size > 62;  // which takes a while
    for (int group = 1; group <= size + 1; ++group) {
      if (!every && group != 2 + size % 7 && group != size / 2 + 1 && group != size - 1) continue;
      INFO(size << " ranks in groups of " << group);
      const hd::verdict v = hd::verify(hd::hierarchical<>{.group = group}, size);
      CHECK(v);
      CHECK(hd::verify(hd::leaders{hd::recursive_doubling{}, group}, size));
      CHECK(hd::verify(hd::pipelined{hd::hierarchical<>{.group = group}, 3}, size));
    }
  }
  for (int size = 1; size <= 20; ++size) {
    for (int group = 1; group <= size; ++group) {
      INFO(size << " ranks in groups of " << group);
      CHECK(hd::verify(hd::hierarchical{hd::direct{}, hd::halving_doubling{}, group}, size, 100));
      CHECK(hd::verify(hd::hierarchical{hd::halving_doubling{}, hd::direct{}, group}, size, 3));
      CHECK(hd::verify(hd::hierarchical{hd::ring{}, binomial_tree{}, group}, size, 100));
      CHECK(hd::verify(hd::hierarchical{hd::ring{}, hd::hierarchical{hd::ring{}, hd::direct{}, 2}, group}, size, 100));
      CHECK(hd::verify(hd::hierarchical{hd::ring{}, hd::double_tree{}, group}, size, 100));
      CHECK(hd::verify(hd::hierarchical{hd::direct{}, hd::recursive_doubling{}, group}, size, 100));
      CHECK(hd::verify(hd::leaders{hd::double_tree{}, group}, size, 100));
      CHECK(hd::verify(hd::leaders{hd::hierarchical<>{.group = 2}, group}, size, 3));
      CHECK(hd::verify(hd::pipelined{hd::leaders{hd::tree{}, group}, 4, 3}, size, 100));
    }
  }
  CHECK(hd::verify(hd::hierarchical{hd::ring{}, hypercube{}, 3}, 11, 50));  // 3 + 3 + 3 + 2; no halves across
}

TEST_CASE("every factorisation is proven, sends 2 n (P - 1) / P and takes the rounds it says") {
  for (int size = 1; size <= 24; ++size) {
    std::vector<int> prefix;
    factorisations(size, prefix, [&](const std::vector<int>& f) {
      for (const hd::exchange within : {hd::exchange::ring, hd::exchange::direct}) {
        const hd::mixed_radix t = radix(f, within);
        INFO(t.name() << (within == hd::exchange::ring ? " of rings" : " of direct exchange"));
        const auto p = static_cast<std::size_t>(size), n = 6 * p;
        std::size_t rounds = 0;
        for (const int x : f) rounds += within == hd::exchange::ring ? 2 * (static_cast<std::size_t>(x) - 1) : 2;
        CHECK(hd::verify(t, size, n));
        CHECK(hd::verify(t, size, n + 1));
        std::size_t ragged = 0;
        for (int r = 0; r < size; ++r) {
          const hd::schedule s = t.all_reduce(r, size, n);
          CHECK(sent_by(s) == 2 * n * (p - 1) / p);
          CHECK(s.rounds() == rounds);
          CHECK(s.half() == rounds / 2);
          ragged += sent_by(t.all_reduce(r, size, n + 1));
        }
        CHECK(ragged == 2 * (n + 1) * (p - 1));  // every element crosses P - 1 links, twice
      }
    });
  }
}

TEST_CASE("the named topologies send and take what their comments say") {
  for (int size = 1; size <= 24; ++size) {
    const auto p = static_cast<std::size_t>(size), n = 12 * p;
    std::size_t factors = 0;
    for (int rest = size, d = 2; rest > 1; ++d) {
      for (; rest % d == 0; rest /= d) ++factors;
    }
    for (int r = 0; r < size; ++r) {
      INFO("rank " << r << " of " << size);
      const std::size_t wire = 2 * n * (p - 1) / p;
      CHECK(sent_by(hd::ring{}.all_reduce(r, size, n)) == wire);
      CHECK(hd::ring{}.all_reduce(r, size, n).rounds() == 2 * (p - 1));
      CHECK(sent_by(hd::direct{}.all_reduce(r, size, n)) == wire);
      CHECK(hd::direct{}.all_reduce(r, size, n).rounds() == (size > 1 ? 2 : 0));
      CHECK(sent_by(hd::halving_doubling{}.all_reduce(r, size, n)) == wire);
      CHECK(hd::halving_doubling{}.all_reduce(r, size, n).rounds() == 2 * factors);
      for (std::size_t x = 1; x <= p; ++x) {
        if (p % x) continue;
        const std::size_t y = p / x;
        const hd::schedule torus = hd::torus_2d{static_cast<int>(x)}.all_reduce(r, size, n);
        CHECK(sent_by(torus) == wire);
        CHECK(torus.rounds() == 2 * (x + y - 2));
        const hd::schedule two = hd::hierarchical<>{.group = static_cast<int>(x)}.all_reduce(r, size, n);
        CHECK(sent_by(two) == 2 * n * (x - 1) / x + 2 * (n / x) * (y - 1) / y);
        CHECK(two.rounds() == 2 * (x - 1) + 2 * (y - 1));
      }
    }
  }
}

TEST_CASE("trees and doublings take the rounds and send the elements that their comments say") {
  for (int size = 1; size <= 40; ++size) {
    std::size_t up = 0, down = 0;  // log2 of size, rounded up and down
    while ((1 << up) < size) ++up;
    while ((2 << down) <= size) ++down;
    std::size_t all_tree = 0, most_double = 0;
    const std::size_t n = 100, p = static_cast<std::size_t>(size);
    for (int r = 0; r < size; ++r) {
      INFO("rank " << r << " of " << size);
      const hd::schedule rd = hd::recursive_doubling{}.all_reduce(r, size, n), one = hd::tree{}.all_reduce(r, size, n),
                         two = hd::double_tree{}.all_reduce(r, size, n);
      CHECK(rd.rounds() == down + (up == down ? 0 : 2));
      CHECK(sent_by(rd) <= (down + (up == down ? 0 : 1)) * n);
      CHECK(one.rounds() == 2 * up);
      CHECK(two.rounds() == 2 * up);
      CHECK(sent_by(one) <= 3 * n);
      all_tree += sent_by(one);
      most_double = std::max(most_double, sent_by(two));
      const hd::schedule chunked = hd::pipelined{hd::tree{}, 7, 2}.all_reduce(r, size, n);
      CHECK(chunked.rounds() == one.rounds() + 12);
      CHECK(sent_by(chunked) == sent_by(one));
      CHECK(hd::leaders<>{.group = 4}.all_reduce(r, size, n).rounds() ==
            2 * (size > 2 ? 2 : up) + 2 * ((p + 3) / 4 - 1));
    }
    CHECK(all_tree == 2 * n * (p - 1));
    CHECK(most_double <= 2 * n);
  }
}

TEST_CASE("reduce_scatter and all_gather are proven for blocks of any sizes") {
  for (int size = 1; size <= 16; ++size) {
    for (unsigned seed = 0; seed < 6; ++seed) {
      std::vector<std::size_t> counts;
      unsigned state = 17 * seed + static_cast<unsigned>(size);
      for (int r = 0; r < size; ++r) {
        state = state * 1664525u + 1013904223u;
        counts.push_back(seed == 0 ? 0 : seed == 1 ? 4 : (state >> 16) % 4 == 0 ? 0 : (state >> 20) % 50);
      }
      INFO(size << " ranks, seed " << seed);
      CHECK(hd::verify_blocks(hd::ring{}, counts));
      CHECK(hd::verify_blocks(hd::direct{}, counts));
      CHECK(hd::verify_blocks(hd::torus_2d{}, counts));
      CHECK(hd::verify_blocks(hd::halving_doubling{}, counts));
    }
  }
}

TEST_CASE("a thousand ranks are proven") {
  CHECK(hd::verify(hd::ring{}, 1024));
  CHECK(hd::verify(hd::mixed_radix{.radices = {2, 2, 2, 2, 2, 2, 2, 2, 2, 2}}, 1024));
  CHECK(hd::verify(hd::torus_2d{32}, 1024));
  CHECK(hd::verify(hd::hierarchical<>{.group = 8}, 1023));
  // Above 64 ranks a loss and a repetition still show.
  struct lossy {
    bool twice;
    hd::schedule all_reduce(int rank, int size, std::size_t count) const {
      hd::schedule s;
      const hd::schedule good = binomial_tree{}.all_reduce(rank, size, count);
      for (std::size_t r = 0; r < good.rounds(); ++r) {
        for (int times = 0; times < (r == 3 ? (twice ? 2 : 0) : 1); ++times) {
          for (const hd::operation& o : good.round(r)) s.add(o.act, static_cast<int>(o.peer), o.range);
        }
        s.next();
      }
      return s;
    }
  };
  CHECK(hd::verify(lossy{false}, 100).what == hd::fault::incomplete);
  CHECK(hd::verify(lossy{true}, 100).what == hd::fault::incomplete);
}

TEST_CASE("the broadcast tree is proven from every root") {
  for (int size = 1; size <= 33; ++size) {
    for (int root = 0; root < size; ++root) {
      std::vector<hd::schedule> all;
      std::vector<hd::interval> blocks(static_cast<std::size_t>(size), hd::interval{0, 0});
      blocks[static_cast<std::size_t>(root)] = {0, 5};
      std::size_t log = 0;
      while ((std::size_t{1} << log) < static_cast<std::size_t>(size)) ++log;
      for (int r = 0; r < size; ++r) all.push_back(hd::detail::binomial_broadcast(r, size, root, 5));
      INFO(size << " ranks, root " << root);
      CHECK(hd::detail::prove(all, 5, {blocks, true, false}));
      CHECK(all[0].rounds() == log);
      std::size_t sent = 0;
      for (const hd::schedule& s : all) sent += sent_by(s);
      CHECK(sent == 5 * (static_cast<std::size_t>(size) - 1));
    }
  }
}

TEST_CASE("broken schedules are rejected with the right fault") {
  using hd::action;
  using hd::fault;
  const auto reason = [](const hd::verdict& v) {
    INFO(describe(v));
    CHECK_FALSE(v);
    return v.what;
  };
  CHECK(verify_edited([](int, auto&, auto&) {}));  // the twin of all that follow

  SECTION("a chunk is lost: one message is missing on both sides") {
    const auto v = verify_edited([](int rank, auto& rounds, auto&) {
      auto& last = rounds.back();
      std::erase_if(last, [&](const hd::operation& o) {
        return (rank == 1 && o.act == action::send) || (rank == 2 && o.act == action::copy);
      });
    });
    CHECK(reason(v) == fault::incomplete);
    CHECK(v.rank == 2);
  }
  SECTION("a contribution counts twice") {
    CHECK(reason(verify_edited([](int, auto& rounds, auto&) { rounds[1] = rounds[0]; })) == fault::double_count);
  }
  SECTION("one peer is another than the sender means") {
    CHECK(reason(verify_edited([](int rank, auto& rounds, auto&) {
            if (rank == 0) rounds[0][1].peer = 2;
          })) == fault::unmatched);
  }
  SECTION("a rank sends to itself") {
    const auto v = verify_edited([](int rank, auto& rounds, auto&) {
      if (rank == 3) rounds[2][0].peer = 3;
    });
    CHECK(reason(v) == fault::bad_peer);
    CHECK(v.rank == 3);
    CHECK(v.round == 2);
  }
  SECTION("a peer doesn't exist") {
    CHECK(reason(verify_edited([](int rank, auto& rounds, auto&) {
            if (rank == 3) rounds[0][0].peer = 4;
          })) == fault::bad_peer);
    CHECK(reason(verify_edited([](int rank, auto& rounds, auto&) {
            if (rank == 0) rounds[0][1].peer = static_cast<std::uint32_t>(-1);
          })) == fault::bad_peer);
  }
  SECTION("an interval leaves the buffer") {
    CHECK(reason(verify_edited([](int, auto& rounds, auto&) { rounds[0][0].range = {7, 2}; })) == fault::bad_range);
    CHECK(reason(verify_edited([](int, auto& rounds, auto&) {
            rounds[0][0].range = {1, SIZE_MAX};
          })) == fault::bad_range);
  }
  SECTION("the two sides mean different intervals of one length") {
    CHECK(reason(verify_edited([](int rank, auto& rounds, auto&) {
            if (rank == 0) rounds[4][1].range.begin = (rounds[4][1].range.begin + 2) % 8;
          })) != fault::none);
    CHECK(reason(verify_edited([](int rank, auto& rounds, auto&) {
            if (rank == 0) rounds[0][1].range.begin = (rounds[0][1].range.begin + 2) % 8;
          })) == fault::unmatched);
  }
  SECTION("a copy overwrites what is being sent") {
    CHECK(reason(verify_edited([](int, auto& rounds, auto&) {
            for (auto& o : rounds[3]) o.range = {0, 2};
          })) == fault::overlap);
  }
  SECTION("two copies write one interval") {
    CHECK(reason(verify_edited([](int rank, auto& rounds, auto&) {
            const hd::interval all{2, 2};
            rounds[5] = {};
            if (rank == 0 || rank == 1) rounds[5] = {{2, action::send, all}};
            if (rank == 2) rounds[5] = {{0, action::copy, all}, {1, action::copy, all}};
          })) == fault::overlap);
  }
  SECTION("two reduces overlap in part") {
    CHECK(reason(verify_edited([](int rank, auto& rounds, auto&) {
            rounds[0] = {};
            if (rank == 0) rounds[0] = {{2, action::send, {0, 4}}};
            if (rank == 1) rounds[0] = {{2, action::send, {0, 2}}};
            if (rank == 2) rounds[0] = {{0, action::reduce, {0, 4}}, {1, action::reduce, {0, 2}}};
          })) == fault::overlap);
  }
  SECTION("a send has no receive") {
    CHECK(reason(verify_edited([](int rank, auto& rounds, auto&) {
            if (rank == 2) rounds[0].erase(rounds[0].begin() + 1);
          })) == fault::unmatched);
  }
  SECTION("a receive has no send") {
    CHECK(reason(verify_edited([](int rank, auto& rounds, auto&) {
            if (rank == 2) rounds[0].erase(rounds[0].begin());
          })) == fault::unmatched);
  }
  SECTION("a cycle: every rank waits for what its neighbour sends a round later") {
    CHECK(reason(verify_edited([](int, auto& rounds, auto&) {
            const auto sends = [](const hd::operation& o) { return o.act == action::send; };
            std::copy_if(rounds[0].begin(), rounds[0].end(), std::back_inserter(rounds[1]), sends);
            std::erase_if(rounds[0], sends);
          })) == fault::cycle);
    const auto v = verify_edited([](int rank, auto& rounds, auto&) {  // of two ranks, one behind the other
      if (rank == 2) std::swap(rounds[1], rounds[2]);
    });
    CHECK(reason(v) == fault::cycle);
    CHECK(v.round == 1);
    CHECK(reason(verify_edited([](int rank, auto& rounds, auto&) {  // its twin: the later send is of something else
            if (rank != 2) return;
            std::swap(rounds[1], rounds[2]);
            for (hd::operation& o : rounds[2])
              if (o.act == action::send) o.range.begin = (o.range.begin + 2) % 8;
          })) == fault::unmatched);
  }
  SECTION("ranks have different numbers of rounds") {
    const auto v = verify_edited([](int rank, auto& rounds, auto&) {
      if (rank == 3) rounds.emplace_back();
    });
    CHECK(reason(v) == fault::rounds_differ);
    CHECK(v.rank == 3);
  }
  SECTION("a rank claims what isn't final on it") {
    CHECK(reason(verify_edited([](int rank, auto&, auto& owned) {
            owned[0].begin = static_cast<std::size_t>((rank + 1) % 4) * 2;
          })) == fault::owner);
  }
  SECTION("nobody owns an element") {
    CHECK(reason(verify_edited([](int rank, auto&, auto& owned) {
            if (rank == 1) owned[0].count = 1;
          })) == fault::owner);
  }
  SECTION("owned leaves the buffer") {
    CHECK(reason(verify_edited([](int rank, auto&, auto& owned) {
            if (rank == 1) owned.push_back({8, 1});
          })) == fault::owner);
  }
  SECTION("a completed element is received again") {  // rank 0 gets back what it completed: a mean would not divide it
    CHECK(reason(hd::verify(returned{}, 4, 8)) == fault::unfinished);
  }
  SECTION("a reduce completes a part of its interval") {
    const auto v = hd::verify(half_wanted{}, 2, 8);
    CHECK(reason(v) == fault::unfinished);
    CHECK(v.round == 0);
  }
  SECTION("the last round is missing everywhere") {
    CHECK(reason(verify_edited([](int, auto& rounds, auto&) { rounds.pop_back(); })) == fault::incomplete);
  }
}

TEST_CASE("blocks of more than 2^31 elements are cut exactly") {
  const std::size_t n = (std::size_t{1} << 33) + 5;
  for (const std::size_t parts : {std::size_t{1}, std::size_t{2}, std::size_t{3}, std::size_t{7}, std::size_t{1000}}) {
    std::size_t at = 0, longest = 0, shortest = SIZE_MAX;
    for (std::size_t i = 0; i < parts; ++i) {
      const hd::interval b = hd::balanced_block(n, parts, i);
      CHECK(b.begin == at);
      at = b.end();
      longest = std::max(longest, b.count);
      shortest = std::min(shortest, b.count);
    }
    CHECK(at == n);
    CHECK(longest - shortest <= 1);
  }
  CHECK(hd::balanced_block(n, 7, 6).begin == 7362801084u);  // n = 7 * 1227133513 + 6
  for (const int size : {2, 3, 7, 8}) {
    CHECK(hd::verify(hd::ring{}, size, n));
    CHECK(hd::verify(hd::direct{}, size, n));
    CHECK(hd::verify(hd::torus_2d{}, size, n));
    CHECK(hd::verify(hd::halving_doubling{}, size, n));
    CHECK(hd::verify(hd::hierarchical<>{.group = 3}, size, n));
    std::size_t sent = 0, furthest = 0;
    for (int r = 0; r < size; ++r) {
      const hd::schedule s = hd::ring{}.all_reduce(r, size, n);
      sent += sent_by(s);
      for (const hd::operation& o : s.operations()) furthest = std::max(furthest, o.range.end());
    }
    CHECK(sent == 2 * n * (static_cast<std::size_t>(size) - 1));
    CHECK(furthest == n);
  }
}

TEST_CASE("what a topology can't do is an argument error") {
  CHECK_THROWS_AS(hd::mixed_radix({.radices = {2, 3}}).all_reduce(0, 7, 1), hd::argument_error);
  CHECK_THROWS_AS(hd::mixed_radix({.radices = {-2, -3}}).all_reduce(0, 6, 1), hd::argument_error);
  CHECK_THROWS_AS(hd::torus_2d{3}.all_reduce(0, 7, 1), hd::argument_error);
  CHECK_THROWS_AS(hd::torus_2d{-1}.all_reduce(0, 7, 1), hd::argument_error);
  CHECK_THROWS_AS(hd::ring{}.all_reduce(4, 4, 1), hd::argument_error);
  CHECK_THROWS_AS(hd::ring{}.all_reduce(-1, 4, 1), hd::argument_error);
  CHECK_THROWS_AS(hd::hierarchical<>{.group = -1}.all_reduce(0, 4, 1), hd::argument_error);
  CHECK_THROWS_AS(hd::leaders<>{.group = -1}.all_reduce(0, 4, 1), hd::argument_error);
  CHECK_THROWS_AS((hd::pipelined{hd::ring{}, 0}.all_reduce(0, 4, 1)), hd::argument_error);
  CHECK_THROWS_AS((hd::pipelined{hd::ring{}, 2, 0}.all_reduce(0, 4, 1)), hd::argument_error);
  CHECK_THROWS_AS(hd::recursive_doubling{}.all_reduce(4, 4, 1), hd::argument_error);
  CHECK_THROWS_AS(hd::tree{}.all_reduce(0, 0, 1), hd::argument_error);
  const std::vector<hd::interval> three(3);
  CHECK_THROWS_AS(hd::ring{}.reduce_scatter(0, 4, three), hd::argument_error);
  CHECK_THROWS_AS(hd::direct{}.all_gather(0, 4, three), hd::argument_error);
  CHECK_THROWS_AS(hd::verify(hd::ring{}, 0), hd::argument_error);
  CHECK_THROWS_AS(hd::verify_blocks(hd::ring{}, {}), hd::argument_error);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/halves.hpp>
#include <heddle/collective/leaders.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/comm/faulty.hpp>
#include <heddle/comm/fingerprint.hpp>
#include <heddle/comm/rank_group.hpp>
#include <heddle/comm/threads.hpp>
#include <heddle/comm/throttled.hpp>
#include <heddle/comm/traced.hpp>
#include <heddle/trace/timeline.hpp>

#include "../support/catch.hpp"
#include "../support/rank_check.hpp"
#include "parts.hpp"
#include "topologies.hpp"

#include <array>
#include <stdexcept>
#include <thread>

namespace hd = heddle;
using namespace std::chrono_literals;
using heddle_test::add;
using heddle_test::add_beyond;
using heddle_test::any;
using heddle_test::check_in_parts;
using heddle_test::counting_parts;
using heddle_test::late;

namespace {

// Ranks that are threads, with messages in parts, as they come where memory isn't shared: each part in memory of its
// own, which is gone when it has been used, and some of them late. Every long message must have been told of in the
// first round of its call, since a sender would wait for that.
template <class Comm> class in_parts : public hd::detail::wrapper<Comm> {
  using hd::detail::wrapper<Comm>::inner_;

 public:
  // Messages above `limit` bytes come in parts of `part`.
  in_parts(Comm inner, std::size_t limit, std::size_t part)
      : hd::detail::wrapper<Comm>(std::move(inner)), limit_(limit), part_(part) {}
  in_parts duplicate() { return {inner_.duplicate(), limit_, part_}; }

  void begin(const hd::header&) {
    RANK_CHECK(awaited_.empty());  // of the call before
    first_ = true;
  }

  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    if constexpr (hd::takes_parts<std::remove_cvref_t<Apply>>) {
      if (std::exchange(first_, false)) {
        apply.expects(limit_, [&](std::uint8_t r, const hd::incoming& m) { awaited_.push_back({r, m.peer, m.bytes}); });
      }
      for (const hd::incoming& m : in) {
        if (m.bytes <= limit_) continue;
        RANK_CHECK(!awaited_.empty() && awaited_.front() == message{h.round, m.peer, m.bytes});
        awaited_.erase(awaited_.begin());
      }
    }
    inner_.exchange(h, out, in, [&](std::span<const hd::arrival> got) {
      if constexpr (hd::takes_parts<std::remove_cvref_t<Apply>>) {
        if (cuts(in, apply)) return deliver(got, in[0].bytes, apply);
      }
      apply(got);
    });
  }

 private:
  struct message {
    std::uint8_t round;
    int peer;
    std::size_t bytes;
    bool operator==(const message&) const = default;
  };

  template <class Apply> bool cuts(std::span<const hd::incoming> in, const Apply& apply) const {
    if (in.empty() || in[0].bytes <= (std::max)(limit_, part_)) return false;
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (in[i].into || in[i].bytes != in[0].bytes) return false;
      for (std::size_t k = 0; k < i; ++k) {
        if (in[k].peer == in[i].peer) return false;
      }
    }
    return apply.takes(part_);
  }

  template <class Apply> void deliver(std::span<const hd::arrival> whole, std::size_t bytes, Apply& apply) {
    for (std::size_t offset = 0; offset < bytes; offset += part_) {
      const std::size_t n = (std::min)(part_, bytes - offset);
      std::vector<std::vector<std::byte>> pieces;
      std::vector<hd::arrival> got(whole.begin(), whole.end());
      for (hd::arrival& a : got) {
        const auto* const from = static_cast<const std::byte*>(a.data) + offset;
        a.data = pieces.emplace_back(from, from + n).data();
      }
      if (++seen_ % 7 == static_cast<std::size_t>(this->rank())) std::this_thread::sleep_for(20us);
      apply.part(std::span<const hd::arrival>(got), offset, n);
      for (auto& p : pieces) std::fill(p.begin(), p.end(), std::byte{0xff});  // no number
    }
  }

  std::size_t limit_, part_, seen_ = 0;
  bool first_ = false;
  std::vector<message> awaited_;
};
using parted = in_parts<hd::threads::communicator>;

// Runs f(comm) on ranks whose long messages come in parts.
template <class Function> void on_ranks(int ranks, std::size_t limit, std::size_t part, Function f) {
  hd::threads::run({.ranks = ranks, .deadline = 60s}, [&](auto& comm) {
    parted p(comm, limit, part);
    f(p, comm);
  });
}

template <class Element, class Op>
void check_type(int ranks, const char* name, const heddle_test::chosen_late& t, const Op& op) {
  on_ranks(ranks, 64, 240 * sizeof(Element), [&](auto& comm, auto& plain) {
    const auto p = static_cast<std::size_t>(ranks);
    for (const std::size_t n :
         {std::size_t{0}, std::size_t{1}, p * 239, p * 240, p * 241, p * 480 + 1, p * 1000 + p - 1})
      check_in_parts<Element>(comm, plain, name, t, n, op);
  });
}

}  // namespace

TEST_CASE("parts give the same bits as whole messages, and what double precision says") {
  for (const int p : {2, 3, 5}) {
    for (const auto& [name, t] :
         {std::pair{"ring", late(hd::ring{})}, std::pair{"direct", late(hd::direct{})},
          std::pair{"halving_doubling", late(hd::halving_doubling{})}, std::pair{"torus_2d", late(hd::torus_2d{})},
          std::pair{"hierarchical of 2", late(hd::hierarchical<>{.group = 2})},
          std::pair{"leaders of 2", late(hd::leaders<>{.group = 2})},
          std::pair{"a pipelined ring", late(hd::pipelined<hd::ring>{{}, 3, 1})},
          std::pair{"binomial_tree", late(heddle_test::binomial_tree{})}}) {
      check_type<float>(p, name, t, hd::sum{});
      check_type<float>(p, name, t, add{});
      check_type<double>(p, name, t, hd::mean{});
      check_type<double>(p, name, t, add_beyond{0.0});
      check_type<hd::float16>(p, name, t, hd::mean{});
      check_type<hd::float16>(p, name, t, hd::product{});
      check_type<hd::float16>(p, name, t, hd::accumulate_in<double>(hd::sum{}));
      check_type<hd::bfloat16>(p, name, t, hd::sum{});
      check_type<hd::bfloat16>(p, name, t, hd::accumulate_in<double>(hd::mean{}));
      check_type<std::uint8_t>(p, name, t, hd::max{});
      check_type<std::uint8_t>(p, name, t, hd::product{});
      check_type<std::int64_t>(p, name, t, hd::sum{});
      check_type<std::int64_t>(p, name, t, hd::min{});
    }
  }
}

TEST_CASE("rounds come in as many parts as their messages hold") {
  for (const int ranks : {2, 3, 5}) {
    on_ranks(ranks, 64, 400, [&](auto& comm, auto& plain) {
      const auto p = static_cast<std::size_t>(ranks);
      for (const std::size_t m : {std::size_t{99}, std::size_t{100}, std::size_t{101}, std::size_t{200},
                                  std::size_t{6400}, std::size_t{6417}}) {
        const std::size_t each = m <= 100 ? 0 : (m + 99) / 100;  // of each message of m elements
        const auto ring = late(hd::ring{}), direct = late(hd::direct{});
        check_in_parts<float>(comm, plain, "ring", ring, m * p, hd::sum{}, each * (p - 1));
        check_in_parts<float>(comm, plain, "direct", direct, m * p, hd::sum{}, each);
      }
    });
  }
}

TEST_CASE("what can't be reduced in parts comes whole") {
  on_ranks(2, 64, 400, [&](auto& comm, auto& plain) {
    check_in_parts<float>(comm, plain, "two of one peer", heddle_test::two_at_once(), 2000, hd::sum{}, 0);
    check_in_parts<double>(comm, plain, "a half that is wanted", late(heddle_test::half_wanted{}), 500, hd::sum{},
                           10);  // its first round in parts; the second one copies
  });
  // Messages of different lengths: rank 0 reduces one piece of each of the others, then the pieces the other way round.
  const auto unequal = [](int rank, int, std::size_t count) {
    const hd::interval pieces[] = {{0, 2 * count / 3}, {2 * count / 3, count - 2 * count / 3}};
    hd::schedule s;
    for (int round = 0; round < 2; ++round, s.next()) {
      if (rank > 0) s.add(hd::action::send, 0, pieces[(rank + round) % 2]);
      for (int peer = 1; peer < 3 && rank == 0; ++peer) s.add(hd::action::reduce, peer, pieces[(peer + round) % 2]);
    }
    if (rank > 0) s.add(hd::action::copy, 0, {0, count});
    for (int peer = 1; peer < 3 && rank == 0; ++peer) s.add(hd::action::send, peer, {0, count});
    s.next();
    return s;
  };
  on_ranks(3, 64, 400, [&](auto& comm, auto& plain) {
    check_in_parts<float>(comm, plain, "of two lengths", {unequal}, 900, hd::sum{}, 0);
  });
  // Elements that no part holds a whole number of.
  on_ranks(3, 64, 404, [](auto& comm, auto& plain) {
    check_in_parts<double>(comm, plain, "ring", late(hd::ring{}), 900, hd::sum{}, 0);
  });
  // What completes a part of its interval refuses a mean there, too.
  CHECK_THROWS_AS(on_ranks(2, 64, 400,
                           [](auto& comm, auto&) {
                             std::vector<float> data(1000, 1.0f);
                             hd::all_reduce(comm, heddle_test::half_wanted{}, std::span(data), hd::mean{});
                           }),
                  hd::argument_error);
}

TEST_CASE("the halves of an all-reduce in parts are what it is as a whole") {
  for (const int ranks : {2, 3, 5}) {
    on_ranks(ranks, 64, 400, [&](auto& comm, auto& plain) {
      const std::size_t n = 1001 * static_cast<std::size_t>(ranks) + 1;
      const hd::leaf l = hd::leaf_of<float>(hd::mean{});
      hd::halved_plan<hd::ring> parts({}, comm.rank(), ranks, n), whole({}, comm.rank(), ranks, n);
      for (int run = 0; run < 2; ++run) {
        std::vector<float> a = heddle_test::input_of<float>(comm.rank(), n), b = a;
        parts.reduce_scatter(comm, a.data(), l);
        whole.reduce_scatter(plain, b.data(), l);
        for (const hd::interval o : parts.owned())
          RANK_CHECK(std::memcmp(a.data() + o.begin, b.data() + o.begin, o.count * sizeof(float)) == 0);
        parts.all_gather(comm, a.data());
        whole.all_gather(plain, b.data());
        RANK_CHECK(a == b);
      }
    });
  }
}

TEST_CASE("a run may begin at a later round, whose messages come in parts") {
  for (const int ranks : {3, 5}) {
    on_ranks(ranks, 64, 400, [&](auto& comm, auto& plain) {
      heddle_test::check_rounds_apart(comm, plain, 1001 * static_cast<std::size_t>(ranks) + 1);
    });
  }
}

TEST_CASE("what is executed in parts is the schedule, once") {
  on_ranks(3, 64, 400, [](auto& comm, auto&) {
    std::vector<float> data(3003, 1.0f);
    std::vector<hd::operation> trace;
    hd::all_reduce_plan<hd::ring> plan({}, comm.rank(), 3, data.size());
    plan.engine().trace = &trace;
    plan(comm, data.data(), hd::leaf_of<float>(hd::sum{}));
    const auto all = plan.plan().operations();
    RANK_CHECK(trace.size() == all.size());
    for (std::size_t i = 0; i < trace.size(); ++i)
      RANK_CHECK(trace[i].peer == all[i].peer && trace[i].act == all[i].act && trace[i].range == all[i].range);
    RANK_CHECK(data == std::vector<float>(3003, 3.0f));
  });
}

namespace {
struct add_until {  // throws when it has been called so often
  long* left;
  float operator()(float a, float b) const {
    if (--*left == 0) throw std::runtime_error("no more sums");
    return a + b;
  }
};
}  // namespace

TEST_CASE("after an operation has thrown between parts, a plan serves again, in parts and whole") {
  constexpr int ranks = 3;
  constexpr std::size_t n = 3000;
  for (const bool whole : {false, true}) {
    for (const long calls : {1, 100, 101, 150, 999, 1999}) {
      std::vector<hd::all_reduce_plan<hd::ring>> plans;
      for (int r = 0; r < ranks; ++r) plans.emplace_back(hd::ring{}, r, ranks, n);
      std::vector<std::vector<float>> data(ranks, std::vector<float>(n));
      const auto reduce = [&](auto& comm, long left) {
        const auto me = static_cast<std::size_t>(comm.rank());
        const add_until op{&left};
        for (std::size_t i = 0; i < n; ++i) data[me][i] = static_cast<float>(i % 97) + static_cast<float>(me);
        plans[me](comm, data[me].data(), hd::leaf_of<float>(op));
      };
      CHECK_THROWS_WITH(
          on_ranks(ranks, 64, 400, [&](auto& comm, auto&) { reduce(comm, comm.rank() == 2 ? calls : -1); }),
          "no more sums");
      on_ranks(ranks, 64, 400, [&](auto& comm, auto& plain) {
        if (whole)
          reduce(plain, -1);
        else
          reduce(comm, -1);
      });
      for (const auto& d : data) {
        for (std::size_t i = 0; i < n; ++i) REQUIRE(d[i] == static_cast<float>(3 * (i % 97) + 3));
      }
    }
  }
}

TEST_CASE("parts pass through wrappers, those of groups, too") {
  hd::timeline times;
  const auto through = [](auto wrapped, auto& plain, std::size_t parts) {
    check_in_parts<float>(wrapped, plain, "ring", late(hd::ring{}), 300 * static_cast<std::size_t>(plain.size()),
                          hd::sum{}, parts);
    check_in_parts<hd::float16>(wrapped, plain, "hierarchical of 2", late(hd::hierarchical<>{.group = 2}), 1207,
                                hd::mean{}, parts ? any : 0);
  };
  on_ranks(3, 64, 400, [&](auto& comm, auto& plain) {
    hd::counting counted(comm);
    through(counted, plain, 6);
    // 3 ranks: 2 n / 3 of the ring's 2 n bytes in each half, in 4 messages a run; parts aren't counted one by one.
    counted = hd::counting(comm);
    hd::all_reduce(counted, hd::ring{}, std::span(std::vector<float>(900).data(), 900));
    RANK_CHECK(counted.sent().messages == 4 && counted.sent().bytes == 4 * 1200);
    through(hd::traced(comm, times), plain, 6);
    through(hd::fingerprint(comm), plain, 6);
    through(hd::faulty(comm, hd::failures{.late = 0.1, .longest = 50us}), plain, 6);
    through(hd::throttled(comm, hd::link_cost{.alpha = 1e-6}), plain, 0);  // which adds messages
    through(hd::counting(hd::fingerprint(hd::faulty(comm, hd::failures{}))), plain, 6);
  });
  // Two groups of ranks that aren't neighbours: what a group's call will receive is told by ranks underneath.
  on_ranks(5, 64, 400, [&](auto& comm, auto& plain) {
    hd::rank_group group(comm, comm.rank() % 2), same(plain, plain.rank() % 2);
    through(group, same, 3 * (static_cast<std::size_t>(group.size()) - 1));
    hd::rank_group inner(group, 0), inner_plain(same, 0);
    through(inner, inner_plain, 3 * (static_cast<std::size_t>(group.size()) - 1));
  });
}

TEST_CASE("a fault within a round of parts strikes before the first of them") {
  using enum hd::failure;
  for (const std::uint64_t call : {0, 1}) {  // of four rounds; both reduce
    std::vector<float> data(900, 1.0f);
    CHECK_THROWS_AS(on_ranks(3, 64, 400,
                             [&](auto& comm, auto&) {
                               std::vector<float> others(900, 1.0f);
                               hd::faulty bad(comm, hd::failures{.what = throw_within, .rank = 1, .call = call});
                               counting_parts counted(bad);
                               std::vector<float>& mine = comm.rank() == 1 ? data : others;
                               hd::all_reduce(counted, hd::ring{}, std::span(mine));
                             }),
                    hd::injected_failure);
    // Rank 1 has reduced as many blocks as it has been through rounds.
    CHECK(std::count(data.begin(), data.end(), 1.0f) == (call == 0 ? 900 : 600));
  }
}

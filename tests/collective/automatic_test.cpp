// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/automatic.hpp>
#include <heddle/collective/gather.hpp>
#include <heddle/collective/verify.hpp>
#include <heddle/comm/calibrate.hpp>
#include <heddle/comm/detail/wrapper.hpp>
#include <heddle/comm/self.hpp>
#include <heddle/comm/threads.hpp>

#include "../support/catch.hpp"
#include "../support/rank_check.hpp"

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

namespace hd = heddle;

namespace {

hd::links cluster(double intra_alpha, double intra_beta, double inter_alpha, double inter_beta, int node,
                  hd::sharing shared = hd::sharing::node, double gamma = 0.0) {
  return {{{intra_alpha, intra_beta}, hd::sharing::rank}, {{inter_alpha, inter_beta}, shared}, gamma, node};
}

void near(double a, double b) {
  CAPTURE(a, b);
  CHECK(std::abs(a - b) <= 1e-9 * std::abs(b));
}

// Time that passes only in messages.
struct virtual_clock {
  using duration = std::chrono::duration<double>;
  using time_point = std::chrono::time_point<virtual_clock, duration>;
  static time_point now() { return time_point(duration(seconds)); }
  static inline thread_local double seconds = 0.0;
};

// Charges a round to that clock: messages through one port one after the other, those of several at the same time.
template <class Comm> class charged {
 public:
  charged(Comm inner, const hd::links& costs) : inner_(std::move(inner)), costs_(costs) {}
  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  std::uint16_t next_sequence() { return inner_.next_sequence(); }
  charged duplicate() { return {inner_.duplicate(), costs_}; }
  void fail(const std::string& text) { inner_.fail(text); }
  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    inner_.exchange(h, out, in, std::forward<Apply>(apply));
    double round = 0.0, first = 0.0;
    for (const hd::outgoing& m : out) {
      const hd::link_class& c = costs_.between(rank(), m.peer);
      const double s = c.cost.alpha + costs_.beta(rank(), m.peer, size()) * static_cast<double>(m.bytes);
      round = c.shared == hd::sharing::pair ? std::max(round, s) : round + s;
      if (h.count != call_ && m.bytes > 4096) first = c.first;
    }
    virtual_clock::seconds += round + first;
    call_ = h.count;
  }

 private:
  Comm inner_;
  hd::links costs_;
  std::uint64_t call_ = 0;
};

}  // namespace

TEST_CASE("prices are the formulas of the literature") {
  const double alpha = 3e-6, beta = 2e-10, gamma = 1e-10;
  hd::links flat{{{alpha, beta}, hd::sharing::rank}, {}, gamma, 0};
  for (const int p : {1, 2, 4, 8, 16}) {
    const double q = p, n = 4.0 * 1600 * p;
    const auto bytes = static_cast<std::size_t>(n);
    const double lg = std::log2(q), wire = 2 * n * (q - 1) / q, work = n * (q - 1) / q;
    CAPTURE(p);
    near(hd::price(hd::ring{}, p, bytes, flat), 2 * (q - 1) * alpha + wire * beta + work * gamma);
    near(hd::price(hd::halving_doubling{}, p, bytes, flat), 2 * lg * alpha + wire * beta + work * gamma);
    near(hd::price(hd::recursive_doubling{}, p, bytes, flat), lg * (alpha + n * beta + n * gamma));
    near(hd::price(hd::direct{}, p, bytes, flat), 2 * (q - 1) * alpha + wire * beta + work * gamma);
    hd::links apart = flat;
    apart.intra.shared = hd::sharing::pair;  // all at once
    near(hd::price(hd::direct{}, p, bytes, apart), p == 1 ? 0 : 2 * (alpha + n / q * beta) + work * gamma);
  }
  // The first message to each peer asks: one in a ring, log2 P of halving; if that is less than sending it twice.
  hd::links asks = flat;
  asks.intra.first = 2e-6;
  const double large = 4.0 * 1'600'000, work = large * 7 / 8 * (2 * beta + gamma);
  near(hd::price(hd::ring{}, 8, 6'400'000, asks), 14 * alpha + work + 2e-6);
  near(hd::price(hd::halving_doubling{}, 8, 6'400'000, asks), 6 * alpha + work + 3 * 2e-6);
  near(hd::price(hd::recursive_doubling{}, 2, 64, asks), alpha + 64 * (2 * beta + gamma));
  // Two nodes of four: rings inside, then 4 columns that share the port of their node.
  const double a1 = 1e-6, b1 = 1e-11, a2 = 2e-5, b2 = 1e-9, n = 4.0 * 8000;
  const hd::links two = cluster(a1, b1, a2, b2, 4);
  near(hd::price(hd::hierarchical<>{.group = 4}, 8, 32000, two),
       2 * (3 * a1 + 3 * n / 4 * b1) + 2 * (a2 + 4 * n / 8 * b2));
  // A leader alone has the port for itself: the same bytes cross in the same time.
  near(hd::price(hd::leaders<>{.group = 4}, 8, 32000, two),
       2 * (2 + 1) * (a1 + n * b1) + 2 * (a2 + n / 2 * b2));  // rank 2 serves two, rank 0 one
  hd::links wide = two;
  wide.inter.shared = hd::sharing::rank;
  near(hd::price(hd::hierarchical<>{.group = 4}, 8, 32000, wide),
       2 * (3 * a1 + 3 * n / 4 * b1) + 2 * (a2 + n / 8 * b2));
}

TEST_CASE("pipelining hides one kind of link behind the other") {
  // Without latencies, and with phases of equal cost, many chunks take half the time.
  const hd::links even = cluster(0, 1e-9, 0, 4e-9 / 3, 4, hd::sharing::rank);
  const hd::hierarchical<> two{.group = 4};
  const std::size_t bytes = std::size_t{1} << 22;
  const double whole = hd::price(two, 16, bytes, even);
  double before = whole;
  for (const int chunks : {4, 16, 64}) {
    const double s = hd::price(hd::pipelined{two, chunks}, 16, bytes, even);
    CAPTURE(chunks, s, whole);
    CHECK(s < before);
    before = s;
  }
  const double inside = 2 * 0.75 * static_cast<double>(bytes) * 1e-9, across = whole - inside;
  CHECK(before >= 0.999 * std::max(inside, across));
  CHECK(before <= 1.25 * std::max(inside, across));
}

TEST_CASE("every candidate of automatic is proven, and none is better than its choice", "[sweep]") {
  for (const int size : {1, 2, 3, 5, 8, 12, 16, 23}) {
    for (const int node : {0, 1, 3, 4, 8}) {
      const hd::automatic t{cluster(1e-6, 1e-10, 1e-5, 1e-9, node, hd::sharing::node, 1e-10)};
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1025}, std::size_t{500000}}) {
        CAPTURE(size, node, count);
        const auto all = t.explain(size, 4 * count);
        for (const hd::choice& c : all) {
          INFO(c.name());
          CHECK(hd::verify(c, size, count));
          CHECK(c.seconds >= all.front().seconds);
          CHECK(c.seconds == hd::price(c, size, 4 * count, t.costs));
        }
        CHECK(hd::verify(t, size, count));
        CHECK(hd::table(all).find(all.front().name()) != std::string::npos);
      }
    }
  }
}

TEST_CASE("the choice follows the links") {
  using shape = hd::choice::shape;
  const hd::links lan{{{1e-5, 1e-9}, hd::sharing::rank}, {}, 1e-10, 0};
  CHECK(hd::automatic{lan}.choose(8, 8).which == shape::recursive_doubling);  // latency only
  const auto large = hd::automatic{lan}.explain(8, std::size_t{1} << 28);
  near(large.front().seconds, hd::price(hd::halving_doubling{}, 8, std::size_t{1} << 28, lan));
  const hd::links switched{{{1e-5, 1e-9}, hd::sharing::pair}, {}, 0, 0};
  CHECK(hd::automatic{switched}.choose(8, std::size_t{1} << 24).which == shape::direct);  // all links at once
  // Slow links between machines: whatever is chosen is a hierarchy, and far better than a flat ring.
  const hd::links slow = cluster(1e-6, 1.2e-10, 2e-5, 1e-9, 8, hd::sharing::rank);
  const hd::choice c = hd::automatic{slow}.choose(64, 25u << 20);
  INFO(c.name());
  CHECK(c.which >= shape::rings_across_rings);
  CHECK(c.chunks > 1);
  CHECK(c.seconds < 0.75 * hd::price(hd::hierarchical<>{.group = 8}, 64, 25u << 20, slow));
}

TEST_CASE("where far messages share links, the choice is a topology of neighbours") {
  hd::links l = cluster(1e-6, 2e-10, 1e-6, 2e-10, 0);
  CHECK(hd::automatic{l}.choose(64, 25u << 20).which == hd::choice::shape::halving_doubling);
  for (std::size_t k = 1; k < 6; k += 2) l.intra.far[k] = 2.0;  // a torus of 4 x 4 x 4 hosts
  const hd::choice c = hd::automatic{l}.choose(64, 25u << 20);
  CHECK((c.which == hd::choice::shape::ring || c.which == hd::choice::shape::torus_2d));
  // Exactly: half of the bytes go 1, 4 or 16 away, the other half twice as long.
  hd::links bytes = l;
  bytes.intra.cost.alpha = 0.0;
  const double n = 64 * 64 * 4, each = 2e-10 * 2 * n;
  near(hd::price(hd::halving_doubling{}, 64, 64 * 64 * 4, bytes),
       each * (1.0 / 2 + 2.0 / 4 + 1.0 / 8 + 2.0 / 16 + 1.0 / 32 + 2.0 / 64));
  bytes.intra.far[2] = 0.0;
  CHECK_THROWS_AS(bytes.check(), hd::argument_error);
}

TEST_CASE("links are a table that reads back as the same value") {
  hd::links l = cluster(1.0 / 3, 2e-11, 1e-5, 1.0 / 7e9, 8, hd::sharing::pair, 0.1);
  l.inter.first = 2.0 / 3;
  l.intra.far[3] = 1.0 / 3;
  l.inter.sized[2] = {0.1, 1.0 / 7};
  CHECK(hd::links::parse(l.text()) == l);
  CHECK(hd::links::parse(hd::links{}.text()) == hd::links{});
  const std::string path = (std::filesystem::temp_directory_path() / "heddle_links_test.txt").string();
  l.save(path);
  CHECK(hd::links::load(path) == l);
  std::remove(path.c_str());
  CHECK_THROWS_AS(hd::links::load(path), hd::file_error);
  CHECK_THROWS_AS(l.save(path + "/no/such/folder"), hd::file_error);
  const std::string far = " 1 1 1 0.5 1 1 1 1 1 1 1 1 1 1 1 1";
  const hd::links older = hd::links::parse("heddle-links 3\nintra 1e-6 2e-9 pair 0" + far +
                                           "\ninter 3e-6 4e-9 node 5e-6" + far + "\ngamma 6e-9\nnode 8\n");
  hd::links same{{{1e-6, 2e-9}, hd::sharing::pair}, {{3e-6, 4e-9}, hd::sharing::node, 5e-6}, 6e-9, 8};
  same.intra.far[3] = same.inter.far[3] = 0.5;
  CHECK(older == same);
  CHECK_THROWS_AS(hd::links::parse("heddle-links 2\n"), hd::file_error);
  const std::string good = l.text();
  for (std::size_t n = 0; n + 1 < good.size(); n += 3) {
    if (n + 3 < good.size()) CHECK_THROWS_AS(hd::links::parse(good.substr(0, n)), hd::file_error);
  }
  CHECK_THROWS_AS(hd::links::parse(good + "more"), hd::file_error);
  // A refusal says where, what is allowed, and in which file.
  const auto refused = [&](const std::string& table, const std::string& why) {
    std::FILE* const f = std::fopen(path.c_str(), "w");
    std::fwrite(table.data(), 1, table.size(), f);
    std::fclose(f);
    std::string text;
    try {
      hd::links::load(path);
    } catch (const hd::file_error& e) {
      text = e.what();
    }
    std::remove(path.c_str());
    INFO(text);
    CHECK((text.find(why) != std::string::npos && text.find(path) != std::string::npos));
  };
  refused("", "the end in line 1 of the table instead of heddle-links");
  refused("heddle-links 2\n", "'2' in line 1 of the table instead of 3 or 4");
  const auto cut = good.find("gamma");
  refused(good.substr(0, cut + 5), "the end in line 4 of the table instead of a number");
  std::string flipped = good;
  flipped[cut] ^= 1;
  refused(flipped, "'famma' in line 4 of the table instead of gamma");
  refused(good + "more", "'more' in line 6 of the table instead of the end");
  refused(good + std::string(10000, ' '), "too long for a table");
  hd::links bad = l;
  bad.gamma = -1;
  CHECK_THROWS_AS(hd::links::parse(bad.text()), hd::file_error);
  CHECK_THROWS_AS(hd::price(hd::ring{}, 2, 8, bad), hd::argument_error);
  bad = l;
  bad.intra.sized[1].beta = 0.0;
  CHECK_THROWS_AS(bad.check(), hd::argument_error);
  bad.gamma = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_AS(bad.check(), hd::argument_error);
  CHECK_THROWS_AS(hd::price(hd::ring{}, 0, 8, l), hd::argument_error);
  CHECK_THROWS_AS(hd::price(hd::ring{}, 2, 8, l, 0), hd::argument_error);
}

TEST_CASE("costs may differ with the number of ranks, and the choice follows") {
  hd::links l = cluster(1e-5, 1e-9, 2e-5, 1e-8, 4);
  l.intra.sized[0] = {3.0, 0.5};   // two or three ranks of a machine
  l.inter.sized[0] = {0.01, 2.0};  // two or three machines
  l.inter.sized[1] = {1.5, 1.0};   // four to seven
  const auto priced = [&](int ranks, hd::link_cost intra, hd::link_cost inter) {
    const hd::links plain = cluster(1e-5 * intra.alpha, 1e-9 * intra.beta, 2e-5 * inter.alpha, 1e-8 * inter.beta, 4);
    for (const std::size_t bytes : {4u, 65536u, 25000000u}) {
      CAPTURE(ranks, bytes);
      near(hd::price(hd::ring{}, ranks, bytes, l), hd::price(hd::ring{}, ranks, bytes, plain));
      near(hd::price(hd::hierarchical<>{.group = 4}, ranks, bytes, l),
           hd::price(hd::hierarchical<>{.group = 4}, ranks, bytes, plain));
      CHECK(hd::automatic{l}.choose(ranks, bytes).name() == hd::automatic{plain}.choose(ranks, bytes).name());
    }
  };
  priced(2, {3.0, 0.5}, {1.0, 1.0});
  priced(3, {3.0, 0.5}, {1.0, 1.0});
  priced(4, {1.0, 1.0}, {1.0, 1.0});
  priced(8, {1.0, 1.0}, {0.01, 2.0});
  priced(16, {1.0, 1.0}, {1.5, 1.0});
  priced(32, {1.0, 1.0}, {1.0, 1.0});
  // On one kind of link: rounds are dear among eight, and cost nothing among four.
  hd::links one = cluster(1e-3, 1e-9, 1e-3, 1e-9, 0);
  one.intra.sized[1] = {1e-6, 1.0};
  near(hd::price(hd::ring{}, 4, 1 << 20, one), 6 * (1e-9 + (1 << 18) * 1e-9));
  near(hd::price(hd::ring{}, 8, 1 << 20, one), 14 * (1e-3 + (1 << 17) * 1e-9));
  const auto rounds = [&](int ranks) {
    return hd::automatic{one}.choose(ranks, 1 << 20).all_reduce(0, ranks, 1 << 18).rounds();
  };
  CHECK(rounds(8) <= 3);
  const double four = hd::automatic{one}.choose(4, 1 << 20).seconds;
  CHECK(four <= 6 * (1e-9 + (1 << 18) * 1e-9));
}

namespace {
// Which ranks took part in each round of a calibration, so that another one can charge them by their number.
struct participants {
  std::mutex mutex;
  std::map<std::pair<std::uint64_t, int>, std::set<int>> of;
};
template <class Comm> class by_number : public hd::detail::wrapper<Comm> {
 public:
  by_number(Comm inner, participants& p, bool charge) : hd::detail::wrapper<Comm>(std::move(inner)), p_(p), charge_(charge) {}
  by_number duplicate() { return {this->inner_.duplicate(), p_, charge_}; }
  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    this->inner_.exchange(h, out, in, std::forward<Apply>(apply));
    const std::lock_guard lock(p_.mutex);
    std::set<int>& all = p_.of[{h.count, h.round}];
    if (!charge_) all.insert(this->rank());
    const double few = all.size() <= 2 ? 0.5 : all.size() <= 4 ? 0.75 : 1.0;
    for (const hd::outgoing& m : out)
      virtual_clock::seconds += few * 1e-5 + (2.0 - few) * 1e-9 * static_cast<double>(m.bytes);
  }

 private:
  participants& p_;
  bool charge_;
};
}  // namespace

TEST_CASE("calibrate measures fewer ranks, too") {
  participants all;
  hd::links found;
  for (const bool charge : {false, true}) {
    hd::threads::run(8, [&](auto& inner) {
      virtual_clock::seconds = 0.0;
      by_number comm(inner, all, charge);
      const hd::links l = hd::calibrate<virtual_clock>(comm);
      if (comm.rank() == 0) found = l;
    });
  }
  CAPTURE(found.text());
  const auto close = [](double a, double b) { return std::abs(a - b) <= 0.01 * b; };
  CHECK((close(found.intra.cost.alpha, 1e-5) && close(found.intra.cost.beta, 1e-9)));
  CHECK((close(found.intra.sized[0].alpha, 0.5) && close(found.intra.sized[0].beta, 1.5)));
  CHECK((close(found.intra.sized[1].alpha, 0.75) && close(found.intra.sized[1].beta, 1.25)));
  CHECK(found.intra.sized[2] == hd::link_cost{1.0, 1.0});
}

TEST_CASE("calibrate finds the costs of a cluster, and all ranks get the same") {
  for (const hd::sharing shared : {hd::sharing::pair, hd::sharing::rank}) {
    hd::link_class intra{{4e-6, 3e-10}, shared, 3e-6}, inter{{5e-5, 2e-9}, shared, 4e-5};
    intra.far[1] = 2.0;  // for those 2 or 3 apart
    inter.far[1] = 3.0;
    for (const int node : {0, 1, 3}) {
      std::vector<hd::links> found(7);
      hd::threads::run(7, [&](auto& inner) {
        virtual_clock::seconds = 0.0;
        charged comm(inner, {intra, inter, 0.0, node});
        found[static_cast<std::size_t>(comm.rank())] = hd::calibrate<virtual_clock>(comm, node);
      });
      CAPTURE(node, found[0].text());
      for (const hd::links& l : found) CHECK(l == found[0]);
      const auto close = [](const hd::link_class& a, const hd::link_class& b) {
        return a.shared == b.shared && std::abs(a.cost.alpha - b.cost.alpha) <= 1e-2 * b.cost.alpha &&
               std::abs(a.cost.beta - b.cost.beta) <= 1e-2 * b.cost.beta &&
               std::abs(a.first - b.first) <= 1e-2 * b.first;
      };
      const auto far = [](const hd::link_class& c, std::size_t k, double factor) {
        return std::abs(c.far[k] - factor) <= 1e-2 && c.far[0] == 1.0;
      };
      for (const std::size_t k : {1, 15}) {  // of 3, around, all are neighbours
        CHECK(far(found[0].intra, k, node == 0 ? 2.0 : node == 1 ? 3.0 : 1.0));
        CHECK(far(found[0].inter, k, node == 0 ? 2.0 : node == 1 ? 3.0 : 1.0));
      }

      CHECK(close(found[0].intra, node == 1 ? inter : intra));
      CHECK(close(found[0].inter, node == 0 ? intra : inter));
      CHECK(found[0].node == node);
    }
  }
  for (const int node : {1, 2, 3}) {
    hd::threads::run(5, [&](auto& comm) {
      const hd::links l = hd::calibrate(comm, node);
      RANK_CHECK(l.node == node && l.inter.cost.alpha > 0 && l.intra.cost.alpha > 0);
    });
  }
  hd::self alone;
  CHECK(hd::calibrate(alone).gamma > 0);
  CHECK_THROWS_AS(hd::calibrate(alone, -1), hd::argument_error);
}

TEST_CASE("the example of the documentation for automatic", "[sweep]") {
  // example-begin automatic
  hd::threads::run(4, [](auto& comm) {
    const hd::links costs = hd::calibrate(comm);                          // a second; every rank gets the same value
    costs.save("links-of-rank-" + std::to_string(comm.rank()) + ".txt");  // later: links::load
    const hd::automatic chosen{costs};
    std::vector<float> gradient(1000, 1.0f);
    hd::all_reduce(comm, chosen, std::span(gradient));                 // 4 on every rank
    const std::string why = hd::table(chosen.explain(64, 25u << 20));  // 64 ranks, 25 MiB: candidates, cheapest first
    if (gradient[0] != 4.0f || why.empty()) throw std::logic_error("it should be 4");
  });
  // example-end
  for (int r = 0; r < 4; ++r) std::remove(("links-of-rank-" + std::to_string(r) + ".txt").c_str());
}

TEST_CASE("automatic reduces like any topology") {
  hd::threads::run(6, [](auto& comm) {
    const hd::automatic t{cluster(1e-6, 1e-10, 1e-5, 1e-9, 3)};
    for (const std::size_t n : {0, 1, 17, 10007}) {
      std::vector<float> data(n, 1.0f + static_cast<float>(comm.rank()));
      hd::all_reduce(comm, t, std::span<float>(data), hd::mean{});
      RANK_CHECK(data == std::vector<float>(n, 3.5f));
    }
  });
  // Ranks that calibrated apart are told apart.
  CHECK_THROWS_AS(hd::threads::run(2,
                                   [](auto& comm) {
                                     const hd::automatic t{cluster(1e-6, 1e-10, 1e-5, 1e-9, comm.rank())};
                                     std::vector<float> data(8);
                                     hd::all_reduce(comm, t, std::span<float>(data));
                                   }),
                  hd::comm_error);
}

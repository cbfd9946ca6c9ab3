// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/gather.hpp>
#include <heddle/comm/self.hpp>
#include <heddle/comm/threads.hpp>
#include <heddle/core/bulk_reduction.hpp>
#include <heddle/core/host.hpp>

#include "../support/catch.hpp"
#include "../support/rank_check.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <numeric>
#include <stdexcept>

namespace hd = heddle;
using namespace std::chrono_literals;

namespace {
std::vector<std::size_t> sizes(int ranks) {
  const auto p = static_cast<std::size_t>(ranks);
  if (ranks == 3) return {0, 1, 2, 3, 4, 17, 1023, 1024, 1025, 10007};
  return {0, 1, p - 1, p, p + 1, 17, 1025};
}
const std::array<int, 7> all_ranks{1, 2, 3, 4, 5, 7, 8};
}  // namespace

TEST_CASE("reduce gives every root the sum, the mean and the rest") {
  for (const int p : all_ranks) {
    hd::threads::run(p, [&](auto& comm) {
      for (int root = 0; root < p; ++root) {
        for (const std::size_t n : sizes(p)) {
          std::vector<float> sum(n), mean(n);
          std::vector<hd::float16> half(n, hd::float16(20000.0f));
          for (std::size_t i = 0; i < n; ++i)
            sum[i] = mean[i] = static_cast<float>(i) * (1.0f + static_cast<float>(comm.rank()));
          hd::reduce(comm, std::span<float>(sum), root);
          hd::reduce(comm, std::span<float>(mean), root, hd::mean{});
          const bool left = hd::reduce(comm, std::span<hd::float16>(half), root, hd::mean{});
          RANK_CHECK(!left);
          if (comm.rank() != root) continue;
          const double total = p * (p + 1) / 2.0;
          for (std::size_t i = 0; i < n; ++i) {
            const double exact = static_cast<double>(i) * total;
            RANK_CHECK(sum[i] == exact);
            RANK_CHECK(std::abs(mean[i] - exact / p) <= exact / p * 0x1p-24);
            RANK_CHECK(std::abs(static_cast<float>(half[i]) - 20000.0) <= 20000.0 * 3 * 0x1p-11);
          }
        }
      }
    });
  }
  hd::self alone;
  std::vector<float> data(3);
  CHECK_THROWS_AS(hd::reduce(alone, std::span<float>(data), 1), hd::argument_error);
  CHECK_THROWS_AS(hd::reduce(alone, std::span<float>(static_cast<float*>(nullptr), 3)), hd::argument_error);
}

TEST_CASE("products") {
  for (const int p : all_ranks) {
    hd::threads::run(p, [&](auto& comm) {
      double exact = 1.0;
      std::int64_t whole = 1;
      for (int r = 0; r < p; ++r) exact *= 0.5 + r, whole *= 3 + r;
      const auto mine = static_cast<float>(0.5 + comm.rank());
      std::vector<float> ring(19, mine), direct(19, mine);
      std::vector<double> wide(19, mine);
      std::vector<hd::bfloat16> half(19, hd::bfloat16(mine));
      std::vector<std::int64_t> integers(19, 3 + comm.rank());
      std::vector<std::uint8_t> bytes(19, static_cast<std::uint8_t>(3 + comm.rank()));
      hd::all_reduce(comm, hd::ring{}, std::span<float>(ring), hd::product{});
      hd::all_reduce(comm, hd::direct{}, std::span<float>(direct), hd::product{});
      hd::all_reduce(comm, hd::native{}, std::span<double>(wide), hd::product{});
      hd::all_reduce(comm, hd::direct{}, std::span<hd::bfloat16>(half), hd::product{});
      hd::all_reduce(comm, hd::ring{}, std::span<std::int64_t>(integers), hd::product{});
      hd::all_reduce(comm, hd::ring{}, std::span<std::uint8_t>(bytes), hd::product{});
      for (std::size_t i = 0; i < 19; ++i) {
        RANK_CHECK(std::abs(ring[i] - exact) <= p * 0x1p-24 * exact);
        RANK_CHECK(std::abs(direct[i] - exact) <= 1.01 * 0x1p-24 * exact);
        RANK_CHECK(std::abs(wide[i] - exact) <= p * 0x1p-53 * exact);
        RANK_CHECK(std::abs(static_cast<float>(half[i]) - exact) <= 1.01 * 0x1p-8 * exact);
        RANK_CHECK(integers[i] == whole);
        RANK_CHECK(bytes[i] == static_cast<std::uint8_t>(whole));  // wraps around
      }
      // From float16's range to infinity: said by whoever multiplied.
      std::vector<hd::float16> large(p > 1 ? 4 : 0, hd::float16(30000.0f));
      const bool left = hd::all_reduce(comm, hd::native{}, std::span<hd::float16>(large), hd::product{});
      const std::vector<unsigned char> mine_left(1, left);
      std::vector<unsigned char> all_left(static_cast<std::size_t>(p));
      hd::all_gather(comm, hd::ring{}, std::span<const unsigned char>(mine_left), std::span<unsigned char>(all_left));
      RANK_CHECK((std::accumulate(all_left.begin(), all_left.end(), 0) > 0) == (p > 1));
      for (const hd::float16 x : large) RANK_CHECK(std::isinf(static_cast<float>(x)));
    });
  }
}

TEST_CASE("all_to_all with equal blocks and with any") {
  for (const int p : all_ranks) {
    hd::threads::run(p, [&](auto& comm) {
      const auto size = static_cast<std::size_t>(p);
      const int me = comm.rank();
      for (const std::size_t n : sizes(p)) {
        std::vector<int> in(n * size), out(n * size, -1);
        for (std::size_t i = 0; i < in.size(); ++i) in[i] = me * 100000 + static_cast<int>(i);
        hd::all_to_all(comm, std::span<const int>(in), std::span<int>(out));
        for (std::size_t i = 0; i < out.size(); ++i) {
          const auto source = static_cast<int>(i / (n ? n : 1));
          RANK_CHECK(out[i] == source * 100000 + me * static_cast<int>(n) + static_cast<int>(i % n));
        }
      }
      // Rank a sends (3 a + 5 b) % 7 elements to rank b; the receivers learn the counts first.
      const auto count = [](int a, int b) { return static_cast<std::size_t>((3 * a + 5 * b) % 7); };
      std::vector<std::size_t> to(size), from(size);
      for (int r = 0; r < p; ++r) to[static_cast<std::size_t>(r)] = count(me, r);
      hd::all_to_all(comm, std::span<const std::size_t>(to), std::span<std::size_t>(from));
      for (int r = 0; r < p; ++r) RANK_CHECK(from[static_cast<std::size_t>(r)] == count(r, me));
      std::vector<double> in, out(std::accumulate(from.begin(), from.end(), std::size_t{0}), -1.0);
      for (int r = 0; r < p; ++r) {
        for (std::size_t k = 0; k < count(me, r); ++k) in.push_back(me * 1000.0 + r * 10.0 + static_cast<double>(k));
      }
      hd::all_to_all(comm, std::span<const double>(in), std::span<const std::size_t>(to), std::span<double>(out),
                     std::span<const std::size_t>(from));
      std::size_t at = 0;
      for (int r = 0; r < p; ++r) {
        for (std::size_t k = 0; k < count(r, me); ++k) {
          RANK_CHECK(out[at++] == r * 1000.0 + me * 10.0 + static_cast<double>(k));
        }
      }
    });
  }
  hd::self alone;
  std::vector<int> data(8);
  const std::span<int> all(data);
  const std::vector<std::size_t> four{4}, three{3}, two{2, 2};
  using counts = std::span<const std::size_t>;
  const auto both = [&](std::span<int> in, const auto& a, std::span<int> out, const auto& b) {
    hd::all_to_all(alone, std::span<const int>(in), counts(a), out, counts(b));
  };
  CHECK_THROWS_AS(both(all.first(4), four, all.subspan(3, 4), four), hd::argument_error);
  CHECK_THROWS_AS(both(all.first(4), three, all.subspan(4), four), hd::argument_error);
  CHECK_THROWS_AS(both(all.first(4), two, all.subspan(4), four), hd::argument_error);
  CHECK_THROWS_AS(both(all.first(4), four, all.subspan(4, 3), three), hd::argument_error);
  CHECK_THROWS_AS(both({static_cast<int*>(nullptr), 4}, four, all.subspan(4), four), hd::argument_error);
  both(all.first(4), four, all.subspan(4), four);
  hd::threads::run(3, [](auto& comm) {
    std::vector<int> in(4), out(4);
    RANK_CHECK_THROWS_AS(hd::all_to_all(comm, std::span<const int>(in), std::span<int>(out)), hd::argument_error);
  });
  // A rank that sends another number than expected: an error, not a wrong result.
  CHECK_THROWS_AS(hd::threads::run(2,
                                   [](auto& comm) {
                                     const bool odd = comm.rank() == 1;
                                     const std::vector<std::size_t> to(2, 2), from{2, 2}, other{3, 2};
                                     std::vector<int> in(odd ? 5 : 4), out(4);
                                     hd::all_to_all(comm, std::span<const int>(in), counts(odd ? other : to),
                                                    std::span<int>(out), counts(from));
                                   }),
                  hd::comm_error);
}

TEST_CASE("send, receive and send_receive") {
  for (const int p : {2, 3, 8}) {
    hd::threads::run(p, [&](auto& comm) {
      const int me = comm.rank(), next = (me + 1) % p, before = (me + p - 1) % p;
      for (const std::size_t n : sizes(p)) {
        // Down a line: each waits for the one before it, and other calls may follow between two ranks at any time.
        std::vector<float> line(n, 0.0f);
        if (me > 0) hd::receive(comm, std::span<float>(line), before, 7);
        for (float& x : line) x += 1.0f;
        if (me < p - 1) hd::send(comm, std::span<const float>(line), next, 7);
        RANK_CHECK(line == std::vector<float>(n, static_cast<float>(me + 1)));
        // Around a ring.
        const std::vector<int> mine(n, me);
        std::vector<int> theirs(n, -1);
        hd::send_receive(comm, std::span<const int>(mine), next, std::span<int>(theirs), before);
        RANK_CHECK(theirs == std::vector<int>(n, before));
        // Between, a collective: its number isn't touched by messages that only some ranks exchange.
        if (me == 0) hd::send(comm, std::span<const int>(mine), 1);
        if (me == 1) hd::receive(comm, std::span<int>(theirs), 0);
        hd::barrier(comm);
      }
    });
  }
  const auto refused = [](auto first, auto second) {
    CHECK_THROWS_AS(hd::threads::run({.ranks = 2, .deadline = 20s},
                                     [&](auto& comm) {
                                       std::vector<float> data(5);
                                       const std::span<float> all(data);
                                       if (comm.rank() == 0)
                                         first(comm, all);
                                       else
                                         second(comm, all);
                                     }),
                    hd::comm_error);
  };
  const auto gives = [](auto& comm, auto all) { hd::send(comm, all, 1); };
  refused(gives, [](auto& comm, auto all) { hd::receive(comm, all.first(4), 0); });
  refused(gives, [](auto& comm, auto all) { hd::receive(comm, all, 0, 1); });
  refused(gives, [](auto& comm, auto all) { hd::broadcast(comm, all); });
  refused(gives, [](auto& comm, auto) {
    std::vector<int> integers(5);
    hd::receive(comm, std::span<int>(integers), 0);
  });
  hd::self alone;
  std::vector<float> data(5);
  const std::span<float> all(data);
  CHECK_THROWS_AS(hd::send(alone, all, 1), hd::argument_error);
  CHECK_THROWS_AS(hd::send(alone, std::span<float>(static_cast<float*>(nullptr), 2), 1), hd::argument_error);
  CHECK_THROWS_AS(hd::send_receive(alone, std::span<const float>(all.first(3)), 1, all.subspan(3), 1),
                  hd::argument_error);
  CHECK_THROWS_AS(hd::send_receive(alone, std::span<const float>(all.first(3)), 1, all.subspan(2), 1),
                  hd::argument_error);
}

TEST_CASE("out of place, and buffers that overlap are refused") {
  for (const int p : all_ranks) {
    hd::threads::run(p, [&](auto& comm) {
      const auto me = static_cast<std::size_t>(comm.rank());
      std::vector<std::size_t> counts(static_cast<std::size_t>(p));
      for (std::size_t r = 0; r < counts.size(); ++r) counts[r] = r * 3 % 4;
      const std::size_t n = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
      std::vector<float> in(n), mine(counts[me]);
      std::iota(in.begin(), in.end(), 1.0f);
      const std::vector<float> before = in;
      hd::reduce_scatter(comm, hd::ring{}, std::span<const float>(in), std::span<const std::size_t>(counts),
                         std::span<float>(mine), hd::mean{});
      RANK_CHECK(in == before);
      const std::size_t at = std::accumulate(counts.begin(), counts.begin() + comm.rank(), std::size_t{0});
      for (std::size_t i = 0; i < mine.size(); ++i)
        RANK_CHECK(std::abs(mine[i] - before[at + i]) <= before[at + i] * p * 0x1p-24f);
    });
  }
  hd::self alone;
  std::vector<float> data(6);
  const std::span<float> all(data);
  const std::vector<std::size_t> three{3};
  const auto scatter = [&](std::span<const float> in, std::span<float> out) {
    hd::reduce_scatter(alone, hd::ring{}, in, std::span<const std::size_t>(three), out);
  };
  CHECK_THROWS_AS(scatter(all.first(3), all.subspan(2, 3)), hd::argument_error);
  CHECK_THROWS_AS(scatter(all.first(3), all.subspan(3, 2)), hd::argument_error);
  scatter(all.first(3), all.subspan(3));
  CHECK_THROWS_AS(hd::all_gather(alone, hd::ring{}, std::span<const float>(all.subspan(1, 3)), all.first(3)),
                  hd::argument_error);
  hd::all_gather(alone, hd::ring{}, std::span<const float>(all.first(3)), all.first(3));  // in its place
}

namespace {
struct compensated {  // a float sum with what it has lost
  float sum = 0.0f, lost = 0.0f;
  compensated() = default;
  explicit compensated(float x) : sum(x) {}
  explicit operator float() const { return sum + lost; }
};
struct add_exactly {
  compensated operator()(compensated a, compensated b) const {
    compensated c;
    c.sum = a.sum + b.sum;
    const float of_b = c.sum - a.sum;
    c.lost = (a.sum - (c.sum - of_b)) + (b.sum - of_b) + a.lost + b.lost;
    return c;
  }
};
struct fixed {  // a 16-bit fixed-point number
  std::int16_t bits = 0;
  fixed() = default;
  explicit fixed(double x) : bits(static_cast<std::int16_t>(std::lround(x * 256))) {}
  explicit operator double() const { return bits / 256.0; }
};

// On every rank: `op` over each rank's value, on a topology.
template <class Element, class Topology, class Op>
Element over_ranks(const Topology& t, int ranks, const Op& op, const std::vector<Element>& of) {
  Element result{};
  hd::threads::run(ranks, [&](auto& comm) {
    std::vector<Element> data(1500, of[static_cast<std::size_t>(comm.rank()) % of.size()]);
    RANK_CHECK(!hd::all_reduce(comm, t, std::span<Element>(data), op));
    for (const Element& x : data) RANK_CHECK(std::memcmp(&x, &data[0], sizeof x) == 0);
    if (comm.rank() == 0) result = data[0];
  });
  return result;
}
}  // namespace

TEST_CASE("the accumulator is a policy: narrower, wider, or the user's own") {
  const std::vector<float> cancel{1e8f, 1.0f, -1e8f, 1.0f};
  const auto both = [&](const auto& op, const auto& of) {
    const auto a = over_ranks(hd::direct{}, 4, op, of), b = over_ranks(hd::native{}, 4, op, of);
    CHECK(std::memcmp(&a, &b, sizeof a) == 0);
    return a;
  };
  CHECK(both(hd::sum{}, cancel) == 2.0f);  // in double
  CHECK(both(hd::accumulate_in<float>(hd::sum{}), cancel) == 1.0f);
  CHECK(both(hd::accumulate_in<float>(hd::mean{}), cancel) == 0.25f);
  CHECK(both(hd::accumulate_in<compensated>(add_exactly{}), cancel) == 2.0f);
  CHECK(both(hd::accumulate_in<float>([](float a, float b) { return a > b ? a : b; }), cancel) == 1e8f);
  CHECK(both(hd::accumulate_in<double>(hd::max{}), std::vector<std::int32_t>{3, -7, 9, 2}) == 9);
  CHECK(both(hd::accumulate_in<std::int64_t>(hd::mean{}), std::vector<std::int32_t>{1 << 30, 1 << 30, 1 << 30, 1 << 30}) == 1 << 30);
  CHECK(static_cast<double>(both(hd::accumulate_in<double>(hd::mean{}), std::vector{fixed(100.0), fixed(101.0)})) == 100.5);
  CHECK(static_cast<double>(over_ranks(hd::ring{}, 3, hd::accumulate_in<double>(hd::sum{}), std::vector{fixed(1.25)})) == 3.75);
  for (const float x : {20000.0f, 6e-8f}) {  // float16 travels divided by a power of two, in any accumulator
    const std::vector<hd::float16> of{hd::float16(x)};
    const auto mean_in_double = hd::accumulate_in<double>(hd::mean{});
    CHECK(static_cast<float>(over_ranks(hd::ring{}, 4, mean_in_double, of)) == static_cast<float>(of[0]));
    CHECK(static_cast<float>(over_ranks(hd::halving_doubling{}, 8, mean_in_double, of)) == static_cast<float>(of[0]));
  }
  const std::vector<hd::bfloat16> ones{hd::bfloat16(1.0f)};
  CHECK(static_cast<float>(over_ranks(hd::direct{}, 7, hd::accumulate_in<double>(hd::mean{}), ones)) == 1.0f);
}

TEST_CASE("a chosen accumulator gives the same bits where the loop is a backend's") {
  const auto same = [](auto element, const auto& op) {
    using Element = decltype(element);
    std::vector<Element> x(1000), a(1000), b(1000);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = Element(0.37f * static_cast<float>(i) - 100.0f);
    const hd::operand in[3] = {{x.data(), 0}, {x.data() + 1, 0}, {x.data() + 2, 0}};
    const hd::bulk_leaf<hd::host, Element, std::remove_cvref_t<decltype(op)>> bulk(op, {});
    const hd::leaf l = hd::leaf_of<Element>(op), m = bulk.get();
    l.reduce(l.context, in, 3, a.data(), 998, 0, 1.0 / 3);
    m.reduce(m.context, in, 3, b.data(), 998, 0, 1.0 / 3);
    CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(Element)) == 0);
    CHECK((l.id == m.id && l.average == m.average));
  };
  same(hd::bfloat16{}, hd::accumulate_in<double>(hd::mean{}));
  same(float{}, hd::accumulate_in<float>(hd::sum{}));
  same(float{}, hd::accumulate_in<double>([](double p, double q) { return p > q ? p : q; }));
}

TEST_CASE("operations of users may hold what they like") {
  struct small_one {  // a few numbers: held by value
    double low, high;
    double operator()(double a, double b) const { return std::clamp(a + b, low, high); }
  };
  struct large_one {
    double table[64];
    double operator()(double a, double b) const { return a + b + table[static_cast<std::size_t>(a) % 64]; }
  };
  large_one large{};
  large.table[1] = 0.5;
  const std::function<double(double, double)> any = [](double a, double b) { return a * b; };
  std::atomic<std::size_t> calls{0};
  const auto counts = [&calls](double a, double b) { return ++calls, a + b; };
  for (const int p : {2, 3}) {
    const std::vector<double> of{1.0, 3.0, 7.0};
    const double all = p == 2 ? 4.0 : 11.0;
    CHECK(over_ranks(hd::ring{}, p, small_one{0.0, 10.0}, of) == std::min(all, 10.0));
    CHECK(over_ranks(hd::native{}, p, small_one{0.0, 10.0}, of) == std::min(all, 10.0));
    CHECK(over_ranks(hd::native{}, p, large, of) == all + 0.5);  // ((1 + 3) + 7), in rank order
    CHECK(over_ranks(hd::ring{}, p, any, of) == (p == 2 ? 3.0 : 21.0));
    calls = 0;
    CHECK(over_ranks(hd::ring{}, p, counts, of) == all);
    CHECK(calls == 1500u * static_cast<std::size_t>(p - 1));
  }
}

TEST_CASE("ranks that accumulate in different types are told apart") {
  CHECK_THROWS_AS(hd::threads::run({.ranks = 2, .deadline = 2s},
                                   [](auto& comm) {
                                     std::vector<float> data(10);
                                     if (comm.rank()) hd::all_reduce(comm, hd::ring{}, std::span(data));
                                     else hd::all_reduce(comm, hd::ring{}, std::span(data), hd::accumulate_in<float>(hd::sum{}));
                                   }),
                  hd::comm_error);
}

TEST_CASE("ranks whose own types differ in size are told apart, before a byte of them is read") {
  struct three {
    double x[3];
  };
  const auto first = [](auto a, auto) { return a; };
  const auto differ = [&](const auto& topology, std::size_t n) {
    std::string text = "nothing";
    try {
      hd::threads::run({.ranks = 3, .deadline = 2s}, [&](auto& comm) {
        if (comm.rank() == 1) {
          std::vector<std::array<float, 2>> small(n);
          hd::all_reduce(comm, topology, std::span(small), first);
        } else {
          std::vector<three> large(n);
          hd::all_reduce(comm, topology, std::span(large), first);
        }
      });
    } catch (const hd::comm_error& e) {
      text = e.what();
    }
    return text;
  };
  for (const std::size_t n : {3u, 300u, 30000u}) {  // few for both, for one of them, for none
    CHECK(differ(hd::native{}, n).find("element of 8 bytes") != std::string::npos);
    CHECK(differ(hd::native{}, n).find("element of 24 bytes") != std::string::npos);
    CHECK(differ(hd::ring{}, n).find("calls differ") != std::string::npos);
  }
}

TEST_CASE("every operation takes spans of fixed size, and inputs that needn't be const") {
  hd::threads::run(2, [](hd::threads::communicator& comm) {
    const int me = comm.rank(), other = 1 - me;
    const auto mine = static_cast<float>(me + 1);
    std::array<float, 4> in{mine, mine, mine, mine}, out{};
    const auto is = [&](const std::array<float, 4>& x, std::array<float, 4> expected) { RANK_CHECK(x == expected); };

    hd::all_reduce(comm, hd::ring{}, std::span(in), std::span(out));
    is(out, {3, 3, 3, 3});
    hd::all_reduce(comm, hd::native{}, std::span(out));
    is(out, {6, 6, 6, 6});
    hd::all_gather(comm, hd::ring{}, std::span(in).first<2>(), std::span(out));
    is(out, {1, 1, 2, 2});
    out = {mine, mine, mine, mine};
    hd::all_gather(comm, hd::ring{}, std::span(out), std::array<std::size_t, 2>{1, 3});
    is(out, {1, 2, 2, 2});
    std::array<float, 2> part{};
    hd::reduce_scatter(comm, hd::ring{}, std::span(in), std::array<std::size_t, 2>{2, 2}, std::span(part));
    RANK_CHECK((part == std::array<float, 2>{3, 3}));
    out = in;
    const std::span<float> own = hd::reduce_scatter(comm, hd::ring{}, std::span(out), std::array<std::size_t, 2>{1, 3});
    RANK_CHECK(own.size() == (me == 0 ? 1u : 3u) && own[0] == 3.0f);
    out = in;
    hd::reduce(comm, std::span(out), 1);
    if (me == 1) is(out, {3, 3, 3, 3});
    out = in;
    hd::broadcast(comm, std::span(out), 1);
    is(out, {2, 2, 2, 2});
    hd::all_to_all(comm, std::span(in), std::span(out));
    is(out, {1, 1, 2, 2});
    out = {};
    const std::array<std::size_t, 2> to0{1, 1};
    if (me == 0) hd::all_to_all(comm, std::span(in), std::array<std::size_t, 2>{1, 3}, std::span(out).first<2>(), to0);
    else hd::all_to_all(comm, std::span(in).first<2>(), to0, std::span(out), std::array<std::size_t, 2>{3, 1});
    is(out, me == 0 ? std::array<float, 4>{1, 2, 0, 0} : std::array<float, 4>{1, 1, 1, 2});
    hd::send_receive(comm, std::span(in), other, std::span(out), other);
    is(out, {3 - mine, 3 - mine, 3 - mine, 3 - mine});
    if (me == 0) hd::send(comm, std::span(in), 1);
    else hd::receive(comm, std::span(out), 0);
    if (me == 1) is(out, {1, 1, 1, 1});
  });
}

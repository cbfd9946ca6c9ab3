// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/automatic.hpp>
#include <heddle/collective/gather.hpp>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/leaders.hpp>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/collective/pipelined.hpp>
#include <heddle/collective/recursive_doubling.hpp>
#include <heddle/comm/calibrate.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/comm/threads.hpp>

#include "support.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <type_traits>
#include <vector>

namespace {

template <class T> T value(int rank, std::size_t i, std::size_t seed) {
  std::uint64_t z = (static_cast<std::uint64_t>(rank + 1) << 40) + (seed << 20) + i;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  const double x = static_cast<double>(z >> 33) * 0x1p-30 - 1.0;  // [-1, 1)
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(x * 100000.0);
  else
    return static_cast<T>(static_cast<float>(x));
}

template <class T> double as_double(T x) {
  if constexpr (sizeof(T) == 2)
    return static_cast<float>(x);
  else
    return static_cast<double>(x);
}

template <class T> double unit() {  // half of the distance between neighbours, relative
  return std::is_integral_v<T> ? 0.0 : sizeof(T) == 2 ? 0x1p-11 : sizeof(T) == 4 ? 0x1p-24 : 0x1p-53;
}

struct chosen_late {  // one type for all topologies, which compiles once
  std::function<hd::schedule(int, int, std::size_t)> make;
  hd::schedule all_reduce(int rank, int size, std::size_t count) const { return make(rank, size, count); }
};
template <class Topology> chosen_late late(const Topology& t) {
  return {[t](int rank, int size, std::size_t count) { return t.all_reduce(rank, size, count); }};
}

template <class T> std::vector<T> input(int rank, std::size_t n) {
  std::vector<T> v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = value<T>(rank, i, n);
  return v;
}

// Against double precision, against rank 0's bits, and against what the same topology gives on threads.
template <class T, class Op>
void check(hd::mpi::communicator& comm, const char* name, const chosen_late& t, std::size_t n, const Op& op) {
  const int p = comm.size(), me = comm.rank();
  INFO(name << ", " << hd::name_of(hd::dtype_of<T>) << ", n " << n << ", P " << p
            << (std::is_same_v<Op, hd::mean>  ? ", mean"
                : std::is_same_v<Op, hd::sum> ? ", sum"
                                              : ", max"));
  std::vector<T> mine = input<T>(me, n), outside(n);
  CHECK_FALSE(hd::all_reduce(comm, t, std::span<const T>(mine), std::span<T>(outside), op));
  CHECK((n == 0 || std::memcmp(mine.data(), input<T>(me, n).data(), n * sizeof(T)) == 0));
  CHECK_FALSE(hd::all_reduce(comm, t, std::span<T>(mine), op));
  CHECK((n == 0 || std::memcmp(mine.data(), outside.data(), n * sizeof(T)) == 0));

  bool inside = true;
  for (std::size_t i = 0; i < n; ++i) {
    long double sum = 0, magnitude = 0, most = -1e9L;
    for (int r = 0; r < p; ++r) {
      const double x = as_double(value<T>(r, i, n));
      sum += x;
      magnitude += std::abs(x);
      most = std::max<long double>(most, x);
    }
    long double expected = sum, bound = 1.02L * (p + 1) * static_cast<long double>(unit<T>()) * magnitude;
    if (sizeof(T) == 2) bound += p * 0x1p-24L;
    if (std::is_same_v<Op, hd::mean>) {
      expected = std::is_integral_v<T> ? std::trunc(sum / p) : sum / p;
      bound /= p;
    }
    if (std::is_same_v<Op, hd::max>) expected = most, bound = 0;
    inside &= std::abs(static_cast<long double>(as_double(mine[i])) - expected) <= bound;
  }
  CHECK(inside);

  std::vector<T> first = mine;
  hd::broadcast(comm, std::span<T>(first));
  CHECK((n == 0 || std::memcmp(first.data(), mine.data(), n * sizeof(T)) == 0));

  std::vector<T> on_threads;
  hd::threads::run(p, [&](auto& thread) {
    std::vector<T> data = input<T>(thread.rank(), n);
    hd::all_reduce(thread, t, std::span<T>(data), op);
    if (thread.rank() == 0) on_threads = data;
  });
  CHECK((n == 0 || std::memcmp(on_threads.data(), mine.data(), n * sizeof(T)) == 0));
}

template <class T> void check_type(hd::mpi::communicator& comm, const char* name, const chosen_late& t) {
  const auto p = static_cast<std::size_t>(comm.size());
  for (const std::size_t n : {std::size_t{0}, std::size_t{1}, p - 1, p, p + 1, std::size_t{17}, std::size_t{1023},
                              std::size_t{1024}, std::size_t{1025}, std::size_t{10007}}) {
    check<T>(comm, name, t, n, hd::sum{});
    check<T>(comm, name, t, n, hd::mean{});
    if (n == 1025) check<T>(comm, name, t, n, hd::max{});
  }
}

template <class Topology>
void check_topology(const char* name, const Topology& t, std::size_t piece = std::size_t{1} << 30) {
  hd::mpi::options o = settings();
  o.piece = piece;
  on_ranks(world_size(), o, [&](auto& comm) {
    check_type<float>(comm, name, late(t));
    check_type<double>(comm, name, late(t));
    check_type<int>(comm, name, late(t));
    check_type<hd::float16>(comm, name, late(t));
  });
}

}  // namespace

TEST_CASE("all_reduce over mpi: ring") { check_topology("ring", hd::ring{}); }
TEST_CASE("all_reduce over mpi: halving_doubling") { check_topology("halving_doubling", hd::halving_doubling{}); }
TEST_CASE("all_reduce over mpi: torus_2d") { check_topology("torus_2d", hd::torus_2d{}); }
TEST_CASE("all_reduce over mpi: hierarchical") { check_topology("hierarchical", hd::hierarchical<>{.group = 2}); }
TEST_CASE("all_reduce over mpi: direct") { check_topology("direct", hd::direct{}); }
TEST_CASE("all_reduce over mpi: in pieces") { check_topology("ring in pieces", hd::ring{}, 1000); }

TEST_CASE("all_reduce over mpi: messages that are reduced in parts") {
  hd::mpi::options o = settings();
  o.piece = 36000;
  on_ranks(world_size(), o, [](auto& comm) {
    for (const auto& [name, t] : {std::pair{"ring", late(hd::ring{})}, std::pair{"direct", late(hd::direct{})},
                                  std::pair{"halving_doubling", late(hd::halving_doubling{})},
                                  std::pair{"pipelined", late(hd::pipelined<hd::ring>{{}, 3, 1})}}) {
      // 27000 per message of three pipelined parts, two of which come from one rank in a round: three pieces and more.
      const auto p = static_cast<std::size_t>(comm.size());
      for (const std::size_t n : {9000 * p, 81000 * p, std::size_t{100003}}) {
        check<float>(comm, name, t, n, hd::sum{});
        check<double>(comm, name, t, n, hd::mean{});
        check<hd::float16>(comm, name, t, n, hd::mean{});
      }
    }
  });
  // As long as they are without that setting.
  on_ranks([](auto& comm) {
    check<float>(comm, "ring", late(hd::ring{}), 500000 * static_cast<std::size_t>(comm.size()) + 1, hd::mean{});
    check<float>(comm, "halving_doubling", late(hd::halving_doubling{}), 1000000, hd::sum{});
  });
}

namespace {
struct sum_until {  // throws when it has been called so often
  long* left;
  float operator()(float a, float b) const {
    if (--*left == 0) throw std::runtime_error("no more sums");
    return a + b;
  }
};
}  // namespace

TEST_CASE("a plan serves again after an operation has thrown between parts") {
  const int p = world_size();
  if (p == 1) return;
  const std::size_t n = 27000 * static_cast<std::size_t>(p);
  hd::all_reduce_plan<hd::ring> plan(hd::ring{}, world_rank(), p, n);
  long left = world_rank() == p - 1 ? 10000 : -1;  // in the second of three parts
  const sum_until op{&left};
  const hd::leaf l = hd::leaf_of<float>(op);
  std::vector<float> data(n, 1.0f);
  hd::mpi::options o = settings();
  o.piece = 36000;
  const ended e = outcome(p, o, [&](auto& comm) { plan(comm, data.data(), l); });
  CHECK(has(e.text, "no more sums"));
  CHECK(e.other == (world_rank() == p - 1));
  on_ranks([&](auto& comm) {  // there messages are reduced whole
    for (std::size_t i = 0; i < n; ++i) data[i] = static_cast<float>(i % 997 + static_cast<std::size_t>(comm.rank()));
    plan(comm, data.data(), l);
  });
  bool right = true;
  for (std::size_t i = 0; i < n; ++i)
    right &= data[i] ==
             static_cast<float>((i % 997) * static_cast<std::size_t>(p) + static_cast<std::size_t>(p * (p - 1) / 2));
  CHECK(right);
}

namespace {
struct received {
  int round, peer;
  std::size_t bytes;
  bool operator==(const received&) const = default;
};

// Writes down what a call says that it will receive, and what it receives.
template <class Comm> class awaiting : public hd::detail::wrapper<Comm> {
 public:
  awaiting(Comm inner, std::size_t above) : hd::detail::wrapper<Comm>(std::move(inner)), above_(above) {}
  awaiting duplicate() { return {this->inner_.duplicate(), above_}; }
  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    if constexpr (hd::takes_parts<std::remove_cvref_t<Apply>>) {
      if (std::exchange(first_, false)) {
        apply.expects(above_, [&](std::uint8_t r, const hd::incoming& m) { said.push_back({r, m.peer, m.bytes}); });
      }
    }
    for (const hd::incoming& m : in) {
      if (m.bytes > above_) came.push_back({h.round, m.peer, m.bytes});
    }
    this->inner_.exchange(h, out, in, std::forward<Apply>(apply));
  }
  std::vector<received> said, came;

 private:
  std::size_t above_;
  bool first_ = true;
};
}  // namespace

TEST_CASE("a schedule says at its beginning what it receives") {
  on_ranks([](auto& comm) {
    std::vector<float> data(10007);
    for (const auto& t : {late(hd::ring{}), late(hd::halving_doubling{}), late(hd::direct{})}) {
      for (const std::size_t above : {std::size_t{0}, std::size_t{4000}, std::size_t{1} << 20}) {
        awaiting<hd::mpi::communicator> all(comm, above);
        hd::all_reduce(all, t, std::span(data));
        CHECK(all.said == all.came);
        CHECK(all.said.empty() == (comm.size() == 1 || above > 4000));
      }
    }
  });
}

namespace {
struct eleven {  // no message of whole elements is as long as a part
  unsigned char bytes[11];
};
struct add_eleven {
  eleven operator()(eleven a, const eleven& b) const {
    for (int i = 0; i < 11; ++i) a.bytes[i] = static_cast<unsigned char>(a.bytes[i] + b.bytes[i]);
    return a;
  }
};
}  // namespace

TEST_CASE("elements that no part holds a whole number of are reduced whole") {
  hd::mpi::options o = settings();
  o.piece = 36000;
  on_ranks(world_size(), o, [](auto& comm) {
    std::vector<eleven> mine(30000);
    const auto byte = [](std::size_t i, int k, int rank) { return static_cast<unsigned char>(i * 7 + k * 3 + rank); };
    for (std::size_t i = 0; i < mine.size(); ++i) {
      for (int k = 0; k < 11; ++k) mine[i].bytes[k] = byte(i, k, comm.rank());
    }
    hd::all_reduce(comm, hd::ring{}, std::span(mine), add_eleven{});
    bool right = true;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      for (int k = 0; k < 11; ++k) {
        unsigned sum = 0;
        for (int r = 0; r < comm.size(); ++r) sum += byte(i, k, r);
        right &= mine[i].bytes[k] == static_cast<unsigned char>(sum);
      }
    }
    CHECK(right);
  });
}

TEST_CASE("all_reduce over mpi: trees, leaders and pipelines") {
  on_ranks([](auto& comm) {
    const auto few = [&](const char* name, const auto& t) {
      for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{17}, std::size_t{1025}}) {
        check<float>(comm, name, late(t), n, hd::sum{});
        check<float>(comm, name, late(t), n, hd::mean{});
      }
    };
    few("recursive_doubling", hd::recursive_doubling{});
    few("tree", hd::tree{});
    few("double_tree", hd::double_tree{});
    few("leaders", hd::leaders<hd::recursive_doubling>{.group = 2});
    few("pipelined tree", hd::pipelined<hd::tree>{.chunks = 3});
    few("pipelined hierarchical", hd::pipelined<hd::hierarchical<>>{{.group = 2}, 3, 2});
  });
}

TEST_CASE("all_reduce over mpi: automatic, by the links that are there, and any factors") {
  on_ranks([](auto& comm) {
    const int p = comm.size();
    for (const int node : {0, 2}) {
      const hd::links costs = hd::calibrate(comm, node);
      hd::links first = costs;
      hd::broadcast(comm, std::span(&first, 1));
      CHECK(first == costs);
      const hd::automatic chosen{costs};
      for (const std::size_t n : {std::size_t{0}, std::size_t{17}, std::size_t{10007}}) {
        check<float>(comm, "automatic", late(chosen), n, hd::mean{});
        std::vector<double> data = input<double>(comm.rank(), n);
        hd::all_reduce(comm, chosen, std::span(data));  // by its own type, whose header tells other choices apart
        double worst = 0;
        for (std::size_t i = 0; i < n; ++i) {
          double sum = 0;
          for (int r = 0; r < p; ++r) sum += value<double>(r, i, n);
          worst = std::max(worst, std::abs(data[i] - sum));
        }
        CHECK(worst <= 1e-14);
      }
    }
    const int m = hd::detail::middle_divisor(p);
    for (const hd::exchange within : {hd::exchange::ring, hd::exchange::direct}) {
      const hd::mixed_radix t{.radices = {p / m, m}, .within = within};
      for (const std::size_t n : {std::size_t{1}, std::size_t{17}, std::size_t{1025}})
        check<float>(comm, "mixed_radix", late(t), n, hd::sum{});
    }
  });
}

TEST_CASE("an accumulator of the caller's choice over mpi, by a schedule and by MPI's own all-reduce") {
  on_ranks([](auto& comm) {
    const int p = comm.size();
    const auto op = hd::accumulate_in<double>(hd::mean{});
    std::vector<hd::bfloat16> a(100, hd::bfloat16(1.0f)), b = a;
    hd::all_reduce(comm, hd::direct{}, std::span<hd::bfloat16>(a), op);
    hd::all_reduce(comm, hd::native{}, std::span<hd::bfloat16>(b), op);
    for (std::size_t i = 0; i < a.size(); ++i) {
      CHECK(static_cast<float>(a[i]) == 1.0f);
      CHECK(std::abs(static_cast<float>(b[i]) - 1.0f) <= static_cast<float>(p) * 0x1p-8f);
    }
  });
}

TEST_CASE("the other collectives over mpi") {
  on_ranks([](auto& comm) {
    const int p = comm.size(), me = comm.rank();
    for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{30011}}) {
      INFO("n " << n);
      std::vector<std::size_t> counts;
      std::vector<int> expected;
      for (int r = 0; r < p; ++r) {
        counts.push_back(r % 2 ? n : n / 2 + 3);
        for (std::size_t i = 0; i < counts.back(); ++i) expected.push_back(value<int>(r, i, n));
      }
      const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
      std::size_t before = 0;
      for (int r = 0; r < me; ++r) before += counts[static_cast<std::size_t>(r)];
      std::vector<int> all(total, -1);
      for (std::size_t i = 0; i < counts[static_cast<std::size_t>(me)]; ++i) all[before + i] = value<int>(me, i, n);
      hd::all_gather(comm, hd::ring{}, std::span<int>(all), std::span<const std::size_t>(counts));
      CHECK(all == expected);

      std::vector<double> data = input<double>(me, total);
      const std::span<double> block =
          hd::reduce_scatter(comm, hd::direct{}, std::span<double>(data), std::span<const std::size_t>(counts));
      REQUIRE(block.size() == counts[static_cast<std::size_t>(me)]);
      double worst = 0;
      for (std::size_t i = 0; i < block.size(); ++i) {
        double sum = 0;
        for (int r = 0; r < p; ++r) sum += value<double>(r, before + i, total);
        worst = std::max(worst, std::abs(sum - block[i]));
      }
      CHECK(worst <= 1e-14);

      for (int root = 0; root < p; ++root) {
        std::vector<float> words = input<float>(me, n);
        hd::broadcast(comm, std::span<float>(words), root);
        CHECK(words == input<float>(root, n));
      }
      hd::barrier(comm);
    }
  });
}

TEST_CASE("what travels over mpi is counted") {
  const auto p = static_cast<std::uint64_t>(world_size());
  on_ranks([&](auto& comm) {
    hd::counting counted(comm);
    std::vector<float> data(1000 * p, 1.0f);
    hd::all_reduce(counted, hd::ring{}, std::span<float>(data), hd::mean{});
    CHECK(counted.sent().bytes == 2 * (p - 1) * 1000 * sizeof(float));
  });
}

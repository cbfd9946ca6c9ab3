// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/gather.hpp>
#include <heddle/collective/halves.hpp>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/leaders.hpp>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/collective/pipelined.hpp>
#include <heddle/collective/recursive_doubling.hpp>
#include <heddle/collective/tree.hpp>
#include <heddle/comm/detail/wrapper.hpp>
#include <heddle/comm/self.hpp>
#include <heddle/comm/threads.hpp>

#include "../comm/conformance.hpp"
#include "../support/catch.hpp"
#include "topologies.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace hd = heddle;
using heddle_test::binomial_tree;
using heddle_test::findings;
using heddle_test::half_wanted;
using heddle_test::hypercube;

namespace {

// ---- Values: exact in T, the same function of (seed, rank, element) everywhere.

std::uint32_t mix(std::uint32_t seed, int rank, std::size_t i) {
  std::uint64_t z = (static_cast<std::uint64_t>(seed) << 48) + (static_cast<std::uint64_t>(rank) << 40) + i + 1;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<std::uint32_t>(z >> 33);
}

template <class T> T value(std::uint32_t seed, int rank, std::size_t i) {
  const double x = mix(seed, rank, i) * 0x1p-30 - 1.0;  // [-1, 1)
  if constexpr (std::is_same_v<T, std::uint8_t>)
    return static_cast<T>(x * 10.0 + 10.0);  // twelve of them don't wrap around
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(x * 100000.0);
  else if constexpr (sizeof(T) == 2)
    return T(static_cast<float>(x));
  else
    return static_cast<T>(x);
}

template <class T> double as_double(T x) {
  if constexpr (sizeof(T) == 2)
    return static_cast<float>(x);
  else
    return static_cast<double>(x);
}

// Half of the distance between neighbours, relative.
template <class T> inline constexpr double unit = 0;
template <> inline constexpr double unit<float> = 0x1p-24;
template <> inline constexpr double unit<double> = 0x1p-53;
template <> inline constexpr double unit<hd::float16> = 0x1p-11;
template <> inline constexpr double unit<hd::bfloat16> = 0x1p-8;

template <class T> bool same_bits(const T* a, const T* b, std::size_t n) {
  return n == 0 || std::memcmp(a, b, n * sizeof(T)) == 0;
}

// ---- Operations of users

struct larger_magnitude {
  template <class T> T operator()(T a, T b) const {
    const double x = std::abs(as_double(a)), y = std::abs(as_double(b));
    return x > y || (x == y && as_double(a) > as_double(b)) ? a : b;
  }
};

struct moments {
  double sum;
  std::int64_t count;
};
struct merge {
  moments operator()(moments a, moments b) const { return {a.sum + b.sum, a.count + b.count}; }
};

// What the reduction must give, and how far a result of `roundings` roundings may be from it.
struct exact {
  long double value, bound;
};

template <class T, class Op> exact oracle(const Op&, std::uint32_t seed, int ranks, std::size_t i, int roundings) {
  long double sum = 0, magnitude = 0, product = 1;
  std::uint64_t wrapped = 1;
  T kept = value<T>(seed, 0, i);
  for (int r = 0; r < ranks; ++r) {
    const T x = value<T>(seed, r, i);
    sum += as_double(x);
    magnitude += std::abs(as_double(x));
    product *= as_double(x);
    if constexpr (std::is_integral_v<T>) wrapped *= static_cast<std::uint64_t>(x);
    if constexpr (std::is_same_v<Op, hd::min>) kept = as_double(x) < as_double(kept) ? x : kept;
    if constexpr (std::is_same_v<Op, hd::max>) kept = as_double(x) > as_double(kept) ? x : kept;
    if constexpr (std::is_same_v<Op, larger_magnitude>) kept = larger_magnitude{}(kept, x);
  }
  if constexpr (std::is_same_v<Op, hd::product> && std::is_integral_v<T>) {
    return {as_double(static_cast<T>(wrapped)), 0};
  } else if constexpr (!std::is_same_v<Op, hd::sum> && !std::is_same_v<Op, hd::mean> &&
                       !std::is_same_v<Op, hd::product>) {
    return {as_double(kept), 0};
  } else {
    if (std::is_same_v<T, double>) roundings = ranks + 1;  // no wider accumulator than the type itself
    if (std::is_same_v<Op, hd::product>) {  // roundings add up over all that were multiplied, not along one path
      if (roundings > 1) roundings = ranks;
      sum = product, magnitude = std::abs(product);
    }
    long double bound = 1.02L * roundings * static_cast<long double>(unit<T>) * magnitude;
    if (std::is_same_v<T, hd::float16>) bound += ranks * 0x1p-24L;  // where terms cancel to a subnormal
    if constexpr (std::is_same_v<Op, hd::mean>) {
      const long double mean = sum / ranks;
      return {std::is_integral_v<T> ? std::trunc(mean) : mean, bound / ranks};
    }
    return {sum, bound};
  }
}

// One all-reduce against the oracle: in place, out of place, the same bits on every rank and in both runs.
template <class T, class Op, class Comm, class Topology>
void check(findings& found, Comm& comm, const Topology& t, std::size_t n, int roundings, const Op& op,
           std::vector<std::vector<std::byte>>& shared, const std::string& what) {
  const int rank = comm.rank(), ranks = comm.size();
  const std::uint32_t seed = static_cast<std::uint32_t>(n) * 31 + 7;
  std::vector<T> in(n), inside(n), outside(n);
  for (std::size_t i = 0; i < n; ++i) in[i] = inside[i] = value<T>(seed, rank, i);
  const std::vector<T> before = in;
  const bool a = hd::all_reduce(comm, t, std::span<T>(inside), op);
  const bool b = hd::all_reduce(comm, t, std::span<const T>(in), std::span<T>(outside), op);
  found.expect(!a && !b, rank, "left the range", what);
  found.expect(same_bits(in.data(), before.data(), n), rank, "input changed", what);
  found.expect(same_bits(inside.data(), outside.data(), n), rank, "two runs differ", what);
  auto& mine = shared[static_cast<std::size_t>(rank)];
  mine.resize(n * sizeof(T));
  if (n) std::memcpy(mine.data(), inside.data(), n * sizeof(T));
  hd::barrier(comm);
  found.expect(mine == shared[0], rank, "ranks differ", what);
  const hd::interval part = hd::balanced_block(n, static_cast<std::size_t>(ranks), static_cast<std::size_t>(rank));
  bool inside_bound = true;
  for (std::size_t i = part.begin; i < part.end(); ++i) {
    const exact e = oracle<T>(op, seed, ranks, i, roundings);
    const long double off = std::abs(static_cast<long double>(as_double(inside[i])) - e.value);
    inside_bound &= off <= e.bound;
  }
  found.expect(inside_bound, rank, "error above what is allowed", what);
  hd::barrier(comm);
}

enum class reach { few, many, all };  // sizes: those to 17, those to 10007, and these with every operation

template <class T, class Comm, class Topology>
void check_type(findings& found, Comm& comm, const Topology& t, int roundings, reach far,
                std::vector<std::vector<std::byte>>& shared, const std::string& name) {
  const auto p = static_cast<std::size_t>(comm.size());
  std::vector<std::size_t> sizes{0, 1, p - 1, p, p + 1, 17};
  if (far != reach::few) sizes.insert(sizes.end(), {1023, 1024, 1025, 10007});
  for (const std::size_t n : sizes) {
    const std::string what =
        name + ", " + hd::name_of(hd::dtype_of<T>) + ", n " + std::to_string(n) + ", P " + std::to_string(p);
    check<T>(found, comm, t, n, roundings, hd::sum{}, shared, what + ", sum");
    check<T>(found, comm, t, n, roundings, hd::mean{}, shared, what + ", mean");
    if (far != reach::all && n != p + 1 && n != 1025) continue;
    check<T>(found, comm, t, n, roundings, hd::product{}, shared, what + ", product");
    check<T>(found, comm, t, n, 0, hd::min{}, shared, what + ", min");
    check<T>(found, comm, t, n, 0, hd::max{}, shared, what + ", max");
    check<T>(found, comm, t, n, 0, larger_magnitude{}, shared, what + ", user's");
  }
}

// example-begin chosen_late
struct chosen_late {  // a topology that is known at run time only
  std::function<hd::schedule(int rank, int size, std::size_t count)> make;
  hd::schedule all_reduce(int rank, int size, std::size_t count) const { return make(rank, size, count); }
};
// example-end

// One type for all topologies, which makes this file compile in a third of the time.
template <class Topology> chosen_late late(const Topology& t) {
  return {[t](int rank, int size, std::size_t count) { return t.all_reduce(rank, size, count); }};
}
hd::native late(hd::native t) { return t; }

enum class types { every, in_turn };  // in turn: other ones with the next number of ranks

template <class Topology> void check_late(const char* name, const Topology& t, int ranks, int roundings, types which) {
  findings found;
  std::vector<std::vector<std::byte>> shared(static_cast<std::size_t>(ranks));
  hd::threads::run(ranks, [&](auto& comm) {
    const auto check = [&]<class T>(int k, reach far, T) {
      if (which == types::every || ranks % 3 == k) check_type<T>(found, comm, t, roundings, far, shared, name);
    };
    check(0, reach::many, float{});
    check(1, reach::few, hd::bfloat16{});
    check(2, reach::many, hd::float16{});
    check(1, reach::few, double{});
    check(2, reach::few, std::int32_t{});
    check(1, reach::many, std::int64_t{});
    check(0, reach::few, std::uint8_t{});

    // A user's element type, with a functor and with a lambda that captures.
    const std::size_t n = 1025;
    std::vector<moments> a(n), b;
    for (std::size_t i = 0; i < n; ++i) a[i] = {static_cast<double>(i) * (comm.rank() + 1), comm.rank() + 1};
    b = a;
    hd::all_reduce(comm, t, std::span<moments>(a), merge{});
    int offset = 0;
    hd::all_reduce(comm, t, std::span<moments>(b), [&offset](moments x, moments y) {
      return moments{x.sum + y.sum + offset, x.count + y.count};
    });
    bool right = true;
    const std::int64_t total = ranks * (ranks + 1) / 2;
    for (std::size_t i = 0; i < n; ++i) {
      right &= a[i].count == total && a[i].sum == static_cast<double>(i) * static_cast<double>(total);
      right &= b[i].count == a[i].count && b[i].sum == a[i].sum;
    }
    found.expect(right, comm.rank(), "a user's type", name);
  });
  CHECK(found.text() == "");
}

template <class Topology>
void check_topology(const char* name, const Topology& t, int ranks, int roundings, types which = types::every) {
  check_late(name, late(t), ranks, roundings, which);
}

// On 1 to 12 ranks; roundings(p) of them are allowed on p.
template <class Topology, class Function> void check_to_12(const char* name, const Topology& t, Function roundings) {
  for (int p = 1; p <= 12; ++p)
    check_topology(name, t, p, roundings(p), p == 6 || p > 8 ? types::in_turn : types::every);
}

int factors(int n) {
  int k = 0;
  for (int d = 2; n > 1; ++d) {
    for (; n % d == 0; n /= d) ++k;
  }
  return k;
}

int log2_up(int n) {
  int k = 0;
  while ((1 << k) < n) ++k;
  return k;
}

int middle(int n) {  // the largest divisor up to the square root
  int best = 1;
  for (int d = 1; d * d <= n; ++d) best = n % d == 0 ? d : best;
  return best;
}

const std::vector<int> all_sizes{1, 2, 3, 4, 5, 7, 8};

// ---- A communicator that writes down what passes through it, to compare with the schedule

// example-begin recording
struct message {
  bool sent;
  int peer;
  const void* data;
  std::size_t bytes;
};

template <hd::communicator Comm> class recording {  // writes down every message, and forwards it
 public:
  recording(Comm inner, std::vector<message>* log) : inner_(std::move(inner)), log_(log) {}
  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  std::uint16_t next_sequence() { return inner_.next_sequence(); }
  recording duplicate() { return {inner_.duplicate(), nullptr}; }  // for another thread: writes nothing down
  void fail(const std::string& text) { inner_.fail(text); }
  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    if (log_) {
      for (const hd::outgoing& m : out) log_->push_back({true, m.peer, m.data, m.bytes});
      for (const hd::incoming& m : in) log_->push_back({false, m.peer, m.into, m.bytes});
    }
    inner_.exchange(h, out, in, std::forward<Apply>(apply));
  }

 private:
  Comm inner_;
  std::vector<message>* log_;
};
static_assert(hd::communicator<recording<hd::threads::communicator>>);
// example-end

// Compares what is said to stay until the next exchange applies with what it was.
struct stayed {
  std::vector<std::pair<const void*, std::vector<std::byte>>> last;
  std::size_t messages = 0;
  bool untouched = true;
};
template <class Comm> struct watching : hd::detail::wrapper<Comm> {
  watching(Comm inner, stayed* s) : hd::detail::wrapper<Comm>(std::move(inner)), seen(s) {}
  watching duplicate() { return {this->inner_.duplicate(), seen}; }
  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    const auto before = std::exchange(seen->last, {});
    for (const hd::outgoing& m : out) {
      if (!m.stays) continue;
      const auto* const from = static_cast<const std::byte*>(m.data);
      seen->last.emplace_back(from, std::vector<std::byte>(from, from + m.bytes));
      ++seen->messages;
    }
    this->inner_.exchange(h, out, in, [&](std::span<const hd::arrival> got) {
      for (const auto& [data, bytes] : before) seen->untouched &= std::memcmp(data, bytes.data(), bytes.size()) == 0;
      apply(got);
    });
  }
  stayed* seen;
};

template <class Topology> void check_execution(const Topology& t, int ranks, std::size_t n) {
  findings found;
  hd::threads::run(ranks, [&](auto& comm) {
    std::vector<message> log;
    std::vector<hd::operation> trace;
    stayed seen;
    recording recorded(watching<std::remove_cvref_t<decltype(comm)>>(comm, &seen), &log);
    std::vector<float> data(n, 1.0f);
    hd::all_reduce_plan<Topology> plan(t, comm.rank(), comm.size(), n);
    plan.engine().trace = &trace;
    plan(recorded, data.data(), hd::leaf_of<float>(hd::sum{}));
    const hd::schedule s = t.all_reduce(comm.rank(), comm.size(), n);
    bool right = log.size() == s.operations().size() && trace.size() == log.size();
    std::size_t k = 0;
    for (std::size_t r = 0; right && r < s.rounds(); ++r) {
      for (const bool sends : {true, false}) {  // a round is posted together: sends first, then receives
        for (const hd::operation& o : s.round(r)) {
          if ((o.act == hd::action::send) != sends) continue;
          const message& m = log[k++];
          const void* place = o.act == hd::action::reduce ? nullptr : data.data() + o.range.begin;
          right &=
              m.sent == sends && m.peer == static_cast<int>(o.peer) && m.bytes == o.range.count * 4 && m.data == place;
        }
      }
    }
    for (std::size_t i = 0; right && i < trace.size(); ++i) {
      const hd::operation &a = trace[i], &b = s.operations()[i];
      right &= a.peer == b.peer && a.act == b.act && a.range == b.range;
    }
    found.expect(right, comm.rank(), "executed something else than the schedule");
    found.expect(data == std::vector<float>(n, static_cast<float>(ranks)), comm.rank(), "wrong sum");
    found.expect(seen.untouched && seen.last.empty(), comm.rank(), "what should stay was written, or isn't waited for");
    if (std::is_same_v<Topology, hd::ring> && n == 1000)
      found.expect(seen.messages == 2 * static_cast<std::size_t>(ranks) - 4, comm.rank(),
                   "a ring's messages don't stay");
    if constexpr (hd::has_owners<Topology>) {
      hd::halved_plan<Topology> halves(t, comm.rank(), comm.size(), n);
      halves.reduce_scatter(recorded, data.data(), hd::leaf_of<float>(hd::sum{}));
      found.expect(seen.untouched && seen.last.empty(), comm.rank(), "something stays after the first half");
      halves.all_gather(recorded, data.data());
      found.expect(seen.untouched && seen.last.empty(), comm.rank(), "something stays after the second half");
    }
  });
  CHECK(found.text() == "");
}

// Runs f(comm, topology, name, findings) for every topology that the special values below are tried on.
template <class Function> void on_every_topology(int ranks, Function f) {
  const auto one = [&](const char* name, const auto& t) {
    findings found;
    hd::threads::run(ranks, [&](auto& comm) { f(comm, late(t), std::string(name), found); });
    INFO(name << " on " << ranks << " ranks");
    CHECK(found.text() == "");
  };
  one("ring", hd::ring{});
  one("direct", hd::direct{});
  one("native", hd::native{});
  one("halving_doubling", hd::halving_doubling{});
  one("torus_2d", hd::torus_2d{});
  one("hierarchical of 3", hd::hierarchical<>{.group = 3});
  one("leaders of 3", hd::leaders<>{.group = 3});
  one("recursive_doubling", hd::recursive_doubling{});
  one("double_tree", hd::double_tree{});
  one("pipelined torus", hd::pipelined{hd::torus_2d{}, 3, 2});
  one("tree", binomial_tree{});
  if ((ranks & (ranks - 1)) == 0) one("hypercube", hypercube{});
}

}  // namespace

TEST_CASE("all_reduce: ring against double precision") {
  check_to_12("ring", hd::ring{}, [](int p) { return p - 1; });
}
TEST_CASE("all_reduce: direct against double precision") {
  check_to_12("direct", hd::direct{}, [](int) { return 1; });
}
TEST_CASE("all_reduce: native against double precision") {
  check_to_12("native", hd::native{}, [](int) { return 1; });
}
TEST_CASE("all_reduce: torus_2d against double precision") {
  check_to_12("torus_2d", hd::torus_2d{}, [](int p) { return middle(p) + p / middle(p) - 2; });
}
TEST_CASE("all_reduce: halving_doubling against double precision") {
  check_to_12("halving_doubling", hd::halving_doubling{}, factors);
}
TEST_CASE("all_reduce: mixed_radix against double precision") {
  check_topology("mixed_radix 2x3", hd::mixed_radix{.radices = {2, 3}}, 6, 3);
  check_topology("mixed_radix 3x2", hd::mixed_radix{.radices = {3, 2}, .within = hd::exchange::direct}, 6, 2);
  check_topology("mixed_radix 4x2", hd::mixed_radix{.radices = {4, 2}}, 8, 4);
  for (int p = 1; p <= 12; ++p) {
    const int m = middle(p), f = p / m;
    const bool rings = p % 4 < 2;
    const hd::mixed_radix t{.radices = {f, m}, .within = rings ? hd::exchange::ring : hd::exchange::direct};
    check_topology("mixed_radix of two", t, p, rings ? f + m - 2 : (f > 1) + (m > 1), types::in_turn);
  }
}
TEST_CASE("all_reduce: hierarchical against double precision") {
  check_topology("hierarchical 3+3+1", hd::hierarchical<>{.group = 3}, 7, 2 + 2);
  check_topology("hierarchical 4+4", hd::hierarchical<>{.group = 4}, 8, 3 + 1);
  check_topology("hierarchical 3+2", hd::hierarchical{hd::direct{}, hd::direct{}, 3}, 5, 2);
  check_topology("hierarchical 2+2, no halves", hd::hierarchical{hd::ring{}, hypercube{}, 2}, 4, 1 + 1);
  for (int p = 1; p <= 12; ++p)
    check_topology("hierarchical of 3", hd::hierarchical<>{.group = 3}, p, 2 + (p + 2) / 3 - 1, types::in_turn);
}
TEST_CASE("all_reduce: trees, doublings and leaders against double precision") {
  for (int p = 1; p <= 12; ++p) {
    int below = 0;
    while ((2 << below) <= p) ++below;
    check_topology("recursive_doubling", hd::recursive_doubling{}, p, log2_up(p) > below ? below + 1 : below);
    check_topology("tree", hd::tree{}, p, log2_up(p));
    check_topology("double_tree", hd::double_tree{}, p, log2_up(p));
    check_topology("leaders of 3", hd::leaders<>{.group = 3}, p, 2 + (p + 2) / 3 - 1);
    check_topology("pipelined hierarchy of 3", hd::pipelined{hd::hierarchical<>{.group = 3}, 4}, p,
                   2 + (p + 2) / 3 - 1);
  }
}
TEST_CASE("all_reduce: topologies of users against double precision") {
  for (const int p : all_sizes) check_topology("binomial_tree", binomial_tree{}, p, log2_up(p));
  for (const int p : {1, 2, 4, 8}) check_topology("hypercube", hypercube{}, p, log2_up(p));
}

TEST_CASE("all_reduce: every type with every operation at every size") {
  const auto one = []<class T>(T, const auto& t, int ranks, int roundings) {
    findings found;
    std::vector<std::vector<std::byte>> shared(static_cast<std::size_t>(ranks));
    hd::threads::run(
        ranks, [&](auto& comm) { check_type<T>(found, comm, t, roundings, reach::all, shared, "every operation"); });
    CHECK(found.text() == "");
  };
  one(float{}, late(hd::ring{}), 5, 4);
  one(double{}, late(hd::halving_doubling{}), 8, 3);
  one(hd::float16{}, late(hd::torus_2d{}), 4, 2);
  one(hd::bfloat16{}, late(hd::hierarchical<>{.group = 3}), 7, 4);
  one(std::int32_t{}, hd::native{}, 3, 1);
  one(std::int64_t{}, late(hd::tree{}), 2, 1);
  one(std::uint8_t{}, late(hd::direct{}), 4, 1);
}

TEST_CASE("a communicator of users conforms") {
  heddle_test::conforms_to_communicator({1, 3}, [](int ranks, auto f) {
    hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(2)}, [&](auto& comm) {
      std::vector<message> log;
      recording recorded(comm, &log);
      f(recorded);
    });
  });
}

TEST_CASE("what passes through the communicator is the schedule") {
  for (const int p : {2, 3, 7, 8}) {
    for (const std::size_t n : {std::size_t{5}, std::size_t{1000}}) {
      check_execution(hd::ring{}, p, n);
      check_execution(hd::direct{}, p, n);
      check_execution(hd::torus_2d{}, p, n);
      check_execution(hd::halving_doubling{}, p, n);
      check_execution(hd::hierarchical<>{.group = 3}, p, n);
      check_execution(hd::pipelined{hd::double_tree{}, 3}, p, n);
      check_execution(binomial_tree{}, p, n);
    }
  }
}

TEST_CASE("a NaN of one rank reaches every rank, and only its element") {
  for (const int p : {2, 7, 8}) {
    on_every_topology(p, [&](auto& comm, const auto& t, const std::string&, findings& found) {
      const auto one = [&](auto zero, const auto& op, const char* name) {
        using type = decltype(zero);
        for (const int source : {0, p - 1}) {
          std::vector<type> data(20);
          for (std::size_t i = 0; i < 20; ++i) data[i] = value<type>(3, comm.rank(), i);
          if (comm.rank() == source) data[13] = static_cast<type>(std::numeric_limits<float>::quiet_NaN());
          const bool left = hd::all_reduce(comm, t, std::span<type>(data), op);
          for (std::size_t i = 0; i < 20; ++i) {
            found.expect(std::isnan(as_double(data[i])) == (i == 13), comm.rank(), "NaN", name);
          }
          found.expect(!left, comm.rank(), "a NaN is not an overflow");
        }
      };
      const auto every = [&](auto zero) {
        one(zero, hd::sum{}, "sum");
        one(zero, hd::mean{}, "mean");
        one(zero, hd::min{}, "min");
        one(zero, hd::max{}, "max");
      };
      every(0.0f);
      every(0.0);
      every(hd::float16(0.0f));
      every(hd::bfloat16(0.0f));
    });
  }
}

TEST_CASE("the mean of identical inputs is that input, with direct and native") {
  const auto same = [](const auto& t, int ranks) {
    findings found;
    hd::threads::run(ranks, [&](auto& comm) {
      const auto one = [&](auto zero) {
        using type = decltype(zero);
        const std::size_t n = 3000;
        std::vector<type> data(n);
        for (std::size_t i = 0; i < n; ++i) data[i] = value<type>(5, 0, i);
        if constexpr (sizeof(type) == 2) {  // every finite value up to 1, subnormal ones too
          for (std::size_t i = 0; i < n; ++i) data[i] = type::from_bits(static_cast<std::uint16_t>(i * 5));
        } else {
          for (std::size_t i = 0; i < 200; ++i) data[i] *= 0x1p-140f;
        }
        const std::vector<type> before = data;
        hd::all_reduce(comm, t, std::span<type>(data), hd::mean{});
        found.expect(same_bits(data.data(), before.data(), n), comm.rank(), "mean of identical inputs");
        const std::vector<std::size_t> counts = [&] {
          std::vector<std::size_t> c(static_cast<std::size_t>(ranks), 7);
          c.back() = n - 7 * (c.size() - 1);
          return c;
        }();
        if constexpr (!std::is_same_v<std::decay_t<decltype(t)>, hd::native>) {
          data = before;
          const std::span<type> own =
              hd::reduce_scatter(comm, t, std::span<type>(data), std::span<const std::size_t>(counts), hd::mean{});
          found.expect(same_bits(own.data(), before.data() + 7 * comm.rank(), own.size()), comm.rank(),
                       "reduce_scatter, mean of identical inputs");
        }
      };
      one(0.0f);
      one(hd::float16(0.0f));
      one(hd::bfloat16(0.0f));
      std::vector<hd::bfloat16> ones(100, hd::bfloat16(1.0f));
      hd::all_reduce(comm, t, std::span<hd::bfloat16>(ones), hd::mean{});
      for (const hd::bfloat16 x : ones) found.expect(static_cast<float>(x) == 1.0f, comm.rank(), "mean of ones");
    });
    CHECK(found.text() == "");
  };
  for (int p = 1; p <= 8; ++p) {
    same(hd::direct{}, p);
    same(hd::native{}, p);
  }
}

TEST_CASE("float16 sums neither leave the range on the way nor vanish") {
  on_every_topology(8, [](auto& comm, const auto& t, const std::string& name, findings& found) {
    const bool exact = name == "direct" || name == "native" || name == "halving_doubling";
    std::vector<hd::float16> data(100, hd::float16(20000.0f));
    bool left = hd::all_reduce(comm, t, std::span<hd::float16>(data), hd::mean{});
    for (const hd::float16 x : data) {
      const double off = std::abs(static_cast<float>(x) - 20000.0);
      found.expect(exact ? off == 0 : off <= 20000.0 * 7 * 0x1p-11, comm.rank(), "mean of 20000");
    }
    found.expect(!left, comm.rank(), "20000 is in range");

    data.assign(100, hd::float16::from_bits(1));  // 6e-8
    left = hd::all_reduce(comm, t, std::span<hd::float16>(data), hd::mean{});
    // Sums of 3, 5 and 6 ranks round at every hop.
    const int most = name == "hierarchical of 3" || name == "leaders of 3" ? 2 : 1;
    for (const hd::float16 x : data)
      found.expect(x.bits >= 1 && x.bits <= most, comm.rank(), "mean of the smallest value");
    found.expect(!left, comm.rank(), "6e-8 is in range");

    for (const auto extreme : {true, false}) {  // min and max are exact down to the smallest value
      data.assign(3, hd::float16::from_bits(static_cast<std::uint16_t>(3 + comm.rank())));
      if (extreme)
        hd::all_reduce(comm, t, std::span<hd::float16>(data), hd::max{});
      else
        hd::all_reduce(comm, t, std::span<hd::float16>(data), hd::min{});
      found.expect(data[2].bits == (extreme ? 10 : 3), comm.rank(), "extreme of subnormal values");
    }
  });
}

TEST_CASE("a float16 sum that leaves the range is infinite, and some rank says so") {
  for (const int p : {7, 8}) {
    const auto one = [&](const auto& t) {
      std::atomic<int> said{0};
      findings found;
      hd::threads::run(p, [&](auto& comm) {
        std::vector<hd::float16> data(50, hd::float16(1.0f));
        data[31] = hd::float16(20000.0f);
        data[32] = hd::float16(-20000.0f);
        said += hd::all_reduce(comm, t, std::span<hd::float16>(data), hd::sum{});
        for (std::size_t i = 0; i < 50; ++i) {
          const float x = static_cast<float>(data[i]);
          found.expect(i == 31   ? x > 0 && std::isinf(x)
                       : i == 32 ? x < 0 && std::isinf(x)
                                 : x == static_cast<float>(p),
                       comm.rank(), "sum out of range");
        }
      });
      CHECK(found.text() == "");
      CHECK(said > 0);
    };
    one(hd::ring{});
    one(hd::direct{});
    one(hd::native{});
    one(hd::halving_doubling{});
    one(hd::torus_2d{});
    one(hd::hierarchical<>{.group = 3});
    one(hd::pipelined{hd::double_tree{}, 3});
    one(binomial_tree{});
  }
}

TEST_CASE("integers wrap around, and means of small ones don't with direct and native") {
  findings found;
  hd::threads::run(3, [&](auto& comm) {
    std::vector<std::int64_t> large(4, std::numeric_limits<std::int64_t>::max());
    hd::all_reduce(comm, hd::ring{}, std::span<std::int64_t>(large));
    found.expect(large[0] == std::numeric_limits<std::int64_t>::max() - 2, comm.rank(), "wrapped sum");
    std::vector<std::uint8_t> bytes(4, 200);
    hd::all_reduce(comm, hd::direct{}, std::span<std::uint8_t>(bytes), hd::mean{});
    found.expect(bytes[3] == 200, comm.rank(), "mean of bytes, direct");
    hd::all_reduce(comm, hd::native{}, std::span<std::uint8_t>(bytes), hd::mean{});
    found.expect(bytes[3] == 200, comm.rank(), "mean of bytes, native");
  });
  CHECK(found.text() == "");
}

TEST_CASE("operations apply in rank order where ranks meet directly") {
  const auto first_of = [](const auto& t, int ranks) {
    findings found;
    hd::threads::run(ranks, [&](auto& comm) {
      std::vector<int> data(100, comm.rank());
      hd::all_reduce(comm, t, std::span<int>(data), [](int a, int) { return a; });
      found.expect(data == std::vector<int>(100, 0), comm.rank(), "op(lower rank, higher rank)");
    });
    CHECK(found.text() == "");
  };
  for (const int p : {2, 5, 8}) {
    first_of(hd::direct{}, p);
    first_of(hd::native{}, p);
    first_of(binomial_tree{}, p);
    first_of(hd::tree{}, p);
    first_of(hd::recursive_doubling{}, p);
    first_of(hd::leaders{hd::tree{}, 3}, p);
  }
  first_of(hypercube{}, 8);
  first_of(hd::halving_doubling{}, 8);
  first_of(hd::hierarchical{hd::direct{}, hd::direct{}, 3}, 7);
}

TEST_CASE("bad buffers are argument errors and nothing changes") {
  hd::self comm;
  std::vector<float> data{1, 2, 3, 4, 5, 6};
  const std::vector<float> before = data;
  const std::span<float> all(data);
  CHECK_THROWS_AS(hd::all_reduce(comm, hd::ring{}, std::span<const float>(all.first(4)), all.subspan(1, 4)),
                  hd::argument_error);
  CHECK_THROWS_AS(hd::all_reduce(comm, hd::ring{}, std::span<const float>(all.subspan(1, 4)), all.first(4)),
                  hd::argument_error);
  CHECK_THROWS_AS(hd::all_reduce(comm, hd::ring{}, std::span<const float>(all.first(3)), all.subspan(3, 2)),
                  hd::argument_error);
  float* const null = nullptr;
  const std::span<float> nothing(null, 3);
  CHECK_THROWS_AS(hd::all_reduce(comm, hd::ring{}, nothing), hd::argument_error);
  CHECK_THROWS_AS(hd::all_reduce(comm, hd::ring{}, std::span<const float>(nothing), all.first(3)), hd::argument_error);
  CHECK_THROWS_AS(hd::all_reduce(comm, hd::ring{}, std::span<const float>(all.first(3)), nothing), hd::argument_error);
  CHECK_THROWS_AS(hd::broadcast(comm, nothing), hd::argument_error);
  CHECK_THROWS_AS(hd::broadcast(comm, all, 1), hd::argument_error);
  CHECK_THROWS_AS(hd::broadcast(comm, all, -1), hd::argument_error);
  const std::vector<std::size_t> three{3}, one_more{3, 0};
  CHECK_THROWS_AS(hd::all_gather(comm, hd::ring{}, nothing, std::span<const std::size_t>(three)), hd::argument_error);
  CHECK_THROWS_AS(hd::all_gather(comm, hd::ring{}, all, std::span<const std::size_t>(three)), hd::argument_error);
  CHECK_THROWS_AS(hd::all_gather(comm, hd::ring{}, all.first(3), std::span<const std::size_t>(one_more)),
                  hd::argument_error);
  CHECK_THROWS_AS(hd::all_gather(comm, hd::ring{}, std::span<const float>(all.first(3)), nothing), hd::argument_error);
  CHECK_THROWS_AS(hd::reduce_scatter(comm, hd::ring{}, all, std::span<const std::size_t>(three)), hd::argument_error);
  CHECK(data == before);

  hd::all_reduce(comm, hd::ring{}, std::span<float>());                            // nothing is legal
  hd::all_reduce(comm, hd::ring{}, std::span<const float>(all), all, hd::mean{});  // equal is in place
  hd::all_reduce(comm, hd::ring{}, std::span<const float>(all.first(3)), all.subspan(3, 3));
  CHECK(data == std::vector<float>{1, 2, 3, 1, 2, 3});
}

TEST_CASE("what completes a part of what it reduces carries sums, and refuses means") {
  findings found;
  hd::threads::run(2, [&](auto& comm) {
    std::vector<float> data(9, 1.0f + static_cast<float>(comm.rank()));
    hd::all_reduce(comm, half_wanted{}, std::span<float>(data));
    found.expect(data == std::vector<float>(9, 3.0f), comm.rank(), "sum");
  });
  CHECK(found.text() == "");
  CHECK_THROWS_AS(hd::threads::run(2,
                                   [](auto& comm) {
                                     std::vector<float> data(9, 1.0f);
                                     hd::all_reduce(comm, half_wanted{}, std::span<float>(data), hd::mean{});
                                   }),
                  hd::argument_error);
}

TEST_CASE("all_gather and reduce_scatter with blocks of any sizes") {
  for (const int p : all_sizes) {
    const auto one = [&](const auto& t) {
      for (unsigned kind = 0; kind < 4; ++kind) {
        std::vector<std::size_t> counts;
        for (int r = 0; r < p; ++r) {
          const auto u = static_cast<std::size_t>(r);
          counts.push_back(kind == 0 ? 5 : kind == 1 ? u * 3 % 7 : kind == 2 ? (r == p / 2 ? 1000 : 0) : 0);
        }
        std::vector<std::size_t> begin{0};
        for (const std::size_t c : counts) begin.push_back(begin.back() + c);
        findings found;
        hd::threads::run(p, [&](auto& comm) {
          const auto me = static_cast<std::size_t>(comm.rank());
          const std::span<const std::size_t> blocks(counts);
          std::vector<double> all(begin.back(), -1.0);
          for (std::size_t i = begin[me]; i < begin[me + 1]; ++i) all[i] = static_cast<double>(i);
          hd::all_gather(comm, t, std::span<double>(all), blocks);
          for (std::size_t i = 0; i < all.size(); ++i)
            found.expect(all[i] == static_cast<double>(i), comm.rank(), "all_gather");

          for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<double>(i * (me + 1));
          const std::span<double> own = hd::reduce_scatter(comm, t, std::span<double>(all), blocks);
          found.expect(own.size() == counts[me] && own.data() == all.data() + begin[me], comm.rank(), "own block");
          const auto total = static_cast<std::size_t>(p * (p + 1) / 2);
          for (std::size_t i = 0; i < own.size(); ++i) {
            found.expect(own[i] == static_cast<double>((begin[me] + i) * total), comm.rank(), "reduce_scatter");
          }
          std::vector<hd::float16> half(begin.back(), hd::float16(20000.0f));
          const auto mean = hd::reduce_scatter(comm, t, std::span<hd::float16>(half), blocks, hd::mean{});
          for (const hd::float16 x : mean) {
            found.expect(std::abs(static_cast<float>(x) - 20000.0) <= 20000.0 * p * 0x1p-11, comm.rank(),
                         "mean of 20000");
          }
        });
        CHECK(found.text() == "");
      }
      findings found;
      hd::threads::run(p, [&](auto& comm) {
        const std::vector<int> mine{comm.rank(), -comm.rank()};
        std::vector<int> all(2 * static_cast<std::size_t>(p));
        hd::all_gather(comm, t, std::span<const int>(mine), std::span<int>(all));
        for (int r = 0; r < p; ++r) {
          const auto at = 2 * static_cast<std::size_t>(r);
          found.expect(all[at] == r && all[at + 1] == -r, comm.rank(), "equal blocks");
        }
      });
      CHECK(found.text() == "");
    };
    one(hd::ring{});
    one(hd::direct{});
    one(hd::torus_2d{});
    one(hd::halving_doubling{});
  }
}

TEST_CASE("broadcast from every root") {
  for (const int p : all_sizes) {
    findings found;
    hd::threads::run(p, [&](auto& comm) {
      for (int root = 0; root < p; ++root) {
        for (const std::size_t n : {0, 1, 1000}) {
          std::vector<moments> data(n, moments{comm.rank() + 0.5, comm.rank()});
          hd::broadcast(comm, std::span<moments>(data), root);
          for (const moments& x : data) found.expect(x.sum == root + 0.5 && x.count == root, comm.rank(), "broadcast");
        }
      }
    });
    CHECK(found.text() == "");
  }
}

TEST_CASE("a barrier lets nobody through before everybody has come") {
  for (const int p : all_sizes) {
    findings found;
    std::atomic<int> came{0};
    hd::threads::run(p, [&](auto& comm) {
      for (int k = 1; k <= 50; ++k) {
        ++came;
        hd::barrier(comm);
        found.expect(came >= k * p, comm.rank(), "came through too early");
        hd::barrier(comm);
      }
    });
    CHECK(found.text() == "");
  }
}

TEST_CASE("the example of the documentation") {
  // example-begin collectives
  hd::threads::run(4, [](auto& comm) {
    std::vector<float> gradient(1000, 1.0f + static_cast<float>(comm.rank()));
    hd::all_reduce(comm, hd::ring{}, std::span(gradient), hd::mean{});  // 2.5 on every rank
    hd::all_reduce(comm, hd::hierarchical{hd::direct{}, hd::ring{}, 2}, std::span(gradient), hd::max{});
    const auto larger = [](float a, float b) { return a > b ? a : b; };  // or an operation of your own
    hd::all_reduce(comm, hd::native{}, std::span(gradient), larger);

    // Every step the same size: schedule, executor and scratch memory are made once.
    hd::all_reduce_plan<hd::ring> plan(hd::ring{}, comm.rank(), comm.size(), gradient.size());
    for (int step = 0; step < 3; ++step) plan(comm, gradient.data(), hd::leaf_of<float>(hd::mean{}));

    hd::broadcast(comm, std::span(gradient), 3);              // from rank 3
    const std::vector<std::size_t> counts{0, 100, 800, 100};  // blocks of any sizes
    const std::span<float> mine = hd::reduce_scatter(comm, hd::direct{}, std::span(gradient), std::span(counts));
    for (float& x : mine) x *= 0.5f;  // each rank updates its part
    hd::all_gather(comm, hd::direct{}, std::span(gradient), std::span(counts));
    hd::barrier(comm);
    if (gradient != std::vector<float>(1000, 5.0f)) throw std::logic_error("it should be half of 4 times 2.5");
  });
  // example-end
}

TEST_CASE("a plan can be used every step, with any operation") {
  findings found;
  hd::threads::run(4, [&](auto& comm) {
    hd::all_reduce_plan<hd::ring> plan(hd::ring{}, comm.rank(), comm.size(), 10);
    for (int step = 0; step < 20; ++step) {
      std::vector<float> data(10, static_cast<float>(comm.rank() + step));
      const hd::mean mean;
      const hd::max max;
      plan(comm, data.data(), step % 2 ? hd::leaf_of<float>(mean) : hd::leaf_of<float>(max));
      const float right = static_cast<float>(step) + (step % 2 ? 1.5f : 3.0f);
      found.expect(data == std::vector<float>(10, right), comm.rank(), "step");
    }
  });
  CHECK(found.text() == "");
}

TEST_CASE("a plan serves the rank that it was made for, and no other") {
  const auto refused = [](const auto& topology, int of, auto use) {
    std::string text;
    try {
      hd::threads::run(of, [&](auto& comm) { use(comm, topology); });
    } catch (const hd::argument_error& e) {
      text = e.what();
    }
    INFO(text);
    CHECK(text.find("a plan for rank 1 of 3 is called by rank") != std::string::npos);
  };
  const auto reduce = [](auto& comm, const auto& t) {
    std::vector<float> data(12);
    hd::all_reduce_plan plan(t, 1, 3, 12);
    plan(comm, data.data(), hd::leaf_of<float>(hd::sum{}));
  };
  const auto scatter = [](auto& comm, const auto& t) {
    std::vector<float> data(12);
    hd::halved_plan(t, 1, 3, 12).reduce_scatter(comm, data.data(), hd::leaf_of<float>(hd::sum{}));
  };
  const auto gather = [](auto& comm, const auto& t) {
    std::vector<float> data(12);
    hd::halved_plan(t, 1, 3, 12).all_gather(comm, data.data());
  };
  for (const int of : {1, 2, 3, 4}) {  // two of the four would reduce among themselves
    refused(hd::ring{}, of, reduce);
    refused(hd::native{}, of, reduce);
    refused(hd::ring{}, of, scatter);
    refused(hd::ring{}, of, gather);
  }
  for (const int rank : {-1, 3, 4}) {
    CHECK_THROWS_AS(hd::all_reduce_plan(hd::ring{}, rank, 3, 12), hd::argument_error);
    CHECK_THROWS_AS(hd::halved_plan(hd::ring{}, rank, 3, 12), hd::argument_error);
  }
  CHECK_THROWS_AS(hd::all_reduce_plan(hd::native{}, 0, 0, 12), hd::argument_error);
}

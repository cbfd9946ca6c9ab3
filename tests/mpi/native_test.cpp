// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/gather.hpp>
#include <heddle/collective/mixed_radix.hpp>

#include "../collective/exact.hpp"
#include "support.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

namespace {

using exact::value, exact::as_double, exact::what;

struct larger {  // a user's operation
  template <class T> T operator()(T a, T b) const { return as_double(a) < as_double(b) ? b : a; }
};

template <class T, class Op> void check(hd::mpi::communicator& comm, what w, const Op& op) {
  const int p = comm.size();
  for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{17}, std::size_t{1025}, std::size_t{10007}}) {
    INFO(hd::name_of(hd::dtype_of<T>) << ", n " << n << ", operation " << static_cast<int>(w));
    std::vector<T> in(n), out(n);
    for (std::size_t i = 0; i < n; ++i) in[i] = value<T>(comm.rank(), i);
    const std::vector<T> before = in;
    CHECK_FALSE(hd::all_reduce(comm, hd::native{}, std::span<const T>(in), std::span<T>(out), op));
    const auto bits = [n](const std::vector<T>& a, const std::vector<T>& b) {
      return n == 0 || std::memcmp(a.data(), b.data(), n * sizeof(T)) == 0;
    };
    CHECK(bits(in, before));
    CHECK_FALSE(hd::all_reduce(comm, hd::native{}, std::span<T>(in), op));
    CHECK(bits(in, out));
    bool right = true;
    for (std::size_t i = 0; i < n; ++i) right &= exact::excess(out[i], w, p, i) <= 0;
    CHECK(right);
  }
}

template <class T> void check_type(hd::mpi::communicator& comm) {
  check<T>(comm, what::sum, hd::sum{});
  check<T>(comm, what::mean, hd::mean{});
  check<T>(comm, what::least, hd::min{});
  check<T>(comm, what::most, hd::max{});
  check<T>(comm, what::most, larger{});
}

void check_types(hd::mpi::communicator& comm) {
  check_type<float>(comm);
  check_type<double>(comm);
  check_type<hd::float16>(comm);
  check_type<hd::bfloat16>(comm);
  check_type<std::int32_t>(comm);
  check_type<std::int64_t>(comm);
  check_type<std::uint8_t>(comm);
}

}  // namespace

TEST_CASE("native over mpi equals the exact result, for every type and operation") {
  on_ranks([](auto& comm) {
    check_types(comm);
    auto second = comm.duplicate();
    check<float>(second, what::sum, hd::sum{});
  });
  hd::mpi::options o = settings();
  o.piece = 1001;  // whole elements go into one call
  on_ranks(world_size(), o, [](auto& comm) { check_types(comm); });
}

TEST_CASE("native over mpi takes any type with an operation") {
  struct extent {
    float low, high;
    std::uint8_t seen;
  };
  on_ranks([](auto& comm) {
    std::vector<extent> all(1000);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const float x = value<float>(comm.rank(), i);
      all[i] = {x, x, static_cast<std::uint8_t>(1u << comm.rank())};
    }
    const auto join = [](extent a, extent b) {
      return extent{std::min(a.low, b.low), std::max(a.high, b.high), static_cast<std::uint8_t>(a.seen | b.seen)};
    };
    hd::all_reduce(comm, hd::native{}, std::span<extent>(all), join);
    for (std::size_t i = 0; i < all.size(); ++i) {
      float low = 1e9f, high = -1e9f;
      for (int r = 0; r < comm.size(); ++r) {
        low = std::min(low, value<float>(r, i));
        high = std::max(high, value<float>(r, i));
      }
      REQUIRE((all[i].low == low && all[i].high == high && all[i].seen == (1u << comm.size()) - 1));
    }
  });
}

TEST_CASE("native over mpi keeps float16 means in range, and NaN in minimum and maximum") {
  const int p = world_size();
  on_ranks([&](auto& comm) {
    for (const float x : {20000.0f, 6e-8f}) {
      std::vector<hd::float16> words(100, hd::float16(x));
      CHECK_FALSE(hd::all_reduce(comm, hd::native{}, std::span<hd::float16>(words), hd::mean{}));
      for (const hd::float16 w : words) CHECK(w.bits == hd::float16(x).bits);
    }
    std::vector<hd::float16> large(10, hd::float16(40000.0f));
    CHECK(hd::all_reduce(comm, hd::native{}, std::span<hd::float16>(large)) == (p > 1));  // the sum isn't finite
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (int r = 0; r < p; ++r) {
      std::vector<float> least(5, 1.0f), most(5, 1.0f);
      if (comm.rank() == r) least[3] = most[3] = nan;
      hd::all_reduce(comm, hd::native{}, std::span<float>(least), hd::min{});
      hd::all_reduce(comm, hd::native{}, std::span<float>(most), hd::max{});
      CHECK((std::isnan(least[3]) && std::isnan(most[3]) && least[2] == 1.0f && most[4] == 1.0f));
    }
  });
}

TEST_CASE("what native hands to MPI is split so that counts are ints") {
  using hd::mpi::detail::elements_of_call;
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1023}, (std::size_t{1} << 31) - 1,
                                  std::size_t{1} << 31, (std::size_t{1} << 33) + 5}) {
    for (const std::size_t bytes : {1u, 4u, 12u, 3000u}) {
      for (const std::size_t piece : {std::size_t{1} << 20, std::size_t{1} << 30, std::size_t{1} << 31}) {
        std::size_t calls = 0, sum = 0;
        bool fits = true;
        for (; const std::size_t n = elements_of_call(count, bytes, piece, calls); ++calls) {
          sum += n;
          fits &= n <= std::size_t{2147483647} && n * bytes <= piece;
        }
        CHECK(sum == count);
        CHECK(fits);
        CHECK(calls <= count / (piece / 2 / bytes) + 1);
      }
    }
  }
  CHECK(elements_of_call(10, 100, 7, 0) == 1);  // an element longer than a piece travels alone
  CHECK(elements_of_call(10, 100, 7, 9) == 1);
  CHECK(elements_of_call(10, 100, 7, 10) == 0);
}

TEST_CASE("ranks in other calls than native are named") {
  const int p = world_size();
  if (p == 1) return;
  for (const int odd : {0, p - 1}) {
    for (const bool other_count : {true, false}) {
      const ended e = outcome(p, settings(), [&](auto& comm) {
        std::vector<float> data(comm.rank() == odd && other_count ? 101 : 100);
        if (comm.rank() == odd && !other_count)
          hd::all_reduce(comm, hd::ring{}, std::span<float>(data), hd::max{});
        else
          hd::all_reduce(comm, hd::native{}, std::span<float>(data));
        hd::barrier(comm);
      });
      INFO(e.text);
      CHECK(has(e.text, "calls differ: rank "));
      CHECK(has(e.text, "rank " + std::to_string(odd) + " is in "));
    }
  }
}

TEST_CASE("ranks whose own types differ in size are named before MPI reduces them") {
  const int p = world_size();
  if (p == 1) return;
  struct three {
    double x[3];
  };
  const auto first = [](auto a, auto) { return a; };
  const ended e = outcome(p, settings(), [&](auto& comm) {
    if (comm.rank() == p - 1) {
      std::vector<std::array<float, 2>> small(100);
      hd::all_reduce(comm, hd::native{}, std::span(small), first);
    } else {
      std::vector<three> large(100);
      hd::all_reduce(comm, hd::native{}, std::span(large), first);
    }
    hd::barrier(comm);
  });
  INFO(e.text);
  CHECK(has(e.text, "element of 8 bytes"));
  CHECK(has(e.text, "element of 24 bytes"));
}

TEST_CASE("a rank that doesn't come to native is named") {
  const int p = world_size(), absent = p - 1;
  if (p == 1) return;
  const ended e = outcome(p, settings(300ms), [&](auto& comm) {
    while (comm.rank() == absent) {
      std::this_thread::sleep_for(10ms);
      comm.exchange({}, {}, {}, [](std::span<const hd::arrival>) {});
    }
    std::vector<float> data(100);
    hd::all_reduce(comm, hd::native{}, std::span<float>(data));
  });
  INFO(e.text);
  REQUIRE(e.error);
  CHECK(has(e.text, "did not reach all_reduce"));
}

TEST_CASE("native on two threads, in no common order", "[threads]") {
  on_ranks([](auto& comm) {
    auto first = comm.duplicate(), second = comm.duplicate();
    const auto work = [](hd::mpi::communicator& c, std::vector<float>& data) {
      for (int k = 0; k < 30; ++k) hd::all_reduce(c, hd::native{}, std::span<float>(data), hd::mean{});
    };
    std::vector<float> a(3000, 1.0f), b(5000, 2.0f);
    std::exception_ptr thrown, thrown_there;
    std::thread other([&] {
      try {
        std::this_thread::sleep_for(comm.rank() % 2 ? 5ms : 0ms);
        work(first, a);
      } catch (const hd::error&) {
        thrown_there = std::current_exception();
      }
    });
    try {
      std::this_thread::sleep_for(comm.rank() % 2 ? 0ms : 5ms);
      work(second, b);
    } catch (const hd::error&) {
      thrown = std::current_exception();
    }
    other.join();
    if (thrown_there) std::rethrow_exception(thrown_there);
    if (thrown) std::rethrow_exception(thrown);
    CHECK((a == std::vector<float>(3000, 1.0f) && b == std::vector<float>(5000, 2.0f)));
  });
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/native_leaves.hpp>
#include <heddle/collective/recursive_doubling.hpp>

#include "exact.hpp"

#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

// All-reduces with native{} as a leaf, against what double precision says. For ranks of any kind: what is wrong comes
// back as a text.
namespace native_leaves {
namespace hd = heddle;

struct pair_of {  // a user's type
  double sum;
  std::int64_t count;
};
struct add_pairs {
  pair_of operator()(pair_of a, pair_of b) const { return {a.sum + b.sum, a.count + b.count}; }
};

template <class T, class Comm, class Topology, class Op>
void check(Comm& comm, const Topology& t, std::size_t n, const Op& op, std::string& wrong) {
  const int p = comm.size();
  std::vector<T> in(n), out(n);
  for (std::size_t i = 0; i < n; ++i) in[i] = exact::value<T>(comm.rank(), i);
  bool right = !hd::all_reduce(comm, t, std::span<const T>(in), std::span<T>(out), op);
  right &= !hd::all_reduce(comm, t, std::span<T>(in), op);
  right &= n == 0 || std::memcmp(in.data(), out.data(), n * sizeof(T)) == 0;
  constexpr auto w = std::is_same_v<Op, hd::max>    ? exact::what::most
                     : std::is_same_v<Op, hd::mean> ? exact::what::mean
                                                    : exact::what::sum;
  for (std::size_t i = 0; i < n; ++i) right &= exact::excess(in[i], w, p, i) <= 0;
  if (right || !wrong.empty()) return;
  wrong = t.name() + " on rank " + std::to_string(comm.rank()) + " of " + std::to_string(p) + ", n " +
          std::to_string(n) + ", " + hd::name_of(hd::dtype_of<T>) +
          (std::is_same_v<Op, hd::mean>  ? ", mean"
           : std::is_same_v<Op, hd::max> ? ", max"
                                         : ", sum");
}

template <class Comm, class Topology> std::string check_all(Comm& comm, const Topology& t) {
  std::string wrong;
  const auto p = static_cast<std::size_t>(comm.size());
  for (const std::size_t n :
       {std::size_t{0}, std::size_t{1}, p - 1, p, p + 1, std::size_t{17}, std::size_t{1025}, std::size_t{10007}}) {
    const auto type = [&]<class T>(T) {
      check<T>(comm, t, n, hd::sum{}, wrong);
      check<T>(comm, t, n, hd::mean{}, wrong);
      if (n == 17) check<T>(comm, t, n, hd::max{}, wrong);
    };
    type(float{});
    if (n == 10007) continue;
    type(double{});
    type(std::int32_t{});
    type(hd::float16{});
    type(hd::bfloat16{});
  }
  // float16 stays in range on its way, and a sum that leaves it is told.
  std::vector<hd::float16> large(100, hd::float16(20000.0f));
  bool left = hd::all_reduce(comm, t, std::span<hd::float16>(large), hd::mean{});
  for (const hd::float16 x : large) left |= static_cast<float>(x) != 20000.0f;
  if (left && wrong.empty()) wrong = t.name() + ": a mean of float16 left the range";
  if (p > 3 && !hd::all_reduce(comm, t, std::span<hd::float16>(large)) && wrong.empty())
    wrong = t.name() + ": nobody says that a sum of float16 left the range";
  // A user's type, by a plan that is used again.
  hd::all_reduce_plan<Topology> plan(t, comm.rank(), comm.size(), 1025);
  for (int call = 0; call < 2; ++call) {
    std::vector<pair_of> pairs(1025, pair_of{0.5 * comm.rank(), comm.rank()});
    plan(comm, pairs.data(), hd::leaf_of<pair_of>(add_pairs{}));
    const auto total = static_cast<std::int64_t>(p * (p - 1) / 2);
    for (const pair_of& x : pairs) {
      if ((x.count != total || x.sum != 0.5 * static_cast<double>(total)) && wrong.empty())
        wrong = t.name() + ": a user's type";
    }
  }
  return wrong;
}

// Calls f(topology) for the topologies to try, all of them groups of `group` ranks.
template <class Function> void each_topology(int group, Function&& f) {
  f(hd::hierarchical{hd::native{}, hd::ring{}, group});
  f(hd::hierarchical{hd::native{}, hd::native{}, group});
  f(hd::hierarchical{hd::ring{}, hd::native{}, group});
  f(hd::hierarchical{hd::native{}, hd::recursive_doubling{}, group});
}
}  // namespace native_leaves

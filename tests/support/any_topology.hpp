// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/leaders.hpp>
#include <heddle/collective/pipelined.hpp>
#include <heddle/collective/recursive_doubling.hpp>
#include <heddle/collective/tree.hpp>

#include <functional>
#include <string>
#include <vector>

/// @file
/// Topologies as data, so that one executor and one kernel serve all of them.
namespace device_test {
namespace hd = heddle;

struct any_topology {
  std::string text;
  std::function<hd::schedule(int, int, std::size_t)> make;
  std::string name() const { return text; }
  hd::schedule all_reduce(int rank, int size, std::size_t n) const { return make(rank, size, n); }
};
template <class Topology> any_topology erased(const Topology& t) {
  return {t.name(), [t](int rank, int size, std::size_t n) { return t.all_reduce(rank, size, n); }};
}
inline std::vector<any_topology> topologies() {
  return {erased(hd::ring{}),
          erased(hd::direct{}),
          erased(hd::torus_2d{}),
          erased(hd::halving_doubling{}),
          erased(hd::recursive_doubling{}),
          erased(hd::tree{}),
          erased(hd::double_tree{}),
          erased(hd::hierarchical<>{.group = 3}),
          erased(hd::leaders<>{.group = 3}),
          erased(hd::pipelined{hd::torus_2d{}, 3, 2})};
}

}  // namespace device_test

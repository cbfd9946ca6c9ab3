// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/comm/counting.hpp>
#include <heddle/comm/rank_group.hpp>

#include "../collective/parts.hpp"
#include "support.hpp"

using heddle_test::any;
using heddle_test::check_in_parts;
using heddle_test::late;
using heddle_test::whole_only;

namespace {

// Messages above 36000 bytes come in parts of that.
constexpr std::size_t part = 36000;
hd::mpi::options in_parts() {
  hd::mpi::options o = settings();
  o.piece = part;
  return o;
}

constexpr std::size_t parts_of(std::size_t bytes) { return bytes <= part ? 0 : (bytes + part - 1) / part; }

// Messages of a part less an element, a part, an element more, and some with an odd tail; then of different lengths.
template <class Element, class Op> void check_sizes(hd::mpi::communicator& comm, const Op& op) {
  whole_only plain(comm);
  const std::size_t p = static_cast<std::size_t>(comm.size()), one = part / sizeof(Element);
  for (const std::size_t m : {one - 1, one, one + 1, 2 * one + 17}) {
    const std::size_t parts = parts_of(m * sizeof(Element));
    check_in_parts<Element>(comm, plain, "ring", late(hd::ring{}), m * p, op, parts * (p - 1));
    check_in_parts<Element>(comm, plain, "direct", late(hd::direct{}), m * p, op, p == 1 ? 0 : parts);
  }
  check_in_parts<Element>(comm, plain, "ring", late(hd::ring{}), 3 * one * p + p - 1, op);
  check_in_parts<Element>(comm, plain, "hierarchical", late(hd::hierarchical<>{.group = 2}), 4 * one * p + 1, op);
}

template <class Element, class Op> void check_tail(hd::mpi::communicator& comm, const Op& op) {
  whole_only plain(comm);
  const std::size_t p = static_cast<std::size_t>(comm.size()), n = (2 * part / sizeof(Element) + 17) * p;
  check_in_parts<Element>(comm, plain, "ring", late(hd::ring{}), n, op, 3 * (p - 1));
}

}  // namespace

TEST_CASE("all_reduce over mpi in parts: types and operations against double precision") {
  const ended e = outcome(world_size(), in_parts(), [](auto& comm) {
    check_sizes<float>(comm, hd::sum{});
    check_sizes<hd::float16>(comm, hd::mean{});
    check_tail<float>(comm, heddle_test::add{});
    check_tail<float>(comm, hd::min{});
    check_tail<double>(comm, hd::mean{});
    check_tail<double>(comm, heddle_test::add_beyond{0.0});
    check_tail<hd::float16>(comm, hd::product{});
    check_tail<hd::float16>(comm, hd::accumulate_in<double>(hd::sum{}));
    check_tail<hd::bfloat16>(comm, hd::sum{});
    check_tail<hd::bfloat16>(comm, hd::accumulate_in<double>(hd::mean{}));
    check_tail<std::uint8_t>(comm, hd::max{});
    check_tail<std::uint8_t>(comm, hd::product{});
    check_tail<std::int64_t>(comm, hd::sum{});
  });
  CHECK(e.text == "");
}

TEST_CASE("all_reduce over mpi in parts: as long as they are without settings, and 64 or more") {
  const ended defaults = outcome(world_size(), settings(), [](auto& comm) {  // messages of 576 KiB and above are cut
    whole_only plain(comm);
    const std::size_t p = static_cast<std::size_t>(comm.size());
    for (const std::size_t m : {std::size_t{147455}, std::size_t{147456}, std::size_t{147457}, std::size_t{344065}}) {
      const std::size_t parts = m < 147456 ? 0 : m < 245760 ? 2 : 4;
      check_in_parts<float>(comm, plain, "ring", late(hd::ring{}), m * p, hd::mean{}, parts * (p - 1));
    }
  });
  CHECK(defaults.text == "");
  const ended cut = outcome(world_size(), in_parts(), [](auto& comm) {
    whole_only plain(comm);
    const std::size_t p = static_cast<std::size_t>(comm.size());
    check_in_parts<float>(comm, plain, "ring", late(hd::ring{}), (65 * 9000 + 7) * p, hd::sum{}, 66 * (p - 1));
  });
  CHECK(cut.text == "");
  if (world_size() < 2) return;
  const ended pair = outcome(2, settings(), [](auto& comm) {  // 30 MB in as many parts as 25 MB
    whole_only plain(comm);
    check_in_parts<double>(comm, plain, "ring", late(hd::ring{}), 7500000, hd::sum{}, 64);
  });
  CHECK(pair.text == "");
}

TEST_CASE("a run over mpi may begin at a later round, whose messages come in parts") {
  if (world_size() < 3) return;
  const ended e = outcome(world_size(), in_parts(), [](auto& comm) {
    whole_only plain(comm);
    heddle_test::check_rounds_apart(comm, plain, 20000 * static_cast<std::size_t>(comm.size()) + 1);
  });
  CHECK(e.text == "");
}

TEST_CASE("two long messages of one rank in one round come over mpi one after the other") {
  if (world_size() < 2) return;
  const ended e = outcome(2, in_parts(), [](auto& comm) {
    whole_only plain(comm);
    for (const std::size_t n : {std::size_t{20000}, std::size_t{40002}, std::size_t{100002}})
      check_in_parts<float>(comm, plain, "two at once", heddle_test::two_at_once(), n, hd::sum{}, 0);
  });
  CHECK(e.text == "");
}

TEST_CASE("parts pass over mpi through groups of ranks") {
  const ended e = outcome(world_size(), in_parts(), [](auto& comm) {
    hd::counting counted(comm);
    hd::rank_group group(counted, comm.rank() % 2);  // neighbours in a group aren't neighbours in the world
    whole_only plain(group);
    const std::size_t p = static_cast<std::size_t>(group.size());
    check_in_parts<float>(group, plain, "ring", late(hd::ring{}), 20001 * p, hd::sum{}, 3 * (p - 1));
    check_in_parts<hd::float16>(group, plain, "direct", late(hd::direct{}), 50000 * p, hd::mean{}, p == 1 ? 0 : 3);
  });
  CHECK(e.text == "");
}

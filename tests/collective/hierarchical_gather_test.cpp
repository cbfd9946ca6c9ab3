// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/gather.hpp>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/verify.hpp>
#include <heddle/comm/threads.hpp>

#include "../support/catch.hpp"
#include "../support/rank_check.hpp"

#include <numeric>

namespace hd = heddle;

namespace {
template <class Topology>
hd::verdict prove_gather(const Topology& t, std::span<const std::size_t> counts) {
  const auto blocks = hd::detail::consecutive(counts);
  std::vector<hd::schedule> all;
  const int size = static_cast<int>(counts.size());
  for (int r = 0; r < size; ++r) all.push_back(t.all_gather(r, size, blocks));
  return hd::detail::prove(all, std::accumulate(counts.begin(), counts.end(), std::size_t{0}), {blocks, true, false});
}
}  // namespace

TEST_CASE("hierarchical all_gather is proven for every group size, ragged ones and empty blocks too") {
  for (int size = 1; size <= 24; ++size) {
    std::vector<std::size_t> counts;
    for (int r = 0; r < size; ++r) counts.push_back(static_cast<std::size_t>((r * 7 + 3) % 5));
    for (int group = 0; group <= size; ++group) {
      CAPTURE(size, group);
      const auto rings = prove_gather(hd::hierarchical{hd::ring{}, hd::ring{}, group}, counts);
      CHECK(std::string(hd::name_of(rings.what)) == "none");
      const auto mixed = prove_gather(hd::hierarchical{hd::halving_doubling{}, hd::direct{}, group}, counts);
      CHECK(std::string(hd::name_of(mixed.what)) == "none");
    }
  }
}

TEST_CASE("hierarchical all_gather gathers, and its slow links carry each block once per other group") {
  hd::threads::run(7, [](auto& comm) {
    const hd::hierarchical t{hd::ring{}, hd::ring{}, 3};
    const std::vector<std::size_t> counts{3, 0, 5, 1, 2, 7, 4};
    std::vector<int> all(22, -1);
    std::size_t at = 0;
    for (int r = 0; r < 7; ++r) {
      for (std::size_t i = 0; i < counts[static_cast<std::size_t>(r)]; ++i, ++at) {
        if (r == comm.rank()) all[at] = static_cast<int>(at);
      }
    }
    hd::all_gather(comm, t, std::span<int>(all), std::span<const std::size_t>(counts));
    for (std::size_t i = 0; i < all.size(); ++i) RANK_CHECK(all[i] == static_cast<int>(i));
  });
}

TEST_CASE("counts that wrap around are refused") {
  hd::threads::run(2, [](auto& comm) {
    std::vector<float> data(4);
    const std::vector<std::size_t> counts{static_cast<std::size_t>(-4), 8};
    RANK_CHECK_THROWS_AS(hd::all_gather(comm, hd::ring{}, std::span<float>(data), std::span<const std::size_t>(counts)),
                         hd::argument_error);
  });
}

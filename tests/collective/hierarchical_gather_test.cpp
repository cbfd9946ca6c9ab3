// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/gather.hpp>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/verify.hpp>
#include <heddle/comm/threads.hpp>

#include "../support/catch.hpp"
#include "../support/rank_check.hpp"

#include <cmath>

namespace hd = heddle;

TEST_CASE(
    "hierarchical all_gather and reduce_scatter are proven for every group size, ragged ones and empty blocks too") {
  for (int size = 1; size <= 24; ++size) {
    std::vector<std::size_t> counts;
    for (int r = 0; r < size; ++r) counts.push_back(static_cast<std::size_t>((r * 7 + 3) % 5));
    for (int group = 0; group <= size; ++group) {
      CAPTURE(size, group);
      const auto rings = hd::verify_blocks(hd::hierarchical{hd::ring{}, hd::ring{}, group}, counts);
      CHECK(std::string(hd::name_of(rings.what)) == "none");
      const auto mixed = hd::verify_blocks(hd::hierarchical{hd::halving_doubling{}, hd::direct{}, group}, counts);
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

TEST_CASE("hierarchical reduce_scatter averages, in ragged groups and float16, too") {
  for (const int group : {2, 3, 4, 6}) {
    hd::threads::run(7, [group](auto& comm) {
      const hd::hierarchical t{hd::ring{}, hd::ring{}, group};
      const std::vector<std::size_t> counts{3, 0, 5, 1, 2, 7, 4};
      std::vector<double> data(22);
      std::vector<hd::float16> half(22, hd::float16(20000.0f));
      for (std::size_t i = 0; i < 22; ++i) data[i] = static_cast<double>(i) * (comm.rank() + 1);
      const auto own =
          hd::reduce_scatter(comm, t, std::span<double>(data), std::span<const std::size_t>(counts), hd::mean{});
      std::size_t at = 0;
      for (int r = 0; r < comm.rank(); ++r) at += counts[static_cast<std::size_t>(r)];
      RANK_CHECK(own.size() == counts[static_cast<std::size_t>(comm.rank())]);
      for (std::size_t i = 0; i < own.size(); ++i) {
        RANK_CHECK(std::abs(own[i] - 4.0 * static_cast<double>(at + i)) <= 1e-12);
      }
      for (const hd::float16 x : hd::reduce_scatter(comm, t, std::span<hd::float16>(half),
                                                    std::span<const std::size_t>(counts), hd::mean{})) {
        RANK_CHECK(std::abs(static_cast<float>(x) - 20000.0) <= 20000.0 * 7 * 0x1p-11);
      }
    });
  }
}

TEST_CASE("counts that wrap around are refused") {
  hd::threads::run(2, [](auto& comm) {
    std::vector<float> data(4);
    const std::vector<std::size_t> counts{static_cast<std::size_t>(-4), 8};
    RANK_CHECK_THROWS_AS(hd::all_gather(comm, hd::ring{}, std::span<float>(data), std::span<const std::size_t>(counts)),
                         hd::argument_error);
  });
}

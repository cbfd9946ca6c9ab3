// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The modes that pairs_test.cpp leaves out, over every topology, with compressors, precisions and policies of
// recomputation that go with them; those without an order of their own on one rank.
#include <heddle/compress/power_sgd.hpp>
#include <heddle/mode/adaptive_period.hpp>
#include <heddle/mode/elastic_sgd.hpp>
#include <heddle/mode/geo_sgd.hpp>
#include <heddle/mode/outer_momentum.hpp>
#include <heddle/trainer/hogwild.hpp>
#include <heddle/trainer/server.hpp>

#include "pairs.hpp"

TEST_CASE("every topology with every other mode, compressors and precisions taking turns") {
  strategies all, alone{.ranks = {1}};
  for (int k = 0; k < any_topology::kinds; ++k) {
    const any_topology t{k};
    all.train(t, hd::error_feedback{any_codec{k % any_codec::kinds}}, hd::diloco{.period = 3, .momentum = 0.5f}, half);
    all.train(t, loose | hd::cast<hd::bfloat16>{}, hd::slow_momentum{.period = 3, .momentum = 0.4f}, brain);
    all.train(t, hd::power_sgd{.rank = 8, .worth = 1.0, .dense_below = 10},
              hd::block_momentum{.period = 3, .momentum = 0.4f});
    all.train(t, hd::cast<hd::float16>{}, hd::elastic_sgd{.period = 3}, brain);
    all.train(t, hd::none{}, hd::geo_sgd{.period = 3}, half);
    all.train(t, hd::cast<hd::bfloat16>{}, hd::geo_sgd{.period = 3});
    all.train(t, tenth, hd::heuristic_average{}, brain);
    alone.train(t, hd::none{}, hd::hogwild<>{});
    alone.train(t, hd::none{}, hd::async_ps{});
    alone.train(t, hd::none{}, hd::async_geo_sgd{.period = 3});
  }
  CHECK(all.seen.size() == 126);
  CHECK(alone.seen.size() == 18);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// One trainer source under every pair of topology and compressor, modes, precisions and policies of recomputation taking
// turns: each against its double-precision reference where it has one, else against the loss it must reach. Topologies,
// codecs and policies are chosen at run time, so that few trainers are compiled. mode_pairs_test.cpp has the other modes.
#include <heddle/compress/power_sgd.hpp>
#include <heddle/compress/random_k.hpp>
#include <heddle/mode/zero1.hpp>
#include <heddle/trainer/server.hpp>

#include "pairs.hpp"

TEST_CASE("every topology with every compressor, each of these pairs in one mode or the other") {
  strategies all;
  const auto each = [&](const auto& c) {
    for (int k = 0; k < any_topology::kinds; ++k) {
      if (k % 2)
        all.train(any_topology{k}, c);
      else
        all.train(any_topology{k}, c, four);
    }
    all.train(hd::native{}, c);
  };
  each(hd::none{});
  each(hd::cast<hd::float16>{});
  each(hd::cast<hd::bfloat16>{});
  each(tenth);
  each(loose | hd::none{});
  each(loose | tenth);
  CHECK(all.seen.size() == 126);
}

TEST_CASE("every topology with every codec, precisions and modes taking turns") {
  strategies all;
  for (int k = 0; k < any_topology::kinds; ++k) {
    const any_topology t{k};
    for (int which = 0; which < any_codec::kinds; ++which) {
      const hd::error_feedback codec{any_codec{which}};
      if ((k + which) % 2)
        all.train(t, codec, hd::every_step{}, half);
      else
        all.train(t, codec, four);
    }
    all.train(t, loose | hd::error_feedback{hd::random_k{.density = 0.3, .dense_below = 10}}, hd::every_step{}, brain);
    all.train(t, hd::power_sgd{.rank = 8, .worth = 1.0, .dense_below = 10}, four, half);
    all.train(t, hd::cast<hd::float16>{}, hd::zero1{}, brain);
    all.train(t, hd::none{}, hd::zero1{}, half);
    all.train(t, hd::none{}, hd::async_ps{.staleness = 0});
  }
  CHECK(all.seen.size() == 162);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/memory/tracking.hpp>
#include <heddle/recompute/chain.hpp>
#include <heddle/recompute/checked.hpp>

#include "../support/catch.hpp"
#include "layers.hpp"

#include <cstddef>
#include <vector>

/// @file
/// What every recompute policy must do. To test your own:
///
///     #include "conformance.hpp"
///     TEST_CASE("my policy conforms") { heddle_test::conforms_to_policy(my_policy{}); }
namespace heddle_test {

/// Random chains of 0 to 40 layers, some sizes 0: the schedule is legal, every layer runs forward and backward as often
/// as the simulator says, memory follows the simulated timeline byte for byte, and the gradients are those without
/// policy.
template <class Policy> void conforms_to_policy(Policy policy) {
  static_assert(heddle::recompute::policy<Policy>);
  for (std::size_t n = 0; n <= 40; ++n) {
    for (unsigned seed = 0; seed < 3; ++seed) {
      INFO("layers " << n << " seed " << seed);
      std::vector<bytes_layer> layers = random_layers(n, 100 * static_cast<unsigned>(n) + seed);
      std::vector<bytes_layer> reference = layers;

      // Without a chain: every activation in a vector of its own.
      const std::vector<unsigned char> x(40, 7);
      std::vector<std::vector<unsigned char>> activations{x}, saved(n);
      for (std::size_t i = 0; i < n; ++i) {
        activations.emplace_back(reference[i].out);
        saved[i].resize(reference[i].kept);
        reference[i].forward(activations[i].data(), activations[i + 1].data(), saved[i].data(), pass::first);
      }
      std::vector<unsigned char> gradient(activations.back().size(), 9);
      const std::vector<unsigned char> top = gradient;
      for (std::size_t i = n; i-- > 0;) {
        std::vector<unsigned char> below(reference[i].in);
        reference[i].backward(activations[i].data(), saved[i].data(), gradient.data(), below.data());
        gradient = below;
      }

      std::vector<heddle::recompute::layer> list(layers.begin(), layers.end());
      heddle::tracking memory{heddle::host_resource{}, {.log = true}};
      heddle::recompute::chain c{heddle::recompute::checked{policy}, memory, list};
      const heddle::recompute::simulation expected = simulate(policy.plan(costs_of(layers)), costs_of(layers));
      std::vector<unsigned char> got(40);
      for (int step = 0; step < 2; ++step) {
        memory.clear_samples();
        memory.reset_peak();
        const void* y = c.forward(x.data());
        const std::size_t size = activations.back().size();
        CHECK((size == 0 || std::memcmp(y, activations.back().data(), size) == 0));
        c.backward(top.data(), n ? got.data() : nullptr);
        CHECK(memory.live() == 0);
        CHECK(memory.peak_bytes() == expected.peak_bytes);
        const auto log = memory.samples();
        REQUIRE(log.size() == expected.timeline.size());
        std::size_t differing = 0;
        for (std::size_t k = 0; k < log.size(); ++k) differing += log[k].bytes != expected.timeline[k].bytes;
        CHECK(differing == 0);
      }
      if (n) CHECK(got == gradient);
      std::size_t again = 0;
      for (const bytes_layer& l : layers) {
        CHECK(l.first == 2);
        CHECK(l.backwards == 2);
        again += static_cast<std::size_t>(l.again);
      }
      CHECK(again == 2 * expected.extra_forwards);
    }
  }
}

}  // namespace heddle_test

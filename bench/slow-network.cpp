// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: time to a fixed loss on Fashion-MNIST over links of 100 Mbit/s, 1 Gbit/s and without a limit, by strategy
// driver: script
// needs: zlib1g-dev zlib.h
// links: z
//
// Four ranks in threads train the perceptron of examples/vision, over links that `throttled` slows down: all links
// under a ring; and, the lines with 2x2, those between two machines of two ranks under a hierarchy. Each line is
//   RATIO <strategy>.<rate>.dense <seconds> <seconds of the faster of dense float and dense float16> s <ratio>
// and above 1 means sooner than both. `automatic` is told what links and memory cost.
// bench/slow-network.sh runs the same on processes of two network namespaces.
#include "support/slow_network.hpp"

#include <heddle/comm/throttled.hpp>

#include <exception>

int main(int count, char** arguments) try {
  namespace hd = heddle;
  if (count != 2) {
    std::fprintf(stderr, "usage: slow-network JSON\n");
    return 2;
  }
  const vision::pictures data = slow_network::images();
  slow_network::contest all(arguments[1]);
  const auto over = [&](const hd::links& costs) {
    return [&data, costs](const auto& plan) {
      slow_network::outcome out;
      hd::threads::run(4, [&](auto& inner) {
        hd::throttled comm(inner.duplicate(), costs);
        const auto mine = slow_network::train(comm, data, plan);
        if (comm.rank() == 0) out = mine;
      });
      return out;
    };
  };
  const struct {
    const char* name;
    double bytes_per_second;
    int turns;
  } rates[] = {{"100Mbit", 12.5e6, 3}, {"1Gbit", 125e6, 3}, {"unlimited", 0.0, 7}};
  for (const auto& rate : rates) {
    const hd::links flat = slow_network::links_of(rate.bytes_per_second);
    all.hold(rate.name, hd::ring{}, flat, rate.turns, over(flat));
  }
  for (const auto& rate : rates) {
    const hd::links machines = slow_network::links_of(rate.bytes_per_second, 2);
    all.hold(std::string("2x2-") + rate.name, hd::hierarchical{hd::ring{}, hd::ring{}, 2}, machines, rate.turns,
             over(machines));
  }
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "slow-network: %s\n", e.what());
  return 1;
}

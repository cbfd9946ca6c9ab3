// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The strategies of bench/slow-network.cpp on MPI processes, two on each of two machines whose link is as slow as
// bench/slow-network.sh made it: slow_network_mpi JSON RATE BYTES-PER-SECOND (0: no limit).
#include "../support/slow_network.hpp"

#include <heddle/comm/mpi.hpp>

#include <cstdlib>
#include <exception>

int main(int count, char** arguments) try {
  namespace hd = heddle;
  if (count != 4) {
    std::fprintf(stderr, "usage: slow_network_mpi JSON RATE BYTES-PER-SECOND\n");
    return 2;
  }
  const double bytes_per_second = std::atof(arguments[3]);
  const vision::pictures data = slow_network::images();
  hd::mpi::run([&](auto& comm) {
    hd::links costs = slow_network::links_of(bytes_per_second, 2);
    costs.inter.shared = hd::sharing::node;
    slow_network::contest all(comm.rank() == 0 ? arguments[1] : "");
    all.hold(std::string("real-") + arguments[2], hd::hierarchical{hd::ring{}, hd::ring{}, 2}, costs,
             bytes_per_second > 0.0 ? 3 : 5, bytes_per_second > 0.0 ? 0 : 20,
             [&](const auto& plan) { return slow_network::train(comm, data, plan); });
  });
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "slow-network: %s\n", e.what());
  return 1;
}

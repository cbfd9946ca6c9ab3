// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "../support/catch.hpp"
#include "rank_check.hpp"
#include "rank_device.cuh"

#include <heddle/collective/mixed_radix.hpp>
#include <heddle/comm/hosted.cuh>
#include <heddle/comm/threads.cuh>
#include <heddle/optim/sgd.hpp>
#include <heddle/trainer/data_parallel.hpp>

namespace hd = heddle;

TEST_CASE("threads on devices: data_parallel trains over them") {
  constexpr std::size_t count = 700, sizes[] = {300, 0, 400};
  constexpr int ranks = 3, steps = 10;
  std::vector<std::vector<float>> trained(ranks);
  // example-begin hosted
  hd::threads::run(ranks, [&](hd::threads::communicator& host) {
    device_test::rank_device device(0);  // a stream on device 0
    hd::hosted comm(hd::threads::device_communicator(host, device.stream()));
    std::vector<float> w(count, 0.5f), g(count);
    hd::data_parallel dp{hd::strategy{.topology = hd::ring{}}, comm, hd::tensors(w.data(), g.data(), sizes), hd::sgd{}};
    for (int s = 0; s < steps; ++s) {
      for (std::size_t i = 0; i < count; ++i) g[i] = w[i] - device_test::element<float>(comm.rank(), i);
      for (std::size_t t = 3; t-- > 0;) dp.ready(t);
      dp.step({.lr = 0.1f});
    }
    trained[static_cast<std::size_t>(comm.rank())] = w;
  });
  // example-end
  const auto goal = device_test::reference<float>(ranks, count, hd::mean{});
  const double left = std::pow(0.9, steps);  // of the distance to the mean of the ranks' goals
  double worst = 0.0;
  for (std::size_t i = 0; i < count; ++i)
    worst = std::fmax(worst, std::fabs(trained[0][i] - (goal[i] + left * (0.5 - goal[i]))));
  CHECK(worst < 1e-5);
  CHECK(trained[1] == trained[0]);
  CHECK(trained[2] == trained[0]);
}

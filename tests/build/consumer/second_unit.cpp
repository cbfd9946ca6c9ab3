// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// A second translation unit with the same headers: linking both shows every definition that is not inline.
#include <heddle/heddle.hpp>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <vector>

namespace hd = heddle;

// Two replicas walk down w^2 / 2 from 1, each with its own noise of mean zero: w halves with every step of rate 1/2.
bool trains() {
  std::atomic<int> right{0};
  const auto plan = hd::strategy{.topology = hd::ring{}};
  hd::threads::run(2, [&](auto& comm) {
    std::vector<float> parameters{1.0f}, gradients{0.0f};
    const std::vector<std::size_t> sizes{1};
    const auto tensors = hd::tensors(parameters.data(), gradients.data(), sizes);
    hd::data_parallel dp{plan, comm, tensors, hd::sgd{}};
    for (int step = 0; step < 10; ++step) {
      gradients[0] = parameters[0] + (comm.rank() == 0 ? 0.25f : -0.25f);
      dp.ready(0);
      dp.step({.lr = 0.5f});
    }
    if (std::abs(parameters[0] - 0x1p-10f) < 1e-6f) ++right;
  });
  return right == 2;
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/throttled.hpp>
#include <heddle/heddle.hpp>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

// Two ranks train twelve layers whose backward takes as long as their communication, on links of a virtual network.
// Compute sleeps: it is somebody else's core, an accelerator. print(what, seconds) is called on every rank, for steps
// that only compute, that compute and then communicate (serial), and that do both at a time (overlapped).
template <class Comm, class Print> void overlapped_training(Comm& comm, Print&& print) {
  namespace hd = heddle;
  using clock_type = std::chrono::steady_clock;
  constexpr std::size_t layers = 12, elements = 25'000;
  constexpr auto backward = std::chrono::milliseconds(5);
  // direct{} on two ranks: two rounds of one message of half a layer, together as long as a layer's backward.
  const hd::link_cost cost{.alpha = 0.1e-3, .beta = (2.5e-3 - 0.1e-3) / (elements / 2 * sizeof(float))};
  std::vector<float> parameters(layers * elements, 1.0f), gradients(layers * elements, 1.0f);
  std::vector<hd::tensor> tensors;
  for (std::size_t i = 0; i < layers; ++i) {
    tensors.push_back({parameters.data() + i * elements, gradients.data() + i * elements, elements, hd::dtype::f32,
                       "layer" + std::to_string(i), 0});
  }
  hd::throttled slow(comm, cost);
  const hd::strategy plan{.topology = hd::direct{}, .buckets = {.first = 1, .cap = 1}};
  hd::data_parallel dp(plan, slow, std::span<const hd::tensor>(tensors), hd::sgd{});
  const auto compute = [&](auto&& layer_done) {
    for (std::size_t i = layers; i-- > 0;) {
      std::this_thread::sleep_for(backward);
      layer_done(i);
    }
  };
  const auto timed = [&](const char* what, auto&& step) {
    hd::barrier(comm);
    const auto start = clock_type::now();
    step();
    hd::barrier(comm);
    print(what, std::chrono::duration<double>(clock_type::now() - start).count());
  };
  for (int s = 0; s < 7; ++s) {
    timed("compute", [&] { compute([](std::size_t) {}); });
    timed("serial", [&] {
      compute([](std::size_t) {});
      for (std::size_t i = layers; i-- > 0;) dp.ready(i);
      dp.step({.lr = 0.1f});
    });
    timed("overlapped", [&] {
      compute([&](std::size_t i) { dp.ready(i); });
      dp.step({.lr = 0.1f});
    });
  }
}

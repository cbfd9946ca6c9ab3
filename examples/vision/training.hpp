// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The training loop: one function, whatever the strategy.

#pragma once

#include <heddle/core/philox.hpp>
#include <heddle/heddle.hpp>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <numbers>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "data.hpp"
#include "model.hpp"

namespace vision {

/// What to train, but not by which strategy.
struct job {
  const pictures& training;
  const pictures& test;
  std::string name;
  std::size_t ranks = 4, epochs = 20, batch = 128, hidden = 128, seed = 1;
  double rate = 0.05;
  bool progress = false;

  std::size_t steps_per_epoch() const { return training.count() / batch; }
  std::size_t steps() const { return epochs * steps_per_epoch(); }
};

struct outcome {
  double loss = 0.0, accuracy = 0.0;  // on the test images
  double seconds = 0.0;
  double bytes_per_step = 0.0;  // that a rank sent
};

/// Linear warm-up over the first epoch, then half a cosine down to 0.
inline double learning_rate(const job& j, std::size_t step) {
  const auto at = static_cast<double>(step), warm = static_cast<double>(j.steps_per_epoch());
  if (at < warm) return j.rate * (at + 1) / warm;
  return j.rate * (1 + std::cos(std::numbers::pi * (at - warm) / (static_cast<double>(j.steps()) - warm))) / 2;
}

/// The order of the images in an epoch, the same on all ranks: a Fisher-Yates shuffle by a counter generator.
inline std::vector<std::uint32_t> order_of(const job& j, std::size_t epoch) {
  std::vector<std::uint32_t> order(j.training.count());
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = order.size(); i-- > 1;) {
    const std::uint64_t random = hd::philox(j.seed, 1000 + epoch, i).word[0];
    std::swap(order[i], order[random * (i + 1) >> 32]);
  }
  return order;
}

/// Trains on all ranks by one strategy; every rank takes its part of each batch.
template <class Plan, class Rule>
outcome train(const job& j, const Plan& plan, const Rule& rule, double rate_factor = 1.0) {
  outcome out;
  hd::threads::run(static_cast<int>(j.ranks), [&](auto& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const std::size_t first = j.batch * rank / j.ranks, mine = j.batch * (rank + 1) / j.ranks - first;
    perceptron model(j.training.pixels, j.hidden, 64, j.seed);
    hd::data_parallel replica{plan, comm, model.tensors(), rule};
    std::vector<float> images(mine * j.training.pixels);
    std::vector<std::uint8_t> labels(mine);
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t step = 0; step < j.steps();) {
      const auto order = order_of(j, step / j.steps_per_epoch());
      double loss = 0.0;
      for (std::size_t b = 0; b < j.steps_per_epoch(); ++b, ++step) {
        for (std::size_t i = 0; i < mine; ++i) {
          const std::size_t from = order[b * j.batch + first + i];
          std::copy_n(j.training.images.data() + from * j.training.pixels, j.training.pixels,
                      images.data() + i * j.training.pixels);
          labels[i] = j.training.labels[from];
        }
        model.use(replica.parameters());
        replica.begin({.samples = static_cast<double>(mine)});
        const auto s = model.run(images.data(), labels.data(), mine, [&](std::size_t i) { replica.ready(i); });
        loss += s.loss / static_cast<double>(j.steps_per_epoch());
        replica.step({.lr = static_cast<float>(learning_rate(j, step) * rate_factor), .loss = s.loss});
      }
      if (j.progress && rank == 0)
        std::fprintf(stderr, "\r\033[K%-16s seed %zu  epoch %zu of %zu  loss %.4f", j.name.c_str(), j.seed,
                     step / j.steps_per_epoch(), j.epochs, loss);
    }
    replica.join();
    if (rank != 0) return;
    out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    out.bytes_per_step = static_cast<double>(replica.report().bytes_sent) / static_cast<double>(j.steps());
    model.use(replica.parameters());
    const auto s = model.run(j.test.images.data(), j.test.labels.data(), j.test.count(), {});
    out.loss = s.loss;
    out.accuracy = static_cast<double>(s.hits) / static_cast<double>(j.test.count());
  });
  if (j.progress) std::fprintf(stderr, "\r\033[K");
  return out;
}

}  // namespace vision

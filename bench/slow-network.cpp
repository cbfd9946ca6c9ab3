// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: time to a fixed loss on Fashion-MNIST over links of 100 Mbit/s, 1 Gbit/s and without a limit, by strategy
// driver: script
// needs: zlib1g-dev zlib.h
// links: z
//
// Four ranks in threads train the perceptron of examples/vision, over links that `throttled` slows down. Each line is
//   RATIO <strategy>.<rate>.dense <seconds> <seconds of the faster of dense float and dense float16> s <ratio>
// and above 1 means sooner than both. Training ends when the loss, averaged over the ranks and the last 20 steps, is
// below 0.55. `automatic` is told what links and memory cost.
#include <heddle/comm/throttled.hpp>
#include <heddle/compress/automatic_compressor.hpp>
#include <heddle/compress/power_sgd.hpp>
#include <heddle/compress/top_k.hpp>

#include <cstdio>
#include <string>
#include <vector>

#include "../examples/vision/training.hpp"

namespace {
namespace hd = heddle;

constexpr int ranks = 4;
constexpr std::size_t batch = 32, window = 20, most_steps = 2000;
constexpr double target = 0.55;

struct outcome {
  double seconds = 0.0;
  std::size_t steps = 0;
  double bytes = 0.0;  // that a rank sent, per step
};

template <class Plan> outcome train(const vision::pictures& data, double bytes_per_second, const Plan& plan) {
  outcome out;
  hd::threads::run(ranks, [&](auto& inner) {
    const hd::link_cost cost{50e-6, bytes_per_second > 0.0 ? 1.0 / bytes_per_second : 0.0};
    hd::throttled comm(inner.duplicate(), bytes_per_second > 0.0 ? cost : hd::link_cost{});
    const auto rank = static_cast<std::size_t>(comm.rank());
    vision::perceptron model(data.pixels, 256, 64, 1);
    hd::data_parallel dp{plan, comm, model.tensors(), hd::sgd{.momentum = 0.9f}};
    std::vector<float> images(batch * data.pixels);
    std::vector<std::uint8_t> labels(batch);
    const auto start = std::chrono::steady_clock::now();
    double loss = 0.0;
    std::size_t step = 0;
    for (; step < most_steps; ++step) {
      for (std::size_t i = 0; i < batch; ++i) {
        const std::size_t from = hd::philox(7, step, rank * batch + i).word[0] % data.count();
        std::copy_n(data.images.data() + from * data.pixels, data.pixels, images.data() + i * data.pixels);
        labels[i] = data.labels[from];
      }
      model.use(dp.parameters());
      dp.begin({.samples = static_cast<double>(batch)});
      loss += model.run(images.data(), labels.data(), batch, [&](std::size_t i) { dp.ready(i); }).loss / window;
      dp.step({.lr = 0.02f});
      if (step % window + 1 < window) continue;
      std::vector<double> mean{loss};
      hd::all_reduce(comm, hd::direct{}, std::span<double>(mean), hd::mean{});
      if (mean[0] < target) break;
      loss = 0.0;
    }
    if (rank != 0) return;
    out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    out.steps = step;
    out.bytes = static_cast<double>(dp.report().bytes_sent) / static_cast<double>(step + 1);
  });
  return out;
}
}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: slow-network JSON\n");
    return 2;
  }
  const std::string folder = "examples/data/fashion-mnist/train9k-";
  const vision::pictures data(folder + "images-idx3-ubyte.gz", folder + "labels-idx1-ubyte.gz");
  const hd::dgc sparse{.sparsity = 0.99, .dense_below = 1024};
  std::FILE* const file = std::fopen(arguments[1], "w");
  if (!file) {
    std::fprintf(stderr, "slow-network: cannot write %s\n", arguments[1]);
    return 1;
  }
  std::fprintf(file, "{\"benchmarks\": [");
  bool first = true;
  const struct {
    const char* name;
    double bytes_per_second;
  } rates[] = {{"100Mbit", 12.5e6}, {"1Gbit", 125e6}, {"unlimited", 0.0}};
  for (const auto& rate : rates) {
    const auto run = [&](const auto& compressor) {
      return train(data, rate.bytes_per_second, hd::strategy{.topology = hd::ring{}, .compressor = compressor});
    };
    hd::links costs;
    costs.intra = {{50e-6, rate.bytes_per_second > 0.0 ? 1.0 / rate.bytes_per_second : 1e-11}, hd::sharing::pair};
    costs.gamma = 2e-10;
    const struct {
      const char* name;
      outcome got;
    } all[] = {{"float", run(hd::none{})},
               {"float16", run(hd::cast<hd::float16>{})},
               {"dgc", run(sparse)},
               {"automatic_dgc", run(hd::automatic_compressor{.compressor = sparse, .costs = costs})},
               {"top_k", run(hd::error_feedback{hd::top_k{.density = 0.01}})},
               {"power_sgd", run(hd::power_sgd{.rank = 4})}};
    const double best = (std::min)(all[0].got.seconds, all[1].got.seconds);
    for (const auto& x : all) {
      std::printf("%s over %s: %zu steps, %.4g bytes a step and rank\n", x.name, rate.name, x.got.steps + 1, x.got.bytes);
      std::printf("RATIO %s.%s.dense %.3g %.3g s %.3f\n", x.name, rate.name, x.got.seconds, best,
                  best / x.got.seconds);
      std::fflush(stdout);
      std::fprintf(file, "%s\n  {\"name\": \"%s.%s\", \"real_time\": %.6g, \"time_unit\": \"s\", \"steps\": %zu}",
                   first ? "" : ",", x.name, rate.name, x.got.seconds, x.got.steps + 1);
      first = false;
    }
  }
  std::fprintf(file, "\n]}\n");
  return std::fclose(file) == 0 ? 0 : 1;
}

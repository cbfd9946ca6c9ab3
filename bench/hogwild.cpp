// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: rows a second of a factorisation machine that threads train without locks, and a model of more threads
// needs: zlib1g-dev zlib.h
// driver: script
// links: z

// bench/hogwild.sh runs this: hogwild [ROWS [REPETITIONS]].
#include <heddle/mode/race.hpp>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <thread>

#include "../examples/ctr/data.hpp"
#include "support/results.hpp"

namespace {
namespace hd = heddle;

constexpr std::size_t width = 16, slots = std::size_t{1} << 20;  // of a feature: a weight and 15 factors; 64 MB

struct spent {
  double clock = 0.0, processor = 0.0;  // seconds; processors' are those of all threads
};

// One thread's part of an epoch, rows t, t + threads, ...: logistic loss of the weights' sum and of products of pairs.
template <class Race>
double learn(const ctr::rows& data, float* table, std::size_t t, std::size_t threads, double& loss) {
  const double start = bench::processor_seconds();
  float own[64 * width], sum[width], move[width];
  for (std::size_t i = t; i < data.size(); i += threads) {
    const std::size_t first = data.begin(i), n = std::min<std::size_t>(data.end(i) - first, 64);
    std::fill_n(sum, width, 0.0f);
    float score = 0.0f, squares = 0.0f;
    for (std::size_t k = 0; k < n; ++k) {
      float* const x = own + k * width;
      Race::read(table + data.indices[first + k] % slots * width, x, width);
      for (std::size_t j = 0; j < width; ++j) sum[j] += x[j];
      for (std::size_t j = 1; j < width; ++j) squares += x[j] * x[j];
    }
    for (std::size_t j = 1; j < width; ++j) score += sum[j] * sum[j];
    score = sum[0] + 0.5f * (score - squares);
    const float wrong = (data.labels[i] > 0.0f ? 1.0f : 0.0f) - 1.0f / (1.0f + std::exp(-score));
    loss -= std::log(std::max(1.0 - std::fabs(static_cast<double>(wrong)), 1e-12));
    for (std::size_t k = 0; k < n; ++k) {
      const float* const x = own + k * width;
      move[0] = 1.0f;
      for (std::size_t j = 1; j < width; ++j) move[j] = sum[j] - x[j];
      Race::add(table + data.indices[first + k] % slots * width, move, 0.02f * wrong, width);
    }
  }
  return bench::processor_seconds() - start;
}

template <class Race> spent epoch(const ctr::rows& data, std::size_t threads, double& loss) {
  std::vector<float> table(slots * width);
  for (std::size_t i = 0; i < table.size(); ++i)
    table[i] = i % width ? 0.02f * (hd::random_uniform(1, 0, i) - 0.5f) : 0.0f;
  std::vector<double> processor(threads), losses(threads);
  const auto start = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> all;
    for (std::size_t t = 0; t < threads; ++t)
      all.emplace_back([&, t] { processor[t] = learn<Race>(data, table.data(), t, threads, losses[t]); });
  }
  spent s{std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
  loss = 0.0;
  for (std::size_t t = 0; t < threads; ++t) s.processor += processor[t], loss += losses[t];
  loss /= static_cast<double>(data.size());
  return s;
}

template <class Race> void compare(const ctr::rows& data, int repetitions) {
  const auto n = static_cast<double>(data.size());
  const auto say = [&](const std::string& name, double ours, double other) {
    std::printf("RATIO %s.%s %.0f %.0f rows/s %.3f\n", name.c_str(), Race::name(), ours, other, ours / other);
    std::fflush(stdout);
  };
  std::vector<double> one, two, ratio, processor, slower;
  double loss[2] = {};
  for (int k = 0; k < repetitions; ++k) {
    const spent a = epoch<Race>(data, 1, loss[0]), b = epoch<Race>(data, 2, loss[1]);
    one.push_back(n / a.clock);
    two.push_back(n / b.clock);
    processor.push_back(n / a.processor);
    slower.push_back(b.processor / a.processor);
  }
  std::printf("%s: log loss over the epoch %.4f by one thread, %.4f by two\n", Race::name(), loss[0], loss[1]);
  say("threads.2", bench::median(two), bench::median(one));
  // A row costs a second of `t` by one thread, and t (1 + c (n - 1)) by n: c is what the second one made both slower,
  // in processor time, which other programs at work don't lengthen.
  const double rate = bench::median(processor), c = std::max(bench::median(slower) - 1.0, 0.0);
  std::printf("%s: cost model, %.0f ns a row, %.3f of it more for each other thread\n", Race::name(), 1e9 / rate, c);
  const auto predicted = [&](int t) { return rate * t / (1.0 + c * (t - 1)); };
  std::printf("%s: two threads ran at %.3f of what the model says\n", Race::name(), bench::median(two) / predicted(2));
  for (const int t : {4, 8, 16}) say("predicted." + std::to_string(t), predicted(t), rate);
}
}  // namespace

int main(int argc, char** argv) {
  ctr::options o;
  o.data = "generated";
  o.rows = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 200'000;
  const int repetitions = argc > 2 ? std::atoi(argv[2]) : 5;
  ctr::rows data;
  const auto from = ctr::data_set(o).open(true, {});
  for (ctr::rows r; from->pop(0, r);)
    for (std::size_t i = 0; i < r.size(); ++i) data.append(r, i);
  compare<hd::vector_asm>(data, repetitions);
  compare<hd::relaxed>(data, repetitions);
}

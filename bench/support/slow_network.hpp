// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Time to a fixed loss by strategy, for ranks of any kind: what slow-network.cpp runs on threads over throttled links,
// and peers/slow_network_mpi.cpp on processes of two network namespaces.

#pragma once

#include <heddle/compress/automatic_compressor.hpp>
#include <heddle/compress/power_sgd.hpp>
#include <heddle/compress/sharded.hpp>
#include <heddle/compress/top_k.hpp>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../examples/vision/training.hpp"

namespace slow_network {
namespace hd = heddle;

struct outcome {
  double seconds = 0.0;
  std::size_t steps = 0;
  double bytes = 0.0;  // that a rank sent, per step
};

/// The images to learn.
inline vision::pictures images() {
  const std::string folder = "examples/data/fashion-mnist/train9k-";
  return vision::pictures(folder + "images-idx3-ubyte.gz", folder + "labels-idx1-ubyte.gz");
}

/// What links of that rate cost, between machines of `node` ranks, or between all ranks; 0 bytes per second: no limit.
inline hd::links links_of(double bytes_per_second, int node = 0) {
  hd::link_class slow{.shared = hd::sharing::pair};
  if (bytes_per_second > 0.0) slow.cost = {50e-6, 1.0 / bytes_per_second};
  return node ? hd::links{.inter = slow, .node = node} : hd::links{.intra = slow};
}

inline double median(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

/// Trains on the ranks of `comm` until the loss, averaged over ranks and the last 20 steps, is below 0.55.
template <class Comm, class Plan> outcome train(Comm& comm, const vision::pictures& data, const Plan& plan) {
  constexpr std::size_t batch = 32, window = 20, look = 10, most_steps = 2000;
  const auto rank = static_cast<std::size_t>(comm.rank());
  vision::perceptron model(data.pixels, 256, 64, 1);
  hd::data_parallel dp{plan, comm, model.tensors(), hd::sgd{.momentum = 0.9f}};
  std::vector<float> pixels(batch * data.pixels);
  std::vector<std::uint8_t> labels(batch);
  const double before = static_cast<double>(dp.report().bytes_sent);
  const auto start = std::chrono::steady_clock::now();
  std::vector<double> losses;
  for (std::size_t step = 0; step < most_steps; ++step) {
    for (std::size_t i = 0; i < batch; ++i) {
      const std::size_t from = hd::philox(7, step, rank * batch + i).word[0] % data.count();
      std::copy_n(data.images.data() + from * data.pixels, data.pixels, pixels.data() + i * data.pixels);
      labels[i] = data.labels[from];
    }
    model.use(dp.parameters());
    dp.begin({.samples = static_cast<double>(batch)});
    losses.push_back(model.run(pixels.data(), labels.data(), batch, [&](std::size_t i) { dp.ready(i); }).loss);
    dp.step({.lr = 0.02f});
    if (step + 1 < window || (step + 1) % look != 0) continue;
    double loss = std::accumulate(losses.end() - window, losses.end(), 0.0) / window;
    hd::all_reduce(comm, hd::direct{}, std::span<double>(&loss, 1), hd::mean{});
    if (loss >= 0.55) continue;
    return {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), step + 1,
            (static_cast<double>(dp.report().bytes_sent) - before) / static_cast<double>(step + 1)};
  }
  throw std::runtime_error("slow-network: the loss isn't reached in 2000 steps");
}

/// All strategies in turn, several times; medians. Prints the lines and adds them to a file in Google Benchmark's form.
class contest {
 public:
  /// @param path The file; empty: none, and nothing is printed.
  explicit contest(const std::string& path) {
    if (path.empty()) return;
    file_ = std::fopen(path.c_str(), "w");
    if (!file_) throw std::runtime_error("slow-network: cannot write " + path);
    std::fprintf(file_, "{\"benchmarks\": [");
  }
  ~contest() {
    if (!file_) return;
    std::fprintf(file_, "\n]}\n");
    std::fclose(file_);
  }
  contest(const contest&) = delete;
  contest& operator=(const contest&) = delete;

  /// @param rate Its name. @param topology Of all strategies; under one with groups sharded DGC, too. @param costs What
  /// automatic is told. @param turns How often. @param more How often the dense ones and automatic besides, where it is
  /// about a few percent of a tenth of a second. @param run run(plan) -> outcome.
  template <class Topology, class Run>
  void hold(const std::string& rate, const Topology& topology, hd::links costs, int turns, int more, Run&& run) {
    costs.gamma = 2e-10;
    const hd::dgc sparse{.sparsity = 0.99, .dense_below = 1024, .values = hd::sparse_values::f16};
    entries_.clear();
    for (int turn = 0; turn < turns + more; ++turn) {
      const auto enter = [&](const char* name, const auto& compressor) {
        add(name, run(hd::strategy{.topology = topology, .compressor = compressor}));
      };
      enter("float", hd::none{});
      enter("float16", hd::cast<hd::float16>{});
      enter("automatic_dgc", hd::automatic_compressor{.compressor = sparse, .costs = costs});
      if (turn >= turns) continue;
      enter("dgc", sparse);
      if constexpr (hd::detail::has_inside<Topology>) enter("sharded_dgc", hd::sharded{sparse});
      enter("top_k", hd::error_feedback{hd::top_k{.density = 0.01}});
      enter("power_sgd", hd::power_sgd{.rank = 4});
    }
    const entry& best = entries_[0].median() < entries_[1].median() ? entries_[0] : entries_[1];
    for (const entry& e : entries_) print(e, rate, best);
  }

  /// @brief Prints a case and adds it to the file; the ratio is the median of those of turns, since neighbours have the
  /// machine alike.
  /// @param seconds Of each turn. @param dense Those of what it is compared with, as many or more. @param steps Each.
  void add_case(const std::string& name, const std::vector<double>& seconds, const std::vector<double>& dense,
                std::size_t steps = 1) {
    std::vector<double> ratios;
    for (std::size_t turn = 0; turn < seconds.size(); ++turn) ratios.push_back(dense[turn] / seconds[turn]);
    std::printf("RATIO %s %.3g %.3g s %.3f\n", name.c_str(), median(seconds), median(dense), median(ratios));
    std::fflush(stdout);
    std::fprintf(file_, "%s\n  {\"name\": \"%s\", \"real_time\": %.6g, \"time_unit\": \"s\", \"steps\": %zu}",
                 first_ ? "" : ",", name.c_str(), median(seconds), steps);
    first_ = false;
  }

 private:
  struct entry {
    std::string name;
    outcome last;
    std::vector<double> seconds;  // of each turn
    double median() const { return slow_network::median(seconds); }
  };

  void add(const char* name, const outcome& o) {
    auto e = std::find_if(entries_.begin(), entries_.end(), [&](const entry& x) { return x.name == name; });
    if (e == entries_.end()) e = entries_.insert(e, entry{name, {}, {}});
    e->last = o;
    e->seconds.push_back(o.seconds);
  }

  void print(const entry& e, const std::string& rate, const entry& best) {
    if (!file_) return;
    std::printf("%s over %s: %zu steps, %.4g bytes a step and rank\n", e.name.c_str(), rate.c_str(), e.last.steps,
                e.last.bytes);
    add_case(e.name + "." + rate + ".dense", e.seconds, best.seconds, e.last.steps);
  }

  std::FILE* file_ = nullptr;
  bool first_ = true;
  std::vector<entry> entries_;
};

}  // namespace slow_network

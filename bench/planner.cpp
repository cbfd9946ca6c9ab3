// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: offline memory planning, published problems against their capacity and training steps against their lower
// bound driver: script
//
// Prints its lines itself, since what it compares are bytes:
//   RATIO minimalloc.<set> <peak> <capacity> bytes <capacity / peak>
//   RATIO trace.<name> <peak> <lower bound> bytes <lower bound / peak>
#include <heddle/memory/lifetimes_csv.hpp>
#include <heddle/memory/search_plan.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace hd = heddle;

namespace {

using clock_type = std::chrono::steady_clock;

double seconds_since(clock_type::time_point start) {
  return std::chrono::duration<double>(clock_type::now() - start).count();
}

struct row {
  std::string name;
  double ours, other, ratio, seconds;
};
std::vector<row> rows;

void ratio(const std::string& name, double ours, double other, double seconds) {
  rows.push_back({name, ours, other, other / ours, seconds});
  std::printf("RATIO %s %.0f %.0f bytes %.4f\n", name.c_str(), ours, other, other / ours);
  std::fflush(stdout);
}

void published(const std::string& folder) {
  constexpr std::size_t capacity = 1048576;
  std::printf("%-12s %8s %12s %12s %12s %9s\n", "set", "buffers", "lower bound", "greedy", "search", "seconds");
  for (const char set : std::string("ABCDEF")) {
    std::ifstream file(folder + "/" + set + ".1048576.csv");
    if (!file) {
      std::printf("SKIP minimalloc.%c there is no %s/%c.1048576.csv\n", set, folder.c_str(), set);
      continue;
    }
    const hd::lifetime_table t = hd::read_lifetimes(file);
    const std::span<const hd::lifetime> all(t.lifetimes);
    const std::size_t greedy = hd::plan_memory(all).peak;
    const auto start = clock_type::now();
    const hd::memory_plan p = hd::search_plan(all, {.target = capacity, .seconds = 60});
    const double took = seconds_since(start);
    std::printf("%-12c %8zu %12zu %12zu %12zu %9.3f\n", set, all.size(), p.lower_bound, greedy, p.peak, took);
    ratio(std::string("minimalloc.") + set, static_cast<double>(p.peak), static_cast<double>(capacity), took);
  }
}

// A step of a chain of layers: what forward keeps is freed in reverse order, each layer has workspaces in both
// directions, the gradient of an activation lives until the layer below is done, those of parameters to the end.
std::vector<hd::lifetime> training_step(unsigned seed, std::size_t layers) {
  std::mt19937 random(seed);
  const auto bytes = [&](std::size_t most) { return 512 * (1 + random() % (most / 512)); };
  std::vector<hd::lifetime> out;
  std::vector<std::vector<std::size_t>> kept(layers);
  std::size_t now = 0;
  const auto begin = [&](std::size_t size) {
    out.push_back({now++, 0, size});
    return out.size() - 1;
  };
  const auto end = [&](std::size_t which) { out[which].last = now++; };
  for (std::size_t l = 0; l < layers; ++l) {
    const std::size_t workspace = begin(bytes(1 << 20));
    for (std::size_t k = 1 + random() % 6; k-- > 0;) kept[l].push_back(begin(bytes(1 << 18)));
    end(workspace);
  }
  std::vector<std::size_t> parameters;
  std::size_t gradient = begin(bytes(1 << 18));
  for (std::size_t l = layers; l-- > 0;) {
    const std::size_t workspace = begin(bytes(1 << 20)), below = begin(bytes(1 << 18));
    parameters.push_back(begin(bytes(1 << 17)));
    end(workspace);
    for (const std::size_t k : kept[l]) end(k);
    end(gradient);
    gradient = below;
  }
  end(gradient);
  for (const std::size_t p : parameters) end(p);
  return out;
}

double percentile(std::vector<double> v, double p) {
  std::sort(v.begin(), v.end());
  return v[static_cast<std::size_t>(p * static_cast<double>(v.size() - 1) + 0.5)];
}

void generated() {
  std::vector<double> at_once, in_time;
  double longest = 0;
  for (unsigned seed = 0; seed < 40; ++seed) {
    for (const std::size_t layers : {8, 16, 32, 64}) {
      const std::vector<hd::lifetime> step = training_step(seed, layers);
      const std::span<const hd::lifetime> all(step);
      const hd::memory_plan quick = hd::search_plan(all, {.seconds = 1e-6 * static_cast<double>(all.size())});
      at_once.push_back(quick.gap());
      const auto start = clock_type::now();
      const std::size_t target = quick.lower_bound + quick.lower_bound / 50;
      in_time.push_back(hd::search_plan(all, {.target = target, .seconds = 1}).gap());
      longest = std::max(longest, seconds_since(start));
    }
  }
  std::printf(
      "%zu generated steps: gap in 1 ms per 1,000 buffers: median %.2f %%, 95th percentile %.2f %%; "
      "largest in 1 s: %.2f %% (the slowest took %.3f s)\n",
      at_once.size(), 100 * percentile(at_once, 0.5), 100 * percentile(at_once, 0.95), 100 * percentile(in_time, 1),
      longest);
  ratio("trace.generated.median", 1e6 * (1 + percentile(at_once, 0.5)), 1e6, 0);
  ratio("trace.generated.p95", 1e6 * (1 + percentile(at_once, 0.95)), 1e6, 0);
  ratio("trace.generated.worst_in_1s", 1e6 * (1 + percentile(in_time, 1)), 1e6, longest);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: planner DATA JSON\n");
    return 2;
  }
  published(arguments[1]);
  generated();
  std::FILE* const file = std::fopen(arguments[2], "w");
  if (!file) {
    std::fprintf(stderr, "planner: cannot write %s\n", arguments[2]);
    return 1;
  }
  std::fprintf(file, "{\"benchmarks\": [");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::fprintf(file, "%s\n  {\"name\": \"%s\", \"ours\": %.0f, \"other\": %.0f, \"ratio\": %.4f, \"seconds\": %.4f}",
                 i ? "," : "", rows[i].name.c_str(), rows[i].ours, rows[i].other, rows[i].ratio, rows[i].seconds);
  }
  std::fprintf(file, "\n]}\n");
  return std::fclose(file) == 0 ? 0 : 1;
}

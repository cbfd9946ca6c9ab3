// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: offline memory planning: published problems against capacity, training steps against their lower bound
// driver: script
//
// Prints its lines itself, since what it compares are bytes:
//   RATIO minimalloc.<set> <peak> <capacity> bytes <capacity / peak>
//   RATIO minimalloc.<set>.bound <peak> <lower bound> bytes <lower bound / peak>   where that is below the capacity
//   RATIO trace.<name> <peak> <lower bound> bytes <lower bound / peak>
#include <heddle/memory/lifetimes_csv.hpp>
#include <heddle/memory/search_plan.hpp>
#include <heddle/recompute/every.hpp>
#include <heddle/recompute/none.hpp>
#include <heddle/recompute/optimal.hpp>
#include <heddle/recompute/promise.hpp>
#include <heddle/recompute/revolve.hpp>
#include <heddle/recompute/sqrt.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/gpt_step.hpp"
#include "support/results.hpp"

namespace hd = heddle;
namespace rc = heddle::recompute;

namespace {

using clock_type = std::chrono::steady_clock;

double seconds_since(clock_type::time_point start) {
  return std::chrono::duration<double>(clock_type::now() - start).count();
}

bench::results found;

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
    found.ratio(std::string("minimalloc.") + set, static_cast<double>(p.peak), static_cast<double>(capacity), "bytes");
    if (p.lower_bound == capacity) continue;
    const hd::memory_plan lower = hd::search_plan(all, {.seconds = 60});
    found.ratio(std::string("minimalloc.") + set + ".bound", static_cast<double>(lower.peak),
                static_cast<double>(lower.lower_bound), "bytes");
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

// Layers of unlike sizes and times.
std::vector<rc::layer_cost> random_chain(unsigned seed, std::size_t layers) {
  std::mt19937 random(seed);
  std::vector<rc::layer_cost> out(layers);
  for (rc::layer_cost& c : out) {
    c.output_bytes = 512 * (1 + random() % 64);
    c.saved_bytes = 512 * (random() % 256);
    c.forward_time = 1 + random() % 10;
    c.backward_time = 2 * c.forward_time;
  }
  return out;
}

double percentile(std::vector<double> v, double p) {
  std::sort(v.begin(), v.end());
  return v[static_cast<std::size_t>(p * static_cast<double>(v.size() - 1) + 0.5)];
}

// Plans of traces, in 1 ms for 1,000 buffers and, to 2 % above the bound, in 1 s.
class gaps {
 public:
  explicit gaps(std::string name) : name_(std::move(name)) {}
  void add(const std::vector<hd::lifetime>& trace) {
    const std::span<const hd::lifetime> all(trace);
    std::vector<double> quick;  // of some, as other programs may interrupt one
    for (int k = 0; k < 5; ++k) {
      quick.push_back(hd::search_plan(all, {.seconds = 1e-6 * static_cast<double>(all.size())}).gap());
    }
    at_once_.push_back(bench::median(quick));
    const auto start = clock_type::now();
    const std::size_t bound = hd::plan_greedy(all).lower_bound, target = bound + bound / 50;
    in_time_.push_back(hd::search_plan(all, {.target = target, .seconds = 1}).gap());
    longest_ = std::max(longest_, seconds_since(start));
    buffers_ = std::max(buffers_, all.size());
  }
  void report() const {
    std::printf(
        "%zu %s steps of up to %zu buffers: gap in 1 ms per 1,000 buffers: median %.2f %%, 95th percentile %.2f %%; "
        "largest in 1 s: %.2f %% (the slowest took %.3f s)\n",
        at_once_.size(), name_.c_str(), buffers_, 100 * percentile(at_once_, 0.5), 100 * percentile(at_once_, 0.95),
        100 * percentile(in_time_, 1), longest_);
    const auto line = [&](const char* what, double gap) {
      found.ratio("trace." + name_ + what, 1e6 * (1 + gap), 1e6, "bytes");
    };
    line(".median", percentile(at_once_, 0.5));
    line(".p95", percentile(at_once_, 0.95));
    line(".worst_in_1s", percentile(in_time_, 1));
  }

 private:
  std::string name_;
  std::vector<double> at_once_, in_time_;
  double longest_ = 0;
  std::size_t buffers_ = 0;
};

// Each policy's schedule for these costs.
template <class Function> void each_policy(const std::vector<rc::layer_cost>& costs, Function&& f) {
  const std::size_t all = rc::simulate(rc::none{}.plan(costs), costs).peak_bytes;
  const std::size_t least = rc::simulate(rc::leanest{}.plan(costs), costs).peak_bytes;
  f("none", rc::none{}.plan(costs));
  f("sqrt", rc::sqrt{}.plan(costs));
  f("every2", rc::every{2}.plan(costs));
  f("full", rc::full{}.plan(costs));
  f("revolve3", rc::revolve{3}.plan(costs));
  f("revolve8", rc::revolve{8}.plan(costs));
  f("leanest", rc::leanest{}.plan(costs));
  f("optimal_half", rc::optimal{(all + least) / 2}.plan(costs));
  f("optimal_eighth", rc::optimal{least + (all - least) / 8}.plan(costs));
}

void recorded() {
  gaps all("recorded");
  for (const bool fine : {false, true}) {
    for (const std::size_t batch : {1, 4}) {
      for (const std::size_t layers : {6, 24}) {
        const gpt::shape dims{
            .vocabulary = 65, .context = 16, .width = 32, .heads = 4, .layers = layers, .batch = batch};
        each_policy(bench::gpt_costs(dims, fine), [&](const std::string& name, const rc::schedule& s) {
          const std::vector<hd::lifetime> trace = bench::gpt_step(dims, fine, s);
          all.add(trace);
          if (batch != 4 || layers != 24) return;
          const hd::memory_plan p = hd::search_plan(std::span<const hd::lifetime>(trace), {.seconds = 1});
          found.ratio(std::string("trace.gpt.") + (fine ? "fine." : "block.") + name, static_cast<double>(p.peak),
                      static_cast<double>(p.lower_bound), "bytes");
        });
      }
    }
  }
  all.report();
}

void generated() {
  gaps plain("generated"), again("recomputed");
  for (unsigned seed = 0; seed < 40; ++seed) {
    for (const std::size_t layers : {8, 16, 32, 64}) {
      plain.add(training_step(seed, layers));
      if (seed >= 10) continue;
      const std::vector<rc::layer_cost> costs = random_chain(seed, layers);
      each_policy(costs, [&](const std::string&, const rc::schedule& s) { again.add(rc::lifetimes(s, costs)); });
    }
  }
  plain.report();
  again.report();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: planner DATA JSON\n");
    return 2;
  }
  recorded();
  generated();
  published(arguments[1]);
  return found.write(arguments[2]) ? 0 : 1;
}

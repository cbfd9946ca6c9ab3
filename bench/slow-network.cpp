// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: time to a fixed loss on Fashion-MNIST over links of 100 Mbit/s, 1 Gbit/s and without a limit, by strategy
// driver: script
// needs: zlib1g-dev zlib.h
// links: z
//
// Four ranks in threads train the perceptron of examples/vision, over links that `throttled` slows down: all links
// under a ring; and, the lines with 2x2, those between two machines of two ranks under a hierarchy. Each line is
//   RATIO <strategy>.<rate>.dense <seconds> <seconds of the faster of dense float and dense float16> s <ratio>
// and above 1 means sooner than both. `automatic` is told what links and memory cost. First, of one rank, the processor
// time of a training step under automatic DGC and under none, in turn: RATIO automatic_dgc.step.dense.
// bench/slow-network.sh runs the same on processes of two network namespaces.
#include "support/slow_network.hpp"

#include <heddle/comm/self.hpp>
#include <heddle/comm/throttled.hpp>

#include <ctime>
#include <exception>

namespace {
namespace hd = heddle;

// A replica of one rank whose links have no limit, so that nothing is ever compressed.
template <class Plan> class lone {
 public:
  lone(const vision::pictures& data, const Plan& plan)
      : data_(data), model_(data.pixels, 256, 64, 1), dp_(plan, comm_, model_.tensors(), hd::sgd{.momentum = 0.9f}) {}
  // Processor time of a step, whatever else the machine does.
  double step(std::size_t at) {
    constexpr std::size_t batch = 32;
    const std::size_t from = at * batch % (data_.count() - batch);
    const double start = now();
    model_.use(dp_.parameters());
    dp_.begin({.samples = static_cast<double>(batch)});
    model_.run(data_.images.data() + from * data_.pixels, data_.labels.data() + from, batch,
               [&](std::size_t i) { dp_.ready(i); });
    dp_.step({.lr = 0.02f});
    return now() - start;
  }

 private:
  static double now() {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
  const vision::pictures& data_;
  hd::self comm_;
  vision::perceptron model_;
  hd::data_parallel<Plan, hd::self, hd::sgd> dp_;
};

void steps(slow_network::contest& all, const vision::pictures& data) {
  const hd::dgc sparse{.sparsity = 0.99, .dense_below = 1024};
  lone plain(data, hd::strategy{.compressor = hd::none{}});
  lone automatic(data, hd::strategy{.compressor = hd::automatic_compressor{.compressor = sparse}});
  std::vector<double> ours, dense;
  for (std::size_t at = 0; at < 1000; ++at) {
    if (at % 2) dense.push_back(plain.step(at));  // whoever is second finds the images in the cache
    ours.push_back(automatic.step(at));
    if (at % 2 == 0) dense.push_back(plain.step(at));
  }
  all.add_case("automatic_dgc.step.dense", ours, dense);
}
}  // namespace

int main(int count, char** arguments) try {
  if (count != 2 && count != 3) {
    std::fprintf(stderr, "usage: slow-network JSON [RATE]\n");
    return 2;
  }
  const std::string only = count == 3 ? arguments[2] : "";
  const vision::pictures data = slow_network::images();
  slow_network::contest all(arguments[1]);
  const auto over = [&](const hd::links& costs) {
    return [&data, costs](const auto& plan) {
      slow_network::outcome out;
      hd::threads::run(4, [&](auto& inner) {
        hd::throttled comm(inner.duplicate(), costs);
        const auto mine = slow_network::train(comm, data, plan);
        if (comm.rank() == 0) out = mine;
      });
      return out;
    };
  };
  if (only.empty() || only == "step") steps(all, data);
  const struct {
    const char* name;
    double bytes_per_second;
    int turns, more;
  } rates[] = {{"100Mbit", 12.5e6, 3, 0}, {"1Gbit", 125e6, 3, 0}, {"unlimited", 0.0, 5, 60}};
  for (const auto& rate : rates) {
    const hd::links flat = slow_network::links_of(rate.bytes_per_second);
    if (only.empty() || only == rate.name) all.hold(rate.name, hd::ring{}, flat, rate.turns, rate.more, over(flat));
  }
  for (const auto& rate : rates) {
    const std::string name = std::string("2x2-") + rate.name;
    const hd::links machines = slow_network::links_of(rate.bytes_per_second, 2);
    if (only.empty() || only == name)
      all.hold(name, hd::hierarchical{hd::ring{}, hd::ring{}, 2}, machines, rate.turns, rate.more, over(machines));
  }
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "slow-network: %s\n", e.what());
  return 1;
}

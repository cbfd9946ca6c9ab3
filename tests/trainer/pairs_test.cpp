// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// One trainer source under every pair of topology and compressor, modes and precisions taking turns: each against its
// double-precision reference where it has one, else against the loss it must reach. Topologies and codecs are chosen at
// run time, so that few trainers are compiled.
#include <heddle/compress/power_sgd.hpp>
#include <heddle/compress/random_k.hpp>
#include <heddle/mode/zero1.hpp>
#include <heddle/trainer/server.hpp>

#include "any_codec.hpp"
#include "support.hpp"

#include <utility>

namespace {
// The quadratic in the precision's element type, as a user's model would be.
template <class Plan> std::vector<std::vector<float>> train_any(const Plan& plan, int ranks, std::size_t steps) {
  using element = typename decltype(plan.precision)::element;
  std::vector<std::vector<float>> out(static_cast<std::size_t>(ranks));
  hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
    std::vector<element> w(quadratic::count, element(0.5f)), g(quadratic::count);
    std::vector<double> wide(quadratic::count), mean(quadratic::count);
    hd::data_parallel dp{plan, comm, hd::tensors(w.data(), g.data(), quadratic::sizes), hd::sgd{.momentum = 0.5f}};
    for (std::size_t s = 0; s < steps; ++s) {
      for (std::size_t i = 0; i < w.size(); ++i) wide[i] = static_cast<double>(static_cast<float>(w[i]));
      quadratic::gradient(wide.data(), mean.data(), first_sample(s, comm.rank(), ranks, 2), 2);
      for (std::size_t i = 0; i < w.size(); ++i) g[i] = element(static_cast<float>(mean[i]) * dp.loss_scale());
      dp.begin({.samples = 2.0});
      for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
      dp.step({.lr = 0.05f});
    }
    dp.join();
    for (const element x : w) out[static_cast<std::size_t>(comm.rank())].push_back(static_cast<float>(x));
  });
  return out;
}

template <class Topology, class Compressor, class Mode = hd::every_step, class Precision = hd::full_precision>
void trains(const Topology& t, const Compressor& c, const Mode& m = {}, const Precision& p = {}) {
  for (const int ranks : {1, 3, 4}) {
    const auto w = train_any(hd::strategy{.topology = t, .compressor = c, .mode = m, .precision = p}, ranks, 60);
    CAPTURE(ranks, c.name(), m.name(), p.name());
    CHECK(all_equal(w));
    using last = hd::detail::last_part<Compressor>;
    if constexpr (hd::elementwise_compressor<last> && Mode::averages != hd::average::parameters) {
      const bool floats = std::is_same_v<last, hd::none> && std::is_same_v<Precision, hd::full_precision>;
      CHECK(distance(w[0], reference(ranks, 60, 2, momentum_oracle(static_cast<double>(0.05f), 0.5, 0.0, false))) < (floats ? 1e-5 : 2e-2));
    }
    CHECK(quadratic::loss(w[0]) < 0.5 * quadratic::loss(std::vector<float>(quadratic::count, 0.5f)));
  }
}

const hd::dgc tenth{.sparsity = 0.8, .dense_below = 10};
const hd::clip loose{.max_norm = 50.0f};
const hd::local_sgd four{.period = 4};
const hd::mixed<hd::float16> half{.scale = 256.0f};
const hd::mixed<hd::bfloat16> brain{};
}  // namespace

TEST_CASE("every topology with every compressor, each of these pairs in one mode or the other") {
  const auto each = [](const auto& c) {
    for (int k = 0; k < any_topology::kinds; ++k) {
      if (k % 2)
        trains(any_topology{k}, c);
      else
        trains(any_topology{k}, c, four);
    }
    trains(hd::native{}, c);
  };
  each(hd::none{});
  each(hd::cast<hd::float16>{});
  each(hd::cast<hd::bfloat16>{});
  each(tenth);
  each(loose | hd::none{});
  each(loose | tenth);
}

TEST_CASE("every topology with every codec, precisions and modes taking turns") {
  for (int k = 0; k < any_topology::kinds; ++k) {
    const any_topology t{k};
    for (int which = 0; which < any_codec::kinds; ++which) {
      const hd::error_feedback codec{any_codec{which}};
      if ((k + which) % 2)
        trains(t, codec, hd::every_step{}, half);
      else
        trains(t, codec, four);
    }
    trains(t, loose | hd::error_feedback{hd::random_k{.density = 0.3, .dense_below = 10}}, hd::every_step{}, brain);
    trains(t, hd::power_sgd{.rank = 8, .worth = 1.0, .dense_below = 10}, four, half);
    trains(t, hd::cast<hd::float16>{}, hd::zero1{}, brain);
    trains(t, hd::none{}, hd::zero1{}, half);
    trains(t, hd::none{}, hd::async_ps{.staleness = 0});
  }
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/chain.hpp>
#include <heddle/recompute/every.hpp>
#include <heddle/recompute/optimal.hpp>
#include <heddle/recompute/sqrt.hpp>
#include <heddle/trainer/data_parallel.hpp>

#include "any_codec.hpp"
#include "support.hpp"

#include <set>
#include <utility>

// A policy chosen at run time, so that few chains are compiled.
struct any_policy {
  int which = 0;
  static constexpr int kinds = 5;

  hd::recompute::schedule plan(std::span<const hd::recompute::layer_cost> costs) const {
    switch (which) {
      case 1: return hd::recompute::every{2}.plan(costs);
      case 2: return hd::recompute::sqrt{}.plan(costs);
      case 3: return hd::recompute::full{}.plan(costs);
      case 4: return hd::recompute::optimal{.budget = 50000}.plan(costs);  // of 58,296 without
    }
    return hd::recompute::none{}.plan(costs);
  }
};

// One tensor of the quadratic as a layer of a chain: it puts what the tensor is off its samples into its place of a
// vector that all layers hand on. What backward needs of that is saved, so it is computed again where the policy says.
struct quadratic_layer {
  const std::vector<double>* w;
  std::size_t begin, n;
  const std::pair<std::size_t, std::size_t>* samples;  // the first, and how many
  std::function<void(const double*)> ready;            // with the gradient

  std::size_t output_bytes() const { return quadratic::count * sizeof(double); }
  std::size_t saved_bytes() const { return n * sizeof(double); }
  void forward(const void* in, void* out, void* saved, hd::recompute::pass) const {
    double* const y = static_cast<double*>(out);
    std::copy_n(static_cast<const double*>(in), quadratic::count, y);
    for (std::size_t i = begin; i < begin + n; ++i) {
      double sum = 0.0;
      for (std::size_t s = samples->first; s < samples->first + samples->second; ++s)
        sum += (*w)[i] - quadratic::target(i) - quadratic::noise(s, i);
      y[i] = sum / static_cast<double>(samples->second);
    }
    if (saved) std::copy_n(y + begin, n, static_cast<double*>(saved));
  }
  void backward(const void*, const void* saved, const void* grad_out, void* grad_in) const {
    const double *const g = static_cast<const double*>(grad_out), *const off = static_cast<const double*>(saved);
    RANK_CHECK(std::equal(off, off + n, g + begin));  // the loss is half its square
    if (grad_in) std::copy_n(g, quadratic::count, static_cast<double*>(grad_in));
    ready(g + begin);
  }
};

// The quadratic in the precision's element type, as a user's model would be.
template <class Plan> std::vector<std::vector<float>> train_any(const Plan& plan, int ranks, std::size_t steps) {
  using element = typename decltype(plan.precision)::element;
  std::vector<std::vector<float>> out(static_cast<std::size_t>(ranks));
  hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
    std::vector<element> w(quadratic::count, element(0.5f)), g(quadratic::count);
    std::vector<double> wide(quadratic::count);
    const auto tensors = hd::tensors(w.data(), g.data(), quadratic::sizes);
    hd::data_parallel dp{plan, comm, tensors, hd::sgd{.momentum = 0.5f}};
    std::pair<std::size_t, std::size_t> samples;
    std::vector<quadratic_layer> layers;
    std::size_t begin = 0;
    for (std::size_t t = 0; t < tensors.size(); begin += tensors[t++].count) {
      layers.push_back({&wide, begin, tensors[t].count, &samples, [&, t](const double* mean) {
                          element* const to = static_cast<element*>(tensors[t].gradient);
                          for (std::size_t i = 0; i < tensors[t].count; ++i)
                            to[i] = element(static_cast<float>(mean[i]) * dp.loss_scale());
                          dp.ready(t);
                        }});
    }
    hd::recompute::chain chain{plan.recompute, hd::host_resource{},
                               std::vector<hd::recompute::layer>(layers.begin(), layers.end())};
    const std::vector<double> start(quadratic::count);
    for (std::size_t s = 0; s < steps; ++s) {
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        for (std::size_t i = 0; i < tensors[t].count; ++i)
          wide[layers[t].begin + i] = static_cast<double>(static_cast<float>(dp.parameters()[t][i]));
      }
      samples = {first_sample(s, comm.rank(), ranks, 2), 2};
      dp.begin({.samples = 2.0});
      const auto* const y = static_cast<const double*>(chain.forward(start.data()));
      const std::vector<double> top(y, y + quadratic::count);
      chain.backward(top.data(), nullptr);
      dp.step({.lr = 0.05f});
    }
    dp.join();
    for (const element x : w) out[static_cast<std::size_t>(comm.rank())].push_back(static_cast<float>(x));
  });
  return out;
}

// The strategies that a case has trained, and the policy that is next in turn.
struct strategies {
  std::set<std::string> seen{};
  int turn = 0;
  std::vector<int> ranks{1, 3, 4};

  template <class Topology, class Compressor, class Mode = hd::every_step, class Precision = hd::full_precision>
  void train(const Topology& t, const Compressor& c, const Mode& m = {}, const Precision& p = {}) {
    for (const int n : ranks) {
      const any_policy again{turn++ % any_policy::kinds};
      const auto w =
          train_any(hd::strategy{.topology = t, .compressor = c, .mode = m, .precision = p, .recompute = again}, n, 60);
      CAPTURE(n, c.name(), m.name(), p.name(), again.which);
      CHECK(all_equal(w));
      using last = hd::detail::last_part<Compressor>;
      if constexpr (hd::elementwise_compressor<last> && Mode::averages != hd::average::parameters) {
        const bool floats = std::is_same_v<last, hd::none> && std::is_same_v<Precision, hd::full_precision>;
        const auto oracle = momentum_oracle(static_cast<double>(0.05f), 0.5, 0.0, false);
        CHECK(distance(w[0], reference(n, 60, 2, oracle)) < (floats ? 1e-5 : 2e-2));
      }
      CHECK(quadratic::loss(w[0]) < 0.5 * quadratic::loss(std::vector<float>(quadratic::count, 0.5f)));
      std::string name = t.name();
      if constexpr (requires { t.which; }) name += std::to_string(t.which);
      if constexpr (requires { last_codec(c).which; }) name += std::to_string(last_codec(c).which);
      seen.insert(name + c.name() + m.name() + p.name() + std::to_string(again.which));
    }
  }

 private:
  template <class Codec> static const Codec& last_codec(const hd::error_feedback<Codec>& e) { return e.codec; }
};

inline const hd::dgc tenth{.sparsity = 0.8, .dense_below = 10};
inline const hd::clip loose{.max_norm = 50.0f};
inline const hd::local_sgd four{.period = 4};
inline const hd::mixed<hd::float16> half{.scale = 256.0f};
inline const hd::mixed<hd::bfloat16> brain{};

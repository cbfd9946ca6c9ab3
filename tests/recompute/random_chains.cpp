// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Random chains that compute: lengths, skips, layers that share parameters, dropout, micro-batches, and random policies.
// Gradients must have the bits that plain loops over the layers give, memory the peak that was simulated.

#include <heddle/memory/tracking.hpp>
#include <heddle/recompute/chain.hpp>
#include <heddle/recompute/checked.hpp>
#include <heddle/recompute/every.hpp>
#include <heddle/recompute/none.hpp>
#include <heddle/recompute/offload.hpp>
#include <heddle/recompute/optimal.hpp>
#include <heddle/recompute/revolve.hpp>
#include <heddle/recompute/selective.hpp>
#include <heddle/recompute/sqrt.hpp>

#include "../support/catch.hpp"
#include "layers.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace {
namespace hd = heddle;
namespace rc = heddle::recompute;
using heddle_test::mix;
using numbers = std::vector<double>;

/// y[i] = tanh of the sum over inputs r of w[i + r] x_r[i], indices modulo sizes, then dropout.
struct mixing {
  std::vector<std::size_t> reads;  // sizes of its inputs
  std::size_t out = 1, parameter = 0, room = 0, back_room = 0;
  bool saves = false, only_once = false;
  double time = 1, restoring = 0;
  std::vector<numbers>*w = nullptr, *g = nullptr;
  std::uint64_t seed = 0, step = 0;

  std::size_t output_bytes() const { return out * sizeof(double); }
  std::size_t saved_bytes() const { return saves ? out * sizeof(double) : 0; }
  std::size_t forward_workspace() const { return room * sizeof(double); }
  std::size_t backward_workspace() const { return back_room * sizeof(double); }
  double forward_time() const { return time; }
  double backward_time() const { return 2 * time; }
  double restore_time() const { return restoring; }
  bool once() const { return only_once; }

  bool stays(std::size_t i) const { return mix(seed ^ mix(step ^ mix(i))) % 4 != 0; }
  double value(rc::inputs in, std::size_t i) const {
    const numbers& weights = (*w)[parameter];
    double sum = 0.1;
    for (std::size_t r = 0; r < reads.size(); ++r)
      sum += weights[(i + r) % weights.size()] * static_cast<const double*>(in[r])[i % reads[r]];
    return std::tanh(sum);
  }
  void forward(rc::inputs in, void* y, void* saved, rc::pass kind, void* workspace) {
    if (kind == rc::pass::first) ++step;
    for (std::size_t i = 0; i < room; ++i) static_cast<double*>(workspace)[i] = 1e300;
    for (std::size_t i = 0; i < out; ++i) {
      const double v = value(in, i);
      if (saved && saves) static_cast<double*>(saved)[i] = v;
      static_cast<double*>(y)[i] = stays(i) ? v : 0;
    }
  }
  void restore(rc::inputs in, void* saved, void*) {
    for (std::size_t i = 0; saves && i < out; ++i) static_cast<double*>(saved)[i] = value(in, i);
  }
  void backward(rc::inputs in, const void* saved, const void* gy, rc::input_gradients gx, void* workspace) {
    for (std::size_t i = 0; i < back_room; ++i) static_cast<double*>(workspace)[i] = -1e300;
    const numbers& weights = (*w)[parameter];
    for (std::size_t r = 0; r < reads.size(); ++r) {
      for (std::size_t i = 0; gx[r] && i < reads[r]; ++i) static_cast<double*>(gx[r])[i] = 0;
    }
    for (std::size_t i = 0; i < out; ++i) {
      if (!stays(i)) continue;
      const double v = saves ? static_cast<const double*>(saved)[i] : value(in, i);
      const double d = static_cast<const double*>(gy)[i] * (1 - v * v);
      for (std::size_t r = 0; r < reads.size(); ++r) {
        const std::size_t k = (i + r) % weights.size(), j = i % reads[r];
        (*g)[parameter][k] += d * static_cast<const double*>(in[r])[j];
        if (gx[r]) static_cast<double*>(gx[r])[j] += d * weights[k];
      }
    }
  }
  void add_gradient(const void* more, void* sum) const {
    for (std::size_t i = 0; i < out; ++i) static_cast<double*>(sum)[i] += static_cast<const double*>(more)[i];
  }
};

struct model {
  std::vector<numbers> w, g;
  std::vector<mixing> layers;
  std::vector<std::vector<std::size_t>> also;

  model(std::size_t n, std::mt19937& random) : layers(n), also(n) {
    for (std::size_t p = 0; p < 1 + n / 2; ++p) {  // fewer parameters than layers
      w.emplace_back(1 + random() % 7);
      for (double& v : w.back()) v = static_cast<double>(random() % 2001) / 1000 - 1;
    }
    clear();
    for (std::size_t i = 0; i < n; ++i) {
      mixing& l = layers[i];
      l.reads.push_back(i ? layers[i - 1].out : input);
      for (std::size_t j = 0; j + 1 < i; ++j) {
        if (random() % (2 * i) != 0) continue;
        also[i].push_back(j);
        l.reads.push_back(layers[j].out);
      }
      l.out = 1 + random() % 30;
      l.parameter = random() % w.size();
      l.room = random() % 2 ? random() % 40 : 0;
      l.back_room = random() % 2 ? random() % 40 : 0;
      l.saves = random() % 3 != 0;
      l.only_once = random() % 8 == 0;
      l.time = 1 + random() % 4;
      if (random() % 2) l.restoring = l.time / 2;
      l.seed = random();
    }
    adopt();
  }
  model(const model& other) : w(other.w), g(other.g), layers(other.layers), also(other.also) { adopt(); }
  model& operator=(const model&) = delete;

  void adopt() {
    for (mixing& l : layers) l.w = &w, l.g = &g;
  }
  void clear() {
    g.clear();
    for (const numbers& v : w) g.emplace_back(v.size());
  }
  std::vector<rc::layer> list() {
    std::vector<rc::layer> all;
    for (std::size_t i = 0; i < layers.size(); ++i) all.emplace_back(layers[i], "layer" + std::to_string(i), also[i]);
    return all;
  }

  /// Forward and backward with everything kept, without a chain; returns the gradient of the input.
  numbers plain(const numbers& x, const numbers& top) {
    const std::size_t n = layers.size();
    std::vector<numbers> outputs(n), saved(n), gradients(n);
    numbers room(40);
    const auto in = [&](std::size_t i) {
      std::vector<const void*> all{i ? outputs[i - 1].data() : x.data()};
      for (const std::size_t j : also[i]) all.push_back(outputs[j].data());
      return all;
    };
    for (std::size_t i = 0; i < n; ++i) {
      outputs[i].resize(layers[i].out);
      saved[i].resize(layers[i].out);
      layers[i].forward(in(i), outputs[i].data(), saved[i].data(), rc::pass::first, room.data());
    }
    gradients[n - 1] = top;
    for (std::size_t i = n; i-- > 0;) {
      std::vector<numbers> parts;
      for (const std::size_t size : layers[i].reads) parts.emplace_back(size);
      std::vector<void*> to;
      for (numbers& p : parts) to.push_back(p.data());
      layers[i].backward(in(i), saved[i].data(), gradients[i].data(), to, room.data());
      if (i == 0) return parts[0];
      for (std::size_t r = 0; r < parts.size(); ++r) {
        const std::size_t from = r == 0 ? i - 1 : also[i][r - 1];
        if (gradients[from].empty())
          gradients[from] = parts[r];
        else
          layers[from].add_gradient(parts[r].data(), gradients[from].data());
      }
    }
    return {};
  }

  static constexpr std::size_t input = 5;
};

/// Some policy's schedule; `which` counts policies.
rc::schedule random_plan(std::span<const rc::layer_cost> costs, unsigned which, std::mt19937& random) {
  const std::uint64_t mask = mix(random());
  const auto some = [mask](std::size_t i, const rc::layer_cost&) { return (mask >> i % 64 & 1) != 0; };
  const std::size_t least = rc::simulate(rc::leanest{}.plan(costs), costs).peak_bytes;
  const std::size_t most = rc::simulate(rc::none{}.plan(costs), costs).peak_bytes;
  switch (which % 9) {
    case 0: return rc::none{}.plan(costs);
    case 1: return rc::sqrt{}.plan(costs);
    case 2: return rc::every{1 + random() % 5}.plan(costs);
    case 3: return rc::revolve{1 + random() % 5}.plan(costs);
    case 4: return rc::selective{some}.plan(costs);
    case 5: return rc::leanest{}.plan(costs);
    case 6: return rc::optimal{least + (most > least ? random() % (most - least) : 0)}.plan(costs);
    case 7: return rc::offload{.policy = rc::every{1 + random() % 4}, .ahead = 1 + random() % 3}.plan(costs);
    default: return rc::offload{.policy = rc::selective{some}, .which = some}.plan(costs);
  }
}

bool same_bits(const numbers& a, const numbers& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

template <class Policy> void conforms(model recomputed, model kept, Policy policy, std::mt19937& random) {
  hd::tracking memory{hd::host_resource{}};
  rc::chain c{policy, memory, recomputed.list(), rc::offload_store<>{}};
  const auto draw = [&](std::size_t n) {
    numbers all(n);
    for (double& v : all) v = static_cast<double>(random() % 4001) / 1000 - 2;
    return all;
  };
  for (int step = 0; step < 2; ++step) {
    recomputed.clear();
    kept.clear();
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      const numbers x = draw(model::input), top = draw(recomputed.layers.back().out);
      numbers got(model::input);
      memory.reset_peak();
      c.forward(x.data());
      c.backward(top.data(), got.data());
      CHECK(memory.live() == 0);
      CHECK(memory.peak_bytes() == c.simulated().peak_bytes);
      CHECK(same_bits(got, kept.plain(x, top)));
    }
    for (std::size_t p = 0; p < kept.w.size(); ++p) CHECK(same_bits(recomputed.g[p], kept.g[p]));
  }
}
}  // namespace

TEST_CASE("random chains with skips and shared parameters: the bits of plain loops, the simulated peak",
          "[recompute][random]") {
  std::size_t again = 0, skips = 0, tied = 0, copied = 0;
  for (unsigned seed = 0; seed < 360; ++seed) {
    std::mt19937 random(seed);
    const std::size_t n = 1 + random() % 18;
    INFO("seed " << seed << " layers " << n);
    model made(n, random);
    std::vector<rc::layer_cost> costs;
    for (const rc::layer& l : made.list()) costs.push_back(l.cost());
    const rc::schedule plan = random_plan(costs, seed, random);
    INFO(to_string(plan));
    if (seed % 2)
      conforms(made, made, plan, random);
    else
      conforms(made, made, rc::checked{plan}, random);
    const rc::simulation s = rc::simulate(plan, costs);
    again += s.extra_forwards;
    copied += s.copied_bytes;
    for (const auto& also : made.also) skips += also.size();
    tied += n - std::min(n, made.w.size());
  }
  CHECK(again > 500);
  CHECK(skips > 200);
  CHECK(tied > 500);
  CHECK(copied > 10000);
}

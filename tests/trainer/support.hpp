// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/heddle.hpp>

#include "../support/catch.hpp"
#include "../support/rank_check.hpp"

#include <array>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include <unistd.h>

namespace hd = heddle;

// A topology chosen at run time, so that few trainers are compiled.
struct any_topology {
  int which = 0;
  static constexpr int kinds = 6;

  template <class Function>
  hd::schedule visit(Function&& f) const {
    switch (which) {
      case 1: return f(hd::torus_2d{});
      case 2: return f(hd::halving_doubling{});
      case 3: return f(hd::hierarchical{hd::ring{}, hd::direct{}, 3});
      case 4: return f(hd::direct{});
      case 5: return f(hd::mixed_radix{});
    }
    return f(hd::ring{});
  }
  std::string name() const { return "any"; }
  hd::schedule all_reduce(int rank, int size, std::size_t n) const {
    return visit([&](auto t) { return t.all_reduce(rank, size, n); });
  }
  hd::schedule reduce_scatter(int rank, int size, std::span<const hd::interval> b) const {
    return visit([&](auto t) { return t.reduce_scatter(rank, size, b); });
  }
  hd::schedule all_gather(int rank, int size, std::span<const hd::interval> b) const {
    return visit([&](auto t) { return t.all_gather(rank, size, b); });
  }
};

// A model whose gradient has a closed form: loss of sample s is |w - target - noise(s)|^2 / 2. Five tensors, one empty.
struct quadratic {
  static constexpr std::array<std::size_t, 5> sizes{7, 0, 1000, 1, 33};
  static constexpr std::size_t count = 1041;

  std::vector<float> w = std::vector<float>(count, 0.5f), g = std::vector<float>(count, 0.0f);

  std::vector<hd::tensor> tensors() { return hd::tensors(w.data(), g.data(), sizes); }

  static double hash(std::uint64_t a, std::uint64_t b) {  // uniform in [-1, 1)
    std::uint64_t z = a * 0x9e3779b97f4a7c15ull + b * 0xd1342543de82ef95ull + 0x632be59bd9b4e019ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return static_cast<double>(z >> 11) * 0x1p-52 - 1.0;
  }
  static double target(std::size_t i) { return hash(1, i); }
  static double noise(std::size_t sample, std::size_t i) { return 0.3 * hash(sample + 2, i); }

  // Mean gradient over samples [first, first + n).
  template <class Real>
  static void gradient(const Real* w, Real* g, std::size_t first, std::size_t n) {
    for (std::size_t i = 0; i < count; ++i) {
      double sum = 0.0;
      for (std::size_t s = first; s < first + n; ++s) sum += static_cast<double>(w[i]) - target(i) - noise(s, i);
      g[i] = static_cast<Real>(n ? sum / static_cast<double>(n) : 0.0);
    }
  }
  static double loss(const std::vector<float>& w) {
    double sum = 0.0;
    for (std::size_t i = 0; i < count; ++i) sum += (w[i] - target(i)) * (w[i] - target(i));
    return sum / count;
  }
};

// Sample numbers of a step: each rank takes `batch` of the step's `ranks * batch`.
inline std::size_t first_sample(std::size_t step, int rank, int ranks, std::size_t batch) {
  return (step * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(rank)) * batch;
}

// One training step as a user writes it.
template <class Trainer>
hd::step_result train_step(Trainer& dp, quadratic& m, std::size_t first, std::size_t n, float lr) {
  dp.begin({.samples = static_cast<double>(n)});
  quadratic::gradient(m.w.data(), m.g.data(), first, n);
  for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
  return dp.step({.lr = lr});
}

// Parameters of every rank after `steps` steps on `ranks` threads.
template <class Plan, class Rule>
std::vector<std::vector<float>> train(const Plan& plan, const Rule& rule, int ranks, std::size_t steps, float lr,
                                      std::size_t batch = 2) {
  std::vector<std::vector<float>> out(static_cast<std::size_t>(ranks));
  hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), rule};
    for (std::size_t s = 0; s < steps; ++s) train_step(dp, m, first_sample(s, comm.rank(), ranks, batch), batch, lr);
    dp.join();
    out[static_cast<std::size_t>(comm.rank())] = m.w;
  });
  return out;
}

// The same in double precision in one process: `update(w, g, step)` is the rule, called per element with two states.
template <class Update>
std::vector<double> reference(int ranks, std::size_t steps, std::size_t batch, Update&& update) {
  std::vector<double> w(quadratic::count, 0.5), g(quadratic::count), a(quadratic::count, 0.0), b(quadratic::count, 0.0);
  for (std::size_t s = 0; s < steps; ++s) {
    const std::size_t n = static_cast<std::size_t>(ranks) * batch;
    quadratic::gradient(w.data(), g.data(), s * n, n);
    for (std::size_t i = 0; i < w.size(); ++i) update(w[i], g[i], a[i], b[i], s + 1);
  }
  return w;
}

inline double distance(const std::vector<float>& a, const std::vector<double>& b) {
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::fabs(a[i] - b[i]));
  return worst;
}

inline bool all_equal(const std::vector<std::vector<float>>& ranks) {
  for (const auto& r : ranks) {
    if (r != ranks[0]) return false;
  }
  return true;
}

// A directory that goes away with the object.
class scratch_directory {
 public:
  scratch_directory() {
    char pattern[] = "/tmp/heddle-test-XXXXXX";
    path_ = ::mkdtemp(pattern);
  }
  ~scratch_directory() { [[maybe_unused]] const int rc = std::system(("rm -rf '" + path_ + "'").c_str()); }
  scratch_directory(const scratch_directory&) = delete;
  scratch_directory& operator=(const scratch_directory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline auto momentum_oracle(double lr, double m, double decay, bool nesterov) {
  return [=](double& w, double g, double& v, double&, std::size_t) {
    const double d = g + decay * w;
    v = m * v + d;
    w -= lr * (nesterov ? d + m * v : v);
  };
}
inline auto adamw_oracle(double lr, double decay) {
  return [=](double& w, double g, double& m, double& v, std::size_t t) {
    m = 0.9 * m + 0.1 * g;
    v = 0.999 * v + 0.001 * g * g;
    const double n = static_cast<double>(t);
    w -= lr * (m / (1.0 - std::pow(0.9, n)) / (std::sqrt(v / (1.0 - std::pow(0.999, n))) + 1e-8) + decay * w);
  };
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/optim/accumulation.hpp>
#include <heddle/optim/adagrad.hpp>
#include <heddle/optim/adam.hpp>
#include <heddle/optim/adamw.hpp>
#include <heddle/optim/ftrl.hpp>
#include <heddle/optim/lamb.hpp>
#include <heddle/optim/lars.hpp>
#include <heddle/optim/rate.hpp>
#include <heddle/optim/sgd.hpp>

#include "../support/catch.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

namespace hd = heddle;

namespace {
// Runs a rule in float beside an oracle in double: oracle(p, g, state, t) updates one element.
template <class Rule, class Oracle>
void compare(const Rule& rule, float decay_scale, Oracle&& oracle, float start = 1.0f) {
  static_assert(hd::optimizer<Rule>);
  for (const std::size_t n : {0u, 1u, 17u, 1025u}) {
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    std::vector<float> p(n), g(n), slots[2] = {std::vector<float>(n, 0.0f), std::vector<float>(n, 0.0f)};
    for (float& x : p) x = start * normal(random);
    std::vector<double> q(p.begin(), p.end()), exact[2] = {std::vector<double>(n, 0.0), std::vector<double>(n, 0.0)};
    float* state[2] = {slots[0].data(), slots[1].data()};
    for (std::size_t step = 0; step < 100; ++step) {
      for (float& x : g) x = normal(random);
      rule.update(p.data(), g.data(), state, n, {.lr = 0.01f, .step = step, .decay_scale = decay_scale});
      for (std::size_t i = 0; i < n; ++i) oracle(q[i], static_cast<double>(g[i]), exact[0][i], exact[1][i], step + 1);
    }
    double worst = 0.0;
    for (std::size_t i = 0; i < n; ++i) worst = std::max(worst, std::fabs(p[i] - q[i]));
    CHECK(worst < 1e-5);
  }
}
}  // namespace

TEST_CASE("sgd with momentum, Nesterov and decay follows its definition") {
  for (const float scale : {1.0f, 0.0f}) {
    for (const float m : {0.0f, 0.9f}) {
      for (const bool nesterov : {false, true}) {
        compare(hd::sgd{.momentum = m, .nesterov = nesterov, .weight_decay = 0.1f}, scale,
                [&](double& p, double g, double& v, double&, std::size_t) {
                  const double mu = static_cast<double>(m), d = g + static_cast<double>(0.1f) * scale * p;
                  v = mu * v + d;
                  p -= static_cast<double>(0.01f) * (nesterov ? d + mu * v : v);
                });
      }
    }
  }
}

TEST_CASE("adamw follows its definition, with bias correction from the first step") {
  for (const float scale : {1.0f, 0.0f}) {
    compare(hd::adamw{.weight_decay = 0.1f}, scale, [&](double& p, double g, double& m, double& v, std::size_t t) {
      m = 0.9 * m + 0.1 * g;
      v = 0.999 * v + 0.001 * g * g;
      const double mh = m / (1.0 - std::pow(0.9, t)), vh = v / (1.0 - std::pow(0.999, t));
      p -= 0.01 * (mh / (std::sqrt(vh) + 1e-8) + 0.1 * scale * p);
    });
  }
  float p = 1.0f, g = 5.0f, m = 0.0f, v = 0.0f;
  float* state[2] = {&m, &v};
  hd::adamw{}.update(&p, &g, state, 1, {.lr = 0.1f});
  CHECK(p == Approx(0.9f).epsilon(1e-5));  // the first step has length lr, whatever the gradient
}

TEST_CASE("momentum and nesterov are sgd under other names") {
  static_assert(hd::momentum().momentum == 0.9f && !hd::momentum().nesterov);
  static_assert(hd::nesterov(0.5f, 0.1f).momentum == 0.5f && hd::nesterov().nesterov);
  static_assert(hd::nesterov(0.5f, 0.1f).weight_decay == 0.1f);
}

TEST_CASE("adam follows its definition; decay is a term of the gradient") {
  for (const float scale : {1.0f, 0.0f}) {
    compare(hd::adam{.weight_decay = 0.1f}, scale, [&](double& p, double g, double& m, double& v, std::size_t t) {
      const double d = g + static_cast<double>(0.1f) * scale * p;
      m = 0.9 * m + 0.1 * d;
      v = 0.999 * v + 0.001 * d * d;
      p -= 0.01 * m / (1.0 - std::pow(0.9, t)) / (std::sqrt(v / (1.0 - std::pow(0.999, t))) + 1e-8);
    });
  }
  CHECK_THROWS_AS(hd::adam{.beta1 = 1.0f}.check(), hd::argument_error);
}

TEST_CASE("adagrad follows its definition") {
  for (const float scale : {1.0f, 0.0f}) {
    compare(hd::adagrad{.weight_decay = 0.1f}, scale, [&](double& p, double g, double& s, double&, std::size_t) {
      const double d = g + static_cast<double>(0.1f) * scale * p;
      s += d * d;
      p -= 0.01 * d / (std::sqrt(s) + 1e-10);
    });
  }
  CHECK_THROWS_AS(hd::adagrad{.eps = 0.0f}.check(), hd::argument_error);
}

TEST_CASE("ftrl follows its definition, and a strong L1 term makes parameters exactly 0") {
  for (const float l1 : {0.0f, 5.0f}) {
    for (const float scale : {1.0f, 0.5f}) {
      compare(hd::ftrl{.beta = 0.5f, .l1 = l1, .l2 = 0.1f}, scale, [&](double& p, double g, double& z, double& n, std::size_t) {
        const double alpha = static_cast<double>(0.01f), one = static_cast<double>(l1) * scale;
        z += g - (std::sqrt(n + g * g) - std::sqrt(n)) / alpha * p;
        n += g * g;
        const double slope = (0.5 + std::sqrt(n)) / alpha + static_cast<double>(0.1f) * scale;
        p = std::fabs(z) <= one ? 0.0 : -(z - (z > 0 ? one : -one)) / slope;
      }, 0.0f);
    }
  }
  float p = 0.0f, g = 0.5f, z = 0.0f, n = 0.0f;
  float* state[2] = {&z, &n};
  hd::ftrl{.l1 = 1.0f}.update(&p, &g, state, 1, {.lr = 0.1f});
  CHECK(p == 0.0f);  // |z| = 0.5
  for (int k = 0; k < 3; ++k) hd::ftrl{.l1 = 1.0f}.update(&p, &g, state, 1, {.lr = 0.1f});
  CHECK(p < 0.0f);
  const float before = p;
  hd::ftrl{}.update(&p, &g, state, 1, {.lr = 0.0f});
  CHECK(p == before);
  g = NAN;
  hd::ftrl{.l1 = 1.0f}.update(&p, &g, state, 1, {.lr = 0.1f});
  CHECK(std::isnan(p));
  CHECK_THROWS_AS(hd::ftrl{.l1 = -1.0f}.check(), hd::argument_error);
}

TEST_CASE("rates are what their formulas say, at compile time too") {
  namespace rate = hd::rate;
  static_assert(rate::warmup(0, 4) == 0.25 && rate::warmup(3, 4) == 1.0 && rate::warmup(9, 4) == 1.0 && rate::warmup(0, 0) == 1.0);
  static_assert(rate::constant(7, 0.5) == 0.5 && rate::linear(5, 10, 2.0, 1.0) == 1.5 && rate::linear(50, 10, 2.0) == 0.0);
  static_assert(rate::staircase(9, 10, 1.0) == 1.0 && rate::staircase(10, 10, 1.0, 0.5) == 0.5 && rate::staircase(70, 10, 1.0, 0.5) == 0x1p-7);
  static_assert(rate::staircase(5, 0, 1.0) == 1.0 && rate::polynomial(5, 10, 4.0, 2) == 1.0 && rate::polynomial(20, 10, 4.0, 2, 0.5) == 0.5);
  static_assert(rate::cosine(0, 0, 3.0, 1.0) == 1.0);  // no steps: at the end
  for (std::size_t t = 0; t <= 1000; t += 7) {
    const double x = static_cast<double>(t) / 1000.0;
    CHECK(std::fabs(rate::cosine(t, 1000, 1.0) - 0.5 * (1.0 + std::cos(3.14159265358979323846 * x))) < 1e-15);
    CHECK(std::fabs(rate::inverse_root(t, 100, 2.0) - (t < 100 ? 2.0 : 2.0 * std::sqrt(100.0 / static_cast<double>(t + 1)))) < 1e-15);
  }
}

TEST_CASE("gradients of several batches add up to that of one, weighted by samples") {
  const std::size_t sizes[3] = {1025, 0, 3};
  hd::accumulation sums(sizes);
  std::mt19937 random(8);
  std::vector<double> exact(1025, 0.0);
  std::vector<float> out(1025);
  for (const double samples : {3.0, 0.0, 5.0}) {
    std::vector<float> g(1025);
    for (float& x : g) x = std::normal_distribution<float>()(random);
    for (std::size_t k = 0; k < g.size(); ++k) exact[k] += samples * g[k] / 8.0;
    if (samples == 0.0) g.assign(g.size(), NAN);  // the gradient of no samples may hold anything
    sums.add(0, g.data(), samples);
    sums.count(samples);
  }
  CHECK(sums.samples() == 8.0);
  char folder[] = "/tmp/heddle-test-XXXXXX";
  REQUIRE(::mkdtemp(folder) != nullptr);
  const std::string files[2] = {std::string(folder) + "/a", std::string(folder) + "/b"};
  {  // saved in the middle of a step, and taken over: by as many ranks, or by fewer
    sums.save(files[0]);
    hd::accumulation other(sizes), both(sizes);
    other.load(std::span(files, 1));
    CHECK(other.samples() == 8.0);
    std::vector<float> one(1025), two(1025);
    other.take(0, out.data());
    sums.take(0, one.data());
    CHECK(out == one);
    const std::vector<float> ones(1025, 1.0f);
    other.clear();
    other.add(0, ones.data(), 24.0);
    other.count(24.0);
    other.save(files[1]);
    both.load(files);
    both.take(0, two.data());
    CHECK(both.samples() == 32.0);
    for (std::size_t k = 0; k < two.size(); ++k) CHECK(two[k] == Approx((8.0 * one[k] + 24.0) / 32.0));
    const std::size_t others[3] = {1025, 1, 3};
    hd::accumulation foreign(others);
    CHECK_THROWS_AS(foreign.load(files), hd::file_error);
    const std::string missing[1] = {std::string(folder) + "/c"};
    CHECK_THROWS_AS(both.load(missing), hd::file_error);
    CHECK(both.samples() == 32.0);
    for (const std::string& file : files) std::remove(file.c_str());
    ::rmdir(folder);
  }
  sums.take(0, out.data());
  sums.take(1, static_cast<float*>(nullptr));
  for (std::size_t k = 0; k < out.size(); ++k) CHECK(out[k] == Approx(exact[k]).margin(1e-6));
  const hd::bfloat16 one[3] = {hd::bfloat16(1.0f), hd::bfloat16(2.0f), hd::bfloat16(-1.0f)};
  hd::bfloat16 back[3];
  sums.clear();
  for (int k = 0; k < 300; ++k) {  // in bfloat16 the sum would stand still at 256
    sums.add(2, one, 1.0);
    sums.count(1.0);
  }
  sums.take(2, back);
  for (int k = 0; k < 3; ++k) CHECK(static_cast<float>(back[k]) == static_cast<float>(one[k]));
  CHECK_THROWS_AS(sums.add(3, one, 1.0), hd::argument_error);
  CHECK_THROWS_AS(sums.count(-1.0), hd::argument_error);
  CHECK_THROWS_AS(sums.count(NAN), hd::argument_error);
}

TEST_CASE("a layerwise step is as long as the parameter says, whatever the gradient") {
  for (const std::size_t n : {1u, 17u, 1025u, 10007u}) {
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    std::vector<float> p(n), g(n), m(n), v(n);
    for (float& x : p) x = normal(random);
    for (float& x : g) x = 1e-3f * normal(random);
    float* state[2] = {m.data(), v.data()};
    const auto moved = [&](const std::vector<float>& q) {  // over the parameter's length
      double d = 0.0, l = 0.0;
      for (std::size_t i = 0; i < n; ++i) {
        d += (static_cast<double>(p[i]) - q[i]) * (static_cast<double>(p[i]) - q[i]);
        l += static_cast<double>(p[i]) * p[i];
      }
      return std::sqrt(d / l);
    };
    auto q = p;
    hd::lars{.trust = 0.5f}.update(q.data(), g.data(), state, n, {.lr = 0.01f});
    CHECK(moved(q) == Approx(0.005).epsilon(1e-4));
    q = p;
    std::fill(m.begin(), m.end(), 0.0f);
    hd::lamb{.weight_decay = 0.1f}.update(q.data(), g.data(), state, n, {.lr = 0.01f});
    CHECK(moved(q) == Approx(0.01).epsilon(1e-4));
    q.assign(n, 0.0f);  // no length to go by: the ratio is 1
    std::fill(m.begin(), m.end(), 0.0f);
    hd::lars{}.update(q.data(), g.data(), state, n, {.lr = 0.01f});
    CHECK(q[0] == -(0.01f * g[0]));
  }
  CHECK_THROWS_AS(hd::lars{.trust = 0.0f}.check(), hd::argument_error);
  CHECK_THROWS_AS(hd::lamb{.eps = 0.0f}.check(), hd::argument_error);
}

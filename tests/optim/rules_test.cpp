// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/optim/adamw.hpp>
#include <heddle/optim/lamb.hpp>
#include <heddle/optim/lars.hpp>
#include <heddle/optim/sgd.hpp>

#include "../support/catch.hpp"

#include <cmath>
#include <random>
#include <vector>

namespace hd = heddle;

namespace {
// Runs a rule in float beside an oracle in double: oracle(p, g, state, t) updates one element.
template <class Rule, class Oracle>
void compare(const Rule& rule, float decay_scale, Oracle&& oracle) {
  static_assert(hd::optimizer<Rule>);
  for (const std::size_t n : {0u, 1u, 17u, 1025u}) {
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    std::vector<float> p(n), g(n), slots[2] = {std::vector<float>(n, 0.0f), std::vector<float>(n, 0.0f)};
    for (float& x : p) x = normal(random);
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

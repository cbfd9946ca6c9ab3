// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// The rules give, bit for bit, what loops over single elements give, whatever the size and the alignment.
#include <heddle/optim/adagrad.hpp>
#include <heddle/optim/adam.hpp>
#include <heddle/optim/adamw.hpp>
#include <heddle/optim/ftrl.hpp>
#include <heddle/optim/lamb.hpp>
#include <heddle/optim/lars.hpp>
#include <heddle/optim/sgd.hpp>

#include "../support/catch.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace hd = heddle;

namespace {
std::vector<std::size_t> sizes() {
  std::vector<std::size_t> all{1023, 1024, 1025, 10007};
  for (std::size_t n = 0; n <= 70; ++n) all.push_back(n);
  return all;
}

// Ordinary numbers, zeros of both signs, subnormal numbers and numbers whose square is subnormal or too small.
float draw(std::mt19937& random) {
  constexpr float smallest = std::numeric_limits<float>::denorm_min();
  const auto r = static_cast<std::uint32_t>(random());
  const float sign = r & 8 ? -1.0f : 1.0f, any = static_cast<float>(r >> 8);
  switch (r % 8) {
    case 0: return sign * 0.0f;
    case 1: return sign * any * smallest;
    case 2: return sign * any * 1e-30f;
    case 3: return sign * any * 1e-10f;
    default: return sign * any * 0x1p-24f;
  }
}

// Parameter, gradient and two slots of n elements; array k begins shift + k floats past an allocation.
struct arrays {
  arrays(std::size_t count, std::size_t first) : n(count), shift(first) {
    for (auto& x : all) x.assign(n + 16, 7.0f);  // what surrounds the n must not change
    for (std::size_t k : {2u, 3u}) std::fill_n(data(k), n, 0.0f);
  }
  float* data(std::size_t k) { return all[k].data() + shift + k; }
  void fill(std::size_t k, std::mt19937& random) {
    for (std::size_t i = 0; i < n; ++i) data(k)[i] = draw(random);
  }
  bool same(const arrays& other) const {
    for (std::size_t k = 0; k < 4; ++k) {
      if (std::memcmp(all[k].data(), other.all[k].data(), (n + 16) * sizeof(float)) != 0) return false;
    }
    return true;
  }
  std::size_t n, shift;
  std::array<std::vector<float>, 4> all;
};

// One element, as sgd and adamw define it.
void one(const hd::sgd& rule, float& p, float g, float& v, float&, const hd::update_context& x) {
  const float decay = rule.weight_decay * x.decay_scale, m = rule.momentum;
  const float d = decay == 0.0f && m == 0.0f ? g : g + decay * p;
  if (m == 0.0f) {
    p -= x.lr * d;
    return;
  }
  v = m * v + d;
  p -= x.lr * (rule.nesterov ? d + m * v : v);
}
void one(const hd::adamw& rule, float& p, float g, float& m, float& v, const hd::update_context& x) {
  const double t = static_cast<double>(x.step) + 1.0;
  const auto c1 = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(rule.beta1), t)));
  const auto c2 = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(rule.beta2), t)));
  m = rule.beta1 * m + (1.0f - rule.beta1) * g;
  v = rule.beta2 * v + (1.0f - rule.beta2) * (g * g);
  p -= x.lr * (m * c1 / (std::sqrt(v * c2) + rule.eps) + rule.weight_decay * x.decay_scale * p);
}
// The steps of the others, one by one.
template <class Rule>
  requires(hd::has_element_step<Rule>)
void one(const Rule& rule, float& p, float g, float& a, float& b, const hd::update_context& x) {
  if constexpr (Rule::slots == 1) rule.element_step(x)(p, g, a);
  else rule.element_step(x)(p, g, a, b);
}

template <class Rule>
void check_bits(const Rule& rule, float decay_scale) {
  for (const std::size_t n : sizes()) {
    for (const std::size_t shift : {0u, 1u, 6u}) {
      std::mt19937 random(static_cast<unsigned>(n));
      arrays a(n, shift);
      a.fill(0, random);
      arrays b = a;
      for (std::size_t step = 0; step < 4; ++step) {
        const hd::update_context x{.lr = 0.01f, .step = step, .decay_scale = decay_scale};
        a.fill(1, random);
        b.all[1] = a.all[1];
        float* const state[2] = {a.data(2), a.data(3)};
        rule.update(a.data(0), a.data(1), state, n, x);
        for (std::size_t i = 0; i < n; ++i) {
          one(rule, b.data(0)[i], b.data(1)[i], b.data(2)[i], b.data(3)[i], x);
        }
      }
      INFO("n " << n << ", shift " << shift);
      CHECK(a.same(b));
    }
  }
}

// The same for layerwise rules, given the ratio.
void one(const hd::lars& rule, double ratio, float& p, float g, float& v, float&, const hd::update_context& x) {
  v = rule.momentum * v + static_cast<float>(x.lr * ratio) * (g + rule.weight_decay * x.decay_scale * p);
  p -= v;
}
void one(const hd::lamb& rule, double ratio, float& p, float g, float& m, float& v, const hd::update_context& x) {
  const double t = static_cast<double>(x.step) + 1.0;
  const auto c1 = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(rule.beta1), t)));
  const auto c2 = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(rule.beta2), t)));
  m = rule.beta1 * m + (1.0f - rule.beta1) * g;
  v = rule.beta2 * v + (1.0f - rule.beta2) * (g * g);
  const float r = m * c1 / (std::sqrt(v * c2) + rule.eps) + rule.weight_decay * x.decay_scale * p;
  p -= static_cast<float>(x.lr * ratio) * r;
}

template <class Rule>
void check_layerwise_bits(const Rule& rule) {
  for (const std::size_t n : sizes()) {
    std::mt19937 random(static_cast<unsigned>(n));
    arrays a(n, 1);
    a.fill(0, random);
    arrays b = a;
    for (std::size_t step = 0; step < 3; ++step) {
      const hd::update_context x{.lr = 0.01f, .step = step};
      a.fill(1, random);
      b.all[1] = a.all[1];
      arrays probe = a;
      float *const of_probe[2] = {probe.data(2), probe.data(3)}, *const state[2] = {a.data(2), a.data(3)};
      const double ratio = rule.ratio(rule.advance(probe.data(0), probe.data(1), of_probe, n, x), x);
      rule.update(a.data(0), a.data(1), state, n, x);
      for (std::size_t i = 0; i < n; ++i) one(rule, ratio, b.data(0)[i], b.data(1)[i], b.data(2)[i], b.data(3)[i], x);
    }
    INFO("n " << n);
    CHECK(a.same(b));
  }
}
}  // namespace

TEST_CASE("lars and lamb give the bits of a loop over single elements") {
  check_layerwise_bits(hd::lars{.momentum = 0.9f, .weight_decay = 0.1f});
  check_layerwise_bits(hd::lamb{.weight_decay = 0.1f});
}

TEST_CASE("sgd gives the bits of a loop over single elements") {
  for (const float momentum : {0.0f, 0.9f}) {
    for (const bool nesterov : {false, true}) {
      for (const float decay : {0.0f, 0.1f}) {
        for (const float scale : {1.0f, 0.3f, 0.0f}) {
          INFO("momentum " << momentum << ", nesterov " << nesterov << ", decay " << decay << ", scale " << scale);
          check_bits(hd::sgd{.momentum = momentum, .nesterov = nesterov, .weight_decay = decay}, scale);
        }
      }
    }
  }
}

TEST_CASE("adam, adagrad and ftrl give the bits of a loop over single elements") {
  check_bits(hd::adam{.weight_decay = 0.1f}, 1.0f);
  check_bits(hd::adagrad{.weight_decay = 0.1f}, 1.0f);
  check_bits(hd::ftrl{.l1 = 0.1f, .l2 = 0.1f}, 1.0f);
}

TEST_CASE("adamw gives the bits of a loop over single elements") {
  for (const float scale : {1.0f, 0.0f}) {
    check_bits(hd::adamw{}, scale);
    check_bits(hd::adamw{.beta1 = 0.0f, .beta2 = 0.5f, .eps = 1e-30f, .weight_decay = 0.1f}, scale);
  }
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/detail/elementwise.hpp>
#include <heddle/optim/concept.hpp>

#include <cmath>

namespace heddle {
inline namespace v0 {
namespace detail {

// What Adam and its kin share: two moments of the gradient, and their quotient as a direction.
class moments {
 public:
  constexpr moments() noexcept = default;  // CUB's iterators want literal types
  template <class Rule>
  moments(const Rule& rule, const update_context& x) noexcept : b1_(rule.beta1), b2_(rule.beta2), eps_(rule.eps) {
    const double t = static_cast<double>(x.step) + 1.0;
    c1_ = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(b1_), t)));
    c2_ = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(b2_), t)));
  }

  // m and v, one gradient later.
  template <class Value> void move(const Value& g, Value& m, Value& v) const {
    m = b1_ * m + (1.0f - b1_) * g;
    v = b2_ * v + (1.0f - b2_) * (g * g);
  }
  // d = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
  template <class Value> void direction(Value& d, const Value& m, const Value& v) const {
    auto root = v * c2_;
    take_root(root);
    d = m * c1_ / (root + eps_);
  }

  // The same for an element, on a device too: there vectors of the host don't compile.
  HEDDLE_HD void move(const float& g, float& m, float& v) const {
    m = b1_ * m + (1.0f - b1_) * g;
    v = b2_ * v + (1.0f - b2_) * (g * g);
  }
  HEDDLE_HD void direction(float& d, const float& m, const float& v) const { d = m * c1_ / (::sqrtf(v * c2_) + eps_); }

  template <class Rule> static void check(const char* name, const Rule& rule) {
    check_below_one(name, "beta1", rule.beta1);
    check_below_one(name, "beta2", rule.beta2);
    check_decay(name, rule.weight_decay);
    check_above_zero(name, "eps", rule.eps);
  }

 private:
  float b1_ = 0.0f, b2_ = 0.0f, eps_ = 0.0f, c1_ = 1.0f, c2_ = 1.0f;
};

/// @cond
// One step of an element, or of eight on the host: weight decay is a term of the gradient, or Decoupled from it.
template <bool Decoupled> struct adam_step {
  moments both;
  float lr, decay;
  HEDDLE_HD void scale(float rate, float factor) { lr *= rate, decay *= factor; }
  HEDDLE_HD void operator()(float& p, const float& g, float& m, float& v) const {
    float d = Decoupled ? g : g + decay * p;
    both.move(d, m, v);
    both.direction(d, m, v);
    p -= lr * (Decoupled ? d + decay * p : d);
  }
  template <class Value> void operator()(Value& p, const Value& g, Value& m, Value& v) const {
    Value d = g;
    if constexpr (!Decoupled) d += decay * p;
    both.move(d, m, v);
    both.direction(d, m, v);
    if constexpr (Decoupled) d += decay * p;
    p -= lr * d;
  }
};
/// @endcond

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/optim/adagrad.hpp>
#include <heddle/optim/ftrl.hpp>
#include <heddle/table/concept.hpp>

#include <cmath>
#include <cstring>

namespace heddle {
inline namespace v0 {
namespace detail {
inline void check_rule_number(const char* rule, const char* what, double x) {
  if (!(x >= 0.0 && x < 1e30)) {
    throw argument_error(std::string("heddle::") + rule + ": " + what + " is " + std::to_string(x) +
                         ", allowed is 0 or above");
  }
}
}  // namespace detail

/// @brief Update rules of sparse tables; see the concept `table_rule`. w: a weight, g: its gradient.
namespace rule {

/// @brief Stochastic gradient descent: w -= lr g. Linear.
/// State:   none.
/// Paper:   Robbins and Monro 1951.
struct sgd {
  static constexpr bool linear = true;                                    ///< Duplicates in any order.
  static constexpr std::size_t slots(std::size_t) noexcept { return 0; }  ///< Floats of state.
  /// One step of a row.
  template <std::size_t Dim>
  HEDDLE_HD void update(float* __restrict w, float*, const float* __restrict g, const row_context& x) const noexcept {
    for (std::size_t i = 0; i < Dim; ++i) w[i] -= x.lr * g[i];
  }
  /// "sgd".
  std::string name() const { return "sgd"; }
};

/// @brief Adds what is pushed: w += g, whatever the rate. Linear. For differences of replicas, and for counting.
/// State:   none.
struct sum {
  static constexpr bool linear = true;                                    ///< Duplicates in any order.
  static constexpr std::size_t slots(std::size_t) noexcept { return 0; }  ///< Floats of state.
  /// One step of a row.
  template <std::size_t Dim>
  HEDDLE_HD void update(float* __restrict w, float*, const float* __restrict g, const row_context&) const noexcept {
    for (std::size_t i = 0; i < Dim; ++i) w[i] += g[i];
  }
  /// "sum".
  std::string name() const { return "sum"; }
};

/// @brief AdaGrad, an accumulator per weight: s += g^2; w -= lr g / (sqrt(s) + eps).
/// State:   4 bytes per weight.
/// Paper:   Duchi, Hazan, Singer 2011; eps outside of the root.
/// Throws:  argument_error from check().
struct adagrad {
  float eps = 1e-8f;     ///< Above 0.
  float initial = 0.0f;  ///< What s begins with, 0 or above.

  static constexpr bool linear = false;                                         ///< Duplicates are summed first.
  static constexpr std::size_t slots(std::size_t dim) noexcept { return dim; }  ///< Floats of state.
  /// Throws argument_error for a number outside its range.
  void check() const {
    detail::check_above_zero("rule::adagrad", "eps", eps);
    detail::check_rule_number("rule::adagrad", "initial", initial);
  }
  /// The state of a new row.
  template <std::size_t Dim> HEDDLE_HD void start(float* s) const noexcept {
    for (std::size_t i = 0; i < Dim; ++i) s[i] = initial;
  }
  /// One step of a row.
  template <std::size_t Dim>
  HEDDLE_HD void update(float* __restrict w, float* __restrict s, const float* __restrict g,
                        const row_context& x) const noexcept {
    const detail::adagrad_step step{x.lr, eps, 0.0f};
    for (std::size_t i = 0; i < Dim; ++i) step(w[i], g[i], s[i]);
  }
  /// "adagrad".
  std::string name() const { return "adagrad"; }
};

/// @brief AdaGrad, one accumulator per row: s += mean of g^2; w -= lr g / (sqrt(s) + eps).
/// State:   4 bytes per row.
/// Paper:   Duchi, Hazan, Singer 2011, with the row as the unit, as recommenders do to save memory.
/// Throws:  argument_error from check().
struct row_adagrad {
  float eps = 1e-8f;     ///< Above 0.
  float initial = 0.0f;  ///< What s begins with, 0 or above.

  static constexpr bool linear = false;                                   ///< Duplicates are summed first.
  static constexpr std::size_t slots(std::size_t) noexcept { return 1; }  ///< Floats of state.
  /// Throws argument_error for a number outside its range.
  void check() const {
    detail::check_above_zero("rule::row_adagrad", "eps", eps);
    detail::check_rule_number("rule::row_adagrad", "initial", initial);
  }
  /// The state of a new row.
  template <std::size_t Dim> HEDDLE_HD void start(float* s) const noexcept { s[0] = initial; }
  /// One step of a row.
  template <std::size_t Dim>
  HEDDLE_HD void update(float* __restrict w, float* __restrict s, const float* __restrict g,
                        const row_context& x) const noexcept {
    float squares = 0.0f;
    for (std::size_t i = 0; i < Dim; ++i) squares += g[i] * g[i];
    s[0] += squares / static_cast<float>(Dim);
    const float rate = x.lr / (std::sqrt(s[0]) + eps);
    for (std::size_t i = 0; i < Dim; ++i) w[i] -= rate * g[i];
  }
  /// "row_adagrad".
  std::string name() const { return "row_adagrad"; }
};

/// @brief Adam on the rows that occur: a row that is not pushed stays as it is, and has its own count of steps.
///
///     m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
///     w -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps),   t = pushes of this row
///
/// State:   8 bytes per weight, and 8 for beta1^t and beta2^t.
/// Paper:   Kingma and Ba 2015, algorithm 1, per row ("lazy").
/// Throws:  argument_error from check().
struct adam {
  float beta1 = 0.9f;    ///< In [0, 1).
  float beta2 = 0.999f;  ///< In [0, 1).
  float eps = 1e-8f;     ///< Above 0.

  static constexpr bool linear = false;  ///< Duplicates are summed first.
  /// Floats of state.
  static constexpr std::size_t slots(std::size_t dim) noexcept { return 2 * dim + 2; }
  /// Throws argument_error for a number outside its range.
  void check() const {
    detail::check_below_one("rule::adam", "beta1", beta1);
    detail::check_below_one("rule::adam", "beta2", beta2);
    detail::check_above_zero("rule::adam", "eps", eps);
  }
  /// The state of a new row.
  template <std::size_t Dim> HEDDLE_HD void start(float* s) const noexcept {
    for (std::size_t i = 0; i < 2 * Dim; ++i) s[i] = 0.0f;
    s[2 * Dim] = s[2 * Dim + 1] = 1.0f;
  }
  /// One step of a row.
  template <std::size_t Dim>
  HEDDLE_HD void update(float* __restrict w, float* __restrict s, const float* __restrict g,
                        const row_context& x) const noexcept {
    float *m = s, *v = s + Dim, *powers = s + 2 * Dim;
    powers[0] *= beta1;
    powers[1] *= beta2;
    const float c1 = x.lr / (1.0f - powers[0]), c2 = 1.0f / (1.0f - powers[1]);
    for (std::size_t i = 0; i < Dim; ++i) {
      m[i] = beta1 * m[i] + (1.0f - beta1) * g[i];
      v[i] = beta2 * v[i] + (1.0f - beta2) * (g[i] * g[i]);
      w[i] -= c1 * m[i] / (std::sqrt(v[i] * c2) + eps);
    }
  }
  /// "adam".
  std::string name() const { return "adam"; }
};

/// @brief FTRL-Proximal, as heddle::ftrl has it: a sparse weight, from sums of gradients; lr is its alpha.
///
/// The weight is a function of the state, so rows begin at 0: use `initial::zero`. A rate of 0 leaves a row.
/// State:   8 bytes per weight (z and n).
/// Paper:   McMahan et al. 2013, algorithm 1.
/// Throws:  argument_error from check().
struct ftrl {
  float beta = 1.0f;  ///< Above 0.
  float l1 = 0.0f;    ///< 0 or above: larger ones make more weights 0.
  float l2 = 0.0f;    ///< 0 or above.

  static constexpr bool linear = false;                                             ///< Duplicates are summed.
  static constexpr std::size_t slots(std::size_t dim) noexcept { return 2 * dim; }  ///< Floats of state.
  /// Throws argument_error for a number outside its range.
  void check() const {
    detail::check_above_zero("rule::ftrl", "beta", beta);
    detail::check_rule_number("rule::ftrl", "l1", l1);
    detail::check_rule_number("rule::ftrl", "l2", l2);
  }
  /// One step of a row.
  template <std::size_t Dim>
  HEDDLE_HD void update(float* __restrict w, float* __restrict s, const float* __restrict g,
                        const row_context& x) const noexcept {
    if (!(x.lr > 0.0f)) return;
    const detail::ftrl_step step{x.lr, beta, l1, l2};
    for (std::size_t i = 0; i < Dim; ++i) step(w[i], g[i], s[i], s[Dim + i]);
  }
  /// "ftrl".
  std::string name() const { return "ftrl"; }
};

/// @brief Nothing: rows that are only read, as in a serving table.
struct frozen {
  static constexpr bool linear = true;                                    ///< Duplicates in any order.
  static constexpr std::size_t slots(std::size_t) noexcept { return 0; }  ///< Floats of state.
  /// Leaves the row.
  template <std::size_t Dim> HEDDLE_HD void update(float*, float*, const float*, const row_context&) const noexcept {}
  /// "frozen".
  std::string name() const { return "frozen"; }
};

/// @brief A rule of dense tensors, `sgd` with momentum or `adamw` for one, applied to the rows that occur; each row has
/// its own count of steps. On the host only.
/// State:   that of the rule, and 4 bytes.
/// @tparam Optimizer Any `optimizer` that isn't layerwise: its `update` sees one row.
template <optimizer Optimizer> struct per_row {
  Optimizer optimizer;  ///< The rule.

  static constexpr bool linear = false;  ///< Duplicates are summed first.
  /// Floats of state.
  static constexpr std::size_t slots(std::size_t dim) noexcept { return Optimizer::slots * dim + 1; }
  /// Throws argument_error for a number outside its range.
  void check() const { optimizer.check(); }
  /// One step of a row.
  template <std::size_t Dim>
  void update(float* __restrict w, float* __restrict s, const float* __restrict g,
              const row_context& x) const noexcept {
    std::uint32_t steps;
    std::memcpy(&steps, s + Optimizer::slots * Dim, 4);
    float* state[Optimizer::slots + 1] = {};
    for (std::size_t k = 0; k < Optimizer::slots; ++k) state[k] = s + k * Dim;
    optimizer.update(w, g, state, Dim, {.lr = x.lr, .step = steps});
    ++steps;
    std::memcpy(s + Optimizer::slots * Dim, &steps, 4);
  }
  /// The rule's name.
  std::string name() const { return "per_row<" + optimizer.name() + ">"; }
};

static_assert(table_rule<sgd> && table_rule<sum> && table_rule<adagrad> && table_rule<row_adagrad> &&
              table_rule<adam> && table_rule<ftrl> && table_rule<frozen>);

}  // namespace rule
}  // namespace v0
}  // namespace heddle

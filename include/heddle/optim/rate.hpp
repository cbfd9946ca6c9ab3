// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace heddle {
inline namespace v0 {

/// @brief Learning rates over a training run, as plain functions of the step, from 0.
///
/// Each is a number times `peak`; chain them by hand: `warmup(step, 100) * cosine(step, 10000, 3e-4)`. They are
/// constexpr, have no state, and give the same bits on every rank and after a resume.
namespace rate {

namespace detail {
// cos(pi x) for x in [0, 1], by the Taylor series around the nearest multiple of pi / 2; error below 1e-15.
constexpr double cos_pi(double x) noexcept {
  if (x > 0.5) return -cos_pi(1.0 - x);
  const double a = x > 0.25 ? 0.5 - x : x;  // then sin(pi a), else cos(pi a)
  const double y = 3.14159265358979323846 * a;
  double term = x > 0.25 ? y : 1.0, sum = term;
  for (double k = x > 0.25 ? 2.0 : 1.0; k < 24.0; k += 2.0) {
    term *= -y * y / (k * (k + 1.0));
    sum += term;
  }
  return sum;
}
constexpr double square_root(double x) noexcept {
  double r = x > 1.0 ? x : 1.0;
  for (double next = 0.5 * (r + x / r); next < r; next = 0.5 * (r + x / r)) r = next;
  return r;
}
// step / steps, at most 1; 1 where there are no steps.
constexpr double part(std::size_t step, std::size_t steps) noexcept {
  return step < steps ? static_cast<double>(step) / static_cast<double>(steps) : 1.0;
}
}  // namespace detail

/// @brief The factor of a linear warm-up: 1 / steps at step 0, 1 from step `steps` - 1 on.
constexpr double warmup(std::size_t step, std::size_t steps) noexcept {
  return step < steps ? static_cast<double>(step + 1) / static_cast<double>(steps) : 1.0;
}
/// @brief `peak`, whatever the step.
constexpr double constant(std::size_t, double peak) noexcept { return peak; }
/// @brief From `peak` at step 0 to `floor` at step `steps` and after, in a straight line.
constexpr double linear(std::size_t step, std::size_t steps, double peak, double floor = 0.0) noexcept {
  return peak + (floor - peak) * detail::part(step, steps);
}
/// @brief From `peak` to `floor` at step `steps` and after, along half a cosine.
/// Paper: Loshchilov and Hutter 2017, without restarts.
constexpr double cosine(std::size_t step, std::size_t steps, double peak, double floor = 0.0) noexcept {
  return floor + (peak - floor) * 0.5 * (1.0 + detail::cos_pi(detail::part(step, steps)));
}
/// @brief `peak` times `factor` for every `period` steps that have passed.
/// @param step The step. @param period Above 0; with 0 the rate never falls. @param peak First rate. @param factor What
/// each fall multiplies by.
constexpr double staircase(std::size_t step, std::size_t period, double peak, double factor = 0.1) noexcept {
  double power = 1.0;
  for (std::size_t falls = period ? step / period : 0; falls && power > 0.0; falls /= 2, factor *= factor) {
    if (falls % 2) power *= factor;
  }
  return peak * power;
}
/// @brief From `peak` to `floor` at step `steps` and after: (1 - step / steps)^power for whole powers.
constexpr double polynomial(std::size_t step, std::size_t steps, double peak, unsigned power,
                            double floor = 0.0) noexcept {
  double left = 1.0;
  for (unsigned k = 0; k < power; ++k) left *= 1.0 - detail::part(step, steps);
  return floor + (peak - floor) * left;
}
/// @brief `peak` up to step `steps`, then falling as 1 over the root of the step; with `warmup` of as many steps the
/// transformer's schedule.
/// Paper: Vaswani et al. 2017, section 5.3.
constexpr double inverse_root(std::size_t step, std::size_t steps, double peak) noexcept {
  if (step < steps) return peak;
  return peak * detail::square_root(static_cast<double>(steps ? steps : 1) / static_cast<double>(step + 1));
}

}  // namespace rate
}  // namespace v0
}  // namespace heddle

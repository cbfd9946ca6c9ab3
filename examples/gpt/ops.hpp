// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// What a transformer computes between its matrix products, forward and backward, for `rows x width` matrices. All of it
// is templated on the scalar: the float version trains, the double version checks it.

#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "../support/matmul.hpp"

namespace gpt {

using examples::multiply;
using examples::vectorised;
using examples::view;

/// exp(x). For float: 2^n times a polynomial on [-ln2/2, ln2/2], relative error below 2e-7, free of branches so that
/// loops over it become vectors; for double the standard library's.
template <class Real> [[gnu::always_inline]] inline Real exponential(Real x) {
  if constexpr (std::is_same_v<Real, float>) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
    const float n = (x * 1.44269504f + shift) - shift;
    const float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = (p * f) * f + f + 1.0f;
    return p * std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
  } else {
    return std::exp(x);
  }
}

/// The sum of term(0) .. term(n - 1) in `Lanes` partial sums: without them a float sum can't become vectors.
template <int Lanes, class Real, class Term> [[gnu::always_inline]] inline Real sum(std::size_t n, Term term) {
  Real partial[Lanes] = {};
  std::size_t j = 0;
  for (; j + Lanes <= n; j += Lanes) {
    for (std::size_t lane = 0; lane < Lanes; ++lane) partial[lane] += term(j + lane);
  }
  Real total = 0;
  for (; j < n; ++j) total += term(j);
  for (int lane = 0; lane < Lanes; ++lane) total += partial[lane];
  return total;
}

/// The largest of x[0] .. x[n - 1], n > 0.
template <int Lanes, class Real> [[gnu::always_inline]] inline Real largest(std::size_t n, const Real* x) {
  Real partial[Lanes];
  for (int lane = 0; lane < Lanes; ++lane) partial[lane] = x[0];
  std::size_t j = 0;
  for (; j + Lanes <= n; j += Lanes) {
    for (std::size_t lane = 0; lane < Lanes; ++lane) {
      partial[lane] = x[j + lane] > partial[lane] ? x[j + lane] : partial[lane];
    }
  }
  Real top = x[0];
  for (; j < n; ++j) top = x[j] > top ? x[j] : top;
  for (int lane = 0; lane < Lanes; ++lane) top = partial[lane] > top ? partial[lane] : top;
  return top;
}

/// out = (x - mean) / deviation of every row, and 1 / deviation in `scale`.
template <class Real> void normalise(std::size_t rows, std::size_t width, const Real* x, Real* out, Real* scale) {
  vectorised([=](auto bytes) {
    constexpr int lanes = bytes / static_cast<int>(sizeof(Real));
    const Real part = Real(1) / static_cast<Real>(width);
    for (std::size_t t = 0; t < rows; ++t) {
      const Real* in = x + t * width;
      Real* to = out + t * width;
      const Real mean = part * sum<lanes, Real>(width, [=](std::size_t j) { return in[j]; });
      const Real variance =
          part * sum<lanes, Real>(width, [=](std::size_t j) { return (in[j] - mean) * (in[j] - mean); });
      scale[t] = Real(1) / std::sqrt(variance + Real(1e-5));
      for (std::size_t j = 0; j < width; ++j) to[j] = (in[j] - mean) * scale[t];
    }
  });
}

/// out = x * gain + bias, row by row.
template <class Real>
void scale_and_shift(std::size_t rows, std::size_t width, const Real* x, const Real* gain, const Real* bias,
                     Real* out) {
  vectorised([=](auto) {
    for (std::size_t t = 0; t < rows; ++t) {
      for (std::size_t j = 0; j < width; ++j) out[t * width + j] = x[t * width + j] * gain[j] + bias[j];
    }
  });
}

/// Backward of scale_and_shift after normalise: adds to d_gain, d_bias and d_x. `x` is what normalise wrote.
template <class Real>
void layer_norm_backward(std::size_t rows, std::size_t width, const Real* x, const Real* scale, const Real* gain,
                         const Real* d_out, Real* d_gain, Real* d_bias, Real* d_x) {
  vectorised([=](auto bytes) {
    constexpr int lanes = bytes / static_cast<int>(sizeof(Real));
    const Real part = Real(1) / static_cast<Real>(width);
    for (std::size_t t = 0; t < rows; ++t) {
      const Real* at = x + t * width;
      const Real* d = d_out + t * width;
      Real* to = d_x + t * width;
      const Real mean = part * sum<lanes, Real>(width, [=](std::size_t j) { return d[j] * gain[j]; });
      const Real slope = part * sum<lanes, Real>(width, [=](std::size_t j) { return d[j] * gain[j] * at[j]; });
      for (std::size_t j = 0; j < width; ++j) {
        d_gain[j] += d[j] * at[j];
        d_bias[j] += d[j];
        to[j] += scale[t] * (d[j] * gain[j] - mean - at[j] * slope);
      }
    }
  });
}

/// sigmoid(x), and 0 where it is below epsilon squared: such values only make products that are denormal numbers, and
/// those are slow.
template <class Real> [[gnu::always_inline]] inline Real sigmoid(Real x) {
  constexpr Real least = Real(-1.4) * std::numeric_limits<Real>::digits;  // about the logarithm of epsilon squared
  const Real value = Real(1) / (Real(1) + exponential(-x));
  return x < least ? Real(0) : value;
}

/// out = gelu(x), in the form x * sigmoid(2 u) with u = sqrt(2/pi) (x + 0.044715 x^3), which is the usual tanh form.
template <class Real> void gelu(std::size_t n, const Real* x, Real* out) {
  vectorised([=](auto) {
    for (std::size_t i = 0; i < n; ++i) {
      out[i] = x[i] * sigmoid(Real(1.5957691216057308) * (x[i] + Real(0.044715) * x[i] * x[i] * x[i]));
    }
  });
}

/// In place: d = d * gelu'(x), and out = gelu(x) once more, since the weights' gradient needs it.
template <class Real> void gelu_backward(std::size_t n, const Real* x, Real* out, Real* d) {
  vectorised([=](auto) {
    for (std::size_t i = 0; i < n; ++i) {
      const Real gate = sigmoid(Real(1.5957691216057308) * (x[i] + Real(0.044715) * x[i] * x[i] * x[i]));
      const Real slope = Real(1.5957691216057308) * (Real(1) + Real(3 * 0.044715) * x[i] * x[i]);
      out[i] = x[i] * gate;
      d[i] *= gate + out[i] * (Real(1) - gate) * slope;
    }
  });
}

/// In place: row t becomes the softmax of scale * its first visible(t) entries; the entries behind them become 0, and
/// so do those below epsilon squared, for the reason given at sigmoid.
template <class Real, class Visible>
void softmax(std::size_t rows, std::size_t width, Real scale, Real* x, Visible visible) {
  vectorised([=](auto bytes) {
    constexpr int lanes = bytes / static_cast<int>(sizeof(Real));
    constexpr Real least = std::numeric_limits<Real>::epsilon() * std::numeric_limits<Real>::epsilon();
    for (std::size_t t = 0; t < rows; ++t) {
      Real* at = x + t * width;
      const std::size_t n = visible(t);
      const Real top = largest<lanes>(n, at);
      for (std::size_t j = 0; j < n; ++j) at[j] = exponential(scale * (at[j] - top));
      const Real total = sum<lanes, Real>(n, [=](std::size_t j) { return at[j]; });
      for (std::size_t j = 0; j < n; ++j) at[j] = at[j] < least * total ? Real(0) : at[j] / total;
      for (std::size_t j = n; j < width; ++j) at[j] = 0;
    }
  });
}

/// In place: d (the gradient of a softmax's result p) becomes the gradient of what it was taken from, before `scale`.
template <class Real> void softmax_backward(std::size_t rows, std::size_t width, Real scale, const Real* p, Real* d) {
  vectorised([=](auto bytes) {
    constexpr int lanes = bytes / static_cast<int>(sizeof(Real));
    for (std::size_t t = 0; t < rows; ++t) {
      const Real* at = p + t * width;
      Real* to = d + t * width;
      const Real dot = sum<lanes, Real>(width, [=](std::size_t j) { return at[j] * to[j]; });
      for (std::size_t j = 0; j < width; ++j) to[j] = scale * at[j] * (to[j] - dot);
    }
  });
}

/// out = x^T for a rows x width matrix whose rows are `stride` apart.
template <class Real>
void transpose(std::size_t rows, std::size_t width, const Real* x, std::size_t stride, Real* out) {
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < width; ++j) out[j * rows + i] = x[i * stride + j];
  }
}

/// y += x.
template <class Real> void add(std::size_t n, const Real* x, Real* y) {
  vectorised([=](auto) {
    for (std::size_t i = 0; i < n; ++i) y[i] += x[i];
  });
}

/// Every row of y += bias.
template <class Real> void add_to_rows(std::size_t rows, std::size_t width, const Real* bias, Real* y) {
  for (std::size_t t = 0; t < rows; ++t) add(width, bias, y + t * width);
}

/// total += every row of x.
template <class Real> void add_rows(std::size_t rows, std::size_t width, const Real* x, Real* total) {
  for (std::size_t t = 0; t < rows; ++t) add(width, x + t * width, total);
}

/// The gradient of the cross-entropy: d = share * (p - 1 at the target, p elsewhere), row by row.
template <class Real>
void cross_entropy_backward(std::size_t rows, std::size_t width, Real share, const Real* p, const std::int32_t* targets,
                            Real* d) {
  vectorised([=](auto) {
    for (std::size_t i = 0; i < rows * width; ++i) d[i] = share * p[i];
  });
  for (std::size_t t = 0; t < rows; ++t) d[t * width + static_cast<std::size_t>(targets[t])] -= share;
}

/// y = x W + bias: x is rows x in, W is in x out.
template <class Real>
void linear(std::size_t rows, std::size_t in, std::size_t out, const Real* x, const Real* weight, const Real* bias,
            Real* y) {
  multiply<Real>(rows, out, in, {x, in}, weight, out, y, out);
  add_to_rows(rows, out, bias, y);
}

/// Backward of linear: adds to d_weight and d_bias, and writes d_x. `turned` is W transposed (out x in).
template <class Real>
void linear_backward(std::size_t rows, std::size_t in, std::size_t out, const Real* x, const Real* turned,
                     const Real* d_y, Real* d_weight, Real* d_bias, Real* d_x) {
  multiply<Real>(in, out, rows, view<Real>{x, in}.transposed(), d_y, out, d_weight, out, true);
  add_rows(rows, out, d_y, d_bias);
  multiply<Real>(rows, in, out, {d_y, out}, turned, in, d_x, in);
}

}  // namespace gpt

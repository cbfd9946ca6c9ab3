// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The model's gradients against finite differences in double precision, and its float version against the double one.

#include <heddle/memory/host_resource.hpp>
#include <heddle/memory/tracking.hpp>
#include <heddle/recompute/chain.hpp>
#include <heddle/recompute/checked.hpp>
#include <heddle/recompute/none.hpp>
#include <heddle/recompute/optimal.hpp>
#include <heddle/recompute/selective.hpp>
#include <heddle/recompute/sqrt.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "catch.hpp"
#include "data.hpp"
#include "fine.hpp"
#include "model.hpp"

namespace {

namespace hd = heddle;

const gpt::shape small{.vocabulary = 11, .context = 9, .width = 12, .heads = 3, .layers = 3, .batch = 2};

gpt::sequences some_text(const gpt::shape& s) {
  std::vector<std::int32_t> text(s.batch * s.context + 1);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<std::int32_t>(gpt::hash(5, i) % s.vocabulary);
  gpt::sequences out;
  for (std::size_t b = 0; b < s.batch; ++b) out.set(b, text, b * s.context, s.context);
  return out;
}

template <class Real> std::vector<hd::recompute::layer> layers_of(gpt::model<Real>& m) {
  std::vector<hd::recompute::layer> out;
  m.for_each_layer([&](auto& l, std::string name) { out.emplace_back(l, std::move(name)); });
  return out;
}

/// The loss, and all gradients in m.gradients().
template <class Real, class Policy> double run(gpt::model<Real>& m, const gpt::sequences& text, Policy policy) {
  hd::recompute::chain chain{policy, hd::host_resource{}, layers_of(m)};
  m.shared().targets = text.targets.data();
  const double loss = *static_cast<const double*>(chain.forward(text.inputs.data()));
  const double one = 1;
  chain.backward(&one, nullptr);
  return loss;
}

template <class Real> double loss_only(gpt::model<Real>& m, const gpt::sequences& text) {
  hd::recompute::chain chain{hd::recompute::none{}, hd::host_resource{}, layers_of(m)};
  m.shared().targets = text.targets.data();
  double loss = 0;
  chain.infer(text.inputs.data(), &loss);
  return loss;
}

/// Moves every parameter off its initial value: a gain of 1 or a bias of 0 would hide mistakes.
template <class Real> void shake(gpt::model<Real>& m) {
  for (std::size_t i = 0; i < m.parameters().size(); ++i) {
    m.parameters()[i] += static_cast<Real>(0.4 * (static_cast<double>(gpt::hash(9, i) % 2001) / 1000 - 1));
  }
}

}  // namespace

TEST_CASE("gpt: blocks cut into eight layers give the same loss and gradients under every policy", "[gpt]") {
  gpt::model<double> m{small, 1};
  shake(m);
  const gpt::sequences text = some_text(small);
  const double loss = run(m, text, hd::recompute::none{});
  const std::vector<double> expected = m.gradients();
  const gpt::fine_layers<double> fine{m};
  const auto check = [&](auto policy) {
    hd::tracking memory{hd::host_resource{}};
    std::vector<int> told(m.plan().size());
    m.shared().ready = [&](std::size_t i) { ++told[i]; };
    std::fill(m.gradients().begin(), m.gradients().end(), 7.0);
    hd::recompute::chain chain{hd::recompute::checked{policy}, memory, fine.list()};
    CHECK(*static_cast<const double*>(chain.forward(text.inputs.data())) == Approx(loss).epsilon(1e-13));
    const double one = 1;
    chain.backward(&one, nullptr);
    CHECK(memory.peak_bytes() == chain.simulated().peak_bytes);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (m.gradients()[i] != Approx(expected[i]).epsilon(1e-11).margin(1e-13)) FAIL("gradient " << i);
    }
    for (const int times : told) CHECK(times == 1);
    m.shared().ready = [](std::size_t) {};
    return chain.simulated().peak_bytes;
  };
  const std::size_t most = check(hd::recompute::none{});
  check(hd::recompute::sqrt{});
  check(hd::recompute::revolve{3});
  const std::size_t least = check(hd::recompute::leanest{});
  CHECK(4 * least < most);
  CHECK(check(hd::recompute::optimal{(least + most) / 2}) <= (least + most) / 2);
  CHECK(check(hd::recompute::selective{hd::recompute::named{{"attention", "gelu", "norm"}}}) < most);
}

TEST_CASE("gpt: every tensor's gradient is the slope of the loss", "[gpt]") {
  gpt::model<double> m{small, 1};
  shake(m);
  const gpt::sequences text = some_text(small);
  const double loss = run(m, text, hd::recompute::none{});
  CHECK(loss == Approx(loss_only(m, text)).epsilon(1e-14));
  const std::vector<double> gradients = m.gradients();
  std::size_t at = 0;
  for (const gpt::tensor_plan& tensor : m.plan()) {
    INFO(tensor.name);
    for (std::size_t trial = 0; trial < 8; ++trial) {
      const std::size_t i = at + gpt::hash(trial, at) % tensor.count;
      const double before = m.parameters()[i];
      const double h = 1e-5;
      m.parameters()[i] = before + h;
      const double above = loss_only(m, text);
      m.parameters()[i] = before - h;
      const double below = loss_only(m, text);
      m.parameters()[i] = before;
      INFO("element " << i - at << " of " << tensor.count);
      CHECK(gradients[i] == Approx((above - below) / (2 * h)).epsilon(1e-6).margin(1e-9));
    }
    at += tensor.count;
  }
}

TEST_CASE("gpt: the float model computes what the double model does", "[gpt]") {
  gpt::model<double> exact{small, 1};
  gpt::model<float> m{small, 1};
  shake(exact);
  for (std::size_t i = 0; i < m.parameters().size(); ++i) {
    m.parameters()[i] = static_cast<float>(exact.parameters()[i]);
    exact.parameters()[i] = static_cast<double>(m.parameters()[i]);
  }
  const gpt::sequences text = some_text(small);
  CHECK(run(m, text, hd::recompute::none{}) == Approx(run(exact, text, hd::recompute::none{})).epsilon(1e-6));
  for (std::size_t i = 0; i < m.gradients().size(); ++i) {
    REQUIRE(static_cast<double>(m.gradients()[i]) == Approx(exact.gradients()[i]).epsilon(1e-4).margin(1e-6));
  }
}

TEST_CASE("gpt: recomputation changes no bit, and each tensor becomes ready once", "[gpt]") {
  gpt::model<float> m{small, 1};
  const gpt::sequences text = some_text(small);
  const double loss = run(m, text, hd::recompute::none{});
  const std::vector<float> gradients = m.gradients();
  std::vector<int> ready(m.plan().size());
  m.shared().ready = [&](std::size_t i) { ++ready[i]; };
  CHECK(run(m, text, hd::recompute::sqrt{}) == loss);
  CHECK(m.gradients() == gradients);
  CHECK(ready == std::vector<int>(ready.size(), 1));
}

TEST_CASE("gpt: products equal the plain triple loop, for every remainder of the tile", "[gpt]") {
  for (const std::size_t m : {0, 1, 7, 8, 9, 17}) {
    for (const std::size_t n : {0, 1, 15, 16, 17, 65}) {
      for (const std::size_t k : {0, 1, 2, 33}) {
        for (const bool turned : {false, true}) {
          for (const bool add : {false, true}) {
            std::vector<double> a(m * k), b(k * n), c(m * n);
            for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<double>(gpt::hash(1, i) % 17) - 8;
            for (std::size_t i = 0; i < b.size(); ++i) b[i] = static_cast<double>(gpt::hash(2, i) % 17) - 8;
            for (std::size_t i = 0; i < c.size(); ++i) c[i] = static_cast<double>(gpt::hash(3, i) % 17) - 8;
            const gpt::view<double> left = turned ? gpt::view<double>{a.data(), 1, m} : gpt::view<double>{a.data(), k};
            std::vector<double> expected(m * n);
            for (std::size_t i = 0; i < m; ++i) {
              for (std::size_t j = 0; j < n; ++j) {
                double sum = add ? c[i * n + j] : 0;
                for (std::size_t p = 0; p < k; ++p) sum += a[turned ? p * m + i : i * k + p] * b[p * n + j];
                expected[i * n + j] = sum;
              }
            }
            gpt::multiply<double>(m, n, k, left, b.data(), n, c.data(), n, add);
            INFO(m << " x " << k << " times " << k << " x " << n << ", turned " << turned << ", add " << add);
            REQUIRE(c == expected);
          }
        }
      }
    }
  }
}

TEST_CASE("gpt: the fast exponential is exact to a few units in the last place", "[gpt]") {
  double worst = 0;
  for (int i = -80000; i <= 80000; ++i) {
    const float x = static_cast<float>(i) * 1e-3f;
    const double exact = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(static_cast<double>(gpt::exponential(x)) - exact) / exact);
  }
  CHECK(worst < 3e-7);
}

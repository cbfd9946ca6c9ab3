// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The device's passes of DGC against double precision: several tensors in one launch, aligned and not.

#include "../core/conformance.hpp"
#include "../support/catch.hpp"

#include <heddle/compress/dgc.cuh>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

namespace {
namespace hd = heddle;

template <class Value> using device = heddle_test::array<hd::cuda, Value>;

double uniform(std::uint64_t stream, std::uint64_t i) {  // in (0, 1)
  return (static_cast<double>(hd::philox(7, stream, i).word[0]) + 0.5) * 0x1p-32;
}
float normal(std::uint64_t stream, std::uint64_t i) {
  return static_cast<float>(std::sqrt(-2.0 * std::log(uniform(stream, 2 * i))) *
                            std::cos(6.283185307179586 * uniform(stream, 2 * i + 1)));
}

// A tensor on the device and its oracle.
struct one {
  one(hd::cuda::queue q, std::size_t n, std::uint32_t k, std::uint32_t most, std::size_t skew)
      : count(n), entries(k), capacity(most), offset(skew), u(n, 0.0), v(n, 0.0),
        g_(q, n + skew), w_(q, n + skew), u_(q, std::vector<float>(n + skew, 0.0f)),
        v_(q, std::vector<float>(n + skew, 0.0f)), value_(q, most), index_(q, most) {}
  hd::dgc_segment segment(bool decays) const {
    return {g_.data() + offset, decays ? w_.data() + offset : nullptr, u_.data() + offset, v_.data() + offset,
            index_.data(), value_.data(), count, entries, capacity, scale_at};
  }
  const float* scale_at = nullptr;
  // After a step whose gradient and parameter were these: checks everything; returns the number of entries sent.
  std::uint32_t check(const std::vector<float>& g, const std::vector<float>& w, const hd::encode_context& x, float factor,
                      std::uint32_t found, bool masking, bool sorted) {
    const std::uint32_t sent = std::min(found, capacity);
    const std::vector<float> got_u = u_.get(), got_v = v_.get(), value = value_.get();
    const std::vector<std::uint32_t> index = index_.get();
    std::vector<char> gone(count, 0);
    double scale = 0.0, worst = 0.0;
    for (std::size_t i = 0; i < count; ++i) {
      const double mine = static_cast<double>(g[i]) * factor / x.ranks + (w.empty() ? 0.0 : static_cast<double>(x.weight_decay) * w[i] / x.ranks);
      u[i] = x.nesterov ? x.momentum * (u[i] + mine) : x.momentum * u[i] + mine;
      v[i] += u[i] + (x.nesterov ? mine : 0.0);
      scale = std::max(scale, std::fabs(v[i]));
    }
    float least = std::numeric_limits<float>::infinity(), held = 0.0f;
    for (std::uint32_t j = 0; j < sent; ++j) {
      const std::uint32_t i = index[j];
      if (i >= count || gone[i] || (sorted && j > 0 && index[j - 1] >= i)) return ~0u;
      gone[i] = 1;
      worst = std::max(worst, std::fabs(value[j] - v[i]));
      v[i] = 0.0;
      if (masking) u[i] = 0.0;
      least = std::min(least, std::fabs(value[j]));
    }
    for (std::size_t i = 0; i < count; ++i) {
      worst = std::max(worst, std::fabs(got_v[i + offset] - v[i]));
      worst = std::max(worst, std::fabs(got_u[i + offset] - u[i]));
      held = std::max(held, std::fabs(got_v[i + offset]));
      u[i] = got_u[i + offset];  // so that roundings don't add up
      v[i] = got_v[i + offset];
    }
    if (worst > 1e-5 * scale + 1e-30) return ~0u;
    if (found <= capacity && sent && least < held) return ~0u;  // all that reached the threshold went
    return sent;
  }

  std::size_t count;
  std::uint32_t entries, capacity;
  std::size_t offset;
  std::vector<double> u, v;
  device<float> g_, w_, u_, v_, value_;
  device<std::uint32_t> index_;
};

std::uint32_t found_in(const hd::dgc_control* c, hd::cuda::queue q) {
  hd::dgc_control host{};
  hd::cuda::copy(c, &host, 1, q);
  q.synchronize();
  return host.found;
}
}  // namespace

TEST_CASE("compress: one launch moves several tensors as the definition says, entries in any order or sorted") {
  const hd::cuda::queue q{};
  const std::size_t sizes[] = {0, 1, 3, 1023, 1024, 1025, 5000, 0};
  const std::vector<float> factors{1, 1, 0.5f, 1, 2, 1, 0.25f, 1};
  const device<float> scale(q, factors);
  for (const bool sorted : {false, true}) {
    std::vector<std::unique_ptr<one>> all;
    std::vector<hd::dgc_segment> segments;
    for (std::size_t j = 0; j < std::size(sizes); ++j) {
      const auto k = static_cast<std::uint32_t>((sizes[j] + 19) / 20);
      all.push_back(std::make_unique<one>(q, sizes[j], k, k + k / 4 + 1, j % 3 == 2 ? 1 : 0));
      all.back()->scale_at = scale.data() + j;
      segments.push_back(all.back()->segment(j % 2 == 0));
    }
    hd::dgc_device passes(segments, q, sorted);
    device<std::uint32_t> bad(q, std::vector<std::uint32_t>{0});
    for (std::size_t step = 0; step < 4; ++step) {
      const hd::dgc c{.masking = step != 2};
      const hd::encode_context x{.step = step, .ranks = 3, .momentum = 0.9f, .nesterov = step % 2 == 1, .weight_decay = 0.01f};
      std::vector<std::vector<float>> g, w;
      for (std::size_t j = 0; j < all.size(); ++j) {
        one& t = *all[j];
        std::vector<float> here(t.count + t.offset), there(t.count + t.offset);
        for (std::size_t i = 0; i < here.size(); ++i) here[i] = normal(10 * step + j, i), there[i] = normal(99 + j, i);
        hd::cuda::copy(here.data(), t.g_.data(), here.size(), q);
        hd::cuda::copy(there.data(), t.w_.data(), there.size(), q);
        q.synchronize();
        g.emplace_back(here.begin() + static_cast<std::ptrdiff_t>(t.offset), here.end());
        w.emplace_back(there.begin() + static_cast<std::ptrdiff_t>(t.offset), there.end());
        if (j % 2) w.back().clear();
      }
      passes.finite(bad.data(), q);
      CHECK(bad.get()[0] == 0);
      passes.step(c, x, q);
      q.synchronize();
      for (std::size_t j = 0; j < all.size(); ++j) {
        const std::uint32_t found = found_in(passes.control() + j, q);
        CHECK(all[j]->check(g[j], w[j], x, factors[j], found, c.masking, sorted) == std::min(found, all[j]->capacity));
      }
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    hd::cuda::copy(&nan, all[6]->g_.data() + 4321, 1, q);
    passes.finite(bad.data(), q);
    CHECK(bad.get()[0] == 1);
  }
}

// The host's passes with the thresholds that the device used: sends the same elements, and moves the same bits, whether
// in one pass or in two halves; a step that is not committed leaves no trace.
TEST_CASE("compress: the device sends what the host would at the same threshold, in one pass and in halves") {
  const hd::cuda::queue q{};
  const std::size_t n = 5003;
  const std::uint32_t k = 100;
  const device<float> factor(q, std::vector<float>{0.3f});
  for (const bool nesterov : {false, true}) {
    const std::uint32_t room = nesterov ? k - k / 3 : k + k / 4;  // too little for what reaches the threshold
    one whole(q, n, k, room, 1), halves(q, n, k, room, 0);
    whole.scale_at = halves.scale_at = factor.data();
    const hd::dgc_segment a = whole.segment(nesterov), b = halves.segment(nesterov);
    hd::dgc_device fused(std::span(&a, 1), q, true), twice(std::span(&b, 1), q, true);
    device<std::uint32_t> bad(q, std::vector<std::uint32_t>{0});
    std::vector<float> u(n, 0.0f), v(n, 0.0f), g(n), w(n);
    for (std::size_t step = 0; step < 6; ++step) {
      const hd::dgc c{.masking = step != 2};
      const hd::encode_context x{.step = step, .ranks = 3, .momentum = 0.9f, .nesterov = nesterov,
                                 .weight_decay = nesterov ? 0.01f : 0.0f};
      for (std::size_t i = 0; i < n; ++i) g[i] = normal(300 + step, i), w[i] = normal(400 + step, i);
      const auto give = [&](const hd::dgc_segment& to) {
        hd::cuda::copy(g.data(), const_cast<float*>(to.gradient), n, q);
        if (to.parameter) hd::cuda::copy(w.data(), const_cast<float*>(to.parameter), n, q);
        q.synchronize();
      };
      if (step == 3) {  // looked at, and not taken
        const float good = std::exchange(g[77], std::numeric_limits<float>::infinity());
        give(b);
        twice.prepare(c, x, bad.data(), q);
        CHECK(bad.get()[0] == 1);
        hd::cuda::fill(bad.data(), 1, 0u, q);
        g[77] = good;
      }
      give(a);
      give(b);
      fused.step(c, x, q);
      twice.prepare(c, x, bad.data(), q);
      CHECK(bad.get()[0] == 0);
      hd::dgc_control known{};
      hd::cuda::copy(static_cast<const hd::dgc_control*>(fused.control()), &known, 1, q);
      twice.commit(c, x, q);
      q.synchronize();
      // The host's pass, rounded as there.
      hd::encode_context there = x;
      there.parameter = nesterov ? w.data() : nullptr;
      hd::detail::largest none(0, 0, 0);
      hd::detail::dgc_pass<true>(hd::detail::dgc_rule(0.3f, there), {g.data(), there.parameter, u.data(), v.data()}, n, none);
      const std::uint32_t from = known.used & hd::detail::dgc_magnitude;
      std::vector<std::uint32_t> index;
      std::vector<float> value;
      for (std::size_t i = 0; i < n && index.size() < room; ++i) {
        if (v[i] == 0.0f || (std::bit_cast<std::uint32_t>(v[i]) & hd::detail::dgc_magnitude) < from) continue;
        index.push_back(static_cast<std::uint32_t>(i));
        value.push_back(v[i]);
        v[i] = 0.0f;
        if (c.masking) u[i] = 0.0f;
      }
      CHECK(index.size() >= k / 2);
      CHECK((index.size() == room) == nesterov);
      for (const one* t : {&whole, &halves}) {
        auto got_index = t->index_.get();
        auto got_value = t->value_.get(), got_u = t->u_.get(), got_v = t->v_.get();
        got_index.resize(index.size());
        got_value.resize(index.size());
        got_u.erase(got_u.begin(), got_u.begin() + static_cast<std::ptrdiff_t>(t->offset));
        got_v.erase(got_v.begin(), got_v.begin() + static_cast<std::ptrdiff_t>(t->offset));
        CHECK(got_index == index);
        CHECK(got_value == value);
        CHECK(got_u == u);
        CHECK(got_v == v);
      }
      CHECK(found_in(twice.control(), q) == found_in(fused.control(), q));
    }
    hd::dgc_device any(std::span(&a, 1), q, false);
    CHECK_THROWS_AS(any.prepare({}, {}, bad.data(), q), hd::argument_error);
  }
}

TEST_CASE("compress: the state on a device is saved, goes on bit for bit, and is divided among other ranks") {
  const hd::cuda::queue q{};
  char folder[] = "/tmp/heddle-test-XXXXXX";
  REQUIRE(::mkdtemp(folder) != nullptr);
  const std::string files[2] = {std::string(folder) + "/0", std::string(folder) + "/1"};
  std::vector<std::unique_ptr<one>> ranks;  // two of the same step, and one to go on elsewhere
  std::vector<std::unique_ptr<hd::dgc_device>> passes;
  const std::size_t n = 3000;
  for (std::size_t r = 0; r < 3; ++r) {
    ranks.push_back(std::make_unique<one>(q, n, 30, 37, 0));
    const hd::dgc_segment segment = ranks.back()->segment(false);
    passes.push_back(std::make_unique<hd::dgc_device>(std::span(&segment, 1), q, true));
  }
  const auto step = [&](std::size_t r, std::size_t s, std::size_t stream) {
    std::vector<float> g(n);
    for (std::size_t i = 0; i < n; ++i) g[i] = normal(500 + 10 * s + stream, i);
    hd::cuda::copy(g.data(), ranks[r]->g_.data(), n, q);
    q.synchronize();
    passes[r]->step({}, {.step = s, .ranks = 2, .momentum = 0.9f}, q);
    q.synchronize();
  };
  for (std::size_t s = 0; s < 8; ++s) step(0, s, 0), step(1, s, 1);
  for (const std::size_t r : {0, 1}) passes[r]->save(files[r], q);
  passes[2]->load(std::span(files, 1), 1, q);
  step(0, 8, 0);
  step(2, 8, 0);
  CHECK(ranks[2]->u_.get() == ranks[0]->u_.get());
  CHECK(ranks[2]->v_.get() == ranks[0]->v_.get());
  CHECK(ranks[2]->index_.get() == ranks[0]->index_.get());
  passes[0]->load(std::span(files, 1), 1, q);
  passes[2]->load(files, 3, q);  // each of three
  const std::vector<float> a = ranks[0]->v_.get(), b = ranks[1]->v_.get(), third = ranks[2]->v_.get();
  double worst = 0.0;
  for (std::size_t i = 0; i < n; ++i)
    worst = std::max(worst, std::fabs(static_cast<double>(third[i]) - (static_cast<double>(a[i]) + b[i]) / 3.0));
  CHECK(worst < 1e-6);
  step(2, 8, 0);
  const std::uint32_t found = found_in(passes[2]->control(), q);
  CHECK((found >= 15 && found <= 37));
  CHECK_THROWS_AS(passes[2]->load({}, 1, q), hd::argument_error);
  CHECK_THROWS_AS(passes[2]->load(files, 0, q), hd::argument_error);
  const std::vector<float> before = ranks[2]->v_.get();
  std::remove(files[1].c_str());
  CHECK_THROWS_AS(passes[2]->load(files, 3, q), hd::file_error);
  CHECK(ranks[2]->v_.get() == before);
  std::remove(files[0].c_str());
  ::rmdir(folder);
}

TEST_CASE("compress: the threshold is steered into 0.5 to 1.25 of what is wanted") {
  const hd::cuda::queue q{};
  const std::size_t n = 12000;
  const std::uint32_t k = 120;
  for (int kind = 0; kind < 3; ++kind) {
    one t(q, n, k, k + k / 4, 0);
    const hd::dgc_segment segment = t.segment(false);
    hd::dgc_device passes(std::span(&segment, 1), q, true);
    std::vector<float> g(n);
    for (std::size_t step = 0; step < 12; ++step) {
      for (std::size_t i = 0; i < n; ++i) {
        g[i] = normal(1000 + step, i);
        if (kind == 1) g[i] /= static_cast<float>(std::sqrt(uniform(2000 + step, i)));  // no variance
        if (kind == 2 && i < n / 8) g[i] *= 10.0f;
      }
      hd::cuda::copy(g.data(), t.g_.data(), n, q);
      const hd::encode_context x{.step = step, .momentum = 0.9f};
      passes.step({}, x, q);
      q.synchronize();
      const std::uint32_t found = found_in(passes.control(), q);
      CHECK(t.check(g, {}, x, 1.0f, found, true, true) == std::min(found, k + k / 4));
      INFO("kind " << kind << ", step " << step << ", found " << found);
      if (step >= 2) CHECK((found >= k / 2 && found <= k + k / 4));
    }
  }
}

TEST_CASE("compress: equal magnitudes move in every step, zeros send nothing, lists add up") {
  const hd::cuda::queue q{};
  const std::size_t n = 3000;
  one t(q, n, 30, 37, 0);
  const hd::dgc_segment segment = t.segment(false);
  hd::dgc_device passes(std::span(&segment, 1), q, true);
  std::vector<float> g(n, 0.0f), sum(n, 0.0f);
  device<float> total(q, sum);
  for (std::size_t step = 0; step < 4; ++step) {
    if (step == 1) std::fill(g.begin(), g.end(), -0.5f);
    hd::cuda::copy(g.data(), t.g_.data(), n, q);
    passes.step({}, {.step = step}, q);
    q.synchronize();
    const std::uint32_t found = found_in(passes.control(), q);
    CHECK(t.check(g, {}, {.step = step}, 1.0f, found, true, true) == (step ? 37u : 0u));
    hd::dgc_device::add(t.index_.data(), t.value_.data(), std::min(found, t.capacity), total.data(), q);
  }
  const std::vector<float> got = total.get(), held = t.v_.get();
  double worst = 0.0;
  for (std::size_t i = 0; i < n; ++i) worst = std::max<double>(worst, std::fabs(got[i] + held[i] + 1.5f));
  CHECK(worst == 0.0);
}

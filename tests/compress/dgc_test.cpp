// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/compress/clip.hpp>
#include <heddle/compress/dgc.hpp>
#include <heddle/compress/sparse_wire.hpp>
#include <heddle/core/philox.hpp>
#include <heddle/optim/sgd.hpp>

#include "../support/catch.hpp"

#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>

namespace hd = heddle;

namespace {
struct state {
  explicit state(std::size_t n) : u(n, 0.0f), v(n, 0.0f) {}
  std::vector<float> u, v, numbers = std::vector<float>(hd::dgc::extra(0), 0.0f);
  float* slots[3] = {u.data(), v.data(), numbers.data()};
};

std::vector<std::byte> packet_of(const hd::dgc& c, const std::vector<float>& g, state& s, const hd::encode_context& x,
                                 float factor = 1.0f) {
  std::vector<std::byte> p;
  c.encode({g.data(), g.size()}, factor, s.slots, x, p);
  return p;
}

std::vector<float> decoded(const hd::dgc& c, const std::vector<std::byte>& p, std::size_t n) {
  std::vector<float> sum(n, 0.0f);
  CHECK(c.decode_add({p.data(), p.size()}, {sum.data(), n}) == p.size());
  return sum;
}

std::vector<std::uint32_t> largest(const std::vector<float>& v, std::size_t k) {
  hd::detail::largest found(v.size(), k, 0);
  hd::detail::offer_all(v.data(), 0, v.size(), found);
  std::vector<std::uint32_t> chosen;
  std::vector<float> values;
  found.finish(chosen, values);
  return chosen;
}

// The definition, by sorting: larger magnitude first, then the lower index.
std::vector<std::uint32_t> largest_by_sorting(const std::vector<float>& v, std::size_t k) {
  std::vector<std::uint32_t> order(v.size());
  for (std::size_t i = 0; i < v.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    const double x = std::fabs(static_cast<double>(v[a])), y = std::fabs(static_cast<double>(v[b]));
    return x != y ? x > y : a < b;
  });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}
}  // namespace

TEST_CASE("what is found are the k largest magnitudes, ties by the lower index") {
  std::mt19937 random(7);
  const auto check = [](const std::vector<float>& v) {
    for (const std::size_t k : {std::size_t{0}, std::size_t{1}, v.size() / 3, v.size()}) {
      if (k <= v.size()) CHECK(largest(v, k) == largest_by_sorting(v, k));
    }
  };
  for (const std::size_t n : {1u, 2u, 31u, 33u, 1000u, 1024u, 1025u, 10007u}) {
    std::vector<float> v(n);
    for (float& x : v) x = std::normal_distribution<float>()(random);
    check(v);
    for (float& x : v) x = std::student_t_distribution<float>(1.5f)(random);
    check(v);
    check(std::vector<float>(n, 0.25f));   // all equal
    check(std::vector<float>(n, -0.25f));
    check(std::vector<float>(n, 0.0f));    // all zero
    for (std::size_t i = 0; i < n; ++i) v[i] = i % 2 ? 0.0f : -0.0f;
    check(v);
    for (std::size_t i = 0; i < n; ++i) v[i] = std::ldexp(static_cast<float>(i % 7), -149);  // denormals
    check(v);
    for (std::size_t i = 0; i < n; ++i) v[i] = static_cast<float>(i % 5) - 2.0f;  // many ties
    check(v);
    for (std::size_t i = 0; i < n; ++i) v[i] = (i < n / 8 ? 10.0f : 1.0f) * std::normal_distribution<float>()(random);
    check(v);
  }
}

TEST_CASE("a blocky tensor does not select more than k") {
  std::mt19937 random(3);
  std::vector<float> g(100000);
  for (std::size_t i = 0; i < g.size(); ++i) g[i] = (i < g.size() / 8 ? 10.0f : 1.0f) * std::normal_distribution<float>()(random);
  const hd::dgc c{.sparsity = 0.999, .dense_below = 0};
  state s(g.size());
  const auto p = packet_of(c, g, s, {});
  CHECK(hd::sparse_packet({p.data(), p.size()}).entries() == 100);
}

TEST_CASE("entries follow the warm-up and never exceed the tensor") {
  const hd::dgc c{.sparsity = 0.999, .begin_step = 100, .warmup_steps = 40, .dense_below = 10};
  CHECK_FALSE(c.sends(1000, {.step = 99}));
  CHECK(c.sends(1000, {.step = 100}));
  CHECK_FALSE(c.sends(9, {.step = 200}));
  CHECK(c.entries(1000, {.step = 99}) == 1000);
  CHECK(c.entries(1000, {.step = 100}) == 250);
  CHECK(c.entries(1000, {.step = 110}) == 63);  // ceil(62.5)
  CHECK(c.entries(1000, {.step = 120}) == 16);
  CHECK(c.entries(1000, {.step = 130}) == 4);
  CHECK(c.entries(1000, {.step = 140}) == 1);
  CHECK(c.entries(10, {.step = 140}) == 1);
  CHECK(c.entries(0, {.step = 140}) == 0);
  CHECK(hd::dgc{.sparsity = 0.0}.entries(17, {}) == 17);
  // A ceiling below the first stages wins over them.
  CHECK(hd::dgc{.sparsity = 0.5, .warmup_steps = 4}.entries(100, {}) == 50);
  CHECK_THROWS_AS((hd::dgc{.sparsity = 1.5}.entries(10, {})), hd::argument_error);
  CHECK_THROWS_AS((hd::dgc{.sparsity = -0.1}.entries(10, {})), hd::argument_error);
}

TEST_CASE("encode changes nothing, commit moves the state as the definition says") {
  for (const bool nesterov : {false, true}) {
    for (const bool masking : {true, false}) {
      const std::size_t n = 100;
      const hd::dgc c{.sparsity = 0.9, .dense_below = 0, .masking = masking};
      std::mt19937 random(1);
      std::normal_distribution<float> normal;
      std::vector<float> w(n), g(n);
      for (float& x : w) x = normal(random);
      state s(n);
      std::vector<double> u(n, 0.0), v(n, 0.0);  // the oracle
      for (std::size_t step = 0; step < 20; ++step) {
        for (float& x : g) x = normal(random);
        const hd::encode_context x{.step = step, .ranks = 4, .parameter = w.data(), .momentum = 0.9f, .nesterov = nesterov, .weight_decay = 0.01f};
        const std::vector<float> u0 = s.u, v0 = s.v;
        const auto p = packet_of(c, g, s, x, 0.5f);
        CHECK(u0 == s.u);
        CHECK(v0 == s.v);
        c.commit({g.data(), n}, 0.5f, s.slots, x, {p.data(), p.size()});
        const std::vector<float> sent = decoded(c, p, n);
        std::size_t count = 0;
        for (std::size_t i = 0; i < n; ++i) {
          const double mine = 0.5 * g[i] / 4.0 + 0.01 / 4.0 * w[i];
          u[i] = nesterov ? 0.9 * (u[i] + mine) : 0.9 * u[i] + mine;
          v[i] += u[i] + (nesterov ? mine : 0.0);
          if (sent[i] != 0.0f) {
            ++count;
            CHECK(sent[i] == Approx(v[i]).epsilon(1e-4));
            v[i] = 0.0;
            if (masking) u[i] = 0.0;
          }
          CHECK(s.u[i] == Approx(u[i]).margin(1e-5));
          CHECK(s.v[i] == Approx(v[i]).margin(1e-5));
        }
        CHECK(count == 10);
      }
    }
  }
}

TEST_CASE("what was sent and what is held add up to the momentum-corrected input, over skipped steps too") {
  const std::size_t n = 4096;
  for (const auto values : {hd::sparse_values::f32, hd::sparse_values::f16}) {
    for (const auto how : {hd::selection::exact, hd::selection::sampled}) {
      const hd::dgc c{.sparsity = 0.99, .dense_below = 0, .selection = how, .values = values};
      std::mt19937 random(5);
      std::normal_distribution<float> normal;
      state s(n);
      std::vector<double> in(n, 0.0), out(n, 0.0);
      std::vector<float> g(n);
      for (std::size_t step = 0; step < 50; ++step) {
        for (float& x : g) x = normal(random) * 1e-6f;
        const hd::encode_context x{.step = step, .ranks = 3, .momentum = 0.9f};
        const std::vector<float> u0 = s.u;
        std::vector<std::byte> p;
        if (step % 2) {
          CHECK(c.fits({g.data(), n}, 1.0f, s.slots, x));
          c.fused({g.data(), n}, 1.0f, s.slots, x, p);
        } else {
          p = packet_of(c, g, s, x);
          if (step == 20) continue;  // skipped: encoded, never committed
          c.commit({g.data(), g.size()}, 1.0f, s.slots, x, {p.data(), p.size()});
        }
        const std::vector<float> sent = decoded(c, p, n);
        for (std::size_t i = 0; i < n; ++i) {
          in[i] += 0.9f * u0[i] + g[i] / 3.0f;
          out[i] += sent[i];
        }
      }
      double worst = 0.0, scale = 0.0;
      for (std::size_t i = 0; i < n; ++i) {
        worst = std::max(worst, std::fabs(in[i] - (out[i] + s.v[i])));
        scale = std::max(scale, std::fabs(in[i]));
      }
      CHECK(worst <= 1e-6 * scale);
    }
  }
}

TEST_CASE("one pass does what the two halves do") {
  for (const std::size_t n : {1u, 17u, 31u, 1024u, 10007u}) {
    for (const bool nesterov : {false, true}) {
      const hd::dgc c{.sparsity = 0.95, .dense_below = 0, .values = hd::sparse_values::f16};
      state a(n), b(n);
      std::mt19937 random(6);
      std::vector<float> g(n), w(n, 0.5f);
      for (std::size_t step = 0; step < 12; ++step) {
        for (float& x : g) x = std::student_t_distribution<float>(2.0f)(random);
        if (step == 8) std::fill(g.begin(), g.end(), 0.0f);  // the threshold is too high at once
        const hd::encode_context x{.step = step, .ranks = 2, .parameter = nesterov ? w.data() : nullptr, .momentum = 0.9f, .nesterov = nesterov, .weight_decay = 0.01f};
        const auto p = packet_of(c, g, a, x);
        c.commit({g.data(), n}, 1.0f, a.slots, x, {p.data(), p.size()});
        std::vector<std::byte> q;
        c.fused({g.data(), n}, 1.0f, b.slots, x, q);
        CHECK(p == q);
        CHECK(a.u == b.u);
        CHECK(a.v == b.v);
        CHECK(a.numbers == b.numbers);
        const double most = *std::max_element(a.v.begin(), a.v.end());
        CHECK(most <= static_cast<double>(a.numbers[1]));
      }
    }
  }
}

TEST_CASE("the selection sends what it says on tensors of every kind") {
  const std::size_t n = 50000;
  const std::size_t k = 50;
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  std::student_t_distribution<float> heavy(1.5f);
  for (int kind = 0; kind < 4; ++kind) {
    const auto draw = [&](std::size_t i, std::size_t step) {
      if (kind == 0) return normal(random);
      if (kind == 1) return heavy(random);
      if (kind == 2) return (i < n / 8 ? 10.0f : 1.0f) * normal(random);
      return normal(random) * (step < 10 ? 1.0f : step < 20 ? 1e-3f : 1e3f);  // it shrinks and it explodes
    };
    for (const auto how : {hd::selection::exact, hd::selection::sampled}) {
      const hd::dgc c{.sparsity = 0.999, .dense_below = 0, .selection = how};
      state s(n);
      std::vector<float> g(n);
      std::vector<std::byte> p;
      for (std::size_t step = 0; step < 30; ++step) {
        for (std::size_t i = 0; i < n; ++i) g[i] = draw(i, step);
        p.clear();
        c.fused({g.data(), n}, 1.0f, s.slots, {.step = step, .momentum = 0.9f}, p);
        const std::vector<float> sent = decoded(c, p, n);
        const std::size_t count = c.elements({p.data(), p.size()});
        CHECK((how == hd::selection::exact ? count == k : count >= k / 2 && count <= k + k / 4));
        float least = std::numeric_limits<float>::infinity(), held = 0.0f;
        for (std::size_t i = 0; i < n; ++i) {
          if (sent[i] != 0.0f) least = std::min(least, std::fabs(sent[i]));
          else held = std::max(held, std::fabs(s.v[i]));
        }
        CHECK(least >= held);  // the largest went
      }
    }
  }
}

TEST_CASE("a search that begins too high is mended") {
  std::mt19937 random(12);
  std::vector<float> g(10007);
  for (float& x : g) x = std::normal_distribution<float>()(random);
  for (const auto how : {hd::selection::exact, hd::selection::sampled}) {
    const hd::dgc c{.sparsity = 0.99, .dense_below = 0, .selection = how};
    state s(g.size());
    s.numbers[0] = 3.5f;  // few reach it
    const auto p = packet_of(c, g, s, {});
    CHECK(c.elements({p.data(), p.size()}) >= 101);
    std::vector<std::byte> q;
    c.fused({g.data(), g.size()}, 1.0f, s.slots, {}, q);
    CHECK(p == q);
  }
}

TEST_CASE("what may run in one pass is finite and stays in range") {
  const hd::dgc c{.sparsity = 0.5, .dense_below = 0};
  for (const float huge : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 3e38f}) {
    std::vector<float> g(100, 1.0f), w(100, 1.0f);
    state s(100);
    const hd::encode_context x{.parameter = w.data(), .momentum = 0.9f, .weight_decay = 0.1f};
    CHECK(c.fits({g.data(), 100}, 1.0f, s.slots, x));
    g[77] = huge;
    CHECK(c.fits({g.data(), 100}, 1.0f, s.slots, x) == (huge == 3e38f));
    g[77] = 1.0f;
    w[3] = huge;
    CHECK(c.fits({g.data(), 100}, 1.0f, s.slots, x) == (huge == 3e38f));
    w[3] = 1.0f;
    s.v[5] = 3e38f;  // as after load(), when the numbers are not known
    CHECK(c.fits({g.data(), 100}, 1.0f, s.slots, x));
    s.u[5] = 1e38f;
    CHECK_FALSE(c.fits({g.data(), 100}, 1.0f, s.slots, x));
  }
  CHECK(c.fits({nullptr, 0}, 1.0f, state(0).slots, {}));
}

TEST_CASE("what is too much for a float when all ranks have added it isn't sent; what is not goes on in both forms") {
  const hd::dgc c{.sparsity = 0.5, .dense_below = 0};
  const std::vector<float> g(100, 1.0f);
  for (const int ranks : {1, 2, 8}) {
    for (const float part : {0.9f, 1.1f}) {
      state s(100);
      for (float& v : s.v) v = part * 3.4e38f / static_cast<float>(ranks);
      if (!std::isfinite(s.v[0])) continue;
      const hd::encode_context x{.ranks = ranks};
      const auto p = packet_of(c, g, s, x);
      CHECK(c.flagged({p.data(), p.size()}) == (part > 1.0f));
      CHECK(c.fits({g.data(), 100}, 1.0f, s.slots, x) == (part < 1.0f));  // the quick bound says no to both
    }
  }
  // The velocity of a tensor that travels dense.
  state s(100);
  std::vector<float> huge(100, 1e38f);
  const hd::encode_context x{.ranks = 4, .momentum = 0.9f};
  int steps = 0;
  for (; steps < 10 && c.fits_dense({huge.data(), 100}, s.slots, x); ++steps) {
    c.correct({huge.data(), 100}, s.slots, x);
    CHECK(hd::all_finite(huge.data(), 100));
    huge.assign(100, 1e38f);
  }
  CHECK(steps == 3);  // 1e38 (1 + 0.9 + 0.81 + ...): the fourth would be 3.439e38
}

TEST_CASE("the dense phase in one pass has the bits of the update and plain descent after it") {
  const std::size_t n = 10007;
  const hd::dgc c{.begin_step = 1000};
  for (const bool nesterov : {false, true}) {
    for (const float decay : {0.0f, 0.01f}) {
      state one(n), two(n);
      std::vector<float> p(n), q(n), g(n);
      for (std::size_t i = 0; i < n; ++i) p[i] = q[i] = hd::random_normal(1, 2, i);
      for (std::size_t step = 0; step < 4; ++step) {
        hd::encode_context x{.step = step, .ranks = 3, .momentum = 0.9f, .nesterov = nesterov, .weight_decay = decay};
        for (std::size_t i = 0; i < n; ++i) g[i] = hd::random_normal(3, step, i);
        x.parameter = decay > 0.0f ? p.data() : nullptr;
        const std::vector<float> mean = g;
        c.step_dense({g.data(), n}, p.data(), one.slots, x, 0.1f);
        CHECK(g == mean);
        x.parameter = decay > 0.0f ? q.data() : nullptr;
        c.correct({g.data(), n}, two.slots, x);
        hd::sgd{}.update(q.data(), g.data(), nullptr, n, {.lr = 0.1f});
      }
      CHECK(p == q);
      CHECK(one.u == two.u);
      CHECK(one.slots[2][1] == two.slots[2][1]);
    }
  }
}

TEST_CASE("the number of entries doesn't depend on rounding, however large the tensor") {
  CHECK(hd::dgc{.sparsity = 0.0}.entries(20000000, {}) == 20000000);
  CHECK(hd::dgc{.sparsity = 0.9}.entries(100000000, {}) == 10000000);
  CHECK(hd::dgc{.sparsity = 0.9}.entries(10, {}) == 1);
  CHECK(hd::dgc{.sparsity = 0.7}.entries(10, {}) == 3);
  CHECK(hd::dgc{.sparsity = 0.7}.entries(11, {}) == 4);
  CHECK(hd::dgc{.sparsity = 0.999999999}.entries(1000, {}) == 1);
  CHECK(hd::dgc{}.entries(0, {}) == 0);
}

TEST_CASE("a gradient that is not finite flags the packet and selects nothing") {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const std::size_t where : {0u, 99u}) {
      std::vector<float> g(100, 1.0f);
      g[where] = bad;
      state s(100);
      const hd::dgc c{.sparsity = 0.9, .dense_below = 0};
      const auto p = packet_of(c, g, s, {});
      CHECK(c.flagged({p.data(), p.size()}));
      CHECK(p.size() == 8);
    }
  }
}

TEST_CASE("a constant gradient moves every step; a zero one sends nothing") {
  const hd::dgc c{.sparsity = 0.99, .dense_below = 0};
  state s(1000);
  const std::vector<float> g(1000, 0.3f);
  for (int step = 0; step < 5; ++step) {
    const auto p = packet_of(c, g, s, {});
    CHECK(hd::sparse_packet({p.data(), p.size()}).entries() == 10);
    c.commit({g.data(), g.size()}, 1.0f, s.slots, hd::encode_context{}, {p.data(), p.size()});
  }
  state zero(1000);
  CHECK(packet_of(c, std::vector<float>(1000, 0.0f), zero, {}).size() == 8);
}

TEST_CASE("a tensor with more elements than an index can name is refused before anything is read") {
  state s(1);
  std::vector<std::byte> p;
  const hd::slice<const float> huge{s.u.data(), 0xffffffffull};
  CHECK_THROWS_AS(hd::dgc{}.encode(huge, 1.0f, s.slots, {}, p), hd::argument_error);
  CHECK_THROWS_AS(hd::dgc{}.fused(huge, 1.0f, s.slots, {}, p), hd::argument_error);
  CHECK(p.empty());
}

TEST_CASE("a damaged packet is refused") {
  const hd::dgc c{.sparsity = 0.9, .dense_below = 0};
  state s(100);
  const auto p = packet_of(c, std::vector<float>(100, 1.0f), s, {});
  std::vector<float> sum(100);
  CHECK_THROWS_AS(c.decode_add({p.data(), p.size() - 1}, {sum.data(), 100}), hd::argument_error);
  CHECK_THROWS_AS(c.decode_add({p.data(), 3}, {sum.data(), 100}), hd::argument_error);
  CHECK_THROWS_AS(c.decode_add({p.data(), p.size()}, {sum.data(), 5}), hd::argument_error);
}

TEST_CASE("clip limits the norm of the rank's share and chains from left to right") {
  std::vector<float> g(10007);
  std::mt19937 random(2);
  for (float& x : g) x = std::normal_distribution<float>()(random);
  double square = 0.0;
  for (const float x : g) square += static_cast<double>(x) * x;
  const double norm = std::sqrt(square);
  const hd::slice<const float> s{g.data(), g.size()};
  CHECK(hd::clip{.max_norm = 1.0f}.scale(s, 1.0f, {.ranks = 1}) == Approx(1.0 / norm).epsilon(1e-6));
  CHECK(hd::clip{.max_norm = 1.0f}.scale(s, 1.0f, {.ranks = 4}) == Approx(2.0 / norm).epsilon(1e-6));
  CHECK(hd::clip{.max_norm = 1e6f}.scale(s, 1.0f, {.ranks = 4}) == 1.0f);
  const auto chain = hd::clip{.max_norm = 2.0f} | (hd::clip{.max_norm = 1.0f} | hd::dgc{});
  CHECK(hd::detail::scale_of(chain, s, 1.0f, hd::encode_context{}) == Approx(1.0 / norm).epsilon(1e-6));
  const auto left = (hd::clip{.max_norm = 2.0f} | hd::clip{.max_norm = 1.0f}) | hd::dgc{};
  CHECK(hd::detail::scale_of(left, s, 1.0f, hd::encode_context{}) == Approx(1.0 / norm).epsilon(1e-6));
  const auto loose_last = hd::clip{.max_norm = 1.0f} | (hd::clip{.max_norm = 2.0f} | hd::dgc{});
  CHECK(hd::detail::scale_of(loose_last, s, 1.0f, hd::encode_context{}) == Approx(1.0 / norm).epsilon(1e-6));
  CHECK(hd::clip{}.scale({nullptr, 0}, 1.0f, {}) == 1.0f);
  CHECK_THROWS_AS(hd::clip{.max_norm = 0.0f}.scale(s, 1.0f, {}), hd::argument_error);
}

namespace {
struct entries {
  std::vector<std::uint32_t> index;
  std::vector<float> value;
};

entries read_all(const std::vector<std::byte>& packet, std::size_t n) {
  entries e;
  const std::size_t bytes = hd::for_each_entry({packet.data(), packet.size()}, n, [&](std::uint32_t i, float v) {
    e.index.push_back(i);
    e.value.push_back(v);
  });
  CHECK(bytes <= packet.size());
  return e;
}

// Bytes of the shortest form, from the table of the documentation.
std::size_t shortest(std::size_t n, const std::vector<std::uint32_t>& index, std::size_t b) {
  const auto pad = [](std::size_t bytes) { return bytes + (4 - bytes % 4) % 4; };
  const std::size_t k = index.size();
  std::size_t words = 0;
  std::int64_t last = -1;
  for (const std::uint32_t i : index) {
    std::int64_t gap = i - last - 1;
    for (; gap >= 65535; gap -= 65535) ++words;
    ++words;
    last = i;
  }
  const std::size_t forms[4] = {4 * k + pad(b * k), pad(2 * words) + pad(b * k), pad((n + 7) / 8) + pad(b * k),
                                k ? pad(b * n) : 4 * n + 8};
  return 8 + (b == 2 ? 4 : 0) + *std::min_element(forms, forms + 4);
}
}  // namespace

TEST_CASE("a sparse packet takes the shortest form and comes back as it was") {
  std::mt19937 random(9);
  int forms[4] = {};
  for (const std::size_t n : {0u, 1u, 2u, 31u, 32u, 33u, 1023u, 1024u, 1025u, 10007u, 400000u}) {
    for (const double density : {0.0, 1e-5, 0.001, 0.02, 0.07, 0.3, 0.9, 0.99, 1.0}) {
      entries e;
      for (std::size_t i = 0; i < n; ++i) {
        if (std::uniform_real_distribution<>()(random) >= density) continue;
        e.index.push_back(static_cast<std::uint32_t>(i));
        e.value.push_back(std::normal_distribution<float>()(random) * 1e-7f + 1e-9f);
      }
      for (const auto kind : {hd::sparse_values::f32, hd::sparse_values::f16}) {
        std::vector<std::byte> packet(5, std::byte{77});  // what is there stays
        hd::append_sparse(n, e.index.data(), e.value.data(), e.index.size(), kind, packet);
        CHECK(packet[4] == std::byte{77});
        packet.erase(packet.begin(), packet.begin() + 5);
        CHECK(packet.size() == shortest(n, e.index, kind == hd::sparse_values::f32 ? 4 : 2));
        const hd::sparse_packet head({packet.data(), packet.size()});
        CHECK(head.bytes() == packet.size());
        CHECK_FALSE(head.flagged());
        ++forms[static_cast<int>(head.indices())];
        packet.resize(packet.size() + 3, std::byte{255});  // what follows doesn't matter
        entries back = read_all(packet, n);
        if (head.indices() == hd::sparse_indices::everything) {  // zeros are there too
          CHECK(back.index.size() == n);
          entries some;
          for (std::size_t j = 0; j < e.index.size(); ++j) {
            some.index.push_back(back.index[e.index[j]]);
            some.value.push_back(back.value[e.index[j]]);
            back.value[e.index[j]] = 0.0f;
          }
          CHECK(std::all_of(back.value.begin(), back.value.end(), [](float v) { return v == 0.0f; }));
          back = some;
        }
        CHECK(back.index == e.index);
        double worst = 0.0;
        for (std::size_t j = 0; j < back.value.size(); ++j) {
          worst = std::max<double>(worst, std::fabs(back.value[j] - e.value[j]) / (std::fabs(e.value[j]) + 1e-12));
        }
        CHECK(worst <= (kind == hd::sparse_values::f32 ? 0.0 : 0x1p-11));
      }
    }
  }
  for (const int used : forms) CHECK(used > 0);
}

TEST_CASE("16-bit values have a scale of their own: huge and tiny ones arrive") {
  for (const float size : {3e38f, 1.0f, 1e-20f, 1e-38f, 1e-42f}) {
    const std::uint32_t index[2] = {3, 70000};
    const float value[2] = {size, -0.37f * size};
    std::vector<std::byte> packet;
    hd::append_sparse(100000, index, value, 2, hd::sparse_values::f16, packet);
    const entries back = read_all(packet, 100000);
    for (int j = 0; j < 2; ++j) CHECK(std::fabs(back.value[j] - value[j]) <= std::fabs(value[j]) * 0x1p-11 + 1e-45);
  }
}

TEST_CASE("damaged sparse packets are refused or read as something, never read past") {
  std::mt19937 random(4);
  for (const std::size_t n : {100u, 1025u}) {
    for (const std::size_t step : {1u, 2u, 9u, 90u}) {
      entries e;
      for (std::size_t i = 3; i < n; i += step) {
        e.index.push_back(static_cast<std::uint32_t>(i));
        e.value.push_back(1.0f);
      }
      std::vector<std::byte> packet;
      hd::append_sparse(n, e.index.data(), e.value.data(), e.index.size(), hd::sparse_values::f32, packet);
      std::vector<float> sum(n, 0.0f);
      for (std::size_t cut = 0; cut < packet.size(); ++cut) {
        const std::vector<std::byte> part(packet.begin(), packet.begin() + static_cast<std::ptrdiff_t>(cut));
        CHECK_THROWS_AS(hd::add_sparse({part.data(), cut}, {sum.data(), n}), hd::argument_error);
      }
      CHECK_THROWS_AS(hd::add_sparse({packet.data(), packet.size()}, {sum.data(), n - step}), hd::argument_error);
      int refused = 0;
      for (int trial = 0; trial < 300; ++trial) {
        std::vector<std::byte> bad = packet;
        bad[random() % std::min<std::size_t>(bad.size(), 40)] ^= static_cast<std::byte>(1u << random() % 8);
        try {
          hd::add_sparse({bad.data(), bad.size()}, {sum.data(), n});
        } catch (const hd::argument_error&) {
          ++refused;
        }
      }
      CHECK(refused > 0);
    }
  }
  std::vector<std::byte> flag;
  hd::append_flagged(flag);
  CHECK(hd::sparse_packet({flag.data(), flag.size()}).flagged());
}

namespace {
// Which character follows two others in Shakespeare's plays: a perceptron with one hidden layer.
class next_character {
 public:
  static constexpr std::size_t before = 2, hidden = 32;

  next_character() {
    std::ifstream file(HEDDLE_TEST_DATA "/tinyshakespeare/input.txt");
    std::string text{std::istreambuf_iterator<char>(file), {}};
    text.resize(std::min<std::size_t>(text.size(), 60000));
    std::vector<int> code(256, -1);
    for (const char c : text) {
      int& k = code[static_cast<unsigned char>(c)];
      if (k < 0) k = static_cast<int>(symbols_++);
      text_.push_back(static_cast<std::size_t>(k));
    }
  }
  bool there() const { return text_.size() == 60000; }
  std::size_t size() const { return (before + 1) * hidden * symbols_; }

  // Mean cross-entropy over a random batch, and its gradient.
  double run(const std::vector<float>& w, std::vector<float>& g, std::size_t batch, std::mt19937& random) const {
    const std::size_t output = before * hidden * symbols_;
    std::fill(g.begin(), g.end(), 0.0f);
    std::vector<float> h(hidden), p(symbols_), dh(hidden);
    double loss = 0.0;
    for (std::size_t b = 0; b < batch; ++b) {
      const std::size_t* const x = text_.data() + random() % (text_.size() - before);
      const auto row = [&](std::size_t k) { return (k * symbols_ + x[k]) * hidden; };
      for (std::size_t j = 0; j < hidden; ++j) h[j] = std::tanh(w[row(0) + j] + w[row(1) + j]);
      std::fill(p.begin(), p.end(), 0.0f);
      for (std::size_t j = 0; j < hidden; ++j) {
        for (std::size_t c = 0; c < symbols_; ++c) p[c] += h[j] * w[output + j * symbols_ + c];
      }
      const float most = *std::max_element(p.begin(), p.end());
      float sum = 0.0f;
      for (float& v : p) sum += v = std::exp(v - most);
      for (float& v : p) v /= sum;
      loss -= std::log(static_cast<double>(p[x[before]]) + 1e-30);
      p[x[before]] -= 1.0f;
      for (std::size_t j = 0; j < hidden; ++j) {
        dh[j] = 0.0f;
        for (std::size_t c = 0; c < symbols_; ++c) {
          dh[j] += w[output + j * symbols_ + c] * p[c];
          g[output + j * symbols_ + c] += h[j] * p[c] / static_cast<float>(batch);
        }
        dh[j] *= (1.0f - h[j] * h[j]) / static_cast<float>(batch);
        for (std::size_t k = 0; k < before; ++k) g[row(k) + j] += dh[j];
      }
    }
    return loss / static_cast<double>(batch);
  }

 private:
  std::vector<std::size_t> text_;
  std::size_t symbols_ = 0;
};

enum class way { dense, dgc, unmasked, uncorrected };

// Mean loss of the last quarter of 500 steps of four ranks.
double trained(const next_character& task, way how) {
  constexpr std::size_t ranks = 4, steps = 500;
  constexpr float lr = 0.5f;
  const std::size_t n = task.size();
  const hd::dgc c{.sparsity = 0.995, .dense_below = 0, .masking = how != way::unmasked};
  std::vector<state> held(ranks, state(n));
  std::mt19937 random(1);
  std::vector<float> w(n), g(n), sum(n), velocity(n, 0.0f);
  for (float& x : w) x = 0.1f * std::normal_distribution<float>()(random);
  double loss = 0.0;
  for (std::size_t step = 0; step < steps; ++step) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (state& s : held) {
      s.slots[0] = s.u.data(), s.slots[1] = s.v.data(), s.slots[2] = s.numbers.data();
      const double here = task.run(w, g, 8, random);
      if (step >= steps * 3 / 4) loss += here / (ranks * steps / 4);
      std::vector<std::byte> packet;
      if (how == way::dense) {
        for (std::size_t i = 0; i < n; ++i) sum[i] += g[i] / ranks;
      } else {
        c.fused({g.data(), n}, 1.0f, s.slots, {.step = step, .ranks = ranks, .momentum = how == way::uncorrected ? 0.0f : 0.9f}, packet);
        c.decode_add({packet.data(), packet.size()}, {sum.data(), n});
      }
    }
    for (std::size_t i = 0; i < n; ++i) {  // momentum here where it isn't inside what was sent
      velocity[i] = (how == way::dense || how == way::uncorrected ? 0.9f : 0.0f) * velocity[i] + sum[i];
      w[i] -= lr * velocity[i];
    }
  }
  return loss;
}
}  // namespace

TEST_CASE("on text, DGC learns as momentum SGD does; without momentum correction or masking it learns worse") {
  const next_character task;
  REQUIRE(task.there());
  const double dense = trained(task, way::dense), dgc = trained(task, way::dgc);
  CHECK(std::fabs(dgc - dense) < 0.1);
  CHECK(trained(task, way::unmasked) > dgc + 0.25);
  CHECK(trained(task, way::uncorrected) > dgc + 0.75);
}

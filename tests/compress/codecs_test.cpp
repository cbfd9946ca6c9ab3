// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Codecs and power_sgd rank by rank in one thread: what is sent and what is held add up, exact cases are exact.
#include <heddle/compress/automatic_compressor.hpp>
#include <heddle/compress/power_sgd.hpp>
#include <heddle/compress/quantize.hpp>
#include <heddle/compress/random_k.hpp>
#include <heddle/compress/sign.hpp>
#include <heddle/compress/top_k.hpp>

#include "../support/catch.hpp"

#include <cmath>
#include <limits>
#include <random>

namespace hd = heddle;

namespace {
using matrix = std::vector<std::vector<float>>;

matrix random_gradients(int ranks, std::size_t n, std::mt19937& random) {
  matrix g(static_cast<std::size_t>(ranks), std::vector<float>(n));
  for (auto& r : g) {
    for (float& x : r) x = std::normal_distribution<float>()(random);
  }
  return g;
}

// P ranks of a compressor. step() gives the sum of what they send, and moves their state if `take` and all are finite.
template <class Compressor> struct world {
  using carrier = decltype(hd::detail::carried(std::declval<const Compressor&>()));
  static constexpr bool sums_up = hd::reducing_compressor<carrier>;

  world(const Compressor& compressor, int ranks, std::size_t count, std::size_t rows = 0)
      : c(hd::detail::carried(compressor)), size(ranks), n(count), x{.ranks = ranks, .tensor = 3, .rows = rows} {
    std::size_t extra = 0;
    if constexpr (sums_up) extra = c.extra(n, x);
    const auto p = static_cast<std::size_t>(size);
    held = sent = matrix(p, std::vector<float>(n, 0.0f));
    more.assign(p, std::vector<float>(extra, 0.0f));
  }
  hd::encode_context of(int rank) const {
    hd::encode_context y = x;
    y.rank = rank;
    return y;
  }
  hd::encode_context late_of(int rank) const {
    hd::encode_context y = of(rank);
    y.held_late = late;
    return y;
  }
  // Whether all are finite.
  bool step(matrix& g, bool take = true) {
    const auto p = static_cast<std::size_t>(size);
    bool finite = true;
    sum.assign(n, 0.0f);
    if constexpr (sums_up) {
      std::vector<std::vector<float>> total(static_cast<std::size_t>(carrier::rounds));
      std::vector<float*> totals;
      for (int round = 0; round < carrier::rounds; ++round) {
        const std::size_t k = c.sum_count(round, n, x);
        total[static_cast<std::size_t>(round)].assign(k, 0.0f);
        std::vector<double> wide(k, 0.0);
        std::vector<float> mine(k);
        for (std::size_t r = 0; r < p; ++r) {
          float* state[2] = {held[r].data(), more[r].data()};
          std::vector<float*> here = totals;
          here.push_back(mine.data());
          auto first = total;  // each rank changes its own copy of earlier rounds
          for (std::size_t k2 = 0; k2 < totals.size(); ++k2) here[k2] = first[k2].data();
          finite &= c.send(round, {g[r].data(), n}, 1.0f, state, of(static_cast<int>(r)), here.data());
          if (r + 1 == p)
            for (std::size_t k2 = 0; k2 < totals.size(); ++k2) total[k2] = first[k2];
          for (std::size_t i = 0; i < k; ++i) wide[i] += mine[i];
        }
        for (std::size_t i = 0; i < k; ++i) total[static_cast<std::size_t>(round)][i] = static_cast<float>(wide[i]);
        totals.clear();
        for (int done = 0; done <= round; ++done) totals.push_back(total[static_cast<std::size_t>(done)].data());
      }
      if (!finite || !take) return finite;
      for (std::size_t r = 0; r < p; ++r) {
        float* state[2] = {held[r].data(), more[r].data()};
        std::vector<float> before = held[r], in = g[r];
        c.commit({g[r].data(), n}, 1.0f, state, late_of(static_cast<int>(r)), totals.data());
        for (std::size_t i = 0; i < n; ++i) sent[r][i] = in[i] / static_cast<float>(size) + before[i] - held[r][i];
        sum = g[r];
      }
    } else {
      std::vector<std::vector<std::byte>> packets(p);
      for (std::size_t r = 0; r < p; ++r) {
        float* state[1] = {held[r].data()};
        c.encode({g[r].data(), n}, 1.0f, state, of(static_cast<int>(r)), packets[r]);
        const hd::slice<const std::byte> packet{packets[r].data(), packets[r].size()};
        CHECK(c.measure(packet) == packet.count);
        CHECK(packet.count <= c.wire_bytes(n, x) + 8);
        finite &= !c.flagged(packet);
        sent[r].assign(n, 0.0f);
        c.decode_add(packet, {sent[r].data(), n});
        c.decode_add(packet, {sum.data(), n});
      }
      if (!finite || !take) return finite;
      for (std::size_t r = 0; r < p; ++r) {
        float* state[1] = {held[r].data()};
        c.commit({g[r].data(), n}, 1.0f, state, late_of(static_cast<int>(r)), {packets[r].data(), packets[r].size()});
      }
    }
    ++x.step;
    return finite;
  }

  carrier c;
  int size;
  std::size_t n;
  hd::encode_context x;
  matrix held, more, sent;
  std::vector<float> sum;
  float late = 1.0f;
};

// Over 50 steps, one of them skipped, what was sent and is held is what went in: on each rank, or for `together` over
// all ranks.
template <class Compressor> void conserves(const Compressor& compressor, bool together = false) {
  for (const std::size_t n : {1u, 2u, 17u, 1025u}) {
    world<Compressor> w(compressor, 3, n);
    std::mt19937 random(5);
    std::vector<std::vector<double>> in(3, std::vector<double>(n, 0.0)), out = in;
    std::vector<double> all(n, 0.0);
    double most = 0.0;  // that went into an element so far, at any time
    for (int step = 0; step < 50; ++step) {
      matrix g = random_gradients(3, n, random);
      const matrix given = g;
      if (step == 20) {
        const matrix before = w.held, more = w.more;
        w.step(g, false);
        CHECK(w.held == before);
        CHECK(w.more == more);
        g[1][n / 2] = std::numeric_limits<float>::quiet_NaN();
        CHECK_FALSE(w.step(g));
        CHECK(w.held == before);
        CHECK(w.more == more);
        continue;
      }
      CHECK(w.step(g));
      for (std::size_t r = 0; r < 3; ++r) {
        for (std::size_t i = 0; i < n; ++i) {
          in[r][i] += given[r][i] / 3.0;
          out[r][i] += w.sent[r][i];
          most = (std::max)(most, std::fabs(in[r][i]));
        }
      }
      for (std::size_t i = 0; i < n; ++i) all[i] += w.sum[i];
    }
    double worst = 0.0;
    for (std::size_t i = 0; i < n; ++i) {
      double total_in = 0.0, total_held = 0.0;
      for (std::size_t r = 0; r < 3; ++r) {
        if (!together) worst = (std::max)(worst, std::fabs(in[r][i] - out[r][i] - w.held[r][i]));
        total_in += in[r][i];
        total_held += w.held[r][i];
      }
      worst = (std::max)(worst, std::fabs(total_in - all[i] - total_held));
    }
    INFO(w.c.name() << ", n " << n);
    CHECK(worst <= 1e-6 * most);
  }
}

std::vector<double> dense(const matrix& g) {
  std::vector<double> sum(g[0].size(), 0.0);
  for (const auto& r : g) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<double>(r[i]) / static_cast<double>(g.size());
  }
  return sum;
}
double apart(const std::vector<float>& a, const std::vector<double>& b) {
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = (std::max)(worst, std::fabs(a[i] - b[i]));
  return worst;
}
}  // namespace

// example-begin signs
struct signs {  // one byte an element: only the sign
  static constexpr bool biased = true;
  void encode(hd::slice<const float> v, const hd::encode_context&, std::vector<std::byte>& packet) const {
    for (const float x : v) packet.push_back(std::byte{x < 0});
  }
  void decode_add(hd::slice<const std::byte> payload, hd::slice<float> sum) const {
    for (std::size_t i = 0; i < sum.count; ++i) sum[i] += payload[i] == std::byte{1} ? -1e-3f : 1e-3f;
  }
  std::string name() const { return "signs"; }
};
static_assert(hd::codec<signs> && hd::compressor<hd::error_feedback<signs>>);
// example-end

// A codec that adds only whole tensors.
template <int Bits> struct whole {
  hd::quantize<Bits> inside{};
  static constexpr bool biased = true;
  void encode(hd::slice<const float> v, const hd::encode_context& x, std::vector<std::byte>& packet) const {
    inside.encode(v, x, packet);
  }
  void decode_add(hd::slice<const std::byte> payload, hd::slice<float> sum) const { inside.decode_add(payload, sum); }
  std::string name() const { return "whole"; }
};

TEST_CASE("error feedback conserves with every codec, through skipped steps") {
  conserves(hd::error_feedback{hd::top_k{.density = 0.05}});
  conserves(hd::error_feedback{hd::sign{.block = 100}});
  conserves(hd::error_feedback{signs{}});
  conserves(hd::error_feedback{hd::quantize<4, hd::rounding::nearest>{.block = 64}});
  conserves(hd::error_feedback{hd::quantize<8>{}});
  conserves(hd::error_feedback{hd::random_k{.density = 0.1}});
  conserves(hd::power_sgd{.rank = 2, .worth = 0.0, .dense_below = 0}, true);
}

TEST_CASE("what sends everything is the dense mean") {
  std::mt19937 random(9);
  for (const std::size_t n : {1u, 17u, 1024u, 1025u}) {
    const matrix g = random_gradients(4, n, random);
    matrix a = g;
    world top(hd::error_feedback{hd::top_k{.density = 1.0}}, 4, n);
    CHECK(top.step(a));
    CHECK(apart(top.sum, dense(g)) < 1e-6);
    CHECK(top.held == matrix(4, std::vector<float>(n, 0.0f)));
    a = g;
    world picked(hd::random_k{.density = 1.0}, 4, n);
    CHECK(picked.step(a));
    CHECK(apart(picked.sum, dense(g)) < 1e-6);
    a = g;
    world full(hd::power_sgd{.rank = 64, .worth = 0.0, .dense_below = 0}, 4, n);
    CHECK(full.step(a));
    CHECK(apart(full.sum, dense(g)) < 1e-5);
  }
  for (const std::size_t rows : {3u, 9001u}) {  // rows in several parts, and far more rows than columns
    const matrix g = random_gradients(2, 27003, random);
    matrix a = g;
    world full(hd::power_sgd{.rank = 3, .worth = 0.0, .dense_below = 0}, 2, 27003, rows);
    CHECK(full.step(a));
    CHECK(apart(full.sum, dense(g)) < 1e-5);
  }
}

TEST_CASE("random_k and stochastic quantisation have the gradient as their expectation") {
  std::mt19937 random(2);
  const std::size_t n = 37;
  const matrix g = random_gradients(2, n, random);
  const auto expectation = [&](auto compressor) {
    world w(compressor, 2, n);
    std::vector<double> mean(n, 0.0);
    for (int step = 0; step < 4000; ++step) {
      matrix a = g;
      w.step(a);
      for (std::size_t i = 0; i < n; ++i) mean[i] += w.sum[i] / 4000.0;
    }
    std::vector<float> m(mean.begin(), mean.end());
    return apart(m, dense(g));
  };
  CHECK(expectation(hd::random_k{.density = 0.3}) < 0.2);  // a value times 4, in a fourth of the steps: sigma 0.03
  CHECK(expectation(hd::quantize<4>{.block = 8}) < 0.02);
  CHECK(expectation(hd::quantize<8>{}) < 0.002);
}

TEST_CASE("random_k picks as many as it says, in rising order, each as often as the others") {
  const hd::random_k c{.density = 0.25};
  for (const std::size_t n : {1u, 3u, 4u, 10u, 1025u}) {
    std::vector<int> hits(n, 0);
    for (std::size_t step = 0; step < 400; ++step) {
      std::size_t count = 0, next = 0;
      double weights = 0.0;
      c.pick(n, {.step = step}, [&](std::size_t j, std::size_t i, float weight) {
        CHECK(j == count++);
        CHECK((i >= next && i < n));
        next = i + 1;
        ++hits[i];
        weights += static_cast<double>(weight);
      });
      CHECK(count == c.picked(n, {}));
      CHECK(weights == static_cast<double>(n));  // the runs cover the tensor
    }
    if (n >= 4) {
      for (const int h : hits) CHECK((h > 50 && h < 200));
    }
  }
  std::vector<std::size_t> a, b;
  c.pick(1000, {.step = 5, .tensor = 1, .rank = 0}, [&](std::size_t, std::size_t i, float) { a.push_back(i); });
  c.pick(1000, {.step = 5, .tensor = 1, .rank = 3}, [&](std::size_t, std::size_t i, float) { b.push_back(i); });
  CHECK(a == b);
  b.clear();
  c.pick(1000, {.step = 5, .tensor = 2}, [&](std::size_t, std::size_t i, float) { b.push_back(i); });
  CHECK(a != b);
}

TEST_CASE("sign sends the mean magnitude of a block with each sign; quantize is within half a level") {
  std::mt19937 random(3);
  const std::size_t n = 1025;
  const matrix g = random_gradients(1, n, random);
  matrix a = g;
  world s(hd::error_feedback{hd::sign{.block = 100}}, 1, n);
  s.step(a);
  for (std::size_t b = 0; b < n; b += 100) {
    const std::size_t end = (std::min)(n, b + 100);
    double mean = 0.0;
    for (std::size_t i = b; i < end; ++i) mean += std::fabs(static_cast<double>(g[0][i]));
    mean /= static_cast<double>(end - b);
    for (std::size_t i = b; i < end; ++i) CHECK(s.sum[i] == Approx(g[0][i] < 0 ? -mean : mean).epsilon(1e-6));
  }
  a = g;
  world q(hd::error_feedback{hd::quantize<8, hd::rounding::nearest>{.block = 1025}}, 1, n);
  q.step(a);
  float most = 0.0f;
  for (const float x : g[0]) most = (std::max)(most, std::fabs(x));
  for (std::size_t i = 0; i < n; ++i) CHECK(std::fabs(q.sum[i] - g[0][i]) <= 0.5001f * most / 127.0f);
}

TEST_CASE("quantize rounds each element by itself, by whichever loop") {
  const auto check = [](const auto& c) {
    std::mt19937 random(5);
    for (const std::size_t n : {1u, 15u, 16u, 17u, 1025u}) {
      std::vector<float> v(n);
      for (float& x : v) x = random() % 8 ? std::normal_distribution<float>()(random) : -0.0f;
      std::vector<std::byte> payload;
      c.encode({v.data(), n}, {.step = 3, .tensor = 5, .rank = 1}, payload);
      for (std::size_t i = 0; i < n; ++i) {
        const float scale = reinterpret_cast<const float*>(payload.data())[i / c.block];
        const std::uint32_t word = hd::philox(c.seed_of(1), hd::random_stream(5, 3), i / 4).word[i % 4];
        const int whole = c.whole_of(v[i], scale > 0.0f ? 1.0 / static_cast<double>(scale) : 0.0, word);
        CHECK(c.value(payload.data(), n, i) == static_cast<float>(whole) * scale);
      }
    }
  };
  check(hd::quantize<8>{.block = 256});
  check(hd::quantize<4>{.block = 40});
  check(hd::quantize<8, hd::rounding::nearest>{.block = 24});
  check(hd::quantize<4, hd::rounding::nearest>{.block = 64});
}

TEST_CASE("zeros, denormal numbers and huge ones pass through every codec without NaN") {
  for (const float scale : {0.0f, 1e-40f, 1e30f}) {
    std::mt19937 random(3);
    matrix g = random_gradients(2, 100, random);
    for (auto& r : g) {
      for (float& x : r) x *= scale;
    }
    const auto good = [&](auto compressor) {
      world w(compressor, 2, 100);
      for (int step = 0; step < 3; ++step) {
        matrix a = g;
        CHECK(w.step(a));
        CHECK(hd::all_finite(w.sum.data(), 100));
        CHECK(hd::all_finite(w.held[0].data(), 100));
        if (scale == 0.0f) CHECK(w.sum == std::vector<float>(100, 0.0f));
      }
    };
    good(hd::error_feedback{hd::top_k{.density = 0.1}});
    good(hd::error_feedback{hd::sign{}});
    good(hd::quantize<8>{});
    good(hd::random_k{});
    good(hd::power_sgd{.worth = 0.0, .dense_below = 0});
  }
}

TEST_CASE("the largest floats are skipped or pass, but never leave an infinity behind") {
  for (const float most : {std::numeric_limits<float>::max(), 3.3e38f, 1e38f}) {
    for (const int ranks : {1, 4}) {
      const matrix g(static_cast<std::size_t>(ranks), std::vector<float>(101, most));
      const auto never = [&](auto compressor) {
        world w(compressor, ranks, 101);
        INFO(w.c.name() << ", " << most << ", ranks " << ranks);
        for (int step = 0; step < 4; ++step) {
          matrix a = g;
          if (step == 1) a.assign(a.size(), std::vector<float>(101, -most));
          const bool taken = w.step(a);
          if (taken) CHECK(hd::all_finite(w.sum.data(), 101));
          for (const auto& e : w.held) CHECK(hd::all_finite(e.data(), e.size()));
          if (most == 1e38f && step == 0 && ranks == 1) CHECK(taken == !std::is_same_v<decltype(compressor), hd::power_sgd>);
        }
      };
      never(hd::error_feedback{hd::quantize<8, hd::rounding::nearest>{}});
      never(hd::error_feedback{hd::top_k{.density = 0.1}});
      never(hd::error_feedback{hd::sign{}});
      never(hd::quantize<8>{});
      never(hd::power_sgd{.worth = 0.0, .dense_below = 0});
    }
  }
}

TEST_CASE("codecs send as many elements as their density says of tensors of any size") {
  CHECK(hd::top_k{.density = 1.0}.entries(20000000) == 20000000);
  CHECK(hd::top_k{.density = 0.3}.entries(10) == 3);
  CHECK(hd::top_k{.density = 1e-9}.entries(1000) == 1);
  CHECK(hd::random_k{.density = 1.0}.picked(20000000, {}) == 20000000);
  CHECK(hd::random_k{.density = 0.1}.picked(0, {}) == 0);
}

TEST_CASE("power_sgd gives a matrix of its rank exactly, and wakes up after zeros") {
  const std::size_t rows = 20, columns = 30;
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  std::vector<float> u(2 * rows), v(2 * columns);
  for (float& x : u) x = normal(random);
  for (float& x : v) x = normal(random);
  matrix g(3, std::vector<float>(rows * columns));
  for (auto& r : g) {
    const float weight = normal(random);
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < columns; ++j) r[i * columns + j] = weight * u[i] * v[j] + u[rows + i] * v[columns + j];
    }
  }
  world w(hd::power_sgd{.rank = 2, .dense_below = 0}, 3, rows * columns, rows);
  CHECK(w.c.wire_bytes(rows * columns, w.x) == 4 * 2 * (rows + columns));
  matrix zero(3, std::vector<float>(rows * columns, 0.0f));
  for (int step = 0; step < 2; ++step) {
    matrix a = zero;
    CHECK(w.step(a));
    CHECK(w.sum == zero[0]);
  }
  matrix a = g;
  CHECK(w.step(a));
  CHECK(apart(w.sum, dense(g)) < 1e-4);
  CHECK(a[0] == a[2]);
  // With rank 4 two columns have nothing to say; they stay out.
  world wide(hd::power_sgd{.rank = 4, .dense_below = 0}, 3, rows * columns, rows);
  for (int step = 0; step < 3; ++step) {
    a = g;
    CHECK(wide.step(a));
    CHECK(apart(wide.sum, dense(g)) < 1e-4);
  }
  // A warm start gets closer to the best matrix of its rank with each step of the same gradient.
  matrix full = random_gradients(1, 400, random);
  world warm(hd::power_sgd{.rank = 1, .dense_below = 0}, 1, 400);
  double first = 0.0, last = 0.0;
  for (int step = 0; step < 20; ++step) {
    a = full;
    for (auto& e : warm.held) std::fill(e.begin(), e.end(), 0.0f);
    warm.step(a);
    last = 0.0;
    for (std::size_t i = 0; i < 400; ++i) last += std::pow(static_cast<double>(warm.sum[i]) - full[0][i], 2);
    if (step == 0) first = last;
  }
  CHECK(last < first);
}

TEST_CASE("power_sgd skips above its limit, and what it makes of ranks at the limit is finite") {
  for (const std::size_t rows : {1u, 5u, 101u}) {
    const std::size_t n = rows * 13;
    world w(hd::power_sgd{.rank = 2, .worth = 0.0, .dense_below = 0}, 4, n, rows);
    const float limit = 4.0f * hd::power_sgd::limit({n, w.x, 2}, w.x);  // a share is a fourth
    for (const float sign : {1.0f, -1.0f}) {
      matrix a(4, std::vector<float>(n, sign * limit));
      for (auto& e : w.held) e.assign(n, 0.0f);
      CHECK(w.step(a));
      CHECK(hd::all_finite(w.sum.data(), n));
      for (auto& e : w.held) {
        CHECK(hd::all_finite(e.data(), n));
        e.assign(n, 0.0f);
      }
      a.assign(4, std::vector<float>(n, 0.0f));
      a[2][n / 2] = sign * std::nextafter(limit, INFINITY);
      CHECK_FALSE(w.step(a));
    }
  }
}

TEST_CASE("power_sgd's loops give the same bits by whichever instructions") {
  std::mt19937 random(9);
  std::normal_distribution<double> normal;
  for (const std::size_t n : {0u, 1u, 7u, 8u, 9u, 31u, 1025u}) {
    std::vector<float> v(n), u(n), kept(n), expected(n);
    std::vector<double> r(n), sums(n), wide(n);
    for (std::size_t i = 0; i < n; ++i) {
      v[i] = static_cast<float>(normal(random));
      u[i] = kept[i] = expected[i] = static_cast<float>(normal(random));
      r[i] = normal(random);
      sums[i] = wide[i] = normal(random);
    }
    const float *const from = v.data(), *const minus = u.data();
    const double* const right = r.data();
    double one[8] = {1.0 / 3.0}, two[8] = {1.0 / 3.0};
    hd::detail::run_loop<hd::detail::dot_chains>(from, right, n, &one[0]);
    hd::detail::dot_chains::run(from, right, n, &two[0]);
    CHECK(std::equal(one, one + 8, two));
    hd::detail::run_loop<hd::detail::add_scaled>(from, 1.0 / 3.0, sums.data(), n);
    hd::detail::add_scaled::run(from, 1.0 / 3.0, wide.data(), n);
    CHECK(sums == wide);
    hd::detail::run_loop<hd::detail::add_scaled>(from, 1.0f / 3.0f, kept.data(), n);
    hd::detail::add_scaled::run(from, 1.0f / 3.0f, expected.data(), n);
    CHECK(kept == expected);
    hd::detail::run_loop<hd::detail::keep_rest>(from, minus, 1.0f / 3.0f, kept.data(), n);
    hd::detail::keep_rest::run(from, minus, 1.0f / 3.0f, expected.data(), n);
    CHECK(kept == expected);
  }
}

TEST_CASE("what is held counts as much more as the rate has fallen") {
  const matrix g{{1.0f, 8.0f}};
  world w(hd::error_feedback{hd::top_k{.density = 0.5}}, 1, 2);
  matrix a = g;
  w.step(a);
  CHECK(w.held[0] == std::vector<float>{1.0f, 0.0f});
  w.x.held_scale = 10.0f;  // the rate is a tenth now
  a = g;
  w.step(a);
  CHECK(w.sum == std::vector<float>{11.0f, 0.0f});
  CHECK(w.held[0] == std::vector<float>{0.0f, 8.0f});
}

namespace {
// At rates that are known only when states move: what is held, at the new rate, is what was held, at the old one, and
// went in and wasn't sent.
template <class Compressor> void follows_rates(const Compressor& compressor) {
  for (const std::size_t n : {1u, 17u, 3000u}) {
    world<Compressor> w(compressor, 3, n);
    INFO(w.c.name() << ", n " << n);
    std::mt19937 random(5);
    for (const float late : {1.0f, 1.0f, 10.0f, 1.0f, 0.25f, 3.0f}) {
      for (const float told : {1.0f, 2.0f}) {
        matrix g = random_gradients(3, n, random);
        const matrix given = g, before = w.held;
        w.x.held_scale = told;
        w.late = late;
        CHECK(w.step(g));
        double worst = 0.0, most = 0.0;
        for (std::size_t i = 0; i < n; ++i) {
          double expected = -static_cast<double>(w.sum[i]), held = 0.0;
          for (std::size_t r = 0; r < 3; ++r) {
            const double in = given[r][i] / 3.0 + static_cast<double>(late) * told * before[r][i];
            most = (std::max)(most, std::fabs(in));
            expected += in;
            held += w.held[r][i];
          }
          worst = (std::max)(worst, std::fabs(held - expected));
        }
        CHECK(worst <= 1e-6 * most);
      }
    }
  }
}
}  // namespace

TEST_CASE("what is held counts by a rate that is known only when states move") {
  follows_rates(hd::error_feedback{hd::top_k{.density = 0.05}});
  follows_rates(hd::error_feedback{hd::sign{.block = 100}});
  follows_rates(hd::error_feedback{hd::quantize<4, hd::rounding::nearest>{.block = 64}});
  follows_rates(hd::error_feedback{whole<8>{}});
  follows_rates(hd::error_feedback{hd::random_k{.density = 0.1}});
  follows_rates(hd::power_sgd{.rank = 2, .worth = 0.0, .dense_below = 0});
  // What that would take out of float's range isn't scaled.
  matrix g{{1.0f, 3e38f}};
  world w(hd::error_feedback{hd::top_k{.density = 0.5}}, 1, 2);
  w.held[0] = {1e37f, 0.0f};
  w.late = 100.0f;
  CHECK(w.step(g));
  CHECK(w.held[0] == std::vector<float>{1e37f, 0.0f});
}

TEST_CASE("automatic_compressor compresses where the closed form of the costs says so, and says why") {
  const auto with = [](double bytes_per_second, hd::sharing shared = hd::sharing::rank) {
    hd::links l;
    l.intra = {{0.0, 1.0 / bytes_per_second}, shared};
    l.gamma = 1.0 / 1e10;
    return hd::automatic_compressor{.compressor = hd::error_feedback{hd::top_k{.density = 0.01}}, .costs = l, .traffic = 60.0};
  };
  const std::size_t n = 1000000;
  const hd::encode_context four{.ranks = 4};
  const auto slow = with(12.5e6), fast = with(1e12);
  // Dense: 8 n 3/4 bytes, and 4 n 3/4 reduced; packets: 3 (16 + 8 n / 100) bytes, and 20 n reduced.
  CHECK(slow.dense_seconds(n, four) == Approx(6.0 * n / 12.5e6 + 3.0 * n / 1e10));
  CHECK(slow.compressed_seconds(n, four) == Approx(3.0 * (16 + 0.08 * n) / 12.5e6 + 20.0 * n / 1e10));
  CHECK(slow.sends(n, four));
  CHECK_FALSE(fast.sends(n, four));
  CHECK_FALSE(slow.sends(100, four));   // below the codec's own limit
  CHECK_FALSE(slow.sends(n, {.ranks = 1}));
  CHECK_FALSE(with(12.5e6).sends(n, {.ranks = 1000}));  // packets of all ranks pass every link
  CHECK(slow.why(n, four).find("compressed: ") == 0);
  CHECK(fast.why(n, four).find("dense: ") == 0);
  CHECK(slow.why(100, four).find("leaves tensors of 100 elements") != std::string::npos);
  // Four ranks that share a port wait four times as long.
  CHECK(with(12.5e6, hd::sharing::node).dense_seconds(n, four) == Approx(4 * 6.0 * n / 12.5e6 + 3.0 * n / 1e10));
  auto bad = slow;
  bad.traffic = -1.0;
  CHECK_THROWS_AS(bad.check(), hd::argument_error);
  bad = slow;
  bad.costs.gamma = NAN;
  CHECK_THROWS_AS(bad.check(), hd::argument_error);
  bad = slow;
  bad.compressor.codec.density = 0.0;
  CHECK_THROWS_AS(bad.check(), hd::argument_error);
}

TEST_CASE("numbers outside their range and damaged packets are refused") {
  CHECK_THROWS_AS(hd::top_k{.density = 0.0}.check(), hd::argument_error);
  CHECK_THROWS_AS(hd::top_k{.density = 1.5}.check(), hd::argument_error);
  CHECK_THROWS_AS(hd::random_k{.density = NAN}.check(), hd::argument_error);
  CHECK_THROWS_AS(hd::sign{.block = 0}.check(), hd::argument_error);
  CHECK_THROWS_AS(hd::quantize<4>{.block = 0}.check(), hd::argument_error);
  CHECK_THROWS_AS(hd::power_sgd{.rank = 0}.check(), hd::argument_error);
  CHECK_THROWS_AS(hd::power_sgd{.worth = -1.0}.check(), hd::argument_error);
  CHECK_THROWS_AS(hd::error_feedback{hd::sign{.block = 0}}.check(), hd::argument_error);
  const std::vector<float> v(100, 1.0f);
  std::vector<float> sum(100), shorter(99);
  const auto damage = [&](const auto& compressor) {
    const auto c = hd::detail::carried(compressor);
    std::vector<std::byte> packet;
    float* const state[1] = {sum.data()};
    c.encode({v.data(), v.size()}, 1.0f, state, {}, packet);
    CHECK_THROWS_AS(c.measure({packet.data(), packet.size() - 1}), hd::argument_error);
    CHECK_THROWS_AS(c.measure({packet.data(), 3}), hd::argument_error);
    CHECK_THROWS_AS(c.decode_add({packet.data(), packet.size()}, {shorter.data(), 3}), hd::argument_error);
  };
  damage(hd::error_feedback{hd::top_k{.density = 0.5}});
  damage(hd::error_feedback{hd::sign{}});
  damage(hd::quantize<8>{});
  // A packet of another tensor leaves what is held as it was.
  const auto foreign = [](const auto& compressor, std::size_t sent, std::size_t n) {
    const auto c = hd::detail::carried(compressor);
    std::vector<float> held(n, 1.0f), other(sent, 1.0f);
    const std::vector<float> before = held, g(sent, 1.0f);
    float *const slots[1] = {held.data()}, *const others[1] = {other.data()};
    std::vector<std::byte> packet;
    c.encode({g.data(), sent}, 1.0f, others, {}, packet);
    CHECK_THROWS_AS(c.commit({before.data(), n}, 1.0f, slots, {}, {packet.data(), packet.size()}), hd::argument_error);
    CHECK(held == before);
  };
  foreign(hd::error_feedback{hd::sign{}}, 500, 1000);
  foreign(hd::error_feedback{hd::top_k{.density = 0.9}}, 1000, 600);  // its first entries would fit
  foreign(hd::error_feedback{whole<8>{}}, 500, 1000);
}

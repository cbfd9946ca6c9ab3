// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/table/sparse_table.hpp>

#include "catch.hpp"
#include "folder.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>

namespace hd = heddle;

namespace {
constexpr std::size_t dim = 4;
constexpr std::uint64_t seed = 7;
constexpr float lr = 0.05f;
using keys_type = std::vector<std::uint64_t>;
using floats = std::vector<float>;

// A batch: some keys occur twice and more.
struct batch {
  keys_type keys;
  floats gradients, shows, clicks;
  batch(std::uint64_t round, std::size_t n, std::uint64_t of) : keys(n), gradients(n * dim), shows(n), clicks(n) {
    for (std::size_t i = 0; i < n; ++i) {
      const auto b = hd::philox(3, round, i);
      keys[i] = b.word[0] % of;
      shows[i] = static_cast<float>(1 + b.word[1] % 3);
      clicks[i] = static_cast<float>(b.word[2] % 4 == 0);
    }
    for (std::size_t i = 0; i < n * dim; ++i) gradients[i] = hd::random_uniform(4, round, i) - 0.5f;
  }
};
// What a batch says of a key, in double.
struct summed {
  double g[dim] = {}, show = 0, click = 0;
};
std::map<std::uint64_t, summed> sums_of(const batch& b) {
  std::map<std::uint64_t, summed> all;
  for (std::size_t i = 0; i < b.keys.size(); ++i) {
    summed& s = all[b.keys[i]];
    for (std::size_t d = 0; d < dim; ++d) s.g[d] += static_cast<double>(b.gradients[i * dim + d]);
    s.show += static_cast<double>(b.shows[i]);
    s.click += static_cast<double>(b.clicks[i]);
  }
  return all;
}
// Box and Muller's transform of the key's Philox block.
struct row_model {
  double w[dim], m[dim] = {}, v[dim] = {}, s = 0, show = 0, click = 0;
  int steps = 0;
  std::uint64_t last = 0;  // round
  explicit row_model(std::uint64_t key, double deviation) {
    const auto b = hd::philox(seed, 0, key);
    for (std::size_t k = 0; k < 2; ++k) {
      const double u = (b.word[2 * k] >> 8) / 16777216.0,
                   angle = 2 * std::acos(-1.0) * (b.word[2 * k + 1] >> 8) / 16777216.0;
      const double radius = std::sqrt(-2 * std::log(1 - u));
      w[2 * k] = deviation * radius * std::cos(angle);
      w[2 * k + 1] = deviation * radius * std::sin(angle);
    }
  }
};

using adam_table = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::adam, hd::initial::normal,
                                    hd::admit::probability, hd::evict::lru, hd::guard::none>;
using score_table = hd::sparse_table<std::uint64_t, hd::row<dim, hd::float16>, hd::rule::row_adagrad,
                                     hd::initial::normal, hd::admit::show_click, hd::evict::score, hd::guard::none>;

constexpr std::size_t most_rows = 120;
const adam_table::settings how_adam{.initial = {.deviation = 0.1f},
                                    .admission = {.p = 0.6f},
                                    .eviction = {.bytes = most_rows * (adam_table::record_bytes + 7)},
                                    .seed = seed,
                                    .shard_bits = 0};
// Dyadic numbers: sums in float are those in double.
const score_table::settings how_score{
    .initial = {.deviation = 0.1f},
    .admission = {.nonclick = 0.25f, .click_weight = 1.0f, .threshold = 1.5f},
    .eviction = {.decay = 0.5f, .nonclick = 0.25f, .click_weight = 1.0f, .threshold = 0.5f, .ticks = 3},
    .seed = seed,
    .shard_bits = 3};

auto train(adam_table& t, std::uint64_t round) {
  const batch b(round, 60, 300);
  return t.push(b.keys, b.gradients, {.lr = lr});
}
auto train(score_table& t, std::uint64_t round) {
  const batch b(round, 60, 300);
  auto report = t.push(b.keys, b.gradients, {.lr = lr, .shows = b.shows, .clicks = b.clicks});
  if (round % 3 == 2) {
    t.advance();
    report.gone = t.evict();
  }
  return report;
}

// Files bring back all that later steps hang on: rows, statistics, what the admission remembers, counts.
template <class Table> void check_files(const typename Table::settings& how) {
  const folder dir;
  Table a(how), b(how), c(how);
  std::uint64_t round = 0;
  const auto both = [&](Table& other, std::uint64_t end) {
    for (; round < end; ++round) {
      const auto x = train(a, round), y = train(other, round);
      CHECK(x.created == y.created);
      CHECK(x.refused == y.refused);
      keys_type gone[2] = {x.gone, y.gone};
      for (auto& g : gone) std::sort(g.begin(), g.end());
      CHECK(gone[0] == gone[1]);
    }
    CHECK(a.size() == other.size());
    CHECK(a.checksum() == other.checksum());
  };
  for (; round < 10; ++round) train(a, round);
  a.save(dir / "full");
  b.load(dir / "full");
  both(b, 20);
  a.save_delta(dir / "delta");
  c.load(dir / "full");
  c.load_delta(dir / "delta");
  CHECK(c.checksum() == a.checksum());
  both(c, 30);
  CHECK(a.counts().evicted > 0);
  CHECK(a.counts().refused > 0);
}
template <class Table> void check_weights(const Table& t, const std::map<std::uint64_t, row_model>& model, double ulp) {
  std::size_t rows = 0;
  double worst = 0;
  t.for_each([&](const auto& r) {
    const auto found = model.find(r.key);
    if (found == model.end()) FAIL("key " << r.key << " has a row");
    ++rows;
    for (std::size_t d = 0; d < dim; ++d)
      worst = (std::max)(worst,
                         std::abs(static_cast<double>(r.weights[d]) - found->second.w[d]) / (1 + found->second.steps));
  });
  CHECK(rows == model.size());
  CHECK(worst <= ulp);
}
template <class Table> void check_unguarded(const typename Table::settings& how, std::uint64_t key) {
  Table t(how);
  floats g(dim, 1.0f), row(dim);
  g[1] = std::nanf("");
  const floats five{5.0f};
  CHECK(t.push(keys_type{key}, g, {.lr = lr, .shows = five, .clicks = five}).rejected == 0);
  CHECK(t.read(keys_type{key}, row) == 0);
  CHECK(std::isnan(row[1]));
}
}  // namespace

TEST_CASE("Adam from normal rows of a part of all keys under a bound, against double precision") {
  adam_table t(how_adam), other(how_adam);
  std::map<std::uint64_t, row_model> model;
  std::set<std::uint64_t> in, out;
  for (std::uint64_t round = 0; round < 40; ++round) {
    const auto sums = sums_of(batch(round, 60, 300));
    const auto report = train(t, round);
    CHECK(report.applied + report.refused == sums.size());
    for (const auto& [key, x] : sums) {
      floats row(dim);
      // One that was dropped at the end of this batch had been let in.
      const bool has = t.read(keys_type{key}, row) == 0 ||
                       std::find(report.gone.begin(), report.gone.end(), key) != report.gone.end();
      (has ? in : out).insert(key);
      if (!has) continue;
      row_model& r = model.try_emplace(key, key, 0.1).first->second;
      r.last = round;
      ++r.steps;
      for (std::size_t d = 0; d < dim; ++d) {
        r.m[d] = 0.9 * r.m[d] + 0.1 * x.g[d];
        r.v[d] = 0.999 * r.v[d] + 0.001 * x.g[d] * x.g[d];
        r.w[d] -= static_cast<double>(lr) * r.m[d] / (1 - std::pow(0.9, r.steps)) /
                  (std::sqrt(r.v[d] / (1 - std::pow(0.999, r.steps))) + 1e-8);
      }
    }
    std::uint64_t latest = 0;
    for (const std::uint64_t key : report.gone) {
      latest = (std::max)(latest, model.at(key).last);
      model.erase(key);
    }
    if (!report.gone.empty()) {
      CHECK(model.size() == most_rows - most_rows / 8);
      for (const auto& [key, r] : model)
        if (r.last < latest) FAIL("key " << key << " of round " << r.last << " stays, one of " << latest << " went");
    }
    CHECK(model.size() <= most_rows);
    check_weights(t, model, 2e-5);
  }
  // A hash of the key decides, not what came before.
  CHECK(std::abs(static_cast<double>(in.size()) - 0.6 * 300) < 4 * std::sqrt(300 * 0.24));
  for (auto k = in.rbegin(); k != in.rend(); ++k) CHECK_FALSE(out.contains(*k));
  for (auto k = out.rbegin(); k != out.rend(); ++k) CHECK(other.push(keys_type{*k}, floats(dim)).refused == 1);
  for (auto k = in.rbegin(); k != in.rend(); ++k) CHECK(other.push(keys_type{*k}, floats(dim)).created == 1);
  check_files<adam_table>(how_adam);
  check_unguarded<adam_table>(how_adam, *in.begin());
}

TEST_CASE("row AdaGrad in float16 with admission and eviction by shows and clicks, against double precision") {
  score_table t(how_score);
  std::map<std::uint64_t, row_model> model;
  std::map<std::uint64_t, double> refused;
  std::uint64_t now = 0;
  std::size_t went = 0;
  for (std::uint64_t round = 0; round < 40; ++round) {
    std::size_t applied = 0;
    for (const auto& [key, x] : sums_of(batch(round, 60, 300))) {
      if (!model.contains(key)) {
        double& score = refused[key];
        score += (x.show - x.click) * 0.25 + x.click;
        if (score < 1.5) continue;
        refused.erase(key);
      }
      ++applied;
      row_model& r = model.try_emplace(key, key, 0.1).first->second;
      for (std::size_t d = 0; d < dim; ++d) r.s += x.g[d] * x.g[d] / dim;
      for (std::size_t d = 0; d < dim; ++d) r.w[d] -= static_cast<double>(lr) * x.g[d] / (std::sqrt(r.s) + 1e-8);
      ++r.steps;
      r.show += x.show;
      r.click += x.click;
      r.last = now;
    }
    keys_type gone;
    if (round % 3 == 2) {
      ++now;
      for (auto& [key, r] : model) {
        r.show *= 0.5;
        r.click *= 0.5;
        if ((r.show - r.click) * 0.25 + r.click < 0.5 || now - r.last > 3) gone.push_back(key);
      }
      for (const std::uint64_t key : gone) model.erase(key);
      went += gone.size();
    }
    auto report = train(t, round);
    std::sort(report.gone.begin(), report.gone.end());
    CHECK(report.applied == applied);
    CHECK(report.gone == gone);
    // Each step rounds to one of the two neighbours, of weights below 1, in steps of 2^-11.
    check_weights(t, model, 0x1p-11);
  }
  CHECK(went > 20);
  CHECK(model.size() > 20);
  check_files<score_table>(how_score);
  check_unguarded<score_table>(how_score, 5);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "drawing.hpp"

#include "catch.hpp"

#include <set>

using namespace ctr;

namespace {
float random(std::uint32_t what, std::size_t i) { return 2.0f * hd::random_uniform(5, what, i) - 1.0f; }

// Rows of up to five features of three fields and a cross.
rows some_rows(std::size_t n) {
  rows r;
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t k = 0; k < i % 6; ++k) {
      r.indices.push_back(key_of(k, i));
      r.fields.push_back(static_cast<std::uint32_t>(k % 4));
      r.values.push_back(random(1, 10 * i + k));
    }
    r.labels.push_back(static_cast<float>(i % 2));
    r.ends.push_back(r.indices.size());
  }
  return r;
}

// The sum of some multiples of the logits, and its gradient.
template <std::size_t Factors> void gradients_are_slopes(kind k) {
  constexpr std::size_t fields = 3, hidden = 4;
  model<Factors> m(k, fields, hidden);
  for (const std::size_t n : {0, 1, 7}) {
    const rows r = some_rows(n);
    std::vector<std::uint64_t> keys;
    m.keys(r, keys);
    std::vector<float> w(keys.size() * m.dim), g(w.size()), logits, by_logit;
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = 0.5f * random(2, i);
    for (std::size_t i = 0; i < n; ++i) by_logit.push_back(random(3, i));
    m.forward(r, w, logits);
    m.backward(r, w, by_logit, g);
    const auto objective = [&] {
      m.forward(r, w, logits);
      double sum = 0.0;
      for (std::size_t i = 0; i < n; ++i) sum += static_cast<double>(by_logit[i]) * static_cast<double>(logits[i]);
      return sum;
    };
    for (std::size_t i = 0; i < w.size(); ++i) {
      const float kept = w[i], step = 1e-3f;
      w[i] = kept + step;
      const double above = objective();
      w[i] = kept - step;
      const double slope = (above - objective()) / (2 * static_cast<double>(step));
      w[i] = kept;
      INFO("rows " << n << ", weight " << i);
      CHECK(std::abs(slope - static_cast<double>(g[i])) < 5e-3);
    }
  }
}
}  // namespace

TEST_CASE("gradients of the models are slopes of their logits") {
  gradients_are_slopes<0>(kind::linear);
  gradients_are_slopes<8>(kind::fm);
  gradients_are_slopes<8>(kind::wide_deep);
}

TEST_CASE("the area under the curve is the part of pairs in the right order") {
  for (const std::size_t n : {0, 1, 2, 17, 300}) {
    std::vector<std::pair<float, bool>> judged;
    for (std::size_t i = 0; i < n; ++i)
      judged.emplace_back(std::round(4.0f * random(4, i)) / 2.0f, random(5, i) + 0.2f * random(4, i) > 0);
    double pairs = 0, right = 0, loss = 0;
    for (const auto& [x, y] : judged) {
      for (const auto& [x2, y2] : judged) {
        if (!y || y2) continue;
        ++pairs;
        right += x > x2 ? 1.0 : x == x2 ? 0.5 : 0.0;
      }
      const double p = 1 / (1 + std::exp(-static_cast<double>(x)));
      loss -= std::log(y ? p : 1 - p) / static_cast<double>(n);
    }
    const score s = score_of(judged);
    CHECK(s.rows == n);
    CHECK(s.auc == Approx(pairs > 0 ? right / pairs : 0.5));
    CHECK(s.loss == Approx(loss).margin(1e-12));
  }
}

TEST_CASE("logits that aren't finite are judged as the worst") {
  for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    const score s = score_of({{bad, true}, {1.0f, true}, {-1.0f, false}, {bad, false}, {0.5f, true}});
    CHECK(s.rows == 5);
    CHECK(s.loss == HUGE_VAL);
    CHECK(s.accuracy == Approx(0.6));
    CHECK(s.auc == Approx(2.0 / 6));  // of the pairs only the finite ones are in order
    CHECK(score_of({{bad, true}, {bad, false}}).auc == 0.0);
  }
}

TEST_CASE("generated rows are the same however they are shared out, in each epoch") {
  options o;
  o.data = "generated";
  o.rows = 1000;
  const data_set data(o);
  std::multiset<std::uint64_t> expected;
  double clicks = 0;
  for (const share& s :
       {share{.batch = 64}, share{.queues = 3, .epochs = 2, .batch = 7}, share{.ranks = 4, .batch = 999}}) {
    std::multiset<std::uint64_t> found;
    for (std::size_t rank = 0; rank < s.ranks; ++rank) {
      share mine = s;
      mine.rank = rank;
      const auto from = data.open(true, mine);
      for (std::size_t q = 0; q < s.queues; ++q) {
        for (std::size_t e = 0; e < s.epochs; ++e) {
          for (rows r; from->pop(q, r);) {
            for (std::size_t i = 0; e == 0 && i < r.size(); ++i) {
              std::uint64_t sum = r.labels[i] > 0.0f;
              for (std::size_t k = r.begin(i); k < r.end(i); ++k) sum = hd::feature_key(sum, r.indices[k]);
              found.insert(sum);
              if (expected.empty()) clicks += static_cast<double>(r.labels[i]);
            }
          }
        }
        rows r;
        CHECK_FALSE(from->pop(q, r));
      }
    }
    if (expected.empty()) expected = found;
    CHECK(found.size() == o.rows);
    CHECK(found == expected);
  }
  CHECK((clicks > 150 && clicks < 500));
  const auto stopped = data.open(true, {.queues = 2});
  rows r;
  CHECK(stopped->pop(0, r));
  stopped->stop();
  CHECK_FALSE(stopped->pop(0, r));
  CHECK_FALSE(stopped->pop(1, r));
}

TEST_CASE("a picture has any title whole, and leaves out what isn't finite") {
  const std::string name(300, 'x');
  point good, bad;
  good.test.loss = 0.5;
  bad.test.loss = HUGE_VAL;
  const std::string svg = drawn({good, bad}, "fm on <&>" + name);
  CHECK(svg.find("fm on &lt;&amp;&gt;" + name + "</text>") != std::string::npos);
  for (const std::string& s : {svg, drawn({}, ""), drawn({bad}, "")}) {
    CHECK(s.find("nan") == std::string::npos);
    CHECK(s.find("inf") == std::string::npos);
    CHECK(s.substr(s.size() - 7) == "</svg>\n");
  }
}

TEST_CASE("features of adult: fields, crosses, buckets") {
  hd::table_batch b;
  b.number_columns = 2;
  b.category_columns = 3;
  b.numbers = {0.0f, 100.0f, std::nanf(""), 101.0f};
  b.categories = {1, 2, 3, 1, 3, 2};
  b.labels = {1.0f, 0.0f};
  rows r;
  encoder{true}.encode(b, r);
  REQUIRE(r.size() == 2);
  CHECK(r.ends == std::vector<std::size_t>{8, 16});
  CHECK(r.fields == std::vector<std::uint32_t>{0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7});
  std::set<std::uint64_t> keys(r.indices.begin(), r.indices.end());
  CHECK(keys.size() == 15);  // of both rows' features only the first category is the same
  for (const std::uint64_t k : keys) CHECK(k >> 63 == 0);
  encoder{}.encode(b, r);
  CHECK(r.ends == std::vector<std::size_t>{5, 10});
  CHECK(bucket_of(17.0f) != bucket_of(18.0f));
  CHECK(bucket_of(-1.0f) != bucket_of(0.0f));
  CHECK(bucket_of(1e30f) > bucket_of(1e29f));
  CHECK(bucket_of(std::nanf("")) == hd::table_batch::missing);
}

TEST_CASE("a shipped file is read whole, from a file without a name") {
  options o;
  o.data = "mushroom";
  const data_set data(o);
  std::size_t count = 0;
  for (const bool training : {true, false}) {
    const auto from = data.open(training, {});
    for (rows r; from->pop(0, r);) count += r.size();
  }
  CHECK(count == 6513 + 1611);
  CHECK_THROWS_AS(unpacked("/nonexistent.gz"), hd::file_error);
  o.folder = "/nonexistent";
  CHECK_THROWS_AS(data_set(o), hd::file_error);
}

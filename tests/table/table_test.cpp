// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/optim/sgd.hpp>
#include <heddle/table/sparse_table.hpp>

#include "catch.hpp"
#include "folder.hpp"

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include <unistd.h>

namespace hd = heddle;

namespace {
constexpr std::size_t dim = 4;
using keys_type = std::vector<std::uint64_t>;
using floats = std::vector<float>;
using table_type = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::adagrad>;

// Numbers from a seed.
std::uint64_t word(std::uint64_t seed, std::uint64_t i) {
  const auto b = hd::philox(seed, 77, i);
  return std::uint64_t{b.word[0]} << 32 | b.word[1];
}
floats gradients(std::uint64_t seed, std::size_t n, std::size_t width = dim) {
  floats g(n * width);
  for (std::size_t i = 0; i < g.size(); ++i) g[i] = hd::random_uniform(seed, 5, i) - 0.5f;
  return g;
}
keys_type some_keys(std::uint64_t seed, std::size_t n, std::uint64_t of) {
  keys_type k(n);
  for (std::size_t i = 0; i < n; ++i) k[i] = word(seed, i) % of;
  return k;
}
template <class Table> floats rows_of(const Table& t, const std::vector<typename Table::key_type>& keys) {
  floats out(keys.size() * Table::dim, -99.0f);
  t.read(keys, out);
  return out;
}
std::string content(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream all;
  all << in.rdbuf();
  return all.str();
}
void write(const std::string& path, const std::string& all) { std::ofstream(path, std::ios::binary) << all; }
}  // namespace

TEST_CASE("mixing is a bijection, and the arithmetic of shards goes past 2^32 rows") {
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const std::uint64_t k = i < 1000 ? i : word(1, i);
    CHECK(hd::detail::unmix(hd::detail::mix(k)) == k);
    CHECK(hd::detail::mix(hd::detail::unmix(k)) == k);
  }
  CHECK(hd::detail::shard_of(~std::uint64_t{0}, 0) == 0);
  CHECK(hd::detail::shard_of(~std::uint64_t{0}, 20) == (1u << 20) - 1);
  CHECK(hd::detail::place_among(~std::uint64_t{0}, 0xffffff00u) == 0xfffffeffu);
  using store = hd::detail::row_store<16>;
  static_assert(store::most_pages * store::page_slots < (std::uint64_t{1} << 32));
  static_assert(store::room(store::most_pages * store::page_slots) < store::none);
  static_assert((store::room(store::most_pages * store::page_slots) << 10) > (std::uint64_t{1} << 41));
  static_assert(store::room(std::uint64_t{1} << 40) == (std::uint64_t{1} << 40) / 5 * 4);
  static_assert(store::mask_of((std::uint64_t{1} << 31) + store::page_slots) == 0xffffffffu);
  static_assert(store::mask_of(store::most_pages * store::page_slots) == 0xffffffffu);
  std::uint64_t pages = 0;
  while (pages < store::most_pages) pages = store::pages_after(pages);
  CHECK(pages == store::most_pages);  // an index grows to all that its words can number, and no further
  CHECK(store::pages_after(pages) > store::most_pages);
  CHECK(hd::detail::checksum("abc", 3) != hd::detail::checksum("abd", 3));
  CHECK(hd::detail::checksum("abc\0", 4) != hd::detail::checksum("abc", 3));
}

TEST_CASE("rules do what their formulas say") {
  constexpr std::size_t n = 3;
  const float lr = 0.1f;
  double w[n] = {0.5, -0.25, 0.0}, s[n] = {}, m[n] = {}, v[n] = {}, z[n] = {}, q[n] = {}, r = 0,
         wr[n] = {0.5, -0.25, 0}, wm[n] = {0.5, -0.25, 0}, wf[n] = {}, mom[n] = {}, wp[n] = {0.5, -0.25, 0};
  float a[n] = {0.5f, -0.25f, 0}, as[n] = {}, b[n] = {0.5f, -0.25f, 0}, bs[1] = {}, c[n] = {0.5f, -0.25f, 0},
        cs[2 * n + 2], d[n] = {}, ds[2 * n] = {}, e[n] = {0.5f, -0.25f, 0}, es[n + 1] = {};
  const hd::rule::adagrad adagrad{.eps = 1e-6f};
  const hd::rule::row_adagrad by_row{.eps = 1e-6f};
  const hd::rule::adam adam;
  const hd::rule::ftrl ftrl{.beta = 0.5f, .l1 = 0.02f, .l2 = 0.1f};
  const hd::rule::per_row<hd::sgd> momentum{{.momentum = 0.5f}};
  adam.start<n>(cs);
  for (int t = 1; t <= 20; ++t) {
    const floats g = gradients(static_cast<std::uint64_t>(t), n, 1);
    double mean = 0;
    for (std::size_t i = 0; i < n; ++i) mean += g[i] * static_cast<double>(g[i]) / n;
    r += mean;
    for (std::size_t i = 0; i < n; ++i) {
      const double x = g[i];
      s[i] += x * x;
      w[i] -= lr * x / (std::sqrt(s[i]) + 1e-6);
      wr[i] -= lr * x / (std::sqrt(r) + 1e-6);
      m[i] = 0.9 * m[i] + 0.1 * x;
      v[i] = 0.999 * v[i] + 0.001 * x * x;
      wm[i] -= lr * (m[i] / (1 - std::pow(0.9, t))) / (std::sqrt(v[i] / (1 - std::pow(0.999, t))) + 1e-8);
      z[i] += x - (std::sqrt(q[i] + x * x) - std::sqrt(q[i])) / lr * wf[i];
      q[i] += x * x;
      wf[i] = std::abs(z[i]) <= 0.02 ? 0 : -(z[i] - (z[i] > 0 ? 0.02 : -0.02)) / ((0.5 + std::sqrt(q[i])) / lr + 0.1);
      mom[i] = 0.5 * mom[i] + x;
      wp[i] -= lr * mom[i];
    }
    adagrad.update<n>(a, as, g.data(), {lr});
    by_row.update<n>(b, bs, g.data(), {lr});
    adam.update<n>(c, cs, g.data(), {lr});
    ftrl.update<n>(d, ds, g.data(), {lr});
    momentum.update<n>(e, es, g.data(), {lr});
    for (std::size_t i = 0; i < n; ++i) {
      CHECK(a[i] == Approx(w[i]).margin(1e-5));
      CHECK(b[i] == Approx(wr[i]).margin(1e-5));
      CHECK(c[i] == Approx(wm[i]).margin(1e-4));
      CHECK(d[i] == Approx(wf[i]).margin(1e-5));
      CHECK(e[i] == Approx(wp[i]).margin(1e-5));
    }
  }
  CHECK_THROWS_AS(hd::rule::adam{.beta2 = 1.0f}.check(), hd::argument_error);
  CHECK_THROWS_AS((table_type({.rule = {.eps = 0.0f}})), hd::argument_error);
  CHECK_THROWS_AS((table_type({.shard_bits = 21})), hd::argument_error);
  CHECK_THROWS_AS((table_type({.first_shard = 5, .last_shard = 5})), hd::argument_error);
}

TEST_CASE("16-bit weights round without bias, int8 within half a scale") {
  double bf = 0, half = 0, tiny = 0;
  const int n = 20000;
  for (int i = 0; i < n; ++i) {
    const auto random = static_cast<std::uint32_t>(word(3, static_cast<std::uint64_t>(i)) & 0xffff);
    bf += static_cast<float>(hd::detail::round_by<hd::bfloat16>(1.001f, random));
    half += static_cast<float>(hd::detail::round_by<hd::float16>(-1.0002f, random));
    tiny += static_cast<float>(hd::detail::round_by<hd::float16>(0x1.4p-24f, random));
  }
  CHECK(bf / n == Approx(1.001).margin(2e-4));
  CHECK(half / n == Approx(-1.0002).margin(3e-5));
  CHECK(tiny / n == Approx(1.25 * 0x1p-24).epsilon(0.05));
  CHECK(static_cast<float>(hd::detail::round_by<hd::float16>(1e9f, 0xffff)) == 65504.0f);
  CHECK(static_cast<float>(hd::detail::round_by<hd::bfloat16>(-std::numeric_limits<float>::max(), 0xffff)) ==
        -0x1.fep127f);
  std::uint32_t kept = 0;
  for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {  // what can be stored stays
    const float x = static_cast<float>(hd::float16::from_bits(static_cast<std::uint16_t>(bits)));
    kept += hd::detail::round_by<hd::float16>(x, 0xffff).bits == bits;
  }
  CHECK(kept == 0x7c00);
  const floats w{0.5f, -1.0f, 0.25f, 0.001f};
  using served = hd::row<4, hd::scaled_int8>;
  std::byte stored[served::bytes];
  floats back(4);
  served::store(w.data(), stored);
  served::load(stored, back.data());
  for (std::size_t i = 0; i < 4; ++i) CHECK(std::abs(back[i] - w[i]) <= 0.5f / 127 + 1e-7f);
  const float endless = std::numeric_limits<float>::infinity();
  const floats odd{endless, 2.0f, std::nanf(""), -endless};  // they don't spoil the others
  served::store(odd.data(), stored);
  served::load(stored, back.data());
  CHECK(back == floats{2.0f / 127 * 127, 2.0f / 127 * 127, 0.0f, -(2.0f / 127 * 127)});

  // A thousand steps of a quarter of the last bit move a bfloat16 weight; rounded to nearest they wouldn't.
  hd::sparse_table<std::int32_t, hd::row<3, hd::bfloat16>, hd::rule::sum, hd::initial::zero> t({.shard_bits = 0});
  const std::vector<std::int32_t> key{-1};
  t.push(key, floats{1.0f, 1.0f, 1.0f});
  for (int i = 0; i < 1000; ++i) t.push(key, floats{0x1p-9f, 0x1p-9f, -0x1p-9f});
  const floats moved = rows_of(t, key);
  CHECK(moved[0] == Approx(1 + 1000 * 0x1p-9).epsilon(0.2));
  CHECK(moved[1] == Approx(1 + 1000 * 0x1p-9).epsilon(0.2));
  CHECK(moved[2] == Approx(1 - 1000 * 0x1p-9).margin(0.4));
  CHECK(moved[0] != moved[1]);
}

TEST_CASE("every key is one like any other") {  // T1
  const folder dir;
  const keys_type keys{0,
                       1,
                       (std::uint64_t{1} << 63) - 1,
                       std::uint64_t{1} << 63,
                       ~std::uint64_t{1},
                       ~std::uint64_t{0},
                       static_cast<std::uint64_t>(-1)};
  table_type t({.seed = 3});
  floats out(keys.size() * dim);
  CHECK(t.pull(keys, out).created == 6);
  CHECK(t.size() == 6);
  t.push(keys, gradients(1, keys.size()), {.lr = 0.1f});
  const floats before = rows_of(t, keys);
  CHECK(before != out);
  t.save(dir / "t");
  table_type u({.seed = 3});
  u.load(dir / "t");
  CHECK(u.size() == 6);
  CHECK(rows_of(u, keys) == before);
  CHECK(u.checksum() == t.checksum());
  CHECK(u.erase(std::span(keys).first(6)) == 6);
  CHECK(u.size() == 0);
  CHECK(rows_of(u, keys) == floats(out.size(), 0.0f));
  std::set<std::uint64_t> seen;
  t.for_each([&](const auto& r) { seen.insert(r.key); });
  CHECK(seen == std::set<std::uint64_t>(keys.begin(), keys.end()));
}

TEST_CASE("keys that are multiples of anything spread over shards") {  // T2
  for (const std::uint64_t step :
       {std::uint64_t{1}, std::uint64_t{1000}, std::uint64_t{1024}, std::uint64_t{1} << 54}) {
    std::vector<int> rows(1024);
    for (std::uint64_t i = 0; i < 102400; ++i) ++rows[hd::detail::shard_of(hd::detail::mix(i * step), 10)];
    const int most = *std::max_element(rows.begin(), rows.end());
    if (step < (std::uint64_t{1} << 50))
      CHECK(most < 100 + 6 * 10);  // mean 100, deviation 10
    else
      CHECK(most >= 100);  // there are but 1024 such keys
  }
}

TEST_CASE("a batch's duplicates make one step, and results are in the caller's order") {  // T3
  table_type a, b, c;
  const floats g = gradients(2, 3);
  floats sum(dim);
  for (std::size_t i = 0; i < 3 * dim; ++i) sum[i % dim] += g[i];
  CHECK(a.push(keys_type{5, 5, 5}, g, {.lr = 0.1f}).applied == 1);
  b.push(keys_type{5}, sum, {.lr = 0.1f});
  for (std::size_t i = 0; i < 3; ++i) c.push(keys_type{5}, std::span(g).subspan(i * dim, dim), {.lr = 0.1f});
  CHECK(a.checksum() == b.checksum());
  CHECK(a.checksum() != c.checksum());
  const keys_type keys{9, 9, 4, 9};
  floats out(4 * dim), nine(dim), four(dim);
  a.pull(keys, out);
  a.pull(keys_type{9}, nine);
  a.pull(keys_type{4}, four);
  floats expected = nine;
  for (const floats* f : {&nine, &four, &nine}) expected.insert(expected.end(), f->begin(), f->end());
  CHECK(out == expected);
  CHECK(nine != four);
}

TEST_CASE("a table equals a map of rows, for any sizes of batches") {
  table_type t({.seed = 9, .shard_bits = 4});
  std::map<std::uint64_t, std::pair<floats, floats>> model;  // weights and accumulators
  std::uint64_t round = 0;
  for (const std::size_t n : {0, 1, 2, 3, 17, 63, 64, 65, 1023, 1024, 1025, 10007, 1, 0}) {
    const keys_type keys = some_keys(++round, n, n < 1000 ? 50 : 3000);
    const floats g = gradients(round, n);
    std::map<std::uint64_t, floats> sums;
    for (std::size_t i = 0; i < n; ++i) {
      floats& s = sums.try_emplace(keys[i], dim).first->second;
      for (std::size_t d = 0; d < dim; ++d) s[d] += g[i * dim + d];
    }
    for (const auto& [key, s] : sums) {
      const bool fresh = !model.contains(key);
      auto& [w, acc] = model[key];
      if (fresh) {
        w.resize(dim), acc.resize(dim);
        hd::initial::uniform{}.fill<dim>(w.data(), 9, 0, key);
      }
      hd::rule::adagrad{}.update<dim>(w.data(), acc.data(), s.data(), {0.05f});
    }
    const auto r = t.push(keys, g, {.lr = 0.05f});
    CHECK(r.applied == sums.size());
    if (round % 4 == 3) {  // erase some
      keys_type gone;
      for (const auto& [key, w] : model)
        if (key % 3 == 0) gone.push_back(key);
      for (const std::uint64_t k : gone) model.erase(k);
      CHECK(t.erase(gone) == gone.size());
      CHECK(t.erase(gone) == 0);
    }
    REQUIRE(t.size() == model.size());
    std::size_t visited = 0;
    t.for_each([&](const auto& row) {
      ++visited;
      const auto& [w, acc] = model.at(row.key);
      if (!std::equal(w.begin(), w.end(), row.weights.begin())) throw std::runtime_error("a row differs");
      if (std::memcmp(row.state.data(), acc.data(), sizeof(float) * dim) != 0)
        throw std::runtime_error("a state differs");
    });
    CHECK(visited == model.size());
  }
  CHECK_THROWS_AS(t.push(keys_type{1}, floats(dim - 1)), hd::argument_error);
  CHECK_THROWS_AS(t.push(keys_type{1}, floats(dim), {.shows = std::span<const float>(gradients(1, 1))}),
                  hd::argument_error);
}

TEST_CASE("initial values depend on seed, table, key and column alone") {  // T4
  const keys_type keys = some_keys(4, 3000, ~std::uint64_t{0});
  floats expected(keys.size() * dim);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    for (std::uint32_t c = 0; c < dim; ++c) {
      const auto b = hd::philox(11, std::uint64_t{2} << 32, keys[i]);
      expected[i * dim + c] = (2 * hd::to_uniform(b.word[c]) - 1) * 0.01f;
    }
  }
  for (const unsigned bits : {0u, 1u, 3u, 10u}) {
    table_type t({.seed = 11, .table = 2, .shard_bits = bits});
    floats out(keys.size() * dim);
    std::vector<std::thread> threads;
    for (std::size_t part = 0; part < 2; ++part) {
      threads.emplace_back([&, part] {
        const std::size_t n = keys.size() / 2;
        t.pull(std::span(keys).subspan(part * n, n), std::span(out).subspan(part * n * dim, n * dim));
      });
    }
    for (auto& th : threads) th.join();
    CHECK(out == expected);
    t.erase(keys);
    t.pull(keys, out);
    CHECK(out == expected);
  }
}

TEST_CASE("threads grow a table while others read, and rows don't move") {  // T5
  hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::sum, hd::initial::zero> t({.shard_bits = 4});
  constexpr std::size_t per_thread = 500'000;
  keys_type old(16);  // their records are watched
  for (std::size_t i = 0; i < old.size(); ++i) old[i] = 1'000'000'000 + i;
  floats zeros(old.size() * dim);
  t.pull(old, zeros);
  const auto places = [&] {
    std::map<std::uint64_t, const std::byte*> at;
    t.for_each([&](const auto& r) {
      if (r.key >= old[0]) at[r.key] = r.state.data();
    });
    return at;
  };
  const auto before = places();
  CHECK(before.size() == 16);
  std::atomic<bool> done{false};
  std::atomic<int> torn{0};
  std::vector<std::thread> threads;
  for (std::uint64_t w = 0; w < 2; ++w) {
    threads.emplace_back([&, w] {
      for (std::size_t first = 0; first < per_thread; first += 500) {
        keys_type keys(500);
        for (std::size_t i = 0; i < 500; ++i) keys[i] = (first + i) * 2 + w;
        for (std::size_t i = 0; i < 20; ++i) keys[i] = i;  // shared
        t.push(keys, floats(500 * dim, 1.0f));
      }
    });
  }
  std::thread reader([&] {
    while (!done) {
      const keys_type keys = some_keys(3, 300, 2 * per_thread);
      const floats out = rows_of(t, keys);
      for (std::size_t i = 0; i < out.size(); i += dim)
        for (std::size_t d = 1; d < dim; ++d) torn += out[i] != out[i + d];
      (void)t.bytes();
    }
  });
  for (auto& th : threads) th.join();
  done = true;
  reader.join();
  CHECK(torn == 0);
  CHECK(places() == before);
  double sum = 0;
  t.for_each([&](const auto& r) { sum += r.weights[0]; });
  CHECK(sum == 2.0 * per_thread);
  CHECK(rows_of(t, keys_type{7})[0] == 2.0f * per_thread / 500);
}

TEST_CASE("evaluation creates nothing") {  // T8
  table_type t;
  t.push(keys_type{1, 2}, floats(2 * dim, 1.0f), {.lr = 0.1f});
  keys_type keys(1000);
  floats out(keys.size() * dim);
  std::vector<std::uint8_t> found(keys.size(), 7);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  CHECK(t.read(keys, out, found) == keys.size() - 2);
  const std::size_t bytes = t.bytes();
  for (std::uint64_t round = 0; round < 1000; ++round) {
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = round * 1000 + i;
    t.read(keys, out);
  }
  CHECK(t.bytes() == bytes);
  CHECK(t.size() == 2);
  CHECK((found[0] == 0 && found[1] == 1 && found[2] == 1 && found[3] == 0));
}

TEST_CASE("admission by count makes a row at the n-th sighting") {  // T9
  using counted = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::sum, hd::initial::zero, hd::admit::count>;
  const folder dir;
  counted t({.admission = {.n = 3}});
  const floats one(dim, 1.0f);
  floats out(dim);
  for (int i = 1; i <= 2; ++i) {
    CHECK(t.push(keys_type{8}, one, {.worker = 1, .sequence = static_cast<std::uint64_t>(i)}).refused == 1);
    // The same push again counts nothing, and pulls never do.
    CHECK(t.push(keys_type{8}, one, {.worker = 1, .sequence = static_cast<std::uint64_t>(i)}).repeated == 1);
    CHECK(t.pull(keys_type{8}, out).created == 0);
    CHECK(out == floats(dim));
  }
  t.save(dir / "t");
  counted u({.admission = {.n = 3}});
  u.load(dir / "t");  // what was counted is saved
  for (counted* x : {&t, &u}) {
    CHECK(x->push(keys_type{8}, one, {.worker = 1, .sequence = 3}).created == 1);
    CHECK(rows_of(*x, {8}) == one);
  }
  CHECK(t.push(keys_type{9, 9, 9}, floats(3 * dim, 1.0f)).refused == 2);  // each is a sighting
  CHECK(rows_of(t, {9}) == one);
  CHECK(t.push(keys_type{10}, one, {.times = std::span<const float>(floats{3.0f})}).created == 1);
  for (const float bad : {std::nanf(""), -1.0f, 1e20f}) {
    const floats wrong{bad};
    CHECK_THROWS_AS(t.push(keys_type{11}, one, {.times = wrong}), hd::argument_error);
    CHECK_THROWS_AS(t.push(keys_type{11}, one, {.shows = wrong}), hd::argument_error);
    CHECK_THROWS_AS(t.push(keys_type{11}, one, {.clicks = wrong}), hd::argument_error);
  }
  std::uint32_t often[1] = {5};
  hd::evict::lfu{.bytes = 1}.touch(often, {.times = 0x1p40f}, 0, 0);
  CHECK(often[0] == 0xffffffffu);
}

TEST_CASE("a bound drops the same rows before and after a restart") {
  using bounded = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::adagrad, hd::initial::uniform,
                                   hd::admit::counting_bloom, hd::evict::lfu>;
  bounded few({.admission = {.n = 2, .cells = 1000}, .eviction = {.bytes = 8 << 20}});  // fewer cells than shards
  for (const std::uint64_t created : {0, 1}) CHECK(few.push(keys_type{3}, floats(dim, 1.0f)).created == created);
  const bounded::settings s{.admission = {.n = 1}, .eviction = {.bytes = 20000}, .shard_bits = 1};
  bounded t(s), u(s);
  const folder dir;
  const auto train = [](bounded& x, std::uint64_t first) {
    std::size_t gone = 0;
    for (std::uint64_t round = first; round < first + 40; ++round)
      gone += x.push(some_keys(round, 50, 1000), gradients(round, 50), {.lr = 0.1f}).gone.size();
    return gone;
  };
  CHECK(train(t, 0) > 0);
  t.save(dir / "t");
  u.load(dir / "t");
  CHECK(train(t, 40) == train(u, 40));
  CHECK(t.checksum() == u.checksum());
  CHECK_THROWS_AS((bounded({.eviction = {.bytes = 8000}, .shard_bits = 1})), hd::argument_error);
}

namespace {
// A full file and its deltas are the table, with what the eviction knows of each row.
template <class Eviction> void deltas_of(const Eviction& eviction) {
  using kept =
      hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::sum, hd::initial::uniform, hd::admit::always, Eviction>;
  const folder dir;
  kept t({.eviction = eviction, .shard_bits = 1}), u({.eviction = eviction, .shard_bits = 1});
  std::size_t gone = 0;
  for (std::uint64_t round = 0; round < 40; ++round) {
    gone += t.push(some_keys(round, 50, 1000), gradients(round, 50)).gone.size();
    t.advance();
    if constexpr (hd::expiring_eviction<Eviction>) gone += t.evict().size();
    if (round == 20) t.save(dir / "t"), u.load(dir / "t");
    if (round <= 20 || round % 3 != 0) continue;
    t.save_delta(dir / "d");
    u.load_delta(dir / "d");
    INFO("round " << round);
    CHECK(t.checksum() == u.checksum());
  }
  CHECK(gone > 20);
}
}  // namespace

TEST_CASE("deltas hold what an eviction has counted down") {
  deltas_of(hd::evict::lfu{.bytes = 15000});
  deltas_of(hd::evict::lru{.bytes = 15000});
  deltas_of(hd::evict::score{.decay = 0.7f, .nonclick = 1.0f, .click_weight = 2.0f, .threshold = 0.1f, .ticks = 99});
  deltas_of(hd::evict::ttl{.ticks = 9});
}

TEST_CASE("a table that follows another by its deltas doesn't grow by what is refused") {
  using counted = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::sum, hd::initial::uniform, hd::admit::count>;
  const folder dir;
  const counted::settings how{.admission = {.n = 1000}, .shard_bits = 1};
  counted t(how), u(how);
  t.push(some_keys(1, 20000, 20000), gradients(1, 20000));
  t.save(dir / "t");
  u.load(dir / "t");
  const std::size_t bytes = u.bytes();
  for (int n = 0; n < 60; ++n) {
    t.push(some_keys(1, 20000, 20000), gradients(1, 20000));
    t.save_delta(dir / "d");
    u.load_delta(dir / "d");
  }
  CHECK(u.bytes() <= bytes + (std::size_t{2} << 20));  // a slab
  for (counted* x : {&t, &u}) {  // what it remembers is the same
    while (x->size() == 0) x->push(some_keys(1, 20000, 20000), gradients(1, 20000));
  }
  CHECK(t.size() == u.size());
  CHECK(t.counts().refused - u.counts().refused == 61 * 20000);
}

TEST_CASE("the counting Bloom filter admits never late, and early at the stated rate") {
  hd::detail::slabs memory;
  const hd::admission_context c{1, 0, memory};
  const hd::admit::counting_bloom bloom{.n = 3, .cells = 1 << 16, .hashes = 4};
  hd::admit::counting_bloom::state state;
  const std::uint64_t u = 20000;
  int early = 0;
  for (std::uint64_t k = 0; k < u; ++k)
    bloom.admit(state, hd::detail::mix(k), {}, c), bloom.admit(state, hd::detail::mix(k), {}, c);
  const std::size_t bytes = state.bytes();
  for (std::uint64_t k = 0; k < u; ++k) {
    if (!bloom.admit(state, hd::detail::mix(k), {}, c)) FAIL("key " << k << " is admitted late");
  }
  for (std::uint64_t k = u; k < 2 * u; ++k) early += bloom.admit(state, hd::detail::mix(k), {}, c);
  const double rate = std::pow(1 - std::exp(-4.0 * u / (1 << 16)), 4);
  CHECK(early / static_cast<double>(u) < 2 * rate);
  CHECK(state.bytes() == bytes);
  CHECK(bytes == 1 << 16);

  // A part of all keys, the same each time.
  const hd::admit::probability p{.p = 0.3f};
  int in = 0;
  for (std::uint64_t k = 0; k < 10000; ++k) in += p.admits_unseen(hd::detail::mix(k), 5);
  CHECK(std::abs(in - 3000) < 250);
  const hd::admit::show_click clicks{.nonclick = 0.5f, .click_weight = 2.0f, .threshold = 3.0f};
  hd::detail::refused_sums scores;
  CHECK_FALSE(clicks.admit(scores, 1, {1, 2.0f, 0.0f}, c));  // 1
  CHECK_FALSE(clicks.admit(scores, 1, {1, 1.0f, 0.0f}, c));  // 1.5
  CHECK(clicks.admit(scores, 1, {1, 1.0f, 1.0f}, c));        // 3.5
  CHECK_FALSE(clicks.admit(scores, 1, {1, 1.0f, 1.0f}, c));  // from the beginning
}

TEST_CASE("rows expire, or fall to a bound, and those that went are named") {
  using expiring = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::sum, hd::initial::zero, hd::admit::always,
                                    hd::evict::ttl>;
  const folder dir;
  expiring t({.eviction = {.ticks = 2}}), u({.eviction = {.ticks = 2}});
  t.push(keys_type{1, 2}, floats(2 * dim, 1.0f));
  t.save(dir / "base");
  u.load(dir / "base");
  for (int i = 0; i < 2; ++i) t.advance();
  t.push(keys_type{2, 3}, floats(2 * dim, 1.0f));
  CHECK(t.evict().empty());
  t.advance();
  CHECK(t.evict() == keys_type{1});
  t.save_delta(dir / "d1");
  u.load_delta(dir / "d1");  // T14: evicted before the delta, gone after loading it
  CHECK(u.size() == 2);
  CHECK(u.now() == 3);
  CHECK(u.checksum() == t.checksum());
  CHECK(t.counts().evicted == 1);

  using bounded = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::sum, hd::initial::zero, hd::admit::always,
                                   hd::evict::lfu>;
  bounded b({.eviction = {.bytes = 64 << 10}, .shard_bits = 2});
  const std::size_t most = (64 << 10) / (bounded::record_bytes + 7);
  std::set<std::uint64_t> gone;
  for (std::uint64_t round = 0; round < 50; ++round) {
    keys_type keys = some_keys(round, 200, ~std::uint64_t{0});
    for (std::size_t i = 0; i < 50; ++i) keys[i] = i, keys[50 + i] = i;  // often
    const auto r = b.push(keys, floats(200 * dim, 1.0f));
    gone.insert(r.gone.begin(), r.gone.end());
    CHECK(r.evicted == r.gone.size());
  }
  CHECK(b.size() <= most);
  CHECK(b.size() > most / 2);
  CHECK(gone.size() == 50 + 50 * 100 - b.size());
  for (std::uint64_t k = 0; k < 50; ++k) CHECK_FALSE(gone.contains(k));
  CHECK(rows_of(b, {7})[0] == 100.0f);
  bounded large({.eviction = {.bytes = 2 << 20}, .shard_bits = 2});
  keys_type keys(1000);
  for (std::uint64_t k = 0; k < 200000; ++k) {
    keys[k % 1000] = k;
    if (k % 1000 == 999) large.push(keys, floats(1000 * dim, 1.0f));
  }
  CHECK(large.bytes() < std::size_t{5} << 20);  // the bound, a slab, and a batch
  // Of the longest untouched first.
  const hd::evict::lru lru{.bytes = 1};
  std::uint32_t old[1] = {0xfffffff0u}, fresh[1] = {5};  // the count has passed 2^32 between them
  CHECK(lru.rank(old, (std::uint64_t{1} << 32) + 10) < lru.rank(fresh, (std::uint64_t{1} << 32) + 10));
  const hd::evict::score score{.decay = 0.5f, .nonclick = 1.0f, .click_weight = 2.0f, .threshold = 1.0f, .ticks = 9};
  std::uint32_t words[3] = {};
  score.touch(words, {1, 2.0f, 1.0f}, 4, 0);
  CHECK_FALSE(score.expired(words, 5));  // (1 - .5) + 1
  CHECK(score.expired(words, 5));        // half of it
}

TEST_CASE("gradients that aren't finite are counted and move nothing") {  // T13
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  table_type t;
  t.push(keys_type{7}, floats(dim, 1.0f), {.lr = 0.1f});
  const std::uint64_t before = t.checksum();
  for (const float bad : {nan, inf, -inf}) {
    for (std::size_t at = 0; at < dim; ++at) {
      floats g(dim, 1.0f);
      g[at] = bad;
      CHECK(t.push(keys_type{7}, g, {.lr = 0.1f}).rejected == 1);
    }
  }
  CHECK(t.checksum() == before);
  CHECK(t.counts().rejected == 12);
  floats two(2 * dim, 1.0f);
  two[0] = nan;  // the other of a pair still counts
  CHECK(t.push(keys_type{7, 7}, two, {.lr = 0.1f}).applied == 1);
  CHECK(t.checksum() != before);
  CHECK_THROWS_AS(t.push(keys_type{7}, floats(dim), {.lr = nan}), hd::argument_error);
  const std::uint64_t after = t.checksum();
  CHECK(t.push(keys_type{7, 7}, floats(2 * dim, 3e38f), {.lr = 0.1f}).rejected == 1);  // their sum overflows
  CHECK(t.push(keys_type{7}, floats(dim, inf), {.lr = 0.1f, .summed = true}).rejected == 1);
  CHECK(t.checksum() == after);

  hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::sum, hd::initial::zero, hd::admit::always, hd::evict::never,
                   hd::guard::clamp>
      c({.guard = {.limit = 2.0f}});
  CHECK(c.push(keys_type{1, 1}, floats{nan, inf, -5.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f}).rejected == 1);
  CHECK(rows_of(c, {1}) == floats{1.0f, 3.0f, -1.0f, 2.0f});
  c.push(keys_type{2}, floats(dim, 3.0f), {.summed = true});  // sums of clamped ones may be larger
  CHECK(rows_of(c, {2}) == floats(dim, 3.0f));
  float g[1] = {nan};
  CHECK_FALSE(hd::guard::raise{}.check<1>(g));
}

TEST_CASE("a push takes effect once, whatever is repeated") {
  hd::sparse_table<std::uint64_t, hd::row<1>, hd::rule::sum, hd::initial::zero> t;
  const floats one(3, 1.0f);
  for (std::uint64_t s = 1; s <= 10; ++s) {
    for (int again = 0; again < 3; ++again) t.push(keys_type{1, 2, 3}, one, {.worker = 4, .sequence = s});
    t.push(keys_type{1, 2, 3}, one, {.worker = 0, .sequence = s});
  }
  CHECK(rows_of(t, {1, 2, 3}) == floats(3, 20.0f));
  CHECK(t.counts().repeated == 60);
  CHECK_THROWS_AS(t.push(keys_type{1}, floats{1}, {.worker = 70000, .sequence = 1}), hd::argument_error);
}

TEST_CASE("files load on any number of servers, and damaged ones are refused") {  // T7
  const folder dir;
  constexpr std::uint32_t shards = 16;
  const keys_type keys = some_keys(6, 3000, 2000);
  table_type whole({.seed = 5, .shard_bits = 4});
  for (std::uint64_t round = 0; round < 3; ++round)
    whole.push(keys, gradients(round, keys.size()), {.lr = 0.1f, .worker = 2, .sequence = round + 1});
  const auto held = [](std::uint32_t k, std::uint32_t of) {
    return table_type::settings{
        .seed = 5, .shard_bits = 4, .first_shard = k * shards / of, .last_shard = (k + 1) * shards / of};
  };
  whole.save(dir / "whole");
  std::vector<std::string> three;
  for (std::uint32_t k = 0; k < 3; ++k) {
    table_type t(held(k, 3));
    t.load(dir / "whole");
    three.push_back(dir / ("three-" + std::to_string(k)));
    t.save(three.back());
  }
  for (const std::uint32_t of : {1u, 2u, 5u}) {
    std::uint64_t sum = 0;
    std::size_t rows = 0;
    for (std::uint32_t k = 0; k < of; ++k) {
      table_type t(held(k, of));
      t.load(three);
      sum += t.checksum();
      rows += t.size();
      CHECK(has(message_of([&] { t.save_delta(dir / "x"); }), "no full file"));
    }
    CHECK(sum == whole.checksum());
    CHECK(rows == whole.size());
  }
  table_type t({.seed = 5, .shard_bits = 4});
  t.load(three);
  // The sequences came with the rows.
  CHECK(t.push(keys, gradients(2, keys.size()), {.lr = 0.1f, .worker = 2, .sequence = 3}).applied == 0);
  CHECK(has(message_of([&] { t.load(std::span(three).first(2)); }), "is in none"));
  std::vector<std::string> twice = three;
  twice.push_back(three[1]);
  CHECK(has(message_of([&] { t.load(twice); }), "and so does"));
  CHECK(has(message_of([&] { table_type(held(0, 3)).push(keys, gradients(0, keys.size())); }), "belongs to none"));

  const std::string good = content(dir / "whole");
  const auto refused = [&](std::string bytes) {
    write(dir / "bad", bytes);
    const std::string said = message_of([&] { t.load(dir / "bad"); });
    return has(said, "/bad: ") && t.checksum() == whole.checksum();
  };
  for (std::size_t n = 0; n < good.size(); n += 1 + good.size() / 40) CHECK(refused(good.substr(0, n)));
  CHECK(refused(good.substr(0, good.size() - 1)));
  CHECK(refused(good + "x"));
  for (std::size_t at = 0; at < good.size(); at += at < 300 ? 7 : 1 + good.size() / 60) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (1 << (at % 8)));
    INFO("byte " << at);
    CHECK(refused(bad));
  }
  // Another layout is refused by name.
  CHECK(has(message_of([&] { table_type({.seed = 6, .shard_bits = 4}).load(dir / "whole"); }),
            "seed is 5, the table's is 6"));
  hd::sparse_table<std::uint64_t, hd::row<8>, hd::rule::sum> wide({.seed = 5, .shard_bits = 4});
  const std::string said = message_of([&] { wide.load(dir / "whole"); });
  CHECK(has(said, "weights in a row is 4, the table's is 8"));
  CHECK(has(said, "rule is adagrad, the table's is sum"));
  CHECK(has(message_of([&] { t.load(dir / "nowhere"); }), "can't open"));
  CHECK(has(message_of([&] { t.save("/nowhere/at/all"); }), "can't write"));
  CHECK(t.checksum() == whole.checksum());
}

TEST_CASE("deltas come in order, none left out, none twice") {  // T14
  const folder dir;
  table_type a({.seed = 1}), b({.seed = 1});
  CHECK(has(message_of([&] { a.save_delta(dir / "d1"); }), "no full file"));
  const auto train = [&](std::uint64_t round) {
    a.push(some_keys(round, 500, 2000), gradients(round, 500), {.lr = 0.1f});
  };
  train(1);
  a.save(dir / "base");
  CHECK(content(dir / "base").size() > 500 * 40);
  b.load(dir / "base");
  std::uint64_t sums[4] = {a.checksum()};
  for (std::uint64_t d = 1; d <= 3; ++d) {
    train(d + 1);
    a.erase(some_keys(d, 20, 2000));
    a.push(some_keys(d, 3, 2000), gradients(d, 3), {.lr = 0.1f});                  // some of them come again
    if (d == 2) CHECK_THROWS_AS(a.save_delta("/nowhere/at/all"), hd::file_error);  // loses nothing
    a.save_delta(dir / ("d" + std::to_string(d)));
    sums[d] = a.checksum();
  }
  CHECK(has(message_of([&] { b.load_delta(dir / "d2"); }), "it is delta 2, where delta 1 is due"));
  b.load_delta(dir / "d1");
  CHECK(b.checksum() == sums[1]);
  CHECK(has(message_of([&] { b.load_delta(dir / "d3"); }), "it is delta 3, where delta 2 is due"));
  CHECK(has(message_of([&] { b.load_delta(dir / "d1"); }), "it is delta 1, where delta 2 is due"));
  CHECK(has(message_of([&] { b.load(dir / "d2"); }), "it is a delta"));
  CHECK(has(message_of([&] { b.load_delta(dir / "base"); }), "it is no delta"));
  std::string bad = content(dir / "d2");
  bad[bad.size() / 2] ^= 1;
  write(dir / "bad", bad);
  CHECK(has(message_of([&] { b.load_delta(dir / "bad"); }), "checksum"));
  CHECK(b.checksum() == sums[1]);
  b.load_delta(dir / "d2");
  b.load_delta(dir / "d3");
  CHECK(b.checksum() == sums[3]);
  // The chain goes on where it was loaded.
  b.push(keys_type{1}, floats(dim, 1.0f), {.lr = 0.1f});
  b.save_delta(dir / "d4");
  a.load(dir / "base");
  for (int d = 1; d <= 4; ++d) a.load_delta(dir / ("d" + std::to_string(d)));
  CHECK(a.checksum() == b.checksum());
  CHECK(content(dir / "d4").size() < content(dir / "d1").size());
  train(9);
  a.save(dir / "base2");
  CHECK(has(message_of([&] { b.load_delta(dir / "d1"); }), "where delta 5 is due"));
  b.load(dir / "base2");
  CHECK(has(message_of([&] { b.load_delta(dir / "d1"); }), "isn't what was loaded"));
}

namespace {
// A copy of a file with right checksums, and what edit(header) and edit(shard, section) have made of it.
template <class Head, class Body>
void forge(const std::string& from, const std::string& to, Head edit_head, Body edit_body) {
  hd::detail::table_reader in(from);
  hd::detail::table_header head = in.head();
  edit_head(head);
  hd::detail::table_writer out(to, head);
  in.each_section([&](std::uint32_t shard, hd::detail::byte_reader r) {
    const std::size_t n = r.left();
    const std::byte* const p = r.take(n);
    std::vector<std::byte> body(p, p + n);
    edit_body(shard, body);
    out.section(shard, body.data(), body.size());
  });
  out.finish();
}
const auto as_it_is = [](auto&&...) {};
}  // namespace

TEST_CASE("forged files with right checksums are refused or read, never half") {
  using kept = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::adagrad, hd::initial::uniform, hd::admit::count,
                                hd::evict::lfu>;
  const folder dir;
  const kept::settings how{.admission = {.n = 2}, .eviction = {.bytes = 1 << 20}, .seed = 1, .shard_bits = 2};
  kept a(how), b(how);
  const auto train = [](kept& t, std::uint64_t round) {
    t.push(some_keys(round, 200, 150), gradients(round, 200), {.lr = 0.1f, .worker = 1, .sequence = round});
  };
  train(a, 1);
  a.save(dir / "base");
  train(a, 2);
  a.erase(some_keys(3, 9, 150));
  a.save_delta(dir / "d1");
  b.load(dir / "base");
  const std::uint64_t before = b.checksum();
  int refused = 0, read = 0;
  for (std::uint64_t i = 0; i < 400; ++i) {
    INFO("forgery " << i);
    const bool delta = i % 2 != 0;
    const std::uint64_t other[] = {std::uint64_t{1} << 63, ~std::uint64_t{0}, std::uint64_t{1} << 32, 0, 1, word(8, i)};
    forge(dir / (delta ? "d1" : "base"), dir / "bad", as_it_is, [&](std::uint32_t shard, std::vector<std::byte>& body) {
      if (shard != word(7, i) % 4) return;
      if (i % 7 == 0) return body.resize(word(9, i) % body.size());
      // The first words are numbers of things, so they get more of it.
      const std::size_t words = body.size() / 4 - 1, at = 4 * (i % 3 == 0 ? i / 3 % 40 : word(9, i) % words);
      std::memcpy(body.data() + at, &other[word(10, i) % 6], 8);
    });
    kept t(how);
    t.load(dir / "base");
    const std::string said = message_of([&] { delta ? t.load_delta(dir / "bad") : t.load(dir / "bad"); });
    if (said == "nothing was thrown") {
      ++read;
      train(t, 5);  // and it can be used
    } else {
      ++refused;
      CHECK(has(said, "/bad: "));
      CHECK(t.checksum() == before);
    }
  }
  CHECK(refused > 60);
  CHECK(read > 60);

  // Counts that are larger than what follows, wherever they stand; kinds that there aren't.
  for (const std::size_t at : {8, 32}) {
    forge(dir / "base", dir / "bad", as_it_is, [&](std::uint32_t, std::vector<std::byte>& body) {
      const std::uint64_t many = std::uint64_t{1} << 63;
      std::memcpy(body.data() + at, &many, 8);
    });
    CHECK(has(message_of([&] { b.load(dir / "bad"); }), "9223372036854775808 things follow, more than it has"));
  }
  for (const std::uint32_t kind : {0u, 5u, ~0u}) {
    forge(dir / "base", dir / "bad", [&](auto& h) { h.kind = static_cast<hd::detail::file_kind>(kind); }, as_it_is);
    CHECK(has(message_of([&] { b.load(dir / "bad"); }), "its kind is " + std::to_string(kind)));
  }
  for (const std::uint32_t version : {0u, 3u}) {
    forge(dir / "base", dir / "bad", [&](auto& h) { h.version = version; }, as_it_is);
    CHECK(has(message_of([&] { b.load(dir / "bad"); }), "its version is " + std::to_string(version)));
  }
  forge(dir / "base", dir / "bad", [&](auto& h) { h.shard_bits = 21; }, as_it_is);
  CHECK(has(message_of([&] { b.load(dir / "bad"); }), "its shard_bits are 21"));
  CHECK(b.checksum() == before);
  // Each difference of types is named.
  const auto said_by = [&]<class Table>(Table&& t) { return message_of([&] { t.load(dir / "base"); }); };
  const auto of = [&]<class Key, class Row, class Rule>(Key, Row, Rule) {
    return said_by(hd::sparse_table<Key, Row, Rule>({.seed = 1, .shard_bits = 2}));
  };
  CHECK(has(of(std::uint32_t{}, hd::row<dim>{}, hd::rule::adagrad{}), "bytes of a key is 8, the table's is 4"));
  CHECK(has(of(std::uint64_t{}, hd::row<dim, hd::bfloat16>{}, hd::rule::adagrad{}), "type of weights is f32"));
  CHECK(has(of(std::uint64_t{}, hd::row<dim>{}, hd::rule::adagrad{}), "admission is count, the table's is always"));
  CHECK(has(of(std::uint64_t{}, hd::row<dim>{}, hd::rule::adagrad{}), "eviction is lfu, the table's is never"));
  CHECK(
      has(of(std::uint64_t{}, hd::row<dim>{}, hd::rule::row_adagrad{}), "rule is adagrad, the table's is row_adagrad"));
}

TEST_CASE("a file that is whole but wrong changes nothing, and a delta hides nothing") {
  const folder dir;
  const table_type::settings how{.seed = 1, .shard_bits = 2};
  table_type a(how), b(how), c(how);
  const auto train = [](table_type& t, std::uint64_t round) {
    t.push(some_keys(round, 200, 300), gradients(round, 200), {.lr = 0.1f});
  };
  train(a, 1);
  a.save(dir / "base");
  train(a, 2);
  a.erase(keys_type{1, 2, 3});
  a.save_delta(dir / "d1");
  b.load(dir / "base");
  const std::uint64_t before = b.checksum();
  // The same content with right checksums, but for one byte more, or under another shard's number.
  const auto rewrite = [&](const std::string& from, std::uint32_t flip, bool more) {
    hd::detail::table_reader in(dir / from);
    hd::detail::table_writer out(dir / "bad", in.head());
    in.each_section([&](std::uint32_t shard, hd::detail::byte_reader r) {
      const std::size_t n = r.left();
      const std::byte* const p = r.take(n);
      std::vector<std::byte> body(p, p + n);
      if (more && shard == 3) body.push_back(std::byte{0});
      out.section(shard ^ flip, body.data(), body.size());
    });
    out.finish();
  };
  rewrite("d1", 0, true);
  CHECK(has(message_of([&] { b.load_delta(dir / "bad"); }), "more bytes than rows"));
  CHECK(b.checksum() == before);
  rewrite("d1", 1, false);
  CHECK(has(message_of([&] { b.load_delta(dir / "bad"); }), "which isn't one of its"));
  CHECK(b.checksum() == before);
  rewrite("base", 1, false);
  CHECK(has(message_of([&] { b.load(dir / "bad"); }), "which isn't one of its"));
  CHECK(b.checksum() == before);

  // What is pushed, or erased, between a load and its delta is in the next delta, where the delta doesn't say otherwise.
  b.push(keys_type{1000, 1001}, floats(2 * dim, 1.0f), {.lr = 0.1f});
  b.erase(some_keys(2, 5, 300));  // d1 brings them back
  b.load_delta(dir / "d1");
  b.save_delta(dir / "d2");
  c.load(dir / "base");
  c.load_delta(dir / "d1");
  c.load_delta(dir / "d2");
  CHECK(c.checksum() == b.checksum());
  CHECK(b.size() == a.size() + 2);

  // A delta that holds all rows replaces that, and all else.
  table_type all(how), follower(how);
  all.load(dir / "base");
  all.push(keys_type{1002}, floats(dim, 1.0f), {.lr = 0.1f, .worker = 1, .sequence = 3});
  hd::detail::table_files<table_type>::save_delta(all, dir / "whole", true);
  follower.load(dir / "base");
  follower.push(keys_type{1000, 1002}, floats(2 * dim, 1.0f), {.lr = 0.1f, .worker = 1, .sequence = 7});
  follower.erase(some_keys(1, 5, 300));
  follower.load_delta(dir / "whole");
  CHECK(follower.checksum() == all.checksum());
  CHECK(follower.sequence_of(1) == 3);
  // What a former reader would take for something else, it refuses.
  const auto version = [&](const char* file) { return hd::detail::table_reader(dir / file).head().version; };
  CHECK(version("base") == 1);
  CHECK(version("d1") == 1);
  CHECK(version("whole") == 2);
  follower.save_delta(dir / "d2");
  all.load_delta(dir / "d2");
  CHECK(follower.checksum() == all.checksum());

  // Keys erased are kept for a delta, but not without end.
  const std::size_t bytes = c.bytes();
  for (std::uint64_t k = 2000; k < 22000; k += 10) {
    keys_type keys(10);
    for (std::size_t i = 0; i < 10; ++i) keys[i] = k + i;
    c.push(keys, floats(10 * dim, 1.0f), {.lr = 0.1f});
    c.erase(keys);
  }
  CHECK(c.bytes() < bytes + 100000);
  CHECK(has(message_of([&] { c.save_delta(dir / "d3"); }), "more keys were erased"));
  c.save(dir / "base");
  c.save_delta(dir / "d1");

  table_type other({.initial = {.range = 5.0f}, .seed = 1, .shard_bits = 2});
  CHECK(other.layout_number() != a.layout_number());
  // What pull would read, without a row.
  const keys_type keys{1, 1, 5000};
  floats seen(keys.size() * dim), pulled(keys.size() * dim);
  const std::size_t rows = c.size();
  c.preview(keys, seen);
  CHECK(c.size() == rows);
  CHECK(c.pull(keys, pulled).created > 0);
  CHECK(seen == pulled);
}

TEST_CASE("what is saved beside training existed") {  // T6
  // Weights, statistics and state of a row all count its pushes: AdaGrad's sum of ones, and the weight that follows.
  const folder dir;
  hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::per_row<hd::sgd>, hd::initial::zero> t(
      {.rule = {{.momentum = 0.0f}}, .shard_bits = 3}),
      u({.rule = {{.momentum = 0.0f}}, .shard_bits = 3});
  std::atomic<bool> done{false};
  std::thread trainer([&] {
    keys_type keys(200);  // none twice, so that each push is a step of 1 of each
    for (std::uint64_t i = 0; !done; ++i) {
      for (std::size_t k = 0; k < 200; ++k) keys[k] = (word(i, 0) % 5000 + 7 * k) % 5000;
      t.push(keys, floats(200 * dim, -1.0f), {.lr = 1.0f});
    }
  });
  int wrong = 0;
  for (int i = 0; i < 6; ++i) {
    if (i == 0)
      t.save(dir / "base");
    else
      t.save_delta(dir / std::to_string(i));
    if (i == 0)
      u.load(dir / "base");
    else
      u.load_delta(dir / std::to_string(i));
    u.for_each([&](const auto& r) {
      std::uint32_t steps;
      std::memcpy(&steps, r.state.data() + sizeof(float) * dim, 4);
      for (const float w : r.weights) wrong += w != static_cast<float>(steps) || steps == 0;
    });
  }
  done = true;
  trainer.join();
  CHECK(wrong == 0);
  t.save_delta(dir / "last");
  u.load_delta(dir / "last");
  CHECK(u.checksum() == t.checksum());  // no change fell between two deltas
}

TEST_CASE("serving tables hold weights alone, and text reads back") {
  const folder dir;
  table_type t({.seed = 2, .shard_bits = 5});
  const keys_type keys = some_keys(1, 300, 1000);
  t.push(keys, gradients(1, 300), {.lr = 0.1f});
  const floats rows = rows_of(t, keys);
  t.save_serving<hd::scaled_int8>(dir / "i8");
  t.save_serving(dir / "f32");
  hd::sparse_table<std::uint64_t, hd::row<dim, hd::scaled_int8>, hd::rule::frozen> small({.shard_bits = 5});
  hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::frozen> exact({.shard_bits = 5});
  small.load(dir / "i8");
  exact.load(dir / "f32");
  CHECK(rows_of(exact, keys) == rows);
  const floats near = rows_of(small, keys);
  for (std::size_t i = 0; i < rows.size(); ++i) CHECK(std::abs(near[i] - rows[i]) <= 0.11f / 127);
  CHECK(small.record_bytes == 24);
  CHECK(has(message_of([&] { exact.load(dir / "i8"); }), "type of weights is i8, the table's is f32"));
  t.export_text(dir / "text");
  std::ifstream in(dir / "text");
  std::size_t lines = 0;
  std::uint64_t key;
  while (in >> key) {
    ++lines;
    const floats row = rows_of(t, {key});
    for (const float w : row) {
      float read;
      in >> read;
      CHECK(read == w);
    }
  }
  CHECK(lines == t.size());
}

namespace {
// The examples of table/concept.hpp.
struct signed_descent {
  static constexpr bool linear = false;
  static constexpr std::size_t slots(std::size_t) { return 0; }
  template <std::size_t Dim> HEDDLE_HD void update(float* w, float*, const float* g, const hd::row_context& x) const {
    for (std::size_t i = 0; i < Dim; ++i) w[i] -= g[i] > 0 ? x.lr : g[i] < 0 ? -x.lr : 0.0f;
  }
  std::string name() const { return "signed_descent"; }
};
struct ones {
  template <std::size_t Dim> HEDDLE_HD void fill(float* w, std::uint64_t, std::uint32_t, std::uint64_t) const {
    for (std::size_t i = 0; i < Dim; ++i) w[i] = 1.0f;
  }
  std::string name() const { return "ones"; }
};
struct even_keys {
  struct state {
    std::size_t bytes() const { return 0; }
    template <class Out> void save(Out&) const {}
    template <class In> void load(In&, const hd::admission_context&) {}
  };
  bool admit(state&, std::uint64_t mixed, const hd::sighting&, const hd::admission_context&) const {
    return hd::detail::unmix(mixed) % 2 == 0;
  }
  bool admits_unseen(std::uint64_t mixed, std::uint64_t) const { return hd::detail::unmix(mixed) % 2 == 0; }
  std::string name() const { return "even_keys"; }
};
struct idle {
  std::uint32_t ticks = 100;
  static constexpr std::size_t words = 1;
  void touch(std::uint32_t* w, const hd::sighting&, std::uint32_t now, std::uint64_t) const { w[0] = now; }
  bool expired(std::uint32_t* w, std::uint32_t now) const { return now > w[0] && now - w[0] > ticks; }
  std::string name() const { return "idle"; }
};
}  // namespace

TEST_CASE("a user's own policies") {
  hd::sparse_table<std::int16_t, hd::row<2>, signed_descent, ones, even_keys, idle, hd::guard::raise> t(
      {.eviction = {.ticks = 0}});
  const std::vector<std::int16_t> keys{-2, 3, 4};
  CHECK(t.push(keys, floats{5, -5, 1, 1, 0, 0}, {.lr = 0.5f}).refused == 1);
  CHECK(rows_of(t, keys) == floats{0.5f, 1.5f, 0, 0, 1, 1});
  CHECK_THROWS_AS(t.push(keys, floats{1, 1, 1, 1, 1, std::nanf("")}, {.lr = 0.5f}), hd::argument_error);
  CHECK_THROWS_AS(t.push(std::vector<std::int16_t>{4, 4}, floats(4, 3e38f), {.lr = 0.5f}), hd::argument_error);
  CHECK(rows_of(t, keys) == floats{0.5f, 1.5f, 0, 0, 1, 1});
  t.advance();
  t.push(std::vector<std::int16_t>{4}, floats{0, 0});
  CHECK(t.evict() == std::vector<std::int16_t>{-2});
}

TEST_CASE("bytes are accounted for") {
  table_type t;
  const std::size_t empty = t.bytes();
  keys_type keys(200000);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  floats out(keys.size() * dim);
  t.pull(keys, out);
  CHECK(t.bytes() > empty + keys.size() * (table_type::record_bytes + 5));
  CHECK(t.bytes() < empty + keys.size() * (table_type::record_bytes + 5) * 3 / 2 + (20 << 20));
  CHECK(table_type::record_bytes == 48);  // 8 key, 4 stamp, 16 state, 16 weights
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/collective/automatic_buckets.hpp>

#include "../support/catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace hd = heddle;

namespace {
constexpr std::size_t whole = std::numeric_limits<std::size_t>::max();

struct model {
  std::vector<std::size_t> counts;
  std::vector<hd::dtype> types;
};

model random_model(unsigned seed, std::size_t tensors) {
  model m;
  std::uint64_t state = seed * 2654435761u + 1;
  const auto next = [&] { return (state = state * 6364136223846793005ull + 1442695040888963407ull) >> 33; };
  for (std::size_t i = 0; i < tensors; ++i) {
    m.counts.push_back(next() % 5 == 0 ? 0 : next() % 4 == 0 ? next() % 5000 : next() % 100);
    m.types.push_back(next() % 3 == 0 ? hd::dtype::f16 : next() % 7 == 0 ? hd::dtype::f64 : hd::dtype::f32);
  }
  return m;
}

// Every element once, pure in type, in order, in bounds, aligned and padded.
void check(const model& m, const std::vector<hd::bucket_buffer>& all, const hd::bucket_rules& rules) {
  std::vector<std::vector<int>> seen;
  for (const std::size_t n : m.counts) seen.emplace_back(n, 0);
  std::size_t before = whole;
  bool good = true;
  for (const hd::bucket_buffer& b : all) {
    good &= b.count % rules.pad == 0 && !b.pieces.empty();
    std::size_t end = 0, previous = whole;
    for (const hd::bucket_piece& p : b.pieces) {
      good &= m.types[p.tensor] == b.type && p.count > 0 && p.offset >= end && p.offset % rules.align == 0;
      good &= previous == whole || p.tensor < previous;  // backward's order
      good &= rules.split || p.count == m.counts[p.tensor];
      for (std::size_t i = 0; i < p.count; ++i) ++seen[p.tensor][p.begin + i];
      end = p.offset + p.count;
      previous = p.tensor;
    }
    good &= end <= b.count && b.count - end < rules.pad;
    good &= before == whole || b.pieces.back().tensor <= before;
    before = b.pieces.back().tensor;
  }
  CHECK(good);
  CHECK(std::all_of(seen.begin(), seen.end(),
                    [](const auto& v) { return std::all_of(v.begin(), v.end(), [](int n) { return n == 1; }); }));
}
}  // namespace

TEST_CASE("layouts hold every element once, whatever the rules") {
  for (unsigned seed = 0; seed < 30; ++seed) {
    const model m = random_model(seed, seed * 3);
    for (const bool split : {false, true}) {
      for (const std::size_t align : {std::size_t{1}, std::size_t{4}, std::size_t{32}}) {
        for (const std::size_t pad : {std::size_t{1}, hd::bucket_padding(3)}) {
          for (const std::size_t cap : {std::size_t{1}, std::size_t{100}, std::size_t{4096}, whole}) {
            CAPTURE(seed, split, align, pad, cap);
            const hd::bucket_rules rules{align, pad, split};
            const hd::buckets b{.first = cap == 4096 ? 256 : cap, .cap = cap};
            const auto all = b.layout(m.counts, m.types, rules);
            check(m, all, rules);
            CHECK(all == b.layout(m.counts, m.types, rules));
            bool within = true;  // a cut buffer never exceeds its cap by more than an element
            for (const hd::bucket_buffer& x : all) {
              const std::size_t n = x.pieces.back().offset + x.pieces.back().count;
              within &= !split || cap == whole || (n - 1) * hd::bytes_of(x.type) < cap;
            }
            CHECK(within);
          }
        }
      }
    }
  }
}

TEST_CASE("layouts by the rules of others") {
  const model m{{300, 0, 20, 1000, 50, 50}, std::vector<hd::dtype>(6, hd::dtype::f32)};
  using pieces = std::vector<hd::bucket_piece>;
  // DistributedDataParallel: closes when the size is reached, a tensor is never cut.
  const auto ddp = hd::buckets{.first = 300, .cap = 4000}.layout(m.counts, m.types);
  REQUIRE(ddp.size() == 3);
  CHECK(ddp[0].pieces == pieces{{5, 0, 50, 0}, {4, 0, 50, 50}});
  CHECK(ddp[1].pieces == pieces{{3, 0, 1000, 0}});
  CHECK(ddp[2].pieces == pieces{{2, 0, 20, 0}, {0, 0, 300, 20}});
  // One for each tensor, one for all, one for each layer.
  CHECK(hd::buckets{1, 1}.layout(m.counts, m.types).size() == 5);
  const auto flat = hd::buckets{whole, whole}.layout(m.counts, m.types, {.align = 64, .pad = hd::bucket_padding(6)});
  REQUIRE(flat.size() == 1);
  CHECK(flat[0].pieces ==
        pieces{{5, 0, 50, 0}, {4, 0, 50, 64}, {3, 0, 1000, 128}, {2, 0, 20, 1152}, {0, 0, 300, 1216}});
  CHECK(flat[0].count == 1536);
  const std::vector<int> layers{0, 0, 0, 1, 1, 2};
  const auto by_layer = hd::buckets{whole, whole}.layout(m.counts, m.types, {}, layers);
  REQUIRE(by_layer.size() == 3);
  CHECK(by_layer[1].pieces == pieces{{4, 0, 50, 0}, {3, 0, 1000, 50}});
  // A tensor three times larger than the bucket, cut; and all after it.
  const auto cut = hd::buckets{1400, 1400}.layout(m.counts, m.types, {.split = true});
  REQUIRE(cut.size() == 5);
  CHECK(cut[0].pieces == pieces{{5, 0, 50, 0}, {4, 0, 50, 50}, {3, 0, 250, 100}});
  CHECK(cut[2].pieces == pieces{{3, 600, 350, 0}});
  CHECK(cut[4].pieces == pieces{{0, 280, 20, 0}});
  CHECK(hd::bucket_padding(8) == 128);
  CHECK(hd::bucket_padding(7) == 896);
}

TEST_CASE("layouts refuse what they can't hold") {
  const std::vector<std::size_t> counts{1, 2};
  const std::vector<hd::dtype> types(2, hd::dtype::f32), one(1, hd::dtype::f32), user(2, hd::dtype::other);
  const std::vector<int> layer{0};
  CHECK_THROWS_AS((hd::buckets{0, 1}.layout(counts, types)), hd::argument_error);
  CHECK_THROWS_AS((hd::buckets{1, 0}.layout(counts, types)), hd::argument_error);
  CHECK_THROWS_AS((hd::buckets{}.layout(counts, types, {.align = 0})), hd::argument_error);
  CHECK_THROWS_AS((hd::buckets{}.layout(counts, types, {.pad = 0})), hd::argument_error);
  CHECK_THROWS_AS((hd::buckets{}.layout(counts, one)), hd::argument_error);
  CHECK_THROWS_AS((hd::buckets{}.layout(counts, user)), hd::argument_error);
  CHECK_THROWS_AS((hd::buckets{}.layout(counts, types, {}, layer)), hd::argument_error);
  CHECK(hd::buckets{}.layout({}, {}).empty());
}

namespace {
// When the last bucket has arrived: gradients become ready one after the other, in equal times that sum up to the time of
// the whole exchange, and buckets travel one after the other.
template <class Topology, class Buckets>
double finished(const Topology& t, const hd::links& l, const std::vector<std::size_t>& bytes, const Buckets& plan) {
  const double backward = hd::price(t, 8, bytes[0] * bytes.size(), l), each = backward / static_cast<double>(bytes.size());
  double now = 0.0;
  for (const hd::bucket b : plan) {
    const double ready = each * static_cast<double>(bytes.size() - b.first);
    now = std::max(now, ready) + hd::price(t, 8, (b.last - b.first) * bytes[0], l);
  }
  return now;
}
}  // namespace

TEST_CASE("buckets by the model are never worse than 1.05 times the best fixed cap") {
  const auto compare = [](const auto& t) {
    for (const double alpha : {1e-6, 1e-5, 1e-4}) {
      for (const double beta : {1e-10, 1e-9, 1e-8}) {
        for (const std::size_t size : {std::size_t{1} << 10, std::size_t{1} << 15, std::size_t{1} << 20}) {
          const hd::links l{{{alpha, beta}, hd::sharing::rank}, {}, 0, 0};
          const std::vector<std::size_t> bytes(48, size);
          double best = 1e9;
          for (std::size_t k = 1; k <= bytes.size(); ++k)
            best = std::min(best, finished(t, l, bytes, hd::buckets{k * size, k * size}.plan(bytes)));
          CAPTURE(alpha, beta, size);
          CHECK(finished(t, l, bytes, hd::automatic_buckets{l}.plan(t, 8, bytes)) <= 1.05 * best);
        }
      }
    }
  };
  compare(hd::ring{});
  compare(hd::direct{});
  compare(hd::halving_doubling{});
}

TEST_CASE("bucket sizes by the model are near the best of all sizes") {
  // What stays exposed behind a backward as long as its communication: the last bucket, and every bucket's latency.
  const hd::links l{{{2e-5, 1e-9}, hd::sharing::rank}, {}, 0, 0};
  const std::size_t n = 40u << 20;
  const auto exposed = [&](double k) {
    const double latency = 2 * 7 * 2e-5, rest = 2.0 * 7 / 8 * static_cast<double>(n) * 1e-9;
    return rest / k + latency * k;
  };
  const std::size_t b = hd::bucket_bytes(hd::ring{}, 8, n, l);
  double best = exposed(1);
  for (int k = 2; k < 1000; ++k) best = std::min(best, exposed(k));
  CHECK(exposed(std::ceil(static_cast<double>(n) / static_cast<double>(b))) <= 1.05 * best);
  CHECK(hd::bucket_bytes(hd::ring{}, 1, n, l) == n);  // nothing to hide
  CHECK(hd::bucket_bytes(hd::ring{}, 8, 0, l) == 1);
}

TEST_CASE("buckets that cut tensors hold every byte once, and close where they are full") {
  for (unsigned seed = 0; seed < 50; ++seed) {
    const model m = random_model(seed, 1 + seed);
    std::vector<std::size_t> bytes;
    std::size_t total = 0;
    for (const std::size_t n : m.counts) total += bytes.emplace_back(n * 4);
    const hd::buckets rule{.first = 1 + seed * 7, .cap = 200 + seed * 40, .split = true};
    std::size_t end = total;  // of what isn't in a bucket yet, tensors being one after the other
    bool good = true, first = true;
    for (const hd::bucket& b : rule.plan(bytes)) {
      std::size_t begin = 0, stop = 0;
      for (std::size_t i = 0; i < b.first; ++i) begin += bytes[i];
      for (std::size_t i = 0; i < b.last; ++i) stop += bytes[i];
      good &= b.first < b.last && b.skip % 128 == 0 && b.skip <= bytes[b.first] && b.cut <= bytes[b.last - 1];
      begin += b.skip;
      stop -= b.cut;
      const std::size_t limit = first ? rule.first : rule.cap, size = stop - begin;
      good &= stop == end && (begin == 0 || (size >= limit && size < limit + 128));
      end = begin;
      first = false;
    }
    CHECK(good);
    CHECK(end == 0);
  }
}

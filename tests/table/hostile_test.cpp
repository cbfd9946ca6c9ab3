// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/table/sparse_table.hpp>

#include "catch.hpp"
#include "folder.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>

namespace hd = heddle;

namespace {
constexpr std::size_t dim = 4;
using keys_type = std::vector<std::uint64_t>;
using floats = std::vector<float>;

// While this lives, files can't grow beyond so many bytes: as on a full disk.
class full_disk {
 public:
  explicit full_disk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit now = before_;
    now.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &now);
  }
  full_disk(const full_disk&) = delete;
  full_disk& operator=(const full_disk&) = delete;
  ~full_disk() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

keys_type keys_of(std::uint64_t seed, std::size_t n, std::uint64_t range) {
  keys_type k(n);
  for (std::size_t i = 0; i < n; ++i) k[i] = hd::philox(1, seed, i).word[0] % range;
  return k;
}
}  // namespace

TEST_CASE("a disk that is full spoils no file, and the next delta has what the failed save hasn't") {
  using table = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::adagrad>;
  const folder dir;
  table t({.shard_bits = 2}), u({.shard_bits = 2});
  const auto push = [&](std::uint64_t seed) {
    const keys_type k = keys_of(seed, 2000, 5000);
    t.push(k, floats(k.size() * dim, 0.5f), {.lr = 0.1f});
  };
  push(1);
  t.save(dir / "full");
  const std::uint64_t before = t.checksum();
  push(2);
  for (const rlim_t bytes : {0, 100, 5000, 60'000}) {
    const full_disk full(bytes);
    CHECK_THROWS_AS(t.save(dir / "full"), hd::file_error);
    CHECK_THROWS_AS(t.save_delta(dir / "delta"), hd::file_error);
    CHECK_THROWS_AS(t.save_serving(dir / "serving"), hd::file_error);
    CHECK_THROWS_AS(t.export_text(dir / "text"), hd::file_error);
    for (const char* name : {"full.tmp", "delta.tmp", "delta", "serving", "serving.tmp", "text", "text.tmp"})
      CHECK(access((dir / name).c_str(), F_OK) != 0);
  }
  u.load(dir / "full");
  CHECK(u.checksum() == before);
  t.erase(keys_of(2, 100, 5000));
  push(3);
  t.save_delta(dir / "delta");
  u.load_delta(dir / "delta");
  CHECK(u.checksum() == t.checksum());
}

TEST_CASE("rows are evicted, erased, saved, pulled and pushed by all at once") {
  using table = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::sum, hd::initial::zero,
                                 hd::admit::counting_bloom, hd::evict::lfu>;
  const folder dir;
  table t({.admission = {.n = 2, .cells = 1 << 12}, .eviction = {.bytes = 64 << 10}, .shard_bits = 2});
  constexpr int rounds = 300;
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t w = 0; w < 3; ++w) {
      threads.emplace_back([&, w] {
        floats rows(200 * dim);
        for (std::uint64_t i = 0; i < rounds; ++i) {
          keys_type k = keys_of(1000 * w + i, 200, 3000);
          k[0] = 0, k[1] = ~std::uint64_t{0};
          t.push(k, floats(k.size() * dim, 1.0f), {.worker = static_cast<std::uint32_t>(w), .sequence = i + 1});
          t.pull(k, rows);
          for (std::size_t r = 0; r < k.size(); ++r)  // a row is of one moment
            for (std::size_t d = 1; d < dim; ++d) wrong += rows[r * dim + d] != rows[r * dim];
          if (i % 10 == w) t.erase(std::span(k).first(20));
          if (i % 50 == 0) t.for_each([&](const auto& r) { wrong += r.weights[0] != r.weights[dim - 1]; });
        }
      });
    }
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i) {
        const std::string path = dir / std::to_string(i);
        t.save(path);
        table u({.admission = {.n = 2, .cells = 1 << 12}, .eviction = {.bytes = 64 << 10}, .shard_bits = 2});
        u.load(path);
        u.for_each([&](const auto& r) { wrong += r.weights[0] != r.weights[dim - 1]; });
      }
    });
  }
  CHECK(wrong == 0);
  for (std::uint32_t w = 0; w < 3; ++w) CHECK(t.sequence_of(w) == rounds);
  const hd::table_counts c = t.counts();
  CHECK(c.evicted > 0);
  CHECK(t.size() <= c.created - c.evicted);  // the rest was erased
  CHECK(t.size() * table::record_bytes <= (64 << 10));
}

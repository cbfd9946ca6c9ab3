// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: sparse tables: pushes and pulls a second against libcuckoo and oneTBB, and bytes per row
// needs: libcuckoo-dev libcuckoo/cuckoohash_map.hh
// needs: libtbb-dev tbb/concurrent_hash_map.h
// driver: script
// links: tbb

// table [bytes RULE | bounded | REPETITIONS]: 8 M pushes of 16 floats, keys Zipf 1.05 over 1 M, batches of 8,192, in
// interleaved pairs.
#include <heddle/table/sparse_table.hpp>

#include <tbb/concurrent_hash_map.h>
#include <libcuckoo/cuckoohash_map.hh>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <thread>

namespace hd = heddle;

namespace {
constexpr std::size_t dim = 16, batch = 8192, batches = 976, keys_in_all = 1'000'000;
using key_type = std::uint64_t;

// As our rows begin: from the key, by a cheap hash.
void begin(key_type key, float* w) {
  std::uint64_t x = key;
  for (std::size_t i = 0; i < dim; ++i) {
    x = hd::detail::mix(x);
    w[i] = (static_cast<float>(x >> 40) * 0x1p-23f - 1.0f) * 0.01f;
  }
}

// A key's first push, made a row only where it is one.
struct first_push {
  key_type key;
  const float* gradient;
};

struct peer_row {
  float weights[dim];
  peer_row() = default;
  explicit peer_row(const first_push& p) {
    begin(p.key, weights);
    add(p.gradient);
  }
  void add(const float* g) {
    for (std::size_t d = 0; d < dim; ++d) weights[d] += g[d];
  }
};

struct cuckoo {
  static constexpr const char* name = "libcuckoo";
  libcuckoo::cuckoohash_map<key_type, peer_row> map;
  void push(const key_type* k, const float* g, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i, g += dim) {
      map.upsert(k[i], [&](peer_row& r) { r.add(g); }, first_push{k[i], g});
    }
  }
  void pull(const key_type* k, float* out, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i, out += dim) {
      if (!map.find_fn(k[i], [&](const peer_row& r) { std::memcpy(out, r.weights, sizeof r); }))
        std::memset(out, 0, sizeof(peer_row));
    }
  }
};

struct onetbb {
  static constexpr const char* name = "tbb";
  struct compare {
    std::size_t hash(const key_type& k) const { return hd::detail::mix(k); }
    bool equal(const key_type& a, const key_type& b) const { return a == b; }
  };
  using map_type = tbb::concurrent_hash_map<key_type, peer_row, compare>;
  map_type map;
  void push(const key_type* k, const float* g, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i, g += dim) {
      map_type::accessor a;
      if (map.insert(a, k[i])) begin(k[i], a->second.weights);
      a->second.add(g);
    }
  }
  void pull(const key_type* k, float* out, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i, out += dim) {
      map_type::const_accessor a;
      if (map.find(a, k[i]))
        std::memcpy(out, a->second.weights, sizeof(peer_row));
      else
        std::memset(out, 0, sizeof(peer_row));
    }
  }
};

// With guard, dirty epoch and sequence, or without.
template <class Guard, class Changes, bool Sequence> struct ours {
  static constexpr const char* name = Sequence ? "ours" : "bare";
  hd::sparse_table<key_type, hd::row<dim>, hd::rule::sum, hd::initial::uniform, hd::admit::always, hd::evict::never,
                   Guard, Changes>
      table;
  std::atomic<std::uint64_t> sequence{0};
  void push(const key_type* k, const float* g, std::size_t n, std::uint32_t worker = 0, std::uint64_t s = 0) {
    table.push({k, n}, {g, n * dim}, {.worker = worker, .sequence = Sequence ? s : 0});
  }
  void pull(const key_type* k, float* out, std::size_t n) { table.read({k, n}, {out, n * dim}); }
};
using full = ours<hd::guard::reject, hd::changes::tracked, true>;
using bare = ours<hd::guard::none, hd::changes::untracked, false>;

struct load {
  std::vector<key_type> keys;
  std::vector<float> gradients;  // of one batch
};

load make_load() {
  // Zipf 1.05 by the inverse of its distribution function.
  std::vector<double> upto(keys_in_all);
  double sum = 0;
  for (std::size_t i = 0; i < keys_in_all; ++i) upto[i] = sum += std::pow(static_cast<double>(i + 1), -1.05);
  load l;
  l.keys.resize(batches * batch);
  for (std::size_t i = 0; i < l.keys.size(); ++i) {
    const hd::philox4x32::block b = hd::philox(7, 0, i);
    const double u = (b.word[0] * 0x1p-32 + b.word[1] * 0x1p-64) * sum;
    const auto rank = static_cast<std::uint64_t>(std::lower_bound(upto.begin(), upto.end(), u) - upto.begin());
    l.keys[i] = hd::detail::mix(rank ^ 0x5bd1e995);
  }
  l.gradients.resize(batch * dim);
  for (std::size_t i = 0; i < l.gradients.size(); ++i) l.gradients[i] = static_cast<float>(i % 7) * 0.125f;
  return l;
}

// Seconds by the wall's clock and by the processors', which other programs at work beside this one don't lengthen.
struct spent {
  double wall, processor;
};

double processor_now() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

template <class Function> spent seconds(int threads, Function f) {
  const auto start = std::chrono::steady_clock::now();
  const double before = processor_now();
  std::vector<std::thread> all;
  for (int t = 1; t < threads; ++t) all.emplace_back(f, t);
  f(0);
  for (auto& t : all) t.join();
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), processor_now() - before};
}

struct rates {
  spent push, pull;
};

template <class Table> rates measure(const load& l, int threads) {
  auto table = std::make_unique<Table>();
  rates r;
  r.push = seconds(threads, [&](int t) {
    for (std::size_t b = static_cast<std::size_t>(t); b < batches; b += static_cast<std::size_t>(threads)) {
      const key_type* const k = l.keys.data() + b * batch;
      if constexpr (requires { table->push(k, nullptr, 0, 0u, 0u); })
        table->push(k, l.gradients.data(), batch, static_cast<std::uint32_t>(t), b + 1);
      else
        table->push(k, l.gradients.data(), batch);
    }
  });
  r.pull = seconds(threads, [&](int t) {
    std::vector<float> out(batch * dim);
    for (std::size_t b = static_cast<std::size_t>(t); b < batches; b += static_cast<std::size_t>(threads))
      table->pull(l.keys.data() + b * batch, out.data(), batch);
  });
  return r;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

std::size_t resident() {
  std::size_t all = 0, mine = 0;
  std::FILE* const f = std::fopen("/proc/self/statm", "r");
  if (f == nullptr || std::fscanf(f, "%zu %zu", &all, &mine) != 2) std::exit(1);
  std::fclose(f);
  return mine * 4096;
}

// Rows of AdaGrad: what the process grows by, what bytes() says, and the payload. Worst point too: just after growing.
template <class Rule> void bytes(const char* name, std::size_t rows) {
  std::vector<key_type> keys(batch);
  std::vector<float> gradients(batch * dim, 0.5f);
  const std::size_t before = resident();
  hd::sparse_table<key_type, hd::row<dim>, Rule> table;
  const double payload = 8 + 4.0 * dim + 4.0 * static_cast<double>(Rule::slots(dim));
  double worst = 0, off = 0, ratio = 0;
  for (std::size_t done = 0, step = 0; done < rows; ++step) {
    const std::size_t n = std::min(batch, rows - done);
    for (std::size_t i = 0; i < n; ++i) keys[i] = hd::detail::mix(done + i);
    table.push({keys.data(), n}, {gradients.data(), n * dim}, {.lr = 0.1f});
    done += n;
    if (done < 1'000'000 || (step % 8 != 0 && done != rows)) continue;
    const double held = static_cast<double>(table.bytes()), grown = static_cast<double>(resident() - before);
    ratio = held / (payload * static_cast<double>(done));
    worst = std::max(worst, ratio);
    off = std::max(off, std::abs(grown / held - 1));
  }
  std::printf("RATIO bytes.%s.10M %.4f 1.25 times_payload %.3f\n", name, ratio, 1.25 / ratio);
  std::printf("RATIO bytes.%s.worst %.4f 1.25 times_payload %.3f\n", name, worst, 1.25 / worst);
  std::printf("RATIO bytes.%s.account %.4f 0.01 part %.3f\n", name, off, 0.01 / std::max(off, 1e-6));
}

// `draws` keys, Zipf-like over as many, into a table that is bounded: keys seen twice, by a Bloom filter, get a row,
// and of the rows the least used go. How many are distinct, and which get a row at their first sighting, is known from
// a bit for each key, kept apart.
void bounded(std::size_t draws) {
  using table_type = hd::sparse_table<key_type, hd::row<dim>, hd::rule::row_adagrad, hd::initial::uniform,
                                      hd::admit::counting_bloom, hd::evict::lfu>;
  constexpr std::size_t bound = std::size_t{256} << 20, cells = std::size_t{1} << 27;
  table_type table({.admission = {.n = 2, .cells = cells, .hashes = 4}, .eviction = {.bytes = bound}});
  std::vector<key_type> keys(batch);
  const std::vector<float> gradients(batch * dim, 0.5f);
  std::vector<bool> seen(draws + 1);
  std::vector<key_type> fresh;  // of a batch: keys that have one sighting
  std::vector<std::pair<std::size_t, std::size_t>> places;
  std::vector<float> rows;
  std::size_t most = 0, distinct = 0, fresh_in_all = 0, early = 0;
  double stated = 0.0, t = 0.0;
  const double tail = std::pow(static_cast<double>(draws), -0.05);
  for (std::size_t done = 0; done < draws; done += batch) {
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < batch; ++i) {
      // The continuous law with density x^-1.05 on [1, draws], by the inverse of its distribution function.
      const double u = (static_cast<double>(hd::philox(3, 1, done + i).word[0]) + 1) * 0x1p-32;
      const double x = std::pow(tail + u * (1 - tail), -20.0);
      keys[i] = hd::detail::mix(static_cast<std::uint64_t>(x));
    }
    table.push(keys, gradients, {.lr = 0.01f});
    t += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (done / batch % 256 == 0) most = std::max(most, table.bytes());
    // The formula's rate for keys that come after so many.
    const double rate =
        std::pow(1.0 - std::exp(-4.0 * static_cast<double>(distinct) / static_cast<double>(cells)), 4.0);
    places.clear();
    for (std::size_t i = 0; i < batch; ++i) {
      const std::size_t x = hd::detail::unmix(keys[i]);
      if (x <= draws && !seen[x]) places.emplace_back(x, i);
    }
    std::sort(places.begin(), places.end());
    fresh.clear();
    for (std::size_t i = 0, last = 0; i < places.size(); i = last) {
      while (last < places.size() && places[last].first == places[i].first) ++last;
      seen[places[i].first] = true;
      ++distinct;
      if (last == i + 1) fresh.push_back(keys[places[i].second]);
    }
    rows.resize(fresh.size() * dim);
    early += fresh.size() - table.read(fresh, rows);
    fresh_in_all += fresh.size();
    stated += rate * static_cast<double>(fresh.size());
  }
  const auto c = table.counts();
  const double limit = static_cast<double>(bound + cells) * 1.02;
  std::printf("bounded: %zu rows, %llu made, %llu refused, %llu dropped, %.2f Mrows/s\n", table.size(),
              static_cast<unsigned long long>(c.created), static_cast<unsigned long long>(c.refused),
              static_cast<unsigned long long>(c.evicted), static_cast<double>(draws) * 1e-6 / t);
  const double part = static_cast<double>(early) / static_cast<double>(fresh_in_all);
  stated /= static_cast<double>(fresh_in_all);
  std::printf(
      "bounded: %zu distinct keys of %zu drawn; %zu of %zu had a row at their first sighting, %.4f %%; stated "
      "%.4f %%\n",
      distinct, draws, early, fresh_in_all, 100.0 * part, 100.0 * stated);
  std::printf("RATIO bounded.100M.early %.3g %.3g part %.3f\n", part, stated, stated / std::max(part, 1e-9));
  std::printf("RATIO bounded.100M %.1f %.1f MiB %.3f\n", static_cast<double>(most) / 0x1p20, limit / 0x1p20,
              limit / static_cast<double>(most));
}

// The median of pairs: by the wall, and as the case .processor by processor time.
void compare(const char* what, int threads, const std::string& end, const std::vector<rates>& mine,
             const std::vector<rates>& theirs, spent rates::* of, double rows) {
  for (double spent::* clock : {&spent::wall, &spent::processor}) {
    std::vector<double> a, b, ratio;
    for (std::size_t k = 0; k < mine.size(); ++k) {
      a.push_back(rows / (mine[k].*of.*clock));
      b.push_back(rows / (theirs[k].*of.*clock));
      ratio.push_back(a.back() / b.back());
    }
    std::printf("RATIO %s.%d.%s%s %.2f %.2f Mrows/s %.3f\n", what, threads, end.c_str(),
                clock == &spent::wall ? "" : ".processor", median(a), median(b), median(ratio));
  }
}

void speeds(int repetitions) {
  const load l = make_load();
  const double rows = static_cast<double>(l.keys.size()) * 1e-6;
  for (const int threads : {1, 2}) {
    std::map<std::string, std::vector<rates>> all;
    for (int k = 0; k < repetitions; ++k) {
      all["ours"].push_back(measure<full>(l, threads));
      all["libcuckoo"].push_back(measure<cuckoo>(l, threads));
      all["bare"].push_back(measure<bare>(l, threads));
      all["tbb"].push_back(measure<onetbb>(l, threads));
    }
    for (const char* mine : {"ours", "bare"}) {
      for (const char* peer : {"libcuckoo", "tbb"}) {
        const std::string end = std::string(peer) + (mine[0] == 'b' ? ".bare" : "");
        compare("push", threads, end, all[mine], all[peer], &rates::push, rows);
        compare("pull", threads, end, all[mine], all[peer], &rates::pull, rows);
      }
    }
    std::fflush(stdout);
  }
}
}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "bytes") == 0) {
    const std::string which = argc > 2 ? argv[2] : "";
    if (which == "row_adagrad")
      bytes<hd::rule::row_adagrad>("row_adagrad", 10'000'000);
    else
      bytes<hd::rule::adagrad>("adagrad", 10'000'000);
    return 0;
  }
  if (argc > 1 && std::strcmp(argv[1], "bounded") == 0) {
    bounded(100'000'000);
    return 0;
  }
  speeds(argc > 1 ? std::max(1, std::atoi(argv[1])) : 7);
  return 0;
}

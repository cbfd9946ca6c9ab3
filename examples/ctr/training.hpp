// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The step that every mode takes, how a model is judged, and training by threads that share a table.

#pragma once

#include <heddle/table/sparse_table.hpp>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "data.hpp"
#include "model.hpp"

namespace ctr {

using clock = std::chrono::steady_clock;
inline double since(clock::time_point t) { return std::chrono::duration<double>(clock::now() - t).count(); }

template <std::size_t Factors, class Admission = hd::admit::always, class Eviction = hd::evict::never>
using table_of_rows = hd::sparse_table<std::uint64_t, hd::row<1 + Factors>,
                                       std::conditional_t<Factors == 0, hd::rule::ftrl, hd::rule::adagrad>, beginning,
                                       Admission, Eviction>;

/// What the servers of geo_sgd hold: they add up what replicas have moved, which train by AdaGrad.
template <std::size_t Factors>
using table_of_sums = hd::sparse_table<std::uint64_t, hd::row<1 + Factors>, hd::rule::sum, beginning>;

/// The settings that the options name.
template <class Table> typename Table::settings settings_of(const options& o) {
  typename Table::settings s;
  if constexpr (requires { s.rule.l1; }) {
    s.rule.l1 = static_cast<float>(o.l1);
    s.rule.l2 = static_cast<float>(o.l2);
  }
  s.seed = o.seed;
  return s;
}

inline kind kind_of(const options& o) {
  if (o.model == "linear") return kind::linear;
  if (o.model == "fm") return kind::fm;
  if (o.model == "wide-deep") return kind::wide_deep;
  throw usage_error("--model is '" + o.model + "', allowed are linear, fm, wide-deep");
}

/// How good a model is on the test rows.
struct score {
  double auc = 0.5, loss = 0.0, accuracy = 0.0;
  std::size_t rows = 0;
};

/// @param judged Logit and label of each row. A logit that isn't finite counts as the worst there is: it can't be ranked.
inline score score_of(std::vector<std::pair<float, bool>> judged) {
  score s;
  s.rows = judged.size();
  if (judged.empty()) return s;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (auto& [logit, label] : judged)
    if (!std::isfinite(logit)) logit = label ? -infinity : infinity;
  std::sort(judged.begin(), judged.end());
  const double n = static_cast<double>(judged.size());
  double positives = 0.0, ranks = 0.0, hits = 0.0;
  for (std::size_t i = 0; i < judged.size();) {
    std::size_t end = i, ones = 0;  // logits that are equal share a rank
    while (end < judged.size() && judged[end].first == judged[i].first) ones += judged[end++].second;
    ranks += static_cast<double>(ones) * (static_cast<double>(i + end + 1) / 2.0);
    positives += static_cast<double>(ones);
    i = end;
  }
  for (const auto& [logit, label] : judged) {
    const double x = label ? static_cast<double>(logit) : -static_cast<double>(logit);
    s.loss += (x > 0 ? std::log1p(std::exp(-x)) : -x + std::log1p(std::exp(x))) / n;
    hits += (logit > 0.0f) == label;
  }
  if (positives > 0 && positives < n) s.auc = (ranks - positives * (positives + 1) / 2) / (positives * (n - positives));
  s.accuracy = hits / n;
  return s;
}

/// An epoch's end, as printed and drawn.
struct point {
  double epoch = 0, seconds = 0, rows_per_second = 0, training_loss = 0;
  score test;
};

/// Counts that threads, and processes that come of this one, share.
struct meters {
  static constexpr std::size_t most_points = 1000;
  std::atomic<std::uint64_t> rows{0}, pushes{0}, sent_bytes{0}, sent_messages{0}, points{0};
  std::atomic<std::uint64_t> counted{0}, staleness{0}, most{0};  // pushes whose staleness is known, its sum, the most
  std::atomic<std::uint64_t> batches{0}, applied{0};             // of workers' shares; of those the servers have taken
  std::atomic<double> seconds{0};              // of the worker that has trained longest, without judging
  std::atomic<std::uint64_t> steps[256] = {};  // of each worker
  point curve[most_points];

  template <class Number> static void raise(std::atomic<Number>& to, Number x) {
    for (Number known = to; x > known && !to.compare_exchange_weak(known, x);) {
    }
  }
  void note_staleness(std::uint64_t pushed, std::uint64_t sum, std::uint64_t longest) {
    counted.fetch_add(pushed, std::memory_order_relaxed);
    staleness.fetch_add(sum, std::memory_order_relaxed);
    raise(most, longest);
  }
  void add(const point& p) {
    if (points < most_points) curve[points++] = p;
  }
};

/// Meters in memory that survives a fork.
class shared_meters {
 public:
  shared_meters() : page_(mmap(nullptr, sizeof(meters), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (page_ == MAP_FAILED) throw std::bad_alloc();
    new (page_) meters;
  }
  shared_meters(const shared_meters&) = delete;
  shared_meters& operator=(const shared_meters&) = delete;
  ~shared_meters() { munmap(page_, sizeof(meters)); }
  meters& operator*() const { return *static_cast<meters*>(page_); }
  meters* operator->() const { return static_cast<meters*>(page_); }

 private:
  void* page_;
};

inline void print_head() {
  std::printf("%5s %9s %10s %10s %10s %8s %10s\n", "epoch", "seconds", "rows/s", "loss", "test loss", "AUC",
              "accuracy %");
}
inline void print(const point& p) {
  std::printf("%5.0f %9.2f %10.0f %10.5f %10.5f %8.5f %10.3f\n", p.epoch, p.seconds, p.rows_per_second, p.training_loss,
              p.test.loss, p.test.auc, 100.0 * p.test.accuracy);
  std::fflush(stdout);
}

/// Pulls what a batch needs, and pushes its gradients.
/// @tparam Store A sparse_table, a sharded_table or a geo_table.
template <std::size_t Factors, class Store> class trainee {
 public:
  static constexpr std::size_t dim = 1 + Factors;

  trainee(const options& o, const data_set& d, Store& store)
      : rate_(static_cast<float>(o.rate > 0.0                          ? o.rate
                                 : Factors == 0 && o.mode != "geo_sgd" ? 0.2
                                                                       : 0.05)),
        shared_(o.mode == "hogwild"),
        store_(store),
        model_(kind_of(o), d.fields(), o.hidden) {}

  /// Learns a batch. Returns the sum of its rows' losses.
  double learn(const rows& r, meters& m) {
    const std::uint64_t before = m.pushes.load(std::memory_order_relaxed);
    model_.keys(r, keys_);
    weights_.resize(keys_.size() * dim);
    gradients_.resize(weights_.size());
    store_.pull(keys_, weights_);
    model_.forward(r, weights_, logits_);
    double loss = 0.0;
    for (std::size_t i = 0; i < r.size(); ++i) {
      const double x = static_cast<double>(logits_[i]), p = 1.0 / (1.0 + std::exp(-x));
      loss += std::log1p(std::exp(-std::abs(x))) + std::max(x, 0.0) - (r.labels[i] > 0.0f ? x : 0.0);
      logits_[i] = static_cast<float>(p) - r.labels[i];
    }
    model_.backward(r, weights_, logits_, gradients_);
    store_.push(keys_, gradients_, {.lr = rate_});
    const std::uint64_t others = m.pushes.fetch_add(1, std::memory_order_relaxed) - before;
    if (shared_) m.note_staleness(1, others, others);  // else servers know it
    m.rows.fetch_add(r.size(), std::memory_order_relaxed);
    return loss;
  }

  /// Judges by the test rows; makes no rows of the table.
  score judge(const data_set& d) { return judge(*d.open(false, {})); }
  score judge(source& test) {
    std::vector<std::pair<float, bool>> judged;
    for (rows r; test.pop(0, r);) {
      model_.keys(r, keys_);
      weights_.resize(keys_.size() * dim);
      store_.read(keys_, weights_);
      model_.forward(r, weights_, logits_);
      for (std::size_t i = 0; i < r.size(); ++i) judged.emplace_back(logits_[i], r.labels[i] > 0.0f);
    }
    return score_of(std::move(judged));
  }

 private:
  float rate_;
  bool shared_;
  Store& store_;
  model<Factors> model_;
  std::vector<std::uint64_t> keys_;
  std::vector<float> weights_, gradients_, logits_;
};

/// A line that says how far training is, on a terminal.
class progress {
 public:
  void tell(std::size_t epoch, double loss, const meters& m) {
    if (!terminal_ || since(said_) < 0.5) return;
    const double t = since(said_);
    const std::uint64_t done = m.rows.load(std::memory_order_relaxed);
    if (rows_ != 0)
      std::fprintf(stderr, "\repoch %zu  %.2f M rows  %.0f rows/s  loss %.4f ", epoch, static_cast<double>(done) * 1e-6,
                   static_cast<double>(done - rows_) / t, loss);
    said_ = clock::now();
    rows_ = done;
  }
  void clear() const {
    if (terminal_) std::fprintf(stderr, "\r%70s\r", "");
  }

 private:
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  clock::time_point said_ = clock::now();
  std::uint64_t rows_ = 0;
};

/// @name Saves: the table's file, and beside it how many epochs are in which table.
/// @{
template <class Table> void save(Table& t, const std::string& path, std::size_t epochs) {
  t.save(path);
  std::ofstream note(path + ".epochs");
  note << epochs << ' ' << t.checksum() << '\n';
  if (!note.flush()) throw hd::file_error("cannot write " + path + ".epochs");
}
/// Returns the epochs.
template <class Table> std::size_t resume(Table& t, const std::string& path) {
  t.load(path);
  std::ifstream note(path + ".epochs");
  std::size_t epochs = 0;
  std::uint64_t sum = 0;
  if (!(note >> epochs >> sum))
    throw hd::file_error("cannot read " + path + ".epochs, which says how far " + path + " is");
  if (sum != t.checksum()) throw hd::file_error(path + ".epochs is of another table than " + path);
  return epochs;
}
/// @}

/// Trains by threads that share a table. A batch's rows are pulled, and its gradients pushed, under the shards' locks;
/// between the two others push.
/// @param done Epochs that are in the table.
template <std::size_t Factors, class Table>
void train_shared(const options& o, const data_set& d, Table& table, std::size_t done, meters& m) {
  const auto training = d.open(
      true, {.queues = o.threads, .epochs = o.epochs, .first_epoch = done, .shuffle = 1 << 16, .batch = o.batch});
  progress line;
  double seconds = 0.0;
  for (std::size_t epoch = done + 1; epoch <= done + o.epochs; ++epoch) {
    const std::uint64_t before = m.rows;
    const auto start = clock::now();
    std::vector<double> loss(o.threads);
    std::vector<std::exception_ptr> failures(o.threads);
    const auto work = [&](std::size_t t) {
      try {
        trainee<Factors, Table> mine(o, d, table);
        double sum = 0.0, count = 0.0;
        for (rows r; training->pop(t, r);) {
          sum += mine.learn(r, m);
          count += static_cast<double>(r.size());
          if (t == 0) line.tell(epoch, sum / count, m);
        }
        loss[t] = sum;
      } catch (...) {
        failures[t] = std::current_exception();
        training->stop();
      }
    };
    {
      std::vector<std::jthread> threads;
      try {
        for (std::size_t t = 1; t < o.threads; ++t) threads.emplace_back(work, t);
      } catch (...) {
        training->stop();
        throw;
      }
      work(0);
    }
    for (const std::exception_ptr& f : failures)
      if (f) std::rethrow_exception(f);
    const double now = since(start), count = static_cast<double>(m.rows - before);
    seconds += now;
    double sum = 0.0;
    for (const double l : loss) sum += l;
    line.clear();
    const point p{static_cast<double>(epoch), seconds, count / now, sum / std::max(count, 1.0),
                  trainee<Factors, Table>(o, d, table).judge(d)};
    print(p);
    m.add(p);
    meters::raise(m.seconds, seconds);
    if (!o.save.empty()) save(table, o.save, epoch);
  }
}

}  // namespace ctr

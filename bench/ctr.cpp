// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: rows a second of examples/ctr by threads and parameter servers, against liblinear, recovery, bounded memory
// needs: zlib1g-dev zlib.h
// wants: libzmq3-dev zmq.h
// driver: script
// links: z

// bench/ctr.sh runs this:
// ctr threads REPETITIONS: rows a second of the models by one and two threads, in turns.
// ctr write TRAIN TEST: adult with its crosses as LIBSVM files.
// ctr loss MODEL TEST: log loss of a model of liblinear's.
// ctr reach LOSS: seconds to that test log loss by one thread and by two.
// ctr keys ROWS KEYS CELLS: of generated rows, how many keys are distinct, and how many that are seen once get a row by
// a filter of so many MiB.
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>

#include "../examples/ctr/training.hpp"
#include "support/results.hpp"

namespace {
using namespace ctr;

/// Rows in memory, in a new order every epoch.
class kept final : public source {
 public:
  kept(const data_set& d, bool training, std::size_t batch) : batch_(batch) {
    const auto from = d.open(training, {});
    for (rows r; from->pop(0, r);)
      for (std::size_t i = 0; i < r.size(); ++i) all_.append(r, i);
    order_.resize(all_.size());
    std::iota(order_.begin(), order_.end(), 0u);
  }
  std::size_t size() const { return order_.size(); }
  std::size_t batches() const { return (size() + batch_ - 1) / batch_; }
  void shuffle(std::uint64_t epoch) {
    for (std::size_t i = size(); i-- > 1;)
      std::swap(order_[i], order_[hd::philox(1, epoch, i).word[0] * (i + 1) >> 32]);
  }
  void get(std::size_t batch, rows& to) const {
    to.clear();
    for (std::size_t i = batch * batch_; i < std::min(size(), (batch + 1) * batch_); ++i) to.append(all_, order_[i]);
  }
  bool pop(std::size_t, rows& to) override {
    get(next_, to);
    next_ = to.size() != 0 ? next_ + 1 : 0;
    return to.size() != 0;
  }

 private:
  rows all_;
  std::vector<std::uint32_t> order_;
  std::size_t batch_, next_ = 0;
};

// Trains on batches [first, last) of an epoch.
template <std::size_t Factors, class Table>
double train(const options& o, const data_set& d, kept& data, Table& table, std::size_t epoch, std::size_t first,
             std::size_t last, std::size_t threads, meters& m) {
  const auto start = ctr::clock::now();
  if (first == 0) data.shuffle(epoch);
  const auto work = [&](std::size_t t) {
    trainee<Factors, Table> mine(o, d, table);
    rows r;
    for (std::size_t b = first + t; b < last; b += threads) {
      data.get(b, r);
      mine.learn(r, m);
    }
  };
  {
    std::vector<std::jthread> all;
    for (std::size_t t = 1; t < threads; ++t) all.emplace_back(work, t);
    work(0);
  }
  return since(start);
}

template <std::size_t Factors> void threads(const char* data, const char* model, int repetitions) {
  options o;
  o.data = data;
  o.model = model;
  o.folder = "examples/data";
  const data_set d(o);
  kept rows_in_memory(d, true, o.batch);
  const shared_meters m;
  std::vector<double> rate[2], ratio;
  for (int k = 0; k < repetitions; ++k) {
    for (std::size_t t = 0; t < 2; ++t) {
      table_of_rows<Factors> table(settings_of<table_of_rows<Factors>>(o));
      double seconds = 0.0;
      for (std::size_t e = 0; e < 2; ++e)
        seconds += train<Factors>(o, d, rows_in_memory, table, e, 0, rows_in_memory.batches(), t + 1, *m);
      rate[t].push_back(2.0 * static_cast<double>(rows_in_memory.size()) / seconds);
    }
    ratio.push_back(rate[1].back() / rate[0].back());
  }
  std::printf("RATIO threads.%s.%s %.0f %.0f rows/s %.3f\n", data, model, bench::median(rate[1]),
              bench::median(rate[0]), bench::median(ratio));
  std::fflush(stdout);
}

options adult() {
  options o;
  o.model = "linear";
  o.folder = "examples/data";
  return o;
}

int write(const char* train, const char* test) {
  const options o = adult();
  const data_set d(o);
  std::map<std::uint64_t, std::size_t> numbers;
  for (const bool training : {true, false}) {
    std::FILE* const file = std::fopen(training ? train : test, "w");
    if (!file) return 1;
    const auto from = d.open(training, {});
    std::vector<std::size_t> line;
    for (rows r; from->pop(0, r);) {
      for (std::size_t i = 0; i < r.size(); ++i) {
        line.clear();
        for (std::size_t k = r.begin(i); k < r.end(i); ++k)
          line.push_back(numbers.try_emplace(r.indices[k], numbers.size() + 1).first->second);
        std::sort(line.begin(), line.end());
        std::fputs(r.labels[i] > 0.0f ? "1" : "0", file);
        for (const std::size_t k : line) std::fprintf(file, " %zu:1", k);
        std::fputc('\n', file);
      }
    }
    if (std::fclose(file) != 0) return 1;
  }
  return 0;
}

// Of a model with two classes and a bias, in the text format of liblinear's.
int loss(const char* model, const char* test) {
  std::ifstream in(model);
  std::string word;
  int first_label = 0, other = 0;
  std::size_t features = 0;
  while (in >> word && word != "w") {
    if (word == "label") in >> first_label >> other;
    if (word == "nr_feature") in >> features;
  }
  std::vector<double> w(features + 2);
  for (std::size_t k = 1; k < w.size(); ++k) in >> w[k];
  if (!in || features == 0) return 1;
  std::vector<std::pair<float, bool>> judged;
  hd::multi_queue_reader reader(hd::libsvm{}, {test}, {.readers = 1});
  for (rows r; reader.pop(0, r);) {
    for (std::size_t i = 0; i < r.size(); ++i) {
      double x = w[features + 1];
      for (std::size_t k = r.begin(i); k < r.end(i); ++k)
        if (r.indices[k] <= features) x += w[r.indices[k]] * static_cast<double>(r.values[k]);
      judged.emplace_back(static_cast<float>(first_label == 1 ? x : -x), r.labels[i] > 0.0f);
    }
  }
  std::printf("%.6f\n", score_of(std::move(judged)).loss);
  return 0;
}

// Prints the seconds of training to that test log loss by one and by two threads.
int reach(double target) {
  options o = adult();
  o.batch = 512;
  o.rate = 0.3;
  o.l1 = 8.0;
  o.l2 = 3.0;
  const data_set d(o);
  kept training(d, true, o.batch);
  kept test(d, false, 1024);
  const shared_meters m;
  for (std::size_t t = 1; t <= 2; ++t) {
    table_of_rows<0> table(settings_of<table_of_rows<0>>(o));
    double seconds = 0.0, reached = HUGE_VAL;
    constexpr std::size_t parts = 4;
    for (std::size_t part = 0; !(reached <= target); ++part) {
      if (part == 100 * parts)
        throw std::runtime_error("test log loss " + std::to_string(target) + " is not reached in 100 epochs, but " +
                                 std::to_string(reached));
      const std::size_t n = training.batches(), p = part % parts;
      seconds += train<0>(o, d, training, table, part / parts, n * p / parts, n * (p + 1) / parts, t, *m);
      reached = trainee<0, table_of_rows<0>>(o, d, table).judge(test).loss;
    }
    std::printf("%.4f%s", seconds, t == 1 ? " " : "\n");
  }
  return 0;
}

// Two tables without a bound: one counts, the other has the filter, which is never late; so what it has besides the
// keys that were seen twice it has early.
int keys(std::size_t rows_in_all, std::size_t drawn_from, std::size_t mib) {
  options o;
  o.data = "generated";
  o.model = "linear";
  o.rows = rows_in_all;
  o.keys = drawn_from;
  using counter = hd::sparse_table<std::uint64_t, hd::row<1>, hd::rule::sum, hd::initial::zero>;
  using filtered =
      hd::sparse_table<std::uint64_t, hd::row<1>, hd::rule::sum, hd::initial::zero, hd::admit::counting_bloom>;
  counter count(counter::settings{});
  filtered admitted({.admission = {.n = 2, .cells = mib << 20}});
  const auto from = data_set(o).open(true, {});
  std::vector<float> ones;
  for (rows r; from->pop(0, r);) {
    ones.assign(r.indices.size(), 1.0f);
    count.push(r.indices, ones);
    admitted.push(r.indices, ones);
  }
  std::size_t once = 0;
  count.for_each([&](const counter::row_view& r) { once += r.weights[0] == 1.0f; });
  const double u = static_cast<double>(count.size()), cells = static_cast<double>(mib << 20);
  const std::size_t early = admitted.size() - (count.size() - once);
  const double part = static_cast<double>(early) / static_cast<double>(std::max<std::size_t>(once, 1)),
               stated = std::pow(1.0 - std::exp(-4.0 * u / cells), 4.0);
  std::printf("%zu distinct keys of %zu; of %zu that were seen once %zu got a row, %.4g %%; stated at most %.4g %%\n",
              count.size(), drawn_from, once, early, 100.0 * part, 100.0 * stated);
  std::printf("RATIO bounded.100M.early %.3g %.3g part %.3f\n", part, stated, stated / std::max(part, 1e-9));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  try {
    if (what == "threads" && argc > 2) {
      const int n = std::atoi(argv[2]);
      threads<0>("adult", "linear", n);
      threads<8>("adult", "wide-deep", n);
      threads<8>("generated", "fm", n);
      return 0;
    }
    if (what == "write" && argc > 3) return write(argv[2], argv[3]);
    if (what == "loss" && argc > 3) return loss(argv[2], argv[3]);
    if (what == "reach" && argc > 2) return reach(std::atof(argv[2]));
    if (what == "keys" && argc > 4)
      return keys(std::strtoull(argv[2], nullptr, 10), std::strtoull(argv[3], nullptr, 10),
                  std::strtoull(argv[4], nullptr, 10));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench ctr: %s\n", e.what());
    return 1;
  }
  std::fprintf(stderr, "see the first lines of bench/ctr.cpp\n");
  return 2;
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Skip-gram and CBOW with negative sampling, as word2vec.c defines them, on parameters that threads share (Hogwild), or
// on a replica for each rank (see replicas.hpp).

#pragma once

#include <heddle/core/philox.hpp>
#include <heddle/data/reader.hpp>
#include <heddle/data/text.hpp>
#include <heddle/memory/buffer.hpp>
#include <heddle/memory/host_resource.hpp>
#include <heddle/mode/hogwild.hpp>

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>

#include "options.hpp"
#include "vocabulary.hpp"

namespace word2vec {

namespace hd = heddle;

/// Word vectors and the vectors that predict words. A row is a multiple of a cache line; what is beyond `size` is zero
/// and stays so.
class model {
 public:
  model(std::size_t words, std::size_t size, std::uint64_t seed)
      : size_(size), stride_((size + 15) / 16 * 16), input_({}, words * stride_), output_({}, words * stride_) {
    for (hd::buffer<float, hd::host_resource>* b : {&input_, &output_}) {
      // Rows are met at random: fewer, larger pages.
      const auto begin = (reinterpret_cast<std::uintptr_t>(b->data()) + 4095) / 4096 * 4096;
      const auto end = reinterpret_cast<std::uintptr_t>(b->data() + b->size()) / 4096 * 4096;
      if (begin < end) (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
      std::fill(b->begin(), b->end(), 0.0f);
    }
    for (std::size_t w = 0; w < words; ++w) {
      for (std::size_t i = 0; i < size; ++i)
        input(w)[i] = (hd::random_uniform(seed, w, i) - 0.5f) / static_cast<float>(size);
    }
  }
  float* input(std::size_t word) { return input_.data() + word * stride_; }
  float* output(std::size_t word) { return output_.data() + word * stride_; }
  const float* input(std::size_t word) const { return input_.data() + word * stride_; }
  std::size_t size() const { return size_; }
  std::size_t stride() const { return stride_; }
  /// All rows, one after the other.
  std::span<float> inputs() { return {input_.data(), input_.size()}; }
  std::span<float> outputs() { return {output_.data(), output_.size()}; }

 private:
  std::size_t size_, stride_;
  hd::buffer<float, hd::host_resource> input_, output_;
};

/// What training has done.
struct outcome {
  std::uint64_t words = 0;  // of the text that are kept, over all epochs
  double seconds = 0.0;
  hd::reader_report read;
};

/// Number of the generator's step to 64 random bits: a function of a counter, so that a run of one thread is always
/// the same.
inline std::uint64_t mixed(std::uint64_t x) {
  x *= 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// The counter before the first random number of a thread's epoch: an epoch draws the same whatever came before it.
inline std::uint64_t first_counter(std::uint64_t seed, std::uint64_t thread, std::uint64_t epoch) {
  return mixed(mixed(mixed(seed) + thread) + epoch);
}

/// What all threads read.
struct constants {
  constants(const options& o, const vocabulary& v) : negatives(weights(v)), keep(v.size()), sigmoid() {
    const double t = o.sample * static_cast<double>(v.total());
    for (std::size_t w = 0; w < v.size(); ++w) {
      const double n = static_cast<double>(v.count(w));
      const double p = t > 0.0 && n > 0.0 ? (std::sqrt(n / t) + 1.0) * t / n : 1.0;
      keep[w] = p >= 1.0 ? 1.0f : static_cast<float>(p);
    }
    for (std::size_t i = 0; i < sigmoid.size(); ++i) {
      const double x = (static_cast<double>(i) / static_cast<double>(sigmoid.size()) * 2.0 - 1.0) * limit;
      sigmoid[i] = static_cast<float>(1.0 / (1.0 + std::exp(-x)));
    }
  }
  static std::vector<double> weights(const vocabulary& v) {
    std::vector<double> w;
    for (std::size_t i = 0; i < v.size(); ++i) w.push_back(std::pow(static_cast<double>(v.count(i)), 0.75));
    return w;
  }
  /// The logistic function, 0 or 1 beyond 6, from a table of 1,000.
  float logistic(float x) const {
    if (x >= limit) return 1.0f;
    if (!(x > -limit)) return 0.0f;
    return sigmoid[static_cast<std::size_t>((x + limit) * (static_cast<float>(sigmoid.size()) / limit / 2.0f))];
  }

  static constexpr float limit = 6.0f;
  alias_table negatives;
  std::vector<float> keep;  // the probability that a word of the text counts
  std::array<float, 1000> sigmoid;
};

/// Who wants to know which rows have changed: nobody.
struct unwatched {
  void input(std::uint32_t, std::size_t) const {}
  void output(std::uint32_t) const {}
};

/// One thread's part of training. @tparam Watcher Is told which rows change.
template <class Race, class Watcher = unwatched> class worker {
 public:
  static constexpr std::size_t longest = 1000;  // words of a sentence, of those that count

  worker(const options& o, const vocabulary& v, const constants& c, model& m, std::uint64_t thread, Watcher w = {})
      : options_(o),
        words_(v),
        constants_(c),
        model_(m),
        watcher_(w),
        thread_(thread),
        own_(m.stride()),
        error_(m.stride()) {
    for (task* t : {&now_, &next_}) {
      t->inputs.resize(2 * o.window);
      t->rows.resize(1 + o.negative);
    }
    factors_.resize(1 + o.negative);
    rows_.resize(1 + o.negative);
  }

  /// An epoch begins.
  void begin(std::size_t epoch) { counter_ = first_counter(options_.seed, thread_, epoch); }

  /// Takes a word of the text. Returns whether it is one of the vocabulary.
  bool take(std::string_view word, float rate) {
    const std::uint32_t w = words_.find(word);
    if (w == vocabulary::none) return false;
    if (constants_.keep[w] >= 1.0f || uniform() < constants_.keep[w]) sentence_.push_back(w);
    if (sentence_.size() == longest) end(rate);
    return true;
  }

  /// Trains on the sentence that was taken.
  void end(float rate) {
    for (std::size_t at = 0; at < sentence_.size(); ++at) {
      const std::size_t reach = options_.window - random() % options_.window;
      const std::size_t first = at > reach ? at - reach : 0, last = std::min(at + reach + 1, sentence_.size());
      next_.count = 0;
      for (std::size_t k = first; k < last; ++k) {
        if (k == at) continue;
        next_.inputs[next_.count++] = sentence_[k];
        if (!options_.cbow) submit(sentence_[at], rate);
      }
      if (options_.cbow && next_.count > 0) submit(sentence_[at], rate);
    }
    if (now_.count > 0) train(now_, rate);
    now_.count = 0;
    sentence_.clear();
  }

 private:
  // Predict rows[0], and not the others, from the mean of inputs.
  struct task {
    std::vector<std::uint32_t> inputs, rows;
    std::size_t count = 0, targets = 0;
  };

  std::uint64_t random() { return mixed(++counter_); }
  float uniform() { return static_cast<float>(random() >> 40) * 0x1p-24f; }

  // Draws the negatives of the task that was begun, asks for its rows, and trains on the one before.
  void submit(std::uint32_t target, float rate) {
    next_.targets = 0;
    next_.rows[next_.targets++] = target;
    for (std::size_t k = 0; k < options_.negative; ++k) {
      const std::uint64_t r = random();
      std::uint32_t w = constants_.negatives.draw(r);
      if (w == 0) w = static_cast<std::uint32_t>(r % (words_.size() - 1)) + 1;
      if (w == target) continue;
      next_.rows[next_.targets++] = w;
      prefetch(model_.output(w));
    }
    for (std::size_t k = 0; k < next_.count; ++k) prefetch(model_.input(next_.inputs[k]));
    std::swap(now_, next_);
    if (next_.count > 0) train(next_, rate);
    next_.count = 0;
  }

  void prefetch(const float* row) const {
    for (std::size_t i = 0; i < model_.stride(); i += 16) __builtin_prefetch(row + i, 1);
  }

  void train(const task& t, float rate) {
    const std::size_t n = model_.stride();
    float *const own = own_.data(), *const error = error_.data();
    Race::read(model_.input(t.inputs[0]), own, n);
    if (t.count > 1) {
      for (std::size_t k = 1; k < t.count; ++k) Race::accumulate(model_.input(t.inputs[k]), own, n);
      const float scale = 1.0f / static_cast<float>(t.count);
      for (std::size_t i = 0; i < n; ++i) own[i] *= scale;
    }
    for (std::size_t k = 0; k < t.targets; ++k) rows_[k] = model_.output(t.rows[k]);
    Race::dots(own, rows_.data(), t.targets, n, factors_.data());
    for (std::size_t k = 0; k < t.targets; ++k)
      factors_[k] = ((k == 0 ? 1.0f : 0.0f) - constants_.logistic(factors_[k])) * rate;
    std::fill(error_.begin(), error_.end(), 0.0f);
    Race::exchange(own, rows_.data(), factors_.data(), t.targets, n, error);
    for (std::size_t k = 0; k < t.count; ++k) Race::add(model_.input(t.inputs[k]), error, 1.0f, n);
    for (std::size_t k = 0; k < t.count; ++k) watcher_.input(t.inputs[k], t.targets);
    for (std::size_t k = 0; k < t.targets; ++k) watcher_.output(t.rows[k]);
  }

  const options& options_;
  const vocabulary& words_;
  const constants& constants_;
  model& model_;
  Watcher watcher_;
  std::uint64_t thread_, counter_ = 0;
  std::vector<std::uint32_t> sentence_;
  task now_, next_;
  std::vector<float> own_, error_, factors_;
  std::vector<float*> rows_;
};

/// Whether sentences are lines. A text of long lines, or of one, has no sentences: words are read in pieces of any length.
inline bool has_lines(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(1 << 16, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  return text.substr(0, static_cast<std::size_t>(file.gcount())).find('\n') != text.npos;
}

/// Reads the text once and counts.
template <class Format> vocabulary count_words(const options& o) {
  vocabulary v;
  hd::multi_queue_reader reader(Format{}, {o.train}, {.readers = 1, .hash = false});
  hd::text_batch batch;
  while (reader.pop(0, batch)) {
    for (std::size_t i = 0; i < batch.size(); ++i) {
      for_each_word(batch[i], [&](std::string_view word) { v.count(word); });
      if constexpr (std::is_same_v<Format, hd::lines>) v.count_line();
    }
  }
  v.finish(o.min_count);
  return v;
}

/// Where the text comes from: a queue of it for each thread; of a part of it, another in each epoch, if other processes
/// have the others. In a random order: lines from a window of 100,000, or a text without them in pieces of 64 KiB.
template <class Format> auto open_text(const options& o, std::size_t process = 0, std::size_t processes = 1) {
  constexpr bool by_line = std::is_same_v<Format, hd::lines>;
  return std::make_unique<hd::multi_queue_reader<Format>>(
      Format{}, std::vector<std::string>{o.train},
      hd::reader_options{.readers = 1,
                         .queues = o.threads,
                         .batch = by_line ? std::size_t{64} : std::size_t{10} * worker<hd::vector_asm>::longest,
                         .epochs = o.until() - o.first,
                         .first_epoch = o.first,
                         .shuffle = o.in_order ? std::size_t{0}
                                    : by_line  ? std::size_t{100000}
                                               : std::size_t{1},
                         .seed = o.seed,
                         .deterministic = o.threads == 1,
                         .rank = process,
                         .ranks = processes,
                         .piece = by_line || o.in_order ? 0u : 1u << 16});
}

/// Trains on one queue of the text. tell(words) is called after every 10,000 words and at the end of an epoch, and gives
/// the rate to go on with.
template <class Format, class Reader, class Worker, class Tell>
void train_queue(Reader& reader, std::size_t queue, const options& o, Worker& w, Tell tell) {
  constexpr bool by_line = std::is_same_v<Format, hd::lines>;
  hd::text_batch batch;
  float rate = tell(0);
  std::uint64_t words = 0;
  for (std::size_t epoch = o.first; epoch < o.until(); ++epoch) {
    w.begin(epoch);
    while (reader.pop(queue, batch)) {
      for (std::size_t i = 0; i < batch.size(); ++i) {
        if constexpr (by_line) {
          for_each_word(batch[i], [&](std::string_view word) { words += w.take(word, rate); });
          w.end(rate);
          ++words;  // the end of the line
        } else {
          words += w.take(batch[i], rate);
        }
        if (words >= 10000) rate = tell(std::exchange(words, 0));
      }
      w.end(rate);
    }
    rate = tell(std::exchange(words, 0));
  }
}

/// Counts what threads have done, and says the rate that follows from it.
template <class Progress> class pace {
  using clock = std::chrono::steady_clock;

 public:
  /// @param processes That train as fast as this one, each with an equal part of the text.
  pace(const options& o, const vocabulary& v, Progress progress, std::size_t processes = 1)
      : options_(o),
        processes_(static_cast<double>(processes)),
        all_(static_cast<double>(o.epochs) * static_cast<double>(v.total()) + 1.0),
        before_(static_cast<double>(o.first) * static_cast<double>(v.total())),
        done_(o.threads),
        progress_(progress) {}

  /// A thread has trained on so many words more.
  float operator()(std::size_t thread, std::uint64_t words) {
    done_.add(thread, words);
    const double now = processes_ * static_cast<double>(done_.sum()), part = (before_ + now) / all_;
    const double rate = options_.rate * std::max(1.0 - part, 1e-4);
    if (thread == 0 && clock::now() - said_ >= std::chrono::milliseconds(500)) {
      said_ = clock::now();
      progress_(part, now / seconds(), rate);
    }
    return static_cast<float>(rate);
  }
  double seconds() const { return std::chrono::duration<double>(clock::now() - start_).count(); }
  std::uint64_t words() const { return done_.sum(); }

 private:
  const options& options_;
  double processes_, all_, before_;
  hd::thread_counters done_;
  Progress progress_;
  clock::time_point start_ = clock::now(), said_ = start_;
};

/// Trains by one process's threads. Calls progress(part, words per second, rate) at times.
template <class Race, class Format, class Progress>
outcome train_shared(const options& o, const vocabulary& v, model& m, Progress progress) {
  const constants c(o, v);
  const auto reader = open_text<Format>(o);
  pace<Progress> done(o, v, progress);
  std::vector<std::exception_ptr> failures(o.threads);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < o.threads; ++t) {
    threads.emplace_back([&, t] {
      try {
        worker<Race> w(o, v, c, m, t);
        train_queue<Format>(*reader, t, o, w, [&](std::uint64_t words) { return done(t, words); });
      } catch (...) {
        failures[t] = std::current_exception();
        reader->stop();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  const double seconds = done.seconds();
  for (const std::exception_ptr& f : failures) {
    if (f) std::rethrow_exception(f);
  }
  return {done.words(), seconds, reader->report()};
}

}  // namespace word2vec

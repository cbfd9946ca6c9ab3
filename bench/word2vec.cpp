// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: words a second of examples/word2vec, against fastText, gensim, a build with a data race, and on slow links
// driver: script

// bench/word2vec.sh runs this: word2vec TEXT skipgram|cbow vector_asm|relaxed|racy THREADS prints seconds per epoch, of the
// clock and of processors;
// word2vec TEXT count prints the words that are kept and the line ends;
// word2vec TEXT replicas geo|lockstep|async|sync|hogwild[:PART[:LEAST[:COMMON]]] WORKERS MBIT PERIOD EPOCHS
// [FOLDER [SEED [RATE]]] prints seconds, megabytes sent by a worker, and by the files in a folder the percentage of
// analogies and the similarities' correlation: workers are threads with a link each of so many Mbit/s, 0 for no bound;
// lockstep is geo whose servers answer when all have pushed, as it is where each worker has a core of its own.
// word2vec TEXT quality skipgram|cbow THREADS SEED FOLDER prints the seconds of five epochs and the same two;
// word2vec TEXT judge FILE FOLDER prints these of vectors that are in a file in word2vec's binary format.
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include <deque>
#include <sstream>

#include "../examples/word2vec/replicas.hpp"
#include "../examples/word2vec/vectors.hpp"

namespace {
namespace hd = heddle;

// The loops of vector_asm with plain loads and stores.
struct racy {
  static void read(const float* shared, float* own, std::size_t n) {
    hd::detail::with_vectors<false>([&](auto loops) { loops.read(shared, own, n); });
  }
  static void add(float* shared, const float* own, float factor, std::size_t n) {
    hd::detail::with_vectors<false>([&](auto loops) { loops.add(shared, own, factor, n); });
  }
  static void accumulate(const float* shared, float* own, std::size_t n) {
    hd::detail::with_vectors<false>([&](auto loops) { loops.accumulate(shared, own, n); });
  }
  static void dots(const float* own, float* const* rows, std::size_t count, std::size_t n, float* out) {
    hd::detail::with_vectors<false>([&](auto loops) { loops.dots(own, rows, count, n, out); });
  }
  static void exchange(const float* own, float* const* rows, const float* factors, std::size_t count, std::size_t n,
                       float* error) {
    hd::detail::with_vectors<false>([&](auto loops) { loops.exchange(own, rows, factors, count, n, error); });
  }
};

template <class Format, class Race> void measure(const word2vec::options& o, const word2vec::vocabulary& v) {
  word2vec::model m(v.size(), o.size, o.seed);
  const std::clock_t start = std::clock();
  const double seconds = word2vec::train_shared<Race, Format>(o, v, m, [](double, double, double) {}).seconds;
  std::printf("%.4f %.4f\n", seconds, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
}

// Messengers whose rank sends over a link of its own, one message after the other; to itself at once.
struct slow_connection {
  double seconds_per_byte;

  class messenger {
    using clock = std::chrono::steady_clock;

   public:
    messenger(std::unique_ptr<hd::threads::messenger> inner, double beta) : inner_(std::move(inner)), beta_(beta) {}
    ~messenger() {
      while (!release()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    int rank() const { return inner_->rank(); }
    int size() const { return inner_->size(); }
    std::uint64_t life() const { return inner_->life(); }
    std::uint64_t life_of(int r) const { return inner_->life_of(r); }
    void connect(int r) { inner_->connect(r); }
    void renew() { inner_->renew(); }
    void send(hd::address to, std::uint32_t tag, std::uint64_t id, hd::payload&& body) {
      try_send(to, tag, id, std::move(body));
    }
    bool try_send(hd::address to, std::uint32_t tag, std::uint64_t id, hd::payload&& body) {
      if (to.rank == rank()) return inner_->try_send(to, tag, id, std::move(body));
      const std::lock_guard lock(mutex_);
      busy_ = std::max(busy_, clock::now()) + std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(
                                                  beta_ * static_cast<double>(body.size() + 64)));
      held_.push_back({to, tag, id, std::move(body), busy_});
      return true;
    }
    std::optional<hd::message> receive(std::chrono::nanoseconds longest) {
      const auto end = clock::now() + longest;
      for (;;) {
        release();
        const auto left = std::min<clock::duration>(end - clock::now(), std::chrono::milliseconds(1));
        auto m = inner_->receive(std::max<clock::duration>(left, {}));
        if (m || clock::now() >= end) return m;
      }
    }

   private:
    struct late {
      hd::address to;
      std::uint32_t tag;
      std::uint64_t id;
      hd::payload body;
      clock::time_point due;
    };
    // Whether all has left.
    bool release() {
      const std::lock_guard lock(mutex_);
      for (; !held_.empty() && held_.front().due <= clock::now(); held_.pop_front()) {
        late& l = held_.front();
        try {
          if (!inner_->try_send(l.to, l.tag, l.id, std::move(l.body))) return false;
        } catch (const hd::peer_error&) {
        }
      }
      return held_.empty();
    }

    std::unique_ptr<hd::threads::messenger> inner_;
    double beta_;
    std::mutex mutex_;
    std::deque<late> held_;
    clock::time_point busy_{};
  };

  template <class Comm> std::unique_ptr<messenger> open(Comm& comm) const {
    return std::make_unique<messenger>(hd::threads::connection{}.open(comm), seconds_per_byte);
  }
};

// The percentage of analogies among the 30,000 commonest words and the similarities' correlation, by the files in a folder.
std::pair<double, double> judge(word2vec::options o, const word2vec::vocabulary& v, const word2vec::model& m,
                                const char* folder) {
  o.eval = folder;
  word2vec::find_eval(o);
  const word2vec::directions d(v, m);
  const auto all = word2vec::analogies(o.analogies, d, std::min<std::size_t>(o.restrict_to, v.size()), 2).at("all");
  return {all.asked ? 100.0 * static_cast<double>(all.right) / static_cast<double>(all.asked) : 0.0,
          word2vec::similarities(o.similarities, d).first};
}
void say(double seconds, const std::pair<double, double>& judged) {
  std::printf("%.2f %.2f %.4f\n", seconds, judged.first, judged.second);
}

template <class Format> int replicas(word2vec::options& o, const word2vec::vocabulary& v, int argc, char** argv) {
  if (argc < 8) return 2;
  std::vector<std::string> settings;
  std::istringstream in(argv[3]);
  for (std::string s; std::getline(in, s, ':');) settings.push_back(s);
  const std::string mode = settings.at(0);
  o.threads = std::strtoul(argv[4], nullptr, 10);
  const double mbit = std::strtod(argv[5], nullptr);
  o.period = std::strtoul(argv[6], nullptr, 10);
  o.epochs = std::strtoul(argv[7], nullptr, 10);
  if (argc > 9) o.seed = std::strtoul(argv[9], nullptr, 10);
  if (argc > 10) o.rate = std::strtod(argv[10], nullptr);
  word2vec::model m(v.size(), o.size, o.seed);
  const auto silent = [](double, double, double) {};
  std::uint64_t sent = 0;
  double seconds = 0.0;
  if (mode == "hogwild") {
    seconds = word2vec::train_shared<hd::vector_asm, Format>(o, v, m, silent).seconds;
  } else {
    hd::geo_options how = mode == "sync"    ? word2vec::synchronous(o)
                          : mode == "async" ? word2vec::async_ps(o)
                                            : word2vec::geo_sgd(o);
    how.half = true;
    // What the answer to a push brings is there at the next push, however slow the link is.
    if (mode == "geo" || mode == "lockstep") how.wait = hd::geo_wait::before_next;
    if (mode == "lockstep") how.synchronous = true;
    if (settings.size() > 1) how.part = std::strtod(settings[1].c_str(), nullptr);
    if (settings.size() > 2) how.least = std::strtoul(settings[2].c_str(), nullptr, 10);
    if (settings.size() > 3) how.common = std::strtoul(settings[3].c_str(), nullptr, 10);
    const slow_connection link{mbit > 0.0 ? 8e-6 / mbit : 0.0};
    seconds = word2vec::train_replicas<Format>(o, v, m, how, link, silent, &sent).seconds;
  }
  std::printf("%.3f %.2f", seconds, static_cast<double>(sent) / 1e6 / static_cast<double>(o.threads));
  if (argc > 8) {
    const auto [right, correlation] = judge(o, v, m, argv[8]);
    std::printf(" %.2f %.4f", right, correlation);
  }
  std::printf("\n");
  return 0;
}

template <class Format> int quality(word2vec::options& o, const word2vec::vocabulary& v, int argc, char** argv) {
  if (argc != 7) return 2;
  o.cbow = argv[3] == std::string("cbow");
  o.threads = std::strtoul(argv[4], nullptr, 10);
  o.seed = std::strtoul(argv[5], nullptr, 10);
  o.epochs = 5;
  word2vec::model m(v.size(), o.size, o.seed);
  const auto silent = [](double, double, double) {};
  const double seconds = word2vec::train_shared<hd::vector_asm, Format>(o, v, m, silent).seconds;
  say(seconds, judge(o, v, m, argv[6]));
  return 0;
}

// Words that the text doesn't keep are passed over, and those that the file lacks have no direction.
int judge_file(const word2vec::options& o, const word2vec::vocabulary& v, int argc, char** argv) {
  if (argc != 5) return 2;
  std::ifstream file(argv[3], std::ios::binary);
  std::size_t words = 0, size = 0;
  file >> words >> size;
  word2vec::model m(v.size(), size, 1);
  std::fill(m.inputs().begin(), m.inputs().end(), 0.0f);
  std::vector<float> row(size);
  for (std::string word; file >> word;) {
    file.get();
    file.read(reinterpret_cast<char*>(row.data()), static_cast<std::streamsize>(size * sizeof(float)));
    if (const auto w = v.find(word); w != word2vec::vocabulary::none) std::copy(row.begin(), row.end(), m.input(w));
  }
  say(0.0, judge(o, v, m, argv[4]));
  return 0;
}
template <class Format> int run(int argc, char** argv) {
  word2vec::options o;
  o.train = argv[1];
  o.epochs = 1;
  const word2vec::vocabulary v = word2vec::count_words<Format>(o);
  const std::string what = argv[2], race = argc > 3 ? argv[3] : "";
  if (what == "count") {
    std::printf("%zu\n", static_cast<std::size_t>(v.total()));
    return 0;
  }
  if (what == "replicas") return replicas<Format>(o, v, argc, argv);
  if (what == "quality") return quality<Format>(o, v, argc, argv);
  if (what == "judge") return judge_file(o, v, argc, argv);
  o.cbow = what == "cbow";
  o.threads = argc > 4 ? std::strtoul(argv[4], nullptr, 10) : 2;
  if (race == "racy")
    measure<Format, racy>(o, v);
  else if (race == "relaxed")
    measure<Format, hd::relaxed>(o, v);
  else
    measure<Format, hd::vector_asm>(o, v);
  return 0;
}
}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  return word2vec::has_lines(argv[1]) ? run<hd::lines>(argc, argv) : run<hd::words>(argc, argv);
}

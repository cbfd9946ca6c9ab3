// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Learns word vectors from a text: skip-gram or CBOW with negative sampling.

#include <unistd.h>

#include <tuple>

#include "replicas.hpp"
#include "vectors.hpp"

#ifndef WORD2VEC_DATA
#define WORD2VEC_DATA "examples/data/kjv/kjv.norm.txt"
#endif

namespace {

namespace hd = heddle;
using namespace word2vec;

// How replicas share what they learn. One more mode is one more entry: a name and train<Format>(...).
template <class Race> struct hogwild_mode {
  const char* name;
  template <class Format, class Progress>
  outcome train(const options& o, const vocabulary& v, model& m, Progress progress) const {
    return train_shared<Race, Format>(o, v, m, progress);
  }
};
// Replicas meet at servers: as options() says.
struct replica_mode {
  const char* name;
  hd::geo_options (*options)(const word2vec::options&);
  template <class Format, class Progress>
  outcome train(const word2vec::options& o, const vocabulary& v, model& m, Progress progress) const {
#ifdef WORD2VEC_MPI
    return train_processes<Format>(o, v, m, options(o), progress);
#else
    return train_replicas<Format>(o, v, m, options(o), hd::threads::connection{}, progress);
#endif
  }
};
#ifdef WORD2VEC_MPI
constexpr std::tuple modes{replica_mode{"geo-sgd", geo_sgd}, replica_mode{"async-ps", async_ps},
                           replica_mode{"synchronous", synchronous}};
#else
constexpr std::tuple modes{hogwild_mode<hd::vector_asm>{"hogwild"},
                           hogwild_mode<hd::relaxed>{"hogwild-relaxed"},
                           hogwild_mode<hd::fetch_add>{"hogwild-fetch-add"},
                           replica_mode{"geo-sgd", geo_sgd},
                           replica_mode{"async-ps", async_ps},
                           replica_mode{"synchronous", synchronous}};
#endif

// Calls f with the mode of this name.
template <class Function> void with_mode(const std::string& name, Function f) {
  std::string names;
  bool found = false;
  std::apply(
      [&](const auto&... mode) {
        ((names += std::string(names.empty() ? "" : ", ") + mode.name,
          name == mode.name ? (found = true, f(mode)) : void()),
         ...);
      },
      modes);
  if (!found) throw usage_error("--mode is '" + name + "', allowed are " + names);
}

// The mean loss of words against drawn ones, from `count` places of the text.
template <class Format> double loss(const options& o, const vocabulary& v, model& m, std::size_t count) {
  const constants c(o, v);
  hd::multi_queue_reader reader(Format{}, {o.train}, {.readers = 1, .batch = 1000, .deterministic = true});
  hd::text_batch batch;
  std::vector<std::uint32_t> text;
  while (text.size() < count && reader.pop(0, batch)) {
    for (std::size_t i = 0; i < batch.size(); ++i)
      for_each_word(batch[i], [&](std::string_view w) {
        if (v.find(w) != vocabulary::none) text.push_back(v.find(w));
      });
  }
  double sum = 0.0;
  for (std::size_t i = 1; i < text.size(); ++i) {
    for (std::size_t k = 0; k <= o.negative; ++k) {
      const float* const row = m.output(k ? c.negatives.draw(mixed(i * 1000 + k)) : text[i]);
      double dot = 0.0;
      for (std::size_t j = 0; j < m.size(); ++j) dot += static_cast<double>(m.input(text[i - 1])[j]) * row[j];
      sum += std::log1p(std::exp(k ? dot : -dot));
    }
  }
  return text.size() > 1 ? sum / static_cast<double>(text.size() - 1) : 0.0;
}

// How far training is, on a terminal; mpirun hands on what isn't one, so there in some 20 lines.
class progress_line {
 public:
  // lines: where there is no terminal.
  explicit progress_line(bool lines) : lines_(lines) {}
  void operator()(double part, double speed, double rate) {
    if (!terminal_ && (!lines_ || part < next_)) return;
    next_ = part + 0.05;
    std::fprintf(stderr, terminal_ ? "\r%5.1f %%  %8.0f words/s  rate %.6f " : "%5.1f %%  %8.0f words/s  rate %.6f\n",
                 100.0 * part, speed, rate);
  }
  void end() const {
    if (terminal_) std::fprintf(stderr, "\r%60s\r", "");
  }

 private:
  bool terminal_ = isatty(STDERR_FILENO) != 0, lines_;
  double next_ = 0.0;
};

// rank, ranks: of processes; 0 of 0: this one trains by threads.
template <class Format> int run(const options& o, int rank, int ranks) {
  progress_line line(ranks > 0);
  const vocabulary v = count_words<Format>(o);
  if (v.size() < 3)
    throw usage_error(o.train + " has fewer than 2 words that occur " + std::to_string(o.min_count) + " times");
  std::printf("%zu words, %zu of them counted in %s\n", v.size(), static_cast<std::size_t>(v.total()), o.train.c_str());
  // Training may take hours: what it would fail on in the end is looked at first.
  if (!o.analogies.empty()) read_analogies(o.analogies);
  if (!o.similarities.empty()) read_similarities(o.similarities);
  if (rank == 0) {
    for (const std::string& path : {o.output, o.checkpoint}) {
      if (path.empty()) continue;
      const bool there = std::ifstream(path).good();
      if (!std::ofstream(path, std::ios::app)) throw hd::file_error("can't write " + path);
      if (!there) std::remove(path.c_str());  // nothing of a training that fails
    }
  }
  model m(v.size(), o.size, o.seed);
  outcome out;
  word2vec::options now = o;
  if (o.resume) now.first = load_checkpoint(o.checkpoint, o, v, m);
  for (; now.first < o.epochs; now.first = now.until()) {
    if (!o.checkpoint.empty()) now.last = now.first + 1;
    with_mode(o.mode, [&](const auto& mode) {
      const outcome seen = mode.template train<Format>(now, v, m, [&](double part, double speed, double rate) {
        if (rank == 0) line(part, speed, rate);
      });
      out.words += seen.words;
      out.seconds += seen.seconds;
      for (const hd::epoch_report& e : seen.read.epochs) out.read.epochs.push_back(e);
    });
    if (!o.checkpoint.empty() && rank == 0) save_checkpoint(o.checkpoint, o, v, m, now.until());
  }
  if (rank == 0) line.end();
  const bool processes = ranks > 0;
  std::printf("%s, %s, %zu %s: %.0f words/s, %.2f s\n", o.mode.c_str(), o.cbow ? "cbow" : "skip-gram",
              processes ? static_cast<std::size_t>(ranks) : o.threads, processes ? "processes" : "threads",
              out.words > 0 ? static_cast<double>(out.words) / out.seconds : 0.0, out.seconds);
  for (const hd::epoch_report& e : out.read.epochs) {
    if (!e.complete || e.hash != out.read.epochs[0].hash || e.delivered != e.records)
      throw hd::file_error("word2vec: the text changed while it was read");
  }
  if (!o.output.empty()) save(o.output, v, m, o.binary);
  const directions d(v, m);
  if (!o.analogies.empty()) {
    const auto scores = analogies(o.analogies, d, std::min<std::size_t>(o.restrict_to, v.size()), o.threads);
    for (const auto& [name, s] : scores) {
      std::printf("analogies %-28s %5.1f %%  (%zu of %zu asked, %zu in the file)\n", name.c_str(),
                  s.asked ? 100.0 * static_cast<double>(s.right) / static_cast<double>(s.asked) : 0.0, s.right, s.asked,
                  s.all);
    }
  }
  if (!o.similarities.empty()) {
    const auto [correlation, s] = similarities(o.similarities, d);
    std::printf("similarities: rank correlation %.3f  (%zu of %zu pairs)\n", correlation, s.asked, s.all);
  }
  for (std::size_t at = 0; at < o.nearest.size();) {
    const std::size_t end = std::min(o.nearest.find(',', at), o.nearest.size());
    const std::string word = o.nearest.substr(at, end - at);
    const std::uint32_t w = d.find(word);
    std::printf("%s:", word.c_str());
    if (w == vocabulary::none)
      std::printf(" not in the text");
    else
      for (const auto& [cosine, other] : nearest(d, v.size(), w, 8))
        std::printf(" %s %.2f", v.word(other).c_str(), cosine);
    std::printf("\n");
    at = end + 1;
  }
  if (!o.check) return 0;
  const double learnt = loss<Format>(o, v, m, 50000), limit = 3.3;  // of two epochs
  const double chance = static_cast<double>(1 + o.negative) * std::log(2.0);
  std::printf("loss %.3f, bound %.2f, %.3f before training: %s\n", learnt, limit, chance,
              learnt <= limit ? "met" : "MISSED");
  return learnt <= limit ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  options o;
  const std::string help = "word2vec --train FILE [OPTIONS]\n" + table_of(o).help();
  try {
    table_of(o).parse(argc, argv);
    if (o.help) {
      std::fputs(help.c_str(), stdout);
      return 0;
    }
    int rank = 0, ranks = 0;
#ifdef WORD2VEC_MPI
    const auto world = hd::mpi::world({.level = hd::mpi::thread_level::multiple});  // MPI runs as long as this
    rank = world.rank(), ranks = world.size();
    if (rank != 0) {  // the first rank speaks for all
      o.output.clear();
      if (!std::freopen("/dev/null", "w", stdout)) throw hd::file_error("word2vec: can't open /dev/null");
    }
#endif
    if (o.check && o.train.empty()) o.train = WORD2VEC_DATA;
    if (o.train.empty()) throw usage_error("--train FILE is missing");
    if (o.resume && o.checkpoint.empty()) throw usage_error("--resume needs --checkpoint FILE");
    with_mode(o.mode, [](const auto&) {});
    find_eval(o);
    return has_lines(o.train) ? run<hd::lines>(o, rank, ranks) : run<hd::words>(o, rank, ranks);
  } catch (const usage_error& e) {
    std::fprintf(stderr, "word2vec: %s\n%s", e.what(), help.c_str());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "word2vec: %s\n", e.what());
    return 1;
  }
}

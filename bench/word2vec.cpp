// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: words a second of examples/word2vec, against fastText, gensim, and a build with a data race
// driver: script

// bench/word2vec.sh runs this: word2vec TEXT skipgram|cbow vector_asm|relaxed|racy THREADS prints seconds per epoch, of the clock and of
// processors;
// word2vec TEXT count prints the words that are kept and the line ends.
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "../examples/word2vec/training.hpp"

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

template <class Race> void measure(const word2vec::options& o, const word2vec::vocabulary& v) {
  word2vec::model m(v.size(), o.size, o.seed);
  const std::clock_t start = std::clock();
  const double seconds = word2vec::train_shared<Race, hd::lines>(o, v, m, [](double, double, double) {}).seconds;
  std::printf("%.4f %.4f\n", seconds, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
}
}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  word2vec::options o;
  o.train = argv[1];
  o.epochs = 1;
  const word2vec::vocabulary v = word2vec::count_words<hd::lines>(o);
  const std::string model = argv[2], race = argc > 3 ? argv[3] : "";
  if (model == "count") {
    std::printf("%zu\n", static_cast<std::size_t>(v.total()));
    return 0;
  }
  o.cbow = model == "cbow";
  o.rate = o.cbow ? 0.05 : 0.025;
  o.threads = argc > 4 ? std::strtoul(argv[4], nullptr, 10) : 2;
  if (race == "racy")
    measure<racy>(o, v);
  else if (race == "relaxed")
    measure<hd::relaxed>(o, v);
  else
    measure<hd::vector_asm>(o, v);
}

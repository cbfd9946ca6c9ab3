// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "replicas.hpp"
#include "vectors.hpp"

#include "catch.hpp"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <sstream>

using namespace word2vec;

namespace {

// A file of its own, removed at the end.
struct file {
  explicit file(const std::string& text = {})
      : path((std::filesystem::temp_directory_path() / ("heddle-word2vec-" + std::to_string(::getpid()) + "-" +
                                                        std::to_string(reinterpret_cast<std::uintptr_t>(this))))
                 .string()) {
    std::ofstream(path, std::ios::binary) << text;
  }
  ~file() { std::filesystem::remove(path); }
  std::string path;
};

// Lines of words whose neighbours depend on them.
std::string text(std::size_t lines) {
  std::string t;
  for (std::size_t i = 0; i < lines; ++i) {
    for (std::size_t k = 0; k < 8; ++k) {
      const std::size_t kind = i % 5;
      t += "w" + std::to_string(kind * 4 + mixed(i * 8 + k) % 4) + (k % 3 == 2 ? "\t" : " ");
    }
    t += i % 7 == 0 ? "once" + std::to_string(i) + "\n" : "\n";
  }
  return t;
}

options options_for(const file& f) {
  options o;
  o.train = f.path;
  o.size = 20;
  o.window = 3;
  o.sample = 1e-2;
  o.rate = 0.05;
  o.epochs = 3;
  return o;
}

// word2vec.c's training in double precision, pair after pair, drawing in the same order.
struct oracle {
  oracle(const options& o, const vocabulary& v, model& m) : in(v.size() * m.size()), out(v.size() * m.size()) {
    for (std::size_t w = 0; w < v.size(); ++w) std::copy_n(m.input(w), m.size(), in.data() + w * m.size());
    const constants c(o, v);
    const std::size_t n = m.size();
    std::uint64_t counter = 0;
    const auto random = [&] { return mixed(++counter); };
    const double all = static_cast<double>(o.epochs) * static_cast<double>(v.total()) + 1.0;
    for (std::size_t epoch = 0; epoch < o.epochs; ++epoch) {
      counter = first_counter(o.seed, 0, epoch);
      // The text is short: the rate changes where an epoch begins.
      const double rate = o.rate * (1.0 - static_cast<double>(epoch) * static_cast<double>(v.total()) / all);
      std::ifstream stream(o.train);
      for (std::string line; std::getline(stream, line);) {
        std::vector<std::uint32_t> sentence;
        for_each_word(line, [&](std::string_view word) {
          const std::uint32_t w = v.find(word);
          if (w == vocabulary::none) return;
          if (c.keep[w] >= 1.0f || static_cast<float>(random() >> 40) * 0x1p-24f < c.keep[w]) sentence.push_back(w);
        });
        const int length = static_cast<int>(sentence.size()), window = static_cast<int>(o.window);
        for (int at = 0; at < length; ++at) {
          const int b = static_cast<int>(random() % o.window);
          std::vector<std::uint32_t> context;
          for (int a = b; a <= 2 * window - b; ++a) {
            const int k = at - window + a;
            if (a != window && k >= 0 && k < length) context.push_back(sentence[static_cast<std::size_t>(k)]);
          }
          const auto step = [&](const std::vector<std::uint32_t>& inputs) {
            std::vector<double> h(n), e(n);
            for (const std::uint32_t w : inputs) {
              for (std::size_t i = 0; i < n; ++i) h[i] += in[w * n + i] / static_cast<double>(inputs.size());
            }
            std::vector<std::uint32_t> rows{sentence[static_cast<std::size_t>(at)]};
            for (std::size_t k = 0; k < o.negative; ++k) {
              const std::uint64_t r = random();
              std::uint32_t w = c.negatives.draw(r);
              if (w == 0) w = static_cast<std::uint32_t>(r % (v.size() - 1)) + 1;
              if (w != rows[0]) rows.push_back(w);
            }
            std::vector<double> g;
            for (std::size_t k = 0; k < rows.size(); ++k) {
              double dot = 0.0;
              for (std::size_t i = 0; i < n; ++i) dot += h[i] * out[rows[k] * n + i];
              g.push_back(((k == 0) - 1.0 / (1.0 + std::exp(-dot))) * rate);
            }
            for (std::size_t k = 0; k < rows.size(); ++k) {
              for (std::size_t i = 0; i < n; ++i) {
                e[i] += g[k] * out[rows[k] * n + i];
                out[rows[k] * n + i] += g[k] * h[i];
              }
            }
            for (const std::uint32_t w : inputs) {
              for (std::size_t i = 0; i < n; ++i) in[w * n + i] += e[i];
            }
          };
          if (o.cbow && !context.empty()) step(context);
          for (const std::uint32_t w : context) {
            if (!o.cbow) step({w});
          }
        }
      }
    }
  }
  std::vector<double> in, out;
};

const auto silent = [](double, double, double) {};

}  // namespace

TEST_CASE("Words are numbered by falling count behind the line end, rare ones dropped") {
  const file f("b a b\nc b a\n\n");
  options o = options_for(f);
  o.min_count = 2;
  const vocabulary v = count_words<hd::lines>(o);
  REQUIRE(v.size() == 3);
  CHECK(v.word(0) == "</s>");
  CHECK(v.count(0) == 3);
  CHECK(v.word(1) == "b");
  CHECK(v.word(2) == "a");
  CHECK(v.total() == 8);
  CHECK(v.find("c") == vocabulary::none);
  CHECK(v.find("a") == 2);
}

TEST_CASE("Aliases are drawn as often as their weights say") {
  const std::vector<double> weights{1.0, 0.0, 5.0, 2.5, 1.5};
  const alias_table t(weights);
  std::vector<double> seen(5);
  for (std::uint64_t i = 0; i < 200000; ++i) ++seen[t.draw(mixed(i))];
  for (std::size_t k = 0; k < 5; ++k) CHECK(std::abs(seen[k] / 200000 - weights[k] / 10.0) < 0.005);
}

TEST_CASE("Rank correlation by hand") {
  CHECK(rank_correlation({1, 2, 3, 4}, {10, 20, 30, 40}) == Approx(1.0));
  CHECK(rank_correlation({1, 2, 3, 4}, {4, 3, 2, 1}) == Approx(-1.0));
  CHECK(rank_correlation({1, 2, 2, 3}, {1, 3, 2, 4}) == Approx(4.5 / std::sqrt(4.5 * 5.0)));  // ranks 1, 2.5, 2.5, 4
  CHECK(rank_correlation({1, 1}, {1, 2}) == 0.0);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(ranks({nan, nan}).size() == 2);  // of vectors that have diverged: it ends
}

TEST_CASE("Files of questions and pairs are read whole, or the line is named that isn't one") {
  const file questions(": first one\na b c d\r\n\n: second\ne f g h"), pairs("title\na,b,1.5\r\n\nc,d,-2");
  const std::vector<analogy> q = read_analogies(questions.path);
  REQUIRE(q.size() == 2);
  CHECK(q[0].section + q[0].word[0] + q[0].word[3] == "firstad");
  CHECK(q[1].section + q[1].word[1] + q[1].word[2] == "secondfg");
  const std::vector<word_pair> p = read_similarities(pairs.path);
  REQUIRE(p.size() == 2);
  CHECK(p[0].word[0] + p[0].word[1] == "ab");
  CHECK((p[0].value == 1.5 && p[1].value == -2.0));
  const auto refused = [](const std::string& text, const char* line, auto read) {
    const file f(text);
    try {
      read(f.path);
    } catch (const hd::file_error& e) {
      return std::string(e.what()).find(f.path + line) != std::string::npos;
    }
    return false;
  };
  for (const char* bad : {"a b c", "garbled", "a b c d e", ":"})
    CHECK(refused("a b c d\n" + std::string(bad), ": line 2:", read_analogies));
  for (const char* bad : {"a", "a,b", "a,b,", "a,b,x", "a,b,nan", "a,b,inf"})
    CHECK(refused("title\na,b,1\n" + std::string(bad), ": line 3:", read_similarities));
  for (const char* none : {"", "\n", ": section\n"}) CHECK(refused(none, " has no questions", read_analogies));
  for (const char* none : {"", "title", "title\n\n"}) CHECK(refused(none, " has no pairs", read_similarities));
}

TEST_CASE("--eval finds both files in a folder or its folders, unless they are given") {
  const file place;
  const std::filesystem::path folder = place.path + ".d";
  std::filesystem::create_directories(folder / "analogy");
  std::ofstream(folder / "analogy" / "questions-words.txt");
  options o;
  find_eval(o);
  CHECK(o.analogies + o.similarities == "");
  o.eval = folder.string();
  CHECK_THROWS_AS(find_eval(o), usage_error);  // no similarities
  std::ofstream(folder / "wordsim353.csv");
  o.analogies = "mine";
  o.similarities = "";
  find_eval(o);
  CHECK(o.analogies == "mine");
  CHECK(o.similarities == o.eval + "/wordsim353.csv");
  o.analogies = "";
  find_eval(o);
  CHECK(o.analogies == o.eval + "/analogy/questions-words.txt");
  std::filesystem::remove_all(folder);
}

TEST_CASE("One thread trains as word2vec.c in double precision, and the same way again") {
  const file f(text(60));
  for (const bool cbow : {false, true}) {
    options o = options_for(f);
    o.threads = 1;
    o.in_order = true;
    o.cbow = cbow;
    const vocabulary v = count_words<hd::lines>(o);
    REQUIRE(v.size() == 21);
    model m(v.size(), o.size, o.seed), again(v.size(), o.size, o.seed), scalar(v.size(), o.size, o.seed);
    const oracle expected(o, v, m);
    const outcome done = train_shared<hd::vector_asm, hd::lines>(o, v, m, silent);
    CHECK(done.words == o.epochs * v.total());
    train_shared<hd::vector_asm, hd::lines>(o, v, again, silent);
    train_shared<hd::fetch_add, hd::lines>(o, v, scalar, silent);
    double worst = 0.0, moved = 0.0;
    for (std::size_t w = 0; w < v.size(); ++w) {
      REQUIRE(std::memcmp(m.input(w), again.input(w), m.stride() * sizeof(float)) == 0);
      for (std::size_t i = 0; i < m.size(); ++i) {
        worst = std::max({worst, std::abs(m.input(w)[i] - expected.in[w * m.size() + i]),
                          std::abs(m.output(w)[i] - expected.out[w * m.size() + i]),
                          static_cast<double>(std::abs(m.input(w)[i] - scalar.input(w)[i]))});
        moved = std::max(moved, std::abs(expected.in[w * m.size() + i]));
      }
      for (std::size_t i = m.size(); i < m.stride(); ++i) CHECK((m.input(w)[i] == 0.0f && m.output(w)[i] == 0.0f));
    }
    CHECK(moved > 0.05);
    CHECK(worst < 0.02 * moved);  // the logistic function's table has steps of 0.012
  }
}

TEST_CASE("Each epoch reads a text in an order of its own, or in the file's") {
  const auto check = [](const std::string& t, auto format) {
    const file f(t);
    options o = options_for(f);
    o.threads = 1;
    const auto epochs = [&] {
      const auto reader = open_text<decltype(format)>(o);
      std::vector<std::vector<std::string>> all(o.epochs);
      hd::text_batch b;
      for (auto& epoch : all) {
        while (reader->pop(0, b))
          for (std::size_t i = 0; i < b.size(); ++i) epoch.emplace_back(b[i]);
      }
      return all;
    };
    auto drawn = epochs();
    o.in_order = true;
    const auto ordered = epochs();
    CHECK(ordered[0] == ordered[1]);
    CHECK(drawn[0] != ordered[0]);
    CHECK(drawn[0] != drawn[1]);
    for (auto& epoch : drawn) std::ranges::sort(epoch);
    auto expected = ordered[0];
    std::ranges::sort(expected);
    CHECK(expected.size() > 10000);
    CHECK(drawn[0] == expected);
    CHECK(drawn[1] == expected);
  };
  std::string lines, words;
  for (int i = 0; i < 60000; ++i) lines += std::to_string(i) + '\n', words += std::to_string(i) + ' ';
  check(lines, hd::lines{});
  check(words, hd::words{});
}

TEST_CASE("Threads read every word of every epoch, and words of one kind become neighbours") {
  const file f(text(2000));
  options o = options_for(f);
  o.threads = 3;
  o.sample = 0.0;
  const vocabulary v = count_words<hd::lines>(o);
  model m(v.size(), o.size, o.seed);
  const outcome done = train_shared<hd::relaxed, hd::lines>(o, v, m, silent);
  CHECK(done.words == o.epochs * v.total());
  for (const hd::epoch_report& e : done.read.epochs) CHECK((e.complete && e.delivered == 2000));
  const directions d(v, m);
  for (const auto& [cosine, w] : nearest(d, v.size(), v.find("w5"), 3)) {
    const int kind = std::stoi(v.word(w).substr(1)) / 4;
    CHECK(kind == 1);
  }
}

TEST_CASE("Replicas on servers learn as threads that share do, and one alone to the bit") {
  const file f(text(2000));
  options o = options_for(f);
  o.sample = 0.0;
  const vocabulary v = count_words<hd::lines>(o);
  model m(v.size(), o.size, o.seed), shared(v.size(), o.size, o.seed);
  o.threads = 1;
  train_shared<hd::vector_asm, hd::lines>(o, v, shared, silent);
  train_replicas<hd::lines>(o, v, m, geo_sgd(o), hd::threads::connection{}, silent);
  for (std::size_t w = 0; w < v.size(); ++w)
    REQUIRE(std::memcmp(m.input(w), shared.input(w), m.stride() * sizeof(float)) == 0);
  o.threads = 3;
  o.period = 1;
  hd::geo_options half = geo_sgd(o);
  half.half = true;
  for (const auto& mode : {geo_sgd(o), half, async_ps(o), synchronous(o)}) {
    model learnt(v.size(), o.size, o.seed);
    const outcome done = train_replicas<hd::lines>(o, v, learnt, mode, hd::threads::connection{}, silent);
    CHECK(done.words == o.epochs * v.total());
    for (const hd::epoch_report& e : done.read.epochs) CHECK((e.complete && e.delivered == 2000));
    const directions d(v, learnt);
    for (const auto& [cosine, w] : nearest(d, v.size(), v.find("w5"), 3))
      CHECK(std::stoi(v.word(w).substr(1)) / 4 == 1);
  }
}

TEST_CASE("Training that was saved after an epoch goes on, in every mode, and one thread to the bit") {
  const file f(text(2000)), saved;
  options o = options_for(f);
  o.sample = 0.0;
  o.rate = 0.02;  // replicas add up what they have moved in an epoch
  const vocabulary v = count_words<hd::lines>(o);
  const auto shared = [](const options& now, const vocabulary& words, model& m) {
    return train_shared<hd::relaxed, hd::lines>(now, words, m, silent);
  };
  const auto replicas = [](auto mode) {
    return [mode](const options& now, const vocabulary& words, model& m) {
      return train_replicas<hd::lines>(now, words, m, mode(now), hd::threads::connection{}, silent);
    };
  };
  const auto check = [&](const auto& train) {
    for (const std::size_t threads : {1, 3}) {
      CAPTURE(threads);
      o.threads = threads;
      model whole(v.size(), o.size, o.seed), begun(v.size(), o.size, o.seed), m(v.size(), o.size, o.seed + 1);
      train(o, v, whole);
      options now = o;
      now.last = 1;
      outcome done = train(now, v, begun);
      CHECK(done.words == v.total());
      save_checkpoint(saved.path, o, v, begun, 1);
      now.first = load_checkpoint(saved.path, o, v, m);
      REQUIRE(now.first == 1);
      CHECK(std::ranges::equal(m.inputs(), begun.inputs()));
      CHECK(std::ranges::equal(m.outputs(), begun.outputs()));
      now.last = 0;
      done = train(now, v, m);
      CHECK(done.words == 2 * v.total());
      if (threads == 1) {
        CHECK(std::ranges::equal(m.inputs(), whole.inputs()));
        CHECK(std::ranges::equal(m.outputs(), whole.outputs()));
      }
      const directions d(v, m);
      for (const auto& [cosine, w] : nearest(d, v.size(), v.find("w5"), 3))
        CHECK(std::stoi(v.word(w).substr(1)) / 4 == 1);
    }
  };
  check(shared);
  check(replicas(geo_sgd));
  check(replicas(async_ps));
  check(replicas(synchronous));

  model m(v.size(), o.size, o.seed);
  const model before(v.size(), o.size, o.seed);
  const auto refused = [&](const options& other) {
    CHECK_THROWS_AS(load_checkpoint(saved.path, other, v, m), hd::file_error);
    CHECK(std::ranges::equal(m.inputs(), std::span(before.input(0), m.inputs().size())));
  };
  options other = o;
  other.cbow = true;
  refused(other);
  other = o;
  other.epochs = 0;
  refused(other);
  std::filesystem::resize_file(saved.path, 1000);
  refused(o);
}

TEST_CASE("Files in word2vec's text and binary formats") {
  const file f("a b a\nb c\n"), out;
  options o = options_for(f);
  o.min_count = 1;
  o.size = 3;
  const vocabulary v = count_words<hd::lines>(o);
  const model m(v.size(), o.size, o.seed);
  for (const bool binary : {false, true}) {
    save(out.path, v, m, binary);
    std::ifstream in(out.path, std::ios::binary);
    std::size_t words = 0, size = 0;
    in >> words >> size;
    CHECK(words == 4);
    CHECK(size == 3);
    for (std::size_t w = 0; w < words; ++w) {
      std::string word;
      float x[3];
      in >> word;
      CHECK(word == v.word(w));
      in.get();
      if (binary)
        in.read(reinterpret_cast<char*>(x), sizeof x);
      else
        in >> x[0] >> x[1] >> x[2];
      CHECK(std::memcmp(x, m.input(w), sizeof x) == 0);
    }
  }
}

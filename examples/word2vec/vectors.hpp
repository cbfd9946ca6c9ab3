// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Word vectors once they are trained: files in word2vec's formats, neighbours, analogies, similarities.

#pragma once

#include <algorithm>
#include <atomic>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <heddle/core/archive.hpp>

#include "training.hpp"

namespace word2vec {

/// Writes a line "words size", then each word and its vector. Throws heddle::file_error.
inline void save(const std::string& path, const vocabulary& v, const model& m, bool binary) {
  std::ofstream file(path, std::ios::binary);
  std::string line = std::to_string(v.size()) + ' ' + std::to_string(m.size()) + '\n';
  for (std::size_t w = 0; w < v.size(); ++w) {
    line += v.word(w);
    line += ' ';
    if (binary) {
      line.append(reinterpret_cast<const char*>(m.input(w)), m.size() * sizeof(float));
    } else {
      for (std::size_t i = 0; i < m.size(); ++i) {
        char text[32];
        line.append(text, std::to_chars(text, text + sizeof text, m.input(w)[i]).ptr);
        line += ' ';
      }
    }
    line += '\n';
    file << line;
    line.clear();
  }
  if (!file.flush()) throw hd::file_error("word2vec: can't write " + path);
}

/// What a checkpoint is of: the words with their counts, and what the vectors are.
inline std::string identity(const options& o, const vocabulary& v) {
  std::uint64_t words = 0;
  for (std::size_t w = 0; w < v.size(); ++w)
    words = hd::record_hash(std::to_string(words) + ' ' + v.word(w) + ' ' + std::to_string(v.count(w)));
  return std::string(o.cbow ? "cbow " : "skip-gram ") + std::to_string(o.size) + ' ' + std::to_string(words);
}

/// Writes what is needed to go on after so many epochs, in any mode: replicas are equal then. Throws
/// heddle::file_error; an older file stays.
inline void save_checkpoint(const std::string& path, const options& o, const vocabulary& v, model& m,
                            std::size_t epochs) {
  hd::archive_writer out;
  out.put(identity(o, v));
  out.put(static_cast<std::uint64_t>(epochs));
  for (const std::span<float> all : {m.inputs(), m.outputs()}) out.put(all.data(), all.size());
  out.write(path);
}

/// Reads it; how many epochs it has seen. Throws heddle::file_error, with nothing changed, for a damaged file or one of
/// another text or model.
inline std::size_t load_checkpoint(const std::string& path, const options& o, const vocabulary& v, model& m) {
  hd::archive_reader in(path);
  if (in.get_string() != identity(o, v)) in.refuse("it is of another text, or of vectors of another kind");
  const auto epochs = in.get<std::uint64_t>();
  if (epochs > o.epochs)
    in.refuse("it has seen " + std::to_string(epochs) + " epochs, here are " + std::to_string(o.epochs));
  for (const std::span<float> all : {m.inputs(), m.outputs()}) in.get(all.data(), all.size());
  in.finish();
  return epochs;
}

/// The vectors of all words, each of length 1.
class directions {
 public:
  directions(const vocabulary& v, const model& m) : words_(v), size_(m.size()) {
    rows_.resize(v.size() * size_);
    for (std::size_t w = 0; w < v.size(); ++w) {
      double squares = 0.0;
      for (std::size_t i = 0; i < size_; ++i) squares += static_cast<double>(m.input(w)[i]) * m.input(w)[i];
      const float scale = squares > 0.0 ? static_cast<float>(1.0 / std::sqrt(squares)) : 0.0f;
      for (std::size_t i = 0; i < size_; ++i) rows_[w * size_ + i] = m.input(w)[i] * scale;
    }
  }

  /// The word without regard to case that is commonest, `vocabulary::none` if there is none.
  std::uint32_t find(std::string word) const {
    const std::uint32_t exact = words_.find(word);
    for (char& c : word) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return std::min(exact, words_.find(word));
  }
  const float* operator[](std::size_t w) const { return rows_.data() + w * size_; }
  std::size_t size() const { return size_; }
  float cosine(const float* x, std::size_t w) const {
    float lanes[8] = {};
    const float* const y = (*this)[w];
    std::size_t i = 0;
    for (; i + 8 <= size_; i += 8) {
      for (std::size_t j = 0; j < 8; ++j) lanes[j] += x[i + j] * y[i + j];
    }
    for (; i < size_; ++i) lanes[0] += x[i] * y[i];
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  }

 private:
  const vocabulary& words_;
  std::size_t size_;
  std::vector<float> rows_;
};

/// The n words nearest to one, with cosines.
inline std::vector<std::pair<float, std::uint32_t>> nearest(const directions& d, std::size_t words, std::uint32_t of,
                                                            std::size_t n) {
  std::vector<std::pair<float, std::uint32_t>> all;
  for (std::uint32_t w = 1; w < words; ++w) {
    if (w != of) all.push_back({d.cosine(d[of], w), w});
  }
  n = std::min(n, all.size());
  std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(n), all.end(), std::greater<>{});
  all.resize(n);
  return all;
}

/// Answers to questions of one section.
struct score {
  std::size_t right = 0, asked = 0, all = 0;  // asked: of all those whose words are known
};

/// A question a : b = c : d and the section that it stands in.
struct analogy {
  std::string word[4], section;
};

/// The questions of a file, four words a line; `: NAME` begins a section, empty lines don't count. Throws
/// heddle::file_error that names the line, also where there is anything else.
inline std::vector<analogy> read_analogies(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw hd::file_error("word2vec: can't read " + path);
  std::vector<analogy> all;
  std::string section = "all", line;
  for (std::size_t number = 1; std::getline(file, line); ++number) {
    std::vector<std::string> words;
    for_each_word(line, [&](std::string_view w) { words.emplace_back(w); });
    if (words.size() >= 2 && words[0] == ":")
      section = words[1];
    else if (words.size() == 4)
      all.push_back({{words[0], words[1], words[2], words[3]}, section});
    else if (!words.empty())
      throw hd::file_error("word2vec: " + path + ": line " + std::to_string(number) + ": " +
                           std::to_string(words.size()) + " words where 4, or ': SECTION', are allowed");
  }
  if (all.empty()) throw hd::file_error("word2vec: " + path + " has no questions");
  return all;
}

/// Questions a : b = c : ?, as read_analogies reads them; the answer is the word among the commonest `limit`
/// whose direction is nearest to b - a + c. Throws heddle::file_error.
inline std::map<std::string, score> analogies(const std::string& path, const directions& d, std::size_t limit,
                                              std::size_t threads) {
  struct question {
    std::uint32_t word[4];
    score* to;
  };
  std::map<std::string, score> scores;
  std::vector<question> questions;
  scores["all"];
  for (const analogy& from : read_analogies(path)) {
    question q{{}, &scores[from.section]};
    ++q.to->all;
    bool known = true;
    for (std::size_t i = 0; i < 4; ++i) known &= (q.word[i] = d.find(from.word[i])) < limit;
    if (known) questions.push_back(q);
  }
  std::vector<char> right(questions.size());
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    std::vector<float> x(d.size());
    for (std::size_t k; (k = next++) < questions.size();) {
      const auto [a, b, c, answer] = questions[k].word;
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = d[b][i] - d[a][i] + d[c][i];
      float best = -1e30f;
      std::uint32_t found = 0;
      for (std::uint32_t w = 1; w < limit; ++w) {
        const float near = d.cosine(x.data(), w);
        if (near > best && w != a && w != b && w != c) best = near, found = w;
      }
      right[k] = found == answer;
    }
  };
  std::vector<std::thread> helpers;
  for (std::size_t t = 0; t < threads; ++t) helpers.emplace_back(work);
  for (std::thread& t : helpers) t.join();
  for (std::size_t k = 0; k < questions.size(); ++k) {
    ++questions[k].to->asked;
    questions[k].to->right += right[k] != 0;
  }
  score& all = scores["all"];
  for (const auto& [name, s] : scores) {
    if (&s == &all) continue;
    all.right += s.right;
    all.asked += s.asked;
    all.all += s.all;
  }
  return scores;
}

/// Ranks from 1; equal values share their mean rank.
inline std::vector<double> ranks(const std::vector<double>& x) {
  std::vector<std::size_t> order(x.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return x[a] < x[b]; });
  std::vector<double> r(x.size());
  for (std::size_t i = 0; i < order.size();) {
    std::size_t j = i + 1;  // of a NaN, which differs from itself, too
    while (j < order.size() && x[order[j]] == x[order[i]]) ++j;
    for (std::size_t k = i; k < j; ++k) r[order[k]] = (static_cast<double>(i + j) + 1.0) / 2.0;
    i = j;
  }
  return r;
}

/// Spearman's rank correlation; 0 for fewer than two pairs, or if one side is constant.
inline double rank_correlation(const std::vector<double>& x, const std::vector<double>& y) {
  const std::vector<double> a = ranks(x), b = ranks(y);
  const double mean = (static_cast<double>(a.size()) + 1.0) / 2.0;
  double ab = 0.0, aa = 0.0, bb = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - mean) * (b[i] - mean);
    aa += (a[i] - mean) * (a[i] - mean);
    bb += (b[i] - mean) * (b[i] - mean);
  }
  return aa > 0.0 && bb > 0.0 ? ab / std::sqrt(aa * bb) : 0.0;
}

/// A pair of words and how alike people find them.
struct word_pair {
  std::string word[2];
  double value;
};

/// Lines `word,word,score` after a title; empty ones don't count. Throws heddle::file_error that names the line, also
/// where a score is no finite number.
inline std::vector<word_pair> read_similarities(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw hd::file_error("word2vec: can't read " + path);
  std::vector<word_pair> all;
  std::string line;
  std::getline(file, line);
  for (std::size_t number = 2; std::getline(file, line); ++number) {
    while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) line.pop_back();
    if (line.empty()) continue;
    const std::size_t first = line.find(','), second = first == line.npos ? first : line.find(',', first + 1);
    double value = std::numeric_limits<double>::quiet_NaN();
    if (second != line.npos) std::from_chars(line.data() + second + 1, line.data() + line.size(), value);
    if (!std::isfinite(value))
      throw hd::file_error("word2vec: " + path + ": line " + std::to_string(number) +
                           ": this is not 'word,word,score' with a finite score");
    all.push_back({{line.substr(0, first), line.substr(first + 1, second - first - 1)}, value});
  }
  if (all.empty()) throw hd::file_error("word2vec: " + path + " has no pairs of words");
  return all;
}

/// How the cosines' order agrees with the scores' of read_similarities. Throws heddle::file_error.
inline std::pair<double, score> similarities(const std::string& path, const directions& d) {
  std::vector<double> people, ours;
  score s;
  for (const word_pair& pair : read_similarities(path)) {
    ++s.all;
    const std::uint32_t a = d.find(pair.word[0]), b = d.find(pair.word[1]);
    if (a == vocabulary::none || b == vocabulary::none) continue;
    people.push_back(pair.value);
    ours.push_back(d.cosine(d[a], b));
  }
  s.asked = people.size();
  return {rank_correlation(people, ours), s};
}

}  // namespace word2vec

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cstddef>
#include <fstream>
#include <string>

#include "../support/option_table.hpp"

namespace word2vec {

using examples::usage_error;

struct options {
  std::string train, output, checkpoint, eval, analogies, similarities, nearest, mode = "hogwild";
  std::size_t size = 100, window = 5, negative = 5, min_count = 5, epochs = 5, threads = 2, seed = 1, period = 1,
              least = 80, common = 200, restrict_to = 30000;
  double sample = 1e-4, rate = 0.05, part = 0.0;
  bool cbow = false, binary = false, in_order = false, resume = false, check = false, help = false;
  std::size_t first = 0, last = 0;  // not on the command line: the epochs to train now; last 0: to the end
  /// Behind the last epoch to train now.
  std::size_t until() const { return last > 0 ? last : epochs; }
};

/// The table of options over one `options`, in the order of --help.
inline examples::option_table table_of(options& o) {
  examples::option_table t;
  t.text("train", "FILE", "the text: words between white space; lines are sentences", o.train);
  t.text("output", "FILE", "where the vectors go, in word2vec's format", o.output);
  t.flag("binary", "write the binary form of it", o.binary);
  t.text("checkpoint", "FILE", "write after each epoch what is needed to go on", o.checkpoint);
  t.flag("resume", "go on behind the epochs that --checkpoint's file has seen", o.resume);
  t.text("mode", "NAME",
         "how threads train: hogwild, hogwild-relaxed, hogwild-fetch-add share the vectors; geo-sgd, async-ps, "
         "synchronous have a replica each",
         o.mode);
  t.size("period", "of geo-sgd: batches of 10,000 words between exchanges", o.period, 1, 1000000);
  t.size("least", "of geo-sgd: changes of a vector until it is exchanged", o.least, 1, 4294967295);
  t.size("common",
         "of replicas: what a vector has moved by more changes than this of all threads is sent in part, and the rest "
         "follows; 0: of all vectors",
         o.common, 0, 4294967295);
  t.real("part", "of replicas: at least so much of it; 0: 1 / threads, 1: all", o.part, 0.0, 1.0);
  t.flag("cbow", "predict a word from the mean of its neighbours instead of from each (skip-gram)", o.cbow);
  t.size("size", "of a vector", o.size, 1, 4096);
  t.size("window", "most words on either side", o.window, 1, 1000);
  t.size("negative", "words drawn to be told apart", o.negative, 1, 100);
  t.real("sample", "frequent words are left out with this threshold; 0: never", o.sample, 0.0, 1.0);
  t.size("min-count", "rarer words don't count", o.min_count, 1, 1000000000);
  t.size("epochs", "times through the text", o.epochs, 1, 1000000);
  t.flag("in-order", "read in the file's order, as word2vec.c does, instead of a random one in each epoch", o.in_order);
  t.size("threads", "that share the vectors; 1 gives the same result in every run", o.threads, 1, 1024);
  t.real("rate", "learning rate at the start", o.rate, 1e-6, 1.0);
  t.size("seed", "of the initial values and of what is drawn", o.seed, 0, ~std::size_t{0});
  t.text("eval", "FOLDER",
         "judge the vectors by the questions-words.txt and wordsim353.csv there, or in its analogy/ and wordsim353/",
         o.eval);
  t.text("analogies", "FILE", "judge the vectors by questions a : b = c : d, one a line", o.analogies);
  t.text("similarities", "FILE", "judge them by pairs of words with people's scores, as CSV", o.similarities);
  t.size("restrict", "commonest words that the analogies are asked about", o.restrict_to, 1, 1000000000);
  t.text("nearest", "WORD,...", "show the nearest neighbours of these words", o.nearest);
  t.flag("check", "train on the text shipped with this program; status 1 if it doesn't learn", o.check);
  t.flag("help", "print this and end", o.help);
  return t;
}

/// Where --eval names a folder, the files in it stand for --analogies and --similarities that weren't given.
inline void find_eval(options& o) {
  const auto find = [&](std::string& to, const char* folder, const char* name) {
    if (o.eval.empty() || !to.empty()) return;
    to = o.eval + "/" + name;
    if (!std::ifstream(to)) to = o.eval + "/" + folder + "/" + name;
    if (!std::ifstream(to)) throw usage_error("--eval " + o.eval + ": there is no " + name);
  };
  find(o.analogies, "analogy", "questions-words.txt");
  find(o.similarities, "wordsim353", "wordsim353.csv");
}

}  // namespace word2vec

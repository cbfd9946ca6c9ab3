// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Trains a small image classifier on Fashion-MNIST under several training strategies and seeds, and compares them.

#include <heddle/compress/sharded.hpp>
#include <heddle/mode/adaptive_period.hpp>
#include <heddle/mode/elastic_sgd.hpp>
#include <heddle/mode/geo_sgd.hpp>
#include <heddle/mode/outer_momentum.hpp>

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "../support/option_table.hpp"
#include "training.hpp"

#ifndef VISION_DATA
#define VISION_DATA "examples/data/fashion-mnist"
#endif

namespace {

using vision::job;
using vision::outcome;
using vision::train;
namespace hd = heddle;

struct entry {
  const char* name;
  const char* about;
  bool standard;  // trained when no strategy is named
  outcome (*run)(const job&);
};

constexpr hd::sgd momentum{.momentum = 0.9f};

hd::dgc sparse(const job& j) {
  return {.sparsity = 0.999,
          .begin_step = j.steps_per_epoch(),
          .warmup_steps = 4 * j.steps_per_epoch(),
          .dense_below = 1024};
}

// What DGC's authors compare with: gradients are held back, and the optimizer's momentum comes after.
struct uncorrected : hd::dgc {
  static constexpr bool owns_momentum = false;
};

const std::vector<entry>& strategies() {
  static const std::vector<entry> all = {
      {"dense", "momentum SGD; single precision every step", true,
       [](const job& j) { return train(j, hd::strategy{.topology = hd::ring{}}, momentum); }},
      {"fp16", "the same with gradients as float16", true,
       [](const job& j) {
         return train(j, hd::strategy{.topology = hd::ring{}, .compressor = hd::cast<hd::float16>{}}, momentum);
       }},
      {"dgc", "the largest 0.1 % of what has gathered up, after a warm-up of five epochs", true,
       [](const job& j) { return train(j, hd::strategy{.topology = hd::ring{}, .compressor = sparse(j)}, momentum); }},
      {"dgc-unmasked", "the same without momentum factor masking", false,
       [](const job& j) {
         hd::dgc d = sparse(j);
         d.masking = false;
         return train(j, hd::strategy{.topology = hd::ring{}, .compressor = d}, momentum);
       }},
      {"dgc-uncorrected", "the same with momentum after the exchange instead of before it", false,
       [](const job& j) {
         return train(j, hd::strategy{.topology = hd::ring{}, .compressor = uncorrected{sparse(j)}}, momentum);
       }},
      {"dgc-half", "the same as dgc with values as float16, after backward in one pass", false,
       [](const job& j) {
         hd::dgc d = sparse(j);
         d.values = hd::sparse_values::f16;
         d.overlap = hd::overlap::none;
         return train(j, hd::strategy{.topology = hd::ring{}, .compressor = d}, momentum);
       }},
      {"dgc-sharded", "the same as dgc between groups of two ranks, each with half of the tensors", false,
       [](const job& j) {
         return train(j,
                      hd::strategy{.topology = hd::hierarchical{hd::ring{}, hd::ring{}, 2},
                                   .compressor = hd::sharded{sparse(j)}},
                      momentum);
       }},
      {"local-sgd", "replicas meet every eighth step", true,
       [](const job& j) {
         return train(j, hd::strategy{.topology = hd::ring{}, .mode = hd::local_sgd{.period = 8}}, momentum);
       }},
      {"diloco", "AdamW on each rank, every 35th step Nesterov on the mean difference", false,
       [](const job& j) {
         return train(j, hd::strategy{.topology = hd::ring{}, .mode = hd::diloco{.period = 35}}, hd::adamw{}, 0.02);
       }},
      {"slow-momentum", "replicas meet every eighth step, under a slow momentum", false,
       [](const job& j) {
         return train(j, hd::strategy{.topology = hd::ring{}, .mode = hd::slow_momentum{.period = 8, .momentum = 0.5f}},
                      momentum);
       }},
      {"block-momentum", "replicas meet every eighth step, under block momentum", false,
       [](const job& j) {
         return train(j, hd::strategy{.topology = hd::ring{}, .mode = hd::block_momentum{.period = 8}}, hd::sgd{});
       }},
      {"elastic-sgd", "replicas meet a common centre every eighth step", false,
       [](const job& j) {
         return train(j, hd::strategy{.topology = hd::ring{}, .mode = hd::elastic_sgd{.period = 8}}, momentum);
       }},
      {"geo-sgd", "replicas' moves summed in instalments every eighth step; plain SGD", false,
       [](const job& j) {
         return train(j, hd::strategy{.topology = hd::ring{}, .mode = hd::geo_sgd{.period = 8}}, hd::sgd{}, 2.5);
       }},
      {"adaptive", "replicas meet by a period that follows the loss", false,
       [](const job& j) {
         return train(
             j,
             hd::strategy{.topology = hd::ring{},
                          .mode = hd::outer_step{.outer = hd::outer::average{}, .period = hd::period::adaptive{}}},
             momentum);
       }},
  };
  return all;
}

struct summary {
  double mean = 0.0, deviation = 0.0;
};
template <class Get> summary over(const std::vector<outcome>& runs, Get&& get) {
  summary s;
  for (const outcome& o : runs) s.mean += get(o) / static_cast<double>(runs.size());
  for (const outcome& o : runs) s.deviation += (get(o) - s.mean) * (get(o) - s.mean);
  s.deviation = runs.size() > 1 ? std::sqrt(s.deviation / static_cast<double>(runs.size() - 1)) : 0.0;
  return s;
}

struct options {
  std::vector<std::string> strategies;
  std::string data = VISION_DATA;
  std::size_t ranks = 4, epochs = 20, batch = 128, hidden = 128, seeds = 3;
  double rate = 0.05, least = 0.0;
  bool list = false, help = false;
};

examples::option_table table_of(options& o) {
  examples::option_table t;
  t.names("strategy", "NAME,...", "what to train: names of --list, or all (default: those marked there)", o.strategies);
  t.flag("list", "print the names of all strategies and end", o.list);
  t.size("ranks", "number of ranks, each a thread", o.ranks, 1, 64);
  t.size("seeds", "runs of each strategy, with seeds 1, 2, ...", o.seeds, 1, 1000);
  t.size("epochs", "passes over the training images", o.epochs, 2, 1000);
  t.size("batch", "images per step, over all ranks", o.batch, 1, 4096);
  t.size("hidden", "width of the first hidden layer", o.hidden, 1, 4096);
  t.real("rate", "highest learning rate of momentum SGD", o.rate);
  t.real("least", "exit with status 1 when a mean accuracy is below this, in percent; 0 for never", o.least, 0, 100);
  t.text("data", "DIR", "folder of the idx files, gzipped", o.data);
  t.flag("help", "print this and end", o.help);
  return t;
}

std::vector<const entry*> chosen(const options& o) {
  std::vector<const entry*> out;
  const bool all = o.strategies == std::vector<std::string>{"all"};
  for (const entry& e : strategies()) {
    if (all || (o.strategies.empty() && e.standard)) out.push_back(&e);
  }
  for (std::size_t i = 0; !all && i < o.strategies.size(); ++i) {
    const entry* found = nullptr;
    for (const entry& e : strategies()) {
      if (o.strategies[i] == e.name) found = &e;
    }
    if (!found) throw examples::usage_error("unknown strategy " + o.strategies[i] + "; --list names all");
    out.push_back(found);
  }
  return out;
}

int compare(const options& o) {
  const auto which = chosen(o);
  const vision::pictures training(o.data + "/train9k-images-idx3-ubyte.gz", o.data + "/train9k-labels-idx1-ubyte.gz");
  const vision::pictures test(o.data + "/test2k-images-idx3-ubyte.gz", o.data + "/test2k-labels-idx1-ubyte.gz");
  if (training.pixels != test.pixels) throw std::runtime_error("training and test images differ in size");
  if (training.count() < o.batch || o.batch < o.ranks)
    throw examples::usage_error("--batch must be from --ranks to " + std::to_string(training.count()));
  std::printf(
      "Fashion-MNIST, %zu images, judged on %zu; perceptron %zu-%zu-64-10; batch %zu over %zu ranks, %zu epochs, %zu "
      "seeds.\n\n%-16s %20s %18s %14s %8s\n",
      training.count(), test.count(), training.pixels, o.hidden, o.batch, o.ranks, o.epochs, o.seeds, "strategy",
      "test accuracy %", "test loss", "kB sent/step", "s/run");
  bool met = true;
  for (const entry* e : which) {
    std::vector<outcome> runs;
    for (std::size_t seed = 1; seed <= o.seeds; ++seed)
      runs.push_back(e->run(
          {training, test, e->name, o.ranks, o.epochs, o.batch, o.hidden, seed, o.rate, isatty(STDERR_FILENO) != 0}));
    const summary accuracy = over(runs, [](const outcome& r) { return 100 * r.accuracy; });
    const summary loss = over(runs, [](const outcome& r) { return r.loss; });
    std::printf("%-16s %12.2f +- %4.2f %10.4f +- %.4f %11.1f %8.1f\n", e->name, accuracy.mean, accuracy.deviation,
                loss.mean, loss.deviation, over(runs, [](const outcome& r) { return r.bytes_per_step / 1000; }).mean,
                over(runs, [](const outcome& r) { return r.seconds; }).mean);
    std::fflush(stdout);
    met = met && accuracy.mean >= o.least;
  }
  if (!met) std::printf("\nan accuracy is below %g %%\n", o.least);
  return met ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    options o;
    table_of(o).parse(count, arguments);
    if (o.help) {
      options standard;
      std::printf(
          "usage: vision [OPTION...]\n\nTrains a small image classifier under several training strategies and seeds.\n"
          "Ends with status 0, 1 when something failed or was missed, 2 on a wrong option.\n\n%s",
          table_of(standard).help().c_str());
      return 0;
    }
    if (o.list) {
      for (const entry& e : strategies()) std::printf("%c %-16s %s\n", e.standard ? '*' : ' ', e.name, e.about);
      std::printf("\n* trained when no --strategy is given\n");
      return 0;
    }
    return compare(o);
  } catch (const examples::usage_error& e) {
    std::fprintf(stderr, "vision: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "vision: %s\n", e.what());
    return 1;
  }
}

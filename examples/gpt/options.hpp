// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The command line.

#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "../support/option_table.hpp"

namespace gpt {

using examples::usage_error;

struct options {
  std::vector<std::string> strategies;  // empty: the default ones
  std::string data;
  std::string report = "report.html";
  std::string save, resume;
  std::size_t ranks = 4;
  int shown_rank = 0;  // whose outcome this process shows
  std::size_t steps = 3000;
  std::size_t stop_after = 0;
  std::size_t batch = 16;
  std::size_t context = 64;
  std::size_t width = 64;
  std::size_t heads = 4;
  std::size_t layers = 2;
  std::size_t memory_layers = 16;
  std::size_t evaluate_every = 200;
  std::size_t seed = 1;
  double rate = 4e-3;
  double sgd_rate = 0.8;
  bool check = false, smoke = false, longer = false, list = false, help = false;

  /// The model and the run of --long: seven times through the text; with a batch of 16 it learns it by heart.
  void lengthen() {
    longer = true;
    layers = 4;
    width = context = 128;
    batch = std::max<std::size_t>(4, ranks);
    steps = 14000;
    evaluate_every = 1000;
  }

  /// Whether the bounds on the loss apply: they are stated for this size, these rates and this many steps.
  bool standard() const {
    options other;
    if (longer) other.lengthen();
    return ranks == other.ranks && steps == other.steps && batch == other.batch && context == other.context &&
           width == other.width && heads == other.heads && layers == other.layers && rate == other.rate &&
           sgd_rate == other.sgd_rate && !smoke;
  }
};

/// The table of options over one `options`, in the order of --help.
inline examples::option_table table_of(options& o) {
  examples::option_table t;
  t.names("strategy", "NAME,...",
          "what to train: names of --list, separated by commas; may be repeated (default: the "
          "five marked there and the memory pair)",
          o.strategies);
  t.flag("list", "print the names of all strategies and end", o.list);
  t.size("ranks", "number of ranks, each a thread; under mpirun it is the number of processes", o.ranks, 1, 64);
  t.size("steps", "training steps of each strategy", o.steps, 1, 1000000);
  t.size("batch", "sequences per step, over all ranks", o.batch, 1, 4096);
  t.size("context", "characters per sequence", o.context, 2, 1024);
  t.size("width", "width of the model", o.width, 4, 1024);
  t.size("heads", "attention heads; must divide the width", o.heads, 1, 64);
  t.size("layers", "transformer blocks", o.layers, 1, 64);
  t.real("rate", "highest learning rate of AdamW", o.rate);
  t.real("sgd-rate", "highest learning rate of momentum SGD", o.sgd_rate);
  t.size("seed", "of the initial values and of the data's order", o.seed, 0, 1000000);
  t.size("evaluate-every", "steps between two points of the loss curves", o.evaluate_every, 1, 1000000);
  t.size("memory-layers", "transformer blocks in the memory pair", o.memory_layers, 1, 64);
  t.text("data", "FILE", "the text to learn", o.data);
  t.text("report", "FILE", "where the report goes; empty for none", o.report);
  t.text("save", "DIR", "save the state of every strategy there when it ends or is interrupted", o.save);
  t.text("resume", "DIR", "continue from what --save wrote; the other options must be the same", o.resume);
  t.size("stop-after", "end each strategy after this step as if interrupted; 0 for never", o.stop_after, 0, 1000000);
  t.flag("check", "exit with status 1 when a bound on the loss is missed", o.check);
  t.flag("smoke", "a test of a few seconds: the loss falls, and all exact topologies agree", o.smoke);
  t.flag("long", "ring-adamw alone on a larger model: 4 layers, width 128, context 128, batch 4, 14000 steps "
         "(each can still be given)", o.longer);
  t.flag("help", "print this and end", o.help);
  return t;
}

/// Reads the command line. Where `processes` isn't 0, that is the number of ranks. Throws: usage_error.
inline options read_options(int count, char** arguments, const std::string& data, std::size_t processes = 0) {
  options o;
  o.data = data;
  if (processes) o.ranks = processes;
  options asked = o;
  table_of(asked).parse(count, arguments);
  if (asked.longer) {
    o.ranks = asked.ranks;
    o.lengthen();
    table_of(o).parse(count, arguments);  // what is given beside --long counts
    if (!o.strategies.empty()) throw usage_error("--long chooses the strategy itself; leave out --strategy");
    o.strategies = {"ring-adamw"};
  } else {
    o = asked;
  }
  if (processes && o.ranks != processes) {
    throw usage_error("--ranks is " + std::to_string(o.ranks) + ", and mpirun has started " +
                      std::to_string(processes) + " processes; leave it out");
  }
  if (o.width % o.heads != 0) {
    throw usage_error("--heads must divide --width, and " + std::to_string(o.heads) + " doesn't divide " +
                      std::to_string(o.width));
  }
  if (o.batch < o.ranks) {
    throw usage_error("--batch must be at least --ranks, and " + std::to_string(o.batch) + " is less than " +
                      std::to_string(o.ranks));
  }
  return o;
}

}  // namespace gpt

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Trains one small GPT under several training strategies and compares them.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "options.hpp"
#include "report.hpp"
#include "strategies.hpp"

#ifndef GPT_DATA
#define GPT_DATA "examples/data/tinyshakespeare/input.txt"
#endif

namespace {

std::atomic<bool> interrupted{false};

extern "C" void on_signal(int number) {
  interrupted.store(true, std::memory_order_relaxed);
  std::signal(number, SIG_DFL);  // a second one ends at once
}

const gpt::strategy_entry& find_strategy(const std::string& name) {
  const auto all = gpt::all_strategies();
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& e) { return e.name == name; });
  if (found == all.end()) throw gpt::usage_error("unknown strategy " + name + "; --list names all");
  return *found;
}

std::vector<const gpt::strategy_entry*> chosen(const gpt::options& o) {
  std::vector<const gpt::strategy_entry*> out;
  for (const auto& e : gpt::all_strategies()) {
    if (o.strategies.empty() && e.standard) out.push_back(&e);
  }
  for (const std::string& name : o.strategies) {
    const gpt::strategy_entry* e = &find_strategy(name);
    if (std::find(out.begin(), out.end(), e) == out.end()) out.push_back(e);
  }
  return out;
}

gpt::outcome run(const gpt::strategy_entry& e, const gpt::options& o, const gpt::corpus& text) {
  gpt::job j{o, text, interrupted, isatty(STDERR_FILENO) != 0, e.name, e.about, o.steps, o.layers};
  if (e.memory) {
    j.steps = std::min<std::size_t>(o.steps, 10);
    j.layers = o.memory_layers;
    j.timeline = true;
  }
  return e.run(j);
}

const gpt::outcome* find_outcome(const std::vector<gpt::outcome>& all, const char* name) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& o) { return name && o.name == name; });
  return found == all.end() ? nullptr : &*found;
}

/// Judges what was trained to the end by the bounds that apply.
void judge(std::vector<gpt::outcome>& all, const gpt::options& o) {
  for (gpt::outcome& mine : all) {
    const gpt::strategy_entry& e = find_strategy(mine.name);
    if (!mine.complete) continue;
    const double limit = o.longer ? 1.58 : e.limit;
    if (limit > 0 && o.standard())
      mine.verdicts.push_back({"<= " + gpt::text_of("%.2f", limit), mine.loss <= limit});
    const gpt::outcome* twin = find_outcome(all, e.twin);
    if (!twin || !twin->complete) continue;
    if (e.memory) {
      mine.verdicts.push_back({"same bits as " + twin->name, mine.loss == twin->loss});
      mine.verdicts.push_back({"less memory", mine.peak_bytes < twin->peak_bytes});
    } else if (o.standard()) {
      mine.verdicts.push_back(
          {"<= " + twin->name + " + " + gpt::text_of("%g", e.apart), mine.loss <= twin->loss + e.apart});
    }
  }
}

bool all_met(const std::vector<gpt::outcome>& all) {
  for (const gpt::outcome& o : all) {
    for (const gpt::verdict& v : o.verdicts) {
      if (!v.met) return false;
    }
  }
  return true;
}

/// A few seconds: the loss falls, and topologies that compute the same mean train the same model, up to rounding.
int smoke(gpt::options o, const gpt::corpus& text) {
  o.steps = 30;
  o.save.clear();
  o.resume.clear();
  bool good = true;
  const auto say = [&](const std::string& what, bool met) {
    std::printf("%-60s %s\n", what.c_str(), met ? "yes" : "NO");
    good = good && met;
  };
  const gpt::outcome ring = run(find_strategy("ring-adamw"), o, text);
  const double before = ring.curve.front().validation;
  say("ring-adamw: the loss falls from " + gpt::text_of("%.3f", before) + " to " + gpt::text_of("%.3f", ring.loss),
      ring.loss < before - 0.5);
  for (const char* name : {"halving-doubling", "torus-2d", "hierarchical", "direct", "native"}) {
    const auto is_it = [&](const gpt::strategy_entry& e) { return std::string_view(e.name) == name; };
    if (std::ranges::none_of(gpt::all_strategies(), is_it)) continue;  // native: on threads only
    const gpt::outcome other = run(find_strategy(name), o, text);
    say(std::string(name) + ": the loss is the ring's, " + gpt::text_of("%.6f", other.loss),
        std::abs(other.loss - ring.loss) < 2e-3);
  }
  for (const char* name : {"ring-sgd", "hierarchical-fp16", "dgc", "local-sgd", "direct-bf16"}) {
    const gpt::outcome other = run(find_strategy(name), o, text);
    say(std::string(name) + ": the loss falls to " + gpt::text_of("%.3f", other.loss), other.loss < before - 0.3);
  }
  const gpt::outcome full = run(find_strategy("memory-full"), o, text);
  const gpt::outcome less = run(find_strategy("memory-sqrt"), o, text);
  say("recomputation: the same bits with " + gpt::text_of_bytes(static_cast<double>(less.peak_bytes)) + " for " +
          gpt::text_of_bytes(static_cast<double>(full.peak_bytes)),
      less.loss == full.loss && less.peak_bytes < full.peak_bytes);
  return good ? 0 : 1;
}

std::string headline(const gpt::options& o, const gpt::corpus& text) {
  return "Tiny Shakespeare, " + std::to_string(text.vocabulary()) + " characters; a GPT of " +
         std::to_string(o.layers) + " layers, width " + std::to_string(o.width) + ", " + std::to_string(o.heads) +
         " heads, context " + std::to_string(o.context) + "; batch " + std::to_string(o.batch) + " over " +
         std::to_string(o.ranks) + " ranks (" + gpt::ranks_are + "), " + std::to_string(o.steps) + " steps, seed " +
         std::to_string(o.seed) + ". Losses are in nats per character on the last tenth of the text.";
}

/// Finds out before the training whether its results can be kept.
void prepare_files(const gpt::options& o, const std::vector<const gpt::strategy_entry*>& strategies) {
  if (!o.report.empty() && !std::ofstream(o.report, std::ios::app)) {
    throw gpt::usage_error("--report: cannot write " + o.report);
  }
  for (const gpt::strategy_entry* e : strategies) {
    std::error_code why;
    if (o.save.empty()) break;
    std::filesystem::create_directories(o.save + "/" + e->name, why);
    if (why) throw gpt::usage_error("--save: cannot make " + o.save + "/" + e->name + ": " + why.message());
  }
}

int compare(const gpt::options& o, const gpt::corpus& text) {
  const auto strategies = chosen(o);
  prepare_files(o, strategies);
  std::vector<gpt::outcome> all;
  std::printf("%s\n\n", headline(o, text).c_str());
  for (const gpt::strategy_entry* e : strategies) {
    if (interrupted) break;
    all.push_back(run(*e, o, text));
    std::printf("%-18s validation loss %.4f after %zu steps, %.1f s\n", e->name, all.back().loss, all.back().steps,
                all.back().seconds);
    std::fflush(stdout);
  }
  judge(all, o);
  std::printf("\n%s", gpt::text_table(all).c_str());
  if (interrupted) std::printf("\ninterrupted: the table holds what was done\n");
  if (!o.report.empty()) {
    std::ofstream page(o.report);
    page << gpt::html_report(headline(o, text), all);
    if (!page.flush()) throw std::runtime_error("cannot write " + o.report);
    std::printf("\nreport: %s\n", o.report.c_str());
  }
  if (!all_met(all)) std::printf("\na bound was missed\n");
  return o.check && (interrupted || !all_met(all)) ? 1 : 0;
}

}  // namespace

int main(int count, char** arguments) {
  try {
#ifdef GPT_MPI
    const auto world = heddle::mpi::world();  // MPI runs as long as this
    gpt::options o = gpt::read_options(count, arguments, GPT_DATA, static_cast<std::size_t>(world.size()));
    o.shown_rank = world.rank();
    if (world.rank() != 0) {  // rank 0 speaks for all
      o.report.clear();
      if (!std::freopen("/dev/null", "w", stdout)) throw std::runtime_error("cannot open /dev/null");
    }
#else
    const gpt::options o = gpt::read_options(count, arguments, GPT_DATA);
#endif
    if (o.help) {
      gpt::options standard;
      standard.data = GPT_DATA;
      std::printf(
          "usage: gpt [OPTION...]\n\nTrains one small GPT on a text under several training strategies and compares "
          "them.\nEnds with status 0, 1 when something failed or was missed, 2 on a wrong option.\n\n%s",
          gpt::table_of(standard).help().c_str());
      return 0;
    }
    if (o.list) {
      for (const auto& e : gpt::all_strategies()) std::printf("%c %-18s %s\n", e.standard ? '*' : ' ', e.name, e.about);
      std::printf("\n* trained when no --strategy is given\n");
      return 0;
    }
    chosen(o);  // a wrong name is an error before anything starts
    std::signal(SIGINT, on_signal);
    std::signal(SIGTERM, on_signal);
    const gpt::corpus text(o.data);
    gpt::check_length(text, o);
    return o.smoke ? smoke(o, text) : compare(o, text);
  } catch (const gpt::usage_error& e) {
    std::fprintf(stderr, "gpt: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpt: %s\n", e.what());
    return 1;
  }
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The command line: one table of options, from which parsing, checking and --help follow.

#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gpt {

/// A wrong option or value; the text is for the user.
struct usage_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

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
class option_table {
 public:
  explicit option_table(options& o) {
    names("strategy", "NAME,...",
          "what to train: names of --list, separated by commas; may be repeated (default: the "
          "five marked there and the memory pair)",
          o.strategies);
    flag("list", "print the names of all strategies and end", o.list);
    size("ranks", "number of ranks, each a thread; under mpirun it is the number of processes", o.ranks, 1, 64);
    size("steps", "training steps of each strategy", o.steps, 1, 1000000);
    size("batch", "sequences per step, over all ranks", o.batch, 1, 4096);
    size("context", "characters per sequence", o.context, 2, 1024);
    size("width", "width of the model", o.width, 4, 1024);
    size("heads", "attention heads; must divide the width", o.heads, 1, 64);
    size("layers", "transformer blocks", o.layers, 1, 64);
    real("rate", "highest learning rate of AdamW", o.rate);
    real("sgd-rate", "highest learning rate of momentum SGD", o.sgd_rate);
    size("seed", "of the initial values and of the data's order", o.seed, 0, 1000000);
    size("evaluate-every", "steps between two points of the loss curves", o.evaluate_every, 1, 1000000);
    size("memory-layers", "transformer blocks in the memory pair", o.memory_layers, 1, 64);
    text("data", "FILE", "the text to learn", o.data);
    text("report", "FILE", "where the report goes; empty for none", o.report);
    text("save", "DIR", "save the state of every strategy there when it ends or is interrupted", o.save);
    text("resume", "DIR", "continue from what --save wrote; the other options must be the same", o.resume);
    size("stop-after", "end each strategy after this step as if interrupted; 0 for never", o.stop_after, 0, 1000000);
    flag("check", "exit with status 1 when a bound on the loss is missed", o.check);
    flag("smoke", "a test of a few seconds: the loss falls, and all exact topologies agree", o.smoke);
    flag("long", "ring-adamw alone on a larger model: 4 layers, width 128, context 128, batch 4, 14000 steps "
         "(each can still be given)", o.longer);
    flag("help", "print this and end", o.help);
  }

  void parse(int count, char** arguments) {
    for (int i = 1; i < count; ++i) {
      const std::string_view argument = arguments[i];
      const std::size_t equals = argument.find('=');
      const entry& e = find(argument.substr(0, equals));
      if (e.placeholder.empty()) {
        if (equals != argument.npos) throw usage_error("--" + e.name + " takes no value");
        e.set("");
      } else if (equals != argument.npos) {
        e.set(std::string(argument.substr(equals + 1)));
      } else if (i + 1 < count) {
        e.set(arguments[++i]);
      } else {
        throw usage_error("--" + e.name + " needs a value: --" + e.name + " " + e.placeholder);
      }
    }
  }

  std::string help() const {
    std::string out;
    for (const entry& e : entries_) {
      std::string left = "  --" + e.name + (e.placeholder.empty() ? "" : " " + e.placeholder);
      left.resize(std::max<std::size_t>(left.size() + 2, 26), ' ');
      std::string line = left;
      std::string rest = e.help + e.standard;
      while (!rest.empty()) {  // wrap at 100 columns
        const bool fits = rest.size() <= 100 - left.size();
        const std::size_t cut = fits ? rest.size() : rest.rfind(' ', 100 - left.size());
        out += line + rest.substr(0, cut) + "\n";
        rest = fits ? "" : rest.substr(cut + 1);
        line.assign(left.size(), ' ');
      }
    }
    return out;
  }

 private:
  struct entry {
    std::string name, placeholder, help, standard;
    std::function<void(const std::string&)> set;
  };

  const entry& find(std::string_view argument) const {
    for (const entry& e : entries_) {
      if (argument == "--" + e.name) return e;
    }
    throw usage_error("unknown option " + std::string(argument));
  }

  void flag(const char* name, const char* help, bool& to) {
    entries_.push_back({name, "", help, "", [&to](const std::string&) { to = true; }});
  }

  void text(const char* name, const char* placeholder, const char* help, std::string& to) {
    const std::string standard = to.empty() ? "" : " (default: " + to + ")";
    entries_.push_back({name, placeholder, help, standard, [&to](const std::string& value) { to = value; }});
  }

  void names(const char* name, const char* placeholder, const char* help, std::vector<std::string>& to) {
    entries_.push_back({name, placeholder, help, "", [&to, name](const std::string& value) {
                          for (std::size_t at = 0; at <= value.size();) {
                            const std::size_t end = std::min(value.find(',', at), value.size());
                            if (end == at)
                              throw usage_error(std::string("--") + name + " has an empty name in '" + value + "'");
                            to.push_back(value.substr(at, end - at));
                            at = end + 1;
                          }
                        }});
  }

  template <class Number>
  static Number number(const std::string& name, const std::string& value, Number least, Number most, const char* kind) {
    Number out{};
    const auto [end, fault] = std::from_chars(value.data(), value.data() + value.size(), out);
    if (fault != std::errc{} || end != value.data() + value.size() || !(out >= least && out <= most)) {
      throw usage_error("--" + name + " must be " + kind + ", not '" + value + "'");
    }
    return out;
  }

  void size(const char* name, const char* help, std::size_t& to, std::size_t least, std::size_t most) {
    const std::string kind = "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
    entries_.push_back({name, "N", help, " (default: " + std::to_string(to) + ")",
                        [=, &to](const std::string& value) { to = number(name, value, least, most, kind.c_str()); }});
  }

  void real(const char* name, const char* help, double& to) {
    std::string standard = std::to_string(to);
    while (standard.back() == '0') standard.pop_back();
    entries_.push_back({name, "X", help, " (default: " + standard + ")", [=, &to](const std::string& value) {
                          to = number(name, value, 1e-9, 1e3, "a number from 1e-9 to 1000");
                        }});
  }

  std::vector<entry> entries_;
};

/// Reads the command line. Where `processes` isn't 0, that is the number of ranks. Throws: usage_error.
inline options read_options(int count, char** arguments, const std::string& data, std::size_t processes = 0) {
  options o;
  o.data = data;
  if (processes) o.ranks = processes;
  options asked = o;
  option_table(asked).parse(count, arguments);
  if (asked.longer) {
    o.ranks = asked.ranks;
    o.lengthen();
    option_table(o).parse(count, arguments);  // what is given beside --long counts
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

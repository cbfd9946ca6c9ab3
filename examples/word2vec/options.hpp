// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <charconv>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace word2vec {

/// A wrong option or value; the text is for the user.
struct usage_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct options {
  std::string train, output, analogies, similarities, nearest, mode = "hogwild";
  std::uint64_t size = 100, window = 5, negative = 5, min_count = 5, epochs = 5, threads = 2, seed = 1,
                restrict_to = 30000;
  double sample = 1e-4, rate = 0.0;  // 0: 0.025, or 0.05 with --cbow
  bool cbow = false, binary = false, check = false, help = false;
};

/// The command line: one table, from which parsing and --help follow.
class option_table {
 public:
  explicit option_table(options& o) {
    text("train", "FILE", "the text: words between white space; lines are sentences", o.train);
    text("output", "FILE", "where the vectors go, in word2vec's format", o.output);
    flag("binary", "write the binary form of it", o.binary);
    text("mode", "NAME", "how threads train: hogwild, hogwild-relaxed, hogwild-fetch-add", o.mode);
    flag("cbow", "predict a word from the mean of its neighbours instead of from each (skip-gram)", o.cbow);
    number("size", "of a vector", o.size, 1, 4096);
    number("window", "most words on either side", o.window, 1, 1000);
    number("negative", "words drawn to be told apart", o.negative, 1, 100);
    real("sample", "frequent words are left out with this threshold; 0: never", o.sample, 0.0, 1.0);
    number("min-count", "rarer words don't count", o.min_count, 1, 1000000000);
    number("epochs", "times through the text", o.epochs, 1, 1000000);
    number("threads", "that share the vectors; 1 gives the same result in every run", o.threads, 1, 1024);
    real("rate", "learning rate at the start; 0: 0.025, with --cbow 0.05", o.rate, 0.0, 1.0);
    number("seed", "of the initial values and of what is drawn", o.seed, 0, ~std::uint64_t{0});
    text("analogies", "FILE", "judge the vectors by questions a : b = c : d, one a line", o.analogies);
    text("similarities", "FILE", "judge them by pairs of words with people's scores, as CSV", o.similarities);
    number("restrict", "commonest words that the analogies are asked about", o.restrict_to, 1, 1000000000);
    text("nearest", "WORD,...", "show the nearest neighbours of these words", o.nearest);
    flag("check", "train on the text shipped with this program; status 1 if it doesn't learn", o.check);
    flag("help", "print this and end", o.help);
  }

  void parse(int count, char** arguments) {
    for (int i = 1; i < count; ++i) {
      const std::string_view argument = arguments[i];
      const std::size_t equals = argument.find('=');
      const entry& e = find(argument.substr(0, equals));
      if (e.placeholder.empty() && equals == argument.npos)
        e.set("");
      else if (e.placeholder.empty())
        throw usage_error("--" + e.name + " takes no value");
      else if (equals != argument.npos)
        e.set(std::string(argument.substr(equals + 1)));
      else if (i + 1 < count)
        e.set(arguments[++i]);
      else
        throw usage_error("--" + e.name + " needs a value: --" + e.name + " " + e.placeholder);
    }
  }
  std::string help() const {
    std::string out = "word2vec --train FILE [OPTIONS]\n";
    for (const entry& e : entries_) {
      std::string left = "  --" + e.name + " " + e.placeholder;
      left.resize(left.size() < 24 ? 24 : left.size() + 1, ' ');
      out += left + e.help + "\n";
    }
    return out;
  }

 private:
  struct entry {
    std::string name, placeholder, help;
    std::function<void(const std::string&)> set;
  };

  const entry& find(std::string_view argument) const {
    for (const entry& e : entries_) {
      if (argument == "--" + e.name) return e;
    }
    throw usage_error("unknown option " + std::string(argument));
  }
  void flag(const char* name, const char* help, bool& to) {
    entries_.push_back({name, "", help, [&to](const std::string&) { to = true; }});
  }
  void text(const char* name, const char* placeholder, const char* help, std::string& to) {
    entries_.push_back({name, placeholder, help, [&to](const std::string& value) { to = value; }});
  }
  template <class Number> void value(const char* name, const char* help, Number& to, Number least, Number most) {
    entries_.push_back({name, "X", help, [=, &to](const std::string& text) {
                          Number x{};
                          const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), x);
                          if (fault != std::errc{} || end != text.data() + text.size() || !(x >= least && x <= most)) {
                            throw usage_error(std::string("--") + name + " is '" + text + "', allowed is " +
                                              std::to_string(least) + " to " + std::to_string(most));
                          }
                          to = x;
                        }});
  }
  void number(const char* name, const char* help, std::uint64_t& to, std::uint64_t least, std::uint64_t most) {
    value(name, help, to, least, most);
  }
  void real(const char* name, const char* help, double& to, double least, double most) {
    value(name, help, to, least, most);
  }

  std::vector<entry> entries_;
};

}  // namespace word2vec

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The command line of an example: one table of options, from which parsing, checking and --help follow.

#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace examples {

/// A wrong option or value; the text is for the user.
struct usage_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Options over variables, which hold their defaults, in the order of --help.
class option_table {
 public:
  /// --name, without a value.
  void flag(const char* name, const char* help, bool& to) {
    entries_.push_back({name, "", help, "", [&to](const std::string&) { to = true; }});
  }

  /// --name TEXT.
  void text(const char* name, const char* operand, const char* help, std::string& to) {
    const std::string standard = to.empty() ? "" : " (default: " + to + ")";
    entries_.push_back({name, operand, help, standard, [&to](const std::string& value) { to = value; }});
  }

  /// --name NAME,NAME,... which may be repeated.
  void names(const char* name, const char* operand, const char* help, std::vector<std::string>& to) {
    entries_.push_back({name, operand, help, "", [&to, name](const std::string& value) {
                          for (std::size_t at = 0; at <= value.size();) {
                            const std::size_t end = std::min(value.find(',', at), value.size());
                            if (end == at)
                              throw usage_error(std::string("--") + name + " has an empty name in '" + value + "'");
                            to.push_back(value.substr(at, end - at));
                            at = end + 1;
                          }
                        }});
  }

  /// --name N, a whole number within bounds.
  void size(const char* name, const char* help, std::size_t& to, std::size_t least, std::size_t most) {
    const std::string kind = "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
    entries_.push_back({name, "N", help, " (default: " + std::to_string(to) + ")",
                        [=, &to](const std::string& value) { to = number(name, value, least, most, kind.c_str()); }});
  }

  /// --name X, a number within bounds.
  void real(const char* name, const char* help, double& to, double least = 1e-9, double most = 1000) {
    const auto shown = [](double x) {
      char text[32];
      return std::string(text, std::to_chars(text, text + sizeof text, x).ptr);
    };
    const std::string kind = "a number from " + shown(least) + " to " + shown(most);
    entries_.push_back({name, "X", help, " (default: " + shown(to) + ")",
                        [=, &to](const std::string& value) { to = number(name, value, least, most, kind.c_str()); }});
  }

  /// Sets what the arguments say. Throws: usage_error.
  void parse(int count, char** arguments) {
    for (int i = 1; i < count; ++i) {
      const std::string_view argument = arguments[i];
      const std::size_t equals = argument.find('=');
      const entry& e = find(argument.substr(0, equals));
      if (e.operand.empty()) {
        if (equals != argument.npos) throw usage_error("--" + e.name + " takes no value");
        e.set("");
      } else if (equals != argument.npos) {
        e.set(std::string(argument.substr(equals + 1)));
      } else if (i + 1 < count) {
        e.set(arguments[++i]);
      } else {
        throw usage_error("--" + e.name + " needs a value: --" + e.name + " " + e.operand);
      }
    }
  }

  /// The table as text.
  std::string help() const {
    std::string out;
    for (const entry& e : entries_) {
      std::string left = "  --" + e.name + (e.operand.empty() ? "" : " " + e.operand);
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
    std::string name, operand, help, standard;
    std::function<void(const std::string&)> set;
  };

  const entry& find(std::string_view argument) const {
    for (const entry& e : entries_) {
      if (argument == "--" + e.name) return e;
    }
    throw usage_error("unknown option " + std::string(argument));
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

  std::vector<entry> entries_;
};

}  // namespace examples

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>

namespace heddle {
inline namespace v0 {

/// @brief The cost of a link: a message of n bytes takes alpha + beta n seconds.
struct link_cost {
  double alpha = 0.0;  ///< Seconds per message, 0 or above.
  double beta = 0.0;   ///< Seconds per byte, 0 or above.

  /// Equality.
  constexpr bool operator==(const link_cost& o) const = default;
};

/// @brief Who divides the bandwidth of a link among the messages of one time.
enum class sharing {
  pair,  ///< Nobody: each pair of ranks has its own link, in each direction.
  rank,  ///< Each rank sends, and receives, through one port.
  node   ///< The ranks of a machine send, and receive, through one port.
};

/// @brief What messages between two ranks of one kind cost.
struct link_class {
  link_cost cost{};                ///< Seconds per message and per byte.
  sharing shared = sharing::rank;  ///< Who divides the bandwidth.
  /// Seconds that the first message of a call from one rank to another takes longer, if it is a long one: the receiver
  /// is asked. What is short is sent at once, and pays no more than its own bytes once more.
  double first = 0.0;
  static constexpr std::size_t distances = 16;  ///< As many as `far` has.
  /// By which factor a byte takes longer than beta between two ranks (or machines) that are 2^k to 2^(k + 1) - 1 apart,
  /// counted around, if all send that far at once: what links inside a network that messages share cost. The last one
  /// is for all that are further apart.
  std::array<double, distances> far = no_distance();
  /// By which factors alpha and beta are other than `cost` if only 2^(k + 1) to 2^(k + 2) - 1 ranks of a machine (or
  /// machines) take part: fewer share caches, switches and the library's own work. The last one is for all above.
  std::array<link_cost, distances> sized = no_size();

  /// Equality.
  constexpr bool operator==(const link_class& o) const {
    return cost == o.cost && shared == o.shared && first == o.first && far == o.far && sized == o.sized;
  }
  /// The factor between a and b of `places` ranks, or machines, that stand around; 1 for one and itself.
  constexpr double factor(int a, int b, int places) const noexcept {
    const int apart = a < b ? b - a : a - b, around = (std::min)(apart, (std::max)(places - apart, 0));
    const auto bits = static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(around)));
    return bits ? far[(std::min)(bits, distances) - 1] : 1.0;
  }
  /// The factors among `places` ranks, or machines.
  constexpr const link_cost& among(int places) const noexcept {
    const auto bits = static_cast<std::size_t>(std::bit_width(static_cast<unsigned>((std::max)(places, 2))));
    return sized[(std::min)(bits - 1, distances) - 1];
  }
  /// Factors of 1.
  static constexpr std::array<link_cost, distances> no_size() noexcept {
    std::array<link_cost, distances> all{};
    all.fill({1.0, 1.0});
    return all;
  }
  /// Factors of 1.
  static constexpr std::array<double, distances> no_distance() noexcept {
    std::array<double, distances> all{};
    all.fill(1.0);
    return all;
  }
  /// What the first message of a call pays for that.
  constexpr double ask(double bytes) const noexcept { return (std::min)(first, cost.beta * bytes); }
};

/// @brief What communication and reduction cost on a cluster: a value that a model of it reads.
///
/// Measure it with `calibrate`, write down what you know, or load what was saved. Ranks that choose by it must hold the
/// same value, as those that `calibrate` returns.
struct links {
  link_class intra{};  ///< Between ranks of one machine.
  link_class inter{};  ///< Between machines.
  double gamma = 0.0;  ///< Seconds per byte that a rank reduces into its buffer, 0 or above.
  int node = 0;        ///< Ranks of one machine, consecutive ones; 0: all are on one.

  /// Equality.
  constexpr bool operator==(const links&) const = default;

  /// The machine of a rank.
  constexpr int node_of(int rank) const noexcept { return node > 0 ? rank / node : 0; }
  /// The kind of link between two ranks.
  constexpr const link_class& between(int a, int b) const noexcept { return node_of(a) == node_of(b) ? intra : inter; }
  /// Seconds per message between two of `size` ranks that all take part.
  constexpr double alpha(int a, int b, int size) const noexcept {
    if (node_of(a) != node_of(b)) return inter.cost.alpha * inter.among(node_of(size - 1) + 1).alpha;
    return intra.cost.alpha * intra.among(near(size)).alpha;
  }
  /// Seconds per byte between two of `size` ranks that all take part.
  constexpr double beta(int a, int b, int size) const noexcept {
    const int x = node_of(a), y = node_of(b), machines = node_of(size - 1) + 1;
    if (x != y) return inter.cost.beta * inter.among(machines).beta * inter.factor(x, y, machines);
    return intra.cost.beta * intra.among(near(size)).beta * intra.factor(a, b, near(size));
  }

  /// Throws argument_error if a cost is negative or not a number, or `node` is negative.
  void check() const {
    for (const double x :
         {intra.cost.alpha, intra.cost.beta, intra.first, inter.cost.alpha, inter.cost.beta, inter.first, gamma}) {
      if (!(x >= 0.0 && x < std::numeric_limits<double>::infinity())) {
        throw argument_error("heddle::links: a cost of " + std::to_string(x) + " s, allowed is 0 or above");
      }
    }
    for (const link_class* c : {&intra, &inter}) {
      for (const double x : c->far) {
        if (!(x > 0.0 && x < std::numeric_limits<double>::infinity()))
          throw argument_error("heddle::links: a factor of " + std::to_string(x) + ", allowed is above 0");
      }
      for (const link_cost& f : c->sized) {
        for (const double x : {f.alpha, f.beta}) {
          if (!(x > 0.0 && x < std::numeric_limits<double>::infinity()))
            throw argument_error("heddle::links: a factor of " + std::to_string(x) + ", allowed is above 0");
        }
      }
    }
    if (node < 0) throw argument_error("heddle::links: node is " + std::to_string(node) + ", allowed is 0 or more");
  }

  /// @brief The table as text: for each kind of link alpha, beta, who shares it, first, far, sized; gamma and node.
  /// Numbers read back as the same bits.
  std::string text() const {
    std::string out = "heddle-links 4\n";
    const auto number = [&out](auto x) {
      char digits[32];
      out.append(1, ' ').append(digits, std::to_chars(digits, digits + sizeof digits, x).ptr);
    };
    for (const bool outside : {false, true}) {
      const link_class& c = outside ? inter : intra;
      out += outside ? "inter" : "intra";
      number(c.cost.alpha);
      number(c.cost.beta);
      out.append(1, ' ').append(names[static_cast<std::size_t>(c.shared)]);
      number(c.first);
      for (const double x : c.far) number(x);
      for (const link_cost& f : c.sized) number(f.alpha), number(f.beta);
      out += '\n';
    }
    number((out += "gamma", gamma));
    number((out += "\nnode", node));
    return out += '\n';
  }

  /// @brief The table that `text` wrote, or that of version 3, which knew no `sized`.
  /// Throws: file_error on anything else.
  static links parse(std::string_view table) {
    const std::string_view all = table;
    const auto word = [&table] {
      table.remove_prefix((std::min)(table.find_first_not_of(" \n"), table.size()));
      const std::string_view w = table.substr(0, table.find_first_of(" \n"));
      table.remove_prefix(w.size());
      return w;
    };
    const auto refuse = [&](std::string_view found, const std::string& wanted) {
      const auto before = all.substr(0, all.size() - table.size() - found.size());
      const std::string line = std::to_string(1 + std::count(before.begin(), before.end(), '\n'));
      throw file_error("heddle::links: " + (found.empty() ? "the end" : "'" + std::string(found.substr(0, 40)) + "'") +
                       " in line " + line + " of the table instead of " + wanted);
    };
    const auto expect = [&](std::string_view what) {
      if (const std::string_view w = word(); w != what) refuse(w, what.empty() ? "the end" : std::string(what));
    };
    const auto number = [&](auto& x) {
      const std::string_view w = word();
      const auto end = std::from_chars(w.data(), w.data() + w.size(), x);
      if (end.ec != std::errc{} || end.ptr != w.data() + w.size()) refuse(w, "a number");
    };
    links l;
    expect("heddle-links");
    const std::string_view version = word();
    if (version != "3" && version != "4") refuse(version, "3 or 4");
    for (const bool outside : {false, true}) {
      link_class& c = outside ? l.inter : l.intra;
      expect(outside ? "inter" : "intra");
      number(c.cost.alpha);
      number(c.cost.beta);
      const std::string_view who = word();
      std::size_t k = 0;
      while (k < 3 && who != names[k]) ++k;
      if (k == 3) refuse(who, "pair, rank or node");
      c.shared = static_cast<sharing>(k);
      number(c.first);
      for (double& x : c.far) number(x);
      if (version == "3") continue;
      for (link_cost& f : c.sized) number(f.alpha), number(f.beta);
    }
    expect("gamma");
    number(l.gamma);
    expect("node");
    number(l.node);
    expect("");
    try {
      l.check();
    } catch (const argument_error& e) {
      throw file_error(std::string(e.what()) + ", in the table");
    }
    return l;
  }

  /// Writes the table to a file. Throws file_error.
  void save(const std::string& path) const {
    const std::string all = text();
    std::FILE* const f = std::fopen(path.c_str(), "w");
    const bool written = f && std::fwrite(all.data(), 1, all.size(), f) == all.size();
    if ((f && std::fclose(f) != 0) || !written) throw file_error("heddle::links: can't write " + path);
  }
  /// Reads a table from a file. Throws file_error naming the file.
  static links load(const std::string& path) {
    std::FILE* const f = std::fopen(path.c_str(), "r");
    if (!f) throw file_error("heddle::links: can't read " + path);
    char some[8192];
    const std::size_t n = std::fread(some, 1, sizeof some, f);
    const bool whole = n < sizeof some && !std::ferror(f);
    std::fclose(f);
    if (!whole) throw file_error("heddle::links: can't read " + path + ", or it is too long for a table");
    try {
      return parse({some, n});
    } catch (const file_error& e) {
      throw file_error(std::string(e.what()) + ", in " + path);
    }
  }

 private:
  // Ranks on a machine, of `size` ranks.
  constexpr int near(int size) const noexcept { return node > 0 ? (std::min)(node, size) : size; }

  static constexpr std::string_view names[] = {"pair", "rank", "node"};
};

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Plans memory offline: reads buffers with their lifetimes (MiniMalloc's CSV), looks for offsets with the lowest peak,
// writes them, and draws the map.

#include <heddle/memory/lifetimes_csv.hpp>
#include <heddle/memory/memory_map.hpp>
#include <heddle/memory/search_plan.hpp>

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace {

constexpr const char* usage =
    "usage: planner FILE [OPTION...]\n\n"
    "Places the buffers of FILE (columns id, lower, upper, size and, optionally, alignment and gaps) so that buffers\n"
    "that are live at once don't overlap, in as few bytes as it can, and prints each better plan.\n"
    "Ends with status 0, 1 when --target was missed or a file can't be read or written, 2 on a wrong option.\n\n"
    "  --target BYTES   stop as soon as the peak is this low (default: the lowest there is)\n"
    "  --seconds X      stop after this time (default: 10)\n"
    "  --seed N         of the search's restarts (default: 1)\n"
    "  --output FILE    write the buffers with their offsets there\n"
    "  --map FILE       draw the plan there, as SVG\n"
    "  --help           print this and end\n";

struct usage_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct options {
  std::string input, output, map;
  heddle::search_limits limits{.seconds = 10};
  bool help = false;
};

template <class Number> Number number(std::string_view name, std::string_view text) {
  Number out{};
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (fault != std::errc{} || end != text.data() + text.size() || !(out >= Number{})) {
    throw usage_error(std::string(name) + " takes a number of 0 or above, not '" + std::string(text) + "'");
  }
  return out;
}

options read_options(int count, char** arguments) {
  options o;
  for (int i = 1; i < count; ++i) {
    const std::string_view name = arguments[i];
    const auto value = [&]() -> std::string_view {
      if (i + 1 == count) throw usage_error(std::string(name) + " needs a value");
      return arguments[++i];
    };
    if (name == "--help")
      o.help = true;
    else if (name == "--target")
      o.limits.target = number<std::size_t>(name, value());
    else if (name == "--seconds")
      o.limits.seconds = number<double>(name, value());
    else if (name == "--seed")
      o.limits.seed = number<std::uint64_t>(name, value());
    else if (name == "--output")
      o.output = value();
    else if (name == "--map")
      o.map = value();
    else if (name.starts_with("-"))
      throw usage_error("unknown option " + std::string(name));
    else if (o.input.empty())
      o.input = name;
    else
      throw usage_error("one file at a time, not also " + std::string(name));
  }
  if (o.input.empty() && !o.help) throw usage_error("no file was given; --help says more");
  return o;
}

// Throws unless a file can be written there, and leaves there what it found. Better now than after the search.
void check_writable(const char* option, const std::string& path) {
  if (path.empty()) return;
  std::error_code ignored;
  const std::filesystem::file_status before = std::filesystem::status(path, ignored);
  if (std::filesystem::is_other(before)) return;  // a pipe or a device would notice
  errno = 0;
  if (!std::ofstream(path, std::ios::app)) {
    throw std::runtime_error(std::string(option) + " can't write " + path + " (" +
                             std::generic_category().message(errno) +
                             "); it takes a file that is new or may be changed, in a folder that exists");
  }
  if (!std::filesystem::exists(before)) std::filesystem::remove(std::filesystem::canonical(path, ignored), ignored);
}

template <class Write> void write_file(const std::string& path, Write&& write) {
  if (path.empty()) return;
  std::ofstream file(path);
  if (file) write(file);
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

int plan(const options& o) {
  std::ifstream file(o.input);
  if (!file) throw std::runtime_error("cannot read " + o.input);
  check_writable("--output", o.output);
  check_writable("--map", o.map);
  const heddle::lifetime_table table = heddle::read_lifetimes(file);
  const std::span<const heddle::lifetime> lifetimes(table.lifetimes);
  std::printf("%zu buffers\n\n%9s %14s %14s %8s\n", table.names.size(), "seconds", "peak", "lower bound", "gap");
  const auto start = std::chrono::steady_clock::now();
  const auto row = [&](const heddle::memory_plan& p) {
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - start;
    std::printf("%9.3f %14zu %14zu %7.2f%%\n", since.count(), p.peak, p.lower_bound, 100 * p.gap());
    if (isatty(STDOUT_FILENO)) std::fflush(stdout);
  };
  const heddle::memory_plan best = heddle::search_plan(lifetimes, o.limits, row);
  if (!heddle::is_valid(best, lifetimes)) throw std::logic_error("the plan is not valid");
  std::printf("\n");
  row(best);
  std::printf("%s\n", best.optimal() ? "no plan has a lower peak" : "a lower peak may exist");
  write_file(o.output, [&](std::ostream& out) { heddle::write_lifetimes(out, table, best); });
  write_file(o.map, [&](std::ostream& out) { heddle::write_memory_map(out, best, lifetimes); });
  if (o.limits.target && best.peak > o.limits.target) {
    std::printf("the target was missed\n");
    return 1;
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const options o = read_options(count, arguments);
    if (o.help) {
      std::fputs(usage, stdout);
      return 0;
    }
    return plan(o);
  } catch (const usage_error& e) {
    std::fprintf(stderr, "planner: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "planner: %s\n", e.what());
    return 1;
  }
}

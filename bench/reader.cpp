// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: the multi-queue reader, bytes per second of processor time, against a loop of read() and memchr, and one of
// getline, strtok and strtod driver: script

// bench/reader.sh runs this. The files are in the system's cache, so the disk doesn't count.
#include <heddle/data/reader.hpp>
#include <heddle/data/sparse.hpp>
#include <heddle/data/text.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>

namespace hd = heddle;

namespace {

constexpr std::size_t bytes = 64 << 20;

// Lines of about 100 bytes.
void write_lines(const std::string& path) {
  std::string text;
  for (std::size_t i = 0; text.size() < bytes; ++i) {
    text.append(40 + hd::philox(1, 0, i).word[0] % 120, 'a');
    text += '\n';
  }
  std::ofstream(path, std::ios::binary) << text;
}

// Rows of 20 features of about 10 bytes.
void write_rows(const std::string& path) {
  std::string text;
  for (std::size_t i = 0; text.size() < bytes; ++i) {
    text += i % 2 ? "+1" : "-1";
    for (std::uint32_t k = 0; k < 20; ++k) {
      const auto random = hd::philox(2, k, i);
      text += ' ' + std::to_string(random.word[0] % 1000000) + ':' +
              std::to_string(random.word[1] % 1000 * 0.001).substr(0, 5);
    }
    text += '\n';
  }
  std::ofstream(path, std::ios::binary) << text;
}

template <class Format> std::size_t ours(Format format, const std::string& path, const hd::reader_options& o) {
  hd::multi_queue_reader reader(format, {path}, o);
  typename Format::batch b;
  std::size_t records = 0;
  while (reader.pop(0, b)) records += b.size();
  return records;
}

// The least that finds every record.
std::size_t read_and_memchr(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY);
  std::vector<char> text(1 << 18);
  std::size_t records = 0;
  for (ssize_t n; (n = ::read(file, text.data(), text.size())) > 0;) {
    const char *p = text.data(), *const end = p + n;
    while ((p = static_cast<const char*>(std::memchr(p, '\n', static_cast<std::size_t>(end - p))))) {
      ++records;
      if (++p == end) break;
    }
  }
  ::close(file);
  return records;
}

// As programs read this format.
std::size_t getline_and_strtod(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "r");
  char* line = nullptr;
  std::size_t room = 0, records = 0;
  std::vector<std::uint64_t> indices;
  std::vector<float> values;
  while (::getline(&line, &room, file) > 0) {
    const char* label = std::strtok(line, " \t\n");
    values.push_back(static_cast<float>(std::strtod(label, nullptr)));
    while (const char* index = std::strtok(nullptr, ":")) {
      const char* const value = std::strtok(nullptr, " \t");
      if (!value) break;
      indices.push_back(std::strtoull(index, nullptr, 10));
      values.push_back(static_cast<float>(std::strtod(value, nullptr)));
    }
    if (++records % 1024 == 0) indices.clear(), values.clear();
  }
  std::free(line);
  std::fclose(file);
  return records;
}

// Processor time of all threads: what reading takes from those who train.
template <class Function> double seconds(std::size_t expected, Function f) {
  const std::clock_t start = std::clock();
  if (f() != expected) {
    std::fprintf(stderr, "reader: another number of records\n");
    std::exit(1);
  }
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

template <class Ours, class Other> void compare(const char* name, std::size_t size, int repetitions, Ours a, Other b) {
  std::vector<double> mine, theirs, ratio;
  const std::size_t records = b();
  for (int i = 0; i < repetitions; ++i) {
    mine.push_back(seconds(records, a));
    theirs.push_back(seconds(records, b));
    ratio.push_back(theirs.back() / mine.back());
  }
  const auto median = [](std::vector<double>& x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
  };
  const double gigabytes = static_cast<double>(size) * 1e-9;
  std::printf("RATIO %s %.3f %.3f GB/s %.3f\n", name, gigabytes / median(mine), gigabytes / median(theirs),
              median(ratio));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  const int repetitions = argc > 2 ? std::atoi(argv[2]) : 7;
  const std::string lines = folder + "/lines", rows = folder + "/rows";
  write_lines(lines);
  write_rows(rows);
  const std::size_t line_bytes = std::filesystem::file_size(lines), row_bytes = std::filesystem::file_size(rows);
  const auto floor = [&] { return read_and_memchr(lines); };
  compare("lines", line_bytes, repetitions, [&] { return ours(hd::lines{}, lines, {.readers = 1}); }, floor);
  compare(
      "lines.unhashed", line_bytes, repetitions,
      [&] { return ours(hd::lines{}, lines, {.readers = 1, .hash = false}); }, floor);
  const auto peer = [&] { return getline_and_strtod(rows); };
  compare("libsvm", row_bytes, repetitions, [&] { return ours(hd::libsvm{}, rows, {.readers = 1}); }, peer);
}

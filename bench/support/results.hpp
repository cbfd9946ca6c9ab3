// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// What benchmarks that compare other things than Google Benchmark's times have in common: lines and a file of figures.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

namespace bench {

inline double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.size() % 2 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

/// Of this thread: other programs on the machine don't count.
inline double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// The comparisons of one program.
class results {
 public:
  /// Prints RATIO <name> <ours> <other> <unit> <other / ours>: for figures of which less is better.
  void ratio(std::string name, double ours, double other, std::string unit) {
    std::printf("RATIO %s %.10g %.10g %s %.4f\n", name.c_str(), ours, other, unit.c_str(), other / ours);
    std::fflush(stdout);
    rows_.push_back({std::move(name), std::move(unit), ours, other});
  }

  /// Writes all of them; whether that worked.
  bool write(const char* path) const {
    std::FILE* const file = std::fopen(path, "w");
    if (!file) {
      std::fprintf(stderr, "cannot write %s\n", path);
      return false;
    }
    std::fprintf(file, "{\"benchmarks\": [");
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const row& r = rows_[i];
      std::fprintf(file,
                   "%s\n  {\"name\": \"%s\", \"ours\": %.10g, \"other\": %.10g, \"unit\": \"%s\", \"ratio\": %.4f}",
                   i ? "," : "", r.name.c_str(), r.ours, r.other, r.unit.c_str(), r.other / r.ours);
    }
    std::fprintf(file, "\n]}\n");
    return std::fclose(file) == 0;
  }

 private:
  struct row {
    std::string name, unit;
    double ours, other;
  };
  std::vector<row> rows_;
};

}  // namespace bench

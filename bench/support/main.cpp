// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// The main function of every benchmark: Google Benchmark's own output, then one line per comparison
//
//     RATIO <case> <ours> <peer-or-floor> <unit> <ratio>
//
// A benchmark whose name has the segment "ours" ("cast/ours/4096") is compared with each one that has "peer..." or
// "floor..." in the same place ("cast/peer_gloo/4096", "cast/floor_memcpy/4096"). Medians are compared; in GB/s where
// the benchmark sets bytes processed, in time otherwise. A ratio above 1 is better than the peer or the floor.
// A benchmark that skips itself becomes "SKIP <case> <why>".
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace {

// Up to 1.7 a run has error_occurred, later it has skipped.
template <class Run>
bool was_skipped(const Run& run) {
  if constexpr (requires { run.error_occurred; }) {
    return run.error_occurred;
  } else {
    return static_cast<bool>(run.skipped);
  }
}

template <class Run>
std::string skip_reason(const Run& run) {
  if constexpr (requires { run.error_message; }) {
    return run.error_message;
  } else {
    return run.skip_message;
  }
}

struct measured {
  std::vector<double> nanoseconds;
  std::vector<double> bytes_per_second;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const std::size_t n = v.size();
  return n == 0 ? 0.0 : n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

class ratio_reporter : public benchmark::ConsoleReporter {
 public:
  ratio_reporter() : ConsoleReporter(OO_Tabular) {}

  void ReportRuns(const std::vector<Run>& runs) override {
    ConsoleReporter::ReportRuns(runs);
    for (const Run& run : runs) {
      const std::string name = run.run_name.function_name + (run.run_name.args.empty() ? "" : "/" + run.run_name.args);
      if (was_skipped(run)) {
        skipped_[name] = skip_reason(run);
        continue;
      }
      // Aggregates come alone (report_aggregates_only) or after the runs they sum up; then the runs suffice.
      if (run.run_type == Run::RT_Aggregate && (run.aggregate_name != "median" || has_runs_[name])) continue;
      if (run.run_type == Run::RT_Iteration) has_runs_[name] = true;
      measured& m = results_[name];
      m.nanoseconds.push_back(run.GetAdjustedRealTime() * 1e9 / benchmark::GetTimeUnitMultiplier(run.time_unit));
      if (auto bytes = run.counters.find("bytes_per_second"); bytes != run.counters.end()) {
        m.bytes_per_second.push_back(bytes->second);
      }
    }
  }

  void print_ratios() const {
    for (const auto& [name, why] : skipped_) std::printf("SKIP %s %s\n", name.c_str(), why.c_str());
    for (const auto& [name, ours] : results_) {
      const std::size_t at = segment(name, "ours");
      if (at == std::string::npos) continue;
      const std::string before = name.substr(0, at), after = name.substr(at + 4);
      for (const auto& [other, theirs] : results_) {
        if (other.compare(0, before.size(), before) != 0 || other == name) continue;
        const std::size_t end = std::min(other.find('/', at), other.size());
        const std::string who = other.substr(at, end - at);
        if ((who.rfind("peer", 0) != 0 && who.rfind("floor", 0) != 0) || other.substr(end) != after) continue;
        const std::string label = before + who + after;
        if (!ours.bytes_per_second.empty() && !theirs.bytes_per_second.empty()) {
          const double a = median(ours.bytes_per_second) / 1e9, b = median(theirs.bytes_per_second) / 1e9;
          std::printf("RATIO %s %.4g %.4g GB/s %.3f\n", label.c_str(), a, b, a / b);
        } else {
          const double a = median(ours.nanoseconds) / 1e3, b = median(theirs.nanoseconds) / 1e3;
          std::printf("RATIO %s %.4g %.4g us %.3f\n", label.c_str(), a, b, b / a);
        }
      }
    }
  }

 private:
  // Where `word` stands as a whole segment between slashes.
  static std::size_t segment(const std::string& name, const std::string& word) {
    for (std::size_t at = 0; at != std::string::npos && at < name.size();) {
      const std::size_t end = std::min(name.find('/', at), name.size());
      if (name.compare(at, end - at, word) == 0) return at;
      at = end == name.size() ? std::string::npos : end + 1;
    }
    return std::string::npos;
  }

  std::map<std::string, measured> results_;
  std::map<std::string, bool> has_runs_;
  std::map<std::string, std::string> skipped_;
};

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  ratio_reporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  reporter.print_ratios();
  return 0;
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief What happened when, as Chrome trace JSON: open the file in https://ui.perfetto.dev or chrome://tracing.
///
/// Threads: every member may be called from any thread.
class timeline {
 public:
  /// The clock of all events.
  using clock = std::chrono::steady_clock;

  /// Time 0 of the trace is now.
  timeline() : origin_(clock::now()) {}

  /// @brief Adds an event.
  /// @param name What the viewer shows. @param category By which it filters. @param process Shown as "rank" and this
  /// number. @param thread Shown as "lane" and this number. @param start When it began. @param end When it ended.
  /// @param more JSON members without braces, such as "\"bytes\":4096", or nothing; they are not checked.
  void add(const std::string& name, const std::string& category, int process, int thread, clock::time_point start,
           clock::time_point end, const std::string& more = {}) {
    std::lock_guard lock(mutex_);
    events_.push_back({name, category, more, process, thread, nanoseconds(start), nanoseconds(end)});
  }

  /// Number of events.
  std::size_t size() const {
    std::lock_guard lock(mutex_);
    return events_.size();
  }

  /// The whole trace as text.
  std::string json() const {
    std::lock_guard lock(mutex_);
    std::string text = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
    const char* between = "\n";
    for (std::size_t i = 0; i < events_.size(); ++i) {
      const event& e = events_[i];
      bool first_of_process = true, first_of_thread = true;
      for (std::size_t k = 0; k < i && first_of_thread; ++k) {
        if (events_[k].process != e.process) continue;
        first_of_process = false;
        if (events_[k].thread == e.thread) first_of_thread = false;
      }
      // No thread has the number of a process, or viewers take it for its main thread and show it first.
      const std::string where =
          ",\"pid\":" + std::to_string(e.process) + ",\"tid\":" + std::to_string(1000ll * (e.process + 1) + e.thread);
      const auto title = [&](const char* of, const std::string& name) {
        text += between + ("{\"ph\":\"M\",\"name\":\"" + std::string(of)) + "\"" + where + ",\"args\":{\"name\":\"" +
                name + "\"}}";
        between = ",\n";
      };
      if (first_of_process) title("process_name", "rank " + std::to_string(e.process));
      if (first_of_thread) title("thread_name", "lane " + std::to_string(e.thread));
      text += between + ("{\"ph\":\"X\",\"name\":" + quoted(e.name)) + ",\"cat\":" + quoted(e.category) + where +
              ",\"ts\":" + microseconds(e.start) + ",\"dur\":" + microseconds(e.end - e.start) + ",\"args\":{" +
              e.more + "}}";
      between = ",\n";
    }
    return text + "\n]}\n";
  }

  /// @brief Writes json() to a file.
  /// Throws: file_error if it can't be written.
  void write(const std::string& path) const {
    const std::string text = json();
    std::FILE* const file = std::fopen(path.c_str(), "wb");
    bool good = file && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    if (file) good = (std::fclose(file) == 0) && good;
    if (!good) throw file_error("heddle::timeline::write: can't write " + path);
  }

 private:
  struct event {
    std::string name, category, more;
    int process, thread;
    std::int64_t start, end;  // nanoseconds since the origin
  };

  std::int64_t nanoseconds(clock::time_point t) const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(t - origin_).count();
  }

  // The format counts in microseconds; three decimals are exact.
  static std::string microseconds(std::int64_t ns) {
    char text[40];
    const std::int64_t size = ns < 0 ? -ns : ns;
    std::snprintf(text, sizeof text, "%s%lld.%03lld", ns < 0 ? "-" : "", static_cast<long long>(size / 1000),
                  static_cast<long long>(size % 1000));
    return text;
  }

  static std::string quoted(const std::string& s) {
    std::string text = "\"";
    for (const char c : s) {
      if (c == '"' || c == '\\') text += '\\';
      if (static_cast<unsigned char>(c) < 0x20) {
        char escape[8];
        std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
        text += escape;
      } else {
        text += c;
      }
    }
    return text + "\"";
  }

  clock::time_point origin_;
  mutable std::mutex mutex_;
  std::vector<event> events_;
};

}  // namespace v0
}  // namespace heddle

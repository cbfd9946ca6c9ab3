// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// What came out: a table for the terminal, and a page with charts (inline SVG, no scripts).

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "../support/markup.hpp"

namespace gpt {

using examples::escaped;

/// A point of a strategy's learning curve.
struct curve_point {
  std::size_t step;
  double training;    // mean loss since the point before
  double validation;  // on a part of the held-out text
  double bytes;       // sent by one rank so far
};

/// A bound on the validation loss and whether it was kept.
struct verdict {
  std::string text;
  bool met;
};

/// One trained strategy.
struct outcome {
  std::string name;
  std::string about;
  std::size_t steps = 0;
  bool complete = false;  // false: interrupted
  double loss = 0;        // validation, whole held-out text
  double seconds = 0;     // of training
  double tokens = 0;      // trained on, over all ranks
  double bytes = 0;       // sent by one rank
  double hidden = 0;      // part of the communication time that ran behind backward
  std::string executor;
  std::size_t peak_bytes = 0;  // activations of one rank
  std::vector<curve_point> curve;
  std::vector<std::pair<double, double>> memory;  // milliseconds, bytes: one training step of one rank
  std::vector<verdict> verdicts;
};

inline std::string text_of(const char* format, double value) {
  std::array<char, 64> buffer;
  std::snprintf(buffer.data(), buffer.size(), format, value);
  return buffer.data();
}

/// 1234567 as "1.23 MB".
inline std::string text_of_bytes(double bytes) {
  constexpr std::array units{"B", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  for (; bytes >= 999.5 && unit + 1 < units.size(); ++unit) bytes /= 1000;
  return text_of(unit == 0 || bytes >= 99.5 ? "%.0f " : bytes >= 9.95 ? "%.1f " : "%.2f ", bytes) + units[unit];
}

/// For the axes of a chart: 2000000 as "2 MB", no digits that say nothing.
inline std::string tick_of_bytes(double bytes) {
  constexpr std::array units{"B", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  for (; bytes >= 999.5 && unit + 1 < units.size(); ++unit) bytes /= 1000;
  return text_of("%g ", bytes) + units[unit];
}

inline std::vector<std::string> table_head() {
  return {"strategy", "validation loss",  "tokens/s", "bytes/step/rank",
          "moved by", "peak activations", "hidden",   "bound"};
}

inline std::vector<std::string> table_row(const outcome& o) {
  const auto steps = static_cast<double>(std::max<std::size_t>(o.steps, 1));
  std::string bound;
  for (const verdict& v : o.verdicts) bound += (bound.empty() ? "" : "; ") + v.text + (v.met ? " met" : " MISSED");
  return {o.name,
          text_of("%.4f", o.loss) + (o.complete ? "" : " (at step " + std::to_string(o.steps) + ")"),
          text_of("%.0f", o.tokens / std::max(o.seconds, 1e-9)),
          text_of_bytes(o.bytes / steps),
          o.executor,
          text_of_bytes(static_cast<double>(o.peak_bytes)),
          text_of("%.0f %%", 100 * o.hidden),
          bound.empty() ? "-" : bound};
}

inline std::string text_table(const std::vector<outcome>& all) {
  std::vector<std::vector<std::string>> rows{table_head()};
  for (const outcome& o : all) rows.push_back(table_row(o));
  std::vector<std::size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::string line;
    for (std::size_t i = 0; i < rows[r].size(); ++i) {
      const std::string gap(widths[i] - rows[r][i].size(), ' ');
      const bool number = i != 0 && i != 4 && i != 7;
      line += (i ? "  " : "") + (number ? gap + rows[r][i] : rows[r][i] + gap);
    }
    out += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    if (r == 0) {
      for (std::size_t i = 0; i < widths.size(); ++i) out += (i ? "  " : "") + std::string(widths[i], '-');
      out += "\n";
    }
  }
  return out;
}

/// A line chart.
struct chart {
  struct series {
    std::string label;
    std::vector<std::pair<double, double>> points;
    bool stairs = false;  // a value holds until the next point
  };

  std::string title, x_label, y_label;
  bool x_log = false, y_from_zero = false;
  bool x_bytes = false, y_bytes = false;
  std::vector<series> lines;

  /// The chart as SVG. Empty series are left out; without any point the result is empty.
  std::string svg() const {
    double x0 = INFINITY, x1 = -INFINITY, y0 = y_from_zero ? 0 : INFINITY, y1 = -INFINITY;
    for (const series& line : lines) {
      for (const auto& [x, y] : line.points) {
        if (!usable(x, y)) continue;
        x0 = std::min(x0, x), x1 = std::max(x1, x), y0 = std::min(y0, y), y1 = std::max(y1, y);
      }
    }
    if (!(x0 <= x1)) return "";
    if (x0 == x1) x1 = x_log ? x0 * 10 : x0 + 1;
    if (!x_log) x0 = std::min(x0, 0.0);
    const std::vector<double> y_ticks = ticks(y0, y1, y_bytes ? 5 : 6);
    y0 = y_from_zero ? 0 : std::min(y0, y_ticks.front());
    y1 = std::max(y1 + (y1 - y0) * 0.04, y_ticks.back());
    const auto place_x = [&](double x) {
      const double part = x_log ? std::log(x / x0) / std::log(x1 / x0) : (x - x0) / (x1 - x0);
      return left + part * (right - left);
    };
    const auto place_y = [&](double y) { return bottom - (y - y0) / (y1 - y0) * (bottom - top); };

    std::string out = "<figure><figcaption>" + escaped(title) + "</figcaption>\n<svg viewBox=\"0 0 " +
                      number(full_width) + " " + number(full_height) + "\" role=\"img\" aria-label=\"" +
                      escaped(title) + "\">\n";
    for (const double y : y_ticks) {
      out += line_at("grid", left, place_y(y), right, place_y(y)) +
             text_at(left - 8, place_y(y) + 4, "end", y_bytes ? tick_of_bytes(y) : text_of("%g", y));
    }
    for (const double x : x_log ? log_ticks(x0, x1) : ticks(x0, x1, 7)) {
      out += line_at("grid", place_x(x), top, place_x(x), bottom) +
             text_at(place_x(x), bottom + 18, "middle", x_bytes ? tick_of_bytes(x) : text_of("%g", x));
    }
    out += line_at("axis", left, bottom, right, bottom) + line_at("axis", left, top, left, bottom);
    out += text_at((left + right) / 2, full_height - 6, "middle", x_label, "label");
    out += "<text class=\"label\" text-anchor=\"middle\" transform=\"translate(16 " + number((top + bottom) / 2) +
           ") rotate(-90)\">" + escaped(y_label) + "</text>\n";
    double legend = top + 8;
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const std::string colour = " class=\"line c" + std::to_string(i % 8) + (i >= 8 ? " dashed" : "") + "\"";
      std::string path;
      double before = 0;
      for (const auto& [x, y] : lines[i].points) {
        if (!usable(x, y)) continue;
        if (!path.empty() && lines[i].stairs) path += pair(place_x(x), before);
        before = place_y(y);
        path += pair(place_x(x), before);
      }
      if (path.empty()) continue;
      out +=
          "<polyline" + colour + " points=\"" + path + "\"><title>" + escaped(lines[i].label) + "</title></polyline>\n";
      out += "<line" + colour + " x1=\"" + number(right + 16) + "\" y1=\"" + number(legend) + "\" x2=\"" +
             number(right + 40) + "\" y2=\"" + number(legend) + "\"/>" +
             text_at(right + 46, legend + 4, "start", lines[i].label);
      legend += 20;
    }
    return out + "</svg></figure>\n";
  }

 private:
  static constexpr double full_width = 900, full_height = 380;
  static constexpr double left = 80, right = 700, top = 14, bottom = 330;

  bool usable(double x, double y) const { return std::isfinite(x) && std::isfinite(y) && !(x_log && x <= 0); }

  static std::string number(double x) { return text_of("%.1f", x); }

  static std::string pair(double x, double y) { return number(x) + "," + number(y) + " "; }

  static std::string line_at(const char* kind, double x1, double y1, double x2, double y2) {
    return std::string("<line class=\"") + kind + "\" x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" +
           number(x2) + "\" y2=\"" + number(y2) + "\"/>\n";
  }

  static std::string text_at(double x, double y, const char* anchor, const std::string& text,
                             const char* kind = "tick") {
    return std::string("<text class=\"") + kind + "\" text-anchor=\"" + anchor + "\" x=\"" + number(x) + "\" y=\"" +
           number(y) + "\">" + escaped(text) + "</text>\n";
  }

  /// Round values at about `count` places of [low, high].
  static std::vector<double> ticks(double low, double high, int count) {
    const double rough = std::max((high - low) / count, 1e-12);
    const double unit = std::pow(10, std::floor(std::log10(rough)));
    double step = 10 * unit;
    for (const double s : {5.0, 2.0, 1.0}) {
      if (s * unit >= rough * 0.999) step = s * unit;
    }
    std::vector<double> out;
    for (double i = std::ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i)
      out.push_back(i * step + 0.0);  // + 0.0: no minus zero
    if (out.empty()) out.push_back(low);
    return out;
  }

  /// 1, 2 and 5 in every decade of [low, high]; the powers of ten alone if these are many.
  static std::vector<double> log_ticks(double low, double high) {
    std::vector<double> out;
    const bool many = high / low > 1e3;
    for (double decade = std::pow(10, std::floor(std::log10(low))); decade <= high; decade *= 10) {
      for (const double s : {1.0, 2.0, 5.0}) {
        if ((s == 1 || !many) && s * decade >= low && s * decade <= high) out.push_back(s * decade);
      }
    }
    return out;
  }
};

/// The whole page.
inline std::string html_report(const std::string& headline, const std::vector<outcome>& all) {
  chart steps{
      .title = "Validation loss against steps", .x_label = "step", .y_label = "nats per character", .lines = {}};
  chart bytes{.title = "Validation loss against bytes sent",
              .x_label = "bytes sent by one rank (log scale)",
              .y_label = "nats per character",
              .x_log = true,
              .x_bytes = true,
              .lines = {}};
  chart memory{.title = "Activation memory during one training step of one rank",
               .x_label = "milliseconds",
               .y_label = "bytes in use",
               .y_from_zero = true,
               .y_bytes = true,
               .lines = {}};
  std::string rows;
  for (const outcome& o : all) {
    if (!o.memory.empty()) {  // a few steps of another model: no learning curve
      memory.lines.push_back({o.name, o.memory, true});
    } else if (o.curve.size() > 1) {
      chart::series by_step{o.name, {}}, by_bytes{o.name, {}};
      for (const curve_point& p : o.curve) {
        by_step.points.emplace_back(static_cast<double>(p.step), p.validation);
        by_bytes.points.emplace_back(p.bytes, p.validation);
      }
      steps.lines.push_back(std::move(by_step));
      bytes.lines.push_back(std::move(by_bytes));
    }
    rows += "<tr>";
    const std::vector<std::string> cells = table_row(o);
    const bool missed = std::any_of(o.verdicts.begin(), o.verdicts.end(), [](const verdict& v) { return !v.met; });
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const std::string kind = i == 0             ? " title=\"" + escaped(o.about) + "\""
                               : i == 7 && missed ? " class=\"missed\""
                                                  : "";
      rows += "<td" + kind + ">" + escaped(cells[i]) + "</td>";
    }
    rows += "</tr>\n";
  }
  std::string head;
  for (const std::string& cell : table_head()) head += "<th>" + cell + "</th>";
  return R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Training strategies compared</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5b6470; --faint: #e3e6ea; --paper: #ffffff; --bad: #c0392b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --dim: #9aa4af; --faint: #2f363d; --paper: #16191d; --bad: #ff7b6b; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1160px;
       margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } p { color: var(--dim); margin: 0 0 1.5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13px; } td:last-child { white-space: normal; }
th, td { padding: .4rem .6rem; text-align: right; border-bottom: 1px solid var(--faint); white-space: nowrap;
         font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 600; } th:first-child, td:first-child, th:nth-child(5), td:nth-child(5),
th:last-child, td:last-child { text-align: left; } .missed { color: var(--bad); font-weight: 600; }
figure { margin: 2rem 0; } figcaption { font-weight: 600; margin-bottom: .5rem; } svg { width: 100%; height: auto; }
.grid { stroke: var(--faint); } .axis { stroke: var(--dim); } .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.dashed { stroke-dasharray: 6 4; } .tick { font-size: 12px; fill: var(--dim); } .label { font-size: 13px; fill: var(--ink); }
.c0 { stroke: #0072b2; } .c1 { stroke: #d55e00; } .c2 { stroke: #009e73; } .c3 { stroke: #cc79a7; } .c4 { stroke: #e69f00; }
.c5 { stroke: #56b4e9; } .c6 { stroke: #8c6bb1; } .c7 { stroke: #7f7f7f; }
</style></head><body>
<h1>Training strategies compared</h1>
)"
         "<p>" +
         escaped(headline) + "</p>\n<div class=\"wide\"><table><thead><tr>" + head + "</tr></thead><tbody>\n" + rows +
         "</tbody></table></div>\n" + steps.svg() + bytes.svg() + memory.svg() + "</body></html>\n";
}

}  // namespace gpt

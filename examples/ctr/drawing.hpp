// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// A picture of a run: AUC and log loss on the test rows over the seconds of training.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "../support/markup.hpp"
#include "training.hpp"

namespace ctr {

using examples::escaped;

/// SVG of both curves, each with its own scale; values that aren't finite are left out.
inline std::string drawn(const std::vector<point>& points, const std::string& title) {
  constexpr double width = 640, height = 240, left = 70, top = 40;
  char text[256];
  const auto put = [&](std::string& to, const char* format, auto... values) {
    std::snprintf(text, sizeof text, format, values...);
    to += text;
  };
  std::string out =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 740 640\" font-family=\"sans-serif\" font-size=\"13\">\n"
      "<rect width=\"740\" height=\"640\" fill=\"white\"/>\n";
  out += "<text x=\"70\" y=\"20\" font-size=\"15\">" + escaped(title) + "</text>\n";
  double last = 1e-9;
  for (const point& p : points) last = std::max(last, p.seconds);
  for (int chart = 0; chart < 2; ++chart) {
    const auto value = [&](const point& p) { return chart ? p.test.loss : p.test.auc; };
    std::vector<point> shown = points;
    std::erase_if(shown, [&](const point& p) { return !std::isfinite(value(p)); });
    double low = shown.empty() ? 0.0 : value(shown[0]), high = low;
    for (const point& p : shown) low = std::min(low, value(p)), high = std::max(high, value(p));
    if (!(high > low)) high = low + 1e-3;
    const double y0 = top + chart * (height + 60);
    put(out, "<text x=\"70\" y=\"%.0f\">%s</text>\n", y0 - 6, chart ? "test log loss" : "AUC");
    put(out, "<rect x=\"70\" y=\"%.0f\" width=\"640\" height=\"240\" fill=\"none\" stroke=\"#999\"/>\n", y0);
    put(out, "<text x=\"64\" y=\"%.0f\" text-anchor=\"end\">%.4f</text>\n", y0 + 10, high);
    put(out, "<text x=\"64\" y=\"%.0f\" text-anchor=\"end\">%.4f</text>\n", y0 + height, low);
    put(out, "<text x=\"710\" y=\"%.0f\" text-anchor=\"end\">%.2f s</text>\n", y0 + height + 16, last);
    out += "<polyline fill=\"none\" stroke=\"#1f5fa8\" stroke-width=\"2\" points=\"";
    for (const point& p : shown)
      put(out, "%.1f,%.1f ", left + width * p.seconds / last, y0 + height * (high - value(p)) / (high - low));
    out += "\"/>\n";
    for (const point& p : shown)
      put(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"#1f5fa8\"/>\n", left + width * p.seconds / last,
          y0 + height * (high - value(p)) / (high - low));
  }
  return out + "</svg>\n";
}

}  // namespace ctr

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/plan.hpp>

#include <algorithm>
#include <cstddef>
#include <ostream>
#include <span>
#include <string>

namespace heddle {
inline namespace v0 {

/// @brief Draws a plan as an SVG image: time to the right, addresses upwards, a box per lifetime, a line at the peak.
///
/// A box names its number, times, size and offset when pointed at.
/// @param out Where the image goes. @param plan A plan for `lifetimes`. @param lifetimes What it places.
/// Throws:  argument_error if the plan has another number of offsets; file_error if the stream fails.
template <class Lifetime = lifetime>
void write_memory_map(std::ostream& out, const memory_plan& plan, std::span<const Lifetime> lifetimes) {
  if (plan.offsets.size() != lifetimes.size()) {
    throw argument_error("heddle::write_memory_map: the plan has " + std::to_string(plan.offsets.size()) +
                         " offsets, there are " + std::to_string(lifetimes.size()) + " lifetimes");
  }
  constexpr double width = 960, height = 480, margin = 56;
  std::size_t first = 0, last = 1;
  if (!lifetimes.empty()) {
    first = lifetimes[0].first;
    for (const Lifetime& x : lifetimes) {
      first = (std::min)(first, x.first);
      last = (std::max)(last, x.last);
    }
  }
  const double moments = static_cast<double>(last > first ? last - first : 1);
  const double bytes = static_cast<double>(plan.peak ? plan.peak : 1);
  const auto along = [&](std::size_t moment) { return margin + static_cast<double>(moment - first) / moments * width; };
  const auto up = [&](std::size_t address) { return margin + height * (1 - static_cast<double>(address) / bytes); };
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << width + 2 * margin << ' ' << height + 2 * margin
      << "\" font-family=\"sans-serif\" font-size=\"13\">\n<path d=\"M0 0h" << width + 2 * margin << 'v'
      << height + 2 * margin << "H0z\" fill=\"#fff\"/>\n<text x=\"" << margin << "\" y=\"24\">" << lifetimes.size()
      << " lifetimes, peak " << plan.peak << " bytes, lower bound " << plan.lower_bound << "</text>\n";
  for (std::size_t i = 0; i < lifetimes.size(); ++i) {
    const Lifetime& x = lifetimes[i];
    if (x.bytes == 0 || x.first == x.last) continue;
    const double top = up(plan.offsets[i] + x.bytes);
    out << "<rect x=\"" << along(x.first) << "\" y=\"" << top << "\" width=\"" << along(x.last) - along(x.first)
        << "\" height=\"" << up(plan.offsets[i]) - top << "\" fill=\"hsl(" << i * 47 % 360
        << " 55% 70%)\" stroke=\"#333\" stroke-width=\"0.4\"><title>" << i << ": [" << x.first << ", " << x.last
        << "), " << x.bytes << " bytes at " << plan.offsets[i] << "</title></rect>\n";
  }
  out << "<path d=\"M" << margin << ' ' << margin << 'h' << width << "M" << margin << ' ' << margin << 'v' << height
      << 'h' << width << "\" fill=\"none\" stroke=\"#000\"/>\n<text x=\"" << margin - 6 << "\" y=\"" << margin + 4
      << "\" text-anchor=\"end\">peak</text>\n<text x=\"" << margin - 6 << "\" y=\"" << margin + height
      << "\" text-anchor=\"end\">0</text>\n<text x=\"" << margin << "\" y=\"" << margin + height + 20 << "\">" << first
      << "</text>\n<text x=\"" << margin + width << "\" y=\"" << margin + height + 20 << "\" text-anchor=\"end\">"
      << last << "</text>\n<text x=\"" << margin + width / 2 << "\" y=\"" << margin + height + 20
      << "\" text-anchor=\"middle\">time</text>\n</svg>\n";
  if (!out) throw file_error("heddle::write_memory_map: the stream can't be written");
}

}  // namespace v0
}  // namespace heddle

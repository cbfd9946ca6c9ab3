// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/schedule.hpp>

#include <fstream>
#include <string>
#include <vector>

// A picture of a collective: time runs to the right, one column for each round, one line for each rank. An arrow is a
// message; solid where the receiver reduces it, dashed where it copies; the colour says where in the buffer it is from.
inline void draw(const std::string& path, const std::string& title, const std::vector<heddle::schedule>& all,
                 std::size_t count) {
  const std::size_t ranks = all.size(), rounds = all[0].rounds();
  const double column = 64, line = 28, left = 56, top = 48;
  const auto x = [&](std::size_t k) { return std::to_string(left + column * static_cast<double>(k)); };
  const auto y = [&](std::size_t r) { return std::to_string(top + line * static_cast<double>(r)); };
  std::ofstream out(path);
  out << "<svg xmlns='http://www.w3.org/2000/svg' width='" << left + column * static_cast<double>(rounds) + 24
      << "' height='" << top + line * static_cast<double>(ranks) << "' font-family='sans-serif' font-size='12'>\n"
      << "<defs><marker id='tip' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='6' markerHeight='6' orient='auto'>"
      << "<path d='M0 0 8 4 0 8z' fill='context-stroke'/></marker></defs>\n"
      << "<rect width='100%' height='100%' fill='white'/><text x='8' y='18'>" << title << "</text>\n";
  for (std::size_t r = 0; r < ranks; ++r) {
    out << "<text x='8' y='" << top + line * static_cast<double>(r) + 4 << "'>rank " << r << "</text><line x1='" << x(0)
        << "' x2='" << x(rounds) << "' y1='" << y(r) << "' y2='" << y(r) << "' stroke='#ccc'/>\n";
  }
  for (std::size_t k = 0; k < rounds; ++k) {
    out << "<text x='" << left + column * (static_cast<double>(k) + 0.4) << "' y='34' fill='#888'>" << k << "</text>\n";
    for (std::size_t r = 0; r < ranks; ++r) {
      for (const heddle::operation& o : all[r].round(k)) {
        if (o.act == heddle::action::send) continue;
        const bool reduces = o.act == heddle::action::reduce;
        const std::size_t hue = count ? o.range.begin * 300 / count : 0;
        out << "<line x1='" << x(k) << "' y1='" << y(o.peer) << "' x2='" << x(k + 1) << "' y2='" << y(r)
            << "' stroke='hsl(" << hue << ",70%,40%)' stroke-width='1.5' marker-end='url(#tip)'"
            << (reduces ? "" : " stroke-dasharray='5 3'") << "><title>round " << k << ": " << o.peer << " to " << r
            << ", elements " << o.range.begin << " to " << o.range.end() << (reduces ? ", reduced" : ", copied")
            << "</title></line>\n";
      }
    }
  }
  out << "</svg>\n";
  if (!out) throw heddle::file_error("can't write " + path);
}

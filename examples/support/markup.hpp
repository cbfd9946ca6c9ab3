// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Text in the pages and drawings that examples write.

#pragma once

#include <string>

namespace examples {

/// Text as HTML and SVG have it, between tags or in quotes.
inline std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += static_cast<unsigned char>(c) < ' ' ? '?' : c;  // which XML hasn't
  }
  return out;
}

}  // namespace examples

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/quantize.hpp>
#include <heddle/compress/sign.hpp>
#include <heddle/compress/top_k.hpp>

#include <string>
#include <vector>

namespace hd = heddle;

// One of the codecs that send packets.
struct any_codec {
  int which = 0;
  std::size_t dense_below = 10;
  static constexpr int kinds = 4;
  static constexpr bool biased = true;

  template <class Function> auto visit(Function&& f) const {
    switch (which) {
      case 0: return f(hd::top_k{.density = 0.1});
      case 1: return f(hd::sign{.block = 64});
      case 2: return f(hd::quantize<4, hd::rounding::nearest>{.block = 64});
    }
    return f(hd::quantize<8>{.block = 100});
  }
  void encode(hd::slice<const float> v, const hd::encode_context& x, std::vector<std::byte>& packet) const {
    visit([&](const auto& c) { c.encode(v, x, packet); });
  }
  void decode_add(hd::slice<const std::byte> payload, hd::slice<float> sum) const {
    visit([&](const auto& c) { c.decode_add(payload, sum); });
  }
  std::string name() const { return "any"; }
};

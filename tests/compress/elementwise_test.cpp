// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "conformance.hpp"

#include <heddle/compress/cast.hpp>
#include <heddle/compress/none.hpp>

// example-begin halves
struct halves {  // send the upper half of each float
  using wire = heddle::bfloat16;
  void encode(heddle::slice<const float> g, wire* out, float factor) const {
    heddle::convert_scaled(g.data, out, g.count, factor);
  }
  void decode(const wire* in, heddle::slice<float> g) const { heddle::convert(in, g.data, g.count); }
  std::string name() const { return "halves"; }
};
static_assert(heddle::compressor<halves>);
// example-end

TEST_CASE("elementwise compressors conform") {
  conformance::elementwise(heddle::none{}, 0.0);
  conformance::elementwise(heddle::cast<heddle::float16>{}, 0x1p-11);
  conformance::elementwise(heddle::cast<heddle::bfloat16>{}, 0x1p-8);
  conformance::elementwise(halves{}, 0x1p-8);
}

TEST_CASE("a finite gradient outside float16's range becomes infinite, never a wrong number") {
  const float g[3] = {65504.0f, 65520.0f, -1e30f};
  heddle::float16 w[3];
  float back[3];
  const heddle::cast<heddle::float16> c;
  c.encode({g, 3}, w, 1.0f);
  c.decode(w, {back, 3});
  CHECK(back[0] == 65504.0f);
  CHECK(std::isinf(back[1]));
  CHECK((std::isinf(back[2]) && back[2] < 0));
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Transforms come before the compressor that ends a chain.
// EXPECT: heddle::operator|: the left side must be a gradient transform such as clip; a compressor ends the chain
// EXPECT: heddle::cast: the wire type must be float16 or bfloat16
#include <heddle/compress/cast.hpp>
#include <heddle/compress/clip.hpp>
#include <heddle/compress/dgc.hpp>

namespace hd = heddle;

const auto clipped_twice = hd::clip{.max_norm = 1.0f} | hd::clip{.max_norm = 2.0f} | hd::dgc{};
const auto brain = hd::cast<hd::bfloat16>{};

#if FAIL == 1
const auto illegal = hd::dgc{} | hd::clip{};
#elif FAIL == 2
const auto illegal = hd::cast<int>{};
#endif

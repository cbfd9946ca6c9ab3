// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// A type in the wrong slot of a strategy: the first error names the slot and what is missing.
// EXPECT: heddle::strategy: .topology must provide all_reduce(rank, size, count)
// EXPECT: heddle::strategy: .compressor must provide encode()
// EXPECT: heddle::strategy: .mode must provide
// EXPECT: heddle::strategy: .precision must be
// EXPECT: heddle::strategy: .recompute must provide plan()
// EXPECT: heddle::strategy: .memory must provide allocate()
// EXPECT: heddle::strategy: .compressor must provide encode()
// EXPECT: heddle::strategy: .mode shards the optimizer, so .topology must leave each element on one owner
// EXPECT: heddle::strategy: .mode shards the optimizer, so .compressor must be elementwise
// EXPECT: heddle::strategy: .compressor is sharded{}, so .topology must have groups
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/tree.hpp>
#include <heddle/compress/cast.hpp>
#include <heddle/compress/clip.hpp>
#include <heddle/compress/dgc.hpp>
#include <heddle/compress/sharded.hpp>
#include <heddle/mode/local_sgd.hpp>
#include <heddle/mode/zero1.hpp>
#include <heddle/recompute/sqrt.hpp>
#include <heddle/trainer/strategy.hpp>

namespace hd = heddle;

// Decodes, but has no encode.
struct half_a_compressor {
  using wire = float;
  void decode(const wire*, hd::slice<float>) const {}
};

const auto legal = hd::strategy{.topology = hd::ring{},
                                .compressor = hd::clip{.max_norm = 1.0f} | hd::cast<hd::bfloat16>{},
                                .mode = hd::local_sgd{.period = 4},
                                .precision = hd::full_precision{},
                                .recompute = hd::recompute::sqrt{},
                                .memory = hd::host_resource{}};

const auto groups = hd::strategy{.topology = hd::hierarchical{}, .compressor = hd::clip{} | hd::sharded{hd::dgc{}}};

const auto sharded = hd::strategy{.topology = hd::native{}, .compressor = hd::cast<hd::float16>{}, .mode = hd::zero1{}};

#if FAIL == 1
const auto illegal = hd::strategy{.topology = hd::local_sgd{}};
#elif FAIL == 2
const auto illegal = hd::strategy{.compressor = hd::ring{}};
#elif FAIL == 3
const auto illegal = hd::strategy{.mode = hd::ring{}};
#elif FAIL == 4
const auto illegal = hd::strategy{.precision = hd::bfloat16{}};
#elif FAIL == 5
const auto illegal = hd::strategy{.recompute = hd::ring{}};
#elif FAIL == 6
const auto illegal = hd::strategy{.memory = hd::ring{}};
#elif FAIL == 7
const auto illegal = hd::strategy{.compressor = half_a_compressor{}};
#elif FAIL == 8
const auto illegal = hd::strategy{.topology = hd::tree{}, .mode = hd::zero1{}};
#elif FAIL == 9
const auto illegal = hd::strategy{.compressor = hd::dgc{}, .mode = hd::zero1{}};
#elif FAIL == 10
const auto illegal = hd::strategy{.topology = hd::ring{}, .compressor = hd::sharded{hd::dgc{}}};
#endif

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
// EXPECT: heddle::strategy: .compressor is biased, so it must be inside error_feedback{}
// EXPECT: heddle::strategy: .mode shards the optimizer, so .compressor must be elementwise
// EXPECT: heddle::error_feedback: the argument must be a codec with biased, encode() and decode_add()
// EXPECT: heddle::mixed: the element type must be float16 or bfloat16
// EXPECT: heddle::strategy: .mode leaves replicas apart by what was sent, so .compressor must be elementwise
// EXPECT: heddle::strategy: .mode leaves replicas apart by what was sent, so .compressor must be elementwise
// EXPECT: heddle::sharded: the compressor must be a packet_compressor by itself
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/tree.hpp>
#include <heddle/compress/cast.hpp>
#include <heddle/compress/clip.hpp>
#include <heddle/compress/dgc.hpp>
#include <heddle/compress/power_sgd.hpp>
#include <heddle/compress/quantize.hpp>
#include <heddle/compress/sharded.hpp>
#include <heddle/compress/top_k.hpp>
#include <heddle/mode/geo_sgd.hpp>
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

const auto fed = hd::strategy{.compressor = hd::clip{} | hd::error_feedback{hd::top_k{}}};
const auto unbiased = hd::strategy{.compressor = hd::quantize<8>{}, .precision = hd::mixed<hd::float16>{}};
const auto low_rank = hd::strategy{.compressor = hd::power_sgd{}, .precision = hd::mixed<hd::bfloat16>{}};

const auto apart = hd::strategy{.compressor = hd::cast<hd::bfloat16>{}, .mode = hd::geo_sgd{}};

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
#elif FAIL == 11
const auto illegal = hd::strategy{.compressor = hd::clip{} | hd::quantize<4, hd::rounding::nearest>{}};
#elif FAIL == 12
const auto illegal = hd::strategy{.compressor = hd::power_sgd{}, .mode = hd::zero1{}};
#elif FAIL == 13
const auto illegal = hd::strategy{.compressor = hd::error_feedback{hd::none{}}};
#elif FAIL == 14
const auto illegal = hd::strategy{.precision = hd::mixed<float>{}};
#elif FAIL == 15
const auto illegal = hd::strategy{.compressor = hd::error_feedback{hd::top_k{}}, .mode = hd::geo_sgd{}};
#elif FAIL == 16
const auto illegal = hd::strategy{.compressor = hd::clip{} | hd::none{},
                                  .mode = hd::outer_step<hd::outer::elastic, hd::weight::equal>{}};
#elif FAIL == 17
const auto illegal = hd::sharded{hd::error_feedback{hd::top_k{}}};
#endif

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Tensors of a device, under what has no device form.
// DEVICE
// EXPECT: heddle::data_parallel: this communicator works in a stream; include heddle/trainer/data_parallel.cuh
// EXPECT: heddle::data_parallel: over tensors of a device .mode must be every_step{}
// EXPECT: heddle::data_parallel: over tensors of a device transforms before .compressor must have scale_of()
// EXPECT: heddle::data_parallel: this .compressor has no form in the trainer of devices
// EXPECT: heddle::data_parallel: this update rule (per_group, for one) has no device form
// EXPECT: heddle::data_parallel: this update rule (per_group, for one) has no device form
// EXPECT: heddle::data_parallel: this .compressor has no form in the trainer of devices
#if FAIL == 1
#include <heddle/trainer/data_parallel.hpp>
#else
#include <heddle/trainer/data_parallel.cuh>
#endif

#include <heddle/collective/mixed_radix.hpp>
#include <heddle/comm/threads.cuh>
#include <heddle/compress/clip.hpp>
#include <heddle/compress/power_sgd.hpp>
#include <heddle/compress/sign.hpp>
#include <heddle/mode/local_sgd.hpp>
#include <heddle/optim/per_group.hpp>

namespace hd = heddle;

struct own_rule {
  static constexpr int slots = 0;
  void update(float* p, const float* g, float* const*, std::size_t n, const hd::update_context& x) const {
    for (std::size_t i = 0; i < n; ++i) p[i] -= x.lr * g[i];
  }
};
struct halved {
  float scale(hd::slice<const float>, float before, const hd::encode_context&) const { return before / 2.0f; }
  std::string name() const { return "halved"; }
};

constexpr auto legal = hd::strategy{.compressor = hd::clip{} | hd::none{}};
template class hd::data_parallel<std::remove_const_t<decltype(legal)>, hd::threads::device_communicator, hd::sgd>;

#if FAIL == 2
constexpr auto illegal = hd::strategy{.mode = hd::local_sgd{}};
#elif FAIL == 3
constexpr auto illegal = hd::strategy{.compressor = halved{} | hd::none{}};
#elif FAIL == 4
constexpr auto illegal = hd::strategy{.compressor = hd::error_feedback{hd::sign{}}};
#elif FAIL == 7
constexpr auto illegal = hd::strategy{.compressor = hd::power_sgd{}};
#endif
#if FAIL == 5
template class hd::data_parallel<std::remove_const_t<decltype(legal)>, hd::threads::device_communicator, own_rule>;
#elif FAIL == 6
template class hd::data_parallel<std::remove_const_t<decltype(legal)>, hd::threads::device_communicator,
                                 hd::per_group<hd::sgd, hd::sgd>>;
#elif FAIL > 1
template class hd::data_parallel<std::remove_const_t<decltype(illegal)>, hd::threads::device_communicator, hd::sgd>;
#endif

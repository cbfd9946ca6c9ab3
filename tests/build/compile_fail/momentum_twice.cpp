// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// A compressor that corrects momentum allows no second momentum around it, and no optimizer but SGD. A rule that makes
// parameters of its own state allows no mode that averages them.
// EXPECT: heddle::strategy: .compressor corrects momentum itself, so .mode must not have an outer momentum
// EXPECT: heddle::strategy: .compressor corrects momentum itself, so .mode must not have an outer momentum
// EXPECT: heddle::data_parallel: this compressor corrects momentum, so the optimizer must be sgd
// EXPECT: heddle::data_parallel: this update rule makes parameters of its own state, so .mode must average gradients
#include <heddle/comm/self.hpp>
#include <heddle/compress/clip.hpp>
#include <heddle/compress/dgc.hpp>
#include <heddle/compress/none.hpp>
#include <heddle/optim/adamw.hpp>
#include <heddle/optim/ftrl.hpp>
#include <heddle/optim/sgd.hpp>
#include <heddle/trainer/data_parallel.hpp>

namespace hd = heddle;

struct outer_momentum_mode {
  static constexpr hd::average averages = hd::average::parameters;
  static constexpr bool outer_momentum = true;
  bool meets(std::size_t step) const { return step % 2 == 1; }
  std::string name() const { return "outer_momentum_mode"; }
};

const auto uncompressed = hd::strategy{.compressor = hd::none{}, .mode = outer_momentum_mode{}};
const auto compressed = hd::strategy{.compressor = hd::clip{} | hd::dgc{}};

template <class Plan, class Optimizer>
void train(const Plan& plan, hd::self& comm, Optimizer rule) {
  std::vector<hd::tensor> none;
  hd::data_parallel dp{plan, comm, none, rule};
  dp.step({.lr = 0.1f});
}
using dgc_plan = std::remove_const_t<decltype(compressed)>;
using plain_plan = hd::strategy<>;
using local_plan = std::remove_const_t<decltype(uncompressed)>;
template void train(const dgc_plan&, hd::self&, hd::sgd);
template void train(const plain_plan&, hd::self&, hd::ftrl);

#if FAIL == 1
const auto illegal = hd::strategy{.compressor = hd::dgc{}, .mode = outer_momentum_mode{}};
#elif FAIL == 2
const auto illegal = hd::strategy{.compressor = hd::clip{} | hd::dgc{}, .mode = outer_momentum_mode{}};
#elif FAIL == 3
template void train(const dgc_plan&, hd::self&, hd::adamw);
#elif FAIL == 4
template void train(const local_plan&, hd::self&, hd::ftrl);
#endif

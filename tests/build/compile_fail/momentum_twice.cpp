// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// A compressor that corrects momentum allows no second momentum around it, and no optimizer but SGD.
// EXPECT: heddle::strategy: .compressor corrects momentum itself, so .mode must not have an outer momentum
// EXPECT: heddle::strategy: .compressor corrects momentum itself, so .mode must not have an outer momentum
// EXPECT: heddle::data_parallel: this compressor corrects momentum, so the optimizer must be sgd
#include <heddle/comm/self.hpp>
#include <heddle/compress/clip.hpp>
#include <heddle/compress/dgc.hpp>
#include <heddle/compress/none.hpp>
#include <heddle/optim/adamw.hpp>
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

template <class Optimizer>
void train(hd::self& comm, Optimizer rule) {
  std::vector<hd::tensor> none;
  hd::data_parallel dp{compressed, comm, none, rule};
  dp.step({.lr = 0.1f});
}
template void train(hd::self&, hd::sgd);

#if FAIL == 1
const auto illegal = hd::strategy{.compressor = hd::dgc{}, .mode = outer_momentum_mode{}};
#elif FAIL == 2
const auto illegal = hd::strategy{.compressor = hd::clip{} | hd::dgc{}, .mode = outer_momentum_mode{}};
#elif FAIL == 3
template void train(hd::self&, hd::adamw);
#endif

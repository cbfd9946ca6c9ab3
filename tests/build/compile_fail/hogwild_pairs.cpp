// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Parameters that are shared: under a compressor, for which there is nothing to send; in another precision; by a rule
// that writes parameters instead of adding to them, which would undo what others have added. A rule that isn't linear,
// such as adamw, is legal: it is never given an element twice in a step.
// EXPECT: heddle::data_parallel: .mode shares parameters and sends nothing, so .compressor must be none{}
// EXPECT: heddle::data_parallel: .mode shares float parameters, so .precision must be full_precision{}
// EXPECT: heddle::data_parallel: this update rule makes parameters of its own state, so .mode must average gradients
// EXPECT: heddle::hogwild: the template argument must be a race policy
#include <heddle/comm/self.hpp>
#include <heddle/compress/cast.hpp>
#include <heddle/optim/adamw.hpp>
#include <heddle/optim/ftrl.hpp>
#include <heddle/optim/mixed.hpp>
#include <heddle/trainer/hogwild.hpp>

namespace hd = heddle;

constexpr auto legal = hd::strategy{.mode = hd::hogwild<>{}};
using legal_plan = std::remove_const_t<decltype(legal)>;
template class hd::data_parallel<legal_plan, hd::self, hd::sgd>;
template class hd::data_parallel<legal_plan, hd::self, hd::adamw>;

#if FAIL == 1
constexpr auto illegal = hd::strategy{.compressor = hd::cast<hd::float16>{}, .mode = hd::hogwild<>{}};
template class hd::data_parallel<std::remove_const_t<decltype(illegal)>, hd::self, hd::sgd>;
#elif FAIL == 2
constexpr auto illegal = hd::strategy{.mode = hd::hogwild<>{}, .precision = hd::mixed<hd::bfloat16>{}};
template class hd::data_parallel<std::remove_const_t<decltype(illegal)>, hd::self, hd::sgd>;
#elif FAIL == 3
template class hd::data_parallel<legal_plan, hd::self, hd::ftrl>;
#elif FAIL == 4
constexpr auto illegal = hd::strategy{.mode = hd::hogwild<hd::adamw>{}};
#endif

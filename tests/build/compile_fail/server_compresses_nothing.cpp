// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// A parameter server, under a compressor.
// EXPECT: heddle::data_parallel: .mode sends to servers, so .compressor must be none{}
#include <heddle/comm/self.hpp>
#include <heddle/compress/cast.hpp>
#include <heddle/trainer/server.hpp>

namespace hd = heddle;

constexpr auto legal = hd::strategy{.mode = hd::async_ps{}};
template class hd::data_parallel<std::remove_const_t<decltype(legal)>, hd::self, hd::sgd>;

#if FAIL == 1
constexpr auto illegal = hd::strategy{.compressor = hd::cast<hd::float16>{}, .mode = hd::async_ps{}};
template class hd::data_parallel<std::remove_const_t<decltype(illegal)>, hd::self, hd::sgd>;
#endif

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The programs that README.md and docs/trainer.md show, as they stand there.
#include <heddle/mode/adaptive_period.hpp>
#include <heddle/mode/elastic_sgd.hpp>
#include <heddle/mode/geo_sgd.hpp>
#include <heddle/mode/outer_momentum.hpp>
#include <heddle/mode/zero1.hpp>
#include <heddle/trainer/hogwild.hpp>
#include <heddle/trainer/server.hpp>

#include "support.hpp"

#include <heddle/collective/verify.hpp>

namespace {
struct batch {
  std::size_t first;
};

// What the text leaves to the reader: a model and its data.
struct model_type : quadratic {
  template <class Ready>
  void backward(std::span<float* const> parameters, batch b, Ready&& ready) {
    if (parameters[0] != w.data()) hd::vector_asm::read(parameters[0], w.data(), count);  // others write them
    gradient(w.data(), g.data(), b.first, 2);
    for (std::size_t i = sizes.size(); i-- > 0;) ready(i);
  }
};
struct data_type {};

template <class Comm>
std::vector<batch> shard(data_type, Comm& comm) {
  std::vector<batch> b;
  for (std::size_t s = 0; s < 60; ++s) b.push_back({first_sample(s, comm.rank(), comm.size(), 2)});
  return b;
}
const data_type data{};
std::vector<float> last;

// example-begin train
constexpr auto plan = hd::strategy{
    .topology   = hd::hierarchical{hd::ring{}, hd::ring{}},
    .compressor = hd::clip{.max_norm = 40.0} | hd::dgc{.sparsity = 0.9, .dense_below = 500},
    .mode       = hd::every_step{}};  // omitted slots take defaults

void train() {
  hd::threads::run(4, [&](auto& comm) {
    model_type model;
    hd::data_parallel dp{plan, comm, model.tensors(), hd::sgd{.momentum = 0.9f}};
    for (auto batch : shard(data, comm)) {
      model.backward(dp.parameters(), batch, [&](std::size_t i) { dp.ready(i); });  // overlaps with backward
      dp.step({.lr = 0.02f});
    }
    // example-end
    if (comm.rank() == 0) last = model.w;
  });
}

// example-begin hypercube
struct hypercube {  // for a power of two
  constexpr hd::schedule all_reduce(int rank, int size, std::size_t count) const {
    hd::schedule s;
    for (int bit = 1; bit < size; bit *= 2) {
      s.add(hd::action::send, rank ^ bit, {0, count});
      s.add(hd::action::reduce, rank ^ bit, {0, count});
      s.next();
    }
    return s;
  }
};
static_assert(hd::verify(hypercube{}, 8));  // proven by the compiler; heddle/collective/verify.hpp
// example-end

// example-begin upper_half
struct upper_half {  // send the upper half of each float
  using wire = hd::bfloat16;
  void encode(hd::slice<const float> g, wire* out, float factor) const {
    hd::convert_scaled(g.data, out, g.count, factor);
  }
  void decode(const wire* in, hd::slice<float> g) const { hd::convert(in, g.data, g.count); }
};
constexpr auto mine = hd::strategy{.topology = hypercube{}, .compressor = upper_half{}};
// example-end

// example-begin same_source
template <class Plan>
std::vector<float> any_mode(const Plan& strategy, float lr) {
  std::vector<float> w;
  hd::threads::run(4, [&](auto& comm) {
    model_type model;
    hd::data_parallel dp{strategy, comm, model.tensors(), hd::sgd{}};
    for (auto batch : shard(data, comm)) {
      model.backward(dp.parameters(), batch, [&](std::size_t i) { dp.ready(i); });
      dp.step({.lr = lr});
    }
    dp.join();
    if (comm.rank() == 0) w = model.w;
  });
  return w;
}
// example-end
}  // namespace

TEST_CASE("the README's program trains") {
  train();
  CHECK(quadratic::loss(last) < 0.3 * quadratic::loss(std::vector<float>(quadratic::count, 0.5f)));
}

TEST_CASE("a user's own topology and compressor train") {
  const auto w = ::train(mine, hd::sgd{}, 4, 60, 0.05f);
  CHECK(all_equal(w));
  CHECK(distance(w[0], reference(4, 60, 2, momentum_oracle(static_cast<double>(0.05f), 0.0, 0.0, false))) < 2e-2);
}

TEST_CASE("one trainer source runs under every mode") {
  const double start = quadratic::loss(std::vector<float>(quadratic::count, 0.5f));
  const auto learns = [&](const auto& mode) {
    CAPTURE(mode.name());
    CHECK(quadratic::loss(any_mode(hd::strategy{.mode = mode}, 0.05f)) < 0.1 * start);
  };
  learns(hd::every_step{});
  learns(hd::zero1{});
  learns(hd::local_sgd{.period = 8});
  learns(hd::diloco{.period = 8});
  learns(hd::slow_momentum{.period = 8});
  learns(hd::block_momentum{.period = 8});
  learns(hd::elastic_sgd{.period = 8});
  learns(hd::geo_sgd{.period = 8});
  learns(hd::heuristic_average{});
  learns(hd::hogwild<>{});
  learns(hd::async_ps{});
  // It adds up what four replicas move, however seldom they hear of each other.
  CHECK(quadratic::loss(any_mode(hd::strategy{.mode = hd::async_geo_sgd{.period = 8}}, 0.004f)) < 0.5 * start);
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Tensors that are cut where a bucket is full train as whole ones do.
#include <heddle/mode/zero1.hpp>

#include "support.hpp"

namespace {
constexpr hd::buckets whole{.first = 1u << 20}, cut{.first = 300, .cap = 1000, .split = true};

// Parameters of rank 0; messages of the exchange of gradients.
struct trained {
  std::vector<float> w;
  std::uint64_t messages = 0;
};

// A run that is cut in two by a checkpoint.
struct journey {
  int ranks = 3;
  std::size_t from = 0, to = 6;
  std::string save{}, load{};
};

template <class Plan, class Rule>
trained run(Plan plan, const Rule& rule, const hd::buckets& b, std::size_t lanes = 1, bool apart = false,
            const journey& j = {}) {
  using element = typename decltype(plan.precision)::element;
  plan.buckets = b;
  plan.lanes = lanes;
  trained out;
  hd::threads::run({.ranks = j.ranks, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
    const std::size_t gap = apart ? 3 : 0;
    std::vector<element> w(quadratic::count, element(0.5f)), g(quadratic::count + 5 * gap);
    auto tensors = hd::tensors(w.data(), g.data(), quadratic::sizes);
    for (std::size_t t = 0; t < tensors.size(); ++t)
      tensors[t].gradient = static_cast<element*>(tensors[t].gradient) + t * gap;
    hd::data_parallel dp{plan, comm, tensors, rule};
    if (!j.load.empty()) dp.load(j.load);
    const auto before = dp.report().messages;
    for (std::size_t s = j.from; s < j.to; ++s) {
      std::vector<float> wide(w.begin(), w.end()), now(quadratic::count);
      quadratic::gradient(wide.data(), now.data(), first_sample(s, comm.rank(), j.ranks, 2), 2);
      dp.begin({.samples = apart ? 1.0 : 1.0 + comm.rank()});  // what is copied takes weights in two roundings
      std::size_t at = 0;
      for (std::size_t t = 0; t < tensors.size(); at += tensors[t++].count) {
        for (std::size_t i = 0; i < tensors[t].count; ++i)
          static_cast<element*>(tensors[t].gradient)[i] = element(now[at + i] * dp.loss_scale());
      }
      for (std::size_t t = tensors.size(); t-- > 0;) dp.ready(t);
      dp.step({.lr = 0.05f});
    }
    dp.join();
    if (!j.save.empty()) dp.save(j.save);
    if (comm.rank() != 0) return;
    out = {{w.begin(), w.end()}, dp.report().messages - before};
  });
  return out;
}
}  // namespace

TEST_CASE("tensors that are cut train as whole ones, bit for bit") {
  const auto same = [](const auto& plan, const auto& rule) {
    const trained a = run(plan, rule, whole), b = run(plan, rule, cut);
    CHECK((a.w == b.w));
    CHECK(b.messages >= 4 * a.messages);  // 4164 bytes: 300, and 1000 in each of the others
    CHECK((run(plan, rule, cut, 3).w == a.w));
    CHECK((run(plan, rule, cut, 2, true).w == run(plan, rule, whole, 1, true).w));
  };
  const hd::sgd momentum{.momentum = 0.9f, .weight_decay = 0.01f};
  same(hd::strategy{.topology = hd::direct{}}, momentum);
  same(hd::strategy{.topology = hd::direct{}, .mode = hd::zero1{}}, hd::adamw{});
  same(hd::strategy{.topology = hd::direct{}, .compressor = hd::cast<hd::bfloat16>{}}, momentum);
  same(hd::strategy{.topology = hd::direct{}, .precision = hd::mixed<hd::bfloat16>{}}, momentum);
  same(hd::strategy{.topology = hd::direct{}, .mode = hd::zero1{}, .precision = hd::mixed<hd::bfloat16>{}},
       hd::adamw{});
  same(hd::strategy{.topology = hd::direct{}, .mode = hd::local_sgd{.period = 2}}, momentum);
}

TEST_CASE("a checkpoint of whole tensors goes on with cut ones, and the reverse, on fewer ranks too") {
  const auto go_on = [](const auto& plan, const auto& rule) {
    const scratch_directory of_whole, of_cut;
    run(plan, rule, whole, 1, false, {.to = 3, .save = of_whole.path()});
    run(plan, rule, cut, 1, false, {.to = 3, .save = of_cut.path()});
    const std::vector<float> at_once = run(plan, rule, whole).w;
    std::vector<float> fewer;
    for (const auto& d : {&of_whole, &of_cut}) {
      for (const auto& b : {whole, cut}) {
        const journey rest{.from = 3, .load = d->path()};
        CHECK((run(plan, rule, b, 2, false, rest).w == at_once));
        const journey on_two{.ranks = 2, .from = 3, .load = d->path()};
        const std::vector<float> here = run(plan, rule, b, 1, true, on_two).w;
        if (fewer.empty()) fewer = here;
        CHECK((here == fewer));
      }
    }
  };
  go_on(hd::strategy{.topology = hd::direct{}}, hd::sgd{.momentum = 0.9f, .weight_decay = 0.01f});
  go_on(hd::strategy{.topology = hd::direct{}, .mode = hd::zero1{}}, hd::adamw{});
  go_on(hd::strategy{.topology = hd::direct{}, .mode = hd::zero1{}, .precision = hd::mixed<hd::bfloat16>{}},
        hd::adamw{});
}

TEST_CASE("what sends whole tensors refuses to cut them") {
  const auto refused = [](const auto& plan) {
    CHECK_THROWS_AS(run(plan, hd::sgd{.momentum = 0.9f}, cut), hd::argument_error);
  };
  refused(hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .dense_below = 10}});
  refused(hd::strategy{.compressor = hd::clip{} | hd::none{}});
}

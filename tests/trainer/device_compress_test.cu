// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// data_parallel over tensors of a device with compressors that hold back, against the same training on the host.
#include "../support/catch.hpp"
#include "device_support.cuh"
#include "rank_check.hpp"

#include <heddle/collective/hierarchical.hpp>
#include <heddle/compress/clip.hpp>

using namespace device_trainer;

TEST_CASE("device trainer: compressors that hold back send what they send on the host") {
  const auto plan = [](auto compressor) {
    return hd::strategy{.topology = in_rank_order, .compressor = compressor, .buckets = tight};
  };
  const hd::random_k random{.density = 0.2, .dense_below = 10};
  const hd::error_feedback top{hd::top_k{.density = 0.1, .dense_below = 10}};
  CHECK(compare(plan(random), hd::sgd{.momentum = 0.9f}) == "");
  CHECK(compare(plan(hd::error_feedback{random}), hd::sgd{}, 3, {.bad_step = 2}) == "");
  CHECK(compare(plan(top), hd::sgd{.momentum = 0.9f}) == "");
  CHECK(compare(plan(top), hd::sgd{}, 2, {.steps = 8, .bad_step = 2, .uneven = true}) == "");
  CHECK(resume(plan(top), hd::sgd{.momentum = 0.9f}, rounding) == "");
  CHECK(compare(plan(hd::error_feedback{random}), hd::sgd{}, 3, {.steps = 8, .slow_from = 3}, 2e-6) == "");
  CHECK(compare(plan(top), hd::sgd{}, 3, {.steps = 8, .slow_from = 3}, 2e-6) == "");
  const auto mixed = hd::strategy{
      .topology = in_rank_order, .compressor = top, .precision = hd::mixed<hd::bfloat16>{}, .buckets = tight};
  CHECK(compare(mixed, hd::sgd{.momentum = 0.9f}, 3, {.bad_step = 2}, rounding ? 2e-2 : 0.0) == "");
}

TEST_CASE("device trainer: top_k sends no more bytes than a dense sum") {
  // 3 ranks: a third of the elements in slots of 8 bytes is as much as a ring of floats moves.
  const auto run = [](double density, std::size_t dense_below) {
    const hd::error_feedback top{hd::top_k{.density = density, .dense_below = dense_below}};
    return on_devices(hd::strategy{.topology = in_rank_order, .compressor = top, .buckets = tight},
                      hd::sgd{.momentum = 0.9f}, 3, {}, first, threads_on_a_device);
  };
  const auto dense = run(1.0, 5000);
  for (const double density : {1.0, 0.4, 0.335}) {
    const auto got = run(density, 0);
    for (std::size_t r = 0; r < 3; ++r) {
      CHECK(got[r].report.bytes_sent == dense[r].report.bytes_sent);
      CHECK(got[r].w == dense[r].w);
    }
  }
  for (const double density : {0.3, 0.1}) CHECK(run(density, 0)[0].report.bytes_sent < dense[0].report.bytes_sent);
}

TEST_CASE("device trainer: dgc in its dense phase is momentum SGD, and goes on from a checkpoint", "[big]") {
  const hd::sgd momentum{.momentum = 0.9f, .nesterov = true, .weight_decay = 0.01f};
  const auto plan = [](hd::dgc c) {
    c.selection = hd::selection::sampled;
    return hd::strategy{.topology = in_rank_order, .compressor = c, .buckets = tight};
  };
  CHECK(compare(plan({.begin_step = 100}), momentum) == "");
  const auto bytes = [&](const hd::dgc& c) {  // of all ranks
    std::uint64_t all = 0;
    for (const outcome& o : on_devices(plan(c), momentum, 3, {}, first, threads_on_a_device))
      all += o.report.bytes_sent;
    return all;
  };
  const auto dense = bytes({.begin_step = 100});
  for (const double sparsity : {0.0, 0.5, 0.74}) CHECK(bytes({.sparsity = sparsity, .dense_below = 0}) <= dense);
  CHECK(bytes({.sparsity = 0.9, .dense_below = 0}) < dense);
  for (const bool exact : {true, false}) {  // what devices don't do is refused
    auto other = plan({});
    if (exact)
      other.compressor.selection = hd::selection::exact;
    else
      other.compressor.values = hd::sparse_values::f16;
    CHECK_THROWS_AS(on_devices(other, momentum, 1, {}, first, threads_on_a_device), hd::argument_error);
  }
  const scratch_directory here;
  const auto run = [&](const course& c) {
    return on_devices(plan({.sparsity = 0.9, .dense_below = 10}), momentum, 3, c, first, threads_on_a_device);
  };
  const auto whole = run({.save_at_3 = here.path()});
  CHECK(run({.steps = 3, .load = here.path()})[0].w == whole[0].w);
  CHECK_NOTHROW(on_host(plan({.sparsity = 0.9, .dense_below = 10}), momentum, 2, {.steps = 2, .load = here.path()}));
}

// Without momentum each rank's gradients, clipped and with decay, are what was sent and what is held: the mean of parameters
// at a rate of 1. Returns what is wrong; `twin` receives parameters and what is held, of all ranks.
struct regime {
  course c;
  float decay = 0.0f;
  bool weights = false;  // rank r has 1 + r samples
  double max_norm = INFINITY;
  int ranks = 3;
};
template <class Plan>
std::string conserves(const Plan& plan, const regime& x, std::uint64_t expected, std::vector<float>& twin) {
  constexpr bool sharded = hd::detail::shards_packets<hd::detail::last_part<decltype(Plan::compressor)>>;
  const auto ranks = static_cast<std::size_t>(x.ranks);
  std::vector<std::vector<double>> in(ranks, std::vector<double>(count)), held = in;
  std::vector<std::vector<float>> w(ranks), left(ranks);
  std::vector<std::uint64_t> sent(ranks);
  hd::threads::run(x.ranks, [&](hd::threads::communicator& host) {
    device_test::rank_device compute(0), exchange(0);
    hd::threads::device_communicator comm(host, exchange.stream());
    device_model<float> m(x.c, compute);
    auto tensors = m.tensors();
    tensors[2].group = 1;
    hd::data_parallel dp{plan, comm, tensors, hd::sgd{.weight_decay = x.decay}};
    const auto r = static_cast<std::size_t>(comm.rank());
    const double weight = x.weights ? x.ranks * (1.0 + comm.rank()) / (x.ranks * (x.ranks + 1) / 2) : 1.0;
    auto decays = static_cast<double>(x.decay);
    for (std::size_t s = 0; s < x.c.steps; ++s) {
      if (s == 7) {
        bool refused = false;
        const hd::group_options other[] = {{.decay_scale = 0.5f}, {.decay_scale = 0.25f}};
        try {
          dp.groups(other);
        } catch (const hd::argument_error&) {
          refused = true;
        }
        RANK_CHECK(refused == (x.decay != 0.0f));
        const hd::group_options halves[] = {{.decay_scale = 0.5f}, {.decay_scale = 0.5f}};
        dp.groups(halves);
        decays *= 0.5;
      }
      const std::vector<float> before = m.parameters();
      if (x.weights) dp.begin({.samples = 1.0 + comm.rank()});
      for (std::size_t t = sizes.size(); t-- > 0;) {
        m.backward(t, comm.rank(), s, 1.0f);
        if (comm.rank() == 1 && s == x.c.bad_step && t == 2) m.spoil(t);
        m.ready(dp, t);
      }
      const bool skipped = m.step(dp, {.lr = x.c.lr}).skipped;
      RANK_CHECK(skipped == (s == x.c.bad_step));
      for (std::size_t t = 0, at = 0; !skipped && t < sizes.size(); at += sizes[t++]) {
        double squares = 0.0;
        for (std::size_t i = at; i < at + sizes[t]; ++i) {
          const auto g = static_cast<double>(before[i] - goal(comm.rank(), s, i));
          squares += g * g;
        }
        const double norm = weight * std::sqrt(squares), limit = x.max_norm * std::sqrt(static_cast<double>(x.ranks));
        for (std::size_t i = at; i < at + sizes[t]; ++i) {
          const auto now = static_cast<double>(before[i]);
          in[r][i] +=
              weight * (norm > limit ? limit / norm : 1.0) * (now - static_cast<double>(goal(comm.rank(), s, i))) +
              decays * now;
        }
      }
    }
    w[r] = m.parameters();
    sent[r] = dp.report().elements_sent;
    const auto own = [&](auto&& f) {  // f(part of what is held, where it begins in the tensor, how much)
      if constexpr (sharded) {        // all in one bucket: tensor 2, then tensor 4
        auto parts = plan.topology.inside(comm.rank(), x.ranks, 1033);
        std::vector<hd::interval> owned(parts.owned().begin(), parts.owned().end());
        std::sort(owned.begin(), owned.end(), [](auto a, auto b) { return a.begin < b.begin; });
        for (const hd::interval& p : owned)
          for (std::size_t i = p.begin; i < p.end(); ++i) f(i < 1000 ? 2 : 4, i < 1000 ? i : i - 1000);
      } else {
        for (const std::size_t t : {2, 4})
          for (std::size_t i = 0; i < sizes[t]; ++i) f(t, i);
      }
    };
    for (const int slot : {0, 1}) {
      const std::vector<float> here[2] = {dp.held(2, slot), dp.held(4, slot)};
      std::size_t at[2] = {0, 0};
      own([&](std::size_t t, std::size_t i) {
        const float v = here[t / 4][at[t / 4]++];
        left[r].push_back(v);
        if (slot == 1) held[r][t == 2 ? 7 + i : 1008 + i] = static_cast<double>(v);
      });
      RANK_CHECK(at[0] == here[0].size());
      RANK_CHECK(at[1] == here[1].size());
    }
  });
  for (std::size_t r = 1; r < ranks; ++r) {
    if (w[r] != w[0]) return "ranks differ";
  }
  double worst = 0.0, kept = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    double back = 0.0, all = 0.0;
    for (std::size_t r = 0; r < ranks; ++r) {
      all += in[r][i] / x.ranks;
      back += held[r][i];
    }
    kept += std::fabs(back);
    // Parameters are rounded in each step, to 3e-8 of some 0.5, and divided by the rate.
    worst =
        std::fmax(worst, std::fabs((0.5 - static_cast<double>(w[0][i])) / static_cast<double>(x.c.lr) - (all - back)));
  }
  twin = w[0];
  for (const auto& here : left) twin.insert(twin.end(), here.begin(), here.end());
  if (worst >= 2e-3) return "lost " + std::to_string(worst);
  if (!(kept > (x.max_norm < 1e3 ? 1.0 : 100.0))) return "held only " + std::to_string(kept);
  if (expected && sent[0] != expected) return "sent " + std::to_string(sent[0]) + ", not " + std::to_string(expected);
  return {};
}

TEST_CASE("device trainer: dgc loses nothing, in one pass or in halves, clipped or not", "[big]") {
  const auto plan = [](bool late, auto before) {
    const hd::dgc c{.sparsity = 0.9,
                    .begin_step = 1,
                    .warmup_steps = 4,
                    .dense_below = 10,
                    .selection = hd::selection::sampled,
                    .overlap = late ? hd::overlap::none : hd::overlap::transactional};
    return hd::strategy{.topology = in_rank_order, .compressor = before(c), .buckets = tight};
  };
  const auto plain = [](const hd::dgc& c) { return c; };
  const auto clipped = [](const hd::dgc& c) { return hd::clip{.max_norm = 0.5f} | c; };
  const course steps{.steps = 12, .lr = 1e-3f}, bad{.steps = 12, .lr = 1e-3f, .bad_step = 5};
  for (const regime& x : {regime{steps}, regime{bad}, regime{steps, 0.5f}, regime{bad, 0.5f, true}}) {
    std::vector<float> halves, whole;
    std::uint64_t expected[2] = {};
    for (const bool late : {false, true}) {
      const hd::dgc& c = plan(late, plain).compressor;
      for (std::size_t s = 0, taken = 0; s < x.c.steps; ++s) {
        const auto room = [&](std::size_t n) {
          const std::size_t k = c.entries(n, {.step = taken});
          if (late && s == x.c.bad_step) return std::size_t{0};  // nothing travels before all know
          const std::size_t most = (std::min)(n, k + k / 4);     // alone in its bucket, or with one that is not sent
          return 3 * (4 + 8 * most) >= 8 * n ? n : most;         // as many bytes as a dense sum: then that
        };
        expected[late] += taken == 0 ? count : 8 + room(1000) + room(33);
        taken += s != x.c.bad_step;
      }
    }
    CHECK(expected[0] < 12 * count / 2);
    CHECK(conserves(plan(false, plain), x, expected[0], halves) == "");
    CHECK(conserves(plan(true, plain), x, expected[1], whole) == "");
    CHECK(halves == whole);
  }
  for (regime x : {regime{steps}, regime{bad, 0.5f, true}}) {
    std::vector<float> halves, whole;
    x.max_norm = 0.5;
    CHECK(conserves(plan(false, clipped), x, 0, halves) == "");
    CHECK(conserves(plan(true, clipped), x, 0, whole) == "");
    CHECK(halves == whole);
  }
}

TEST_CASE("device trainer: clipped gradients are those of the host") {
  const auto plan = [](auto compressor) {
    return hd::strategy{
        .topology = in_rank_order, .compressor = hd::clip{.max_norm = 2.0f} | compressor, .buckets = tight};
  };
  const hd::sgd momentum{.momentum = 0.9f};
  CHECK(compare(plan(hd::none{}), momentum, 3, {.bad_step = 2}, 2e-6) == "");
  CHECK(compare(plan(hd::cast<hd::bfloat16>{}), momentum, 2, {.steps = 8, .uneven = true}, 1e-3) == "");
  const hd::error_feedback top{hd::top_k{.density = 0.1, .dense_below = 10}};
  CHECK(compare(plan(top), momentum, 3, {.bad_step = 2}, 2e-6) == "");
  CHECK(compare(plan(hd::clip{.max_norm = 1.0f} | hd::random_k{.density = 0.2, .dense_below = 10}), momentum, 3, {},
                2e-6) == "");
  const hd::dgc dense{.begin_step = 100, .selection = hd::selection::sampled};
  CHECK(compare(plan(dense), momentum, 3, {}, 2e-6) == "");
}

TEST_CASE("device trainer: sharded dgc holds and sends parts of the group's gradient, and loses nothing", "[big]") {
  const auto plan = [](bool late, hd::dgc c) {
    c.selection = hd::selection::sampled;
    c.overlap = late ? hd::overlap::none : hd::overlap::transactional;
    return hd::strategy{.topology = hd::hierarchical{hd::ring{}, hd::ring{}, 2},
                        .compressor = hd::clip{.max_norm = 0.5f} | hd::sharded{c},
                        .buckets = hd::buckets{.first = 1 << 20, .cap = 1 << 20}};
  };
  const hd::dgc sparse{.sparsity = 0.9, .begin_step = 1, .warmup_steps = 4, .dense_below = 10};
  const course steps{.steps = 12, .lr = 1e-3f}, bad{.steps = 12, .lr = 1e-3f, .bad_step = 5};
  for (const int ranks : {4, 3}) {  // two groups of two; 2 + 1
    for (const regime& x : {regime{steps, 0.0f, false, 0.5, ranks}, regime{bad, 0.5f, true, 0.5, ranks}}) {
      std::vector<float> halves, whole;
      CHECK(conserves(plan(false, sparse), x, 0, halves) == "");
      CHECK(conserves(plan(true, sparse), x, 0, whole) == "");
      CHECK(halves == whole);
    }
  }
  const hd::sgd momentum{.momentum = 0.9f, .nesterov = true, .weight_decay = 0.01f};
  CHECK(compare(plan(false, {.begin_step = 100, .dense_below = 10}), momentum, 4, {}, 1e-5) == "");
  const scratch_directory here, there;
  const auto run = [&](int ranks, const course& c) {
    return on_devices(plan(false, sparse), momentum, ranks, c, first, threads_on_a_device);
  };
  const auto whole = run(4, {.save_at_3 = here.path()});
  CHECK(run(4, {.steps = 3, .load = here.path()})[1].w == whole[1].w);
  CHECK_NOTHROW(run(3, {.steps = 2, .load = here.path()}));
  CHECK_NOTHROW(on_host(plan(false, sparse), momentum, 4, {.steps = 2, .load = here.path()}));
  on_host(plan(false, sparse), momentum, 4, {.save_at_3 = there.path()});
  CHECK_NOTHROW(run(4, {.steps = 2, .load = there.path()}));
}

TEST_CASE("device trainer: a step of dgc that would leave float's range in U or V is skipped") {
  for (const std::size_t begin_step : {100, 0}) {
    const auto plan = hd::strategy{
        .topology = in_rank_order,
        .compressor =
            hd::dgc{.sparsity = 0.9, .begin_step = begin_step, .dense_below = 10, .selection = hd::selection::sampled},
        .buckets = tight};
    hd::threads::run(2, [&](hd::threads::communicator& host) {
      device_test::rank_device compute(0), exchange(0);
      hd::threads::device_communicator comm(host, exchange.stream());
      device_model<float> m({}, compute);
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
      for (std::size_t s = 0; s < 6; ++s) {
        for (std::size_t t = sizes.size(); t-- > 0;) {
          hd::cuda::fill(static_cast<float*>(m.tensors()[t].gradient), sizes[t], 1e38f, compute.queue());
          m.ready(dp, t);
        }
        m.step(dp, {.lr = 1e-38f});
      }
      RANK_CHECK(dp.report().skipped > 0);
      RANK_CHECK(dp.report().steps > 1);
      std::vector<float> all = m.parameters();
      for (const std::size_t t : {std::size_t{2}, std::size_t{4}}) {
        for (const int slot : {0, 1}) {
          const std::vector<float> here = dp.held(t, slot);
          all.insert(all.end(), here.begin(), here.end());
        }
      }
      bool finite = true;
      for (const float x : all) finite = finite && std::isfinite(x);
      RANK_CHECK(finite);
    });
  }
}

TEST_CASE("device trainer: an exchange begins behind the last update, whatever queue has it") {
  const auto plan = hd::strategy{.topology = in_rank_order,
                                 .compressor = hd::error_feedback{hd::top_k{.density = 0.25, .dense_below = 10}},
                                 .precision = hd::mixed<hd::bfloat16>{},
                                 .buckets = tight};
  hd::threads::run(2, [&](hd::threads::communicator& host) {
    device_test::rank_device backward(0), updates(0), exchange(0);
    hd::threads::device_communicator comm(host, exchange.stream());
    device_model<hd::bfloat16> m({}, backward);
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
    for (const float g : {1.0f, 2.0f}) {  // gradients that need no parameters
      for (std::size_t t = sizes.size(); t-- > 0;) {
        hd::cuda::fill(static_cast<hd::bfloat16*>(m.tensors()[t].gradient), sizes[t], hd::bfloat16(g * dp.loss_scale()),
                       backward.queue());
        m.ready(dp, t);
      }
      dp.step({.lr = 0.25f}, updates.queue());
    }
    updates.queue().synchronize();
    // Of equal values the first fourth is sent, then of what is held, 1 + 2, the next; small tensors as they are.
    std::vector<float> expected;
    for (const std::size_t n : sizes) {
      const std::size_t part = (n + 3) / 4;
      for (std::size_t i = 0; i < n; ++i)
        expected.push_back(n < 10 ? -0.25f : i < part ? 0.25f : i < 2 * part ? -0.25f : 0.5f);
    }
    RANK_CHECK(m.parameters() == expected);
  });
}

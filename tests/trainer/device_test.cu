// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// data_parallel over tensors of a device, against the same training on the host.
#include "../support/catch.hpp"
#include "device_support.cuh"
#include "rank_check.hpp"

#include <heddle/comm/staged.cuh>
#include <heddle/optim/adamw.hpp>

#include <thread>

using namespace device_trainer;

TEST_CASE("device trainer: float gradients of several buckets train as on the host") {
  const hd::sgd momentum{.momentum = 0.9f, .nesterov = true, .weight_decay = 0.01f};
  for (const int ranks : {1, 2, 3}) {
    CHECK(compare(hd::strategy{.topology = in_rank_order, .buckets = tight}, momentum, ranks) == "");
    CHECK(compare(hd::strategy{.topology = hd::native{}}, hd::adamw{.weight_decay = 0.1f}, ranks) == "");
  }
  const auto ring = hd::strategy{.topology = any_topology{}, .buckets = tight};
  CHECK(compare(ring, momentum, 3, {.apart = true}) == "");
  const auto report = on_devices(ring, momentum, 2, {}, first, threads_on_a_device)[0].report;
  const auto same = on_host(ring, momentum, 2, {})[0].report;
  CHECK(report.state_bytes == same.state_bytes);
  CHECK(report.elements_sent == same.elements_sent);
  CHECK(report.bytes_sent == same.bytes_sent);
  CHECK(report.executor == "schedule: any");
}

TEST_CASE("device trainer: tensors that are cut train as on the host") {
  constexpr hd::buckets cut{.first = 300, .cap = 1000, .split = true};
  const auto plan = hd::strategy{.topology = in_rank_order, .buckets = cut};
  const hd::sgd momentum{.momentum = 0.9f, .nesterov = true, .weight_decay = 0.01f};
  CHECK(compare(plan, momentum) == "");
  CHECK(compare(plan, momentum, 3, {.apart = true}) == "");
  CHECK(compare(plan, hd::sgd{.momentum = 0.9f}, 3, {.steps = 8, .bad_step = 1, .uneven = true}) == "");
  CHECK(resume(plan, hd::sgd{.momentum = 0.9f}, rounding) == "");
  const auto whole = hd::strategy{.topology = in_rank_order, .buckets = tight};
  CHECK(on_devices(plan, momentum, 2, {}, first, threads_on_a_device)[0].report.messages >
        on_devices(whole, momentum, 2, {}, first, threads_on_a_device)[0].report.messages);
}

TEST_CASE("device trainer: ranks whose sums differ agree whether a step counts") {
  const auto alone = hd::strategy{.topology = any_topology{.none = true}, .buckets = tight};
  const auto runs = on_devices(alone, hd::sgd{.momentum = 0.9f}, 3, {.bad_step = 2}, first, threads_on_a_device);
  for (const outcome& o : runs) {
    CHECK(o.results[2].skipped);
    CHECK(o.report.skipped == 1);
  }
}

TEST_CASE("device trainer: device memory through pinned memory, too") {
  const auto plan = hd::strategy{.topology = any_topology{}, .buckets = tight};
  const hd::sgd rule{.momentum = 0.9f};
  const auto got = on_devices(plan, rule, 3, {}, first, [](hd::threads::communicator& host, cudaStream_t stream) {
    return hd::staged<hd::threads::communicator>(host, stream);
  });
  CHECK(differ(on_host(plan, rule, 3, {}), got, rounding) == "");
}

TEST_CASE("device trainer: weights by samples, ranks that end early, limits and skipped steps are those of the host") {
  const auto plan = hd::strategy{.topology = in_rank_order, .buckets = tight};
  CHECK(compare(plan, hd::sgd{.momentum = 0.9f}, 3, {.steps = 8, .uneven = true}) == "");
  CHECK(compare(plan, hd::sgd{.momentum = 0.9f}, 3, {.steps = 8, .uneven = true, .apart = true}) == "");
  CHECK(compare(plan, hd::sgd{.momentum = 0.9f}, 3, {.bad_step = 2}) == "");
  CHECK(compare(plan, hd::sgd{}, 3, {.max_value = 0.3f}) == "");
  CHECK(compare(plan, hd::sgd{}, 3, {.max_value = 3e38f}) == "");
  CHECK(compare(plan, hd::sgd{.momentum = 0.9f}, 3, {.max_norm = 1.5f}, 1e-6) == "");
  CHECK(compare(plan, hd::sgd{.momentum = 0.9f}, 3, {.max_norm = 1.5f, .bad_step = 1}, 1e-6) == "");
}

TEST_CASE("device trainer: 16-bit wires and 16-bit models train as on the host") {
  const auto wire = hd::strategy{.topology = in_rank_order, .compressor = hd::cast<hd::bfloat16>{}};
  CHECK(compare(wire, hd::sgd{.momentum = 0.9f}) == "");
  CHECK(compare(wire, hd::sgd{}, 3, {.steps = 8, .bad_step = 1, .uneven = true}) == "");
  const auto mixed = hd::strategy{.topology = hd::native{},
                                  .precision = hd::mixed<hd::float16>{.scale = 1024.0f, .growth = 2, .patience = 1},
                                  .buckets = tight};
  const double step = rounding ? 2e-3 : 0.0;  // of 16 bits
  CHECK(compare(mixed, hd::sgd{.momentum = 0.9f}, 3, {.bad_step = 2, .apart = true}, step) == "");
  CHECK(compare(mixed, hd::sgd{}, 3, {.max_norm = 1.0f}, 2e-3) == "");
  CHECK(resume(mixed, hd::sgd{.momentum = 0.9f}, step) == "");
}

TEST_CASE("device trainer: a bucket travels while the rest of backward isn't even enqueued") {
  hd::threads::run({.ranks = 2, .deadline = std::chrono::seconds(20)}, [](hd::threads::communicator& host) {
    device_test::rank_device compute(0), exchange(0);
    hd::threads::device_communicator comm(host, exchange.stream());
    device_model<float> m({}, compute);
    hd::data_parallel dp{hd::strategy{.topology = in_rank_order, .buckets = tight}, comm, m.tensors(), hd::sgd{}};
    m.backward(4, comm.rank(), 0, 1.0f);
    m.ready(dp, 4);  // 132 bytes: the first bucket
    const float mean = 0.5f - 0.5f * (goal(0, 0, 1008) + goal(1, 0, 1008));
    // What travels is counted just after it was enqueued, behind the kernels that make it; before that this queue may not
    // look at it.
    float first = 0.0f;
    for (int tries = 0; first != mean && tries < 15000; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (dp.report().elements_sent < 33) continue;  // in the middle of a step
      hd::cuda::copy(static_cast<const float*>(m.tensors()[4].gradient), &first, 1, exchange.queue());
      exchange.queue().synchronize();
    }
    RANK_CHECK(first == mean);
    for (std::size_t t = 4; t-- > 0;) {
      m.backward(t, comm.rank(), 0, 1.0f);
      m.ready(dp, t);
    }
    RANK_CHECK(!m.step(dp, {.lr = 0.1f}).skipped);
  });
}

TEST_CASE("device trainer: checkpoints go on bit for bit, and between host and device") {
  CHECK(resume(hd::strategy{.topology = in_rank_order, .buckets = tight}, hd::sgd{.momentum = 0.9f}, rounding) == "");
}

TEST_CASE("device trainer: wrong use is refused before anything moves") {
  hd::threads::run(2, [](hd::threads::communicator& host) {
    device_test::rank_device compute(0), exchange(0);
    hd::threads::device_communicator comm(host, exchange.stream());
    device_model<float> m({}, compute);
    const auto refused = [&](auto&& f) {
      try {
        f();
      } catch (const hd::argument_error& e) {
        return std::string(e.what());
      }
      return std::string("nothing was thrown");
    };
    std::vector<float> w(8), g(8);
    const std::size_t eight[] = {8};
    RANK_CHECK(refused([&] {
                 hd::data_parallel dp(hd::strategy{.topology = in_rank_order}, comm,
                                      hd::tensors(w.data(), g.data(), eight), hd::sgd{});
               }).find("is in host memory") != std::string::npos);
    RANK_CHECK(refused([&] {
                 hd::data_parallel dp(hd::strategy{.topology = in_rank_order, .lanes = 2}, comm, m.tensors(),
                                      hd::sgd{});
               }).find("allowed is 1") != std::string::npos);
    hd::data_parallel dp(hd::strategy{.topology = in_rank_order}, comm, m.tensors(), hd::sgd{},
                         hd::unused::treat_as_zero);
    RANK_CHECK(refused([&] { dp.step({.lr = -1.0f}, compute.queue()); }).find("lr") != std::string::npos);
    dp.ready(0, compute.queue());
    RANK_CHECK(refused([&] { dp.ready(0, compute.queue()); }).find("ready before") != std::string::npos);
    RANK_CHECK(!dp.step({.lr = 0.1f}, compute.queue()).skipped);  // the others count as zero
    RANK_CHECK(m.parameters()[500] == 0.5f);
  });
}

TEST_CASE("device trainer: factors of groups") {
  hd::threads::run(2, [](hd::threads::communicator& host) {
    device_test::rank_device compute(0), exchange(0);
    hd::threads::device_communicator comm(host, exchange.stream());
    device_model<float> m({}, compute);
    auto tensors = m.tensors();
    tensors[2].group = 1;
    hd::data_parallel dp{hd::strategy{.topology = in_rank_order}, comm, tensors, hd::sgd{.weight_decay = 0.5f}};
    const hd::group_options groups[2] = {{}, {.lr_scale = 0.0f}};
    dp.groups(groups);
    for (std::size_t t = sizes.size(); t-- > 0;) {
      m.backward(t, comm.rank(), 0, 1.0f);
      m.ready(dp, t);
    }
    m.step(dp, {.lr = 0.1f});
    const std::vector<float> w = m.parameters();
    RANK_CHECK(w[6] != 0.5f);
    RANK_CHECK(w[7] == 0.5f);
    RANK_CHECK(w[1006] == 0.5f);
    RANK_CHECK(w[1007] != 0.5f);
  });
}

TEST_CASE("device trainer: a rank that leaves ends the others with its name") {
  try {
    hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(20)}, [](hd::threads::communicator& host) {
      device_test::rank_device compute(0), exchange(0);
      hd::threads::device_communicator comm(host, exchange.stream());
      device_model<float> m({}, compute);
      hd::data_parallel dp{hd::strategy{.topology = in_rank_order, .buckets = tight}, comm, m.tensors(), hd::sgd{}};
      for (std::size_t t = sizes.size(); t-- > 0;) {
        m.backward(t, comm.rank(), 0, 1.0f);
        m.ready(dp, t);
        if (comm.rank() == 1 && t == 2) throw std::runtime_error("enough");
      }
      m.step(dp, {.lr = 0.1f});
    });
    FAIL("nobody threw");
  } catch (const std::runtime_error& e) {
    CHECK(std::string(e.what()) == "enough");
  }
}

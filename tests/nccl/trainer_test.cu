// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Trainers over NCCL: tensors of devices, and tensors of the host that travel through devices.

#include "../support/catch.hpp"
#include "../trainer/device_support.cuh"
#include "rank_check.hpp"

#include <heddle/comm/nccl.hpp>

#include <cstdio>

using namespace device_trainer;

namespace {
bool devices_for(int ranks) {
  int there = 0;
  static_cast<void>(cudaGetDeviceCount(&there));
  static_cast<void>(cudaGetLastError());
  if (there < ranks) std::printf("SKIP: %d devices for %d ranks\n", there, ranks);
  return there >= ranks;
}
int own(int rank) { return rank; }
auto over_nccl(hd::threads::communicator& host, cudaStream_t stream) { return hd::nccl::connect(host, stream); }

void launch_backward(std::size_t t, const float* parameters, float* gradients, std::span<const std::size_t> counts,
                     cudaStream_t stream) {
  std::size_t begin = 0;
  for (std::size_t k = 0; k < t; ++k) begin += counts[k];
  hd::cuda::for_each(counts[t], gradient<float>{parameters + begin, gradients + begin, begin, 0, 0, 1.0f}, {stream});
}
}  // namespace

// example-begin device_trainer
// Flat buffers in device memory and the stream of forward, backward and update, as in a trainer written by hand.
void train_on_device(hd::nccl::communicator& comm, float* parameters, float* gradients,
                     std::span<const std::size_t> counts, cudaStream_t stream) {
  const hd::cuda::queue q{stream};
  hd::data_parallel dp{hd::strategy{.topology = hd::native{}}, comm, hd::tensors(parameters, gradients, counts),
                       hd::sgd{.momentum = 0.9f}};
  for (int step = 0; step < 10; ++step) {
    for (std::size_t t = counts.size(); t-- > 0;) {
      launch_backward(t, parameters, gradients, counts, stream);  // your kernels
      dp.ready(t, q);  // when these are done its bucket leaves in the communicator's stream
    }
    dp.step({.lr = 0.1f}, q);  // enqueues the update behind the exchange
  }
}
// example-end

TEST_CASE("nccl: data_parallel trains tensors of devices") {
  if (!devices_for(2)) return;
  CHECK_NOTHROW(hd::threads::run(2, [](hd::threads::communicator& host) {
    device_test::rank_device compute(host.rank()), exchange(host.rank());
    hd::nccl::communicator comm = hd::nccl::connect(host, exchange.stream());
    const std::vector<float> start(count, 0.5f), zeros(count, 0.0f);
    const auto w = compute.put(start), g = compute.put(zeros);
    compute.queue().synchronize();
    train_on_device(comm, w.data(), g.data(), sizes, compute.stream());
    compute.queue().synchronize();
  }));
  const hd::sgd momentum{.momentum = 0.9f, .weight_decay = 0.01f};
  const auto schedule = hd::strategy{.topology = in_rank_order, .buckets = tight};
  const auto library = hd::strategy{.topology = hd::native{}};
  for (const int ranks : {2, 3}) {
    if (!devices_for(ranks)) return;
    const course c{.steps = 8, .bad_step = 2, .uneven = true};
    CHECK(differ(on_host(schedule, momentum, ranks, c), on_devices(schedule, momentum, ranks, c, own, over_nccl),
                 rounding) == "");
    CHECK(differ(on_host(library, momentum, ranks, {}), on_devices(library, momentum, ranks, {}, own, over_nccl),
                 2e-6) == "");
  }
}

TEST_CASE("nccl: data_parallel trains tensors of the host over devices") {
  if (!devices_for(3)) return;
  const auto plan = hd::strategy{.topology = in_rank_order, .buckets = tight};
  const hd::sgd momentum{.momentum = 0.9f};
  const course c{.steps = 8, .bad_step = 2, .uneven = true};
  std::vector<outcome> got(3);
  hd::threads::run(3, [&](hd::threads::communicator& host) {
    device_test::rank_device device(host.rank());
    hd::hosted comm(hd::nccl::connect(host, device.stream()));
    host_model<float> m(c);
    hd::data_parallel dp{plan, comm, m.tensors(), momentum};
    loop(m, dp, comm.rank(), c, got[static_cast<std::size_t>(comm.rank())]);
  });
  CHECK(differ(on_host(plan, momentum, 3, c), got, 0.0) == "");
}

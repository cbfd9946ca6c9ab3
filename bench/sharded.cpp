// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
// about: AdamW inside the all-reduce (ZeRO-1) against an all-reduce and an update on every rank, and memory traffic

// Two ranks on threads, fp32, AdamW, no clipping. "ours" is sharded_update over native{}: reduce-scatter, the norm of
// what each rank owns, update, all-gather. "peer_separate" gives the same bits in separate passes: the one-pass
// all-reduce of threads, a look for values that aren't finite, an update of everything on every rank. "floor_traffic"
// streams as many bytes as the fused step must move, a third of them written, in as many streams as an update has:
// each gradient is read once, each element's parameter and moments are read and written by one rank, and its parameter
// is written to the other: 4 (P + 6 + P - 1) bytes per element.
#include <heddle/collective/sharded_update.hpp>
#include <heddle/comm/threads.hpp>
#include <heddle/optim/adamw.hpp>

#include <benchmark/benchmark.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

namespace hd = heddle;

namespace {

constexpr int ranks = 2;
constexpr hd::adamw rule{.weight_decay = 0.1f};

double processor_seconds() {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Runs `make(comm)`'s result once per iteration on every rank; time is the processor time of rank 0, which doesn't
// change with what else runs on the machine as much as the time of day.
template <class Make> void run(benchmark::State& state, Make&& make) {
  hd::threads::run(ranks, [&](auto& comm) {
    auto step = make(comm);
    const auto timed = [&] {
      hd::barrier(comm);
      const double start = processor_seconds();
      step();
      return processor_seconds() - start;
    };
    timed();
    std::vector<std::size_t> go(1, 1);
    if (comm.rank() == 0) {
      for (auto _ : state) {
        hd::broadcast(comm, std::span(go));
        state.SetIterationTime(timed());
      }
      go[0] = 0;
      hd::broadcast(comm, std::span(go));
    } else {
      for (;;) {
        hd::broadcast(comm, std::span(go));
        if (!go[0]) break;
        timed();
      }
    }
  });
}

void ours(benchmark::State& state) {
  const auto n = static_cast<std::size_t>(state.range(0));
  run(state, [n](auto& comm) {
    return [&comm, n, p = std::vector<float>(n, 1.0f), g = std::vector<float>(n, 1e-3f),
            update = hd::sharded_update(hd::native{}, rule, comm.rank(), comm.size(), std::span(&n, 1))]() mutable {
      if (update(comm, std::span(g), std::span(p), {.lr = 1e-6f}).skipped) std::abort();
    };
  });
}

void separate(benchmark::State& state) {
  const auto n = static_cast<std::size_t>(state.range(0));
  run(state, [n](auto& comm) {
    return [&comm, n, p = std::vector<float>(n, 1.0f), g = std::vector<float>(n, 1e-3f), m = std::vector<float>(n),
            v = std::vector<float>(n), steps = std::size_t{0},
            reduce = hd::all_reduce_plan<hd::native>({}, comm.rank(), comm.size(), n)]() mutable {
      reduce(comm, g.data(), hd::leaf_of<float>(hd::mean{}));
      if (!hd::all_finite(g.data(), n)) std::abort();
      float* const moments[] = {m.data(), v.data()};
      rule.update(p.data(), g.data(), moments, n, {.lr = 1e-6f, .step = steps++});
    };
  });
}

// Reads two streams and writes one, as often as gives the bytes of the fused step.
void traffic(benchmark::State& state) {
  const auto n = static_cast<std::size_t>(state.range(0)), floats = n * (ranks + 6 + ranks - 1) / ranks / 3;
  run(state, [floats](auto&) {
    return [a = std::vector<float>(floats, 1.0f), b = std::vector<float>(floats, 1.0f),
            c = std::vector<float>(floats)]() mutable {
      for (std::size_t i = 0; i < a.size(); ++i) c[i] = a[i] + 0.5f * b[i];
      benchmark::DoNotOptimize(c.data());
      benchmark::ClobberMemory();
    };
  });
}

void sizes(benchmark::internal::Benchmark* b) {
  b->UseManualTime()->Unit(benchmark::kMillisecond)->Arg(1 << 20)->Arg(1 << 24);
}
BENCHMARK(ours)->Name("threads/ours")->Apply(sizes);
BENCHMARK(separate)->Name("threads/peer_separate")->Apply(sizes);
BENCHMARK(traffic)->Name("threads/floor_traffic")->Apply(sizes);

}  // namespace

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: a barrier of threads, also with more ranks than cores, against a limit of 100 us
#include <heddle/collective/gather.hpp>
#include <heddle/comm/threads.hpp>

#include <benchmark/benchmark.h>

#include <chrono>

namespace hd = heddle;

namespace {
constexpr int barriers = 500;

// Seconds of one barrier, over many in a row.
void ours(benchmark::State& state) {
  for (auto _ : state) {
    double seconds = 0.0;
    hd::threads::run(static_cast<int>(state.range(0)), [&](auto& comm) {
      hd::barrier(comm);
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < barriers; ++i) hd::barrier(comm);
      if (comm.rank() == 0) seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    });
    state.SetIterationTime(seconds / barriers);
  }
}

void limit(benchmark::State& state) {
  for (auto _ : state) state.SetIterationTime(100e-6);
}
}  // namespace

BENCHMARK(ours)->Name("barrier/ours")->Arg(2)->Arg(4)->Arg(8)->UseManualTime()->Iterations(20)->Unit(benchmark::kMicrosecond);
BENCHMARK(limit)->Name("barrier/floor_limit")->Arg(2)->Arg(4)->Arg(8)->UseManualTime()->Iterations(20)->Unit(benchmark::kMicrosecond);

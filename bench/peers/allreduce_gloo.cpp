// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// allreduce_gloo RANKS FOLDER BYTES CALLS SAMPLES...: times gloo::allreduce in place, a sum of floats, in RANKS processes
// over loopback; FOLDER is an empty folder in which they meet. Rank 0 prints "gloo <bytes> <seconds>" per sample: one
// call of CALLS in a row.
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace {
int run(int rank, int ranks, const std::string& folder, int argc, char** argv) {
  gloo::transport::tcp::attr where;
  where.hostname = "127.0.0.1";
  gloo::rendezvous::FileStore store(folder);
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
  auto device = gloo::transport::tcp::CreateDevice(where);
  context->connectFullMesh(store, device);
  for (int a = 0; a + 2 < argc; a += 3) {
    const std::size_t bytes = std::strtoull(argv[a], nullptr, 10), n = bytes / sizeof(float);
    const int calls = std::atoi(argv[a + 1]), samples = std::atoi(argv[a + 2]);
    std::vector<float> data(n, 1.0f);
    const auto reduce = [&] {
      gloo::AllreduceOptions o(context);
      o.setOutput(data.data(), n);
      o.setReduceFunction(static_cast<void (*)(void*, const void*, const void*, std::size_t)>(&gloo::sum<float>));
      gloo::allreduce(o);
    };
    reduce();
    if (data[n - 1] != static_cast<float>(ranks)) return 3;
    for (int s = 0; s < samples; ++s) {
      gloo::BarrierOptions together(context);
      gloo::barrier(together);
      const auto start = std::chrono::steady_clock::now();
      for (int c = 0; c < calls; ++c) reduce();
      const std::chrono::duration<double> t = std::chrono::steady_clock::now() - start;
      if (rank == 0) std::printf("gloo %zu %.9g\n", bytes, t.count() / calls);
    }
  }
  return 0;
}
}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const int ranks = std::atoi(argv[1]);
  int rank = 0;
  for (int r = 1; r < ranks && rank == 0; ++r) {
    if (fork() == 0) rank = r;
  }
  const int result = run(rank, ranks, argv[2], argc - 3, argv + 3);
  if (rank != 0) return result;
  bool good = result == 0;
  for (int r = 1; r < ranks; ++r) {
    int status = 0;
    wait(&status);
    good = good && status == 0;
  }
  return good ? 0 : 3;
}

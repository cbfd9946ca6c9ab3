// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// The stand-in for NCCL: what its calls give, and that it finds what NCCL leaves undefined.

#include "../support/catch.hpp"
#include "launch.hpp"

#include <emulated/control.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace nccl_standin {

// One rank: a thread with a device, a stream and 64 floats of which the i-th is rank + i.
struct rank {
  int number;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  float *in = nullptr, *out = nullptr;

  std::vector<float> result() const {
    std::vector<float> host(64);
    cudaMemcpyAsync(host.data(), out, sizeof(float) * 64, cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    return host;
  }
};

// Runs f on so many ranks; true if all said so.
bool on_ranks(int ranks, const std::function<bool(rank&)>& f, int blocking = 1) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  std::atomic<int> well = 0;
  std::vector<std::thread> threads;
  for (int number = 0; number < ranks; ++number) {
    threads.emplace_back([&, number] {
      rank r{.number = number};
      cudaSetDevice(number);
      cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking);
      std::vector<float> host(64);
      for (std::size_t i = 0; i < 64; ++i) host[i] = static_cast<float>(number + static_cast<int>(i));
      cudaMallocAsync(&r.in, sizeof(float) * 64, r.stream);
      cudaMallocAsync(&r.out, sizeof(float) * 64, r.stream);
      cudaMemcpyAsync(r.in, host.data(), sizeof(float) * 64, cudaMemcpyHostToDevice, r.stream);
      cudaStreamSynchronize(r.stream);
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = blocking;
      ncclResult_t code = ncclCommInitRankConfig(&r.comm, ranks, id, number, &config);
      while (code == ncclInProgress) ncclCommGetAsyncError(r.comm, &code);
      well += code == ncclSuccess && f(r);
      if (r.comm) ncclCommDestroy(r.comm);
      cudaFreeAsync(r.in, r.stream);
      cudaFreeAsync(r.out, r.stream);
      cudaStreamSynchronize(r.stream);
      cudaStreamDestroy(r.stream);
      static_cast<void>(cudaGetLastError());
    });
  }
  for (std::thread& t : threads) t.join();
  return well == ranks;
}

// What went wrong on the device, which the test expected.
std::string told() {
  std::string all;
  for (const std::string& f : emulated::faults()) all += f + "\n";
  emulated::clear_faults();
  return all;
}
bool contains(const std::string& text, const std::string& words) { return text.find(words) != text.npos; }

}  // namespace nccl_standin

using namespace nccl_standin;

TEST_CASE("emulated nccl: collectives give what NCCL's documentation says") {
  CHECK(on_ranks(3, [](rank& r) {
    bool right = true;
    const auto check = [&](ncclResult_t code, auto&& want, std::size_t n) {
      const std::vector<float> got = r.result();
      right &= code == ncclSuccess;
      for (std::size_t i = 0; i < n; ++i) right &= got[i] == static_cast<float>(want(static_cast<int>(i)));
    };
    check(ncclAllReduce(r.in, r.out, 64, ncclFloat, ncclSum, r.comm, r.stream), [](int i) { return 3 + 3 * i; }, 64);
    check(ncclAllReduce(r.in, r.out, 8, ncclFloat, ncclMax, r.comm, r.stream), [](int i) { return 2 + i; }, 8);
    check(ncclAllReduce(r.in, r.out, 8, ncclFloat, ncclMin, r.comm, r.stream), [](int i) { return i; }, 8);
    check(ncclAllReduce(r.in, r.out, 2, ncclFloat, ncclProd, r.comm, r.stream), [](int i) { return i * 6; }, 2);
    check(ncclReduceScatter(r.in, r.out, 7, ncclFloat, ncclSum, r.comm, r.stream),
          [&](int i) { return 3 + 3 * (7 * r.number + i); }, 7);
    check(ncclAllGather(r.in, r.out, 5, ncclFloat, r.comm, r.stream), [](int i) { return i / 5 + i % 5; }, 15);
    check(ncclBroadcast(r.number == 1 ? r.in : nullptr, r.out, 9, ncclFloat, 1, r.comm, r.stream),
          [](int i) { return 1 + i; }, 9);
    check(ncclReduce(r.in, r.out, 4, ncclFloat, ncclSum, 2, r.comm, r.stream),
          [&](int i) { return r.number == 2 ? 3 + 3 * i : 1 + i; }, 4);
    float half = 0.5f;
    ncclRedOp_t halved;
    right &= ncclRedOpCreatePreMulSum(&halved, &half, ncclFloat, ncclScalarHostImmediate, r.comm) == ncclSuccess;
    check(ncclAllReduce(r.in, r.out, 4, ncclFloat, halved, r.comm, r.stream), [](int i) { return 1.5 + 1.5 * i; }, 4);
    right &= ncclRedOpDestroy(halved, r.comm) == ncclSuccess;
    // In place: the whole, this rank's part of the input, this rank's part of the output.
    check(ncclAllReduce(r.out, r.out, 4, ncclFloat, ncclSum, r.comm, r.stream), [](int i) { return 4.5 + 4.5 * i; }, 4);
    cudaMemcpyAsync(r.out, r.in, 64 * sizeof(float), cudaMemcpyDefault, r.stream);
    check(ncclAllGather(r.out + 3 * r.number, r.out, 3, ncclFloat, r.comm, r.stream),
          [](int i) { return i / 3 + i; }, 9);
    return right;
  }));
}

TEST_CASE("emulated nccl: grouped messages meet in order, whatever the ranks' pace") {
  CHECK(on_ranks(4, [](rank& r) {
    const int next = (r.number + 1) % 4, before = (r.number + 3) % 4;
    ncclResult_t code = ncclSuccess;
    for (int round = 0; round < 5; ++round) {  // two messages a round, of different lengths
      ncclGroupStart();
      ncclSend(r.in, 3, ncclFloat, next, r.comm, r.stream);
      ncclSend(r.in + 3, 4, ncclFloat, next, r.comm, r.stream);
      ncclRecv(r.out, 3, ncclFloat, before, r.comm, r.stream);
      ncclRecv(r.out + 3, 4, ncclFloat, before, r.comm, r.stream);
      if (const ncclResult_t end = ncclGroupEnd(); end != ncclSuccess) code = end;
    }
    const std::vector<float> got = r.result();
    bool right = code == ncclSuccess;
    for (std::size_t i = 0; i < 7; ++i) right &= got[i] == static_cast<float>(before + static_cast<int>(i));
    return right;
  }));
}

TEST_CASE("emulated nccl: a split orders by key, and leaves out who gives no color") {
  CHECK(on_ranks(4, [](rank& r) {
    ncclComm_t part = nullptr;
    const int color = r.number == 3 ? NCCL_SPLIT_NOCOLOR : r.number % 2;
    if (ncclCommSplit(r.comm, color, -r.number, &part, nullptr) != ncclSuccess) return false;
    if (r.number == 3) return part == nullptr;
    int mine = -1, size = -1;
    ncclCommUserRank(part, &mine);
    ncclCommCount(part, &size);
    const bool right = size == (r.number == 1 ? 1 : 2) && mine == (r.number == 0 ? 1 : 0);
    ncclCommDestroy(part);
    return right;
  }));
}

TEST_CASE("emulated nccl: calls that differ are named on both sides") {
  on_ranks(2, [](rank& r) {
    const std::size_t count = r.number == 0 ? 4 : 5;
    ncclAllReduce(r.in, r.out, count, ncclFloat, ncclSum, r.comm, r.stream);
    cudaStreamSynchronize(r.stream);
    return true;
  });
  std::string text = told();
  CHECK(contains(text, "calls differ: "));
  CHECK(contains(text, "ncclAllReduce of 4 float32, operation 0, by rank 0 of 2"));
  CHECK(contains(text, "ncclAllReduce of 5 float32, operation 0, by rank 1 of 2"));
  on_ranks(2, [](rank& r) {
    r.number == 0 ? ncclSend(r.in, 4, ncclFloat, 1, r.comm, r.stream)
                  : ncclRecv(r.out, 3, ncclFloat, 0, r.comm, r.stream);
    cudaStreamSynchronize(r.stream);
    return true;
  });
  text = told();
  CHECK(contains(text, "ncclSend of 4 float32, peer 1"));
  CHECK(contains(text, "ncclRecv of 3 float32, peer 0"));
}

TEST_CASE("emulated nccl: an operation that no peer joins is a deadlock, by name") {
  emulated::reset({.seed = emulated::current().seed, .stall_seconds = 0.3});
  on_ranks(2, [](rank& r) {
    if (r.number == 0) {
      ncclSend(r.in, 4, ncclFloat, 1, r.comm, r.stream);
      return cudaStreamSynchronize(r.stream) == cudaErrorLaunchTimeout;
    }
    return true;
  });
  const std::string text = told();
  CHECK(contains(text, "a deadlock: "));
  CHECK(contains(text, "ncclSend of 4 float32, peer 1, by rank 0 of 2"));
  emulated::reset({.seed = emulated::current().seed});  // memory of a broken device isn't freed
}

TEST_CASE("emulated nccl: a rank that never comes is named, and a group left open too") {
  emulated::reset({.seed = emulated::current().seed, .stall_seconds = 0.2});
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  ncclComm_t comm = nullptr;
  CHECK(ncclCommInitRank(&comm, 2, id, 0) == ncclSystemError);
  CHECK(contains(told(), "ncclCommInitRank of rank 0 of 2"));
  CHECK(ncclCommInitRank(&comm, 2, id, 1) == ncclInvalidUsage);  // the same device
  CHECK(contains(told(), "ranks 0 and 1 of one NCCL communicator on device 0"));
  CHECK(ncclCommInitRank(&comm, 2, ncclUniqueId{}, 1) == ncclInvalidArgument);
  ncclGroupStart();
  const std::vector<std::string> left = emulated::leaks();
  CHECK(std::any_of(left.begin(), left.end(), [](const auto& s) { return contains(s, "an NCCL group"); }));
  CHECK(std::any_of(left.begin(), left.end(), [](const auto& s) { return contains(s, "NCCL communicator"); }));
  CHECK(ncclGroupEnd() == ncclSuccess);
  CHECK(ncclGroupEnd() == ncclInvalidUsage);
  CHECK(ncclCommAbort(comm) == ncclSuccess);
}

TEST_CASE("emulated nccl: buffers that are too short, or overlap, are refused") {
  on_ranks(1, [](rank& r) {
    CHECK(ncclAllReduce(r.in, r.out, 65, ncclFloat, ncclSum, r.comm, r.stream) == ncclInvalidArgument);
    CHECK(ncclAllReduce(r.in, r.in + 1, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclInvalidArgument);
    CHECK(ncclSend(r.in, 1, ncclFloat, 1, r.comm, r.stream) == ncclInvalidArgument);
    CHECK(std::string(ncclGetLastError(r.comm)) == "no such rank");
    return true;
  });
  const std::string text = told();
  CHECK(contains(text, "reads 260 bytes that the device hasn't"));
  CHECK(contains(text, "the buffers overlap"));
}

TEST_CASE("emulated nccl: a nonblocking call takes effect when it says so") {
  std::atomic<int> late = 0, refused = 0;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    emulated::reset({.seed = seed});
    CHECK(on_ranks(
        2,
        [&](rank& r) {
          ncclResult_t code = ncclAllReduce(r.in, r.out, 8, ncclFloat, ncclSum, r.comm, r.stream);
          if (code == ncclInProgress) {
            ++late;
            refused += ncclAllReduce(r.in, r.out, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclInvalidArgument;
          }
          while (code == ncclInProgress) ncclCommGetAsyncError(r.comm, &code);
          return code == ncclSuccess && r.result()[1] == 3.0f;
        },
        0));
  }
  CHECK(late > 0);
  CHECK(refused == late);
}

TEST_CASE("emulated nccl: an abort ends this rank's work, an error on purpose doesn't") {
  CHECK(on_ranks(2, [](rank& r) {
    if (r.number == 1) return true;
    ncclAllReduce(r.in, r.out, 8, ncclFloat, ncclSum, r.comm, r.stream);
    emulated::fail_nccl(r.comm, ncclRemoteError);
    ncclResult_t state = ncclSuccess;
    bool right = cudaStreamQuery(r.stream) == cudaErrorNotReady;
    right &= ncclCommGetAsyncError(r.comm, &state) == ncclSuccess && state == ncclRemoteError;
    right &= ncclCommAbort(r.comm) == ncclSuccess;
    r.comm = nullptr;
    return right && cudaStreamSynchronize(r.stream) == cudaSuccess;
  }));
}

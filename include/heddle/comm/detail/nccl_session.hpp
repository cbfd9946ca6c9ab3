// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <heddle/comm/concept.hpp>
#include <heddle/core/cuda_queue.hpp>

#if !__has_include(<nccl.h>)
#error "heddle/comm/nccl.hpp needs nccl.h: link the CMake target heddle::nccl"
#endif
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace heddle {
inline namespace v0 {
/// @brief Ranks as processes or threads with a device each, which NCCL connects.
namespace nccl {

/// @brief Settings of a communicator.
struct options {
  std::chrono::nanoseconds deadline{30'000'000'000ll};  ///< How long a call waits for its peers.
  /// Whether NCCL's own calls block. Only the others can be left when a peer doesn't come.
  bool blocking = false;
  /// Name of the machine that this rank runs on, for split_by_host; empty: the host name and the kernel's boot id.
  std::string host = {};
  /// Whether `connect` prepares `native{}` to reduce inside machines and across them, where there are several machines
  /// of equally many ranks, two or more: communicator::split_levels. Equal on all ranks.
  bool levels = true;
  /// From how many bytes on it does so: three calls of NCCL take longer to begin than one. Equal on all ranks.
  std::size_t levels_from = std::size_t{64} << 10;
  /// Whether what the communicator holds for itself, `scratch` and lent messages, is memory of ncclMemAlloc that is
  /// registered with NCCL. Growing it waits for the stream.
  bool registered = false;
};

namespace detail {
using namespace heddle::detail;
using clock = std::chrono::steady_clock;

inline void rest(clock::duration waited) {
  if (waited < std::chrono::microseconds(200))
    std::this_thread::yield();
  else
    std::this_thread::sleep_for(std::chrono::microseconds(50));
}

inline std::string machine_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  std::string text = name, boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;  // containers of one machine may share a host name
  return text + "/" + boot;
}

// Some versions of CUDA keep what a query has answered as the thread's last error.
inline void forget_not_ready() {
  if (cudaPeekAtLastError() == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
}

// FNV-1a.
inline std::uint64_t hash_of(const std::string& text) noexcept {
  std::uint64_t h = 0xcbf29ce484222325u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return h;
}

// What communicators made from one another share on one rank: what failed first, and the NCCL communicators to abort.
class session {
 public:
  explicit session(const options& o) : settings(o) {
    if (settings.host.empty()) settings.host = machine_name();
  }

  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  std::string failure() const {
    std::lock_guard lock(mutex_);
    return text_;
  }

  // The first failure wins. All are marked before any is aborted, so that nobody begins something on one of them.
  void fail(const std::string& text) {
    std::vector<ncclComm_t> own;
    {
      std::lock_guard lock(mutex_);
      if (failed()) return;
      text_ = text;
      failed_.store(true, std::memory_order_release);
      own.swap(own_);
    }
    for (const ncclComm_t c : own) ncclCommAbort(c);
  }

  // Ours to abort from now on. If somebody has failed meanwhile, it happens at once.
  void adopt(ncclComm_t c) {
    {
      std::lock_guard lock(mutex_);
      if (!failed()) return own_.push_back(c);
    }
    ncclCommAbort(c);
  }
  // Whether it is still the caller's to destroy.
  bool give_up(ncclComm_t c) {
    std::lock_guard lock(mutex_);
    return std::erase(own_, c) > 0;
  }

  options settings;

 private:
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::string text_;
  std::vector<ncclComm_t> own_;
};

// One NCCL communicator and its stream.
class link {
 public:
  // Memory that a communicator holds for itself, by `options::registered`.
  struct own_memory {
    explicit own_memory(cudaStream_t s) : plain(s) {}
    std::byte* data() const noexcept { return registered ? static_cast<std::byte*>(registered) : plain.data(); }
    stream_buffer plain;
    void *registered = nullptr, *handle = nullptr;
    std::size_t bytes = 0;  // of `registered`
  };

  // Works on a communicator of the user's.
  link(std::shared_ptr<session> s, ncclComm_t user, cudaStream_t queue)
      : shared(std::move(s)), comm(user), stream(queue), stage(queue), scratch(queue) {
    settle("ncclCommGetAsyncError", ncclInProgress);
    ask();
  }
  // Makes one: `make` calls NCCL and may leave it in progress; `parent` tells when that is over, null for the new one.
  template <class Make>
  link(std::shared_ptr<session> s, cudaStream_t queue, int rank_of_caller, link* parent, Make&& make)
      : shared(std::move(s)), rank(rank_of_caller), stream(queue), stage(queue), scratch(queue) {
    ncclComm_t made = nullptr;
    const ncclResult_t code = make(&made);
    if (parent) {
      parent->settle("ncclCommSplit", code);
    } else {
      comm = made;
      if (code != ncclInProgress) check("ncclCommInitRankConfig", code);
    }
    comm = made;
    if (!comm) return;  // this rank is in no part of a split
    shared->adopt(comm);
    owned_ = true;
    settle("ncclCommInitRankConfig", ncclInProgress);
    ask();
  }
  link(const link&) = delete;
  link& operator=(const link&) = delete;

  ~link() {
    if (owned_ && !shared->failed() && std::uncaught_exceptions() > unwinding_)
      shared->fail("rank " + std::to_string(rank) + " left by an exception");
    const bool ours = owned_ && shared->give_up(comm);  // else it is the user's, or aborted
    if (!ours && !stage.registered && !scratch.registered) return;
    const auto start = clock::now();
    const auto wait_while = [&](auto&& busy) {
      while (busy() && clock::now() - start < shared->settings.deadline) rest(clock::now() - start);
    };
    cudaError_t work = cudaSuccess;
    ncclResult_t state = ncclInProgress;
    wait_while([&] { return (work = cudaStreamQuery(stream)) == cudaErrorNotReady; });
    forget_not_ready();
    for (own_memory* m : {&stage, &scratch}) {  // what the stream may still use stays
      if (work == cudaSuccess) give_back(*m, ours || !owned_);
    }
    if (!ours) return;
    if (work == cudaSuccess) {
      ncclCommFinalize(comm);
      wait_while([&] { return ncclCommGetAsyncError(comm, &state) == ncclSuccess && state == ncclInProgress; });
    }
    if (state == ncclSuccess)
      ncclCommDestroy(comm);
    else
      ncclCommAbort(comm);
  }

  // Whether NCCL still has the communicator: a failure aborts ours, a user's stays.
  bool alive() const noexcept { return comm && !(owned_ && shared->failed()); }

  // Waits until everything enqueued is done, or throws.
  void drain(const char* what) {
    const auto start = clock::now();
    cudaError_t code;
    while ((code = cudaStreamQuery(stream)) == cudaErrorNotReady) {
      require(what);
      require_time(what, clock::now() - start);
      rest(clock::now() - start);
    }
    forget_not_ready();
    require(what);
    check("cudaStreamQuery", code);
  }

  // Memory of at least so many bytes in `m`, for later work of the stream.
  void reserve(own_memory& m, std::size_t bytes) {
    if (!shared->settings.registered) return check("cudaMallocAsync", m.plain.reserve(bytes));
    if (bytes <= m.bytes) return;
    drain("ncclCommRegister");
    give_back(m, true);
    check("ncclMemAlloc", ncclMemAlloc(&m.registered, bytes));
    m.bytes = bytes;
    settle("ncclCommRegister", ncclCommRegister(comm, m.registered, bytes, &m.handle));
  }

  // Throws if anybody has failed; `what` is the operation.
  void require(const char* what) {
    if (!shared->failed()) {
      ncclResult_t state = ncclSuccess;
      const ncclResult_t code = ncclCommGetAsyncError(comm, &state);
      if (code != ncclSuccess) state = code;
      if (state == ncclSuccess || state == ncclInProgress) return;
      shared->fail(text_of("ncclCommGetAsyncError", state));
    }
    throw comm_error(what, rank, -1, shared->failure());
  }

  // A call's result: waits until it has taken effect, throws if it hasn't.
  void settle(const char* call, ncclResult_t code) {
    const auto start = clock::now();
    while (code == ncclInProgress) {
      ncclResult_t state = ncclSuccess;
      if (shared->failed()) require(call);
      code = ncclCommGetAsyncError(comm, &state);
      if (code == ncclSuccess) code = state;
      if (code != ncclInProgress) break;
      require_time(call, clock::now() - start);
      rest(clock::now() - start);
    }
    check(call, code);
  }

  void require_time(const char* call, clock::duration waited) {
    if (waited <= shared->settings.deadline) return;
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(shared->settings.deadline).count();
    shared->fail(std::string(call) + " of rank " + std::to_string(rank) + " did not end within " +
                           std::to_string(ms) + " ms: a peer has not come");
    throw comm_error(call, rank, -1, shared->failure());
  }

  void check(const char* call, ncclResult_t code) {
    if (code == ncclSuccess) return;
    shared->fail(text_of(call, code));
    throw comm_error(call, rank, -1, shared->failure());
  }
  void check(const char* call, cudaError_t code) {
    if (code == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());
    shared->fail(std::string(call) + ": " + cudaGetErrorName(code) + " (" + cudaGetErrorString(code) + ")");
    throw comm_error(call, rank, -1, shared->failure());
  }

  std::shared_ptr<session> shared;
  ncclComm_t comm = nullptr;
  int rank = 0, size = 1;
  cudaStream_t stream;
  own_memory stage, scratch;  // what is only lent to `apply`; the executor's

 private:
  void give_back(own_memory& m, bool alive) noexcept {
    if (m.handle && alive) ncclCommDeregister(comm, m.handle);
    if (m.registered) ncclMemFree(m.registered);
    m.registered = m.handle = nullptr;
    m.bytes = 0;
  }
  std::string text_of(const char* call, ncclResult_t code) const {
    const char* more = !shared->failed() ? ncclGetLastError(comm) : nullptr;
    return std::string(call) + ": " + ncclGetErrorString(code) + (more && *more ? std::string(" (") + more + ")" : "");
  }
  void ask() {
    check("ncclCommUserRank", ncclCommUserRank(comm, &rank));
    check("ncclCommCount", ncclCommCount(comm, &size));
  }

  bool owned_ = false;
  int unwinding_ = std::uncaught_exceptions();
};

// NCCL's name of an element type; -1 for none.
constexpr int type_of(dtype t) noexcept {
  switch (t) {
    case dtype::f32: return ncclFloat32;
    case dtype::f64: return ncclFloat64;
    case dtype::f16: return ncclFloat16;
    case dtype::bf16: return ncclBfloat16;
    case dtype::i32: return ncclInt32;
    case dtype::i64: return ncclInt64;
    case dtype::u8: return ncclUint8;
    default: return -1;
  }
}
}  // namespace detail

}  // namespace nccl
}  // namespace v0
}  // namespace heddle

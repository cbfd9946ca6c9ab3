// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/memory/cuda_memory.hpp>

#if !__has_include(<nccl.h>)
#error "heddle/memory/nccl_mem.hpp needs nccl.h: link the CMake target heddle::nccl"
#endif
#include <nccl.h>

#include <string>

namespace heddle {
inline namespace v0 {
namespace detail {
struct nccl_kind {
  static constexpr const char* name = "nccl_mem";
  static cudaError_t take(void** p, std::size_t n) {
    const ncclResult_t code = ncclMemAlloc(p, n);
    if (code == ncclSuccess) return cudaSuccess;
    const cudaError_t cause = cudaGetLastError();
    if (code == ncclUnhandledCudaError) return cause == cudaSuccess ? cudaErrorMemoryAllocation : cause;
    throw error("heddle::nccl_mem: " + std::string(ncclGetErrorString(code)));
  }
  static void give(void* p) noexcept {
    // NCCL doesn't say that it waits. mutation survives: the emulated one does.
    static_cast<void>(cudaDeviceSynchronize());
    static_cast<void>(ncclMemFree(p));
  }
  [[noreturn]] static void refuse(std::size_t n, std::size_t) { refuse_device_memory(name, n); }
};
}  // namespace detail

/// @brief Memory of the current device, from `ncclMemAlloc`: fit for NCCL's registered buffers, for which the network
/// and the links between devices read and write it without a copy.
///
/// Allocations are whole pages of the device, some MiB: put a `queue_pool` on it. Registering is the program's:
/// `nccl::communicator::register_memory`.
///
/// State:   as `cuda_device`.
/// Sync:    a deallocation waits for the device. Thread-safe.
/// Throws:  as `cuda_device`; `error` with NCCL's own words on anything else.
using nccl_mem = detail::cuda_plain<detail::nccl_kind>;

static_assert(resource<nccl_mem, cuda_order::queue>);

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#if !__has_include(<cuda_runtime_api.h>)
#error "heddle/core/cuda_queue.hpp needs cuda_runtime_api.h: link the CMake target heddle::cuda"
#endif
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief A call of the CUDA runtime, or of CUB, that failed. `what()` names the operation and CUDA's own error.
class cuda_error : public error {
 public:
  /// @param operation What was tried, for example "cuda::copy". @param code CUDA's error.
  cuda_error(const std::string& operation, cudaError_t code)
      : error("heddle::" + operation + ": " + cudaGetErrorName(code) + " (" + cudaGetErrorString(code) + ")"),
        code_(code) {}
  /// CUDA's error.
  cudaError_t code() const noexcept { return code_; }

 private:
  cudaError_t code_;
};

namespace detail {
/// Throws cuda_error unless the call succeeded; takes the error out of CUDA's per-thread slot.
inline void check_cuda(const char* operation, cudaError_t code) {
  if (code == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw cuda_error(operation, code);
}
}  // namespace detail

/// @brief The queue and the event of `cuda`, for host code that needs no nvcc.
///
/// Sync:   only queue::synchronize and event::synchronize block the host
/// Throws: cuda_error when CUDA refuses
struct cuda_order {
  class event;

  /// @brief The caller's stream, borrowed. A default-made one is the default stream.
  struct queue {
    cudaStream_t stream = nullptr;  ///< The stream; it must outlive every use of the queue.

    /// Blocks the host until all work in the stream is done. Throws cuda_error, also for earlier work that failed.
    void synchronize() const { detail::check_cuda("cuda::queue::synchronize", cudaStreamSynchronize(stream)); }
    /// Later work of this queue starts only when the event is done; does not block the host.
    void wait(const event& e) const;
    /// @brief A number that no other stream of the process has or had: a handle may come again, this doesn't.
    /// Throws cuda_error, for a stream that is no more.
    unsigned long long id() const {
      unsigned long long number = 0;
      detail::check_cuda("cuda::queue::id", cudaStreamGetId(stream, &number));
      return number;
    }
    /// Whether both are the same stream.
    friend bool operator==(queue a, queue b) noexcept { return a.stream == b.stream; }
  };

  /// @brief A point in a queue. Owns a cudaEvent_t without timing, made by the first `record`.
  class event {
   public:
    event() = default;
    /// Takes the event over; `other` is left without one.
    event(event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    /// Swaps the two events.
    event& operator=(event&& other) noexcept {
      std::swap(event_, other.event_);
      return *this;
    }
    ~event() {
      if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
    }

    /// Marks the queue's present end; an earlier mark is forgotten.
    void record(queue q) {
      if (event_ == nullptr)
        detail::check_cuda("cuda::event::record", cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
      detail::check_cuda("cuda::event::record", cudaEventRecord(event_, q.stream));
    }
    /// Whether all work before the mark is done; true when nothing was recorded.
    bool ready() const {
      if (event_ == nullptr) return true;
      const cudaError_t code = cudaEventQuery(event_);
      if (code == cudaErrorNotReady) {
        static_cast<void>(cudaGetLastError());
        return false;
      }
      detail::check_cuda("cuda::event::ready", code);
      return true;
    }
    /// Blocks the host until the work before the mark is done.
    void synchronize() const {
      if (event_ != nullptr) detail::check_cuda("cuda::event::synchronize", cudaEventSynchronize(event_));
    }
    /// The event for other CUDA calls; null before the first `record`.
    cudaEvent_t get() const noexcept { return event_; }

   private:
    cudaEvent_t event_ = nullptr;
  };
};

inline void cuda_order::queue::wait(const event& e) const {
  if (e.get() != nullptr) detail::check_cuda("cuda::queue::wait", cudaStreamWaitEvent(stream, e.get(), 0));
}

namespace detail {
// Device memory that grows, in the order of one stream.
class stream_buffer {
 public:
  explicit stream_buffer(cudaStream_t s) : stream_(s) {}
  stream_buffer(stream_buffer&& o) noexcept
      : stream_(o.stream_), data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}
  ~stream_buffer() {
    if (data_) static_cast<void>(cudaFreeAsync(data_, stream_));
  }
  // Memory of so many bytes; null for 0. What was there before may still be read by earlier work.
  cudaError_t reserve(std::size_t bytes) {
    if (bytes <= bytes_) return cudaSuccess;
    if (data_) static_cast<void>(cudaFreeAsync(data_, stream_));
    data_ = nullptr;
    bytes_ = 0;
    const cudaError_t code = cudaMallocAsync(&data_, bytes, stream_);
    if (code == cudaSuccess) bytes_ = bytes;
    return code;
  }
  std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }
  // The next piece of so many bytes begins that far behind this one.
  static constexpr std::size_t rounded(std::size_t bytes) noexcept { return (bytes + 255) / 256 * 256; }

 private:
  cudaStream_t stream_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};
}  // namespace detail

}  // namespace v0
}  // namespace heddle

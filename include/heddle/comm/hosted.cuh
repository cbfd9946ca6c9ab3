// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/wrapper.hpp>
#include <heddle/core/cuda_queue.hpp>

#include <cstring>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief Host memory over a communicator that works in a stream, such as nccl::communicator: what `staged` is for the
/// other way. With it whatever wants host memory, a data_parallel for example, runs over devices and the links between
/// them.
///
/// Each round is copied up, exchanged in the stream, copied down and waited for. Messages carry their header, so ranks
/// whose calls differ are told apart where the lengths agree, and sums of float16 are allowed. `progress()` is polled:
/// the communicator underneath is called by the program's own thread only, in the same order on all ranks.
/// Wire:    as underneath, and 16 bytes a message.
/// State:   pinned and device memory for the longest round, what it sends and receives.
/// Traffic: each byte is copied within the host once, and once between host and device, on each side.
/// Sync:    blocks until the round is done.
/// Throws:  what is thrown underneath; cuda_error, after the peers were told; comm_error for calls that differ.
/// @tparam Comm The communicator underneath, held by value; its device is the current one of the constructing thread.
template <class Comm> class hosted : public detail::wrapper<Comm> {
  using detail::wrapper<Comm>::inner_;
  static_assert(stream_ordered<Comm>, "heddle::hosted: the communicator underneath must work in a stream");

 public:
  /// @param inner The communicator underneath.
  explicit hosted(Comm inner) : detail::wrapper<Comm>(std::move(inner)), device_(inner_.stream()) {
    check("cudaGetDevice", cudaGetDevice(&number_));
  }
  /// Takes over the other's memory.
  hosted(hosted&& o) noexcept
      : detail::wrapper<Comm>(std::move(static_cast<detail::wrapper<Comm>&>(o))),
        number_(o.number_),
        device_(std::move(o.device_)),
        pinned_(std::exchange(o.pinned_, nullptr)),
        bytes_(std::exchange(o.bytes_, 0)) {}
  ~hosted() {
    if (pinned_) static_cast<void>(cudaFreeHost(pinned_));
  }

  /// A duplicate in the same stream.
  hosted duplicate() {
    check("cudaSetDevice", cudaSetDevice(number_));  // the duplicate's is the calling thread's, which may be another
    return hosted(inner_.duplicate());
  }
  /// Called by the program's own thread only.
  heddle::progress progress() const noexcept { return heddle::progress::polled; }
  void* scratch(std::size_t) = delete;
  void copy(void*, const void*, std::size_t) = delete;

  /// @brief One round; see the communicator concept.
  template <class Apply>
  void exchange(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    check("cudaSetDevice", cudaSetDevice(number_));  // this may be another thread than the constructing one
    out_.clear();
    in_.clear();
    std::size_t up = 0, all = 0;
    for (const outgoing& m : out) up += place_of(m.bytes);
    all = up;
    for (const incoming& m : in) all += place_of(m.bytes);
    check("cudaMallocAsync", device_.reserve(all));
    if (all > bytes_) {
      bytes_ = 0;
      check("cudaFreeHost", cudaFreeHost(std::exchange(pinned_, nullptr)));
      check("cudaHostAlloc", cudaHostAlloc(reinterpret_cast<void**>(&pinned_), all, cudaHostAllocDefault));
      bytes_ = all;
    }
    std::size_t at = 0;
    for (const outgoing& m : out) {
      header own = h;
      own.contributors = m.contributors;
      std::memcpy(pinned_ + at, &own, sizeof own);
      if (m.bytes) std::memcpy(pinned_ + at + sizeof own, m.data, m.bytes);
      out_.push_back({m.peer, device_.data() + at, sizeof own + m.bytes, 1});
      at += place_of(m.bytes);
    }
    for (const incoming& m : in) {
      in_.push_back({m.peer, device_.data() + at, sizeof(header) + m.bytes});
      at += place_of(m.bytes);
    }
    try {
      inner_.copy(device_.data(), pinned_, up);
      inner_.exchange(h, out_, in_, [](std::span<const arrival>) {});
      inner_.copy(pinned_ + up, device_.data() + up, all - up);
      inner_.synchronize();
    } catch (...) {  // nothing that is in the stream may use the pinned memory later
      static_cast<void>(cudaStreamSynchronize(inner_.stream()));
      throw;
    }
    arrivals_.clear();
    at = up;
    for (const incoming& m : in) {
      header theirs;
      std::memcpy(&theirs, pinned_ + at, sizeof theirs);
      if (!theirs.matches(h)) differ(h, m, theirs);
      const std::byte* const data = pinned_ + at + sizeof theirs;
      if (m.into && m.bytes) std::memcpy(m.into, data, m.bytes);
      arrivals_.push_back({m.into ? m.into : data, theirs.contributors});
      at += place_of(m.bytes);
    }
    std::forward<Apply>(apply)(std::span<const arrival>(arrivals_));
  }

 private:
  // Where the next message begins behind one of so many bytes.
  static std::size_t place_of(std::size_t bytes) noexcept {
    return detail::stream_buffer::rounded(sizeof(header) + bytes);
  }
  void check(const char* call, cudaError_t code) {
    if (code == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());
    inner_.fail(std::string(call) + ": " + cudaGetErrorString(code));
    throw cuda_error(call, code);
  }
  [[noreturn]] void differ(const header& h, const incoming& m, const header& theirs) {
    const std::string text = "calls differ: rank " + std::to_string(this->rank()) + " is in " +
                             detail::describe(h, m.bytes) + ", rank " + std::to_string(m.peer) + " is in " +
                             detail::describe(theirs, m.bytes);
    inner_.fail(text);
    throw comm_error(name_of(h.kind), this->rank(), m.peer, text);
  }

  int number_ = 0;  // of the device
  detail::stream_buffer device_;
  std::byte* pinned_ = nullptr;
  std::size_t bytes_ = 0;  // of `pinned_`
  std::vector<outgoing> out_;
  std::vector<incoming> in_;
  std::vector<arrival> arrivals_;
};

}  // namespace v0
}  // namespace heddle

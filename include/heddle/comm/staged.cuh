// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/wrapper.hpp>
#include <heddle/core/cuda.cuh>

#include <algorithm>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief How device memory meets a communicator of the host.
struct staging {
  std::size_t chunk =
      std::size_t{1} << 20;  ///< Bytes that are copied and sent at a time, 1 or above; equal on all ranks.
  /// Whether the communicator underneath reads and writes device memory itself, as a CUDA-aware MPI does
  /// (`mpi::cuda_aware()`): then nothing is copied. Equal on all ranks.
  bool direct = false;
};

/// @brief Device memory over a communicator of the host, such as mpi::communicator: messages pass through pinned memory
/// in chunks, so that one chunk travels while the next is copied down and the last one is copied up.
///
/// Works in a stream (`stream_ordered`): pass collectives a queue of this stream. The host waits in an exchange until
/// its messages have come; the copies up and the reductions are enqueued.
/// Wire:   as underneath; a message of b bytes is ceil(b / chunk) messages.
/// State:  pinned memory for the longest round, what it sends and receives; device memory for received messages that
/// are only lent.
/// Traffic: each byte sent is copied down once, each received one up once; none with `direct`.
/// Sync:   `exchange` waits for the stream's earlier work and for the peers; `scratch` and `copy` only enqueue.
/// Throws: what is thrown underneath; cuda_error, after the peers were told; argument_error if chunk is 0.
/// @tparam Comm The communicator underneath, held by value.
template <class Comm> class staged : public detail::wrapper<Comm> {
  using detail::wrapper<Comm>::inner_;

 public:
  /// @param inner The communicator underneath. @param stream Must outlive this. @param s How.
  staged(Comm inner, cudaStream_t stream, const staging& s = {})
      : detail::wrapper<Comm>(std::move(inner)), stream_(stream), staging_(s), lent_(stream), scratch_(stream) {
    if (s.chunk < 1) throw argument_error("heddle::staged: chunk 0; allowed is 1 byte and above");
  }
  /// Takes over the other's memory.
  staged(staged&& o) noexcept
      : detail::wrapper<Comm>(std::move(static_cast<detail::wrapper<Comm>&>(o))),
        stream_(o.stream_),
        staging_(o.staging_),
        pinned_(std::exchange(o.pinned_, {})),
        lent_(std::move(o.lent_)),
        scratch_(std::move(o.scratch_)),
        events_(std::exchange(o.events_, {})),
        uploading_(std::exchange(o.uploading_, false)) {}
  ~staged() {
    if (!pinned_.data && events_.empty()) return;
    static_cast<void>(cudaStreamSynchronize(stream_));
    for (cudaEvent_t e : events_) static_cast<void>(cudaEventDestroy(e));
    if (pinned_.data) static_cast<void>(cudaFreeHost(pinned_.data));
  }

  /// A duplicate in the same stream.
  staged duplicate() { return {inner_.duplicate(), stream_, staging_}; }
  /// The stream that it works in.
  cudaStream_t stream() const noexcept { return stream_; }
  /// Waits for the stream's work.
  void synchronize() { check("cudaStreamSynchronize", cudaStreamSynchronize(stream_)); }

  /// @brief One round; see the communicator concept.
  template <class Apply>
  void exchange(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    std::size_t lent = 0;
    for (const incoming& m : in) lent += m.into ? 0 : rounded(m.bytes);
    check("cudaMallocAsync", lent_.reserve(lent));
    arrivals_.clear();
    lent = 0;
    for (const incoming& m : in) {
      arrivals_.push_back({m.into ? m.into : lent_.data() + lent, 1});
      lent += m.into ? 0 : rounded(m.bytes);
    }
    if (staging_.direct) {
      send_directly(h, out, in);
    } else {
      send_staged(h, out, in);
    }
    std::forward<Apply>(apply)(std::span<const arrival>(arrivals_));
  }

  /// Device memory of at least so many bytes, aligned to 256; the next call may give the same.
  void* scratch(std::size_t bytes) {
    check("cudaMallocAsync", scratch_.reserve(bytes));
    return scratch_.data();
  }
  /// Enqueues a copy of so many bytes.
  void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes) check("cudaMemcpyAsync", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
  }

 private:
  struct block {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };

  static std::size_t rounded(std::size_t bytes) noexcept { return detail::stream_buffer::rounded(bytes); }

  void check(const char* call, cudaError_t code) {
    if (code == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());
    inner_.fail(std::string(call) + ": " + cudaGetErrorString(code));
    throw cuda_error(call, code);
  }
  void note(std::span<const arrival> got) {
    for (std::size_t i = 0; i < got.size(); ++i) arrivals_[i].contributors = got[i].contributors;
  }

  void send_directly(const header& h, std::span<const outgoing> out, std::span<const incoming> in) {
    synchronize();
    incoming_.clear();
    for (std::size_t i = 0; i < in.size(); ++i)
      incoming_.push_back({in[i].peer, const_cast<void*>(arrivals_[i].data), in[i].bytes});
    inner_.exchange(h, this->settled(out), incoming_, [this](std::span<const arrival> got) { note(got); });
  }

  // Both sides cut a message alike, so the k-th chunk round of one meets that of the other, whatever rounds either has
  // with others. Round numbers tell nothing here: ranks have different numbers of chunks.
  void send_staged(header h, std::span<const outgoing> out, std::span<const incoming> in) {
    h.round = 0;
    std::size_t longest = 0, total = 0;
    for (const outgoing& m : out) longest = (std::max)(longest, m.bytes), total += rounded(m.bytes);
    for (const incoming& m : in) longest = (std::max)(longest, m.bytes), total += rounded(m.bytes);
    const std::size_t chunk = staging_.chunk, chunks = longest / chunk + (longest % chunk != 0);
    if (uploading_) check("cudaEventSynchronize", cudaEventSynchronize(events_[0]));
    uploading_ = false;
    if (total > pinned_.bytes) {
      if (pinned_.data) check("cudaFreeHost", cudaFreeHost(std::exchange(pinned_, {}).data));
      void* p = nullptr;
      check("cudaHostAlloc", cudaHostAlloc(&p, total, cudaHostAllocDefault));
      pinned_ = {static_cast<std::byte*>(p), total};
    }
    while (events_.size() <= chunks) {  // the first says when all has been copied up
      cudaEvent_t e = nullptr;
      check("cudaEventCreate", cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
      events_.push_back(e);
    }
    for (std::size_t c = 0; c < chunks; ++c) {
      std::size_t at = 0;
      for (const outgoing& m : out) {
        const std::size_t begin = (std::min)(c * chunk, m.bytes), n = (std::min)(chunk, m.bytes - begin);
        copy(pinned_.data + at + begin, static_cast<const std::byte*>(m.data) + begin, n);
        at += rounded(m.bytes);
      }
      check("cudaEventRecord", cudaEventRecord(events_[c + 1], stream_));
    }
    for (std::size_t c = 0; c < chunks; ++c) {
      check("cudaEventSynchronize", cudaEventSynchronize(events_[c + 1]));
      outgoing_.clear();
      incoming_.clear();
      std::size_t at = 0;
      for (const outgoing& m : out) {
        if (c * chunk < m.bytes)
          outgoing_.push_back(
              {m.peer, pinned_.data + at + c * chunk, (std::min)(chunk, m.bytes - c * chunk), m.contributors});
        at += rounded(m.bytes);
      }
      const std::size_t received = at;
      for (const incoming& m : in) {
        if (c * chunk < m.bytes)
          incoming_.push_back({m.peer, pinned_.data + at + c * chunk, (std::min)(chunk, m.bytes - c * chunk)});
        at += rounded(m.bytes);
      }
      inner_.exchange(h, outgoing_, incoming_, [&](std::span<const arrival> got) {
        if (c == 0) note(got);  // every message has a first chunk
      });
      at = received;
      for (std::size_t i = 0; i < in.size(); ++i) {
        const std::size_t begin = (std::min)(c * chunk, in[i].bytes), n = (std::min)(chunk, in[i].bytes - begin);
        copy(static_cast<std::byte*>(const_cast<void*>(arrivals_[i].data)) + begin, pinned_.data + at + begin, n);
        at += rounded(in[i].bytes);
      }
    }
    if (chunks == 0) inner_.exchange(h, {}, {}, [](std::span<const arrival>) {});  // who has failed is heard of
    if (in.empty()) return;
    check("cudaEventRecord", cudaEventRecord(events_[0], stream_));
    uploading_ = true;
  }

  cudaStream_t stream_;
  staging staging_;
  block pinned_;
  detail::stream_buffer lent_, scratch_;
  std::vector<cudaEvent_t> events_;
  bool uploading_ = false;
  std::vector<arrival> arrivals_;
  std::vector<outgoing> outgoing_;
  std::vector<incoming> incoming_;
};

}  // namespace v0
}  // namespace heddle

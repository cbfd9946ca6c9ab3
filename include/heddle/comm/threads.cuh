// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/wrapper.hpp>
#include <heddle/comm/threads.hpp>
#include <heddle/core/cuda_queue.hpp>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace threads {

/// @brief How ranks of one process reach each other's device memory.
struct device_options {
  /// Whether ranks read and write the memory of each other's devices where CUDA can: peer access is then enabled
  /// between the devices, and given to the present memory pool of each (`cudaDeviceGetMemPool`). Say false if buffers
  /// come from pools that other devices may not use; then what goes between two devices is copied. Equal on all ranks.
  bool peers = true;
};

namespace detail {
// What a rank's peers know of its device. They hold it, too: they may wait for its events after it has gone.
struct device_place {
  int device = 0;
  cuda_order::event ready;  // what is sent in this round has been written
  cuda_order::event done;   // what was received has been read
};
}  // namespace detail

/// @brief A rank of threads::run with a stream of a device: any number of ranks on any number of devices, also all on
/// one. Zero copy: a receiver's kernels read the sender's memory.
///
///     hd::threads::run(8, [&](auto& host) {
///       hd::threads::device_communicator comm(host, stream);    // this thread's current device, this rank's stream
///       hd::all_reduce(comm, hd::ring{}, gradient, hd::mean{}, hd::cuda::queue{stream});
///     });
///
/// It works in the stream's order (`stream_ordered`): ranks meet on the host to tell each other where buffers lie, then
/// enqueue, and events order their streams. The host never waits for a device. Work waits only for what was enqueued
/// before it, so whatever order a device works in, none can wait for ever.
///
/// Between devices that can't read each other, what is lent and what `native{}` reduces goes through a copy, which CUDA
/// passes through the host.
/// Wire:    nothing on one device but what a schedule copies; between devices the payload.
/// State:   device memory for the executor's scratch, and for what is lent by devices that can't be read; two events.
/// Threads: one at a time, with the rank's device as its current one.
/// Sync:    everything enqueues, and waits for the peers' host threads to come; the constructor, `duplicate` and
///          `synchronize` block.
/// Throws:  comm_error as threads::communicator, of which this has the deadline, the headers and the failures;
///          cuda_error, after the peers were told. When it throws, no peer reads this rank's buffers any more.
class device_communicator : public heddle::detail::wrapper<communicator> {
  using place = detail::device_place;
  using buffer = heddle::detail::stream_buffer;

 public:
  /// @brief Collective.
  /// @param host The same ranks. @param stream A stream of the calling thread's current device; it must outlive this.
  /// @param o Settings.
  device_communicator(communicator host, cudaStream_t stream, const device_options& o = {})
      : wrapper(std::move(host)), options_(o), queue_{stream}, stage_(stream), scratch_(stream) {
    auto mine = std::make_shared<place>();
    told([&] {
      heddle::detail::check_cuda("cudaGetDevice", cudaGetDevice(&mine->device));
      // Made here, since a peer that leaves may look at it at any time. mutation survives: none did in the tests.
      mine->done.record(queue_);
    });
    places_.resize(static_cast<std::size_t>(size()));
    for (int r = 0; r < size(); ++r) tell(r, &mine, sizeof(mine));
    const header h = begin_call(inner_, {.kind = operation_kind::control, .count = sizeof(mine)});
    inner_.exchange(h, out_, in_, [&](std::span<const arrival> got) {
      for (std::size_t i = 0; i < got.size(); ++i)
        places_[static_cast<std::size_t>(in_[i].peer)] = *static_cast<const std::shared_ptr<place>*>(got[i].data);
    });
    places_[static_cast<std::size_t>(rank())] = std::move(mine);
    reaches_.resize(places_.size());
    told([&] {
      for (std::size_t r = 0; r < places_.size(); ++r) reaches_[r] = reach(places_[r]->device);
    });
  }

  /// A second one of the same ranks, in the same stream. Collective.
  device_communicator duplicate() { return {inner_.duplicate(), queue_.stream, options_}; }
  /// The stream that it works in.
  cudaStream_t stream() const noexcept { return queue_.stream; }
  /// Whether kernels of this rank read the memory of that rank's device.
  bool reaches(int peer) const { return reaches_[static_cast<std::size_t>(peer)]; }

  /// @brief Waits until everything enqueued in the stream is done. Throws comm_error if a peer has failed.
  void synchronize() {
    told([&] { queue_.synchronize(); });
    inner_.exchange({}, {}, {}, [](std::span<const arrival>) {});
  }

  /// @brief One round, enqueued; see the communicator concept.
  template <class Apply>
  void exchange(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    in_.assign(in.begin(), in.end());
    for (incoming& m : in_) m.into = nullptr;  // the host moves nothing: it lends what the device copies
    meet(h, settled(out), [&](std::span<const arrival> got) {
      receive(in, got);
      std::forward<Apply>(apply)(std::span<const arrival>(arrivals_));
    });
  }

  /// Device memory of at least so many bytes, aligned to 256; the next call may give the same.
  void* scratch(std::size_t bytes) {
    told([&] { heddle::detail::check_cuda("cudaMallocAsync", scratch_.reserve(bytes)); });
    return scratch_.data();
  }
  /// Enqueues a copy of so many bytes.
  void copy(void* to, const void* from, std::size_t bytes) {
    told([&] { enqueue_copy(to, from, bytes); });
  }

  /// @brief All-reduce in one pass, enqueued: a kernel of each rank reduces its block from every rank's buffer, in rank
  /// order, and stores it to every rank's output.
  /// Traffic: reads and writes each buffer once, the least possible.
  /// @param h Header. @param in Input, equal to `out` or disjoint from every rank's. @param out Output.
  /// @param count Elements. @param l The leaf; one without `reduce_to` costs a copy to each further rank.
  bool native_all_reduce(const header& h, const void* in, void* out, std::size_t count, const leaf& l) {
    const std::size_t bytes = (std::max<std::size_t>)(1, count * l.bytes);  // empty ones compare their calls, too
    out_.clear();
    in_.clear();
    for (int r = 0; r < size(); ++r) {
      tell(r, in, bytes);
      tell(r, out, bytes);
    }
    bool left_range = false;
    meet(h, out_, [&](std::span<const arrival> got) { left_range = reduce_block(in, out, got, count, l); });
    return left_range;
  }

 private:
  const place& mine() const { return *places_[static_cast<std::size_t>(rank())]; }

  // Calls f; tells every rank if CUDA refuses.
  template <class Function> void told(Function&& f) {
    try {
      f();
    } catch (const cuda_error& e) {
      inner_.fail(e.what());
      throw;
    }
  }

  // Adds a message to a peer, and one from it.
  void tell(int peer, const void* data, std::size_t bytes) {
    if (peer == rank()) return;
    out_.push_back({peer, data, bytes, 1});
    in_.push_back({peer, nullptr, bytes});
  }

  void enqueue_copy(void* to, const void* from, std::size_t bytes) {
    if (bytes)
      heddle::detail::check_cuda("cudaMemcpyAsync", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, queue_.stream));
  }

  // Whether this device's kernels may use that one's memory from now on.
  bool reach(int device) const {
    using heddle::detail::check_cuda;
    if (device == mine().device) return true;
    int can = 0;
    if (options_.peers) check_cuda("cudaDeviceCanAccessPeer", cudaDeviceCanAccessPeer(&can, mine().device, device));
    if (!can) return false;
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(device, 0);
    if (enabled == cudaErrorPeerAccessAlreadyEnabled)
      static_cast<void>(cudaGetLastError());
    else
      check_cuda("cudaDeviceEnablePeerAccess", enabled);
    cudaMemPool_t pool = nullptr;
    check_cuda("cudaDeviceGetMemPool", cudaDeviceGetMemPool(&pool, device));
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = mine().device;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    check_cuda("cudaMemPoolSetAccess", cudaMemPoolSetAccess(pool, &access, 1));
    return true;
  }

  // A round of the host in which ranks tell where buffers lie. `work` enqueues what reads the peers' and writes here.
  template <class Work> void meet(const header& h, std::span<const outgoing> out, Work&& work) {
    place& me = *places_[static_cast<std::size_t>(rank())];
    try {
      if (!out.empty()) me.ready.record(queue_);
      inner_.exchange(h, out, in_, [&](std::span<const arrival> got) {
        try {
          for (std::size_t i = 0; i < in_.size(); ++i) {
            if (i == 0 || in_[i].peer != in_[i - 1].peer)
              queue_.wait(places_[static_cast<std::size_t>(in_[i].peer)]->ready);
          }
          work(got);
        } catch (...) {  // what it has enqueued may read later
          static_cast<void>(cudaEventRecord(me.done.get(), queue_.stream));
          throw;
        }
        if (!in_.empty()) me.done.record(queue_);
      });
      // All receivers have enqueued what reads from here. An event that was recorded again since is only later, and
      // what it stands for was enqueued before this.
      for (std::size_t i = 0; i < out.size(); ++i) {
        if (i == 0 || out[i].peer != out[i - 1].peer) queue_.wait(places_[static_cast<std::size_t>(out[i].peer)]->done);
      }
    } catch (const cuda_error& e) {
      inner_.fail(e.what());
      leave(out);
      throw;
    } catch (...) {
      leave(out);
      throw;
    }
  }

  // The caller may write or free its buffers in any way: waits for those who read them.
  void leave(std::span<const outgoing> out) const noexcept {
    for (const outgoing& m : out) {
      if (m.peer >= 0 && m.peer < size() &&
          cudaEventSynchronize(places_[static_cast<std::size_t>(m.peer)]->done.get()) != cudaSuccess)
        static_cast<void>(cudaGetLastError());
    }
  }

  // What has come, to where it shall land, or lent.
  void receive(std::span<const incoming> in, std::span<const arrival> got) {
    std::size_t bytes = 0;
    for (const incoming& m : in) bytes += m.into || reaches(m.peer) ? 0 : buffer::rounded(m.bytes);
    heddle::detail::check_cuda("cudaMallocAsync", stage_.reserve(bytes));
    arrivals_.assign(got.begin(), got.end());
    bytes = 0;
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (!in[i].into && reaches(in[i].peer)) continue;
      void* const to = in[i].into ? in[i].into : stage_.data() + bytes;
      bytes += in[i].into ? 0 : buffer::rounded(in[i].bytes);
      enqueue_copy(to, got[i].data, in[i].bytes);
      arrivals_[i].data = to;
    }
  }

  // This rank's block of a native all-reduce. `got` holds input and output of each other rank, in rank order.
  bool reduce_block(const void* in, void* out, std::span<const arrival> got, std::size_t count, const leaf& l) {
    const auto me = static_cast<std::size_t>(rank()), p = static_cast<std::size_t>(size());
    const std::size_t line = (std::max<std::size_t>)(1, 128 / l.bytes);
    const std::size_t share = ((count + p - 1) / p + line - 1) / line * line;
    const std::size_t begin = (std::min)(count, share * me), n = (std::min)(count, begin + share) - begin;
    if (n == 0) return false;
    const std::size_t offset = begin * l.bytes, bytes = n * l.bytes;
    const auto of = [&](std::size_t r, std::size_t which) {  // 0: input, 1: output
      const void* const base = r == me ? (which ? out : in) : got[2 * (r - (r > me)) + which].data;
      return static_cast<const std::byte*>(base) + offset;
    };
    std::size_t staged = 0;
    for (std::size_t r = 0; r < p; ++r) staged += reaches_[r] ? 0 : buffer::rounded(bytes);
    heddle::detail::check_cuda("cudaMallocAsync", stage_.reserve(staged));
    operands_.clear();
    outputs_.clear();
    void* const mine = const_cast<std::byte*>(of(me, 1));
    outputs_.push_back(mine);
    staged = 0;
    for (std::size_t r = 0; r < p; ++r) {
      const std::byte* from = of(r, 0);
      if (!reaches_[r]) {
        enqueue_copy(stage_.data() + staged, from, bytes);
        from = stage_.data() + staged;
        staged += buffer::rounded(bytes);
      }
      operands_.push_back({from, 0});
      if (r != me && reaches_[r] && l.reduce_to) outputs_.push_back(const_cast<std::byte*>(of(r, 1)));
    }
    const double factor = l.average ? 1.0 / static_cast<double>(p) : 1.0;
    const bool left_range = l.reduce_to
                                ? l.reduce_to(l.context, operands_.data(), static_cast<int>(p), outputs_.data(),
                                              static_cast<int>(outputs_.size()), n, factor)
                                : l.reduce(l.context, operands_.data(), static_cast<int>(p), mine, n, 0, factor);
    for (std::size_t r = 0; r < p; ++r) {
      if (r != me && !(reaches_[r] && l.reduce_to)) enqueue_copy(const_cast<std::byte*>(of(r, 1)), mine, bytes);
    }
    return left_range;
  }

  device_options options_;
  cuda_order::queue queue_;
  std::vector<std::shared_ptr<place>> places_;  // by rank
  std::vector<unsigned char> reaches_;          // by rank
  buffer stage_, scratch_;
  std::vector<outgoing> out_;
  std::vector<incoming> in_;
  std::vector<arrival> arrivals_;
  std::vector<operand> operands_;
  std::vector<void*> outputs_;
};
static_assert(heddle::communicator<device_communicator> && stream_ordered<device_communicator> &&
              has_native_all_reduce<device_communicator>);

}  // namespace threads
}  // namespace v0
}  // namespace heddle

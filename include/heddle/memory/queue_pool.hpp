// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/backend.hpp>
#include <heddle/core/error.hpp>
#include <heddle/memory/pool.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief A `pool` whose blocks are free in the order of queues: what a queue gives back it may have again at once,
/// other queues only after its work.
///
/// A request takes, in this order: the smallest block that holds it among those which its own queue gave back and those
/// whose work is known to be done; a block of another queue, which the requesting queue then waits for, by an event, on
/// the device; neighbours that different queues gave back, joined, after a wait for each; a new chunk of the upstream.
/// So the host waits for the device only in `allocate_sync` (usable at once, so its block's work must be done) and
/// where chunks go back to the upstream: at the limit, in `trim`, at the end. Growth, limit and `.granularity` are
/// `pool`'s.
///
/// The queue of a deallocation may differ from that of the allocation: give a block back on the queue that uses it
/// last, such as the one of an asynchronous collective. Queues are told apart by `id()` where they have it, as a
/// stream's handle may come again after its end, else by `==`.
///
/// @code{.cpp}
/// heddle::queue_pool memory{heddle::cuda_order{}, heddle::cuda_device{}, {.max = std::size_t{8} << 30}};
/// float* x = static_cast<float*>(memory.allocate({stream}, 4096, 256));
/// kernel<<<1, 256, 0, stream>>>(x);
/// memory.deallocate({stream}, x, 4096, 256);   // while the kernel runs
/// @endcode
///
/// State:   `pool`'s, and up to 32 events for each queue that is in use.
/// Traffic: an event is recorded for each deallocation; a request that waits goes over all blocks.
/// Order:   any upstream, through its `_sync` calls; all queues belong to one device, current in each call.
/// Sync:    as above; a mutex, thread-safe.
/// Throws:  as `pool`; what the backend throws where it can't wait. A block whose deallocation can't be marked by an
///          event (its queue is no more, the device is broken) stays live and is counted in `refused()`.
///
/// @tparam Backend A type with a queue and an event, such as a backend. Queues need not outlive the pool.
template <class Backend, class Upstream> class queue_pool {
  static_assert(has_queue<Backend> && has_event<Backend>,
                "heddle::queue_pool: the backend must have a queue and an event");

 public:
  /// The queue that calls take.
  using queue = typename Backend::queue;

  /// @brief Takes `.initial` bytes from a copy of `upstream`.
  /// @param order Only its type matters: whose queues and events they are. @param upstream Where chunks come from.
  /// @param options As for `pool`.
  queue_pool([[maybe_unused]] Backend order, Upstream upstream, pool_options options = {})
      : state_(std::make_shared<state>("queue_pool", std::move(upstream), options)) {}

  /// A block of at least `bytes` bytes for later work on `q`.
  void* allocate(queue q, std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("queue_pool", alignment);
    if (bytes == 0) return nullptr;
    std::lock_guard lock(state_->mutex);
    return state_->allocate(q, bytes, alignment);
  }

  /// Gives a block back; work that `q` has now may use it still. A pointer that is not a live block of this pool
  /// changes nothing but `refused()`.
  void deallocate(queue q, void* p, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    if (!p) return;
    std::lock_guard lock(state_->mutex);
    state_->deallocate(q, static_cast<std::byte*>(p));
  }

  /// A block of at least `bytes` bytes, usable at once and anywhere; may wait for the device.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("queue_pool", alignment);
    if (bytes == 0) return nullptr;
    std::lock_guard lock(state_->mutex);
    return state_->allocate_sync(bytes, alignment);
  }

  /// Gives a block back that nobody uses any more.
  void deallocate_sync(void* p, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    if (!p) return;
    std::lock_guard lock(state_->mutex);
    if (!state_->give(static_cast<std::byte*>(p), 0, 0)) ++state_->refused;
  }

  /// Bytes in live blocks, with their rounding.
  std::size_t in_use() const {
    std::lock_guard lock(state_->mutex);
    return state_->in_use;
  }
  /// Bytes held from the upstream.
  std::size_t held() const {
    std::lock_guard lock(state_->mutex);
    return state_->held;
  }
  /// The largest free block, whichever queue gave it back; joining or growing may give more.
  std::size_t largest_free() const {
    std::lock_guard lock(state_->mutex);
    return state_->largest_free();
  }
  /// How many deallocations named a pointer that was not a live block, or a queue that can't be marked.
  std::size_t refused() const {
    std::lock_guard lock(state_->mutex);
    return state_->refused;
  }
  /// Waits for the work of all free blocks, gives every chunk without a live block back to the upstream, and returns
  /// the bytes given back.
  std::size_t trim() {
    std::lock_guard lock(state_->mutex);
    state_->drain();
    return state_->release(static_cast<std::size_t>(-1));
  }
  /// The options it was made with.
  pool_options options() const { return state_->options; }

  /// Whether both are one pool.
  friend bool operator==(const queue_pool& a, const queue_pool& b) noexcept { return a.state_ == b.state_; }

 private:
  using event = typename Backend::event;
  static constexpr std::size_t most_marks = 32;

  // A deallocation of a line and the event behind it.
  struct mark {
    std::uint64_t ticket = 0;
    event at{};
  };

  // A queue that has given blocks back; its place in `lines` is its number as an owner. Deallocations have tickets,
  // which are reached in order. An event may stand for several of them, the last one's.
  struct line {
    bool used = false;
    unsigned long long id = 0;
    queue of{};
    std::uint64_t last = 0, done = 0;  // the last ticket, and the last that is known to be reached
    std::vector<mark> marks;           // of tickets above `done`, in order
  };

  struct state : detail::chunked_heap<Upstream> {
    using detail::chunked_heap<Upstream>::chunked_heap;
    using detail::chunked_heap<Upstream>::blocks;
    using detail::chunked_heap<Upstream>::chunks;
    using detail::chunked_heap<Upstream>::free_of;

    ~state() {
      for (const line& l : lines) {
        try {
          if (!l.marks.empty()) l.marks.back().at.synchronize();
        } catch (...) {  // whatever its backend says, this queue can't be waited for: it is broken and uses nothing
        }
      }
    }

    void* allocate(queue q, std::size_t bytes, std::size_t alignment) {
      const std::uint32_t own = line_of(q);
      if (this->in_use == 0 && chunks.size() > 1) {
        settle();
        this->unite(bytes);
      }
      this->reserve();
      std::uint32_t k = smaller(best(0, bytes, alignment), best(own, bytes, alignment));
      if (k == detail::no_block && settle()) k = smaller(best(0, bytes, alignment), best(own, bytes, alignment));
      if (k == detail::no_block) k = of_another(q, bytes, alignment);
      if (k == detail::no_block) k = joined(q, own, bytes, alignment);
      if (k == detail::no_block) k = grown(bytes, alignment);
      return this->take(k, bytes, alignment, this->options.granularity);
    }

    void* allocate_sync(std::size_t bytes, std::size_t alignment) {
      this->reserve();
      std::uint32_t k = best(0, bytes, alignment);
      if (k == detail::no_block && drain()) k = best(0, bytes, alignment);
      if (k == detail::no_block) k = grown(bytes, alignment);
      return this->take(k, bytes, alignment, this->options.granularity);
    }

    void deallocate(queue q, std::byte* p) noexcept {
      std::uint32_t own = 0;
      std::uint64_t ticket = 0;
      try {
        own = line_of(q);
        ticket = marked(lines[own]);
      } catch (const std::exception&) {  // no event, no reuse
        ++refused;
        return;
      }
      if (!this->give(p, own, ticket)) ++refused;
    }

    std::uint32_t best(std::uint32_t owner, std::size_t bytes, std::size_t alignment) const noexcept {
      return free_of[owner].best(blocks, bytes, alignment);
    }
    std::uint32_t smaller(std::uint32_t a, std::uint32_t b) const noexcept {
      if (a == detail::no_block || b == detail::no_block) return a == detail::no_block ? b : a;
      return blocks[b].size < blocks[a].size ? b : a;
    }

    // The number of a queue's line, which is made if there is none.
    std::uint32_t line_of(queue q) {
      unsigned long long id = 0;
      if constexpr (requires { q.id(); }) id = q.id();
      std::uint32_t idle = 0;
      for (std::uint32_t i = 1; i < lines.size(); ++i) {
        if (lines[i].used && lines[i].id == id && lines[i].of == q) return i;
        if (idle == 0 && lines[i].marks.empty() && free_of[i].empty()) idle = i;
      }
      if (idle == 0) {
        free_of.resize(lines.size() + 1);
        lines.emplace_back();
        idle = static_cast<std::uint32_t>(lines.size() - 1);
        lines[idle].marks.reserve(most_marks);
        spare.reserve(lines.size() * most_marks);
      }
      line& l = lines[idle];
      l.used = true;
      l.id = id;
      l.of = q;
      return idle;
    }

    // Marks the present end of a queue and returns the ticket.
    std::uint64_t marked(line& l) {
      if (l.marks.size() == most_marks) poll(l);
      if (l.marks.size() == most_marks) {
        l.marks.back().at.record(l.of);  // stands for what it marked before, too
      } else {
        event e;
        if (!spare.empty()) {
          e = std::move(spare.back());
          spare.pop_back();
        }
        e.record(l.of);
        l.marks.push_back({0, std::move(e)});
      }
      return l.marks.back().ticket = ++l.last;
    }

    void forget(line& l, std::size_t count) {
      if (count == 0) return;
      l.done = l.marks[count - 1].ticket;
      for (std::size_t i = 0; i < count; ++i) spare.push_back(std::move(l.marks[i].at));
      l.marks.erase(l.marks.begin(), l.marks.begin() + static_cast<std::ptrdiff_t>(count));
    }

    void poll(line& l) {
      std::size_t reached = 0;
      while (reached < l.marks.size() && l.marks[reached].at.ready()) ++reached;
      forget(l, reached);
    }

    // Makes blocks whose work is done free for all; whether there were any.
    bool settle() {
      for (line& l : lines) poll(l);
      bool any = false;
      for (const std::uint32_t first : chunks) {
        for (std::uint32_t k = first; k != detail::no_block; k = blocks[k].after) {
          if (!blocks[k].free || blocks[k].owner == 0 || blocks[k].ticket > lines[blocks[k].owner].done) continue;
          k = this->release_to_all(k);
          any = true;
        }
      }
      return any;
    }

    // The same, after a wait of the host for all that is not done.
    bool drain() {
      for (line& l : lines) {
        if (!l.marks.empty()) l.marks.back().at.synchronize();
        forget(l, l.marks.size());
      }
      return settle();
    }

    // Makes work of `q` wait until an owner's ticket is reached.
    void wait(queue q, std::uint32_t owner, std::uint64_t ticket) {
      const line& l = lines[owner];
      const auto m = std::find_if(l.marks.begin(), l.marks.end(), [&](const mark& x) { return x.ticket >= ticket; });
      if (m != l.marks.end()) q.wait(m->at);
    }

    std::uint32_t of_another(queue q, std::size_t bytes, std::size_t alignment) {
      std::uint32_t k = detail::no_block;
      for (std::uint32_t i = 1; i < lines.size(); ++i) k = smaller(k, best(i, bytes, alignment));
      if (k != detail::no_block) wait(q, blocks[k].owner, blocks[k].ticket);
      return k;
    }

    // The smallest run of free neighbours that holds the request, as one block.
    std::uint32_t joined(queue q, std::uint32_t own, std::size_t bytes, std::size_t alignment) {
      struct run {
        std::uint32_t first = detail::no_block, last = detail::no_block;
        std::size_t size = 0;
      } found;
      for (const std::uint32_t chunk : chunks) {
        run now;
        for (std::uint32_t k = chunk; k != detail::no_block; k = blocks[k].after) {
          if (!blocks[k].free) {
            now = {};
            continue;
          }
          if (now.size == 0) now.first = k;
          now.last = k;
          now.size += blocks[k].size;
          if (blocks[k].after != detail::no_block && blocks[blocks[k].after].free) continue;
          const std::size_t skip = (0 - reinterpret_cast<std::uintptr_t>(blocks[now.first].begin)) & (alignment - 1);
          if (skip > now.size || now.size - skip < bytes) continue;
          if (found.size == 0 || now.size < found.size) found = now;
        }
      }
      if (found.size == 0) return detail::no_block;
      for (std::uint32_t k = found.first;; k = blocks[k].after) {
        if (blocks[k].owner != own) wait(q, blocks[k].owner, blocks[k].ticket);
        if (k == found.last) break;
      }
      this->join(found.first, found.last, own, marked(lines[own]));  // what is left of it comes after the waits
      return found.first;
    }

    // A block of the upstream's, after a wait of the host if the limit demands one.
    std::uint32_t grown(std::size_t bytes, std::size_t alignment) {
      try {
        this->grow(bytes);
      } catch (const memory_error&) {
        if (!drain()) throw;
        this->reserve();
        if (const std::uint32_t k = best(0, bytes, alignment); k != detail::no_block) return k;
        this->grow(bytes);
      }
      this->reserve();
      return best(0, bytes, alignment);
    }

    mutable std::mutex mutex;
    std::vector<line> lines{1};  // the first stands for what is free for all
    std::vector<event> spare;
    std::size_t refused = 0;
  };

  std::shared_ptr<state> state_;
};

static_assert(resource<queue_pool<host, host_resource>>);

}  // namespace v0
}  // namespace heddle

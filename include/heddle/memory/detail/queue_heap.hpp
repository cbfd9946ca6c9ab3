// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/detail/chunked_heap.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// What `queue_pool` keeps: blocks that are free in the order of queues.
template <class Backend, class Upstream> class queue_heap : public locked_heap<Upstream> {
  using queue = typename Backend::queue;
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

  using locked_heap<Upstream>::blocks;
  using locked_heap<Upstream>::chunks;
  using locked_heap<Upstream>::free_of;

 public:
  using locked_heap<Upstream>::locked_heap;

  ~queue_heap() {
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
    if (k == no_block && settle()) k = smaller(best(0, bytes, alignment), best(own, bytes, alignment));
    if (k == no_block) k = of_another(q, bytes, alignment);
    if (k == no_block) k = joined(q, own, bytes, alignment);
    if (k == no_block) k = grown(bytes, alignment);
    return this->take(k, bytes, alignment, this->options.granularity);
  }

  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    this->reserve();
    std::uint32_t k = best(0, bytes, alignment);
    if (k == no_block && drain()) k = best(0, bytes, alignment);
    if (k == no_block) k = grown(bytes, alignment);
    return this->take(k, bytes, alignment, this->options.granularity);
  }

  void deallocate(queue q, std::byte* p) noexcept {
    std::uint32_t own = 0;
    std::uint64_t ticket = 0;
    try {
      own = line_of(q);
      ticket = marked(lines[own]);
    } catch (const std::exception&) {  // no event, no reuse
      ++this->refused;
      return;
    }
    if (!this->give(p, own, ticket)) ++this->refused;
  }

  // Makes all free blocks free for all, after a wait of the host; whether there were others.
  bool drain() {
    for (line& l : lines) {
      if (!l.marks.empty()) l.marks.back().at.synchronize();
      forget(l, l.marks.size());
    }
    return settle();
  }

 private:
  std::uint32_t best(std::uint32_t owner, std::size_t bytes, std::size_t alignment) const noexcept {
    return free_of[owner].best(blocks, bytes, alignment);
  }
  std::uint32_t smaller(std::uint32_t a, std::uint32_t b) const noexcept {
    if (a == no_block || b == no_block) return a == no_block ? b : a;
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
      line made;
      made.marks.reserve(most_marks);
      spare.reserve((lines.size() + 1) * most_marks);
      free_of.resize(lines.size() + 1);
      lines.push_back(std::move(made));
      idle = static_cast<std::uint32_t>(lines.size() - 1);
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
      for (std::uint32_t k = first; k != no_block; k = blocks[k].after) {
        if (!blocks[k].free || blocks[k].owner == 0 || blocks[k].ticket > lines[blocks[k].owner].done) continue;
        k = this->release_to_all(k);
        any = true;
      }
    }
    return any;
  }

  // Makes work of `q` wait until an owner's ticket is reached.
  void wait(queue q, std::uint32_t owner, std::uint64_t ticket) {
    const line& l = lines[owner];
    const auto m = std::find_if(l.marks.begin(), l.marks.end(), [&](const mark& x) { return x.ticket >= ticket; });
    if (m != l.marks.end()) q.wait(m->at);
  }

  std::uint32_t of_another(queue q, std::size_t bytes, std::size_t alignment) {
    std::uint32_t k = no_block;
    for (std::uint32_t i = 1; i < lines.size(); ++i) k = smaller(k, best(i, bytes, alignment));
    if (k != no_block) wait(q, blocks[k].owner, blocks[k].ticket);
    return k;
  }

  // The smallest run of free neighbours that holds the request, as one block.
  std::uint32_t joined(queue q, std::uint32_t own, std::size_t bytes, std::size_t alignment) {
    struct run {
      std::uint32_t first = no_block, last = no_block;
      std::size_t size = 0;
    } found;
    for (const std::uint32_t chunk : chunks) {
      run now;
      for (std::uint32_t k = chunk; k != no_block; k = blocks[k].after) {
        if (!blocks[k].free) {
          now = {};
          continue;
        }
        if (now.size == 0) now.first = k;
        now.last = k;
        now.size += blocks[k].size;
        if (blocks[k].after != no_block && blocks[blocks[k].after].free) continue;
        const std::size_t skip = (0 - reinterpret_cast<std::uintptr_t>(blocks[now.first].begin)) & (alignment - 1);
        if (skip > now.size || now.size - skip < bytes) continue;
        if (found.size == 0 || now.size < found.size) found = now;
      }
    }
    if (found.size == 0) return no_block;
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
      if (const std::uint32_t k = best(0, bytes, alignment); k != no_block) return k;
      this->grow(bytes);
    }
    this->reserve();
    return best(0, bytes, alignment);
  }

  std::vector<line> lines{1};  // the first stands for what is free for all
  std::vector<event> spare;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

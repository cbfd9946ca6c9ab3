// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/detail/adaptor.hpp>
#include <heddle/memory/lifetime.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <ostream>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief One allocation or deallocation.
struct memory_event {
  std::int64_t nanoseconds = 0;   ///< Since the adaptor was constructed, by the steady clock.
  const void* pointer = nullptr;  ///< The block.
  std::size_t bytes = 0;          ///< Its size as asked for.
  std::size_t alignment = 0;      ///< Its alignment as asked for.
  bool allocation = false;        ///< Else a deallocation.
};

namespace detail {
class logging_policy {
 public:
  template <class Take> void* allocate(std::size_t bytes, std::size_t alignment, Take&& take) {
    {
      // Room for this event and for the deallocation of every live block: giving memory back must not fail.
      std::lock_guard lock(mutex);
      if (events.capacity() < events.size() + 2 * (live + 1)) events.reserve(2 * (events.size() + 2 * (live + 1)));
      ++live;
    }
    void* p = nullptr;
    try {
      p = take(bytes, alignment);
    } catch (...) {
      std::lock_guard lock(mutex);
      --live;
      throw;
    }
    std::lock_guard lock(mutex);
    push(p, bytes, alignment, true);
    return p;
  }

  template <class Give> void deallocate(void* p, std::size_t bytes, std::size_t alignment, Give&& give) noexcept {
    {
      std::lock_guard lock(mutex);
      --live;
      push(p, bytes, alignment, false);
    }
    give(p, bytes, alignment);
  }

  std::mutex mutex;
  std::vector<memory_event> events;
  std::size_t live = 0;

 private:
  void push(const void* p, std::size_t bytes, std::size_t alignment, bool allocation) {
    const auto since = std::chrono::steady_clock::now() - start_;
    events.push_back(
        {std::chrono::duration_cast<std::chrono::nanoseconds>(since).count(), p, bytes, alignment, allocation});
  }

  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};
}  // namespace detail

/// @brief Keeps every allocation and deallocation, for a table, or as lifetimes for a planner.
///
/// @code{.cpp}
/// heddle::logging memory{heddle::host_resource{}};
/// train_one_step(memory);
/// heddle::memory_plan p = heddle::plan_memory(std::span<const heddle::lifetime>(memory.lifetimes()));
/// heddle::write_lifetimes(file, memory.lifetimes());   // MiniMalloc's table: heddle/memory/lifetimes_csv.hpp
/// @endcode
///
/// State:   40 bytes an event, shared by all copies; `clear` empties it.
/// Order:   any upstream.
/// Sync:    a mutex; thread-safe if the upstream is.
/// Throws:  what the upstream throws; `std::bad_alloc` when the log can't grow.
template <class Upstream = host_resource> class logging : public detail::adaptor<Upstream, detail::logging_policy> {
  using base = detail::adaptor<Upstream, detail::logging_policy>;

 public:
  /// Logs what goes to a copy of `upstream`.
  explicit logging(Upstream upstream = Upstream{}) : base(std::move(upstream)) {}

  /// The events so far, in order.
  std::vector<memory_event> events() const {
    std::lock_guard lock(this->policy().mutex);
    return this->policy().events;
  }

  /// Empties the log.
  void clear() {
    std::lock_guard lock(this->policy().mutex);
    this->policy().events.clear();
  }

  /// @brief The lifetimes of the blocks allocated so far, in the order of allocation; moments are numbers of events.
  ///
  /// What is still live ends with the log. Deallocations of blocks from before the log are left out.
  std::vector<lifetime> lifetimes() const {
    const std::vector<memory_event> log = events();
    std::vector<lifetime> out;
    std::map<const void*, std::size_t> live;
    for (std::size_t k = 0; k < log.size(); ++k) {
      if (log[k].allocation) {
        live[log[k].pointer] = out.size();
        out.push_back({k, log.size(), log[k].bytes, log[k].alignment, no_group});
      } else if (const auto at = live.find(log[k].pointer); at != live.end()) {
        out[at->second].last = k;
        live.erase(at);
      }
    }
    return out;
  }

  /// @brief Writes the events as a table: nanoseconds,action,pointer,bytes,alignment,in_use.
  /// Throws: file_error if the stream fails.
  void write_csv(std::ostream& out) const {
    out << "nanoseconds,action,pointer,bytes,alignment,in_use\n";
    std::int64_t in_use = 0;
    for (const memory_event& e : events()) {
      in_use += e.allocation ? static_cast<std::int64_t>(e.bytes) : -static_cast<std::int64_t>(e.bytes);
      out << e.nanoseconds << ',' << (e.allocation ? "allocate" : "deallocate") << ',' << e.pointer << ',' << e.bytes
          << ',' << e.alignment << ',' << in_use << '\n';
    }
    if (!out) throw file_error("heddle::logging::write_csv: the stream can't be written");
  }
};

static_assert(resource<logging<>>);

}  // namespace v0
}  // namespace heddle

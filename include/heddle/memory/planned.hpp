// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/archive.hpp>
#include <heddle/core/error.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/checked.hpp>
#include <heddle/memory/host_resource.hpp>
#include <heddle/memory/search_plan.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief An allocator for a step that repeats: it records one step, plans offsets for all its blocks, and from then on
/// answers each request with the address that the plan has for it.
///
/// Between two calls of `begin_step` lies a step. The first is served by the upstream and recorded. The next ones are
/// replayed: the k-th call is compared with the recorded one, and a request costs that comparison and an addition. A
/// step that does something else is served by the upstream from there on and counted; the step after it is recorded
/// anew. Blocks that outlive their step are never planned: the upstream serves them each time.
///
/// @code{.cpp}
/// heddle::planned memory{heddle::host_resource{}};
/// for (...) {
///   memory.begin_step();
///   train_one_step(memory);
/// }
/// // memory.plan().peak bytes in one block, at the lower bound or near it
/// @endcode
///
/// State:   one block of the plan's peak, 32 bytes for each call of a step, shared by all copies.
/// Traffic: a few instructions a call while the step repeats.
/// Order:   any upstream; outside `tracking` or `logging`, if these shall see what the program asks for, inside them.
/// Sync:    one thread, and on a device one queue for all that it gives: a planned block is used again by what that
///          queue does afterwards. `thread_safe` around it where threads take turns in a fixed order. Nothing waits but
///          `begin_step(queue)`, once for each plan. When the last copy goes, no work may use its blocks any more.
/// Throws:  `argument_error` on a bad alignment; what the upstream throws; `file_error` from load and save.
/// Source:  the task-specific allocators of Alibaba's PAI; STAlloc (arXiv 2507.16274) for plans from traces.
template <class Upstream = host_resource> class planned {
  static_assert(has_allocate_sync<Upstream> && has_deallocate_sync<Upstream>,
                "heddle::planned: the upstream must provide allocate_sync and a noexcept deallocate_sync");

 public:
  /// @param upstream Serves what isn't planned, and the block of the plan. @param limits How long to search for a plan
  /// after a recorded step; by default only the greedy plans are made.
  explicit planned(Upstream upstream = Upstream{}, search_limits limits = {.seconds = 0})
      : state_(std::make_shared<state>(std::move(upstream), limits)) {}

  /// @brief A step begins here, and the one before it ends. Plans after a recorded step. A step without a call is none.
  /// Throws: memory_error where the upstream has no room for the plan's block; the next step is recorded again then.
  void begin_step() { state_->begin_step(); }

  /// The same for steps on a queue of a device, which is waited for where a plan is made: it may use an older block.
  template <class Queue>
  void begin_step(Queue queue)
    requires has_allocate<Upstream, Queue>
  {
    if (state_->now == phase::recording) queue.synchronize();
    state_->begin_step();
  }

  /// A block for work on `queue`, which is the same in all calls.
  template <class Queue>
  void* allocate(Queue queue, std::size_t bytes, std::size_t alignment)
    requires has_allocate<Upstream, Queue>
  {
    if (void* const p = state_->replay(bytes, alignment)) return p;
    return state_->allocate(bytes, alignment, [&] { return state_->upstream.allocate(queue, bytes, alignment); });
  }

  /// Gives a block back; work that `queue` has now may use it still.
  template <class Queue>
  void deallocate(Queue queue, void* p, std::size_t bytes, std::size_t alignment) noexcept
    requires has_deallocate<Upstream, Queue>
  {
    if (!p || state_->replay(p)) return;
    state_->deallocate(static_cast<std::byte*>(p), bytes,
                       [&]() noexcept { state_->upstream.deallocate(queue, p, bytes, alignment); });
  }

  /// A block, usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    if (void* const p = state_->replay(bytes, alignment)) return p;
    return state_->allocate(bytes, alignment, [&] { return state_->upstream.allocate_sync(bytes, alignment); });
  }

  /// Gives a block back.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (!p || state_->replay(p)) return;
    state_->deallocate(static_cast<std::byte*>(p), bytes,
                       [&]() noexcept { state_->upstream.deallocate_sync(p, bytes, alignment); });
  }

  /// @brief Takes the plan of a step that is known before it runs; the next step is replayed.
  /// @param known The step's blocks; moments are the numbers of its calls, allocations and deallocations, from 0.
  /// @param made Their places, by `plan_memory` or `search_plan`.
  /// Throws: argument_error if these aren't the calls of a step, if the plan isn't valid for them, or if blocks of the
  /// present plan are live; memory_error where the upstream has no room for the plan's block beside the present one.
  /// Nothing has changed then. No work may use blocks of earlier steps any more: on a device wait for its queue first.
  void expect(std::vector<lifetime> known, memory_plan made) { state_->expect(std::move(known), std::move(made)); }

  /// The same, behind all work of a device's queue, which is waited for.
  template <class Queue>
  void expect(Queue queue, std::vector<lifetime> known, memory_plan made)
    requires has_allocate<Upstream, Queue>
  {
    queue.synchronize();
    expect(std::move(known), std::move(made));
  }

  /// Whether the current step is answered from a plan.
  bool replaying() const noexcept { return state_->now == phase::replaying; }
  /// The plan in force; empty before there is one.
  const memory_plan& plan() const noexcept { return state_->plan; }
  /// The lifetimes that it places, with numbers of calls for moments.
  const std::vector<lifetime>& lifetimes() const noexcept { return state_->lifetimes; }
  /// How many steps did something else than their plan.
  std::size_t deviations() const noexcept { return state_->deviations; }
  /// What the last of them did, and where; empty if there was none.
  const std::string& last_deviation() const noexcept { return state_->last_deviation; }

  /// @brief Writes the plan to a file.
  /// Throws: file_error if it can't; argument_error if there is no plan.
  void save(const std::string& path) const { state_->save(path); }

  /// @brief Takes the plan of an earlier run from a file; the next step is replayed.
  /// Throws: file_error if the file is missing or damaged; memory_error; nothing has changed then. argument_error if
  /// blocks of the present plan are live. On a device wait for the queue first, as for `expect`.
  void load(const std::string& path) { state_->load(path); }

  /// Whether both share one plan.
  friend bool operator==(const planned& a, const planned& b) noexcept { return a.state_ == b.state_; }

 private:
  enum class phase { idle, recording, replaying, deviating };

  // A recorded call: an allocation of so many bytes, or with 0 bytes the deallocation of a block. `taken` and `given`
  // are the addresses in the plan's block; both are null for an allocation outside of it and behind the last call.
  struct call {
    std::size_t bytes, alignment;
    std::byte *taken, *given;
  };

  // The same in a file.
  struct saved_call {
    std::size_t bytes, alignment, offset;
  };

  // An allocation of the recorded step, with the moments of its birth and death.
  struct recorded {
    std::size_t bytes, alignment, birth, death;
  };

  struct state {
    static constexpr std::size_t outside = static_cast<std::size_t>(-1);

    state(Upstream u, search_limits l) : upstream(std::move(u)), limits(l) {}
    state(const state&) = delete;
    state& operator=(const state&) = delete;
    ~state() { release(); }

    void release() noexcept {
      if (base) upstream.deallocate_sync(base, held, detail::max_alignment);
      base = nullptr;
      held = 0;
    }

    // The planned address, if the call is the one that comes next; else null.
    void* replay(std::size_t bytes, std::size_t alignment) noexcept {
      const call* const c = next;
      if (!c->taken || c->bytes != bytes || c->alignment != alignment) return nullptr;
      next = c + 1;
      return c->taken;
    }
    // Whether giving this block back is what comes next.
    bool replay(const void* p) noexcept {
      const call* const c = next;
      if (c->given != p) return false;
      next = c + 1;
      return true;
    }

    template <class Take> void* allocate(std::size_t bytes, std::size_t alignment, Take&& take) {
      if (now == phase::replaying && bytes != 0) {
        if (next != last() && next->bytes == bytes && next->alignment == alignment)  // one that outlived its step
          ++next;
        else
          deviate("allocates", bytes);
      }
      void* const p = take();
      if (p && now == phase::recording) record_allocation(p, bytes, alignment);
      return p;
    }

    template <class Give> void deallocate(std::byte* p, std::size_t bytes, Give&& give) noexcept {
      if (base && reinterpret_cast<std::uintptr_t>(p) - reinterpret_cast<std::uintptr_t>(base) < held) {
        if (now == phase::replaying) deviate("gives back", bytes);
        --live;
        return;
      }
      if (now == phase::recording) record_deallocation(p);
      give();
    }

    // Blocks of the plan that are live.
    std::size_t live_now() const noexcept {
      std::size_t n = live;
      if (now != phase::replaying) return n;
      for (const call* c = calls.data(); c != next; ++c) n += (c->taken != nullptr) - (c->given != nullptr);
      return n;
    }

    // Behind the last call.
    const call* last() const noexcept { return calls.data() + calls.size() - 1; }
    // Where no call is replayed.
    void stop_replay() noexcept { next = last(); }

    void begin_step() {
      if (now == phase::replaying && next != last() && next != calls.data()) deviate("ends early and leaves", 0);
      const phase ended = std::exchange(now, phase::idle);
      if (ended == phase::recording) make_plan();
      stop_replay();
      // Blocks of an old plan that are still live: wait until they are gone.
      if (ended == phase::recording || ended == phase::replaying) {
        now = phase::replaying;
        next = calls.data();
      } else if (live == 0) {
        begin_recording();
      }
    }

    void begin_recording() {
      trace.clear();
      open.clear();
      moment = 0;
      now = phase::recording;
    }

    void record_allocation(void* p, std::size_t bytes, std::size_t alignment) {
      try {
        trace.push_back({bytes, alignment, moment, outside});
        open[p] = trace.size() - 1;
      } catch (const std::bad_alloc&) {  // no room for the record: this step isn't planned
        now = phase::idle;
      }
      ++moment;
    }

    void record_deallocation(void* p) noexcept {
      const auto at = open.find(p);
      if (at == open.end()) return;  // from before this step
      trace[at->second].death = moment++;
      open.erase(at);
    }

    // The blocks of a step that end with it, as a planner takes them.
    static std::vector<lifetime> placeable(const std::vector<recorded>& from) {
      std::vector<lifetime> out;
      for (const recorded& r : from) {
        if (r.death != outside) out.push_back({r.birth, r.death, r.bytes, r.alignment, no_group});
      }
      return out;
    }

    void make_plan() {
      std::vector<lifetime> placed = placeable(trace);
      memory_plan made = search_plan(std::span<const lifetime>(placed), limits);
      adopt(trace, moment, std::move(made), std::move(placed));
    }

    void expect(std::vector<lifetime> known, memory_plan made) {
      if (const std::size_t n = live_now(); n != 0) {
        throw argument_error("heddle::planned::expect: " + std::to_string(n) + " blocks of the present plan are live");
      }
      std::vector<recorded> calls_of;
      std::vector<bool> seen(2 * known.size());
      for (const lifetime& l : known) {
        for (const std::size_t moment_of : {l.first, l.last}) {
          if (moment_of >= seen.size() || seen[moment_of] || l.first > l.last || l.bytes == 0) {
            throw argument_error(
                "heddle::planned::expect: the moments must be the numbers of calls, each once, from 0 to " +
                std::to_string(seen.size()) + ", and no block may be empty");
          }
          seen[moment_of] = true;
        }
        detail::check_alignment("planned::expect", l.alignment);
        calls_of.push_back({l.bytes, l.alignment, l.first, l.last});
      }
      if (!is_valid(made, std::span<const lifetime>(known))) {
        throw argument_error("heddle::planned::expect: the plan's blocks overlap, or are not those of the step");
      }
      adopt(calls_of, seen.size(), std::move(made), std::move(known));
      now = phase::replaying;
      next = calls.data();
    }

    // Takes a plan over, all or nothing.
    void adopt(const std::vector<recorded>& from, std::size_t moments, memory_plan made, std::vector<lifetime> placed) {
      std::vector<call> by_moment(moments + 1, call{});
      std::byte* block = nullptr;
      if (made.peak > held) {
        block = static_cast<std::byte*>(upstream.allocate_sync(made.peak, detail::max_alignment));
      }
      if (block) {
        release();
        base = block;
        held = made.peak;
      }
      std::size_t k = 0;
      for (const recorded& r : from) {
        std::byte* const at = r.death == outside ? nullptr : base + made.offsets[k++];
        by_moment[r.birth] = {r.bytes, r.alignment, at, nullptr};
        if (at) by_moment[r.death] = {0, r.alignment, nullptr, at};
      }
      calls = std::move(by_moment);
      stop_replay();
      plan = std::move(made);
      lifetimes = std::move(placed);
    }

    void deviate(const char* what, std::size_t bytes) noexcept {
      const std::ptrdiff_t done = next - calls.data();
      live = live_now();
      now = phase::deviating;
      stop_replay();
      ++deviations;
      try {
        last_deviation = "call " + std::to_string(done) + " of a step of " + std::to_string(calls.size() - 1) +
                         ": the step " + what + " " + std::to_string(bytes) + " bytes";
      } catch (const std::bad_alloc&) {  // the text is lost, the count isn't
      }
    }

    void save(const std::string& path) const {
      if (calls.size() == 1) {
        throw argument_error("heddle::planned::save: there is no plan yet; record a step first");
      }
      archive_writer out;
      out.put(std::string("heddle::planned 1"));
      out.put(static_cast<std::uint64_t>(calls.size() - 1));
      for (const call* c = calls.data(); c != last(); ++c) {
        const std::byte* const at = c->taken ? c->taken : c->given;
        out.put(saved_call{c->bytes, c->alignment, at ? static_cast<std::size_t>(at - base) : outside});
      }
      out.put(static_cast<std::uint64_t>(plan.peak));
      out.put(static_cast<std::uint64_t>(plan.lower_bound));
      out.write(path);
    }

    void load(const std::string& path) {
      if (const std::size_t n = live_now(); n != 0) {
        throw argument_error("heddle::planned::load: " + std::to_string(n) + " blocks of the present plan are live");
      }
      archive_reader in(path);
      if (in.get_string() != "heddle::planned 1") in.refuse("it is not a memory plan");
      const auto count = in.template get<std::uint64_t>();
      if (count > (std::uint64_t{1} << 32)) in.refuse("it has too many calls");
      std::vector<recorded> found;
      std::vector<std::size_t> offsets;            // of each, `outside` for those that outlive their step
      std::map<std::size_t, std::size_t> live_at;  // the block at an offset
      for (std::size_t m = 0; m < count; ++m) {
        const auto c = in.template get<saved_call>();
        if (!detail::is_alignment(c.alignment) && c.bytes) in.refuse("an alignment is no power of two");
        if (c.bytes) {
          if (c.offset != outside && !live_at.emplace(c.offset, found.size()).second)
            in.refuse("two blocks share a place");
          found.push_back({c.bytes, c.alignment, m, outside});
          offsets.push_back(c.offset);
        } else {
          const auto born = live_at.find(c.offset);
          if (born == live_at.end()) in.refuse("it gives back what it did not take");
          found[born->second].death = m;
          live_at.erase(born);
        }
      }
      memory_plan made;
      made.peak = static_cast<std::size_t>(in.template get<std::uint64_t>());
      made.lower_bound = static_cast<std::size_t>(in.template get<std::uint64_t>());
      in.finish();
      if (!live_at.empty()) in.refuse("it keeps what it took");
      const std::vector<lifetime> placed = placeable(found);
      std::erase(offsets, outside);
      made.offsets = std::move(offsets);
      if (!is_valid(made, std::span<const lifetime>(placed))) in.refuse("its blocks overlap");
      adopt(found, count, std::move(made), placed);
      now = phase::replaying;
      next = calls.data();
    }

    Upstream upstream;
    search_limits limits;
    phase now = phase::idle;
    std::byte* base = nullptr;  // the block of the plan
    std::size_t held = 0;
    std::size_t live = 0;             // blocks of the plan, while it is not replayed
    std::vector<call> calls{call{}};  // and an empty one behind them
    const call* next = calls.data();  // the one that comes next; the last, which nothing equals, while none is replayed
    memory_plan plan;
    std::vector<lifetime> lifetimes;
    std::vector<recorded> trace;
    std::map<void*, std::size_t> open;  // live blocks of the recorded step
    std::size_t moment = 0;
    std::size_t deviations = 0;
    std::string last_deviation;
  };

  std::shared_ptr<state> state_;
};

static_assert(resource<planned<>>);

}  // namespace v0
}  // namespace heddle

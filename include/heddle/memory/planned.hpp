// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/archive.hpp>
#include <heddle/core/error.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/checked.hpp>
#include <heddle/memory/detail/recorded_step.hpp>
#include <heddle/memory/host_resource.hpp>
#include <heddle/memory/search_plan.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
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
/// replayed: the k-th request is compared with the recorded one, size, alignment and what was given back before it, and
/// costs that comparison and an addition. A step that does something else is served by the upstream from there on and
/// counted; the step after it is recorded anew. Where the upstream has no room for it beside the block of the plan,
/// that is given back first, if nothing in it is live. Blocks that outlive their step are never planned: the upstream
/// serves them each time.
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
/// State:   one block of the plan's peak; for each block of a step 32 bytes that calls read, and some 120 beside them;
///          shared by all copies.
/// Traffic: a few instructions a call while the step repeats.
/// Order:   any upstream; outside `tracking` or `logging`, if these shall see what the program asks for, inside them.
/// Sync:    one thread, and on a device one queue for all that it gives: a planned block is used again by what that
///          queue does afterwards; calls without a queue must not be mixed with it. `thread_safe` around it where
///          threads take turns in a fixed order. Nothing waits but `begin_step(queue)`, once for each plan. When the
///          last copy goes, no work may use its blocks any more.
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
    if (state_->replays(bytes, alignment)) [[likely]]
      return state_->next++->at;
    return state_->allocate(
        bytes, alignment, [=, this] { return state_->upstream.allocate(queue, bytes, alignment); },
        [=, this](void* p, std::size_t n) { state_->upstream.deallocate(queue, p, n, detail::max_alignment); });
  }

  /// Gives a block back; work that `queue` has now may use it still.
  template <class Queue>
  void deallocate(Queue queue, void* p, std::size_t bytes, std::size_t alignment) noexcept
    requires has_deallocate<Upstream, Queue>
  {
    if (!state_->replays(p)) [[unlikely]] {
      state_->deallocate(static_cast<std::byte*>(p), bytes,
                         [=, this]() noexcept { state_->upstream.deallocate(queue, p, bytes, alignment); });
    }
  }

  /// A block, usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    if (state_->replays(bytes, alignment)) [[likely]]
      return state_->next++->at;
    return state_->allocate(
        bytes, alignment, [=, this] { return state_->upstream.allocate_sync(bytes, alignment); },
        [=, this](void* p, std::size_t n) { state_->upstream.deallocate_sync(p, n, detail::max_alignment); });
  }

  /// Gives a block back.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (!state_->replays(p)) [[unlikely]] {
      state_->deallocate(static_cast<std::byte*>(p), bytes,
                         [=, this]() noexcept { state_->upstream.deallocate_sync(p, bytes, alignment); });
    }
  }

  /// @brief Takes the plan of a step that is known before it runs; the next step is replayed.
  /// @param known The step's blocks; moments are the numbers of its calls, allocations and deallocations, from 0.
  /// @param made Their places, by `plan_memory` or `search_plan`.
  /// Throws: argument_error if these aren't the calls of a step, if the plan isn't valid for them, or if blocks of the
  /// present plan are live; memory_error where the upstream has no room for the plan's block, with the present one
  /// given back. Nothing has changed then. No work may use blocks of earlier steps any more: on a device wait for its
  /// queue first.
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

  /// How many deallocations named a place of the plan where no block was live: it was given back before. They change
  /// nothing else. During a replay one may be seen only at the call after it; `checking` around this names both callers.
  std::size_t refused() const noexcept { return state_->refused; }

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

  // A recorded allocation; `then` says with what alignment, and what comes next in `givings`. What is taken and what is
  // given back are two lists with a position each: were it one, each call would wait for the one before it to store the
  // position.
  struct taking {
    std::size_t bytes;
    std::uint64_t then;
    std::byte* at;
  };

  struct state {
    state(Upstream u, search_limits l) : upstream(std::move(u)), limits(l) { stop_replay(); }
    state(const state&) = delete;
    state& operator=(const state&) = delete;
    ~state() { release(); }

    void release() noexcept {
      if (base) upstream.deallocate_sync(base, held, detail::max_alignment);
      base = nullptr;
      held = 0;
    }

    // Whether a call is the one that comes next: then `next++->at` is the planned address. One branch is faster than
    // three. No alignment has bits above the 16 that `when` keeps apart from a place; most callers pass a constant.
    bool replays(std::size_t bytes, std::size_t alignment) const noexcept {
      return ((next->bytes ^ bytes) | (next->then ^ when(given, alignment)) | (alignment >> 16)) == 0;
    }
    // Whether this is the block that is given back next. That it is too early shows when the next one is taken.
    bool replays(const void* p) noexcept {
      if (*given != p) return false;
      ++given;
      return true;
    }
    // A place in `givings` and an alignment, which is at most 4096, in one number: all places have the bits from 48 on
    // in common. Records are read once a step in order, so the fewer bytes they have the better. Plus 1 where the
    // upstream serves the block, so that no call equals it.
    static std::uint64_t when(std::byte* const* place, std::size_t alignment) noexcept {
      return reinterpret_cast<std::uintptr_t>(place) ^ std::rotl(std::uint64_t{alignment}, 48);
    }

    // A call that isn't replayed: take() asks the upstream, give(block, bytes) gives the block of the plan back to it.
    template <class Take, class Give>
    [[gnu::noinline, gnu::cold]] void* allocate(std::size_t bytes, std::size_t alignment, Take take, Give give) {
      const bool replays_upstream =
          now == phase::replaying && next->then == when(given, alignment) + 1 && next->bytes == bytes;
      if (now == phase::replaying && !replays_upstream && bytes != 0) deviate("allocates", bytes);
      void* p = nullptr;
      try {
        p = take();
      } catch (const memory_error&) {
        if (!base || now == phase::replaying || !live.empty()) throw;
        give(base, held);  // no longer in use, since this step is none that it was made for
        forget();
        p = take();
      }
      next += replays_upstream;
      if (p && now == phase::recording && !recorder.allocation(p, bytes, alignment)) now = phase::idle;
      return p;
    }

    template <class Give>
    [[gnu::noinline, gnu::cold]] void deallocate(std::byte* p, std::size_t bytes, Give give) noexcept {
      if (!p) return;
      if (base && reinterpret_cast<std::uintptr_t>(p) - reinterpret_cast<std::uintptr_t>(base) < held) {
        if (now == phase::replaying) deviate("gives back", bytes);
        refused += std::erase(live, p) == 0;
        return;
      }
      if (now == phase::recording) recorder.deallocation(p);
      give();
    }

    // Puts the places of a replay's live blocks in `live`; returns how many were given back untaken.
    std::size_t find_live() noexcept {
      live.clear();
      for (const taking* c = takings.data(); c != next; ++c) {
        if (c->at) live.push_back(c->at);
      }
      back.assign(static_cast<std::byte* const*>(givings.data()), given);
      return detail::subtract(live, back);
    }
    std::size_t live_now() noexcept {
      if (now == phase::replaying) find_live();
      return live.size();
    }

    // Calls of the present step that were replayed, and those of the plan.
    std::size_t done() const noexcept {
      return static_cast<std::size_t>((next - takings.data()) + (given - givings.data()));
    }
    std::size_t calls() const noexcept { return takings.size() + givings.size() - 2; }

    void start_replay() noexcept {
      now = phase::replaying;
      next = takings.data();
      given = givings.data();
    }
    void stop_replay() noexcept {
      next = &takings.back();
      given = &givings.back();
    }

    void begin_step() {
      if (now == phase::replaying && done() != 0 && done() != calls())
        deviate("ends early and leaves", live_now(), " block(s)");
      if (now == phase::recording && recorder.step().calls == 0) return;
      const phase ended = std::exchange(now, phase::idle);
      if (ended == phase::recording) make_plan();
      stop_replay();
      // Blocks of an old plan that are still live: wait until they are gone.
      if (ended == phase::recording || ended == phase::replaying) {
        start_replay();
      } else if (live.empty()) {
        recorder.begin();
        now = phase::recording;
      }
    }

    void make_plan() {
      std::vector<lifetime> placed = recorder.step().placeable();
      memory_plan made = search_plan(std::span<const lifetime>(placed), limits);
      adopt(recorder.step(), std::move(made), std::move(placed));
    }

    void expect(std::vector<lifetime> known, memory_plan made) {
      if (const std::size_t n = live_now(); n != 0) {
        throw argument_error("heddle::planned::expect: " + std::to_string(n) + " blocks of the present plan are live");
      }
      detail::recorded_step step;
      std::vector<bool> seen(step.calls = 2 * known.size());
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
        step.blocks.push_back({l.bytes, l.alignment, l.first, l.last});
      }
      if (!is_valid(made, std::span<const lifetime>(known))) {
        throw argument_error("heddle::planned::expect: the plan's blocks overlap, or are not those of the step");
      }
      adopt(step, std::move(made), std::move(known));
      start_replay();
    }

    // Takes a plan over, all or nothing.
    void adopt(const detail::recorded_step& step, memory_plan made, std::vector<lifetime> placed) {
      constexpr std::size_t none = detail::outlives;
      std::vector<std::size_t> taken(step.calls, none), ended(step.calls, none);  // the block of each call
      std::vector<std::size_t> offsets;
      for (std::size_t k = 0; const detail::recorded_block& b : step.blocks) {
        taken[b.birth] = offsets.size();
        if (b.death != none) ended[b.death] = offsets.size();
        offsets.push_back(b.death == none ? none : made.offsets[k++]);
      }
      std::vector<taking> to_take(step.blocks.size() + 1, last);
      std::vector<std::byte*> to_give(made.offsets.size() + 1, no_place());
      live.reserve(to_take.size());  // so that nothing fails when a step deviates
      back.reserve(to_give.size());
      if (made.peak > held) hold(made.peak);
      auto t = to_take.begin();
      auto g = to_give.begin();
      for (std::size_t m = 0; m < step.calls; ++m) {
        if (ended[m] != none) *g++ = base + offsets[ended[m]];
        if (taken[m] == none) continue;
        const detail::recorded_block& b = step.blocks[taken[m]];
        const std::size_t offset = offsets[taken[m]];
        *t++ = {b.bytes, when(&*g, b.alignment) + (offset == none), offset == none ? nullptr : base + offset};
      }
      takings = std::move(to_take);
      givings = std::move(to_give);
      stop_replay();
      plan = std::move(made);
      lifetimes = std::move(placed);
    }

    // Exchanges the block of the plan, of which nothing is live, for another one: the upstream may not have room for
    // both. If there is none for this one, the old one is taken again.
    void hold(std::size_t bytes) {
      std::byte* const before = base;
      const std::size_t had = held;
      release();
      try {
        base = static_cast<std::byte*>(upstream.allocate_sync(bytes, detail::max_alignment));
        held = bytes;
      } catch (...) {
        try {
          base = static_cast<std::byte*>(upstream.allocate_sync(had, detail::max_alignment));
          held = had;
          for (taking& c : takings) c.at = c.at ? base + (c.at - before) : nullptr;
          for (std::byte*& at : std::span(givings).first(givings.size() - 1)) at = base + (at - before);
        } catch (...) {  // another program has it
          forget();
          now = phase::idle;
        }
        throw;
      }
    }

    // There is no plan any more, and no block.
    void forget() noexcept {
      base = nullptr;
      held = 0;
      takings.assign(1, last);
      givings.assign(1, no_place());
      stop_replay();
      plan = {};
      lifetimes.clear();
    }

    void deviate(const char* what, std::size_t count, const char* of = " bytes") noexcept {
      const std::size_t at = done();
      refused += find_live();
      now = phase::deviating;
      stop_replay();
      ++deviations;
      try {
        last_deviation = "call " + std::to_string(at) + " of a step of " + std::to_string(calls()) + ": the step " +
                         what + " " + std::to_string(count) + of;
      } catch (const std::bad_alloc&) {  // the text is lost, the count isn't
      }
    }

    void save(const std::string& path) const {
      if (calls() == 0) {
        throw argument_error("heddle::planned::save: there is no plan yet; record a step first");
      }
      archive_writer out;
      out.put(std::string(detail::saved_plan_magic));
      out.put(static_cast<std::uint64_t>(calls()));
      std::byte* const* g = givings.data();
      const auto put_giving = [&] { out.put(detail::saved_call{0, 1, static_cast<std::size_t>(*g++ - base)}); };
      for (const taking& c : std::span(takings).first(takings.size() - 1)) {
        const auto alignment = static_cast<std::size_t>((c.then ^ when(g, 0)) >> 48);
        while (c.then - (c.at == nullptr) != when(g, alignment)) put_giving();
        out.put(
            detail::saved_call{c.bytes, alignment, c.at ? static_cast<std::size_t>(c.at - base) : detail::outlives});
      }
      while (g != &givings.back()) put_giving();
      out.put(static_cast<std::uint64_t>(plan.peak));
      out.put(static_cast<std::uint64_t>(plan.lower_bound));
      out.write(path);
    }

    void load(const std::string& path) {
      if (const std::size_t n = live_now(); n != 0) {
        throw argument_error("heddle::planned::load: " + std::to_string(n) + " blocks of the present plan are live");
      }
      auto [step, made] = detail::load_plan(path);
      adopt(step, std::move(made), step.placeable());
      start_replay();
    }

    const taking* next = nullptr;  // what every call reads comes first
    std::byte* const* given = nullptr;
    Upstream upstream;
    search_limits limits;
    phase now = phase::idle;
    std::byte* base = nullptr;  // the block of the plan
    std::size_t held = 0;
    std::vector<std::byte*> live, back;  // places of the plan's blocks, while it is not replayed; room for find_live()
    // Behind the last of each is one that no call equals; it comes next while none is replayed.
    static constexpr taking last{0, 0, nullptr};
    std::byte* no_place() noexcept { return reinterpret_cast<std::byte*>(this); }
    std::vector<taking> takings{last};
    std::vector<std::byte*> givings{no_place()};
    memory_plan plan;
    std::vector<lifetime> lifetimes;
    detail::step_recorder recorder;
    std::size_t deviations = 0, refused = 0;
    std::string last_deviation;
  };

  std::shared_ptr<state> state_;
};

static_assert(resource<planned<>>);

}  // namespace v0
}  // namespace heddle

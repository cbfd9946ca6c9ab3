// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/host_resource.hpp>
#include <heddle/recompute/none.hpp>
#include <heddle/recompute/simulate.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace recompute {

/// @brief The predicate of `offload` that names every layer.
struct every_layer {
  /// True.
  constexpr bool operator()(std::size_t, const layer_cost&) const noexcept { return true; }
};

/// @brief Another policy's schedule, whose kept blocks wait in the store (pinned host memory) for their backward.
///
/// Copies run beside the layers: out from the moment a block is written, and back early enough. How early: by
/// `bytes_per_time` the copies are laid out in time, one after the other, and a step waits for a copy only where the
/// link is the bottleneck; where it is 0, copies get `ahead` steps. A block whose way out and back would not fit
/// between its uses stays.
///
/// @code{.cpp}
/// namespace rc = heddle::recompute;
/// rc::offload plan{.policy = rc::sqrt{}, .bytes_per_time = 12e9};   // where profile() gives seconds
/// rc::offload_store<heddle::cuda, pinned> store{pinned{}, compute, copies};
/// rc::chain c{plan, device_memory, layers, std::move(store)};
/// @endcode
///
/// State:   of what the policy keeps between forward and backward, what is on its way or stays; the rest in the store.
/// Traffic: each block once out and once back; `simulation::copied_bytes`.
/// Order:   any policy inside, `selective` and `optimal` too; the chain must have an `offload_store`.
/// Throws:  what the policy and the predicate throw.
template <class Policy = none, class Predicate = every_layer> struct offload {
  Policy policy{};            ///< Decides what is kept.
  Predicate which{};          ///< which(index, layer_cost) is true for layers that may leave.
  double bytes_per_time = 0;  ///< Of the link, one way, in the time unit of the costs; 0 for unknown.
  std::size_t ahead = 1;      ///< Steps that a copy gets, where the link is unknown.
  std::size_t least = 1;      ///< Fewer bytes than this stay.

  /// The policy's schedule with copies.
  template <class Schedule = schedule> Schedule plan(std::span<const layer_cost> costs) const {
    constexpr bool checks = requires { Policy::checks_values; };
    static_assert(!checks, "heddle::recompute::offload: checked goes outermost, checked{offload{.policy = ...}}");
    const Schedule base = policy.plan(costs);
    const std::size_t n = costs.size(), steps = base.steps.size();
    if (n == 0) return base;

    // What each layer holds when the forward phase ends, and the steps that use it.
    struct stay {
      std::size_t bytes = 0, start = 0, last = 0, next = 0;
      bool output = false;
    };
    std::vector<stay> held(n);
    std::vector<double> time(steps + 1);  // when a step begins, if none waits
    const std::size_t turn = simulate(base, costs).forward_steps;
    {
      using kind = heddle::detail::block_kind;
      const auto count = [&](std::size_t k, kind what, std::size_t i, std::size_t bytes, bool taken) {
        if (k >= turn || (what != kind::output && what != kind::saved)) return;
        held[i].bytes = taken ? held[i].bytes + bytes : held[i].bytes - bytes;
        if (what == kind::output) held[i].output = taken;
      };
      heddle::detail::rehearse<simulation>(base, costs, count);
      const auto use = [&](std::size_t i, std::size_t k) {
        if (k < turn)
          held[i].last = k;
        else if (held[i].next == 0)
          held[i].next = k;
      };
      for (std::size_t k = 0; k < steps; ++k) {
        const action a = base.steps[k].what;
        const std::size_t i = base.steps[k].layer;
        time[k + 1] = time[k] + (a == action::backward  ? costs[i].backward_time
                                 : a == action::restore ? costs[i].again()
                                 : is_forward(a)        ? costs[i].forward_time
                                                        : 0.0);
        use(i, k);
        if (is_forward(a) && k < turn) held[i].start = k;
        if (a == action::drop) continue;
        if (i > 0) use(i - 1, k);
        for (const std::size_t j : costs[i].also_reads) use(j, k);
      }
    }

    std::vector<std::size_t> leave_by(n, steps), back_from(n, 0);  // evict after, fetch before these steps
    const auto link = [&](std::size_t i) { return static_cast<double>(held[i].bytes) / bytes_per_time; };
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < n; ++i) {
      if (!held[i].output) held[i].start = held[i].last;  // the saved block alone, once the output is gone
      if (held[i].bytes >= (std::max)(least, std::size_t{1}) && which(i, costs[i])) order.push_back(i);
    }
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return held[a].start < held[b].start; });
    double now = 0;
    for (const std::size_t i : order) {
      std::size_t k = held[i].start + std::clamp(ahead, std::size_t{1}, steps);
      if (bytes_per_time > 0) {
        now = (std::max)(now, time[held[i].start + 1]) + link(i);
        k = held[i].start + 1;
        while (k < turn && time[k + 1] < now) ++k;
      }
      leave_by[i] = (std::max)(k, held[i].last);
    }
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return held[a].next > held[b].next; });
    now = time[steps];
    for (const std::size_t i : order) {  // from the one needed last
      std::size_t k = held[i].next > ahead ? held[i].next - ahead : 0;
      if (bytes_per_time > 0) {
        now = (std::min)(now, time[held[i].next]) - link(i);
        k = held[i].next;
        while (k > turn && time[k] > now) --k;
      }
      back_from[i] = (std::max)(k, turn);
    }

    std::vector<std::vector<operation>> before(steps + 1);
    for (const std::size_t i : order) {
      if (leave_by[i] >= turn || back_from[i] <= leave_by[i] + 1) continue;  // it is used again too soon
      before[held[i].start + 1].push_back({action::offload, i});
      before[leave_by[i] + 1].push_back({action::evict, i});
      before[back_from[i]].push_back({action::fetch, i});
    }
    Schedule out;
    for (std::size_t k = 0; k < steps; ++k) {
      // Room is made before it is taken.
      std::stable_sort(before[k].begin(), before[k].end(), [](const operation& a, const operation& b) {
        return (a.what == action::evict) > (b.what == action::evict);
      });
      out.steps.insert(out.steps.end(), before[k].begin(), before[k].end());
      out.steps.push_back(base.steps[k]);
    }
    return out;
  }
};

static_assert(policy<offload<>>);

/// @brief Where a chain's offloaded blocks go, and the two queues that bring them there and back beside the layers.
///
/// A copy out starts when the layers' queue has come to its place, and the chain frees the block only behind the copy,
/// in queue order; a copy back starts when the memory for it is there, and the layers' queue waits for it just before
/// the first use. The host waits for nothing.
///
/// State:   one block per slot of what was ever offloaded, kept from step to step (`stored_bytes` of the simulation).
/// Sync:    only enqueues; growing a slot and destruction wait for the copies.
/// Throws:  what the backend and the resource throw.
///
/// @tparam Backend Whose queues, events and copies; on `host` a copy is done when it is called.
/// @tparam Resource Memory that the backend copies to without the host: pinned. Needs `allocate_sync`,
/// `deallocate_sync`.
template <class Backend = host, class Resource = host_resource> class offload_store {
  static_assert(has_allocate_sync<Resource> && has_deallocate_sync<Resource>,
                "heddle::recompute::offload_store: the resource must provide allocate_sync and a noexcept "
                "deallocate_sync; see memory/concept.hpp");

 public:
  /// Of the backend.
  using queue = typename Backend::queue;

  /// @param resource Memory of the store. @param compute The queue on which the layers work. @param copies Another one.
  explicit offload_store(Resource resource = Resource{}, queue compute = queue{}, queue copies = queue{})
      : resource_(std::move(resource)), compute_(compute), copies_(copies) {}
  offload_store(offload_store&&) = default;
  offload_store(const offload_store&) = delete;
  offload_store& operator=(const offload_store&) = delete;
  offload_store& operator=(offload_store&&) = delete;
  ~offload_store() {
    if (slots_.empty()) return;
    wait_for_copies();
    for (slot& s : slots_) resource_.deallocate_sync(s.data, s.bytes, alignment);
  }

  /// The queue of the layers.
  queue compute() const { return compute_; }
  /// Bytes that it holds.
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const slot& s : slots_) sum += s.bytes;
    return sum;
  }

  /// Begins to copy `bytes` bytes out, behind what the layers' queue has now.
  void put(std::size_t where, const void* from, std::size_t bytes) {
    if (where >= slots_.size()) slots_.resize(where + 1);
    slot& s = slots_[where];
    if (s.bytes != bytes) {
      if (s.data) copies_.synchronize();
      void* const room = resource_.allocate_sync(bytes, alignment);
      resource_.deallocate_sync(s.data, s.bytes, alignment);
      s.data = static_cast<std::byte*>(room);
      s.bytes = bytes;
    }
    begin(s, static_cast<const std::byte*>(from), s.data);
  }
  /// Begins to copy the slot back, behind what the layers' queue has now.
  void get(std::size_t where, void* to, std::size_t) {
    slot& s = slots_[where];
    begin(s, s.data, static_cast<std::byte*>(to));
  }
  /// What the layers' queue does from now on comes after the slot's copy.
  void finish(std::size_t where) {
    compute_.wait(slots_[where].done);
    slots_[where].busy = false;
  }
  /// `finish` for every copy that is under way.
  void settle() noexcept {
    try {
      for (std::size_t k = 0; k < slots_.size(); ++k) {
        if (slots_[k].busy) finish(k);
      }
    } catch (...) {  // a device that refuses to order its work: the host waits
      wait_for_copies();
    }
  }

 private:
  static constexpr std::size_t alignment = 64;

  struct slot {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    typename Backend::event begin, done;
    bool busy = false;
  };

  void begin(slot& s, const std::byte* from, std::byte* to) {
    s.begin.record(compute_);
    copies_.wait(s.begin);
    Backend::copy(from, to, s.bytes, copies_);
    s.busy = true;
    s.done.record(copies_);
  }

  void wait_for_copies() noexcept {
    try {
      copies_.synchronize();
    } catch (...) {  // the device is lost, and with it the copies
    }
  }

  Resource resource_;
  queue compute_, copies_;
  std::vector<slot> slots_;
};

}  // namespace recompute
}  // namespace v0
}  // namespace heddle

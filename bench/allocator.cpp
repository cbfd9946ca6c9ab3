// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: nanoseconds per allocation and deallocation, and memory per live byte, against malloc, jemalloc and std::pmr
// driver: script
// wants: libjemalloc-dev jemalloc/jemalloc.h
// links: dl
//
// Replays traces: a step of the GPT example, recorded; a random one; for each size class one with blocks of one size.
// Prints its lines itself:
//   RATIO <resource>.<peer>.<trace> <ours> <peer> ns <peer / ours>   a pair of calls, median of interleaved runs
//   RATIO planned.<peer>.<trace>.net ...                             less the replay with the addresses at hand
//   RATIO planned.floor.<trace> ...                                  against the same comparisons written by hand
//   RATIO floor.<peer>.<trace> ...                                   those by hand against a peer
//   RATIO <resource>.bound.<trace> <peak> <lower bound> bytes <lower bound / peak>
#include <heddle/memory/arena.hpp>
#include <heddle/memory/host_resource.hpp>
#include <heddle/memory/planned.hpp>
#include <heddle/memory/pmr.hpp>
#include <heddle/memory/pool.hpp>
#include <heddle/memory/queue_pool.hpp>
#include <heddle/memory/tracking.hpp>
#include <heddle/recompute/none.hpp>

#include <dlfcn.h>
#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory_resource>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/gpt_step.hpp"
#include "support/results.hpp"

namespace hd = heddle;

namespace {

struct call {
  std::uint32_t block, bytes : 31, take : 1;  // else it is given back
};

struct trace {
  std::string name;
  std::vector<call> calls;
  std::size_t blocks = 0, lower_bound = 0;
};

trace from_lifetimes(std::string name, const std::vector<hd::lifetime>& all) {
  trace t{std::move(name), {}, all.size(), hd::plan_memory(std::span<const hd::lifetime>(all)).lower_bound};
  std::vector<std::pair<std::size_t, call>> events;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto block = static_cast<std::uint32_t>(i), bytes = static_cast<std::uint32_t>(all[i].bytes);
    events.push_back({all[i].first, {block, bytes, 1}});
    events.push_back({all[i].last, {block, bytes, 0}});
  }
  std::stable_sort(events.begin(), events.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& e : events) t.calls.push_back(e.second);
  return t;
}

// Blocks of a size each, about half of `most` live at a time, which end in any order.
template <class Size> trace random_trace(std::string name, std::size_t blocks, std::size_t most, Size&& size) {
  std::mt19937 random(1);
  std::vector<hd::lifetime> all;
  std::vector<std::size_t> live;
  std::size_t now = 0;
  const auto end = [&](std::size_t k) {
    all[live[k]].last = now++;
    live[k] = live.back();
    live.pop_back();
  };
  while (all.size() < blocks) {
    if (live.size() >= most || (!live.empty() && random() % most < live.size())) end(random() % live.size());
    live.push_back(all.size());
    all.push_back({now++, 0, size(random)});
  }
  while (!live.empty()) end(live.size() - 1);
  return from_lifetimes(std::move(name), all);
}

// One replay; touches the first byte of each block, as any use would. A block is given back as give(pointer, bytes).
template <class Take, class Give> void replay(const trace& t, void** blocks, Take&& take, Give&& give) {
  for (const call *c = t.calls.data(), *end = c + t.calls.size(); c != end; ++c) {
    if (c->take) {
      void* const p = take(c->block, c->bytes);
      blocks[c->block] = p;
      *static_cast<volatile char*>(p) = 1;
    } else {
      give(blocks[c->block], c->bytes);
    }
  }
}

// The calls of one queue.
struct by_queue {
  hd::queue_pool<hd::host, hd::host_resource> memory;
  void* allocate_sync(std::size_t bytes, std::size_t alignment) { return memory.allocate({}, bytes, alignment); }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    memory.deallocate({}, p, bytes, alignment);
  }
};

struct contender {
  std::string name;
  bool ours;
  std::function<void()> step;
  std::vector<double> nanoseconds = {};
};

bench::results found;

void measure(const trace& t) {
  std::vector<void*> blocks(t.blocks);
  std::vector<contender> all;
  const auto add = [&](const char* name, bool ours, auto take, auto give) {
    all.push_back({name, ours, [&t, at = blocks.data(), take, give] { replay(t, at, take, give); }});
  };
  const auto add_resource = [&](const char* name, auto memory, auto before) {
    all.push_back({name, true, [&t, at = blocks.data(), memory, before]() mutable {
                     before(memory);
                     replay(
                         t, at, [&](std::size_t, std::size_t bytes) { return memory.allocate_sync(bytes, 64); },
                         [&](void* p, std::size_t bytes) { memory.deallocate_sync(p, bytes, 64); });
                   }});
  };
  const auto nothing = [](auto&) {};
  hd::tracking under_planned{hd::host_resource{}}, under_pool{hd::host_resource{}}, under_arena{hd::host_resource{}};
  hd::planned planned{under_planned, {.seconds = 3}};
  add_resource("planned", planned, [](auto& m) { m.begin_step(); });
  add_resource("pool", hd::pool{under_pool}, nothing);
  add_resource("queue_pool", by_queue{hd::queue_pool{hd::host{}, hd::host_resource{}}}, nothing);
  add_resource("arena", hd::arena{under_arena}, nothing);
  add(
      "malloc", false, [](std::size_t, std::size_t n) { return std::malloc(n); },
      [](void* p, std::size_t) { std::free(p); });
  void* const library = dlopen("libjemalloc.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library) {
    const auto take = reinterpret_cast<void* (*)(std::size_t)>(dlsym(library, "malloc"));
    const auto give = reinterpret_cast<void (*)(void*)>(dlsym(library, "free"));
    if (take && give) {
      add(
          "jemalloc", false, [take](std::size_t, std::size_t n) { return take(n); },
          [give](void* p, std::size_t) { give(p); });
    }
  } else {
    std::printf("SKIP planned.jemalloc.%s libjemalloc.so.2 can't be loaded\n", t.name.c_str());
  }
  std::pmr::unsynchronized_pool_resource standard({.max_blocks_per_chunk = 0, .largest_required_pool_block = 1 << 22});
  add(
      "pmr_pool", false, [&standard](std::size_t, std::size_t n) { return standard.allocate(n, 64); },
      [&standard](void* p, std::size_t n) { standard.deallocate(p, n, 64); });

  // What the replay itself costs, with the addresses that `planned` gives; then with the least that compares each call
  // with a recorded one: two positions in memory and four numbers.
  for (int warm = 0; warm < 3; ++warm) all.front().step();
  const std::vector<void*> addresses = blocks;
  add(
      "replay", false, [&addresses](std::size_t block, std::size_t) { return addresses[block]; },
      [](void*, std::size_t) {});
  struct recorded {
    std::size_t bytes, alignment, given;
    void* at;
  };
  std::vector<recorded> taken;
  std::vector<void*> given;
  for (const call& c : t.calls) {
    if (c.take)
      taken.push_back({c.bytes, 64, given.size(), addresses[c.block]});
    else
      given.push_back(addresses[c.block]);
  }
  struct positions {
    std::size_t taken, given;
  } now{};
  positions* volatile const position = &now;
  all.push_back({"floor", false, [&, at = blocks.data(), taken = taken.data(), given = given.data()] {
                   now = {};
                   replay(
                       t, at,
                       [&, taken](std::size_t, std::size_t bytes) {
                         positions& p = *position;
                         const recorded& r = taken[p.taken];
                         if ((r.bytes ^ bytes) | (r.alignment ^ 64) | (r.given ^ p.given)) std::abort();
                         ++p.taken;
                         return r.at;
                       },
                       [&, given](void* block, std::size_t) {
                         positions& p = *position;
                         if (given[p.given] != block) std::abort();
                         ++p.given;
                       });
                 }});

  const auto pairs = static_cast<double>(t.blocks);
  for (int warm = 0; warm < 3; ++warm) {
    for (contender& c : all) c.step();
  }
  for (int repeat = 0; repeat < 41; ++repeat) {
    for (contender& c : all) {
      const int times = std::max(1, static_cast<int>(100000 / pairs));
      const double start = bench::processor_seconds();
      for (int k = 0; k < times; ++k) c.step();
      c.nanoseconds.push_back(1e9 * (bench::processor_seconds() - start) / pairs / times);
    }
  }
  std::printf("trace %s: %zu blocks, %zu bytes live at most\n", t.name.c_str(), t.blocks, t.lower_bound);
  const double replayed =
      bench::median(std::find_if(all.begin(), all.end(), [](auto& c) { return c.name == "replay"; })->nanoseconds);
  for (const contender& ours : all) {
    if (!ours.ours && ours.name != "floor") continue;
    for (const contender& peer : all) {
      if (peer.name == "replay" || peer.ours || (peer.name == "floor" && ours.name != "planned")) continue;
      const std::string name = ours.name + "." + peer.name + "." + t.name;
      const double mine = bench::median(ours.nanoseconds), theirs = bench::median(peer.nanoseconds);
      found.ratio(name, mine, theirs, "ns");
      if (ours.name != "planned" || peer.name == "floor") continue;
      found.ratio(name + ".net", std::max(0.1, mine - replayed), theirs - replayed, "ns");
    }
  }
  const auto bound = static_cast<double>(t.lower_bound);
  found.ratio("planned.bound." + t.name, static_cast<double>(planned.plan().peak), bound, "bytes");
  found.ratio("pool.bound." + t.name, static_cast<double>(under_pool.peak_bytes()), bound, "bytes");
  found.ratio("arena.bound." + t.name, static_cast<double>(under_arena.peak_bytes()), bound, "bytes");
  if (planned.deviations() != 0) std::abort();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: allocator JSON\n");
    return 2;
  }
  // Else malloc maps large blocks each time, at some microseconds each. 32 MiB is the most that glibc takes.
  if (!mallopt(M_MMAP_THRESHOLD, 32 << 20) || !mallopt(M_TRIM_THRESHOLD, 1 << 30)) std::abort();
  // At the sizes of the example's --long run.
  const gpt::shape dims{.vocabulary = 65, .context = 32, .width = 32, .heads = 4, .layers = 24, .batch = 1};
  measure(from_lifetimes("gpt", bench::gpt_step(dims, false, hd::recompute::none{})));
  measure(
      random_trace("random", 2000, 200, [](auto& random) { return std::size_t{64} << random() % 12 | random() % 64; }));
  const auto of_class = [](std::size_t bytes) { return [bytes](auto&) { return bytes; }; };
  measure(random_trace("64B", 2000, 200, of_class(64)));
  measure(random_trace("1KiB", 2000, 200, of_class(1024)));
  measure(random_trace("16KiB", 2000, 200, of_class(16384)));
  measure(random_trace("256KiB", 1000, 100, of_class(262144)));
  measure(random_trace("4MiB", 500, 50, of_class(4194304)));
  return found.write(arguments[1]) ? 0 : 1;
}

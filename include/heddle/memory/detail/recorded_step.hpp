// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/archive.hpp>
#include <heddle/memory/detail/checked.hpp>
#include <heddle/memory/plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// A block of a step, with the numbers of the calls that take it and give it back.
struct recorded_block {
  std::size_t bytes, alignment, birth, death;
};
inline constexpr std::size_t outlives = static_cast<std::size_t>(-1);  // the death of one that outlives its step

// What a step takes and gives back.
struct recorded_step {
  std::vector<recorded_block> blocks;
  std::size_t calls = 0;

  // The blocks that end with it, as a planner takes them.
  std::vector<lifetime> placeable() const {
    std::vector<lifetime> out;
    for (const recorded_block& b : blocks) {
      if (b.death != outlives) out.push_back({b.birth, b.death, b.bytes, b.alignment, no_group});
    }
    return out;
  }
};

// Writes down a step while it runs.
class step_recorder {
 public:
  void begin() {
    step_.blocks.clear();
    step_.calls = 0;
    live_.clear();
  }
  // Whether there was room for the record.
  bool allocation(void* p, std::size_t bytes, std::size_t alignment) {
    try {
      step_.blocks.push_back({bytes, alignment, step_.calls++, outlives});
      live_[p] = step_.blocks.size() - 1;
    } catch (const std::bad_alloc&) {
      return false;
    }
    return true;
  }
  void deallocation(void* p) noexcept {
    const auto at = live_.find(p);
    if (at == live_.end()) return;  // from before this step
    step_.blocks[at->second].death = step_.calls++;
    live_.erase(at);
  }
  const recorded_step& step() const noexcept { return step_; }

 private:
  recorded_step step_;
  std::map<void*, std::size_t> live_;  // which block lies there
};

// Takes each place of `given` out of `taken` once and returns how many were not there. Sorts both.
inline std::size_t subtract(std::vector<std::byte*>& taken, std::vector<std::byte*>& given) noexcept {
  std::sort(taken.begin(), taken.end());
  std::sort(given.begin(), given.end());
  auto left = taken.begin();
  auto g = given.begin();
  std::size_t missing = 0;
  for (std::byte* const p : taken) {
    for (; g != given.end() && *g < p; ++g) ++missing;
    if (g != given.end() && *g == p)
      ++g;
    else
      *left++ = p;
  }
  missing += static_cast<std::size_t>(given.end() - g);
  taken.erase(left, taken.end());
  return missing;
}

// A call in a file: with 0 bytes a deallocation; blocks that outlive their step have `outlives` for an offset.
struct saved_call {
  std::size_t bytes, alignment, offset;
};
inline constexpr const char* saved_plan_magic = "heddle::planned 1";

// A step and its plan from a file; file_error if it isn't one.
inline std::pair<recorded_step, memory_plan> load_plan(const std::string& path) {
  archive_reader in(path);
  if (in.get_string() != saved_plan_magic) in.refuse("it is not a memory plan");
  const auto count = in.get<std::uint64_t>();
  if (count > (std::uint64_t{1} << 32)) in.refuse("it has too many calls");
  recorded_step step;
  step.calls = static_cast<std::size_t>(count);
  memory_plan plan;
  std::vector<std::size_t> offsets;            // of each block
  std::map<std::size_t, std::size_t> live_at;  // the block at an offset
  for (std::size_t m = 0; m < count; ++m) {
    const auto c = in.get<saved_call>();
    if (!is_alignment(c.alignment) && c.bytes) in.refuse("an alignment is no power of two");
    if (c.bytes) {
      if (c.offset != outlives && !live_at.emplace(c.offset, offsets.size()).second)
        in.refuse("two blocks share a place");
      step.blocks.push_back({c.bytes, c.alignment, m, outlives});
      offsets.push_back(c.offset);
    } else {
      const auto born = live_at.find(c.offset);
      if (born == live_at.end()) in.refuse("it gives back what it did not take");
      step.blocks[born->second].death = m;
      live_at.erase(born);
    }
  }
  plan.peak = static_cast<std::size_t>(in.get<std::uint64_t>());
  plan.lower_bound = static_cast<std::size_t>(in.get<std::uint64_t>());
  in.finish();
  if (!live_at.empty()) in.refuse("it keeps what it took");
  std::erase(offsets, outlives);
  plan.offsets = std::move(offsets);
  const std::vector<lifetime> placed = step.placeable();
  if (!is_valid(plan, std::span<const lifetime>(placed))) in.refuse("its blocks overlap");
  return {std::move(step), std::move(plan)};
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/recompute/layer.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// FNV-1a over 8-byte words, then over the rest: finds accidents, not forgeries.
inline std::uint64_t hash_of(const void* data, std::size_t bytes) noexcept {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint64_t hash = 14695981039346656037u;
  std::size_t k = 0;
  for (; k + 8 <= bytes; k += 8) {
    std::uint64_t word = 0;
    for (std::size_t j = 0; j < 8; ++j) word |= static_cast<std::uint64_t>(p[k + j]) << (8 * j);
    hash = (hash ^ word) * 1099511628211u;
    hash ^= hash >> 32;
  }
  for (; k < bytes; ++k) hash = (hash ^ p[k]) * 1099511628211u;
  return hash;
}

// Hashes of what a layer's first pass makes, with which later passes are compared.
struct made_first {
  std::uint64_t output, saved;

  // What is not as it was in the first pass, by name, or null; what is null itself isn't compared.
  const char* differs(bool again, const void* out, std::size_t out_bytes, const void* kept,
                      std::size_t kept_bytes) noexcept {
    const auto changes = [again](std::uint64_t& first, const void* data, std::size_t bytes) {
      if (!data) return false;
      if (again) return hash_of(data, bytes) != first;
      first = hash_of(data, bytes);
      return false;
    };
    return changes(output, out, out_bytes) ? "output" : changes(saved, kept, kept_bytes) ? "saved block" : nullptr;
  }
};

struct alignas(64) cache_line {
  std::array<unsigned char, 64> bytes;
};

// Where a layer is to write the block that it saves: where the first pass keeps none, to `unkept`, to be compared with
// what comes later. The same bytes lie there each time, so that those which a layer leaves out don't differ.
inline void* marked(void* saved, std::size_t bytes, bool again, std::vector<cache_line>& unkept) {
  if (!saved && !again) {
    unkept.resize(bytes / 64 + (bytes % 64 != 0));
    saved = unkept.data();
  }
  if (saved) std::memset(saved, 0xA5, bytes);
  return saved;
}

// All layers forward, each output held until its last reader has run; the last one goes to the caller's `out`.
template <class Allocate, class Release>
void run_inference(const std::vector<recompute::layer>& layers, const void* in, void* out, Allocate&& allocate,
                   Release&& release) {
  struct block {
    void* data = nullptr;
    std::size_t bytes = 0, last_reader = 0;
  };
  const std::size_t n = layers.size();
  std::vector<block> held(n + 1);  // the last one is the workspace
  block& workspace = held[n];
  const auto take = [&](block& b, std::size_t bytes) {
    b.data = allocate(bytes);
    b.bytes = bytes;
  };
  const auto give = [&](block& b) noexcept {
    if (b.data) release(b.data, b.bytes);
    b.data = nullptr;
  };
  for (std::size_t i = 0; i < n; ++i) {
    if (i > 0) held[i - 1].last_reader = (std::max)(held[i - 1].last_reader, i);
    for (const std::size_t j : layers[i].also_reads()) held[j].last_reader = i;
  }
  std::vector<const void*> from;
  try {
    for (std::size_t i = 0; i < n; ++i) {
      const recompute::layer_cost cost = layers[i].cost();
      const bool last = i + 1 == n;
      if (!last) take(held[i], cost.output_bytes);
      take(workspace, cost.forward_workspace);
      from.assign(1, i ? held[i - 1].data : in);
      for (const std::size_t j : cost.also_reads) from.push_back(held[j].data);
      layers[i].forward({from.data(), from.size()}, last ? out : held[i].data, nullptr, recompute::pass::inference,
                        workspace.data);
      give(workspace);
      for (std::size_t j = 0; j < i; ++j) {
        if (held[j].last_reader == i) give(held[j]);
      }
    }
  } catch (...) {
    for (block& b : held) give(b);
    throw;
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle

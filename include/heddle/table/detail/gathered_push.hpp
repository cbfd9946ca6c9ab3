// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/convert.hpp>
#include <heddle/core/error.hpp>
#include <heddle/table/concept.hpp>
#include <heddle/table/detail/batch.hpp>
#include <heddle/table/detail/table_wire.hpp>
#include <heddle/table/guard.hpp>
#include <heddle/table/settings.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// A guard of what travels: what is finite may not be so when it is narrowed, or summed.
struct finite_on_wire {
  bool half;
  template <std::size_t Dim> bool check(const float* g) const noexcept {
    if (!half) return guard::reject{}.check<Dim>(g);
    float narrow[Dim];
    for (std::size_t i = 0; i < Dim; ++i) narrow[i] = static_cast<float>(static_cast<bfloat16>(g[i]));
    return guard::reject{}.check<Dim>(narrow);
  }
};

// Gradients as a guard that edits leaves them; nothing for one that doesn't, but throws for one that throws.
template <std::size_t Dim, class Guard>
std::vector<float> guarded(const Guard& guard, bool half, std::span<const float> gradients, std::uint64_t& rejected) {
  std::vector<float> mended;
  if constexpr (Guard::edits) {
    mended.assign(gradients.begin(), gradients.end());
    for (std::size_t i = 0; i < mended.size(); i += Dim) rejected += !guard.template check<Dim>(&mended[i]);
  } else if constexpr (Guard::throws) {
    for (std::size_t i = 0; i < gradients.size(); i += Dim)
      if (!guard.template check<Dim>(&gradients[i]) || !finite_on_wire{half}.check<Dim>(&gradients[i]))
        throw argument_error("heddle::sharded_table: push: the gradient of item " + std::to_string(i / Dim) +
                             " isn't finite");
  }
  return mended;
}

// What a worker's threads have pushed and nobody has sent yet.
template <class Key, std::size_t Dim, class Guard> class gathered_push {
 public:
  gathered_push(const Guard& guard, bool half) : guard_(guard), half_(half) {}
  std::size_t keys() const noexcept { return keys_.size(); }
  std::uint64_t pushes() const noexcept { return pushes_; }
  float lr() const noexcept { return lr_; }

  // Adds a push: all or, where it throws, nothing. Returns how many gradients were left out or edited.
  std::uint64_t add(std::span<const Key> keys, std::span<const float> gradients, const push_options& o) {
    std::uint64_t rejected = 0;
    const std::vector<float> mended = guarded<Dim>(guard_, half_, gradients, rejected);
    const std::size_t before = keys_.size();
    try {
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const float* const g = (Guard::edits ? mended.data() : gradients.data()) + i * Dim;
        if constexpr (!Guard::edits) {
          if (!guard_.template check<Dim>(g)) {
            ++rejected;
            continue;
          }
        }
        keys_.push_back(keys[i]);
        gradients_.insert(gradients_.end(), g, g + Dim);
        const float times = o.times.empty() ? 1.0f : o.times[i];
        seen_.push_back({times, o.shows.empty() ? times : o.shows[i], o.clicks.empty() ? 0.0f : o.clicks[i]});
      }
    } catch (...) {
      keys_.resize(before), gradients_.resize(before * Dim);
      if (seen_.size() > before) seen_.resize(before);
      throw;
    }
    ++pushes_;
    lr_ = o.lr;
    sightings_ = sightings_ || !o.shows.empty() || !o.clicks.empty() || !o.times.empty();
    return rejected;
  }

  // Sums all key by key, and makes a message to each server. server_of(mixed key); head(server): how it begins.
  // `overflows`: sums left out as they weren't finite.
  template <class ServerOf, class Head>
  std::vector<std::vector<std::byte>> bodies(int servers, ServerOf server_of, Head head, std::size_t& overflows) const {
    batch b;
    const auto n = static_cast<std::uint32_t>(keys_.size());
    b.entries.resize(n);
    for (std::uint32_t i = 0; i < n; ++i) b.entries[i] = {mix(widen_key(keys_[i])), i, 0};
    const auto gradient = [&](std::uint32_t i) {
      return i < n ? gradients_.data() + std::size_t{i} * Dim : b.sums.data() + std::size_t{i - n} * Dim;
    };
    const auto sight = [&](std::uint32_t i) { return i < n ? seen_[i] : b.seen[i - n]; };
    b.merge(Dim, n, gradient, sight);
    const bool with_sightings = sightings_ || n != b.entries.size();
    overflows = 0;
    if constexpr (!std::is_same_v<Guard, guard::none>)
      overflows = drop_overflows<Dim, false>(b, 0, finite_on_wire{half_}, gradient);
    std::vector<std::vector<batch_entry>> of(static_cast<std::size_t>(servers));
    for (const batch_entry& e : b.entries) of[static_cast<std::size_t>(server_of(e.mixed))].push_back(e);
    std::vector<float> floats;
    std::vector<std::vector<std::byte>> out;
    for (int k = 0; k < servers; ++k) {
      const auto& mine = of[static_cast<std::size_t>(k)];
      table_request h = head(k);
      h.items = mine.size();
      h.lr = lr_;
      h.sightings = with_sightings;
      byte_writer body;
      body.put(h);
      for (const auto& e : mine) body.put(static_cast<Key>(unmix(e.mixed)));
      if (h.sightings) {
        for (float sighting::* field : {&sighting::times, &sighting::show, &sighting::click})
          for (const auto& e : mine) body.put((std::min)(sight(e.item).*field, 0x1p32f));
      }
      floats.clear();
      for (const auto& e : mine) floats.insert(floats.end(), gradient(e.item), gradient(e.item) + Dim);
      put_floats(body, floats.data(), floats.size(), half_);
      out.push_back(body.release());
    }
    return out;
  }
  void clear() noexcept {
    keys_.clear(), gradients_.clear(), seen_.clear();
    sightings_ = false;
    pushes_ = 0;
  }

 private:
  Guard guard_;
  bool half_;
  std::vector<Key> keys_;
  std::vector<float> gradients_;
  std::vector<sighting> seen_;
  std::uint64_t pushes_ = 0;
  float lr_ = 0.0f;
  bool sightings_ = false;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

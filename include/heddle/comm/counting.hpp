// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/levels.hpp>
#include <heddle/comm/detail/wrapper.hpp>

#include <atomic>
#include <memory>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief What a rank has sent, as counted by `counting`.
struct traffic {
  std::uint64_t bytes = 0;          ///< Payload bytes sent, headers not included, control messages not included.
  std::uint64_t messages = 0;       ///< Messages that carried them.
  std::uint64_t control_bytes = 0;  ///< Bytes of control messages and barriers (agreement on samples, sizes, flags).
};

/// @brief Counts what a rank sends; duplicates count into the same figures.
///
/// The native all-reduce of threads is counted as what a rank reads of others and stores to others: 2 n (P - 1) / P.
/// @tparam Comm The communicator underneath, held by value.
template <class Comm>
class counting : public detail::wrapper<Comm> {
  using detail::wrapper<Comm>::inner_;

 public:
  /// Wraps a communicator.
  explicit counting(Comm inner) : counting(std::move(inner), std::make_shared<counters>()) {}

  /// A duplicate that counts into the same figures.
  counting duplicate() { return {inner_.duplicate(), counters_}; }
  static constexpr bool parts_count_anew = detail::parts_count_anew<Comm>;  ///< As the communicator underneath.
  /// A part that counts into the same figures.
  counting split(int color, int key = 0)
    requires has_levels<Comm>
  {
    return {inner_.split(color, key), counters_};
  }
  /// Parts for two levels, kept.
  auto& levels(int group)
    requires has_levels<Comm>
  {
    return levels_.of(*this, group);
  }

  /// What this rank has sent so far.
  traffic sent() const noexcept { return {counters_->bytes, counters_->messages, counters_->control}; }

  /// Forwards and counts.
  template <class Apply>
  void exchange(header h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    inner_.exchange(h, out, in, std::forward<Apply>(apply));
    std::uint64_t n = 0;
    for (const outgoing& m : out) n += m.bytes;
    if (h.kind == operation_kind::control || h.kind == operation_kind::barrier) {
      counters_->control += n;
    } else {
      counters_->bytes += n;
      counters_->messages += out.size();
    }
  }

  /// Forwards and counts.
  bool native_all_reduce(header h, const void* in, void* out, std::size_t count, const leaf& l)
    requires has_native_all_reduce<Comm>
  {
    const bool r = inner_.native_all_reduce(h, in, out, count, l);
    const auto p = static_cast<std::uint64_t>(this->size());
    counters_->bytes += 2 * count * l.bytes * (p - 1) / p;
    counters_->messages += p > 1;
    return r;
  }

  /// Forwards and counts what a rank must send, (P - 1) / P of the bytes.
  bool native_reduce_scatter(const header& h, void* data, std::span<const std::size_t> counts, const leaf& l)
    requires has_native_halves<Comm>
  {
    const bool r = inner_.native_reduce_scatter(h, data, counts, l);
    count_half(counts, l.bytes);
    return r;
  }
  /// The same.
  void native_all_gather(const header& h, void* data, std::span<const std::size_t> counts, std::size_t bytes)
    requires has_native_halves<Comm>
  {
    inner_.native_all_gather(h, data, counts, bytes);
    count_half(counts, bytes);
  }

 private:
  void count_half(std::span<const std::size_t> counts, std::size_t bytes) {
    std::uint64_t n = 0;
    for (const std::size_t c : counts) n += c;
    const auto p = static_cast<std::uint64_t>(this->size());
    counters_->bytes += n * bytes * (p - 1) / p;
    counters_->messages += p > 1;
  }
  struct counters {
    std::atomic<std::uint64_t> bytes{0}, messages{0}, control{0};
  };
  counting(Comm inner, std::shared_ptr<counters> c)
      : detail::wrapper<Comm>(std::move(inner)), counters_(std::move(c)) {}

  std::shared_ptr<counters> counters_;
  detail::level_cache<counting> levels_;
};

}  // namespace v0
}  // namespace heddle

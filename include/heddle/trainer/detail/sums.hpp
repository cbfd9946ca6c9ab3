// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/counting.hpp>
#include <heddle/trainer/detail/exchanged.hpp>

#include <limits>

namespace heddle {
inline namespace v0 {
namespace detail {

// The exchange of sums that all ranks have of what a compressor sends, bucket by bucket and round after round, each
// with a flag at its end: not a number where a rank's gradient isn't finite.
template <class Strategy, class Comm> class sum_exchange {
  using kind = exchange_kind<Strategy>;
  static constexpr std::size_t rounds = static_cast<std::size_t>(kind::carrier_type::rounds);

 public:
  sum_exchange(exchanged<Strategy>& all, const std::vector<bucket>& buckets) : all_(all) {
    typename kind::template list<held_part> parts;
    for (const bucket& range : buckets) {
      buckets_.emplace_back().range = range;
      for (std::size_t i = range.first; i < range.last; ++i) {
        const std::size_t n = all_.count(i), extra = codec().extra(n, all_.context_of(i));
        parts.push_back({i, 0, n, static_cast<std::size_t>(all_.ranks()), extra});
      }
    }
    all_.hold(std::move(parts));
  }

  static constexpr bool late() noexcept { return false; }

  // Whether everything is finite.
  bool run(std::size_t bucket, counting<Comm>& comm) {
    one& b = buckets_[bucket];
    for (std::vector<float>& total : b.totals) total.clear();
    bool finite = true;
    for (std::size_t round = 0; round < rounds; ++round) {
      std::vector<float>& total = b.totals[round];
      std::size_t n = 0;
      for (std::size_t i = b.range.first; i < b.range.last; ++i)
        n += all_.sends(i) ? codec().sum_count(static_cast<int>(round), all_.count(i), all_.context_of(i)) : 0;
      if (n == 0) break;
      total.assign(n + 1, 0.0f);
      each_total(b, [&](std::size_t i, float* const* sums) {
        all_.with_whole(i, [&](auto g, auto state, const auto& x) {
          if (!codec().send(static_cast<int>(round), g, all_.factor(i), state, x, sums))
            total[n] = std::numeric_limits<float>::quiet_NaN();
        });
      });
      auto& plan = b.plans[round];
      if (!plan || plan->count() != n + 1) plan.emplace(all_.plan().topology, all_.rank(), all_.ranks(), n + 1);
      (*plan)(comm, total.data(), leaf_of<float>(sum{}));
      finite &= all_finite(total.data(), total.size());
      all_.count_sent(n);
    }
    return finite;
  }

  void settle(std::size_t bucket) {
    one& b = buckets_[bucket];
    each_total(b, [&](std::size_t i, float* const* sums) {
      all_.with_whole(i, [&](auto g, auto state, const auto& x) { codec().commit(g, all_.factor(i), state, x, sums); });
    });
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      if (!all_.sends(i)) all_.release(i);
    }
  }

 private:
  struct one {
    bucket range;
    std::vector<float> totals[rounds];
    std::optional<all_reduce_plan<typename kind::topology_type>> plans[rounds];
  };

  const typename kind::carrier_type& codec() const noexcept { return all_.carrier(); }

  // f(tensor, where its sums are, round by round)
  template <class Function> void each_total(one& b, Function&& f) {
    float* sums[rounds];
    std::size_t at[rounds] = {};
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      if (!all_.sends(i)) continue;
      for (std::size_t r = 0; r < rounds; ++r) {
        sums[r] = b.totals[r].data() + at[r];
        at[r] += b.totals[r].empty() ? 0 : codec().sum_count(static_cast<int>(r), all_.count(i), all_.context_of(i));
      }
      f(i, static_cast<float* const*>(sums));
    }
  }

  exchanged<Strategy>& all_;
  std::vector<one> buckets_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/detail/pieces.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/core/detail/squares.hpp>
#include <heddle/trainer/detail/exchanged.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

// The elementwise exchange, bucket by bucket: the mean of what a codec makes of gradients, or with a sharded optimizer
// the first half of it and later the parameters.
template <class Strategy, class Comm> class dense_exchange {
  using kind = exchange_kind<Strategy>;
  using piece = typename kind::piece;
  using element = typename kind::element;
  using codec_type = typename kind::codec_type;
  using topology_type = typename kind::topology_type;
  using wire = typename kind::wire;
  static constexpr bool shards = kind::shards;

 public:
  dense_exchange(exchanged<Strategy>& all, const std::vector<bucket>& buckets) : all_(all) {
    for (const bucket& range : buckets) {
      one& b = buckets_.emplace_back();
      b.range = range;
      if constexpr (shards) plan_for(b, all_.elements_of(range));
    }
    if constexpr (shards) pieces();
  }

  // `count` elements of a bucket travel in this step. Whether the result is finite; with shards the norm tells that.
  bool run(std::size_t bucket, std::size_t count, counting<Comm>& comm) {
    one& b = buckets_[bucket];
    plan_for(b, count);
    all_.count_sent(count);
    bool finite = true;
    if constexpr (kind::as_they_are)
      finite = average_as_they_are(b, comm);
    else
      finite = average(b, comm);
    if constexpr (shards) b.squares = squares_of(b);
    return finite;
  }

  // What an update rule is to work on, bucket by bucket: with shards what this rank owns, else everything, cut where
  // what it would own ends. Without shards only after an exchange.
  const std::vector<piece>& pieces() {
    std::size_t at = 0;
    for (std::size_t k = pieces_.empty() ? 0 : buckets_.size(); k < buckets_.size(); ++k) {
      one& b = buckets_[k];
      b.first_piece = pieces_.size();
      cut(
          owned_of(b), b.range.first, b.range.last, [&](std::size_t i) { return all_.part(b.range, i).count; },
          [&](piece p) {
            if (shards && !p.own) return;
            p.begin += all_.part(b.range, p.tensor).begin;
            p.bucket = k;
            p.state = shards ? at : all_.offset(p.tensor) + p.begin;
            at += p.count;
            pieces_.push_back(p);
          });
      b.last_piece = pieces_.size();
    }
    return pieces_;
  }

  // The squares of what this rank owns of a bucket, or where nobody does of its block.
  double squares(std::size_t bucket) const { return shards ? buckets_[bucket].squares : squares_of(buckets_[bucket]); }

  // The second half of a bucket whose optimizer is sharded: parameters.
  void gather(std::size_t bucket, counting<Comm>& comm) {
    one& b = buckets_[bucket];
    if (element* const start = all_.run_of(b.range, &tensor::parameter)) {
      b.reduce->all_gather(comm, start);
      return;
    }
    const auto parameter = [&](std::size_t i) { return static_cast<element*>(all_.tensors()[i].parameter); };
    b.parameters.resize(b.reduce->count());
    for (std::size_t k = b.first_piece; k < b.last_piece; ++k) {
      const piece& p = pieces_[k];
      std::copy_n(parameter(p.tensor) + p.begin, p.count, b.parameters.data() + p.position);
    }
    b.reduce->all_gather(comm, b.parameters.data());
    const element* from = b.parameters.data();
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      const interval part = all_.part(b.range, i);
      std::copy_n(from, part.count, parameter(i) + part.begin);
      from += part.count;
    }
  }

 private:
  struct one {
    bucket range;
    std::optional<std::conditional_t<shards, halved_plan<topology_type>, all_reduce_plan<topology_type>>> reduce{};
    std::size_t first_piece = 0, last_piece = 0;
    double squares = 0.0;  // of what this rank owns
    std::vector<wire> elements{};
    std::vector<element> parameters{};  // on their way, where their memory isn't one run
  };

  void plan_for(one& b, std::size_t count) {
    if (!b.reduce || b.reduce->count() != count)
      b.reduce.emplace(all_.plan().topology, all_.rank(), all_.ranks(), count);
  }

  // What this rank owns of a bucket; where nobody does, equal blocks.
  std::vector<interval> owned_of(const one& b) const {
    const auto copy = [](std::span<const interval> s) { return std::vector<interval>(s.begin(), s.end()); };
    if constexpr (shards) {
      return copy(b.reduce->owned());
    } else {
      if (!kind::holds && b.reduce && b.reduce->plan().halved()) return copy(b.reduce->plan().owned());
      const auto size = static_cast<std::size_t>(all_.ranks()), rank = static_cast<std::size_t>(all_.rank());
      return {balanced_block(all_.elements_of(b.range), size, rank)};
    }
  }

  double squares_of(const one& b) const {
    double sum = 0.0;
    for (std::size_t k = b.first_piece; k < b.last_piece; ++k) {
      const piece& p = pieces_[k];
      if (!p.own) continue;
      all_.each_block(all_.result(p.tensor) + p.begin, p.count,
                      [&](const float* x, std::size_t n) { sum += detail::squares(x, n); });
    }
    return sum;
  }

  // Gradients of 16 bits: in place where they are one run, through a buffer elsewhere. The weight is at most 1, so no
  // finite element leaves the range.
  bool average_as_they_are(one& b, counting<Comm>& comm) {
    const std::size_t count = b.reduce->count();
    element* const run = all_.run_of(b.range, &tensor::gradient);
    if (!run) b.elements.resize(count);
    element* const start = run ? run : b.elements.data();
    std::size_t at = 0;
    for (std::size_t i = b.range.first, n; i < b.range.last; at += n, ++i) {
      const interval part = all_.part(b.range, i);
      n = part.count;
      if (!run) std::copy_n(all_.result(i) + part.begin, n, start + at);
      if (all_.weight() == 0.0f)
        std::fill_n(start + at, n, element(0.0f));
      else if (all_.weight() != 1.0f)
        multiply(start + at, n, all_.weight());
    }
    reduce(b, comm, start);
    at = 0;
    for (std::size_t i = b.range.first; !run && i < b.range.last; ++i) {
      const interval part = all_.part(b.range, i);
      std::copy_n(start + at, part.count, all_.result(i) + part.begin);
      at += part.count;
    }
    bool finite = true;
    if constexpr (!shards)
      all_.each_block(start, count, [&](const float* x, std::size_t n) { finite &= all_finite(x, n); });
    return finite;
  }
  static void multiply(element* x, std::size_t count, float factor) {
    float block[2048];
    for (std::size_t at = 0; at < count; at += std::size(block)) {
      const std::size_t n = (std::min)(count - at, std::size(block));
      convert_scaled(x + at, block, n, factor);
      convert(block, x + at, n);
    }
  }

  // What travels of tensor i in a bucket.
  slice<float> gradient(const one& b, std::size_t i) const {
    const interval part = all_.part(b.range, i);
    return all_.gradient(i).subslice(part.begin, part.count);
  }

  // The elementwise part: encode, all-reduce with mean or its first half, decode.
  bool average(one& b, counting<Comm>& comm) {
    bool in_place = std::is_same_v<wire, float>;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) in_place &= !all_.sends(i) || !all_.count(i);
    float* start = nullptr;
    if constexpr (kind::widens)
      start = in_place ? gradient(b, b.range.first).data : nullptr;
    else if constexpr (!kind::mixes)
      start = in_place ? all_.run_of(b.range, &tensor::gradient) : nullptr;
    if (start) {
      for (std::size_t i = b.range.first; i < b.range.last; ++i) {
        const slice<float> g = gradient(b, i);
        if (all_.factor(i) != 1.0f) convert_scaled(g.data, g.data, g.count, all_.factor(i));
      }
      reduce(b, comm, start);
      return shards || has_fits_dense<typename kind::carrier_type> || all_finite(start, b.reduce->count());
    }
    if constexpr (std::is_same_v<codec_type, typename kind::compressor_type>)
      return copy_through(b, last_of(all_.plan().compressor), comm);
    else
      return copy_through(b, codec_type{}, comm);
  }

  void reduce(one& b, counting<Comm>& comm, void* elements) {
    const leaf l = leaf_of<wire>(mean{});
    if constexpr (shards)
      b.reduce->reduce_scatter(comm, elements, l);
    else
      (*b.reduce)(comm, elements, l);
  }

  template <class Codec> bool copy_through(one& b, const Codec& codec, counting<Comm>& comm) {
    b.elements.resize(b.reduce->count());
    std::size_t at = 0;
    for (std::size_t i = b.range.first; i < b.range.last; ++i) {
      if (all_.sends(i)) continue;
      const slice<float> g = gradient(b, i);
      codec.encode(g, b.elements.data() + at, all_.factor(i) / all_.rest());
      at += g.count;
    }
    reduce(b, comm, b.elements.data());
    const auto decode = [&](slice<float> g, std::size_t from) {
      codec.decode(b.elements.data() + from, g);
      if (all_.rest() != 1.0f) convert_scaled(g.data, g.data, g.count, all_.rest());
    };
    bool finite = true;
    if constexpr (shards) {
      for (std::size_t k = b.first_piece; k < b.last_piece; ++k) {
        const piece& p = pieces_[k];
        decode(all_.gradient(p.tensor).subslice(p.begin, p.count), p.position);
      }
    } else {
      at = 0;
      for (std::size_t i = b.range.first; i < b.range.last; ++i) {
        if (all_.sends(i)) continue;
        const slice<float> g = gradient(b, i);
        decode(g, at);
        finite &= all_finite(g.data, g.count);
        at += g.count;
      }
    }
    return finite;
  }

  exchanged<Strategy>& all_;
  std::vector<one> buckets_;
  std::vector<piece> pieces_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

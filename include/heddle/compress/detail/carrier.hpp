// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>
#include <heddle/compress/detail/codec_loops.hpp>

#include <algorithm>
#include <cstring>
#include <memory>

namespace heddle {
inline namespace v0 {
namespace detail {

// Appends the payload of a codec that works block by block; values(begin, n) gives those of a block.
template <class Codec, class Allocator, class Values>
void encode_blocks(const Codec& c, std::size_t count, const encode_context& x,
                   std::vector<std::byte, Allocator>& packet, Values&& values) {
  const std::size_t at = packet.size();
  packet.resize(at + c.wire_bytes(count, x));
  for (std::size_t begin = 0, n = 0; begin < count; begin += n) {
    n = (std::min)(c.block, count - begin);
    c.encode_block(values(begin, n), begin, n, count, x, packet.data() + at);
  }
}
template <class Codec>
concept works_by_blocks = requires(const Codec& c, const float* v, const encode_context& x, std::byte* payload) {
  c.encode_block(v, c.block, c.block, c.block, x, payload);
};
template <class Codec>
concept adds_by_blocks = works_by_blocks<Codec> && requires(const Codec& c, const std::byte* payload, float* sum) {
  c.add_block(payload, c.block, c.block, c.block, sum);
};
template <class Codec>
concept takes_off = requires(const Codec& c, slice<const std::byte> payload, slice<float> v) {
  c.check_payload(payload, v.count);
  c.take_off(payload, v);
};
// A codec that takes its values part by part, as long as these are in cache.
template <class Codec>
concept works_by_parts = requires(const Codec& c, std::size_t n, const encode_context& x,
                                  std::vector<std::byte>& packet, const float* (*values)(std::size_t, std::size_t)) {
  c.encode_parts(n, x, packet, values);
};

// A codec as a compressor that data_parallel can use: packets, or sums where it picks the same elements on all ranks;
// with error feedback or without.
template <class Codec, bool Feedback> class carrier {
 public:
  static constexpr int slots = Feedback ? 1 : 0;
  static constexpr std::size_t head = sizeof(std::uint64_t);  // of a packet: its bytes and a flag

  explicit carrier(const Codec& c) : codec_(c) {}

  bool sends(std::size_t n, const encode_context&) const noexcept {
    if constexpr (requires { codec_.dense_below; })
      return n > 0 && n >= codec_.dense_below;
    else
      return n > 0;
  }
  std::size_t wire_bytes(std::size_t n, const encode_context& x) const {
    if constexpr (has_wire_bytes<Codec>)
      return head + codec_.wire_bytes(n, x);
    else if constexpr (has_pick<Codec>)
      return sizeof(float) * codec_.picked(n, x);
    else
      return head + sizeof(float) * n;
  }
  // A tensor that travelled dense; nothing of it is held, unless it has just been loaded.
  void correct(slice<float>, float* const*, const encode_context&) const noexcept {}
  void release(slice<float> g, float* const* state, const encode_context& x) const noexcept {
    if constexpr (Feedback)
      release_held(g, state[0], static_cast<float>(x.ranks) * with_late_scale(x, state[0], g.count).held_scale);
  }
  std::string name() const { return codec_.name(); }

  // ---- Packets
  template <class Allocator>
  void encode(slice<const float> g, float factor, float* const* state, const encode_context& x,
              std::vector<std::byte, Allocator>& packet) const
    requires has_payload<Codec>
  {
    const std::size_t at = packet.size();
    packet.resize(at + head);
    bool finite = true;
    if constexpr (works_by_blocks<Codec> || works_by_parts<Codec>) {  // v stays in cache
      std::vector<float> v;
      const auto values = [&](std::size_t begin, std::size_t n) {
        v.resize((std::max)(v.size(), n));
        float* const e = Feedback ? state[0] + begin : nullptr;
        const bool good = take(g.subslice(begin, n), factor, &e, x, v.data());
        if (!good) std::fill_n(v.data(), n, 0.0f);
        finite &= good;
        return static_cast<const float*>(v.data());
      };
      if constexpr (works_by_blocks<Codec>)
        encode_blocks(codec_, g.count, x, packet, values);
      else
        codec_.encode_parts(g.count, x, packet, values);
      if (!finite) packet.resize(at + head);
    } else {
      const auto v = std::make_unique_for_overwrite<float[]>(g.count);
      finite = take(g, factor, state, x, v.get());
      if (finite) codec_.encode({v.get(), g.count}, x, packet);
    }
    const std::uint64_t word = std::uint64_t{packet.size() - at} << 1 | (finite ? 0u : 1u);
    std::memcpy(packet.data() + at, &word, sizeof word);
  }
  void commit(slice<const float> g, float factor, float* const* state, const encode_context& told,
              slice<const std::byte> packet) const
    requires has_payload<Codec>
  {
    if constexpr (Feedback) {
      float* const e = state[0];  // stays as it is if the packet is damaged
      const encode_context x = with_late_scale(told, e, g.count);
      const std::size_t bytes = measure(packet);
      const bool sent = !flagged(packet);
      if constexpr (adds_by_blocks<Codec>) {
        if (sent && bytes != wire_bytes(g.count, x)) {
          throw argument_error("heddle::compress: damaged packet of " + std::to_string(bytes) + " bytes for " +
                               std::to_string(g.count) + " elements");
        }
        std::vector<float> v((std::min)(codec_.block, g.count));
        for (std::size_t begin = 0, n = 0; begin < g.count; begin += n) {
          n = (std::min)(codec_.block, g.count - begin);
          float* const kept = e + begin;
          take(g.subslice(begin, n), factor, &kept, x, v.data(), -1.0f);  // -v, to which add_block() can add
          if (sent) codec_.add_block(packet.data + head, begin, n, g.count, v.data());
          for (std::size_t i = 0; i < n; ++i) kept[i] = -v[i];
        }
      } else if constexpr (takes_off<Codec>) {
        const slice<const std::byte> payload = packet.subslice(head, bytes - head);
        if (sent) codec_.check_payload(payload, g.count);
        take(g, factor, state, x, e);
        if (sent) codec_.take_off(payload, {e, g.count});
      } else {
        std::vector<float> decoded(g.count);
        decode_add(packet, {decoded.data(), g.count});
        take(g, factor, state, x, e);
        for (std::size_t i = 0; i < g.count; ++i) e[i] -= decoded[i];
      }
    }
  }
  std::size_t decode_add(slice<const std::byte> packet, slice<float> sum) const
    requires has_payload<Codec>
  {
    const std::size_t bytes = measure(packet);
    if (!flagged(packet)) codec_.decode_add(packet.subslice(head, bytes - head), sum);
    return bytes;
  }
  bool flagged(slice<const std::byte> packet) const
    requires has_payload<Codec>
  {
    return (word_of(packet) & 1) != 0;
  }
  std::size_t measure(slice<const std::byte> packets) const
    requires has_payload<Codec>
  {
    const std::uint64_t bytes = word_of(packets) >> 1;
    if (bytes < head || bytes > packets.count) {
      throw argument_error("heddle::compress: damaged packet, " + std::to_string(packets.count) + " bytes that say " +
                           std::to_string(bytes));
    }
    return static_cast<std::size_t>(bytes);
  }

  // ---- Sums
  static constexpr int rounds = 1;
  std::size_t extra(std::size_t, const encode_context&) const noexcept { return 0; }
  std::size_t sum_count(int, std::size_t n, const encode_context& x) const
    requires has_pick<Codec>
  {
    return codec_.picked(n, x);
  }
  bool send(int, slice<const float> g, float factor, float* const* state, const encode_context& x,
            float* const* sums) const
    requires has_pick<Codec>
  {
    bool finite = true;
    float block[2048];
    std::size_t begin = 0, n = 0;  // of the elements whose v is there
    const auto make = [&](std::size_t first, std::size_t count, float* v) {
      float* const e = Feedback ? state[0] + first : nullptr;
      return take(g.subslice(first, count), factor, &e, x, v);
    };
    const auto next = [&] {
      begin += n;
      n = (std::min)(std::size(block), g.count - begin);
      finite &= make(begin, n, block);
    };
    codec_.pick(g.count, x, [&](std::size_t j, std::size_t i, float weight) {
      while (i >= begin + n) next();
      if (i >= begin)
        sums[0][j] = block[i - begin];
      else
        make(i, 1, sums[0] + j);
      if (!Feedback) sums[0][j] *= weight;
    });
    while (begin + n < g.count) next();
    return finite;
  }
  void commit(slice<float> g, float factor, float* const* state, const encode_context& told, float* const* sums) const
    requires has_pick<Codec>
  {
    const encode_context x = Feedback ? with_late_scale(told, state[0], g.count) : told;
    const float late = x.held_scale - told.held_scale;  // of e wasn't sent
    std::vector<float> missed(late == 0.0f ? 0 : codec_.picked(g.count, x));
    if (late != 0.0f)
      codec_.pick(g.count, x, [&](std::size_t j, std::size_t i, float) { missed[j] = late * state[0][i]; });
    std::size_t begin = 0, n = 0;  // of the block that was moved last and is still in cache
    const auto next = [&] {
      begin += n;
      n = (std::min)(std::size_t{2048}, g.count - begin);
      const slice<float> part = g.subslice(begin, n);
      if constexpr (Feedback) {
        float* const e = state[0] + begin;
        take(part, factor, &e, x, e);
      }
      std::fill(part.begin(), part.end(), 0.0f);
    };
    codec_.pick(g.count, x, [&](std::size_t j, std::size_t i, float) {
      while (i >= begin + n) next();
      g[i] = sums[0][j];
      if constexpr (Feedback) state[0][i] = late == 0.0f ? 0.0f : missed[j];
    });
    while (begin + n < g.count) next();
  }

 private:
  // v = g factor / ranks + e, or with sign -1 the opposite, also where v is e; whether the sum over all ranks of such
  // values is finite.
  static bool take(slice<const float> g, float factor, float* const* state, const encode_context& x, float* v,
                   float sign = 1.0f) {
    const float share = sign * factor / static_cast<float>(x.ranks);
    const std::uint32_t peak = feed(v, g.data, Feedback ? state[0] : nullptr, g.count, share, sign * x.held_scale);
    return std::bit_cast<float>(peak) <= most_sent(x.ranks);  // false for NaN
  }
  static std::uint64_t word_of(slice<const std::byte> packet) {
    std::uint64_t word = 0;
    if (packet.count < head)
      throw argument_error("heddle::compress: damaged packet of " + std::to_string(packet.count) + " bytes");
    std::memcpy(&word, packet.data, sizeof word);
    return word;
  }

  Codec codec_;
};

template <codec Codec> struct carried_as<Codec> {
  static auto make(const Codec& c) { return carrier<Codec, false>(c); }
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

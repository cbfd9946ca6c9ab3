// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/dtype.hpp>
#include <heddle/core/error.hpp>
#include <heddle/core/reduction.hpp>
#include <heddle/core/slice.hpp>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace heddle {
inline namespace v0 {

/// @brief What a message belongs to; travels in its header so that mismatched calls are reported, not guessed.
enum class operation_kind : std::uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  barrier,
  control,
  reduce,
  all_to_all,
  send
};

/// The name used in messages.
constexpr const char* name_of(operation_kind k) noexcept {
  switch (k) {
    case operation_kind::all_reduce: return "all_reduce";
    case operation_kind::reduce_scatter: return "reduce_scatter";
    case operation_kind::all_gather: return "all_gather";
    case operation_kind::broadcast: return "broadcast";
    case operation_kind::barrier: return "barrier";
    case operation_kind::control: return "control";
    case operation_kind::reduce: return "reduce";
    case operation_kind::all_to_all: return "all_to_all";
    case operation_kind::send: return "send";
  }
  return "unknown";
}

namespace detail {
// The topologies that a header can name; the last stands for those of users.
inline constexpr std::string_view topology_names[] = {
    "",         "native",    "ring",      "direct", "torus_2d",    "halving_doubling", "mixed_radix", "hierarchical",
    "leaders",  "tree",      "pipelined", "double_tree", "recursive_doubling", "automatic", "a topology of the user's"};

// A topology's name in 16 bits: 5 say which, 11 are a hash of its settings, 0 if it has none. 0 is no topology.
constexpr std::uint16_t topology_tag(std::string_view name) noexcept {
  constexpr std::size_t last = std::size(topology_names) - 1;
  const std::string_view stem = name.substr(0, name.find_first_of(" ("));
  std::size_t which = 0;
  while (which < last && topology_names[which] != stem) ++which;
  std::uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  const bool plain = which < last && stem.size() == name.size();
  return static_cast<std::uint16_t>(which << 11 | (plain ? 0 : hash % 2047 + 1));
}

inline std::string topology_text(std::uint16_t tag) {
  const std::size_t which = tag >> 11;
  std::string text(which < std::size(topology_names) ? topology_names[which] : "unknown topology");
  if (tag & 2047) text += " (settings " + std::to_string(tag & 2047) + ")";
  return text;
}
}  // namespace detail

/// @brief The 16-byte header of every message: two ranks that exchange must agree on all fields but `contributors`.
struct header {
  operation_kind kind = operation_kind::control;  ///< The collective.
  dtype type = dtype::other;                      ///< Element type.
  std::uint8_t reduction = 0;                     ///< Identity of the reduction, 0 for none.
  std::uint8_t round = 0;                         ///< Round number modulo 256.
  std::uint16_t sequence = 0;                     ///< Number of the call on this communicator, modulo 65536.
  std::uint16_t contributors = 1;                 ///< How many ranks are summed in the payload (scaled float16).
  std::uint64_t count = 0;  ///< Elements of the whole collective, below 2^48; above them the topology's tag.

  /// Elements of the whole collective.
  constexpr std::uint64_t elements() const noexcept { return count & ((std::uint64_t{1} << 48) - 1); }
  /// The same call, on a topology of this name: ranks that use different ones don't match.
  constexpr header on(std::string_view name) const noexcept {
    header h = *this;
    h.count |= static_cast<std::uint64_t>(detail::topology_tag(name)) << 48;
    return h;
  }
  /// Whether the peer is in the same call.
  constexpr bool matches(const header& o) const noexcept {
    return kind == o.kind && type == o.type && reduction == o.reduction && round == o.round && sequence == o.sequence &&
           count == o.count;
  }
};
static_assert(sizeof(header) == 16);

namespace detail {
inline std::string describe(const header& h, const std::string& message = {}) {
  const auto tag = static_cast<std::uint16_t>(h.count >> 48);
  return std::string(name_of(h.kind)) + "(count " + std::to_string(h.elements()) + ", " + name_of(h.type) +
         (tag ? ", " + topology_text(tag) : std::string()) + ", reduction " + std::to_string(h.reduction) + ", call " +
         std::to_string(h.sequence) + message + ")";
}
// With the bytes of its message, or of its elements.
inline std::string describe(const header& h, std::size_t bytes, bool of_element = false) {
  const std::string what = of_element ? ", element of " : ", round " + std::to_string(h.round) + ", message of ";
  return describe(h, what + std::to_string(bytes) + " bytes");
}
}  // namespace detail

/// @brief One message to send in a round. The bytes stay untouched until the exchange returns, and longer where the
/// caller says so.
struct outgoing {
  int peer;                    ///< Destination rank.
  const void* data;            ///< First byte; read by the receiver in place where memory is shared.
  std::size_t bytes;           ///< Length, above 0.
  std::uint16_t contributors;  ///< Goes into the header.
  /// The caller goes on to another exchange, whatever happens, and leaves the bytes untouched until `apply` there: so
  /// this one may return while they are read. A wrapper that may throw between the two passes messages on without it.
  bool stays = false;
};

/// @brief One message to receive in a round.
struct incoming {
  int peer;           ///< Source rank.
  void* into;         ///< Where the bytes shall land; null: only lend them to `apply`.
  std::size_t bytes;  ///< Length, above 0; the sender must agree.
};

/// @brief A received message as `apply` sees it; the pointer is valid during that call only.
struct arrival {
  const void* data;            ///< The payload: the sender's own memory, a staging buffer, or `incoming::into`.
  std::uint16_t contributors;  ///< From the sender's header.
};

/// @name Requirements of a communicator, one by one
/// @{
/// Has `rank()` and `size()`.
template <class C>
concept has_rank_and_size = requires(const C& c) {
  { c.rank() } -> std::convertible_to<int>;
  { c.size() } -> std::convertible_to<int>;
};
/// Has `next_sequence()`: the number of the next call.
template <class C>
concept has_sequence = requires(C& c) {
  { c.next_sequence() } -> std::convertible_to<std::uint16_t>;
};
/// Has `exchange(header, outgoing, incoming, apply)`.
template <class C>
concept has_exchange = requires(C& c, header h, void (*apply)(std::span<const arrival>)) {
  c.exchange(h, detail::value_of<std::span<const outgoing>>(), detail::value_of<std::span<const incoming>>(), apply);
};
/// Has `duplicate()`: a second communicator of the same ranks with traffic of its own (collective).
template <class C>
concept has_duplicate = requires(C& c) {
  { c.duplicate() } -> std::same_as<C>;
};
/// Has `fail(text)`: makes every pending and later call of every rank end with comm_error naming this rank.
template <class C>
concept has_fail = requires(C& c, const std::string& text) { c.fail(text); };
/// @}

/// @brief A group of ranks that call the same operations in the same order.
///
/// One member function carries everything: `exchange` posts all messages of a round together and returns when they
/// have arrived, `apply` has run, and no peer reads this rank's buffers any more (but for those that it is told
/// `outgoing::stays` of, which it may ignore). The k-th message to a peer meets the k-th one it expects from here. What
/// a new communicator must provide:
///
///     struct my_communicator {
///       int rank() const;                          // 0 .. size() - 1
///       int size() const;
///       std::uint16_t next_sequence();             // 0, 1, 2 ... per call
///       my_communicator duplicate();               // collective
///       void fail(const std::string& text);        // this rank can't go on: wake every peer
///       template <class Apply>                     // Apply: void(std::span<const arrival>), called once
///       void exchange(header h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
///         // send each `out`, receive each `in`; check header::matches and the length; then apply(arrivals)
///       }
///     };
///
/// Throws: comm_error from any call when a peer failed, called something else, or didn't come within the deadline.
/// Threads: one thread at a time per communicator object; `duplicate()` for another thread.
template <class C>
concept communicator = has_rank_and_size<C> && has_sequence<C> && has_exchange<C> && has_duplicate<C> && has_fail<C>;

/// @brief Whether the communicator works in a stream: buffers lie in the stream's memory, `exchange` only enqueues, and
/// what the communicator concept says of its return holds in the stream's order. The leaves it meets enqueue too
/// (`bulk_leaf`), so `apply` runs on the host before the messages have come. `scratch(n)` is memory of n bytes that the
/// next call of it may give again, `copy(to, from, n)` copies in order.
template <class C>
concept stream_ordered = requires(C& c, void* to, const void* from, std::size_t n) {
  { c.scratch(n) } -> std::same_as<void*>;
  c.copy(to, from, n);
};

/// @brief Whether an `apply` of `exchange` would rather have messages in parts, which a communicator may give it while
/// the rest is on its way. Then, instead of one call with the arrivals, it makes `part(arrivals, offset, n)` for
/// consecutive bytes [offset, offset + n) of all messages, which must be equally long, and not received `into` a place;
/// `arrival::data` are those bytes. `takes(n)` says whether parts of n bytes will do, and the last one shorter.
/// `expects(n, f)` calls f(round, incoming) for what the same call receives from this round on, if it is longer than n
/// bytes; a communicator asks in a call's first round.
/// A wrapper that changes peers renames them in `expects`; one that adds messages passes a mere function on.
template <class Apply>
concept takes_parts = requires(Apply& a, const Apply& c, std::span<const arrival> got, std::size_t n,
                               void (*f)(std::uint8_t, const incoming&)) {
  { c.takes(n) } -> std::same_as<bool>;
  a.part(got, n, n);
  c.expects(n, f);
};

/// @brief Whether the communicator has an all-reduce of its own (`native{}` calls it).
template <class C>
concept has_native_all_reduce = requires(C& c, header h, const void* in, void* out, std::size_t n, const leaf& l) {
  c.native_all_reduce(h, in, out, n, l);
};

/// @brief Whether the communicator has a reduce-scatter and an all-gather of its own: `native_reduce_scatter(header,
/// data, counts, leaf)` and `native_all_gather(header, data, counts, bytes per element)`, in place, of blocks that lie
/// one after the other, one for each rank. A mean isn't divided.
template <class C>
concept has_native_halves = requires(C& c, header h, void* data, std::size_t bytes, const leaf& l) {
  c.native_reduce_scatter(h, data, detail::value_of<std::span<const std::size_t>>(), l);
  c.native_all_gather(h, data, detail::value_of<std::span<const std::size_t>>(), bytes);
};

/// @brief Whether the communicator can be split in two levels, as hierarchical with native{} leaves does: `split(color,
/// key)`, which gives one of the ranks with the same color, and `levels(group)`, which keeps what was split: `inside`
/// are this rank's group of consecutive ranks, `across` those that have its place in their groups. All collective.
template <class C>
concept has_levels = requires(C& c, int group) {
  { c.split(group, group) } -> std::same_as<C>;
  { c.levels(group).inside } -> std::same_as<C&>;
  { c.levels(group).across } -> std::same_as<C&>;
};

/// @brief Whether the communicator wants to know of each call before its first message: `begin(header)`, on every rank.
template <class C>
concept has_begin = requires(C& c, const header& h) { c.begin(h); };

/// @brief Who makes messages move while a program computes.
enum class progress {
  thread,  ///< Whoever wants that calls from a thread of its own, as data_parallel does.
  polled   ///< Nobody: the communicator is called by the program's own thread only, and moves messages meanwhile.
};

/// @brief Whether the communicator says who may call it: `progress()`. One that doesn't may be called by any thread.
template <class C>
concept has_progress = requires(const C& c) {
  { c.progress() } -> std::same_as<progress>;
};

/// @brief Begins a collective: numbers it, and tells a communicator that wants to know. Once per call on every rank,
/// also where the rank has nothing to send or receive.
/// @param comm Communicator. @param h Header of the call; its `sequence` is set here.
/// @return The header that goes into every exchange of the call.
template <communicator Comm>
header begin_call(Comm& comm, header h) {
  h.sequence = comm.next_sequence();
  if constexpr (has_begin<Comm>) comm.begin(h);
  return h;
}

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief The bytes of a message, and room before them for a header, so that they travel without being copied.
///
/// Owns them; move only. They are aligned for any number of 8 bytes.
class payload {
 public:
  static constexpr std::size_t room = 64;  ///< Bytes kept free before the first one.

  payload() = default;
  /// @param bytes How many; their values are arbitrary.
  explicit payload(std::size_t bytes)
      : first_(static_cast<std::byte*>(::operator new(room + bytes))),
        size_(bytes),
        release_([](void* p) noexcept { ::operator delete(p); }),
        context_(first_) {}
  /// A copy. @param bytes What to copy.
  explicit payload(std::span<const std::byte> bytes) : payload(bytes.size()) {
    if (!bytes.empty()) std::memcpy(data(), bytes.data(), bytes.size());
  }
  /// @brief Takes over memory. @param first The header's first byte; the payload begins `room` behind it.
  /// @param bytes Length behind the header. @param release Called once, with context. @param context Its argument.
  payload(std::byte* first, std::size_t bytes, void (*release)(void*) noexcept, void* context) noexcept
      : first_(first), size_(bytes), release_(release), context_(context) {}
  /// Takes over what the other owns.
  payload(payload&& o) noexcept
      : first_(std::exchange(o.first_, nullptr)),
        size_(std::exchange(o.size_, 0)),
        release_(std::exchange(o.release_, nullptr)),
        context_(o.context_) {}
  /// Takes over what the other owns, and gives up what it has.
  payload& operator=(payload&& o) noexcept {
    payload old(std::move(*this));
    first_ = std::exchange(o.first_, nullptr);
    size_ = std::exchange(o.size_, 0);
    release_ = std::exchange(o.release_, nullptr);
    context_ = o.context_;
    return *this;
  }
  ~payload() {
    if (release_) release_(context_);
  }

  /// First byte; null if there is no memory.
  std::byte* data() noexcept { return first_ ? first_ + room : nullptr; }
  /// First byte; null if there is no memory.
  const std::byte* data() const noexcept { return first_ ? first_ + room : nullptr; }
  /// How many bytes.
  std::size_t size() const noexcept { return size_; }
  /// All of them.
  std::span<const std::byte> bytes() const noexcept { return {data(), size_}; }
  /// All of them, as characters.
  std::string_view text() const noexcept { return {reinterpret_cast<const char*>(data()), size_}; }
  /// The room for the header; null if there is no memory.
  std::byte* head() noexcept { return first_; }

 private:
  std::byte* first_ = nullptr;
  std::size_t size_ = 0;
  void (*release_)(void*) noexcept = nullptr;
  void* context_ = nullptr;
};

/// @brief Whom a message is for or from. A process that restarts keeps its rank and begins another life, whose number
/// is higher.
struct address {
  int rank = 0;            ///< 0 .. size() - 1.
  std::uint64_t life = 0;  ///< Which life of it; 0 where one sends to whichever there is.

  constexpr address() = default;
  /// @param r Rank. @param l Life.
  constexpr address(int r, std::uint64_t l = 0) noexcept : rank(r), life(l) {}
  /// The same life of the same rank.
  friend constexpr bool operator==(const address&, const address&) = default;
};

/// @brief What `receive` returns. All but `data` are news of a peer, in their place among its messages.
enum class message_kind : std::uint8_t {
  data,    ///< What a peer sent.
  joined,  ///< A life of a peer has been heard of; before any message of it.
  died,    ///< A life is over: silent for too long, or another has begun. Nothing of it comes any more.
  left,    ///< A life has said goodbye. Nothing of it comes any more.
  gap,     ///< Messages of a life are lost, since a connection broke: some that it sent after the last one received.
  refused  ///< A peer holds this messenger's life for dead; it heeds this one again after `renew()`.
};

/// The name used in messages.
constexpr const char* name_of(message_kind k) noexcept {
  switch (k) {
    case message_kind::data: return "data";
    case message_kind::joined: return "joined";
    case message_kind::died: return "died";
    case message_kind::left: return "left";
    case message_kind::gap: return "gap";
    case message_kind::refused: return "refused";
  }
  return "unknown";
}

/// @brief A message, or news of a peer.
struct message {
  message_kind kind = message_kind::data;  ///< Which.
  address from;                            ///< Who sent it, or whom the news is about.
  std::uint32_t tag = 0;                   ///< As given to `send`; 0 in news.
  std::uint64_t id = 0;                    ///< As given to `send`; 0 in news.
  payload body;                            ///< What was sent; in news, a sentence that says what happened.
};

/// @brief A message can't be sent: the life it is for is over, or nobody answered at that rank. The message was not
/// handed over, not even in part.
struct peer_error : comm_error {
  using comm_error::comm_error;
};

/// @brief A message can't be sent: the peer hasn't taken what was sent to it before. The message was not handed over.
struct congestion_error : comm_error {
  using comm_error::comm_error;
};

/// @brief Settings of a messenger.
struct messenger_options {
  std::chrono::nanoseconds silence{10'000'000'000ll};   ///< After so long a silence a peer is declared dead.
  std::chrono::nanoseconds beat{250'000'000};           ///< Between two signs of life; at most half of `silence`.
  std::chrono::nanoseconds patience{30'000'000'000ll};  ///< How long `send` waits for room, or for a peer to answer.
  /// Bytes, with 64 for each message, that may be on their way to a peer and in its memory before it has received them.
  /// A longer message waits until nothing else is.
  std::size_t window = std::size_t{16} << 20;
  /// Whether a thread of the messenger's own gives signs of life, and takes in what comes, while the program is
  /// elsewhere. Without it the program must call `receive` several times in `silence`.
  bool thread = true;
  std::uint64_t life = 0;  ///< This life's number, above those of former lives; 0 is the wall clock's nanoseconds.
};

/// @brief What a messenger has carried, without signs of life.
struct messenger_counts {
  std::uint64_t messages_sent = 0;      ///< Messages handed over.
  std::uint64_t bytes_sent = 0;         ///< Their bytes.
  std::uint64_t messages_received = 0;  ///< Messages that `receive` returned, without news.
  std::uint64_t bytes_received = 0;     ///< Their bytes.
  std::uint64_t discarded = 0;          ///< Packets of or for lives that are over, and such that weren't understood.
};

/// @name Requirements of a messenger, one by one
/// @{
/// Has `rank()`, `size()` and `life()`: its own address, and how many ranks there can be.
template <class M>
concept has_own_address = requires(const M& m) {
  { m.rank() } -> std::convertible_to<int>;
  { m.size() } -> std::convertible_to<int>;
  { m.life() } -> std::convertible_to<std::uint64_t>;
};
/// Has `connect(rank)`, which looks for a peer without waiting, and `life_of(rank)`: its life, 0 if none is known.
template <class M>
concept has_peers = requires(M& m, int r) {
  m.connect(r);
  { m.life_of(r) } -> std::convertible_to<std::uint64_t>;
};
/// Has `send(to, tag, id, payload&&)`, which may wait, and `try_send` of the same, which doesn't and says whether it
/// has sent.
template <class M>
concept has_send = requires(M& m, address to, std::uint32_t tag, std::uint64_t id, payload&& body) {
  m.send(to, tag, id, std::move(body));
  { m.try_send(to, tag, id, std::move(body)) } -> std::same_as<bool>;
};
/// Has `receive(longest)`: the next message from anybody, or nothing if none comes in time.
template <class M>
concept has_receive = requires(M& m, std::chrono::nanoseconds longest) {
  { m.receive(longest) } -> std::same_as<std::optional<message>>;
};
/// Has `renew()`: begins another life.
template <class M>
concept has_renew = requires(M& m) { m.renew(); };
/// @}

/// @brief Sends to and receives from anybody, sizes unknown in advance; survives the death of peers.
///
/// Between one life of a peer and one life of another, messages come in the order in which they were sent, each at most
/// once. A message is for one life: one that was sent to a former life is never delivered to its successor. Sent
/// doesn't mean delivered: what is under way is lost where a life ends, and where a connection breaks between two that
/// live; the latter is told by `message_kind::gap` before later messages of that peer. So who must know repeats a
/// request until a reply comes, and the receiver remembers which `id`s of whom it has served: that makes exactly once.
///
/// `basic_messenger` is one over any transport: a new transport is a handful of short functions. `threads::messenger`,
/// `mpi::messenger` and `zmq::messenger` are its models; `lossy` is a wrapper.
///
/// Throws: argument_error if a rank isn't one; peer_error, congestion_error. After them the message is still the
/// caller's, and the messenger can be used as before.
template <class M>
concept messenger = has_own_address<M> && has_peers<M> && has_send<M> && has_receive<M> && has_renew<M>;

}  // namespace v0
}  // namespace heddle

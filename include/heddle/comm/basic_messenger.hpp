// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/packet.hpp>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief A messenger over a transport, which carries packets between ranks in order, or loses them.
///
/// A transport is found among the neighbours of this file; what it must provide, all of it called by one thread at a
/// time but the last two:
///
///     struct my_transport {
///       int rank() const, size() const;
///       std::string where() const;                // how it is reached, for those who don't know: any text
///       void open(int peer, std::string_view w);  // prepares sending; w: what the peer's where() said, or empty
///       void close(int peer);                     // the peer is gone: drops what waits for it
///       bool put(int peer, payload& p);           // takes p and sends head and bytes; or not now: false, p untouched
///       bool get(payload& p);                     // the next packet, if there is one
///       void wait(std::chrono::nanoseconds t);    // until something may have come since get said no; at most t
///       void wake();                              // ends wait early, also one that begins afterwards
///     };
///
/// Wire:   64 bytes of header per message, in the byte order of the machine, which must be the same on all. A sign of
/// life per peer and `beat`, if nothing else was sent; one per quarter of a window of what is received.
/// State:  up to a window per peer and direction.
/// Sync:   any thread may call any member at any time. send, receive wait; the others don't.
/// Throws: as the messenger concept says; send, receive also what was thrown in the messenger's own thread before.
template <class Transport> class basic_messenger {
  using clock = std::chrono::steady_clock;
  using peer = detail::correspondent;

 public:
  /// @param o Settings. @param transport What the transport is made from.
  /// Throws: argument_error if a setting is out of range; what making the transport throws.
  template <class... Arguments>
  explicit basic_messenger(const messenger_options& o, Arguments&&... transport)
      : options_(detail::checked(o)),
        transport_(std::forward<Arguments>(transport)...),
        peers_(static_cast<std::size_t>(transport_.size())),
        life_(o.life ? o.life : detail::next_life(0)) {
    begin_self();
    chored_ = clock::now();
    if (o.thread) background_ = std::thread([this] { attend(); });
  }
  basic_messenger(const basic_messenger&) = delete;
  basic_messenger& operator=(const basic_messenger&) = delete;
  /// Says goodbye to all peers.
  ~basic_messenger() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      for (int r = 0; r < size(); ++r) {
        try {
          if (r != rank()) say(r, detail::packet_kind::bye, at(r).up ? at(r).life : 0);
        } catch (...) {  // then it finds out by the silence
        }
      }
    }
    stop_.notify_all();
    if (background_.joinable()) background_.join();
  }

  /// This rank, 0 .. size() - 1.
  int rank() const noexcept { return transport_.rank(); }
  /// How many ranks there can be.
  int size() const noexcept { return transport_.size(); }
  /// The number of this life.
  std::uint64_t life() const {
    std::lock_guard lock(mutex_);
    return life_;
  }
  /// The life of a peer, 0 if none is known.
  std::uint64_t life_of(int rank) const {
    std::lock_guard lock(mutex_);
    const peer& p = peers_[detail::checked("life_of", rank, size())];
    return p.up ? p.life : 0;
  }
  /// What has been carried so far.
  messenger_counts counts() const {
    std::lock_guard lock(mutex_);
    return counts_;
  }

  /// @brief Looks for a peer until it is there; news of it come by `receive`. Sending to it does the same. After it has
  /// left, it must be called again; one that has died is looked for anyway.
  void connect(int rank) {
    std::lock_guard lock(mutex_);
    seek(static_cast<int>(detail::checked("connect", rank, size())));
  }

  /// @brief Sends a message; waits if it must, at most for `patience`.
  /// @param to Whom. @param tag Any number. @param id Any number. @param body The message; taken unless it throws.
  void send(address to, std::uint32_t tag, std::uint64_t id, payload&& body) {
    std::unique_lock lock(mutex_);
    if (attempt(to, tag, id, body)) return;
    const auto end = clock::now() + options_.patience;
    for (;;) {
      const bool more = pump();
      const auto now = clock::now();
      chores(now);
      if (attempt(to, tag, id, body)) return;
      if (now >= end) detail::throw_unsent(rank(), to, at(to.rank), body.size(), options_);
      pause(lock, (std::min<clock::duration>)(end - now, std::chrono::milliseconds(more ? 0 : 10)), sending_);
    }
  }
  /// @brief Sends a copy. @param to Whom. @param tag Any number. @param id Any number. @param bytes The message.
  void send(address to, std::uint32_t tag, std::uint64_t id, std::span<const std::byte> bytes) {
    send(to, tag, id, payload(bytes));
  }
  /// @brief Sends a message if that is possible without waiting, and says whether it has.
  /// @param to Whom. @param tag Any number. @param id Any number. @param body The message; taken if it was sent.
  bool try_send(address to, std::uint32_t tag, std::uint64_t id, payload&& body) {
    std::lock_guard lock(mutex_);
    if (attempt(to, tag, id, body)) return true;
    pump();
    chores(clock::now());
    return attempt(to, tag, id, body);
  }

  /// @brief The next message, from anybody, or news.
  /// @param longest How long to wait for it; 0 only looks.
  std::optional<message> receive(std::chrono::nanoseconds longest) {
    std::unique_lock lock(mutex_);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (++receives_ % 64 == 0) chores(clock::now());
    while (inbox_.empty() && pump()) continue;
    if (!inbox_.empty()) return take();
    auto now = clock::now();
    const auto end = longest < std::chrono::hours(10'000) ? now + longest : now + std::chrono::hours(10'000);
    for (;;) {
      chores(now);
      if (!inbox_.empty()) return take();
      if (now >= end) return std::nullopt;
      pause(lock, end - now, receiving_);
      while (inbox_.empty() && pump()) continue;
      now = clock::now();
    }
  }

  /// @brief Begins another life, above those that peers know who refused this one, as if the process had restarted:
  /// forgets what has come and wasn't received, and what is known of peers, and looks for those that were there.
  void renew() {
    std::lock_guard lock(mutex_);
    life_ = detail::next_life((std::max)(life_, known_));
    inbox_.clear();
    for (int r = 0; r < size(); ++r) {
      peer& p = at(r);
      const bool again = p.up || p.wanted || p.sought;
      p = {.ended = p.ended, .open = p.open};
      if (again && r != rank()) seek(r);
    }
    begin_self();
  }

 protected:
  /// The transport; what it shows must not change.
  const Transport& carrier() const noexcept { return transport_; }

 private:
  static constexpr int most_tries = 100;  // of telling a peer who isn't reached yet, a millisecond apart

  peer& at(int r) { return peers_[static_cast<std::size_t>(r)]; }
  void begin_self() { at(rank()) = {.life = life_, .up = true}; }

  // ---- Sending. All below hold the lock.

  bool attempt(address& to, std::uint32_t tag, std::uint64_t id, payload& body) {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    peer& p = peers_[detail::checked("send", to.rank, size())];
    if (p.up && !to.life) to.life = p.life;
    const bool over = p.up ? to.life != p.life : to.life ? to.life <= p.ended : p.ended && !p.wanted;
    if (over || p.refused) detail::throw_over(rank(), to, p);
    if (!p.up) {
      if (!p.wanted) seek(to.rank);
      return false;
    }
    const std::uint64_t under_way = p.sent - p.credited, units = payload::room + body.size();
    if (under_way > 0 && under_way + units > options_.window) {
      if (!p.asked) p.asked = say(to.rank, detail::packet_kind::ask, p.life);
      return false;
    }
    if (!body.head()) body = payload(0);
    const std::size_t bytes = body.size();
    write_head(p, body, {.kind = detail::packet_kind::data, .tag = tag, .to = to.life, .id = id});
    if (to.rank == rank())
      accept(std::move(body), p.heard);
    else if (!transport_.put(to.rank, body))
      return false;
    p.sent += units;
    p.said = true;
    p.told = p.consumed;
    rouse();
    ++counts_.messages_sent;
    counts_.bytes_sent += bytes;
    return true;
  }

  void write_head(const peer& p, payload& body, detail::packet_head h) const {
    h.source = rank();
    h.from = life_;
    h.place = p.sent;
    h.credit = p.consumed;
    h.bytes = body.size();
    std::memcpy(body.head(), &h, sizeof h);
  }

  // Sends a packet without a message. Beats say how this rank is reached.
  bool say(int r, detail::packet_kind kind, std::uint64_t to) {
    peer& p = at(r);
    const bool known = kind == detail::packet_kind::bye || kind == detail::packet_kind::refuse;
    const std::string where = known ? std::string() : transport_.where();
    payload body(std::as_bytes(std::span(where)));
    write_head(p, body, {.kind = kind, .to = to, .id = (std::max)(p.life, p.ended)});
    if (!p.open || !transport_.put(r, body)) return false;
    p.said = true;
    p.told = p.consumed;
    return true;
  }
  void beat(int r) {
    peer& p = at(r);
    if (say(r, detail::packet_kind::beat, p.up ? p.life : 0)) p.owed = 0;
    owing_ |= p.owed > 0;
  }
  // The same, again and again if it isn't reached yet.
  void beat_soon(int r) {
    at(r).owed = most_tries;
    beat(r);
  }

  void open(int r, std::string_view where) {
    transport_.open(r, where);
    at(r).open = true;
  }
  void seek(int r) {
    peer& p = at(r);
    if (p.up) return;
    p.wanted = true;
    open(r, {});
    beat_soon(r);
  }

  // ---- Receiving.

  // Takes in some of what has come; returns whether there may be more.
  bool pump() {
    int n = 0;
    clock::time_point now{};
    for (payload p; n < 64 && transport_.get(p); ++n) {
      if (n == 0) now = clock::now();
      accept(std::move(p), now);
    }
    rouse(n > 0);
    return n == 64;
  }

  void accept(payload&& packet, clock::time_point now) {
    detail::packet_head h;
    std::memcpy(&h, packet.head(), sizeof h);
    if (h.magic != detail::packet_head{}.magic || h.source < 0 || h.source >= size() || h.bytes != packet.size()) {
      ++counts_.discarded;
      return;
    }
    const int r = h.source;
    peer& p = at(r);
    const bool is_beat = h.kind == detail::packet_kind::beat || h.kind == detail::packet_kind::ask;
    // Before what the peer's life is worth here: two that hold each other for dead must both learn it.
    if (h.kind == detail::packet_kind::refuse) {
      if (h.to != life_ || h.from < p.life || std::exchange(p.refused, true)) return;
      known_ = (std::max)(known_, h.id);
      news(message_kind::refused, r, h.from, "rank " + std::to_string(r) + " holds this life for dead");
      return;
    }
    if (h.from <= p.ended || h.from < p.life) {  // of a former life, which learns that it is over
      counts_.discarded += !is_beat;
      if (is_beat && !p.up) open(r, packet.text());
      if (is_beat) say(r, detail::packet_kind::refuse, h.from);
      return;
    }
    if (!p.up || h.from > p.life) begin(r, h.from);
    p.heard = now;
    if (is_beat) open(r, packet.text());
    const bool leaves = h.kind == detail::packet_kind::bye;
    if (h.to != life_ && !leaves) {  // it doesn't know of this life
      counts_.discarded += !is_beat;
      if (p.owed == 0) beat_soon(r);
      return;
    }
    if (h.to == life_ && !in_place(p, h)) return;
    if (h.kind == detail::packet_kind::data) {
      p.arrived += payload::room + packet.size();
      inbox_.push_back({{message_kind::data, {r, h.from}, h.tag, h.id, std::move(packet)}, p.arrived});
    }
    if (h.kind == detail::packet_kind::ask) {
      p.asks = p.consumed == p.told;
      if (!p.asks) beat_soon(r);
    }
    if (leaves) {
      end(r, message_kind::left, "rank " + std::to_string(r) + " has left");
      transport_.close(r);
      p.open = false;
    }
  }

  // What a packet says of the streams between the two lives. Whether it is the next one or a later one.
  bool in_place(peer& p, const detail::packet_head& h) {
    if (h.credit > p.credited) {
      p.credited = h.credit;
      p.asked = false;
    }
    if (h.place < p.arrived) {
      ++counts_.discarded;
      return false;
    }
    if (h.place > p.arrived) {
      const std::string lost = std::to_string(h.place - p.arrived);
      news(message_kind::gap, h.source, p.life, lost + " bytes of rank " + std::to_string(h.source) + " are lost");
      inbox_.back().end = h.place;
    }
    p.arrived = h.place;
    return true;
  }

  void news(message_kind kind, int r, std::uint64_t life, const std::string& text) {
    inbox_.push_back({{kind, {r, life}, 0, 0, payload(std::as_bytes(std::span(text)))}, 0});
  }
  void begin(int r, std::uint64_t life) {
    peer& p = at(r);
    if (p.up) end(r, message_kind::died, "rank " + std::to_string(r) + " has begun another life");
    p = {.life = life, .ended = p.ended, .up = true, .open = p.open};
    news(message_kind::joined, r, life, "rank " + std::to_string(r) + " is there");
  }
  void end(int r, message_kind how, const std::string& text) {
    peer& p = at(r);
    news(how, r, p.life, text);
    p.up = p.wanted = false;
    p.ended = p.life;
  }

  message take() {
    detail::arrival_of_message i = std::move(inbox_.front());
    inbox_.pop_front();
    const int r = i.what.from.rank;
    peer& p = at(r);
    if (i.what.kind == message_kind::data) {
      ++counts_.messages_received;
      counts_.bytes_received += i.what.body.size();
    }
    if (p.up && i.what.from.life == p.life && i.end > p.consumed) {
      p.consumed = i.end;
      if (r == rank())
        p.credited = i.end;
      else if (std::exchange(p.asks, false) || p.consumed - p.told >= options_.window / 4)
        beat_soon(r);
    }
    rouse();
    return std::move(i.what);
  }

  // ---- In between.

  // How long there is nothing to do but wait for packets.
  clock::duration tick() const {
    const clock::duration half = options_.beat / 2;
    return owing_ ? (std::min<clock::duration>)(half, std::chrono::milliseconds(1)) : half;
  }

  // Ends the waits of those who can go on; again whenever a look for packets may have undone that.
  void rouse(bool credit = false) {
    if ((receiving_ > 0 && !inbox_.empty()) || (sending_ > 0 && credit)) transport_.wake();
  }
  // Waits for a packet without holding the lock; counted meanwhile.
  void pause(std::unique_lock<std::mutex>& lock, clock::duration longest, int& count) {
    ++count;
    const auto t = (std::min)(longest, tick());
    lock.unlock();
    transport_.wait(t);
    lock.lock();
    --count;
  }

  // Signs of life, and who has given none. Time in which this process didn't run is nobody's silence.
  void chores(clock::time_point now) {
    const bool due = now - chored_ >= options_.beat / 2;
    if (!due && (!owing_ || now - tried_ < std::chrono::milliseconds(1))) return;
    owing_ = false, tried_ = now;
    const bool slept = now - chored_ > options_.silence / 2;
    if (due) chored_ = now;
    for (int i = 0; due && i < 10'000 && pump();) ++i;  // nobody is silent whose packets lie here
    for (int r = 0; r < size(); ++r) {
      peer& p = at(r);
      if (r == rank() || !(p.up || p.wanted || p.sought)) continue;
      if (due && p.up) {
        if (slept) p.heard = (std::max)(p.heard, now - options_.silence / 2);
        if (now - p.heard > options_.silence) {
          end(r, message_kind::died,
              "rank " + std::to_string(r) + " was silent for " + detail::milliseconds(now - p.heard));
          p.sought = true;
          transport_.close(r);
          open(r, {});
        }
      }
      if (p.owed > 0) --p.owed;
      if (p.owed > 0 || (due && !std::exchange(p.said, false))) beat(r);
    }
    rouse();
  }

  // The thread of its own.
  void attend() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      try {
        if (sending_ + receiving_ == 0) pump();
        chores(clock::now());
      } catch (...) {
        failure_ = std::current_exception();
      }
      // A system-clock wait, since ThreadSanitizer knows it; nothing depends on its length.
      stop_.wait_until(lock, std::chrono::system_clock::now() + tick());
    }
  }

  messenger_options options_;
  Transport transport_;
  std::vector<peer> peers_;
  std::deque<detail::arrival_of_message> inbox_;
  messenger_counts counts_;
  std::uint64_t life_, known_ = 0, receives_ = 0;  // known_: the highest of this rank's lives that others know
  std::exception_ptr failure_;  // of the thread of its own, not thrown yet
  clock::time_point chored_{}, tried_{};
  bool owing_ = false, stopping_ = false;  // some peer is owed a beat; the thread shall end
  int sending_ = 0, receiving_ = 0;        // threads in pause
  mutable std::mutex mutex_;
  std::condition_variable stop_;
  std::thread background_;
};

}  // namespace v0
}  // namespace heddle

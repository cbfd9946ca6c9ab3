// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <heddle/comm/detail/mpi_pending.hpp>

namespace heddle {
inline namespace v0 {
namespace mpi {
namespace detail {

// The rounds of one communicator: what is posted, and what has come.
class rounds : public pending {
 public:
  // One round; see the communicator concept.
  template <class Apply>
  void run(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    session_->require_thread();
    if (channel_->left) throw_failure(h);
    channel_->inside = true;
    try {
      keep_what_stays();
      if (session_->look(session_->now())) throw_failure(h);
      const bool begins = channel_->enter(h);
      std::size_t part = 0;
      std::vector<announcement> early;
      if constexpr (takes_parts<std::remove_cvref_t<Apply>>) {
        part = part_of(in, apply);
        // Not in a simulator, whose prices are of one question for each peer.
        if (begins && !session_->simulated()) {
          apply.expects(limit(), [&](std::uint8_t round, const incoming& m) {
            require_peer(m.peer);
            if (!std::exchange(channel_->in_call(m.peer).called, true)) early.push_back({round, m.peer, m.bytes});
          });
        }
      }
      post(h, out, in, part, early);
      // Not before the peers have this rank's part under way, too: it can't begin during `apply`.
      const auto others_can_go_on = [this] { return uncalled_ == 0 && staying_ == 0; };
      if constexpr (takes_parts<std::remove_cvref_t<Apply>>) {
        if (part) take_parts(h, out, in, part, apply, others_can_go_on);
      }
      if (!part) {
        wait(h, out, in, [&] { return arriving_ == 0 && others_can_go_on(); });
        std::forward<Apply>(apply)(std::span<const arrival>(arrivals_));
      }
      wait(h, out, in, [this] { return active_ == 0; });
      channel_->inside = false;
    } catch (const std::exception& e) {
      retreat(e.what());
      throw;
    } catch (...) {
      retreat("an exception that is not a std::exception");
      throw;
    }
  }

 protected:
  using pending::pending;

  [[noreturn]] void mismatch(const header& h, std::size_t bytes, int peer, const label& theirs,
                             bool of_element = false) {
    const std::string text = "calls differ: rank " + std::to_string(rank()) + " is in " +
                             describe(h, bytes, of_element) + ", rank " + std::to_string(peer) + " is in " +
                             describe(theirs.head, static_cast<std::size_t>(theirs.bytes), of_element);
    session_->fail(rank(), text);
    throw comm_error(heddle::name_of(h.kind), rank(), peer, text);
  }

 private:
  struct announcement {  // of the first long message of a peer in a call, before its round
    std::uint8_t round;
    int peer;
    std::size_t bytes;
  };

  // How many bytes of each message are received and reduced at a time; 0 if `apply` shall have them whole. Two messages
  // of one peer come one after the other, with all their parts, so none of the second is there beside the first.
  template <class Apply> std::size_t part_of(std::span<const incoming> in, const Apply& apply) const {
    if (in.empty() || in[0].bytes <= limit()) return 0;
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (in[i].into || in[i].bytes != in[0].bytes) return 0;
      for (std::size_t k = 0; k < i; ++k) {
        if (in[k].peer == in[i].peer) return 0;
      }
    }
    const std::size_t n = piece_of(in[0].bytes);
    return n < in[0].bytes && apply.takes(n) ? n : 0;
  }

  // A part of every message is reduced while the next one comes.
  template <class Apply, class Ready>
  void take_parts(const header& h, std::span<const outgoing> out, std::span<const incoming> in, std::size_t part,
                  Apply& apply, Ready&& ready) {
    const std::size_t bytes = in[0].bytes;
    std::uint8_t half = 0;
    for (std::size_t o = 0; o < bytes; o += part, half ^= 1) {
      wait(h, out, in, [&] {
        return ready() && std::all_of(incoming_.begin(), incoming_.end(),
                                      [&](const progress& x) { return x.known && x.came[half]; });
      });
      for (std::size_t i = 0; i < in.size(); ++i) {
        incoming_[i].came[half] = false;
        arrivals_[i].data = half_of(i, part, half);
      }
      apply.part(std::span<const arrival>(arrivals_), o, (std::min)(part, bytes - o));
      auto held = session_->enter();
      for (std::size_t i = 0; i < in.size(); ++i) receive_part(h, i, in[i], o + 2 * part, part, half);
    }
  }

  std::byte* half_of(std::size_t i, std::size_t part, std::uint8_t half) noexcept {
    return lent_[incoming_[i].lent + half * lines(part)].bytes;
  }
  void receive_part(const header& h, std::size_t i, const incoming& m, std::size_t offset, std::size_t part,
                    std::uint8_t half) {
    if (offset >= m.bytes) return;
    receive(h, half_of(i, part, half), (std::min)(part, m.bytes - offset), payload_tag,
            {role::payload_in, i, m.peer, false, half});
  }

  // Keeps the requests of the round before that haven't ended, and memory that they may be in.
  void keep_what_stays() {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      requests_[kept] = requests_[i];
      roles_[kept++] = roles_[i];
    }
    requests_.resize(kept);
    roles_.resize(kept);
    arriving_ = active_ = uncalled_ = 0;
    old_ = staying_ = kept;
    if (kept) memory_.swap(memory_before_);
  }

  void post(const header& h, std::span<const outgoing> out, std::span<const incoming> in, std::size_t part,
            std::span<const announcement> early) {
    incoming_.assign(in.size(), {});
    outgoing_.assign(out.size(), {});
    arrivals_.assign(in.size(), {nullptr, 1});
    for (const outgoing& m : out) require_peer(m.peer);
    for (const incoming& m : in) require_peer(m.peer);
    // Memory of the round, all of it before anything is posted. A head is received where what follows it is aligned.
    std::size_t used = 0, lent = 0;
    const auto take = [&](std::size_t bytes) { return std::exchange(used, used + lines(bytes)); };
    for (std::size_t i = 0; i < in.size(); ++i) {
      progress& x = incoming_[i];
      x.head = take(line_bytes + limit());
      if (in[i].bytes <= limit()) continue;
      if (!in[i].into) x.lent = std::exchange(lent, lent + (part ? 2 * lines(part) : lines(in[i].bytes)));
      if (!std::exchange(channel_->in_call(in[i].peer).called, true)) x.call = take(sizeof(label));
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      progress& x = outgoing_[i];
      x.head = take(sizeof(label) + (out[i].bytes > limit() ? 0 : out[i].bytes));
      if (out[i].bytes <= limit()) continue;
      if (!std::exchange(channel_->in_call(out[i].peer).listening, true)) x.call = take(sizeof(label));
    }
    std::size_t place = take(early.size() * sizeof(line));
    grow(memory_, used);
    grow(lent_, lent);
    auto held = session_->enter();
    // Sends first: a receive copies at once what is there already, and peers would wait for their messages meanwhile.
    for (std::size_t i = 0; i < out.size(); ++i) post(h, i, out[i]);
    for (std::size_t i = 0; i < in.size(); ++i) post(h, i, in[i], part);
    for (const announcement& a : early) {
      header then = h;
      then.round = a.round;
      with(a.peer).sends = true;
      send_label(then, place++, a.bytes, 0, call_tag, {role::call_out, 0, a.peer});
    }
  }

  void post(const header& h, std::size_t i, const incoming& m, std::size_t part) {
    progress& x = incoming_[i];
    receive(h, head_of(i), sizeof(label) + limit(), head_tag, {role::head_in, i, m.peer});
    if (m.bytes <= limit()) return;
    with(m.peer).sends = true;
    if (part) {
      receive_part(h, i, m, 0, part, 0);
      receive_part(h, i, m, part, part, 1);
    } else {
      std::byte* const to = m.into ? static_cast<std::byte*>(m.into) : lent_[x.lent].bytes;
      cut(m.bytes, [&](std::size_t offset, std::size_t length) {
        receive(h, to + offset, length, payload_tag, {role::payload_in, i, m.peer});
      });
    }
    if (x.call != none) send_label(h, x.call, m.bytes, 0, call_tag, {role::call_out, i, m.peer});
  }
  void post(const header& h, std::size_t i, const outgoing& m) {
    header head = h;
    head.contributors = m.contributors;
    const bool is_long = m.bytes > limit();
    progress& x = outgoing_[i];
    if (x.call != none) receive(h, at(x.call), sizeof(label), call_tag, {role::call_in, i, m.peer});
    if (!is_long && m.bytes) std::memcpy(at(x.head) + sizeof(label), m.data, m.bytes);
    send_label(head, x.head, m.bytes, is_long ? 0 : m.bytes, head_tag, {role::head_out, i, m.peer, m.stays});
    if (!is_long) return;
    ++uncalled_;
    if (with(m.peer).ready) send_payload(h, i, m);
  }

  // The receiver is in this call.
  void send_payload(const header& h, std::size_t i, const outgoing& m) {
    outgoing_[i].started = true;
    --uncalled_;
    cut(m.bytes, [&](std::size_t offset, std::size_t length) {
      send(h, static_cast<const std::byte*>(m.data) + offset, length, payload_tag,
           {role::payload_out, i, m.peer, m.stays});
      ++with(m.peer).sent;
    });
  }

  void send_label(const header& h, std::size_t place, std::size_t bytes, std::size_t behind, tag t, role r) {
    const label head{h, bytes};
    std::memcpy(at(place), &head, sizeof head);
    send(h, at(place), sizeof head + behind, t, r);
  }

  void require_peer(int peer) const {
    if (peer >= 0 && peer < size() && peer != rank()) return;
    throw argument_error("heddle::mpi::exchange: peer " + std::to_string(peer) + " of rank " + std::to_string(rank()) +
                         " is not one of the other " + std::to_string(size() - 1) + " ranks");
  }

  // Bytes of the MPI messages that a long message is cut into, the same on both sides: short enough for a receiver's
  // cache, few, and of whole elements, if these have any usual length. A simulator has no caches.
  std::size_t piece_of(std::size_t bytes) const noexcept {
    if (session_->simulated()) return session_->piece();
    const std::size_t pieces = std::clamp<std::size_t>((bytes + cached / 2) / cached, 1, 64);
    const std::size_t even = (bytes / pieces + whole) / whole * whole;
    return (std::min)(even, session_->piece());
  }

  // f(offset, length) of each of them.
  template <class Function> void cut(std::size_t bytes, Function&& f) const {
    const std::size_t piece = piece_of(bytes);
    for (std::size_t o = 0; o < bytes; o += piece) f(o, (std::min)(piece, bytes - o));
  }

  std::byte* head_of(std::size_t i) noexcept { return at(incoming_[i].head) + line_bytes - sizeof(label); }

  // Polls until `done`. The deadline counts from when something moved last.
  template <class Done>
  void wait(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Done&& done) {
    if (done()) return;
    auto moved = session_->now();
    rest pause = session_->resting();
    const options& o = session_->settings();
    bool reported = o.stall.count() <= 0 || !o.on_stall;
    bool again = false;
    while (!done()) {
      int rc = MPI_SUCCESS;
      const int n = test(rc, session_->simulated());
      if (n == 0) session_->check(rc, "MPI_Testsome", heddle::name_of(h.kind));
      for (const bool head : {true, false}) {  // heads first: they say why a payload doesn't fit
        for (int k = 0; k < n; ++k) {
          const role r = roles_[static_cast<std::size_t>(ended_[static_cast<std::size_t>(k)])];
          if ((r.what == role::head_in) != head) continue;
          const MPI_Status& status = statuses_[static_cast<std::size_t>(k)];
          if (rc != MPI_SUCCESS) {
            session_->check(rc == MPI_ERR_IN_STATUS ? status.MPI_ERROR : rc, "a message failed",
                            heddle::name_of(h.kind), r.peer);
          }
          if (head) arrive(h, r.index, in[r.index], status);
          if (r.what == role::payload_in) incoming_[r.index].came[r.half] = true;
          if (r.what == role::call_in) start(h, r.index, out);
        }
      }
      if (n > 0) {
        moved = session_->now();
        again = false;
        continue;
      }
      const auto now = session_->now();
      const bool failed = session_->look(now), is_late = now - moved > session_->deadline();
      const bool stalls = !reported && now - moved > o.stall;
      if (failed || is_late || stalls) {
        // MPI looks first and moves messages then: what that has ended is seen in another look.
        if (!std::exchange(again, true)) continue;
        if (failed) throw_failure(h);
        if (stalls) o.on_stall(o.stall_context, stalled(h, in));
        if (is_late) late(h, in);
        reported = true;
        again = false;
      }
      pause(now - moved);
    }
  }

  // A head has come: the message itself, or what it will be.
  void arrive(const header& h, std::size_t i, const incoming& m, const MPI_Status& status) {
    int length = 0;
    MPI_Get_count(&status, MPI_BYTE, &length);
    const std::byte* const head = head_of(i);
    const std::size_t expected = sizeof(label) + (m.bytes > limit() ? 0 : m.bytes);
    const label theirs = agreed(h, head, m.bytes, m.peer, static_cast<std::size_t>(length) == expected);
    progress& x = incoming_[i];
    x.known = true;
    const std::byte* const sent_along = head + sizeof(label);
    if (m.into && m.bytes <= limit() && m.bytes) std::memcpy(m.into, sent_along, m.bytes);
    const std::byte* data = static_cast<const std::byte*>(m.into);
    if (!data) data = m.bytes > limit() ? lent_[x.lent].bytes : sent_along;
    arrivals_[i] = {data, theirs.head.contributors};
  }

  // The receiver of a long message has said that it is in the call: sends it, and all others to it.
  void start(const header& h, std::size_t first, std::span<const outgoing> out) {
    const int peer = out[first].peer;
    agreed(h, at(outgoing_[first].call), out[first].bytes, peer, true);
    auto held = session_->enter();
    with(peer).ready = true;
    for (std::size_t i = first; i < out.size(); ++i) {
      if (out[i].peer == peer && out[i].bytes > limit() && !outgoing_[i].started) send_payload(h, i, out[i]);
    }
  }

  // What a peer says about a message; it must be the same.
  label agreed(const header& h, const std::byte* said, std::size_t bytes, int peer, bool fits) {
    label theirs;
    std::memcpy(&theirs, said, sizeof theirs);
    if (theirs.head.matches(h) && theirs.bytes == bytes && fits) return theirs;
    mismatch(h, bytes, peer, theirs);
  }

  static constexpr std::size_t cached = 393216, whole = 64 * 3 * 5 * 7;
};

}  // namespace detail

}  // namespace mpi
}  // namespace v0
}  // namespace heddle

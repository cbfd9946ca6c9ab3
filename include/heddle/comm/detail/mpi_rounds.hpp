// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <heddle/comm/detail/mpi_session.hpp>

#include <memory>
#include <span>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace mpi {
namespace detail {

// The rounds of one communicator: what is posted, what has come, and how to leave a round that fails.
class rounds {
 public:
  /// This rank, 0 .. size() - 1.
  int rank() const noexcept { return session_->rank(); }
  /// Number of ranks.
  int size() const noexcept { return session_->size(); }

  // One round; see the communicator concept.
  template <class Apply>
  void run(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    session_->require_thread();
    if (session_->look(clock::now())) throw_failure(h);
    try {
      post(h, out, in);
      // Not before the peers have this rank's part under way, too: it can't begin during `apply`.
      wait(h, out, in, [this] { return arriving_ == 0 && uncalled_ == 0; });
      std::forward<Apply>(apply)(std::span<const arrival>(arrivals_));
      wait(h, out, in, [this] { return active_ == 0; });
    } catch (const std::exception& e) {
      retreat(e.what(), out, in);
      throw;
    } catch (...) {
      retreat("an exception that is not a std::exception", out, in);
      throw;
    }
  }

 protected:
  rounds(std::shared_ptr<session> s, int channel) : session_(std::move(s)), channel_(channel) {}

  [[noreturn]] void throw_failure(const header& h) const {
    throw comm_error(heddle::name_of(h.kind), rank(), session_->failed(), session_->failure());
  }

  std::shared_ptr<session> session_;
  int channel_;

 private:
  static constexpr std::size_t line_bytes = sizeof(line), carried = 4000, none = ~std::size_t{0};

  // What a request is about: the message `index` of `in` for the first three, of `out` for the others.
  struct role {
    enum kind : std::uint8_t { head_in, payload_in, call_out, head_out, call_in, payload_out } what;
    std::size_t index;
    bool arrives() const noexcept { return what <= payload_in; }
    bool concerns_incoming() const noexcept { return what <= call_out; }
    bool of_caller() const noexcept { return what == payload_in || what == payload_out; }
  };
  // A message to receive or send. Its head is at `head` in the memory of the round, and `lent` is where the bytes go
  // that `apply` shall only see. Long ones of one peer are called for and sent in order: `before` is the one before,
  // `ordinal` its number.
  struct progress {
    std::size_t head = 0, lent = 0, before = none, ordinal = 0, missing = 1;
    bool posted = false, known = false, started = false;  // known: head or call has come; started: called for, or sent
  };
  enum tag : int { head_tag, call_tag, payload_tag, decline_tag };

  int tag_of(tag t) const noexcept { return 4 * channel_ + t; }
  std::byte* at(std::size_t first) noexcept { return memory_[first].bytes; }
  std::size_t limit() const noexcept { return (std::min)(carried, session_->piece()); }
  static std::size_t lines(std::size_t bytes) noexcept { return (bytes + line_bytes - 1) / line_bytes; }

  void post(const header& h, std::span<const outgoing> out, std::span<const incoming> in) {
    requests_.clear();
    roles_.clear();
    arriving_ = active_ = uncalled_ = 0;
    incoming_.assign(in.size(), {});
    outgoing_.assign(out.size(), {});
    arrivals_.assign(in.size(), {nullptr, 1});
    for (const outgoing& m : out) require_peer(m.peer);
    for (const incoming& m : in) require_peer(m.peer);
    // Memory of the round, all of it before anything is posted. A head is received where what follows it is aligned.
    std::size_t used = 0;
    const auto take = [&](std::size_t bytes) { return std::exchange(used, used + lines(bytes)); };
    last_.assign(static_cast<std::size_t>(size()), none);
    for (std::size_t i = 0; i < in.size(); ++i) {
      incoming_[i].head = take(line_bytes + limit());
      if (in[i].bytes > limit()) follow(incoming_, i, in[i].peer);
      if (in[i].bytes > limit() && !in[i].into) incoming_[i].lent = take(in[i].bytes);
    }
    last_.assign(static_cast<std::size_t>(size()), none);
    for (std::size_t i = 0; i < out.size(); ++i) {
      outgoing_[i].head = take(sizeof(label) + (out[i].bytes > limit() ? 0 : out[i].bytes));
      if (out[i].bytes > limit()) follow(outgoing_, i, out[i].peer);
    }
    if (memory_.size() < used) memory_.resize(used);
    auto held = session_->enter();
    for (std::size_t i = 0; i < in.size(); ++i) {
      receive(h, head_of(i), sizeof(label) + limit(), in[i].peer, head_tag, {role::head_in, i});
    }
    for (std::size_t i = 0; i < out.size(); ++i) post(h, i, out[i]);
  }

  void post(const header& h, std::size_t i, const outgoing& m) {
    label head{h, m.bytes};
    head.head.contributors = m.contributors;
    std::byte* const to = at(outgoing_[i].head);
    std::memcpy(to, &head, sizeof head);
    const bool is_long = m.bytes > limit();
    if (!is_long && m.bytes) std::memcpy(to + sizeof head, m.data, m.bytes);
    if (is_long) receive(h, nullptr, 0, m.peer, call_tag, {role::call_in, i});
    outgoing_[i].posted = true;
    uncalled_ += is_long;
    send(h, to, sizeof head + (is_long ? 0 : m.bytes), m.peer, head_tag, {role::head_out, i});
  }

  // Puts a long message behind the one before it with the same peer.
  void follow(std::vector<progress>& all, std::size_t i, int peer) {
    progress& x = all[i];
    x.before = std::exchange(last_[static_cast<std::size_t>(peer)], i);
    x.ordinal = x.before == none ? 0 : all[x.before].ordinal + 1;
  }

  void require_peer(int peer) const {
    if (peer >= 0 && peer < size() && peer != rank()) return;
    throw argument_error("heddle::mpi::exchange: peer " + std::to_string(peer) + " of rank " + std::to_string(rank()) +
                         " is not one of the other " + std::to_string(size() - 1) + " ranks");
  }

  MPI_Request* request(role r) {
    requests_.push_back(MPI_REQUEST_NULL);
    roles_.push_back(r);
    ++active_;
    arriving_ += r.arrives();
    return &requests_.back();
  }

  void send(const header& h, const void* data, std::size_t bytes, int peer, tag t, role r) {
    session_->check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, peer, tag_of(t), session_->comm(), request(r)),
                    "MPI_Isend", heddle::name_of(h.kind), peer);
  }
  void receive(const header& h, void* data, std::size_t bytes, int peer, tag t, role r) {
    session_->check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, peer, tag_of(t), session_->comm(), request(r)),
                    "MPI_Irecv", heddle::name_of(h.kind), peer);
  }

  // f(offset, length) of each piece of a long message.
  template <class Function> void cut(std::size_t bytes, Function&& f) const {
    for (std::size_t o = 0; o < bytes; o += session_->piece()) f(o, (std::min)(session_->piece(), bytes - o));
  }

  std::byte* head_of(std::size_t i) noexcept { return at(incoming_[i].head) + line_bytes - sizeof(label); }

  // Looks at all requests once: how many have ended, described by ended_ and statuses_.
  int test(int& rc) {
    ended_.resize(requests_.size());
    statuses_.resize(requests_.size());
    int n = 0;
    auto held = session_->enter();
    rc = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &n, ended_.data(), statuses_.data());
    if (n == MPI_UNDEFINED) n = 0;
    for (int k = 0; k < n; ++k) {
      const role r = roles_[static_cast<std::size_t>(ended_[static_cast<std::size_t>(k)])];
      --active_;
      arriving_ -= r.arrives();
    }
    return n;
  }

  // Polls until `done`. The deadline counts from when something moved last.
  template <class Done>
  void wait(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Done&& done) {
    if (done()) return;
    auto moved = clock::now();
    while (!done()) {
      int rc = MPI_SUCCESS;
      const int n = test(rc);
      if (n == 0) session_->check(rc, "MPI_Testsome", heddle::name_of(h.kind));
      bool known = false;
      for (int k = 0; k < n; ++k) {
        const role r = roles_[static_cast<std::size_t>(ended_[static_cast<std::size_t>(k)])];
        const MPI_Status& status = statuses_[static_cast<std::size_t>(k)];
        if (rc != MPI_SUCCESS) {
          session_->check(rc == MPI_ERR_IN_STATUS ? status.MPI_ERROR : rc, "a message failed", heddle::name_of(h.kind),
                          r.concerns_incoming() ? in[r.index].peer : out[r.index].peer);
        }
        if (r.what == role::head_in) arrive(h, r.index, in[r.index], status);
        if (r.what == role::payload_in) --incoming_[r.index].missing;
        if (r.what == role::call_in) outgoing_[r.index].known = true;
        known |= r.what == role::head_in || r.what == role::call_in;
      }
      if (known) start(h, out, in);
      if (n > 0) {
        moved = clock::now();
        continue;
      }
      const auto now = clock::now();
      if (session_->look(now)) throw_failure(h);
      if (now - moved > session_->deadline()) late(h, out, in);
      rest(now - moved);
    }
  }

  // A head has come: the message itself, or what it will be.
  void arrive(const header& h, std::size_t i, const incoming& m, const MPI_Status& status) {
    int length = 0;
    MPI_Get_count(&status, MPI_BYTE, &length);
    const std::byte* const head = head_of(i);
    label theirs;
    std::memcpy(&theirs, head, sizeof theirs);
    const std::size_t expected = sizeof theirs + (m.bytes > limit() ? 0 : m.bytes);
    if (!theirs.head.matches(h) || theirs.bytes != m.bytes || static_cast<std::size_t>(length) != expected)
      mismatch(h, m.bytes, m.peer, theirs);
    progress& x = incoming_[i];
    x.known = true;
    --x.missing;
    const std::byte* data = m.bytes > limit() ? at(x.lent) : head + sizeof theirs;
    if (m.into) {
      if (m.bytes <= limit() && m.bytes) std::memcpy(m.into, data, m.bytes);
      data = static_cast<const std::byte*>(m.into);
    }
    arrivals_[i] = {data, theirs.head.contributors};
  }

  // Calls for the long messages whose heads have come, and sends those that have been called for.
  void start(const header& h, std::span<const outgoing> out, std::span<const incoming> in) {
    auto held = session_->enter();
    const auto due = [](const std::vector<progress>& all, std::size_t i) {
      const progress& x = all[i];
      return x.known && !x.started && (x.before == none || all[x.before].started);
    };
    for (std::size_t i = 0; i < in.size(); ++i) {
      const incoming& m = in[i];
      if (m.bytes <= limit() || !due(incoming_, i)) continue;
      std::byte* const to = m.into ? static_cast<std::byte*>(m.into) : at(incoming_[i].lent);
      cut(m.bytes, [&](std::size_t offset, std::size_t length) {
        receive(h, to + offset, length, m.peer, payload_tag, {role::payload_in, i});
        ++incoming_[i].missing;
      });
      incoming_[i].started = true;
      send(h, nullptr, 0, m.peer, call_tag, {role::call_out, i});
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (!due(outgoing_, i)) continue;
      outgoing_[i].started = true;
      --uncalled_;
      cut(out[i].bytes, [&](std::size_t offset, std::size_t length) {
        send(h, static_cast<const std::byte*>(out[i].data) + offset, length, out[i].peer, payload_tag,
             {role::payload_out, i});
      });
    }
  }

  [[noreturn]] void mismatch(const header& h, std::size_t bytes, int peer, const label& theirs) {
    const std::string text = "calls differ: rank " + std::to_string(rank()) + " is in " +
                             describe(h, bytes) + ", rank " + std::to_string(peer) + " is in " +
                             describe(theirs.head, static_cast<std::size_t>(theirs.bytes));
    session_->fail(rank(), text);
    throw comm_error(heddle::name_of(h.kind), rank(), peer, text);
  }

  [[noreturn]] void late(const header& h, std::span<const outgoing> out, std::span<const incoming> in) {
    int peer = -1;
    bool there = true;
    for (std::size_t i = 0; i < in.size() && there; ++i) {
      if (peer < 0 && incoming_[i].missing) peer = in[i].peer;
      if (incoming_[i].known) continue;
      peer = in[i].peer;
      there = false;
    }
    for (std::size_t i = 0; i < requests_.size() && peer < 0; ++i) {
      if (requests_[i] == MPI_REQUEST_NULL || roles_[i].what == role::call_out) continue;
      peer = out[roles_[i].index].peer;
      there = roles_[i].what != role::call_in;
    }
    const std::string text =
        "rank " + std::to_string(peer) + " did not " + (there ? "finish " : "reach ") + describe(h, 0) +
        " of rank " + std::to_string(rank()) + " within " +
        std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(session_->deadline()).count()) + " ms";
    session_->fail(peer, text);
    throw comm_error(heddle::name_of(h.kind), rank(), peer, text);
  }

  // Tells everybody that this rank has failed, and each receiver how many long messages to it have begun. Then waits
  // until MPI holds no memory of the caller: what has begun arrives, since both sides stay in the call until then, and
  // where a sender says that it won't begin, the receive is withdrawn.
  void retreat(const char* why, std::span<const outgoing> out, std::span<const incoming> in) noexcept {
    session& s = *session_;
    s.fail(rank(), "an exchange of rank " + std::to_string(rank()) + " failed: " + why);
    const auto end = clock::now() + s.deadline();
    std::vector<std::uint64_t> begun(static_cast<std::size_t>(size()));
    std::vector<MPI_Request> told;
    {
      auto held = s.enter();
      for (std::size_t i = 0; i < requests_.size(); ++i) {
        if (requests_[i] == MPI_REQUEST_NULL) continue;
        if (roles_[i].what == role::head_in || roles_[i].what == role::call_in) MPI_Cancel(&requests_[i]);
      }
      for (const progress& x : outgoing_) {
        if (x.started) ++begun[static_cast<std::size_t>(out[static_cast<std::size_t>(&x - outgoing_.data())].peer)];
      }
      for (std::size_t i = 0; i < outgoing_.size(); ++i) {  // once per peer: where the first that won't begin is
        const progress& x = outgoing_[i];
        if (!x.posted || x.started || out[i].bytes <= limit()) continue;
        std::uint64_t& count = begun[static_cast<std::size_t>(out[i].peer)];
        if (x.ordinal != count) continue;
        MPI_Isend(&count, sizeof count, MPI_BYTE, out[i].peer, tag_of(decline_tag), s.comm(),
                  &told.emplace_back(MPI_REQUEST_NULL));
      }
    }
    const auto pending = [&](auto&& which) {
      for (std::size_t i = 0; i < requests_.size(); ++i) {
        if (requests_[i] != MPI_REQUEST_NULL && which(roles_[i])) return true;
      }
      return false;
    };
    auto moved = clock::now();
    while (pending([](role r) { return r.of_caller(); })) {
      int rc = MPI_SUCCESS;
      const int n = test(rc);
      int asked = -1;
      for (std::size_t i = 0; i < requests_.size(); ++i) {
        if (requests_[i] == MPI_REQUEST_NULL || roles_[i].what != role::payload_in) continue;
        const int peer = in[roles_[i].index].peer;
        if (peer != std::exchange(asked, peer)) heed(peer, in);
      }
      const auto now = clock::now();
      if (n > 0) moved = now;
      if (now > end) MPI_Abort(s.comm(), 1);
      rest(now - moved);
    }
    // What is left are short messages, in memory of this object: it stays for good unless they are through.
    int rc = MPI_SUCCESS, done = 0;
    for (int i = 0; i < 1000 && !done; ++i) {
      test(rc);
      auto held = s.enter();
      MPI_Testall(static_cast<int>(told.size()), told.data(), &done, MPI_STATUSES_IGNORE);
      done = done && !pending([](role) { return true; });
    }
    auto held = s.enter();
    requests_.insert(requests_.end(), told.begin(), told.end());
    for (MPI_Request& r : requests_) {
      if (r != MPI_REQUEST_NULL) MPI_Request_free(&r);
    }
    if (!done) new std::pair(std::move(memory_), std::move(begun));
    memory_ = {};
    requests_.clear();
    roles_.clear();
    arriving_ = active_ = uncalled_ = 0;
  }

  // In a call that has failed: if the peer says that it won't begin some messages, withdraws what they were to fill.
  void heed(int peer, std::span<const incoming> in) {
    auto held = session_->enter();
    int found = 0;
    std::uint64_t begun = 0;
    MPI_Iprobe(peer, tag_of(decline_tag), session_->comm(), &found, MPI_STATUS_IGNORE);
    if (!found) return;
    MPI_Recv(&begun, sizeof begun, MPI_BYTE, peer, tag_of(decline_tag), session_->comm(), MPI_STATUS_IGNORE);
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL || roles_[i].what != role::payload_in) continue;
      const std::size_t k = roles_[i].index;
      if (in[k].peer == peer && incoming_[k].ordinal >= begun) MPI_Cancel(&requests_[i]);
    }
  }

  std::vector<line> memory_;
  std::vector<progress> incoming_, outgoing_;
  std::vector<arrival> arrivals_;
  std::vector<std::size_t> last_;  // long message of each peer
  std::vector<MPI_Request> requests_;
  std::vector<role> roles_;
  std::vector<int> ended_;
  std::vector<MPI_Status> statuses_;
  std::size_t arriving_ = 0, active_ = 0, uncalled_ = 0;  // requests of what arrives; all; long messages not begun
};

}  // namespace detail

}  // namespace mpi
}  // namespace v0
}  // namespace heddle

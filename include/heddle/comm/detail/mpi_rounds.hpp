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
    if (channel_->left) throw_failure(h);
    channel_->inside = true;
    try {
      keep_what_stays();
      if (session_->look(session_->now())) throw_failure(h);
      channel_->enter(h);
      post(h, out, in);
      // Not before the peers have this rank's part under way, too: it can't begin during `apply`.
      wait(h, out, in, [this] { return arriving_ == 0 && uncalled_ == 0 && staying_ == 0; });
      std::forward<Apply>(apply)(std::span<const arrival>(arrivals_));
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
  rounds(std::shared_ptr<session> s, int number, MPI_Comm own)
      : session_(std::move(s)), channel_(std::make_shared<channel>(number, session_->size(), own)) {}

  // Marks the failure. A thread that is in an exchange hears of it there; one that begins later sees it.
  void fail(const std::string& text) {
    session_->fail(rank(), text);
    if (!channel_->inside) say_last_word();
  }

  // After a failure: tells everybody how many payloads to it this rank has begun; it begins no more.
  void say_last_word() {
    if (channel_->told.exchange(true)) return;
    session_->tell(tag_of(last_tag), [this](int peer) {
      std::string word(sizeof(std::uint64_t), '\0');
      std::memcpy(word.data(), &with(peer).sent, word.size());
      return word;
    });
  }

  [[noreturn]] void throw_failure(const header& h) const {
    throw comm_error(heddle::name_of(h.kind), rank(), session_->failed(), session_->failure());
  }

  std::shared_ptr<session> session_;
  std::shared_ptr<channel> channel_;

 private:
  static constexpr std::size_t line_bytes = sizeof(line), carried = 32768, none = ~std::size_t{0};

  // A message to receive or send. In the memory of the round are its head, the receiver's call, if it is the first long
  // one of a peer, and the bytes that `apply` shall only see.
  struct progress {
    std::size_t head = 0, call = none, lent = 0, missing = 1;
    bool known = false, started = false;  // its head has come; it is being sent
  };
  enum tag : int { head_tag, call_tag, payload_tag, last_tag };

  int tag_of(tag t) const noexcept { return 4 * channel_->number + t; }
  std::byte* at(std::size_t first) noexcept { return memory_[first].bytes; }
  std::size_t limit() const noexcept { return (std::min)(carried, session_->piece()); }
  static std::size_t lines(std::size_t bytes) noexcept { return (bytes + line_bytes - 1) / line_bytes; }
  static void grow(std::vector<line>& v, std::size_t n) {
    if (v.size() >= n) return;
    v.clear();  // or it would be copied
    v.resize(n);
  }

  partner& with(int peer) noexcept { return channel_->partners[static_cast<std::size_t>(peer)]; }

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

  void post(const header& h, std::span<const outgoing> out, std::span<const incoming> in) {
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
      if (!in[i].into) x.lent = std::exchange(lent, lent + lines(in[i].bytes));
      if (!std::exchange(channel_->in_call(in[i].peer).called, true)) x.call = take(sizeof(label));
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      progress& x = outgoing_[i];
      x.head = take(sizeof(label) + (out[i].bytes > limit() ? 0 : out[i].bytes));
      if (out[i].bytes <= limit()) continue;
      if (!std::exchange(channel_->in_call(out[i].peer).listening, true)) x.call = take(sizeof(label));
    }
    grow(memory_, used);
    grow(lent_, lent);
    auto held = session_->enter();
    for (std::size_t i = 0; i < in.size(); ++i) post(h, i, in[i]);
    for (std::size_t i = 0; i < out.size(); ++i) post(h, i, out[i]);
  }

  void post(const header& h, std::size_t i, const incoming& m) {
    progress& x = incoming_[i];
    receive(h, head_of(i), sizeof(label) + limit(), head_tag, {role::head_in, i, m.peer});
    if (m.bytes <= limit()) return;
    std::byte* const to = m.into ? static_cast<std::byte*>(m.into) : lent_[x.lent].bytes;
    with(m.peer).sends = true;
    cut(m.bytes, [&](std::size_t offset, std::size_t length) {
      receive(h, to + offset, length, payload_tag, {role::payload_in, i, m.peer});
      ++x.missing;
    });
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

  MPI_Request* request(role r) {
    requests_.push_back(MPI_REQUEST_NULL);
    roles_.push_back(r);
    active_ += !r.stays;
    arriving_ += r.arrives();
    return &requests_.back();
  }

  void send(const header& h, const void* data, std::size_t bytes, tag t, role r) {
    session_->check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, r.peer, tag_of(t), session_->comm(), request(r)),
                    "MPI_Isend", heddle::name_of(h.kind), r.peer);
  }
  void receive(const header& h, void* data, std::size_t bytes, tag t, role r) {
    session_->check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, r.peer, tag_of(t), session_->comm(), request(r)),
                    "MPI_Irecv", heddle::name_of(h.kind), r.peer);
  }

  // f(offset, length) of each piece of a long message.
  template <class Function> void cut(std::size_t bytes, Function&& f) const {
    for (std::size_t o = 0; o < bytes; o += session_->piece()) f(o, (std::min)(session_->piece(), bytes - o));
  }

  std::byte* head_of(std::size_t i) noexcept { return at(incoming_[i].head) + line_bytes - sizeof(label); }

  // Looks at all requests once: how many have ended, described by ended_ and statuses_. Or waits for one of them.
  int test(int& rc, bool waits = false) {
    ended_.resize(requests_.size());
    statuses_.resize(requests_.size());
    int n = 0;
    auto held = session_->enter();
    const int all = static_cast<int>(requests_.size());
    if (waits) {
      rc = MPI_Waitany(all, requests_.data(), ended_.data(), statuses_.data());
      n = ended_[0] != MPI_UNDEFINED;
    } else {
      rc = MPI_Testsome(all, requests_.data(), &n, ended_.data(), statuses_.data());
    }
    if (n == MPI_UNDEFINED) n = 0;
    for (int k = 0; k < n; ++k) {
      const auto i = static_cast<std::size_t>(ended_[static_cast<std::size_t>(k)]);
      const role r = roles_[i];
      if (i < old_)
        --staying_;
      else
        active_ -= !r.stays;
      arriving_ -= r.arrives();
      int withdrawn = 0;
      if (r.what == role::payload_in) MPI_Test_cancelled(&statuses_[static_cast<std::size_t>(k)], &withdrawn);
      if (r.what == role::payload_in && !withdrawn) ++with(r.peer).received;
    }
    return n;
  }

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
          if (r.what == role::payload_in) --incoming_[r.index].missing;
          if (r.what == role::call_in) start(h, r.index, out);
        }
      }
      if (n > 0) {
        moved = session_->now();
        again = false;
        continue;
      }
      again = !again;
      if (again) continue;  // MPI looks first and moves messages then: what that has ended is seen now
      const auto now = session_->now();
      if (session_->look(now)) throw_failure(h);
      if (!reported && now - moved > o.stall) {
        reported = true;
        o.on_stall(o.stall_context, stalled(h, in));
      }
      if (now - moved > session_->deadline()) late(h, in);
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
    --x.missing;
    const std::byte* data = m.bytes > limit() ? lent_[x.lent].bytes : head + sizeof(label);
    if (m.into) {
      if (m.bytes <= limit() && m.bytes) std::memcpy(m.into, data, m.bytes);
      data = static_cast<const std::byte*>(m.into);
    }
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

  [[noreturn]] void mismatch(const header& h, std::size_t bytes, int peer, const label& theirs) {
    const std::string text = "calls differ: rank " + std::to_string(rank()) + " is in " +
                             describe(h, bytes) + ", rank " + std::to_string(peer) + " is in " +
                             describe(theirs.head, static_cast<std::size_t>(theirs.bytes));
    session_->fail(rank(), text);
    throw comm_error(heddle::name_of(h.kind), rank(), peer, text);
  }

  // The ranks that this round waits for: those of which nothing has come, else those with whom something isn't through.
  std::vector<int> missing(std::span<const incoming> in, bool& there) const {
    std::vector<int> ranks;
    const auto add = [&](auto&& which) {
      for (std::size_t i = 0; i < requests_.size(); ++i) {
        if (requests_[i] != MPI_REQUEST_NULL && which(roles_[i].what)) ranks.push_back(roles_[i].peer);
      }
    };
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (!incoming_[i].known) ranks.push_back(in[i].peer);
    }
    if (ranks.empty()) add([](auto what) { return what == role::call_in; });
    there = ranks.empty();
    if (there) add([](auto what) { return what != role::call_out; });
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  std::string stalled(const header& h, std::span<const incoming> in) const {
    std::string text = "rank " + std::to_string(rank()) + " has waited in " + describe(h) + " for more than " +
                       milliseconds(session_->settings().stall) + " for ";
    bool there = false;
    const char* between = "rank ";
    for (const int r : missing(in, there)) text += std::exchange(between, ", ") + std::to_string(r);
    return there ? text + " to finish" : text;
  }

  [[noreturn]] void late(const header& h, std::span<const incoming> in) {
    bool there = false;
    const std::vector<int> ranks = missing(in, there);
    const int peer = ranks.empty() ? -1 : ranks.front();
    const std::string text = "rank " + std::to_string(peer) + " did not " + (there ? "finish " : "reach ") +
                             describe(h, 0) + " of rank " + std::to_string(rank()) + " within " +
                             milliseconds(session_->deadline());
    session_->fail(peer, text);
    throw comm_error(heddle::name_of(h.kind), rank(), peer, text);
  }

  // Tells everybody that this rank has failed, and how many payloads to it have begun: its last word. Then waits until
  // MPI holds no memory of the caller and nobody's payload waits for this rank: what has begun arrives, since both
  // sides stay until then; what has not, is withdrawn. A peer that is in no call gives its word in its next; it is
  // waited for no longer than `patience`, since nothing of it can be under way.
  void retreat(const char* why) noexcept {
    session& s = *session_;
    s.fail(rank(), "an exchange of rank " + std::to_string(rank()) + " failed: " + why);
    const auto start = session_->now();
    const auto patience = (std::min<clock::duration>)(s.deadline(), std::chrono::seconds(1));
    {
      auto held = s.enter();
      for (std::size_t i = 0; i < requests_.size(); ++i) {
        if (requests_[i] == MPI_REQUEST_NULL) continue;
        if (roles_[i].what == role::head_in || roles_[i].what == role::call_in) MPI_Cancel(&requests_[i]);
      }
    }
    say_last_word();
    std::vector<std::vector<std::byte>> sunk;
    const auto pending = [&](auto&& which) {
      for (std::size_t i = 0; i < requests_.size(); ++i) {
        if (requests_[i] != MPI_REQUEST_NULL && which(roles_[i])) return true;
      }
      return false;
    };
    rest pause = s.resting();
    for (auto moved = start;;) {
      int rc = MPI_SUCCESS;
      const int n = test(rc);
      const auto now = session_->now();
      if (n > 0) moved = now;
      bool waits = false;
      for (int peer = 0; peer < size(); ++peer) {
        if (with(peer).sends) waits |= heed(peer, now - start > patience, sunk);
      }
      if (!waits && !pending([](role r) { return r.of_caller(); })) break;
      if (now - start > s.deadline() + patience) MPI_Abort(s.comm(), 1);
      pause(now - moved);
    }
    // What is left are short messages, in memory of this object: it stays for good unless they are through.
    int rc = MPI_SUCCESS;
    const auto any = [&] { return pending([](role) { return true; }); };
    for (int i = 0; i < 1000 && any(); ++i) test(rc);
    auto held = s.enter();
    if (any()) {
      new auto(std::move(memory_));
      new auto(std::move(memory_before_));
    }
    for (MPI_Request& r : requests_) {
      if (r != MPI_REQUEST_NULL) MPI_Request_free(&r);
    }
    memory_ = memory_before_ = {};
    requests_.clear();
    roles_.clear();
    channel_->left = true;
  }

  // In a call that has failed: whether payloads of the peer may still come. Those without a receive go into `sunk`;
  // receives for which there is none, as the peer says or because it has said nothing when `late`, are withdrawn.
  bool heed(int peer, bool late, std::vector<std::vector<std::byte>>& sunk) {
    auto held = session_->enter();
    partner& p = with(peer);
    MPI_Status status;
    int found = 0;
    if (p.last_word == partner::none) MPI_Iprobe(peer, tag_of(last_tag), session_->comm(), &found, MPI_STATUS_IGNORE);
    if (found) {
      MPI_Recv(&p.last_word, sizeof p.last_word, MPI_BYTE, peer, tag_of(last_tag), session_->comm(),
               MPI_STATUS_IGNORE);
    }
    if (p.last_word == partner::none && !late) return true;
    const std::uint64_t due = p.last_word == partner::none ? 0 : p.last_word - p.received;
    std::uint64_t posted = 0;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL || roles_[i].what != role::payload_in || roles_[i].peer != peer) continue;
      if (posted == due) MPI_Cancel(&requests_[i]);
      else ++posted;
    }
    found = 0;
    if (posted < due) MPI_Iprobe(peer, tag_of(payload_tag), session_->comm(), &found, &status);
    if (found) {
      int length = 0;
      MPI_Get_count(&status, MPI_BYTE, &length);
      void* const to = sunk.emplace_back(static_cast<std::size_t>(length)).data();
      MPI_Irecv(to, length, MPI_BYTE, peer, tag_of(payload_tag), session_->comm(),
                request({role::payload_in, 0, peer}));
    }
    return due > 0;
  }

  // Heads and what travels behind them, of this round and of the one before; what payloads are received into.
  std::vector<line> memory_, memory_before_, lent_;
  std::vector<progress> incoming_, outgoing_;
  std::vector<arrival> arrivals_;
  std::vector<MPI_Request> requests_;
  std::vector<role> roles_;
  std::vector<int> ended_;
  std::vector<MPI_Status> statuses_;
  std::size_t arriving_ = 0, active_ = 0, uncalled_ = 0;  // requests of what arrives; all that end in this round; long
                                                          // messages not begun
  std::size_t old_ = 0, staying_ = 0;  // the first requests are of the round before; how many of those go on
};

}  // namespace detail

}  // namespace mpi
}  // namespace v0
}  // namespace heddle

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

// What is under way on one communicator, whom it waits for, and how to leave a round that fails.
class pending {
 public:
  /// This rank, 0 .. size() - 1.
  int rank() const noexcept { return session_->rank(); }
  /// Number of ranks.
  int size() const noexcept { return session_->size(); }

 protected:
  pending(std::shared_ptr<session> s, int number, MPI_Comm own)
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

  static constexpr std::size_t line_bytes = sizeof(line), carried = 32768, none = ~std::size_t{0};

  // A message to receive or send. In the memory of the round are its head, the receiver's call, if it is the first long
  // one of a peer, and the bytes that `apply` shall only see.
  struct progress {
    std::size_t head = 0, call = none, lent = 0;
    bool known = false, started = false;  // its head has come; it is being sent
    bool came[2] = {};                    // in parts: what is in each half of `lent`
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
    const auto under_way = [&](auto&& which) {
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
      if (!waits && !under_way([](role r) { return r.of_caller(); })) break;
      if (now - start > s.deadline() + patience) s.end_job();
      pause(now - moved);
    }
    // What is left are short messages, in memory of this object: it stays for good unless they are through.
    int rc = MPI_SUCCESS;
    const auto any = [&] { return under_way([](role) { return true; }); };
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

  std::shared_ptr<session> session_;
  std::shared_ptr<channel> channel_;

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

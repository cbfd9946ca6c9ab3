// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/basic_messenger.hpp>
#include <heddle/comm/detail/tell_ranks.hpp>

#include <atomic>
#include <memory>

namespace heddle {
inline namespace v0 {
namespace threads {

namespace detail {
// Where packets for one rank wait, in the life that a messenger has.
class mailbox {
 public:
  void put(payload&& p) {
    {
      std::lock_guard lock(mutex_);
      packets_.push_back(std::move(p));
      if (sleepers_ == 0) return;
    }
    wake_.notify_one();
  }
  void take(std::deque<payload>& into) {
    std::lock_guard lock(mutex_);
    packets_.swap(into);
    woken_ = false;
  }
  void wait(std::chrono::nanoseconds longest) {
    std::unique_lock lock(mutex_);
    ++sleepers_;
    // A system-clock wait, since ThreadSanitizer knows it; who waits looks at the steady clock afterwards.
    wake_.wait_until(lock, std::chrono::system_clock::now() + longest, [this] { return woken_ || !packets_.empty(); });
    --sleepers_;
  }
  void wake() {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    wake_.notify_all();
  }
  std::atomic<bool> cut{false};  // as if its process were dead

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<payload> packets_;
  int sleepers_ = 0;
  bool woken_ = false;
};
}  // namespace detail

/// @brief Where the messengers of one process meet. Copies are the same place.
class meeting_place {
 public:
  /// @param ranks How many ranks there can be, 1 or above. Throws: argument_error.
  explicit meeting_place(int ranks) {
    if (ranks < 1)
      throw argument_error("heddle::threads::meeting_place: ranks " + std::to_string(ranks) +
                           "; allowed is 1 and above");
    state_ = std::make_shared<state>(static_cast<std::size_t>(ranks));
  }
  /// How many ranks there can be.
  int size() const noexcept { return static_cast<int>(state_->boxes.size()); }

  /// @brief Cuts the messenger that has this rank off, as if its process had been killed: nothing comes from it or to
  /// it any more, and peers find out by its silence. A new messenger of this rank is a restarted process.
  void kill(int rank) {
    std::lock_guard lock(state_->mutex);
    if (const auto& box = state_->boxes.at(static_cast<std::size_t>(rank))) box->cut = true;
  }

 private:
  friend class transport;
  struct state {
    explicit state(std::size_t ranks) : boxes(ranks) {}
    std::mutex mutex;
    std::vector<std::shared_ptr<detail::mailbox>> boxes;
  };
  std::shared_ptr<state> state_;
};

/// @brief Carries packets between threads: a pointer changes hands.
class transport {
 public:
  /// @param place Where the others are. @param rank This rank; a messenger that had it is cut off.
  transport(meeting_place place, int rank) : place_(std::move(place)), rank_(rank) {
    if (rank < 0 || rank >= size()) {
      throw argument_error("heddle::threads::messenger: rank " + std::to_string(rank) + "; allowed is 0 to " +
                           std::to_string(size() - 1));
    }
    std::lock_guard lock(place_.state_->mutex);
    auto& mine = place_.state_->boxes[static_cast<std::size_t>(rank)];
    if (mine) mine->cut = true;
    mine = box_;
    boxes_.resize(place_.state_->boxes.size());
  }
  /// This rank.
  int rank() const noexcept { return rank_; }
  /// How many ranks there can be.
  int size() const noexcept { return place_.size(); }
  /// Nothing: ranks are enough.
  std::string where() const { return {}; }
  /// Nothing to do.
  void open(int, std::string_view) {}
  /// Forgets the life that had the rank.
  void close(int peer) { boxes_[static_cast<std::size_t>(peer)].reset(); }
  /// Hands a packet over. @param peer To whom. @param p The packet.
  bool put(int peer, payload& p) {
    if (box_->cut) return false;
    auto& box = boxes_[static_cast<std::size_t>(peer)];
    if (!box || box->cut) {
      std::lock_guard lock(place_.state_->mutex);
      box = place_.state_->boxes[static_cast<std::size_t>(peer)];
    }
    if (!box || box->cut) return false;
    box->put(std::move(p));
    return true;
  }
  /// Takes the next packet. @param p Where to.
  bool get(payload& p) {
    if (box_->cut) return false;
    if (taken_.empty()) box_->take(taken_);
    if (taken_.empty()) return false;
    p = std::move(taken_.front());
    taken_.pop_front();
    return true;
  }
  /// Waits for a packet. @param longest At most so long.
  void wait(std::chrono::nanoseconds longest) { box_->wait(longest); }
  /// Ends a wait.
  void wake() { box_->wake(); }

 private:
  meeting_place place_;
  int rank_;
  std::shared_ptr<detail::mailbox> box_ = std::make_shared<detail::mailbox>();
  std::vector<std::shared_ptr<detail::mailbox>> boxes_;  // of the peers, as last seen
  std::deque<payload> taken_;
};

/// @brief A messenger between threads of one process. A message isn't copied. What was sent to a peer is lost only
/// where a life ends.
class messenger : public basic_messenger<transport> {
 public:
  /// @param o Settings. @param place Where the others are. @param rank This rank; a messenger that had it is cut off.
  /// Throws: argument_error.
  messenger(const messenger_options& o, meeting_place place, int rank) : basic_messenger(o, std::move(place), rank) {}
};
static_assert(heddle::messenger<messenger>);

/// @brief Opens messengers between the ranks of a communicator that are threads of one process.
struct connection {
  messenger_options options{};  ///< Of every messenger.

  /// @brief A messenger with this rank's number. Collective.
  /// @param comm Any communicator whose ranks are threads of one process.
  /// Throws: comm_error if a rank is another process.
  template <heddle::communicator Comm> std::unique_ptr<messenger> open(Comm& comm) const {
    struct record {
      std::uint64_t process, place;
    };
    // The last one who has a copy of rank 0's place frees it: rank 0 itself may have failed by then.
    struct shared_place {
      meeting_place place;
      std::atomic<int> waiting;
    };
    shared_place* const made = comm.rank() == 0 ? new shared_place{meeting_place(comm.size()), comm.size()} : nullptr;
    const record mine{heddle::detail::process_number(), reinterpret_cast<std::uintptr_t>(made)};
    const std::vector<record> all = heddle::detail::tell_ranks(comm, mine);
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].process == mine.process) continue;
      delete made;  // all throw
      throw comm_error("threads::connection", comm.rank(), static_cast<int>(r),
                       "it is another process; messengers between processes are opened by mpi::connection or "
                       "zmq::connection");
    }
    auto* const shared = reinterpret_cast<shared_place*>(all[0].place);
    const meeting_place place = shared->place;
    if (--shared->waiting == 0) delete shared;
    auto opened = std::make_unique<messenger>(options, place, comm.rank());
    heddle::detail::tell_ranks(comm, std::uint8_t{1});  // all can be reached
    return opened;
  }
};

}  // namespace threads
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/basic_messenger.hpp>
#include <heddle/comm/detail/mpi_session.hpp>

#include <memory>

namespace heddle {
inline namespace v0 {
namespace mpi {

/// @brief Settings of how a messenger waits for MPI.
struct messenger_progress {
  /// How long a wait looks again and again, before it sleeps 50 us between two looks.
  std::chrono::nanoseconds spin{200'000};
};

/// @brief Carries packets between MPI processes, point to point. A packet is one MPI message, on a duplicate of the
/// user's communicator.
class transport {
 public:
  /// @brief Collective, as MPI_Comm_dup is; afterwards nothing is.
  /// @param user An intra-communicator; not used any more afterwards. @param p How to wait.
  /// Throws: argument_error if MPI isn't running or `user` isn't an intra-communicator; comm_error with MPI's text.
  explicit transport(MPI_Comm user, const messenger_progress& p = {}) {
    if (!detail::initialised() || detail::finalised())
      throw argument_error("heddle::mpi::messenger: MPI isn't running");
    int between = 0;
    if (user != MPI_COMM_NULL) MPI_Comm_test_inter(user, &between);
    if (user == MPI_COMM_NULL || between) throw argument_error("heddle::mpi::messenger: needs an intra-communicator");
    spin_ = p.spin;
    check(MPI_Comm_dup(user, &comm_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    sending_.resize(static_cast<std::size_t>(size_));
  }
  transport(const transport&) = delete;
  transport& operator=(const transport&) = delete;
  ~transport() {
    if (detail::finalised()) return;
    // What is under way leaves, if its peer lives; the communicator stays until MPI_Finalize, since others may send
    // yet.
    const auto start = detail::clock::now();
    while (reap() && detail::clock::now() - start < std::chrono::seconds(1)) std::this_thread::yield();
    for (auto& queue : sending_) leave(queue);
    leave(coming_);
  }

  /// This rank.
  int rank() const noexcept { return rank_; }
  /// Number of ranks.
  int size() const noexcept { return size_; }
  /// Nothing: ranks are enough.
  std::string where() const { return {}; }
  /// Nothing to do.
  void open(int, std::string_view) {}
  /// What is under way to or from a peer stays in memory for good: MPI can't take it back. @param peer Which.
  void close(int peer) {
    leave(sending_[static_cast<std::size_t>(peer)]);
    std::deque<transfer> gone;
    for (transfer& t : coming_) {
      if (t.peer == peer) gone.push_back(std::move(t));
    }
    std::erase_if(coming_, [&](const transfer& t) { return t.peer == peer; });
    leave(gone);
  }
  /// @brief Begins to send a packet. @param peer To whom. @param p The packet.
  /// Throws: argument_error if it is longer than MPI can count.
  bool put(int peer, payload& p) {
    if (detail::finalised()) return false;  // the goodbye of a messenger that outlives MPI
    const std::size_t bytes = payload::room + p.size();
    if (bytes > INT_MAX) {
      throw argument_error("heddle::mpi::messenger: a message of " + std::to_string(p.size()) +
                           " bytes; allowed is up to " + std::to_string(INT_MAX - payload::room));
    }
    auto& queue = sending_[static_cast<std::size_t>(peer)];
    while (!queue.empty() && done(queue.front())) queue.pop_front();
    MPI_Request request = MPI_REQUEST_NULL;
    if (MPI_Isend(p.head(), static_cast<int>(bytes), MPI_BYTE, peer, 0, comm_, &request) != MPI_SUCCESS) return false;
    transfer t{peer, request, std::move(p), false};
    if (!done(t)) queue.push_back(std::move(t));
    return true;
  }
  /// @brief Takes the next packet. @param p Where to.
  bool get(payload& p) {
    if (detail::finalised()) return false;
    for (;;) {
      int found = 0, bytes = 0;
      MPI_Message handle = MPI_MESSAGE_NULL;
      MPI_Status status;
      if (MPI_Improbe(MPI_ANY_SOURCE, 0, comm_, &found, &handle, &status) != MPI_SUCCESS || !found) break;
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      transfer t{status.MPI_SOURCE, MPI_REQUEST_NULL, payload(static_cast<std::size_t>(bytes) - payload::room), false};
      if (MPI_Imrecv(t.body.head(), bytes, MPI_BYTE, &handle, &t.request) != MPI_SUCCESS) continue;
      if (done(t) && coming_.empty()) return given(p, t);
      coming_.push_back(std::move(t));
      if (coming_.size() > 64) break;
    }
    // The first that is complete, and that no earlier one of the same peer waits in front of.
    for (std::size_t i = 0; i < coming_.size(); ++i) {
      transfer& t = coming_[i];
      bool first = true;
      for (std::size_t k = 0; k < i && first; ++k) first = coming_[k].peer != t.peer;
      if (!first || !done(t)) continue;
      given(p, t);
      coming_.erase(coming_.begin() + static_cast<std::ptrdiff_t>(i));
      return true;
    }
    return false;
  }
  /// @brief Rests between two looks. @param longest At most so long.
  void wait(std::chrono::nanoseconds longest) {
    const auto now = detail::clock::now();
    if (moved_.exchange(false)) idle_since_ = now.time_since_epoch().count();
    const auto idle = now.time_since_epoch() - detail::clock::duration(idle_since_.load());
    if (idle < spin_) return std::this_thread::yield();
    std::this_thread::sleep_for((std::min<std::chrono::nanoseconds>)(longest, std::chrono::microseconds(50)));
  }
  /// Nothing: waits are short.
  void wake() {}

 private:
  struct transfer {
    int peer;
    MPI_Request request;
    payload body;
    bool complete;
  };

  void check(int rc, const char* call) const {
    if (rc == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    MPI_Error_string(rc, text, &length);
    throw comm_error("mpi::messenger", rank_, -1,
                     std::string(call) + ": " + std::string(text, static_cast<std::size_t>(length)));
  }
  static bool done(transfer& t) {
    int yes = t.complete;
    if (!yes) MPI_Test(&t.request, &yes, MPI_STATUS_IGNORE);
    return t.complete = yes != 0;
  }
  bool given(payload& p, transfer& t) {
    p = std::move(t.body);
    moved_ = true;
    return true;
  }
  // Whether something is still being sent.
  bool reap() {
    bool some = false;
    for (auto& queue : sending_) {
      while (!queue.empty() && done(queue.front())) queue.pop_front();
      some |= !queue.empty();
    }
    return some;
  }
  // MPI may yet read or write these.
  static void leave(std::deque<transfer>& queue) {
    std::erase_if(queue, [](transfer& t) { return done(t); });
    if (queue.empty()) return;
    for (transfer& t : queue) MPI_Request_free(&t.request);
    [[maybe_unused]] const auto* const kept = new auto(std::move(queue));
    queue.clear();
  }

  std::chrono::nanoseconds spin_{};
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::vector<std::deque<transfer>> sending_;
  std::deque<transfer> coming_;
  std::atomic<bool> moved_{true};
  std::atomic<detail::clock::rep> idle_since_{0};
};

/// @brief A messenger between MPI processes: `mpi::messenger m(options, comm)`, collective.
///
/// A thread of its own (`messenger_options::thread`) needs MPI_THREAD_MULTIPLE, or MPI_THREAD_SERIALIZED and no other
/// use of MPI meanwhile; without it, a wait polls. MPI can't start a process again, so another life is one of the same
/// process, by `renew()`. What Open MPI 4.1 allows: by default a dead process ends the job; under
/// `mpirun --enable-recovery` survivors go on with each other, and end by `_exit`, since MPI_Finalize would wait for
/// the dead.
/// Wire:    the packet, in one MPI message. Longest: 2^31 - 65 bytes.
/// State:   the MPI communicator, and what was under way to peers that died, stay until the process ends.
class messenger : public basic_messenger<transport> {
 public:
  /// @param o Settings. @param user An intra-communicator. @param p How to wait.
  /// Throws: argument_error; thread_level_error; comm_error with MPI's text.
  messenger(const messenger_options& o, MPI_Comm user, const messenger_progress& p = {})
      : basic_messenger(checked(o), user, p) {}

 private:
  static const messenger_options& checked(const messenger_options& o) {
    if (!o.thread || !detail::initialised() || detail::finalised()) return o;
    int given = 0;
    MPI_Query_thread(&given);
    if (given < MPI_THREAD_SERIALIZED)
      throw thread_level_error(static_cast<thread_level>(given), thread_level::serialized,
                               "a messenger with a thread of its own");
    return o;
  }
};
static_assert(heddle::messenger<messenger>);

/// @brief Opens messengers between the processes of an MPI communicator, whose ranks have the same numbers in the
/// communicator that is given to open().
struct connection {
  MPI_Comm user = MPI_COMM_WORLD;  ///< An intra-communicator.
  messenger_options options{};     ///< Of every messenger.

  /// @brief A messenger with this rank's number. Collective.
  /// @param comm A communicator of the same ranks.
  /// Throws: argument_error if their numbers differ; thread_level_error below MPI_THREAD_MULTIPLE, since two threads
  /// use it; as messenger.
  template <class Comm> std::unique_ptr<messenger> open(Comm& comm) const {
    int given = 0;
    if (detail::initialised() && !detail::finalised()) MPI_Query_thread(&given);
    if (given < MPI_THREAD_MULTIPLE)
      throw thread_level_error(static_cast<thread_level>(given), thread_level::multiple, "mpi::connection");
    auto opened = std::make_unique<messenger>(options, user);
    if (opened->rank() != comm.rank() || opened->size() != comm.size())
      throw argument_error("heddle::mpi::connection: rank " + std::to_string(opened->rank()) + " of " +
                           std::to_string(opened->size()) + " is rank " + std::to_string(comm.rank()) + " of " +
                           std::to_string(comm.size()) + " in the other communicator; allowed are equal numbers");
    return opened;
  }
};

}  // namespace mpi
}  // namespace v0
}  // namespace heddle

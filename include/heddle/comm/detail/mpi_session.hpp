// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <heddle/comm/detail/mpi_options.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace mpi {

namespace detail {
using namespace heddle::detail;
using clock = std::chrono::steady_clock;

inline bool initialised() {
  int yes = 0;
  MPI_Initialized(&yes);
  return yes != 0;
}
inline bool finalised() {
  int yes = 0;
  MPI_Finalized(&yes);
  return yes != 0;
}

// What somebody who waits does between two looks: others may need the core. MPI often yields, too, so not every time.
class rest {
 public:
  explicit rest(const options& o) : options_(o) {}
  void operator()(clock::duration waited) {
    if (options_.time != time_source::steady) return;
    if (waited > options_.spin) std::this_thread::sleep_for(std::chrono::microseconds(50));
    else if (++looks_ % 8 == 0) std::this_thread::yield();
  }

 private:
  const options& options_;
  unsigned looks_ = 0;
};

// The machine of each rank: 0, 1, 2 .. in the order of their lowest ranks, from the lowest rank on the machine of each.
inline std::vector<int> numbered(const std::vector<int>& lowest) {
  std::vector<int> nodes(lowest.size());
  int seen = 0;
  for (std::size_t r = 0; r < lowest.size(); ++r) {
    const auto low = static_cast<std::size_t>(lowest[r]);
    nodes[r] = low == r ? seen++ : nodes[low];
  }
  return nodes;
}

// How many ranks each machine has, if they are consecutive ones and as many on each, fewer on the last at most; else 0.
inline int per_node(const std::vector<int>& nodes) noexcept {
  std::size_t n = 0;
  while (n < nodes.size() && nodes[n] == 0) ++n;
  for (std::size_t r = 0; r < nodes.size(); ++r) {
    if (static_cast<std::size_t>(nodes[r]) != r / n) return 0;
  }
  return static_cast<int>(n);
}

// What a communicator and its duplicates share in one process: the MPI communicator, who failed first, and the lock
// that makes one call at a time of theirs where MPI asks for that.
//
// All messages travel on one duplicate of the user's communicator. Tag 0 carries the notes that a rank has failed; each
// heddle communicator has four tags of its own.
class session {
 public:
  static constexpr std::size_t longest_note = 2000;

  session(MPI_Comm user, const options& o, bool finalises)
      : options_(o), unwinding_(std::uncaught_exceptions()) {
    if (!initialised() || finalised()) throw argument_error("heddle::mpi::communicator: MPI isn't running");
    int given = 0;
    MPI_Query_thread(&given);
    level_ = static_cast<thread_level>(given);
    if (level_ < o.level) {
      throw thread_level_error(level_, o.level,
                               o.level == thread_level::serialized
                                   ? "a communicator that other threads may use, as data_parallel does,"
                                   : "this communicator");
    }
    if (o.piece < 1 || o.piece > INT_MAX) {
      throw argument_error("heddle::mpi::communicator: piece is " + std::to_string(o.piece) +
                           " bytes, allowed is 1 to 2147483647");
    }
    int between = 0;
    if (user != MPI_COMM_NULL) MPI_Comm_test_inter(user, &between);
    if (user == MPI_COMM_NULL || between) {
      throw argument_error("heddle::mpi::communicator: needs an intra-communicator, and this is " +
                           std::string(between ? "an inter-communicator" : "MPI_COMM_NULL"));
    }
    check(MPI_Comm_dup(user, &comm_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    heard_.resize(static_cast<std::size_t>(size_));
    void* bound = nullptr;
    int has_bound = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &bound, &has_bound);
    if (has_bound) highest_tag_ = *static_cast<int*>(bound);
    char name[MPI_MAX_PROCESSOR_NAME] = {};
    int length = 0;
    MPI_Get_processor_name(name, &length);
    host_.assign(name, static_cast<std::size_t>(length));
    // Pieces must be cut alike on both sides; a simulator's are cut otherwise.
    const auto piece = static_cast<long long>(o.piece);
    const long long mine[4] = {piece, -piece, simulated(), -simulated()};
    long long most[4] = {};
    const int rc = MPI_Allreduce(mine, most, 4, MPI_LONG_LONG, MPI_MAX, comm_);
    if (rc != MPI_SUCCESS || most[0] != -most[1] || most[2] != -most[3]) MPI_Comm_free(&comm_);
    check(rc, "MPI_Allreduce");
    if (most[0] != -most[1]) {
      throw argument_error("heddle::mpi::communicator: piece is " + std::to_string(-most[1]) +
                           " bytes on one rank and " + std::to_string(most[0]) +
                           " on another; allowed is the same on all");
    }
    if (most[2] != -most[3]) {
      throw argument_error("heddle::mpi::communicator: time is simulator on some ranks only; allowed is all or none");
    }
    MPI_Comm node = MPI_COMM_NULL;
    check(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node), "MPI_Comm_split_type");
    int lowest = rank_;
    MPI_Bcast(&lowest, 1, MPI_INT, 0, node);
    MPI_Comm_free(&node);
    nodes_.resize(static_cast<std::size_t>(size_));
    MPI_Allgather(&lowest, 1, MPI_INT, nodes_.data(), 1, MPI_INT, comm_);
    nodes_ = numbered(nodes_);
    finalises_ = finalises;
  }
  session(const session&) = delete;
  session& operator=(const session&) = delete;

  ~session() {
    if (finalised()) return;
    if (failed() < 0 && std::uncaught_exceptions() > unwinding_)
      fail(rank_, "rank " + std::to_string(rank_) + " left by an exception");
    if (finalises_)
      MPI_Finalize();
    else if (failed() < 0 && everybody_leaves())
      free_all();
  }

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  MPI_Comm comm() const noexcept { return comm_; }
  std::size_t piece() const noexcept { return options_.piece; }
  std::chrono::nanoseconds deadline() const noexcept { return options_.deadline; }
  rest resting() const { return rest(options_); }
  const options& settings() const noexcept { return options_; }
  bool simulated() const noexcept { return options_.time == time_source::simulator; }
  // Looks whether the request has ended, or waits for that.
  int test(MPI_Request* r, int* done) const {
    if (!simulated()) return MPI_Test(r, done, MPI_STATUS_IGNORE);
    *done = 1;
    return MPI_Wait(r, MPI_STATUS_IGNORE);
  }
  clock::time_point now() const {
    if (options_.time == time_source::steady) return clock::now();
    return clock::time_point(std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(MPI_Wtime())));
  }
  const std::vector<int>& nodes() const noexcept { return nodes_; }
  const std::string& host() const noexcept { return host_; }

  // Takes over the MPI communicator of a channel; it goes away with the session's own.
  void keep(int channel, MPI_Comm c) {
    std::lock_guard lock(mutex_);
    kept_.emplace_back(channel, c);
  }

  // A number for a new communicator; rank 0 gives it. Numbers are not used again, since messages of a communicator
  // that failed may lie where nobody takes them.
  int give_channel() {
    const int n = ++channels_;
    if (n <= (highest_tag_ - 3) / 4) return n;
    const std::string text = "this MPI has tags for " + std::to_string((highest_tag_ - 3) / 4) + " duplicates";
    fail(rank_, text);
    throw argument_error("heddle::mpi::communicator::duplicate: " + text);
  }

  // Throws unless MPI allows this thread to call it. (SMPI's MPI_Is_thread_main is true on rank 0 only.)
  void require_thread() const {
    if (level_ >= thread_level::serialized) return;
    if (std::this_thread::get_id() != thread_) {
      throw thread_level_error(level_, thread_level::serialized,
                               "a call from another thread than the one that initialised MPI");
    }
  }

  // Holds MPI for one call.
  std::unique_lock<std::mutex> enter() {
    return level_ == thread_level::multiple ? std::unique_lock<std::mutex>() : std::unique_lock(mpi_);
  }

  int failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  std::string failure() const {
    std::lock_guard lock(mutex_);
    return text_;
  }

  // Marks the failure and tells everybody. The first one wins: later ones are its consequences.
  void fail(int culprit, const std::string& text) {
    if (!mark(culprit, text)) return;
    const std::string said =
        text.substr(0, longest_note) + " (says rank " + std::to_string(rank_) + " on " + host_ + ")";
    std::string note(sizeof culprit, '\0');
    std::memcpy(note.data(), &culprit, sizeof culprit);
    note += said;
    tell(0, [&](int) { return note; });
  }

  // Ends the job, where memory of the caller can't be taken back from MPI. Nobody catches that, so it first says why,
  // and who is lost: the others have run into their deadlines, too, and tell so.
  [[noreturn]] void end_job() {
    const std::lock_guard listening(listen_);
    const auto start = now();
    const auto silent = [&] { return std::count(heard_.begin(), heard_.end(), 0) > 1; };  // beside this rank
    for (rest pause = resting(); silent() && now() - start < std::chrono::seconds(1); pause(now() - start)) hear();
    std::string lost;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || heard_[static_cast<std::size_t>(r)]) continue;
      lost += (lost.empty() ? "; no word from rank " : ", ") + std::to_string(r);
    }
    std::fprintf(stderr, "heddle: rank %d ends the job by MPI_Abort: %s%s\n", rank_, failure().c_str(), lost.c_str());
    std::fflush(stderr);
    MPI_Abort(comm(), 1);
    std::abort();
  }

  // Sends message(r), a short one, to every other rank r. MPI copies it; if it can't yet, it stays in memory for good.
  template <class Message> void tell(int tag, Message&& message) {
    std::vector<std::string> messages(static_cast<std::size_t>(size_));
    std::vector<MPI_Request> sent(static_cast<std::size_t>(size_), MPI_REQUEST_NULL);
    auto held = enter();
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const std::string& m = messages[static_cast<std::size_t>(r)] = message(r);
      MPI_Isend(m.data(), static_cast<int>(m.size()), MPI_CHAR, r, tag, comm_, &sent[static_cast<std::size_t>(r)]);
    }
    int done = 0;
    for (int i = 0; i < 1000 && !done; ++i) MPI_Testall(size_, sent.data(), &done, MPI_STATUSES_IGNORE);
    if (done) return;
    for (MPI_Request& r : sent) {
      if (r != MPI_REQUEST_NULL) MPI_Request_free(&r);
    }
    [[maybe_unused]] const auto* const kept = new auto(std::move(messages));
  }

  // Whether somebody has failed; looks for notes once in a millisecond.
  bool look(clock::time_point now) {
    if (failed() >= 0) return true;
    const clock::rep due = next_look_.load(std::memory_order_relaxed), t = now.time_since_epoch().count();
    if (t < due) return false;
    std::unique_lock listening(listen_, std::try_to_lock);
    if (!listening) return false;
    next_look_.store(t + clock::duration(std::chrono::milliseconds(1)).count(), std::memory_order_relaxed);
    const std::vector<char> note = hear();
    int culprit = 0;
    if (note.size() < sizeof culprit) return false;
    std::memcpy(&culprit, note.data(), sizeof culprit);
    mark(culprit, std::string(note.begin() + sizeof culprit, note.end()));
    return true;
  }

  // A comm_error with MPI's own words unless the call succeeded.
  void check(int rc, const char* call, const char* operation = "mpi::communicator", int peer = -1) const {
    if (rc == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    MPI_Error_string(rc, text, &length);
    throw comm_error(operation, rank_, peer,
                     std::string(call) + ": " + std::string(text, static_cast<std::size_t>(length)));
  }

 private:
  // A rank's note that something has failed, if one has come.
  std::vector<char> hear() {
    auto held = enter();
    int found = 0, length = 0;
    MPI_Status status;
    for (int i = 0; i < 8 && !found; ++i) {  // a probe takes in a part of what has come, and a note comes last
      if (MPI_Iprobe(MPI_ANY_SOURCE, 0, comm_, &found, &status) != MPI_SUCCESS) return {};
    }
    if (!found) return {};
    MPI_Get_count(&status, MPI_CHAR, &length);
    std::vector<char> note(static_cast<std::size_t>(length));
    MPI_Recv(note.data(), length, MPI_CHAR, status.MPI_SOURCE, 0, comm_, MPI_STATUS_IGNORE);
    heard_[static_cast<std::size_t>(status.MPI_SOURCE)] = 1;
    return note;
  }

  // Whether all ranks are about to free the MPI communicator. If one isn't, it may yet fail and send a note, which must
  // find the communicator: Open MPI 4.1 keeps messages to a freed one for the next of the same number, whose member the
  // sender may not be, and crashes. A communicator that isn't freed costs some memory until MPI_Finalize.
  bool everybody_leaves() {
    MPI_Request barrier = MPI_REQUEST_NULL;
    const auto start = now();
    rest pause = resting();
    for (int done = 0;;) {
      {
        auto held = enter();
        const bool began = barrier != MPI_REQUEST_NULL;
        if (!began && MPI_Ibarrier(comm_, &barrier) != MPI_SUCCESS) return false;
        if (test(&barrier, &done) != MPI_SUCCESS) return false;
      }
      if (done) return true;
      const auto time = now();
      const auto most = (std::min<clock::duration>)(options_.deadline, std::chrono::seconds(1));
      if (look(time) || time - start > most) return false;
      pause(time - start);
    }
  }

  void free_all() {
    // In one order on all ranks, though threads may have made them in another.
    std::stable_sort(kept_.begin(), kept_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (auto& [channel, c] : kept_) MPI_Comm_free(&c);
    MPI_Comm_free(&comm_);
  }

  bool mark(int culprit, const std::string& text) {
    std::lock_guard lock(mutex_);
    if (failed() >= 0) return false;
    text_ = text;
    failed_.store(culprit, std::memory_order_release);
    return true;
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1, highest_tag_ = 32767;
  options options_;
  std::vector<int> nodes_;
  thread_level level_ = thread_level::single;
  std::thread::id thread_ = std::this_thread::get_id();
  std::string host_;
  int unwinding_;
  bool finalises_ = false;
  std::atomic<int> channels_{0}, failed_{-1};
  std::atomic<clock::rep> next_look_{0};
  std::mutex mpi_, listen_;
  mutable std::mutex mutex_;
  std::string text_;
  std::vector<char> heard_;  // who has sent a note
  std::vector<std::pair<int, MPI_Comm>> kept_;
};

// Another rank. Before the first long message of a collective call its receiver says that it is in the call, and so
// will receive all that comes: the sender hands nothing of its caller's to MPI before it knows that.
struct partner {
  static constexpr std::uint64_t none = ~std::uint64_t{0};
  std::uint64_t call = 0;                               // which collective call the next three are about
  bool called = false, listening = false, ready = false;  // this rank has told it; listens for its word; has heard it
  bool sends = false;                                   // it has been told at least once
  std::uint64_t sent = 0, received = 0;                 // payloads begun to it, and completed from it, in all calls
  std::uint64_t last_word = none;                       // after a failure: its `sent`, once it has told it
};

// What a communicator and its copies share.
struct channel {
  channel(int n, int ranks, MPI_Comm o) : number(n), partners(static_cast<std::size_t>(ranks)), own(o) {}

  // A collective call begins that tells so.
  void begin(const header& h) noexcept {
    ++call;
    last = h;
    told_of = first = true;
  }
  // Notes the round, and counts the collective calls: in one that hasn't told, rounds ascend. Whether it is the first
  // round of its call here.
  bool enter(const header& h) noexcept {
    const bool same = h.kind == last.kind && h.type == last.type && h.reduction == last.reduction &&
                      h.sequence == last.sequence && h.count == last.count && (told_of || h.round > last.round);
    last = h;
    if (same) return std::exchange(first, false);
    ++call;
    told_of = first = false;
    return true;
  }
  // The peer, as far as this collective call goes.
  partner& in_call(int peer) noexcept {
    partner& p = partners[static_cast<std::size_t>(peer)];
    if (std::exchange(p.call, call) != call) p.called = p.listening = p.ready = false;
    return p;
  }

  int number;  // of its tags
  std::uint16_t sequence = 0;
  std::vector<partner> partners;
  std::atomic<bool> inside{false};  // in an exchange
  std::atomic<bool> told{false};    // after a failure: this rank has said its last word
  bool left = false;                // and withdrawn
  header last;
  std::uint64_t call = 0;
  bool told_of = false, first = false;  // the call has told that it begins; no round of it has come yet
  MPI_Comm own;  // for MPI's own collectives; null until it is needed
};

// What stands before every message.
struct label {
  header head;
  std::uint64_t bytes;
};
static_assert(sizeof(label) == 24);

// What a request is about: the message `index` of what a round receives for the first three, of what it sends for the
// others. `peer` is its other end.
struct role {
  enum kind : std::uint8_t { head_in, payload_in, call_out, head_out, call_in, payload_out } what;
  std::size_t index;
  int peer;
  bool stays = false;  // it may end in the next round
  std::uint8_t half = 0;  // of the memory that parts are received into
  bool arrives() const noexcept { return what <= payload_in; }
  bool of_caller() const noexcept { return what == payload_in || what == payload_out; }
};

inline std::string milliseconds(std::chrono::nanoseconds t) { return std::to_string(t.count() / 1'000'000) + " ms"; }

// A unit of memory for messages, so that what is inside them is aligned. Not initialised.
struct alignas(64) line {
  line() noexcept {}  // defaulted, a vector would fill it with zeros
  std::byte bytes[64];
};
}  // namespace detail

}  // namespace mpi
}  // namespace v0
}  // namespace heddle

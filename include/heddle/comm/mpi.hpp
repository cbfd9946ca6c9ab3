// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/concept.hpp>

#if !__has_include(<mpi.h>)
#error "heddle/comm/mpi.hpp needs mpi.h: link the CMake target heddle::mpi, or compile with mpicxx"
#endif
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
/// @brief Ranks as MPI processes.
namespace mpi {

/// @brief What MPI promises about calls from several threads; each level includes those before it.
enum class thread_level : int {
  single = MPI_THREAD_SINGLE,          ///< The process has one thread.
  funneled = MPI_THREAD_FUNNELED,      ///< Only the thread that initialised MPI calls it.
  serialized = MPI_THREAD_SERIALIZED,  ///< Any thread calls it, one at a time.
  multiple = MPI_THREAD_MULTIPLE       ///< Any thread calls it at any time.
};

/// The name used in messages.
constexpr const char* name_of(thread_level l) noexcept {
  switch (l) {
    case thread_level::single: return "MPI_THREAD_SINGLE";
    case thread_level::funneled: return "MPI_THREAD_FUNNELED";
    case thread_level::serialized: return "MPI_THREAD_SERIALIZED";
    case thread_level::multiple: return "MPI_THREAD_MULTIPLE";
  }
  return "unknown";
}

/// @brief MPI promises less about threads than is needed.
class thread_level_error : public error {
 public:
  /// @param given What MPI was initialised with. @param needed The least that would do. @param why What needs it.
  thread_level_error(thread_level given, thread_level needed, const std::string& why)
      : error(std::string("heddle::mpi: MPI gives ") + name_of(given) + ", and " + why + " needs " + name_of(needed) +
              ", to be asked for with MPI_Init_thread"),
        given_(given),
        needed_(needed) {}
  /// What MPI was initialised with.
  thread_level given() const noexcept { return given_; }
  /// The least that would do.
  thread_level needed() const noexcept { return needed_; }

 private:
  thread_level given_, needed_;
};

/// @brief Settings of a communicator.
struct options {
  std::chrono::nanoseconds deadline{30'000'000'000ll};  ///< How long a call waits without anything moving.
  /// The least level that is accepted. Below `serialized` only the thread that initialised MPI may use the
  /// communicator, which excludes data_parallel on more than one rank.
  thread_level level = thread_level::serialized;
  std::size_t piece = std::size_t{1} << 30;  ///< Bytes of the longest MPI message, 1 to 2^31 - 1, equal on all ranks.
};

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

// Between two looks of somebody who waits: others may need the core.
inline void rest(clock::duration waited) {
  if (waited < std::chrono::microseconds(200))
    std::this_thread::yield();
  else
    std::this_thread::sleep_for(std::chrono::microseconds(50));
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
      : deadline_(o.deadline), piece_(o.piece), unwinding_(std::uncaught_exceptions()) {
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
    void* bound = nullptr;
    int has_bound = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &bound, &has_bound);
    if (has_bound) highest_tag_ = *static_cast<int*>(bound);
    char name[MPI_MAX_PROCESSOR_NAME] = {};
    int length = 0;
    MPI_Get_processor_name(name, &length);
    host_.assign(name, static_cast<std::size_t>(length));
    // Pieces must be cut alike on both sides.
    const long long mine[2] = {static_cast<long long>(piece_), -static_cast<long long>(piece_)};
    long long most[2] = {};
    const int rc = MPI_Allreduce(mine, most, 2, MPI_LONG_LONG, MPI_MAX, comm_);
    if (rc != MPI_SUCCESS || most[0] != -most[1]) MPI_Comm_free(&comm_);
    check(rc, "MPI_Allreduce");
    if (most[0] != -most[1]) {
      throw argument_error("heddle::mpi::communicator: piece is " + std::to_string(-most[1]) +
                           " bytes on one rank and " + std::to_string(most[0]) +
                           " on another; allowed is the same on all");
    }
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
      MPI_Comm_free(&comm_);
  }

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  MPI_Comm comm() const noexcept { return comm_; }
  std::size_t piece() const noexcept { return piece_; }
  std::chrono::nanoseconds deadline() const noexcept { return deadline_; }
  const std::string& host() const noexcept { return host_; }

  // A number for a new communicator; rank 0 gives it. Numbers are not used again, since messages of a communicator
  // that failed may lie where nobody takes them.
  int give_channel() {
    const int n = ++channels_;
    if (n <= (highest_tag_ - 3) / 4) return n;
    const std::string text = "this MPI has tags for " + std::to_string((highest_tag_ - 3) / 4) + " duplicates";
    fail(rank_, text);
    throw argument_error("heddle::mpi::communicator::duplicate: " + text);
  }

  // Throws unless MPI allows this thread to call it.
  void require_thread() const {
    if (level_ >= thread_level::serialized) return;
    int here = 0;
    MPI_Is_thread_main(&here);
    if (!here) {
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
    note_.resize(sizeof culprit);
    std::memcpy(note_.data(), &culprit, sizeof culprit);
    note_.insert(note_.end(), said.begin(), said.end());
    std::vector<MPI_Request> sent(static_cast<std::size_t>(size_), MPI_REQUEST_NULL);
    auto held = enter();
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      MPI_Isend(note_.data(), static_cast<int>(note_.size()), MPI_CHAR, r, 0, comm_,
                &sent[static_cast<std::size_t>(r)]);
    }
    // Short messages: MPI copies them. If it can't yet, the note stays in memory for good.
    int done = 0;
    for (int i = 0; i < 1000 && !done; ++i) MPI_Testall(size_, sent.data(), &done, MPI_STATUSES_IGNORE);
    if (done) return;
    for (MPI_Request& r : sent) {
      if (r != MPI_REQUEST_NULL) MPI_Request_free(&r);
    }
    [[maybe_unused]] const auto* const kept = new std::vector<char>(std::move(note_));
  }

  // Whether somebody has failed; looks for notes once in a millisecond.
  bool look(clock::time_point now) {
    if (failed() >= 0) return true;
    const clock::rep due = next_look_.load(std::memory_order_relaxed), t = now.time_since_epoch().count();
    if (t < due) return false;
    std::unique_lock listening(listen_, std::try_to_lock);
    if (!listening) return false;
    next_look_.store(t + clock::duration(std::chrono::milliseconds(1)).count(), std::memory_order_relaxed);
    auto held = enter();
    int found = 0, length = 0, culprit = 0;
    MPI_Status status;
    for (int i = 0; i < 8 && !found; ++i) {  // a probe takes in a part of what has come, and a note comes last
      if (MPI_Iprobe(MPI_ANY_SOURCE, 0, comm_, &found, &status) != MPI_SUCCESS) return false;
    }
    if (!found) return false;
    MPI_Get_count(&status, MPI_CHAR, &length);
    std::vector<char> note(static_cast<std::size_t>(length));
    MPI_Recv(note.data(), length, MPI_CHAR, status.MPI_SOURCE, 0, comm_, MPI_STATUS_IGNORE);
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
  // Whether all ranks are about to free the MPI communicator. If one isn't, it may yet fail and send a note, which must
  // find the communicator: Open MPI 4.1 keeps messages to a freed one for the next of the same number, whose member the
  // sender may not be, and crashes. A communicator that isn't freed costs some memory until MPI_Finalize.
  bool everybody_leaves() {
    MPI_Request barrier = MPI_REQUEST_NULL;
    const auto start = clock::now();
    for (int done = 0;;) {
      {
        auto held = enter();
        const bool began = barrier != MPI_REQUEST_NULL;
        if (!began && MPI_Ibarrier(comm_, &barrier) != MPI_SUCCESS) return false;
        if (MPI_Test(&barrier, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
      }
      if (done) return true;
      const auto now = clock::now();
      if (look(now) || now - start > (std::min<clock::duration>)(deadline_, std::chrono::seconds(1))) return false;
      rest(now - start);
    }
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
  std::chrono::nanoseconds deadline_;
  std::size_t piece_;
  thread_level level_ = thread_level::single;
  std::string host_;
  int unwinding_;
  bool finalises_ = false;
  std::atomic<int> channels_{0}, failed_{-1};
  std::atomic<clock::rep> next_look_{0};
  std::mutex mpi_, listen_;
  mutable std::mutex mutex_;
  std::string text_;
  std::vector<char> note_;
};

// What stands before every message.
struct label {
  header head;
  std::uint64_t bytes;
};
static_assert(sizeof(label) == 24);

// A unit of memory for messages, so that what is inside them is aligned.
struct alignas(64) line {
  std::byte bytes[64];
};
}  // namespace detail

/// @brief A rank of an MPI communicator, which it borrows: it works on a duplicate.
///
/// A message of up to 4,000 bytes travels behind its header. Of a longer one the header comes first; when it has come,
/// the receiver posts its buffer and calls for the rest, and only then does the sender hand its own buffer to MPI. So
/// MPI holds memory of the caller only while both ranks are in the call. When it fails on one of them, the sender says
/// which messages it has begun; these arrive, and the receiver withdraws its buffers for the others: nothing is read or
/// written after the call has thrown. If a peer doesn't do its part within another deadline (its process is stopped),
/// MPI_Abort ends the job.
///
/// Waiting is polling by the calling thread, with yields and then short sleeps; there is no progress thread, since no
/// transfer is pending outside a call, and data_parallel calls from a thread of its own.
/// Wire:   the payload and 24 bytes per message; an empty message more for each long one.
/// State:  the received bytes of one round that are only lent to `apply`; 4 kB per message.
/// Sync:   every member but the getters blocks until its part is done; the constructor, as MPI_Comm_dup, without a
/// deadline. The destructor of the last copy waits up to a second for the other ranks; if they don't come, or somebody
/// has failed, the MPI communicator stays until MPI_Finalize.
/// Throws: comm_error naming the rank at fault, or with MPI's text; thread_level_error.
class communicator {
 public:
  /// @brief Works on a duplicate of `user`, with its error handler set to MPI_ERRORS_RETURN. Collective.
  /// @param user An intra-communicator; not used any more afterwards. @param o Settings.
  /// Throws: argument_error if MPI isn't running, `user` isn't an intra-communicator, or `piece` is out of range or
  /// differs between ranks; thread_level_error.
  explicit communicator(MPI_Comm user, const options& o = {})
      : session_(std::make_shared<detail::session>(user, o, false)), channel_(session_->give_channel()) {}

  /// This rank, 0 .. size() - 1.
  int rank() const noexcept { return session_->rank(); }
  /// Number of ranks.
  int size() const noexcept { return session_->size(); }
  /// Number of the next call.
  std::uint16_t next_sequence() noexcept { return sequence_++; }
  /// Name of the machine that this rank runs on, as MPI knows it.
  const std::string& host() const noexcept { return session_->host(); }

  /// @brief Makes every pending and later call of every rank throw comm_error naming this rank and `text`. Others hear
  /// of it while they wait, or in their next call.
  void fail(const std::string& text) { session_->fail(rank(), text); }

  /// @brief A second communicator of the same ranks, for another thread. Collective; it makes no MPI communicator.
  communicator duplicate() {
    int number = rank() == 0 ? session_->give_channel() : 0;
    const header h{.kind = operation_kind::control, .count = 1};
    std::vector<outgoing> out;
    std::vector<incoming> in;
    for (int r = 1; r < size() && rank() == 0; ++r) out.push_back({r, &number, sizeof number, 1});
    if (rank() != 0) in.push_back({0, &number, sizeof number});
    exchange(h, out, in, [](std::span<const arrival>) {});
    return {session_, number};
  }

  /// @brief One round; see the communicator concept.
  template <class Apply>
  void exchange(header h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    session_->require_thread();
    if (session_->look(detail::clock::now())) throw_failure(h);
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

 private:
  friend communicator world(const options& o);
  using label = detail::label;
  static constexpr std::size_t line_bytes = sizeof(detail::line), carried = 4000, none = ~std::size_t{0};

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

  communicator(std::shared_ptr<detail::session> s, int channel) : session_(std::move(s)), channel_(channel) {}

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
    auto moved = detail::clock::now();
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
        moved = detail::clock::now();
        continue;
      }
      const auto now = detail::clock::now();
      if (session_->look(now)) throw_failure(h);
      if (now - moved > session_->deadline()) late(h, out, in);
      detail::rest(now - moved);
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

  [[noreturn]] void throw_failure(const header& h) const {
    throw comm_error(heddle::name_of(h.kind), rank(), session_->failed(), session_->failure());
  }

  [[noreturn]] void mismatch(const header& h, std::size_t bytes, int peer, const label& theirs) {
    const std::string text = "calls differ: rank " + std::to_string(rank()) + " is in " +
                             heddle::detail::describe(h, bytes) + ", rank " + std::to_string(peer) + " is in " +
                             heddle::detail::describe(theirs.head, static_cast<std::size_t>(theirs.bytes));
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
        "rank " + std::to_string(peer) + " did not " + (there ? "finish " : "reach ") + heddle::detail::describe(h, 0) +
        " of rank " + std::to_string(rank()) + " within " +
        std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(session_->deadline()).count()) + " ms";
    session_->fail(peer, text);
    throw comm_error(heddle::name_of(h.kind), rank(), peer, text);
  }

  // Tells everybody that this rank has failed, and each receiver how many long messages to it have begun. Then waits
  // until MPI holds no memory of the caller: what has begun arrives, since both sides stay in the call until then, and
  // where a sender says that it won't begin, the receive is withdrawn.
  void retreat(const char* why, std::span<const outgoing> out, std::span<const incoming> in) noexcept {
    detail::session& s = *session_;
    s.fail(rank(), "an exchange of rank " + std::to_string(rank()) + " failed: " + why);
    const auto end = detail::clock::now() + s.deadline();
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
    auto moved = detail::clock::now();
    while (pending([](role r) { return r.of_caller(); })) {
      int rc = MPI_SUCCESS;
      const int n = test(rc);
      int asked = -1;
      for (std::size_t i = 0; i < requests_.size(); ++i) {
        if (requests_[i] == MPI_REQUEST_NULL || roles_[i].what != role::payload_in) continue;
        const int peer = in[roles_[i].index].peer;
        if (peer != std::exchange(asked, peer)) heed(peer, in);
      }
      const auto now = detail::clock::now();
      if (n > 0) moved = now;
      if (now > end) MPI_Abort(s.comm(), 1);
      detail::rest(now - moved);
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

  std::shared_ptr<detail::session> session_;
  int channel_;
  std::uint16_t sequence_ = 0;
  std::vector<detail::line> memory_;
  std::vector<progress> incoming_, outgoing_;
  std::vector<arrival> arrivals_;
  std::vector<std::size_t> last_;  // long message of each peer
  std::vector<MPI_Request> requests_;
  std::vector<role> roles_;
  std::vector<int> ended_;
  std::vector<MPI_Status> statuses_;
  std::size_t arriving_ = 0, active_ = 0, uncalled_ = 0;  // requests of what arrives; all; long messages not begun
};
static_assert(heddle::communicator<communicator>);

/// @brief All processes of the job. Initialises MPI if nobody has, and then finalises it when the communicator, its
/// copies and duplicates are gone; MPI can't be started again afterwards.
/// @param o Settings; MPI is asked for MPI_THREAD_MULTIPLE, and `o.level` is the least that is accepted.
/// Throws: argument_error if MPI was finalised; thread_level_error.
inline communicator world(const options& o = {}) {
  if (detail::finalised()) throw argument_error("heddle::mpi::world: MPI was finalised and can't be started again");
  const bool mine = !detail::initialised();
  if (mine) {
    int given = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &given);
  }
  try {
    auto s = std::make_shared<detail::session>(MPI_COMM_WORLD, o, mine);
    const int channel = s->give_channel();
    return {std::move(s), channel};
  } catch (...) {
    if (mine) MPI_Finalize();
    throw;
  }
}

/// @brief Runs f(comm) on the rank that this process is, and tells the others if it throws.
/// @param o Settings. @param f Called with a communicator of all processes.
/// Throws: what f throws; what world() throws.
template <class Function> void run(const options& o, Function&& f) {
  communicator comm = world(o);
  try {
    f(comm);
  } catch (const std::exception& e) {
    comm.fail("rank " + std::to_string(comm.rank()) + " threw: " + e.what());
    throw;
  } catch (...) {
    comm.fail("rank " + std::to_string(comm.rank()) + " threw an exception that is not a std::exception");
    throw;
  }
}

/// @brief run(options{}, f).
template <class Function> void run(Function&& f) { run(options{}, std::forward<Function>(f)); }

}  // namespace mpi
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/levels.hpp>
#include <heddle/comm/detail/threads_world.hpp>

#include <cstring>
#include <exception>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
/// @brief Ranks as threads of one process.
namespace threads {

/// @brief Settings of threads::run.
struct options {
  int ranks = 1;                                       ///< Number of ranks, at least 1.
  std::chrono::nanoseconds deadline{30'000'000'000ll};  ///< How long a call waits for its peers.
  std::chrono::nanoseconds stall{0};                    ///< When a wait is reported to `on_stall`; 0 is never.
  /// Called once in each wait that lasts longer than `stall`, on the thread that waits, with a text that names the
  /// operation and the ranks that are missing. It must not throw.
  void (*on_stall)(void* context, const std::string& report) = nullptr;
  void* stall_context = nullptr;  ///< Passed to `on_stall`.
};

/// @brief A rank of threads::run. Zero copy: a receiver reads the sender's buffer.
///
/// Waiting ranks spin only where cores are free, then yield, then sleep on a condition variable, so that more ranks
/// than cores make progress. A rank that fails first takes back what no peer has begun to read and waits for those who
/// have, so that nobody reads a buffer that is being destroyed.
/// @tparam Session What the ranks share beside their messages; use the name `communicator`.
/// Sync:   every member blocks until its part of the round is done.
/// Throws: comm_error naming the rank at fault, when it failed, called something else, or missed the deadline.
template <class Session>
class basic_communicator {
  using world = detail::world<Session>;

 public:
  /// @param w State shared by all ranks. @param rank This rank.
  basic_communicator(std::shared_ptr<world> w, int rank) : world_(std::move(w)), rank_(rank) {}

  /// This rank, 0 .. size() - 1.
  int rank() const noexcept { return rank_; }
  /// Number of ranks.
  int size() const noexcept { return world_->ranks; }
  /// Number of the next call.
  std::uint16_t next_sequence() noexcept { return sequence_++; }

  /// @brief Makes every pending and later call of every rank throw comm_error naming this rank and `text`.
  void fail(const std::string& text) { world_->shared->fail(known(), text); }

  /// @brief A second communicator of the same ranks, for another thread. Collective.
  basic_communicator duplicate() {
    const header h{.kind = operation_kind::control};
    std::shared_ptr<world>& made = world_->children[0];
    if (rank_ == 0) made = std::make_shared<world>(world_->shared, world_->members);
    meet(h, false);
    std::shared_ptr<world> mine = made;
    meet(h, true);
    if (rank_ == 0) made.reset();
    return {std::move(mine), rank_};
  }

  /// @brief A communicator of the ranks that give the same `color`, in the order of `key`, then of their ranks here.
  /// Collective. A failure is everybody's, in all parts; errors name ranks as threads::run numbers them.
  /// @param color Which group, 0 or above. @param key Place in the group.
  /// Throws: argument_error if color is negative; comm_error.
  basic_communicator split(int color, int key = 0) {
    if (color < 0) {
      const std::string text = "heddle::threads::communicator::split: color is " + std::to_string(color) +
                               ", allowed is 0 or above";
      fail(text);
      throw argument_error(text);
    }
    const header h{.kind = operation_kind::control, .count = 2};
    world_->standing_of(rank_).color = color;
    world_->standing_of(rank_).key = key;
    meet(h, false);
    const std::vector<int> part = world_->part_of(rank_);
    std::shared_ptr<world>& made = world_->children[static_cast<std::size_t>(part[0])];
    if (rank_ == part[0]) made = world_->child(part);
    meet(h, false);
    std::shared_ptr<world> mine = made;
    meet(h, true);
    if (rank_ == part[0]) made.reset();
    return {std::move(mine), static_cast<int>(std::find(part.begin(), part.end(), rank_) - part.begin())};
  }

  /// @brief Communicators of this rank's group of `group` consecutive ranks and of those with its place in theirs; they
  /// are kept.
  /// @param group Ranks of a group, at least 1; the last group may be smaller. The first call is collective.
  heddle::detail::level_pair<basic_communicator>& levels(int group) { return levels_.of(*this, group); }

  /// @brief One round; see the communicator concept.
  template <class Apply>
  void exchange(header h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    Session& s = *world_->shared;
    if (s.failed() >= 0) pass(h, detail::wait_end::failed, -1);
    sent_.clear();
    read_.clear();
    try {
      post(h, out);
      collect(h, in);
      std::forward<Apply>(apply)(std::span<const arrival>(arrivals_));
      release();
      for (const int peer : sent_) {
        auto& b = world_->between(rank_, peer);
        await(h, peer, [&] { return b.state.load(std::memory_order_seq_cst) == b.empty; });
      }
    } catch (...) {
      retreat();
      throw;
    }
  }

  /// @brief All-reduce in one pass: each rank reduces its block from every rank's buffer, in rank order, and stores it
  /// to every rank's output. Few elements (up to 4 KiB) are copied to where all see them, and every rank reduces all.
  /// Traffic: reads and writes each buffer once, the least possible.
  /// @param h Header; its `count` must be `count`. @param in Input, may equal `out`. @param out Output.
  /// @param count Elements. @param l The reduction.
  /// @return Whether a value that this rank reduced left float16's range.
  bool native_all_reduce(header h, const void* in, void* out, std::size_t count, const leaf& l) {
    Session& s = *world_->shared;
    if (s.failed() >= 0) pass(h, detail::wait_end::failed, -1);
    const auto me = static_cast<std::size_t>(rank_), p = static_cast<std::size_t>(size());
    const bool few = count <= (std::min)(world::few_bytes, world::few_bytes_of_all / p) / l.bytes;
    const std::uint64_t call = ++world_->standings[me].calls;
    auto& mine = world_->tells(rank_, call);
    mine.head = h;
    mine.element = l.bytes;
    mine.in = in;
    mine.out = out;
    if (few && count) std::memcpy(mine.elements, in, count * l.bytes);
    mine.call.store(call, std::memory_order_seq_cst);
    for (int r = 0; r < size(); ++r)
      if (r != rank_) world_->ring(r);
    hear_all(h, call);
    for (int r = 0; r < size(); ++r) {
      if (const auto& theirs = world_->tells(r, call); !theirs.head.matches(h) || theirs.element != l.bytes)
        mismatch(h, l.bytes, r, theirs.head, theirs.element, true);
    }
    operands_.resize(p);
    const double factor = l.average ? 1.0 / static_cast<double>(p) : 1.0;
    if (few) {
      for (std::size_t r = 0; r < p; ++r) operands_[r] = {world_->tells(static_cast<int>(r), call).elements, 0};
      operands_[me].data = in;
      return count && guarded([&] {
               return l.reduce(l.context, operands_.data(), static_cast<int>(p), out, count, 0, factor);
             });
    }
    // Here a rank that has given up isn't waited for in vain, and its buffers aren't read.
    meet(h, false);
    // From here on nobody may leave before everybody is done.
    bool left_range = false;
    std::exception_ptr thrown;
    try {
      left_range = guarded([&] { return reduce_block(call, count, l, factor); });
    } catch (...) {
      thrown = std::current_exception();
    }
    meet(h, true);
    if (thrown) std::rethrow_exception(thrown);
    if (s.failed() >= 0) pass(h, detail::wait_end::failed, -1);  // perhaps in its part of this result
    return left_range;
  }

 private:
  // This rank's number in the session, and as text that of any.
  int known() const noexcept { return world_->known(rank_); }
  std::string name(int r) const { return std::to_string(world_->known(r)); }

  // Waits for a peer, or throws.
  template <class Ready>
  void await(const header& h, int peer, Ready&& ready) {
    if (ready()) return;
    std::atomic<int>& mark = world_->standing_of(rank_).waits_for;
    mark.store(peer, std::memory_order_release);
    const detail::wait_end end = world_->shared->wait(known(), ready, true, [&] {
      std::string idle;
      for (int r = 0; r < size(); ++r) {
        if (r != rank_ && world_->standing_of(r).waits_for.load(std::memory_order_acquire) < 0)
          idle += (idle.empty() ? "" : ", ") + name(r);
      }
      return stalled(h) + "rank " + name(peer) +
             (idle.empty() ? "; every rank waits for another" : "; not waiting: rank " + idle);
    });
    if (end == detail::wait_end::ready) mark.store(-1, std::memory_order_release);  // else the mark stays, for others
    else pass(h, end, world_->culprit(peer));
  }

  // This rank's block of a native all-reduce, from every rank's buffer and to every rank's.
  bool reduce_block(std::uint64_t call, std::size_t count, const leaf& l, double factor) {
    const auto me = static_cast<std::size_t>(rank_), p = static_cast<std::size_t>(size());
    const std::size_t line = (std::max<std::size_t>)(1, 64 / l.bytes);
    const std::size_t share = ((count + p - 1) / p + line - 1) / line * line;
    // Blocks begin on a cache line of rank 0's buffer, and so of all that lie alike; rank 0 takes what is before the
    // first one, too. Vectors across two lines would cost a fifth of the time.
    const auto origin = reinterpret_cast<std::uintptr_t>(world_->tells(0, call).out);
    const std::size_t lead = count > 64 ? (0 - origin) % 64 / l.bytes : 0;
    const std::size_t end = (std::min)(count, share * (me + 1) + lead), first = (std::min)(count, share * me + lead);
    // A piece of all ranks is in a near cache while it is stored. Every other call goes backwards: what the one before
    // touched last is still cached. Where most isn't, it does so in runs that go up, as memory is read ahead.
    const std::size_t run = (end - first) * p * l.bytes > 4194304 ? 64 : 1;
    const std::size_t step = (std::max<std::size_t>)(1, (run > 1 ? 4096 : 2048) / l.bytes);
    const std::size_t places = (end - first + step * run - 1) / (step * run) * run;
    bool left_range = false;
    for (std::size_t k = 0; k < places; ++k) {
      const std::size_t at = first + (call % 2 ? k : (places - 1 - k) ^ (run - 1)) * step, i = at == lead ? 0 : at;
      if (at >= end) continue;
      const std::size_t m = (std::min)(at + step, end) - i, offset = i * l.bytes;
      for (std::size_t r = 0; r < p; ++r)
        operands_[r] = {static_cast<const std::byte*>(world_->tells(static_cast<int>(r), call).in) + offset, 0};
      std::byte* const mine = static_cast<std::byte*>(world_->tells(rank_, call).out) + offset;
      left_range |= l.reduce(l.context, operands_.data(), static_cast<int>(p), mine, m, 0, factor);
      for (int r = 0; r < size(); ++r) {
        std::byte* const theirs = static_cast<std::byte*>(world_->tells(r, call).out) + offset;
        if (theirs != mine) std::memcpy(theirs, mine, m * l.bytes);
      }
    }
    return left_range;
  }

  // Calls f; tells every rank if it throws.
  template <class Function>
  bool guarded(Function&& f) {
    try {
      return f();
    } catch (...) {
      world_->shared->fail(known(), "the reduction of rank " + name(rank_) +
                                      " threw: " + detail::text_of(std::current_exception()));
      throw;
    }
  }

  // Waits until every rank has told its part of a call, or throws.
  void hear_all(const header& h, std::uint64_t call) {
    const auto come = [&](int r) { return world_->tells(r, call).call.load(std::memory_order_seq_cst) == call; };
    int next = 0;
    const auto all = [&] {
      while (next < size() && come(next)) ++next;
      return next == size();
    };
    const detail::wait_end end = world_->shared->wait(known(), all, true, [&] { return stalled(h) + missing(come); });
    if (end != detail::wait_end::ready) pass(h, end, next);
  }

  // Waits at the gate, or throws; with `must_open` it can't fail.
  void meet(const header& h, bool must_open) {
    const auto gates = [&](int r) -> auto& { return world_->standing_of(r).gates; };
    const std::uint64_t times = gates(rank_).fetch_add(1, std::memory_order_acq_rel) + 1;
    const auto come = [&](int r) { return gates(r).load(std::memory_order_acquire) >= times; };
    const detail::wait_end end = world_->door.arrive_and_wait(*world_->shared, known(), world_->members, must_open,
                                                              [&] { return stalled(h) + missing(come); });
    if (end == detail::wait_end::ready) return;
    int absent = 0;
    while (absent < size() && come(absent)) ++absent;
    pass(h, end, absent < size() ? absent : -1);
  }

  // The ranks that have not come, as text.
  template <class Come>
  std::string missing(Come&& come) const {
    std::string text;
    for (int r = 0; r < size(); ++r) {
      if (!come(r)) text += (text.empty() ? "rank " : ", ") + name(r);
    }
    return text;
  }

  // The beginning of a stall report.
  std::string stalled(const header& h) const {
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(world_->shared->stall().after);
    return "rank " + name(rank_) + " has waited in " + heddle::detail::describe(h) + " for more than " +
           std::to_string(ms.count()) + " ms for ";
  }

  // Throws unless the wait ended well; tells every rank why.
  void pass(const header& h, detail::wait_end end, int peer) {
    Session& s = *world_->shared;
    if (end == detail::wait_end::ready) return;
    if (end == detail::wait_end::failed) throw comm_error(name_of(h.kind), known(), s.failed(), s.failure());
    const std::string text =
        (peer >= 0 ? "rank " + name(peer) : std::string("a rank")) + " did not reach " +
        heddle::detail::describe(h, 0) + " of rank " + name(rank_) + " within " +
        std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(s.deadline()).count()) + " ms";
    s.fail(world_->known(peer >= 0 ? peer : rank_), text);
    throw comm_error(name_of(h.kind), known(), peer >= 0 ? world_->known(peer) : peer, text);
  }

  [[noreturn]] void mismatch(const header& h, std::size_t bytes, int peer, const header& theirs,
                             std::size_t their_bytes, bool of_element = false) {
    const std::string text = "calls differ: rank " + name(rank_) + " is in " +
                             heddle::detail::describe(h, bytes, of_element) + ", rank " + name(peer) + " is in " +
                             heddle::detail::describe(theirs, their_bytes, of_element);
    world_->shared->fail(known(), text);
    throw comm_error(name_of(h.kind), known(), world_->known(peer), text);
  }

  void post(const header& h, std::span<const outgoing> out) {
    for (const outgoing& m : out) {
      if (m.peer < 0 || m.peer >= size() || m.peer == rank_) {
        throw argument_error("heddle::threads::exchange: peer " + std::to_string(m.peer) + " of rank " +
                             std::to_string(rank_) + " is not one of the other " + std::to_string(size() - 1) +
                             " ranks");
      }
      auto& b = world_->between(rank_, m.peer);
      if (!b.filling) {
        b.filling = true;
        b.messages.clear();
        sent_.push_back(m.peer);
      }
      b.messages.push_back(m);
    }
    for (const int peer : sent_) {
      auto& b = world_->between(rank_, peer);
      b.filling = false;
      b.head = h;
      b.state.store(b.posted, std::memory_order_seq_cst);
      world_->ring(peer);
    }
  }

  void collect(const header& h, std::span<const incoming> in) {
    arrivals_.clear();
    for (const incoming& m : in) {
      if (m.peer < 0 || m.peer >= size() || m.peer == rank_) {
        throw argument_error("heddle::threads::exchange: peer " + std::to_string(m.peer) + " is not another rank");
      }
      auto& b = world_->between(m.peer, rank_);
      if (b.state.load(std::memory_order_relaxed) != b.reading) {
        const auto take = [&] {
          int posted = b.posted;
          return b.state.compare_exchange_strong(posted, b.reading, std::memory_order_seq_cst);
        };
        await(h, m.peer, take);
        read_.push_back(m.peer);
        b.taken = 0;
      }
      const std::size_t k = b.taken++;
      const std::size_t bytes = k < b.messages.size() ? b.messages[k].bytes : 0;
      if (!b.head.matches(h) || bytes != m.bytes) mismatch(h, m.bytes, m.peer, b.head, bytes);
      if (m.into) std::memcpy(m.into, b.messages[k].data, bytes);
      arrivals_.push_back({m.into ? m.into : b.messages[k].data, b.messages[k].contributors});
    }
    for (const int peer : read_) {
      auto& b = world_->between(peer, rank_);
      if (b.taken != b.messages.size()) mismatch(h, 0, peer, b.head, b.messages[b.taken].bytes);
    }
  }

  void release() noexcept {
    for (const int peer : read_) {
      auto& b = world_->between(peer, rank_);
      b.state.store(b.empty, std::memory_order_seq_cst);
      world_->ring(peer);
    }
    read_.clear();
  }

  // First tell everybody, then let nobody begin to read here, then wait for those who have begun.
  void retreat() noexcept {
    Session& s = *world_->shared;
    const std::string why = detail::text_of(std::current_exception());
    if (s.failed() < 0) s.fail(known(), "an exchange of rank " + name(rank_) + " failed: " + why);
    release();
    for (const int peer : sent_) {
      auto& b = world_->between(rank_, peer);
      b.filling = false;
      int posted = b.posted;
      if (b.state.compare_exchange_strong(posted, b.empty, std::memory_order_seq_cst)) continue;
      const auto read = [&] { return b.state.load(std::memory_order_seq_cst) == b.empty; };
      s.wait(known(), read, false, [&] { return stalled(b.head) + "rank " + name(peer) + " to stop reading"; });
    }
  }

  std::shared_ptr<world> world_;
  int rank_;
  std::uint16_t sequence_ = 0;
  std::vector<int> sent_, read_;  // peers of this round
  std::vector<arrival> arrivals_;
  std::vector<operand> operands_;
  heddle::detail::level_cache<basic_communicator> levels_;
};

/// @brief The communicator that threads::run hands to each rank.
using communicator = basic_communicator<detail::session>;
static_assert(heddle::communicator<communicator> && has_native_all_reduce<communicator> && has_levels<communicator>);

namespace detail {
// Everything of `run` that does not depend on the function, so that each call site costs a few instructions.
template <class Session>
void run_ranks(const options& o, void (*call)(void*, basic_communicator<Session>&), void* f) {
  if (o.ranks < 1)
    throw argument_error("heddle::threads::run: ranks is " + std::to_string(o.ranks) + ", allowed is 1 or more");
  const heddle::detail::stall_report stall{o.stall, o.on_stall, o.stall_context};
  auto shared = std::make_shared<Session>(o.ranks, o.deadline, stall);
  std::vector<int> numbers;
  for (int r = 0; r < o.ranks; ++r) numbers.push_back(r);
  auto w = std::make_shared<world<Session>>(shared, std::move(numbers));
  std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(o.ranks));
  std::atomic<int> first{-1};
  const auto body = [&](int rank) {
    const auto record = [&](const std::string& text) {
      thrown[static_cast<std::size_t>(rank)] = std::current_exception();
      int none = -1;
      first.compare_exchange_strong(none, rank);
      shared->fail(rank, text);
    };
    try {
      basic_communicator<Session> comm(w, rank);
      call(f, comm);
    } catch (...) {
      record("rank " + std::to_string(rank) + " threw: " + text_of(std::current_exception()));
    }
  };
  {
    std::vector<std::jthread> ranks;
    ranks.reserve(thrown.size());
    for (int r = 1; r < o.ranks; ++r) ranks.emplace_back(body, r);
    body(0);
  }
  const int cause = shared->failed();
  if (cause >= 0 && thrown[static_cast<std::size_t>(cause)])
    std::rethrow_exception(thrown[static_cast<std::size_t>(cause)]);
  if (first >= 0) std::rethrow_exception(thrown[static_cast<std::size_t>(first.load())]);
}
}  // namespace detail

/// @brief Runs f(comm) on `o.ranks` threads, one per rank, and returns when every rank has ended.
/// Throws: the first exception of any rank, after all have ended: a rank that throws makes every other rank's pending
/// call fail with comm_error naming it. argument_error if ranks < 1.
template <class Function, class Session = detail::session>
void run(const options& o, Function&& f) {
  std::remove_reference_t<Function>* const pointer = std::addressof(f);  // may be one to a function
  const auto call = [](void* p, basic_communicator<Session>& comm) { (**static_cast<decltype(&pointer)>(p))(comm); };
  detail::run_ranks<Session>(o, call, const_cast<std::remove_reference_t<Function>**>(&pointer));
}

/// @brief run(options{.ranks = n}, f).
template <class Function>
void run(int n, Function&& f) {
  run(options{.ranks = n}, std::forward<Function>(f));
}

}  // namespace threads
}  // namespace v0
}  // namespace heddle

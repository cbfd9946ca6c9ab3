// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <heddle/comm/detail/levels.hpp>
#include <heddle/comm/detail/mpi_native.hpp>

#include <dlfcn.h>

namespace heddle {
inline namespace v0 {
namespace mpi {

/// @brief A rank of an MPI communicator, which it borrows: it works on a duplicate.
///
/// A message of up to 32 KiB travels behind its header. For longer ones the receiver first says, once per peer and
/// collective call, that it is in the call; then they go straight from the caller's memory to where they are wanted. A
/// schedule's receivers say so to all senders when the call begins. Messages above 576 KiB are cut into some of about
/// 384 KiB, 64 at most; what is reduced is received and reduced one by one, where all messages of a round are equally
/// long and of different peers. A call ends when all that was begun has arrived. When it fails on one rank, all say how
/// much they have begun; that still arrives, and other receives are withdrawn: nothing is read or written after the
/// call has thrown. If a peer doesn't do its part within another deadline (its process is stopped), MPI_Abort ends the
/// job.
///
/// Waiting is polling by the calling thread, with yields and then short sleeps; there is no progress thread, since no
/// transfer is pending outside a call, and data_parallel calls from a thread of its own, or from the program's
/// (`options::progress`).
/// Wire:   the payload and 24 bytes per message; 24 bytes more per call from each receiver of long ones.
/// State:  the received bytes of one round that are only lent to `apply`, or two parts of each of its messages;
/// addresses for 32 KiB per message, of which a short one touches a few.
/// Sync:   every member but the getters blocks until its part is done; the constructor, as MPI_Comm_dup, without a
/// deadline. The destructor of the last copy waits up to a second for the other ranks; if they don't come, or somebody
/// has failed, the MPI communicator stays until MPI_Finalize.
/// Throws: comm_error naming the rank at fault, or with MPI's text; thread_level_error.
class communicator : private detail::natives {
 public:
  /// @brief Works on a duplicate of `user`, with its error handler set to MPI_ERRORS_RETURN. Collective.
  /// @param user An intra-communicator; not used any more afterwards. @param o Settings.
  /// Throws: argument_error if MPI isn't running, `user` isn't an intra-communicator, `piece` is out of range, or it or
  /// whether `time` is a simulator's differs between ranks; thread_level_error.
  explicit communicator(MPI_Comm user, const options& o = {})
      : communicator(std::make_shared<detail::session>(user, o, false)) {}

  using rounds::rank;
  using rounds::size;
  /// Number of the next call.
  std::uint16_t next_sequence() noexcept { return channel_->sequence++; }
  /// A collective call begins: rounds that come with its header are of one call, however they are numbered.
  void begin(const header& h) noexcept { channel_->begin(h); }
  /// Who makes messages move while the program computes, as in the settings.
  heddle::progress progress() const noexcept { return session_->settings().progress; }
  /// Name of the machine that this rank runs on, as MPI knows it.
  const std::string& host() const noexcept { return session_->host(); }

  /// @brief Makes every pending and later call of every rank throw comm_error naming this rank and `text`. Others hear
  /// of it while they wait, or in their next call.
  void fail(const std::string& text) { natives::fail(text); }

  /// @brief A second communicator of the same ranks, for another thread. Collective.
  communicator duplicate() {
    int number = rank() == 0 ? session_->give_channel() : 0;
    const header h{.kind = operation_kind::control, .count = 1};
    std::vector<outgoing> out;
    std::vector<incoming> in;
    for (int r = 1; r < size() && rank() == 0; ++r) out.push_back({r, &number, sizeof number, 1});
    if (rank() != 0) in.push_back({0, &number, sizeof number});
    exchange(h, out, in, [](std::span<const arrival>) {});
    return {session_, number, another(number)};
  }

  static constexpr bool parts_count_anew = true;  ///< Errors of what split() gives number its ranks.

  /// @brief A communicator of the ranks that give the same `color`, in the order of `key`, then of their ranks here.
  /// Collective. A failure there isn't heard of here. Below MPI_THREAD_MULTIPLE no other thread may split meanwhile.
  /// @param color Which group, 0 or above. @param key Place in the group.
  /// Throws: argument_error if color is negative; comm_error.
  communicator split(int color, int key = 0) {
    if (color < 0) {
      const std::string text = "heddle::mpi::communicator::split: color is " + std::to_string(color) +
                               ", allowed is 0 or above";
      fail(text);
      throw argument_error(text);
    }
    return communicator(part(color, key));
  }

  /// @brief Communicators of this rank's group of `group` consecutive ranks and of those with its place in theirs; they
  /// are kept.
  /// @param group Ranks of a group, at least 1; the last group may be smaller. The first call is collective, as split.
  auto& levels(int group) { return levels_.of(*this, group); }

  /// Number of the machine that a rank runs on: 0, 1, 2 .. in the order of their lowest ranks. Ranks that share memory,
  /// as MPI_Comm_split_type sees it, share a machine.
  int node_of(int rank) const { return session_->nodes().at(static_cast<std::size_t>(rank)); }
  /// Ranks on each machine, for `hierarchical{.group = ...}`: if every machine has a run of as many consecutive ranks,
  /// and the last one no more; else 0.
  int ranks_per_node() const noexcept { return detail::per_node(session_->nodes()); }

  /// @brief One round; see the communicator concept.
  template <class Apply>
  void exchange(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    run(h, out, in, std::forward<Apply>(apply));
  }

  /// @brief MPI_Iallreduce, once all ranks have told each other that they are in this call. With MPI's own type and
  /// operation where they do the same; else the leaf is an operation of MPI. Sums of 16-bit types travel as floats.
  /// Wire:   ceil(log2 P) messages of a header and 8 bytes, and what MPI does; 4 bytes per element for sums of 16 bits.
  /// State:  up to 4 MiB for sums of 16-bit types.
  /// Error:  what MPI promises for the order; partial results have the element's type, of 16-bit sums float.
  /// Throws: comm_error. A process that is stopped inside makes the others end the job by MPI_Abort after the deadline.
  /// @param h Header; its `count` must be `count`. @param in Input; equal to `out` or apart. @param out Output.
  /// @param count Elements. @param l The reduction.
  /// @return Whether a finite result left the range of its 16-bit type.
  bool native_all_reduce(const header& h, const void* in, void* out, std::size_t count, const leaf& l) {
    return reduce(h, in, out, count, l);
  }

  /// @brief MPI_Ireduce_scatter in place, once all ranks have told each other that they are in this call. A mean isn't
  /// divided. Sums of 16-bit types are rounded where MPI adds; more than options::piece bytes are all-reduced.
  /// @param h Header. @param data All blocks, one after the other; this rank's is final afterwards, others are scratch.
  /// @param counts Elements of each rank's block. @param l The reduction.
  /// @return Whether a finite result left the range of its 16-bit type.
  bool native_reduce_scatter(const header& h, void* data, std::span<const std::size_t> counts, const leaf& l) {
    return scatter(h, data, counts, l);
  }
  /// @brief MPI_Iallgatherv in place, once all ranks have told each other that they are in this call; above
  /// options::piece bytes a broadcast of each block.
  /// @param h Header. @param data All blocks, one after the other. @param counts Elements of each rank's block.
  /// @param bytes Bytes of an element.
  void native_all_gather(const header& h, void* data, std::span<const std::size_t> counts, std::size_t bytes) {
    gather(h, data, counts, bytes);
  }

 private:
  friend communicator world(const options& o);

  explicit communicator(std::shared_ptr<detail::session> s) : natives(s, s->give_channel(), MPI_COMM_NULL) {}
  communicator(std::shared_ptr<detail::session> s, int number, MPI_Comm own)
      : natives(std::move(s), number, own) {}

  heddle::detail::level_cache<communicator> levels_;
};
static_assert(heddle::communicator<communicator> && has_native_all_reduce<communicator> &&
              has_native_halves<communicator> && has_levels<communicator>);

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
    return communicator(std::move(s));
  } catch (...) {
    if (mine) MPI_Finalize();
    throw;
  }
}

/// @brief Whether MPI says that it reads and writes device memory: then `staged` needn't copy. Asks the function
/// MPIX_Query_cuda_support of Open MPI and MPICH by name, since not every MPI has it; false where there is none.
inline bool cuda_aware() {
  using query = int (*)();
  const auto ask = reinterpret_cast<query>(dlsym(RTLD_DEFAULT, "MPIX_Query_cuda_support"));
  return ask && ask() == 1;
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

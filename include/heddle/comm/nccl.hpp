// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <heddle/comm/detail/nccl_session.hpp>
#include <heddle/comm/detail/wrapper.hpp>

#include <optional>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace nccl {

class communicator;
template <class Share>
communicator connect(int rank, int size, Share&& share, cudaStream_t stream, const options& o = {});

/// @brief A rank of an NCCL communicator, with one stream of this rank's device.
///
/// It works in the stream's order: `exchange` enqueues one group of sends and receives and returns, `apply` then
/// enqueues what shall happen to the messages, and what the communicator concept promises for the return of `exchange`
/// holds for later work of the stream. Buffers lie in memory that the device can reach. Leaves must enqueue too
/// (`bulk_leaf` on the same stream). Messages have no headers: ranks whose calls differ are NCCL's undefined behaviour.
///
/// A failure ends the communicator and all that were made from it, on this rank: it marks them, then aborts those which
/// it has made itself. Other ranks learn of it from NCCL, if that notices, or from the deadline.
/// Wire:   the payload.
/// State:  device memory for the received bytes of one round that are only lent to `apply`, and for `scratch`.
/// Threads: one at a time, with the rank's device as its current one.
/// Sync:   everything enqueues, but `synchronize`, `split`, `duplicate` and their kind block. The destructor waits for
///         the stream, up to a deadline; if that is not enough it aborts.
/// Throws: comm_error, naming the call of NCCL or CUDA, when it fails, when NCCL reports an error that happened since,
///         or when a peer doesn't come within the deadline.
class communicator {
 public:
  /// @brief Works on a communicator of the user's, which is neither aborted nor destroyed here.
  /// @param user An NCCL communicator, blocking or not. @param stream A stream of its device; both must outlive this.
  /// @param o Settings.
  communicator(ncclComm_t user, cudaStream_t stream, const options& o = {})
      : link_(std::make_shared<detail::link>(std::make_shared<detail::session>(o), user, stream)) {}

  /// This rank, 0 .. size() - 1.
  int rank() const noexcept { return link_->rank; }
  /// Number of ranks.
  int size() const noexcept { return link_->size; }
  /// Number of the next call.
  std::uint16_t next_sequence() noexcept { return sequence_++; }
  /// The stream that it works in.
  cudaStream_t stream() const noexcept { return link_->stream; }
  /// NCCL's own handle, for calls that are not here; it is gone after a failure.
  ncclComm_t get() const noexcept { return link_->comm; }

  /// @brief Ends this communicator and its relatives on this rank; later calls throw comm_error with `text`.
  void fail(const std::string& text) { link_->shared->fail(text); }

  /// @brief Waits until everything enqueued in the stream is done.
  /// Throws: comm_error when NCCL reports an error, or nothing ends within the deadline.
  void synchronize() {
    detail::link& l = *link_;
    const auto start = detail::clock::now();
    cudaError_t code;
    while ((code = cudaStreamQuery(l.stream)) == cudaErrorNotReady) {
      l.require("synchronize");
      l.require_time("synchronize", detail::clock::now() - start);
      detail::rest(detail::clock::now() - start);
    }
    detail::forget_not_ready();
    l.require("synchronize");
    l.check("cudaStreamQuery", code);
  }

  /// @brief A second communicator of the same ranks. Collective.
  communicator duplicate() { return *split(0, rank()); }

  /// @brief The ranks that give the same color, ordered by key, then rank, on the same stream. Collective.
  /// @param color 0 or more, or NCCL_SPLIT_NOCOLOR for a rank that gets none. @param key Orders the ranks.
  std::optional<communicator> split(int color, int key) {
    detail::link& l = *link_;
    l.require("split");
    const auto make = [&](ncclComm_t* made) {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = l.shared->settings.blocking ? 1 : 0;
      return ncclCommSplit(l.comm, color, key, made, &config);
    };
    auto made = std::make_shared<detail::link>(l.shared, l.stream, l.rank, &l, make);
    if (!made->comm) return std::nullopt;
    return communicator(std::move(made));
  }

  /// @brief The machine of each rank, by `options::host`: 0, 1, 2 .. in the order of their lowest ranks. Collective;
  /// synchronises.
  std::vector<int> machines() {
    const auto hosts = host_hashes();
    std::vector<int> all;
    for (std::size_t r = 0, seen = 0; r < hosts.size(); ++r) {
      const auto before = static_cast<std::size_t>(std::find(hosts.begin(), hosts.end(), hosts[r]) - hosts.begin());
      all.push_back(before < r ? all[before] : static_cast<int>(seen++));
    }
    return all;
  }

  /// @brief The ranks of one machine, by `options::host`. Collective; synchronises.
  communicator split_by_host() {
    const auto hosts = host_hashes();
    const auto mine = static_cast<std::size_t>(rank());
    return *split(static_cast<int>(std::find(hosts.begin(), hosts.end(), hosts[mine]) - hosts.begin()), rank());
  }

  /// @brief The ranks that have the same place on their machines: the first of each, the second of each and so on; on
  /// machines of unequal size the later ones are fewer. Collective; synchronises.
  communicator split_across_hosts() {
    const auto hosts = host_hashes();
    const auto mine = hosts.begin() + rank();
    return *split(static_cast<int>(std::count(hosts.begin(), mine, *mine)), rank());
  }

  /// @brief One round, enqueued; see above and the communicator concept.
  template <class Apply>
  void exchange(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    detail::link& l = *link_;
    l.require(name_of(h.kind));
    std::size_t lent = 0;
    for (const incoming& m : in) lent += m.into ? 0 : rounded(m.bytes);
    l.check("cudaMallocAsync", l.stage.reserve(lent));
    arrivals_.clear();
    lent = 0;
    if (!out.empty() || !in.empty()) {
      l.check("ncclGroupStart", ncclGroupStart());
      ncclResult_t code = ncclSuccess;
      for (const outgoing& m : out) {
        if (code == ncclSuccess) code = ncclSend(m.data, m.bytes, ncclUint8, m.peer, l.comm, l.stream);
      }
      for (const incoming& m : in) {
        void* const to = m.into ? m.into : l.stage.data() + lent;
        lent += m.into ? 0 : rounded(m.bytes);
        if (code == ncclSuccess) code = ncclRecv(to, m.bytes, ncclUint8, m.peer, l.comm, l.stream);
        arrivals_.push_back({to, 1});
      }
      const ncclResult_t end = ncclGroupEnd();  // in any case: an open group would swallow what follows
      l.check("ncclSend or ncclRecv", code);
      l.settle("ncclGroupEnd", end);
    }
    std::forward<Apply>(apply)(std::span<const arrival>(arrivals_));
  }

  /// Device memory of at least so many bytes, aligned to 256; the next call may give the same.
  void* scratch(std::size_t bytes) {
    link_->check("cudaMallocAsync", link_->scratch.reserve(bytes));
    return link_->scratch.data();
  }
  /// Enqueues a copy of so many bytes.
  void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes) link_->check("cudaMemcpyAsync", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, link_->stream));
  }

  /// @brief NCCL's all-reduce, enqueued. A mean is NCCL's sum, divided once by `l`; of float16 it is NCCL's average,
  /// which divides first, since the sum might leave the range. NCCL drops a NaN in min and max.
  /// @param h Header. @param in Input, may equal `out`. @param out Output. @param count Elements. @param l The leaf.
  /// Throws: argument_error for an operation or type that NCCL hasn't.
  bool native_all_reduce(const header& h, const void* in, void* out, std::size_t count, const leaf& l) {
    const ncclDataType_t type = type_of(l.type);
    const bool divided_first = l.id == heddle::detail::reduction_id<mean> && l.type == dtype::f16;
    const ncclRedOp_t op = divided_first ? ncclAvg : operation_of(l);
    native(h, [&](detail::link& k) { return ncclAllReduce(in, out, count, type, op, k.comm, k.stream); });
    return l.average && !divided_first && count ? divide(out, count, l) : false;
  }

  /// @brief NCCL's reduce-scatter of `count` elements for each rank, enqueued.
  /// @param in size() * count elements. @param out This rank's; may be its place in `in`.
  bool native_reduce_scatter(const header& h, const void* in, void* out, std::size_t count, const leaf& l) {
    const ncclDataType_t type = type_of(l.type);
    const bool divided_first = l.id == heddle::detail::reduction_id<mean> && l.type == dtype::f16;
    const ncclRedOp_t op = divided_first ? ncclAvg : operation_of(l);
    native(h, [&](detail::link& k) { return ncclReduceScatter(in, out, count, type, op, k.comm, k.stream); });
    return l.average && !divided_first && count ? divide(out, count, l) : false;
  }

  /// @brief NCCL's all-gather of `bytes` bytes of each rank, enqueued. @param in May be this rank's place in `out`.
  void native_all_gather(const header& h, const void* in, void* out, std::size_t bytes) {
    native(h, [&](detail::link& k) { return ncclAllGather(in, out, bytes, ncclUint8, k.comm, k.stream); });
  }

  /// @brief NCCL's broadcast of `bytes` bytes, in place, enqueued.
  void native_broadcast(const header& h, void* data, std::size_t bytes, int root) {
    native(h, [&](detail::link& k) { return ncclBroadcast(data, data, bytes, ncclUint8, root, k.comm, k.stream); });
  }

 private:
  template <class Share>
  friend communicator connect(int rank, int size, Share&& share, cudaStream_t stream, const options& o);

  explicit communicator(std::shared_ptr<detail::link> l) : link_(std::move(l)) {}

  static std::size_t rounded(std::size_t bytes) noexcept { return (bytes + 255) / 256 * 256; }

  static ncclDataType_t type_of(dtype t) {
    const int type = detail::type_of(t);
    if (type < 0) throw argument_error("heddle::nccl: NCCL has no such element type; use a schedule such as ring{}");
    return static_cast<ncclDataType_t>(type);
  }
  static ncclRedOp_t operation_of(const leaf& l) {
    switch (l.id) {
      case 1:
      case 2: return ncclSum;
      case 3: return ncclMin;
      case 4: return ncclMax;
      case 5: return ncclProd;
      default: throw argument_error("heddle::nccl: NCCL has no user operations; use a schedule such as ring{}");
    }
  }
  bool divide(void* out, std::size_t count, const leaf& l) {
    const operand x{out, 0};
    return l.reduce(l.context, &x, 1, out, count, 0, 1.0 / size());
  }
  template <class Call>
  void native(const header& h, Call&& call) {
    link_->require(name_of(h.kind));  // first: after a failure there is no NCCL communicator to call
    link_->settle(name_of(h.kind), call(*link_));
  }

  // Of every rank's machine.
  std::vector<std::uint64_t> host_hashes() {
    std::vector<std::uint64_t> all(static_cast<std::size_t>(size()));
    const std::uint64_t mine = detail::hash_of(link_->shared->settings.host);
    auto* const there = static_cast<std::uint64_t*>(scratch(all.size() * sizeof mine));
    copy(there + rank(), &mine, sizeof mine);
    native_all_gather({}, there + rank(), there, sizeof mine);
    copy(all.data(), there, all.size() * sizeof mine);
    synchronize();
    return all;
  }

  std::shared_ptr<detail::link> link_;
  std::uint16_t sequence_ = 0;
  std::vector<arrival> arrivals_;
};
static_assert(heddle::communicator<communicator> && stream_ordered<communicator> &&
              has_native_all_reduce<communicator>);

/// @brief An NCCL communicator whose all-reduce (`native{}`) has two levels: reduce-scatter inside a machine,
/// all-reduce of the ranks that have the same place across machines, all-gather inside, each of them NCCL's own.
///
/// Machines are told apart by `options::host`. Where they have unequally many ranks, one each, or where there is one
/// only, it is NCCL's flat all-reduce. Everything else is the communicator's.
/// Wire:   2 n (X - 1) / X inside, 2 (n / X) (Y - 1) / Y across, on Y machines of X ranks.
/// State:  two communicators of NCCL's more.
/// Sync:   the constructor and `duplicate` block; the all-reduce enqueues.
/// Error:  what NCCL promises on each level; a mean divides once, but of float16, where NCCL divides on both.
class two_level : public heddle::detail::wrapper<communicator> {
 public:
  /// Splits `comm`. Collective.
  explicit two_level(communicator comm) : wrapper(std::move(comm)) {
    const std::vector<int> machine = inner_.machines();
    const int machines = 1 + *std::max_element(machine.begin(), machine.end()), each = size() / machines;
    bool even = machines > 1 && each > 1;
    for (int m = 0; m < machines; ++m) even &= std::count(machine.begin(), machine.end(), m) == each;
    if (!even) return;
    inside_.emplace(inner_.split_by_host());
    across_.emplace(inner_.split_across_hosts());
  }

  /// A second one of the same ranks. Collective.
  two_level duplicate() { return two_level(inner_.duplicate()); }
  /// The stream that it works in.
  cudaStream_t stream() const noexcept { return inner_.stream(); }
  /// Whether there are two levels.
  bool levels() const noexcept { return inside_.has_value(); }

  /// Forwards.
  template <class Apply>
  void exchange(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    inner_.exchange(h, out, in, std::forward<Apply>(apply));
  }

  /// @brief The all-reduce, enqueued; see communicator::native_all_reduce. Elements that can't be divided among the
  /// ranks of a machine, fewer than there are of them, are reduced flat.
  bool native_all_reduce(const header& h, const void* in, void* out, std::size_t count, const leaf& l) {
    if (!inside_) return inner_.native_all_reduce(h, in, out, count, l);
    const bool divides = l.id == heddle::detail::reduction_id<mean> && l.type != dtype::f16;
    leaf part = l;
    if (divides) {
      part.id = heddle::detail::reduction_id<sum>;
      part.average = false;
    }
    const std::size_t block = count / static_cast<std::size_t>(inside_->size());
    const std::size_t bytes = block * l.bytes, whole = bytes * static_cast<std::size_t>(inside_->size());
    auto* const to = static_cast<std::byte*>(out);
    std::byte* const mine = to + bytes * static_cast<std::size_t>(inside_->rank());
    const std::size_t rest = count % static_cast<std::size_t>(inside_->size());
    if (rest) inner_.native_all_reduce(h, static_cast<const std::byte*>(in) + whole, to + whole, rest, part);
    if (block) {
      inside_->native_reduce_scatter(h, in, mine, block, part);
      across_->native_all_reduce(h, mine, mine, block, part);
      inside_->native_all_gather(h, mine, out, bytes);
    }
    const operand all{out, 0};
    return divides && count && l.reduce(l.context, &all, 1, out, count, 0, 1.0 / size());
  }

 private:
  std::optional<communicator> inside_, across_;
};
static_assert(heddle::communicator<two_level> && stream_ordered<two_level> && has_native_all_reduce<two_level>);

/// @brief Makes a communicator of `size` ranks. Collective.
/// @param rank This rank. @param size Number of ranks.
/// @param share Called once with an ncclUniqueId&, which rank 0 has filled: gives every rank rank 0's, for example
/// `[](ncclUniqueId& id) { MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD); MPI_Barrier(MPI_COMM_WORLD); }`. If
/// NCCL's calls shall block, it must not return on any rank before all have the id.
/// @param stream A stream of the calling thread's current device, which becomes the rank's. It must outlive the result.
/// @param o Settings.
/// Throws: comm_error when a peer doesn't come within the deadline; argument_error for a rank out of range.
template <class Share>
communicator connect(int rank, int size, Share&& share, cudaStream_t stream, const options& o) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw argument_error("heddle::nccl::connect: rank " + std::to_string(rank) + " of " + std::to_string(size) +
                         ", allowed is 0 to size - 1");
  }
  ncclUniqueId id{};
  if (rank == 0) {
    if (const ncclResult_t code = ncclGetUniqueId(&id); code != ncclSuccess)
      throw comm_error("connect", rank, -1, std::string("ncclGetUniqueId: ") + ncclGetErrorString(code));
  }
  std::forward<Share>(share)(id);
  const auto make = [&](ncclComm_t* made) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = o.blocking ? 1 : 0;
    return ncclCommInitRankConfig(made, size, id, rank, &config);
  };
  return communicator(
      std::make_shared<detail::link>(std::make_shared<detail::session>(o), stream, rank, nullptr, make));
}

/// @brief The same over the ranks of another communicator, such as mpi::world() or that of threads::run.
template <heddle::communicator Comm>
communicator connect(Comm& other, cudaStream_t stream, const options& o = {}) {
  const auto share = [&](ncclUniqueId& id) {
    std::vector<outgoing> out;
    std::vector<incoming> in;
    for (int r = 1; r < other.size() && other.rank() == 0; ++r) out.push_back({r, &id, sizeof id, 1});
    if (other.rank() != 0) in.push_back({0, &id, sizeof id});
    const header h = begin_call(other, {.kind = operation_kind::control, .count = sizeof id});
    // It returns when the messages have been taken, but on a receiver perhaps before another one has its own.
    other.exchange(h, out, in, [](std::span<const arrival>) {});
  };
  return connect(other.rank(), other.size(), share, stream, o);
}

/// @brief For connect: shares the id through a file that all ranks see. Rank 0 writes it, the others wait for it.
/// @param path A file that doesn't exist yet; rank 0's program removes it when all are connected.
/// @param rank This rank. @param deadline How long to wait.
inline auto share_through_file(std::string path, int rank,
                               std::chrono::nanoseconds deadline = std::chrono::seconds(30)) {
  return [path = std::move(path), rank, deadline](ncclUniqueId& id) {
    const auto start = detail::clock::now();
    if (rank == 0) {
      const std::string partial = path + ".partial";
      std::ofstream(partial, std::ios::binary).write(id.internal, sizeof id.internal);
      if (std::rename(partial.c_str(), path.c_str()) != 0) throw file_error("heddle::nccl: can't write " + path);
      return;
    }
    while (!std::ifstream(path, std::ios::binary).read(id.internal, sizeof id.internal)) {
      if (detail::clock::now() - start > deadline)
        throw comm_error("connect", rank, 0, "no NCCL id in " + path + " within the deadline");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  };
}

}  // namespace nccl
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <heddle/comm/detail/nccl_session.hpp>

#include <cstdio>
#include <optional>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace nccl {

class communicator;
template <class Share>
communicator connect(int rank, int size, Share&& share, cudaStream_t stream, const options& o = {});

/// @brief Memory that is registered with the communicators of one rank, until this is destroyed.
/// Made by communicator::register_memory. Destroy it when no collective uses the memory any more, before that is freed,
/// and before the communicator, whose stream and ncclComm_t it needs.
class registration {
 public:
  /// Takes it over.
  registration(registration&& o) noexcept : held_(std::exchange(o.held_, {})) {}
  ~registration() {
    for (const part& p : held_) {
      if (p.handle && p.with->alive()) ncclCommDeregister(p.with->comm, p.handle);  // else it went with that
    }
  }

 private:
  friend class communicator;
  struct part {
    std::shared_ptr<detail::link> with;
    void* handle;
  };
  registration() = default;
  std::vector<part> held_;
};

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
  void synchronize() { link_->drain("synchronize"); }

  /// @brief A second communicator of the same ranks. Collective.
  communicator duplicate() {
    communicator second = *split(0, rank());
    if (levels_) second.split_levels();
    return second;
  }

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

  /// @brief Lets `native{}` reduce in two levels, by communicators of NCCL for inside a machine and across machines.
  ///
  /// `connect` does so by itself, unless options::levels is false. Machines are told apart by `options::host`. Where
  /// they have unequally many ranks, one each, or where there is one only, nothing changes. Collective; blocks.
  void split_levels();
  /// Whether `native{}` has two levels.
  bool levels() const noexcept { return levels_ != nullptr; }

  /// @brief Registers memory of the program's, such as the buckets of its gradients, with this communicator and its
  /// levels, so that the network and the links between devices may read and write it without a copy: all of an
  /// allocation of `nccl_mem`, for which NCCL does so.
  /// @param data Memory of this rank's device. @param bytes Its length; 0 is legal, and registers nothing.
  /// Throws: argument_error for a null pointer or memory that NCCL doesn't take; the communicator is as before then.
  registration register_memory(void* data, std::size_t bytes);

  /// @brief One round, enqueued; see above and the communicator concept.
  template <class Apply>
  void exchange(const header& h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    detail::link& l = *link_;
    l.require(name_of(h.kind));
    std::size_t lent = 0;
    for (const incoming& m : in) lent += m.into ? 0 : rounded(m.bytes);
    l.reserve(l.stage, lent);
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
    link_->reserve(link_->scratch, bytes);
    return link_->scratch.data();
  }
  /// Enqueues a copy of so many bytes.
  void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes) link_->check("cudaMemcpyAsync", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, link_->stream));
  }

  /// @brief NCCL's all-reduce, enqueued; with levels a reduce-scatter inside a machine, an all-reduce of the ranks that
  /// have the same place across machines, and an all-gather inside. Buffers below options::levels_from are reduced
  /// flat, and so is what is left when the ranks of a machine have taken equal blocks of a multiple of 16 bytes. A mean
  /// is NCCL's sum, divided once by `l`; of float16 it is NCCL's average, on each level, which divides first, since the
  /// sum might leave the range. NCCL drops a NaN in min and max.
  /// Wire:   with levels 2 n (X - 1) / X inside, 2 (n / X) (Y - 1) / Y across, on Y machines of X ranks.
  /// @param h Header. @param in Input, may equal `out`. @param out Output. @param count Elements. @param l The leaf.
  /// Throws: argument_error for an operation or type that NCCL hasn't.
  bool native_all_reduce(const header& h, const void* in, void* out, std::size_t count, const leaf& l) {
    const bool divides = l.id == heddle::detail::reduction_id<mean> && l.type != dtype::f16;
    leaf part = l;
    if (divides) part.id = heddle::detail::reduction_id<sum>;
    if (levels_ && count * l.bytes >= link_->shared->settings.levels_from) reduce_in_levels(h, in, out, count, part);
    else reduce_flat(h, in, out, count, part);
    return divides && count ? divide(out, count, l) : false;
  }

  /// @brief NCCL's reduce-scatter of `count` elements for each rank, enqueued.
  /// @param in size() * count elements. @param out This rank's; may be its place in `in`.
  bool native_reduce_scatter(const header& h, const void* in, void* out, std::size_t count, const leaf& l) {
    const bool divides = l.id == heddle::detail::reduction_id<mean> && l.type != dtype::f16;
    const ncclDataType_t type = type_of(l.type);
    const ncclRedOp_t op = divides ? ncclSum : operation_of(l);
    native(h, [&](detail::link& k) { return ncclReduceScatter(in, out, count, type, op, k.comm, k.stream); });
    return divides && count ? divide(out, count, l) : false;
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

  static std::size_t rounded(std::size_t bytes) noexcept { return detail::stream_buffer::rounded(bytes); }

  static ncclDataType_t type_of(dtype t) {
    const int type = detail::type_of(t);
    if (type < 0) throw argument_error("heddle::nccl: NCCL has no such element type; use a schedule such as ring{}");
    return static_cast<ncclDataType_t>(type);
  }
  static ncclRedOp_t operation_of(const leaf& l) {
    switch (l.id) {
      case 1: return ncclSum;
      case 2: return ncclAvg;  // of float16 only
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

  // NCCL's own all-reduce of these ranks; a mean divides first.
  void reduce_flat(const header& h, const void* in, void* out, std::size_t count, const leaf& l) {
    const ncclDataType_t type = type_of(l.type);
    const ncclRedOp_t op = operation_of(l);
    native(h, [&](detail::link& k) { return ncclAllReduce(in, out, count, type, op, k.comm, k.stream); });
  }
  void reduce_in_levels(const header& h, const void* in, void* out, std::size_t count, const leaf& l);

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

  struct level_pair;
  std::shared_ptr<detail::link> link_;
  std::shared_ptr<level_pair> levels_;
  std::uint16_t sequence_ = 0;
  std::vector<arrival> arrivals_;
};
static_assert(heddle::communicator<communicator> && stream_ordered<communicator> &&
              has_native_all_reduce<communicator>);

/// @cond
struct communicator::level_pair {
  communicator inside, across;
};
/// @endcond

inline void communicator::split_levels() {
  const std::vector<int> machine = machines();
  const int several = 1 + *std::max_element(machine.begin(), machine.end()), each = size() / several;
  bool even = several > 1 && each > 1;
  for (int m = 0; m < several; ++m) even &= std::count(machine.begin(), machine.end(), m) == each;
  if (!even) return;
  const auto mine = machine.begin() + rank();
  communicator inside = *split(*mine, rank());
  communicator across = *split(static_cast<int>(std::count(machine.begin(), mine, *mine)), rank());
  levels_ = std::make_shared<level_pair>(level_pair{std::move(inside), std::move(across)});
}

inline void communicator::reduce_in_levels(const header& h, const void* in, void* out, std::size_t count,
                                           const leaf& l) {
  auto& [inside, across] = *levels_;
  const auto ranks = static_cast<std::size_t>(inside.size());
  const std::size_t line = (std::max<std::size_t>)(1, 16 / l.bytes);  // no block begins in the middle of one
  const std::size_t block = count / ranks / line * line, bytes = block * l.bytes, rest = count - block * ranks;
  auto* const to = static_cast<std::byte*>(out);
  std::byte* const mine = to + bytes * static_cast<std::size_t>(inside.rank());
  if (rest) reduce_flat(h, static_cast<const std::byte*>(in) + bytes * ranks, to + bytes * ranks, rest, l);
  if (block == 0) return;
  const ncclDataType_t type = type_of(l.type);
  const ncclRedOp_t op = operation_of(l);
  inside.native(h, [&](detail::link& k) { return ncclReduceScatter(in, mine, block, type, op, k.comm, k.stream); });
  across.reduce_flat(h, mine, mine, block, l);
  inside.native_all_gather(h, mine, out, bytes);
}

inline registration communicator::register_memory(void* data, std::size_t bytes) {
  registration r;
  if (bytes == 0) return r;
  if (!data) throw argument_error("heddle::nccl::register_memory: null, with " + std::to_string(bytes) + " bytes");
  const auto add = [&](const std::shared_ptr<detail::link>& with) {
    with->require("ncclCommRegister");
    r.held_.push_back({with, nullptr});
    const ncclResult_t code = ncclCommRegister(with->comm, data, bytes, &r.held_.back().handle);
    if (code == ncclInvalidArgument) {  // the caller's mistake, of which no communicator has to end
      throw argument_error("heddle::nccl::register_memory: NCCL refuses these " + std::to_string(bytes) +
                           " bytes; allowed is memory of this rank's device");
    }
    with->settle("ncclCommRegister", code);
  };
  add(link_);
  if (levels_) add(levels_->inside.link_), add(levels_->across.link_);
  return r;
}

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
  communicator made(std::make_shared<detail::link>(std::make_shared<detail::session>(o), stream, rank, nullptr, make));
  if (o.levels && size > 3) made.split_levels();
  return made;
}

/// @brief The same over the ranks of another communicator, such as mpi::world() or that of threads::run.
template <heddle::communicator Comm>
communicator connect(Comm& other, cudaStream_t stream, const options& o = {}) {
  const auto share = [&](ncclUniqueId& id) {
    const header h = begin_call(other, {.kind = operation_kind::control, .count = sizeof id});
    // Rank 0 sends to all others, or all others to it.
    const auto star = [&](bool to_root, void* data, std::size_t bytes) {
      std::vector<outgoing> out;
      std::vector<incoming> in;
      for (int r = 1; r < other.size(); ++r) {
        if (other.rank() != 0 && other.rank() != r) continue;
        const int peer = other.rank() == 0 ? r : 0;
        if ((peer == 0) == to_root) out.push_back({peer, data, bytes, 1});
        else in.push_back({peer, to_root ? nullptr : data, bytes});
      }
      other.exchange(h, out, in, [](std::span<const arrival>) {});
    };
    char byte = 0;
    star(false, &id, sizeof id);
    star(true, &byte, 1);  // all have it,
    star(false, &byte, 1);  // and know that
  };
  return connect(other.rank(), other.size(), share, stream, o);
}

/// @brief For connect: shares the id through a file that all ranks see, and returns when all have it.
///
/// Rank 0 writes it, the others say that they have read it by a file `path`.`rank` each, which rank 0 removes.
/// @param path A file that doesn't exist yet; rank 0's program removes it when all are connected.
/// @param rank This rank. @param size Number of ranks. @param deadline How long to wait.
/// Throws: file_error if a file can't be written; comm_error naming the rank that hasn't come within the deadline.
inline auto share_through_file(std::string path, int rank, int size,
                               std::chrono::nanoseconds deadline = std::chrono::seconds(30)) {
  return [path = std::move(path), rank, size, deadline](ncclUniqueId& id) {
    const auto write = [](const std::string& to, const char* bytes, std::size_t n) {
      const std::string partial = to + ".partial";
      std::ofstream file(partial, std::ios::binary);
      file.write(bytes, static_cast<std::streamsize>(n));
      file.close();
      if (!file || std::rename(partial.c_str(), to.c_str()) != 0) throw file_error("heddle::nccl: can't write " + to);
    };
    const auto wait = [&, start = detail::clock::now()](int peer, auto&& come) {
      while (!come()) {
        if (detail::clock::now() - start > deadline)
          throw comm_error("connect", rank, peer, "rank " + std::to_string(peer) + " did not come to " + path +
                                                      " within the deadline");
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    };
    char all[sizeof id.internal + 1] = {};  // the last byte is there when all ranks have the id
    const auto read = [&](std::size_t n) {
      return !!std::ifstream(path, std::ios::binary).read(all, static_cast<std::streamsize>(n));
    };
    if (rank == 0) {
      std::copy_n(id.internal, sizeof id.internal, all);
      write(path, all, sizeof id.internal);
      for (int r = 1; r < size; ++r) wait(r, [&] { return !!std::ifstream(path + "." + std::to_string(r)); });
      for (int r = 1; r < size; ++r) std::remove((path + "." + std::to_string(r)).c_str());
      write(path, all, sizeof all);
    } else {
      wait(0, [&] { return read(sizeof id.internal); });
      std::copy_n(all, sizeof id.internal, id.internal);
      write(path + "." + std::to_string(rank), "", 0);
      wait(0, [&] { return read(sizeof all); });
    }
  };
}

}  // namespace nccl
}  // namespace v0
}  // namespace heddle

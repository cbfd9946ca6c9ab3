// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// NCCL between threads. What NCCL leaves undefined (counts, types or operations that differ, a group left open) is a
// fault that names both sides; what it leaves open (when a nonblocking call takes effect, the order of a sum) is chosen
// by the seed. A send ends only when its receive has begun, and the other way round.

#include "machine.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <nccl.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <utility>

namespace emulated {
namespace {

enum class kind : unsigned char { send, receive, all_reduce, reduce_scatter, all_gather, broadcast, reduce };

constexpr const char* names[] = {"ncclSend",      "ncclRecv",      "ncclAllReduce", "ncclReduceScatter",
                                 "ncclAllGather", "ncclBroadcast", "ncclReduce"};
constexpr const char* type_names[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                      "uint64", "float16", "float32", "float64", "bfloat16"};
constexpr std::size_t type_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

struct operation {
  kind what;
  const void* from;
  void* to;
  std::size_t count;
  ncclDataType_t type;
  int op;    // of a reduction, -1 for none
  int peer;  // or root, -1 for none
  cudaStream_t stream;
};

// How a rank is, for those who meet its operations.
struct status {
  int rank = 0, size = 0;
  std::uint64_t number = 0;  // of the communicator
  bool aborted = false;
  ncclResult_t error = ncclSuccess;
  std::string text;
  std::vector<double> factors;  // of ncclRedOpCreatePreMulSum

  std::string name() const {
    return "rank " + std::to_string(rank) + " of " + std::to_string(size) + " of NCCL communicator " +
           std::to_string(number);
  }
};

struct match;

// One rank's operation, once it is in a stream.
struct part {
  operation o;
  std::shared_ptr<status> of;
  match* in = nullptr;  // the communicator keeps it
  bool posted = false;  // its stream has come to it
  char tag = 0;
};

// What operations of several ranks make together: a collective, or a send and its receive.
struct match {
  std::vector<std::shared_ptr<part>> parts;  // by rank, or the sender and the receiver
  bool done = false, wrong = false;
  char tag = 0;
};

struct split_call {
  std::map<int, std::pair<int, int>> asked;  // color and key, by rank
  std::map<int, std::shared_ptr<struct clique>> made;
};

// The ranks of a communicator.
struct clique {
  int size = 0;
  std::uint64_t number = 0;
  std::map<int, int> devices;                                   // by rank
  std::map<std::uint64_t, match> collectives;                   // by number
  std::map<std::array<std::uint64_t, 3>, match> messages;       // by source, destination, number
  std::map<std::uint64_t, split_call> splits;
  bool complete() const { return static_cast<int>(devices.size()) == size; }
};

// Something that a nonblocking call has begun.
struct pending {
  std::function<bool()> ready;
  std::function<void()> run;
  std::string what;
};

struct rank_state : status {
  std::shared_ptr<clique> of;
  int device = 0;
  bool blocking = true;
  std::vector<pending> begun;
  std::uint64_t collectives = 0, splits = 0;
  std::map<int, std::array<std::uint64_t, 2>> messages;  // sent and received, by peer
};

struct group {
  std::uint64_t generation = 0;
  unsigned depth = 0;
  std::vector<std::pair<std::shared_ptr<rank_state>, operation>> operations;
  std::vector<std::shared_ptr<rank_state>> made;
};
// The calling thread's; one that was left open before reset() is forgotten.
group& own_group(const machine& m) {
  thread_local group g;
  if (g.generation != m.generation) {
    g = {};
    g.generation = m.generation;
  }
  return g;
}

// A buffer that is registered with a communicator; its address is the handle.
struct registered_buffer {
  const rank_state* with;
  const char* begin;
  std::size_t bytes;
};

// What is known of ids and registered buffers, forgotten by reset().
struct registry {
  std::uint64_t generation = 0;
  std::map<std::uint64_t, std::shared_ptr<clique>> by_id;
  std::map<void*, std::unique_ptr<registered_buffer>> buffers;
};
registry& known(machine& m) {
  static registry r;
  if (r.generation != m.generation) {
    r = {};
    r.generation = m.generation;
  }
  return r;
}

std::string describe(const operation& o, const status& of) {
  std::string text = std::string(names[static_cast<unsigned>(o.what)]) + " of " + std::to_string(o.count) + " " +
                     type_names[o.type];
  if (o.op >= 0) text += ", operation " + std::to_string(o.op);
  if (o.peer >= 0) text += (o.what <= kind::receive ? ", peer " : ", root ") + std::to_string(o.peer);
  return text + ", by " + of.name();
}

ncclResult_t fail(status& r, ncclResult_t code, const std::string& text) {
  r.text = text;
  if (code != ncclInvalidArgument && code != ncclInvalidUsage) r.error = code;
  return code;
}

// ---- Waiting

bool settle(rank_state& r) {
  while (!r.begun.empty() && r.begun.front().ready()) {
    const pending first = std::move(r.begun.front());
    r.begun.erase(r.begun.begin());
    first.run();
  }
  return r.begun.empty();
}

// Blocks until what was begun is done; the machine is held before and after.
ncclResult_t wait(machine& m, rank_state& r) {
  const auto since = std::chrono::steady_clock::now();
  while (!settle(r)) {
    const unsigned depth = m.mutex.release();
    usleep(50);
    m.mutex.regain(depth);
    if (r.aborted || r.error != ncclSuccess) return r.error != ncclSuccess ? r.error : ncclInternalError;
    if (std::chrono::steady_clock::now() - since > std::chrono::duration<double>(m.with.stall_seconds)) {
      m.blame(r.begun.front().what + " never ends: not all ranks have called it");
      r.begun.clear();
      return fail(r, ncclSystemError, "not all ranks have come");
    }
  }
  return ncclSuccess;
}

ncclResult_t begin(machine& m, rank_state& r, pending p) {
  r.begun.push_back(std::move(p));
  if (r.blocking) return wait(m, r);
  if (m.random.coin()) settle(r);
  return r.begun.empty() ? ncclSuccess : ncclInProgress;
}

// ---- Moving data

template <class Value> Value combined(int op, Value a, Value b) {
  switch (op) {
    case ncclProd: return static_cast<Value>(a * b);
    case ncclMax: return a < b || a != a ? b : a;  // a NaN is dropped, as by fmax
    case ncclMin: return b < a || a != a ? b : a;
    default: return static_cast<Value>(a + b);
  }
}

template <class Value> constexpr bool whole = std::is_integral_v<Value>;

// The sum of all ranks in the element's own type, begun at a rank that the seed picks.
template <class Value> std::vector<char> reduced(machine& m, const match& all, std::size_t count) {
  const std::size_t ranks = all.parts.size(), bytes = count * sizeof(Value), first = m.random.below(ranks);
  const operation& o = all.parts[0]->o;
  std::vector<char> result(bytes);
  std::vector<Value> total(count), next(count);
  for (std::size_t k = 0; k < ranks; ++k) {
    const part& p = *all.parts[(first + k) % ranks];
    std::memcpy(static_cast<void*>(next.data()), p.o.from, bytes);
    double factor = o.op == ncclAvg && !whole<Value> ? 1.0 / static_cast<double>(ranks) : 1.0;
    if (o.op >= ncclNumOps) factor = p.of->factors[static_cast<std::size_t>(p.o.op - ncclNumOps)];
    for (std::size_t i = 0; i < count; ++i) {
      if (factor != 1.0) {
        if constexpr (whole<Value>)
          next[i] = static_cast<Value>(next[i] * static_cast<Value>(factor));
        else
          next[i] = static_cast<Value>(next[i] * static_cast<Value>(static_cast<float>(factor)));
      }
      total[i] = k == 0 ? next[i] : combined(o.op, total[i], next[i]);
    }
  }
  if constexpr (whole<Value>) {
    for (Value& v : total) v = o.op == ncclAvg ? static_cast<Value>(v / static_cast<Value>(ranks)) : v;
  }
  std::memcpy(result.data(), static_cast<const void*>(total.data()), bytes);
  return result;
}

std::vector<char> reduced(machine& m, const match& all, std::size_t count) {
  switch (all.parts[0]->o.type) {
    case ncclInt8: return reduced<signed char>(m, all, count);
    case ncclUint8: return reduced<unsigned char>(m, all, count);
    case ncclInt32: return reduced<int>(m, all, count);
    case ncclUint32: return reduced<unsigned>(m, all, count);
    case ncclInt64: return reduced<long long>(m, all, count);
    case ncclUint64: return reduced<unsigned long long>(m, all, count);
    case ncclFloat16: return reduced<__half>(m, all, count);
    case ncclFloat32: return reduced<float>(m, all, count);
    case ncclFloat64: return reduced<double>(m, all, count);
    default: return reduced<__nv_bfloat16>(m, all, count);
  }
}

void move(machine& m, const match& all) {
  const operation& o = all.parts[0]->o;
  const std::size_t bytes = o.count * type_bytes[o.type], ranks = all.parts.size();
  if (bytes == 0) return;
  std::vector<char> data;
  switch (o.what) {
    case kind::send:
    case kind::receive:
      std::memcpy(all.parts[1]->o.to, o.from, bytes);
      break;
    case kind::all_reduce:
      data = reduced(m, all, o.count);
      for (const auto& p : all.parts) std::memcpy(p->o.to, data.data(), bytes);
      break;
    case kind::reduce:
      data = reduced(m, all, o.count);
      std::memcpy(all.parts[static_cast<std::size_t>(o.peer)]->o.to, data.data(), bytes);
      break;
    case kind::reduce_scatter:
      data = reduced(m, all, o.count * ranks);
      for (std::size_t r = 0; r < ranks; ++r) std::memcpy(all.parts[r]->o.to, data.data() + r * bytes, bytes);
      break;
    case kind::all_gather:
      for (const auto& p : all.parts) {
        data.resize(data.size() + bytes);
        std::memcpy(data.data() + data.size() - bytes, p->o.from, bytes);
      }
      for (const auto& p : all.parts) std::memcpy(p->o.to, data.data(), data.size());
      break;
    case kind::broadcast:
      data.resize(bytes);
      std::memcpy(data.data(), all.parts[static_cast<std::size_t>(o.peer)]->o.from, bytes);
      for (const auto& p : all.parts) std::memcpy(p->o.to, data.data(), bytes);
      break;
  }
}

bool ready(const part& p) {
  if (p.in->done || p.in->wrong || p.of->aborted) return true;
  if (p.of->error != ncclSuccess) return false;
  return std::all_of(p.in->parts.begin(), p.in->parts.end(), [](const auto& other) {
    return other && other->posted && !other->of->aborted && other->of->error == ncclSuccess;
  });
}

void finish(machine& m, const part& p) {
  if (p.of->aborted || p.in->wrong) return;
  if (!p.in->done) {
    for (const auto& other : p.in->parts) tsan_acquire(&other->tag);
    move(m, *p.in);
    p.in->done = true;
    p.in->parts.clear();  // they hold the ranks, which hold the communicator
    tsan_release(&p.in->tag);
  }
  tsan_acquire(&p.in->tag);
}

// ---- Enqueuing

bool same(const operation& a, const operation& b) {
  if (a.what <= kind::receive) return a.count * type_bytes[a.type] == b.count * type_bytes[b.type];
  return a.what == b.what && a.count == b.count && a.type == b.type && a.peer == b.peer &&
         (a.op == b.op || (a.op >= ncclNumOps && b.op >= ncclNumOps));
}

void join(machine& m, rank_state& r, const std::shared_ptr<part>& p) {
  std::size_t place = 0, places = 2;
  if (p->o.what <= kind::receive) {
    const bool sends = p->o.what == kind::send;
    place = sends ? 0 : 1;
    const std::uint64_t number = r.messages[p->o.peer][place]++;
    const auto me = static_cast<std::uint64_t>(r.rank), peer = static_cast<std::uint64_t>(p->o.peer);
    p->in = &r.of->messages[{sends ? me : peer, sends ? peer : me, number}];
  } else {
    place = static_cast<std::size_t>(r.rank);
    places = static_cast<std::size_t>(r.of->size);
    p->in = &r.of->collectives[r.collectives++];
  }
  p->in->parts.resize(places);
  for (const auto& other : p->in->parts) {
    if (!other || same(other->o, p->o)) continue;
    const std::string text = "calls differ: " + describe(p->o, r) + ", and " + describe(other->o, *other->of);
    m.blame(text);
    p->in->wrong = true;
    fail(r, ncclInternalError, text);
    fail(*other->of, ncclInternalError, text);
    break;
  }
  p->in->parts[place] = p;
}

void enqueue(machine& m, const std::shared_ptr<rank_state>& r, const std::vector<operation>& operations) {
  std::vector<std::shared_ptr<part>> parts;
  std::string name;
  for (const operation& o : operations) {
    parts.push_back(std::make_shared<part>(part{.o = o, .of = r}));
    join(m, *r, parts.back());
    name += (name.empty() ? "" : " with ") + describe(o, *r);
  }
  const int before = std::exchange(me().device, r->device);
  const auto s = m.find(operations.front().stream);
  me().device = before;
  if (!s) return;  // destroyed since it was checked
  m.push(s, name, [parts] {
    for (const auto& p : parts) {
      p->posted = true;
      tsan_release(&p->tag);
    }
  });
  m.push(
      s, name, [parts, r, &m] { for (const auto& p : parts) finish(m, *p); }, {}, {},
      [parts] { return std::all_of(parts.begin(), parts.end(), [](const auto& p) { return ready(*p); }); });
}

ncclResult_t end_group(machine& m) {
  group g = std::exchange(own_group(m), {});
  m.alive.erase(&own_group(m));
  ncclResult_t result = ncclSuccess;
  for (const auto& r : g.made) {
    if (const ncclResult_t code = r->blocking ? wait(m, *r) : ncclInProgress; result == ncclSuccess) result = code;
  }
  while (!g.operations.empty()) {
    const std::shared_ptr<rank_state> r = g.operations.front().first;
    std::vector<operation> own;
    std::erase_if(g.operations, [&](const auto& x) {
      if (x.first != r) return false;
      own.push_back(x.second);
      return true;
    });
    if (std::any_of(own.begin(), own.end(), [&](const operation& o) { return o.stream != own[0].stream; })) {
      m.blame("a group with several streams for one communicator, which isn't emulated");
      return fail(*r, ncclInvalidUsage, "several streams");
    }
    const ncclResult_t code =
        begin(m, *r, {[] { return true; }, [&m, r, own] { enqueue(m, r, own); }, describe(own[0], *r)});
    if (result == ncclSuccess) result = code;
  }
  return result;
}

bool overlaps(const void* a, std::size_t an, const void* b, std::size_t bn) {
  const auto* const x = static_cast<const char*>(a);
  const auto* const y = static_cast<const char*>(b);
  return a && b && an && bn && x < y + bn && y < x + an;
}

// Bytes that an operation reads and writes on one rank.
std::pair<std::size_t, std::size_t> extents(const operation& o, const rank_state& r) {
  const std::size_t n = o.count * type_bytes[o.type], all = n * static_cast<std::size_t>(r.of->size);
  switch (o.what) {
    case kind::send: return {n, 0};
    case kind::receive: return {0, n};
    case kind::reduce_scatter: return {all, n};
    case kind::all_gather: return {n, all};
    case kind::broadcast: return {r.rank == o.peer ? n : 0, n};
    case kind::reduce: return {n, r.rank == o.peer ? n : 0};
    case kind::all_reduce: break;
  }
  return {n, n};
}

ncclResult_t check(machine& m, rank_state& r, const operation& o) {
  const auto bad = [&](const std::string& why) {
    m.blame(describe(o, r) + ": " + why);
    return fail(r, ncclInvalidArgument, why);
  };
  if (o.type < 0 || o.type >= ncclNumTypes) return fail(r, ncclInvalidArgument, "no such type");
  if (o.op >= ncclNumOps && static_cast<std::size_t>(o.op - ncclNumOps) >= r.factors.size())
    return bad("the operation isn't one of this communicator's");
  const bool rooted = o.what != kind::all_reduce && o.what != kind::reduce_scatter && o.what != kind::all_gather;
  if (rooted && (o.peer < 0 || o.peer >= r.of->size)) return bad("no such rank");
  const auto [in, out] = extents(o, r);
  const auto has = [&m](const void* p, std::size_t bytes) {
    return bytes == 0 || (m.find(p) && m.check_range(p, bytes) == cudaSuccess);
  };
  if (!has(o.from, in)) return bad("reads " + std::to_string(in) + " bytes that the device hasn't");
  if (!has(o.to, out)) return bad("writes " + std::to_string(out) + " bytes that the device hasn't");
  const auto me = static_cast<std::size_t>(r.rank);
  const char *f = static_cast<const char*>(o.from), *t = static_cast<const char*>(o.to);
  const bool in_place = o.what == kind::reduce_scatter ? t == f + me * out
                        : o.what == kind::all_gather   ? f == t + me * in
                                                       : f == t;
  if (overlaps(f, in, t, out) && !in_place) return bad("the buffers overlap, and it isn't in place");
  return ncclSuccess;
}

}  // namespace
}  // namespace emulated

struct ncclComm {
  std::shared_ptr<emulated::rank_state> state;
};

namespace emulated {
namespace {

ncclResult_t submit(ncclComm_t comm, const operation& o) {
  call c;
  if (me().in_item) return ncclInvalidUsage;
  if (!comm || !c.m.alive.contains(comm)) return ncclInvalidArgument;
  rank_state& r = *comm->state;
  if (!r.begun.empty()) return fail(r, ncclInvalidArgument, "the call before is still in progress");
  if (r.error != ncclSuccess) return r.error;
  if (r.aborted) return ncclInvalidUsage;
  if (const ncclResult_t code = check(c.m, r, o); code != ncclSuccess) return code;
  const int before = std::exchange(me().device, r.device);
  const auto s = c.m.find(o.stream);
  me().device = before;
  if (!s || s->device != r.device) return fail(r, ncclUnhandledCudaError, "the stream is of another device");
  own_group(c.m).operations.emplace_back(comm->state, o);
  return own_group(c.m).depth ? ncclSuccess : end_group(c.m);
}

ncclComm_t new_comm(machine& m, const std::shared_ptr<clique>& of, int rank, int device, bool blocking) {
  auto r = std::make_shared<rank_state>();
  r->of = of;
  r->rank = rank;
  r->size = of->size;
  r->number = of->number;
  r->device = device;
  r->blocking = blocking;
  of->devices[rank] = device;
  auto* const comm = new ncclComm{r};
  m.alive[comm] = "NCCL communicator " + std::to_string(of->number) + ", rank " + std::to_string(rank);
  return comm;
}

bool blocks(const ncclConfig_t* config, bool otherwise) {
  return !config || config->blocking == NCCL_CONFIG_UNDEF_INT ? otherwise : config->blocking != 0;
}

ncclResult_t drop(ncclComm_t comm, bool abort) {
  call c;
  if (!comm || !c.m.alive.contains(comm)) return ncclInvalidArgument;
  rank_state& r = *comm->state;
  if (abort) {
    r.aborted = true;
    r.begun.clear();
  } else if (!r.begun.empty()) {
    return fail(r, ncclInvalidArgument, "the call before is still in progress");
  }
  const auto forget = [&r](match& x) {
    for (std::shared_ptr<part>& p : x.parts)
      if (p && p->of.get() == &r) p = nullptr;
  };
  for (auto& [number, x] : r.of->collectives) forget(x);
  for (auto& [number, x] : r.of->messages) forget(x);
  std::erase_if(known(c.m).buffers, [&](const auto& b) {
    if (b.second->with != &r) return false;
    const std::string what = std::to_string(b.second->bytes) + " bytes registered with " + r.name();
    if (!abort) c.m.blame(what + ", which is destroyed");
    return true;
  });
  c.m.alive.erase(comm);
  delete comm;
  return ncclSuccess;
}

}  // namespace

std::size_t registered_with_nccl() {
  const held hold(the_machine());
  std::size_t bytes = 0;
  for (const auto& [handle, b] : known(the_machine()).buffers) bytes += b->bytes;
  return bytes;
}
void fail_nccl(ncclComm_t comm, ncclResult_t error) {
  const held hold(the_machine());
  fail(*comm->state, error, "a failure on purpose");
  comm->state->error = error;
}

}  // namespace emulated

using namespace emulated;

ncclResult_t ncclGetVersion(int* version) {
  if (!version) return ncclInvalidArgument;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* texts[] = {"no error",         "unhandled cuda error", "unhandled system error",
                                   "internal error",   "invalid argument",     "invalid usage",
                                   "remote process exited or there was a network error", "NCCL operation in progress"};
  return result >= 0 && result < ncclNumResults ? texts[result] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t comm) {
  const held hold(the_machine());
  return comm && the_machine().alive.contains(comm) ? comm->state->text.c_str() : "";
}
ncclResult_t ncclMemAlloc(void** pointer, std::size_t bytes) {
  return cudaMalloc(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* pointer) {
  {
    call c(false);
    for (const auto& [handle, b] : known(c.m).buffers)
      if (b->begin == pointer) c.m.blame("ncclMemFree of memory that is registered with " + b->with->name());
  }
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  call c(false);
  if (!id) return ncclInvalidArgument;
  auto made = std::make_shared<clique>();
  made->number = ++c.m.made;
  *id = {};
  std::memcpy(id->internal, &made->number, sizeof made->number);
  known(c.m).by_id[made->number] = std::move(made);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  call c;
  if (!comm || ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
  std::uint64_t number = 0;
  std::memcpy(&number, id.internal, sizeof number);
  const auto found = known(c.m).by_id.find(number);
  if (found == known(c.m).by_id.end()) return ncclInvalidArgument;
  const std::shared_ptr<clique> of = found->second;
  if (of->size == 0) of->size = ranks;
  for (const auto& [r, device] : of->devices) {
    if (device != me().device) continue;
    c.m.blame("ranks " + std::to_string(r) + " and " + std::to_string(rank) + " of one NCCL communicator on device " +
              std::to_string(me().device));
    return ncclInvalidUsage;
  }
  if (of->size != ranks || of->devices.contains(rank)) {
    c.m.blame("ncclCommInitRank as rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
              " with an id that others use for " + std::to_string(of->size) + " ranks, or for this one");
    return ncclInvalidUsage;
  }
  *comm = new_comm(c.m, of, rank, me().device, blocks(config, true));
  const std::shared_ptr<rank_state> r = (*comm)->state;
  pending p{[of] { return of->complete(); }, [] {}, "ncclCommInitRank of " + r->name()};
  if (own_group(c.m).depth == 0) return begin(c.m, *r, std::move(p));
  r->begun.push_back(std::move(p));
  own_group(c.m).made.push_back(r);
  return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  call c;
  if (!comm || !c.m.alive.contains(comm) || !made || (color < 0 && color != NCCL_SPLIT_NOCOLOR))
    return ncclInvalidArgument;
  const std::shared_ptr<rank_state> r = comm->state;
  if (!r->begun.empty()) return fail(*r, ncclInvalidArgument, "the call before is still in progress");
  *made = nullptr;
  const std::uint64_t number = r->splits++;
  const std::shared_ptr<clique> of = r->of;
  of->splits[number].asked[r->rank] = {color, key};
  const bool blocking = blocks(config, r->blocking);
  const auto run = [&m = c.m, of, r, number, color, made, blocking] {
    if (color == NCCL_SPLIT_NOCOLOR) return;
    split_call& s = of->splits[number];
    std::vector<std::pair<int, int>> order;  // key and rank of those with this color
    for (const auto& [rank, asked] : s.asked)
      if (asked.first == color) order.emplace_back(asked.second, rank);
    std::sort(order.begin(), order.end());
    std::shared_ptr<clique>& child = s.made[color];
    if (!child) {
      child = std::make_shared<clique>();
      child->number = ++m.made;
      child->size = static_cast<int>(order.size());
    }
    const auto mine =
        std::find_if(order.begin(), order.end(), [&](const auto& x) { return x.second == r->rank; }) - order.begin();
    *made = new_comm(m, child, static_cast<int>(mine), r->device, blocking);
  };
  return begin(c.m, *r,
               {[of, number] { return static_cast<int>(of->splits[number].asked.size()) == of->size; }, run,
                "ncclCommSplit of " + r->name()});
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  call c;
  if (!comm || !c.m.alive.contains(comm)) return ncclInvalidArgument;
  return begin(c.m, *comm->state, {[] { return true; }, [] {}, "ncclCommFinalize"});
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return drop(comm, false); }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return drop(comm, true); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  call c;
  if (!comm || !error || !c.m.alive.contains(comm)) return ncclInvalidArgument;
  rank_state& r = *comm->state;
  if (!r.begun.empty() && c.m.random.coin()) settle(r);
  *error = r.error != ncclSuccess ? r.error : r.begun.empty() ? ncclSuccess : ncclInProgress;
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, std::size_t bytes, void** handle) {
  call c(false);
  if (!comm || !c.m.alive.contains(comm) || !handle || bytes == 0) return ncclInvalidArgument;
  if (!c.m.find(buffer) || c.m.check_range(buffer, bytes) != cudaSuccess)
    return fail(*comm->state, ncclInvalidArgument, "not memory of a device");
  auto made = std::make_unique<registered_buffer>(
      registered_buffer{comm->state.get(), static_cast<const char*>(buffer), bytes});
  *handle = made.get();
  known(c.m).buffers[*handle] = std::move(made);
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  call c(false);
  if (!comm || !c.m.alive.contains(comm)) return ncclInvalidArgument;
  const auto found = known(c.m).buffers.find(handle);
  if (found == known(c.m).buffers.end() || found->second->with != comm->state.get()) return ncclInvalidArgument;
  known(c.m).buffers.erase(found);
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  if (!comm || !count) return ncclInvalidArgument;
  *count = comm->state->of->size;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
  if (!comm || !device) return ncclInvalidArgument;
  *device = comm->state->device;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  if (!comm || !rank) return ncclInvalidArgument;
  *rank = comm->state->rank;
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  call c(false);
  if (!op || !scalar || !comm || residence != ncclScalarHostImmediate) return ncclInvalidArgument;
  double factor = 0.0;
  switch (type) {
    case ncclFloat16: factor = static_cast<float>(*static_cast<__half*>(scalar)); break;
    case ncclBfloat16: factor = static_cast<float>(*static_cast<__nv_bfloat16*>(scalar)); break;
    case ncclFloat32: factor = *static_cast<float*>(scalar); break;
    case ncclFloat64: factor = *static_cast<double*>(scalar); break;
    case ncclInt32: factor = *static_cast<int*>(scalar); break;
    default: return ncclInvalidArgument;
  }
  std::vector<double>& factors = comm->state->factors;
  *op = static_cast<ncclRedOp_t>(ncclNumOps + factors.size());
  factors.push_back(factor);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  call c(false);
  return comm && op >= ncclNumOps && static_cast<std::size_t>(op - ncclNumOps) < comm->state->factors.size()
             ? ncclSuccess
             : ncclInvalidArgument;
}

ncclResult_t ncclGroupStart() {
  call c(false);
  group& g = own_group(c.m);
  if (++g.depth == 1) c.m.alive[&g] = "an NCCL group that a host thread has left open";
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  call c;
  group& g = own_group(c.m);
  if (g.depth == 0) return ncclInvalidUsage;
  return --g.depth == 0 ? end_group(c.m) : ncclSuccess;
}

ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit(comm, {kind::send, from, nullptr, count, type, -1, peer, stream});
}
ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit(comm, {kind::receive, nullptr, to, count, type, -1, peer, stream});
}
ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {kind::all_reduce, from, to, count, type, op, -1, stream});
}
ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {kind::reduce_scatter, from, to, count, type, op, -1, stream});
}
ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return submit(comm, {kind::all_gather, from, to, count, type, -1, -1, stream});
}
ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {kind::broadcast, from, to, count, type, -1, root, stream});
}
ncclResult_t ncclReduce(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {kind::reduce, from, to, count, type, op, root, stream});
}

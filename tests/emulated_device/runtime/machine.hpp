// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Devices, streams, events and memory: one machine per process, under one lock.

#include "engine.hpp"
#include "random.hpp"
#include "sanitizers.hpp"

#include <cuda_runtime.h>
#include <emulated/control.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace emulated {

// A recursive mutex that ThreadSanitizer doesn't see: CUDA's own lock orders nothing that a program may rely on.
class hidden_mutex {
 public:
  void lock();
  void unlock();
  // Lets go of it altogether, and takes it back as deep as it was held.
  unsigned release();
  void regain(unsigned depth);

 private:
  std::atomic<const void*> owner_{nullptr};
  unsigned depth_ = 0;
};

struct stream;

// A point of a stream: reached when `number` of its items have run.
struct point {
  std::shared_ptr<stream> of;
  std::uint64_t number = 0;
  std::shared_ptr<char> tag = nullptr;  // orders what has run until there before who waits for it
};

struct item {
  std::string name;
  std::function<void()> run;
  std::vector<point> after;      // points of other streams that come first
  std::unique_ptr<char> tag;     // orders the host's call before the run
  std::shared_ptr<char> done;    // the tag of the point behind it
  std::function<void()> ended;   // what becomes true with it: an event is done
  std::function<bool()> ready;   // what other host threads do first; asked when nothing else is left to wait for
};

struct stream {
  stream() = default;
  stream(const stream&) = delete;
  ~stream();
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  std::uint64_t id = 0;
  unsigned nth = 0;  // of the streams made since the reset
  std::deque<item> items;
  std::uint64_t pushed = 0, run = 0;
  bool running = false;
  bool destroyed = false;     // what is in it still runs
  void* context = nullptr;    // ThreadSanitizer's
  std::shared_ptr<char> end;  // the tag of the point behind all that was pushed
};

// What one cudaEventRecord made: the event may be recorded again, or destroyed, before this is reached.
struct recording {
  point at;
  bool done = false;
  double milliseconds = 0.0;
};

// `symbol` is a variable whose address was asked for; like registered memory, it isn't the machine's to free.
enum class memory_kind : unsigned char { device, pooled, symbol, pinned, registered, managed };
// Out of the host's reach.
inline bool of_device_only(memory_kind k) { return k <= memory_kind::symbol; }

struct allocation {
  char* begin = nullptr;
  std::size_t bytes = 0;
  memory_kind kind = memory_kind::device;
  int device = 0;
  std::uint64_t number = 0;       // the how-manieth allocation it is
  bool alive = true;              // false from the call of cudaFreeAsync until the item runs
  bool born = true;               // false from the call of cudaMallocAsync until the item runs
  cudaMemPool_t pool = nullptr;
};

}  // namespace emulated

struct CUstream_st {
  std::shared_ptr<emulated::stream> of;
  std::uint64_t number;
};
struct CUevent_st {
  int device;
  unsigned flags;
  std::uint64_t number;
  std::shared_ptr<emulated::recording> last;
};
struct CUmemPoolHandle_st {
  int device;
  std::uint64_t number;
  std::uint64_t release_threshold, used, used_high, most;
  int reuse[3];
  std::set<int> readers = {};  // other devices that may use it
};

namespace emulated {

struct device {
  std::shared_ptr<stream> legacy;
  cudaError_t broken = cudaSuccess;  // a fault of a kernel: every later call returns it
  std::set<int> peers;
  CUmemPoolHandle_st own_pool{};
  cudaMemPool_t pool = nullptr;
  std::size_t used = 0;
  std::map<const void*, int> dynamic_shared;  // by kernel
  char gone = 0, gone_blocking = 0;           // tags of streams that have ended: all, and the blocking ones
};

class machine {
 public:
  machine();

  void reset(const options& o);

  // Streams
  std::shared_ptr<stream> make_stream(int device, unsigned flags, int priority);
  std::shared_ptr<stream> find(cudaStream_t handle);  // null if there is no such stream
  point push(const std::shared_ptr<stream>& s, std::string name, std::function<void()> run,
             std::vector<point> after = {}, std::function<void()> ended = {}, std::function<bool()> ready = {});
  void destroy(cudaStream_t handle);              // what is in the stream still runs
  void retire(const std::shared_ptr<stream>& s);  // it is destroyed, and nothing is left to do
  void forget_handles(int device);                // streams, events and pools are gone
  static point end_of(const std::shared_ptr<stream>& s) { return {s, s->pushed, s->end}; }
  static bool reached(const point& p) { return p.of->run >= p.number; }
  void wait_for(point p);  // other host threads may use the machine meanwhile, as in what follows
  void wait_for_device(int device);
  void run_unlocked(const std::function<void()>& f);  // the host's own code, in an item
  void step();                                        // work that the seed lets happen now
  void ask(const point& p);                           // and, half of the time, work before this point

  // Memory
  cudaError_t allocate(void** p, std::size_t bytes, memory_kind kind, int device, cudaMemPool_t pool = nullptr);
  void release(allocation& a);
  bool release_start(const void* p);  // what begins there, unless another host thread has done so
  void adopt(void* p, std::size_t bytes, memory_kind kind, int device);  // knows memory that others own
  allocation* find(const void* p);          // the living allocation that holds this address
  allocation* find_start(const void* p);    // that begins there
  cudaError_t check_range(const void* p, std::size_t bytes) const;
  void check_guards(const std::string& after);
  void check_quarantine();
  void expose();   // device code may read and write device memory
  void conceal();  // the host must not
  void conceal_peers(int device, bool yes);  // a kernel of this device must not, without peer access
  void bear(const void* p, std::uint64_t number);  // a cudaMallocAsync has come

  void blame(const std::string& text) { found.push_back(text); }

  hidden_mutex mutex;
  options with;
  generator random{0};
  std::vector<device> devices;
  std::set<cudaStream_t> streams;
  std::set<cudaEvent_t> events;
  std::set<cudaMemPool_t> pools;
  std::vector<std::shared_ptr<stream>> all_streams;
  std::map<const char*, allocation> memory;  // by first address
  std::deque<allocation> quarantine;
  std::size_t quarantined = 0;
  std::map<const void*, std::string> alive;  // what libraries have made and not destroyed, in words
  std::vector<std::string> found;
  std::uint64_t made = 0;  // numbers handles and allocations
  unsigned streams_made = 0;
  std::uint64_t ran = 0, choices = 0;
  double now = 0.0;        // virtual milliseconds: each item takes some
  std::uint64_t allocations_until_failure = 0, launches_until_failure = 0;
  cudaError_t launch_failure = cudaSuccess;
  bool exposed = false;
  std::uint64_t generation = 0;  // counts resets: per-thread streams of an earlier one are dead

 private:
  bool runnable(const stream& s) const;
  void run_one(const std::shared_ptr<stream>& s) noexcept;  // what a host function throws has nowhere to go
  std::shared_ptr<stream> needed_for(const point& p);
  std::shared_ptr<stream> any_able();
  void wait_for_hosts(const point& p);
  void give_up(const point& p);
};

machine& the_machine();

// Holds the machine; meanwhile the C library's accesses are bookkeeping.
class held {
 public:
  explicit held(machine& m) : lock_(m.mutex) {}

 private:
  std::lock_guard<hidden_mutex> lock_;
  unwatched bookkeeping_;
};

// The calling OS thread's part.
struct caller {
  int device = 0;
  cudaError_t last = cudaSuccess;
  bool in_item = false;  // runs one: as a host function, it may not call CUDA
  std::map<int, std::shared_ptr<stream>> own_streams;  // cudaStreamPerThread, by device
  std::uint64_t generation = 0;
};
caller& me();

// One call of the API: holds the lock, lets the seed move, hides device memory from the host again at its end, and
// keeps the error for cudaGetLastError.
class call {
 public:
  explicit call(bool may_step = true);
  ~call();
  call(const call&) = delete;
  // To be returned.
  cudaError_t end(cudaError_t code);
  // Not success when no call may be made: in a host function, or on a device that is broken.
  cudaError_t start() const;
  // What has become of the device that a stream or an event belongs to, once it was waited for.
  cudaError_t state(int device) const { return m.devices[static_cast<std::size_t>(device)].broken; }

  machine& m;

 private:
  held hold_;
};

}  // namespace emulated

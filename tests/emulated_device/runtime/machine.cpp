// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include "machine.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace emulated {
namespace {

constexpr std::size_t guard = 64;               // bytes on either side, where AddressSanitizer isn't there to see
constexpr unsigned char guard_byte = 0xa5;
constexpr unsigned char poison_byte = 0xff;     // a NaN in every float type, -1 in every integer
constexpr std::size_t quarantine_bytes = std::size_t{64} << 20;
constexpr std::size_t hidden_ends = std::size_t{64} << 10;  // of a long allocation only the ends are hidden

// The default of options::eagerness: a different one for each seed in turn.
eagerness chosen(const options& o) {
  if (o.eagerness != eagerness::by_seed) return o.eagerness;
  constexpr eagerness each[] = {eagerness::random, eagerness::lazy, eagerness::eager};
  return each[o.seed % 3];
}

}  // namespace

void hidden_mutex::lock() {
  static thread_local char self;
  for (const void* owner = nullptr; !owner_.compare_exchange_strong(owner, &self); owner = nullptr) {
    if (owner == &self) break;
    owner_.wait(owner);
  }
  ++depth_;
}
void hidden_mutex::unlock() {
  if (--depth_ != 0) return;
  owner_ = nullptr;
  owner_.notify_one();
}
unsigned hidden_mutex::release() {
  const unsigned depth = depth_;
  depth_ = 1;
  unlock();
  return depth;
}
void hidden_mutex::regain(unsigned depth) {
  lock();
  depth_ = depth;
}

stream::~stream() {
  if (context) tsan_destroy(context);
}

machine::machine() { reset({}); }

machine& the_machine() {
  static machine* const one = new machine;  // never destroyed: threads may end after main
  return *one;
}

caller& me() {
  static thread_local caller c;
  if (c.generation != the_machine().generation) {
    c = {};
    c.generation = the_machine().generation;
  }
  return c;
}

void machine::reset(const options& o) {
  if (o.devices < 0 || o.devices > 64) {
    std::fprintf(stderr, "emulated::reset: %d devices, allowed are 0 to 64\n", o.devices);
    std::abort();
  }
  for (const auto& s : all_streams) s->items.clear();  // they may hold each other
  all_streams.clear();
  for (cudaStream_t s : streams) delete s;
  for (cudaEvent_t e : events) delete e;
  for (cudaMemPool_t p : pools) delete p;
  streams.clear();
  events.clear();
  pools.clear();
  while (!memory.empty()) release(memory.begin()->second);
  for (const allocation& dead : quarantine) std::free(dead.begin - 256);
  quarantine.clear();
  quarantined = 0;
  found.clear();
  alive.clear();
  with = o;
  random = generator(o.seed);
  ran = choices = made = 0;
  streams_made = 0;
  now = 0.0;
  allocations_until_failure = launches_until_failure = 0;
  launch_failure = cudaSuccess;
  ++generation;
  devices.clear();
  devices.resize(static_cast<std::size_t>(o.devices));
  for (int d = 0; d < o.devices; ++d) {
    device& on = devices[static_cast<std::size_t>(d)];
    on.legacy = make_stream(d, cudaStreamDefault, 0);
    on.own_pool.device = d;
    on.pool = &on.own_pool;
  }
}

// ---- Order

std::shared_ptr<stream> machine::make_stream(int device, unsigned flags, int priority) {
  auto s = std::make_shared<stream>();
  s->device = device;
  s->flags = flags;
  s->priority = priority;
  s->id = ++made;
  s->nth = streams_made++;
  s->context = tsan_create();
  all_streams.push_back(s);
  return s;
}

std::shared_ptr<stream> machine::find(cudaStream_t handle) {
  if (devices.empty()) return nullptr;
  const int on = me().device;
  if (handle == nullptr || handle == cudaStreamLegacy) return devices[static_cast<std::size_t>(on)].legacy;
  if (handle == cudaStreamPerThread) {
    std::shared_ptr<stream>& own = me().own_streams[on];
    if (!own) own = make_stream(on, cudaStreamDefault, 0);
    return own;
  }
  return streams.count(handle) ? handle->of : nullptr;
}

// The legacy default stream and the blocking streams of its device wait for each other, and come after each other also
// when there is nothing left to wait for.
point machine::push(const std::shared_ptr<stream>& s, std::string name, std::function<void()> run,
                    std::vector<point> after, std::function<void()> ended, std::function<bool()> ready) {
  const std::shared_ptr<stream>& legacy = devices[static_cast<std::size_t>(s->device)].legacy;
  if (s == legacy) {
    for (const auto& other : all_streams) {
      if (other != s && other->device == s->device && !(other->flags & cudaStreamNonBlocking))
        after.push_back(end_of(other));
    }
  } else if (!(s->flags & cudaStreamNonBlocking)) {
    after.push_back(end_of(legacy));
  }
  auto tag = std::make_unique<char>();
  tsan_release(tag.get());
  s->end = std::make_shared<char>();
  s->items.push_back({std::move(name), std::move(run), std::move(after), std::move(tag), s->end, std::move(ended),
                      std::move(ready)});
  ++s->pushed;
  return end_of(s);
}

bool machine::runnable(const stream& s) const {
  if (s.items.empty() || s.running) return false;
  const item& first = s.items.front();
  return std::all_of(first.after.begin(), first.after.end(), reached) && (!first.ready || first.ready());
}

// A stream whose next item may run, if there is one.
std::shared_ptr<stream> machine::any_able() {
  std::vector<std::shared_ptr<stream>> list;
  for (const auto& s : all_streams)
    if (runnable(*s)) list.push_back(s);
  return list.empty() ? nullptr : list[random.below(list.size())];
}

void machine::run_one(const std::shared_ptr<stream>& s) noexcept {
  item i = std::move(s->items.front());
  s->items.pop_front();
  s->running = me().in_item = true;
  // Of what this OS thread has done, the item comes after its beginning alone: there its thread-local variables were
  // made, threadIdx among them.
  static thread_local char beginning;
  static thread_local bool told = false;
  if (!std::exchange(told, true)) tsan_release(&beginning);
  void* const host = tsan_current();
  tsan_switch(s->context);
  tsan_acquire(&beginning);
  tsan_acquire(i.tag.get());
  for (const point& p : i.after)
    if (p.tag) tsan_acquire(p.tag.get());
  device& on = devices[static_cast<std::size_t>(s->device)];
  if (s == on.legacy) tsan_acquire(&on.gone_blocking);
  {
    const unwatched bookkeeping;
    expose();
  }
  i.run();
  ++s->run;
  ++ran;
  now += 0.001 * static_cast<double>(1 + random.below(50));
  choices = (choices ^ s->id ^ ran << 32) * 0x9e3779b97f4a7c15u;
  {
    const unwatched bookkeeping;
    i.run = nullptr;
  }
  tsan_release(i.done.get());
  tsan_switch(host);
  if (i.ended) i.ended();
  s->running = me().in_item = false;
  if (s->destroyed && s->items.empty()) retire(s);
}

void machine::destroy(cudaStream_t handle) {
  const std::shared_ptr<stream> s = handle->of;
  delete handle;
  s->destroyed = true;
  if (s->items.empty()) retire(s);
}

void machine::forget_handles(int on) {
  std::erase_if(streams, [&](cudaStream_t s) {
    const bool gone = s->of->device == on;
    if (gone) destroy(s);
    return gone;
  });
  std::erase_if(events, [&](cudaEvent_t e) {
    const bool gone = e->device == on;
    if (gone) delete e;
    return gone;
  });
  std::erase_if(pools, [&](cudaMemPool_t p) {
    const bool gone = p->device == on;
    if (gone) delete p;
    return gone;
  });
}

void machine::retire(const std::shared_ptr<stream>& s) {
  device& on = devices[static_cast<std::size_t>(s->device)];
  void* const host = tsan_current();
  tsan_switch(s->context);
  tsan_release(&on.gone);
  if (!(s->flags & cudaStreamNonBlocking)) tsan_release(&on.gone_blocking);
  tsan_switch(host);
  std::erase(all_streams, s);
}

// The stream whose next item has to run before p is reached: p's own, or one that it waits for. Null if another host
// thread has to do something first.
std::shared_ptr<stream> machine::needed_for(const point& p) {
  std::shared_ptr<stream> s = p.of;
  while (!runnable(*s)) {
    if (s->running) return nullptr;  // a host function, on another thread
    const item& first = s->items.front();
    const auto q = std::find_if(first.after.begin(), first.after.end(), [](const point& a) { return !reached(a); });
    if (q == first.after.end()) return nullptr;  // it isn't ready
    s = q->of;
  }
  return s;
}

void machine::wait_for(point p) {
  const bool lazy = chosen(with) == eagerness::lazy;
  while (!reached(p)) {
    std::shared_ptr<stream> s = lazy || random.coin() ? needed_for(p) : any_able();
    if (!s) s = any_able();  // another stream's item may be what others wait for
    if (s)
      run_one(s);
    else
      wait_for_hosts(p);
  }
  if (p.tag) tsan_acquire(p.tag.get());
}

// Nothing can run: until another host thread has changed that, or for so long that none will.
void machine::wait_for_hosts(const point& p) {
  using clock = std::chrono::steady_clock;
  std::uint64_t seen = ran + made;
  clock::time_point since = clock::now();
  for (unsigned turn = 0; !reached(p); ++turn) {
    const unsigned depth = mutex.release();
    if (turn < 100)
      sched_yield();
    else
      usleep(50);
    mutex.regain(depth);
    if (reached(p) || needed_for(p) || any_able()) return;
    std::uint64_t pushed = 0;
    for (const auto& s : all_streams) pushed += s->pushed;
    if (const std::uint64_t now_seen = ran + made + pushed; now_seen != seen) {
      seen = now_seen;
      since = clock::now();
    }
    if (clock::now() - since > std::chrono::duration<double>(with.stall_seconds)) return give_up(p);
  }
}

// What waits for other host threads never will be ready: it is named, and ends as a launch does that has timed out.
void machine::give_up(const point& p) {
  std::string text = "a deadlock: a host thread waits for stream " + std::to_string(p.of->nth) + " of device " +
                     std::to_string(p.of->device) + ", and nothing can run.";
  bool given_up = false;
  for (const auto& s : all_streams) {
    if (!s->running && s->items.empty()) continue;
    text += "\n  stream " + std::to_string(s->nth) + " of device " + std::to_string(s->device) + ": ";
    if (s->running) {
      text += "a host function has not returned";
      continue;
    }
    item& first = s->items.front();
    text += first.name;
    if (!std::all_of(first.after.begin(), first.after.end(), reached)) {
      text += ", after other streams";
    } else {
      text += ", which isn't ready";
      first.ready = nullptr;
      first.run = [] {};
      devices[static_cast<std::size_t>(s->device)].broken = cudaErrorLaunchTimeout;
      given_up = true;
    }
    if (s->items.size() > 1) text += ", and " + std::to_string(s->items.size() - 1) + " more";
  }
  blame(text);
  if (given_up) return;
  std::fprintf(stderr, "emulated device: %s\n", text.c_str());
  std::abort();
}

void machine::run_unlocked(const std::function<void()>& f) {
  conceal();
  const unsigned depth = mutex.release();
  if constexpr (tsan) {
    // As with a driver, a thread of its own runs it. On the caller's stack its frames would lie where frames of the
    // host have been, whose writes the stream does not come after.
    std::thread([&f] {
      me().in_item = true;
      f();
    }).join();
  } else {
    f();
  }
  mutex.regain(depth);
}

void machine::wait_for_device(int on) {
  for (;;) {
    bool all = true;
    for (const auto& s : std::vector(all_streams)) {
      if (s->device != on) continue;
      all &= reached(end_of(s));
      wait_for(end_of(s));
    }
    if (all) break;
  }
  tsan_acquire(&devices[static_cast<std::size_t>(on)].gone);
}

void machine::step() {
  const eagerness how = chosen(with);
  if (how == eagerness::lazy || me().in_item) return;
  for (std::uint64_t left = how == eagerness::eager ? ~std::uint64_t{0} : random.below(3); left > 0; --left) {
    const auto s = any_able();
    if (!s) return;
    run_one(s);
  }
}

void machine::ask(const point& p) {
  if (reached(p) || !random.coin()) return;
  std::shared_ptr<stream> s = needed_for(p);
  if (!s) s = any_able();
  if (s) run_one(s);
}

// ---- Memory

namespace {

void hide(const allocation& a) {
  const std::size_t end = (std::min)(a.bytes, hidden_ends);
  asan_poison(a.begin, end);
  asan_poison(a.begin + a.bytes - end, end);
}

}  // namespace

cudaError_t machine::allocate(void** p, std::size_t bytes, memory_kind kind, int on, cudaMemPool_t pool) {
  if (!p) return cudaErrorInvalidValue;
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (allocations_until_failure && --allocations_until_failure == 0) return cudaErrorMemoryAllocation;
  const bool counts = kind == memory_kind::device || kind == memory_kind::pooled || kind == memory_kind::managed;
  std::size_t& used = devices[static_cast<std::size_t>(on)].used;
  if (counts && bytes > with.memory_bytes - (std::min)(used, with.memory_bytes)) return cudaErrorMemoryAllocation;
  const std::size_t edge = asan ? 0 : guard;
  const std::size_t front = asan ? 0 : 256;  // keeps 256-byte alignment
  void* all = nullptr;
  // AddressSanitizer's own limit would end the process.
  if (bytes > std::size_t{1} << 39 || posix_memalign(&all, 256, front + bytes + edge) != 0)
    return cudaErrorMemoryAllocation;
  allocation a;
  a.begin = static_cast<char*>(all) + front;
  a.bytes = bytes;
  a.kind = kind;
  a.device = on;
  a.number = ++made;
  a.pool = pool;
  if (!asan) {
    std::memset(a.begin - guard, guard_byte, guard);
    std::memset(a.begin + bytes, guard_byte, guard);
  }
  std::memset(a.begin, poison_byte, bytes);
  if (counts) used += bytes;
  a.born = kind != memory_kind::pooled;
  if (!a.born) asan_poison(a.begin, bytes);
  else if (kind == memory_kind::device && !exposed) hide(a);
  memory[a.begin] = a;
  *p = a.begin;
  return cudaSuccess;
}

namespace {

std::string describe(const allocation& a) {
  constexpr const char* kinds[] = {"device", "stream-ordered device", "symbol", "pinned", "registered", "managed"};
  return std::string(kinds[static_cast<unsigned>(a.kind)]) + " memory of " + std::to_string(a.bytes) +
         " bytes (allocation " + std::to_string(a.number) + ")";
}

bool owned(const allocation& a) { return a.kind != memory_kind::registered && a.kind != memory_kind::symbol; }

// Which byte outside of the allocation was written, or 0.
std::ptrdiff_t broken_guard(const allocation& a) {
  if (asan || !owned(a)) return 0;
  for (std::size_t i = 0; i < guard; ++i) {
    if (static_cast<unsigned char>(a.begin[a.bytes + i]) != guard_byte)
      return static_cast<std::ptrdiff_t>(a.bytes + i);
  }
  for (std::size_t i = 1; i <= guard; ++i) {
    if (static_cast<unsigned char>(*(a.begin - i)) != guard_byte) return -static_cast<std::ptrdiff_t>(i);
  }
  return 0;
}

void mend(const allocation& a) {
  std::memset(a.begin - guard, guard_byte, guard);
  std::memset(a.begin + a.bytes, guard_byte, guard);
}

}  // namespace

void machine::check_guards(const std::string& after) {
  if (asan) return;
  for (const auto& [begin, a] : memory) {
    if (const std::ptrdiff_t at = broken_guard(a)) {
      blame(after + " wrote at byte " + std::to_string(at) + " of " + describe(a));
      mend(a);
    }
  }
}

void machine::release(allocation& a) {
  if (!asan && owned(a)) std::memset(a.begin, poison_byte, a.bytes);  // who reads it still
  const unwatched bookkeeping;
  if (!owned(a)) {
    memory.erase(a.begin);
    return;
  }
  if (const std::ptrdiff_t at = broken_guard(a)) blame("byte " + std::to_string(at) + " was written of " + describe(a));
  if (a.kind != memory_kind::pinned) devices[static_cast<std::size_t>(a.device)].used -= a.bytes;
  if (a.pool) a.pool->used -= a.bytes;
  asan_unpoison(a.begin, a.bytes);
  const allocation dead = a;
  memory.erase(dead.begin);
  if (asan) return std::free(dead.begin);
  // Not given back at once: who still writes it is found out.
  quarantine.push_back(dead);
  quarantined += dead.bytes;
  if (quarantined > quarantine_bytes || quarantine.size() > 4096) check_quarantine();
  while (quarantined > quarantine_bytes || quarantine.size() > 4096) {
    quarantined -= quarantine.front().bytes;
    std::free(quarantine.front().begin - 256);
    quarantine.pop_front();
  }
}

bool machine::release_start(const void* p) {
  allocation* const a = find_start(p);
  if (a) release(*a);
  return a != nullptr;
}

// Who has written memory after its end.
void machine::check_quarantine() {
  for (const allocation& dead : quarantine) {
    constexpr std::uint64_t poison = ~std::uint64_t{0};
    static_assert(poison_byte == 0xff);
    std::size_t at = 0;
    std::uint64_t word = poison;
    for (; at + sizeof word <= dead.bytes && word == poison; at += sizeof word)
      std::memcpy(&word, dead.begin + at, sizeof word);
    if (word != poison) at -= sizeof word;
    while (at < dead.bytes && static_cast<unsigned char>(dead.begin[at]) == poison_byte) ++at;
    if (at == dead.bytes) continue;
    blame("byte " + std::to_string(at) + " was written after the end of " + describe(dead));
    std::memset(dead.begin, poison_byte, dead.bytes);
  }
}

void machine::adopt(void* p, std::size_t bytes, memory_kind kind, int on) {
  allocation a;
  a.begin = static_cast<char*>(p);
  a.bytes = bytes;
  a.kind = kind;
  a.device = on;
  a.number = ++made;
  memory[a.begin] = a;
}

allocation* machine::find(const void* p) {
  auto next = memory.upper_bound(static_cast<const char*>(p));
  if (next == memory.begin()) return nullptr;
  allocation& a = std::prev(next)->second;
  return static_cast<const char*>(p) < a.begin + a.bytes ? &a : nullptr;
}

allocation* machine::find_start(const void* p) {
  const auto found_at = memory.find(static_cast<const char*>(p));
  return found_at == memory.end() ? nullptr : &found_at->second;
}

cudaError_t machine::check_range(const void* p, std::size_t bytes) const {
  const allocation* a = const_cast<machine*>(this)->find(p);
  if (!a) return cudaSuccess;  // the host's own
  return bytes > static_cast<std::size_t>(a->begin + a->bytes - static_cast<const char*>(p)) ? cudaErrorInvalidValue
                                                                                             : cudaSuccess;
}

// Under AddressSanitizer the host can't read device memory, as on a real machine; neither can a stream read memory
// whose cudaMallocAsync hasn't come yet.
void machine::expose() {
  if (!asan || exposed) return;
  exposed = true;
  for (const auto& [begin, a] : memory)
    if (a.kind == memory_kind::device || (a.kind == memory_kind::pooled && a.born)) asan_unpoison(a.begin, a.bytes);
}

void machine::conceal() {
  if (!asan || !exposed) return;
  exposed = false;
  for (const auto& [begin, a] : memory) {
    if (a.kind == memory_kind::device || (a.kind == memory_kind::pooled && a.born)) hide(a);
  }
}

void machine::conceal_peers(int on, bool yes) {
  if (!asan) return;
  const std::set<int>& peers = devices[static_cast<std::size_t>(on)].peers;
  for (const auto& [begin, a] : memory) {
    if ((a.kind != memory_kind::device && a.kind != memory_kind::pooled) || !a.born || a.device == on) continue;
    if (a.kind == memory_kind::device ? peers.contains(a.device) : a.pool && a.pool->readers.contains(on)) continue;
    if (yes)
      asan_poison(a.begin, a.bytes);
    else
      asan_unpoison(a.begin, a.bytes);
  }
}

void machine::bear(const void* p, std::uint64_t number) {
  allocation* a = find_start(p);
  if (!a || a->number != number) return;  // cudaFree came first
  if (!asan) std::memset(a->begin, poison_byte, a->bytes);  // who has used it already
  a->born = true;
  asan_unpoison(a->begin, a->bytes);
}

// ---- Calls

call::call(bool may_step) : m(the_machine()), hold_(m) {
  if (may_step) m.step();
}

call::~call() {
  if (!me().in_item) m.conceal();
}

cudaError_t call::start() const {
  if (me().in_item) return cudaErrorNotPermitted;
  if (m.devices.empty()) return cudaErrorNoDevice;
  return state(me().device);
}

cudaError_t call::end(cudaError_t code) {
  // "Not ready" isn't an error, the documentation says, and isn't kept; some versions of CUDA keep it nevertheless.
  if (code == cudaErrorNotReady && (me().last != cudaSuccess || m.random.coin())) return code;
  if (code != cudaSuccess) me().last = code;
  return code;
}

// ---- Control

void reset(const options& o) {
  const held hold(the_machine());
  the_machine().reset(o);
}
const options& current() { return the_machine().with; }
const std::vector<std::string>& faults() {
  const held hold(the_machine());
  the_machine().check_quarantine();
  return the_machine().found;
}
void report_fault(const std::string& text) {
  machine& m = the_machine();
  const held hold(m);
  const std::string where = where_now();
  m.blame(where.empty() ? text : where + ": " + text);
}
void clear_faults() {
  the_machine().found.clear();
  for (device& d : the_machine().devices) d.broken = cudaSuccess;
}

std::vector<std::string> leaks() {
  machine& m = the_machine();
  const held hold(m);
  std::vector<std::string> lines;
  for (cudaStream_t s : m.streams) lines.push_back("stream " + std::to_string(s->number));
  for (cudaEvent_t e : m.events) lines.push_back("event " + std::to_string(e->number));
  for (cudaMemPool_t p : m.pools) lines.push_back("memory pool " + std::to_string(p->number));
  for (const auto& [what, text] : m.alive) lines.push_back(text);
  for (const auto& [begin, a] : m.memory)
    if (a.alive && a.kind != memory_kind::symbol) lines.push_back(describe(a));
  return lines;
}

void fail_allocation(std::uint64_t n) { the_machine().allocations_until_failure = n + 1; }
void fail_launch(std::uint64_t n, cudaError_t error) {
  the_machine().launches_until_failure = n + 1;
  the_machine().launch_failure = error;
}
std::uint64_t items_run() { return the_machine().ran; }
std::uint64_t choices() { return the_machine().choices; }
bool is_device_memory(const void* p, std::size_t bytes) {
  machine& m = the_machine();
  const held hold(m);
  return m.find(p) && m.check_range(p, bytes) == cudaSuccess;
}
bool watches_races() { return tsan; }

}  // namespace emulated

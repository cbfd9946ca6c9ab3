// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include "engine.hpp"

#include "random.hpp"
#include "sanitizers.hpp"

#include <emulated/kernel.h>

#include <boost/context/detail/fcontext.hpp>

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

constinit thread_local uint3 threadIdx{0, 0, 0};
constinit thread_local uint3 blockIdx{0, 0, 0};
constinit thread_local dim3 blockDim{1, 1, 1};
constinit thread_local dim3 gridDim{1, 1, 1};

namespace emulated {
namespace {

namespace context = boost::context::detail;

// As much as a device has for a thread's local memory, and more for what sanitizers add. Only what is used is real.
constexpr std::size_t stack_bytes = (asan || tsan ? 1024 : 512) * 1024;
// A frame that jumps over it is larger than any device takes; odd in pages, so that stacks don't share cache sets.
constexpr std::size_t guard_bytes = 512 * 1024 + 4096;
constexpr unsigned stream_sets = 8;
constexpr std::size_t static_shared_limit = 48 * 1024;
constexpr std::uint64_t step_of_yield = 16;  // a loop that only yields is given up sooner than one of barriers

// A stack on which device threads run, and where it was left. The OS thread's own stack is one too.
struct fiber {
  context::fcontext_t at = nullptr;
  char* stack = nullptr;  // lowest address; below it lies the guard
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  void* fake_stack = nullptr;
  void* tsan_context = nullptr;
  unsigned thread = 0;  // with ThreadSanitizer: the device thread that always runs here
  bool fresh = true;
};

enum class waits : unsigned char { no, at_barrier, at_meeting };

struct device_thread {
  fiber* on = nullptr;
  waits state = waits::no;
  site where{};
  const meeting* what = nullptr;
};

struct shared_block {
  const void* declaration;
  void* data;
  std::size_t bytes;
};

const char* name_of(warp_operation o) {
  switch (o) {
    case warp_operation::sync: return "__syncwarp";
    case warp_operation::shuffle: return "__shfl_sync";
    case warp_operation::shuffle_up: return "__shfl_up_sync";
    case warp_operation::shuffle_down: return "__shfl_down_sync";
    case warp_operation::shuffle_xor: return "__shfl_xor_sync";
    case warp_operation::ballot: return "__ballot_sync";
    case warp_operation::any: return "__any_sync";
    case warp_operation::all: return "__all_sync";
    case warp_operation::match_any: return "__match_any_sync";
    case warp_operation::match_all: return "__match_all_sync";
    case warp_operation::reduce_add: return "__reduce_add_sync";
    case warp_operation::reduce_min: return "__reduce_min_sync";
    case warp_operation::reduce_max: return "__reduce_max_sync";
    case warp_operation::reduce_and: return "__reduce_and_sync";
    case warp_operation::reduce_or: return "__reduce_or_sync";
    case warp_operation::reduce_xor: return "__reduce_xor_sync";
  }
  return "?";
}

const char* file_of(site where) {
  const char* slash = std::strrchr(where.file, '/');
  return slash ? slash + 1 : where.file;
}

std::string triple(unsigned x, unsigned y, unsigned z) {
  return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

class engine {
 public:
  std::optional<fault> run(const grid& g, const std::function<void()>& body) {
    const unwatched bookkeeping;
    static thread_local const char caller = 0;
    if (caller_ != &caller) {
      // What a fiber has on its stack belongs to another OS thread: addresses of thread-local variables.
      for (const std::unique_ptr<fiber>& f : fibers_) f->fresh = true;
      caller_ = &caller;
    }
    grid_ = &g;
    body_ = &body;
    random_ = generator(g.seed);
    fault_.reset();
    count_ = g.threads.x * g.threads.y * g.threads.z;
    blockDim = g.threads;
    gridDim = g.blocks;
    prepare_order();
    countdown_ = 1 + static_cast<unsigned>(random_.below(64));
    host_.tsan_context = tsan_current();
    tags_ = std::make_unique<grid_tags>();
    const std::uint64_t blocks = std::uint64_t{g.blocks.x} * g.blocks.y * g.blocks.z;
    const affine order(blocks, random_);
    for (std::uint64_t b = 0; b < blocks && !fault_; ++b) run_block(order(b), b);
    end_grid();
    return std::exchange(fault_, std::nullopt);
  }

  const meeting& meet(unsigned mask, warp_operation operation, std::uint64_t value, site where) {
    step(1);
    const unsigned warp = current_ / 32, mine = 1u << current_ % 32;
    if (!(mask & mine)) {
      give_up(cudaErrorLaunchFailure, "%s at %s:%u with mask 0x%08x, which doesn't name the calling lane %u",
              name_of(operation), file_of(where), where.line, mask, current_ % 32);
    }
    if (const unsigned absent = mask & ~living_[warp]) {
      give_up(cudaErrorLaunchFailure, "%s at %s:%u with mask 0x%08x, which names absent lanes 0x%08x",
              name_of(operation), file_of(where), where.line, mask, absent);
    }
    meeting* m = nullptr;
    for (meeting* open : meetings_[warp]) {
      if (open->mask == mask && open->operation == operation && open->arrived != mask) m = open;
    }
    if (!m) {
      const unwatched bookkeeping;
      if (free_meetings_.empty()) free_meetings_.push_back(&all_meetings_.emplace_back());
      m = free_meetings_.back();
      free_meetings_.pop_back();
      m->mask = mask;
      m->arrived = m->left = 0;
      m->operation = operation;
      m->where = where;
      meetings_[warp].push_back(m);
    }
    m->value[current_ % 32] = value;
    m->arrived |= mine;
    if (operation == warp_operation::sync) tsan_release(m);
    if (m->arrived == mask) {
      for (unsigned others = mask & ~mine; others != 0; others &= others - 1)
        make_ready(warp * 32 + static_cast<unsigned>(std::countr_zero(others)));
      if (random_.coin()) yield();
    } else {
      park(waits::at_meeting, where, m);
    }
    if (operation == warp_operation::sync) tsan_acquire(m);
    return *m;
  }

  void leave(const meeting& left) {
    meeting& m = const_cast<meeting&>(left);
    m.left |= 1u << current_ % 32;
    if (m.left != m.mask) return;
    const unwatched bookkeeping;
    std::vector<meeting*>& open = meetings_[current_ / 32];
    open.erase(std::find(open.begin(), open.end(), &m));
    if (!tsan) free_meetings_.push_back(&m);  // there, an address used again would order lanes that never met
  }

  int barrier(bool predicate, site where) {
    step(1);
    const unsigned turn = turn_;
    tsan_release(tags_->barrier(turn));
    ++arrived_;
    trues_ += predicate;
    if (arrived_ == 1) barrier_site_ = where;
    // Another place in the source is another barrier, whatever the hardware counts.
    else if (barrier_site_.line != where.line || std::strcmp(barrier_site_.file, where.file) != 0) {
      give_up(cudaErrorLaunchFailure, "a divergent barrier: this thread is at %s:%u, %u others of its block at %s:%u",
              file_of(where), where.line, arrived_ - 1, file_of(barrier_site_), barrier_site_.line);
    }
    if (arrived_ == alive_) {
      open_barrier();
      if (random_.coin()) yield();
    } else {
      park(waits::at_barrier, where, nullptr);
    }
    tsan_acquire(tags_->barrier(turn));
    return counted_[turn % 2];
  }

  void fence() {
    tsan_release(&tags_->fence);
    tsan_acquire(&tags_->fence);
    if (random_.coin()) yield();
  }

  void maybe_yield() {
    tsan_acquire(&tags_->fence);
    if (--countdown_ != 0) return;
    countdown_ = 1 + static_cast<unsigned>(random_.below(64));
    yield();
  }

  void yield() {
    step(step_of_yield);
    const unsigned me = current_;
    threads_[me].on = running_;
    ready_.push_back(me);
    dispatch();
    resume(me);
  }

  unsigned lane() const { return current_ % 32; }

  void* shared(const void* declaration, std::size_t bytes, std::size_t alignment) {
    for (const shared_block& s : shared_) {
      if (s.declaration != declaration) continue;
      tsan_acquire(s.data);
      return s.data;
    }
    std::size_t all = bytes;
    for (const shared_block& s : shared_) all += s.bytes;
    if (all > static_shared_limit) {
      give_up(cudaErrorLaunchOutOfResources, "%zu bytes of static shared memory, at most %zu", all,
              static_shared_limit);
    }
    if (all + grid_->dynamic_shared > grid_->shared_limit) {
      give_up(cudaErrorLaunchOutOfResources, "%zu bytes of static and %zu of dynamic shared memory, at most %zu", all,
              grid_->dynamic_shared, grid_->shared_limit);
    }
    // Made by nobody's thread: every thread of the block is ordered after it, and no two by it.
    tsan_switch(host_.tsan_context);
    void* data = allocate_shared(bytes, alignment);
    shared_.push_back({declaration, data, bytes});
    tsan_release(data);
    tsan_switch(running_->tsan_context);
    tsan_acquire(data);
    return data;
  }

  void* dynamic_shared() const { return dynamic_; }

  // Leaves the stack as it is, so nothing on it may own memory: the message is formatted here.
  [[noreturn, gnu::format(printf, 3, 4)]] void give_up(cudaError_t code, const char* format, ...) {
    char text[512];
    std::va_list list;
    va_start(list, format);
    std::vsnprintf(text, sizeof text, format, list);
    va_end(list);
    tell(code, text);
    switch_to(host_);
    std::abort();  // nobody comes back here
  }

  void tell(cudaError_t code, const char* text) {
    const unwatched bookkeeping;
    fault_ = {code, where() + ": " + text};
  }

  bool ends_its_stack(const void* address) const {
    const auto* const at = static_cast<const char*>(address);
    return running_ != &host_ && at < running_->stack && at >= running_->stack - guard_bytes;
  }

  std::string where() const {
    return "kernel " + grid_->name + ", block " + triple(blockIdx.x, blockIdx.y, blockIdx.z) + ", thread " +
           triple(threadIdx.x, threadIdx.y, threadIdx.z);
  }

 private:
  // Addresses for ThreadSanitizer, new for each grid. Barriers alternate: a thread that is late to leave one must not
  // see who has come to the next.
  struct grid_tags {
    char begin = 0, end = 0, fence = 0;
    std::deque<std::array<char, 2>> barriers;  // one pair a block
    void* barrier(unsigned turn) { return &barriers.back()[turn % 2]; }
  };

  // Block b of n in an order of the seed: up, down, or by an affine map.
  struct affine {
    affine(std::uint64_t blocks, generator& random) : n(blocks) {
      switch (random.below(4)) {
        case 0: break;
        case 1: factor = first = n - 1; break;
        default:
          first = random.below(n);
          do factor = 1 + random.below(n);
          while (std::gcd(factor, n) != 1);
      }
    }
    std::uint64_t operator()(std::uint64_t i) const {
      return static_cast<std::uint64_t>((static_cast<unsigned __int128>(i) * factor + first) % n);
    }
    std::uint64_t n, factor = 1, first = 0;
  };

  void prepare_order() {
    const dim3 d = grid_->threads;
    indices_.resize(count_);
    order_.resize(count_);
    unsigned id = 0;
    for (unsigned z = 0; z < d.z; ++z)
      for (unsigned y = 0; y < d.y; ++y)
        for (unsigned x = 0; x < d.x; ++x) indices_[id++] = {x, y, z};
    for (unsigned i = 0; i < count_; ++i) order_[i] = i;
    const std::uint64_t kind = random_.below(4);
    if (kind == 1) std::reverse(order_.begin(), order_.end());
    if (kind >= 2)
      for (unsigned i = count_; i > 1; --i) std::swap(order_[i - 1], order_[random_.below(i)]);
    threads_.resize(count_);
    meetings_.resize((count_ + 31) / 32);
    living_.resize(meetings_.size());
    ready_.reserve(count_);
  }

  void run_block(std::uint64_t b, std::uint64_t nth) {
    const dim3 g = grid_->blocks;
    blockIdx = {static_cast<unsigned>(b % g.x), static_cast<unsigned>(b / g.x % g.y),
                static_cast<unsigned>(b / g.x / g.y)};
    for (unsigned w = 0; w < living_.size(); ++w)
      living_[w] = count_ - 32 * w >= 32 ? ~0u : (1u << (count_ - 32 * w)) - 1;
    next_ = arrived_ = trues_ = turn_ = 0;
    alive_ = count_;
    steps_ = 0;
    set_ = static_cast<unsigned>(nth % 2) + 2 * (grid_->stream % stream_sets);
    tags_->barriers.emplace_back();
    for (shared_block& s : shared_) std::memset(s.data, 0xff, s.bytes);
    if (tsan) {
      retire_shared();
      retired_meetings_.push_back(std::exchange(all_meetings_, {}));
    }
    if (!dynamic_ && grid_->dynamic_shared) dynamic_ = allocate_shared(grid_->dynamic_shared, 16);
    if (dynamic_ && !tsan) std::memset(dynamic_, 0xff, grid_->dynamic_shared);
    tsan_release(&tags_->begin);
    running_ = &host_;
    dispatch();
    if (!fault_ && alive_ != 0) fault_ = {cudaErrorLaunchFailure, stuck()};
    if (fault_) forget_fibers();
  }

  void end_grid() {
    tsan_acquire(&tags_->end);
    retire_shared();
    for (const shared_block& s : retired_) std::free(s.data);
    retired_.clear();
    retired_meetings_.clear();
    tags_.reset();
    grid_ = nullptr;
  }

  void retire_shared() {
    if (dynamic_) retired_.push_back({nullptr, dynamic_, 0});
    dynamic_ = nullptr;
    retired_.insert(retired_.end(), shared_.begin(), shared_.end());
    shared_.clear();
  }

  // Exactly as many bytes as asked for, so that AddressSanitizer sees the first one beyond.
  static void* allocate_shared(std::size_t bytes, std::size_t alignment) {
    void* data = nullptr;
    if (posix_memalign(&data, (std::max)(alignment, std::size_t{16}), bytes) != 0) std::abort();
    std::memset(data, 0xff, bytes);
    return data;
  }

  // Every way to wait comes through here, so that a loop which waits for ever is given up.
  void step(std::uint64_t size) {
    steps_ += size;
    if (steps_ <= grid_->patience) return;
    give_up(cudaErrorLaunchTimeout, "the block doesn't end: %u threads still run, and none has ended for long", alive_);
  }

  void make_ready(unsigned thread) {
    threads_[thread].state = waits::no;
    ready_.push_back(thread);
  }

  void open_barrier() {
    counted_[turn_ % 2] = static_cast<int>(trues_);
    ++turn_;
    arrived_ = trues_ = 0;
    for (unsigned i = 0; i < count_; ++i)
      if (threads_[i].state == waits::at_barrier) make_ready(i);
  }

  void park(waits state, site where, const meeting* what) {
    const unsigned me = current_;
    threads_[me] = {running_, state, where, what};
    dispatch();
    resume(me);
  }

  void resume(unsigned me) {
    current_ = me;
    threadIdx = indices_[me];
  }

  // Leaves this fiber for a thread that can go on, or one that hasn't begun, or, when there is neither, for the host.
  void dispatch() {
    const bool begin = next_ < count_ && (ready_.empty() || random_.coin());
    if (begin) return switch_to(fiber_for_new());
    if (ready_.empty()) return switch_to(host_);
    const std::size_t k = ready_.size() == 1 ? 0 : random_.below(ready_.size());
    const unsigned thread = ready_[k];
    ready_[k] = ready_.back();
    ready_.pop_back();
    if (threads_[thread].on != running_) switch_to(*threads_[thread].on);
  }

  fiber& fiber_for_new() {
    if (tsan) {
      const unwatched bookkeeping;
      const unsigned thread = order_[next_++];
      std::vector<fiber*>& set = sets_[set_];
      if (set.size() <= thread) set.resize(count_, nullptr);
      if (!set[thread]) set[thread] = &make_fiber();
      set[thread]->thread = thread;
      return *set[thread];
    }
    if (idle_.empty()) idle_.push_back(&make_fiber());
    fiber* f = idle_.back();
    idle_.pop_back();
    return *f;
  }

  fiber& make_fiber() {
    fiber& f = *fibers_.emplace_back(std::make_unique<fiber>());
    void* all = mmap(nullptr, guard_bytes + stack_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED ||
        mprotect(static_cast<char*>(all) + guard_bytes, stack_bytes, PROT_READ | PROT_WRITE) != 0) {
      std::fprintf(stderr, "emulated device: no memory for the stack of a device thread\n");
      std::abort();
    }
    f.stack = static_cast<char*>(all) + guard_bytes;
    f.bottom = f.stack;
    f.bytes = stack_bytes;
    f.tsan_context = tsan_create();
    return f;
  }

  void switch_to(fiber& to) {
    fiber& from = *running_;
    left_ = &from;
    running_ = &to;
    if (to.fresh && &to != &host_) {
      to.at = context::make_fcontext(to.stack + stack_bytes, stack_bytes, &entry);
      to.fresh = false;
    }
    asan_leave(&from.fake_stack, to.bottom, to.bytes);
    tsan_switch(to.tsan_context);
    const context::transfer_t t = context::jump_fcontext(to.at, this);
    came_back(t, from);
  }

  // Runs on the fiber that was switched to, `self`.
  void came_back(context::transfer_t t, fiber& self) {
    fiber& other = *left_;
    other.at = t.fctx;
    asan_arrive(self.fake_stack, &other.bottom, &other.bytes);
  }

  static void entry(context::transfer_t t) {
    engine& e = *static_cast<engine*>(t.data);
    e.came_back(t, *e.running_);
    for (;;) e.work();
  }

  // One fiber runs thread after thread; only a thread that has to wait keeps it.
  void work() {
    do {
      current_ = tsan ? running_->thread : order_[next_++];
      threadIdx = indices_[current_];
      tsan_acquire(&tags_->begin);
      // No frame lives below this one, but poison of earlier ones may, where a large functor then has its place.
      if (asan) asan_unpoison(static_cast<char*>(__builtin_frame_address(0)) - 16384, 16384);
      (*body_)();
      tsan_release(&tags_->end);
      living_[current_ / 32] &= ~(1u << current_ % 32);
      --alive_;
      steps_ = 0;
      if (arrived_ != 0 && arrived_ == alive_) open_barrier();
    } while (!tsan && next_ < count_);
    if (!tsan) idle_.push_back(running_);
    dispatch();
  }

  std::string stuck() const {
    std::string text = "kernel " + grid_->name + ", block " + triple(blockIdx.x, blockIdx.y, blockIdx.z) +
                       ": no thread can go on.";
    unsigned told = 0;
    for (unsigned i = 0; i < count_ && told < 8; ++i) {
      const device_thread& t = threads_[i];
      if (t.state == waits::no) continue;
      ++told;
      text += "\n  thread " + triple(indices_[i].x, indices_[i].y, indices_[i].z) + " waits at ";
      if (t.state == waits::at_barrier)
        text += "__syncthreads";
      else
        text += name_of(t.what->operation);
      text += std::string(", ") + file_of(t.where) + ":" + std::to_string(t.where.line);
      if (t.state == waits::at_meeting) {
        char lanes[48];
        std::snprintf(lanes, sizeof lanes, ", for lanes 0x%08x of its warp", t.what->mask & ~t.what->arrived);
        text += lanes;
      }
    }
    return text + "\n  " + std::to_string(alive_) + " of " + std::to_string(count_) + " threads have not ended";
  }

  // After a fault, stacks are left as they are: nothing on them needs to be destroyed.
  void forget_fibers() {
    idle_.clear();
    ready_.clear();
    std::fill(threads_.begin(), threads_.end(), device_thread{});
    for (std::vector<meeting*>& m : meetings_) m.clear();
    free_meetings_.clear();
    all_meetings_.clear();
    for (const std::unique_ptr<fiber>& f : fibers_) {
      asan_unpoison(f->stack, stack_bytes);
      f->fake_stack = nullptr;
      f->fresh = true;
      if (tsan) {
        tsan_switch(f->tsan_context);
        tsan_release(&tags_->end);  // the host, which frees what the grid has used, comes after it
        tsan_switch(host_.tsan_context);
        tsan_destroy(f->tsan_context);
        f->tsan_context = tsan_create();
      } else {
        idle_.push_back(f.get());
      }
    }
  }

  const grid* grid_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  generator random_{0};
  std::optional<fault> fault_;

  const char* caller_ = nullptr;  // the OS thread that runs the grid
  fiber host_;
  fiber* running_ = &host_;
  fiber* left_ = nullptr;
  std::vector<std::unique_ptr<fiber>> fibers_;
  std::vector<fiber*> idle_;
  std::vector<fiber*> sets_[2 * stream_sets];
  unsigned set_ = 0;

  std::vector<uint3> indices_;
  std::vector<unsigned> order_;
  std::vector<device_thread> threads_;
  std::vector<unsigned> ready_;
  unsigned count_ = 0, next_ = 0, alive_ = 0, current_ = 0;
  unsigned arrived_ = 0, trues_ = 0, turn_ = 0, countdown_ = 1;
  int counted_[2] = {};
  site barrier_site_{};
  std::uint64_t steps_ = 0;  // since the block's last thread ended

  std::vector<std::vector<meeting*>> meetings_;  // of each warp
  std::vector<unsigned> living_;                 // lanes of each warp that haven't ended
  std::vector<meeting*> free_meetings_;
  std::deque<meeting> all_meetings_;
  std::vector<std::deque<meeting>> retired_meetings_;
  std::vector<shared_block> shared_, retired_;
  void* dynamic_ = nullptr;
  std::unique_ptr<grid_tags> tags_;
};

constinit thread_local engine* running_engine = nullptr;

// While it lives, a device thread that reads or writes where no memory is says so before the process ends.
// The sanitizers have reports of their own.
class crash_report {
 public:
  crash_report() {
    if (asan || tsan) return;
    stack_t other{};
    sigaltstack(nullptr, &other);
    if (other.ss_flags & SS_DISABLE) {  // the device thread's own may be what has ended
      static thread_local char own[64 * 1024];
      other = {own, 0, sizeof own};
      sigaltstack(&other, nullptr);
    }
    struct sigaction mine {};
    mine.sa_sigaction = &tell;
    mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &mine, &before_);
  }
  ~crash_report() {
    if (!asan && !tsan) sigaction(SIGSEGV, &before_, nullptr);
  }
  crash_report(const crash_report&) = delete;

 private:
  // The access is made again when this returns, for whoever handled it before.
  static void tell(int, siginfo_t* info, void*) {
    sigaction(SIGSEGV, &before_, nullptr);
    if (!running_engine) return;
    std::fprintf(stderr, "emulated device: in %s: %s %p\n", running_engine->where().c_str(),
                 running_engine->ends_its_stack(info->si_addr) ? "the stack is full at" : "no memory at", info->si_addr);
  }
  static inline struct sigaction before_ {};
};

engine& device_side(const char* what) {
  if (running_engine) return *running_engine;
  std::fprintf(stderr, "emulated device: %s called outside of a kernel\n", what);
  std::abort();
}

}  // namespace

std::optional<fault> run_grid(const grid& g, const std::function<void()>& body) {
  // One for all OS threads, since ThreadSanitizer has few contexts; who calls holds the machine. Never destroyed.
  static engine* const one = new engine;
  running_engine = one;
  const crash_report report;
  std::optional<fault> f = one->run(g, body);
  running_engine = nullptr;
  return f;
}

std::string where_now() { return running_engine ? running_engine->where() : std::string(); }

const meeting& meet(unsigned mask, warp_operation operation, std::uint64_t value, site where) {
  return device_side(name_of(operation)).meet(mask, operation, value, where);
}
void leave(const meeting& m) { running_engine->leave(m); }
int barrier(bool predicate, site where) { return device_side("__syncthreads").barrier(predicate, where); }
void fence() { device_side("__threadfence").fence(); }
void maybe_yield() { device_side("an atomic operation").maybe_yield(); }
void yield() { device_side("__nanosleep").yield(); }
unsigned lane() { return device_side("a warp operation").lane(); }
void* shared_memory(const void* declaration, std::size_t bytes, std::size_t alignment) {
  return device_side("HEDDLE_SHARED").shared(declaration, bytes, alignment);
}
void* dynamic_shared_memory() { return device_side("HEDDLE_DYNAMIC_SHARED").dynamic_shared(); }
long long clock() {
  static thread_local long long ticks = 0;
  return ticks += 8;
}
void misaligned(const void* address, unsigned bytes) {
  device_side("a vector access").give_up(cudaErrorMisalignedAddress, "a misaligned access of %u bytes at %p", bytes,
                                         address);
}
void wrong_width(int width) {
  device_side("a shuffle").give_up(cudaErrorLaunchFailure, "a shuffle of width %d", width);
}
void trap() { device_side("__trap").give_up(cudaErrorLaunchFailure, "__trap()"); }

}  // namespace emulated

// What assert() of the C library calls, in its place: in a kernel it ends the kernel.
extern "C" void __assert_fail(const char* condition, const char* file, unsigned line, const char* function) noexcept {
  if (emulated::running_engine) {
    emulated::running_engine->give_up(cudaErrorAssert, "assertion %s failed at %s:%u", condition,
                                      emulated::file_of({file, line}), line);
  }
  std::fprintf(stderr, "%s:%u: %s: Assertion `%s' failed.\n", file, line, function, condition);
  std::abort();
}

// What code compiled with -fsanitize=alignment calls before an access of a misaligned pointer, laid out as g++ and clang
// write it. Where UndefinedBehaviorSanitizer is linked, this comes before its own, which reports what isn't of a kernel.
namespace {
struct mismatch {
  struct {
    const char* file;
    std::uint32_t line, column;
  } where;
  const struct {
    std::uint16_t kind, info;
    char name[1];  // in quotes
  } * type;
  unsigned char log_of_alignment, access;
};

void check_mismatch(const mismatch& m, const void* address) {
  if (!emulated::running_engine) return;
  const bool null = address == nullptr;
  emulated::running_engine->give_up(null ? cudaErrorIllegalAddress : cudaErrorMisalignedAddress,
                                    "a %s access of type %s at %s:%u, address %p", null ? "null" : "misaligned",
                                    m.type->name, emulated::file_of({m.where.file, m.where.line}), m.where.line,
                                    address);
}
}  // namespace

extern "C" [[gnu::weak]] void __ubsan_handle_type_mismatch_v1(const mismatch* m, const void* address) {
  check_mismatch(*m, address);  // the host's processor takes it
}
extern "C" [[gnu::weak]] void __ubsan_handle_type_mismatch_v1_abort(const mismatch* m, const void* address) {
  check_mismatch(*m, address);
  using handler = void (*)(const mismatch*, const void*);
  if (const auto next = reinterpret_cast<handler>(dlsym(RTLD_NEXT, __func__))) next(m, address);
  std::abort();
}

#if EMULATED_ASAN
// AddressSanitizer's report begins with the place on the device.
extern "C" void __asan_on_error() {
  const std::string where = emulated::where_now();
  if (!where.empty()) std::fprintf(stderr, "emulated device: in %s\n", where.c_str());
}
#endif

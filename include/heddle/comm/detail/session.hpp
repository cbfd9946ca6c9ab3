// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace heddle {
inline namespace v0 {
namespace detail {

// Why a wait ended.
enum class wait_end { ready, failed, late };

// When a long wait is reported, and to whom; never if after is 0.
struct stall_report {
  std::chrono::nanoseconds after{0};
  void (*to)(void* context, const std::string& report) = nullptr;
  void* context = nullptr;
};

// What all communicators of one threads::run share: who failed first, and one bell per rank to sleep on. `Clock` takes
// the time of deadlines.
template <class Clock>
class basic_session {
  static constexpr std::chrono::microseconds yielding{50};

 public:
  basic_session(int ranks, std::chrono::nanoseconds deadline, stall_report stall = {})
      : bells_(std::make_unique<bell[]>(static_cast<std::size_t>(ranks))), ranks_(ranks), deadline_(deadline),
        stall_(std::move(stall)),
        spins_(std::thread::hardware_concurrency() >= static_cast<unsigned>(ranks) ? 100 : 0) {}

  std::chrono::nanoseconds deadline() const noexcept { return deadline_; }
  const stall_report& stall() const noexcept { return stall_; }
  int failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  std::string failure() const {
    std::lock_guard lock(mutex_);
    return text_;
  }

  // The first failure wins: the later ones are its consequences.
  void fail(int rank, const std::string& text) {
    {
      std::lock_guard lock(mutex_);
      if (failed_.load(std::memory_order_relaxed) >= 0) return;
      text_ = text;
      failed_.store(rank, std::memory_order_release);
    }
    for (int r = 0; r < ranks_; ++r) ring(r);
  }

  // Wakes whoever of `rank` sleeps. Call it after a sequentially consistent store to what they wait for.
  void ring(int rank) noexcept {
    bell& b = bells_[static_cast<std::size_t>(rank)];
    if (b.sleepers.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard lock(b.mutex);
    b.wake.notify_all();
  }

  // Spins for about a microsecond where cores are free, then yields for a while, then sleeps. A yield is cheap on a core
  // that is free, and the only way to go on where the system has put the peer, or this rank's own computation, on the
  // same core: there a longer spin would cost its length in every call. Where other programs want the cores, a yield
  // lasts as long as one of them may run, so the while is a time: who sleeps is let in again at once when woken. `ready`
  // must read with seq_cst loads, so that either the sleeper sees the store or the ringer sees the sleeper.
  // `what_is_missing` gives the text of a stall report.
  template <class Ready, class Missing>
  wait_end wait(int rank, Ready&& ready, bool heed_failure, Missing&& what_is_missing) {
    for (int i = 0; i < spins_; ++i) {
      if (ready()) return wait_end::ready;
      if (i >= 32) pause();  // a pause is as long as a message between two cores
    }
    const auto start = Clock::now(), end = start + deadline_;
    do {
      if (ready()) return wait_end::ready;
      std::this_thread::yield();
    } while (Clock::now() - start < yielding);
    bell& b = bells_[static_cast<std::size_t>(rank)];
    bool reported = stall_.after.count() <= 0 || !stall_.to;
    for (;;) {
      {
        std::unique_lock lock(b.mutex);
        b.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const bool done = ready();  // once: it may take what it finds
        // A system-clock wait: ThreadSanitizer knows it, and the deadline below is taken from the steady clock.
        if (!done && !(heed_failure && failed() >= 0)) {
          b.wake.wait_until(lock, std::chrono::system_clock::now() + std::chrono::milliseconds(20));
        }
        b.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (done) return wait_end::ready;
      }
      if (ready()) return wait_end::ready;
      if (heed_failure && failed() >= 0) return wait_end::failed;
      if (!reported && Clock::now() - start > stall_.after) {
        reported = true;
        stall_.to(stall_.context, what_is_missing());
      }
      if (heed_failure && Clock::now() > end) return wait_end::late;
    }
  }

 private:
  struct alignas(64) bell {
    std::atomic<int> sleepers{0};
    std::mutex mutex;
    std::condition_variable wake;
  };

  static void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  std::unique_ptr<bell[]> bells_;
  int ranks_;
  std::chrono::nanoseconds deadline_;
  stall_report stall_;
  int spins_;
  std::atomic<int> failed_{-1};
  mutable std::mutex mutex_;
  std::string text_;
};

using session = basic_session<std::chrono::steady_clock>;

// A barrier whose arrival can be taken back until the last rank has come, so that a rank that gives up leaves it
// either for all or for none. word = generation << 32 | arrived.
class gate {
 public:
  // Returns ready once all of `members`, `rank` among them, have arrived; failed or late after having withdrawn the
  // arrival.
  template <class Session, class Members, class Missing>
  wait_end arrive_and_wait(Session& s, int rank, const Members& members, bool must_open, Missing&& what_is_missing) {
    const std::uint64_t before = word_.fetch_add(1, std::memory_order_seq_cst);
    const std::uint64_t generation = before >> 32;
    const auto ranks = static_cast<std::uint64_t>(members.size());
    if ((before & 0xffffffffu) + 1 == ranks) {
      word_.store((generation + 1) << 32, std::memory_order_seq_cst);
      for (const int r : members) s.ring(r);
      return wait_end::ready;
    }
    const auto open = [&] { return (word_.load(std::memory_order_seq_cst) >> 32) != generation; };
    wait_end end = s.wait(rank, open, !must_open, what_is_missing);
    while (end != wait_end::ready) {  // withdraw, unless it opens in this instant
      std::uint64_t w = word_.load(std::memory_order_seq_cst);
      if ((w >> 32) != generation || (w & 0xffffffffu) == ranks) {
        end = s.wait(rank, open, false, what_is_missing);
      } else if (word_.compare_exchange_strong(w, w - 1, std::memory_order_seq_cst)) {
        return end;
      }
    }
    return end;
  }

 private:
  alignas(64) std::atomic<std::uint64_t> word_{0};
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Every adaptor over an upstream that refuses at random, while operator new refuses at random too: nothing is lost,
// nothing is given back twice, and the counts are right after each call. Only allocations can fail: by the concept
// deallocations are noexcept.

#include <heddle/memory/any_resource.hpp>
#include <heddle/memory/arena.hpp>
#include <heddle/memory/binning.hpp>
#include <heddle/memory/checking.hpp>
#include <heddle/memory/fallback.hpp>
#include <heddle/memory/fixed_size.hpp>
#include <heddle/memory/limiting.hpp>
#include <heddle/memory/logging.hpp>
#include <heddle/memory/planned.hpp>
#include <heddle/memory/pool.hpp>
#include <heddle/memory/queue_pool.hpp>
#include <heddle/memory/retry_on_failure.hpp>
#include <heddle/memory/statistics.hpp>
#include <heddle/memory/thread_safe.hpp>
#include <heddle/memory/tracking.hpp>

#include "../support/catch.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {
thread_local int news_left = -1;  // until one fails; below 0 none does

void* allocate_or_null(std::size_t bytes) noexcept {
  if (news_left >= 0 && news_left-- == 0) return nullptr;
  return std::malloc(bytes ? bytes : 1);
}
}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (void* const p = allocate_or_null(bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return allocate_or_null(bytes);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }

namespace {
namespace hd = heddle;

/// For a while operator new does not fail, or fails after so many calls.
class news {
 public:
  explicit news(int until_one_fails = -1) : before_(std::exchange(news_left, until_one_fails)) {}
  news(const news&) = delete;
  news& operator=(const news&) = delete;
  ~news() { news_left = before_; }

 private:
  int before_;
};

/// Gives what it is asked for or throws, and writes down what is out.
class faulty {
 public:
  explicit faulty(unsigned seed) : state_(std::make_shared<state>()) { state_->random.seed(seed); }

  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    const news none_fails;
    state& s = *state_;
    if (bytes != 0 && s.one_in != 0 && s.random() % s.one_in == 0) {
      ++s.failures;
      if (const auto how = s.random() % 4; how == 0)
        throw std::bad_alloc();
      else if (how == 1)
        throw std::runtime_error("an upstream's own kind");
      throw hd::memory_error("faulty", bytes);
    }
    void* const p = hd::host_resource{}.allocate_sync(bytes, alignment);
    if (p) s.out[p] = {bytes, alignment};
    s.bytes += bytes;
    return p;
  }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    const news none_fails;
    if (!p) return;
    const auto at = state_->out.find(p);
    if (at == state_->out.end() || at->second != std::pair(bytes, alignment)) {
      ++state_->wrong;
      return;
    }
    state_->bytes -= bytes;
    state_->out.erase(at);
    hd::host_resource{}.deallocate_sync(p, bytes, alignment);
  }
  void* allocate(hd::host::queue, std::size_t b, std::size_t a) { return allocate_sync(b, a); }
  void deallocate(hd::host::queue, void* p, std::size_t b, std::size_t a) noexcept { deallocate_sync(p, b, a); }
  friend bool operator==(const faulty&, const faulty&) = default;

  /// One request of so many fails; 0: none.
  void fail(unsigned one_in) { state_->one_in = one_in; }
  std::size_t bytes() const { return state_->bytes; }
  std::size_t live() const { return state_->out.size(); }
  std::size_t failures() const { return state_->failures; }
  /// Deallocations of what was not out, or with another size or alignment.
  std::size_t wrong() const { return state_->wrong; }

 private:
  struct state {
    std::mt19937 random;
    unsigned one_in = 0;
    std::map<void*, std::pair<std::size_t, std::size_t>> out;
    std::size_t bytes = 0, failures = 0, wrong = 0;
  };
  std::shared_ptr<state> state_;
};

/// What a program has and did, as it sees it itself.
struct program {
  struct piece {
    unsigned char* p;
    std::size_t bytes, alignment;
    unsigned char mark;
  };
  std::vector<piece> live;
  std::size_t bytes = 0, taken = 0, given = 0, refused = 0, spoiled = 0;
};

/// That there was something to survive.
struct figures {
  std::size_t failures = 0, refused = 0, replayed = 0;
  figures& operator+=(const figures& o) {
    failures += o.failures, refused += o.refused, replayed += o.replayed;
    return *this;
  }
};

/// Steps of random calls, mostly the same as the step before, in every other one with failures. `make(upstream)` makes
/// the resource, which may fail; `right(resource, upstream, program)` says whether its counts are right.
template <class Make, class Right> figures survives(unsigned seed, Make make, Right right) {
  faulty upstream{seed};
  figures sum;
  {
    std::mt19937 chance(seed);
    std::optional<decltype(make(upstream))> made;
    for (upstream.fail(2); !made;) {
      try {
        const news failing(static_cast<int>(chance() % 8) - 1);
        made.emplace(make(upstream));
      } catch (const std::exception&) {
        REQUIRE(upstream.live() == 0);
      }
      if (chance() % 4 == 0) upstream.fail(0);
    }
    auto& memory = *made;
    program mine;
    const auto take = [&](std::size_t bytes, std::size_t alignment, bool by_queue, unsigned char mark, bool fails) {
      try {
        void* p = nullptr;
        {
          const news failing(fails && chance() % 3 == 0 ? static_cast<int>(chance() % 3) : -1);
          p = by_queue ? memory.allocate(hd::host::queue{}, bytes, alignment) : memory.allocate_sync(bytes, alignment);
        }
        if (!p) return;
        std::memset(p, mark, bytes);
        mine.live.push_back({static_cast<unsigned char*>(p), bytes, alignment, mark});
        mine.bytes += bytes;
        ++mine.taken;
      } catch (const std::exception&) {
        ++mine.refused;
      }
    };
    const auto give = [&](std::size_t k, bool by_queue, bool fails) {
      const program::piece x = mine.live[k];
      mine.live.erase(mine.live.begin() + static_cast<std::ptrdiff_t>(k));
      for (std::size_t i = 0; i < x.bytes; ++i) mine.spoiled += x.p[i] != x.mark;
      const news failing(fails ? 0 : -1);
      if (by_queue)
        memory.deallocate(hd::host::queue{}, x.p, x.bytes, x.alignment);
      else
        memory.deallocate_sync(x.p, x.bytes, x.alignment);
      mine.bytes -= x.bytes;
      ++mine.given;
    };
    for (unsigned step = 0; step < 24; ++step) {
      const bool fails = step % 4 == 2;
      upstream.fail(fails ? 4 : 0);
      if constexpr (requires { memory.begin_step(); }) {
        try {
          const news failing(fails ? static_cast<int>(chance() % 20) : -1);
          memory.begin_step();
        } catch (const std::exception&) {
        }
        sum.replayed += memory.replaying();
      }
      if constexpr (requires { memory.trim(); }) {
        if (fails) memory.trim();
      }
      std::mt19937 random(seed + step / 8);
      for (int call = 0; call < 40; ++call) {
        const bool by_queue = random() % 2;
        if (random() % 5 < 3) {
          const std::size_t bytes = random() % 8 ? random() % 1500 : random() % 9000;
          take(bytes, std::size_t{1} << random() % 9, by_queue, static_cast<unsigned char>(random()), fails);
        } else if (const unsigned k = random(); !mine.live.empty()) {
          give(k % mine.live.size(), by_queue, fails);
        }
        INFO("step " << step << " call " << call);
        REQUIRE(right(memory, upstream, mine));
        REQUIRE(upstream.wrong() == 0);
        REQUIRE(mine.spoiled == 0);
      }
      while (step % 5 != 4 && !mine.live.empty()) give(mine.live.size() - 1, false, fails);
      REQUIRE(right(memory, upstream, mine));
    }
    while (!mine.live.empty()) give(0, true, true);
    REQUIRE(right(memory, upstream, mine));
    sum.failures = upstream.failures();
    sum.refused = mine.refused;
  }
  CHECK(upstream.live() == 0);
  CHECK(upstream.bytes() == 0);
  CHECK(upstream.wrong() == 0);
  return sum;
}

template <class Make, class Right> void survives(Make make, Right right) {
  figures sum;
  for (unsigned seed = 1; seed <= 8; ++seed) {
    INFO("seed " << seed);
    sum += survives(seed, make, right);
  }
  CHECK(sum.failures != 0);
  CHECK(sum.refused != 0);
}
}  // namespace

TEST_CASE("adaptors that count survive an upstream and a heap that fail", "[memory][failures]") {
  survives([](const faulty& f) { return hd::tracking{f, {.log = true}}; },
           [](const auto& m, const faulty& f, const program& mine) {
             return m.bytes() == mine.bytes && f.bytes() == mine.bytes && m.live() == mine.live.size() &&
                    m.allocations() == mine.taken && m.samples().size() == mine.taken + mine.given;
           });
  survives([](const faulty& f) { return hd::limiting{f, 30000}; },
           [](const auto& m, const faulty& f, const program& mine) {
             return m.in_use() == mine.bytes && f.bytes() == mine.bytes;
           });
  survives([](const faulty& f) { return hd::statistics{f}; },
           [](const auto& m, const faulty& f, const program& mine) {
             return m.counts().bytes == static_cast<std::int64_t>(mine.bytes) && f.bytes() == mine.bytes &&
                    m.counts().allocations == mine.taken && m.counts().deallocations == mine.given;
           });
  survives([](const faulty& f) { return hd::logging{f}; },
           [](const auto& m, const faulty& f, const program& mine) {
             return m.events().size() == mine.taken + mine.given && f.bytes() == mine.bytes;
           });
  survives([](const faulty& f) { return hd::any_resource<>{hd::thread_safe{f}}; },
           [](const auto&, const faulty& f, const program& mine) { return f.bytes() == mine.bytes; });
  survives([](const faulty& f) { return hd::checking{f}; },
           [](const auto& m, const faulty& f, const program& mine) {
             return m.leaks().size() == mine.live.size() && m.faults().empty() && f.live() == mine.live.size();
           });
}

TEST_CASE("adaptors that ask elsewhere or again survive an upstream and a heap that fail", "[memory][failures]") {
  int asked = 0;
  survives(
      [&](const faulty& f) {
        return hd::retry_on_failure{f, [&](std::size_t, int attempt) { return ++asked, attempt < 2; }};
      },
      [](const auto&, const faulty& f, const program& mine) { return f.bytes() == mine.bytes; });
  CHECK(asked != 0);
  for (unsigned seed = 1; seed <= 8; ++seed) {
    INFO("seed " << seed);
    const faulty second{seed + 100};
    survives(
        seed,
        [&](const faulty& f) {
          faulty(second).fail(3);
          return hd::fallback{hd::limiting{f, 6000}, second};
        },
        [&](const auto& m, const faulty& f, const program& mine) {
          return m.fallen_back() == second.live() && f.bytes() + second.bytes() == mine.bytes && second.wrong() == 0;
        });
    CHECK(second.live() == 0);
    CHECK(second.failures() != 0);
  }
}

TEST_CASE("adaptors that keep chunks survive an upstream and a heap that fail", "[memory][failures]") {
  const auto pools = [](const auto& m, const faulty& f, const program& mine) {
    return m.held() == f.bytes() && m.in_use() >= mine.bytes && m.in_use() <= mine.bytes + 256 * mine.live.size() &&
           m.refused() == 0;
  };
  const hd::pool_options options{.initial = 1000, .max = 60000, .growth = 4096};
  survives([&](const faulty& f) { return hd::pool{f, options}; }, pools);
  survives([&](const faulty& f) { return hd::queue_pool{hd::host{}, f, options}; }, pools);
  survives([](const faulty& f) { return hd::arena{f, 3000}; },
           [](const auto& m, const faulty& f, const program& mine) {
             return m.held() == f.bytes() && m.live() == mine.live.size();
           });
  survives([](const faulty& f) { return hd::fixed_size{f, {.block = 2048, .per_chunk = 3}}; },
           [](const auto& m, const faulty& f, const program& mine) {
             return m.held() == f.bytes() && m.in_use() == 2048 * mine.live.size();
           });
  survives([](const faulty& f) { return hd::binning{f, {.smallest = 64, .largest = 1024, .chunk = 2048}}; },
           [](const auto& m, const faulty&, const program& mine) {
             std::size_t blocks = 0;
             for (const program::piece& x : mine.live) {
               const std::size_t need = std::bit_ceil((std::max)({x.bytes, x.alignment, std::size_t{64}}));
               blocks += need <= 1024 ? need : 0;
             }
             return m.in_use() == blocks;
           });
}

TEST_CASE("planned survives an upstream and a heap that fail", "[memory][failures]") {
  figures sum;
  std::size_t deviations = 0;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    INFO("seed " << seed);
    sum += survives(
        seed, [](const faulty& f) { return hd::planned{f}; },
        [&](const auto& m, const faulty&, const program&) {
          deviations += m.deviations() != 0;
          return m.refused() == 0;
        });
  }
  CHECK(sum.replayed > 100);
  CHECK(sum.refused > 100);
  CHECK(deviations != 0);
}

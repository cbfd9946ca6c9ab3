// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/checked.hpp>
#include <heddle/memory/host_resource.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief What a program did wrong with a block.
enum class memory_misuse {
  double_free,      ///< Given back twice.
  foreign_pointer,  ///< Given back, but never handed out.
  wrong_size,       ///< Given back with another size or alignment than it was asked for.
  overrun,          ///< Bytes before or after it were written.
  leak              ///< Not given back when `checking::leaks` looked.
};

/// @brief A misuse, and where it happened: return addresses, which `addr2line -e PROGRAM ADDRESS` turns into lines.
struct memory_fault {
  memory_misuse what{};             ///< The kind.
  const void* pointer = nullptr;    ///< The block.
  std::size_t bytes = 0;            ///< Its size as asked for; 0 for a foreign pointer.
  std::size_t given = 0;            ///< The size it was given back with.
  const void* allocated = nullptr;  ///< Who asked for it; null for a foreign pointer.
  const void* freed = nullptr;      ///< Who gave it back, in a double free the first time; null for a leak.
  const void* again = nullptr;      ///< Who gave it back the second time.
};

namespace detail {
inline constexpr unsigned char canary = 0xA5;
inline constexpr std::size_t canary_bytes = 64;

class checking_policy {
 public:
  struct block {
    std::size_t bytes, alignment;
    const void *allocated, *freed;
  };

  checking_policy() { faults.reserve(64); }

  // The call sites are those of the adaptor's four functions, which must not be inlined into their callers.
  template <class Take> void* allocate(std::size_t bytes, std::size_t alignment, Take&& take, const void* site) {
    check_alignment("checking", alignment);
    const std::size_t before = front(alignment);
    if (bytes > max_bytes - before - canary_bytes) throw memory_error("checking", bytes, max_bytes);
    std::map<const void*, block> record{{nullptr, {bytes, alignment, site, nullptr}}};  // so that nothing fails later
    {
      std::lock_guard lock(mutex);
      faults.reserve(faults.size() + 2 * live.size() + 8);
    }
    auto* const p = static_cast<unsigned char*>([&] {
      try {
        return take(before + bytes + canary_bytes, alignment);
      } catch (const memory_error& e) {  // which knows the block with its canaries
        throw memory_error("checking, with " + std::to_string(before + canary_bytes) + " bytes of canaries beside them",
                           bytes, e.limit(), e.in_use(), e.largest_free());
      }
    }());
    std::memset(p, canary, before);
    std::memset(p + before + bytes, canary, canary_bytes);
    auto node = record.extract(record.begin());
    node.key() = p + before;
    std::lock_guard lock(mutex);
    freed.erase(p + before);
    live.insert(std::move(node));
    return p + before;
  }

  template <class Give>
  void deallocate(void* p, std::size_t bytes, std::size_t alignment, Give&& give, const void* site) noexcept {
    block b{};
    {
      std::lock_guard lock(mutex);
      const auto at = live.find(p);
      if (at == live.end()) {  // nothing is given back
        const auto before = freed.find(p);
        if (before == freed.end())
          note({memory_misuse::foreign_pointer, p, 0, bytes, nullptr, site, nullptr});
        else
          note({memory_misuse::double_free, p, before->second.bytes, bytes, before->second.allocated,
                before->second.freed, site});
        return;
      }
      b = at->second;
      b.freed = site;
      if (b.bytes != bytes || b.alignment != alignment)
        note({memory_misuse::wrong_size, p, b.bytes, bytes, b.allocated, site, nullptr});
      if (!intact(static_cast<unsigned char*>(p), b))
        note({memory_misuse::overrun, p, b.bytes, bytes, b.allocated, site, nullptr});
      auto node = live.extract(at);  // so that giving memory back allocates nothing
      node.mapped() = b;
      freed.insert(std::move(node));
    }
    const std::size_t before = front(b.alignment);
    give(static_cast<unsigned char*>(p) - before, before + b.bytes + canary_bytes, b.alignment);
  }

  static bool intact(const unsigned char* p, const block& b) noexcept {
    const auto good = [](const unsigned char* at, std::size_t n) {
      return std::all_of(at, at + n, [](unsigned char c) { return c == canary; });
    };
    return good(p - front(b.alignment), front(b.alignment)) && good(p + b.bytes, canary_bytes);
  }

  mutable std::mutex mutex;
  std::map<const void*, block> live, freed;
  std::vector<memory_fault> faults;

 private:
  static std::size_t front(std::size_t alignment) noexcept { return (std::max)(alignment, canary_bytes); }

  void note(const memory_fault& f) noexcept {
    if (faults.size() < faults.capacity()) faults.push_back(f);
  }
};
}  // namespace detail

/// @brief Watches how a program treats its blocks: double frees, foreign pointers, wrong sizes, overruns, leaks.
///
/// Each block stands between two runs of 64 known bytes (before it, as many as its alignment if that is more), which
/// are compared when it is given back. A fault is recorded with both call sites; a block that isn't live is not given
/// back, everything else goes on.
///
/// @code{.cpp}
/// heddle::checking memory{heddle::host_resource{}};
/// ...
/// memory.check();   // throws argument_error for the first fault
/// @endcode
///
/// State:   about 80 bytes for each block ever handed out, shared by all copies; 128 or more around each live one.
/// Order:   any upstream on the host, which writes to the memory; outermost, since the call sites are those that call
///          this adaptor. On a device compute-sanitizer looks for overruns.
/// Sync:    a mutex; thread-safe if the upstream is.
/// Throws:  what the upstream throws, a `memory_error` with the size that was asked for here: its other figures are the
///          upstream's, which counts the known bytes too; `argument_error` on a bad alignment.
template <class Upstream = host_resource> class checking {
  static_assert(has_allocate_sync<Upstream> && has_deallocate_sync<Upstream>,
                "heddle::checking: the upstream must provide allocate_sync and a noexcept deallocate_sync");
  static_assert(has_allocate<Upstream, host::queue>,
                "heddle::checking: the upstream must serve host::queue, since the host reads and writes around blocks");

 public:
  /// Watches blocks of a copy of `upstream`.
  explicit checking(Upstream upstream = Upstream{})
      : upstream_(std::move(upstream)), policy_(std::make_shared<detail::checking_policy>()) {}

  /// A block, usable at once.
  [[gnu::noinline]] void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    return take(bytes, alignment, __builtin_return_address(0));
  }
  /// Gives a block back, if it is one.
  [[gnu::noinline]] void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    give(p, bytes, alignment, __builtin_return_address(0));
  }
  /// As `allocate_sync`: the host's queue does everything at once.
  [[gnu::noinline]] void* allocate(host::queue, std::size_t bytes, std::size_t alignment) {
    return take(bytes, alignment, __builtin_return_address(0));
  }
  /// As `deallocate_sync`.
  [[gnu::noinline]] void deallocate(host::queue, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    give(p, bytes, alignment, __builtin_return_address(0));
  }

  /// The faults so far, in order.
  std::vector<memory_fault> faults() const {
    std::lock_guard lock(policy_->mutex);
    return policy_->faults;
  }

  /// One fault of kind `leak` for each block that is live now; those written beyond their ends are of kind `overrun`.
  std::vector<memory_fault> leaks() const {
    std::lock_guard lock(policy_->mutex);
    std::vector<memory_fault> out;
    for (const auto& [p, b] : policy_->live) {
      const bool good = detail::checking_policy::intact(static_cast<const unsigned char*>(p), b);
      out.push_back(
          {good ? memory_misuse::leak : memory_misuse::overrun, p, b.bytes, 0, b.allocated, nullptr, nullptr});
    }
    return out;
  }

  /// Throws: argument_error that describes the first fault, if there is one.
  void check() const {
    const std::vector<memory_fault> all = faults();
    if (!all.empty()) throw argument_error(describe(all.front()));
  }

  /// A fault as a sentence.
  static std::string describe(const memory_fault& f) {
    static constexpr const char* names[] = {"was given back twice", "was never handed out",
                                            "was given back with another size", "was written beyond its ends",
                                            "was not given back"};
    std::string s = "heddle::checking: the block at " + hex(f.pointer) + " of " + std::to_string(f.bytes) + " bytes " +
                    names[static_cast<int>(f.what)];
    if (f.what == memory_misuse::wrong_size) s += " (" + std::to_string(f.given) + " bytes)";
    if (f.allocated) s += "; allocated by " + hex(f.allocated);
    if (f.freed) s += "; given back by " + hex(f.freed);
    if (f.again) s += " and by " + hex(f.again);
    return s;
  }

  /// Whether both share one state.
  friend bool operator==(const checking& a, const checking& b) noexcept { return a.policy_ == b.policy_; }

 private:
  static std::string hex(const void* p) {
    std::string out = "0x";
    for (int shift = 60; shift >= 0; shift -= 4) {
      const auto digit = reinterpret_cast<std::uintptr_t>(p) >> shift & 15;
      if (digit || out.size() > 2 || shift == 0) out += "0123456789abcdef"[digit];
    }
    return out;
  }

  void* take(std::size_t bytes, std::size_t alignment, const void* site) {
    if (bytes == 0) return upstream_.allocate_sync(0, alignment);
    return policy_->allocate(
        bytes, alignment, [&](std::size_t n, std::size_t a) { return upstream_.allocate_sync(n, a); }, site);
  }
  void give(void* p, std::size_t bytes, std::size_t alignment, const void* site) noexcept {
    if (!p) return;
    policy_->deallocate(
        p, bytes, alignment,
        [&](void* q, std::size_t n, std::size_t a) noexcept { upstream_.deallocate_sync(q, n, a); }, site);
  }

  Upstream upstream_;
  std::shared_ptr<detail::checking_policy> policy_;
};

static_assert(resource<checking<>>);

}  // namespace v0
}  // namespace heddle

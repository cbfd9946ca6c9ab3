// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/messenger.hpp>
#include <heddle/core/philox.hpp>

#include <algorithm>
#include <mutex>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief What a bad network does to messages: chances for each one sent, from 0 to 1.
struct losses {
  double drop = 0.0;                             ///< It never arrives.
  double duplicate = 0.0;                        ///< It arrives twice.
  double reorder = 0.0;                          ///< One to eight later messages of this rank overtake it.
  double delay = 0.0;                            ///< It comes later, by up to `longest`; others overtake it.
  std::chrono::nanoseconds longest{20'000'000};  ///< After so long everything that is late is sent, 0 or above.
  std::uint64_t seed = 0;                        ///< Which messages it happens to.
};

/// @brief A messenger that loses, repeats, reorders and delays what it sends, for tests of what is written on top. The
/// fate of a rank's k-th message depends on the seed alone.
///
/// What is late is sent within later calls, as soon as there is room. If the life that it was for is over by then, it
/// is dropped. `send` and `try_send` say that a message was sent also where it wasn't.
/// Throws: argument_error if a chance is outside 0 .. 1; what the messenger underneath throws.
/// @tparam Messenger The messenger underneath, which must outlive this one.
template <messenger Messenger> class lossy {
  using clock = std::chrono::steady_clock;

 public:
  /// @param inner The messenger underneath. @param l What goes wrong.
  lossy(Messenger& inner, const losses& l) : inner_(&inner), losses_(l) {
    for (const double chance : {l.drop, l.duplicate, l.reorder, l.delay}) {
      if (!(chance >= 0.0 && chance <= 1.0))
        throw argument_error("heddle::lossy: a chance is " + std::to_string(chance) + "; allowed is 0 .. 1");
    }
  }

  /// This rank.
  int rank() const { return inner_->rank(); }
  /// How many ranks there can be.
  int size() const { return inner_->size(); }
  /// The number of this life.
  std::uint64_t life() const { return inner_->life(); }
  /// Forwards.
  std::uint64_t life_of(int rank) const { return inner_->life_of(rank); }
  /// Forwards.
  void connect(int rank) { inner_->connect(rank); }
  /// Forwards; what is late is dropped.
  void renew() {
    std::lock_guard lock(mutex_);
    held_.clear();
    inner_->renew();
  }
  /// The messenger underneath.
  Messenger& inner() noexcept { return *inner_; }

  /// Forwards, or not. @param to Whom. @param tag Any number. @param id Any number. @param body The message.
  void send(address to, std::uint32_t tag, std::uint64_t id, payload&& body) {
    treat(to, tag, id, body, [this](address a, std::uint32_t t, std::uint64_t i, payload& p) {
      inner_->send(a, t, i, std::move(p));
      return true;
    });
  }
  /// Forwards, or not. @param to Whom. @param tag Any number. @param id Any number. @param bytes The message.
  void send(address to, std::uint32_t tag, std::uint64_t id, std::span<const std::byte> bytes) {
    send(to, tag, id, payload(bytes));
  }
  /// Forwards, or not. @param to Whom. @param tag Any number. @param id Any number. @param body The message.
  bool try_send(address to, std::uint32_t tag, std::uint64_t id, payload&& body) {
    return treat(to, tag, id, body, [this](address a, std::uint32_t t, std::uint64_t i, payload& p) {
      return inner_->try_send(a, t, i, std::move(p));
    });
  }
  /// Forwards. @param longest How long to wait.
  std::optional<message> receive(std::chrono::nanoseconds longest) {
    auto now = clock::now();
    const auto end = now + (std::min<clock::duration>)(longest, std::chrono::hours(10'000));
    for (;;) {
      const auto next = (std::min)(end, release(now));
      std::optional<message> m = inner_->receive((std::max<clock::duration>)(next - now, {}));
      if (m) return m;
      now = clock::now();
      if (now >= end) return m;
    }
  }

 private:
  struct late {
    address to;
    std::uint32_t tag;
    std::uint64_t id;
    payload body;
    int overtaken;  // how many messages may yet pass it
    clock::time_point due;
  };

  template <class Send> bool treat(address to, std::uint32_t tag, std::uint64_t id, payload& body, Send&& send) {
    if (!to.life) to.life = inner_->life_of(to.rank);  // what is late isn't for a successor
    std::unique_lock lock(mutex_);
    const philox4x32::block dice = philox(losses_.seed, random_stream(rank(), 1), calls_);
    double chance = to_uniform(dice.word[0]);
    const auto happens = [&chance](double p) {
      const bool yes = chance >= 0.0 && chance < p;
      chance -= p;
      return yes;
    };
    if (happens(losses_.drop)) {
      ++calls_;
      body = {};
    } else if (const bool again = happens(losses_.duplicate); again || chance >= losses_.reorder + losses_.delay) {
      lock.unlock();
      payload copy = again ? payload(body.bytes()) : payload();
      if (!send(to, tag, id, body)) return false;
      lock.lock();
      ++calls_;
      if (again) held_.push_back({to, tag, id, std::move(copy), 0, clock::now()});
    } else {
      ++calls_;
      const bool reorder = happens(losses_.reorder);
      const double part = reorder ? 1.0 : to_uniform(dice.word[1]);
      held_.push_back({to, tag, id, std::move(body), reorder ? static_cast<int>(1 + dice.word[2] % 8) : -1,
                       clock::now() + std::chrono::duration_cast<clock::duration>(losses_.longest * part)});
      return true;  // it hasn't passed anything
    }
    for (late& l : held_) l.overtaken -= l.overtaken > 0;
    lock.unlock();
    release(clock::now());
    return true;
  }

  // Sends what was held long enough, if there is room for it; returns when to look again.
  clock::time_point release(clock::time_point now) {
    std::vector<late> due;
    auto next = (clock::time_point::max)();
    {
      std::lock_guard lock(mutex_);
      const auto is_due = [&](const late& l) { return l.overtaken == 0 || l.due <= now; };
      const auto first = std::stable_partition(held_.begin(), held_.end(), [&](const late& l) { return !is_due(l); });
      std::move(first, held_.end(), std::back_inserter(due));
      held_.erase(first, held_.end());
      for (const late& l : held_) next = (std::min)(next, l.due);
    }
    for (late& l : due) {
      try {
        if (inner_->try_send(l.to, l.tag, l.id, std::move(l.body))) continue;
      } catch (const peer_error&) {  // as a network would: nobody hears of it
        continue;
      }
      std::lock_guard lock(mutex_);
      next = (std::min)(next, now + std::chrono::milliseconds(1));
      held_.push_back(std::move(l));
    }
    return next;
  }

  Messenger* inner_;
  losses losses_;
  std::mutex mutex_;
  std::uint64_t calls_ = 0;
  std::vector<late> held_;
};

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/wrapper.hpp>
#include <heddle/core/philox.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

namespace heddle {
inline namespace v0 {

/// @brief What `faulty` throws where it plays a rank whose own code failed.
struct injected_failure : error {
  using error::error;
};

/// @brief What goes wrong in a call.
enum class failure : std::uint8_t {
  none,          ///< Nothing.
  drop,          ///< The connection: this rank and all others get a comm_error naming this rank.
  delay,         ///< The call begins late, by `failures::longest`. Longer than the deadline it is a rank that hangs.
  throw_before,  ///< injected_failure, before any message is posted.
  throw_within,  ///< injected_failure while messages are applied or reduced: peers may be reading this rank's memory.
  throw_after    ///< injected_failure, after the call is done.
};

/// @brief When something goes wrong; the same on every rank.
///
/// A call is an exchange, a native all-reduce or a duplication; each rank counts its own from 0, over all duplicates.
struct failures {
  failure what = failure::none;                 ///< What happens in call `call` of rank `rank`.
  int rank = 0;                                 ///< Where it happens; a number that is no rank: nowhere.
  std::uint64_t call = 0;                       ///< When it happens.
  double late = 0.0;                            ///< Chance that any call of any rank begins late, 0 .. 1.
  std::chrono::nanoseconds longest{1'000'000};  ///< The longest delay, 0 or above; by chance any shorter one.
  std::uint64_t seed = 0;                       ///< Which calls are late, and by how much.
};

/// @brief A communicator that fails on purpose, for tests of what is written on top: at a chosen call of a chosen rank,
/// and with delays drawn by a seed.
///
/// Throws: injected_failure or comm_error, as `failures` says; argument_error if a number is outside its range.
/// @tparam Comm The communicator underneath, held by value.
template <class Comm>
class faulty : public detail::wrapper<Comm> {
  using detail::wrapper<Comm>::inner_;

 public:
  /// @param inner The communicator underneath. @param f What goes wrong.
  faulty(Comm inner, const failures& f) : faulty(std::move(inner), f, std::make_shared<std::atomic<std::uint64_t>>(0)) {
    if (!(f.late >= 0.0 && f.late <= 1.0) || f.longest.count() < 0) {
      throw argument_error("heddle::faulty: late " + std::to_string(f.late) + ", longest " +
                           std::to_string(f.longest.count()) + " ns; allowed is 0 .. 1, and 0 or above");
    }
  }

  /// A duplicate that counts its calls with this one.
  faulty duplicate() {
    const failure what = next();
    before(what, "duplicate");
    faulty second{inner_.duplicate(), failures_, calls_};
    after(what == failure::throw_within ? failure::throw_after : what);
    return second;
  }

  /// Number of calls of this rank so far.
  std::uint64_t calls() const noexcept { return *calls_; }

  /// Forwards, or fails.
  template <class Apply>
  void exchange(header h, std::span<const outgoing> out, std::span<const incoming> in, Apply&& apply) {
    const failure what = next();
    before(what, name_of(h.kind));
    const auto first = [&] {
      if (what == failure::throw_within) raise();
    };
    inner_.exchange(h, this->settled(out), in, detail::applying{apply, first, [](int peer) { return peer; }});
    after(what);
  }

  /// Forwards, or fails. Where this rank has nothing to reduce, throw_within is throw_after.
  bool native_all_reduce(header h, const void* in, void* out, std::size_t count, const leaf& l)
    requires has_native_all_reduce<Comm>
  {
    const failure what = next();
    before(what, name_of(h.kind));
    leaf mine = l;
    if (what == failure::throw_within) {
      mine.context = this;
      mine.reduce = [](const void* self, const operand*, int, void*, std::size_t, int, double) -> bool {
        static_cast<const faulty*>(self)->raise();
        return false;
      };
    }
    const bool left_range = inner_.native_all_reduce(h, in, out, count, mine);
    after(what == failure::throw_within ? failure::throw_after : what);
    return left_range;
  }

 private:
  faulty(Comm inner, const failures& f, std::shared_ptr<std::atomic<std::uint64_t>> calls)
      : detail::wrapper<Comm>(std::move(inner)), failures_(f), calls_(std::move(calls)) {}

  // What happens in this call; sleeps if it is late.
  failure next() {
    const std::uint64_t call = (*calls_)++;
    const auto rank = static_cast<std::uint32_t>(this->rank());
    const failure what = this->rank() == failures_.rank && call == failures_.call ? failures_.what : failure::none;
    const philox4x32::block dice = philox(failures_.seed, random_stream(rank, 0), call);
    double wait = to_uniform(dice.word[0]) < failures_.late ? to_uniform(dice.word[1]) : 0.0;
    if (what == failure::delay) wait = 1.0;
    const auto delay = std::chrono::duration_cast<std::chrono::nanoseconds>(failures_.longest * wait);
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    return what;
  }

  void before(failure what, const char* operation) {
    if (what == failure::throw_before) raise();
    if (what != failure::drop) return;
    const std::string text = "the connection of rank " + std::to_string(this->rank()) + " was dropped";
    inner_.fail(text);
    throw comm_error(operation, this->rank(), this->rank(), text);
  }

  void after(failure what) const {
    if (what == failure::throw_after) raise();
  }

  [[noreturn]] void raise() const {
    throw injected_failure("heddle::faulty: rank " + std::to_string(this->rank()) + " fails in call " +
                         std::to_string(failures_.call));
  }

  failures failures_;
  std::shared_ptr<std::atomic<std::uint64_t>> calls_;
};

}  // namespace v0
}  // namespace heddle

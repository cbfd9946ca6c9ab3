// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/gather.hpp>
#include <heddle/comm/detail/tell_ranks.hpp>
#include <heddle/trainer/options.hpp>

#include <exception>

namespace heddle {
inline namespace v0 {
namespace detail {

// What each rank tells the others when an exchange opens.
struct announcement {
  std::uint64_t exchange = 0;    // number of the exchange: the same on all ranks
  std::uint64_t step = 0;        // what compressors count: the same on all ranks
  std::uint64_t clock = 0;       // what the mode counts: the same on all ranks that have not joined
  double samples = 0.0;          // weight of this rank's contribution
  std::uint32_t joined = 0;      // has no more batches
  float lr = 0.0f;               // for those who have joined
  float max_norm = 0.0f;         // likewise
  float max_value = 0.0f;        // likewise
  float step_seconds = 0.0f;     // of a local step since the last meeting
  float meeting_seconds = 0.0f;  // of the last meeting
  float loss = 0.0f;             // mean loss since then; 0: not known
  float loss_scale = 1.0f;       // the same on all ranks
  std::uint32_t bad = 0;         // local steps skipped for an infinity since the last exchange
  float held_scale = 1.0f;       // of the step, for those who have joined
};
static_assert(sizeof(announcement) == 72, "docs/trainer.md states it");

// What all ranks know of an exchange when it has opened.
struct agreement {
  double weights = 0.0, most = 0.0;  // of samples: the sum, and a rank's most
  float held_scale = 1.0f;           // of those who have batches, the same on all of them
  bool any_joined = false, all_joined = true, any_bad = false;
};

// Throws comm_error if a rank is in another exchange, or has another loss scale.
template <class Announcement>
agreement agree(const std::vector<Announcement>& announced, const Announcement& mine, int rank) {
  agreement all{.held_scale = mine.held_scale};
  for (std::size_t r = 0; r < announced.size(); ++r) {
    const Announcement& a = announced[r];
    const bool apart =
        a.exchange != mine.exchange || a.step != mine.step || (a.clock != mine.clock && !a.joined && !mine.joined);
    if (apart) {
      const auto where = [](const Announcement& x) {
        return "exchange " + std::to_string(x.exchange) + ", step " + std::to_string(x.step) + ", local step " +
               std::to_string(x.clock);
      };
      throw comm_error("data_parallel", rank, static_cast<int>(r),
                       "this rank is in " + where(mine) + ", rank " + std::to_string(r) + " in " + where(a));
    }
    if (a.loss_scale != mine.loss_scale) {
      throw comm_error("data_parallel", rank, static_cast<int>(r),
                       "this rank's loss scale is " + std::to_string(mine.loss_scale) + ", rank " + std::to_string(r) +
                           "'s is " + std::to_string(a.loss_scale));
    }
    if (mine.joined && !a.joined) all.held_scale = a.held_scale;
    all.any_bad |= a.bad != 0;
    all.weights += a.samples;
    all.most = (std::max)(all.most, a.samples);
    all.any_joined |= a.joined != 0;
    all.all_joined &= a.joined != 0;
  }
  return all;
}

// What the others step with.
inline step_options told_options(const std::vector<announcement>& told) {
  step_options o;
  for (const announcement& a : told) {
    if (!a.joined) o = {a.lr, a.max_norm, a.max_value};
  }
  return o;
}

// Tells a small record to all ranks and gives theirs, in rank order. Keeps what it prepared, as all_reduce_plan does.
template <class Record, class Comm, class Operation = operation> class tell_plan {
  static_assert(std::is_trivially_copyable_v<Record>);

 public:
  const std::vector<Record>& operator()(Comm& comm, const Record& mine) {
    if (all_.empty()) {
      all_.resize(static_cast<std::size_t>(comm.size()));
      schedule_ = direct{}.all_gather(comm.rank(), comm.size(), equal_blocks(comm.size(), 1));
      executor_.prepare(comm.rank(), schedule_, sizeof(Record));
    }
    all_[static_cast<std::size_t>(comm.rank())] = mine;
    const header h = begin_call(comm, {operation_kind::control, dtype::other, 0, 0, 0, 1, sizeof(Record)});
    executor_.run_prepared(comm, schedule_, 0, schedule_.rounds(), h, reinterpret_cast<std::byte*>(all_.data()),
                           nullptr);
    return all_;
  }

  // What the last call gave.
  const std::vector<Record>& all() const noexcept { return all_; }

 private:
  std::vector<Record> all_;
  schedule schedule_;
  basic_executor<Operation> executor_;
};

// Whether it is so on all ranks.
template <class Comm> bool everywhere(Comm& comm, bool good) {
  for (const std::uint32_t theirs : tell_ranks(comm, static_cast<std::uint32_t>(good))) good &= theirs != 0;
  return good;
}

// Something that every rank does and that counts only if all of them succeed: one rank's failure is everybody's, and
// nobody waits for it.
template <class Comm> class together {
 public:
  together(Comm& comm, const char* what) : comm_(comm), what_(what) {}

  // Runs f here and on all ranks; whether it succeeded everywhere.
  template <class Function> bool succeed(Function&& f) {
    try {
      f();
    } catch (const std::exception& e) {
      failure_ = *e.what() ? e.what() : "unknown failure";
    }
    const auto failed = tell_ranks(comm_, static_cast<std::uint32_t>(!failure_.empty()));
    first_ = std::find(failed.begin(), failed.end(), 1u) - failed.begin();
    return first_ == comm_.size();
  }

  // Throws file_error if it did not.
  void check() const {
    if (!failure_.empty()) throw file_error(failure_);
    if (first_ == comm_.size()) return;
    throw file_error(std::string("heddle::data_parallel::") + what_ + ": rank " + std::to_string(first_) +
                     " failed; nothing has changed here");
  }

 private:
  Comm& comm_;
  const char* what_;
  std::string failure_;
  std::ptrdiff_t first_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

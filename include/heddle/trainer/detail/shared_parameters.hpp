// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/tell_ranks.hpp>
#include <heddle/memory/buffer.hpp>
#include <heddle/mode/concept.hpp>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace heddle {
inline namespace v0 {
namespace detail {

template <class Strategy>
concept shares_parameters = std::remove_cvref_t<decltype(Strategy::mode)>::averages == average::shared;

// One copy of the parameters for ranks that are threads of this process; it goes with the last of them.
template <class Memory> class shared_parameters {
  struct release {
    void operator()(shared_parameters* p) const noexcept {
      if (p->users_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete p;
    }
  };

 public:
  using handle = std::unique_ptr<shared_parameters, release>;

  // Rank 0 makes it and fills it; collective. Throws comm_error if ranks are of several processes, or tell different
  // models.
  template <class Comm, class Fill>
  static handle share(Comm& comm, std::uint64_t model, const Memory& memory, std::size_t count, Fill fill) {
    struct record {
      std::uint64_t model, process, address;
    };
    std::unique_ptr<shared_parameters> made;
    if (comm.rank() == 0) {
      made.reset(new shared_parameters(memory, count, comm.size()));
      fill(made->values());
    }
    const record mine{model, process_number(), reinterpret_cast<std::uintptr_t>(made.get())};
    const std::vector<record> all = tell_ranks(comm, mine);
    // From here on every rank has what it needs; nothing can fail on one alone but by what all of them see.
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].process != mine.process) {
        throw comm_error("data_parallel", comm.rank(), static_cast<int>(r),
                         "the ranks are several processes; a mode that shares parameters needs threads of one");
      }
    }
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].model != model) {
        throw comm_error("data_parallel", comm.rank(), static_cast<int>(r),
                         "they bring tensors of different names, sizes or types, or different kinds of strategy");
      }
    }
    (void)made.release();
    return handle(reinterpret_cast<shared_parameters*>(all[0].address));
  }

  float* values() noexcept { return values_.data(); }
  std::size_t count() const noexcept { return values_.size(); }
  std::size_t bytes() const noexcept { return values_.bytes(); }
  int ranks() const noexcept { return ranks_; }

  // Waits for all ranks, for as long as it takes. Throws comm_error if one has left.
  void meet(int rank, const char* what) {
    std::unique_lock lock(mutex_);
    const std::uint64_t round = round_;
    if (++here_ == ranks_) {
      here_ = 0;
      ++round_;
      lock.unlock();
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return round_ != round || left_ > 0; });
    if (round_ == round) {
      --here_;
      throw comm_error(what, rank, -1, "a rank has left and will not come");
    }
  }

  // This rank will not come again.
  void leave() noexcept {
    {
      std::lock_guard lock(mutex_);
      ++left_;
    }
    changed_.notify_all();
  }

 private:
  shared_parameters(const Memory& memory, std::size_t count, int ranks)
      : values_(memory, count), ranks_(ranks), users_(ranks) {}

  buffer<float, Memory> values_;
  int ranks_;
  std::atomic<int> users_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int here_ = 0, left_ = 0;
  std::uint64_t round_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

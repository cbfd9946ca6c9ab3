// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/execute.hpp>
#include <heddle/collective/native.hpp>

#include <type_traits>

namespace heddle {
inline namespace v0 {

namespace detail {
inline void check_buffer(const char* what, const void* data, std::size_t count) {
  if (!data && count) {
    throw argument_error(std::string("heddle::") + what + ": null buffer with count " + std::to_string(count));
  }
}

// The rank that a plan is for: on a communicator of other ranks it would reduce among the wrong ones.
class planned_rank {
 public:
  planned_rank(const char* what, int rank, int size) : rank_(rank), size_(size) {
    if (rank < 0 || rank >= size) {
      throw argument_error(std::string("heddle::") + what + ": a plan for rank " + std::to_string(rank) + " of " +
                           std::to_string(size) + ", allowed is 0 or above, and below the number of ranks");
    }
  }
  template <class Comm> void check(const char* what, const Comm& comm) const {
    if (comm.rank() != rank_ || comm.size() != size_) refuse(what, comm.rank(), comm.size());
  }

 private:
  [[noreturn, gnu::noinline]] void refuse(const char* what, int rank, int size) const {
    throw argument_error(std::string("heddle::") + what + ": a plan for rank " + std::to_string(rank_) + " of " +
                         std::to_string(size_) + " is called by rank " + std::to_string(rank) + " of " +
                         std::to_string(size) + ", allowed is the rank that it was made for");
  }
  int rank_, size_;
};

// Sums of float16 travel with their number of contributors in a header, and messages in a stream have none. A
// communicator's own all-reduce keeps a mean in range; nothing in a stream tells that a sum has left it.
template <class Comm>
void check_headers(const char* what, const leaf& l, int size, bool own = false) {
  if constexpr (stream_ordered<Comm>) {
    if (!l.scaled() || size == 1 || (own && l.average)) return;
    throw argument_error(std::string("heddle::") + what + ": float16 sums need messages with headers, which this "
                         "communicator hasn't; use mean{} by native{}, bfloat16 or float");
  }
}

template <class Comm, class Topology>
constexpr void require_topology() {
  if constexpr (std::is_same_v<Topology, native>) {
    static_assert(has_native_all_reduce<Comm>,
                  "heddle::native: this communicator has no all-reduce of its own; choose a topology such as ring{}");
  } else {
    static_assert(has_all_reduce_schedule<Topology>,
                  "heddle: .topology must provide all_reduce(rank, size, count) or be native{}; "
                  "see docs/collective.md; with native{} in it include heddle/collective/native_leaves.hpp");
  }
}
}  // namespace detail

/// @brief A prepared all-reduce: the schedule of this rank for a fixed count, its executor and scratch memory.
///
/// Build it once per buffer size and call it every step; a call allocates nothing after the first.
/// @tparam Operation heddle::operation.
template <class Topology, class Operation = operation>
class all_reduce_plan {
 public:
  /// @param t The topology. @param rank This rank. @param size Number of ranks. @param count Elements.
  /// Throws: what the topology throws for this number of ranks; argument_error if `rank` isn't one of them.
  all_reduce_plan(const Topology& t, int rank, int size, std::size_t count)
      : whose_("all_reduce_plan", rank, size),
        count_(count),
        head_(detail::on_topology({operation_kind::all_reduce, dtype::other, 0, 0, 0, 1, count}, t)) {
    if constexpr (has_all_reduce_schedule<Topology>) {
      schedule_ = t.all_reduce(rank, size, count);
    }
  }

  /// Elements.
  std::size_t count() const noexcept { return count_; }
  /// The schedule; empty for native{}.
  const schedule& plan() const noexcept { return schedule_; }
  /// The executor, for its trace.
  basic_executor<Operation>& engine() noexcept { return executor_; }

  /// @brief Reduces `buffer` in place over all ranks; every rank ends with bitwise the same values.
  /// Sync:   returns when this rank's result is complete and no peer reads its buffer.
  /// @return Whether a value that this rank finished left float16's range.
  /// Throws: argument_error on another rank, or another number of them, than it was made for; comm_error.
  template <communicator Comm>
  bool operator()(Comm& comm, void* buffer, const leaf& l) {
    detail::require_topology<Comm, Topology>();
    whose_.check("all_reduce_plan", comm);
    detail::check_buffer("all_reduce", buffer, count_);
    detail::check_headers<Comm>("all_reduce", l, comm.size(), std::is_same_v<Topology, native>);
    header h = head_;
    h.type = l.type;
    h.reduction = l.id;
    h = begin_call(comm, h);
    if (comm.size() == 1) return false;
    std::byte* const data = static_cast<std::byte*>(buffer);
    if constexpr (std::is_same_v<Topology, native>) {
      return comm.native_all_reduce(h, data, data, count_, l);
    } else {
      if (executor_.prepared_bytes() != l.bytes) {
        const interval all{0, count_};
        executor_.prepare(comm.rank(), schedule_, l.bytes, std::span(&all, 1));
      }
      return executor_.run_prepared(comm, schedule_, 0, schedule_.rounds(), h, data, &l,
                                    l.average ? 1.0 / comm.size() : 1.0);
    }
  }

 private:
  detail::planned_rank whose_;
  std::size_t count_;
  header head_;
  schedule schedule_;
  basic_executor<Operation> executor_;
};

/// @brief Reduces a buffer over all ranks, in place.
/// @param comm Communicator. @param t Topology: how the bytes travel.
/// @param data Elements, the same count on all ranks.
/// @param op sum{}, mean{}, min{}, max{} or a user's associative, commutative `T operator()(T, T) const`.
/// @return Whether a value left float16's range on this rank; other types never do.
/// Throws: comm_error if ranks call with different counts, types or operations, or a peer fails; argument_error.
template <communicator Comm, class Topology, class Element, std::size_t Extent, class Op = sum>
bool all_reduce(Comm& comm, const Topology& t, std::span<Element, Extent> data, const Op& op = {}) {
  static_assert(!stream_ordered<Comm>, "heddle::all_reduce: this communicator works in a stream; pass the queue last");
  const leaf l = leaf_of<Element>(op);
  return all_reduce_plan<Topology>(t, comm.rank(), comm.size(), data.size())(comm, data.data(), l);
}

/// @brief The same, out of place. `in` and `out` must be equal or disjoint.
/// Throws: argument_error if the sizes differ, a buffer is null with a count, or they overlap without being equal.
template <communicator Comm, class Topology, class In, std::size_t InExtent, class Element, std::size_t Extent,
          class Op = sum>
  requires detail::reads<In, Element>
bool all_reduce(Comm& comm, const Topology& t, std::span<In, InExtent> in, std::span<Element, Extent> out,
                const Op& op = {}) {
  if (in.size() != out.size()) {
    throw argument_error("heddle::all_reduce: " + std::to_string(in.size()) + " elements in, " +
                         std::to_string(out.size()) + " out; allowed is the same number");
  }
  detail::check_buffer("all_reduce", in.data(), in.size());
  detail::check_buffer("all_reduce", out.data(), out.size());
  const auto a = reinterpret_cast<std::uintptr_t>(in.data()), b = reinterpret_cast<std::uintptr_t>(out.data());
  if (a != b && a < b + out.size_bytes() && b < a + in.size_bytes()) {
    throw argument_error("heddle::all_reduce: input and output overlap without being equal");
  }
  if (a != b && !in.empty()) std::memcpy(out.data(), in.data(), in.size_bytes());
  return all_reduce(comm, t, out, op);
}

}  // namespace v0
}  // namespace heddle

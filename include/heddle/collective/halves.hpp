// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/gather.hpp>

namespace heddle {
inline namespace v0 {

/// @brief A prepared all-reduce in its two halves, with room between them for work on what this rank owns.
///
/// The first half adds in the order of the whole all-reduce, so what a rank owns afterwards has the bits that
/// `all_reduce_plan` gives everybody. The second half may carry other elements, such as updated parameters. native{}
/// runs as direct{}, which adds in the same order as the native all-reduce of threads.
/// Wire:    n (P - 1) / P elements sent per rank and half.
/// Throws:  what the topology throws; argument_error if its all-reduce has no halves, or a rank calls it that it wasn't
///          made for; comm_error.
template <class Topology> class halved_plan {
  static_assert(has_owners<Topology>,
                "heddle::halved_plan: the topology must provide all_reduce() in halves, reduce_scatter() and "
                "all_gather(), such as ring{}, or be native{}; see docs/collective.md");

 public:
  /// What the halves run on.
  using topology_type = std::conditional_t<std::is_same_v<Topology, native>, direct, Topology>;

  /// @param t The topology. @param rank This rank. @param size Number of ranks. @param count Elements.
  halved_plan(const Topology& t, int rank, int size, std::size_t count) : whose_("halved_plan", rank, size) {
    const topology_type on = [&] {
      if constexpr (std::is_same_v<Topology, native>)
        return (void)t, direct{};
      else
        return t;
    }();
    schedule_ = on.all_reduce(rank, size, count);
    head_ = detail::on_topology({operation_kind::reduce_scatter, dtype::other, 0, 0, 0, 1, count}, on);
    if (!schedule_.halved()) {
      throw argument_error(
          "heddle::halved_plan: this topology's all_reduce() has no halves, so no rank owns anything "
          "between them; call schedule::split(), or choose ring{}");
    }
  }

  /// Elements of the buffer.
  std::size_t count() const noexcept { return head_.elements(); }
  /// What is complete on this rank between the halves.
  std::span<const interval> owned() const noexcept { return schedule_.owned(); }

  /// @brief The first half, in place: what this rank owns becomes final, the rest is scratch afterwards.
  /// @return Whether a value that this rank finished left float16's range.
  template <communicator Comm> bool reduce_scatter(Comm& comm, void* buffer, const leaf& l) {
    whose_.check("halved_plan", comm);
    detail::check_buffer("reduce_scatter", buffer, count());
    detail::check_headers<Comm>("reduce_scatter", l, comm.size());
    header h = head_;
    h.type = l.type;
    h.reduction = l.id;
    h = begin_call(comm, h);
    if (reduce_.prepared_bytes() != l.bytes) {
      const interval all{0, count()};
      reduce_.prepare(comm.rank(), schedule_, l.bytes, std::span(&all, 1));
    }
    return reduce_.run_prepared(comm, schedule_, 0, schedule_.half(), h, static_cast<std::byte*>(buffer), &l,
                                l.average ? 1.0 / comm.size() : 1.0);
  }

  /// @brief The second half, in place: what each rank owns reaches every rank.
  template <class Element, communicator Comm> void all_gather(Comm& comm, Element* buffer) {
    static_assert(std::is_trivially_copyable_v<Element>);
    whose_.check("halved_plan", comm);
    detail::check_buffer("all_gather", buffer, count());
    header h = head_;
    h.kind = operation_kind::all_gather;
    h.type = dtype_of<Element>;
    h = begin_call(comm, h);
    if (gather_.prepared_bytes() != sizeof(Element)) gather_.prepare(comm.rank(), schedule_, sizeof(Element));
    gather_.run_prepared(comm, schedule_, schedule_.half(), schedule_.rounds(), h, reinterpret_cast<std::byte*>(buffer),
                         nullptr);
  }

 private:
  detail::planned_rank whose_;
  schedule schedule_;
  header head_;
  executor reduce_, gather_;
};

}  // namespace v0
}  // namespace heddle

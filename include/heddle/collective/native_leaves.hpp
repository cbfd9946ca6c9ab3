// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/comm/detail/levels.hpp>
#include <heddle/core/convert.hpp>

#include <cmath>
#include <optional>

namespace heddle {
inline namespace v0 {

/// @brief A prepared all-reduce of a hierarchy in which native{} is a leaf: the communicator is split in two, and
/// each phase is a call there.
///
///     hd::all_reduce(comm, hd::hierarchical{hd::native{}, hd::ring{}, 4}, data);      // inside what the library does
///     hd::strategy{.topology = hd::hierarchical{hd::native{}, hd::native{}, 4}}       // on both levels
///
/// Inside, native{} is a reduce-scatter and an all-gather of the communicator's own where it has them (MPI), else
/// direct{}, which on threads reads every buffer once. Across, it is the communicator's own all-reduce. The parts are
/// made in the first call and kept by the communicator; that call is collective for all ranks. A mean is divided once,
/// by the number of all ranks. Sums and means of float16 travel as floats, since no header says by what they were
/// divided.
/// Wire:    as hierarchical; float16 twice as much.
/// State:   a float for each float16.
/// Throws:  as all_reduce_plan, and what splitting throws. Does not compile for a communicator that can't be split.
template <class Intra, class Inter, class Operation>
  requires(detail::has_native_leaf<hierarchical<Intra, Inter>>)
class all_reduce_plan<hierarchical<Intra, Inter>, Operation> {
  static_assert(!detail::has_native_leaf<Intra>,
                "heddle::hierarchical: .intra may be native{} or a topology with reduce_scatter() and all_gather()");
  static constexpr bool native_inside = std::is_same_v<Intra, native>;
  using schedule_type = basic_schedule<Operation>;

 public:
  /// @param t The topology. @param rank This rank. @param size Number of ranks. @param count Elements.
  /// Throws: argument_error if the topology's group is negative or there is no such rank; what its parts throw.
  all_reduce_plan(const hierarchical<Intra, Inter>& t, int rank, int size, std::size_t count)
      : whose_("all_reduce_plan", rank, size),
        count_(count),
        group_(t.group_of(size)),
        head_(detail::on_topology({operation_kind::all_reduce, dtype::other, 0, 0, 0, 1, count}, t)) {
    const int groups = t.groups(size), last = size - (groups - 1) * group_, mine = rank / group_;
    const int members = mine == groups - 1 ? last : group_, local = rank % group_;
    for (int r = 0; r < members; ++r) {
      const auto column = [&] {
        return balanced_block(count, static_cast<std::size_t>(last), static_cast<std::size_t>(r));
      };
      blocks_.push_back(r < last ? column() : interval{count, 0});
      counts_.push_back(blocks_.back().count);
    }
    column_ = blocks_[static_cast<std::size_t>(local)];
    const auto inside = detail::as_schedules(t.intra);
    scatter_ = inside.reduce_scatter(local, members, std::span<const interval>(blocks_));
    gather_ = inside.all_gather(local, members, std::span<const interval>(blocks_));
    if (local < last) across_.emplace(t.inter, mine, groups, column_.count);
  }

  /// Elements.
  std::size_t count() const noexcept { return count_; }
  /// Empty: what runs is calls on two levels.
  const schedule_type& plan() const noexcept { return none_; }

  /// @brief Reduces `buffer` in place over all ranks.
  /// Sync:   returns when this rank's result is complete and no peer reads its buffer.
  /// @return Whether a value that this rank finished left float16's range.
  /// Throws: argument_error on another rank, or among other ranks, than the plan was made for; see the class.
  template <communicator Comm> bool operator()(Comm& comm, void* buffer, const leaf& l) {
    static_assert(
        has_levels<Comm> && !stream_ordered<Comm>,
        "heddle::hierarchical: with native{} in it the communicator must be one of the host that can be split, "
        "such as that of threads or MPI; see docs/collective.md");
    whose_.check("all_reduce_plan", comm);
    detail::check_buffer("all_reduce", buffer, count_);
    header h = head_;
    h.type = l.type;
    h.reduction = l.id;
    h = begin_call(comm, h);
    if (comm.size() == 1) return false;
    auto& level = comm.levels(group_);
    across_now_ = false;
    try {
      if (l.scaled()) return as_floats(level, h, static_cast<float16*>(buffer), l, comm.size());
      return run(level, h, static_cast<std::byte*>(buffer), l, comm.size());
    } catch (const comm_error& e) {
      fail(comm, level, e.what());
      if constexpr (!detail::parts_count_anew<Comm>) throw;
      const int me = comm.rank(), local = me % group_;
      const int peer = e.peer() < 0 ? -1 : across_now_ ? e.peer() * group_ + local : me - local + e.peer();
      throw comm_error(e.operation(), me, peer,
                       "rank " + std::to_string(peer) + " of all ranks, in a part: " + e.what());
    } catch (const std::exception& e) {  // who waits on another level waits for this rank
      fail(comm, level, e.what());
      throw;
    } catch (...) {
      fail(comm, level, "an exception that is not a std::exception");
      throw;
    }
  }

 private:
  template <class Comm, class Level> static void fail(Comm& comm, Level& level, const std::string& text) {
    level.inside.fail(text);
    level.across.fail(text);
    comm.fail(text);
  }

  template <class Level> bool run(Level& level, header h, std::byte* buffer, const leaf& l, int ranks) {
    leaf part = l;
    part.average = false;
    bool left_range = false;
    const auto begin = [&](operation_kind kind) {
      header x = h;
      x.kind = kind;
      return begin_call(level.inside, x);
    };
    using inside = std::remove_reference_t<decltype(level.inside)>;
    constexpr bool own = native_inside && has_native_halves<inside>;
    header now = begin(operation_kind::reduce_scatter);
    if constexpr (own) {
      left_range |= level.inside.native_reduce_scatter(now, buffer, counts_, part);
    } else {
      if (scattering_.prepared_bytes() != l.bytes)
        scattering_.prepare(level.inside.rank(), scatter_, l.bytes, std::span<const interval>(&column_, 1));
      left_range |= scattering_.run_prepared(level.inside, scatter_, 0, scatter_.rounds(), now, buffer, &part);
    }
    across_now_ = true;
    if (across_ && column_.count) {
      std::byte* const column = buffer + column_.begin * l.bytes;
      left_range |= (*across_)(level.across, column, part);
      if (l.average) {
        const operand x{column, 0};
        left_range |= l.reduce(l.context, &x, 1, column, column_.count, 0, 1.0 / ranks);
      }
    }
    across_now_ = false;
    now = begin(operation_kind::all_gather);
    if constexpr (own) {
      level.inside.native_all_gather(now, buffer, counts_, l.bytes);
    } else {
      if (gathering_.prepared_bytes() != l.bytes) gathering_.prepare(level.inside.rank(), gather_, l.bytes);
      gathering_.run_prepared(level.inside, gather_, 0, gather_.rounds(), now, buffer, nullptr);
    }
    return left_range;
  }

  template <class Level> bool as_floats(Level& level, const header& h, float16* x, const leaf& l, int ranks) {
    floats_.resize(count_);
    convert(x, floats_.data(), count_);
    leaf wide = leaf_of<float>(sum{});
    if (l.average) wide = leaf_of<float>(mean{});
    run(level, h, reinterpret_cast<std::byte*>(floats_.data()), wide, ranks);
    bool left_range = false;
    if (convert_checked(floats_.data(), x, count_)) {
      for (std::size_t i = 0; i < count_; ++i)
        left_range |= std::isfinite(floats_[i]) && !std::isfinite(static_cast<float>(x[i]));
    }
    return left_range;
  }

  detail::planned_rank whose_;
  std::size_t count_;
  int group_;
  header head_;
  std::vector<interval> blocks_;     // of this rank's group
  std::vector<std::size_t> counts_;  // their lengths
  interval column_;                  // this rank's
  schedule_type scatter_, gather_, none_;
  basic_executor<Operation> scattering_, gathering_;
  std::optional<all_reduce_plan<Inter, Operation>> across_;
  std::vector<float> floats_;
  bool across_now_ = false;  // which level this rank is on
};

}  // namespace v0
}  // namespace heddle

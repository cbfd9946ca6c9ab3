// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/collective/point_to_point.hpp>
#include <heddle/collective/tree.hpp>

namespace heddle {
inline namespace v0 {

namespace detail {
// Blocks one after the other, in rank order.
template <class Interval = interval>
std::vector<Interval> consecutive(std::span<const std::size_t> counts) {
  std::vector<Interval> blocks;
  std::size_t at = 0;
  for (const std::size_t n : counts) {
    blocks.push_back({at, n});
    at += n;
  }
  return blocks;
}

// One block of `count` elements for each rank.
template <class Interval = interval>
std::vector<Interval> equal_blocks(int ranks, std::size_t count) {
  std::vector<Interval> blocks;
  for (int r = 0; r < ranks; ++r) blocks.push_back({static_cast<std::size_t>(r) * count, count});
  return blocks;
}

inline void check_counts(const char* what, const std::vector<interval>& blocks, int size, std::size_t elements) {
  std::size_t left = elements;  // subtracting, since a sum could wrap
  bool good = blocks.size() == static_cast<std::size_t>(size);
  for (const interval b : blocks) {
    good = good && b.count <= left;
    if (good) left -= b.count;
  }
  if (!good || left != 0) {
    throw argument_error(std::string("heddle::") + what + ": " + std::to_string(blocks.size()) + " counts for " +
                         std::to_string(size) + " ranks, which must sum to the " + std::to_string(elements) +
                         " elements of the buffer, do not");
  }
}

// Binomial tree from `root`: in round k the ranks at distance below 2^k send to those 2^k further.
template <class Schedule = schedule>
constexpr Schedule binomial_broadcast(int rank, int size, int root, std::size_t count) {
  Schedule s;
  const int me = (rank - root + size) % size;
  for (int reach = 1; reach < size; reach *= 2) {
    if (me < reach && me + reach < size) s.add(action::send, (me + reach + root) % size, {0, count});
    else if (me >= reach && me < 2 * reach) s.add(action::copy, (me - reach + root) % size, {0, count});
    s.next();
  }
  return s;
}

// Gathers blocks that are in their places.
template <class Comm, class Topology, class Element>
void gather_blocks(Comm& comm, const Topology& t, std::span<Element> all, const std::vector<interval>& blocks) {
  static_assert(has_all_gather_schedule<Topology>,
                "heddle::all_gather: the topology must provide all_gather(rank, size, blocks); see docs/collective.md");
  static_assert(std::is_trivially_copyable_v<Element>);
  check_counts("all_gather", blocks, comm.size(), all.size());
  check_buffer("all_gather", all.data(), all.size());
  const schedule s = t.all_gather(comm.rank(), comm.size(), blocks);
  const header h = begin_call(
      comm, on_topology({operation_kind::all_gather, dtype_of<Element>, 0, 0, 0, 1, all.size()}, t));
  run_once(comm, s, h, all.data(), sizeof(Element));
}
}  // namespace detail

/// @brief Gathers blocks of any sizes, in place: `all` holds rank r's block at the place that `counts` gives it.
/// @param comm Communicator. @param t A topology with all_gather. @param all Every rank's block, one after the other.
/// @param counts Elements of each rank's block, the same on all ranks; 0 is legal.
/// Throws: argument_error if the counts don't sum to all.size(); comm_error.
template <communicator Comm, class Topology, class Element, std::size_t Extent>
void all_gather(Comm& comm, const Topology& t, std::span<Element, Extent> all, std::span<const std::size_t> counts) {
  detail::gather_blocks(comm, t, std::span<Element>(all), detail::consecutive(counts));
}

/// @brief Gathers equal blocks: `all` receives size() times mine.size() elements.
/// Throws: argument_error if all.size() isn't that, or `mine` overlaps `all` elsewhere than in its place; comm_error.
template <communicator Comm, class Topology, class In, std::size_t InExtent, class Element, std::size_t Extent>
  requires detail::reads<In, Element>
void all_gather(Comm& comm, const Topology& t, std::span<In, InExtent> mine, std::span<Element, Extent> all) {
  const std::vector<interval> blocks = detail::equal_blocks(comm.size(), mine.size());
  detail::check_counts("all_gather", blocks, comm.size(), all.size());
  detail::check_buffer("all_gather", mine.data(), mine.size());
  detail::check_buffer("all_gather", all.data(), all.size());
  Element* const place = all.data() + mine.size() * static_cast<std::size_t>(comm.rank());
  if (place != mine.data()) {
    detail::check_apart("all_gather", mine.data(), mine.size_bytes(), all.data(), all.size_bytes());
    if constexpr (stream_ordered<Comm>) comm.copy(place, mine.data(), mine.size_bytes());
    else if (!mine.empty()) std::memcpy(place, mine.data(), mine.size_bytes());
  }
  detail::gather_blocks(comm, t, std::span<Element>(all), blocks);
}

namespace detail {
template <class Comm, class Topology, class Element, class Operation = operation>
std::span<Element> reduce_blocks(Comm& comm, const Topology& t, std::span<Element> data,
                                 std::span<const std::size_t> counts, const leaf& l) {
  static_assert(has_reduce_scatter_schedule<Topology>,
                "heddle::reduce_scatter: the topology must provide reduce_scatter(rank, size, blocks); "
                "see docs/collective.md");
  const std::vector<interval> blocks = consecutive(counts);
  check_counts("reduce_scatter", blocks, comm.size(), data.size());
  check_buffer("reduce_scatter", data.data(), data.size());
  check_headers<Comm>("reduce_scatter", l, comm.size());
  const schedule s = t.reduce_scatter(comm.rank(), comm.size(), blocks);
  const interval own = blocks[static_cast<std::size_t>(comm.rank())];
  const header h =
      begin_call(comm, detail::on_topology({operation_kind::reduce_scatter, l.type, l.id, 0, 0, 1, data.size()}, t));
  std::byte* const bytes = reinterpret_cast<std::byte*>(data.data());
  basic_executor<Operation> x;
  x.prepare(comm.rank(), s, l.bytes, s.halved() ? s.owned() : std::span(&own, 1));
  x.run_prepared(comm, s, 0, s.rounds(), h, bytes, &l, l.average ? 1.0 / comm.size() : 1.0);
  return data.subspan(own.begin, own.count);
}
}  // namespace detail

/// @brief Reduces in place so that this rank's block, given by `counts` in rank order, is final; the rest of `data` is
/// scratch afterwards.
/// @return This rank's block inside `data`.
/// Throws: argument_error if the counts don't sum to data.size(); comm_error.
template <communicator Comm, class Topology, class Element, std::size_t Extent, class Op = sum>
std::span<Element> reduce_scatter(Comm& comm, const Topology& t, std::span<Element, Extent> data,
                                  std::span<const std::size_t> counts, const Op& op = {}) {
  static_assert(!stream_ordered<Comm>,
                "heddle::reduce_scatter: this communicator works in a stream; pass the queue last");
  return detail::reduce_blocks(comm, t, std::span<Element>(data), counts, leaf_of<Element>(op));
}

/// @brief The same, out of place: `mine` receives this rank's block, `data` keeps its values.
/// Throws: argument_error, too, if mine.size() isn't this rank's count or the buffers overlap.
template <communicator Comm, class Topology, class In, std::size_t InExtent, class Element, std::size_t Extent,
          class Op = sum>
  requires detail::reads<In, Element>
void reduce_scatter(Comm& comm, const Topology& t, std::span<In, InExtent> data, std::span<const std::size_t> counts,
                    std::span<Element, Extent> mine, const Op& op = {}) {
  const auto me = static_cast<std::size_t>(comm.rank());
  if (me >= counts.size() || counts[me] != mine.size()) {
    throw argument_error("heddle::reduce_scatter: an output of " + std::to_string(mine.size()) +
                         " elements, allowed is this rank's count");
  }
  detail::check_buffer("reduce_scatter", data.data(), data.size());
  detail::check_buffer("reduce_scatter", mine.data(), mine.size());
  detail::check_apart("reduce_scatter", data.data(), data.size_bytes(), mine.data(), mine.size_bytes());
  std::vector<Element> work(data.begin(), data.end());
  const std::span<Element> own = reduce_scatter(comm, t, std::span<Element>(work), counts, op);
  std::copy(own.begin(), own.end(), mine.begin());
}

namespace detail {
template <class Comm, class Element, class Operation = operation>
bool reduce_to(Comm& comm, std::span<Element> data, int root, const leaf& l) {
  const int size = comm.size(), rank = comm.rank();
  if (root < 0 || root >= size) {
    throw argument_error("heddle::reduce: root " + std::to_string(root) + " of " + std::to_string(size) + " ranks");
  }
  check_buffer("reduce", data.data(), data.size());
  check_headers<Comm>("reduce", l, size);
  const interval all{0, data.size()};
  basic_schedule<Operation> s;
  tree_reduce(s, (rank - root + size) % size, size, all, [&](int node) { return (node + root) % size; });
  basic_executor<Operation> x;
  x.prepare(rank, s, l.bytes, std::span(&all, rank == root));
  const header h = begin_call(comm, {operation_kind::reduce, l.type, l.id, 0, 0, 1, data.size()});
  return x.run_prepared(comm, s, 0, s.rounds(), h, reinterpret_cast<std::byte*>(data.data()), &l,
                        l.average ? 1.0 / size : 1.0);
}
}  // namespace detail

/// @brief Reduces in place to one rank, up a binary tree; on the others `data` is scratch afterwards.
/// Wire:   n elements sent per rank, ceil(log2 P) rounds and roundings.
/// @param comm Communicator. @param data Elements, the same count on all ranks. @param root Who gets the result.
/// @param op As for all_reduce.
/// @return Whether a value left float16's range on this rank.
/// Throws: argument_error if root isn't a rank; comm_error.
template <communicator Comm, class Element, std::size_t Extent, class Op = sum>
bool reduce(Comm& comm, std::span<Element, Extent> data, int root = 0, const Op& op = {}) {
  static_assert(!stream_ordered<Comm>, "heddle::reduce: this communicator works in a stream; pass the queue last");
  return detail::reduce_to(comm, std::span<Element>(data), root, leaf_of<Element>(op));
}

/// @brief Copies root's elements to every rank, by a binomial tree.
/// Wire:   n elements received per rank, ceil(log2 P) rounds.
/// Throws: argument_error if root isn't a rank; comm_error.
template <communicator Comm, class Element, std::size_t Extent>
void broadcast(Comm& comm, std::span<Element, Extent> data, int root = 0) {
  static_assert(std::is_trivially_copyable_v<Element>);
  if (root < 0 || root >= comm.size()) {
    throw argument_error("heddle::broadcast: root " + std::to_string(root) + " of " + std::to_string(comm.size()) +
                         " ranks");
  }
  detail::check_buffer("broadcast", data.data(), data.size());
  const schedule s = detail::binomial_broadcast(comm.rank(), comm.size(), root, data.size());
  const header h = begin_call(comm, {operation_kind::broadcast, dtype_of<Element>, static_cast<std::uint8_t>(root),
                                       0, 0, 1, data.size()});
  detail::run_once(comm, s, h, data.data(), sizeof(Element));
}

/// @brief Returns when every rank has called it. Dissemination: ceil(log2 P) rounds. In a stream it returns at once,
/// and later work of the stream begins when every rank's stream has come to it.
template <communicator Comm>
void barrier(Comm& comm) {
  std::byte own[2]{};
  std::byte* bytes = own;
  if constexpr (stream_ordered<Comm>) bytes = static_cast<std::byte*>(comm.scratch(sizeof own));
  header h = begin_call(comm, {operation_kind::barrier, dtype::u8, 0, 0, 0, 1, 0});
  const int rank = comm.rank(), size = comm.size();
  for (int reach = 1; reach < size; reach *= 2) {
    const outgoing out{(rank + reach) % size, bytes, 1, 1};
    const incoming in{(rank - reach + size) % size, bytes + 1, 1};
    comm.exchange(h, std::span(&out, 1), std::span(&in, 1), [](std::span<const arrival>) {});
    ++h.round;
  }
}

/// @brief Whether a reduce-scatter half leaves each element complete on one rank, from where a second half gathers it.
///
/// ring, direct, torus_2d, halving_doubling, mixed_radix, hierarchical over these, and native.
template <class Topology>
concept has_owners =
    std::is_same_v<Topology, native> ||
    (has_all_reduce_schedule<Topology> && has_reduce_scatter_schedule<Topology> && has_all_gather_schedule<Topology>);

template <class Topology> class halved_plan;  // heddle/collective/halves.hpp

}  // namespace v0
}  // namespace heddle

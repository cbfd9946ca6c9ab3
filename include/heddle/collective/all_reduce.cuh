// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/all_reduce.hpp>
#include <heddle/core/bulk_reduction.hpp>
#include <heddle/core/cuda.cuh>

namespace heddle {
inline namespace v0 {

/// @brief Reduces device memory over all ranks, in place and in stream order.
///
/// Sync:   only enqueues on `q`, whose stream must be the communicator's; the communicator's `synchronize` waits with a
///         deadline.
/// @param comm A communicator that works in a stream, such as nccl::communicator. @param t Topology.
/// @param data Device memory, the same count on all ranks. @param op sum{}, mean{}, min{}, max{} or a user's functor,
/// marked HEDDLE_HD. @param q The queue.
/// Throws: comm_error if the communicator has failed; argument_error for sums of float16, and its means through a
/// schedule.
template <communicator Comm, class Topology, class Element, std::size_t Extent, class Op>
void all_reduce(Comm& comm, const Topology& t, std::span<Element, Extent> data, const Op& op, cuda::queue q) {
  static_assert(stream_ordered<Comm>, "heddle::all_reduce: this communicator works on the host; pass no queue");
  const bulk_leaf<cuda, Element, Op> l(op, q);
  all_reduce_plan<Topology>(t, comm.rank(), comm.size(), data.size())(comm, data.data(), l.get());
}

}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/gather.hpp>
#include <heddle/core/bulk_reduction.hpp>
#include <heddle/core/cuda.cuh>

namespace heddle {
inline namespace v0 {

/// @brief reduce_scatter of device memory, in place and in stream order.
///
/// `all_gather`, `broadcast`, `all_to_all` and `barrier` need no form of their own: those of the host enqueue, where
/// the communicator works in a stream.
/// Sync:   only enqueues on `q`, whose stream must be the communicator's.
/// @return This rank's block inside `data`.
/// Throws: argument_error if the counts don't sum to data.size(), or for float16 sums; comm_error.
template <communicator Comm, class Topology, class Element, std::size_t Extent, class Op>
std::span<Element> reduce_scatter(Comm& comm, const Topology& t, std::span<Element, Extent> data,
                                  std::span<const std::size_t> counts, const Op& op, cuda::queue q) {
  static_assert(stream_ordered<Comm>, "heddle::reduce_scatter: this communicator works on the host; pass no queue");
  const bulk_leaf<cuda, Element, Op> l(op, q);
  return detail::reduce_blocks(comm, t, std::span<Element>(data), counts, l.get());
}

/// @brief reduce of device memory, in place and in stream order: up a binary tree to `root`; on the others `data` is
/// scratch afterwards.
/// Sync:   only enqueues on `q`, whose stream must be the communicator's.
/// Throws: argument_error if root isn't a rank, or for float16; comm_error.
template <communicator Comm, class Element, std::size_t Extent, class Op>
void reduce(Comm& comm, std::span<Element, Extent> data, int root, const Op& op, cuda::queue q) {
  static_assert(stream_ordered<Comm>, "heddle::reduce: this communicator works on the host; pass no queue");
  const bulk_leaf<cuda, Element, Op> l(op, q);
  detail::reduce_to(comm, std::span<Element>(data), root, l.get());
}

}  // namespace v0
}  // namespace heddle

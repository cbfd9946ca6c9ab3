// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <type_traits>

namespace heddle {
inline namespace v0 {

/// @brief The communicator's own all-reduce instead of a schedule: one pass through shared memory between threads,
/// MPI_Iallreduce between processes.
///
/// Wire:    on threads each rank reads 1 / P of every buffer and writes 1 / P of every output.
/// Error:   on threads 1 rounding, in rank order; elsewhere what the library promises.
/// Throws:  does not compile for a communicator without `native_all_reduce`.
struct native {
  /// "native".
  std::string name() const { return "native"; }
};

struct direct;

namespace detail {
// Whether a topology is put together of others, of which one is native{}: it has no schedule of its own.
template <class Topology> inline constexpr bool has_native_leaf = false;

// A topology with direct{}, which reads and adds alike, in the places of native{}: what the model can price.
template <class Topology> constexpr auto as_schedules(const Topology& t) {
  if constexpr (std::is_same_v<Topology, native>)
    return std::conditional_t<has_native_leaf<Topology>, Topology, direct>{};  // a name that depends: it isn't complete
  else if constexpr (has_native_leaf<Topology>) return t.as_schedules();
  else return t;
}
}  // namespace detail

}  // namespace v0
}  // namespace heddle

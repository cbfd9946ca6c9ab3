// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

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

}  // namespace v0
}  // namespace heddle

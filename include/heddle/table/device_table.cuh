// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief `device_table` on the backend `cuda`: what differs there is that slots are taken atomically.

#include <heddle/core/cuda.cuh>
#include <heddle/table/device_table.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

/// @cond
template <class Make> struct make_rows<cuda, Make> {
  Make m;
  __device__ void operator()(std::size_t k) const {
    std::uint64_t mixed = 0;
    const std::uint32_t row = m.make(k, mixed);
    if (row == m.t.none) return;
    std::uint32_t s = m.t.home(mixed);
    while (atomicCAS(m.t.slots + s, 0u, row + 1) != 0) s = m.t.after(s);
  }
};
/// @endcond

}  // namespace detail
}  // namespace v0
}  // namespace heddle

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/tell_ranks.hpp>
#include <heddle/trainer/detail/checked.hpp>

namespace heddle {
inline namespace v0 {

/// @brief Refuses parameters that differ between ranks. Every trainer begins with rank 0's, whatever others bring; who
/// takes other ones for a fault, such as another seed on a rank, calls this before. Collective.
///
///     hd::require_equal(comm, model.tensors());
///     hd::data_parallel dp{plan, comm, model.tensors(), hd::sgd{}};
///
/// Cost:   one pass over the parameters, and for each tensor 8 bytes from every rank to every rank.
/// Throws: comm_error on every rank if one brings tensors of other names, sizes or types than rank 0, or a parameter of
///         other bits; it names the first such rank, and the tensor.
/// @param comm Communicator of all replicas. @param tensors The model's, in host memory.
template <communicator Comm> void require_equal(Comm& comm, std::span<const tensor> tensors) {
  const auto require = [&](std::uint64_t mine, const std::string& otherwise) {
    const std::vector<std::uint64_t> all = detail::tell_ranks(comm, mine);
    const auto other = std::find_if(all.begin(), all.end(), [&](std::uint64_t h) { return h != all.front(); });
    if (other != all.end())
      throw comm_error("require_equal", comm.rank(), static_cast<int>(other - all.begin()), otherwise);
  };
  require(detail::fingerprint({tensors.begin(), tensors.end()}, ""),
          "it brings tensors of other names, sizes or types");
  for (const tensor& t : tensors)
    require(detail::fnv1a(t.parameter, t.count * bytes_of(t.type)), "its \"" + t.name + "\" begins with other values");
}

}  // namespace v0
}  // namespace heddle

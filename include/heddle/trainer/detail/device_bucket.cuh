// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/all_reduce.cuh>
#include <heddle/trainer/detail/device_forms.cuh>
#include <heddle/trainer/detail/exchanged.hpp>

#include <optional>

namespace heddle {
inline namespace v0 {
namespace detail {

// A bucket of tensors of a device, and the messages in which it travels.
template <class Strategy> struct device_bucket {
  using kind = exchange_kind<Strategy>;
  using gradient_type = typename kind::gradient_type;
  using topology_type = typename kind::topology_type;

  std::vector<bucket_piece> pieces;    // of what is averaged
  std::vector<std::size_t> all, sent;  // its tensors, and those that a compressor with state sends
  std::vector<interval> parts;         // the elements of each
  std::size_t tensors = 0, missing = 0, count = 0;
  gradient_type* run = nullptr;  // its elements, where these are one run of memory and travel as they are
  stream_buffer elements, sums;  // what is averaged; with shards_held what is added up inside the group
  device_work work;
  std::optional<all_reduce_plan<topology_type>> reduce{}, add{};
  basic_schedule<typename kind::operation> inside{};
  basic_executor<typename kind::operation> inside_engine{};

  explicit device_bucket(cudaStream_t s) : elements(s), sums(s), work(s) {}

  // What each rank owns of its group's gradient of the tensors that are sent, size(i) elements of tensor i; these are
  // the same in all steps.
  template <class Size>
  void lay_out_shards(const topology_type& topology, int rank, int ranks, const bucket& range, Size&& size) {
    std::size_t n = 0;
    for (std::size_t i = range.first; i < range.last; ++i) n += size(i);
    work.owned.resize(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r) {
      auto s = topology.inside(r, ranks, n);
      cut(s.owned(), range.first, range.last, size, [&](const piece& p) {
        if (p.own) work.owned[static_cast<std::size_t>(r)].push_back(p);
      });
      if (r == rank) inside = std::move(s);
    }
    inside_engine.prepare(rank, inside, sizeof(float), inside.owned());
    check_cuda("data_parallel", sums.reserve(n * sizeof(float)));
  }

  // The sum over the group of what is sent, of which this rank owns a part. facts(i): what is known of tensor i.
  template <class Comm, class Facts>
  void sum_inside(const topology_type& topology, Comm& comm, cuda::queue q, Facts&& facts) {
    std::size_t n = 0;
    auto* const to = reinterpret_cast<float*>(sums.data());
    for (const std::size_t i : sent) {
      const device_facts f = facts(i);
      cuda::for_each(f.count, convert_by<float, float>{f.gradient, to + n, f.factor, 1.0f}, q);
      n += f.count;
    }
    const bulk_leaf<cuda, float, heddle::sum> added(heddle::sum{}, q);
    const leaf l = added.get();
    const header h =
        begin_call(comm, on_topology({operation_kind::reduce_scatter, l.type, l.id, 0, 0, 1, n}, topology));
    inside_engine.run_prepared(comm, inside, 0, inside.rounds(), h, reinterpret_cast<std::byte*>(to), &l);
  }

  // The sum over all ranks of n floats.
  template <class Comm> void add_up(const topology_type& topology, Comm& comm, cuda::queue q, float* x, std::size_t n) {
    if (!add || add->count() != n) add.emplace(topology, comm.rank(), comm.size(), n);
    (*add)(comm, x, bulk_leaf<cuda, float, heddle::sum>(heddle::sum{}, q).get());
  }
  // Every rank's block of so many bytes, the own one being in its place.
  template <class Comm>
  static void gather(const topology_type& topology, Comm& comm, std::byte* all,
                     const std::vector<std::size_t>& blocks) {
    std::size_t bytes = 0;
    for (const std::size_t n : blocks) bytes += n;
    const std::span<std::byte> data(all, bytes);
    if constexpr (has_all_gather_schedule<topology_type>)
      all_gather(comm, topology, data, std::span<const std::size_t>(blocks));
    else
      all_gather(comm, ring{}, data, std::span<const std::size_t>(blocks));
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle

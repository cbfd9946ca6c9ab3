// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "../collective/native_leaves.hpp"
#include "support.hpp"

TEST_CASE("native as a leaf, over mpi, in even and in ragged groups") {
  for (const std::size_t piece : {std::size_t{1} << 30, std::size_t{4000}}) {  // in small pieces, too
    hd::mpi::options o = settings();
    o.piece = piece;
    on_ranks(world_size(), o, [](auto& comm) {
      for (const int group : {0, 2, 3}) {
        native_leaves::each_topology(group, [&](const auto& t) { CHECK(native_leaves::check_all(comm, t) == ""); });
      }
    });
  }
}

TEST_CASE("a rank that doesn't come to a level is named within the deadline") {
  if (world_size() < 4) return;
  const ended e = outcome(4, settings(2s), [](auto& comm) {
    std::vector<float> data(1000, 1.0f);
    const hd::hierarchical t{hd::native{}, hd::native{}, 2};
    hd::all_reduce(comm, t, std::span(data));
    if (comm.rank() != 3)
      hd::all_reduce(comm, t, std::span(data));
    else
      throw std::runtime_error("rank 3 goes");
  });
  if (world_rank() > 2) return;  // 2 waits for 3, 0 and 1 for whom waits for it
  INFO(e.text);
  REQUIRE(e.error);
  if (world_rank() == 2) CHECK(e.error->peer() == 3);
  CHECK(e.error->rank() == world_rank());
}

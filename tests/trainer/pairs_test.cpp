// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// One trainer source under every pair of topology and compressor, modes taking turns: each against its double-precision
// reference where it has one, else against the loss it must reach.
#include "support.hpp"

#include <tuple>
#include <utility>

namespace {
template <class... Parts>
using list = std::tuple<Parts...>;

template <std::size_t Count, class Function>
void for_each_index(Function&& f) {
  [&]<std::size_t... Index>(std::index_sequence<Index...>) {
    (f(std::integral_constant<std::size_t, Index>{}), ...);
  }(std::make_index_sequence<Count>{});
}

template <class Topology, class Compressor, class Mode>
void trains(const Topology& t, const Compressor& c, const Mode& m, int ranks) {
  const auto plan = hd::strategy{.topology = t, .compressor = c, .mode = m};
  const auto w = train(plan, hd::sgd{.momentum = 0.5f}, ranks, 60, 0.05f);
  CAPTURE(ranks, c.name(), m.name());
  CHECK(all_equal(w));
  constexpr bool elementwise = !hd::packet_compressor<hd::detail::last_part<Compressor>>;
  if constexpr (elementwise && Mode::averages == hd::average::gradients) {
    const double roundoff = std::is_same_v<Compressor, hd::none> ? 1e-5 : 2e-2;
    CHECK(distance(w[0], reference(ranks, 60, 2, momentum_oracle(static_cast<double>(0.05f), 0.5, 0.0, false))) < roundoff);
  }
  CHECK(quadratic::loss(w[0]) < 0.5 * quadratic::loss(std::vector<float>(quadratic::count, 0.5f)));
}
}  // namespace

TEST_CASE("every topology with every compressor, each of these pairs in one mode or the other") {
  const list<hd::ring, hd::direct, hd::torus_2d, hd::halving_doubling, hd::hierarchical<hd::ring, hd::ring>, hd::native> topologies{};
  const auto compressors = std::make_tuple(hd::none{}, hd::cast<hd::float16>{}, hd::cast<hd::bfloat16>{},
                                           hd::dgc{.sparsity = 0.8, .dense_below = 10},
                                           hd::clip{.max_norm = 50.0f} | hd::none{},
                                           hd::clip{.max_norm = 50.0f} | hd::dgc{.sparsity = 0.8, .dense_below = 10});
  const list<hd::every_step, hd::local_sgd> modes{{}, {.period = 4}};
  for_each_index<6>([&](auto t) {
    for_each_index<6>([&](auto c) {
      constexpr std::size_t m = (t() + c()) % 2;
      for (const int ranks : {1, 3, 4}) trains(std::get<t()>(topologies), std::get<c()>(compressors), std::get<m>(modes), ranks);
    });
  });
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
// EXPECT: heddle::sparse_table: Rule must be a table_rule; see docs/table.md
// EXPECT: heddle::sparse_table: rows of scaled_int8 can't be trained; their Rule is rule::frozen
// EXPECT: heddle::sparse_table: rule::frozen takes no push
// EXPECT: heddle::sparse_table: evict() needs an Eviction whose rows expire

#include <heddle/table/sparse_table.hpp>

namespace hd = heddle;

struct no_update {
  static constexpr bool linear = true;
  static constexpr std::size_t slots(std::size_t) { return 0; }
  std::string name() const { return "no_update"; }
};

void use(const std::vector<int>& keys, const std::vector<float>& gradients) {
#if FAIL == 1
  hd::sparse_table<int, hd::row<4>, no_update> t;
#elif FAIL == 2
  hd::sparse_table<int, hd::row<4, hd::scaled_int8>, hd::rule::sgd> t;
#elif FAIL == 3
  hd::sparse_table<int, hd::row<4>, hd::rule::frozen> t;
  t.push(keys, gradients);
#elif FAIL == 4
  hd::sparse_table<int, hd::row<4>, hd::rule::sgd> t;
  t.evict();
#else
  hd::sparse_table<int, hd::row<4>, hd::rule::sgd, hd::initial::zero, hd::admit::always, hd::evict::ttl> t;
  hd::sparse_table<int, hd::row<4, hd::scaled_int8>, hd::rule::frozen> served;
  t.push(keys, gradients);
  t.evict();
#endif
}

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// A sharded update on a topology that leaves nothing on one owner, and one with something that is no update rule, and one with
// a rule for groups.
// EXPECT: heddle::halved_plan: the topology must provide all_reduce() in halves, reduce_scatter() and all_gather()
// EXPECT: heddle::sharded_update: the rule must have slots and update()
// EXPECT: heddle::sharded_update: it isn't told the groups of tensors, so not per_group
#include <heddle/collective/sharded_update.hpp>
#include <heddle/collective/tree.hpp>
#include <heddle/optim/adamw.hpp>
#include <heddle/optim/per_group.hpp>

namespace hd = heddle;

const std::size_t sizes[] = {10};
const hd::sharded_update legal(hd::native{}, hd::adamw{}, 0, 1, std::span(sizes));

#if FAIL == 1
const hd::sharded_update illegal(hd::tree{}, hd::adamw{}, 0, 1, std::span(sizes));
#elif FAIL == 2
const hd::sharded_update illegal(hd::ring{}, hd::ring{}, 0, 1, std::span(sizes));
#elif FAIL == 3
const hd::sharded_update illegal(hd::ring{}, hd::per_group{hd::adamw{}}, 0, 1, std::span(sizes));
#endif

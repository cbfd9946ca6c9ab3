// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief What a trainer needs and what has no dependency: core, memory, communicators of one process, collectives,
/// compressors, update rules, modes, recomputation and the trainer.
///
/// What wraps communicators, measures or plans is included by its own name: heddle/comm/throttled.hpp,
/// heddle/collective/automatic.hpp, heddle/memory/search_plan.hpp and others; the pages in docs/ name them.

#include <heddle/collective/gather.hpp>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/verify.hpp>
#include <heddle/comm/self.hpp>
#include <heddle/comm/threads.hpp>
#include <heddle/compress/cast.hpp>
#include <heddle/compress/clip.hpp>
#include <heddle/compress/dgc.hpp>
#include <heddle/core/philox.hpp>
#include <heddle/memory/pool.hpp>
#include <heddle/memory/tracking.hpp>
#include <heddle/mode/local_sgd.hpp>
#include <heddle/optim/adamw.hpp>
#include <heddle/recompute/chain.hpp>
#include <heddle/recompute/simulate.hpp>
#include <heddle/recompute/sqrt.hpp>
#include <heddle/trainer/data_parallel.hpp>

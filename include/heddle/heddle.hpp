// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief What a data-parallel trainer needs and what has no dependency: core, communicators of one process,
/// collectives, compressors, update rules, modes and the trainer.
///
/// Memory resources, recomputation, and what wraps communicators, measures or plans are included by their own names:
/// heddle/memory/pool.hpp, heddle/recompute/chain.hpp, heddle/collective/automatic.hpp and others; the pages in docs/
/// name them.

#include <heddle/collective/gather.hpp>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/comm/self.hpp>
#include <heddle/comm/threads.hpp>
#include <heddle/compress/cast.hpp>
#include <heddle/compress/clip.hpp>
#include <heddle/compress/dgc.hpp>
#include <heddle/mode/local_sgd.hpp>
#include <heddle/optim/adamw.hpp>
#include <heddle/trainer/data_parallel.hpp>

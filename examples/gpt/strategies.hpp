// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Every strategy the example knows: a name, what it is, what it must reach, and the one line that chooses it.

#pragma once

#include <span>
#include <string_view>

#include "training.hpp"

namespace gpt {

struct strategy_entry {
  const char* name;
  const char* about;
  bool standard;     // trained when no --strategy is given
  double limit;      // the loss it must reach with the standard settings, or 0
  const char* twin;  // the strategy it is compared with, or null
  double apart;      // how much higher than its twin's the loss may be
  bool memory;       // one of the memory pair: a few steps of a deeper model
  outcome (*run)(const job&);
};

/// The model is small, and so are its messages: the gradients of the last layers travel while the first are computed.
inline constexpr hd::buckets buckets{.first = 64 << 10, .cap = 128 << 10};

inline hd::adamw adamw() { return {.beta1 = 0.9f, .beta2 = 0.95f}; }
inline hd::sgd momentum_sgd() { return {.momentum = 0.9f, .nesterov = true}; }

/// AdamW under this plan.
template <class Plan> outcome with_adamw(const job& j, const Plan& plan) {
  return train(j, plan, adamw(), {j.settings.rate, j.settings.rate / 50});
}

/// SGD with Nesterov's momentum under this plan.
template <class Plan> outcome with_sgd(const job& j, const Plan& plan) {
  return train(j, plan, momentum_sgd(), {j.settings.sgd_rate, j.settings.sgd_rate / 10});
}

inline std::span<const strategy_entry> all_strategies() {
  static constexpr strategy_entry all[] = {
      {"ring-adamw", "AdamW; gradients in single precision around a ring, every step", true, 1.85, nullptr, 0, false,
       [](const job& j) { return with_adamw(j, hd::strategy{.topology = hd::ring{}, .buckets = buckets}); }},
      {"ring-sgd", "SGD with Nesterov's momentum and clipped gradients around a ring, every step", true, 2.00, nullptr,
       0, false,
       [](const job& j) {
         return with_sgd(
             j, hd::strategy{
                    .topology = hd::ring{}, .compressor = hd::clip{.max_norm = 1.0} | hd::none{}, .buckets = buckets});
       }},
      {"hierarchical-fp16", "AdamW; gradients as float16, rings inside groups and across them", true, 0, "ring-adamw",
       0.01, false,
       [](const job& j) {
         return with_adamw(j, hd::strategy{.topology = hd::hierarchical{hd::ring{}, hd::ring{}},
                                           .compressor = hd::cast<hd::float16>{},
                                           .buckets = buckets});
       }},
      {"dgc", "Nesterov's momentum; clipped gradients, the largest 1 % of what has gathered up, after a warm-up", true,
       0, "ring-sgd", 0.05, false,
       [](const job& j) {
         return with_sgd(j, hd::strategy{.topology = hd::ring{},
                                         .compressor = hd::clip{.max_norm = 1.0} | hd::dgc{.sparsity = 0.99,
                                                                                           .begin_step = j.steps / 30,
                                                                                           .warmup_steps = j.steps / 10,
                                                                                           .dense_below = 2048},
                                         .buckets = buckets});
       }},
      {"dgc-999", "the largest 0.1 %, after a warm-up over most of the steps, without masking", false, 0, "ring-sgd",
       0.05, false,
       [](const job& j) {
         return with_sgd(j,
                         hd::strategy{.topology = hd::ring{},
                                      .compressor = hd::clip{.max_norm = 1.0} | hd::dgc{.sparsity = 0.999,
                                                                                        .begin_step = j.steps / 20,
                                                                                        .warmup_steps = j.steps * 3 / 5,
                                                                                        .dense_below = 2048,
                                                                                        .masking = false},
                                      .buckets = buckets});
       }},
      {"local-sgd", "AdamW on each rank; replicas meet every eighth step", true, 0, "ring-adamw", 0.15, false,
       [](const job& j) {
         return with_adamw(
             j, hd::strategy{.topology = hd::ring{}, .mode = hd::local_sgd{.period = 8}, .buckets = buckets});
       }},
      {"memory-full", "a deeper model for a few steps, keeping every activation", true, 0, nullptr, 0, true,
       [](const job& j) { return with_adamw(j, hd::strategy{.topology = hd::ring{}, .buckets = buckets}); }},
      {"memory-sqrt", "the same, keeping one activation in sqrt(layers) and computing the others again", true, 0,
       "memory-full", 0, true,
       [](const job& j) {
         return with_adamw(
             j, hd::strategy{.topology = hd::ring{}, .buckets = buckets, .recompute = hd::recompute::sqrt{}});
       }},
      {"halving-doubling", "AdamW; single precision by recursive halving and doubling", false, 0, "ring-adamw", 0.01,
       false,
       [](const job& j) {
         return with_adamw(j, hd::strategy{.topology = hd::halving_doubling{}, .buckets = buckets});
       }},
      {"torus-2d", "AdamW; single precision on a two-dimensional torus", false, 0, "ring-adamw", 0.01, false,
       [](const job& j) { return with_adamw(j, hd::strategy{.topology = hd::torus_2d{}, .buckets = buckets}); }},
      {"hierarchical", "AdamW; single precision, rings inside groups and across them", false, 0, "ring-adamw", 0.01,
       false,
       [](const job& j) {
         return with_adamw(j, hd::strategy{.topology = hd::hierarchical{hd::ring{}, hd::ring{}}, .buckets = buckets});
       }},
      {"direct", "AdamW; single precision, everybody with everybody", false, 0, "ring-adamw", 0.01, false,
       [](const job& j) { return with_adamw(j, hd::strategy{.topology = hd::direct{}, .buckets = buckets}); }},
#ifndef GPT_MPI
      {"native", "AdamW; single precision through shared memory, one pass", false, 0, "ring-adamw", 0.01, false,
       [](const job& j) { return with_adamw(j, hd::strategy{.topology = hd::native{}, .buckets = buckets}); }},
#endif
      {"direct-bf16", "AdamW; gradients as bfloat16, everybody with everybody", false, 0, "ring-adamw", 0.01, false,
       [](const job& j) {
         return with_adamw(
             j, hd::strategy{.topology = hd::direct{}, .compressor = hd::cast<hd::bfloat16>{}, .buckets = buckets});
       }},
  };
  return all;
}

}  // namespace gpt

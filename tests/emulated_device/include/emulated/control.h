// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief For tests: how the emulated device behaves, and what it has seen.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulated {

/// How eager streams are. `by_seed` picks one of the other three.
enum class eagerness : unsigned char {
  by_seed,
  lazy,    ///< Work runs when somebody waits for it, and then only what is needed.
  eager,   ///< Work runs as soon as it may.
  random   ///< A few items here and there.
};

/// Everything that can be chosen.
struct options {
  std::uint64_t seed = 0;                                ///< Chooses every order.
  int devices = 2;                                       ///< 1 to 64.
  std::size_t memory_bytes = std::size_t{1} << 32;       ///< Of each device.
  emulated::eagerness eagerness = eagerness::by_seed;    ///< How eager streams are.
  bool peers = true;                                     ///< Whether devices can read each other's memory.
  double stall_seconds = 30.0;  ///< Until host threads that wait, with no work that could run, are given up.
  std::uint64_t patience = 100'000'000;  ///< Barriers, warp operations, yields (times 16) until a block is given up.
};

/// Forgets all devices, streams, events, memory and errors, and starts afresh. Nobody else may use CUDA meanwhile.
void reset(const options& o = {});
/// What reset() was given.
const options& current();

/// What was found wrong since reset(): each fault of a kernel and each broken guard, in words.
const std::vector<std::string>& faults();
/// Adds one: what a library's stand-in has found wrong with a call, with the place on the device where there is one.
void report_fault(const std::string& text);
/// Forgets faults that a test has expected.
void clear_faults();
/// What was made and not destroyed: streams, events, pools and memory, one line each.
std::vector<std::string> leaks();

/// The n-th allocation from now fails as if memory were full; 0 is the next one.
void fail_allocation(std::uint64_t n);
/// The n-th launch from now, of a kernel or of a library's, fails with this error.
void fail_launch(std::uint64_t n, cudaError_t error = cudaErrorLaunchOutOfResources);

/// Items that have run since reset(): equal under equal seeds.
std::uint64_t items_run();
/// A number that depends on every choice made since reset(), for tests of repeatability.
std::uint64_t choices();

/// Whether a range lies in memory that the device can reach: what a library checks of its arguments.
bool is_device_memory(const void* pointer, std::size_t bytes);

/// Whether this build runs device threads as ThreadSanitizer fibers.
bool watches_races();

}  // namespace emulated

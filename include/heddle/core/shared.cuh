// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

/// @file
/// @brief How kernels declare shared memory.
///
/// Two macros, so that an environment in which `__shared__` isn't enough (one that runs kernels on the CPU) can define
/// its own before: what it has defined stays. A kernel with both kinds of shared memory reads like this:
///
///     template <class Value> __global__ void sum(const Value* in, Value* out) {
///       HEDDLE_SHARED(Value[32], totals);       // totals is an array of 32
///       HEDDLE_DYNAMIC_SHARED(Value, values);   // values points to what the launch asked for
///       ...

/// Declares `name`, a variable of type `type` in the block's shared memory; arrays are written HEDDLE_SHARED(int[256],
/// bins). It is not initialised, and its type must have a trivial default constructor.
#ifndef HEDDLE_SHARED
#define HEDDLE_SHARED(type, name) __shared__ ::std::type_identity_t<type> name
#endif

/// Declares `name`, a pointer to `type` at the beginning of the block's dynamic shared memory, of which the launch says
/// how many bytes there are. It is aligned to 16 bytes; every declaration in a kernel points to the same memory.
#ifndef HEDDLE_DYNAMIC_SHARED
#define HEDDLE_DYNAMIC_SHARED(type, name)                                 \
  extern __shared__ __align__(16) unsigned char heddle_dynamic_shared_[]; \
  type* const name = reinterpret_cast<type*>(heddle_dynamic_shared_)
#endif

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   CUDA's qualifiers as a host compiler can take them: they vanish, but for __shared__.
// Limits: __CUDACC__ and __CUDA_ARCH__ stay undefined, because this is not nvcc. `extern __shared__` is no C++ here:
//         dynamic shared memory goes through an accessor. __noinline__ and __forceinline__ don't force anything, and
//         __noinline__ is empty because libstdc++ writes __attribute__((__noinline__)), which must stay valid.

#define __host__
#define __device__
#define __global__
#define __constant__
#define __managed__
#define __shared__ static thread_local
#define __grid_constant__
#define __forceinline__ inline
#define __inline_hint__ inline
#define __noinline__
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// As many NOPs before the kernel's first instruction as a block may have threads: nobody runs them, the runtime counts.
#define __launch_bounds__(threads, ...) __attribute__((__patchable_function_entry__((threads), (threads))))
#else
#define __launch_bounds__(...)
#endif
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __block_size__(...)
#define __align__(bytes) __attribute__((__aligned__(bytes)))
#define __builtin_align__(bytes) __attribute__((__aligned__(bytes)))
#define __device_builtin__
#define __cudart_builtin__

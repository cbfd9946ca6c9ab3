// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   the least and the greatest finite value of all types that CUB compares, the 16-bit ones included.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

namespace cub::detail {

template <class T> T greatest() { return (std::numeric_limits<T>::max)(); }
template <class T> T least() { return std::numeric_limits<T>::lowest(); }
template <> inline __half greatest<__half>() { return __half_raw{0x7bff}; }
template <> inline __half least<__half>() { return __half_raw{0xfbff}; }
template <> inline __nv_bfloat16 greatest<__nv_bfloat16>() { return __nv_bfloat16_raw{0x7f7f}; }
template <> inline __nv_bfloat16 least<__nv_bfloat16>() { return __nv_bfloat16_raw{0xff7f}; }

}  // namespace cub::detail

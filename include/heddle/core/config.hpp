// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief Version numbers (CMake reads them from here) and the one decoration macro.

/// Major version; interfaces may change when it changes.
#define HEDDLE_VERSION_MAJOR 0
/// Minor version.
#define HEDDLE_VERSION_MINOR 1
/// Patch version.
#define HEDDLE_VERSION_PATCH 0

/// Marks a function callable from host and device code; expands to nothing where the compiler knows no device.
#if defined(__CUDACC__)
#define HEDDLE_HD __host__ __device__
#else
#define HEDDLE_HD
#endif

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Rounding to 16 bits is always written out.
// EXPECT: conversion from 'float' to non-scalar type 'heddle::v0::float16' requested
// EXPECT: conversion from 'float' to non-scalar type 'heddle::v0::bfloat16' requested
#include <heddle/core/float16.hpp>

heddle::float16 half = heddle::float16(1.0f);
heddle::bfloat16 brain = heddle::bfloat16(1.0f);

#if FAIL == 1
heddle::float16 rounded = 1.1f;
#elif FAIL == 2
heddle::bfloat16 rounded = 1.1f;
#endif

// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// A slice never gives write access to what was read-only.
// EXPECT: conversion from 'slice<const float>' to non-scalar type 'slice<float>' requested
#include <heddle/core/slice.hpp>

heddle::slice<const float> reader(heddle::slice<float> writable) { return writable; }

#if FAIL == 1
heddle::slice<float> writer(heddle::slice<const float> read_only) {
  heddle::slice<float> writable = read_only;
  return writable;
}
#endif

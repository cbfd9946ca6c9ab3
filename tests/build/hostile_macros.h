// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Names that real code defines as macros before it includes anything else: <complex.h>, <windows.h>, <termios.h>,
// X11 and hand-written CUDA trainers. Every use of one of them in a header is a syntax error after this file.
#define I (__extension__ 1.0iF)
#define small char
#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))
#define T 16
#define N 1024
#define B0 0000000
#define WARP_SIZE 32
#define CEIL_DIV(m, n) (((m) + (n)-1) / (n))
#define CHECK(call) do { call; } while (0)
#define True 1
#define False 0
